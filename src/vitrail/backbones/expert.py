"""The visual expert: pictures' tokens have weights of their own inside an attention that all tokens share (CogVLM).

B batch, L tokens, W width
"""

from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vitrail.backbones.point import FusionPoint, Sight, check_layers, flat_mask, refuse_other, size
from vitrail.config import Config
from vitrail.errors import ConfigError
from vitrail.nn import BlockConfig, KVCache, Work, cost
from vitrail.nn.attention import Layer, Route, shared


class ExpertConfig(Config, tag="expert", tag_field="kind"):
    """`at` which layers there is an expert: all unless given. It has QKV and MLP weights and, with `out`, a projection
    out of attention too: CogVLM's checkpoints hold one, its paper does not tell of it. Norms are shared."""

    at: tuple[int, ...] | None = None
    out: bool = True

    def check(self, layers: int, text: BlockConfig) -> None:
        if self.at is not None:
            check_layers("expert", self.at, layers)
        if text.attention.bias == "all_but_k":
            raise ConfigError("an expert has no biases for q and v alone", "use bias 'all', 'qkv', 'out' or 'none'")


class Marked(NamedTuple):
    """mask (B, L), True at the pictures' tokens"""

    mask: Tensor


class VisualExpert(FusionPoint):
    """Starts as a copy of the weights that the text has."""

    def __init__(self, config: ExpertConfig, blocks: nn.ModuleList):
        super().__init__()
        named = range(len(blocks)) if config.at is None else config.at
        self.layers = nn.ModuleDict({str(i): _copy(blocks[i], config.out) for i in named})

    def start(self, x: Tensor, pictures: Marked | None, cache: KVCache | None) -> Sight:
        if pictures is None:
            return Sight()
        refuse_other(pictures, Marked)
        mask = flat_mask(pictures.mask, x)
        words, order = int((~mask).sum()), mask.long().argsort(stable=True)
        return Sight() if words == len(mask) else _Parted(self.layers, order, order.argsort(), words)


def _copy(block: Any, out: bool) -> nn.ModuleDict:
    attention, mlp = block.branches["self"].op, block.branches["mlp"].op
    own = {"qkv": attention.qkv, "mlp": mlp, **({"out": attention.out} if out else {})}
    return nn.ModuleDict(deepcopy(own)).requires_grad_(True)


@dataclass
class _Parted(Sight):
    layers: nn.ModuleDict
    order: Tensor  # (B·L,) the words, then the pictures
    back: Tensor  # (B·L,) from there to where they stand
    words: int

    def route(self, layer: int) -> Route:
        return partial(self._through, self.layers[str(layer)]) if str(layer) in self.layers else shared

    def _through(self, own: Any, name: str, layer: Layer, x: Tensor) -> Tensor:
        """Each token through the weights of its kind alone, so that two sets cost no more than one."""
        if name not in own:
            return layer(x)
        words, pictures = x.flatten(0, 1)[self.order].tensor_split([self.words])  # (·, W) twice
        parts = [own[name](pictures)] if not self.words else [layer(words), own[name](pictures)]
        return torch.cat(parts)[self.back].unflatten(0, x.shape[:2])


# ---- what it costs: work without `context` is a pass without pictures -------------------------------------------


@cost.flops.register
def _(module: VisualExpert, work: Work) -> int:
    """A token goes through one of two sets of weights of the same shape: the second adds no work."""
    return 0


@cost.bytes.register
def _(module: VisualExpert, work: Work) -> cost.Bytes:
    return cost.Bytes(weights=size(module), read=size(module) if work.context else 0)
