"""`vitrail ledger`: what models cost, before anybody pays for it."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from PIL import Image

from vitrail.backbones.decoder import DecoderConfig
from vitrail.config import Config
from vitrail.errors import ConfigError, VitrailError
from vitrail.hub.configs import read_config
from vitrail.hub.files import write_json
from vitrail.lab.ledger import DEVICES, LENGTHS, PRESETS, Floor, Ledger, Time, named
from vitrail.lab.ledger import ledger as make_ledger
from vitrail.show.ledger import Series, draw_ledger, si, tokens
from vitrail.show.style import check_picture, save_picture

CURVE = tuple(2**power for power in range(10, 21))  # contexts of the picture


def ledger(
    names: Annotated[list[str] | None, Parameter(negative="")] = None,
    /,
    *,
    context: int = 8192,
    batch: int = 1,
    dtype: str = "bfloat16",
    device: Annotated[list[str] | None, Parameter(negative="")] = None,
    json: Path | None = None,
    out: Path | None = None,
) -> None:
    """Show what models cost: parameters, FLOPs, bytes, and the time that a device needs at least.

    Nothing is loaded or computed; 235B parameters take a second. Without a name the presets are listed.

    Example: vitrail ledger llama-3.1-8b qwen3-30b-a3b --context 32768 --batch 16 --device h100

    Parameters
    ----------
    names
        Presets, folders with a config.json or vitrail.json, or GGUF files.
    context
        Tokens of a decoder's prompt. Towers read pictures of their own size.
    batch
        Rows at once.
    dtype
        What weights and cache are kept in: float32, bfloat16, float16, float8.
    device
        h200, h100, a100, rtx4090. May be repeated.
    json
        Write the ledgers to this file too.
    out
        Draw decoding time and memory over the context (decoders, at most six) as this picture.
    """
    if not names:
        for line in listing():
            print(line)
        return
    if out is not None:
        check_picture(out)
    devices = list(dict.fromkeys(device or ["h200"]))
    settings = {"context": context, "batch": batch, "dtype": dtype}
    models = {name: _config(name) for name in names}
    found = [make_ledger(model, name=name, devices=devices, **settings) for name, model in models.items()]
    print("\n\n".join(table(group, batch) for group in _groups(found)))
    print("\n" + "\n".join(_notes(found, models)))
    if json is not None:
        origins = {name: DEVICES[name]._asdict() for name in devices}
        _write(json, {"devices": origins, "ledgers": [one.plain() for one in found]})
    if out is not None:
        decoders = {name: model for name, model in models.items() if isinstance(model, DecoderConfig)}
        save_picture(_sheet(decoders, devices[0], batch, dtype), out)
        print(f"→ {out}")


def listing() -> Iterator[str]:
    """A line a preset."""
    for name, config in PRESETS.items():
        one = make_ledger(config, devices=(), lengths=())
        size = f"{config.context:,} tokens" if isinstance(config, DecoderConfig) else f"{one.tokens:,} tokens each"
        active = f", {_count(one.active)} active" if one.active != one.parameters else ""
        yield f"{name:22}{_count(one.parameters):>7}   {one.row}s, {size}{active}"


# ---- the table --------------------------------------------------------------------------------------------------

Cell = Callable[[Ledger], str]


def table(ledgers: Sequence[Ledger], batch: int) -> str:
    """A column a model, a row a figure. All models read the same: prompts, pictures, texts or pairs."""
    first = ledgers[0]
    rows: list[tuple[str, Cell]] = [("parameters", lambda x: _count(x.parameters))]
    if any(x.active != x.parameters for x in ledgers):
        rows += [("active", lambda x: _count(x.active))]
    rows += [("weights", lambda x: si(x.weights, "B"))]
    rows += _prompt_rows(first) if first.row == "prompt" else _tower_rows(first)
    for i, floor in enumerate(first.floors):
        rows += [(f"{floor.device}, batch {batch}", lambda x: "")]
        rows += [(f"  {label}", _at(i, cell)) for label, cell in _floor_rows(first, floor)]
    return _aligned([x.name for x in ledgers], [(label, [cell(x) for x in ledgers]) for label, cell in rows])


def _prompt_rows(first: Ledger) -> list[tuple[str, Cell]]:
    caches = [(f"cache, {'a token' if n == 1 else tokens(n)}", n) for n in first.cache]
    return [
        *((label, lambda x, n=n: si(x.cache[n], "B")) for label, n in caches),
        (f"prefill, {tokens(first.tokens)}", lambda x: si(x.forward, "FLOP")),
        (f"a token at {tokens(first.tokens)}", lambda x: si(x.decode or 0, "FLOP")),
        ("training, a token", lambda x: si(x.train, "FLOP")),
    ]


def _tower_rows(first: Ledger) -> list[tuple[str, Cell]]:
    return [
        (f"tokens, a {first.row}", lambda x: f"{x.tokens:,}"),
        (f"forward, a {first.row}", lambda x: si(x.forward, "FLOP")),
        (f"training, a {first.row}", lambda x: si(x.train, "FLOP")),
    ]


def _floor_rows(first: Ledger, floor: Floor) -> list[tuple[str, Callable[[Ledger, Floor], str]]]:
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
        ("batch that turns", lambda x, f: "none" if f.turning is None else f"{f.turning:,}"),
        ("prompts that fit", lambda x, f: f"{f.fitting:,}"),
        ("devices needed", lambda x, f: str(f.needed)),
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
    if any(x.row == "prompt" for x in ledgers):
        lines += [
            "batch that turns: the least that makes a token's time c; none where a row's cache outweighs its work"
        ]
    for one in ledgers:
        config = models[one.name]
        if isinstance(config, DecoderConfig) and one.tokens > config.context:
            lines += [f"{one.name} was made for {config.context:,} tokens, not {one.tokens:,}"]
        lines += [
            f"{one.name} needs {floor.needed} {floor.device}: its times are those of one, as if it held all"
            for floor in one.floors
            if floor.needed > 1
        ]
    return lines


# ---- in and out -------------------------------------------------------------------------------------------------


def _config(name: str) -> Config:
    return read_config(name) if name not in PRESETS and Path(name).exists() else named(name)


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


def _write(path: Path, data: dict) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, data)
    except OSError as error:
        raise VitrailError(f"{path} cannot be written: {error.strerror}", "give another path with --json") from error
    print(f"→ {path}")
