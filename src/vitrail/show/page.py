"""One page that is whole in itself: pictures, mosaics of codes and tables as HTML, without a script and without a link.

Text is escaped where it is put in; what these functions return is `Html`, and is not escaped again.

h × w codes, d width of a code, K codes that are looked at to find their spread
"""

import base64
import io
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

import torch
from PIL import Image
from torch import Tensor

from vitrail.codecs.quantizers import Quantizer


class Html(str):
    """Markup; any other string is text."""


class Section(NamedTuple):
    title: str
    body: Sequence[str]


def page(title: str, lead: Sequence[str], sections: Sequence[Section]) -> str:
    """The whole document. It forbids itself the network."""
    parts = [f"<section><h2>{html(s.title)}</h2>{_joined(s.body)}</section>" for s in sections]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; '
        "style-src 'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html(title)}</title><style>{STYLE}</style></head>"
        f"<body><header><h1>{html(title)}</h1>{_joined(lead)}</header><main>{''.join(parts)}</main></body></html>\n"
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


def figure(image: Image.Image, caption: str) -> Html:
    kept = io.BytesIO()
    image.convert("RGB").save(kept, "PNG", optimize=True)
    shown = f'<img src="data:image/png;base64,{base64.b64encode(kept.getvalue()).decode()}" alt="">'
    return Html(f"<figure>{shown}<figcaption>{html(caption)}</figcaption></figure>")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Html:
    def line(cells: Sequence[str], tag: str) -> str:
        return f"<tr>{''.join(f'<{tag}>{html(cell)}</{tag}>' for cell in cells)}</tr>"

    body = "".join(line(cells, "td") for cells in rows)
    return Html(f"<table><thead>{line(head, 'th')}</thead><tbody>{body}</tbody></table>")


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


def _joined(parts: Sequence[str]) -> str:
    """Text as paragraphs, markup as it is"""
    return "".join(part if isinstance(part, Html) else f"<p>{escape(part)}</p>" for part in parts)


STYLE = """
:root { color-scheme: light dark; --paper: #faf9f6; --ink: #20232a; --soft: #5f636b; --line: #dedbd4;
  --right: #1d7a50; --wrong: #b8402c; }
@media (prefers-color-scheme: dark) { :root { --paper: #16181c; --ink: #e8e6e1; --soft: #a2a5ab; --line: #34373d;
  --right: #5cc795; --wrong: #f0836e; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 58rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 2rem; line-height: 1.2; margin: 0 0 .5rem; }
h2 { margin: 3rem 0 .5rem; padding-top: 1rem; border-top: 1px solid var(--line); }
h3 { margin: 2rem 0 .5rem; }
p { max-width: 42rem; margin: .5rem 0; }
.row { display: flex; flex-wrap: wrap; gap: .75rem; margin: .75rem 0; }
figure { margin: 0; width: min(10rem, 47%); }
img, svg { display: block; width: 100%; height: auto; border: 1px solid var(--line); border-radius: 4px; }
rect:hover { stroke: var(--ink); stroke-width: .12; }
figcaption, th { color: var(--soft); font-size: .875rem; }
figcaption { margin-top: .25rem; line-height: 1.35; }
table { border-collapse: collapse; margin: .5rem 0; width: 100%; table-layout: fixed; }
th, td { text-align: left; vertical-align: top; padding: .3rem 1rem .3rem 0; border-bottom: 1px solid var(--line); }
.right { color: var(--right); }
.wrong { color: var(--wrong); }
"""
