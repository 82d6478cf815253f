"""Pixels and words to features."""

from vitrail.encoders.conv import Conv, ConvConfig
from vitrail.encoders.hybrid import Hybrid, HybridConfig
from vitrail.encoders.packed import PackedViT, PackedViTConfig
from vitrail.encoders.sam import SAM, SAMConfig
from vitrail.encoders.text import TextConfig, TextTower
from vitrail.encoders.tiled import TiledViT, TiledViTConfig
from vitrail.encoders.towers import TowerConfig, Towers, TowersConfig
from vitrail.encoders.vit import ViT, ViTConfig

__all__ = ["SAM", "Conv", "ConvConfig", "Hybrid", "HybridConfig", "PackedViT", "PackedViTConfig", "SAMConfig"]
__all__ += ["TextConfig", "TextTower", "TiledViT", "TiledViTConfig", "TowerConfig", "Towers", "TowersConfig"]
__all__ += ["ViT", "ViTConfig"]
