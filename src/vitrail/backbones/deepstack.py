"""DeepStack: a picture's features of several depths are added at its tokens, after the first layers (Qwen3-VL).

B batch, L tokens, N picture tokens of a batch, K depths, W width
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from vitrail.backbones.point import FusionPoint, Sight, check_layers, flat_mask, refuse_other
from vitrail.config import Config
from vitrail.errors import StreamError
from vitrail.nn import BlockConfig, KVCache, Work, cost


class DeepStackConfig(Config, tag="deepstack", tag_field="kind"):
    """The k-th feature is added to what leaves layer `at[k]`."""

    at: tuple[int, ...] = (0, 1, 2)

    def check(self, layers: int, text: BlockConfig) -> None:
        check_layers("deepstack", self.at, layers)


class Stacked(NamedTuple):
    """mask (B, L), True at the pictures' tokens, and features (K, N, W) of those tokens in order, row after row; or, in
    place of the mask, the tokens' places (N,) among all B·L, in any order, which need not be looked for"""

    mask: Tensor
    depths: Tensor | Sequence[Tensor]


class DeepStack(FusionPoint):
    """Has no weights: what makes the features fit the decoder is a connector."""

    def __init__(self, config: DeepStackConfig):
        super().__init__()
        self.config = config

    def start(self, x: Tensor, pictures: Stacked | None, cache: KVCache | None) -> Sight:
        if pictures is None:
            return Sight()
        refuse_other(pictures, Stacked)
        mask = pictures.mask
        rows = mask if mask.ndim == 1 else flat_mask(mask, x).nonzero()[:, 0]  # (N,)
        given, wanted = [tuple(f.shape) for f in pictures.depths], (len(rows), x.shape[-1])
        if given != [wanted] * len(self.config.at):
            raise StreamError(
                f"features {given} do not fit {len(rows)} picture tokens at {len(self.config.at)} layers",
                f"give {wanted} for each layer",
            )
        return _Added(rows, {i + 1: f.to(x.dtype) for i, f in zip(self.config.at, pictures.depths, strict=True)})


@dataclass
class _Added(Sight):
    rows: Tensor  # (N,) among the B·L tokens
    features: dict[int, Tensor]  # (N, W) at a point

    def at(self, point: int, x: Tensor) -> Tensor:
        if point not in self.features:
            return x
        return x.flatten(0, 1).index_add(0, self.rows, self.features[point]).view_as(x)


@cost.flops.register
def _(module: DeepStack, work: Work) -> int:
    return 0


@cost.bytes.register
def _(module: DeepStack, work: Work) -> cost.Bytes:
    return cost.Bytes()
