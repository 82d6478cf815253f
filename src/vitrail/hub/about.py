"""What a config.json may say: the type and range of every key that a family reads.

A file is a stranger's. Counts of what is built one by one are bounded, so that a wrong one cannot make us build for
ever, and widths so that no tensor's size passes what a machine can count.
"""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from vitrail.errors import CheckpointError

MOST = 10_000
"""Layers, heads, experts."""

Count = Annotated[int, Meta(ge=1, le=MOST)] | None
Few = Annotated[int, Meta(ge=0, le=MOST)] | None
Width = Annotated[int, Meta(ge=1, le=2**20)] | None
Length = Annotated[int, Meta(ge=1, le=2**31)] | None
Rate = Annotated[float, Meta(gt=0, le=1e30)] | None
Side = Annotated[int, Meta(ge=1, le=2**20)] | list[Annotated[int, Meta(ge=1, le=2**20)]] | None
Text, Flag, Number = str | None, bool | None, float | None


class Rope(msgspec.Struct):
    rope_type: Text = None
    type: Text = None
    rope_theta: Rate = None
    factor: Rate = None
    partial_rotary_factor: Rate = None
    original_max_position_embeddings: Length = None
    low_freq_factor: Rate = None
    high_freq_factor: Rate = None
    beta_fast: Rate = None
    beta_slow: Rate = None
    attention_factor: Rate = None
    mscale: Number = None
    mscale_all_dim: Number = None
    truncate: Flag = None


class Sizes(msgspec.Struct):
    """A decoder or a tower."""

    vocab_size: Length = None
    hidden_size: Width = None
    intermediate_size: Width = None
    num_hidden_layers: Count = None
    num_attention_heads: Count = None
    num_key_value_heads: Count = None
    head_dim: Width = None
    hidden_act: Text = None
    rms_norm_eps: Rate = None
    layer_norm_eps: Rate = None
    max_position_embeddings: Length = None
    rope_theta: Rate = None
    partial_rotary_factor: Rate = None
    rope_scaling: Rope | None = None
    rope_parameters: Rope | None = None
    attention_bias: Flag = None
    mlp_bias: Flag = None
    tie_word_embeddings: Flag = None
    # experts
    num_experts: Few = None
    num_local_experts: Few = None
    num_experts_per_tok: Few = None
    moe_intermediate_size: Width = None
    norm_topk_prob: Flag = None
    decoder_sparse_step: Count = None
    mlp_only_layers: list[int] | None = None
    # towers
    num_channels: Width = None
    image_size: Side = None
    patch_size: Side = None
    num_patches: Width = None
    num_register_tokens: Few = None
    mlp_ratio: Rate = None
    layerscale_value: Number = None
    qkv_bias: Flag = None
    use_swiglu_ffn: Flag = None
    use_mask_token: Flag = None
    vision_use_head: Flag = None
    projection_size: Width = None
    window_size: Few = None
    mlp_dim: Width = None
    output_channels: Width = None


class Args(msgspec.Struct):
    """timm's model_args."""

    img_size: Width = None
    patch_size: Width = None
    embed_dim: Width = None
    depth: Count = None
    num_heads: Count = None
    in_chans: Width = None
    mlp_ratio: Rate = None
    swiglu_mlp: Flag = None
    scale_mlp: Flag = None
    qkv_fused: Flag = None
    scale_attn_inner: Flag = None
    use_rot_pos_emb: Flag = None
    ref_feat_shape: tuple[int, int] | None = None
    global_pool: Text = None


Classes = Annotated[int, Meta(ge=0, le=2**20)] | None


class Labels(msgspec.Struct):
    num_classes: Classes = None


class About(Sizes):
    architecture: Text = None
    num_classes: Classes = None
    model_args: Args | None = None
    pretrained_cfg: Labels | None = None
    vision_config: Sizes | None = None
    high_res_vision_config: Sizes | None = None
    vision_config_dict: Sizes | None = None
    text_config: Sizes | None = None
    text_config_dict: Sizes | None = None
    projection_dim: Width = None
    logit_scale_init_value: Number = None
    logit_bias_init_value: Number = None


def check_about(about: dict[str, Any]) -> None:
    """Refuse a config.json that says what cannot be; keys that no family reads are let through."""
    try:
        msgspec.convert(about, About)
    except msgspec.ValidationError as error:
        reason, _, key = str(error).partition(" - at `$.")
        raise CheckpointError(f"{key.rstrip('`')}: {reason[:1].lower()}{reason[1:]}", "fetch the file again") from None
