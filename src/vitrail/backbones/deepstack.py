"""DeepStack fusion: image features of several tower layers are added at the image tokens after the first decoder layers
(Qwen3-VL).

Shapes: B batch, L tokens, N image tokens of a batch, K feature layers, W width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from vitrail.backbones.fusion_point import FusionPass, FusionPoint, check_fusion_layers, check_inputs_type, flatten_mask
from vitrail.config import Config
from vitrail.errors import StreamError
from vitrail.nn import BlockConfig, KVCache, cost


class DeepStackConfig(Config, tag="deepstack", tag_field="kind"):
    """Config of `DeepStack`. The k-th feature is added to the output of layer `layer_indices[k]`."""

    layer_indices: tuple[int, ...] = (0, 1, 2)

    def check_decoder(self, num_layers: int, text_block: BlockConfig) -> None:
        check_fusion_layers("deepstack", self.layer_indices, num_layers)


class DeepStackInputs(NamedTuple):
    """Image mask (B, L) and features (K, N, W) of the image tokens in order, row after row.

    In place of the mask, flat indices (N,) of the image tokens among all B·L can be given, in any order.
    """

    image_mask: Tensor
    features: Tensor | Sequence[Tensor]


class DeepStack(FusionPoint):
    """Fusion point without weights; a connector projects the features to the decoder's width."""

    def __init__(self, config: DeepStackConfig):
        super().__init__()
        self.config = config

    def start_pass(self, x: Tensor, inputs: DeepStackInputs | None, cache: KVCache | None) -> FusionPass:
        if inputs is None:
            return FusionPass()
        check_inputs_type(inputs, DeepStackInputs)
        mask = inputs.image_mask
        flat_indices = mask if mask.ndim == 1 else flatten_mask(mask, x).nonzero()[:, 0]  # (N,)
        given_shapes, expected_shape = [tuple(f.shape) for f in inputs.features], (len(flat_indices), x.shape[-1])
        if given_shapes != [expected_shape] * len(self.config.layer_indices):
            raise StreamError(
                f"features {given_shapes} do not match {len(flat_indices)} image tokens, "
                f"{len(self.config.layer_indices)} layers",
                f"give features {expected_shape} for each layer",
            )
        return _DeepStackPass(
            flat_indices,
            {i + 1: f.to(x.dtype) for i, f in zip(self.config.layer_indices, inputs.features, strict=True)},
        )


@dataclass
class _DeepStackPass(FusionPass):
    rows: Tensor  # (N,) flat indices among the B·L tokens
    features: dict[int, Tensor]  # features (N, W) by point

    def apply_at(self, point: int, x: Tensor) -> Tensor:
        if point not in self.features:
            return x
        return x.flatten(0, 1).index_add(0, self.rows, self.features[point]).view_as(x)


cost.count_flops.register(DeepStack, cost.sum_child_flops)  # no weights
cost.count_bytes.register(DeepStack, cost.sum_child_bytes)
