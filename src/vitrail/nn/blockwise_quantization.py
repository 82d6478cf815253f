"""Block-wise quantization as in bitsandbytes: 8-bit dynamic codes, and NF4 weights with double quantization.

    8 bits  value ≈ map[code] · s, with s the largest magnitude of a block of 256 values
    NF4     value ≈ table[code] · s, with s of a block of 64 values; s minus its mean is stored with 8 bits

Codes and scales are those of bitsandbytes, except where a value is about as near to two codes. So an adapter that is
trained on NF4 weights here fits that library's NF4 weights.

n values, b blocks of 64, O outputs, I inputs
"""

from collections.abc import Callable
from functools import cache
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BLOCK, NF4_BLOCK = 256, 64
CHUNK = 2**24  # values that are (de)quantized at a time, which limits the size of temporary float32 copies

# Quantiles of a normal distribution, with an exact 0 (Dettmers et al. 2023, QLoRA, appendix E).
NF4_TABLE = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


@cache
def make_dynamic_map(signed: bool, device: torch.device) -> Tensor:
    """Return the 256 values of the dynamic 8-bit type in ascending order.

    A code has a decimal exponent of −6 … 0 and a fraction: a larger exponent leaves more bits for the fraction.
    """
    values = [0.0, 1.0]
    for i in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (i if signed else i + 1) + 1)
        means = (10.0 ** (i - 6) * ((edges[:-1] + edges[1:]) / 2)).tolist()
        values += means + ([-x for x in means] if signed else [])
    return torch.tensor(sorted(values), device=device)


@cache
def make_nf4_table(device: torch.device) -> Tensor:
    """Return the 16 values of NF4."""
    return torch.tensor(NF4_TABLE, device=device)


@cache
def _nf4_pairs(device: torch.device) -> Tensor:
    """Return the two values of each byte, (256, 2): the first is in the high bits."""
    byte, table = torch.arange(256, device=device), make_nf4_table(device)
    return torch.stack([table[byte >> 4], table[byte & 15]], -1)


def _find_nearest(x: Tensor, table: Tensor) -> Tensor:
    """Return the index of the nearest entry of an ascending table."""
    return torch.bucketize(x, (table[1:] + table[:-1]) / 2, out_int32=True)


def _scale_blocks(values: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Divide n values by the largest magnitude of their block. Returns (blocks, block) padded with 0, and (blocks,)."""
    blocks = F.pad(values.float(), (0, -len(values) % block)).view(-1, block)
    scales = blocks.abs().amax(1)
    return (blocks * torch.where(scales > 0, 1 / scales, 0)[:, None]).clamp_(-1, 1), scales


def quantize_blockwise(values: Tensor, signed: bool = True, block: int = BLOCK) -> tuple[Tensor, Tensor]:
    """Quantize n values to 8 bits: codes (n,) and the scale of every block."""
    table = make_dynamic_map(signed, values.device)
    codes, scales = [], []
    for part in values.split(CHUNK):
        scaled, scale = _scale_blocks(part, block)
        codes.append(_find_nearest(scaled.flatten(), table)[: len(part)].to(torch.uint8))
        scales.append(scale)
    return torch.cat(codes), torch.cat(scales)


def dequantize_blockwise(codes: Tensor, scales: Tensor, signed: bool = True, block: int = BLOCK) -> Tensor:
    """Return the n values in float32."""
    table = make_dynamic_map(signed, codes.device)
    values = [
        (F.pad(table[part.int()], (0, -len(part) % block)).view(-1, block) * scale[:, None]).flatten()[: len(part)]
        for part, scale in zip(codes.split(CHUNK), scales.split(CHUNK // block), strict=True)
    ]
    return torch.cat(values)


class NF4Weight(nn.Module):
    """A frozen weight with 4 bits for each value, and about 0.13 bits for the scales.

    codes         (n/2,) uint8, two codes each, the first in the high bits
    scale_codes   (b,) uint8, 8-bit codes of the scales minus their mean
    scale_scales  (b/256,) float32 scales of these codes
    scale_mean    () float32
    """

    codes: Tensor
    scale_codes: Tensor
    scale_scales: Tensor
    scale_mean: Tensor

    def __init__(self, shape: torch.Size, device: torch.device):
        super().__init__()
        self.shape = shape
        blocks = -(-self.numel // NF4_BLOCK)
        self.register_buffer("codes", torch.empty((self.numel + 1) // 2, dtype=torch.uint8, device=device))
        self.register_buffer("scale_codes", torch.empty(blocks, dtype=torch.uint8, device=device))
        self.register_buffer("scale_scales", torch.empty(-(-blocks // BLOCK), device=device))
        self.register_buffer("scale_mean", torch.empty((), device=device))

    @property
    def numel(self) -> int:
        return self.shape.numel()

    @classmethod
    @torch.no_grad()
    def quantize(cls, weight: Tensor) -> Self:
        """Quantize a weight on its device. On the meta device, only the sizes are set."""
        made = cls(weight.shape, weight.device)
        if weight.is_meta:
            return made
        scales = []
        for i, part in enumerate(weight.detach().flatten().split(CHUNK)):
            scaled, scale = _scale_blocks(part, NF4_BLOCK)
            codes = _find_nearest(scaled.flatten(), make_nf4_table(weight.device)).to(torch.uint8)
            packed = (codes[0::2] << 4 | codes[1::2])[: (len(part) + 1) // 2]
            made.codes[i * CHUNK // 2 :][: len(packed)] = packed
            scales.append(scale)
        scale = torch.cat(scales)
        made.scale_mean.copy_(scale.mean())
        codes, scale_scales = quantize_blockwise(scale - made.scale_mean)
        made.scale_codes.copy_(codes)
        made.scale_scales.copy_(scale_scales)
        return made

    def scales(self) -> Tensor:
        """Return the scales of all blocks, (b,)."""
        return dequantize_blockwise(self.scale_codes, self.scale_scales) + self.scale_mean

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return the weight in a dtype."""
        if self.codes.is_cuda:
            from vitrail.nn.kernels.nf4_triton import dequantize_nf4

            return dequantize_nf4(self, dtype)
        values = torch.empty(self.numel, dtype=dtype, device=self.codes.device)
        if not values.is_meta:
            parts = zip(
                values.split(CHUNK), self.codes.split(CHUNK // 2), self.scales().split(CHUNK // NF4_BLOCK), strict=True
            )
            for target, codes, scale in parts:
                pairs = F.embedding(codes.int(), _nf4_pairs(codes.device)).flatten()
                blocks = F.pad(pairs, (0, len(scale) * NF4_BLOCK - len(pairs))).view(-1, NF4_BLOCK)
                target.copy_((blocks * scale[:, None]).flatten()[: len(target)])
        return values.view(self.shape)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move the tensors to another device without rounding the scales: `model.bfloat16()` casts all others."""
        exact = {name: getattr(self, name) for name in ("scale_scales", "scale_mean")}
        super()._apply(fn, recurse)
        for name, before in exact.items():
            if (after := getattr(self, name)).dtype != before.dtype:
                setattr(self, name, before.to(after.device))
        return self


class _NF4Product(torch.autograd.Function):
    """x Wᵀ with W dequantized in each pass: neither the weight nor x is kept for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: NF4Weight) -> Tensor:
        ctx.weight = weight
        return F.linear(x, weight.dequantize(x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] @ ctx.weight.dequantize(grads[0].dtype), None


@torch.compiler.disable
def nf4_linear(x: Tensor, weight: NF4Weight, bias: Tensor | None = None) -> Tensor:
    """Return x (…, I) · Wᵀ + bias, (…, O), with gradients of x and of the bias."""
    y: Tensor = _NF4Product.apply(x, weight)  # type: ignore[assignment]
    return y if bias is None else y + bias


class NF4Linear(nn.Linear):
    """Frozen linear layer with an NF4 weight, made by `quantize_linear`."""

    nf4: NF4Weight
    dtype: torch.dtype  # of the weight before quantization

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The dequantized weight."""
        return self.nf4.dequantize(self.dtype)

    def forward(self, input: Tensor) -> Tensor:
        """(…, I) → (…, O)"""
        return nf4_linear(input, self.nf4, self.bias)


def quantize_linear(layer: Any, device: torch.device | str | None = None) -> None:
    """Replace the weight of a linear layer by an NF4 weight on a device, in place: references to it stay valid."""
    weight = layer._parameters.pop("weight")
    layer.dtype = weight.dtype
    layer.nf4 = NF4Weight.quantize(weight if weight.is_meta or device is None else weight.to(device))
    if type(layer) is nn.Linear:
        layer.__class__ = NF4Linear


def count_parameters(module: nn.Module, trainable: bool = False) -> int:
    """Count parameters, those of NF4 weights included; or the trainable ones."""
    if trainable:
        return sum(p.numel() for p in module.parameters() if p.requires_grad)
    packed = sum(one.numel for one in module.modules() if isinstance(one, NF4Weight))
    return packed + sum(p.numel() for p in module.parameters())
