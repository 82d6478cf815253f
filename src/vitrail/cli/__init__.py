"""The command line. Each command's module is imported when the command runs, so `--help` stays fast."""

import inspect
import io
import os
import re
import sys
import warnings
from typing import NamedTuple

from cyclopts import App

from vitrail import __version__
from vitrail.errors import ConfigError, VitrailError
from vitrail.registry import describe_recipe_components, load_plugins


class Command(NamedTuple):
    """A row of `vitrail --help`. `get_command` adds the docstring of the function to the help of a command."""

    target: str
    description: str
    example: str


COMMANDS = {
    "ask": Command(
        "vitrail.cli.ask_command:ask_questions",
        "Ask a model questions about images and videos.",
        'vitrail ask scene.png "how many dogs are there?"',
    ),
    "caption": Command(
        "vitrail.cli.drawing_commands:caption_images",
        "Write captions of images.",
        "vitrail caption scene.png",
    ),
    "codec": Command(
        "vitrail.cli.codec_command:app",
        "Show the reconstructions of codecs, and compare codecs with JPEG, WebP and AVIF.",
        "vitrail codec compare out/bsq --data cifar10 --limit 1000 --baseline jpeg --baseline avif --plot rates.svg",
    ),
    "data": Command(
        "vitrail.cli.data_command:app",
        "List, fetch and show datasets, generate annotated scenes, and record episodes of worlds.",
        "vitrail data show crowded --out crowded.png",
    ),
    "demo": Command(
        "vitrail.cli.demo_command:write_demo_page",
        "Write an HTML page that demonstrates a model: it draws images and answers questions about them.",
        "vitrail demo --image photo.jpg -o out/demo",
    ),
    "detokenize": Command(
        "vitrail.cli.tokenize_command:detokenize_files",
        "Decode a token file to images.",
        "vitrail detokenize photos.vtok --codec out/bsq -o photos-again",
    ),
    "draw": Command(
        "vitrail.cli.drawing_commands:draw_images",
        "Draw an image from a prompt, in-paint a part of an image, or vary an image.",
        'vitrail draw "a red dog" -o dog.png --seed 1',
    ),
    "eval": Command(
        "vitrail.cli.eval_command:app",
        "Evaluate a model: suites on scenes and datasets, 22 vision-language and 5 text benchmarks.",
        "vitrail eval out/clip/final zeroshot --data cifar10",
    ),
    "export": Command(
        "vitrail.cli.checkpoint_conversion_command:export_checkpoint",
        "Convert a model to the Hugging Face layout.",
        "vitrail export out/llava -o out/llava-hf",
    ),
    "grid": Command(
        "vitrail.cli.grid_command:draw_grids",
        "Draw how every resolution policy splits an image into tokens.",
        "vitrail grid photo.jpg",
    ),
    "import": Command(
        "vitrail.cli.checkpoint_conversion_command:import_checkpoint",
        "Convert a Hugging Face model, a GGUF file or a llama2.c file to Vitrail's format.",
        "vitrail import llava-hf/llava-1.5-7b-hf -o out/llava",
    ),
    "information": Command(
        "vitrail.cli.information_command:measure_information",
        "Measure the information at every bottleneck of a model: tokens, bits, ranks and linear probes.",
        "vitrail information out/codec/final --out codec.png",
    ),
    "judge": Command(
        "vitrail.cli.judge_command:app",
        "Detect objects in images with a judge, and measure the error of the judge on labelled scenes.",
        "vitrail judge check out/judge/final --count 200",
    ),
    "ledger": Command(
        "vitrail.cli.ledger_command:print_ledger",
        "Show what models cost: parameters, FLOPs, bytes and roofline times.",
        "vitrail ledger llama-3.1-8b qwen3-30b-a3b --context-length 32768",
    ),
    "play": Command(
        "vitrail.cli.play_command:play_world",
        "Play a world model in the browser, beside its simulator.",
        "vitrail play --world pocket",
    ),
    "rotary": Command(
        "vitrail.cli.rotary_command:draw_rotary_layouts",
        "Draw the rotary layouts: the axis and frequency of every channel, and the resulting attention decay.",
        "vitrail rotary mrope mrope_interleaved --out layouts.png",
    ),
    "scaling": Command(
        "vitrail.cli.scaling_command:app",
        "Fit scaling laws of scores over visual tokens, plan token counts, and measure divergence.",
        "vitrail scaling fit paper",
    ),
    "search": Command(
        "vitrail.cli.search_command:search_images",
        "Search a folder of images by text or by another image.",
        'vitrail search photos "a red bicycle" --model openai/clip-vit-base-patch16',
    ),
    "package": Command(
        "vitrail.cli.drawing_commands:package_model",
        "Quantize a model to 8 bits a weight for shipping, and report how much its outputs change.",
        "vitrail package out/mini/final -o packages/mini/vitrail_mini/mini",
    ),
    "stream": Command(
        "vitrail.cli.stream_command:draw_streams",
        "Draw a packed token stream: kinds, positions, spans, losses and the attention mask.",
        "vitrail stream --position-rule qwen3-vl",
    ),
    "serve": Command(
        "vitrail.cli.serve_command:serve_models",
        "Serve models with OpenAI's API: chat, completions, embeddings and images.",
        "vitrail serve mini-vlm --port 8000",
    ),
    "sweep": Command(
        "vitrail.cli.sweep_command:run_sweep_command",
        "Train a recipe in several variants and seeds, evaluate every model, and print one table.",
        "vitrail sweep batch --out out/batch --jobs 3",
    ),
    "text-tokenizer": Command(
        "vitrail.cli.text_tokenizer_command:app",
        "Show the tokens of a text, or train a byte-level BPE tokenizer.",
        "vitrail text-tokenizer train captions.txt --vocab-size 4096 --out out/bpe",
    ),
    "tokenize": Command(
        "vitrail.cli.tokenize_command:tokenize_files",
        "Encode images or videos to a bit-packed file of codec tokens.",
        "vitrail tokenize photos --codec out/bsq -o photos.vtok",
    ),
    "recipes": Command(
        "vitrail.cli.recipes_command:app",
        "List, show and copy recipes, and print their JSON schema.",
        "vitrail recipes show mini-vlm --resolved",
    ),
    "finetune": Command(
        "vitrail.cli.finetune_command:finetune_model",
        "Fine-tune a vision-language model on conversations, with LoRA by default.",
        "vitrail finetune llava-hf/llava-1.5-7b-hf talks.json --out out/tuned",
    ),
    "train": Command(
        "vitrail.cli.train_command:train_recipe",
        "Train a recipe. The same command resumes an interrupted run.",
        "vitrail train smoke --out out/smoke stages.0.steps=100",
    ),
    "write": Command(
        "vitrail.cli.write_command:generate_text",
        "Continue a text with a language model.",
        'vitrail write "Once upon a time"',
    ),
}

PLUGIN_HELP = "`--plugin MODULE` imports a third-party plugin for one run."

app = App(
    name="vitrail",
    help="Visual tokens for vision-language models, image generation and world models.",
    help_epilogue="For all commands: `--plugin MODULE` imports a third-party plugin. `--revision REVISION` is the "
    "commit, branch or tag of hub models and data (also: owner/name@revision). `--allow-hub` lets the files of a local "
    "folder name models of the hub that are not on this machine.",
    version=__version__,
)
for _name, _command in COMMANDS.items():
    app.command(_command.target, name=_name, help=f"{_command.description}\n\nExample: `{_command.example}`")


def get_command(name: str) -> App:
    """Import a command. The help of a function is its docstring, with the example of its row if it has no other."""
    command, row = app[name], COMMANDS[name]
    if name in ("recipes", "train"):
        command.help_epilogue = f"{describe_recipe_components()}\n\n{PLUGIN_HELP}"
    function = command.default_command
    if function is not None and not row.target.endswith(":app"):
        text = inspect.cleandoc(function.__doc__ or row.description).partition("\n\nParameters\n")[0]
        command.help = text if "Example:" in text else f"{text}\n\nExample: `{row.example}`"
    return command


def _take_values(arguments: list[str], option: str, remedy: str) -> list[str]:
    """Remove every `OPTION VALUE` from the arguments and return the values."""
    values = []
    while option in arguments:
        at = arguments.index(option)
        if at + 1 == len(arguments):
            raise ConfigError(f"{option} has no value", remedy)
        values.append(arguments[at + 1])
        del arguments[at : at + 2]
    return values


def _take_common_options(arguments: list[str]) -> None:
    """Apply the options that all commands share, and remove them from the arguments."""
    if revisions := _take_values(arguments, "--revision", "give a commit, a branch or a tag of the hub"):
        from vitrail.data.sources.hub_snapshots import set_default_revision

        set_default_revision(revisions[-1])
    if "--allow-hub" in arguments:
        arguments.remove("--allow-hub")
        os.environ["VITRAIL_ALLOW_HUB"] = "1"  # see `data.sources.hub_snapshots`
    if plugins := _take_values(arguments, "--plugin", "give the name of a Python module to import"):
        load_plugins(plugins)


def _name_options(message: str) -> str:
    """Name folder arguments of Python as options. In a recipe they are keys, which are written like arguments."""
    if sys.argv[1:2] == ["train"]:
        return message
    return re.sub(r"\b(image|video)_folder=FOLDER", r"--\1-folder FOLDER", message)


def main(application: App = app) -> None:
    """Run a command line. A `VitrailError` prints as two lines, the problem and the remedy, without a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # characters that the terminal cannot encode print as "?"
            stream.reconfigure(errors="replace")
    warnings.formatwarning = lambda message, *_args, **_options: f"warning: {message}\n"  # without the line of code
    # `load_image` raises its own error for such images.
    warnings.filterwarnings("ignore", message="Image size .* exceeds limit")
    try:
        try:
            _take_common_options(sys.argv)
            if application is app and len(sys.argv) > 1 and sys.argv[1] in COMMANDS:
                get_command(sys.argv[1])
            application()
        except VitrailError as error:
            print(f"vitrail: {_name_options(str(error))}", file=sys.stderr)
            sys.exit(2)
        except OSError as error:  # a file or folder that no inner function reports
            if isinstance(error, BrokenPipeError) or error.filename is None:
                raise
            print(f"vitrail: {error.filename}: {error.strerror}", file=sys.stderr)
            print("  → check that it exists, and that you have permission to read or write it", file=sys.stderr)
            sys.exit(2)
        except KeyboardInterrupt:
            sys.exit(130)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # the reading end closed the pipe: discard what is still buffered
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
