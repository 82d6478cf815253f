"""Published figures that do not survive arithmetic, worked out again with the ledger's own rules."""

from typing import NamedTuple

import torch

from vitrail.backbones.decoder import Decoder, DecoderConfig
from vitrail.backbones.presets import DECODERS
from vitrail.nn import AttentionConfig, BlockConfig, PlainConfig, RotaryConfig, Work, cost

# ---- GAIA-1: FLOPs a frame --------------------------------------------------------------------------------------

GAIA_FRAME, GAIA_CONTEXT = 576, 26 * (32 + 576 + 2)
"""Image tokens of a frame; tokens of 26 frames with their text and actions: 15,860."""

GAIA = DecoderConfig(
    vocab=8192,
    layers=32,
    block=BlockConfig(width=4096, attention=AttentionConfig(heads=32), mlp=PlainConfig(hidden=16_384, bias=False)),
    rotary=RotaryConfig(head_dim=128),
    context=GAIA_CONTEXT,
)
"""A shape of 6.5B parameters; the real one was never told, and only the size matters here."""


class Frame(NamedTuple):
    """FLOPs of one frame: products with weights, and attention over the context."""

    weights: int
    attention: int


def gaia_frame(cached: bool) -> Frame:
    """One frame of GAIA-1's world model: 576 tokens, one after another, at the full context.

    The 1.15e17 FLOPs that are told hold only if all 15,860 tokens are run again for each of the 576: without a cache
    of keys and values. Then an A100 needs over six minutes a frame, not the 29 s told beside it. With a cache a frame
    takes 1.2e13, and reading weights and cache 576 times is what bounds it: six seconds.
    """
    step = Work.decode(GAIA_CONTEXT) if cached else Work.prefill(GAIA_CONTEXT)
    with torch.device("meta"):
        model = Decoder(GAIA)
    weights = cost.flops(model, step.with_(pairs=0))
    return Frame(GAIA_FRAME * weights, GAIA_FRAME * (cost.flops(model, step) - weights))


# ---- 003, Table 7: "TFLOPs" against visual tokens ---------------------------------------------------------------

TABLE_7 = {
    1: 2.380, 8: 2.428, 16: 2.484, 32: 2.595, 64: 2.817, 128: 3.262, 256: 4.151, 384: 5.040, 512: 4.151, 768: 4.151,
}  # fmt: skip
"""Visual tokens → what the table calls TFLOPs of the prefill."""


def table_7_line(tokens: int) -> float:
    """The line through the first row and that of 384, which all rows but those of 512 and 768 lie on.

    Those two repeat the row of 256. They would be 5.929 and 7.707.
    """
    slope = (TABLE_7[384] - TABLE_7[1]) / (384 - 1)
    return TABLE_7[1] + slope * (tokens - 1)


def table_7_least() -> int:
    """FLOPs that one more token costs Llama-2-7B alone, attention left out: 1.3e10.

    The table's slope is 6.945e9 a token, with a fusion module on top. So it counts multiply-adds, not operations.
    """
    with torch.device("meta"):
        model = Decoder(DECODERS["llama-2-7b"])
    return cost.flops(model, Work(tokens=1, pairs=0, asked=0))
