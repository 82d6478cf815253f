"""Selection of tower layers: resolve layer indices and run the blocks up to them."""

from collections.abc import Sequence
from itertools import islice
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from vitrail.errors import ConfigError
from vitrail.nn import AttentionPlan, Rotation

FeatureLayer: TypeAlias = int | tuple[int, ...] | None
"""Layer whose features are used, or several ones, whose features are concatenated in this order (Molmo)."""


def resolve_depth(layer: FeatureLayer, num_blocks: int) -> int:
    """Return the number of blocks to run for `layer`, an index into the hidden states as in transformers.

    0 is the input of the first block, k the output of the k-th, −1 that of the last, −2 that of the one before (LLaVA).
    None means all blocks.
    """
    if layer is None:
        return num_blocks
    if isinstance(layer, tuple):
        return max(resolve_depth(one, num_blocks) for one in layer)
    if not -num_blocks - 1 <= layer <= num_blocks:
        raise ConfigError(
            f"a tower of {num_blocks} blocks has no layer {layer}", f"use {-num_blocks - 1} … {num_blocks}"
        )
    return layer if layer >= 0 else num_blocks + 1 + layer


def check_layer_indices(name: str, indices: Sequence[int], layers: int) -> None:
    """Raise if an index is not that of one of the layers."""
    if any(not 0 <= index < layers for index in indices):
        raise ConfigError(f"{name} {tuple(indices)} exceed {layers} layers", "count from 0")


def count_layers(layer: FeatureLayer) -> int:
    """Return the number of layers whose features are concatenated."""
    if layer == ():
        raise ConfigError("the tuple of tower layers is empty", "give at least one layer, or None")
    return len(layer) if isinstance(layer, tuple) else 1


def run_blocks(blocks: nn.ModuleList, x: Tensor, layer: FeatureLayer, **block_inputs: Any) -> Tensor:
    """Run x (…, D) through the blocks up to `layer`. Features of several layers are concatenated, (…, layers · D).

    `block_inputs` are further arguments of every block.
    """
    depths = [resolve_depth(one, len(blocks)) for one in (layer if isinstance(layer, tuple) else (layer,))]
    states = {0: x} if 0 in depths else {}
    for depth, block in enumerate(islice(blocks, max(depths)), start=1):
        x = block(x, **block_inputs)
        if depth in depths:
            states[depth] = x
    return states[depths[0]] if len(depths) == 1 else torch.cat([states[depth] for depth in depths], dim=-1)


def run_blocks_to_layers(
    blocks: nn.ModuleList,
    x: Tensor,
    layers: Sequence[int | None],
    plans: Sequence[AttentionPlan],
    rotation: Rotation | None = None,
) -> list[Tensor]:
    """Return the hidden states of several layers from one pass. Each block has its plan; later blocks are not run."""
    depths = [resolve_depth(layer, len(blocks)) for layer in layers]
    states = {0: x} if 0 in depths else {}
    for depth in range(1, max(depths) + 1):
        x = blocks[depth - 1](x, plan=plans[depth - 1], rotation=rotation)
        if depth in depths:
            states[depth] = x
    return [states[depth] for depth in depths]
