"""Build a self-contained HTML page: images, figures, mosaics of codes and tables, without external resources.

The only script is the optional one that sorts tables. Arguments of type `str` are escaped. Functions return `Html`,
which is not escaped again.

Shapes: h × w codes, d code width, K sampled codes.
"""

import base64
import hashlib
import io
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from PIL import Image
from torch import Tensor

from vitrail.codecs.quantizers import Quantizer
from vitrail.plots import style
from vitrail.plots.charts import to_hex, to_inline_svg

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DARK_COLOURS = {
    style.PAPER: "#16181c",
    style.INK: "#e8e6e1",
    style.SOFT: "#a2a5ab",
    style.FAINT: "#34373d",
    style.BLUE: "#7db0f5",
    style.RED: "#f0836e",
    style.GREEN: "#5cc795",
    style.GOLD: "#e3b04b",
    style.VIOLET: "#b99be8",
}
# CSS variables that replace the colours of charts in dark mode.
_DARK_RULES = " ".join(f"--{to_hex(colour)[1:]}: {dark};" for colour, dark in DARK_COLOURS.items())
STYLE_SHEET, SORT_SCRIPT = (
    Path(__file__).with_name(name).read_text(encoding="utf-8") for name in ("page.css", "sort_tables.js")
)
STYLE_SHEET += f"@media (prefers-color-scheme: dark) {{ :root {{ {_DARK_RULES} }} }}"


class Html(str):
    """A string of HTML markup. Any other string is plain text."""


class NumberCell(str):
    """A table cell that sorts by its numeric value."""

    value: float

    def __new__(cls, text: str, value: float) -> "NumberCell":
        cell = super().__new__(cls, text)
        cell.value = value
        return cell


class Section(NamedTuple):
    """A section of a page; strings of the body are paragraphs unless they are `Html`."""

    title: str
    body: Sequence[str]


def render_page(title: str, introduction: Sequence[str], sections: Sequence[Section], *, is_long: bool = False) -> str:
    """Render the document, with a policy that blocks the network. A long page has a table of contents and sorting."""
    parts = [
        f'<section id="{_make_anchor(s)}"><h2>{escape_html(s.title)}</h2>{_render_parts(s.body)}</section>'
        for s in sections
    ]
    script = (
        f"'sha256-{base64.b64encode(hashlib.sha256(SORT_SCRIPT.encode()).digest()).decode()}'" if is_long else "'none'"
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; '
        f"style-src 'unsafe-inline'; script-src {script}\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape_html(title)}</title><style>{STYLE_SHEET}</style></head>"
        f'<body class="{"long" if is_long else "short"}">'
        f"<header><h1>{escape_html(title)}</h1>{_render_parts(introduction)}</header>"
        f"{_render_contents(sections) if is_long else ''}<main>{''.join(parts)}</main>"
        f"{f'<script>{SORT_SCRIPT}</script>' if is_long else ''}</body></html>\n"
    )


def escape_html(text: str) -> Html:
    return text if isinstance(text, Html) else Html(escape(text))


def render_heading(text: str) -> Html:
    return Html(f"<h3>{escape_html(text)}</h3>")


def render_verdict(is_right: bool, text: str) -> Html:
    """Render text after a tick or a cross."""
    kind, sign, label = ("right", "✓", "right") if is_right else ("wrong", "✗", "wrong")
    return Html(f'<span class="{kind}"><span role="img" aria-label="{label}">{sign}</span> {escape_html(text)}</span>')


def render_row(*figures: str) -> Html:
    return Html(f'<div class="row">{"".join(figures)}</div>')


def render_strip(*figures: str) -> Html:
    """Render figures in a strip of up to six columns."""
    return Html(f'<div class="strip">{"".join(figures)}</div>')


def render_tiles(*blocks: Sequence[str]) -> Html:
    """Render blocks in a responsive grid."""
    return Html(f'<div class="tiles">{"".join(f"<div>{_render_parts(block)}</div>" for block in blocks)}</div>')


def render_lines(*parts: str) -> Html:
    """Render each part on its own line."""
    return Html("".join(f'<span class="line">{escape_html(part)}</span>' for part in parts))


def render_list(parts: Sequence[str]) -> Html:
    return Html(f"<ul>{''.join(f'<li>{escape_html(part)}</li>' for part in parts)}</ul>")


def render_image(image: Image.Image, caption: str, alt: str = "") -> Html:
    """Render an image with a caption. `alt` is its alternative text."""
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, "PNG", optimize=True)
    img = f'<img src="data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}" alt="{escape(alt)}">'
    return Html(f"<figure>{img}<figcaption>{escape_html(caption)}</figcaption></figure>")


def render_figure(chart: "Figure", label: str, caption: str) -> Html:
    """Render a figure at its native size, scrollable if too wide. `label` is its accessible name."""
    body = (
        f'<div class="wide" role="region" tabindex="0" aria-label="{escape(label)}">{to_inline_svg(chart, label)}</div>'
    )
    return Html(f'<figure class="whole">{body}<figcaption>{escape_html(caption)}</figcaption></figure>')


def render_table(head: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "") -> Html:
    """Render a table. With a caption it is a data table: scrollable, sortable, with row headers in the first column."""

    def line(cells: Sequence[str], tag: str) -> str:
        parts = (f"<{tag}{_format_sort_attributes(cell)}>{escape_html(cell)}</{tag}>" for cell in cells)
        return f"<tr>{''.join(parts)}</tr>"

    if not caption:
        body = "".join(line(cells, "td") for cells in rows)
        return Html(f"<table><thead>{line(head, 'th')}</thead><tbody>{body}</tbody></table>")
    tops = "".join(f'<th scope="col">{escape_html(cell)}</th>' for cell in head)
    named = (
        f'<tr><th scope="row">{escape_html(cells[0])}</th>{line(cells[1:], "td").removeprefix("<tr>")}'
        for cells in rows
    )
    inside = f"<caption>{escape_html(caption)}</caption><thead><tr>{tops}</tr></thead><tbody>{''.join(named)}</tbody>"
    label = escape(re.sub("<[^>]*>", "", caption) if isinstance(caption, Html) else caption)
    around = f'<div class="wide" role="region" tabindex="0" aria-label="{label}">'
    return Html(f'{around}<table class="data">{inside}</table></div>')


def render_details(title: str, body: Sequence[str]) -> Html:
    """Render a collapsed block."""
    return Html(f"<details><summary>{escape_html(title)}</summary>{_render_parts(body)}</details>")


def render_code(text: str) -> Html:
    return Html(f"<code>{escape_html(text)}</code>")


def render_code_mosaic(ids: Tensor, colours: Tensor, caption: str) -> Html:
    """Render code ids (h, w) as cells of colours uint8 (h, w, 3), with the id on hover."""
    h, w = ids.shape
    cells = [
        f'<rect x="{x}" y="{y}" width="1" height="1" fill="#{r:02x}{g:02x}{b:02x}"><title>{code}</title></rect>'
        for y, (numbers, hues) in enumerate(zip(ids.tolist(), colours.tolist(), strict=True))
        for x, (code, (r, g, b)) in enumerate(zip(numbers, hues, strict=True))
    ]
    label = f"{h} by {w} codes, each a coloured cell"
    lines = 'stroke="#808080" stroke-width=".05"'
    drawn = f'<svg viewBox="0 0 {w} {h}" {lines} role="img" aria-label="{label}">{"".join(cells)}</svg>'
    return Html(f"<figure>{drawn}<figcaption>{escape_html(caption)}</figcaption></figure>")


@torch.no_grad()
def compute_code_colours(quantizer: Quantizer, ids: Tensor) -> Tensor:
    """Map code ids (h, w) to colours uint8 (h, w, 3) by projecting code vectors, so that near codes look similar."""
    size = quantizer.vocab_sizes[0]
    some = torch.arange(min(size, 4096), device=ids.device) * 2_654_435_761 % size  # (K,) spread over the codebook
    known, codes = quantizer.lookup(some).float(), quantizer.lookup(ids).float()  # (K, d), (h, w, d)
    d = known.shape[-1]
    axes = torch.cos(2.4 * torch.arange(1, d + 1)[:, None] * torch.arange(1, 4) + torch.arange(3))  # (d, 3)
    axes = (axes / axes.norm(dim=0)).to(codes)
    z = (codes - known.mean(0)) / known.std(0, correction=0).clamp(min=1e-6)
    return (255 * torch.sigmoid(1.5 * z @ axes)).round().to(torch.uint8).cpu()


def _format_sort_attributes(cell: str) -> str:
    return f' class="number" data-n="{cell.value:.9g}"' if isinstance(cell, NumberCell) else ""


def _make_anchor(section: Section) -> str:
    return "-".join(re.findall(r"\w+", section.title.lower())) or "section"


def _render_contents(sections: Sequence[Section]) -> str:
    lines = "".join(f'<li><a href="#{_make_anchor(s)}">{escape_html(s.title)}</a></li>' for s in sections)
    return f'<nav aria-label="Sections"><ul>{lines}</ul></nav>'


def _render_parts(parts: Sequence[str]) -> str:
    """Join parts: text as paragraphs, markup unchanged."""
    return "".join(part if isinstance(part, Html) else f"<p>{escape(part)}</p>" for part in parts)
