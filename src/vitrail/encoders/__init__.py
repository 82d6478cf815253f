"""Pixels and words to features."""

from vitrail.encoders.conv import Conv, ConvConfig
from vitrail.encoders.packed import PackedViT, PackedViTConfig
from vitrail.encoders.sam import SAM, SAMConfig
from vitrail.encoders.text import TextConfig, TextTower
from vitrail.encoders.tiled import TiledViT, TiledViTConfig
from vitrail.encoders.towers import TowerConfig, Towers, TowersConfig
from vitrail.encoders.vit import ViT, ViTConfig

__all__ = ["SAM", "Conv", "ConvConfig", "PackedViT", "PackedViTConfig", "SAMConfig", "TextConfig", "TextTower"]
__all__ += ["TiledViT", "TiledViTConfig", "TowerConfig", "Towers", "TowersConfig", "ViT", "ViTConfig"]
