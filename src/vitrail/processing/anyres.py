"""Policies that cut a picture into tiles of the tower's own size, beside one view of the whole."""

import math

from vitrail.errors import ConfigError
from vitrail.processing.cut import (
    Colour,
    Cut,
    Padded,
    Rectangle,
    Size,
    Span,
    View,
    centred_square,
    check_picture,
    square,
    whole,
)

# (rows, columns) of tiles. The order matters: the first of equals wins.
MOST = 1024  # tiles of a picture, and grids to choose from: beyond, a config is hostile or mistaken
GRIDS_NEXT: tuple[Size, ...] = ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3))
GRIDS_ONEVISION: tuple[Size, ...] = tuple((rows, columns) for rows in range(1, 7) for columns in range(1, 7))


class AnyRes(Padded, tag="anyres"):
    """LLaVA-NeXT: the whole picture squashed to one tile, then the picture at the best grid of tiles.

    The best grid keeps the most of the picture's pixels; among equals, the one with least padding. The picture is
    fitted into it with its aspect kept, centred on `fill` and cut in raster order. Tokens: the base view, then the
    tiles stitched, the rows or columns that lie in padding dropped, and a newline after each row.

    `max_tiles` is N of LLaVA-OneVision's anyres_max_N: more tokens than 1.1² × N tiles' worth are shrunk (bilinearly,
    on features) to about N tiles' worth.

    `pool` is the side of the blocks of which a video's frame is read as means (LLaVA-NeXT-Video: 2).

    Scales are taken in float64 exactly as the reference does, since its rounding decides tokens. One corner of it is
    worth knowing: a picture so thin that it is less than a token row high keeps none of its tiles' tokens when a tile
    has an even number of rows, and only the base view is read.
    """

    tile: int = 336
    patch: int = 14
    unread: int = 0
    grids: tuple[Size, ...] = GRIDS_NEXT
    max_tiles: int | None = None
    pool: int | None = None

    def __post_init__(self) -> None:
        square(self.tile, self.patch, self.unread, merge=1 if self.pool is None else self.pool)
        if not self.grids or min(map(min, self.grids)) < 1:
            raise ConfigError(f"AnyRes.grids is {self.grids}", "give (rows, columns) of tiles, at least one of each")
        most = max(rows * columns for rows, columns in self.grids)
        if most > MOST or len(self.grids) > MOST:
            raise ConfigError(f"AnyRes: {len(self.grids)} grids of up to {most:,} tiles", f"give {MOST} at most")
        if self.max_tiles is not None and self.max_tiles < 1:
            raise ConfigError(f"AnyRes.max_tiles is {self.max_tiles}", "give at least 1, or leave it out")
        if self.max_tiles is not None and self.pool is not None:
            raise ConfigError(
                f"AnyRes.max_tiles {self.max_tiles} and pool {self.pool} shrink a video's frames, each in its way",
                "give max_tiles as LLaVA-OneVision has it, or pool as LLaVA-NeXT-Video",
            )

    def cut(self, height: int, width: int) -> Cut:
        check_picture(height, width)
        grid = square(self.tile, self.patch, self.unread)
        rows, columns = self._best(height, width)
        canvas = (rows * self.tile, columns * self.tile)
        resized = _fit(height, width, canvas)
        top, left = (canvas[0] - resized[0]) // 2, (canvas[1] - resized[1]) // 2
        source, tile = (0, 0, height, width), (self.tile, self.tile)
        base = View(source=source, resized=tile, offset=(0, 0), canvas=tile, grid=grid)
        tiles = [
            View(
                source=source,
                resized=resized,
                offset=(top - row * self.tile, left - column * self.tile),
                canvas=tile,
                grid=grid,
            )
            for row in range(rows)
            for column in range(columns)
        ]
        window = _unpad(height, width, (rows * grid.rows, columns * grid.columns))
        size = _shrink(window[2:], self.max_tiles, grid.tokens) if self.max_tiles else window[2:]
        stitched = Span(first=1, layout=(rows, columns), window=window, size=size, newline="row")
        return Cut(height=height, width=width, views=(base, *tiles), spans=(whole(base), stitched))

    def film(self, frames: int) -> Cut:
        """A video of so many frames, a tile each. With `pool` one token is read of every block of a frame, and nothing
        stands between or behind them. Without, as LLaVA-OneVision reads it: a frame's tokens are shrunk (bilinearly) to
        half as many rows and columns, rounded up, and one newline stands behind the last frame."""
        grid, tile = square(self.tile, self.patch, self.unread, merge=self.pool or 1), (self.tile, self.tile)
        view = View(source=(0, 0, *tile), resized=tile, offset=(0, 0), canvas=tile, grid=grid)
        if self.pool is not None:
            spans = tuple(whole(view, first=n) for n in range(frames))
            return Cut(height=self.tile, width=self.tile, views=(view,) * frames, spans=spans)
        half = (math.ceil(grid.rows / 2), math.ceil(grid.columns / 2))
        spans = [whole(view, first=n, newline="end" if n == frames - 1 else "none") for n in range(frames)]
        halved = tuple(span.with_(size=half) for span in spans)
        return Cut(height=self.tile, width=self.tile, views=(view,) * frames, spans=halved)

    def _best(self, height: int, width: int) -> Size:
        def merit(shape: Size) -> tuple[int, int]:
            tall, wide = shape[0] * self.tile, shape[1] * self.tile
            scale = min(wide / width, tall / height)
            useful = min(int(width * scale) * int(height * scale), width * height)
            return useful, useful - tall * wide  # the second: minus what is wasted

        return max(self.grids, key=merit)


def _fit(height: int, width: int, canvas: Size) -> Size:
    """The largest size with the picture's aspect inside the canvas; the free side rounded up."""
    tall, wide = canvas
    by_width, by_height = wide / width, tall / height
    if by_width < by_height:
        return min(math.ceil(height * by_width), tall), wide
    return tall, min(math.ceil(width * by_height), wide)


def _unpad(height: int, width: int, tokens: Size) -> Rectangle:
    """The window of a token mosaic that holds the picture: as many rows (or columns) cut before as after."""
    rows, columns = tokens
    if width / height > columns / rows:
        kept = int(round(height * (columns / width), 7))
        cut = (rows - kept) // 2
        return cut, 0, rows - 2 * cut, columns
    kept = int(round(width * (rows / height), 7))
    cut = (columns - kept) // 2
    return 0, cut, rows, columns - 2 * cut


def _shrink(tokens: Size, max_tiles: int, tile_tokens: int) -> Size:
    rows, columns = tokens
    ratio = math.sqrt(rows * columns / (max_tiles * tile_tokens))
    return (int(rows // ratio), int(columns // ratio)) if ratio > 1.1 else tokens


class HD9(Padded, tag="hd9"):
    """HD-9 of "Token scaling": nine local views in a 3 × 3 grid and a global one, 10 × 144 + 10 = 1450 tokens.

    24 × 24 patches of a 336² view become 12 × 12 tokens by a 3 × 3 convolution of stride 2 and padding 1, and each
    view is closed by a newline. The count does not depend on the picture.

    The text says that the global view is made "through padding and zooming" and that the local views divide "the
    processed image". It leaves open, and this is chosen here: the grid is always 3 × 3 (the only reading in which
    every picture has 1450 tokens; the method it follows, InternLM-XComposer2-4KHD, takes as many tiles as the aspect
    asks for); the picture is centred on a square before it is zoomed, to 1008² and to 336²; the padding is white, as
    in 4KHD; the global view comes first; bicubic.
    """

    fill: Colour = (255, 255, 255)
    tile: int = 336
    patch: int = 14
    merge: int = 2

    def __post_init__(self) -> None:
        square(self.tile, self.patch, merge=self.merge)

    def cut(self, height: int, width: int) -> Cut:
        check_picture(height, width)
        grid = square(self.tile, self.patch, merge=self.merge)
        source = centred_square(height, width)
        tile, full = (self.tile, self.tile), (3 * self.tile, 3 * self.tile)
        views = [View(source=source, resized=tile, offset=(0, 0), canvas=tile, grid=grid)]
        views += [
            View(source=source, resized=full, offset=(-row * self.tile, -column * self.tile), canvas=tile, grid=grid)
            for row in range(3)
            for column in range(3)
        ]
        spans = tuple(whole(view, first=index, newline="end") for index, view in enumerate(views))
        return Cut(height=height, width=width, views=tuple(views), spans=spans)
