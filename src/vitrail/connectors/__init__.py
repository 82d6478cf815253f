"""Connectors: vision features to visual tokens for a language model, with one interface and one file each.

`make_connector(config)` builds the connector of a config; in a recipe, `kind` selects it.
"""

from typing import TYPE_CHECKING, TypeAlias

from vitrail.config import make_registered_type
from vitrail.connectors.attention_pool import AttentionPoolConnector, AttentionPoolConnectorConfig
from vitrail.connectors.connector import Connector, ConnectorConfig
from vitrail.connectors.conv_merger import ConvMerger, ConvMergerConfig
from vitrail.connectors.feature_layout import FeatureLayout, group_blocks, ungroup_blocks
from vitrail.connectors.fused_queries import FusedQueryConfig, FusedQueryConnector
from vitrail.connectors.gated_merger import GatedMerger, GatedMergerConfig
from vitrail.connectors.grid_resampler import GridResampler, GridResamplerConfig
from vitrail.connectors.merger import Merger, MergerConfig
from vitrail.connectors.packed_pool import PackedPool, PackedPoolConfig
from vitrail.connectors.pool_connector import PoolConnector, PoolConnectorConfig
from vitrail.connectors.pooled_projector import PooledProjector, PooledProjectorConfig
from vitrail.connectors.projector import Projector, ProjectorConfig
from vitrail.connectors.qformer import QFormer, QFormerConfig
from vitrail.connectors.resampler import Resampler, ResamplerConfig
from vitrail.registry import CONNECTORS

if TYPE_CHECKING:
    AnyConnectorConfig: TypeAlias = ConnectorConfig
else:
    AnyConnectorConfig = make_registered_type(CONNECTORS, ConnectorConfig, lambda connector: connector.Config)


def make_connector(config: ConnectorConfig) -> Connector:
    """Build the connector of a config."""
    return CONNECTORS[str(config.__struct_config__.tag)](config)


__all__ = [
    "AnyConnectorConfig",
    "AttentionPoolConnector",
    "AttentionPoolConnectorConfig",
    "Connector",
    "ConnectorConfig",
    "ConvMerger",
    "ConvMergerConfig",
    "FeatureLayout",
    "FusedQueryConfig",
    "FusedQueryConnector",
    "GatedMerger",
    "GatedMergerConfig",
    "GridResampler",
    "GridResamplerConfig",
    "Merger",
    "MergerConfig",
    "PackedPool",
    "PackedPoolConfig",
    "PoolConnector",
    "PoolConnectorConfig",
    "PooledProjector",
    "PooledProjectorConfig",
    "Projector",
    "ProjectorConfig",
    "QFormer",
    "QFormerConfig",
    "Resampler",
    "ResamplerConfig",
    "group_blocks",
    "make_connector",
    "ungroup_blocks",
]
