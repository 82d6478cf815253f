"""Molmo 1: CLIP over overlapping tiles, attention pooling of two layers' features, and Qwen2 or OLMo 2.

transformers has no such models; they follow the published code. Exports have the published layout, for which other
libraries need the code files of the original repository. The published config names neither the tower, which is always
CLIP ViT-L/14 at 336 pixels with 23 blocks, nor the special tokens, whose ids are read from the tokenizer's files. Other
towers are written under the key vision_backbone, which the published code ignores.

The published processor places several images at the start of the text, but all their features at the first of them;
here every image has its own.
"""

from pathlib import Path
from typing import Any

from vitrail.connectors import AttentionPoolConnectorConfig
from vitrail.encoders.vit import ViTConfig
from vitrail.errors import CheckpointError, ConfigError
from vitrail.hub.chat_config import ChatConfig
from vitrail.hub.checkpoint_family import (
    ACTIVATIONS,
    CheckpointFamily,
    build_round_trip_check,
    fill_defaults,
    reject_settings,
)
from vitrail.hub.decoder_config import read_decoder_config, write_decoder_config
from vitrail.hub.llava import normalize_llava_config
from vitrail.hub.tensor_rules import (
    TensorRule,
    add_prefix,
    fuse,
    fuse_layer,
    permute_columns,
    rename,
    rename_layer,
    swap_halves,
)
from vitrail.models.vlm import VLM, VLMConfig
from vitrail.models.vlm_config import NEWLINE_TOKEN
from vitrail.nn import AttentionConfig, BlockConfig, GatedMLPConfig, PlainMLPConfig
from vitrail.processing.image_layout import ImageLayout
from vitrail.processing.image_processors import HFImageProcessor
from vitrail.processing.overlapping_tiles import OverlapPolicy
from vitrail.processing.tokenizer_files import read_added_tokens
from vitrail.registry import FAMILIES
from vitrail.stream import StreamRules

HFConfig = dict[str, Any]

START_TOKEN, END_TOKEN, PATCH_TOKEN, COLUMN_TOKEN = "<im_start>", "<im_end>", "<im_patch>", "<im_col>"
TOKEN_KEYS = {PATCH_TOKEN: "image_patch_token_id", COLUMN_TOKEN: "image_col_token_id"}  # as in the processor
NUM_EXTRA_EMBEDDINGS = 128  # embeddings beyond the vocabulary; the first four are those of the tokens above
FEATURE_LAYERS = (-2, -9)

# Defaults of the published config class, and sizes of the tower that the published code builds.
DEFAULTS: HFConfig = {
    "vocab_size": 50_304,
    "embedding_size": 50_304,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,  # as many as attention heads
    "max_position_embeddings": 2048,
    "layer_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "qkv_bias": False,
    "attention_layer_norm": False,
    "norm_after": False,
    "layer_norm_type": "rms",
}
TOWER: HFConfig = {
    "image_default_input_size": [336, 336],
    "image_patch_size": 14,
    "image_emb_dim": 1024,
    "image_num_heads": 16,
    "image_num_layers": 23,
    "image_mlp_dim": 4096,
    "image_mlp_activations": "quick_gelu",
    "image_norm_eps": 1e-5,
}


def _read_tower(settings: HFConfig) -> ViTConfig:
    settings = fill_defaults(settings, TOWER)
    height, width = settings["image_default_input_size"]
    activation = settings["image_mlp_activations"]
    if height != width or activation not in ACTIVATIONS:
        raise CheckpointError(
            f"vision_backbone has images of {height} × {width} and the activation {activation!r}",
            f"known: square images, and {', '.join(ACTIVATIONS)}",
        )
    return ViTConfig(
        layers=settings["image_num_layers"],
        block=BlockConfig(
            width=settings["image_emb_dim"],
            attention=AttentionConfig(heads=settings["image_num_heads"], bias="all"),
            mlp=PlainMLPConfig(
                intermediate_size=settings["image_mlp_dim"],
                activation=ACTIVATIONS[activation],  # pyrefly: ignore[bad-argument-type]
            ),
            eps=settings["image_norm_eps"],
        ),
        image_size=height,
        patch_size=settings["image_patch_size"],
        patch_bias=False,
        cls_token=True,
        positions="cls_and_patches",
        position_interpolation="bicubic_antialias",
        norm_first=True,
        norm_last="none",
    )


def _write_tower(config: ViTConfig) -> HFConfig:
    block = config.block
    if not isinstance(block.mlp, PlainMLPConfig):
        raise ConfigError("Molmo needs a ViT with plain MLPs")
    return {
        "image_default_input_size": [config.image_size, config.image_size],
        "image_patch_size": config.patch_size,
        "image_emb_dim": block.width,
        "image_num_heads": block.attention.heads,
        "image_num_layers": config.layers,
        "image_mlp_dim": block.mlp.intermediate_size,
        "image_mlp_activations": next(name for name, own in ACTIVATIONS.items() if own == block.mlp.activation),
        "image_norm_eps": block.eps,
    }


def _read_config(hf_config: HFConfig) -> VLMConfig:
    hf_config = fill_defaults(hf_config, DEFAULTS)
    reject_settings(
        hf_config,
        clip_qkv="clipped projections are not supported",
        weight_tying="the published code does not tie the output head",
        moe_num_experts="experts (MolmoE) are not supported",
        rope_scaling="the published code does not scale rotary positions",
    )
    if hf_config["layer_norm_type"] != "rms":
        raise CheckpointError(f"layer_norm_type is {hf_config['layer_norm_type']!r}", "known: rms")
    hidden = hf_config["intermediate_size"] // 2  # of gate and up projection, each
    text = hf_config | {"vocab_size": hf_config["embedding_size"], "rms_norm_eps": hf_config["layer_norm_eps"]}
    decoder = read_decoder_config(
        text | {"tie_word_embeddings": False},
        mlp=GatedMLPConfig(intermediate_size=hidden),
        bias="qkv" if hf_config["qkv_bias"] else "none",
        qk_norm=hf_config["attention_layer_norm"],
        extra_embeddings=NUM_EXTRA_EMBEDDINGS,
    )
    block = decoder.block.replace(norm_position="output" if hf_config["norm_after"] else "before")
    if hf_config["attention_layer_norm"]:
        block = block.replace(attention=block.attention.replace(qk_norm_over="heads"))
    tower, vocab_size = _read_tower(hf_config.get("vision_backbone") or {}), decoder.vocab_size
    margin = tower.grid_size // 12 * 2  # 4 of 24 patches, unless the processor file has others
    return VLMConfig(
        tower=tower,
        connector=AttentionPoolConnectorConfig(
            in_features=len(FEATURE_LAYERS) * tower.width,
            out_features=block.width,
            pooled_width=tower.width,
            heads=tower.block.attention.heads,
            intermediate_size=hidden,
        ),
        decoder=decoder.replace(block=block),
        policy=OverlapPolicy(tile_size=tower.image_size, patch_size=tower.patch_size, margins=(margin, margin)),
        vision_feature_layer=FEATURE_LAYERS,
        padding_embedding=True,
        merge="add",
        rules=StreamRules(fill_id=hf_config.get(TOKEN_KEYS[PATCH_TOKEN], vocab_size + 2)),
        vision_token_ids={NEWLINE_TOKEN: hf_config.get(TOKEN_KEYS[COLUMN_TOKEN], vocab_size + 3)},
    )


def _write_config(config: VLMConfig) -> HFConfig:
    if not isinstance(config.tower, ViTConfig) or not isinstance(config.policy, OverlapPolicy):
        raise ConfigError("Molmo needs a ViT and the policy overlap")
    decoder, tower = config.decoder, _write_tower(config.tower)
    shared = write_decoder_config(
        decoder, "MolmoForCausalLM", "head_dim", "hidden_act", "rms_norm_eps", "attention_bias", "rope_parameters"
    )
    attention = decoder.block.attention
    return {
        **shared,
        "embedding_size": decoder.vocab_size,
        "intermediate_size": 2 * shared["intermediate_size"],
        "layer_norm_eps": decoder.block.eps,
        "layer_norm_type": "rms",
        "rope_theta": decoder.rotary.theta,
        "qkv_bias": attention.bias == "qkv",
        "attention_layer_norm": attention.qk_norm is not None,
        "norm_after": decoder.block.norm_position == "output",
        "clip_qkv": None,
        "weight_tying": False,
        "use_position_ids": True,
        TOKEN_KEYS[PATCH_TOKEN]: config.rules.fill_id,  # not used by the published code
        TOKEN_KEYS[COLUMN_TOKEN]: config.vision_token_ids.get(NEWLINE_TOKEN),
        **({} if tower == TOWER else {"vision_backbone": tower}),
    }


def _add_tokens(hf_config: HFConfig, folder: Path) -> HFConfig:
    """Add the ids of the image tokens, if the folder has a file of the tokenizer with them."""
    tokens = read_added_tokens(folder)
    return hf_config | {key: tokens[token] for token, key in TOKEN_KEYS.items() if token in tokens}


def _build_rules(config: VLMConfig) -> list[TensorRule]:
    connector, decoder = config.connector, config.decoder
    assert isinstance(connector, AttentionPoolConnectorConfig)
    assert isinstance(config.tower, ViTConfig)
    width, hidden, pool = connector.pooled_width, connector.intermediate_size, "image_pooling_2d"
    language = [
        fuse("embed.weight", ["wte.embedding", "wte.new_embedding"], [decoder.vocab_size, decoder.extra_embeddings]),
        rename("norm.weight", "ln_f.weight"),
        rename("head.weight", "ff_out.weight"),
    ]
    block = _build_block_rules(decoder.block)
    for i in range(decoder.layers):
        language += add_prefix(f"blocks.{i}.", f"blocks.{i}.", block)
    vision = [
        *add_prefix("tower.", "image_vit.", _build_tower_rules(config.tower)),
        *rename_layer("connector.q", f"{pool}.wq"),
        *fuse_layer("connector.kv", [f"{pool}.wk", f"{pool}.wv"], [width, width]),
        *rename_layer("connector.out", f"{pool}.wo"),
        fuse("connector.gate_up.weight", ["image_projector.w1.weight", "image_projector.w3.weight"], [hidden, hidden]),
        rename("connector.down.weight", "image_projector.w2.weight"),
        rename("padding_embedding", "pad_embed"),
    ]
    return [
        *add_prefix("", "model.vision_backbone.", vision),
        *add_prefix("decoder.", "model.transformer.", language),
    ]


def _build_block_rules(config: BlockConfig) -> list[TensorRule]:
    attention = config.attention
    rules = [
        *rename_layer("branches.self.op.qkv", "att_proj", attention.bias == "qkv"),
        *rename_layer("branches.self.op.out", "attn_out", False),
        *rename_layer("branches.self.norm", "attn_norm", False),
        *rename_layer("branches.mlp.norm", "ff_norm", False),
        swap_halves("branches.mlp.op.gate_up.weight", "ff_proj.weight"),
        *rename_layer("branches.mlp.op.down", "ff_out", False),
    ]
    if attention.qk_norm is not None:
        rules += [rename(f"branches.self.op.{norm}.weight", f"{norm}.weight") for norm in ("q_norm", "k_norm")]
    return rules


def _build_tower_rules(config: ViTConfig) -> list[TensorRule]:
    width, P = config.width, config.patch_size
    block = [
        *fuse_layer("branches.self.op.qkv", [f"attention.{x}" for x in ("wq", "wk", "wv")], [width] * 3),
        *rename_layer("branches.self.op.out", "attention.wo"),
        *rename_layer("branches.self.norm", "attention_norm"),
        *rename_layer("branches.mlp.norm", "ffn_norm"),
        *rename_layer("branches.mlp.op.up", "feed_forward.w1"),
        *rename_layer("branches.mlp.op.down", "feed_forward.w2"),
    ]
    rules = [
        permute_columns("embed.proj.weight", "patch_embedding.weight", (P, P, config.channels), (2, 0, 1)),
        rename("cls", "class_embedding"),
        rename("positions.table", "positional_embedding"),
        *rename_layer("norm_first", "pre_ln"),
    ]
    for i in range(config.layers):
        rules += add_prefix(f"blocks.{i}.", f"transformer.resblocks.{i}.", block)
    return rules


def write_image_text(layout: ImageLayout, number: int) -> list[str]:
    """Write the tokens before and after the whole image, and after its tiles."""
    return [START_TOKEN, END_TOKEN + START_TOKEN, END_TOKEN]


# ---- image processor --------------------------------------------------------------------------------------------


def _parse_overlap(config: Any, json_config: HFConfig) -> OverlapPolicy:
    margins, described = json_config["overlap_margins"], _format_overlap(config)
    for key in described.keys() - {"max_crops", "overlap_margins"}:
        if json_config[key] != described[key]:
            raise CheckpointError(
                f"{key} is {json_config[key]}, and the model has {described[key]}",
                "check that both files belong to the same model",
            )
    if not isinstance(margins, list) or len(margins) != 2 or not all(isinstance(n, int) for n in margins):
        raise CheckpointError(f"overlap_margins is {margins!r}", "give two numbers of patches")
    return config.policy.replace(max_tiles=json_config["max_crops"], margins=tuple(margins))


def _format_overlap(config: Any) -> HFConfig:
    policy = config.policy
    grid = config.view_grid
    return {
        "base_image_input_size": [policy.tile_size, policy.tile_size],
        "image_patch_size": policy.patch_size,
        "image_token_length_h": grid.num_rows,
        "image_token_length_w": grid.num_columns,
        "max_crops": policy.max_tiles,
        "overlap_margins": list(policy.margins),
        "image_padding_mask": config.padding_embedding,
    }


IMAGE_PROCESSOR = HFImageProcessor("MolmoImageProcessor", (OverlapPolicy,), _parse_overlap, _format_overlap)
MOLMO = CheckpointFamily(
    "molmo",
    VLM,
    _read_config,
    _write_config,
    build_round_trip_check(_read_config, _write_config, normalize_llava_config, IMAGE_PROCESSOR),
    _build_rules,
    image_processor=IMAGE_PROCESSOR,
    add_settings=_add_tokens,
    chat_config=ChatConfig(
        "MolmoProcessor",
        "molmo",
        image_boundary_tokens=(START_TOKEN, END_TOKEN),
        image_text=write_image_text,
        required_word="type",
        takes_chat_template=False,
    ),
)
FAMILIES.register("molmo", MOLMO)
