"""LLaVA's own layout (`liuhaotian/llava-v1.5-7b`): read as LLaVA-1.5 or LLaVA-NeXT. Exports have transformers' layout.

The config names a vision tower, and has neither a vision_config nor an image token. LLaVA-1.5's files lack the tower's
weights, which are those of the named CLIP repository. LLaVA-NeXT's files contain a tower that was trained further.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from vitrail.connectors import ProjectorConfig
from vitrail.errors import CheckpointError
from vitrail.hub.chat_config import ChatConfig
from vitrail.hub.checkpoint_family import (
    CheckpointFamily,
    fill_defaults,
    make_read_only,
    reject_settings,
    require_key,
)
from vitrail.hub.checkpoint_info import resolve_reference
from vitrail.hub.encoder_families import CLIP_VISION
from vitrail.hub.llava import CLIP_L_336, LANGUAGE_MODELS, LLAVA_15, LLAVA_NEXT, find_part_family
from vitrail.hub.safetensors_files import SafetensorsWeights
from vitrail.hub.tensor_rules import TensorRule, add_prefix, rename_layer, view
from vitrail.models.vlm import VLM, VLMConfig
from vitrail.processing.image_processors import mean_to_fill_colour
from vitrail.processing.resolution_policies import LetterboxPolicy
from vitrail.registry import FAMILIES

HFConfig = dict[str, Any]

TOWERS: dict[str, HFConfig] = {
    "openai/clip-vit-large-patch14": {**CLIP_L_336, "image_size": 224},
    "openai/clip-vit-large-patch14-336": CLIP_L_336,
}
TOWER_PREFIX = "model.vision_tower.vision_tower."
FEATURE_STRATEGIES = {"patch": "default", "cls_patch": "full"}
DEFAULTS: HFConfig = {
    "mm_projector_type": "linear",
    "mm_vision_select_layer": -2,
    "mm_vision_select_feature": "patch",
    "mm_patch_merge_type": "flat",
    "image_aspect_ratio": "square",
}
PROJECTOR_LAYERS = {"linear": 1, "mlp2x_gelu": 2, "mlp3x_gelu": 3, "mlp4x_gelu": 4}


def _find_tower_name(hf_config: HFConfig) -> str:
    """Return the hub id of the tower. Trained models often name a local folder of it."""
    tower_path = str(require_key(hf_config, "mm_vision_tower"))
    for name in TOWERS:
        if Path(tower_path).name == Path(name).name:
            return name
    raise CheckpointError(f"mm_vision_tower {tower_path!r} is not supported", f"known: {', '.join(TOWERS)}")


def _read_config(hf_config: HFConfig) -> VLMConfig:
    hf_config = fill_defaults(hf_config, DEFAULTS)
    tower, kind = TOWERS[_find_tower_name(hf_config)], hf_config["mm_projector_type"]
    reject_settings(
        hf_config,
        mm_use_im_start_end="tokens around an image are not supported",
        mm_resampler_type="resamplers are not supported",
    )
    if kind not in PROJECTOR_LAYERS:
        raise CheckpointError(f"mm_projector_type {kind!r} is not supported", f"known: {', '.join(PROJECTOR_LAYERS)}")
    strategy = hf_config["mm_vision_select_feature"]
    if strategy not in FEATURE_STRATEGIES:
        raise CheckpointError(
            f"mm_vision_select_feature {strategy!r} is not supported", f"known: {', '.join(FEATURE_STRATEGIES)}"
        )
    ratio, merge = hf_config["image_aspect_ratio"], hf_config["mm_patch_merge_type"]
    if (ratio, merge) not in (("square", "flat"), ("pad", "flat"), ("anyres", "spatial_unpad")):
        raise CheckpointError(
            f"image_aspect_ratio {ratio!r} with mm_patch_merge_type {merge!r} is not supported",
            "known: square or pad with flat, anyres with spatial_unpad",
        )
    family, more = (LLAVA_15, {}) if merge == "flat" else (LLAVA_NEXT, {"image_grid_pinpoints": _read_grids(hf_config)})
    config = family.from_hf_config(
        {
            "model_type": family.name,
            "vision_config": {"model_type": CLIP_VISION.name, **tower},
            "text_config": {**hf_config, "model_type": "llama"},
            "image_token_index": _read_image_token_id(hf_config),
            "vision_feature_layer": hf_config["mm_vision_select_layer"],
            "vision_feature_select_strategy": FEATURE_STRATEGIES[strategy],
            **more,
        }
    )
    connector = config.connector
    assert isinstance(connector, ProjectorConfig)
    config = config.replace(connector=connector.replace(layers=PROJECTOR_LAYERS[kind]))
    if ratio != "pad":
        return config
    fill_colour = mean_to_fill_colour(config.mean)
    size = {key: getattr(config.policy, key) for key in ("image_size", "patch_size", "unread_pixels")}
    return config.replace(policy=LetterboxPolicy(fill_colour=fill_colour, **size))


def _read_grids(hf_config: HFConfig) -> list[list[int]]:
    """Read the grids of tiles, which LLaVA stores as (width, height)."""
    return [[height, width] for width, height in require_key(hf_config, "image_grid_pinpoints")]


def _read_image_token_id(hf_config: HFConfig) -> int:
    """Return the id that stands for an image. LLaVA has none in its vocabulary, so the unused id of <unk> serves."""
    if hf_config.get("image_token_index") is not None:
        return hf_config["image_token_index"]
    if hf_config.get("pad_token_id") is None:
        raise CheckpointError(
            "image_token_index and pad_token_id are missing",
            "set image_token_index to the id of a special token that no text contains, such as <unk>",
        )
    return hf_config["pad_token_id"]


def _build_rules(config: VLMConfig) -> list[TensorRule]:
    assert isinstance(config.connector, ProjectorConfig)
    layers, width = config.connector.layers, config.decoder.block.width
    language_family = find_part_family(config.decoder, LANGUAGE_MODELS)
    rules = [
        *add_prefix("tower.", f"{TOWER_PREFIX}vision_model.", CLIP_VISION.tensor_rules(config.tower)),
        *add_prefix("decoder.", "", language_family.tensor_rules(config.decoder)),
    ]
    for i in range(layers):
        name = "model.mm_projector" if layers == 1 else f"model.mm_projector.{2 * i}"
        rules += rename_layer(f"connector.layers.linears.{i}", name)
    return [*rules, view("newline", "model.image_newline", (1, width), (width,))] if config.newline else rules


class _WeightsWithTower(SafetensorsWeights):
    """Weights of a folder without a vision tower, and the tower of another folder in the dtype of the decoder."""

    def __init__(self, path: Path, tower: SafetensorsWeights):
        super().__init__(path)
        self._tower = tower
        names = [name for name in tower if name.startswith("vision_model.")]
        self._tower_names = {TOWER_PREFIX + name: name for name in names}

    def __contains__(self, name: str) -> bool:
        return super().__contains__(name) or name in self._tower_names

    def __iter__(self) -> Iterator[str]:
        yield from super().__iter__()
        yield from self._tower_names

    def get_shape(self, name: str) -> tuple[int, ...]:
        tower_name = self._tower_names.get(name)
        return super().get_shape(name) if tower_name is None else self._tower.get_shape(tower_name)

    def get_file(self, name: str) -> Path:
        tower_name = self._tower_names.get(name)
        return super().get_file(name) if tower_name is None else self._tower.get_file(tower_name)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._tower_names:
            return super().__getitem__(name)
        return self._tower[self._tower_names[name]].to(super().__getitem__("model.norm.weight").dtype)


def _open_weights(path: Path, hf_config: HFConfig) -> SafetensorsWeights:
    weights = SafetensorsWeights(path)
    if any(name.startswith(TOWER_PREFIX) for name in weights):
        return weights
    name = _find_tower_name(hf_config)
    folder = path / Path(name).name
    try:
        return _WeightsWithTower(path, SafetensorsWeights(folder if folder.exists() else resolve_reference(name, path)))
    except CheckpointError as error:
        raise CheckpointError(
            f"{path} contains no vision tower: mm_vision_tower names {name}, which cannot be opened ({error.problem})",
            f"put the model.safetensors of {name} into {folder}, or: {error.remedy}",
        ) from None


LLAVA_ORIGINAL = CheckpointFamily(
    "LlavaLlamaForCausalLM",
    VLM,
    _read_config,
    tensor_rules=_build_rules,
    **make_read_only(LLAVA_15.name, LLAVA_NEXT.name),
    config_key="architectures",
    open_weights=_open_weights,
    chat_config=ChatConfig("LlavaProcessor", "vicuna"),
)
FAMILIES.register("LlavaLlamaForCausalLM", LLAVA_ORIGINAL)
