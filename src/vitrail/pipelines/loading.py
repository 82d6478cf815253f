"""Load the pipeline that fits a checkpoint. This is `vitrail.load`."""

import importlib
from pathlib import Path
from typing import Any

import torch

from vitrail.connectors.feature_reduction import AnyReductionConfig
from vitrail.errors import CheckpointError, ConfigError
from vitrail.hub.peft_adapters import load_adapter
from vitrail.pipelines.base import Pipeline, find_bundled_model, read_config_of
from vitrail.registry import MODELS

PIPELINES: dict[str, str] = {
    "unified": "vitrail.pipelines.unified:UnifiedPipeline",
    "vlm": "vitrail.pipelines.chat:ChatPipeline",
    "cross-attention-vlm": "vitrail.pipelines.chat:ChatPipeline",
    "encoder-decoder-vlm": "vitrail.pipelines.chat:ChatPipeline",
    "genie": "vitrail.pipelines.world:WorldPipeline",
    "contrastive": "vitrail.pipelines.embedding:EmbeddingPipeline",
    "qlip": "vitrail.pipelines.embedding:EmbeddingPipeline",
    "codec": "vitrail.pipelines.codec_pipeline:CodecPipeline",
    "codec-training": "vitrail.pipelines.codec_pipeline:CodecPipeline",
    "causal-video-codec": "vitrail.pipelines.video_codec_pipeline:VideoCodecPipeline",
    "decoder": "vitrail.pipelines.text:TextPipeline",
    "detector": "vitrail.pipelines.detector_pipeline:DetectorPipeline",
}
"""Model kind (a key of `vitrail.registry.MODELS`) → pipeline, imported on use."""


def load(
    name_or_path: str | Path = "mini",
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    template: str | None = None,
    reduction: AnyReductionConfig | None = None,
    adapter: str | Path | None = None,
) -> Any:
    """Load the pipeline of a bundled model, a folder or a hub id.

    | model                        | pipeline             |
    |------------------------------|----------------------|
    | vision-language model        | `ChatPipeline`       |
    | unified model                | `UnifiedPipeline`    |
    | world model                  | `WorldPipeline`      |
    | contrastive model, QLIP      | `EmbeddingPipeline`  |
    | image codec                  | `CodecPipeline`      |
    | causal video codec           | `VideoCodecPipeline` |
    | language model               | `TextPipeline`       |
    | detector                     | `DetectorPipeline`   |

    device     default: a GPU if there is one
    dtype      default: the pipeline's own, usually bfloat16 on a GPU and float32 on the CPU
    template   chat template preset, for vision-language models
    reduction  keep fewer tokens of each image, for vision-language models
    adapter    folder of a PEFT LoRA adapter, applied without merging
    """
    cls = find_pipeline(name_or_path)
    options: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
    chat = {name: value for name, value in {"template": template, "reduction": reduction}.items() if value is not None}
    if chat and cls.__name__ != "ChatPipeline":
        name = next(iter(chat))
        raise ConfigError(f"{name_or_path} is not a vision-language model and takes no {name}", f"remove {name}")
    pipeline = cls.load(name_or_path, device=device, **options, **chat)
    if adapter is not None:
        load_adapter(pipeline.model, adapter).eval()
    return pipeline


def find_pipeline(name_or_path: str | Path) -> Any:
    """Find the pipeline class of a checkpoint. Reads the config only, no weights."""
    kind = find_model_kind(name_or_path)
    if kind not in PIPELINES:
        raise CheckpointError(
            f"{name_or_path} is a model of kind {kind!r}, which has no pipeline",
            "load the model itself with vitrail.hub.load",
        )
    module, _, name = PIPELINES[kind].partition(":")
    cls: type[Pipeline] = getattr(importlib.import_module(module), name)
    return cls


def find_model_kind(name_or_path: str | Path) -> str:
    """Return the kind of the model of a checkpoint, a key of `vitrail.registry.MODELS`, or else its config class."""
    config = read_config_of(find_bundled_model(name_or_path))
    kinds = (kind for kind, model in MODELS.items() if type(config) is model.Config)
    return next(kinds, type(config).__name__)


def is_vlm(name_or_path: str | Path) -> bool:
    """Whether a checkpoint is a vision-language model. Reads the config only, no weights."""
    return find_model_kind(name_or_path) in ("vlm", "cross-attention-vlm", "encoder-decoder-vlm")


def is_world_model(name_or_path: str | Path) -> bool:
    """Whether a checkpoint is a world model. Reads the config only, no weights."""
    return find_model_kind(name_or_path) == "genie"
