"""Published figures, each with our own computation, the evidence, and the reason if it does not hold."""

from collections.abc import Callable, Iterator
from math import log
from typing import NamedTuple

from experiments.published_figures import published_arithmetic as w
from experiments.published_figures.audit import count_gaia_frame_flops, interpolate_table_7
from vitrail.encoders.presets import VIT_SIZES
from vitrail.lab.cost_ledger import DEVICES, compute_ledger
from vitrail.lab.system_specs import get_system_cost

VLM_AUDIT = "audit of vision-language models"
WORLD_MODEL_AUDIT = "audit of world models"
VLM_TUTORIAL = "tutorial on vision-language models"
TOKEN_SCALING_PAPER = "arXiv 2412.18387"
QLIP_PAPER = "QLIP"
GENIE_PAPER = "Genie"


APPROXIMATE_TOLERANCE = 0.07  # relative tolerance of figures printed with "~"


class PublishedFigure(NamedTuple):
    """A figure of a publication and our computation of it.

    source           the publication
    quantity         what the figure measures
    printed          the figure as printed
    published_value  the figure as a number
    compute          our computation
    evidence         a command or a formula that yields our value
    tolerance        relative tolerance
    reason           why the figure does not hold; empty if it holds
    """

    source: str
    quantity: str
    printed: str
    value: float
    compute: Callable[[], float]
    evidence: str
    tolerance: float = 0.0
    reason: str = ""

    @property
    def holds(self) -> bool:
        return not self.reason

    def matches(self) -> bool:
        """Whether our value equals the published one within the tolerance."""
        return abs(self.compute() - self.value) <= self.tolerance * abs(self.value)


PUBLISHED_FIGURES: tuple[PublishedFigure, ...] = (
    # ---- tokens ----
    PublishedFigure(
        VLM_AUDIT,
        "LLaVA-1.5's patches",
        "576",
        576,
        lambda: compute_ledger("clip-l14-336", devices=()).tokens,
        "vitrail ledger clip-l14-336",
    ),
    PublishedFigure(
        VLM_AUDIT,
        "LLaVA-1.5's patches with CLS",
        "577",
        577,
        lambda: w.build_vit("clip-l14-336").workload().tokens,
        "(336 / 14)² + 1",
    ),
    PublishedFigure(
        VLM_AUDIT,
        "LLaVA-1.0's patches",
        "256",
        256,
        lambda: w.count_image_tokens("llava-1.0"),
        "vitrail ledger llava-1.0",
    ),
    PublishedFigure(
        VLM_TUTORIAL,
        "32 frames for LLaVA-1.5",
        "18432",
        18_432,
        lambda: w.count_image_tokens("llava-1.5-7b", num_images=32),
        "vitrail ledger llava-1.5-7b --num-images 32",
    ),
    PublishedFigure(
        VLM_TUTORIAL,
        "BLIP-2's tokens per image",
        "32",
        32,
        lambda: w.count_image_tokens("blip2-opt-2.7b"),
        "vitrail ledger blip2-opt-2.7b",
    ),
    PublishedFigure(TOKEN_SCALING_PAPER, "HD-9's patches", "5760", 5_760, w.count_hd9_patches, "10 · 24²"),
    PublishedFigure(
        TOKEN_SCALING_PAPER, "HD-9's tokens", "1450", 1_450, lambda: w.compute_hd9_workload()[1], "10 · (12² + 1)"
    ),
    PublishedFigure(
        WORLD_MODEL_AUDIT,
        "GAIA-1's tokens per frame",
        "576",
        576,
        lambda: compute_ledger("gaia1", devices=()).tokens,
        "vitrail ledger gaia1",
    ),
    PublishedFigure(
        WORLD_MODEL_AUDIT,
        "GAIA-1's context",
        "15,860",
        15_860,
        lambda: get_system_cost("gaia-1", devices=()).own_context,
        "26 · (32 + 576 + 2)",
    ),
    # ---- bits ----
    PublishedFigure(
        WORLD_MODEL_AUDIT,
        "GAIA-1, compression ratio",
        "≈ 470×",
        472.6,
        lambda: w.compute_compression_ratio("gaia1"),
        "24 · 288 · 512 / (576 · 13) = 472.6",
        1e-4,
    ),
    PublishedFigure(
        QLIP_PAPER,
        "VQGAN of 2^14 codes, factor 16",
        "438.8",
        438.8,
        lambda: w.compute_compression_ratio("vqgan-f16-16384"),
        "24 · 16² / 14",
        2e-4,
    ),
    PublishedFigure(
        QLIP_PAPER,
        "MaskGIT's VQGAN, 2^10 codes",
        "614.4",
        614.4,
        lambda: w.compute_compression_ratio("vqgan-f16-1024"),
        "24 · 16² / 10",
    ),
    PublishedFigure(
        QLIP_PAPER,
        "BSQ-ViT and QLIP-B/16, 28 bits",
        "219.4",
        219.4,
        lambda: w.compute_compression_ratio("qlip-b16-256"),
        "24 · 16² / 28",
        2e-4,
    ),
    PublishedFigure(
        QLIP_PAPER,
        "BSQ-ViT, 18 bits, factor 8",
        "85.3",
        85.3,
        lambda: w.compute_compression_ratio("bsq-vit-b8-18"),
        "24 · 8² / 18",
        4e-4,
    ),
    PublishedFigure(
        QLIP_PAPER, "QLIP-B/8", "54.8", 54.8, lambda: w.compute_compression_ratio("qlip-b8-256"), "24 · 8² / 28", 2e-3
    ),
    PublishedFigure(
        QLIP_PAPER, "QLIP-L/14", "168", 168.0, lambda: w.compute_compression_ratio("qlip-l14-392"), "24 · 14² / 28"
    ),
    PublishedFigure(
        QLIP_PAPER, "MoVQGAN, 40 bits", "153.6", 153.6, lambda: w.compute_patch_compression(40, 16), "24 · 16² / 40"
    ),
    PublishedFigure(
        QLIP_PAPER,
        "RQ-VAE, factor 32, 112 bits",
        "219.4",
        219.4,
        lambda: w.compute_patch_compression(112, 32),
        "24 · 32² / 112",
        2e-4,
    ),
    PublishedFigure(
        QLIP_PAPER,
        "DALL-E's dVAE and ViT-VQGAN, 13 bits",
        "118.2",
        118.2,
        lambda: w.compute_patch_compression(13, 8),
        "24 · 8² / 13",
        4e-4,
    ),
    PublishedFigure(
        QLIP_PAPER,
        "VILA-U at 384, 224 bits",
        "21",
        21.0,
        lambda: w.compute_patch_compression(224, 14),
        "24 · 14² / 224",
    ),
    # ---- parameters ----
    PublishedFigure(
        QLIP_PAPER,
        "QLIP-B: encoder, decoder, quantizer",
        "87M + 87M + 1M",
        175e6,
        lambda: w.count_codec_parameters("qlip-b16-256"),
        "vitrail ledger qlip-b16-256",
        0.01,
    ),
    PublishedFigure(
        QLIP_PAPER,
        "QLIP-L: encoder, decoder, quantizer",
        "304M + 304M + 2M",
        610e6,
        lambda: w.count_codec_parameters("qlip-l14-392"),
        "vitrail ledger qlip-l14-392",
        0.01,
    ),
    PublishedFigure(
        VLM_AUDIT,
        "Qwen3-VL's flagship",
        "235B",
        235e9,
        lambda: w.count_system_parameters("qwen3-vl-235b-a22b"),
        "vitrail ledger qwen3-vl-235b-a22b --all",
        0.01,
    ),
    PublishedFigure(
        VLM_AUDIT,
        "its active parameters",
        "22B",
        22e9,
        lambda: compute_ledger("qwen3-235b-a22b", devices=()).active_parameters,
        "vitrail ledger qwen3-235b-a22b",
        0.02,
    ),
    PublishedFigure(
        WORLD_MODEL_AUDIT,
        "GAIA-1, all parts",
        "9.4B",
        9.4e9,
        lambda: w.count_system_parameters("gaia-1"),
        "vitrail ledger gaia-1 --all",
        0.01,
    ),
    PublishedFigure(
        WORLD_MODEL_AUDIT,
        "Cosmos' denoiser",
        "14B",
        14e9,
        lambda: w.count_system_parameters("cosmos-2-14b"),
        "vitrail ledger cosmos-2-14b --all",
        0.02,
    ),
    PublishedFigure(
        VLM_TUTORIAL,
        "ViT-B/16",
        "86M",
        86e6,
        lambda: w.count_vit_parameters("clip-b16"),
        "vitrail ledger clip-b16",
        0.01,
    ),
    PublishedFigure(
        VLM_TUTORIAL,
        "ViT-L/14",
        "304M",
        304e6,
        lambda: w.count_vit_parameters("clip-l14"),
        "vitrail ledger clip-l14",
        0.01,
    ),
    PublishedFigure(
        VLM_TUTORIAL,
        "ViT-H/14",
        "632M",
        632e6,
        lambda: w.count_vit_parameters("clip-h14"),
        "vitrail ledger clip-h14",
        0.01,
    ),
    PublishedFigure(
        VLM_TUTORIAL,
        "LLaVA-1.5's projector",
        "~20M",
        20e6,
        lambda: w.count_component_parameters("llava-1.5-7b", "connector"),
        "vitrail ledger llava-1.5-7b",
        APPROXIMATE_TOLERANCE,
    ),
    PublishedFigure(
        VLM_TUTORIAL,
        "BLIP-2's Q-Former with its text branch",
        "~180M",
        180e6,
        w.count_qformer_parameters,
        "published_arithmetic.count_qformer_parameters()",
        APPROXIMATE_TOLERANCE,
    ),
    # ---- operations ----
    PublishedFigure(
        VLM_AUDIT,
        "SigLIP and DINOv2 at 224",
        "~350-400 GFLOPs",
        375e9,
        lambda: compute_ledger("prismatic-224", devices=()).forward_flops,
        "vitrail ledger prismatic-224",
        APPROXIMATE_TOLERANCE,
    ),
    PublishedFigure(
        WORLD_MODEL_AUDIT,
        "training GAIA-1's world model",
        "9.4 × 10²¹",
        9.4e21,
        w.count_gaia_training_flops,
        "6 · 6.5e9 · 420e6 · 576",
        0.01,
    ),
    PublishedFigure(
        WORLD_MODEL_AUDIT,
        "GAIA-1's tokens per parameter",
        "~37",
        37,
        w.compute_gaia_tokens_per_parameter,
        "420e6 · 576 / 6.5e9",
        APPROXIMATE_TOLERANCE,
    ),
    PublishedFigure(
        WORLD_MODEL_AUDIT,
        "GAIA-1: attention cost ratio of 25 Hz to 6.25 Hz",
        "~15×",
        15,
        lambda: (25 / w.GAIA_HZ) ** 2,
        "(25 / 6.25)²",
        APPROXIMATE_TOLERANCE,
    ),
    PublishedFigure(
        TOKEN_SCALING_PAPER,
        "Table 7, 1 query, in multiply-adds",
        "2.380",
        2.380e12,
        lambda: w.count_table_7_macs(1),
        "published_arithmetic.count_table_7_macs(1)",
        0.01,
    ),
    PublishedFigure(
        TOKEN_SCALING_PAPER,
        "Table 7, 256 queries",
        "4.151",
        4.151e12,
        lambda: w.count_table_7_macs(256),
        "published_arithmetic.count_table_7_macs(256)",
        0.01,
    ),
    PublishedFigure(
        TOKEN_SCALING_PAPER,
        "Table 7, 384 queries",
        "5.040",
        5.040e12,
        lambda: w.count_table_7_macs(384),
        "published_arithmetic.count_table_7_macs(384)",
        0.01,
    ),
    PublishedFigure(
        TOKEN_SCALING_PAPER,
        "Table 7, one more query (rows of 1 and 384)",
        "(5.040 − 2.380) / 383",
        6.945e9,
        w.compute_table_7_slope,
        "published_arithmetic.compute_table_7_slope()",
        0.015,
    ),
    # ---- losses ----
    PublishedFigure(
        VLM_TUTORIAL, "CLIP's initial logit scale", "≈ 2.659", 2.659, lambda: log(1 / 0.07), "ln(1 / 0.07)", 2e-4
    ),
    PublishedFigure(
        VLM_TUTORIAL,
        "SigLIP's loss of 8 pairs with all logits 0",
        "5.545",
        5.545,
        lambda: 64 * log(2) / 8,
        "64 ln 2 / 8",
        1e-4,
    ),
    # ==== figures that do not hold ====
    PublishedFigure(
        WORLD_MODEL_AUDIT,
        "GAIA-1: FLOPs per frame",
        "≈ 1.15 × 10¹⁷",
        1.15e17,
        lambda: sum(count_gaia_frame_flops(cached=True)),
        "audit.count_gaia_frame_flops(cached=True)",
        0.1,
        "assumes that each of the 576 tokens reprocesses all 15,860 tokens",
    ),
    PublishedFigure(
        WORLD_MODEL_AUDIT,
        "GAIA-1: seconds per frame on an A100",
        "~29",
        29,
        lambda: w.compute_gaia_frame_seconds("a100"),
        "vitrail ledger gaia-1 --all --device a100",
        APPROXIMATE_TOLERANCE,
        "1.15e17 FLOPs take over six minutes; with a KV cache, weights and keys are read 576 times",
    ),
    PublishedFigure(
        WORLD_MODEL_AUDIT,
        "GAIA-1: slowdown relative to real time on an A100",
        "180×",
        180,
        lambda: w.GAIA_HZ * w.compute_gaia_frame_seconds("a100"),
        "6.25 Hz · the seconds above",
        0.1,
        "derived from the 29 s",
    ),
    PublishedFigure(
        WORLD_MODEL_AUDIT,
        "GAIA-1: frames per second on an H100",
        "≈ 0.02",
        0.02,
        lambda: 1 / w.compute_gaia_frame_seconds("h100"),
        "vitrail ledger gaia-1 --all --device h100",
        0.1,
        "derived from the 1.15e17 FLOPs; ours is the upper bound",
    ),
    PublishedFigure(
        WORLD_MODEL_AUDIT,
        "GAIA-1: slowdown relative to real time on Orin, at least",
        "3-4 orders of magnitude",
        1e3,
        lambda: w.GAIA_HZ * w.compute_gaia_frame_seconds("orin"),
        "6.25 Hz · vitrail ledger gaia-1 --all --device orin",
        0.1,
        "derived from the 1.15e17 FLOPs; memory traffic gives less than three orders",
    ),
    PublishedFigure(
        WORLD_MODEL_AUDIT,
        "TesserAct's videos",
        "~200,000",
        200e3,
        lambda: 1e3 * (80 + 80 + 25 + 100),
        "80k + 80k + 25k + 100k",
        APPROXIMATE_TOLERANCE,
        "its table of datasets sums to 285k, as stated elsewhere in the text",
    ),
    PublishedFigure(
        WORLD_MODEL_AUDIT,
        "H100: 16-bit FLOPs per second",
        "≈ 2,000 TFLOPS",
        2_000e12,
        lambda: DEVICES["h100"].flops,
        "datasheet, dense",
        0.1,
        "16-bit rate with 2:4 sparsity; the dense rate is that of 8 bits",
    ),
    PublishedFigure(
        WORLD_MODEL_AUDIT,
        "Orin: FLOPs per second",
        "≈ 67 TFLOPS",
        67e12,
        lambda: DEVICES["orin"].flops,
        "85e12 / 2",
        0.1,
        "its GPU has 170 sparse int8 TOPS: 85 dense, and half of that in 16 bits",
    ),
    PublishedFigure(
        VLM_AUDIT,
        "Orin: seconds for two towers",
        "below 1.0 Hz",
        1.0,
        w.compute_two_tower_seconds,
        "vitrail ledger prismatic-224 --device orin",
        0.5,
        "400 GFLOPs take 9 ms; a 7B model is slow because it reads its weights, over 60 ms per token",
    ),
    PublishedFigure(
        VLM_AUDIT,
        "LLaVA-1.5: bits of an image, at most",
        "576 × 1024 × log₂(precision)",
        576 * 1024 * 16,
        lambda: 24 * 336**2,
        "24 · 336²",
        0.1,
        "at 16 bits per number this is 3.5 times the bits of the image, so it bounds nothing",
    ),
    PublishedFigure(
        TOKEN_SCALING_PAPER,
        "Table 7, 512 queries",
        "4.151",
        4.151e12,
        lambda: 1e12 * interpolate_table_7(512),
        "1e12 · audit.interpolate_table_7(512)",
        0.01,
        "repeats the row of 256; the other eight rows lie on one line",
    ),
    PublishedFigure(
        TOKEN_SCALING_PAPER,
        "Table 7, 768 queries",
        "4.151",
        4.151e12,
        lambda: 1e12 * interpolate_table_7(768),
        "1e12 · audit.interpolate_table_7(768)",
        0.01,
        "repeats the row of 256; the other eight rows lie on one line",
    ),
    PublishedFigure(
        TOKEN_SCALING_PAPER,
        "Table 7 as TFLOPs, 256 queries",
        "4.151",
        4.151e12,
        lambda: 2 * w.count_table_7_macs(256),
        "2 · published_arithmetic.count_table_7_macs(256)",
        0.01,
        "counts multiply-adds; FLOPs are twice as many",
    ),
    PublishedFigure(
        TOKEN_SCALING_PAPER,
        "HD-9: patches per token after merging",
        "4 × 4 ⇒ 1",
        16,
        w.compute_patches_per_token,
        "5760 / 1440",
        0.0,
        "the text also states a factor of four, which is 2 × 2",
    ),
    PublishedFigure(
        TOKEN_SCALING_PAPER,
        "width of the tower, CLIP ViT-H/14",
        "1024",
        1024,
        lambda: VIT_SIZES["H"][0],
        "16 heads of 80",
        0.0,
        "width 1,024 at 336 pixels is ViT-L/14",
    ),
    PublishedFigure(
        TOKEN_SCALING_PAPER,
        "bound of D² by suprema of cosines, for unit states 30° to either side",
        "Υ = 0",
        0.0,
        lambda: w.compute_squared_distance(30, 2),
        "‖(√3 / 2, ½) − (√3 / 2, −½)‖²",
        0.0,
        "cosines between branches enter Υ negatively, so their suprema give no bound",
    ),
    PublishedFigure(
        TOKEN_SCALING_PAPER,
        "squared distance of two equal states, by the appendix",
        "2M²(1 − 2 E cos)",
        -2.0,
        lambda: w.compute_squared_distance(0, 1),
        "2M²(1 − E cos) = 0 at M = 1, cos = 1",
        0.0,
        "one factor of two too many: a square cannot be negative",
    ),
    PublishedFigure(
        VLM_TUTORIAL,
        "LLaVA-NeXT's tokens, at most",
        "2880",
        2_880,
        lambda: w.count_image_tokens("llava-next-7b", image_size=(672, 672)),
        "vitrail ledger llava-next-7b --image-size 672x672",
        0.0,
        "five views of 576, plus 48 newline tokens",
    ),
    PublishedFigure(
        VLM_TUTORIAL,
        "LLaVA-NeXT's tokens with the stated 2 × 3 tiles",
        "2880",
        2_880,
        lambda: (1 + 2 * 3) * 576,
        "(1 + 2 · 3) · 576",
        0.0,
        "seven views; the released grids have at most four tiles",
    ),
    PublishedFigure(
        VLM_TUTORIAL,
        "CLIP's loss of 8 unrelated pairs at its initial scale, width 512",
        "≈ 2.08 ≈ log(N)",
        2.08,
        lambda: w.compute_initial_clip_loss(8, 512, 1 / 0.07),
        "published_arithmetic.compute_initial_clip_loss(8, 512, 1 / 0.07)",
        0.01,
        "logits of unrelated vectors have a spread of 0.63, which adds about 0.17 to ln 8",
    ),
    PublishedFigure(
        QLIP_PAPER,
        "VILA-U at 256, compression ratio",
        "27.4",
        27.4,
        lambda: w.compute_patch_compression(56, 16),
        "24 · 16² / 56",
        0.01,
        "56 bits already include all four depths; 27.4 counts the depths twice",
    ),
    PublishedFigure(
        GENIE_PAPER,
        "parameters of Genie's dynamics",
        "10.1B",
        10.1e9,
        w.count_genie_parameters,
        "published_arithmetic.count_genie_parameters()",
        0.05,
        "48 layers of width 5,120 with two attentions of 36 heads of 128 and the usual MLP have more",
    ),
    PublishedFigure(
        GENIE_PAPER,
        "Genie: 4 × 4 patches in a frame of 160 × 90",
        "160 × 90 / 4²",
        900,
        lambda: get_system_cost("genie-11b", devices=()).tokens_per_image,
        "40 · ⌈90 / 4⌉",
        0.0,
        "90 rows are not a multiple of 4 and are padded to 92",
    ),
)


def iter_figures(holding: bool) -> Iterator[tuple[str, ...]]:
    """Yield the figures that hold, or the others: source, quantity, printed, ours, evidence, reason."""
    for one in PUBLISHED_FIGURES:
        if one.holds == holding:
            yield one.source, one.quantity, one.printed, format_number(one.compute()), one.evidence, one.reason


def format_number(value: float) -> str:
    """Format a number with four significant digits."""
    if value == int(value) and abs(value) < 1e6:
        return f"{int(value):,}"
    return f"{value:.4g}" if 1e-3 < abs(value) < 1e4 else f"{value:.3e}".replace("e+", "e").replace("e0", "e")
