"""Decoders match transformers on random checkpoints of unusual shapes: logits, gradients and export."""

import copy
import dataclasses
import json
import random

import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    Glm4Config,
    Glm4ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Ministral3Config,
    Ministral3ForCausalLM,
    MinistralConfig,
    MinistralForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from helpers import randomize, relative
from vitrail.backbones.decoder import Decoder, DecoderConfig
from vitrail.errors import CheckpointError, VitrailError
from vitrail.hub import from_hf, load, save, to_hf
from vitrail.hub.checkpoint_info import read_config
from vitrail.nn import (
    AttentionConfig,
    BlockConfig,
    GatedMLPConfig,
    MoEConfig,
    PlainMLPConfig,
    RotaryConfig,
    RotaryEmbedding,
)
from vitrail.nn.rotary_embedding import NTKScaling, QueryScaling
from vitrail.registry import FAMILIES

CASES = 16

ROPES = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
]


def odd(seed: int) -> dict:
    """Draw a small, unusual config."""
    draw = random.Random(seed)
    kv_heads = draw.choice([1, 2, 3])
    heads = kv_heads * draw.choice([1, 2, 3])
    return {
        "vocab_size": draw.randint(20, 130),
        "hidden_size": heads * draw.choice([6, 10, 14]),
        "num_hidden_layers": draw.randint(1, 4),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": draw.choice([6, 8, 14, 18]),
        "intermediate_size": draw.randint(9, 70),
        "tie_word_embeddings": draw.random() < 0.5,
        "rms_norm_eps": draw.choice([1e-6, 1e-5]),
        "hidden_act": draw.choice(["silu", "silu", "gelu"]),
        "max_position_embeddings": 256,
        "rope_parameters": {**draw.choice(ROPES), "rope_theta": draw.choice([10_000.0, 500_000.0, 1e6])},
    }


def llama(seed: int):
    draw = random.Random(seed + 1)
    return LlamaConfig(**odd(seed), attention_bias=draw.random() < 0.3, mlp_bias=draw.random() < 0.3), LlamaForCausalLM


def qwen2(seed: int):
    settings = odd(seed)
    settings.pop("head_dim")  # Qwen2 has none of its own
    return Qwen2Config(**settings), Qwen2ForCausalLM


def qwen3(seed: int):
    return Qwen3Config(**odd(seed), attention_bias=random.Random(seed + 1).random() < 0.3), Qwen3ForCausalLM


def qwen3_moe(seed: int):
    draw = random.Random(seed + 1)
    count = draw.randint(2, 7)
    settings = odd(seed)
    return (
        Qwen3MoeConfig(
            **settings,
            num_experts=count,
            num_experts_per_tok=draw.randint(1, count),
            moe_intermediate_size=draw.randint(5, 40),
            norm_topk_prob=draw.random() < 0.5,
            decoder_sparse_step=draw.choice([1, 1, 2]),
            mlp_only_layers=[0] if draw.random() < 0.3 and settings["num_hidden_layers"] > 1 else [],
        ),
        Qwen3MoeForCausalLM,
    )


def gemma(seed: int):
    settings = odd(seed)
    settings["hidden_act"] = random.Random(seed + 1).choice(["gelu", "gelu_pytorch_tanh", "silu"])
    bias = random.Random(seed).random() < 0.3
    return GemmaConfig(**settings, pad_token_id=None, attention_bias=bias), GemmaForCausalLM


def windowed(seed: int) -> dict:
    """Draw a config with a sliding window shorter than the 19 tokens of the test."""
    draw, settings = random.Random(seed + 1), odd(seed)
    settings["hidden_activation"] = settings.pop("hidden_act")
    if draw.random() < 0.3:  # no regular pattern
        count = settings["num_hidden_layers"]
        settings["layer_types"] = draw.choices(["sliding_attention", "full_attention"], k=count)
    return settings | {
        "pad_token_id": None,  # transformers gives its embedding no gradient
        "sliding_window": draw.choice([1, 4, 7, 30]),
        "query_pre_attn_scalar": draw.choice([settings["head_dim"], 5, 24]),
        "attention_bias": draw.random() < 0.3,
    }


def gemma2(seed: int):
    caps = {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0} if seed % 3 else {}
    return Gemma2Config(**windowed(seed), **caps), Gemma2ForCausalLM


def gemma3(seed: int):
    settings = windowed(seed)
    if seed % 2:
        local = {"rope_type": "default", "rope_theta": 100.0}
        settings["rope_parameters"] = {"full_attention": settings["rope_parameters"], "sliding_attention": local}
    else:  # as in the released files
        rope = settings.pop("rope_parameters")
        settings |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope, "rope_local_base_freq": 100.0}
    return Gemma3TextConfig(**settings, sliding_window_pattern=2 + seed % 2), Gemma3ForCausalLM


def gemma4(seed: int, **more):
    draw, settings = random.Random(seed + 1), windowed(seed)
    del settings["query_pre_attn_scalar"]
    channels = draw.choice([8, 12, 16])  # of layers with full attention
    full = {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": draw.choice([0.25, 0.5, 1.0])}
    settings["num_hidden_layers"] += 1
    types = draw.choices(["sliding_attention", "full_attention"], k=settings["num_hidden_layers"] - 1)
    return Gemma4TextConfig(
        **settings
        | {
            "layer_types": None if seed % 4 == 1 else [*types, "full_attention"],
            "rope_parameters": {"full_attention": full, "sliding_attention": settings["rope_parameters"]},
        },
        global_head_dim=channels,
        num_global_key_value_heads=draw.choice([None, 1]),
        attention_k_eq_v=seed % 2 == 0,
        hidden_size_per_layer_input=0,
        final_logit_softcapping=draw.choice([None, 2.0]),
        use_bidirectional_attention=draw.choice([None, "vision"]),
        **more,
    ), Gemma4ForCausalLM


def gemma4_moe(seed: int):
    draw = random.Random(seed + 2)
    count = draw.randint(2, 7)
    more = {"num_experts": count, "top_k_experts": draw.randint(1, count)}
    return gemma4(seed, enable_moe_block=True, moe_intermediate_size=draw.randint(5, 40), **more)


def mistral(seed: int):
    return MistralConfig(**odd(seed), sliding_window=random.Random(seed).choice([1, 4, 7, 30])), MistralForCausalLM


def ministral(seed: int):
    settings, draw = odd(seed), random.Random(seed)
    settings["num_hidden_layers"] += 2
    types = draw.choices(["sliding_attention", "full_attention"], k=settings["num_hidden_layers"])
    types[:2] = ["sliding_attention", "full_attention"]
    more = {"layer_types": None if seed % 4 == 1 else types, "sliding_window": draw.choice([1, 4, 7])}
    return MinistralConfig(**settings, **more), MinistralForCausalLM


def ministral3(seed: int):
    """Draw an original length shorter than the 19 tokens of the test, so that the scale of the queries changes."""
    settings, draw = odd(seed), random.Random(seed)
    settings["rope_parameters"] = {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 16.0,
        "original_max_position_embeddings": draw.choice([4, 5, 8]),
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": draw.choice([0.1, 0.7]),
    }
    return Ministral3Config(**settings, sliding_window=draw.choice([None, 6]), pad_token_id=None), Ministral3ForCausalLM


def mixtral(seed: int):
    draw = random.Random(seed + 1)
    count = draw.randint(2, 7)
    more = {"num_local_experts": count, "num_experts_per_tok": draw.randint(1, count)}
    return MixtralConfig(**odd(seed), **more, sliding_window=draw.choice([None, 5])), MixtralForCausalLM


def phi3(seed: int):
    settings, draw = odd(seed), random.Random(seed + 1)
    channels, share = draw.choice([(16, 0.75), (8, 0.5), (46, 26.5 / 46)])
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": share}
    if seed % 2 == 0:  # LongRoPE; 19 tokens are more or less than the original length
        slots = int(channels * share) // 2
        factors = {key: [draw.uniform(1, 9) for _ in range(slots)] for key in ("short_factor", "long_factor")}
        rope |= {"rope_type": "longrope", **factors}
    settings |= {
        "hidden_size": channels * settings["num_attention_heads"],
        "rope_parameters": rope,
        "head_dim": channels,
    }
    lengths = {"max_position_embeddings": 64, "original_max_position_embeddings": draw.choice([4, 30])}
    window = {"sliding_window": draw.choice([None, 5]), "pad_token_id": None}
    return Phi3Config(**settings | lengths | window), Phi3ForCausalLM


def glm4(seed: int):
    draw, settings = random.Random(seed + 1), odd(seed)
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": draw.choice([0.5, 1.0])}
    settings |= {"head_dim": draw.choice([8, 12, 16]), "rope_parameters": rope}
    return Glm4Config(**settings, attention_bias=draw.random() < 0.7, pad_token_id=None), Glm4ForCausalLM


def qwen3_5_settings(seed: int) -> dict:
    settings, draw = odd(seed), random.Random(seed + 1)
    key_heads = draw.choice([1, 2, 3])
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": draw.choice([0.25, 0.5, 1.0])}
    settings |= {"head_dim": draw.choice([8, 16]), "num_hidden_layers": draw.randint(2, 5), "rope_parameters": rope}
    if settings["num_hidden_layers"] < 4 or draw.random() < 0.3:  # not every fourth layer
        types = draw.choices(["linear_attention", "full_attention"], k=settings["num_hidden_layers"])
        settings["layer_types"] = ["linear_attention", *types[1:-1], "full_attention"]
    return settings | {
        "attention_bias": draw.random() < 0.3,
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": key_heads * draw.choice([1, 2, 3]),
        "linear_key_head_dim": draw.choice([5, 8, 12]),
        "linear_value_head_dim": draw.choice([6, 8, 10]),
        "linear_conv_kernel_dim": draw.choice([1, 2, 4]),
    }


def qwen3_5(seed: int):
    return Qwen3_5TextConfig(**qwen3_5_settings(seed)), Qwen3_5ForCausalLM


def qwen3_5_moe(seed: int):
    draw, settings = random.Random(seed + 2), qwen3_5_settings(seed)
    del settings["intermediate_size"]
    count = draw.randint(2, 7)
    more = {
        "num_experts": count,
        "num_experts_per_tok": draw.randint(1, count),
        "moe_intermediate_size": draw.randint(5, 40),
        "shared_expert_intermediate_size": draw.randint(5, 40),
    }
    return Qwen3_5MoeTextConfig(**settings, **more), Qwen3_5MoeForCausalLM


def deepseek_settings(seed: int, groups: int) -> dict:
    """Draw sizes of latent attention and experts. Half of the configs have YaRN, which sharpens the scores too."""
    settings, draw = odd(seed), random.Random(seed + 1)
    del settings["head_dim"]
    settings["num_key_value_heads"] = settings["num_attention_heads"]
    if seed % 2:
        mscale = draw.choice([0.7, 1.0])
        yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16, "beta_fast": 4.0}
        settings["rope_parameters"] = yarn | {"rope_theta": 1e3, "mscale": 1.0, "mscale_all_dim": mscale}
    else:
        settings["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4}
    count = groups * draw.randint(2, 4)
    return settings | {
        "attention_bias": draw.random() < 0.3,
        "kv_lora_rank": draw.choice([5, 8, 12]),
        "q_lora_rank": draw.choice([None, 6, 9]),
        "qk_nope_head_dim": draw.choice([3, 6, 8]),
        "qk_rope_head_dim": draw.choice([2, 4, 10]),
        "v_head_dim": draw.choice([5, 7, 16]),
        "n_routed_experts": count,
        "num_experts_per_tok": draw.randint(1, count // groups),
        "moe_intermediate_size": draw.randint(5, 40),
        "n_shared_experts": draw.randint(1, 3),
        "routed_scaling_factor": draw.choice([1.0, 2.5]),
        "first_k_dense_replace": draw.randint(0, 1),
        "n_group": groups,
        "topk_group": draw.randint(1, groups),
    }


def deepseek_v2(seed: int):
    groups = random.Random(seed).choice([1, 2, 3])
    settings = deepseek_settings(seed, groups)
    for key in ("kv_lora_rank", "qk_nope_head_dim"):  # transformers views pairs of channels as complex numbers
        settings[key] += settings[key] % 2
    method = "greedy" if groups == 1 else "group_limited_greedy"
    return DeepseekV2Config(**settings, topk_method=method), DeepseekV2ForCausalLM


def deepseek_v3(seed: int):
    draw = random.Random(seed)
    more = {"norm_topk_prob": draw.random() < 0.7, "rope_interleave": draw.random() < 0.7}
    return DeepseekV3Config(**deepseek_settings(seed, draw.choice([1, 2, 3])), **more), DeepseekV3ForCausalLM


BUILDERS = {
    "llama": llama,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
    "gemma": gemma,
    "gemma2": gemma2,
    "gemma3_text": gemma3,
    "gemma4_text": gemma4,
    "gemma4_text with experts": gemma4_moe,
    "mistral": mistral,
    "ministral": ministral,
    "ministral3": ministral3,
    "mixtral": mixtral,
    "phi3": phi3,
    "glm4": glm4,
    "qwen3_5_text": qwen3_5,
    "qwen3_5_moe_text": qwen3_5_moe,
    "deepseek_v2": deepseek_v2,
    "deepseek_v3": deepseek_v3,
}
BUFFERS = ("layer_scalar", "e_score_correction_bias")  # of checkpoints


def checkpoint(family: str, seed: int, folder):
    config, model = BUILDERS[family](seed)
    config._attn_implementation = config._experts_implementation = "eager"
    reference = randomize(model(config), seed=seed, spread=0.15).eval()
    for name, buffer in reference.named_buffers():
        if name.endswith(BUFFERS):
            draw = random.Random(seed + len(name))
            buffer.copy_(torch.tensor([draw.uniform(0.5, 1.5) for _ in buffer]))
    reference.save_pretrained(folder)
    return reference


@pytest.mark.parametrize("family", BUILDERS)
@pytest.mark.parametrize("seed", [0, 1, 2, 5])
@torch.no_grad()
def test_cache_equals_no_cache(family, seed):
    """Rows of different lengths, prefilled, then decoded in steps of one and three tokens."""
    config, _ = BUILDERS[family](seed)
    row = FAMILIES[family.split()[0]]
    ours = randomize(row.model_class(row.from_hf_config(config.to_dict())), spread=0.15).eval()
    ids, lengths, cache = torch.randint(0, config.vocab_size, (2, 19)), [9, 6], ours.make_cache(2)
    whole = ours(ids)
    first = ours(ids[:, :9], cache=cache, counts=torch.tensor(lengths))
    parts = [[one[:n]] for one, n in zip(first, lengths, strict=True)]
    for step in (1, 3, 1, 1, 3, 1):
        given = torch.stack([one[n : n + step] for one, n in zip(ids, lengths, strict=True)])
        for part, new in zip(parts, ours(given, cache=cache), strict=True):
            part.append(new)
        lengths = [n + step for n in lengths]
    assert lengths == [19, 16]
    for part, one, n in zip(parts, whole, lengths, strict=True):
        assert relative(torch.cat(part), one[:n]) <= 1e-5


@pytest.mark.parametrize("family", BUILDERS)
@pytest.mark.parametrize("seed", range(CASES))
def test_matches_transformers(family, seed, tmp_path):
    reference = checkpoint(family, seed, tmp_path / "theirs")
    ours = from_hf(tmp_path / "theirs")
    ids = torch.randint(0, reference.config.vocab_size, (2, 19))

    states = reference(ids, output_hidden_states=True)
    logits = ours(ids)
    assert relative(logits, states.logits) <= 1e-4
    assert relative(ours.forward_hidden(ids), states.hidden_states[-1]) <= 1e-4
    weight = torch.randn_like(logits)
    (logits * weight).sum().backward()
    (states.logits * weight).sum().backward()
    theirs = {name: p.grad for name, p in reference.named_parameters()}
    theirs |= {name: p for name, p in reference.named_buffers() if name.endswith(BUFFERS)}  # without gradients
    theirs = on_disk(family, theirs, ours.config.tie_word_embeddings)
    grads = pulled(FAMILIES[family.split()[0]], ours.config, theirs)  # theirs, fused as the weights are
    noise = 1e-6 * max(p.abs().max() for p in grads.values())  # a router of one expert has no gradient but noise
    for name, p in ours.named_parameters():
        torch.testing.assert_close(p.grad, other := grads.pop(name), rtol=0, atol=max(1e-3 * other.abs().max(), noise))
    natives = ("output_scale", "correction_bias")
    assert grads.keys() == {name for name, _ in ours.named_buffers() if name.endswith(natives)}

    if seed % 4 == 0:  # the way back, and our own format
        to_hf(ours, tmp_path / "back")
        back = AutoModelForCausalLM.from_pretrained(
            tmp_path / "back", attn_implementation="eager", experts_implementation="eager"
        ).eval()
        assert type(back) is type(reference)
        assert relative(back(ids).logits, states.logits) <= 1e-6
        save(ours, tmp_path / "own")
        again = load(tmp_path / "own")
        assert again.config == ours.config
        # Copies have aligned tensors. Products with others round differently.
        assert torch.equal(copy.deepcopy(again)(ids), copy.deepcopy(ours)(ids))


BY_LENGTH = {
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1.0, 1.1, 1.3, 2.0],
        "long_factor": [1.0, 2.5, 7.0, 30.0],
        "factor": 4.0,
        "original_max_position_embeddings": 12,
    },
}


@pytest.mark.parametrize("kind", BY_LENGTH)
@pytest.mark.parametrize("length", [7, 12, 13, 31])
def test_rope_scaling_by_length(kind, length, tmp_path):
    """Rows of up to 12 tokens have other frequencies than longer ones."""
    settings = odd(5) | {"head_dim": 8, "max_position_embeddings": 12, "tie_word_embeddings": False}
    config = LlamaConfig(**settings | {"rope_parameters": BY_LENGTH[kind] | {"rope_theta": 10_000.0}})
    reference = randomize(LlamaForCausalLM(config), spread=0.15).eval()
    reference.save_pretrained(tmp_path)
    ours, ids = from_hf(tmp_path), torch.randint(0, config.vocab_size, (2, length))
    assert relative(ours(ids), reference(ids).logits) <= 1e-4
    to_hf(ours, tmp_path / "back")
    assert read_config(tmp_path / "back") == ours.config
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
    assert relative(back(ids).logits, reference(ids).logits) <= 1e-6


@pytest.mark.parametrize("kind", BY_LENGTH)
def test_rope_scaling_depends_on_own_row_only(kind, tmp_path):
    settings = odd(5) | {"head_dim": 8, "max_position_embeddings": 12}
    config = LlamaConfig(**settings | {"rope_parameters": BY_LENGTH[kind] | {"rope_theta": 10_000.0}})
    rotary = FAMILIES["llama"].from_hf_config(config.to_dict()).rotary
    short, both = torch.arange(5)[None], torch.stack([torch.arange(5), torch.arange(20, 25)])
    rotation = RotaryEmbedding(rotary)
    assert torch.equal(rotation(both).cos[:1], rotation(short).cos)
    assert torch.equal(rotation(both).cos[1:], rotation(both[1:]).cos)


def published(family: str):
    """Config of a released model."""
    common = {"tie_word_embeddings": False}
    match family:
        case "llama":  # Llama-3.1-8B
            settings = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 128256}
            more = {"num_key_value_heads": 8, "intermediate_size": 14336}
            return LlamaConfig(**settings, **more, **common), LlamaForCausalLM
        case "qwen2":  # Qwen2.5-7B
            settings = {"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "vocab_size": 152064}
            more = {"num_key_value_heads": 4, "intermediate_size": 18944}
            return Qwen2Config(**settings, **more, **common), Qwen2ForCausalLM
        case "gemma":  # gemma-2b
            settings = {"hidden_size": 2048, "num_hidden_layers": 18, "num_attention_heads": 8, "vocab_size": 256_000}
            more = {"num_key_value_heads": 1, "intermediate_size": 16_384, "head_dim": 256}
            return GemmaConfig(**settings, **more), GemmaForCausalLM
        case "gemma2":  # gemma-2-2b
            return Gemma2Config(), Gemma2ForCausalLM
        case "gemma3_text":  # gemma-3-4b
            settings = {"hidden_size": 2560, "num_hidden_layers": 34, "intermediate_size": 10_240}
            return Gemma3TextConfig(**settings, sliding_window=1024), Gemma3ForCausalLM
        case "gemma4_text":  # Gemma-4-31B, six layers of it
            settings = {"hidden_size": 5376, "num_hidden_layers": 6, "num_attention_heads": 32}
            more = {"intermediate_size": 21_504, "num_key_value_heads": 16, "num_global_key_value_heads": 4}
            none = {"hidden_size_per_layer_input": 0}
            return Gemma4TextConfig(**settings, **more, **none, attention_k_eq_v=True), Gemma4ForCausalLM
        case "gemma4_text with experts":  # Gemma-4-26B-A4B, six layers of it
            settings = {"hidden_size": 2816, "num_hidden_layers": 6, "num_attention_heads": 16}
            more = {"intermediate_size": 2112, "num_key_value_heads": 8, "num_global_key_value_heads": 2}
            experts = {"num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704, "enable_moe_block": True}
            none = {"hidden_size_per_layer_input": 0}
            return Gemma4TextConfig(**settings, **more, **experts, **none, attention_k_eq_v=True), Gemma4ForCausalLM
        case "qwen3":  # Qwen3-4B
            settings = {"hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 32, "vocab_size": 151936}
            more = {"num_key_value_heads": 8, "intermediate_size": 9728, "head_dim": 128, "tie_word_embeddings": True}
            return Qwen3Config(**settings, **more), Qwen3ForCausalLM
        case "mistral":  # Mistral-7B-v0.1
            return MistralConfig(), MistralForCausalLM
        case "ministral":  # Ministral-8B-Instruct-2410
            settings = {"num_hidden_layers": 36, "intermediate_size": 12_288, "head_dim": 128, "vocab_size": 131_072}
            return MinistralConfig(**settings, sliding_window=32_768), MinistralForCausalLM
        case "ministral3":  # Ministral-3-8B
            return Ministral3Config(), Ministral3ForCausalLM
        case "mixtral":  # Mixtral-8x7B, three layers of it
            return MixtralConfig(num_hidden_layers=3), MixtralForCausalLM
        case "phi3":  # Phi-3-mini
            return Phi3Config(), Phi3ForCausalLM
        case "glm4":  # GLM-4-9B-0414
            return Glm4Config(), Glm4ForCausalLM
        case "qwen3_5_text":  # Qwen3.5-9B
            return Qwen3_5TextConfig(), Qwen3_5ForCausalLM
        case "deepseek_v2":  # DeepSeek-V2, two layers of it
            settings = {
                "hidden_size": 5120,
                "num_hidden_layers": 2,
                "num_attention_heads": 128,
                "n_routed_experts": 160,
            }
            more = {"moe_intermediate_size": 1536, "num_experts_per_tok": 6, "n_group": 8, "topk_group": 3}
            dense = {"first_k_dense_replace": 1, "intermediate_size": 12_288, "topk_method": "group_limited_greedy"}
            return DeepseekV2Config(**settings, **more, **dense), DeepseekV2ForCausalLM
        case "deepseek_v3":  # DeepSeek-V3, two layers of it
            return DeepseekV3Config(num_hidden_layers=2, first_k_dense_replace=1), DeepseekV3ForCausalLM
        case "qwen3_5_moe_text":  # Qwen3.5-35B-A3B, four layers of it
            return Qwen3_5MoeTextConfig(num_hidden_layers=4), Qwen3_5MoeForCausalLM
    # Qwen3-30B-A3B, three layers of it: the rest repeat
    settings = {"hidden_size": 2048, "num_hidden_layers": 3, "num_attention_heads": 32, "vocab_size": 151936}
    more = {"num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8}
    return Qwen3MoeConfig(**settings, **more, moe_intermediate_size=768, **common), Qwen3MoeForCausalLM


def on_disk(family: str, tensors: dict[str, torch.Tensor], tied: bool) -> dict[str, torch.Tensor]:
    """Rename tensors or gradients to checkpoint names; a tied head occurs once."""
    theirs = {name: p for name, p in tensors.items() if name != "lm_head.weight" or not tied}
    gate, up, down = ("w1", "w3", "w2") if family == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    stacked = [] if family.startswith("gemma4") else list(theirs)
    for name in stacked:  # in memory transformers stacks the experts; on disk they lie one by one
        if name.endswith("experts.gate_up_proj"):
            base = name.removesuffix(".gate_up_proj")
            for e, one in enumerate(theirs.pop(name)):
                theirs[f"{base}.{e}.{gate}.weight"], theirs[f"{base}.{e}.{up}.weight"] = one.chunk(2)
        elif name.endswith("experts.down_proj"):
            base = name.removesuffix(".down_proj")
            theirs |= {f"{base}.{e}.{down}.weight": one for e, one in enumerate(theirs.pop(name))}
    block = ".block_sparse_moe." if family == "mixtral" else ".mlp."
    return {name.replace(".mlp.", block): p for name, p in theirs.items()}


def pulled(row, config, theirs) -> dict[str, torch.Tensor]:
    """Load native tensors; every external tensor must be used."""
    ours = {}
    for move in row.tensor_rules(config):
        ours |= dict(zip(move.native, move.load([theirs.pop(name) for name in move.hf]), strict=True))
    assert not theirs
    return ours


@pytest.mark.parametrize("family", BUILDERS)
def test_released_shapes_map_to_native(family):
    config, model = published(family)
    row = FAMILIES[family.split()[0]]
    with torch.device("meta"):
        reference, ours = model(config), row.model_class(row.from_hf_config(config.to_dict()))
    state = pulled(row, ours.config, on_disk(family, reference.state_dict(), ours.config.tie_word_embeddings))
    shapes = {name: tuple(p.shape) for name, p in ours.state_dict().items()}
    assert {name: tuple(p.shape) for name, p in state.items()} == shapes


@pytest.mark.gpu
@pytest.mark.parametrize("family", BUILDERS)
@torch.no_grad()
def test_released_shapes_match_in_bfloat16(family):
    config, model = published(family)
    config.num_hidden_layers = min(config.num_hidden_layers, 8)  # the rest repeat
    if layer_types := getattr(config, "layer_types", None):
        config.layer_types = layer_types[: config.num_hidden_layers]
    if getattr(config, "n_routed_experts", None):  # so that eight layers of DeepSeek-V3 fit
        config.n_routed_experts = min(config.n_routed_experts, 32)
    row = FAMILIES[family.split()[0]]
    with torch.device("cuda"):
        reference = model(config).bfloat16().eval()
    with torch.device("meta"):
        ours = row.model_class(row.from_hf_config(config.to_dict()))
    theirs = on_disk(family, reference.state_dict(), ours.config.tie_word_embeddings)
    ours.load_state_dict(pulled(row, ours.config, theirs), assign=True)
    for rotary in filter(None, (ours.rotary, ours.sliding_rotary)):
        rotary.reset_frequencies(torch.device("cuda"))
    ids = torch.randint(0, config.vocab_size, (2, 300), device="cuda")
    theirs, mine = reference(ids).logits.float(), ours.eval()(ids).float()
    exact = ours.float()(ids)  # what both round
    # Mean squares, not the largest error: rounding can send a token to another expert.
    error, allowed = ((logits - exact).square().mean().sqrt() for logits in (mine, theirs))
    assert error <= max(1.5 * allowed, 1e-2 * exact.square().mean().sqrt())


def test_dtype_is_kept_or_converted(tmp_path):
    reference = checkpoint("llama", 3, tmp_path).bfloat16()
    reference.save_pretrained(tmp_path)
    assert {p.dtype for p in from_hf(tmp_path).parameters()} == {torch.bfloat16}
    assert {p.dtype for p in from_hf(tmp_path, dtype=torch.float32).parameters()} == {torch.float32}
    assert from_hf(tmp_path).rotary.frequency.dtype == torch.float32


def test_tied_head_may_be_stored(tmp_path):
    """As in Qwen3-0.6B and 1.7B."""
    seed = next(seed for seed in range(CASES) if odd(seed)["tie_word_embeddings"])
    reference = checkpoint("qwen3", seed, tmp_path)
    tensors = {name: p.clone() for name, p in reference.state_dict().items()}
    assert "lm_head.weight" in tensors
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    ours = from_hf(tmp_path)
    assert ours.head is None
    ids = torch.randint(0, reference.config.vocab_size, (1, 7))
    assert relative(ours(ids), reference(ids).logits) <= 1e-4
    tensors["lm_head.weight"][0] += 1
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"'lm_head.weight' differs from 'model.embed_tokens.weight'"):
        from_hf(tmp_path)


def test_sharded_files(tmp_path):
    reference = checkpoint("qwen3", 1, tmp_path / "a")
    reference.save_pretrained(tmp_path / "b", max_shard_size="20KB")
    assert len(list((tmp_path / "b").glob("*.safetensors"))) > 2
    ids = torch.randint(0, reference.config.vocab_size, (1, 7))
    assert torch.equal(from_hf(tmp_path / "a")(ids), from_hf(tmp_path / "b")(ids))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba"}, "unknown model_type 'mamba'"),
        ({"hidden_size": None}, "'hidden_size' is missing"),
        ({"hidden_act": "snake"}, "snake"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "longrope"),
        ({"num_key_value_heads": 5}, "key/value heads"),
        ({"intermediate_size": 11}, "(?s)gate_proj.*check intermediate_size"),
        ({"num_hidden_layers": 9}, "(?s)no tensor 'model.layers.*check num_hidden_layers"),
        ({"num_hidden_layers": 99}, "99 layers, but"),
        ({"vocab_size": 3}, "(?s)embed_tokens.weight.*check vocab_size"),
    ],
)
def test_mismatched_config_raises(change, message, tmp_path):
    checkpoint("llama", 2, tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(Exception, match=message) as error:
        from_hf(tmp_path)
    assert error.type.__module__ == "vitrail.errors"


WRONG = [
    ("llama", {"num_attention_heads": "4"}, "num_attention_heads"),
    ("llama", {"hidden_size": "7"}, "hidden_size"),
    ("llama", {"hidden_size": -64}, "hidden_size"),
    ("llama", {"rms_norm_eps": "1e-5"}, "rms_norm_eps"),
    ("llama", {"max_position_embeddings": "long"}, "max_position_embeddings"),
    ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 0}}, "rope_theta"),
    ("llama", {"rope_parameters": {"rope_type": "linear"}, "rope_scaling": None}, "factor"),
    ("llama", {"rope_parameters": "abc"}, "rope_parameters"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ("llama", {"rope_scaling": {"type": "yarn"}, "rope_parameters": None}, "factor"),
    ("llama", {"hidden_act": ["silu"]}, "hidden_act"),
    ("llama", {"num_hidden_layers": 0}, "num_hidden_layers"),
    ("llama", {"num_hidden_layers": 3_000_000}, "num_hidden_layers"),
    ("llama", {"tie_word_embeddings": "no"}, "tie_word_embeddings"),
    ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step"),
    ("qwen3_moe", {"mlp_only_layers": "x"}, "mlp_only_layers"),
    ("qwen3_moe", {"num_experts": 10**9}, "num_experts"),
    ("qwen3_moe", {"num_experts": 0, "num_local_experts": 0}, "experts"),
    ("gemma4_text", {"hidden_size_per_layer_input": 8}, "Gemma 4 E2B and E4B"),
    ("gemma4_text", {"num_kv_shared_layers": 1}, "num_kv_shared_layers"),
    ("gemma4_text", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
    ("gemma4_text", {"rope_parameters": {"rope_type": "default"}}, "rope_parameters has no full_attention"),
    ("gemma4_text", {"per_layer_config": {"0": {"sliding_window": 3}}}, "per_layer_config"),
    ("gemma4_text with experts", {"top_k_experts": 9}, "experts"),
]


@pytest.mark.parametrize(("family", "change", "message"), WRONG)
def test_invalid_config_error_names_file_and_key(family, change, message, tmp_path):
    """With and without weights; `vitrail ledger` reads the config only."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**BUILDERS[family](0)[0].to_dict(), **change}))
    for read in (from_hf, read_config):
        with pytest.raises(VitrailError, match=message) as error:
            read(tmp_path)
        assert str(file) in error.value.problem


def test_unexpected_errors_name_the_file(tmp_path):
    for broken in (KeyError("k"), TypeError("t"), ValueError("v"), ZeroDivisionError("z")):

        def read(about, broken=broken):
            raise broken

        with pytest.raises(CheckpointError, match=r"config\.json is not a valid config of llama"):
            dataclasses.replace(FAMILIES["llama"], from_hf_config=read).read_config({}, tmp_path / "config.json")


# ---- export -----------------------------------------------------------------------------------------------------


def test_model_without_family_is_not_exported(tmp_path):
    ours = from_hf_of("qwen2", tmp_path)
    with pytest.raises(CheckpointError, match="llama"):
        to_hf(ours, tmp_path / "x", family="llama")


def from_hf_of(family, tmp_path):
    checkpoint(family, 0, tmp_path / "theirs")
    return from_hf(tmp_path / "theirs")


BLOCK = BlockConfig(width=16, attention=AttentionConfig(heads=2), mlp=GatedMLPConfig(intermediate_size=12), norm="rms")
TINY = DecoderConfig(vocab_size=9, layers=2, block=BLOCK, rotary=RotaryConfig(head_dim=8))
NORMED = BLOCK.replace(attention=AttentionConfig(heads=2, qk_norm="rms"))
MIXED = NORMED.replace(mlp=MoEConfig(num_experts=3, experts_per_token=2, intermediate_size=8))


@pytest.mark.parametrize(
    "changes",
    [
        {"block": NORMED.replace(eps=1e-5)},  # its q and k norms keep 1e-6
        {"dense_layers": (0,), "dense_mlp": GatedMLPConfig(intermediate_size=20)},
        {"block": MIXED, "dense_layers": (0,), "dense_mlp": GatedMLPConfig(intermediate_size=20, bias=True)},
        {"block": MIXED, "dense_layers": (0,), "dense_mlp": GatedMLPConfig(intermediate_size=20, activation="gelu")},
        {
            "block": MIXED.replace(
                mlp=MoEConfig(num_experts=3, experts_per_token=2, intermediate_size=8, shared_intermediate_size=4)
            )
        },
        {"block": BLOCK.replace(norm="layer")},
        {"block": BLOCK.replace(mlp=PlainMLPConfig(intermediate_size=12))},
        {"rotary": RotaryConfig(head_dim=8, pairing="adjacent")},
        {"block": NORMED, "rotary": RotaryConfig(head_dim=8, rotary_dim=4)},  # transformers' would turn the whole head
        {"rotary": RotaryConfig(head_dim=8, query_scaling=QueryScaling(beta=0.1, original_length=8, offset=1))},
        {"rotary": RotaryConfig(head_dim=8, scaling=NTKScaling(factor=2.0))},
    ],
)
def test_inexpressible_config_is_not_exported(changes, tmp_path):
    with pytest.raises(CheckpointError, match="no Hugging Face family"):
        to_hf(Decoder(TINY.replace(**changes)), tmp_path / "x")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("llama", {"block": BLOCK.replace(eps=1e-5)}),  # the eps of q and k norms that it has not
        ("llama", {"rotary": RotaryConfig(head_dim=8, rotary_dim=8)}),
        ("llama", {"block": BLOCK.replace(mlp=GatedMLPConfig(intermediate_size=12, activation="quick_gelu"))}),
        ("phi3", {"rotary": RotaryConfig(head_dim=8, rotary_dim=4)}),
        ("mistral", {"layer_types": ("sliding_attention",), "sliding_window": 3}),
        ("qwen3", {"block": NORMED}),
        ("qwen3_moe", {"block": MIXED, "dense_layers": (1, 0), "dense_mlp": GatedMLPConfig(intermediate_size=20)}),
    ],
)
def test_expressible_config_is_exported(family, changes, tmp_path):
    ours = randomize(Decoder(TINY.replace(**changes))).eval()
    to_hf(ours, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == family
    ids = torch.randint(0, 9, (1, 6))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    assert relative(ours(ids), theirs(ids).logits) <= 1e-4


def test_incomplete_rules_write_nothing(tmp_path, monkeypatch):
    row = FAMILIES["llama"]
    monkeypatch.setitem(
        FAMILIES._values, "llama", dataclasses.replace(row, tensor_rules=lambda config: row.tensor_rules(config)[1:])
    )
    with pytest.raises(CheckpointError, match=r"do not cover 'embed\.weight'"):
        to_hf(Decoder(TINY), tmp_path / "x")
    assert not (tmp_path / "x").exists()
