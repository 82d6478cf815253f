"""One page that is whole in itself: pictures, drawings, mosaics of codes and tables as HTML, without a link to another,
and without a script but the one that sorts tables, where it is asked for.

Text is escaped where it is put in; what these functions return is `Html`, and is not escaped again.

h × w codes, d width of a code, K codes that are looked at to find their spread
"""

import base64
import hashlib
import io
import re
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

import torch
from PIL import Image
from torch import Tensor

from vitrail.codecs.quantizers import Quantizer
from vitrail.show.figure import Figure
from vitrail.show.page_style import SORT, STYLE


class Html(str):
    """Markup; any other string is text."""


class Number(str):
    """A cell that is sorted by its value, whatever unit it is written in."""

    value: float

    def __new__(cls, text: str, value: float) -> "Number":
        made = super().__new__(cls, text)
        made.value = value
        return made


class Section(NamedTuple):
    title: str
    body: Sequence[str]


def page(title: str, lead: Sequence[str], sections: Sequence[Section], *, long: bool = False) -> str:
    """The whole document. It forbids itself the network. A long one lists its sections, and sorts its tables."""
    parts = [f'<section id="{_anchor(s)}"><h2>{html(s.title)}</h2>{_joined(s.body)}</section>' for s in sections]
    script = f"'sha256-{base64.b64encode(hashlib.sha256(SORT.encode()).digest()).decode()}'" if long else "'none'"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; '
        f"style-src 'unsafe-inline'; script-src {script}\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html(title)}</title><style>{STYLE}</style></head>"
        f'<body class="{"long" if long else "short"}"><header><h1>{html(title)}</h1>{_joined(lead)}</header>'
        f"{_contents(sections) if long else ''}<main>{''.join(parts)}</main>"
        f"{f'<script>{SORT}</script>' if long else ''}</body></html>\n"
    )


def html(text: str) -> Html:
    return text if isinstance(text, Html) else Html(escape(text))


def heading(text: str) -> Html:
    return Html(f"<h3>{html(text)}</h3>")


def marked(right: bool, text: str) -> Html:
    """Text behind a tick or a cross."""
    kind, sign, said = ("right", "✓", "right") if right else ("wrong", "✗", "wrong")
    return Html(f'<span class="{kind}"><span role="img" aria-label="{said}">{sign}</span> {html(text)}</span>')


def row(*figures: str) -> Html:
    return Html(f'<div class="row">{"".join(figures)}</div>')


def strip(*figures: str) -> Html:
    """Stages of one thing, six in a line where there is room."""
    return Html(f'<div class="strip">{"".join(figures)}</div>')


def tiles(*blocks: Sequence[str]) -> Html:
    """Blocks side by side where there is room."""
    return Html(f'<div class="tiles">{"".join(f"<div>{_joined(block)}</div>" for block in blocks)}</div>')


def lines(*parts: str) -> Html:
    """Each on a line of its own."""
    return Html("".join(f'<span class="line">{html(part)}</span>' for part in parts))


def listed(parts: Sequence[str]) -> Html:
    return Html(f"<ul>{''.join(f'<li>{html(part)}</li>' for part in parts)}</ul>")


def figure(image: Image.Image, caption: str, alt: str = "") -> Html:
    """`alt` is for who cannot see it, and empty where the caption says it all."""
    kept = io.BytesIO()
    image.convert("RGB").save(kept, "PNG", optimize=True)
    shown = f'<img src="data:image/png;base64,{base64.b64encode(kept.getvalue()).decode()}" alt="{escape(alt)}">'
    return Html(f"<figure>{shown}<figcaption>{html(caption)}</figcaption></figure>")


def drawing(drawn: Figure, label: str, caption: str) -> Html:
    """A drawing at its own size, which scrolls where it is wider than the page; `label` is for who cannot see it."""
    shown = f'<div class="wide" role="region" tabindex="0" aria-label="{escape(label)}">{drawn.inline(label)}</div>'
    return Html(f'<figure class="whole">{shown}<figcaption>{html(caption)}</figcaption></figure>')


def table(head: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "") -> Html:
    """With a caption it is one of data: its first column names the rows, and it may scroll and be sorted."""

    def line(cells: Sequence[str], tag: str) -> str:
        return f"<tr>{''.join(f'<{tag}{_sorted_by(cell)}>{html(cell)}</{tag}>' for cell in cells)}</tr>"

    if not caption:
        body = "".join(line(cells, "td") for cells in rows)
        return Html(f"<table><thead>{line(head, 'th')}</thead><tbody>{body}</tbody></table>")
    tops = "".join(f'<th scope="col">{html(cell)}</th>' for cell in head)
    named = (f'<tr><th scope="row">{html(cells[0])}</th>{line(cells[1:], "td").removeprefix("<tr>")}' for cells in rows)
    inside = f"<caption>{html(caption)}</caption><thead><tr>{tops}</tr></thead><tbody>{''.join(named)}</tbody>"
    label = escape(re.sub("<[^>]*>", "", caption) if isinstance(caption, Html) else caption)
    around = f'<div class="wide" role="region" tabindex="0" aria-label="{label}">'
    return Html(f'{around}<table class="data">{inside}</table></div>')


def fold(title: str, body: Sequence[str]) -> Html:
    """Parts that are shown when they are asked for."""
    return Html(f"<details><summary>{html(title)}</summary>{_joined(body)}</details>")


def code(text: str) -> Html:
    return Html(f"<code>{html(text)}</code>")


def mosaic(ids: Tensor, colours: Tensor, caption: str) -> Html:
    """ids (h, w), colours uint8 (h, w, 3) → a cell a code, its id on hover"""
    h, w = ids.shape
    cells = [
        f'<rect x="{x}" y="{y}" width="1" height="1" fill="#{r:02x}{g:02x}{b:02x}"><title>{code}</title></rect>'
        for y, (numbers, hues) in enumerate(zip(ids.tolist(), colours.tolist(), strict=True))
        for x, (code, (r, g, b)) in enumerate(zip(numbers, hues, strict=True))
    ]
    label = f"{h} by {w} codes, each a coloured cell"
    lines = 'stroke="#808080" stroke-width=".05"'
    drawn = f'<svg viewBox="0 0 {w} {h}" {lines} role="img" aria-label="{label}">{"".join(cells)}</svg>'
    return Html(f"<figure>{drawn}<figcaption>{html(caption)}</figcaption></figure>")


@torch.no_grad()
def code_colours(quantizer: Quantizer, ids: Tensor) -> Tensor:
    """ids (h, w) → uint8 (h, w, 3): each code's vector on three fixed axes, so that codes that are near look alike"""
    size = quantizer.sizes[0]
    some = torch.arange(min(size, 4096), device=ids.device) * 2_654_435_761 % size  # (K,) spread over all
    known, codes = quantizer.lookup(some).float(), quantizer.lookup(ids).float()  # (K, d), (h, w, d)
    d = known.shape[-1]
    axes = torch.cos(2.4 * torch.arange(1, d + 1)[:, None] * torch.arange(1, 4) + torch.arange(3))  # (d, 3)
    axes = (axes / axes.norm(dim=0)).to(codes)
    z = (codes - known.mean(0)) / known.std(0, correction=0).clamp(min=1e-6)
    return (255 * torch.sigmoid(1.5 * z @ axes)).round().to(torch.uint8).cpu()


def _sorted_by(cell: str) -> str:
    return f' class="number" data-n="{cell.value:.9g}"' if isinstance(cell, Number) else ""


def _anchor(section: Section) -> str:
    return "-".join(re.findall(r"\w+", section.title.lower())) or "section"


def _contents(sections: Sequence[Section]) -> str:
    lines = "".join(f'<li><a href="#{_anchor(s)}">{html(s.title)}</a></li>' for s in sections)
    return f'<nav aria-label="Sections"><ul>{lines}</ul></nav>'


def _joined(parts: Sequence[str]) -> str:
    """Text as paragraphs, markup as it is"""
    return "".join(part if isinstance(part, Html) else f"<p>{escape(part)}</p>" for part in parts)
