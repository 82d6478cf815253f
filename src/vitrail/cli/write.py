"""`vitrail write`: a language model goes on with a text."""

import json
import secrets
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from vitrail import hub
from vitrail.backbones.decoder import DecoderConfig
from vitrail.data.sources.progress import bar
from vitrail.data.text import LINES
from vitrail.devices import usable
from vitrail.errors import ConfigError, TextError
from vitrail.generate import Sampling, stream
from vitrail.generate.many import many
from vitrail.hub.configs import read_config
from vitrail.processing.chat import ChatTemplate

USUAL = 200  # tokens, where the context has room for them


def write(
    prompt: str,
    /,
    *,
    model: str = "stories15M",
    tokens: int | None = None,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    seed: int | None = None,
    stop: Annotated[tuple[str, ...], Parameter(negative="")] = (),
    chat: Annotated[bool, Parameter(negative="")] = False,
    count: int | None = None,
    out: Annotated[Path | None, Parameter(alias="-o")] = None,
    device: str | None = None,
) -> None:
    """Go on with a text, shown as it is written; the last line, on stderr, says how fast.

    Example: vitrail write "Once upon a time"

    Example: vitrail write "Name three colours of glass." --model smollm2-135m --chat

    Example: vitrail write "" --count 1000 --tokens 255 --temperature 1 --seed 0 --out stories.jsonl

    Parameters
    ----------
    prompt
        How the text begins, or with --chat what to ask.
    model
        stories15M or smollm2-135m (fetched when first used), a .gguf file, a llama2.c .bin file, a model folder, or a
        hub id.
    tokens
        How many to write at most; 200, or what the model's context has room for.
    temperature
        0 always takes the likeliest token, 1 draws as the model weighs them.
    top_k
        Draw only from the k likeliest tokens.
    top_p
        Draw only from the likeliest tokens that together reach this probability.
    min_p
        Draw only from tokens at least this fraction as likely as the likeliest.
    seed
        The same seed writes the same text; without one it is drawn, and shown at the end.
    stop
        Text at which to end, itself not shown. May be repeated.
    chat
        Ask as the model's chat template has it, and show the answer alone.
    count
        Write so many texts that begin so, many side by side and unshown, into the file `--out`, without `--stop` and
        `--chat`. More begin with those of fewer, by the same seed.
    out
        Where they go, a .jsonl file: {"text": "…"} a line, as a recipe's text source reads it.
    device
        cpu, cuda, …; a GPU if there is one.
    """
    if (count is None) != (out is None):
        raise ConfigError("--count and --out go together", "give both to write a file of texts, or neither")
    if out is not None and out.suffix != LINES:
        raise ConfigError(f"{out} would be read as one long text", f"call it {out.with_suffix(LINES).name}")
    if count is not None and (count < 1 or stop or chat):
        raise ConfigError(
            f"--count {count} with {'--stop' if stop else '--chat' if chat else 'no text'}",
            "ask for one text or more, and leave out --stop and --chat",
        )
    seed = secrets.randbelow(2**31) if seed is None else seed
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    if tokens is not None and tokens < 1:
        raise ConfigError(f"--tokens is {tokens}", "ask for at least one token, or leave it out")
    if not all(stop):
        raise ConfigError("--stop is empty", "give the text to end at, or leave it out")
    device, config = usable(device), read_config(model)
    if not isinstance(config, DecoderConfig):
        kind = type(config).__name__.removesuffix("Config")
        raise ConfigError(f"{model} is a {kind} and does not write text", "give a language model")
    words = hub.tokenizer(model)
    if chat and words.chat_template is None:
        raise TextError(f"{model} has no chat template", "leave --chat away, or give a model made for chats")
    if chat:
        ids = ChatTemplate.of(words).encode([{"role": "user", "content": prompt}], words, generate=True).ids
    else:
        ids = words.encode(prompt, specials=True)
    room = max(1, min(USUAL, config.context - len(ids)))
    if count is not None and out is not None:
        limit = room if tokens is None else tokens
        texts = many(
            hub.load(model, device=device),
            ids,
            count,
            max_new=limit,
            stops=words.stops,
            sampling=sampling,
            known=min(words.size, config.vocab),
        )
        cut = _keep(((words.decode([*ids, *one.ids], skip_specials=True), one.ended) for one in texts), count, out)
        print(f"{count} texts in {out}, {cut} of them cut at {limit} tokens, seed {seed}", file=sys.stderr)
        return
    pieces = stream(
        hub.load(model, device=device),
        [ids],
        max_new=room if tokens is None else tokens,
        sampling=sampling,
        tokenizer=words,
        stop_strings=stop,
    )
    times = [time.perf_counter()]
    try:
        _show("" if chat else prompt)
        for piece in pieces:
            _show(piece.text)
            times.append(time.perf_counter())
        _show("\n")
    except KeyboardInterrupt:
        _show("\n")
        raise
    finally:
        print(_speed(times, sampling), file=sys.stderr)


def _keep(texts: Iterator[tuple[str, bool]], count: int, out: Path) -> int:
    """A text a line, in a file that is there when it is whole → how many did not come to their end"""
    partial, cut = out.with_name(f"{out.name}.partial"), 0
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        with partial.open("w", encoding="utf-8") as file, bar("writing", count, unit="text") as progress:
            for text, ended in texts:
                file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
                cut += not ended
                progress.update()
        partial.replace(out)
    finally:
        partial.unlink(missing_ok=True)
    return cut


def _show(text: str) -> None:
    print(text, end="", flush=True)


def _speed(times: list[float], sampling: Sampling) -> str:
    """What the clock says: the first token carries the prompt, the others are the pace."""
    count, words = len(times) - 1, []
    if count:
        words.append(f"first after {times[1] - times[0]:.2f} s")
    if count > 1:
        words.append(f"then {(count - 1) / (times[-1] - times[1]):.1f} tokens/s")
    if not sampling.greedy:
        words.append(f"seed {sampling.seed}")
    return ", ".join([f"{count} token{'s' * (count != 1)}", *words])
