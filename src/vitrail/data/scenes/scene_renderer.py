"""Scene renderer: scenes to pixels and object masks, on the device of the scenes, at any resolution.

The renderer interpolates sprites from the atlas level nearest to their size and blends them from far to near in sRGB,
like Pillow and browsers. It uses integers only, so the pixels are bit-identical on every device and in any batch.

Three methods give the same pixels:

- "windows" samples a sprite only inside its box. The host reads the window sizes once per chunk.
- "everywhere" samples every sprite at every pixel. This is far more work, but needs no synchronization, and
  `torch.compile` reduces it to a few kernels.
- "fused" is one GPU kernel, which samples a sprite only inside its box and needs no synchronization.

Shapes: B scenes, O object slots, H × W pixels, L lines of windows, P pixels of windows.
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from vitrail.data.scenes.appearance import Appearance
from vitrail.data.scenes.atlas import Atlas
from vitrail.data.scenes.backgrounds import render_backgrounds
from vitrail.data.scenes.packed_pixels import (
    apply_colour_matrix,
    apply_tint,
    blend_over,
    extract_channel,
    lerp,
    scale_layer,
    to_rgb_bytes,
)
from vitrail.data.scenes.scene import GRID, SceneBatch
from vitrail.data.scenes.sprite_textures import SpriteTextures
from vitrail.errors import ImageError
from vitrail.nn.kernels import HAS_TRITON

CHUNK_PIXELS = {"cpu": 1 << 20, "cuda": 1 << 24}  # pixels per chunk
_MIN_TEXELS_PER_PIXEL = (
    4,
    3,
)  # minimum texels per pixel of the chosen level, as a fraction: a compromise between sharp and smooth

RenderMethod = Literal["windows", "everywhere"]


class ObjectMasks(NamedTuple):
    """Coverage of each pixel by each object, 0…255."""

    amodal: Tensor  # uint8 (B, O, H, W): full object, ignoring occlusion
    visible: Tensor  # uint8 (B, O, H, W): part not covered by nearer objects
    background: Tensor  # uint8 (B, H, W): part not covered by any object; adds up to 255 with `visible`


def render_scenes(
    scenes: SceneBatch,
    atlas: Atlas,
    size: int | tuple[int, int],
    method: RenderMethod | Literal["fused"] | None = None,
    opacity: float = 1.0,
    appearance: Appearance | None = None,
) -> Tensor:
    """Render scenes to uint8 (B, 3, H, W).

    size        image size or (H, W)
    method      rendering method; default: the fastest without synchronization on this device
    opacity     opacity of all objects
    appearance  appearance augmentation of the objects
    """
    H, W = _to_height_width(size)
    method = _default_method(scenes.box.device) if method is None else method
    share = round(256 * opacity)
    out = scenes.box.new_empty(len(scenes), 3, H, W, dtype=torch.uint8)
    for rows, objects in _iter_chunks(scenes, atlas, H, W, appearance):
        canvas = render_backgrounds(scenes.background[rows], H, W)
        if method == "fused":
            out[rows] = objects.blend_fused(canvas, share)
            continue
        flat = canvas.view(-1)
        for places, layer in objects.iter_layers(method):
            layer = layer if share == 256 else scale_layer(layer, share)
            if places is None:
                canvas = blend_over(layer, canvas)
            else:
                flat.scatter_(0, places, blend_over(layer, _gather_flat(flat, places)))
        out[rows] = to_rgb_bytes(canvas)
    return out


def render_masks(
    scenes: SceneBatch,
    atlas: Atlas,
    size: int | tuple[int, int],
    method: RenderMethod = "windows",
    appearance: Appearance | None = None,
) -> ObjectMasks:
    """Render the amodal and visible masks of all objects."""
    H, W = _to_height_width(size)
    B, O = scenes.sprite.shape
    whole = scenes.box.new_zeros(B, O, H, W, dtype=torch.uint8)
    for rows, objects in _iter_chunks(scenes, atlas, H, W, appearance):
        for slot, (places, layer) in enumerate(objects.iter_layers(method)):
            if places is None:
                whole[rows, slot] = extract_channel(layer, 3)
            else:
                part = whole.new_zeros(rows.stop - rows.start, H, W)
                part.view(-1).scatter_(0, places, extract_channel(layer, 3).byte())
                whole[rows, slot] = part
    visible = torch.empty_like(whole)
    left = whole.new_full((B, H, W), 255, dtype=torch.int32)
    for slot in reversed(range(O)):  # nearest first
        taken = (left * whole[:, slot] + 127) // 255
        visible[:, slot] = taken
        left = left - taken
    return ObjectMasks(whole, visible, left.byte())


def _to_height_width(size: int | tuple[int, int]) -> tuple[int, int]:
    H, W = (size, size) if isinstance(size, int) else size
    if min(H, W) < 1 or max(H, W) > 8192:
        raise ImageError(f"the image size is {H} × {W} pixels", "give sides of 1 to 8,192 pixels")
    return H, W


def _default_method(device: torch.device) -> RenderMethod | Literal["fused"]:
    if device.type == "cpu":
        return "windows"
    return "fused" if HAS_TRITON and device.type == "cuda" and not torch.compiler.is_compiling() else "everywhere"


def _iter_chunks(
    scenes: SceneBatch, atlas: Atlas, H: int, W: int, look: Appearance | None
) -> Iterator[tuple[slice, "_ObjectTextures"]]:
    """Yield slices of the batch with their prepared objects."""
    device = scenes.box.device
    if device != atlas.table.concept.device:
        raise ImageError(
            f"the scenes are on {device} and the atlas is on {atlas.table.concept.device}",
            "move one with .to(device)",
        )
    step = max(1, CHUNK_PIXELS.get(device.type, CHUNK_PIXELS["cuda"]) // (H * W))
    for start in range(0, len(scenes), step):
        rows = slice(start, min(start + step, len(scenes)))
        appearance = (
            None if look is None else Appearance(look.is_mirrored[rows], look.bend[rows], look.colour_matrix[:, rows])
        )
        yield rows, _ObjectTextures(scenes[rows], atlas.textures, atlas.table.aspect, H, W, appearance)


class _AxisAppearance(NamedTuple):
    """Distortion and flip along one axis of a box."""

    bend: Tensor  # (B, O) in 1/256
    mirrored: Tensor | None  # (B, O), for the horizontal axis

    def along(self, at: Tensor, size: Tensor) -> Tensor:
        """Map coordinates (B, O, pixels) in 0 … `size` (B, O, 1). The ends and outer coordinates stay fixed."""
        within = at.clamp(min=0).minimum(size)
        at = at + self.bend[..., None] * within * (size - within) // (256 * size.clamp(min=1))
        return at if self.mirrored is None else torch.where(self.mirrored[..., None], size - at, at)


class _Axis(NamedTuple):
    """Texel coordinates of every pixel along one image axis, for each object."""

    texel: Tensor  # (B, O, pixels): texel before the pixel's centre
    share: Tensor  # (B, O, pixels): weight of the next texel, 0…256
    low: Tensor  # (B, O): first pixel of the object's window
    count: Tensor  # (B, O): number of pixels of the window, 0 in an empty slot

    @classmethod
    def of(
        cls,
        low: Tensor,
        high: Tensor,
        aspect: Tensor,
        side: Tensor,
        pixels: int,
        appearance: "_AxisAppearance | None" = None,
    ) -> "_Axis":
        """Compute the coordinates from the box ends (B, O).

        Outside of a box, both texels are in the transparent rim of the cell. In an empty slot, this is everywhere.
        """
        centre = (2 * torch.arange(pixels, device=low.device) + 1) * GRID  # in 1/(2 · GRID · pixels) of the image
        scale = (256 * (side - 2) * aspect)[..., None]
        along = (centre - 2 * pixels * low[..., None]) * scale
        along = along // (2 * pixels * GRID * (high - low).clamp(min=1)[..., None])
        if appearance is not None:
            along = appearance.along(along, (scale[..., 0] // GRID)[..., None])
        at = 128 + along  # texel centres are at halves
        last = side[..., None] - 1
        at = torch.minimum(at.clamp(min=0), last << 8)
        texel = torch.minimum(at >> 8, last - 1)
        # Sampling reaches 1.5 texels beyond the box: the last partial texel, and half of the next one.
        reach = 3 * (high - low) * pixels * GRID // (2 * (side - 2) * aspect) + 1
        first = ((low * pixels - reach) // GRID).clamp(min=0)
        end = -((-high * pixels - reach) // GRID)
        return cls(texel, at - (texel << 8), first, (end.clamp(max=pixels) - first).clamp(min=0) * (high > low))


class _ObjectTextures:
    """Texel positions and sampling coordinates of the objects of a chunk."""

    def __init__(
        self, scenes: SceneBatch, texture: SpriteTextures, aspect: Tensor, H: int, W: int, look: Appearance | None
    ):
        sprite, colour = scenes.sprite.clamp(min=0), scenes.colour  # (B, O)
        x0, y0, x1, y1 = scenes.box.unbind(-1)
        longest = torch.maximum((x1 - x0) * W, (y1 - y0) * H)  # (B, O), in 1/GRID of a pixel
        texels, pixels = _MIN_TEXELS_PER_PIXEL
        level = (longest[..., None] * texels > (texture.cell_size[:-1] - 2) * GRID * pixels).sum(-1)
        self.shape, self.texels = (len(scenes), H, W), texture.texels
        self.side = texture.cell_size[level]
        self.tinted = colour > 0
        self.start = texture.level_start[level] + (sprite + self.tinted * len(aspect)) * self.side * self.side
        self.ink, self.light = texture.tint_colour[colour], texture.tint_highlight[texture.is_word[sprite], colour]
        wide, high = aspect[sprite].unbind(-1)
        self.look = look
        across = None if look is None else _AxisAppearance(look.bend[..., 0], look.is_mirrored)
        down = None if look is None else _AxisAppearance(look.bend[..., 1], None)
        self.x = _Axis.of(x0, x1, wide, self.side, W, across)
        self.y = _Axis.of(y0, y1, high, self.side, H, down)

    def blend_fused(self, canvas: Tensor, share: int) -> Tensor:
        """Blend all objects over a packed canvas (B, H, W) with the fused kernel: uint8 (B, 3, H, W)."""
        from vitrail.nn.kernels.scene_compositing import composite_objects

        objects = (self.start, self.side, self.ink, self.light, self.tinted)
        shade = None if self.look is None else self.look.colour_matrix
        return composite_objects(canvas, self.texels, objects, self.x, self.y, shade, share)

    def iter_layers(self, way: RenderMethod) -> Iterator[tuple[Tensor | None, Tensor]]:
        """Yield the layers from far to near: flat pixel indices (None: all pixels) and packed pixels."""
        if way not in ("windows", "everywhere"):
            raise ImageError(
                f"unknown rendering method {way!r}", "give windows or everywhere; render_scenes also takes fused"
            )
        return self._sample_windows() if way == "windows" else self._sample_everywhere()

    def _sample_everywhere(self) -> Iterator[tuple[None, Tensor]]:
        """Yield the pixels (B, H, W) of each slot."""
        for slot in range(self.side.shape[1]):
            objects = (self.start, self.side, self.ink, self.light, self.tinted)
            start, side, ink, light, coloured = (t[:, slot, None, None] for t in objects)
            first = (start + self.y.texel[:, slot, :, None] * side) + self.x.texel[:, slot, None, :]
            layer = self._interpolate(first, side, self.x.share[:, slot, None, :], self.y.share[:, slot, :, None])
            layer = torch.where(coloured, apply_tint(layer, ink, light), layer)
            yield (
                None,
                layer
                if self.look is None
                else apply_colour_matrix(layer, self.look.colour_matrix[:, :, slot, None, None]),
            )

    def _sample_windows(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield for each slot the pixel indices (P,) in the flattened (B, H, W) of its objects, and the pixels (P,)."""
        pixels = self.x.count * self.y.count
        sizes = torch.stack([self.y.count.sum(0), pixels.sum(0), (pixels * self.tinted).sum(0)], 1)  # (O, 3)
        for slot, (lines, total, coloured) in enumerate(sizes.tolist()):
            yield self._sample_window(slot, lines, total, coloured)

    def _sample_window(self, slot: int, lines: int, pixels: int, num_coloured: int) -> tuple[Tensor, Tensor]:
        """Sample the windows of one slot, split into lines and pixels. Tinted objects come first."""
        _, H, W = self.shape
        x, y = (_Axis(*(part[:, slot] for part in axis)) for axis in (self.x, self.y))
        scene = self.tinted[:, slot].long().argsort(descending=True, stable=True)
        scene, row = _expand_runs(scene, y.count[scene], y.low[scene], lines)  # (L,)
        line = torch.arange(lines, device=scene.device)
        line, column = _expand_runs(line, x.count[scene], x.low[scene], pixels)  # (P,)
        side, at = self.side[scene, slot], scene * H + row
        first = self.start[scene, slot] + _gather_flat(y.texel, at) * side
        at_column = _gather_flat(scene * W, line) + column
        layer = self._interpolate(
            _gather_flat(first, line) + _gather_flat(x.texel, at_column),
            _gather_flat(side, line),
            _gather_flat(x.share, at_column),
            _gather_flat(_gather_flat(y.share, at), line),
        )
        if num_coloured:
            whose = _gather_flat(scene, line[:num_coloured])
            layer[:num_coloured] = apply_tint(layer[:num_coloured], self.ink[whose, slot], self.light[whose, slot])
        if self.look is not None:
            layer = apply_colour_matrix(layer, self.look.colour_matrix[:, :, slot][:, _gather_flat(scene, line)])
        return _gather_flat(at * W, line) + column, layer

    def _interpolate(self, first: Tensor, side: Tensor, across: Tensor, down: Tensor) -> Tensor:
        """Interpolate between four texels. `first` is the upper left."""
        below = first + side
        upper = lerp(_gather_flat(self.texels, first), _gather_flat(self.texels, first + 1), across)
        lower = lerp(_gather_flat(self.texels, below), _gather_flat(self.texels, below + 1), across)
        return lerp(upper, lower, down)


def _expand_runs(items: Tensor, counts: Tensor, low: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Repeat each item (n,) by its count → (total,), with running numbers low, low + 1, … per item."""
    offset = low - counts.cumsum(0) + counts
    repeated, offset = (t.repeat_interleave(counts, output_size=total) for t in (items, offset))
    return repeated, torch.arange(total, device=items.device) + offset


def _gather_flat(values: Tensor, places: Tensor) -> Tensor:
    """Return the values at flat indices. On a CPU, this is several times faster than indexing."""
    return values.reshape(-1).index_select(0, places.reshape(-1)).view(places.shape)
