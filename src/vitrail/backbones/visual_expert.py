"""Visual expert fusion: image tokens have their own weights within an attention that all tokens share (CogVLM).

Shapes: B batch, L tokens, W width.
"""

from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vitrail.backbones.fusion_point import (
    FusionPass,
    FusionPoint,
    check_fusion_layers,
    check_inputs_type,
    flatten_mask,
)
from vitrail.config import Config
from vitrail.errors import ConfigError
from vitrail.nn import BlockConfig, KVCache, Workload, cost
from vitrail.nn.attention import LayerFn, LayerRouter, apply_shared_layer
from vitrail.nn.parameters import count_parameter_bytes


class VisualExpertConfig(Config, tag="expert", tag_field="kind"):
    """Config of a `VisualExpert`.

    `layer_indices` are the layers with an expert; None: all. An expert has its own QKV and MLP weights and, with
    `output_projection`, its own attention output projection, as in CogVLM's checkpoints. Norms are shared.
    """

    layer_indices: tuple[int, ...] | None = None
    output_projection: bool = True

    def check_decoder(self, num_layers: int, text_block: BlockConfig) -> None:
        if self.layer_indices is not None:
            check_fusion_layers("expert", self.layer_indices, num_layers)
        if text_block.attention.bias == "all_but_k":
            raise ConfigError(
                "visual experts do not support bias 'all_but_k'", "use bias 'all', 'qkv', 'out' or 'none'"
            )
        if text_block.attention.latent is not None:
            raise ConfigError("visual experts do not support latent attention", "use prefix fusion")


class VisualExpertInputs(NamedTuple):
    """Image mask (B, L), True at image tokens."""

    image_mask: Tensor


class VisualExpert(FusionPoint):
    """Fusion point with expert weights, initialized with the text weights."""

    def __init__(self, config: VisualExpertConfig, blocks: nn.ModuleList):
        super().__init__()
        named = range(len(blocks)) if config.layer_indices is None else config.layer_indices
        self.layers = nn.ModuleDict({str(i): _copy_weights(blocks[i], config.output_projection) for i in named})

    def start_pass(self, x: Tensor, inputs: VisualExpertInputs | None, cache: KVCache | None) -> FusionPass:
        if inputs is None:
            return FusionPass()
        check_inputs_type(inputs, VisualExpertInputs)
        mask = flatten_mask(inputs.image_mask, x)
        num_text_tokens, order = int((~mask).sum()), mask.long().argsort(stable=True)
        return (
            FusionPass()
            if num_text_tokens == len(mask)
            else _VisualExpertPass(self.layers, order, order.argsort(), num_text_tokens)
        )


def _copy_weights(block: Any, out: bool) -> nn.ModuleDict:
    attention, mlp = block.branches["self"].op, block.branches["mlp"].op
    copied = {"qkv": attention.qkv, "mlp": mlp, **({"out": attention.out} if out else {})}
    return nn.ModuleDict(deepcopy(copied)).requires_grad_(True)


@dataclass
class _VisualExpertPass(FusionPass):
    layers: nn.ModuleDict
    order: Tensor  # (B·L,) text tokens first, then image tokens
    inverse_order: Tensor  # (B·L,) inverse permutation
    num_text_tokens: int

    def route(self, layer: int) -> LayerRouter:
        return partial(self._route_tokens, self.layers[str(layer)]) if str(layer) in self.layers else apply_shared_layer

    def _route_tokens(self, expert: Any, name: str, layer: LayerFn, x: Tensor) -> Tensor:
        """Apply text weights to text tokens and expert weights to image tokens, so two sets cost the same as one."""
        if name not in expert:
            return layer(x)
        text, image = x.flatten(0, 1)[self.order].tensor_split([self.num_text_tokens])  # (·, W) twice
        parts = [expert[name](image)] if not self.num_text_tokens else [layer(text), expert[name](image)]
        return torch.cat(parts)[self.inverse_order].unflatten(0, x.shape[:2])


# ---- cost: a workload without `context_tokens` is a pass without images -----------------------------------------


@cost.count_flops.register
def _(module: VisualExpert, work: Workload) -> int:
    """A token passes through one of two weight sets of the same shape, so the expert adds no FLOPs."""
    return 0


@cost.count_bytes.register
def _(module: VisualExpert, work: Workload) -> cost.MemoryBytes:
    return cost.MemoryBytes(
        weights=count_parameter_bytes(module), read=count_parameter_bytes(module) if work.context_tokens else 0
    )
