"""`vitrail ledger`: what models cost, before anybody pays for it."""

import inspect
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import torch
from cyclopts import Parameter
from PIL import Image

from vitrail import recipe
from vitrail.backbones.decoder import DecoderConfig
from vitrail.cli.systems import measured_table, printed
from vitrail.cli.written import check_written, write_plain
from vitrail.config import Config
from vitrail.errors import ConfigError
from vitrail.hub.configs import read_config, shipped
from vitrail.lab.costs import system_notes, system_tables
from vitrail.lab.ledger import DEVICES, DTYPES, LENGTHS, PRESETS, Floor, Ledger, Part, Time, named, pick
from vitrail.lab.ledger import ledger as make_ledger
from vitrail.lab.measure import better, rates
from vitrail.lab.measure import measure as time_passes
from vitrail.lab.systems import WHOLE, system
from vitrail.models.looking import LookingVLMConfig
from vitrail.models.presets import SYSTEMS
from vitrail.models.unified import UnifiedConfig
from vitrail.models.vlm import VLMConfig
from vitrail.show.ledger import Series, draw_ledger, si, tokens
from vitrail.show.style import check_picture, save_picture
from vitrail.studio import MINI

PARTS = ("tower", "connector", "decoder")
CURVE = tuple(2**power for power in range(10, 21))  # contexts of the picture


def ledger(
    names: Annotated[list[str] | None, Parameter(negative="")] = None,
    /,
    *,
    context: int = 8192,
    picture: str = "640x480",
    pictures: int = 1,
    batch: int = 1,
    dtype: str = "bfloat16",
    device: Annotated[list[str] | None, Parameter(negative="")] = None,
    all: Annotated[bool, Parameter(negative="")] = False,
    measure: Annotated[bool, Parameter(negative="")] = False,
    json: Path | None = None,
    out: Path | None = None,
) -> None:
    """Show what models cost: parameters, FLOPs, bytes, and the time that a device needs at least.

    Nothing is loaded or computed; 235B parameters take a second. Without a name the presets are listed.

    Example: vitrail ledger llama-3.1-8b qwen3-30b-a3b --context 32768 --batch 16 --device h100

    Example: vitrail ledger qwen2.5-vl-7b llama-3.2-11b-vision --picture 640x480 --context 64

    Example: vitrail ledger --all --json systems.json

    Example: vitrail ledger clip-b16 smollm2-135m --measure --context 128 --dtype float32

    Parameters
    ----------
    names
        Presets, mini, recipes, folders with a config.json or vitrail.json, or GGUF files.
    context
        Tokens of a decoder's prompt, or words of a question to a vision-language model. Towers read pictures of their
        own size.
    picture
        Width and height of the pictures that a vision-language model is asked about; models that read and draw have a
        size of their own.
    pictures
        How many of them a question has.
    batch
        Rows at once.
    dtype
        What weights and cache are kept in: float32, bfloat16, float16, float8.
    device
        h200, h100, a100, rtx4090, orin. May be repeated; with --all it is all of them unless given.
    all
        Show whole systems at published size: models that look, draw, dream and act, and how often a second they can.
    measure
        Run the models named, with random weights, on the device that is here, and show each pass beside its floor at
        the rates that the device reaches in the same run.
    json
        Write the ledgers to this file too.
    out
        Draw decoding time and memory over the context (decoders, at most six) as this picture.
    """
    check_written(json)
    if all:
        _refuse("all", context=context, picture=picture, pictures=pictures, batch=batch, measure=measure, out=out)
        _all(names, device, dtype, json)
        return
    if measure:
        _refuse("measure", pictures=pictures, device=device, out=out)
        _measure(names, context, _size(picture), batch, dtype, json)
        return
    if not names:
        for line in listing():
            print(line)
        return
    if out is not None:
        check_picture(out)
    devices = list(dict.fromkeys(device or ["h200"]))
    settings = {"context": context, "picture": _size(picture), "pictures": pictures, "batch": batch, "dtype": dtype}
    models = {name: config_of(name) for name in names}
    found = [make_ledger(model, name=name, devices=devices, **settings) for name, model in models.items()]
    print("\n\n".join(table(group, batch) for group in _groups(found)))
    print("\n" + "\n".join(_notes(found, models)))
    if json is not None:
        origins = {name: DEVICES[name]._asdict() for name in devices}
        write_plain(json, {"devices": origins, "ledgers": [one.plain() for one in found]})
    if out is not None:
        decoders = {name: model for name, model in models.items() if isinstance(model, DecoderConfig)}
        save_picture(_sheet(decoders, devices[0], batch, dtype), out)
        print(f"→ {out}")


def _refuse(mode: str, **options: object) -> None:
    """Options that a mode does not take, unless they are as always."""
    usual = inspect.signature(ledger).parameters
    for name, value in options.items():
        if value != usual[name].default:
            raise ConfigError(f"--{mode} takes no --{name}", "leave one of the two out")


def _all(names: list[str] | None, device: list[str] | None, dtype: str, json: Path | None) -> None:
    found = [system(name, devices=list(dict.fromkeys(device or DEVICES)), dtype=dtype) for name in names or WHOLE]
    print("\n\n".join(map(printed, system_tables(found, LENGTHS))))
    print("\n" + "\n".join(system_notes(found)))
    if json is not None:
        origins = {name: DEVICES[name]._asdict() for name in found[0].reach}
        write_plain(json, {"devices": origins, "systems": [one.plain() for one in found]})


def _measure(
    names: list[str] | None, context: int, picture: tuple[int, int], batch: int, dtype: str, json: Path | None
) -> None:
    if not names:
        raise ConfigError("there is nothing to measure", "name presets or folders, such as clip-b16")
    if dtype == "float8":
        raise ConfigError("nothing runs in float8 here", "measure in float32, bfloat16 or float16")
    here, models = "cuda" if torch.cuda.is_available() else "cpu", {name: config_of(name) for name in names}
    kept = pick(DTYPES, dtype, "type")
    at = rates(here, kept)
    settings = {"context": context, "picture": picture, "batch": batch, "dtype": dtype, "device": here}
    found = [one for name, model in models.items() for one in time_passes(model, at, name=name, **settings)]
    at = better(at, rates(here, kept))
    found = [one.against(at) for one in found]
    print(measured_table(found, at))
    if json is not None:
        write_plain(json, {"device": at._asdict(), "settings": settings, "passes": [one.plain() for one in found]})


def listing() -> Iterator[str]:
    """A line a preset; vision-language models under a heading of their own."""
    for name, config in PRESETS.items():
        if name not in SYSTEMS:
            yield _line(name, config)
    yield ""
    yield "vision-language models, asked about a picture of 640 × 480:"
    for name, config in SYSTEMS.items():
        yield _line(name, config)
    yield ""
    yield "a model that ships, reads pictures of its own size, and draws:"
    yield _line(MINI, config_of(MINI))


def _line(name: str, config: Config) -> str:
    one = make_ledger(config, devices=(), lengths=())
    active = f", {_count(one.active)} active" if one.active != one.parameters else ""
    match config:
        case DecoderConfig():
            size = f"prompts, {config.context:,} tokens"
        case VLMConfig() | UnifiedConfig():
            size = f"{one.seen:,} tokens of a picture"
        case LookingVLMConfig():
            size = f"{one.seen:,} features of a picture, beside the tokens"
        case _:
            size = f"{one.row}s, {one.tokens:,} tokens each"
    return f"{name:22}{_count(one.parameters):>7}   {size}{active}"


# ---- the table --------------------------------------------------------------------------------------------------

Cell = Callable[[Ledger], str]


def table(ledgers: Sequence[Ledger], batch: int) -> str:
    """A column a model, a row a figure. All models read the same: prompts, pictures, texts, pairs or questions."""
    first = ledgers[0]
    rows: list[tuple[str, Cell]] = [("parameters", lambda x: _count(x.parameters))]
    rows += _part_rows(ledgers, lambda part: _count(part.parameters))
    if any(x.active != x.parameters for x in ledgers):
        rows += [("active", lambda x: _count(x.active))]
    rows += [("weights", lambda x: si(x.weights, "B"))]
    rows += _part_rows(ledgers, lambda part: si(part.weights, "B"))
    match first.row:
        case "prompt":
            rows += _prompt_rows(first)
        case "question":
            rows += _question_rows(ledgers)
        case _:
            rows += _tower_rows(first)
    for i, floor in enumerate(first.floors):
        rows += [(f"{floor.device}, batch {batch}", lambda x: "")]
        rows += [(f"  {label}", _at(i, cell)) for label, cell in _floor_rows(first, floor, _part_names(ledgers))]
    return _aligned([x.name for x in ledgers], [(label, [cell(x) for x in ledgers]) for label, cell in rows])


def _prompt_rows(first: Ledger) -> list[tuple[str, Cell]]:
    caches = [(f"cache, {'a token' if n == 1 else tokens(n)}", n) for n in first.cache]
    return [
        *((label, lambda x, n=n: si(x.cache[n], "B")) for label, n in caches),
        (f"prefill, {tokens(first.tokens)}", lambda x: si(x.forward, "FLOP")),
        (f"a token at {tokens(first.tokens)}", lambda x: si(x.decode or 0, "FLOP")),
        ("training, a token", lambda x: si(x.train, "FLOP")),
    ]


def _question_rows(ledgers: Sequence[Ledger]) -> list[tuple[str, Cell]]:
    """Questions have as many tokens as the model makes of their pictures: no two columns need have the same."""
    return [
        ("picture tokens", lambda x: f"{x.seen:,}"),
        ("tokens of the question", lambda x: f"{x.tokens:,}"),
        ("prefill", lambda x: si(x.forward, "FLOP")),
        *_part_rows(ledgers, lambda part: si(part.forward, "FLOP")),
        ("a token after it", lambda x: si(x.decode or 0, "FLOP")),
        ("training, a question", lambda x: si(x.train, "FLOP")),
        ("cache", lambda x: si(x.cache[x.tokens], "B")),
        *((f"cache, {tokens(n)}", lambda x, n=n: si(x.cache[n], "B")) for n in LENGTHS),
    ]


def _part_rows(ledgers: Sequence[Ledger], cell: Callable[[Part], str]) -> list[tuple[str, Cell]]:
    return [
        (f"  {name}", lambda x, name=name: cell(x.parts[name]) if name in x.parts else "–")
        for name in _part_names(ledgers)
    ]


def _part_names(ledgers: Sequence[Ledger]) -> list[str]:
    """Those of all that look, whether a model has them or not, and what only some have."""
    return list(dict.fromkeys([*PARTS, *(name for x in ledgers for name in x.parts)])) if ledgers[0].parts else []


def _tower_rows(first: Ledger) -> list[tuple[str, Cell]]:
    return [
        (f"tokens, a {first.row}", lambda x: f"{x.tokens:,}"),
        (f"forward, a {first.row}", lambda x: si(x.forward, "FLOP")),
        (f"training, a {first.row}", lambda x: si(x.train, "FLOP")),
    ]


def _floor_rows(first: Ledger, floor: Floor, parts: Sequence[str]) -> list[tuple[str, Callable[[Ledger, Floor], str]]]:
    held = [
        ("batch that turns", lambda x, f: "none" if f.turning is None else f"{f.turning:,}"),
        (f"{first.row}s that fit", lambda x, f: f"{f.fitting:,}"),
        ("devices needed", lambda x, f: str(f.needed)),
    ]
    if first.row == "question":
        return [
            ("the first token", lambda x, f: _time(f.forward)),
            *(
                (f"  {name}", lambda x, f, name=name: _time(f.parts[name]) if name in f.parts else "–")
                for name in parts
            ),
            ("a token after it", lambda x, f: _time(f.decode[x.tokens])),
            *((f"a token at {tokens(n)}", lambda x, f, n=n: _time(f.decode[n])) for n in LENGTHS),
            ("tokens/s after it", lambda x, f: f"{f.batch / f.decode[x.tokens].floor:,.0f}"),
            *held,
        ]
    if first.row != "prompt":
        return [
            ("forward", lambda x, f: _time(f.forward)),
            (f"{first.row}s/s", lambda x, f: f"{f.batch / f.forward.floor:,.0f}"),
            ("devices needed", lambda x, f: str(f.needed)),
        ]
    return [
        (f"prefill, {tokens(first.tokens)}", lambda x, f: _time(f.forward)),
        *((f"a token at {tokens(n)}", lambda x, f, n=n: _time(f.decode[n])) for n in floor.decode),
        (f"tokens/s at {tokens(first.tokens)}", lambda x, f: f"{f.batch / f.decode[x.tokens].floor:,.0f}"),
        *held,
    ]


def _count(parameters: int) -> str:
    """8030261248 → "8.03 B": billions, as everybody says."""
    return si(parameters, "").replace("G", "B")


def _at(index: int, cell: Callable[[Ledger, Floor], str]) -> Cell:
    return lambda x: cell(x, x.floors[index])


def _time(time: Time) -> str:
    """A floor and what it stands on: c for computing, m for moving bytes."""
    return f"{si(time.floor, 's')} {time.bound[0]}"


def _aligned(heads: list[str], rows: list[tuple[str, list[str]]]) -> str:
    """Columns as wide as they must be; models that do not fit the terminal follow below."""
    left = max(len(label) for label, _ in rows)
    widths = [2 + max(len(head), *(len(cells[i]) for _, cells in rows)) for i, head in enumerate(heads)]
    room = shutil.get_terminal_size().columns - left
    blocks: list[list[int]] = [[]]
    for i, width in enumerate(widths):
        if blocks[-1] and sum(widths[j] for j in blocks[-1]) + width > room:
            blocks.append([])
        blocks[-1].append(i)
    return "\n\n".join(
        "\n".join(
            f"{label:{left}}{''.join(f'{cells[i]:>{widths[i]}}' for i in block)}".rstrip()
            for label, cells in [("", heads), *rows]
        )
        for block in blocks
    )


def _notes(ledgers: Sequence[Ledger], models: dict[str, Config]) -> list[str]:
    lines = [f"{floor.device}: {DEVICES[floor.device].origin}" for floor in ledgers[0].floors]
    lines += ["times are floors: c all products at the device's rate, m each byte moved once"]
    if any(x.row in ("prompt", "question") for x in ledgers):
        lines += [
            "batch that turns: the least that makes a token's time c; none where a row's cache outweighs its work"
        ]
    if any(isinstance(models[x.name], LookingVLMConfig) for x in ledgers):
        lines += ["picture tokens of models whose pictures are no part of the stream are looked at from beside it"]
    for one in ledgers:
        config = models[one.name]
        words = getattr(config, "decoder", config)
        if isinstance(words, DecoderConfig) and one.tokens > words.context:
            lines += [f"{one.name} was made for {words.context:,} tokens, not {one.tokens:,}"]
        lines += [
            f"{one.name} needs {floor.needed} {floor.device}: its times are those of one, as if it held all"
            for floor in one.floors
            if floor.needed > 1
        ]
    return lines


# ---- in and out -------------------------------------------------------------------------------------------------


def config_of(name: str) -> Config:
    """Of a preset, of a folder or a file, of a model that ships, or of what a recipe trains."""
    if name not in PRESETS and (name in shipped() or Path(name).exists()):
        return read_config(name)
    if name in (*recipe.names(), *recipe.untested()):
        return recipe.read(name).model_config()
    if name in WHOLE and name not in PRESETS:
        raise ConfigError(f"{name} is a system of several models", f"vitrail ledger {name} --all shows what it costs")
    return named(name)


def _size(words: str) -> tuple[int, int]:
    """640x480, as everybody writes it → height and width."""
    found = re.fullmatch(r"(\d+)[x×](\d+)", words)
    if found is None:
        raise ConfigError(f"--picture {words} is no size", "give width and height, such as 640x480")
    return int(found[2]), int(found[1])


def _groups(ledgers: list[Ledger]) -> list[list[Ledger]]:
    """A table for each thing that models read."""
    kinds = dict.fromkeys(x.row for x in ledgers)
    return [[x for x in ledgers if x.row == kind] for kind in kinds]


def _sheet(models: dict[str, DecoderConfig], device: str, batch: int, dtype: str) -> Image.Image:
    if not 1 <= len(models) <= 6:
        raise ConfigError(
            f"the picture shows one to six decoders, not {len(models)}", "name fewer, or leave --out away"
        )
    shown = {}
    for name, model in models.items():
        one = make_ledger(
            model, batch=batch, dtype=dtype, devices=[device], lengths=(*CURVE, *LENGTHS), context=CURVE[0]
        )
        cache = {n: batch * one.cache[n] for n in LENGTHS}
        shown[name] = Series(one.weights, cache, {n: t.floor for n, t in one.floors[0].decode.items()})
    note = f"batch {batch}, {dtype}; a floor: every weight, key and value is read once, every product runs at full rate"
    return draw_ledger(shown, device=device, memory=DEVICES[device].memory, note=note)
