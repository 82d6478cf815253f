"""Quantizers: vectors to codes and ids, with one interface and one file each.

`make_quantizer(config)` builds the quantizer of a config; in a recipe, `kind` selects it.
"""

from typing import TYPE_CHECKING, TypeAlias

from vitrail.codecs.quantizers.bsq import BSQ, BSQConfig
from vitrail.codecs.quantizers.continuous import KL, IdentityQuantizer, IdentityQuantizerConfig, KLConfig
from vitrail.codecs.quantizers.fsq import FSQ, FSQConfig
from vitrail.codecs.quantizers.grouped_vq import GroupedVQ, GroupedVQConfig
from vitrail.codecs.quantizers.ibq import IBQ, IBQConfig
from vitrail.codecs.quantizers.lfq import LFQ, LFQConfig
from vitrail.codecs.quantizers.quantizer import Quantizer, QuantizerOutput, bits_per_id
from vitrail.codecs.quantizers.residual_vq import ResidualVQ, ResidualVQConfig
from vitrail.codecs.quantizers.simvq import SimVQ, SimVQConfig
from vitrail.codecs.quantizers.vq import VQ, VQConfig
from vitrail.config import Config, make_registered_type
from vitrail.registry import QUANTIZERS

if TYPE_CHECKING:
    QuantizerConfig: TypeAlias = Config
else:
    QuantizerConfig = make_registered_type(QUANTIZERS, Config, lambda quantizer: quantizer.Config)


def make_quantizer(config: Config) -> Quantizer:
    """Build the quantizer of a config."""
    return QUANTIZERS[str(config.__struct_config__.tag)](config)


__all__ = [
    "BSQ",
    "FSQ",
    "IBQ",
    "KL",
    "LFQ",
    "VQ",
    "BSQConfig",
    "FSQConfig",
    "GroupedVQ",
    "GroupedVQConfig",
    "IBQConfig",
    "IdentityQuantizer",
    "IdentityQuantizerConfig",
    "KLConfig",
    "LFQConfig",
    "Quantizer",
    "QuantizerConfig",
    "QuantizerOutput",
    "ResidualVQ",
    "ResidualVQConfig",
    "SimVQ",
    "SimVQConfig",
    "VQConfig",
    "bits_per_id",
    "make_quantizer",
]
