"""Quantizers: vectors → codes and ids, one short file each, one interface.

`make_quantizer(config)` builds the one whose config it is; in a recipe the `kind` of the table says which.
"""

from vitrail.codecs.quantizers.base import Quantized, Quantizer, bits_of
from vitrail.codecs.quantizers.bsq import BSQ, BSQConfig
from vitrail.codecs.quantizers.continuous import KL, Continuous, ContinuousConfig, KLConfig
from vitrail.codecs.quantizers.fsq import FSQ, FSQConfig
from vitrail.codecs.quantizers.grouped import GroupedVQ, GroupedVQConfig
from vitrail.codecs.quantizers.ibq import IBQ, IBQConfig
from vitrail.codecs.quantizers.lfq import LFQ, LFQConfig
from vitrail.codecs.quantizers.residual import ResidualVQ, ResidualVQConfig
from vitrail.codecs.quantizers.simvq import SimVQ, SimVQConfig
from vitrail.codecs.quantizers.usage import Usage, usage
from vitrail.codecs.quantizers.vq import VQ, VQConfig

QuantizerConfig = (
    VQConfig
    | ResidualVQConfig
    | GroupedVQConfig
    | SimVQConfig
    | IBQConfig
    | FSQConfig
    | LFQConfig
    | BSQConfig
    | ContinuousConfig
    | KLConfig
)

QUANTIZERS: tuple[type[Quantizer], ...] = (
    VQ, ResidualVQ, GroupedVQ, SimVQ, IBQ, FSQ, LFQ, BSQ, Continuous, KL,
)  # fmt: skip


def make_quantizer(config: QuantizerConfig) -> Quantizer:
    return {kind.Config: kind for kind in QUANTIZERS}[type(config)](config)


__all__ = [
    "BSQ",
    "FSQ",
    "IBQ",
    "KL",
    "LFQ",
    "QUANTIZERS",
    "VQ",
    "BSQConfig",
    "Continuous",
    "ContinuousConfig",
    "FSQConfig",
    "GroupedVQ",
    "GroupedVQConfig",
    "IBQConfig",
    "KLConfig",
    "LFQConfig",
    "Quantized",
    "Quantizer",
    "QuantizerConfig",
    "ResidualVQ",
    "ResidualVQConfig",
    "SimVQ",
    "SimVQConfig",
    "Usage",
    "VQConfig",
    "bits_of",
    "make_quantizer",
    "usage",
]
