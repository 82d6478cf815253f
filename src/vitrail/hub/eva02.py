"""EVA-02 in the layout of timm: config.json names an architecture, and this module lists its sizes."""

from typing import Any

from vitrail.encoders.vit import ViT, ViTConfig
from vitrail.errors import CheckpointError
from vitrail.hub.checkpoint_family import CheckpointFamily, build_round_trip_check, require_key
from vitrail.hub.encoder_families import HFConfig, build_patch_embed_rules
from vitrail.hub.tensor_rules import TensorRule, add_prefix, fuse, fuse_layer, rename, rename_layer, view
from vitrail.nn import AttentionConfig, BlockConfig, GatedMLPConfig, RotaryConfig
from vitrail.registry import FAMILIES


def _build_model_args(image: int, patch: int, width: int, depth: int, heads: int, inner: str, pool: str) -> HFConfig:
    """Build the model_args of an architecture. `inner` is where inner norms are: none, mlp, or both."""
    return {
        "img_size": image,
        "patch_size": patch,
        "embed_dim": width,
        "depth": depth,
        "num_heads": heads,
        "in_chans": 3,
        "mlp_ratio": 4 * 2 / 3,
        "swiglu_mlp": True,
        "scale_mlp": inner != "none",
        "qkv_fused": inner == "none",
        "scale_attn_inner": inner == "both",
        "use_rot_pos_emb": True,
        "ref_feat_shape": [16, 16],
        "global_pool": pool,
    }


ARCHITECTURES: dict[str, HFConfig] = {
    #                                  image patch width depth heads inner   pool
    "eva02_tiny_patch14_224":       _build_model_args(224,  14,  192,   12,    3, "none", "avg"),
    "eva02_small_patch14_224":      _build_model_args(224,  14,  384,   12,    6, "none", "avg"),
    "eva02_base_patch14_224":       _build_model_args(224,  14,  768,   12,   12, "mlp",  "avg"),
    "eva02_large_patch14_224":      _build_model_args(224,  14, 1024,   24,   16, "mlp",  "avg"),
    "eva02_tiny_patch14_336":       _build_model_args(336,  14,  192,   12,    3, "none", "avg"),
    "eva02_small_patch14_336":      _build_model_args(336,  14,  384,   12,    6, "none", "avg"),
    "eva02_base_patch14_448":       _build_model_args(448,  14,  768,   12,   12, "mlp",  "avg"),
    "eva02_large_patch14_448":      _build_model_args(448,  14, 1024,   24,   16, "mlp",  "avg"),
    "eva02_base_patch16_clip_224":  _build_model_args(224,  16,  768,   12,   12, "both", "token"),
    "eva02_large_patch14_clip_224": _build_model_args(224,  14, 1024,   24,   16, "both", "token"),
    "eva02_large_patch14_clip_336": _build_model_args(336,  14, 1024,   24,   16, "both", "token"),
}  # fmt: skip

POOL_SETTINGS: dict[str, HFConfig] = {
    "avg":   {"pool": "mean", "norm_last": "pooled"},
    "token": {"pool": "cls", "norm_last": "tokens"},
}  # fmt: skip


def _read_config(hf_config: HFConfig) -> ViTConfig:
    name = require_key(hf_config, "architecture").partition(".")[0]
    if name not in ARCHITECTURES:
        raise CheckpointError(f"architecture {name!r} is not supported", f"known: {', '.join(ARCHITECTURES)}")
    model_args = {key: value for key, value in (hf_config.get("model_args") or {}).items() if value is not None}
    unknown = sorted(set(model_args) - set(ARCHITECTURES[name]))
    if unknown:
        raise CheckpointError(f"model_args.{unknown[0]} is not supported for EVA-02")
    args = {**ARCHITECTURES[name], **model_args}
    if not args["swiglu_mlp"] or not args["use_rot_pos_emb"] or args["qkv_fused"] == args["scale_mlp"]:
        raise CheckpointError(
            "EVA-02 needs SwiGLU and rotary positions, and separate q, k, v exactly if the MLP has a norm"
        )
    span, pool = args["ref_feat_shape"], args["global_pool"]
    if span[0] != span[1] or pool not in POOL_SETTINGS:
        raise CheckpointError(
            f"ref_feat_shape {span} with global_pool {pool!r} is not supported", "use a square, and avg or token"
        )
    width, heads = args["embed_dim"], args["num_heads"]
    mlp_norm, attention_norm = ("layer" if args[key] else None for key in ("scale_mlp", "scale_attn_inner"))
    classes = hf_config.get("num_classes")
    return ViTConfig(
        layers=args["depth"],
        block=BlockConfig(
            width=width,
            attention=AttentionConfig(heads=heads, bias="all_but_k", inner_norm=attention_norm),
            mlp=GatedMLPConfig(intermediate_size=int(width * args["mlp_ratio"]), bias=True, inner_norm=mlp_norm),
        ),
        image_size=args["img_size"],
        patch_size=args["patch_size"],
        channels=args["in_chans"],
        cls_token=True,
        positions="cls_and_patches",
        position_interpolation="bicubic_antialias",
        rotary=RotaryConfig(head_dim=width // heads, layout="2d", pairing="adjacent"),
        rotary_span=span[0],
        head_width=(hf_config.get("pretrained_cfg") or {}).get("num_classes", 0) if classes is None else classes,
        **POOL_SETTINGS[pool],
    )


def _write_config(config: ViTConfig) -> HFConfig:
    block, mlp = config.block, config.block.mlp
    inner = getattr(mlp, "inner_norm", None), block.attention.inner_norm
    args = {
        **_build_model_args(
            config.image_size, config.patch_size, block.width, config.layers, block.attention.heads, "none", "avg"
        ),
        "in_chans": config.channels,
        "mlp_ratio": (mlp.intermediate_size + 0.5)
        / block.width,  # plus a half, so that timm rounds down to the same size
        "scale_mlp": inner[0] is not None,
        "qkv_fused": inner[0] is None,
        "scale_attn_inner": inner[1] is not None,
        "ref_feat_shape": [config.rotary_span] * 2,
        "global_pool": "avg" if config.pool == "mean" else "token",
    }
    released: Any = {"architecture": "eva02_base_patch14_224", "model_args": args}
    for name, row in ARCHITECTURES.items():
        if {**args, "mlp_ratio": row["mlp_ratio"]} == row and int(
            block.width * row["mlp_ratio"]
        ) == mlp.intermediate_size:
            released = {"architecture": name}
    return {
        **released,
        "num_classes": config.head_width,
        "num_features": block.width,
        "global_pool": args["global_pool"],
        "pretrained_cfg": {
            "num_classes": config.head_width,
            "input_size": [config.channels, config.image_size, config.image_size],
            "first_conv": "patch_embed.proj",
            "classifier": "head",
        },
    }


def _build_rules(config: ViTConfig) -> list[TensorRule]:
    W, rows = config.block.width, 1 + config.grid_size**2
    rules = [
        view("cls", "cls_token", (W,), (1, 1, W)),
        view("positions.table", "pos_embed", (rows, W), (1, rows, W)),
        *build_patch_embed_rules(config, "patch_embed.proj"),
        *rename_layer("norm_last", "fc_norm" if config.norm_last == "pooled" else "norm"),
    ]
    if config.head_width:
        rules += rename_layer("head", "head")
    for i in range(config.layers):
        rules += add_prefix(f"blocks.{i}.", f"blocks.{i}.", _build_block_rules(config.block))
    return rules


def _build_block_rules(block: BlockConfig) -> list[TensorRule]:
    attention, mlp, W, hidden = "branches.self.op", "branches.mlp.op", block.width, block.mlp.intermediate_size
    rules = [
        *rename_layer("branches.self.norm", "norm1"),
        *rename_layer("branches.mlp.norm", "norm2"),
        *rename_layer(f"{attention}.out", "attn.proj"),
        *rename_layer(f"{mlp}.down", "mlp.fc2"),
    ]
    if block.attention.inner_norm:
        rules += rename_layer(f"{attention}.inner_norm", "attn.norm")
    if isinstance(block.mlp, GatedMLPConfig) and block.mlp.inner_norm:
        rules += rename_layer(f"{mlp}.norm", "mlp.norm")
        rules += fuse_layer(f"{mlp}.gate_up", ["mlp.fc1_g", "mlp.fc1_x"], [hidden, hidden])
        rules += [
            fuse(f"{attention}.qkv.weight", [f"attn.{x}_proj.weight" for x in "qkv"], [W] * 3),
            *(rename(f"{attention}.{x}_bias", f"attn.{x}_proj.bias") for x in "qv"),
        ]
    else:
        rules += rename_layer(f"{mlp}.gate_up", "mlp.fc1")
        rules += [rename(f"{attention}.qkv.weight", "attn.qkv.weight")]
        rules += [rename(f"{attention}.{x}_bias", f"attn.{x}_bias") for x in "qv"]
    return rules


EVA02 = CheckpointFamily(
    "eva02",
    ViT,
    _read_config,
    _write_config,
    build_round_trip_check(_read_config, _write_config),
    _build_rules,
    config_key="architecture",
)
FAMILIES.register("eva02", EVA02)
