"""EVA-02 in timm's layout: config.json names an architecture, whose sizes are timm's to know."""

from typing import Any

from vitrail.encoders.vit import ViT, ViTConfig
from vitrail.errors import CheckpointError
from vitrail.hub.encoders import About, patch_moves
from vitrail.hub.family import Family, need, round_trip
from vitrail.hub.maps import Move, fuse, fuse_layer, layer, rename, under, view
from vitrail.nn import AttentionConfig, BlockConfig, GatedConfig, RotaryConfig


def _row(image: int, patch: int, width: int, depth: int, heads: int, inner: str, pool: str) -> About:
    """`inner` names where else there are norms: nowhere, in the mlp, in attention too."""
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


ARCHITECTURES: dict[str, About] = {
    #                                  image patch width depth heads inner   pool
    "eva02_tiny_patch14_224":       _row(224,  14,  192,   12,    3, "none", "avg"),
    "eva02_small_patch14_224":      _row(224,  14,  384,   12,    6, "none", "avg"),
    "eva02_base_patch14_224":       _row(224,  14,  768,   12,   12, "mlp",  "avg"),
    "eva02_large_patch14_224":      _row(224,  14, 1024,   24,   16, "mlp",  "avg"),
    "eva02_tiny_patch14_336":       _row(336,  14,  192,   12,    3, "none", "avg"),
    "eva02_small_patch14_336":      _row(336,  14,  384,   12,    6, "none", "avg"),
    "eva02_base_patch14_448":       _row(448,  14,  768,   12,   12, "mlp",  "avg"),
    "eva02_large_patch14_448":      _row(448,  14, 1024,   24,   16, "mlp",  "avg"),
    "eva02_base_patch16_clip_224":  _row(224,  16,  768,   12,   12, "both", "token"),
    "eva02_large_patch14_clip_224": _row(224,  14, 1024,   24,   16, "both", "token"),
    "eva02_large_patch14_clip_336": _row(336,  14, 1024,   24,   16, "both", "token"),
}  # fmt: skip

POOLS: dict[str, About] = {
    "avg":   {"pool": "mean", "norm_last": "pooled"},
    "token": {"pool": "cls", "norm_last": "tokens"},
}  # fmt: skip


def _read(about: About) -> ViTConfig:
    name = need(about, "architecture").partition(".")[0]
    if name not in ARCHITECTURES:
        raise CheckpointError(f"architecture {name!r} is not known", f"known: {', '.join(ARCHITECTURES)}")
    given = {key: value for key, value in (about.get("model_args") or {}).items() if value is not None}
    unknown = sorted(set(given) - set(ARCHITECTURES[name]))
    if unknown:
        raise CheckpointError(f"model_args.{unknown[0]} is set, which is not built for EVA-02")
    args = {**ARCHITECTURES[name], **given}
    if not args["swiglu_mlp"] or not args["use_rot_pos_emb"] or args["qkv_fused"] == args["scale_mlp"]:
        raise CheckpointError(
            "only EVA-02 with SwiGLU and rotary positions is built, and q, k, v apart just where the MLP has a norm"
        )
    span, pool = args["ref_feat_shape"], args["global_pool"]
    if span[0] != span[1] or pool not in POOLS:
        raise CheckpointError(f"ref_feat_shape {span} with global_pool {pool!r} is not built", "a square; avg or token")
    width, heads = args["embed_dim"], args["num_heads"]
    mlp_norm, attention_norm = ("layer" if args[key] else None for key in ("scale_mlp", "scale_attn_inner"))
    classes = about.get("num_classes")
    return ViTConfig(
        layers=args["depth"],
        block=BlockConfig(
            width=width,
            attention=AttentionConfig(heads=heads, bias="all_but_k", inner_norm=attention_norm),
            mlp=GatedConfig(hidden=int(width * args["mlp_ratio"]), bias=True, inner_norm=mlp_norm),
        ),
        image=args["img_size"],
        patch=args["patch_size"],
        channels=args["in_chans"],
        cls=True,
        positions="cls_and_patches",
        resize="bicubic_antialias",
        rotary=RotaryConfig(head_dim=width // heads, layout="2d", pairing="adjacent"),
        rotary_span=span[0],
        head=(about.get("pretrained_cfg") or {}).get("num_classes", 0) if classes is None else classes,
        **POOLS[pool],
    )


def _write(config: ViTConfig) -> About:
    block, mlp = config.block, config.block.mlp
    inner = getattr(mlp, "inner_norm", None), block.attention.inner_norm
    args = {
        **_row(config.image, config.patch, block.width, config.layers, block.attention.heads, "none", "avg"),
        "in_chans": config.channels,
        "mlp_ratio": (mlp.hidden + 0.5) / block.width,  # halfway, so that timm's rounding down gives it back
        "scale_mlp": inner[0] is not None,
        "qkv_fused": inner[0] is None,
        "scale_attn_inner": inner[1] is not None,
        "ref_feat_shape": [config.rotary_span] * 2,
        "global_pool": "avg" if config.pool == "mean" else "token",
    }
    released: Any = {"architecture": "eva02_base_patch14_224", "model_args": args}
    for name, row in ARCHITECTURES.items():
        if {**args, "mlp_ratio": row["mlp_ratio"]} == row and int(block.width * row["mlp_ratio"]) == mlp.hidden:
            released = {"architecture": name}
    return {
        **released,
        "num_classes": config.head,
        "num_features": block.width,
        "global_pool": args["global_pool"],
        "pretrained_cfg": {
            "num_classes": config.head,
            "input_size": [config.channels, config.image, config.image],
            "first_conv": "patch_embed.proj",
            "classifier": "head",
        },
    }


def _moves(config: ViTConfig) -> list[Move]:
    W, rows = config.block.width, 1 + config.side**2
    moves = [
        view("cls", "cls_token", (W,), (1, 1, W)),
        view("positions.table", "pos_embed", (rows, W), (1, rows, W)),
        *patch_moves(config, "patch_embed.proj"),
        *layer("norm_last", "fc_norm" if config.norm_last == "pooled" else "norm"),
    ]
    if config.head:
        moves += layer("head", "head")
    for i in range(config.layers):
        moves += under(f"blocks.{i}.", f"blocks.{i}.", _block_moves(config.block))
    return moves


def _block_moves(block: BlockConfig) -> list[Move]:
    attention, mlp, W, hidden = "branches.self.op", "branches.mlp.op", block.width, block.mlp.hidden
    moves = [
        *layer("branches.self.norm", "norm1"),
        *layer("branches.mlp.norm", "norm2"),
        *layer(f"{attention}.out", "attn.proj"),
        *layer(f"{mlp}.down", "mlp.fc2"),
    ]
    if block.attention.inner_norm:
        moves += layer(f"{attention}.inner_norm", "attn.norm")
    if isinstance(block.mlp, GatedConfig) and block.mlp.inner_norm:
        moves += layer(f"{mlp}.norm", "mlp.norm")
        moves += fuse_layer(f"{mlp}.gate_up", ["mlp.fc1_g", "mlp.fc1_x"], [hidden, hidden])
        moves += [
            fuse(f"{attention}.qkv.weight", [f"attn.{x}_proj.weight" for x in "qkv"], [W] * 3),
            *(rename(f"{attention}.{x}_bias", f"attn.{x}_proj.bias") for x in "qv"),
        ]
    else:
        moves += layer(f"{mlp}.gate_up", "mlp.fc1")
        moves += [rename(f"{attention}.qkv.weight", "attn.qkv.weight")]
        moves += [rename(f"{attention}.{x}_bias", f"attn.{x}_bias") for x in "qv"]
    return moves


EVA02 = Family("eva02", ViT, _read, _write, round_trip(_read, _write), _moves, key="architecture")
