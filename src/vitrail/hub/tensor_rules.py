"""Reversible rules between native and external tensors. One list of rules serves import and export.

Import runs `load` of every rule, export runs `export`. A tensor that no rule mentions is an error in either direction.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vitrail.errors import CheckpointError


class TensorRule(NamedTuple):
    """A reversible step between native and external tensors.

    `alternative` loads the same native tensors from files that lack the first external tensor.
    """

    native: tuple[str, ...]
    hf: tuple[str, ...]
    load: Callable[[list[Tensor]], list[Tensor]]  # external → native
    export: Callable[[list[Tensor]], list[Tensor]]  # native → external
    alternative: "TensorRule | None" = None

    def with_names(self, native: Callable[[str], str], hf: Callable[[str], str]) -> "TensorRule":
        """Return the rule with changed names of native and external tensors."""
        return self._replace(
            native=tuple(map(native, self.native)),
            hf=tuple(map(hf, self.hf)),
            alternative=None if self.alternative is None else self.alternative.with_names(native, hf),
        )


def rename(native: str, hf: str) -> TensorRule:
    """One tensor with another name."""
    return TensorRule((native,), (hf,), list, list)


def rename_layer(native: str, hf: str, bias: bool = True) -> list[TensorRule]:
    """Rename the weight, and optionally the bias, of a linear layer or a norm."""
    return [rename(f"{native}.{part}", f"{hf}.{part}") for part in (("weight", "bias") if bias else ("weight",))]


def fuse(native: str, hf: Sequence[str], sizes: Sequence[int]) -> TensorRule:
    """One native tensor is several external ones, concatenated along the first axis."""

    def pull(tensors: list[Tensor]) -> list[Tensor]:
        for name, tensor, size in zip(hf, tensors, sizes, strict=True):
            if tensor.shape[0] != size:
                raise CheckpointError(f"tensor {name!r} has {tensor.shape[0]} rows, the config requires {size}")
        return [torch.cat(tensors)]

    return TensorRule((native,), tuple(hf), pull, lambda tensors: list(tensors[0].split(list(sizes))))


def fuse_layer(native: str, hf: Sequence[str], sizes: Sequence[int], bias: bool = True) -> list[TensorRule]:
    """Fuse the weights, and optionally the biases, of linear layers."""
    parts = ("weight", "bias") if bias else ("weight",)
    return [fuse(f"{native}.{part}", [f"{name}.{part}" for name in hf], sizes) for part in parts]


def split(native: Sequence[str], hf: str, sizes: Sequence[int]) -> TensorRule:
    """One external tensor is several native ones, concatenated along the first axis."""
    fused = fuse(hf, native, sizes)
    return TensorRule(tuple(native), (hf,), fused.export, fused.load)


def flatten_kernel(native: str, hf: str, shape: Sequence[int]) -> TensorRule:
    """An external convolution kernel of `shape` is a native matrix: flattened after the first axis."""
    shape = tuple(shape)

    def pull(tensors: list[Tensor]) -> list[Tensor]:
        if tuple(tensors[0].shape) != shape:
            raise CheckpointError(f"tensor {hf!r} has shape {tuple(tensors[0].shape)}, the config requires {shape}")
        return [tensors[0].flatten(1)]

    def push(tensors: list[Tensor]) -> list[Tensor]:
        return [tensors[0].reshape(shape)]

    return TensorRule((native,), (hf,), pull, push)


def view(native: str, hf: str, native_shape: Sequence[int], hf_shape: Sequence[int]) -> TensorRule:
    """One tensor with another name and another shape of the same size."""

    def reshape_to(shape: Sequence[int], name: str) -> Callable[[list[Tensor]], list[Tensor]]:
        def run(tensors: list[Tensor]) -> list[Tensor]:
            if tensors[0].numel() != torch.Size(shape).numel():
                raise CheckpointError(f"tensor {name!r} has shape {tuple(tensors[0].shape)}, not {tuple(shape)}")
            return [tensors[0].reshape(tuple(shape))]

        return run

    return TensorRule((native,), (hf,), reshape_to(native_shape, hf), reshape_to(hf_shape, native))


def permute_columns(native: str, hf: str, sizes: Sequence[int], order: Sequence[int]) -> TensorRule:
    """One matrix whose columns count over axes of `sizes` in the file; in the native one they follow in `order`."""
    native_sizes, inverse = [sizes[axis] for axis in order], [list(order).index(axis) for axis in range(len(order))]

    def reorder(shape: Sequence[int], order: Sequence[int], name: str) -> Callable[[list[Tensor]], list[Tensor]]:
        def run(tensors: list[Tensor]) -> list[Tensor]:
            (matrix,) = tensors
            if matrix.ndim != 2 or matrix.shape[1] != torch.Size(shape).numel():
                raise CheckpointError(f"tensor {name!r} has shape {tuple(matrix.shape)}, not (…, {tuple(shape)})")
            axes = matrix.unflatten(1, tuple(shape)).permute(0, *(axis + 1 for axis in order))
            return [axes.flatten(1).contiguous()]

        return run

    return TensorRule((native,), (hf,), reorder(sizes, order, hf), reorder(native_sizes, inverse, native))


def transpose(native: str, hf: str) -> TensorRule:
    """One matrix with another name, transposed."""

    def swap(tensors: list[Tensor]) -> list[Tensor]:
        if tensors[0].ndim != 2:
            raise CheckpointError(f"tensor {hf!r} has shape {tuple(tensors[0].shape)}, a matrix is required")
        return [tensors[0].T.contiguous()]

    return TensorRule((native,), (hf,), swap, swap)


def swap_halves(native: str, hf: str) -> TensorRule:
    """One tensor with another name, whose first and second half of rows are swapped."""

    def swap(tensors: list[Tensor]) -> list[Tensor]:
        if len(tensors[0]) % 2:
            raise CheckpointError(f"tensor {hf!r} has {len(tensors[0])} rows, an even number is required")
        return [torch.cat(tensors[0].chunk(2)[::-1])]

    return TensorRule((native,), (hf,), swap, swap)


def ungroup_qkv(native: str, hf: str, heads: int, kv_heads: int, head_dim: int) -> TensorRule:
    """One external tensor has the rows of each group in turn: its queries, key and value. Native rows are q, k, v."""
    per_group = heads // kv_heads

    def pull(tensors: list[Tensor]) -> list[Tensor]:
        rows = (heads + 2 * kv_heads) * head_dim
        if tensors[0].shape[0] != rows:
            raise CheckpointError(f"tensor {hf!r} has {tensors[0].shape[0]} rows, the config requires {rows}")
        groups = tensors[0].unflatten(0, (kv_heads, per_group + 2, head_dim))
        return [torch.cat([part.flatten(0, 2) for part in groups.split([per_group, 1, 1], dim=1)])]

    def push(tensors: list[Tensor]) -> list[Tensor]:
        parts = tensors[0].split([heads * head_dim, kv_heads * head_dim, kv_heads * head_dim])
        return [torch.cat([part.unflatten(0, (kv_heads, -1, head_dim)) for part in parts], dim=1).flatten(0, 2)]

    return TensorRule((native,), (hf,), pull, push)


def stack_experts(native: str, hf: Sequence[Sequence[str]], sizes: Sequence[int]) -> TensorRule:
    """One native tensor stacks the fused matrices of all experts: hf[expert][part]."""
    flat = tuple(name for parts in hf for name in parts)
    parts_per_expert = len(hf[0])

    def pull(tensors: list[Tensor]) -> list[Tensor]:
        fused = [
            fuse(native, parts, sizes).load(tensors[i * parts_per_expert : (i + 1) * parts_per_expert])
            for i, parts in enumerate(hf)
        ]
        return [torch.stack([matrix for (matrix,) in fused])]

    def push(tensors: list[Tensor]) -> list[Tensor]:
        return [piece for matrix in tensors[0] for piece in matrix.split(list(sizes))]

    return TensorRule((native,), flat, pull, push)


def stack(native: str, hf: Sequence[str]) -> TensorRule:
    """One native tensor is several external ones, stacked along a new first axis."""
    return TensorRule((native,), tuple(hf), lambda tensors: [torch.stack(tensors)], lambda tensors: list(tensors[0]))


def add_prefix(native: str, hf: str, rules: Iterable[TensorRule]) -> list[TensorRule]:
    """Add a prefix to the tensor names of rules on both sides."""
    return [rule.with_names(lambda name: native + name, lambda name: hf + name) for rule in rules]
