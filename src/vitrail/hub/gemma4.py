"""Gemma 4 with images: 26B-A4B and 31B, and others without an audio tower or embeddings for each layer.

The tower takes images of any size; the mean of 3 × 3 patches is a token. Image tokens attend to each other in layers
with a sliding window. Videos are not supported.
"""

from typing import Any

import torch
from torch import Tensor

from vitrail.connectors import PackedPoolConfig
from vitrail.encoders.packed_vit import PackedViT, PackedViTConfig
from vitrail.errors import CheckpointError, ConfigError
from vitrail.hub.chat_config import ChatConfig, VisionTokens
from vitrail.hub.checkpoint_family import CheckpointFamily, build_round_trip_check, fill_defaults, reject_settings
from vitrail.hub.decoder_config import read_gated_mlp
from vitrail.hub.gemma4_text import GEMMA4_TEXT
from vitrail.hub.llava import normalize_llava_config, read_part, write_part
from vitrail.hub.tensor_rules import TensorRule, add_prefix, fuse, fuse_layer, permute_columns, rename, rename_layer
from vitrail.hub.vlm_towers import build_tower_family, to_hf_activation
from vitrail.models.vlm import VLM, VLMConfig
from vitrail.nn import AttentionConfig, BlockConfig
from vitrail.processing import image_processors
from vitrail.processing.image_loading import NORMALIZATIONS
from vitrail.processing.resolution_policies import TokenBudgetPolicy
from vitrail.registry import FAMILIES
from vitrail.stream import StreamRules

HFConfig = dict[str, Any]

# Defaults of transformers for keys that a config.json leaves out.
DEFAULTS: HFConfig = {
    "boi_token_id": 255_999,
    "eoi_token_id": 258_882,
    "image_token_id": 258_880,
    "tie_word_embeddings": True,
}
TOWER_DEFAULTS: HFConfig = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 16,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "head_dim": 64,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "pooling_kernel_size": 3,
    "patch_size": 16,
    "position_embedding_size": 10_240,
    "use_clipped_linears": False,
    "standardize": False,
}
THETA = 100.0
MAX_TOKENS = 280  # of an image, if the config names none
AUDIO_PROCESSOR: HFConfig = {  # the processor requires one, with its defaults, although the model hears nothing
    "audio_ms_per_token": 40,
    "audio_seq_length": 750,
    "feature_extractor": {"feature_extractor_type": "Gemma4AudioFeatureExtractor"},
}
BOUNDARY_TOKENS = {"vision_start": "boi_token_id", "vision_end": "eoi_token_id"}


# ---- the tower --------------------------------------------------------------------------------------------------


def _read_tower(hf_config: HFConfig) -> PackedViTConfig:
    hf_config = fill_defaults(hf_config, TOWER_DEFAULTS)
    reject_settings(
        hf_config,
        use_clipped_linears="linear layers that clip their values, as in Gemma 4 E2B and E4B, are not supported",
    )
    rope = hf_config.get("rope_parameters") or {}
    if rope.get("rope_type", "default") not in ("default", "axial"):
        raise CheckpointError(f"rope_type is {rope['rope_type']!r}", "known: axial")
    attention = AttentionConfig(
        heads=hf_config["num_attention_heads"],
        kv_heads=hf_config["num_key_value_heads"],
        head_dim=hf_config["head_dim"],
        qk_norm="rms",
        v_norm=True,
        eps=hf_config["rms_norm_eps"],
        query_pre_attn_scalar=1.0,
    )
    return PackedViTConfig(
        layers=hf_config["num_hidden_layers"],
        block=BlockConfig(
            width=hf_config["hidden_size"],
            attention=attention,
            mlp=read_gated_mlp(hf_config, "hidden_activation"),
            norm="rms",
            eps=hf_config["rms_norm_eps"],
            norm_position="both",
        ),
        patch_size=hf_config["patch_size"],
        temporal_patch_size=1,
        spatial_merge_size=hf_config["pooling_kernel_size"],
        theta=float(rope.get("rope_theta") or THETA),
        position_table_size=hf_config["position_embedding_size"],
    )


def _write_tower(config: PackedViTConfig) -> HFConfig:
    block = config.block
    return {
        "architectures": ["Gemma4VisionModel"],
        "hidden_size": block.width,
        "intermediate_size": block.mlp.intermediate_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": block.attention.heads,
        "num_key_value_heads": block.attention.num_kv_heads,
        "head_dim": block.attention.resolve_head_dim(block.width),
        "hidden_activation": to_hf_activation(block.mlp.activation),
        "rms_norm_eps": block.eps,
        "pooling_kernel_size": config.spatial_merge_size,
        "patch_size": config.patch_size,
        "position_embedding_size": config.position_table_size,
        "use_clipped_linears": False,
        "rope_parameters": {"rope_type": "axial", "rope_theta": config.theta},
    }


def _list_channels(head_dim: int) -> Tensor:
    """List the channel of a head in the file for each native one.

    The files rotate the first half of a head by the column and the second by the row, each with pairs of its own two
    quarters. Here the quarters are in the order of the layout 2d: row, column, row, column.
    """
    return torch.arange(head_dim).unflatten(0, (4, -1))[[2, 0, 3, 1]].flatten()


def _build_qkv_rules(attention: AttentionConfig, head_dim: int) -> list[TensorRule]:
    channels = _list_channels(head_dim)
    inverse = channels.argsort()
    sizes = [heads * head_dim for heads in (attention.heads, attention.num_kv_heads, attention.num_kv_heads)]
    fused = fuse("branches.self.op.qkv.weight", [f"self_attn.{x}_proj.linear.weight" for x in "qkv"], sizes)

    def reorder(heads: Tensor, order: Tensor) -> Tensor:
        return heads.unflatten(0, (-1, head_dim))[:, order].flatten(0, 1)

    def load(tensors: list[Tensor]) -> list[Tensor]:
        qkv = fused.export(fused.load(tensors))  # checks the sizes
        return fused.load([*(reorder(x, channels) for x in qkv[:2]), qkv[2]])

    def export(tensors: list[Tensor]) -> list[Tensor]:
        q, k, v = fused.export(tensors)
        return [reorder(q, inverse), reorder(k, inverse), v]

    norms = [
        rename(f"branches.self.op.{x}_norm.weight", f"self_attn.{x}_norm.weight")._replace(
            load=lambda tensors: [tensors[0][channels]], export=lambda tensors: [tensors[0][inverse]]
        )
        for x in "qk"
    ]
    return [TensorRule(fused.native, fused.hf, load, export), *norms]


def _build_tower_rules(config: PackedViTConfig) -> list[TensorRule]:
    block, P, hidden = config.block, config.patch_size, config.block.mlp.intermediate_size
    norms = {
        "self.norm": "input_layernorm",
        "self.post_norm": "post_attention_layernorm",
        "mlp.norm": "pre_feedforward_layernorm",
        "mlp.post_norm": "post_feedforward_layernorm",
    }
    rules = [
        *_build_qkv_rules(block.attention, block.attention.resolve_head_dim(block.width)),
        *rename_layer("branches.self.op.out", "self_attn.o_proj.linear", bias=False),
        *fuse_layer(
            "branches.mlp.op.gate_up", ["mlp.gate_proj.linear", "mlp.up_proj.linear"], [hidden] * 2, bias=False
        ),
        *rename_layer("branches.mlp.op.down", "mlp.down_proj.linear", bias=False),
        *(rename(f"branches.{native}.weight", f"{hf}.weight") for native, hf in norms.items()),
    ]
    return [
        # A patch is rows × columns × channels in the file, and channels × rows × columns here.
        permute_columns("embed.proj.weight", "patch_embedder.input_proj.weight", (P, P, config.channels), (2, 0, 1)),
        rename("position_table", "patch_embedder.position_embedding_table"),
        *(rule for i in range(config.layers) for rule in add_prefix(f"blocks.{i}.", f"encoder.layers.{i}.", rules)),
    ]


GEMMA4_VISION = build_tower_family(
    "gemma4_vision", PackedViT, _read_tower, _write_tower, _build_tower_rules, TOWER_DEFAULTS
)


# ---- the model --------------------------------------------------------------------------------------------------


def _read_config(hf_config: HFConfig) -> VLMConfig:
    hf_config = fill_defaults(hf_config, DEFAULTS)
    text, vision = hf_config.get("text_config") or {}, hf_config.get("vision_config")
    _, decoder = read_part(hf_config, "text_config", {GEMMA4_TEXT.name: GEMMA4_TEXT}, GEMMA4_TEXT.name)
    if hf_config.get("audio_config") is not None:
        raise CheckpointError(
            "audio_config is given: the audio tower of Gemma 4 (audio_tower, embed_audio) is not supported",
            "use Gemma 4 26B-A4B or 31B, whose audio_config is null",
        )
    if vision is None:
        raise CheckpointError("vision_config is null", "load the text model alone, with model_type gemma4_text")
    _, tower = read_part(hf_config, "vision_config", {GEMMA4_VISION.name: GEMMA4_VISION}, GEMMA4_VISION.name)
    normalization = NORMALIZATIONS["half"]
    return VLMConfig(
        tower=tower,
        connector=PackedPoolConfig(
            in_features=tower.block.width,
            out_features=decoder.block.width,
            merge=tower.spatial_merge_size,
            standardize=bool(fill_defaults(vision, TOWER_DEFAULTS)["standardize"]),
            eps=tower.block.eps,
        ),
        decoder=decoder.replace(
            tie_word_embeddings=bool(hf_config["tie_word_embeddings"]),
            sliding_spans=decoder.sliding_window is not None,
        ),
        policy=TokenBudgetPolicy(
            patch_size=tower.patch_size,
            merge_size=tower.spatial_merge_size,
            max_tokens=hf_config.get("vision_soft_tokens_per_image") or MAX_TOKENS,
        ),
        mean=normalization.mean,
        std=normalization.std,
        rules=StreamRules(
            fill_id=hf_config["image_token_id"],
            bidirectional=("image",) if text.get("use_bidirectional_attention") == "vision" else (),
        ),
        vision_token_ids={name: hf_config[key] for name, key in BOUNDARY_TOKENS.items()},
    )


def _write_config(config: VLMConfig) -> HFConfig:
    connector, decoder, spans = config.connector, config.decoder, config.rules.bidirectional
    if not isinstance(config.tower, PackedViTConfig) or not isinstance(connector, PackedPoolConfig):
        raise ConfigError("Gemma 4 needs a packed ViT and the connector packed-pool")
    if not isinstance(config.policy, TokenBudgetPolicy):
        raise ConfigError("Gemma 4 needs the policy token-budget")
    missing = [name for name in BOUNDARY_TOKENS if name not in config.vision_token_ids]
    if missing:
        raise ConfigError(f"vision_token_ids lacks {missing[0]!r}", "add the ids of the tokens around an image")
    text = write_part(GEMMA4_TEXT, decoder.replace(sliding_spans=False))
    return {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "vision_config": {**write_part(GEMMA4_VISION, config.tower), "standardize": connector.standardize},
        "text_config": {**text, "use_bidirectional_attention": "vision" if "image" in spans else None},
        "audio_config": None,
        "image_token_id": config.rules.fill_id,
        **{key: config.vision_token_ids[name] for name, key in BOUNDARY_TOKENS.items()},
        "vision_soft_tokens_per_image": config.policy.max_tokens,
        "tie_word_embeddings": decoder.tie_word_embeddings,
    }


def _write_processor_fields(config: Any, vision_tokens: VisionTokens) -> HFConfig:
    return {"image_seq_length": config.policy.max_tokens, **AUDIO_PROCESSOR}


def _build_rules(config: VLMConfig) -> list[TensorRule]:
    decoder = [
        rule.with_names(lambda name: f"decoder.{name}", lambda name: name.replace("model.", "model.language_model.", 1))
        for rule in GEMMA4_TEXT.tensor_rules(config.decoder)
    ]
    assert isinstance(config.connector, PackedPoolConfig)
    stored = {"mean": "std_bias", "scale": "std_scale"} if config.connector.standardize else {}
    return [
        *add_prefix("tower.", "model.vision_tower.", GEMMA4_VISION.tensor_rules(config.tower)),
        *(rename(f"connector.{native}", f"model.vision_tower.{hf}") for native, hf in stored.items()),
        rename("connector.proj.weight", "model.embed_vision.embedding_projection.weight"),
        *decoder,
    ]


GEMMA4 = CheckpointFamily(
    "gemma4",
    VLM,
    _read_config,
    _write_config,
    build_round_trip_check(_read_config, _write_config, normalize_llava_config, image_processors.GEMMA4),
    _build_rules,
    duplicate_tensors=(("lm_head.weight", "model.language_model.embed_tokens.weight"),),
    image_processor=image_processors.GEMMA4,
    chat_config=ChatConfig(
        "Gemma4Processor",
        "gemma4",
        image_boundary_tokens=("<|image>", "<image|>"),
        end_of_turn="<turn|>",
        processor_fields=_write_processor_fields,
        tokenizer_tokens={
            "image_token": "image",
            "boi_token": "vision_start",
            "eoi_token": "vision_end",
            # The processor refuses tokenizers without them.
            "audio_token": "<|audio|>",
            "boa_token": "<|audio>",
            "eoa_token": "<audio|>",
        },
    ),
    class_defaults=DEFAULTS,
    part_defaults={"vision_config": TOWER_DEFAULTS},
)
FAMILIES.register("gemma4", GEMMA4)
