"""Pixels and words to features."""

from vitrail.encoders.conv import Conv, ConvConfig
from vitrail.encoders.packed import PackedViT, PackedViTConfig
from vitrail.encoders.text import TextConfig, TextTower
from vitrail.encoders.tiled import TiledViT, TiledViTConfig
from vitrail.encoders.towers import TowerConfig, Towers, TowersConfig
from vitrail.encoders.vit import ViT, ViTConfig

__all__ = ["Conv", "ConvConfig", "PackedViT", "PackedViTConfig", "TextConfig", "TextTower", "TiledViT"]
__all__ += ["TiledViTConfig", "TowerConfig", "Towers", "TowersConfig", "ViT", "ViTConfig"]
