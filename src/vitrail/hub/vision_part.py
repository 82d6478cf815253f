"""Models of which only the vision tower is implemented: Segment Anything and BLIP.

The tower is read from the full checkpoint, and the tensors of the other parts are left out. An export writes the tower
alone.
"""

from typing import Any

from vitrail.hub.blip2 import BLIP_TOWER
from vitrail.hub.checkpoint_family import CheckpointFamily
from vitrail.hub.tensor_rules import add_prefix
from vitrail.hub.vlm_towers import SAM_VISION
from vitrail.registry import FAMILIES


def build_vision_part_family(
    name: str, tower: CheckpointFamily, prefix: str, other_parts: tuple[str, ...]
) -> CheckpointFamily:
    """Build the family of a model whose vision tower alone is read.

    prefix       prefix of the tower's tensors in the full checkpoint
    other_parts  prefixes of the tensors of the other parts
    """

    def read_config(hf_config: dict[str, Any]) -> Any:
        return tower.from_hf_config(hf_config.get("vision_config") or {})

    return CheckpointFamily(
        name,
        tower.model_class,
        read_config,
        tower.to_hf_config,
        lambda _config: False,
        lambda config: add_prefix("", prefix, tower.tensor_rules(config)),
        ignored_prefixes=other_parts,
        part_defaults={"vision_config": tower.class_defaults},
    )


SAM = build_vision_part_family("sam", SAM_VISION, "", ("prompt_encoder.", "mask_decoder.", "shared_image_embedding."))
BLIP = build_vision_part_family(
    "blip",
    BLIP_TOWER,
    "vision_model.",
    (
        "text_decoder.",
        "text_encoder.",
        "text_model.",
        "vision_proj.",
        "text_proj.",
        "itm_head.",
        "visual_projection.",
        "text_projection.",
        "logit_scale",
    ),
)
FAMILIES.register("sam", SAM)
FAMILIES.register("blip", BLIP)
