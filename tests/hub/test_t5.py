"""T5 and UMT5 encoders match transformers on random checkpoints: states of all layers, padding, gradients, export."""

import json
import random

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import T5Config, T5EncoderModel, T5ForConditionalGeneration, UMT5Config, UMT5EncoderModel

from helpers import randomize, relative
from vitrail.encoders import T5Encoder
from vitrail.errors import CheckpointError, ConfigError
from vitrail.hub import from_hf, load, save, to_hf
from vitrail.hub.t5 import MLP_KINDS
from vitrail.nn import cost
from vitrail.registry import FAMILIES

VALUES, GRADIENTS = 1e-4, 1e-3  # max |Δ| / max |reference|
CLASSES = {"t5": (T5Config, T5EncoderModel), "umt5": (UMT5Config, UMT5EncoderModel)}


def build_reference(family: str, seed: int):
    draw = random.Random(seed)
    config_class, model_class = CLASSES[family]
    config = config_class(
        vocab_size=draw.randint(20, 60),
        d_model=draw.choice([6, 10, 16]),
        d_kv=draw.choice([3, 4, 8]),
        num_heads=draw.choice([1, 2, 3]),
        d_ff=draw.randint(5, 30),
        num_layers=draw.randint(1, 3),
        relative_attention_num_buckets=draw.choice([8, 12, 32]),
        relative_attention_max_distance=draw.choice([9, 20, 128]),
        layer_norm_epsilon=draw.choice([1e-6, 1e-3]),
        feed_forward_proj=draw.choice(list(MLP_KINDS)),
    )
    return randomize(model_class(config), seed=seed).eval()


@pytest.mark.parametrize("family", CLASSES)
@pytest.mark.parametrize("seed", range(12))
def test_encoder_matches_transformers(family, seed, tmp_path):
    reference = build_reference(family, seed)
    reference.save_pretrained(tmp_path / "theirs")
    ours = from_hf(tmp_path / "theirs")
    ids = torch.randint(ours.config.vocab_size, (3, random.Random(seed).choice([1, 7, 40])))
    mask = torch.ones_like(ids)
    mask[1, ids.shape[1] // 2 + 1 :] = 0
    for given in (None, mask):
        states = reference(ids, attention_mask=given, output_hidden_states=True)
        output, expected = ours(ids, given), states.last_hidden_state
        assert output.shape == expected.shape and relative(output, expected) <= VALUES
        for layer in range(ours.config.layers):  # transformers keeps the last state only with the last norm
            assert relative(ours(ids, given, layer=layer), states.hidden_states[layer]) <= VALUES
        weight = torch.randn_like(expected)
        kept = dict(reference.named_parameters())
        theirs = dict(zip(kept, torch.autograd.grad((expected * weight).sum(), kept.values()), strict=True))
        names = dict(ours.named_parameters())
        mine = dict(zip(names, torch.autograd.grad((output * weight).sum(), names.values()), strict=True))
        for rule in FAMILIES[family].tensor_rules(ours.config):
            for name, gradient in zip(rule.native, rule.load([theirs[x] for x in rule.hf]), strict=True):
                bound = GRADIENTS * gradient.abs().max().clamp_min(1e-2)
                assert (mine[name] - gradient).abs().max() <= bound, name

    to_hf(ours, tmp_path / "back")
    hf_config = json.loads((tmp_path / "back/config.json").read_text())
    assert (hf_config["model_type"], hf_config["architectures"]) == (family, [type(reference).__name__])
    stored, original = load_file(tmp_path / "back/model.safetensors"), load_file(tmp_path / "theirs/model.safetensors")
    assert stored.keys() == original.keys()
    assert all(torch.equal(stored[name], original[name]) for name in stored)
    back = type(reference).from_pretrained(tmp_path / "back").eval()
    assert torch.equal(back(ids).last_hidden_state, reference(ids).last_hidden_state)
    save(ours, tmp_path / "native")
    loaded = load(tmp_path / "native")
    assert loaded.config == ours.config and torch.equal(loaded(ids), ours(ids))


def test_encoder_of_a_full_checkpoint(tmp_path):
    """The decoder of T5ForConditionalGeneration is left out."""
    config = build_reference("t5", 3).config
    reference = randomize(T5ForConditionalGeneration(T5Config(**{**config.to_dict(), "is_encoder_decoder": True})))
    reference.save_pretrained(tmp_path)
    ids = torch.randint(config.vocab_size, (2, 9))
    expected = reference.eval().encoder(ids).last_hidden_state
    assert relative(from_hf(tmp_path)(ids), expected) <= VALUES


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype, tmp_path):
    reference = build_reference("t5", 1).to(dtype)
    reference.save_pretrained(tmp_path)
    ours = from_hf(tmp_path)
    ids = torch.randint(ours.config.vocab_size, (2, 9))
    assert {p.dtype for p in ours.parameters()} == {dtype} == {ours(ids).dtype}
    with torch.no_grad():
        ours.blocks[0].out.weight.mul_(torch.finfo(torch.float16).max)  # states beyond the range of float16
    assert ours(ids).isfinite().all()


def test_cost_is_that_of_the_real_model(tmp_path):
    config = from_saved_config(tmp_path)
    with torch.device("meta"):
        model = T5Encoder(config)
        ids = torch.zeros(2, 13, dtype=torch.long)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(ids)
    work = model.workload(2, 13)
    assert cost.count_flops(model, work) == counter.get_total_flops()
    held = cost.count_bytes(model, work)
    assert held.weights == sum(p.numel() * 4 for p in model.parameters())


def from_saved_config(folder):
    build_reference("t5", 5).save_pretrained(folder)
    return from_hf(folder).config


def test_unsupported_settings():
    with pytest.raises(CheckpointError, match="feed_forward_proj 'gated-mish'"):
        FAMILIES["t5"].from_hf_config({"feed_forward_proj": "gated-mish"})
    with pytest.raises(ConfigError, match="7 buckets"):
        FAMILIES["t5"].from_hf_config({"relative_attention_num_buckets": 7})


def test_published_size():
    """The T5-XXL encoder of Stable Diffusion 3 and FLUX: 9,524,621,312 bytes in half precision."""
    xxl = {"d_model": 4096, "d_ff": 10_240, "num_heads": 64, "num_layers": 24, "feed_forward_proj": "gated-gelu"}
    with torch.device("meta"):
        model = T5Encoder(FAMILIES["t5"].from_hf_config(xxl))
    assert sum(p.numel() for p in model.parameters()) == 4_762_310_656
