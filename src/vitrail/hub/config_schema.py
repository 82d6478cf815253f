"""Schema of config.json: type and range of every key that a family reads.

The files are untrusted. Counts are bounded, so that no file can ask for an endless number of modules. Widths are
bounded, so that the size of a tensor cannot overflow.
"""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from vitrail.config import MAX_LAYERS
from vitrail.errors import CheckpointError

MAX_COUNT = MAX_LAYERS
"""Largest number of layers, heads or experts."""

PositiveCount = Annotated[int, Meta(ge=1, le=MAX_COUNT)] | None
NonNegativeCount = Annotated[int, Meta(ge=0, le=MAX_COUNT)] | None
WidthField = Annotated[int, Meta(ge=1, le=2**20)] | None
NonNegativeWidth = Annotated[int, Meta(ge=0, le=2**20)] | None
LengthField = Annotated[int, Meta(ge=1, le=2**31)] | None
PositiveFloat = Annotated[float, Meta(gt=0, le=1e30)] | None
ImageSizeField = Annotated[int, Meta(ge=1, le=2**20)] | list[Annotated[int, Meta(ge=1, le=2**20)]] | None
StageCounts = list[Annotated[int, Meta(ge=1, le=MAX_COUNT)]] | None
StageWidths = list[Annotated[int, Meta(ge=1, le=2**20)]] | None
Text, Flag, Number = str | None, bool | None, float | None


class RopeSchema(msgspec.Struct):
    """Rotary position settings, or those of each layer type (Gemma 3)."""

    full_attention: "RopeSchema | None" = None
    sliding_attention: "RopeSchema | None" = None

    rope_type: Text = None
    type: Text = None
    rope_theta: PositiveFloat = None
    factor: PositiveFloat = None
    partial_rotary_factor: PositiveFloat = None
    original_max_position_embeddings: LengthField = None
    low_freq_factor: PositiveFloat = None
    high_freq_factor: PositiveFloat = None
    beta_fast: PositiveFloat = None
    beta_slow: PositiveFloat = None
    attention_factor: PositiveFloat = None
    mscale: Number = None
    mscale_all_dim: Number = None
    llama_4_scaling_beta: Number = None
    truncate: Flag = None


class TransformerSchema(msgspec.Struct):
    """Settings of a decoder or a tower."""

    vocab_size: LengthField = None
    hidden_size: WidthField = None
    intermediate_size: WidthField = None
    num_hidden_layers: PositiveCount = None
    num_attention_heads: PositiveCount = None
    num_key_value_heads: PositiveCount = None
    head_dim: WidthField = None
    hidden_act: Text = None
    hidden_activation: Text = None
    query_pre_attn_scalar: PositiveFloat = None
    attn_logit_softcapping: PositiveFloat = None
    final_logit_softcapping: PositiveFloat = None
    layer_types: list[str] | None = None
    sliding_window: LengthField = None
    sliding_window_pattern: PositiveCount = None
    max_window_layers: NonNegativeCount = None
    rope_local_base_freq: PositiveFloat = None
    rms_norm_eps: PositiveFloat = None
    layer_norm_eps: PositiveFloat = None
    max_position_embeddings: LengthField = None
    rope_theta: PositiveFloat = None
    partial_rotary_factor: PositiveFloat = None
    rope_scaling: RopeSchema | None = None
    rope_parameters: RopeSchema | None = None
    attention_bias: Flag = None
    mlp_bias: Flag = None
    tie_word_embeddings: Flag = None
    # experts
    num_experts: NonNegativeCount = None
    num_local_experts: NonNegativeCount = None
    num_experts_per_tok: NonNegativeCount = None
    moe_intermediate_size: WidthField = None
    norm_topk_prob: Flag = None
    decoder_sparse_step: PositiveCount = None
    mlp_only_layers: list[int] | None = None
    n_routed_experts: NonNegativeCount = None
    n_shared_experts: NonNegativeCount = None
    n_group: PositiveCount = None
    topk_group: PositiveCount = None
    first_k_dense_replace: NonNegativeCount = None
    moe_layer_freq: PositiveCount = None
    routed_scaling_factor: PositiveFloat = None
    topk_method: Text = None
    scoring_func: Text = None
    # latent attention; a model without it may state widths of 0
    kv_lora_rank: NonNegativeWidth = None
    q_lora_rank: NonNegativeWidth = None
    qk_nope_head_dim: NonNegativeWidth = None
    qk_rope_head_dim: NonNegativeWidth = None
    v_head_dim: NonNegativeWidth = None
    use_mla: Flag = None
    rope_interleave: Flag = None
    # T5
    d_model: WidthField = None
    d_kv: WidthField = None
    d_ff: WidthField = None
    num_layers: PositiveCount = None
    num_heads: Annotated[int, Meta(ge=1, le=MAX_COUNT)] | StageCounts = None
    relative_attention_num_buckets: PositiveCount = None
    relative_attention_max_distance: LengthField = None
    layer_norm_epsilon: PositiveFloat = None
    feed_forward_proj: Text = None
    # BART
    encoder_layers: PositiveCount = None
    encoder_attention_heads: PositiveCount = None
    encoder_ffn_dim: WidthField = None
    decoder_layers: PositiveCount = None
    decoder_attention_heads: PositiveCount = None
    decoder_ffn_dim: WidthField = None
    activation_function: Text = None
    scale_embedding: Flag = None
    # towers
    depths: StageCounts = None
    dim_embed: StageWidths = None
    num_groups: StageCounts | Annotated[int, Meta(ge=1, le=MAX_COUNT)] = None
    patch_stride: StageCounts = None
    patch_padding: list[Annotated[int, Meta(ge=0, le=MAX_COUNT)]] | None = None
    patch_prenorm: list[bool] | None = None
    in_channels: WidthField = None
    num_channels: WidthField = None
    image_size: ImageSizeField = None
    patch_size: ImageSizeField = None
    num_patches: WidthField = None
    num_register_tokens: NonNegativeCount = None
    mlp_ratio: PositiveFloat = None
    layerscale_value: Number = None
    qkv_bias: Flag = None
    use_swiglu_ffn: Flag = None
    use_mask_token: Flag = None
    use_gated_mlp: Flag = None
    query_bias: Flag = None
    key_bias: Flag = None
    value_bias: Flag = None
    proj_bias: Flag = None
    use_head: Flag = None
    is_native: Flag = None
    vision_use_head: Flag = None
    projection_size: WidthField = None
    window_size: NonNegativeCount = None
    mlp_dim: WidthField = None
    output_channels: WidthField = None


class TimmArgsSchema(msgspec.Struct):
    """model_args of timm."""

    img_size: WidthField = None
    patch_size: WidthField = None
    embed_dim: WidthField = None
    depth: PositiveCount = None
    num_heads: PositiveCount = None
    in_chans: WidthField = None
    mlp_ratio: PositiveFloat = None
    swiglu_mlp: Flag = None
    scale_mlp: Flag = None
    qkv_fused: Flag = None
    scale_attn_inner: Flag = None
    use_rot_pos_emb: Flag = None
    ref_feat_shape: tuple[int, int] | None = None
    global_pool: Text = None


ClassCount = Annotated[int, Meta(ge=0, le=2**20)] | None


class TimmPretrainedSchema(msgspec.Struct):
    """pretrained_cfg of timm."""

    num_classes: ClassCount = None


class ConfigSchema(TransformerSchema):
    """A whole config.json."""

    architecture: Text = None
    num_classes: ClassCount = None
    model_args: TimmArgsSchema | None = None
    pretrained_cfg: TimmPretrainedSchema | None = None
    vision_config: TransformerSchema | None = None
    high_res_vision_config: TransformerSchema | None = None
    vision_config_dict: TransformerSchema | None = None
    text_config: TransformerSchema | None = None
    text_config_dict: TransformerSchema | None = None
    llm_config: TransformerSchema | None = None
    language_config: TransformerSchema | None = None
    projection_dim: WidthField = None
    logit_scale_init_value: Number = None
    logit_bias_init_value: Number = None


def check_config_schema(hf_config: dict[str, Any]) -> None:
    """Raise an error if a value of config.json has the wrong type or range. Unknown keys are ignored."""
    try:
        msgspec.convert(hf_config, ConfigSchema)
    except msgspec.ValidationError as error:
        reason, _, key = str(error).partition(" - at `$.")
        raise CheckpointError(
            f"{key.rstrip('`')}: {reason[:1].lower()}{reason[1:]}", "correct this key, as in the original config"
        ) from None
