"""What towers share: how deep a layer lies, a run to there, and what such a run leaves alone."""

from collections.abc import Sequence
from itertools import islice

from torch import Tensor, nn

from vitrail.errors import ConfigError
from vitrail.nn import Plan, Rotation


def depth_of(layer: int | None, blocks: int) -> int:
    """How many of a tower's blocks lead to `layer`, counted as transformers counts hidden states: 0 is what enters the
    first block, k what leaves the k-th, −1 what leaves the last, −2 the one before (LLaVA's choice). None: all."""
    if layer is None:
        return blocks
    if not -blocks - 1 <= layer <= blocks:
        raise ConfigError(f"a tower of {blocks} blocks has no layer {layer}", f"use {-blocks - 1} … {blocks}")
    return layer if layer >= 0 else blocks + 1 + layer


def run_blocks(blocks: nn.ModuleList, x: Tensor, layer: int | None, **given) -> Tensor:
    """x through the blocks that lead to `layer`."""
    for block in islice(blocks, depth_of(layer, len(blocks))):
        x = block(x, **given)
    return x


def run_depths(
    blocks: nn.ModuleList,
    x: Tensor,
    layers: Sequence[int | None],
    plans: Sequence[Plan],
    rotation: Rotation | None = None,
) -> list[Tensor]:
    """What leaves each of several layers, from one pass; each block has its plan, and none past the deepest is run."""
    depths = [depth_of(layer, len(blocks)) for layer in layers]
    states = {0: x} if 0 in depths else {}
    for depth in range(1, max(depths) + 1):
        x = blocks[depth - 1](x, plan=plans[depth - 1], rotation=rotation)
        if depth in depths:
            states[depth] = x
    return [states[depth] for depth in depths]
