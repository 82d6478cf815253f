"""Figures that texts tell, each as printed, worked out again, and with what shows it: those that hold, and those that
do not survive arithmetic, with the reason."""

from collections.abc import Callable, Iterator
from math import log
from typing import NamedTuple

from vitrail.encoders.presets import SIZES
from vitrail.lab import worked as w
from vitrail.lab.audit import gaia_frame, table_7_line
from vitrail.lab.ledger import DEVICES, ledger
from vitrail.lab.systems import compression, system

EYES = "audit of vision-language models"
WORLDS = "audit of world models"
TUTORIAL = "tutorial on vision-language models"
TOKENS = "arXiv 2412.18387"
QLIP = "QLIP"
GENIE = "Genie"


ABOUT = 0.07  # the share that what is printed with a "~" may be off by


class Told(NamedTuple):
    """
    source   the text
    about    what the figure is of
    printed  the figure, as it is printed there
    told     the same as a number
    worked   ours
    by       a command or a formula that shows it
    within   the share that it may be off by
    why      it does not hold, where it does not
    """

    source: str
    about: str
    printed: str
    told: float
    worked: Callable[[], float]
    by: str
    within: float = 0.0
    why: str = ""

    @property
    def holds(self) -> bool:
        return not self.why

    def fits(self) -> bool:
        """Whether our figure is the one told."""
        return abs(self.worked() - self.told) <= self.within * abs(self.told)


# fmt: off
FIGURES: tuple[Told, ...] = (
    # ---- tokens ----
    Told(EYES, "LLaVA-1.5's patches", "576", 576, lambda: ledger("clip-l14-336", devices=()).tokens,
         "vitrail ledger clip-l14-336"),
    Told(EYES, "the same with CLS", "577", 577, lambda: w.vit("clip-l14-336").work().tokens, "(336 / 14)² + 1"),
    Told(EYES, "LLaVA-1.0's patches", "256", 256, lambda: w.seen("llava-1.0"), "vitrail ledger llava-1.0"),
    Told(TUTORIAL, "32 frames for LLaVA-1.5", "18432", 18_432, lambda: w.seen("llava-1.5-7b", pictures=32),
         "vitrail ledger llava-1.5-7b --pictures 32"),
    Told(TUTORIAL, "BLIP-2's tokens of a picture", "32", 32, lambda: w.seen("blip2-opt-2.7b"),
         "vitrail ledger blip2-opt-2.7b"),
    Told(TOKENS, "HD-9's patches", "5760", 5_760, w.patches, "10 · 24²"),
    Told(TOKENS, "HD-9's tokens", "1450", 1_450, lambda: w.views()[1], "10 · (12² + 1)"),
    Told(WORLDS, "GAIA-1's tokens of a frame", "576", 576, lambda: ledger("gaia1", devices=()).tokens,
         "vitrail ledger gaia1"),
    Told(WORLDS, "GAIA-1's context", "15,860", 15_860, lambda: system("gaia-1", devices=()).own,
         "26 · (32 + 576 + 2)"),
    # ---- bits ----
    Told(WORLDS, "GAIA-1, times fewer bits", "≈ 470×", 472.6, lambda: compression("gaia1"),
         "24 · 288 · 512 / (576 · 13) = 472.6", 1e-4),
    Told(QLIP, "VQGAN of 2^14 codes, factor 16", "438.8", 438.8, lambda: compression("vqgan-f16-16384"),
         "24 · 16² / 14", 2e-4),
    Told(QLIP, "MaskGIT's VQGAN, 2^10 codes", "614.4", 614.4, lambda: compression("vqgan-f16-1024"),
         "24 · 16² / 10"),
    Told(QLIP, "BSQ-ViT and QLIP-B/16, 28 bits", "219.4", 219.4, lambda: compression("qlip-b16-256"),
         "24 · 16² / 28", 2e-4),
    Told(QLIP, "BSQ-ViT, 18 bits, factor 8", "85.3", 85.3, lambda: compression("bsq-vit-b8-18"),
         "24 · 8² / 18", 4e-4),
    Told(QLIP, "QLIP-B/8", "54.8", 54.8, lambda: compression("qlip-b8-256"), "24 · 8² / 28", 2e-3),
    Told(QLIP, "QLIP-L/14", "168", 168.0, lambda: compression("qlip-l14-392"), "24 · 14² / 28"),
    Told(QLIP, "MoVQGAN, 40 bits", "153.6", 153.6, lambda: w.fewer(40, 16), "24 · 16² / 40"),
    Told(QLIP, "RQ-VAE, factor 32, 112 bits", "219.4", 219.4, lambda: w.fewer(112, 32), "24 · 32² / 112", 2e-4),
    Told(QLIP, "DALL-E's dVAE and ViT-VQGAN, 13 bits", "118.2", 118.2, lambda: w.fewer(13, 8), "24 · 8² / 13", 4e-4),
    Told(QLIP, "VILA-U at 384, 224 bits", "21", 21.0, lambda: w.fewer(224, 14), "24 · 14² / 224"),
    # ---- parameters ----
    Told(QLIP, "QLIP-B: encoder, decoder, quantizer", "87M + 87M + 1M", 175e6,
         lambda: w.codec_parameters("qlip-b16-256"), "vitrail ledger qlip-b16-256", 0.01),
    Told(QLIP, "QLIP-L: encoder, decoder, quantizer", "304M + 304M + 2M", 610e6,
         lambda: w.codec_parameters("qlip-l14-392"), "vitrail ledger qlip-l14-392", 0.01),
    Told(EYES, "Qwen3-VL's flagship", "235B", 235e9, lambda: w.parameters("qwen3-vl-235b-a22b"),
         "vitrail ledger qwen3-vl-235b-a22b --all", 0.01),
    Told(EYES, "and what a token meets of it", "22B", 22e9, lambda: ledger("qwen3-235b-a22b", devices=()).active,
         "vitrail ledger qwen3-235b-a22b", 0.02),
    Told(WORLDS, "GAIA-1, all parts", "9.4B", 9.4e9, lambda: w.parameters("gaia-1"),
         "vitrail ledger gaia-1 --all", 0.01),
    Told(WORLDS, "Cosmos' denoiser", "14B", 14e9, lambda: w.parameters("cosmos-2-14b"),
         "vitrail ledger cosmos-2-14b --all", 0.02),
    Told(TUTORIAL, "ViT-B/16", "86M", 86e6, lambda: w.vit_parameters("clip-b16"), "vitrail ledger clip-b16", 0.01),
    Told(TUTORIAL, "ViT-L/14", "304M", 304e6, lambda: w.vit_parameters("clip-l14"), "vitrail ledger clip-l14", 0.01),
    Told(TUTORIAL, "ViT-H/14", "632M", 632e6, lambda: w.vit_parameters("clip-h14"), "vitrail ledger clip-h14", 0.01),
    Told(TUTORIAL, "LLaVA-1.5's projector", "~20M", 20e6, lambda: w.part("llava-1.5-7b", "connector"),
         "vitrail ledger llava-1.5-7b", ABOUT),
    Told(TUTORIAL, "BLIP-2's Q-Former, with its half for texts", "~180M", 180e6, w.whole_qformer,
         "vitrail.lab.worked.whole_qformer()", ABOUT),
    # ---- operations ----
    Told(EYES, "SigLIP beside DINOv2 at 224", "~350-400 GFLOPs", 375e9,
         lambda: ledger("prismatic-224", devices=()).forward, "vitrail ledger prismatic-224", ABOUT),
    Told(WORLDS, "training GAIA-1's world model", "9.4 × 10²¹", 9.4e21, w.gaia_training,
         "6 · 6.5e9 · 420e6 · 576", 0.01),
    Told(WORLDS, "GAIA-1's tokens a parameter", "~37", 37, w.gaia_ratio, "420e6 · 576 / 6.5e9", ABOUT),
    Told(WORLDS, "GAIA-1: attention over 6.25 Hz for 25 Hz, times less", "~15×", 15, lambda: (25 / w.GAIA_HZ) ** 2,
         "(25 / 6.25)²", ABOUT),
    Told(TOKENS, "Table 7, 1 query, in multiply-adds", "2.380", 2.380e12, lambda: w.table_7(1),
         "vitrail.lab.worked.table_7(1)", 0.01),
    Told(TOKENS, "Table 7, 256 queries", "4.151", 4.151e12, lambda: w.table_7(256),
         "vitrail.lab.worked.table_7(256)", 0.01),
    Told(TOKENS, "Table 7, 384 queries", "5.040", 5.040e12, lambda: w.table_7(384),
         "vitrail.lab.worked.table_7(384)", 0.01),
    Told(TOKENS, "Table 7, one more query, by its rows of 1 and 384", "(5.040 − 2.380) / 383", 6.945e9, w.slope,
         "vitrail.lab.worked.slope()", 0.015),
    # ---- losses ----
    Told(TUTORIAL, "CLIP's first scale", "≈ 2.659", 2.659, lambda: log(1 / 0.07), "ln(1 / 0.07)", 2e-4),
    Told(TUTORIAL, "SigLIP's loss of 8 pairs where all logits are 0", "5.545", 5.545, lambda: 64 * log(2) / 8,
         "64 ln 2 / 8", 1e-4),

    # ==== what does not hold ====
    Told(WORLDS, "GAIA-1: FLOPs a frame", "≈ 1.15 × 10¹⁷", 1.15e17, lambda: sum(gaia_frame(cached=True)),
         "vitrail.lab.audit.gaia_frame(cached=True)", 0.1,
         "holds only if all 15,860 tokens are run again for each of the 576"),
    Told(WORLDS, "GAIA-1: seconds a frame on an A100", "~29", 29, lambda: w.gaia_seconds("a100"),
         "vitrail ledger gaia-1 --all --device a100", ABOUT,
         "1.15e17 FLOPs would take over six minutes; with a cache weights and keys are read 576 times"),
    Told(WORLDS, "GAIA-1: times slower than real time there", "180×", 180, lambda: w.GAIA_HZ * w.gaia_seconds("a100"),
         "6.25 Hz · the seconds above", 0.1, "follows from the 29 s"),
    Told(WORLDS, "GAIA-1: frames a second on an H100", "≈ 0.02", 0.02, lambda: 1 / w.gaia_seconds("h100"),
         "vitrail ledger gaia-1 --all --device h100", 0.1,
         "follows from the 1.15e17 FLOPs; ours is the most there can be"),
    Told(WORLDS, "GAIA-1: times slower than real time on Orin, at least", "3-4 orders of magnitude", 1e3,
         lambda: w.GAIA_HZ * w.gaia_seconds("orin"), "6.25 Hz · vitrail ledger gaia-1 --all --device orin", 0.1,
         "follows from the 1.15e17 FLOPs; by reading weights and keys alone it is less than three"),
    Told(WORLDS, "TesserAct's videos", "~200,000", 200e3, lambda: 1e3 * (80 + 80 + 25 + 100),
         "80k + 80k + 25k + 100k", ABOUT,
         "the table of its data sets adds up to 285k, as is told elsewhere in the text"),
    Told(WORLDS, "an H100's FLOPs a second in 16 bits", "≈ 2,000 TFLOPS", 2_000e12, lambda: DEVICES["h100"].flops,
         "datasheet, dense", 0.1, "in 16 bits only with half of the weights zero; dense it is that in 8 bits"),
    Told(WORLDS, "Orin's FLOPs a second", "≈ 67 TFLOPS", 67e12, lambda: DEVICES["orin"].flops, "85e12 / 2", 0.1,
         "its GPU has 170 sparse int8 TOPS: 85 dense, half of that in 16 bits"),
    Told(EYES, "Orin's seconds for two towers", "below 1.0 Hz", 1.0, w.two_towers,
         "vitrail ledger prismatic-224 --device orin", 0.5,
         "400 GFLOPs take it 9 ms; what makes a 7B model slow there is reading its weights, over 60 ms a token"),
    Told(EYES, "LLaVA-1.5: bits of a picture, at most", "576 × 1024 × log₂(precision)", 576 * 1024 * 16,
         lambda: 24 * 336**2, "24 · 336²", 0.1,
         "at 16 bits a number that is 3.5 times what the picture has, and so bounds nothing"),
    Told(TOKENS, "Table 7, 512 queries", "4.151", 4.151e12, lambda: 1e12 * table_7_line(512),
         "1e12 · vitrail.lab.audit.table_7_line(512)", 0.01, "repeats the row of 256; the other eight lie on one line"),
    Told(TOKENS, "Table 7, 768 queries", "4.151", 4.151e12, lambda: 1e12 * table_7_line(768),
         "1e12 · vitrail.lab.audit.table_7_line(768)", 0.01, "repeats the row of 256; the other eight lie on one line"),
    Told(TOKENS, "Table 7's TFLOPs, 256 queries", "4.151", 4.151e12, lambda: 2 * w.table_7(256),
         "2 · vitrail.lab.worked.table_7(256)", 0.01, "counts multiply-adds: operations are twice as many"),
    Told(TOKENS, "HD-9's merge, patches a token", "4 × 4 ⇒ 1", 16, w.merged, "5760 / 1440", 0.0,
         "printed beside a factor of four: it is 2 × 2"),
    Told(TOKENS, "width of its tower, CLIP ViT-H/14", "1024", 1024, lambda: SIZES["H"][0], "16 heads of 80", 0.0,
         "1,024 wide, at 336 pixels, is ViT-L/14"),
    Told(TOKENS, "what suprema of cosines let D² be: unit states, the second 30° to either side", "Υ = 0", 0.0,
         lambda: w.squared_distance(30, 2), "‖(√3 / 2, ½) − (√3 / 2, −½)‖²", 0.0,
         "cosines between the branches count against Υ, so their suprema make no bound"),
    Told(TOKENS, "squared distance of two equal states, by the appendix", "2M²(1 − 2 E cos)", -2.0,
         lambda: w.squared_distance(0, 1), "2M²(1 − E cos) = 0 at M = 1, cos = 1", 0.0,
         "a two too many: no square is negative"),
    Told(TUTORIAL, "LLaVA-NeXT's tokens, at most", "2880", 2_880, lambda: w.seen("llava-next-7b", picture=(672, 672)),
         "vitrail ledger llava-next-7b --picture 672x672", 0.0,
         "five views of 576; the 48 newlines behind the rows are tokens too"),
    Told(TUTORIAL, "and with the 2 × 3 tiles told beside it", "2880", 2_880, lambda: (1 + 2 * 3) * 576,
         "(1 + 2 · 3) · 576", 0.0, "seven views; its released grids have no more than four tiles"),
    Told(TUTORIAL, "CLIP's loss of 8 unrelated pairs at its first scale, width 512", "≈ 2.08 ≈ log(N)", 2.08,
         lambda: w.clip_at_start(8, 512, 1 / 0.07), "vitrail.lab.worked.clip_at_start(8, 512, 1 / 0.07)", 0.01,
         "logits of unrelated vectors spread by 0.63 there, which costs some 0.17 beyond ln 8"),
    Told(QLIP, "VILA-U at 256, times fewer bits", "27.4", 27.4, lambda: w.fewer(56, 16), "24 · 16² / 56", 0.01,
         "56 bits are those of all four depths; 27.4 counts the depths again"),
    Told(GENIE, "Genie's dynamics", "10.1B", 10.1e9, w.genie, "vitrail.lab.worked.genie()", 0.05,
         "48 layers of width 5,120 with 36 heads of 128, twice a layer, and the usual MLP"),
    Told(GENIE, "Genie's patches of 4 × 4 in a frame of 160 × 90", "160 × 90 / 4²", 900,
         lambda: system("genie-11b", devices=()).picture, "40 · ⌈90 / 4⌉", 0.0,
         "90 rows are no multiple of 4: they are padded to 92"),
)
# fmt: on


def rows(holding: bool) -> Iterator[tuple[str, ...]]:
    """Of the figures that hold, or of the others: source, what it is of, as printed, ours, what shows it, and why."""
    for one in FIGURES:
        if one.holds == holding:
            yield one.source, one.about, one.printed, number(one.worked()), one.by, one.why


def number(value: float) -> str:
    """Four figures, as a person writes them."""
    if value == int(value) and abs(value) < 1e6:
        return f"{int(value):,}"
    return f"{value:.4g}" if 1e-3 < abs(value) < 1e4 else f"{value:.3e}".replace("e+", "e").replace("e0", "e")
