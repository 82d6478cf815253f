"""Pixels and words to features."""

from vitrail.encoders.conv import Conv, ConvConfig
from vitrail.encoders.text import TextConfig, TextTower
from vitrail.encoders.towers import TowerConfig, Towers, TowersConfig
from vitrail.encoders.vit import ViT, ViTConfig

__all__ = ["Conv", "ConvConfig", "TextConfig", "TextTower", "TowerConfig", "Towers", "TowersConfig", "ViT", "ViTConfig"]
