"""Image LoRA: low-rank updates of the decoder's layers that apply to samples with images (Phi-4-multimodal).

    y = x Wᵀ + (alpha / rank) · (x Aᵀ) Bᵀ   for all tokens of a sample with an image, y = x Wᵀ for other samples

Shapes: B batch, L tokens, W width, I inputs, O outputs, R rank.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.backbones.fusion_point import FusionPass, FusionPoint, check_inputs_type
from vitrail.config import Config
from vitrail.errors import ConfigError, StreamError
from vitrail.nn import BlockConfig, GatedMLPConfig, KVCache, Workload, cost
from vitrail.nn.attention import LayerFn, LayerRouter
from vitrail.nn.mlp import apply_activation
from vitrail.nn.parameters import count_parameter_bytes


class ImageLoRAConfig(Config, tag="image-lora", tag_field="kind"):
    """Config of an `ImageLoRA`: rank and alpha of the updates of all linear layers."""

    rank: int
    alpha: float

    def check_decoder(self, num_layers: int, text_block: BlockConfig) -> None:
        if self.rank < 1:
            raise ConfigError(f"image LoRA has rank {self.rank}", "use a rank of at least 1")
        mlp = text_block.mlp
        if not isinstance(mlp, GatedMLPConfig) or mlp.inner_norm is not None:
            raise ConfigError(f"image LoRA does not support {type(mlp).__name__}", "use a gated MLP without inner norm")


class ImageLoRAInputs(NamedTuple):
    """Mask (B, L), True at all tokens of samples with an image."""

    sample_mask: Tensor

    @classmethod
    def from_image_mask(cls, image_mask: Tensor, segments: Tensor) -> Self:
        """Mark all tokens of the samples that have an image token. `segments` (B, L) are samples, −1 in padding."""
        rows = torch.arange(len(segments), device=segments.device)[:, None].expand_as(segments)
        marked = image_mask.new_zeros(len(segments), int(segments.max()) + 2)  # the last column belongs to padding
        marked[rows[image_mask], segments[image_mask]] = True
        return cls(marked[rows, segments])

    def to(self, device: torch.device) -> "ImageLoRAInputs":
        return ImageLoRAInputs(self.sample_mask.to(device))


class ImageLoRA(FusionPoint):
    """Fusion point with low-rank updates. They start without effect, because B is zero."""

    def __init__(self, config: ImageLoRAConfig, blocks: nn.ModuleList):
        super().__init__()
        self.layers = nn.ModuleList([_make_updates(config, block) for block in blocks])

    def start_pass(self, x: Tensor, inputs: ImageLoRAInputs | None, cache: KVCache | None) -> FusionPass:
        """Prepare a pass. The cache keeps which rows have an image, for later passes of their generated tokens."""
        if inputs is None:
            rows = None if cache is None else cache.image_rows
            return FusionPass() if rows is None else _ImageLoRAPass(self.layers, rows[:, None, None])
        check_inputs_type(inputs, ImageLoRAInputs)
        mask = inputs.sample_mask
        if mask.shape != x.shape[:2] or mask.dtype != torch.bool:
            raise StreamError(
                f"the sample mask is {mask.dtype} {tuple(mask.shape)}, but tokens are {tuple(x.shape[:2])}",
                "give a boolean mask (rows, tokens)",
            )
        if cache is not None:
            cache.image_rows = mask.any(1)
        return _ImageLoRAPass(self.layers, mask[..., None])


class LowRankUpdate(nn.Module):
    """Update of a linear layer: x (…, I) → (…, O)."""

    def __init__(self, config: ImageLoRAConfig, layer: Any):
        super().__init__()
        self.scale = config.alpha / config.rank
        self.a = nn.Parameter(layer.weight.new_empty(config.rank, layer.in_features))
        self.b = nn.Parameter(layer.weight.new_zeros(layer.out_features, config.rank))
        nn.init.kaiming_uniform_(self.a, a=5**0.5)  # as in nn.Linear

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, self.a), self.b) * self.scale


def _make_updates(config: ImageLoRAConfig, block: Any) -> nn.ModuleDict:
    attention, mlp = block.branches["self"].op, block.branches["mlp"].op
    layers = {"qkv": attention.qkv, "out": attention.out, "gate_up": mlp.gate_up, "down": mlp.down}
    return nn.ModuleDict({name: LowRankUpdate(config, layer) for name, layer in layers.items()})


@dataclass
class _ImageLoRAPass(FusionPass):
    layers: nn.ModuleList
    mask: Tensor  # (B, L, 1) or (B, 1, 1)

    def route(self, layer: int) -> LayerRouter:
        return partial(self._add_updates, self.layers[layer])

    def _add_updates(self, updates: Any, name: str, layer: LayerFn, x: Tensor) -> Tensor:
        if name != "mlp":
            return self._apply(updates[name], layer, x)
        mlp: Any = layer
        gate, up = self._apply(updates["gate_up"], mlp.gate_up, x).chunk(2, dim=-1)
        return self._apply(updates["down"], mlp.down, apply_activation(gate, mlp.activation) * up)

    def _apply(self, update: nn.Module, layer: LayerFn, x: Tensor) -> Tensor:
        return layer(x) + update(x).where(self.mask, 0)


# ---- cost: a workload without `context_tokens` is a pass without images -----------------------------------------


@cost.count_flops.register
def _(module: ImageLoRA, work: Workload) -> int:
    weights = sum(parameter.numel() for parameter in module.parameters())
    return 2 * weights * work.tokens if work.context_tokens else 0


@cost.count_bytes.register
def _(module: ImageLoRA, work: Workload) -> cost.MemoryBytes:
    weights = count_parameter_bytes(module)
    return cost.MemoryBytes(weights=weights, read=weights if work.context_tokens else 0)
