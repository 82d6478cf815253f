"""Fusion points: the ways a picture reaches the layers of a decoder.

    prefix     as tokens among the words; nothing is added (LLaVA, Qwen2-VL)
    cross      gated blocks between the layers look at its features (Flamingo, Idefics, Llama-3.2-V)
    expert     its tokens have weights of their own inside an attention that all share (CogVLM)
    deepstack  its features of several depths are added at its tokens, after the first layers (Qwen3-VL)

Without a picture a fused decoder is the plain one. What a fusion adds is the decoder's one part `fusion`, so that it is
frozen, saved and counted by that name.
"""

from torch import nn

from vitrail.backbones.cross import Cross, CrossConfig, Looked, picture_plan
from vitrail.backbones.deepstack import DeepStack, DeepStackConfig, Stacked
from vitrail.backbones.expert import ExpertConfig, Marked, VisualExpert
from vitrail.backbones.point import FusionPoint, Sight
from vitrail.config import Config
from vitrail.nn import BlockConfig

__all__ = [
    "CrossConfig",
    "DeepStackConfig",
    "ExpertConfig",
    "Fusion",
    "FusionPoint",
    "Looked",
    "Marked",
    "Pictures",
    "PrefixConfig",
    "Sight",
    "Stacked",
    "fusion_parameters",
    "make_fusion",
    "picture_plan",
]


class PrefixConfig(Config, tag="prefix", tag_field="kind"):
    """Pictures are tokens like any other."""

    def check(self, layers: int, text: BlockConfig) -> None:
        """Any decoder will do."""


Fusion = PrefixConfig | CrossConfig | ExpertConfig | DeepStackConfig

Pictures = Looked | Marked | Stacked
"""What a decoder with cross, expert or deepstack fusion is given beside its tokens."""


def make_fusion(config: Fusion, text: BlockConfig, blocks: nn.ModuleList) -> FusionPoint | None:
    """What is added to a decoder of these blocks; `text` is their config."""
    match config:
        case PrefixConfig():
            return None
        case CrossConfig():
            return Cross(config, text)
        case ExpertConfig():
            return VisualExpert(config, blocks)
        case DeepStackConfig():
            return DeepStack(config)


def fusion_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """What fusion added, by name, wherever in a model its decoder is."""
    points = [(name, module) for name, module in model.named_modules() if isinstance(module, FusionPoint)]
    return {f"{point}.{name}": p for point, module in points for name, p in module.named_parameters()}
