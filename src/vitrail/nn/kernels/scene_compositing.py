# pyrefly: ignore-errors
# (the checker takes a kernel's parameters for those of a Python function)
"""Triton kernel that composites scene objects over backgrounds in one launch, bit-identical to the torch renderer.

The torch implementation in `vitrail.data.scenes` makes about forty passes over all pixels per object, each through
device memory. This kernel composites all objects of a pixel in registers, and skips objects whose window does not touch
the block: outside its window an object is transparent.

B scenes, O object slots, H, W pixels
"""

from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitrail.errors import ImageError

INTERPRETED = triton.knobs.runtime.interpret
# Four channels in one int64, as in `vitrail.data.scenes`.
LOW, HALF = tl.constexpr(0x00FF00FF00FF00FF), tl.constexpr(0x0080008000800080)
OPACITY = tl.constexpr(0x00FF << 48)
BLOCK = 512  # pixels of a scene, a few lines


@triton.jit
def _shifted(lanes):
    return ((lanes + HALF) >> 8) & LOW


@triton.jit
def _lerp(a, b, share):
    return _shifted(a * (256 - share) + b * share)


@triton.jit
def _channel(packed, which: tl.constexpr):
    return (packed >> (16 * which)) & 0xFF


@triton.jit
def _shaded(layer, shade_ptr, stride):
    red, green, blue, opacity = _channel(layer, 0), _channel(layer, 1), _channel(layer, 2), _channel(layer, 3)
    out = layer & OPACITY
    for which in tl.static_range(3):
        row = shade_ptr + 4 * which * stride
        mixed = tl.load(row) * red + tl.load(row + stride) * green + tl.load(row + 2 * stride) * blue
        mixed = (mixed + tl.load(row + 3 * stride) * opacity + 2048) >> 12
        out |= tl.minimum(tl.maximum(mixed, 0), opacity) << (16 * which)
    return out


@triton.jit(do_not_specialize=["objects", "opacity"])
def _paint(
    canvas_ptr, out_ptr, texels_ptr, start_ptr, side_ptr, ink_ptr, light_ptr, tinted_ptr,
    x_texel_ptr, x_share_ptr, x_count_ptr, y_texel_ptr, y_share_ptr, y_low_ptr, y_count_ptr,
    shade_ptr, stride, objects, opacity, H, W, SHADED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    scene, block = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    at = block + tl.arange(0, BLOCK)
    inside = at < H * W
    row, column = at // W, at % W
    top, bottom = block // W, (block + BLOCK - 1) // W
    below = tl.load(canvas_ptr + scene * H * W + at, mask=inside, other=0)
    for slot in range(objects):
        item = scene * objects + slot
        low, lines = tl.load(y_low_ptr + item), tl.load(y_count_ptr + item)
        if (lines > 0) & (tl.load(x_count_ptr + item) > 0) & (low <= bottom) & (low + lines > top):
            side = tl.load(side_ptr + item)
            across = tl.load(x_share_ptr + item * W + column, mask=inside, other=0)
            down = tl.load(y_share_ptr + item * H + row, mask=inside, other=0)
            first = tl.load(start_ptr + item) + tl.load(y_texel_ptr + item * H + row, mask=inside, other=0) * side
            upper = texels_ptr + first + tl.load(x_texel_ptr + item * W + column, mask=inside, other=0)
            lower = upper + side
            a, b = tl.load(upper, mask=inside, other=0), tl.load(upper + 1, mask=inside, other=0)
            c, d = tl.load(lower, mask=inside, other=0), tl.load(lower + 1, mask=inside, other=0)
            layer = _lerp(_lerp(a, b, across), _lerp(c, d, across), down)
            if tl.load(tinted_ptr + item) > 0:
                share = _channel(layer, 0)
                mixed = tl.load(ink_ptr + item) * share
                mixed += tl.load(light_ptr + item) * (_channel(layer, 1) - share)
                layer = _shifted(mixed) + (layer & OPACITY)
            if SHADED:
                layer = _shaded(layer, shade_ptr + item, stride)
            if opacity < 256:
                layer = _shifted(layer * opacity)
            cover = _channel(layer, 3)
            below = _shifted(below * (256 - cover - (cover >> 7))) + layer
    for which in tl.static_range(3):
        place = out_ptr + (scene * 3 + which) * H * W + at
        tl.store(place, _channel(below, which).to(tl.uint8), mask=inside)


def composite_objects(
    canvas: Tensor,  # (B, H, W) packed, opaque
    texels: Tensor,
    objects: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],  # (B, O) each: start, side, ink, light, tinted
    x: tuple[Tensor, Tensor, Tensor, Tensor],  # (B, O, W) texel and share, (B, O) low and count
    y: tuple[Tensor, Tensor, Tensor, Tensor],  # (B, O, H), likewise
    shade: Tensor | None,  # (12, B, O)
    opacity: int,  # of 256
) -> Tensor:
    """Composite all objects of B scenes and return uint8 images (B, 3, H, W)."""
    if not canvas.is_cuda and not INTERPRETED:
        raise ImageError(f"the compositing kernel needs a GPU, and the scenes are on {canvas.device}", "omit `way`")
    B, H, W = canvas.shape
    O = objects[0].shape[1]
    out = torch.empty(B, 3, H, W, dtype=torch.uint8, device=canvas.device)
    start, side, ink, light, tinted = (part.long().contiguous() for part in objects)
    x_texel, x_share, _, x_count = (part.contiguous() for part in x)
    y_texel, y_share, y_low, y_count = (part.contiguous() for part in y)
    shades = canvas if shade is None else shade.contiguous()
    if B:
        with torch.cuda.device(canvas.device) if canvas.is_cuda else nullcontext():
            _paint[(B, triton.cdiv(H * W, BLOCK))](  # the first grid axis has the largest limit
                canvas.contiguous(), out, texels, start, side, ink, light, tinted,
                x_texel, x_share, x_count, y_texel, y_share, y_low, y_count,
                shades, B * O, O, opacity, H, W, SHADED=shade is not None, BLOCK=BLOCK,
            )  # fmt: skip
    return out
