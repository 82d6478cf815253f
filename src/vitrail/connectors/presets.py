"""Connectors by name: the published shapes, a row each.

`fused-256` has the width and depth that were published; its heads and the width of its MLPs were not, and are Llama's
for that width.
"""

from vitrail.connectors.base import ConnectorConfig
from vitrail.connectors.conv import ConvMergerConfig
from vitrail.connectors.fused import FusedConfig
from vitrail.connectors.merger import MergerConfig
from vitrail.connectors.pool import PoolConfig
from vitrail.connectors.projector import ProjectorConfig
from vitrail.connectors.qformer import QFormerConfig
from vitrail.connectors.resampler import ResamplerConfig

# fmt: off
PRESETS: dict[str, ConnectorConfig] = {
    "llava-7b":         ProjectorConfig(reads=1024, gives=4096, layers=1),
    "llava-1.5-7b":     ProjectorConfig(reads=1024, gives=4096),
    "llava-1.5-13b":    ProjectorConfig(reads=1024, gives=5120),
    "qwen2-vl-2b":      MergerConfig(reads=1280, gives=1536, order="blocks"),
    "qwen2-vl-7b":      MergerConfig(reads=1280, gives=3584, order="blocks"),
    "qwen2.5-vl-7b":    MergerConfig(reads=1280, gives=3584, order="blocks", norm="rms"),
    "qwen3-vl-8b":      MergerConfig(reads=1152, gives=4096, order="blocks"),
    "qwen3-vl-8b-deep": MergerConfig(reads=1152, gives=4096, order="blocks", norm_at="after"),  # at each tap
    "internvl3-8b":     MergerConfig(reads=1024, gives=3584, hidden=3584, norm_at="after", eps=1e-5),
    "blip2-stage1":     QFormerConfig(reads=1408, gives=256, text=True),
    "blip2-opt-2.7b":   QFormerConfig(reads=1408, gives=2560),
    "openflamingo-9b":  ResamplerConfig(reads=1024, gives=1024, heads=8, head_dim=64),
    "idefics-9b":       ResamplerConfig(reads=1280, gives=1280, head_dim=96, activation="relu", qk_norm="layer"),
    "hd-9":             ConvMergerConfig(reads=1024, gives=1024, newline=True),
    "fused-256":        FusedConfig(reads=1024, gives=4096, vocab=49_408),
    "next-video":       PoolConfig(reads=4096, gives=4096, space=2),
}
# fmt: on
