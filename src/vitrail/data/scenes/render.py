"""Scenes → pixels and masks, on the device of the scenes, at any resolution.

Sprites are read between the texels of the level nearest their size and laid one over another, farthest first, in sRGB
as Pillow and browsers do. All in whole numbers: the pixels of a scene are the same bits on every device and in any
batch.

There are three ways to the same pixels. "windows" reads a sprite only where it lies; the host learns the windows' sizes
once a chunk. "everywhere" reads every sprite at every pixel: far more work, but nothing waits for the host, and
`torch.compile` can make it a few kernels. "fused" is one kernel on a GPU, which reads a sprite where it lies and waits
for nobody.

B scenes, O object slots, H, W pixels, L lines of windows, P pixels of windows.
"""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from vitrail.data.scenes.backgrounds import backdrop
from vitrail.data.scenes.lanes import bytes_of, channel, faded, lerp, over, shaded, tinted
from vitrail.data.scenes.looks import Look
from vitrail.data.scenes.scene import GRID, Scenes
from vitrail.data.scenes.sprites import Atlas
from vitrail.data.scenes.texture import Texture
from vitrail.errors import ImageError

CHUNK = {"cpu": 1 << 20, "cuda": 1 << 24}  # pixels worked on at once
_FUSED = find_spec("triton") is not None
_FINE = (4, 3)  # texels a pixel, at least, of the level that is read: between the sharpest and the smoothest

Way = Literal["windows", "everywhere"]


class Masks(NamedTuple):
    """How far each object covers each pixel, 0…255."""

    whole: Tensor  # uint8 (B, O, H, W): as if it were alone
    visible: Tensor  # uint8 (B, O, H, W): what nearer objects leave of it
    background: Tensor  # uint8 (B, H, W): what all objects leave; with `visible` it adds up to 255


def render(
    scenes: Scenes,
    atlas: Atlas,
    size: int | tuple[int, int],
    way: Way | Literal["fused"] | None = None,
    opacity: float = 1.0,
    look: Look | None = None,
) -> Tensor:
    """uint8 (B, 3, H, W). `size` is a side or (H, W); without a `way` it is the fastest of the device that asks it for
    nothing; `opacity` is that of all objects; `look` says how each differs from how it was designed."""
    H, W = _size(size)
    way = _fastest(scenes.box.device) if way is None else way
    share = round(256 * opacity)
    out = scenes.box.new_empty(len(scenes), 3, H, W, dtype=torch.uint8)
    for rows, objects in _chunks(scenes, atlas, H, W, look):
        canvas = backdrop(scenes.background[rows], H, W)
        if way == "fused":
            out[rows] = objects.laid_over(canvas, share)
            continue
        flat = canvas.view(-1)
        for places, layer in objects.slots(way):
            layer = layer if share == 256 else faded(layer, share)
            if places is None:
                canvas = over(layer, canvas)
            else:
                flat.scatter_(0, places, over(layer, _take(flat, places)))
        out[rows] = bytes_of(canvas)
    return out


def masks(
    scenes: Scenes, atlas: Atlas, size: int | tuple[int, int], way: Way = "windows", look: Look | None = None
) -> Masks:
    """How far every object, whole or as it is seen, covers every pixel."""
    H, W = _size(size)
    B, O = scenes.sprite.shape
    whole = scenes.box.new_zeros(B, O, H, W, dtype=torch.uint8)
    for rows, objects in _chunks(scenes, atlas, H, W, look):
        for slot, (places, layer) in enumerate(objects.slots(way)):
            if places is None:
                whole[rows, slot] = channel(layer, 3)
            else:
                part = whole.new_zeros(rows.stop - rows.start, H, W)
                part.view(-1).scatter_(0, places, channel(layer, 3).byte())
                whole[rows, slot] = part
    visible = torch.empty_like(whole)
    left = whole.new_full((B, H, W), 255, dtype=torch.int32)
    for slot in reversed(range(O)):  # nearest first
        taken = (left * whole[:, slot] + 127) // 255
        visible[:, slot] = taken
        left = left - taken
    return Masks(whole, visible, left.byte())


def _size(size: int | tuple[int, int]) -> tuple[int, int]:
    H, W = (size, size) if isinstance(size, int) else size
    if min(H, W) < 1 or max(H, W) > 8192:
        raise ImageError(f"a picture of {H} × {W} pixels", "give sides of 1 to 8,192 pixels")
    return H, W


def _fastest(device: torch.device) -> Way | Literal["fused"]:
    if device.type == "cpu":
        return "windows"
    return "fused" if _FUSED and device.type == "cuda" and not torch.compiler.is_compiling() else "everywhere"


def _chunks(scenes: Scenes, atlas: Atlas, H: int, W: int, look: Look | None) -> Iterator[tuple[slice, "_Objects"]]:
    """Rows of the batch, and their objects."""
    device = scenes.box.device
    if device != atlas.table.concept.device:
        raise ImageError(
            f"scenes on {device} and an atlas on {atlas.table.concept.device}", "move one with .to(device)"
        )
    step = max(1, CHUNK.get(device.type, CHUNK["cuda"]) // (H * W))
    for start in range(0, len(scenes), step):
        rows = slice(start, min(start + step, len(scenes)))
        worn = None if look is None else Look(look.mirrored[rows], look.bend[rows], look.shade[:, rows])
        yield rows, _Objects(scenes[rows], atlas.texture, atlas.table.aspect, H, W, worn)


class _Worn(NamedTuple):
    """How a look moves what lies along one side of a box."""

    bend: Tensor  # (B, O) in 1/256
    mirrored: Tensor | None  # (B, O), of the side from left to right

    def along(self, at: Tensor, whole: Tensor) -> Tensor:
        """(B, O, pixels) from 0 to `whole` (B, O, 1): the ends stay where they are, and what lies beyond"""
        within = at.clamp(min=0).minimum(whole)
        at = at + self.bend[..., None] * within * (whole - within) // (256 * whole.clamp(min=1))
        return at if self.mirrored is None else torch.where(self.mirrored[..., None], whole - at, at)


class _Axis(NamedTuple):
    """For every pixel along one side of the picture: which texel of each object it reads."""

    texel: Tensor  # (B, O, pixels): the one before the pixel's centre
    share: Tensor  # (B, O, pixels): of the one behind it, 0…256
    low: Tensor  # (B, O): the first pixel of the object's window
    count: Tensor  # (B, O): the pixels of its window, 0 in an empty slot

    @classmethod
    def of(
        cls, low: Tensor, high: Tensor, aspect: Tensor, side: Tensor, pixels: int, worn: "_Worn | None" = None
    ) -> "_Axis":
        """From the ends of the boxes (B, O). Beyond a box both texels are in the cell's transparent rim; so they are
        everywhere in an empty slot."""
        centre = (2 * torch.arange(pixels, device=low.device) + 1) * GRID  # in 1/(2 · GRID · pixels) of the picture
        scale = (256 * (side - 2) * aspect)[..., None]
        along = (centre - 2 * pixels * low[..., None]) * scale
        along = along // (2 * pixels * GRID * (high - low).clamp(min=1)[..., None])
        if worn is not None:
            along = worn.along(along, (scale[..., 0] // GRID)[..., None])
        at = 128 + along  # texel centres lie at halves
        last = side[..., None] - 1
        at = torch.minimum(at.clamp(min=0), last << 8)
        texel = torch.minimum(at >> 8, last - 1)
        # Sampling reaches three half texels beyond the box: what holds its last fraction, and halfway into the next.
        reach = 3 * (high - low) * pixels * GRID // (2 * (side - 2) * aspect) + 1
        first = ((low * pixels - reach) // GRID).clamp(min=0)
        end = -((-high * pixels - reach) // GRID)
        return cls(texel, at - (texel << 8), first, (end.clamp(max=pixels) - first).clamp(min=0) * (high > low))


class _Objects:
    """Where the texels of each object lie, and how the picture's lines and columns read them."""

    def __init__(self, scenes: Scenes, texture: Texture, aspect: Tensor, H: int, W: int, look: Look | None):
        sprite, colour = scenes.sprite.clamp(min=0), scenes.colour  # (B, O)
        x0, y0, x1, y1 = scenes.box.unbind(-1)
        longest = torch.maximum((x1 - x0) * W, (y1 - y0) * H)  # (B, O), in 1/GRID of a pixel
        texels, pixels = _FINE
        level = (longest[..., None] * texels > (texture.side[:-1] - 2) * GRID * pixels).sum(-1)
        self.shape, self.texels = (len(scenes), H, W), texture.texels
        self.side = texture.side[level]
        self.tinted = colour > 0
        self.start = texture.start[level] + (sprite + self.tinted * len(aspect)) * self.side * self.side
        self.ink, self.light = texture.ink[colour], texture.light[texture.word[sprite], colour]
        wide, high = aspect[sprite].unbind(-1)
        self.look = look
        across = None if look is None else _Worn(look.bend[..., 0], look.mirrored)
        down = None if look is None else _Worn(look.bend[..., 1], None)
        self.x = _Axis.of(x0, x1, wide, self.side, W, across)
        self.y = _Axis.of(y0, y1, high, self.side, H, down)

    def laid_over(self, canvas: Tensor, share: int) -> Tensor:
        """(B, H, W) packed → uint8 (B, 3, H, W)"""
        from vitrail.nn.kernels.paint import paint

        objects = (self.start, self.side, self.ink, self.light, self.tinted)
        shade = None if self.look is None else self.look.shade
        return paint(canvas, self.texels, objects, self.x, self.y, shade, share)

    def slots(self, way: Way) -> Iterator[tuple[Tensor | None, Tensor]]:
        """From the farthest: places, or None for everywhere, and the packed layer"""
        if way not in ("windows", "everywhere"):
            raise ImageError(
                f"scenes cannot be drawn by {way!r}", "give windows or everywhere; render also takes fused"
            )
        return self._in_windows() if way == "windows" else self._everywhere()

    def _everywhere(self) -> Iterator[tuple[None, Tensor]]:
        """For each slot (B, H, W) what it shows at every pixel"""
        for slot in range(self.side.shape[1]):
            objects = (self.start, self.side, self.ink, self.light, self.tinted)
            start, side, ink, light, coloured = (t[:, slot, None, None] for t in objects)
            first = (start + self.y.texel[:, slot, :, None] * side) + self.x.texel[:, slot, None, :]
            layer = self._read(first, side, self.x.share[:, slot, None, :], self.y.share[:, slot, :, None])
            layer = torch.where(coloured, tinted(layer, ink, light), layer)
            yield None, layer if self.look is None else shaded(layer, self.look.shade[:, :, slot, None, None])

    def _in_windows(self) -> Iterator[tuple[Tensor, Tensor]]:
        """For each slot (P,) places in the flattened (B, H, W) where its objects lie, and (P,) what they show there"""
        pixels = self.x.count * self.y.count
        sizes = torch.stack([self.y.count.sum(0), pixels.sum(0), (pixels * self.tinted).sum(0)], 1)  # (O, 3)
        for slot, (lines, total, coloured) in enumerate(sizes.tolist()):
            yield self._window(slot, lines, total, coloured)

    def _window(self, slot: int, lines: int, pixels: int, coloured: int) -> tuple[Tensor, Tensor]:
        """Windows are cut into lines, and lines into pixels; those of tinted objects come first."""
        _, H, W = self.shape
        x, y = (_Axis(*(part[:, slot] for part in axis)) for axis in (self.x, self.y))
        scene = self.tinted[:, slot].long().argsort(descending=True, stable=True)
        scene, row = _runs(scene, y.count[scene], y.low[scene], lines)  # (L,)
        line = torch.arange(lines, device=scene.device)
        line, column = _runs(line, x.count[scene], x.low[scene], pixels)  # (P,)
        side, at = self.side[scene, slot], scene * H + row
        first = self.start[scene, slot] + _take(y.texel, at) * side
        at_column = _take(scene * W, line) + column
        layer = self._read(
            _take(first, line) + _take(x.texel, at_column),
            _take(side, line),
            _take(x.share, at_column),
            _take(_take(y.share, at), line),
        )
        if coloured:
            whose = _take(scene, line[:coloured])
            layer[:coloured] = tinted(layer[:coloured], self.ink[whose, slot], self.light[whose, slot])
        if self.look is not None:
            layer = shaded(layer, self.look.shade[:, :, slot][:, _take(scene, line)])
        return _take(at * W, line) + column, layer

    def _read(self, first: Tensor, side: Tensor, across: Tensor, down: Tensor) -> Tensor:
        """Between four texels, of which `first` is the upper left."""
        below = first + side
        upper = lerp(_take(self.texels, first), _take(self.texels, first + 1), across)
        lower = lerp(_take(self.texels, below), _take(self.texels, below + 1), across)
        return lerp(upper, lower, down)


def _runs(items: Tensor, counts: Tensor, low: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """(n,) → (total,) each item as often as its count says, and beside it low, low + 1, …"""
    begin = low - counts.cumsum(0) + counts
    repeated, begin = (t.repeat_interleave(counts, output_size=total) for t in (items, begin))
    return repeated, torch.arange(total, device=items.device) + begin


def _take(values: Tensor, places: Tensor) -> Tensor:
    """The values at these places of the flattened tensor; several times as fast on a CPU as indexing."""
    return values.reshape(-1).index_select(0, places.reshape(-1)).view(places.shape)
