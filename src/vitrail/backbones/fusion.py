"""Fusion of images with a decoder.

    prefix     as tokens of the stream; no extra weights (LLaVA, Qwen2-VL)
    cross      gated cross-attention blocks between layers (Flamingo, Idefics, Llama-3.2-V)
    expert     own weights for image tokens within shared attention (CogVLM)
    deepstack  features of several tower layers added after the first decoder layers (Qwen3-VL)
    image-lora low-rank updates of all layers for samples with images (Phi-4-multimodal)

Without an image, a decoder with fusion equals the plain decoder. All added weights are in the decoder's part `fusion`,
so they are frozen, saved and counted by that name.
"""

from torch import nn

from vitrail.backbones.cross_attention_fusion import (
    CrossAttentionFusion,
    CrossAttentionFusionConfig,
    CrossAttentionInputs,
    make_image_plan,
)
from vitrail.backbones.deepstack import DeepStack, DeepStackConfig, DeepStackInputs
from vitrail.backbones.fusion_point import FusionPass, FusionPoint
from vitrail.backbones.image_lora import ImageLoRA, ImageLoRAConfig, ImageLoRAInputs
from vitrail.backbones.visual_expert import VisualExpert, VisualExpertConfig, VisualExpertInputs
from vitrail.config import Config
from vitrail.nn import BlockConfig

__all__ = [
    "CrossAttentionFusionConfig",
    "CrossAttentionInputs",
    "DeepStackConfig",
    "DeepStackInputs",
    "FusionConfig",
    "FusionInputs",
    "FusionPass",
    "FusionPoint",
    "ImageLoRAConfig",
    "ImageLoRAInputs",
    "PrefixFusionConfig",
    "VisualExpertConfig",
    "VisualExpertInputs",
    "get_fusion_parameters",
    "make_fusion",
    "make_image_plan",
]


class PrefixFusionConfig(Config, tag="prefix", tag_field="kind"):
    """Images are tokens of the stream."""

    def check_decoder(self, num_layers: int, text_block: BlockConfig) -> None:
        """Accept any decoder."""


FusionConfig = PrefixFusionConfig | CrossAttentionFusionConfig | VisualExpertConfig | DeepStackConfig | ImageLoRAConfig

FusionInputs = CrossAttentionInputs | VisualExpertInputs | DeepStackInputs | ImageLoRAInputs
"""Inputs of a decoder with another fusion than prefix, in addition to its tokens."""


def make_fusion(config: FusionConfig, text_block: BlockConfig, blocks: nn.ModuleList) -> FusionPoint | None:
    """Build the fusion point of a decoder with these blocks, whose config is `text_block`."""
    match config:
        case PrefixFusionConfig():
            return None
        case CrossAttentionFusionConfig():
            return CrossAttentionFusion(config, text_block)
        case VisualExpertConfig():
            return VisualExpert(config, blocks)
        case DeepStackConfig():
            return DeepStack(config)
        case ImageLoRAConfig():
            return ImageLoRA(config, blocks)


def get_fusion_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return all parameters of fusion points in a model, by name."""
    points = [(name, module) for name, module in model.named_modules() if isinstance(module, FusionPoint)]
    return {f"{point}.{name}": p for point, module in points for name, p in module.named_parameters()}
