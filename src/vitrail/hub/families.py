"""The table of families: how a Hugging Face config.json becomes one of our configs, and back."""

from vitrail.backbones.decoder import Decoder, DecoderConfig
from vitrail.hub.decoders import DECODERS
from vitrail.hub.family import Family

MODELS: dict[str, tuple[type, type]] = {
    "decoder": (DecoderConfig, Decoder),
}
"""Kinds of our own format → config and model."""

FAMILIES: dict[str, Family] = {family.name: family for family in (*DECODERS,)}
"""model_type → family; the first that fits is the one a model is exported as."""
