"""Figures that texts tell of these systems, each worked out again by the ledger: those that hold, and those that do
not, with the reason."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from vitrail.backbones.decoder import Decoder
from vitrail.codecs.codec import Codec
from vitrail.codecs.presets import CODECS
from vitrail.encoders.presets import VITS
from vitrail.encoders.vit import ViT
from vitrail.lab.audit import GAIA, GAIA_CONTEXT, GAIA_FRAME, gaia_frame
from vitrail.lab.ledger import DEVICES, TRAINING, ledger
from vitrail.lab.systems import compression, genie_dynamics, system
from vitrail.models.presets import VLMS
from vitrail.models.vlm import VLM
from vitrail.nn import Work, cost
from vitrail.processing.grid import Grid

GAIA_IMAGES = 420e6
"""4,700 hours at 25 frames a second."""

VILA = 56 * Grid(h=16, w=16).tokens
"""Bits of VILA-U's codes of 256² pixels: 16 × 16 of them, four times 14 bits each."""


class Told(NamedTuple):
    """A figure, the share that it may be off by, and the ledger's; where it does not hold, why."""

    about: str
    told: float
    worked: Callable[[], float]
    within: float = 0.0
    why: str = ""

    @property
    def holds(self) -> bool:
        return not self.why

    def fits(self) -> bool:
        """Whether the ledger's figure is the one told."""
        return abs(self.worked() - self.told) <= self.within * abs(self.told)


def _vit(name: str) -> ViT:
    with torch.device("meta"):
        return ViT(VITS[name])


def _seen(name: str, **more) -> int:
    return ledger(name, devices=(), **more).seen


def _views() -> tuple[Work, int]:
    """The tower's work for a picture in HD-9, and the tokens that queries then read."""
    config = VLMS["token-scaling"]
    with torch.device("meta"):
        model = VLM(config)
    return model.work([(1008, 1008)], 1).looks[0], config.given(config.policy.cut(1008, 1008))


def _patches() -> int:
    tower, _ = _views()
    return tower.tokens - tower.rows * VITS["clip-l14-336"].prefix


def table_7(queries: int) -> float:
    """Multiply-adds of token-scaling's prefill with so many queries, 16 words and all ten views."""
    config = VLMS["token-scaling"]
    assert config.queries is not None
    config = config.with_(queries=config.queries.with_(first=queries))
    return ledger(config, context=16, devices=()).forward / 2


def _slope() -> float:
    return (table_7(384) - table_7(1)) / (384 - 1)


def gaia_training() -> float:
    """FLOPs of all products with weights for every token of every image, once."""
    with torch.device("meta"):
        model = Decoder(GAIA)
    return TRAINING * cost.flops(model, Work(tokens=1, pairs=0)) * GAIA_IMAGES * GAIA_FRAME


def _two_towers() -> float:
    return ledger("prismatic-224", devices=["orin"]).floors[0].forward.floor


def _parameters(name: str) -> int:
    return system(name, devices=(), lengths=()).parameters


def _qlip_parameters(name: str) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in Codec(CODECS[name]).parameters())


def _genie() -> int:
    """Parameters of the dynamics with an MLP of four times the width."""
    with torch.device("meta"):
        return sum(p.numel() for p in genie_dynamics(4 * 5120).parameters())


def _a_frame(device: str) -> float:
    return system("gaia-1", devices=[device], lengths=()).reach[device][GAIA_CONTEXT].seconds


# fmt: off
FIGURES: tuple[Told, ...] = (
    # ---- tokens ----
    Told("LLaVA-1.5's patches",                     576, lambda: ledger("clip-l14-336", devices=()).tokens),
    Told("the same with CLS",                       577, lambda: _vit("clip-l14-336").work().tokens),
    Told("LLaVA-1.0's tokens of a picture",         256, lambda: _seen("llava-1.0")),
    Told("32 frames for LLaVA-1.5",              18_432, lambda: _seen("llava-1.5-7b", pictures=32)),
    Told("BLIP-2's tokens of a picture",             32, lambda: _seen("blip2-opt-2.7b")),
    Told("HD-9's patches",                        5_760, _patches),
    Told("HD-9's tokens",                         1_450, lambda: _views()[1]),
    Told("GAIA-1's tokens of a frame",              576, lambda: ledger("gaia1", devices=()).tokens),
    Told("GAIA-1's context",                     15_860, lambda: system("gaia-1", devices=()).own),
    # ---- bits ----
    Told("GAIA-1, times fewer bits",              472.6, lambda: compression("gaia1"), 1e-4),
    Told("VQGAN of 2^14 codes, factor 16",        438.8, lambda: compression("vqgan-f16-16384"), 2e-4),
    Told("MaskGIT's VQGAN, 2^10 codes",           614.4, lambda: compression("vqgan-f16-1024")),
    Told("BSQ-ViT and QLIP-B/16, 28 bits",        219.4, lambda: compression("qlip-b16-256"), 2e-4),
    Told("BSQ-ViT, 18 bits, factor 8",             85.3, lambda: compression("bsq-vit-b8-18"), 4e-4),
    Told("QLIP-B/8",                               54.8, lambda: compression("qlip-b8-256"), 2e-3),
    Told("QLIP-L/14",                             168.0, lambda: compression("qlip-l14-392")),
    # ---- parameters ----
    Told("QLIP-B: encoder, decoder, quantizer",   175e6, lambda: _qlip_parameters("qlip-b16-256"), 0.01),
    Told("QLIP-L: encoder, decoder, quantizer",   610e6, lambda: _qlip_parameters("qlip-l14-392"), 0.01),
    Told("Qwen3-VL's flagship",                   235e9, lambda: _parameters("qwen3-vl-235b-a22b"), 0.01),
    Told("and what a token meets of it",           22e9, lambda: ledger("qwen3-235b-a22b", devices=()).active, 0.02),
    Told("GAIA-1, all parts",                     9.4e9, lambda: _parameters("gaia-1"), 0.01),
    Told("Cosmos' denoiser",                       14e9, lambda: _parameters("cosmos-2-14b"), 0.02),
    # ---- operations ----
    Told("SigLIP beside DINOv2 at 224",           375e9, lambda: ledger("prismatic-224", devices=()).forward, 0.07),
    Told("the same at 384",                       1.1e12, lambda: ledger("prismatic-384", devices=()).forward, 0.05),
    Told("training GAIA-1's world model",        9.4e21, gaia_training, 0.01),
    Told("Table 7, 1 query, in multiply-adds",  2.380e12, lambda: table_7(1), 0.01),
    Told("Table 7, 256 queries",                4.151e12, lambda: table_7(256), 0.01),
    Told("Table 7, 384 queries",                5.040e12, lambda: table_7(384), 0.01),
    Told("Table 7, one more query",             6.945e9, _slope, 0.015),
    # ---- what does not hold ----
    Told("GAIA-1: FLOPs a frame",              1.15e17, lambda: sum(gaia_frame(cached=True)), 0.1,
         "holds only if all 15,860 tokens are run again for each of the 576; with a cache it is 1.2e13"),
    Told("GAIA-1: seconds a frame on an A100",      29, lambda: _a_frame("a100"), 0.1,
         "1.15e17 FLOPs would take over six minutes; with a cache weights and keys are read 576 times, six seconds"),
    Told("an H100's FLOPs a second",             2_000e12, lambda: DEVICES["h100"].flops, 0.1,
         "with half of the weights zero; dense it is 989e12"),
    Told("Orin's FLOPs a second",                  67e12, lambda: DEVICES["orin"].flops, 0.1,
         "its GPU has 170 sparse int8 TOPS: 85 dense, 42.5e12 in 16 bits"),
    Told("Orin's time for two towers, s",            1.0, _two_towers, 0.5,
         "400 GFLOPs take it 9 ms; what makes a 7B model slow there is reading its weights, over 60 ms a token"),
    Told("Table 7, 512 queries",                4.151e12, lambda: table_7(512), 0.01,
         "repeats the row of 256; it would be 5.9e12 multiply-adds"),
    Told("Table 7, 768 queries",                4.151e12, lambda: table_7(768), 0.01,
         "repeats the row of 256; it would be 7.7e12 multiply-adds"),
    Told("Table 7's TFLOPs, 256 queries",       4.151e12, lambda: 2 * table_7(256), 0.01,
         "counts multiply-adds: operations are twice as many"),
    Told("HD-9's merge, patches a token",             16, lambda: _patches() / (_views()[1] - _views()[0].rows), 0.0,
         "4 × 4 ⇒ 1 is printed beside a factor of four: it is 2 × 2"),
    Told("LLaVA-NeXT's tokens, at most",           2_880, lambda: _seen("llava-next-7b", picture=(672, 672)), 0.0,
         "five views of 576; the 48 newlines behind the rows are tokens too"),
    Told("VILA-U at 256, times fewer bits",         27.4, lambda: 24 * 256**2 / VILA, 0.01,
         "56 bits are those of all four depths; 27.4 counts the depths again"),
    Told("Genie's dynamics",                      10.1e9, _genie, 0.05,
         "48 layers of width 5,120 with 36 heads of 128, twice a layer, and the usual MLP are 19 billion"),
)
# fmt: on
