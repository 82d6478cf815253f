"""The decoder against transformers on random checkpoints of odd shapes: logits, gradients, and the way back."""

import dataclasses
import json
import random

import pytest
import torch
from safetensors.torch import save_file
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
from vitrail.backbones.decoder import Decoder, DecoderConfig
from vitrail.errors import CheckpointError, VitrailError
from vitrail.hub import from_hf, load, save, to_hf
from vitrail.hub.configs import read_config
from vitrail.hub.families import FAMILIES
from vitrail.nn import AttentionConfig, BlockConfig, ExpertsConfig, GatedConfig, PlainConfig, RotaryConfig
from vitrail.nn.rotary import NTK

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
    (logits * weight).sum().backward()
    (states.logits * weight).sum().backward()
    theirs = on_disk({name: p.grad for name, p in reference.named_parameters()}, ours.config.tied)
    grads = pulled(FAMILIES[family], ours.config, theirs)  # theirs, fused as the weights are
    noise = 1e-6 * max(p.abs().max() for p in grads.values())  # a router of one expert has no gradient but noise
    for name, p in ours.named_parameters():
        torch.testing.assert_close(p.grad, other := grads.pop(name), rtol=0, atol=max(1e-3 * other.abs().max(), noise))
    assert not grads

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


def on_disk(tensors: dict[str, torch.Tensor], tied: bool) -> dict[str, torch.Tensor]:
    """A model's tensors, or their gradients, under the names they have in a checkpoint; a tied head once."""
    theirs = {name: p for name, p in tensors.items() if name != "lm_head.weight" or not tied}
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
    state = pulled(row, ours.config, on_disk(reference.state_dict(), ours.config.tied))
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
    theirs = on_disk(reference.state_dict(), ours.config.tied)
    ours.load_state_dict(pulled(row, ours.config, theirs), assign=True)
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


def test_a_tied_head_may_be_stored_all_the_same(tmp_path):
    """As Qwen3-0.6B and 1.7B store it."""
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
        ({"hidden_size": None}, "'hidden_size' is missing"),
        ({"use_sliding_window": True}, "sliding"),
        ({"hidden_act": "snake"}, "snake"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "longrope"),
        ({"num_key_value_heads": 5}, "key/value heads"),
        ({"intermediate_size": 11}, "gate_proj"),
        ({"num_hidden_layers": 9}, "no tensor 'model.layers"),
        ({"num_hidden_layers": 99}, "99 layers and holds"),
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
]


@pytest.mark.parametrize(("family", "change", "says"), WRONG)
def test_a_wrong_config_is_an_error_that_names_file_and_key(family, change, says, tmp_path):
    """With and without weights: the command line's ledger reads the config alone."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**BUILDERS[family](0)[0].to_dict(), **change}))
    for read in (from_hf, read_config):
        with pytest.raises(VitrailError, match=says) as error:
            read(tmp_path)
        assert str(file) in error.value.problem


def test_the_last_net_names_the_file(tmp_path):
    for broken in (KeyError("k"), TypeError("t"), ValueError("v"), ZeroDivisionError("z")):

        def read(about, broken=broken):
            raise broken

        with pytest.raises(CheckpointError, match=r"config\.json is no config of a llama"):
            dataclasses.replace(FAMILIES["llama"], read=read).config({}, tmp_path / "config.json")


# ---- export -----------------------------------------------------------------------------------------------------


def test_a_foreign_model_is_not_exported_as_something_else(tmp_path):
    ours = from_hf_of("qwen2", tmp_path)
    with pytest.raises(CheckpointError, match="llama"):
        to_hf(ours, tmp_path / "x", family="llama")


def from_hf_of(family, tmp_path):
    checkpoint(family, 0, tmp_path / "theirs")
    return from_hf(tmp_path / "theirs")


BLOCK = BlockConfig(width=16, attention=AttentionConfig(heads=2), mlp=GatedConfig(hidden=12), norm="rms")
TINY = DecoderConfig(vocab=9, layers=2, block=BLOCK, rotary=RotaryConfig(head_dim=8))
NORMED = BLOCK.with_(attention=AttentionConfig(heads=2, qk_norm="rms"))
MIXED = NORMED.with_(mlp=ExpertsConfig(count=3, active=2, hidden=8))


@pytest.mark.parametrize(
    "changes",
    [
        {"block": NORMED.with_(eps=1e-5)},  # its q and k norms keep 1e-6
        {"dense": (0,), "dense_mlp": GatedConfig(hidden=20)},
        {"block": MIXED, "dense": (0,), "dense_mlp": GatedConfig(hidden=20, bias=True)},
        {"block": MIXED, "dense": (0,), "dense_mlp": GatedConfig(hidden=20, activation="gelu")},
        {"block": MIXED.with_(mlp=ExpertsConfig(count=3, active=2, hidden=8, shared=4))},
        {"block": BLOCK.with_(norm="layer")},
        {"block": BLOCK.with_(mlp=PlainConfig(hidden=12))},
        {"rotary": RotaryConfig(head_dim=8, pairing="adjacent")},
        {"rotary": RotaryConfig(head_dim=8, dim=4)},  # transformers' would turn the whole head
        {"rotary": RotaryConfig(head_dim=8, scaling=NTK(factor=2.0))},
    ],
)
def test_what_cannot_be_expressed_is_not_exported(changes, tmp_path):
    with pytest.raises(CheckpointError, match="no Hugging Face family"):
        to_hf(Decoder(TINY.with_(**changes)), tmp_path / "x")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("llama", {"block": BLOCK.with_(eps=1e-5)}),  # the eps of q and k norms that it has not
        ("llama", {"rotary": RotaryConfig(head_dim=8, dim=8)}),
        ("llama", {"block": BLOCK.with_(mlp=GatedConfig(hidden=12, activation="quick_gelu"))}),
        ("qwen3", {"block": NORMED}),
        ("qwen3_moe", {"block": MIXED, "dense": (1, 0), "dense_mlp": GatedConfig(hidden=20)}),
    ],
)
def test_what_can_be_expressed_is(family, changes, tmp_path):
    ours = randomize(Decoder(TINY.with_(**changes))).eval()
    to_hf(ours, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == family
    ids = torch.randint(0, 9, (1, 6))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    assert relative(ours(ids), theirs(ids).logits) <= 1e-4


def test_a_map_that_forgets_writes_nothing(tmp_path, monkeypatch):
    row = FAMILIES["llama"]
    monkeypatch.setitem(FAMILIES, "llama", dataclasses.replace(row, moves=lambda config: row.moves(config)[1:]))
    with pytest.raises(CheckpointError, match=r"forgets 'embed\.weight'"):
        to_hf(Decoder(TINY), tmp_path / "x")
    assert not (tmp_path / "x").exists()
