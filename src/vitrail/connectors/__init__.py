"""Features to soft tokens for a language model, one short file each, one interface.

`make_connector(config)` builds the one whose config it is; in a recipe the `kind` of the table says which.
"""

from vitrail.connectors.base import Connector, ConnectorConfig
from vitrail.connectors.conv import ConvMerger, ConvMergerConfig
from vitrail.connectors.fused import Fused, FusedConfig
from vitrail.connectors.grids import Laid, into_blocks, out_of_blocks
from vitrail.connectors.merger import Merger, MergerConfig
from vitrail.connectors.pool import Pool, PoolConfig
from vitrail.connectors.projector import Projector, ProjectorConfig
from vitrail.connectors.qformer import QFormer, QFormerConfig
from vitrail.connectors.resampler import Resampler, ResamplerConfig

AnyConnectorConfig = (
    ProjectorConfig | MergerConfig | QFormerConfig | ResamplerConfig | FusedConfig | PoolConfig | ConvMergerConfig
)

CONNECTORS: tuple[type[Connector], ...] = (Projector, Merger, QFormer, Resampler, Fused, Pool, ConvMerger)


def make_connector(config: AnyConnectorConfig) -> Connector:
    return {kind.Config: kind for kind in CONNECTORS}[type(config)](config)


__all__ = [
    "CONNECTORS",
    "AnyConnectorConfig",
    "Connector",
    "ConnectorConfig",
    "ConvMerger",
    "ConvMergerConfig",
    "Fused",
    "FusedConfig",
    "Laid",
    "Merger",
    "MergerConfig",
    "Pool",
    "PoolConfig",
    "Projector",
    "ProjectorConfig",
    "QFormer",
    "QFormerConfig",
    "Resampler",
    "ResamplerConfig",
    "into_blocks",
    "make_connector",
    "out_of_blocks",
]
