import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageDraw, ImageFont

from vitrail.processing.resolution import POLICIES, AnyRes, Canvas, Crop, Letterbox, Naive, Native, Tiles, named
from vitrail.show import grid as sheet
from vitrail.show.grid import AREA, CAPTION, FOOT, GAP, HEAD, MARGIN, PANEL, describe, draw_grid, sizes

GREEN = (20, 140, 60)


def panel(image: Image.Image, policy, index: int = 1) -> np.ndarray:
    """The picture area of one panel."""
    drawn = np.asarray(draw_grid(image, {"it": policy}))
    left = MARGIN + index * (PANEL + GAP)
    return drawn[HEAD : HEAD + AREA, left : left + PANEL]


def near(pixels: np.ndarray, colour: tuple[int, int, int], by: int = 40) -> np.ndarray:
    return np.abs(pixels.astype(int) - colour).max(-1) <= by


@pytest.mark.parametrize(("count", "columns", "rows"), [(1, 2, 1), (3, 4, 1), (4, 4, 2), (7, 4, 2)])
def test_layout(count, columns, rows):
    policies = {name: named(name) for name in list(POLICIES)[:count]}
    width = 2 * MARGIN + columns * PANEL + (columns - 1) * GAP
    height = HEAD + rows * (AREA + CAPTION) + (rows - 1) * GAP + FOOT
    assert draw_grid(Image.new("RGB", (30, 20)), policies).size == (width, height)


def test_captions():
    assert describe("anyres", AnyRes().cut(672, 672)) == "anyres · 5 views · 2,928 tokens"
    assert describe("naive", Naive().cut(1, 1)) == "naive · 1 view · 576 tokens"
    assert describe("one", Naive(size=14).cut(1, 1)) == "one · 1 view · 1 token"


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (Naive(), "336×336 px · 2.00× too tall"),
        (Letterbox(), "336×336 px · aspect kept · 50% padding"),
        (Crop(), "336×336 px · aspect kept · 50% cut away"),
        (AnyRes(), "whole + 2×1 tiles of 336×336 px · 2.00× too tall"),
        (AnyRes(grids=((2, 2),)), "whole + 2×2 tiles of 336×336 px · 2.00× too tall · 40% padding"),
        (Native(), "392×196 px · aspect kept"),
        (named("hd9"), "whole + 3×3 tiles of 336×336 px · aspect kept · 50% padding"),
        (Tiles(), "whole + 2×1 tiles of 448×448 px · 2.00× too tall"),
        (Tiles(most=1), "448×448 px · 2.00× too tall"),
        (Canvas(tile=210), "2×1 tiles of 210×210 px · aspect kept · 9% padding"),
        (Canvas(), "560×560 px · aspect kept · 50% padding"),
    ],
)
def test_sizes(policy, words):
    assert sizes(policy.cut(200, 400)) == words


def test_sizes_of_a_strip():
    assert sizes(Crop().cut(1, 2000)).endswith("over 99% cut away")
    assert "too wide" in sizes(Naive().cut(200, 100))


def test_padding_is_hatched_and_the_picture_shown():
    shown = panel(Image.new("RGB", (400, 200), GREEN), Letterbox(patch=112))[
        :, :AREA
    ]  # a square view, standing on its caption
    band, middle = shown[AREA // 16 : 3 * AREA // 16], shown[7 * AREA // 16 : 9 * AREA // 16]
    assert near(band, sheet.HATCH[0]).mean() > 0.6 and not near(band, GREEN).any()
    assert near(middle, GREEN).mean() > 0.9


def test_what_is_cut_away_is_faded():
    pixels = panel(Image.new("RGB", (400, 200), GREEN), Crop())
    middle, end = pixels[-40:-10, PANEL // 2 - 40 : PANEL // 2 + 40], pixels[-40:-10, 5:60]
    pale = tuple(round(0.28 * level + 0.72 * veil) for level, veil in zip(GREEN, sheet.VEIL, strict=True))
    assert near(end, pale, 6).all()
    assert not near(middle, pale, 6).any()


@pytest.mark.parametrize("patch", [14, 28, 42])
def test_a_line_between_tokens(patch):
    """Along a row through the middle of a token, as many lines are crossed as there are columns less one."""
    pixels = panel(Image.new("RGB", (336, 336), "black"), Naive(patch=patch))[:, 2 : AREA - 2]
    count = 336 // patch
    row = pixels[round(AREA * (count // 2 + 0.5) / count)].max(-1) > 60
    assert (np.diff(row.astype(int)) == 1).sum() == count - 1


def test_lines_show_on_a_white_page():
    pixels = panel(Image.new("RGB", (336, 336), "white"), Naive(patch=42))[:, 4 : AREA - 4]
    assert (pixels.max(-1) < 140).mean() > 0.01


@pytest.mark.parametrize(("size", "rows"), [((300, 300), 8), ((300, 200), 6)])
def test_newlines_are_dots(size, rows):
    """One beside each row that is kept, and nothing else there."""
    image, policy = Image.new("RGB", size, "black"), AnyRes(tile=56, grids=((2, 2),))
    assert policy.cut(*size[::-1]).spans[1].size[0] == rows
    beside = near(panel(image, policy), sheet.ACCENT)[:, -6:].any(1)
    assert (np.diff(beside.astype(int), prepend=0) == 1).sum() == rows


def test_a_refusal_is_shown():
    pixels = panel(Image.new("RGB", (1000, 3), GREEN), Native())
    assert near(pixels, sheet.HATCH[0]).mean() > 0.5


HALVES = Image.new("RGB", (400, 200), GREEN)
HALVES.paste((150, 40, 30), (200, 0, 400, 200))


@pytest.mark.parametrize(
    ("policy", "before"),  # where the tiles begin, in tiles: the whole stands before them, if there is one
    [(AnyRes(grids=((1, 2),), patch=336), 1.16), (Tiles(patch=224), 1.16), (Canvas(tile=200, patch=200, most=2), 0)],
)
def test_tiles_lie_side_by_side(policy, before):
    """A picture of two colours: the left tile has the one, the right tile the other, wherever the whole is read."""
    pixels = panel(HALVES, policy)
    tile = PANEL / (before + 2.08)
    y = round(AREA - tile / 3)
    for at, colour in ((before + 0.3, GREEN), (before + 1.3, (150, 40, 30))):
        assert near(pixels[y, round(at * tile)], colour).all()
    if before:
        assert near(pixels[y, round(0.25 * tile)], GREEN).all()
        assert near(pixels[y, round(0.75 * tile)], (150, 40, 30)).all()


@settings(max_examples=60)
@given(st.sampled_from(["anyres", "hd9", "tiles", "canvas"]), st.integers(1, 3000), st.integers(1, 3000))
def test_a_whole_and_its_tiles(name, height, width):
    cut = named(name).cut(height, width)
    base, tiles = sheet._parts(cut)
    wanted = {"anyres": 0, "hd9": 0, "tiles": len(cut.views) - 1, "canvas": None}[name]
    assert base == (0 if len(cut.views) == 1 else wanted)
    assert not tiles or np.prod(sheet._mosaic(cut, tiles)) == len(tiles)


@pytest.mark.parametrize("size", [(1, 1), (1, 900), (900, 1), (3, 2000)])
def test_any_size_is_drawn(size):
    draw_grid(Image.new("RGB", size, GREEN))


def test_deterministic_and_untouched():
    image = Image.new("RGB", (50, 40), GREEN)
    first, second = (np.asarray(draw_grid(image)) for _ in range(2))
    assert np.array_equal(first, second)
    assert (np.asarray(image) == GREEN).all()


def test_every_letter_has_a_shape(monkeypatch):
    """Pillow's own font draws a box for what it lacks."""
    said = []
    write = ImageDraw.ImageDraw.text
    monkeypatch.setattr(
        ImageDraw.ImageDraw, "text", lambda self, at, words, **how: (said.append(words), write(self, at, words, **how))
    )
    draw_grid(Image.new("RGB", (1000, 3)), title="a rather long title that must be cut short " * 6)
    font = ImageFont.load_default(20)
    missing = bytes(font.getmask("\uffff"))
    assert len(said) > 20 and any(words.endswith("…") for words in said)
    assert not [letter for letter in set("".join(said)) - {" "} if bytes(font.getmask(letter)) == missing]
