"""`vitrail stream`: how samples become one stream of tokens, and how they are packed."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from vitrail.show.stream import draw_stream
from vitrail.show.style import check_picture, save_picture
from vitrail.stream import POSITIONS, pack
from vitrail.stream.describe import EXAMPLE, Description


def stream(
    file: Path | None = None,
    /,
    *,
    rule: str | None = None,
    both: Annotated[tuple[str, ...] | None, Parameter(negative="")] = None,
    budget: int | None = None,
    out: Path = Path("out/stream.png"),
) -> None:
    """Show how samples become one stream: kinds, positions, spans, losses, packing, and who sees whom.

    A file describes the samples by their sizes:

        budget = 96
        [rules]
        positions = "qwen2.5-vl"
        both = ["image"]
        [[samples]]
        name = "caption"
        parts = [{ text = 4 }, { picture = [8, 12], merge = 2 }, { text = 6, loss = true }]

    A part is { text = n }, { picture = [rows, columns] }, { picture = [height, width], policy = "llava-next" },
    { video = [t, rows, columns], seconds = 0.5, stamp = 4 }, { action = n } or { query = n }; loss, codes, both and
    merge may be added.

    Parameters
    ----------
    file
        A .toml or .json description; an example unless given.
    rule
        Positions by 1d, qwen2-vl, qwen2.5-vl, qwen3-vl, qwen2-vl/transformers or qwen2.5-vl/transformers.
    both
        A kind to be read both ways: image, video, query, … May be repeated.
    budget
        Tokens of a row; the longest sample's unless given.
    out
        The picture to write.
    """
    check_picture(out)
    asked = EXAMPLE if file is None else Description.load(file)
    changes = {"positions": rule, "both": both}
    asked = asked.with_(rules=asked.rules.with_(**{k: v for k, v in changes.items() if v is not None}))
    asked = asked if budget is None else asked.with_(budget=budget)
    streams = asked.streams()
    batch = pack(streams, asked.budget or max(map(len, streams)))
    print(f"{asked.rules.positions}: {POSITIONS[asked.rules.positions].says}")
    for i, (sample, built) in enumerate(zip(asked.samples, streams, strict=True)):
        print(f"\n{sample.name or f'sample {i}'}  {len(built)} tokens, {built.learnt} learnt")
        at = 0
        for part in sample.all_parts():
            where = built.positions[at : at + part.tokens]
            at += part.tokens
            if len(where):
                first, last = (f"({', '.join(map(str, place.tolist()))})" for place in (where[0], where[-1]))
                print(f"  {part!s:38} {part.tokens:6,}  {first} … {last}")
    print(f"\n{batch}")
    save_picture(draw_stream(batch, f"Packed streams, positions by {asked.rules.positions}"), out)
    print(f"→ {out}")
