"""Lookup-free quantization: the sign of every channel is a bit (MAGVIT-v2)."""

from vitrail.codecs.quantizers.binary_codes import BinaryQuantizer, BinaryQuantizerConfig
from vitrail.registry import QUANTIZERS


class LFQConfig(BinaryQuantizerConfig, tag="lfq", tag_field="kind"):
    inv_temperature: float = 100.0


@QUANTIZERS.register("lfq")
class LFQ(BinaryQuantizer[LFQConfig]):
    """Lookup-free quantizer. Codes are ±1; the first dimension is the highest bit of an id.

    Losses: `commit`, mean (x − code)²; `entropy`, see `entropy_loss`.
    """

    Config = LFQConfig
