"""The command line: parse, call, show. Commands load when they are called, so help is quick."""

import io
import os
import sys
import warnings
from typing import NamedTuple

from cyclopts import App

from vitrail import __version__
from vitrail.errors import VitrailError


class Command(NamedTuple):
    """A row of `vitrail --help`; the rest of a command's help is its function's docstring."""

    target: str
    says: str
    example: str


COMMANDS = {
    "ask": Command(
        "vitrail.cli.ask:ask",
        "Ask a model questions about pictures.",
        'vitrail ask scene.png "how many dogs are there?"',
    ),
    "caption": Command(
        "vitrail.cli.studio:caption",
        "Say what pictures show.",
        "vitrail caption scene.png",
    ),
    "claims": Command(
        "vitrail.cli.claims:app",
        "Re-test design claims of the papers in miniature: effect, interval and verdict.",
        "vitrail claims run qlip-words-fall",
    ),
    "codec": Command(
        "vitrail.cli.codec:app",
        "Look at what codecs keep of a picture, and measure it beside JPEG, WebP and AVIF.",
        "vitrail codec compare out/bsq --data cifar10 --limit 1000 --baseline jpeg --baseline avif --plot rates.svg",
    ),
    "data": Command(
        "vitrail.cli.data:app",
        "List, fetch and show data sets, make scenes whose truth is known, and record worlds.",
        "vitrail data show crowded --out crowded.png",
    ),
    "demo": Command(
        "vitrail.cli.demo:demo",
        "Write a page that shows a model reading pictures and drawing them.",
        "vitrail demo --image photo.jpg -o out/demo",
    ),
    "detokenize": Command(
        "vitrail.cli.tokenize:detokenize",
        "Write the pictures of a file of tokens.",
        "vitrail detokenize photos.vtok --codec out/bsq -o photos-again",
    ),
    "draw": Command(
        "vitrail.cli.studio:draw",
        "Draw a picture, draw a part of one anew, or vary it.",
        'vitrail draw "a red dog" -o dog.png --seed 1',
    ),
    "eval": Command(
        "vitrail.cli.eval:app",
        "Test contrastive, vision, language, unified and world models and towers: own suites, 21 + 5 benchmarks.",
        "vitrail eval out/clip/final zeroshot --data cifar10",
    ),
    "export": Command(
        "vitrail.cli.port:give",
        "Write a model of ours in Hugging Face's layout.",
        "vitrail export out/llava -o out/llava-hf",
    ),
    "grid": Command(
        "vitrail.cli.grid:grid",
        "Show how a picture is cut into tokens under every resolution policy.",
        "vitrail grid photo.jpg",
    ),
    "import": Command(
        "vitrail.cli.port:take",
        "Write a model of Hugging Face's, or of one file, in our own format.",
        "vitrail import llava-hf/llava-1.5-7b-hf -o out/llava",
    ),
    "information": Command(
        "vitrail.cli.information:information",
        "Show what is left of pictures at every bottleneck of a model: tokens, bits, ranks, and what can be read off.",
        "vitrail information out/codec/final --out codec.png",
    ),
    "judge": Command(
        "vitrail.cli.judge:app",
        "Look at pictures with a detector, and measure its error where the truth is known.",
        "vitrail judge check out/judge/final --count 200",
    ),
    "lab": Command(
        "vitrail.cli.lab:app",
        "Write all that the lab knows on one page, and list figures of the texts with ours beside them.",
        "vitrail lab report -o report.html",
    ),
    "ledger": Command(
        "vitrail.cli.ledger:ledger",
        "Show what models cost: parameters, FLOPs, bytes, and the time that a device needs at least.",
        "vitrail ledger llama-3.1-8b qwen3-30b-a3b --context 32768",
    ),
    "play": Command(
        "vitrail.cli.play:play",
        "Play in a world model, in the browser, beside its simulator.",
        "vitrail play --world pocket",
    ),
    "rotary": Command(
        "vitrail.cli.rotary:rotary",
        "Draw the rotary layouts: which axis turns which channel, how fast, and what that makes near.",
        "vitrail rotary mrope mrope_interleaved --out layouts.png",
    ),
    "scaling": Command(
        "vitrail.cli.scaling:app",
        "Fit the law of scores over visual tokens, plan by it, and measure the divergence behind it.",
        "vitrail scaling fit paper",
    ),
    "search": Command(
        "vitrail.cli.search:search",
        "Find pictures in a folder by words, or by another picture.",
        'vitrail search photos "a red bicycle" --model openai/clip-vit-base-patch16',
    ),
    "ship": Command(
        "vitrail.cli.studio:ship",
        "Pack a model that reads and draws into 8 bits a weight, and say what that changes.",
        "vitrail ship out/mini/final -o src/vitrail/weights/mini",
    ),
    "stream": Command(
        "vitrail.cli.stream:stream",
        "Show how samples become one packed stream: kinds, positions, spans, losses, and who sees whom.",
        "vitrail stream --rule qwen3-vl",
    ),
    "sweep": Command(
        "vitrail.cli.sweep:sweep",
        "Train a recipe in several variants and seeds, test every model alike, and show one table.",
        "vitrail sweep batch --out out/batch --jobs 3",
    ),
    "tokenize": Command(
        "vitrail.cli.tokenize:tokenize",
        "Write pictures, folders and shards as the ids of a codec, bit-packed, to one file.",
        "vitrail tokenize photos --codec out/bsq -o photos.vtok",
    ),
    "recipes": Command(
        "vitrail.cli.train:list_recipes",
        "List the recipes that can be trained by name.",
        "vitrail recipes",
    ),
    "train": Command(
        "vitrail.cli.train:train",
        "Train a recipe; the same command goes on after any interruption.",
        "vitrail train smoke --out out/smoke stages.0.steps=100",
    ),
    "words": Command(
        "vitrail.cli.words:app",
        "Show how a text is cut into tokens, or train a tokenizer of your own.",
        'vitrail words "A pane of red glass" --tokenizer folder/with/tokenizer.json',
    ),
    "write": Command(
        "vitrail.cli.write:write",
        "Go on with a text: a language model writes, token by token.",
        'vitrail write "Once upon a time"',
    ),
}

app = App(
    name="vitrail",
    help="Visual tokens: read, write and predict pictures, and see what each design costs and keeps.",
    version=__version__,
)
for _name, _command in COMMANDS.items():
    app.command(_command.target, name=_name, help=f"{_command.says}\n\nExample: `{_command.example}`")


def main() -> None:
    """Run a command; what a person can mend is said in two lines, without a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal without arrows gets question marks
            stream.reconfigure(errors="replace")
    warnings.filterwarnings("ignore", message="Image size .* exceeds limit")  # Pillow's, where ours says what to do
    try:
        try:
            app()
        except VitrailError as error:
            print(f"vitrail: {error}", file=sys.stderr)
            sys.exit(2)
        except OSError as error:  # a file or folder that nobody further in had a better word for
            if isinstance(error, BrokenPipeError) or error.filename is None:
                raise
            print(f"vitrail: {error.filename}: {error.strerror}", file=sys.stderr)
            print("  → check that it is there, and that you may read it or write to it", file=sys.stderr)
            sys.exit(2)
        except KeyboardInterrupt:
            sys.exit(130)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough; nothing is left to flush at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
