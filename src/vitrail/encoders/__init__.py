"""Vision and text encoders."""

from vitrail.encoders.conv_tower import ConvTower, ConvTowerConfig
from vitrail.encoders.davit import DaViT, DaViTConfig
from vitrail.encoders.hybrid_tower import HybridTower, HybridTowerConfig
from vitrail.encoders.multi_tower import MultiTower, MultiTowerConfig, TowerConfig
from vitrail.encoders.packed_vit import PackedViT, PackedViTConfig
from vitrail.encoders.patch_tower import PatchTower, PatchTowerConfig
from vitrail.encoders.sam import SAM, SAMConfig
from vitrail.encoders.t5_encoder import T5Encoder, T5EncoderConfig
from vitrail.encoders.text_tower import TextTower, TextTowerConfig
from vitrail.encoders.tiled_vit import TiledViT, TiledViTConfig
from vitrail.encoders.vit import ViT, ViTConfig

__all__ = [
    "SAM",
    "ConvTower",
    "ConvTowerConfig",
    "DaViT",
    "DaViTConfig",
    "HybridTower",
    "HybridTowerConfig",
    "PackedViT",
    "PackedViTConfig",
    "PatchTower",
    "PatchTowerConfig",
    "SAMConfig",
]
__all__ += [
    "MultiTower",
    "MultiTowerConfig",
    "T5Encoder",
    "T5EncoderConfig",
    "TextTower",
    "TextTowerConfig",
    "TiledViT",
    "TiledViTConfig",
    "TowerConfig",
]
__all__ += ["ViT", "ViTConfig"]
