"""The decoder against transformers on random checkpoints of odd shapes: logits, gradients, and the way back."""

import json
import random

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from helpers import randomize, relative
from vitrail.errors import CheckpointError
from vitrail.hub import from_hf, load, save, to_hf
from vitrail.hub.families import FAMILIES

CASES = 24

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
    """A small config nobody would choose."""
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


BUILDERS = {"llama": llama, "qwen2": qwen2, "qwen3": qwen3, "qwen3_moe": qwen3_moe}


def checkpoint(family: str, seed: int, folder):
    config, model = BUILDERS[family](seed)
    config._attn_implementation = config._experts_implementation = "eager"
    reference = randomize(model(config), seed=seed, spread=0.15).eval()
    reference.save_pretrained(folder)
    return reference


@pytest.mark.parametrize("family", BUILDERS)
@pytest.mark.parametrize("seed", range(CASES))
def test_agreement(family, seed, tmp_path):
    reference = checkpoint(family, seed, tmp_path / "theirs")
    ours = from_hf(tmp_path / "theirs")
    ids = torch.randint(0, reference.config.vocab_size, (2, 19))

    states = reference(ids, output_hidden_states=True)
    logits = ours(ids)
    assert relative(logits, states.logits) <= 1e-4
    assert relative(ours.hidden(ids), states.hidden_states[-1]) <= 1e-4
    weight = torch.randn_like(logits)
    a = torch.autograd.grad((logits * weight).sum(), [ours.embed.weight, ours.norm.weight])
    theirs = [reference.model.embed_tokens.weight, reference.model.norm.weight]
    b = torch.autograd.grad((states.logits * weight).sum(), theirs)
    for mine, other in zip(a, b, strict=True):
        assert relative(mine, other) <= 1e-3

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
        assert torch.equal(again(ids), logits)


def published(family: str):
    """The shapes of a released model."""
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
        case "qwen3":  # Qwen3-4B
            settings = {"hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 32, "vocab_size": 151936}
            more = {"num_key_value_heads": 8, "intermediate_size": 9728, "head_dim": 128, "tie_word_embeddings": True}
            return Qwen3Config(**settings, **more), Qwen3ForCausalLM
    # Qwen3-30B-A3B, three layers of it: the rest repeat
    settings = {"hidden_size": 2048, "num_hidden_layers": 3, "num_attention_heads": 32, "vocab_size": 151936}
    more = {"num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8}
    return Qwen3MoeConfig(**settings, **more, moe_intermediate_size=768, **common), Qwen3MoeForCausalLM


def on_disk(reference, tied: bool) -> dict[str, torch.Tensor]:
    """A model's tensors under the names they have in a checkpoint."""
    theirs = {name: p for name, p in reference.state_dict().items() if name != "lm_head.weight" or not tied}
    for name in list(theirs):  # in memory transformers stacks the experts; on disk they lie one by one
        if name.endswith("experts.gate_up_proj"):
            base = name.removesuffix(".gate_up_proj")
            for e, one in enumerate(theirs.pop(name)):
                theirs[f"{base}.{e}.gate_proj.weight"], theirs[f"{base}.{e}.up_proj.weight"] = one.chunk(2)
        elif name.endswith("experts.down_proj"):
            base = name.removesuffix(".down_proj")
            theirs |= {f"{base}.{e}.down_proj.weight": one for e, one in enumerate(theirs.pop(name))}
    return theirs


def pulled(row, config, theirs) -> dict[str, torch.Tensor]:
    """Our tensors, every one of theirs used up."""
    ours = {}
    for move in row.moves(config):
        ours |= dict(zip(move.ours, move.pull([theirs.pop(name) for name in move.theirs]), strict=True))
    assert not theirs
    return ours


@pytest.mark.parametrize("family", BUILDERS)
def test_published_shapes_map_onto_ours(family):
    config, model = published(family)
    row = FAMILIES[family]
    with torch.device("meta"):
        reference, ours = model(config), row.model(row.read(config.to_dict()))
    state = pulled(row, ours.config, on_disk(reference, ours.config.tied))
    shapes = {name: tuple(p.shape) for name, p in ours.state_dict().items()}
    assert {name: tuple(p.shape) for name, p in state.items()} == shapes


@pytest.mark.gpu
@pytest.mark.parametrize("family", BUILDERS)
@torch.no_grad()
def test_published_shapes_agree_in_bfloat16(family):
    config, model = published(family)
    config.num_hidden_layers = min(config.num_hidden_layers, 8)  # the rest repeat
    row = FAMILIES[family]
    with torch.device("cuda"):
        reference = model(config).bfloat16().eval()
    with torch.device("meta"):
        ours = row.model(row.read(config.to_dict()))
    ours.load_state_dict(pulled(row, ours.config, on_disk(reference, ours.config.tied)), assign=True)
    ours.rotary.fill(torch.device("cuda"))
    ids = torch.randint(0, config.vocab_size, (2, 300), device="cuda")
    theirs, mine = reference(ids).logits.float(), ours.eval()(ids).float()
    exact = ours.float()(ids)  # what both round
    scale = exact.abs().max()
    error = (mine - exact).abs().max() / scale
    assert error <= max(1.5 * (theirs - exact).abs().max() / scale, 1e-2)


def test_bf16_is_kept_and_can_be_changed(tmp_path):
    reference = checkpoint("llama", 3, tmp_path).bfloat16()
    reference.save_pretrained(tmp_path)
    assert {p.dtype for p in from_hf(tmp_path).parameters()} == {torch.bfloat16}
    assert {p.dtype for p in from_hf(tmp_path, dtype=torch.float32).parameters()} == {torch.float32}
    assert from_hf(tmp_path).rotary.frequency.dtype == torch.float32


def test_shards(tmp_path):
    reference = checkpoint("qwen3", 1, tmp_path / "a")
    reference.save_pretrained(tmp_path / "b", max_shard_size="20KB")
    assert len(list((tmp_path / "b").glob("*.safetensors"))) > 2
    ids = torch.randint(0, reference.config.vocab_size, (1, 7))
    assert torch.equal(from_hf(tmp_path / "a")(ids), from_hf(tmp_path / "b")(ids))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "mamba"}, "unknown model_type 'mamba'"),
        ({"hidden_size": None}, "lacks 'hidden_size'"),
        ({"use_sliding_window": True}, "sliding"),
        ({"hidden_act": "snake"}, "snake"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "longrope"),
        ({"num_key_value_heads": 5}, "key/value heads"),
        ({"intermediate_size": 11}, "gate_proj"),
        ({"num_hidden_layers": 99}, "no tensor 'model.layers"),
        ({"vocab_size": 3}, "embed.weight"),
    ],
)
def test_a_config_that_does_not_fit_is_refused_by_name(change, says, tmp_path):
    checkpoint("llama", 2, tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(Exception, match=says) as error:
        from_hf(tmp_path)
    assert error.type.__module__ == "vitrail.errors"


def test_a_foreign_model_is_not_exported_as_something_else(tmp_path):
    ours = from_hf_of("qwen2", tmp_path)
    with pytest.raises(CheckpointError, match="llama"):
        to_hf(ours, tmp_path / "x", family="llama")


def from_hf_of(family, tmp_path):
    checkpoint(family, 0, tmp_path / "theirs")
    return from_hf(tmp_path / "theirs")
