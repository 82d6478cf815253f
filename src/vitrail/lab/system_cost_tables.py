"""Tables of the cost of complete systems, for the terminal and for HTML pages."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from vitrail.lab.cost_ledger import DEVICES
from vitrail.lab.system_cost import OutputLatency, SystemCost
from vitrail.plots.html_page import NumberCell
from vitrail.plots.number_format import format_si, format_token_count


class CostTable(NamedTuple):
    title: str
    head: list[str]
    rows: list[list[str]]


MISSING = "–"


def build_system_tables(costs: Sequence[SystemCost], context_lengths: Sequence[int]) -> Iterator[CostTable]:
    """Yield the cost tables, one row per system.

    The tables are: size and cache; FLOPs per output; latency and rate per device; and, for the first device, the passes
    of systems that have several.
    """
    heads = ["output", "parameters", "active", "weights", "image", "second", *_format_heads("cache", context_lengths)]
    yield CostTable(
        "",
        heads,
        [
            [
                row.name,
                row.output,
                format_parameters(row.parameters),
                format_parameters(row.active_parameters),
                format_quantity(row.weight_bytes, "B"),
                NumberCell(f"{row.tokens_per_image:,}", row.tokens_per_image),
                MISSING
                if row.tokens_per_second is None
                else NumberCell(f"{row.tokens_per_second:,.0f}", row.tokens_per_second),
                *(
                    format_quantity(row.cache_bytes[n], "B") if n in row.cache_bytes else MISSING
                    for n in context_lengths
                ),
            ]
            for row in costs
        ],
    )
    yield CostTable(
        "FLOPs per output",
        ["own", *_format_heads("at", context_lengths)],
        [
            [
                row.name,
                *(
                    format_quantity(row.flops[n], "FLOP") if n in row.flops else MISSING
                    for n in (row.own_context, *context_lengths)
                ),
            ]
            for row in costs
        ],
    )
    for device in costs[0].latency:
        heads = ["own", "Hz", *(x for n in context_lengths for x in (f"at {format_token_count(n)}", "Hz")), "devices"]
        yield CostTable(
            device,
            heads,
            [
                [
                    row.name,
                    *(
                        cell
                        for n in (row.own_context, *context_lengths)
                        for cell in _format_latency(row.latency[device].get(n))
                    ),
                    NumberCell(
                        str(row.latency[device][row.own_context].num_devices),
                        row.latency[device][row.own_context].num_devices,
                    ),
                ]
                for row in costs
            ],
        )
    device = next(iter(costs[0].latency))
    several = [
        (row, row.latency[device][row.own_context].pass_seconds)
        for row in costs
        if len(row.latency[device][row.own_context].pass_seconds) > 1
    ]
    if several:
        yield CostTable(
            f"passes, {device}",
            ["first", "", "then", ""],
            [
                [
                    row.name,
                    *(cell for name, seconds in passes.items() for cell in (name, format_quantity(seconds, "s"))),
                ]
                for row, passes in several
            ],
        )


def build_system_notes(costs: Sequence[SystemCost]) -> Iterator[str]:
    for device in costs[0].latency:
        yield f"{device}: {DEVICES[device].origin}"
    yield "answer: one 640 × 480 image and 32 text tokens after a cached context, up to the first token"
    yield "image, second: tokens per image and per second of video (2 frames/s as model input, else the native rate)"
    yield "own: the native context; other context lengths are shown even if the model does not support them"
    yield f"{MISSING}: no video, or a fixed context (a codec, a policy, a denoised clip)"
    yield "times are rooflines of one device that holds everything; Hz counts frames if the output is video"
    for row in costs:
        unbuilt = (
            f"only parameters are counted for {', '.join(row.published_components)}" if row.published_components else ""
        )
        note = "; ".join(part for part in (row.note, unbuilt) if part)
        if note:
            yield f"{row.name}: {note}"


def format_quantity(value: float, unit: str) -> NumberCell:
    return NumberCell(format_si(value, unit), value)


def format_parameters(parameters: int) -> NumberCell:
    """Format a parameter count, with B for billions."""
    return NumberCell(format_si(parameters, "").replace("G", "B"), parameters)


def _format_heads(label: str, context_lengths: Sequence[int]) -> list[str]:
    return [f"{label} {format_token_count(n)}" for n in context_lengths]


def _format_latency(latency: OutputLatency | None) -> tuple[str, str]:
    if latency is None:
        return MISSING, MISSING
    return format_quantity(latency.seconds, "s"), NumberCell(f"{latency.hz:.3g}", latency.hz)
