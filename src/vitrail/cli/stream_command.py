"""`vitrail stream`: drawings of packed token streams."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from vitrail.plots.charts import check_chart_path, save_chart
from vitrail.plots.stream_plot import draw_stream
from vitrail.stream import POSITION_RULES, pack_streams
from vitrail.stream.stream_description import EXAMPLE_DESCRIPTION, StreamDescription


def draw_streams(
    file: Path | None = None,
    /,
    *,
    position_rule: str | None = None,
    bidirectional: Annotated[tuple[str, ...] | None, Parameter(negative="")] = None,
    row_length: int | None = None,
    out: Path = Path("out/stream.png"),
) -> None:
    """Draw a packed token stream: kinds, positions, spans, losses and the attention mask.

    A file describes the samples by their sizes:

        row_length = 96
        [rules]
        positions = "qwen2.5-vl"
        bidirectional = ["image"]
        [[samples]]
        name = "caption"
        parts = [{ text = 4 }, { image = [8, 12], merge_size = 2 }, { text = 6, loss = true }]

    A part is { text = n }, { image = [rows, columns] }, { image = [height, width], policy = "llava-next" },
    { video = [t, rows, columns], seconds = 0.5, timestamp_tokens = 4 }, { action = n } or { query = n }. Optional keys
    are loss, codes, bidirectional and merge_size.

    Parameters
    ----------
    file
        A .toml or .json description. Default: an example.
    position_rule
        1d, qwen2-vl, qwen2.5-vl, qwen3-vl, glm4v, qwen2-vl/transformers or qwen2.5-vl/transformers.
    bidirectional
        A kind with bidirectional attention: image, video, query, … May be repeated.
    row_length
        Tokens of a packed row. Default: the length of the longest sample.
    out
        The image to write.
    """
    check_chart_path(out)
    description = EXAMPLE_DESCRIPTION if file is None else StreamDescription.load(file)
    changes = {"positions": position_rule, "bidirectional": bidirectional}
    description = description.replace(
        rules=description.rules.replace(**{k: v for k, v in changes.items() if v is not None})
    )
    description = description if row_length is None else description.replace(row_length=row_length)
    streams = description.build_streams()
    batch = pack_streams(streams, description.row_length or max(map(len, streams)))
    print(f"{description.rules.positions}: {POSITION_RULES[description.rules.positions].description}")
    for i, (sample, stream) in enumerate(zip(description.samples, streams, strict=True)):
        print(f"\n{sample.name or f'sample {i}'}  {len(stream)} tokens, {stream.num_target_tokens} with loss")
        at = 0
        for part in sample.build_parts():
            where = stream.positions[at : at + part.num_tokens]
            at += part.num_tokens
            if len(where):
                first, last = (f"({', '.join(map(str, place.tolist()))})" for place in (where[0], where[-1]))
                print(f"  {part!s:38} {part.num_tokens:6,}  {first} … {last}")
    print(f"\n{batch}")
    save_chart(draw_stream(batch, f"Packed streams, positions by {description.rules.positions}"), out)
    print(f"→ {out}")
