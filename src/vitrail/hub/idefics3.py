"""Idefics 3 and SmolVLM: SigLIP over the tiles of a split image, a linear merger of patches, and a Llama.

Texts around the tiles name their rows and columns. The whole image follows the tiles. SmolVLM takes videos too, whose
frames follow their times.
"""

from collections.abc import Callable
from typing import Any

from vitrail.connectors import MergerConfig
from vitrail.encoders.vit import ViTConfig
from vitrail.errors import ConfigError
from vitrail.hub.chat_config import ChatConfig, VisionTokens
from vitrail.hub.checkpoint_family import CheckpointFamily, build_round_trip_check, fill_defaults
from vitrail.hub.encoder_families import SIGLIP_VISION
from vitrail.hub.llava import LANGUAGE_MODELS, find_part_family, normalize_llava_config, read_part, write_part
from vitrail.hub.tensor_rules import TensorRule, add_prefix, rename
from vitrail.models.vlm import VLM, VLMConfig
from vitrail.processing import image_processors
from vitrail.processing.image_layout import ImageLayout
from vitrail.processing.image_loading import NORMALIZATIONS
from vitrail.processing.split_tiles import SplitPolicy
from vitrail.registry import FAMILIES
from vitrail.stream import StreamRules

HFConfig = dict[str, Any]

# Defaults of transformers for keys that a config.json leaves out.
DEFAULTS: HFConfig = {"image_token_id": 128_257, "scale_factor": 2, "tie_word_embeddings": False}
VISION_DEFAULTS: HFConfig = {
    "hidden_size": 1152,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 32,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}
TEXT_DEFAULTS: HFConfig = {"rms_norm_eps": 1e-5}  # of a config.json without text_config


def _read_config(hf_config: HFConfig) -> VLMConfig:
    hf_config = fill_defaults(hf_config, DEFAULTS)
    vision = fill_defaults(hf_config.get("vision_config") or {}, VISION_DEFAULTS)
    tower = SIGLIP_VISION.from_hf_config({**vision, "vision_use_head": False})
    hf_config["text_config"] = hf_config.get("text_config") or TEXT_DEFAULTS
    _, decoder = read_part(hf_config, "text_config", LANGUAGE_MODELS, "llama")
    connector = MergerConfig(
        in_features=tower.width,
        out_features=decoder.block.width,
        merge=hf_config["scale_factor"],
        layers=1,
        bias=False,
        norm_position="none",
    )
    normalization, size = NORMALIZATIONS["half"], tower.image_size
    return VLMConfig(
        tower=tower,
        connector=connector,
        decoder=decoder.replace(tie_word_embeddings=hf_config["tie_word_embeddings"]),
        policy=SplitPolicy(
            tile_size=size,
            patch_size=tower.patch_size,
            unread_pixels=size % tower.patch_size,
            merge_size=connector.merge,
            longest_edge=4 * size,
        ),
        mean=normalization.mean,
        std=normalization.std,
        rules=StreamRules(fill_id=hf_config["image_token_id"]),
    )


def _read_smolvlm(hf_config: HFConfig) -> VLMConfig:
    config = _read_config(hf_config)
    return config.replace(policy=config.policy.replace(takes_videos=True))


def _write_config(config: VLMConfig, name: str) -> HFConfig:
    tower, connector = config.tower, config.connector
    if not isinstance(tower, ViTConfig) or not isinstance(connector, MergerConfig) or tower.pool != "none":
        raise ConfigError(f"{name} needs a ViT without pooling, and a merger")
    vision = SIGLIP_VISION.to_hf_config(tower)
    return {
        "architectures": [f"{CLASS_NAMES[name]}ForConditionalGeneration"],
        "vision_config": {
            "model_type": f"{name}_vision",
            **{key: value for key, value in vision.items() if key in VISION_DEFAULTS},
        },
        "text_config": write_part(find_part_family(config.decoder, LANGUAGE_MODELS), config.decoder),
        "image_token_id": config.rules.fill_id,
        "scale_factor": connector.merge,
        "tie_word_embeddings": config.decoder.tie_word_embeddings,
    }


def _write_processor_fields(config: Any, vision_tokens: VisionTokens) -> HFConfig:
    return {"image_seq_len": config.view_grid.num_tokens}


def write_image_text(layout: ImageLayout, number: int = 0) -> list[str]:
    """Write the texts before each view of an image, and after the last one."""
    *tiles, overview = layout.views
    texts = []
    if tiles:
        rows, columns = (tiles[0].resized_size[axis] // overview.canvas_size[axis] for axis in (0, 1))
        texts = [f"{FAKE_TOKEN}<row_{row + 1}_col_{column + 1}>" for row in range(rows) for column in range(columns)]
        texts = ["\n" * (n > 0 and n % columns == 0) + text for n, text in enumerate(texts)]
    return [*texts, "\n\n" * bool(tiles) + FAKE_TOKEN + "<global-img>", FAKE_TOKEN]


def _build_rules(config: VLMConfig) -> list[TensorRule]:
    language_family = find_part_family(config.decoder, LANGUAGE_MODELS)
    text_rules = [
        rule._replace(hf=tuple(name.removeprefix("model.") for name in rule.hf))
        for rule in language_family.tensor_rules(config.decoder)
    ]
    head = [rule for rule in text_rules if rule.native == ("head.weight",)]
    return [
        *add_prefix("tower.", "model.vision_model.", SIGLIP_VISION.tensor_rules(config.tower)),
        rename("connector.layers.linears.0.weight", "model.connector.modality_projection.proj.weight"),
        *add_prefix("decoder.", "model.text_model.", [rule for rule in text_rules if rule not in head]),
        *add_prefix("decoder.", "", head),
    ]


FAKE_TOKEN = "<fake_token_around_image>"
CLASS_NAMES = {"idefics3": "Idefics3", "smolvlm": "SmolVLM"}


def _normalize_config(config: VLMConfig) -> VLMConfig:
    return normalize_llava_config(config).replace(video_sampling=None)  # part of the video processor file


def _make_family(
    name: str, read: Callable[[HFConfig], VLMConfig], image_processor: image_processors.HFImageProcessor
) -> CheckpointFamily:
    takes_videos = read is _read_smolvlm

    def write(config: VLMConfig) -> HFConfig:
        return _write_config(config, name)

    return CheckpointFamily(
        name,
        VLM,
        read,
        write,
        build_round_trip_check(read, write, _normalize_config, image_processor),
        _build_rules,
        duplicate_tensors=(("lm_head.weight", "model.text_model.embed_tokens.weight"),),
        image_processor=image_processor,
        has_video_processor=takes_videos,
        chat_config=ChatConfig(
            f"{CLASS_NAMES[name]}Processor",
            "idefics3",
            image_boundary_tokens=(FAKE_TOKEN, FAKE_TOKEN),
            image_text=write_image_text,
            end_of_turn="<end_of_utterance>",
            processor_fields=_write_processor_fields,
            required_word="video" if takes_videos else None,
            fixed_image_token="<image>",
        ),
        class_defaults=DEFAULTS,
        part_defaults={"vision_config": VISION_DEFAULTS, "text_config": TEXT_DEFAULTS},
    )


IDEFICS3 = _make_family("idefics3", _read_config, image_processors.IDEFICS3)
SMOLVLM = _make_family("smolvlm", _read_smolvlm, image_processors.SMOLVLM)
FAMILIES.register("idefics3", IDEFICS3)
FAMILIES.register("smolvlm", SMOLVLM)
