"""HTML pages: their content, and the absence of external references."""

import base64
import io
import re
from html.parser import HTMLParser

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from vitrail.codecs.quantizers import FSQ, VQ
from vitrail.plots.html_page import (
    Html,
    Section,
    compute_code_colours,
    escape_html,
    render_code_mosaic,
    render_image,
    render_page,
    render_row,
    render_table,
    render_verdict,
)

VOID = {"meta", "img"}


class Page(HTMLParser):
    """Parses a page into texts and references. Mismatched tags are an error."""

    def __init__(self, text: str):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.texts, self.style = [], [], [], ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "style":
            self.style += data
        else:
            self.texts.append((self.open[-1] if self.open else "", data))

    def of(self, tag: str) -> list[dict]:
        return [attrs for name, attrs in self.tags if name == tag]

    def under(self, tag: str) -> list[str]:
        return [text for name, text in self.texts if name == tag]

    def pictures(self) -> list[Image.Image]:
        return [Image.open(io.BytesIO(base64.b64decode(img["src"].partition(",")[2]))) for img in self.of("img")]

    def alone(self) -> None:
        """Assert that nothing is fetched and no script runs."""
        assert not {"script", "link", "iframe", "object", "embed", "base", "form"} & {tag for tag, _ in self.tags}
        for _, attrs in self.tags:
            assert not {"href", "xlink:href", "srcset", "action", "poster", "style"} & attrs.keys()
            assert not [key for key in attrs if key.startswith("on")]
            assert attrs.get("src", "data:image/png;base64,").startswith("data:image/png;base64,")
        assert not re.search(r"url\(|@import|https?:", self.style)
        assert "default-src 'none'" in self.of("meta")[1]["content"]


def picture(seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (5, 7, 3), dtype=np.uint8))


def test_page_contains_its_parts():
    sections = [
        Section(
            "First",
            [
                "words",
                render_row(render_image(picture(0), "one"), render_image(picture(1), render_verdict(True, "two"))),
            ],
        ),
        Section("Second", [render_table(("a", "b"), [("1", render_verdict(False, "2"))])]),
    ]
    found = Page(render_page("Title", ["lead"], sections))
    found.alone()
    assert found.under("h1") == ["Title"] and found.under("h2") == ["First", "Second"]
    assert found.under("p") == ["lead", "words"] and found.under("td") == ["1"] and found.under("th") == ["a", "b"]
    assert [np.array_equal(a, picture(i)) for i, a in enumerate(found.pictures())] == [True, True]
    assert [span["class"] for span in found.of("span") if "class" in span] == ["right", "wrong"]


@given(st.text(st.characters(blacklist_categories=("Cs", "Cc")), min_size=1))
def test_text_is_escaped(text):
    nasty = f"<script>{text}</script><img src=x onerror=y>{text}&amp;"
    body = [nasty, render_image(picture(), nasty), render_table((nasty,), [(render_verdict(True, nasty),)])]
    found = Page(render_page(nasty, [nasty], [Section(nasty, body)]))
    found.alone()
    assert len(found.of("img")) == 1 and found.under("h2") == found.under("h1") == found.under("th") == [nasty]
    assert found.under("p") == [nasty, nasty] and found.under("figcaption") == [nasty]
    assert isinstance(escape_html(nasty), Html) and escape_html(escape_html(nasty)) == escape_html(nasty)


@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 2**32))
def test_mosaic_has_one_cell_per_code(h, w, seed):
    rng = torch.Generator().manual_seed(seed)
    ids, colours = torch.randint(0, 64000, (h, w), generator=rng), torch.randint(0, 256, (h, w, 3), generator=rng)
    found = Page(render_page("page", [], [Section("", [render_code_mosaic(ids, colours.to(torch.uint8), "")])]))
    found.alone()
    cells = found.of("rect")
    assert [(int(cell["y"]), int(cell["x"])) for cell in cells] == [(y, x) for y in range(h) for x in range(w)]
    assert [int(text) for text in found.under("title")[1:]] == ids.flatten().tolist()
    hues = [[int(cell["fill"][i : i + 2], 16) for i in (1, 3, 5)] for cell in cells]
    assert hues == colours.flatten(0, 1).tolist()


def test_near_codes_have_similar_colours():
    fsq = FSQ(FSQ.Config(levels=(8, 8, 8, 5, 5, 5)))
    ids = torch.randint(0, 64000 // 2, (400, 1))
    colours = compute_code_colours(fsq, ids).long()
    assert torch.equal(colours, compute_code_colours(fsq, ids.flip(0)).flip(0).long())  # independent of other codes
    assert colours.float().flatten(0, 1).std(0).min() > 30  # colours differ
    distance = (fsq.lookup(ids)[:, None] - fsq.lookup(ids)[None]).flatten(2).norm(dim=-1)
    apart = (colours[:, None] - colours[None]).float().flatten(2).norm(dim=-1)
    some = ~torch.eye(400, dtype=torch.bool)
    near, far = distance[some].quantile(torch.tensor([0.02, 0.98]))
    assert 2 * apart[some & (distance <= near)].mean() < apart[some & (distance >= far)].mean()


def test_any_code_width_has_colours():
    for width in (1, 2, 9):
        vq = VQ(VQ.Config(dim=width, codebook_size=5))
        assert compute_code_colours(vq, torch.arange(5)[None]).shape == (1, 5, 3)
