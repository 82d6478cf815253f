"""Tables of the costs of models as text, one column a model, and a figure of decoders over the context length."""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from vitrail.backbones.decoder import DecoderConfig
from vitrail.codecs.causal_video_codec import CausalVideoCodecConfig
from vitrail.config import Config
from vitrail.errors import ConfigError
from vitrail.lab.cost_ledger import (
    CONTEXT_LENGTHS,
    DEVICES,
    VIDEO_FRAMES,
    ComponentCost,
    CostLedger,
    DeviceRoofline,
    PassTime,
    compute_ledger,
    get_model_kind,
)
from vitrail.models.cross_attention_vlm import CrossAttentionVLMConfig
from vitrail.plots.ledger_plot import LedgerSeries, draw_ledger
from vitrail.plots.number_format import format_si, format_token_count

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DEFAULT_CONTEXT_LENGTH = 8192
PLOT_LENGTHS = tuple(2**power for power in range(10, 21))  # context lengths of the plot
VLM_PARTS = ("tower", "connector", "decoder")

FormatCell = Callable[[CostLedger], str]
RooflineCell = Callable[[CostLedger, DeviceRoofline], str]


def format_ledgers(ledgers: Sequence[CostLedger], batch_size: int, width: int) -> str:
    """Format a table of `width` characters with one column a model.

    All models have the same kind of input, such as prompts or images.
    """
    first = ledgers[0]
    rows: list[tuple[str, FormatCell]] = [("parameters", lambda x: _format_count(x.parameters))]
    rows += _format_part_rows(ledgers, lambda part: _format_count(part.parameters))
    if any(x.active_parameters != x.parameters for x in ledgers):
        rows += [("active", lambda x: _format_count(x.active_parameters))]
    rows += [("weights", lambda x: format_si(x.weight_bytes, "B"))]
    rows += _format_part_rows(ledgers, lambda part: format_si(part.weight_bytes, "B"))
    match first.input_kind:
        case "prompt":
            rows += _format_prompt_rows(first)
        case "question":
            rows += _format_question_rows(ledgers)
        case _:
            rows += _format_tower_rows(first)
    for i, floor in enumerate(first.rooflines):
        rows += [(f"{floor.device}, batch {batch_size}", lambda _x: "")]
        rows += [
            (f"  {label}", _at_device(i, cell))
            for label, cell in _format_roofline_rows(first, floor, _list_part_names(ledgers))
        ]
    cells = [(label, [cell(x) for x in ledgers]) for label, cell in rows]
    return _align_columns([x.name for x in ledgers], cells, width)


def _format_prompt_rows(first: CostLedger) -> list[tuple[str, FormatCell]]:
    caches = [(f"cache, {'a token' if n == 1 else format_token_count(n)}", n) for n in first.cache_bytes]
    return [
        *((label, lambda x, n=n: format_si(x.cache_bytes[n], "B")) for label, n in caches),
        (f"prefill, {format_token_count(first.tokens)}", lambda x: format_si(x.forward_flops, "FLOP")),
        (f"decode step at {format_token_count(first.tokens)}", lambda x: format_si(x.decode_flops or 0, "FLOP")),
        ("training, a token", lambda x: format_si(x.training_flops, "FLOP")),
    ]


def _format_question_rows(ledgers: Sequence[CostLedger]) -> list[tuple[str, FormatCell]]:
    """Rows for questions with images. Every model has its own number of image tokens."""
    return [
        ("image tokens", lambda x: f"{x.image_tokens:,}"),
        ("prompt tokens", lambda x: f"{x.tokens:,}"),
        ("prefill", lambda x: format_si(x.forward_flops, "FLOP")),
        *_format_part_rows(ledgers, lambda part: format_si(part.forward_flops, "FLOP")),
        ("decode step", lambda x: format_si(x.decode_flops or 0, "FLOP")),
        ("training, a question", lambda x: format_si(x.training_flops, "FLOP")),
        ("cache", lambda x: format_si(x.cache_bytes[x.tokens], "B")),
        *(
            (f"cache, {format_token_count(n)}", lambda x, n=n: format_si(x.cache_bytes[n], "B"))
            for n in CONTEXT_LENGTHS
        ),
    ]


def _format_part_rows(
    ledgers: Sequence[CostLedger], cell: Callable[[ComponentCost], str]
) -> list[tuple[str, FormatCell]]:
    return [
        (f"  {name}", lambda x, name=name: cell(x.components[name]) if name in x.components else "–")
        for name in _list_part_names(ledgers)
    ]


def _list_part_names(ledgers: Sequence[CostLedger]) -> list[str]:
    """List the parts of all vision-language models, then the parts that only some models have."""
    return (
        list(dict.fromkeys([*VLM_PARTS, *(name for x in ledgers for name in x.components)]))
        if ledgers[0].components
        else []
    )


def _format_tower_rows(first: CostLedger) -> list[tuple[str, FormatCell]]:
    one_input = f"{'an' if first.input_kind[0] in 'aeiou' else 'a'} {first.input_kind}"
    return [
        (f"tokens, {one_input}", lambda x: f"{x.tokens:,}"),
        (f"forward, {one_input}", lambda x: format_si(x.forward_flops, "FLOP")),
        (f"training, {one_input}", lambda x: format_si(x.training_flops, "FLOP")),
    ]


def _format_roofline_rows(
    first: CostLedger, roofline: DeviceRoofline, parts: Sequence[str]
) -> list[tuple[str, RooflineCell]]:
    if first.input_kind not in ("prompt", "question"):
        return [
            ("forward", lambda _x, f: _format_time(f.forward)),
            (f"{first.input_kind}s/s", lambda _x, f: f"{f.batch_size / f.forward.roofline:,.0f}"),
            ("devices needed", lambda _x, f: str(f.num_devices)),
        ]
    is_question = first.input_kind == "question"
    rows = _format_question_times(parts) if is_question else _format_prompt_times(first, roofline)
    return [
        *rows,
        ("compute-bound batch", _format_compute_bound_batch),
        (f"{first.input_kind}s that fit", lambda _x, f: f"{f.max_batch_size:,}"),
        ("devices needed", lambda _x, f: str(f.num_devices)),
    ]


def _format_question_times(parts: Sequence[str]) -> list[tuple[str, RooflineCell]]:
    return [
        ("first token", lambda _x, f: _format_time(f.forward)),
        *(
            (f"  {name}", lambda _x, f, name=name: _format_time(f.components[name]) if name in f.components else "–")
            for name in parts
        ),
        ("decode step", lambda x, f: _format_time(f.decode[x.tokens])),
        *(_decode_row(n) for n in CONTEXT_LENGTHS),
        ("tokens/s", _format_token_rate),
    ]


def _format_prompt_times(first: CostLedger, roofline: DeviceRoofline) -> list[tuple[str, RooflineCell]]:
    length = format_token_count(first.tokens)
    return [
        (f"prefill, {length}", lambda _x, f: _format_time(f.forward)),
        *(_decode_row(n) for n in roofline.decode),
        (f"tokens/s at {length}", _format_token_rate),
    ]


def _decode_row(length: int) -> tuple[str, RooflineCell]:
    return f"decode step at {format_token_count(length)}", lambda _x, f: _format_time(f.decode[length])


def _format_token_rate(ledger: CostLedger, roofline: DeviceRoofline) -> str:
    return f"{roofline.batch_size / roofline.decode[ledger.tokens].roofline:,.0f}"


def _format_compute_bound_batch(_ledger: CostLedger, roofline: DeviceRoofline) -> str:
    size = roofline.compute_bound_batch_size
    return "none" if size is None else f"{size:,}"


def _format_count(parameters: int) -> str:
    """Format a number of parameters: 8030261248 → "8.03 B"."""
    return format_si(parameters, "").replace("G", "B")


def _at_device(index: int, cell: RooflineCell) -> FormatCell:
    return lambda x: cell(x, x.rooflines[index])


def _format_time(time: PassTime) -> str:
    """Format a roofline time and its bound: c for compute, m for memory bandwidth."""
    return f"{format_si(time.roofline, 's')} {time.bound[0]}"


def _align_columns(heads: list[str], rows: list[tuple[str, list[str]]], width: int) -> str:
    """Align columns. Models that do not fit the width follow in further blocks."""
    left = max(len(label) for label, _ in rows)
    widths = [2 + max(len(head), *(len(cells[i]) for _, cells in rows)) for i, head in enumerate(heads)]
    room = width - left
    blocks: list[list[int]] = [[]]
    for i, column in enumerate(widths):
        if blocks[-1] and sum(widths[j] for j in blocks[-1]) + column > room:
            blocks.append([])
        blocks[-1].append(i)
    return "\n\n".join(
        "\n".join(
            f"{label:{left}}{''.join(f'{cells[i]:>{widths[i]}}' for i in block)}".rstrip()
            for label, cells in [("", heads), *rows]
        )
        for block in blocks
    )


def list_notes(ledgers: Sequence[CostLedger], models: dict[str, Config]) -> list[str]:
    lines = [f"{floor.device}: {DEVICES[floor.device].origin}" for floor in ledgers[0].rooflines]
    lines += ["times are rooflines: c compute-bound (products at peak rate), m memory-bound (each byte moved once)"]
    if any(x.input_kind in ("prompt", "question") for x in ledgers):
        lines += [
            "compute-bound batch: the smallest batch whose decode step is compute-bound; none if the KV cache of a row "
            "always dominates"
        ]
    if any(isinstance(models[x.name], CrossAttentionVLMConfig) for x in ledgers):
        lines += ["image tokens of models with cross-attention are not part of the prompt"]
    for one in ledgers:
        config = models[one.name]
        if isinstance(config, CausalVideoCodecConfig):
            height, width = config.frame_size
            lines += [f"{one.name}: {config.net.round_up_frames(VIDEO_FRAMES)} frames of {height} × {width} pixels"]
        lines += _list_context_notes(one, config)
        lines += [
            f"{one.name} needs {floor.num_devices} {floor.device}: the times are those of one device with enough memory"
            for floor in one.rooflines
            if floor.num_devices > 1
        ]
    return lines


def _list_context_notes(ledger: CostLedger, config: Config) -> list[str]:
    """Say whether the prompt fills, or exceeds, the context of the decoder."""
    decoder = getattr(config, "decoder", config)
    if not isinstance(decoder, DecoderConfig):
        return []
    if ledger.tokens > decoder.context_length:
        return [f"{ledger.name} has a context of {decoder.context_length:,} tokens, less than {ledger.tokens:,}"]
    if ledger.tokens == decoder.context_length < DEFAULT_CONTEXT_LENGTH:
        return [f"{ledger.name}: the prompt has {ledger.tokens:,} tokens, the context of the model"]
    return []


def format_preset(name: str, config: Config) -> str:
    """Format the size of a model in one line."""
    one = compute_ledger(config, devices=(), context_lengths=())
    active = f", {_format_count(one.active_parameters)} active" if one.active_parameters != one.parameters else ""
    if one.input_kind == "prompt":
        size = f"prompts, {getattr(config, 'context_length', one.tokens):,} tokens"
    elif one.input_kind == "question":
        by_cross_attention = isinstance(config, CrossAttentionVLMConfig)
        size = (
            f"{one.image_tokens:,} {'image features, by cross-attention' if by_cross_attention else 'tokens an image'}"
        )
    else:
        size = f"{one.input_kind}s, {one.tokens:,} tokens each"
    return f"{name:22}{_format_count(one.parameters):>7}   {size}{active}"


def group_by_input(ledgers: list[CostLedger]) -> list[list[CostLedger]]:
    """Group ledgers by the kind of input of the models."""
    kinds = dict.fromkeys(x.input_kind for x in ledgers)
    return [[x for x in ledgers if x.input_kind == kind] for kind in kinds]


def default_context_length(model: Config, models: Iterable[Config]) -> int:
    """Return 8192, or less if the context of the model is shorter.

    Several decoders share a table, and so the shortest context. The images of a question take a part of the context.
    """
    if isinstance(model, DecoderConfig):
        return min(DEFAULT_CONTEXT_LENGTH, *(one.context_length for one in models if isinstance(one, DecoderConfig)))
    decoder = getattr(model, "decoder", None)
    if not isinstance(decoder, DecoderConfig) or get_model_kind(model).input_kind != "question":
        return DEFAULT_CONTEXT_LENGTH
    image_tokens = compute_ledger(model, context_length=1, devices=(), context_lengths=()).tokens - 1
    return max(1, min(DEFAULT_CONTEXT_LENGTH, decoder.context_length - image_tokens))


def draw_decoder_costs(models: dict[str, DecoderConfig], device: str, batch_size: int, dtype: str) -> "Figure":
    """Draw decoding time and memory over the context length, for at most six decoders."""
    if not 1 <= len(models) <= 6:
        raise ConfigError(
            f"--out supports one to six decoders, not {len(models)}", "give fewer models, or remove --out"
        )
    series = {}
    for name, model in models.items():
        ledger = compute_ledger(
            model,
            batch_size=batch_size,
            dtype=dtype,
            devices=[device],
            context_lengths=(*PLOT_LENGTHS, *CONTEXT_LENGTHS),
            context_length=PLOT_LENGTHS[0],
        )
        cache = {n: batch_size * ledger.cache_bytes[n] for n in CONTEXT_LENGTHS}
        series[name] = LedgerSeries(
            ledger.weight_bytes, cache, {n: t.roofline for n, t in ledger.rooflines[0].decode.items()}
        )
    note = f"batch {batch_size}, {dtype}; roofline: weights, keys and values are read once, products run at peak rate"
    return draw_ledger(series, device=device, memory=DEVICES[device].memory, note=note)
