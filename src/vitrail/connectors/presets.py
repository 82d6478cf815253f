"""Configs of published connectors.

For `fused-256` the width and depth were published, but not its heads and MLP width: these are Llama's for that width.
"""

from vitrail.connectors.connector import ConnectorConfig
from vitrail.connectors.conv_merger import ConvMergerConfig
from vitrail.connectors.fused_queries import FusedQueryConfig
from vitrail.connectors.merger import MergerConfig
from vitrail.connectors.pool_connector import PoolConnectorConfig
from vitrail.connectors.projector import ProjectorConfig
from vitrail.connectors.qformer import QFormerConfig
from vitrail.connectors.resampler import ResamplerConfig

# fmt: off
CONNECTOR_PRESETS: dict[str, ConnectorConfig] = {
    "llava-7b":         ProjectorConfig(in_features=1024, out_features=4096, layers=1),
    "llava-1.5-7b":     ProjectorConfig(in_features=1024, out_features=4096),
    "llava-1.5-13b":    ProjectorConfig(in_features=1024, out_features=5120),
    "qwen2-vl-2b":      MergerConfig(in_features=1280, out_features=1536, order="blocks"),
    "qwen2-vl-7b":      MergerConfig(in_features=1280, out_features=3584, order="blocks"),
    "qwen2.5-vl-7b":    MergerConfig(in_features=1280, out_features=3584, order="blocks", norm="rms"),
    "qwen3-vl-8b":      MergerConfig(in_features=1152, out_features=4096, order="blocks"),
    # for each feature layer
    "qwen3-vl-8b-deep": MergerConfig(in_features=1152, out_features=4096, order="blocks", norm_position="after"),
    "internvl3-8b":     MergerConfig(in_features=1024, out_features=3584, intermediate_size=3584, norm_position="after", eps=1e-5),  # noqa: E501
    "blip2-stage1":     QFormerConfig(in_features=1408, out_features=256, use_text=True),
    "blip2-opt-2.7b":   QFormerConfig(in_features=1408, out_features=2560),
    "openflamingo-9b":  ResamplerConfig(in_features=1024, out_features=1024, heads=8, head_dim=64),
    "idefics-9b":       ResamplerConfig(in_features=1280, out_features=1280, head_dim=96, activation="relu", qk_norm="layer"),  # noqa: E501
    "hd-9":             ConvMergerConfig(in_features=1024, out_features=1024, newline=True),
    "fused-256":        FusedQueryConfig(in_features=1024, out_features=4096, vocab_size=49_408),
    "next-video":       PoolConnectorConfig(in_features=4096, out_features=4096, spatial_window=2),
}
# fmt: on
