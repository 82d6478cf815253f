# pyrefly: ignore-errors
# (the checker takes a kernel's parameters for those of a Python function)
"""Triton kernel that dequantizes NF4 weights: each code is read once, without float32 copies.

The plain version is `vitrail.nn.blockwise_quantization.NF4Weight.dequantize`.
"""

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitrail.nn.blockwise_quantization import NF4_BLOCK, make_dynamic_map, make_nf4_table

if TYPE_CHECKING:
    from vitrail.nn.blockwise_quantization import NF4Weight

BYTES = 2048  # codes of a program, two a byte


@triton.jit
def _dequantize(
    codes_ptr, scale_codes_ptr, scale_scales_ptr, mean_ptr, table_ptr, map_ptr, out_ptr, N,
    BLOCK: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BYTES + tl.arange(0, BYTES)
    inside = 2 * at < N
    code = tl.load(codes_ptr + at, mask=inside, other=0).to(tl.int32)
    block = 2 * at // BLOCK
    scale_code = tl.load(scale_codes_ptr + block, mask=inside, other=0).to(tl.int32)
    scale = tl.load(map_ptr + scale_code) * tl.load(scale_scales_ptr + block // 256, mask=inside, other=0.0)
    scale += tl.load(mean_ptr)
    high, low = tl.load(table_ptr + (code >> 4)) * scale, tl.load(table_ptr + (code & 15)) * scale
    out = tl.interleave(high, low).to(out_ptr.dtype.element_ty)
    place = tl.program_id(0).to(tl.int64) * (2 * BYTES) + tl.arange(0, 2 * BYTES)
    tl.store(out_ptr + place, out, mask=place < N)


def dequantize_nf4(weight: "NF4Weight", dtype: torch.dtype) -> Tensor:
    """Return the weight in a dtype."""
    device = weight.codes.device
    out = torch.empty(weight.shape, dtype=dtype, device=device)
    _dequantize[(triton.cdiv(len(weight.codes), BYTES),)](
        weight.codes, weight.scale_codes, weight.scale_scales, weight.scale_mean, make_nf4_table(device),
        make_dynamic_map(True, device), out, weight.numel, NF4_BLOCK, BYTES,
    )  # fmt: skip
    return out
