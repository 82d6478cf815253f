import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageDraw, ImageFont

from vitrail.plots import token_grid as sheet
from vitrail.plots.token_grid import (
    CAPTION_HEIGHT,
    FOOT,
    GAP,
    HEAD,
    MARGIN,
    PANEL_HEIGHT,
    PANEL_WIDTH,
    describe_layout,
    describe_sizes,
    draw_token_grid,
)
from vitrail.processing.anyres import AnyResPolicy
from vitrail.processing.internvl_tiles import TilesPolicy
from vitrail.processing.mllama_canvas import CanvasPolicy
from vitrail.processing.resolution_policies import (
    CropPolicy,
    LetterboxPolicy,
    NaivePolicy,
    NativePolicy,
    get_policy,
)
from vitrail.registry import RESOLUTION_POLICIES

GREEN = (20, 140, 60)


def panel(image: Image.Image, policy, index: int = 1) -> np.ndarray:
    """Return the image area of one panel."""
    drawn = np.asarray(draw_token_grid(image, {"it": policy}))
    left = MARGIN + index * (PANEL_WIDTH + GAP)
    return drawn[HEAD : HEAD + PANEL_HEIGHT, left : left + PANEL_WIDTH]


def near(pixels: np.ndarray, colour: tuple[int, int, int], by: int = 40) -> np.ndarray:
    return np.abs(pixels.astype(int) - colour).max(-1) <= by


@pytest.mark.parametrize(("count", "columns", "rows"), [(1, 2, 1), (3, 4, 1), (4, 4, 2), (7, 4, 2)])
def test_layout(count, columns, rows):
    policies = {name: get_policy(name) for name in list(RESOLUTION_POLICIES)[:count]}
    width = 2 * MARGIN + columns * PANEL_WIDTH + (columns - 1) * GAP
    height = HEAD + rows * (PANEL_HEIGHT + CAPTION_HEIGHT) + (rows - 1) * GAP + FOOT
    assert draw_token_grid(Image.new("RGB", (30, 20)), policies).size == (width, height)


def test_captions():
    assert describe_layout("anyres", AnyResPolicy().layout(672, 672)) == "anyres · 5 views · 2,928 tokens"
    assert describe_layout("naive", NaivePolicy().layout(1, 1)) == "naive · 1 view · 576 tokens"
    assert describe_layout("one", NaivePolicy(image_size=14).layout(1, 1)) == "one · 1 view · 1 token"


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (NaivePolicy(), "336×336 px · 2.00× too tall"),
        (LetterboxPolicy(), "336×336 px · aspect kept · 50% padding"),
        (CropPolicy(), "336×336 px · aspect kept · 50% cropped"),
        (AnyResPolicy(), "overview + 2×1 tiles of 336×336 px · 2.00× too tall"),
        (AnyResPolicy(grids=((2, 2),)), "overview + 2×2 tiles of 336×336 px · 2.00× too tall · 40% padding"),
        (NativePolicy(), "392×196 px · aspect kept"),
        (get_policy("hd9"), "overview + 3×3 tiles of 336×336 px · aspect kept · 50% padding"),
        (TilesPolicy(), "overview + 2×1 tiles of 448×448 px · 2.00× too tall"),
        (TilesPolicy(max_tiles=1), "448×448 px · 2.00× too tall"),
        (CanvasPolicy(tile_size=210), "2×1 tiles of 210×210 px · aspect kept · 9% padding"),
        (CanvasPolicy(), "560×560 px · aspect kept · 50% padding"),
    ],
)
def test_sizes(policy, words):
    assert describe_sizes(policy.layout(200, 400)) == words


def test_sizes_of_a_strip():
    assert describe_sizes(CropPolicy().layout(1, 2000)).endswith("over 99% cropped")
    assert "too wide" in describe_sizes(NaivePolicy().layout(200, 100))


def test_padding_is_hatched_around_the_image():
    shown = panel(Image.new("RGB", (400, 200), GREEN), LetterboxPolicy(patch_size=112))[
        :, :PANEL_HEIGHT
    ]  # a square view, aligned with its caption
    band, middle = (
        shown[PANEL_HEIGHT // 16 : 3 * PANEL_HEIGHT // 16],
        shown[7 * PANEL_HEIGHT // 16 : 9 * PANEL_HEIGHT // 16],
    )
    assert near(band, sheet.PADDING_COLOURS[0]).mean() > 0.6 and not near(band, GREEN).any()
    assert near(middle, GREEN).mean() > 0.9


def test_cropped_regions_are_faded():
    pixels = panel(Image.new("RGB", (400, 200), GREEN), CropPolicy())
    middle, end = pixels[-40:-10, PANEL_WIDTH // 2 - 40 : PANEL_WIDTH // 2 + 40], pixels[-40:-10, 5:60]
    pale = tuple(round(0.28 * level + 0.72 * veil) for level, veil in zip(GREEN, sheet.CROPPED_COLOUR, strict=True))
    assert near(end, pale, 6).all()
    assert not near(middle, pale, 6).any()


@pytest.mark.parametrize("patch", [14, 28, 42])
def test_lines_separate_tokens(patch):
    """A horizontal line through the middle of a token crosses columns − 1 token lines."""
    pixels = panel(Image.new("RGB", (336, 336), "black"), NaivePolicy(patch_size=patch))[:, 2 : PANEL_HEIGHT - 2]
    count = 336 // patch
    row = pixels[round(PANEL_HEIGHT * (count // 2 + 0.5) / count)].max(-1) > 60
    assert (np.diff(row.astype(int)) == 1).sum() == count - 1


def test_lines_are_visible_on_a_white_image():
    pixels = panel(Image.new("RGB", (336, 336), "white"), NaivePolicy(patch_size=42))[:, 4 : PANEL_HEIGHT - 4]
    assert (pixels.max(-1) < 140).mean() > 0.01


@pytest.mark.parametrize(("size", "rows"), [((300, 300), 8), ((300, 200), 6)])
def test_newline_tokens_are_dots(size, rows):
    """One dot next to each remaining row, and nothing else."""
    image, policy = Image.new("RGB", size, "black"), AnyResPolicy(tile_size=56, grids=((2, 2),))
    assert policy.layout(*size[::-1]).spans[1].size[0] == rows
    neighbour = near(panel(image, policy), sheet.VIEW_COLOUR)[:, -6:].any(1)
    assert (np.diff(neighbour.astype(int), prepend=0) == 1).sum() == rows


def test_rejected_image_has_a_hatched_panel():
    pixels = panel(Image.new("RGB", (1000, 3), GREEN), NativePolicy())
    assert near(pixels, sheet.PADDING_COLOURS[0]).mean() > 0.5


HALVES = Image.new("RGB", (400, 200), GREEN)
HALVES.paste((150, 40, 30), (200, 0, 400, 200))


@pytest.mark.parametrize(
    ("policy", "before"),  # start of the tiles in tile widths, after the overview if any
    [
        (AnyResPolicy(grids=((1, 2),), patch_size=336), 1.16),
        (TilesPolicy(patch_size=224), 1.16),
        (CanvasPolicy(tile_size=200, patch_size=200, max_tiles=2), 0),
    ],
)
def test_tiles_are_side_by_side(policy, before):
    """With an image of two colours, each tile has one, wherever the overview is in the sequence."""
    pixels = panel(HALVES, policy)
    tile = PANEL_WIDTH / (before + 2.08)
    y = round(PANEL_HEIGHT - tile / 3)
    for at, colour in ((before + 0.3, GREEN), (before + 1.3, (150, 40, 30))):
        assert near(pixels[y, round(at * tile)], colour).all()
    if before:
        assert near(pixels[y, round(0.25 * tile)], GREEN).all()
        assert near(pixels[y, round(0.75 * tile)], (150, 40, 30)).all()


@settings(max_examples=60)
@given(st.sampled_from(["anyres", "hd9", "tiles", "canvas"]), st.integers(1, 3000), st.integers(1, 3000))
def test_overview_and_tiles_are_separated(name, height, width):
    cut = get_policy(name).layout(height, width)
    base, tiles = sheet._split_views(cut)
    wanted = {"anyres": 0, "hd9": 0, "tiles": len(cut.views) - 1, "canvas": None}[name]
    assert base == (0 if len(cut.views) == 1 else wanted)
    assert not tiles or np.prod(sheet._get_tile_grid(cut, tiles)) == len(tiles)


@pytest.mark.parametrize("size", [(1, 1), (1, 900), (900, 1), (3, 2000)])
def test_any_image_size_is_drawn(size):
    draw_token_grid(Image.new("RGB", size, GREEN))


def test_drawing_is_deterministic_and_keeps_the_input():
    image = Image.new("RGB", (50, 40), GREEN)
    first, second = (np.asarray(draw_token_grid(image)) for _ in range(2))
    assert np.array_equal(first, second)
    assert (np.asarray(image) == GREEN).all()


def test_every_character_has_a_glyph(monkeypatch):
    """Pillow's default font draws a box for missing glyphs."""
    drawn = []
    write = ImageDraw.ImageDraw.text
    monkeypatch.setattr(
        ImageDraw.ImageDraw, "text", lambda self, at, words, **how: (drawn.append(words), write(self, at, words, **how))
    )
    draw_token_grid(Image.new("RGB", (1000, 3)), title="a rather long title that must be cut short " * 6)
    font = ImageFont.load_default(20)
    missing = bytes(font.getmask("\uffff"))
    assert len(drawn) > 20 and any(words.endswith("…") for words in drawn)
    assert not [letter for letter in set("".join(drawn)) - {" "} if bytes(font.getmask(letter)) == missing]
