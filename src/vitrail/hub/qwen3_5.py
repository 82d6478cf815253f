"""Qwen3.5 of transformers, dense and with experts: Qwen3-VL with linear attention in most layers, without DeepStack.

The released files also contain a head that predicts further tokens (`mtp`), which is not read.
"""

from typing import Any

from vitrail.hub.qwen3_5_text import QWEN3_5_DEFAULTS, QWEN3_5_MOE_DEFAULTS, QWEN3_5_MOE_TEXT, QWEN3_5_TEXT
from vitrail.hub.qwen_vl import QWEN3_SHARED, QwenVLVariant, build_qwen_vl_family
from vitrail.hub.qwen_vl_towers import QWEN_VL_TOWERS
from vitrail.registry import FAMILIES

_SHARED: Any = {
    **QWEN3_SHARED,
    "tower": QWEN_VL_TOWERS["qwen3_5"],
    "mrope_sections": (11, 11, 10),
    "image_token_id": 248_056,
    "vision_token_ids": {"video": 248_057, "vision_start": 248_053, "vision_end": 248_054},
    "ignored_prefixes": ("mtp.",),
}
QWEN3_5_VARIANTS = (
    QwenVLVariant(
        "qwen3_5",
        "Qwen3_5ForConditionalGeneration",
        language_model=QWEN3_5_TEXT,
        text_defaults=QWEN3_5_DEFAULTS,
        **_SHARED,
    ),
    QwenVLVariant(
        "qwen3_5_moe",
        "Qwen3_5MoeForConditionalGeneration",
        language_model=QWEN3_5_MOE_TEXT,
        text_defaults=QWEN3_5_MOE_DEFAULTS,
        **_SHARED,
    ),
)
QWEN3_5, QWEN3_5_MOE = map(build_qwen_vl_family, QWEN3_5_VARIANTS)
FAMILIES.register("qwen3_5", QWEN3_5)
FAMILIES.register("qwen3_5_moe", QWEN3_5_MOE)
