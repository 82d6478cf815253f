"""`vitrail write`: continue a text with a language model."""

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
from vitrail.cli.config_options import DeviceOption
from vitrail.data.sources.progress_bar import progress_bar
from vitrail.data.text_source import JSONL_SUFFIX
from vitrail.devices import resolve_device
from vitrail.errors import ConfigError, TextError
from vitrail.generate import SamplingConfig, stream_tokens
from vitrail.generate.bulk_generation import generate_many
from vitrail.hub.checkpoint_info import read_config
from vitrail.processing.chat_template import ChatTemplate
from vitrail.processing.tokenizer import Tokenizer

DEFAULT_MAX_NEW_TOKENS = 200  # tokens, if they fit the context


def generate_text(
    prompt: str,
    /,
    *,
    model: str = "stories15M",
    max_new_tokens: int | None = None,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    seed: int | None = None,
    stop: Annotated[tuple[str, ...], Parameter(negative="")] = (),
    chat: Annotated[bool, Parameter(negative="")] = False,
    count: int | None = None,
    out: Annotated[Path | None, Parameter(alias="-o")] = None,
    device: DeviceOption = None,
) -> None:
    """Continue a text with a language model. Tokens are printed as they are generated; the speed goes to stderr.

    Example: vitrail write "Once upon a time"

    Example: vitrail write "Name three colours of glass." --model smollm2-135m --chat

    Example: vitrail write "" --count 1000 --max-new-tokens 255 --temperature 1 --seed 0 --out stories.jsonl

    Parameters
    ----------
    prompt
        The start of the text, or with --chat a user message.
    model
        stories15M or smollm2-135m (fetched when first used), a .gguf file, a llama2.c .bin file, a model folder, or a
        hub id.
    max_new_tokens
        Maximum number of new tokens. Default: 200, or what fits the context.
    temperature
        Sampling temperature. 0 is greedy.
    top_k
        Sample only from the k likeliest tokens.
    top_p
        Sample only from the likeliest tokens whose probabilities sum to this value.
    min_p
        Sample only from tokens with at least this fraction of the largest probability.
    seed
        Seed of sampling. The same seed gives the same text. Default: a random seed, which is printed.
    stop
        Text that ends generation. It is not printed. May be repeated.
    chat
        Format the prompt with the chat template of the model, and print only the answer.
    count
        Generate so many texts from the prompt in batches and save them to `--out`. Excludes `--stop` and `--chat`. The
        first texts do not depend on the count.
    out
        A .jsonl file for the texts: {"text": "…"} a line, as text sources of recipes read it.
    """
    _check_options(max_new_tokens, stop, chat, count, out)
    seed = secrets.randbelow(2**31) if seed is None else seed
    sampling = SamplingConfig(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    device, config = resolve_device(device), read_config(model)
    if not isinstance(config, DecoderConfig):
        kind = type(config).__name__.removesuffix("Config")
        raise ConfigError(f"{model} is a {kind}, not a language model", "give a language model")
    tokenizer = hub.load_tokenizer(model)
    ids = _encode_prompt(prompt, model, tokenizer, chat)
    limit = max_new_tokens or max(1, min(DEFAULT_MAX_NEW_TOKENS, config.context_length - len(ids)))
    decoder = hub.load(model, device=device)
    if count is not None and out is not None:
        stop_ids, vocab_size = tokenizer.stop_ids, min(tokenizer.vocab_size, config.vocab_size)
        texts = generate_many(
            decoder, ids, count, max_new_tokens=limit, stop_ids=stop_ids, sampling=sampling, vocab_size=vocab_size
        )
        decoded = ((tokenizer.decode([*ids, *one.ids], skip_special_tokens=True), one.is_complete) for one in texts)
        cut = _save_texts(decoded, count, out)
        print(f"{count} texts in {out}, {cut} of them truncated at {limit} tokens, seed {seed}", file=sys.stderr)
        return
    pieces = stream_tokens(
        decoder, [ids], max_new_tokens=limit, sampling=sampling, tokenizer=tokenizer, stop_strings=stop
    )
    times = [time.perf_counter()]
    try:
        _print_now("" if chat else prompt)
        for piece in pieces:
            _print_now(piece.text)
            times.append(time.perf_counter())
        _print_now("\n")
    except KeyboardInterrupt:
        _print_now("\n")
        raise
    finally:
        print(_format_speed(times, sampling), file=sys.stderr)


def _check_options(
    max_new_tokens: int | None, stop: tuple[str, ...], chat: bool, count: int | None, out: Path | None
) -> None:
    if (count is None) != (out is None):
        raise ConfigError("--count and --out go together", "give both to write a file of texts, or neither")
    if out is not None and out.suffix != JSONL_SUFFIX:
        raise ConfigError(
            f"{out} does not have the extension {JSONL_SUFFIX}", f"use {out.with_suffix(JSONL_SUFFIX).name}"
        )
    if count is not None and (count < 1 or stop or chat):
        raise ConfigError(
            f"--count {count} is not possible{' with --stop' if stop else ' with --chat' if chat else ''}",
            "give a count of at least 1, without --stop and --chat",
        )
    if max_new_tokens is not None and max_new_tokens < 1:
        raise ConfigError(f"--max-new-tokens is {max_new_tokens}", "give at least 1, or remove it")
    if not all(stop):
        raise ConfigError("--stop is empty", "give a text, or remove it")


def _encode_prompt(prompt: str, model: str, tokenizer: Tokenizer, chat: bool) -> list[int]:
    """Encode a prompt, as a user message of the chat template with `chat`."""
    if not chat:
        return tokenizer.encode(prompt, add_special_tokens=True)
    if tokenizer.chat_template is None:
        raise TextError(f"{model} has no chat template", "remove --chat, or give a chat model")
    template, messages = ChatTemplate.from_tokenizer(tokenizer), [{"role": "user", "content": prompt}]
    return template.encode(messages, tokenizer, add_generation_prompt=True).ids


def _save_texts(texts: Iterator[tuple[str, bool]], count: int, out: Path) -> int:
    """Save texts as JSON Lines, atomically. Returns the number of texts without an end token."""
    partial, cut = out.with_name(f"{out.name}.partial"), 0
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        with partial.open("w", encoding="utf-8") as file, progress_bar("writing", count, unit="text") as progress:
            for text, ended in texts:
                file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
                cut += not ended
                progress.update()
        partial.replace(out)
    finally:
        partial.unlink(missing_ok=True)
    return cut


def _print_now(text: str) -> None:
    print(text, end="", flush=True)


def _format_speed(times: list[float], sampling: SamplingConfig) -> str:
    """Format the latency of the first token, which includes prefill, and the speed of the others."""
    count, words = len(times) - 1, []
    if count:
        words.append(f"first after {times[1] - times[0]:.2f} s")
    if count > 1:
        words.append(f"then {(count - 1) / (times[-1] - times[1]):.1f} tokens/s")
    if not sampling.is_greedy:
        words.append(f"seed {sampling.seed}")
    return ", ".join([f"{count} token{'s' * (count != 1)}", *words])
