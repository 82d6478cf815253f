"""Blocks against transformers' layers with the same weights: outputs and gradients."""

import pytest
import torch
from transformers import (
    Blip2QFormerConfig,
    CLIPVisionConfig,
    Dinov2Config,
    IdeficsConfig,
    LlamaConfig,
    MllamaTextConfig,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.blip_2.modeling_blip_2 import Blip2QFormerLayer
from transformers.models.clip.modeling_clip import CLIPEncoderLayer
from transformers.models.dinov2.modeling_dinov2 import Dinov2Layer
from transformers.models.idefics.perceiver import IdeficsPerceiverResampler
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding
from transformers.models.mllama.modeling_mllama import MllamaCrossAttentionDecoderLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from helpers import put, randomize, relative
from vitrail.errors import ConfigError
from vitrail.nn import (
    Attention,
    AttentionConfig,
    AttentionPlan,
    Block,
    BlockConfig,
    GatedMLPConfig,
    PlainMLPConfig,
    RotaryConfig,
    RotaryEmbedding,
    attention_plan,
    make_mlp,
)


def assert_equal_layers(ours, theirs, x, values=1e-5, gradients=1e-4):
    """Check that outputs and input gradients are equal."""
    weight = torch.randn(ours.shape)
    assert relative(ours, theirs) <= values
    (a,), (b,) = (torch.autograd.grad((y * weight).sum(), x, retain_graph=True) for y in (ours, theirs))
    assert relative(a, b) <= gradients


def copy(target, source):
    with torch.no_grad():
        for ours, theirs in zip(target.parameters(), source.parameters(), strict=True):
            ours.copy_(theirs)


SIZES = [(48, 4, 2, 16, 80), (60, 6, 3, 8, 50), (40, 5, 1, 24, 96), (36, 3, 3, 12, 36)]  # unusual sizes on purpose


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("family", "settings", "bias", "qk_norm"),
    [
        (LlamaDecoderLayer, LlamaConfig, "none", None),
        (Qwen2DecoderLayer, Qwen2Config, "qkv", None),
        (Qwen3DecoderLayer, Qwen3Config, "none", "rms"),
    ],
)
def test_decoder_layers(size, family, settings, bias, qk_norm):
    width, heads, kv_heads, head_dim, hidden = size
    reference_config = settings(
        hidden_size=width,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=hidden,
        rms_norm_eps=1e-6,
    )
    reference_config._attn_implementation = "eager"
    layer = randomize(family(reference_config, layer_idx=0))
    attention = AttentionConfig(heads=heads, kv_heads=kv_heads, head_dim=head_dim, bias=bias, qk_norm=qk_norm)
    block = Block(
        BlockConfig(width=width, attention=attention, mlp=GatedMLPConfig(intermediate_size=hidden), norm="rms")
    )
    ours, mlp = block.branches["self"], block.branches["mlp"]
    theirs = layer.self_attn
    put(ours.op.qkv, theirs.q_proj, theirs.k_proj, theirs.v_proj)
    copy(ours.op.out, theirs.o_proj)
    if qk_norm:
        copy(ours.op.q_norm, theirs.q_norm)
        copy(ours.op.k_norm, theirs.k_norm)
    copy(ours.norm, layer.input_layernorm)
    copy(mlp.norm, layer.post_attention_layernorm)
    put(mlp.op.gate_up, layer.mlp.gate_proj, layer.mlp.up_proj)
    copy(mlp.op.down, layer.mlp.down_proj)

    x = torch.randn(2, 11, width, requires_grad=True)
    at = torch.arange(11)[None].expand(2, -1)
    angles = LlamaRotaryEmbedding(LlamaConfig(hidden_size=width, num_attention_heads=heads, head_dim=head_dim))(x, at)
    future = torch.full((11, 11), -torch.inf).triu(1)[None, None]
    reference = layer(x, attention_mask=future, position_embeddings=angles)
    reference = reference[0] if isinstance(reference, tuple) else reference
    assert_equal_layers(
        block(x, AttentionPlan(causal=True), rotation=RotaryEmbedding(RotaryConfig(head_dim=head_dim))(at)),
        reference,
        x,
    )


@pytest.mark.parametrize("activation", ["quick_gelu", "gelu", "gelu_tanh"])
def test_clip_tower_layer(activation):
    name = {"gelu_tanh": "gelu_pytorch_tanh"}.get(activation, activation)
    reference_config = CLIPVisionConfig(hidden_size=60, num_attention_heads=5, intermediate_size=77, hidden_act=name)
    reference_config._attn_implementation = "eager"
    layer = randomize(CLIPEncoderLayer(reference_config))
    block = Block(
        BlockConfig(
            width=60,
            attention=AttentionConfig(heads=5, bias="all"),
            mlp=PlainMLPConfig(intermediate_size=77, activation=activation),
            eps=1e-5,
        )
    )
    ours, mlp = block.branches["self"], block.branches["mlp"]
    theirs = layer.self_attn
    put(ours.op.qkv, theirs.q_proj, theirs.k_proj, theirs.v_proj)
    copy(ours.op.out, theirs.out_proj)
    copy(ours.norm, layer.layer_norm1)
    copy(mlp.norm, layer.layer_norm2)
    copy(mlp.op, layer.mlp)
    x = torch.randn(2, 17, 60, requires_grad=True)
    reference = layer(x, attention_mask=None)
    assert_equal_layers(block(x), reference[0] if isinstance(reference, tuple) else reference, x)


def test_dinov2_layer_with_layer_scale():
    reference_config = Dinov2Config(hidden_size=48, num_attention_heads=4, mlp_ratio=3, layerscale_value=0.5)
    reference_config._attn_implementation = "eager"
    layer = randomize(Dinov2Layer(reference_config)).eval()
    block = Block(
        BlockConfig(
            width=48,
            attention=AttentionConfig(heads=4, bias="all"),
            mlp=PlainMLPConfig(intermediate_size=144),
            layer_scale=0.5,
        )
    )
    ours, mlp = block.branches["self"], block.branches["mlp"]
    linear = {name.split(".")[-1]: m for name, m in layer.attention.named_modules() if isinstance(m, torch.nn.Linear)}
    names = ("query", "key", "value", "dense") if "query" in linear else ("q_proj", "k_proj", "v_proj", "o_proj")
    if names[3] not in linear:
        names = (*names[:3], next(name for name in linear if name not in names))
    put(ours.op.qkv, *(linear[name] for name in names[:3]))
    copy(ours.op.out, linear[names[3]])
    copy(ours.norm, layer.norm1)
    copy(mlp.norm, layer.norm2)
    copy(mlp.op, layer.mlp)
    with torch.no_grad():
        ours.scale.copy_(layer.layer_scale1.lambda1)
        mlp.scale.copy_(layer.layer_scale2.lambda1)
    x = torch.randn(2, 9, 48, requires_grad=True)
    reference = layer(x)
    assert_equal_layers(block(x), reference[0] if isinstance(reference, tuple) else reference, x)


def test_qformer_layer():
    reference_config = Blip2QFormerConfig(
        hidden_size=48, num_attention_heads=4, intermediate_size=70, encoder_hidden_size=36, cross_attention_frequency=1
    )
    reference_config._attn_implementation = "eager"
    layer = randomize(Blip2QFormerLayer(reference_config, layer_idx=0)).eval()
    block = Block(
        BlockConfig(
            width=48,
            attention=AttentionConfig(heads=4, bias="all"),
            mlp=PlainMLPConfig(intermediate_size=70),
            branches=("self", "cross", "mlp"),
            norm_position="after",
            eps=reference_config.layer_norm_eps,
            context_width=36,
        )
    )
    for name, theirs in (("self", layer.attention), ("cross", layer.crossattention)):
        ours, source = block.branches[name], theirs.attention
        if name == "self":
            put(ours.op.qkv, source.query, source.key, source.value)
        else:
            put(ours.op.q, source.query)
            put(ours.op.kv, source.key, source.value)
        copy(ours.op.out, theirs.output.dense)
        copy(ours.norm, theirs.output.LayerNorm)
    mlp = block.branches["mlp"]
    copy(mlp.op.up, layer.intermediate_query.dense)
    copy(mlp.op.down, layer.output_query.dense)
    copy(mlp.norm, layer.output_query.LayerNorm)

    x, picture = torch.randn(2, 7, 48, requires_grad=True), torch.randn(2, 13, 36)
    reference = layer(x, encoder_hidden_states=picture, query_length=7)
    assert_equal_layers(block(x, context=picture), reference, x)


def test_gated_cross_attention_layer():
    reference_config = MllamaTextConfig(
        hidden_size=48, num_attention_heads=6, num_key_value_heads=2, intermediate_size=64, rms_norm_eps=1e-6
    )
    reference_config._attn_implementation = "eager"
    layer = randomize(MllamaCrossAttentionDecoderLayer(reference_config, layer_idx=0))
    block = Block(
        BlockConfig(
            width=48,
            attention=AttentionConfig(heads=6, kv_heads=2, qk_norm="rms"),
            mlp=GatedMLPConfig(intermediate_size=64),
            branches=("cross", "mlp"),
            norm="rms",
            gated=True,
        )
    )
    x, picture = torch.randn(2, 7, 48, requires_grad=True), torch.randn(2, 13, 48)
    assert torch.equal(block(x, context=picture), x)  # closed gates do not change the text model

    cross, mlp, theirs = block.branches["cross"], block.branches["mlp"], layer.cross_attn
    put(cross.op.q, theirs.q_proj)
    put(cross.op.kv, theirs.k_proj, theirs.v_proj)
    copy(cross.op.out, theirs.o_proj)
    copy(cross.op.q_norm, theirs.q_norm)
    copy(cross.op.k_norm, theirs.k_norm)
    copy(cross.norm, layer.input_layernorm)
    put(mlp.op.gate_up, layer.mlp.gate_proj, layer.mlp.up_proj)
    copy(mlp.op.down, layer.mlp.down_proj)
    copy(mlp.norm, layer.post_attention_layernorm)
    with torch.no_grad():
        cross.gate.copy_(layer.cross_attn_attn_gate)
        mlp.gate.copy_(layer.cross_attn_mlp_gate)
    reference = layer(x, picture, None, None, None)
    reference = reference[0] if isinstance(reference, tuple) else reference
    assert_equal_layers(block(x, context=picture), reference, x)


def test_perceiver_resampler():
    width, heads, head_dim, depth = 40, 3, 8, 2
    reference_config = IdeficsConfig()
    reference_config.vision_config.embed_dim = width
    reference_config.perceiver_config.qk_layer_norms_perceiver = True
    resampler = randomize(IdeficsPerceiverResampler(reference_config, width, depth, heads, head_dim, n_latents=5))
    config = BlockConfig(
        width=width,
        attention=AttentionConfig(heads=heads, head_dim=head_dim, qk_norm="layer", eps=1e-5),
        mlp=PlainMLPConfig(intermediate_size=resampler.intermediate_dim, activation="relu", bias=False),
        branches=("joint", "mlp"),
        eps=1e-5,
    )
    blocks = [Block(config) for _ in range(depth)]
    for block, (attention, feed) in zip(blocks, resampler.blocks, strict=True):
        ours, mlp = block.branches["joint"], block.branches["mlp"]
        put(ours.op.q, attention.q_proj)
        put(ours.op.kv, attention.k_proj, attention.v_proj)
        copy(ours.op.out, attention.output_proj)
        copy(ours.op.q_norm, attention.q_layer_norm)
        copy(ours.op.k_norm, attention.k_layer_norm)
        copy(ours.norm, attention.latents_layer_norm)
        copy(ours.context_norm, attention.context_layer_norm)
        copy(mlp.norm, feed.ln)
        copy(mlp.op.up, feed.fc)
        copy(mlp.op.down, feed.c_proj)
    picture = torch.randn(2, 13, width, requires_grad=True)
    x = resampler.latents.expand(2, -1, -1)
    for block in blocks:
        x = block(x, context=picture)
    assert_equal_layers(resampler.layer_norm(x), resampler(picture), picture)


def test_packed_cross_attention_equals_unpacked():
    """Queries of several images in one row, each attending to its own image; the images differ in size."""
    config = BlockConfig(
        width=48,
        attention=AttentionConfig(heads=4, bias="all"),
        mlp=PlainMLPConfig(intermediate_size=70),
        branches=("self", "cross", "mlp"),
        norm_position="after",
        context_width=36,
    )
    block = randomize(Block(config))
    pictures = [torch.randn(n, 36) for n in (5, 12, 1)]
    queries = [torch.randn(n, 48) for n in (4, 4, 3)]
    alone = [block(q[None], context=p[None])[0] for q, p in zip(queries, pictures, strict=True)]

    def ids(parts):
        return torch.arange(len(parts)).repeat_interleave(torch.tensor([len(p) for p in parts]))[None]

    packed = block(
        torch.cat(queries)[None],
        attention_plan(ids(queries)),
        context=torch.cat(pictures)[None],
        context_plan=attention_plan(ids(queries), key_segments=ids(pictures)),
    )
    assert relative(packed[0], torch.cat(alone)) <= 1e-5


@pytest.mark.parametrize(
    "bad",
    [
        {"branches": ()},
        {"branches": ("mlp", "mlp")},
        {"branches": ("self", "joint", "mlp")},
        {"gated": True, "layer_scale": 0.1},
        {"width": 50},
    ],
)
def test_invalid_blocks_raise(bad):
    with pytest.raises(ConfigError):
        BlockConfig(
            **({"width": 48, "attention": AttentionConfig(heads=4), "mlp": PlainMLPConfig(intermediate_size=8)} | bad)
        )


def test_invalid_attention_raises():
    with pytest.raises(ConfigError, match="kv_heads"):
        AttentionConfig(heads=6, kv_heads=4)
    block = Block(
        BlockConfig(
            width=16,
            attention=AttentionConfig(heads=2),
            mlp=PlainMLPConfig(intermediate_size=8),
            branches=("cross", "mlp"),
        )
    )
    with pytest.raises(ConfigError, match="context"):
        block(torch.randn(1, 2, 16))


def test_configs_round_trip_and_suggest_keys():
    config = BlockConfig(
        width=48, attention=AttentionConfig(heads=4), mlp=GatedMLPConfig(intermediate_size=8), branches=("cross", "mlp")
    )
    assert BlockConfig.from_dict(config.to_dict()) == config
    with pytest.raises(ConfigError, match=r"attention\.head'.*\n.*heads"):
        BlockConfig.from_dict({"width": 48, "attention": {"head": 4}, "mlp": {"kind": "plain", "intermediate_size": 8}})
    with pytest.raises(ConfigError, match="kv_heads"):
        BlockConfig.from_dict(
            {"width": 8, "attention": {"heads": 4, "kv_heads": 3}, "mlp": {"kind": "plain", "intermediate_size": 8}}
        )
    with pytest.raises(ConfigError, match="hiden"):
        GatedMLPConfig(intermediate_size=8).replace(hiden=9)


@pytest.mark.parametrize("bias", ["none", "qkv", "out", "all", "all_but_k"])
@pytest.mark.parametrize("inner", [None, "layer", "rms"])
def test_attention_equals_the_formula(bias, inner):
    """Every choice of bias and inner norm, against the formula."""
    config = AttentionConfig(heads=3, head_dim=4, bias=bias, inner_norm=inner, eps=1e-3)
    ours = randomize(Attention(10, config))
    x = torch.randn(2, 7, 10)
    q, k, v = (x @ w.T for w in ours.qkv.weight.chunk(3))
    if bias in ("qkv", "all"):
        q, k, v = (z + b for z, b in zip((q, k, v), ours.qkv.bias.chunk(3), strict=True))
    if bias == "all_but_k":
        q, v = q + ours.q_bias, v + ours.v_bias
    q, k, v = (z.unflatten(-1, (3, 4)).transpose(1, 2) for z in (q, k, v))
    seen = ((q @ k.mT / 2).softmax(-1) @ v).transpose(1, 2).flatten(2)
    seen = ours.inner_norm(seen) if inner else seen
    seen = seen @ ours.out.weight.T + (ours.out.bias if bias in ("out", "all", "all_but_k") else 0)
    assert relative(ours(x, AttentionPlan()), seen) <= 1e-5
    biases = {name for name, _ in ours.named_parameters() if "bias" in name and "inner" not in name}
    assert (
        biases
        == {
            "none": set(),
            "qkv": {"qkv.bias"},
            "out": {"out.bias"},
            "all": {"qkv.bias", "out.bias"},
            "all_but_k": {"q_bias", "v_bias", "out.bias"},
        }[bias]
    )


def test_all_but_k_bias_needs_self_attention():
    with pytest.raises(ConfigError, match="together"):
        Attention(8, AttentionConfig(heads=2, bias="all_but_k"), "cross")


@pytest.mark.parametrize("inner", [None, "layer"])
def test_gated_mlp_equals_the_formula(inner):
    ours = randomize(make_mlp(6, GatedMLPConfig(intermediate_size=9, bias=True, inner_norm=inner, eps=1e-3)))
    x = torch.randn(4, 6)
    gate, up = (x @ ours.gate_up.weight.T + ours.gate_up.bias).chunk(2, dim=-1)
    y = torch.nn.functional.silu(gate) * up
    y = ours.norm(y) if inner else y
    assert relative(ours(x), y @ ours.down.weight.T + ours.down.bias) <= 1e-5
