"""OPT matches transformers on random checkpoints of unusual shapes: logits, gradients, export, generation."""

import json
import random

import pytest
import torch
from transformers import OPTConfig, OPTForCausalLM

from helpers import randomize, relative
from vitrail.backbones.decoder import Decoder, DecoderConfig
from vitrail.errors import ConfigError, VitrailError
from vitrail.generate.sampling import SamplingConfig
from vitrail.generate.text_generation import generate_texts
from vitrail.hub import from_hf, load, save, to_hf
from vitrail.nn import AttentionConfig, BlockConfig, PlainMLPConfig, RotaryConfig
from vitrail.registry import FAMILIES

CONTEXT = 40
GREEDY = SamplingConfig(temperature=0)


def checkpoint(seed: int, folder, **more) -> OPTForCausalLM:
    draw = random.Random(seed)
    heads = draw.choice([1, 2, 3])
    config = OPTConfig(
        **{
            "vocab_size": draw.randint(20, 130),
            "hidden_size": heads * draw.choice([5, 6, 9]),  # odd heads too: nothing is turned
            "num_hidden_layers": draw.randint(1, 4),
            "num_attention_heads": heads,
            "ffn_dim": draw.randint(9, 70),
            "activation_function": draw.choice(["relu", "relu", "gelu"]),
            "enable_bias": draw.random() < 0.7,
            "tie_word_embeddings": draw.random() < 0.5,
            "max_position_embeddings": CONTEXT,
            **more,
        }
    )
    reference = randomize(OPTForCausalLM(config).eval(), seed=seed, spread=0.15)
    reference.save_pretrained(folder)
    return reference


@pytest.mark.parametrize("seed", range(12))
def test_matches_transformers(seed, tmp_path):
    reference = checkpoint(seed, tmp_path / "theirs")
    ours = from_hf(tmp_path / "theirs")
    ids = torch.randint(2, reference.config.vocab_size, (2, CONTEXT))  # 1 is their padding, which has no gradient
    expected, logits = reference(ids).logits, ours(ids)
    assert relative(logits, expected) <= 1e-4

    weight = torch.randn_like(logits)
    (logits * weight).sum().backward()
    (expected * weight).sum().backward()
    theirs = {name: p.grad for name, p in reference.named_parameters()}
    for move in FAMILIES["opt"].tensor_rules(ours.config):
        for name, g in zip(move.native, move.load([theirs[x] for x in move.hf]), strict=True):
            found = ours.get_parameter(name).grad
            assert (found - g).abs().max() <= 1e-3 * g.abs().max().clamp_min(1e-2), name

    to_hf(ours, tmp_path / "back")
    assert json.loads((tmp_path / "back/config.json").read_text())["model_type"] == "opt"
    back, kept = OPTForCausalLM.from_pretrained(tmp_path / "back").state_dict(), reference.state_dict()
    assert back.keys() == kept.keys() and all(torch.equal(x, back[name]) for name, x in kept.items())
    save(ours, tmp_path / "own")
    assert torch.equal(load(tmp_path / "own")(ids), logits)


def test_generation_matches_transformers(tmp_path):
    """Greedy generation from a batch of prompts with different lengths, up to the context length."""
    reference = checkpoint(5, tmp_path, eos_token_id=None)
    ours = from_hf(tmp_path)
    prompts = [[4, 5, 6, 7, 8] * 6, [9, 3], [5]]
    for prompt, row in zip(prompts, generate_texts(ours, prompts, stop_ids=(), sampling=GREEDY), strict=True):
        room = CONTEXT - len(prompt)
        expected = reference.generate(torch.tensor([prompt]), max_new_tokens=room, do_sample=False)
        assert list(row.ids) == expected[0, len(prompt) :].tolist() and len(row.ids) == room


def test_exceeding_the_context_raises(tmp_path):
    checkpoint(2, tmp_path)
    ours = from_hf(tmp_path)
    with pytest.raises(ConfigError, match="at most 40 tokens"):
        ours(torch.full((2, CONTEXT + 1), 3))
    cache = ours.make_cache(1)
    ours(torch.full((1, CONTEXT), 3), cache=cache)
    with pytest.raises(ConfigError, match="position 40"):
        ours(torch.tensor([[3]]), cache=cache)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"do_layer_norm_before": False}, "350m"),
        ({"word_embed_proj_dim": 7}, "350m"),
        ({"_remove_final_layer_norm": True}, "norms"),
        ({"layer_norm_elementwise_affine": False}, "norms"),
        ({"activation_function": "mish"}, "mish"),
        ({"ffn_dim": None}, "ffn_dim"),
    ],
)
def test_unsupported_settings_raise(change, message, tmp_path):
    checkpoint(0, tmp_path)
    about = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(about | change))
    with pytest.raises(VitrailError, match=message):
        from_hf(tmp_path)


def test_learned_positions_in_other_decoders():
    """Any decoder can have learned positions; a table shorter than the context raises an error."""
    block = BlockConfig(width=12, attention=AttentionConfig(heads=2), mlp=PlainMLPConfig(intermediate_size=16))
    config = DecoderConfig(
        vocab_size=9, layers=1, block=block, rotary=RotaryConfig(head_dim=6), learned_positions=8, context_length=8
    )
    model, plain = randomize(Decoder(config)), Decoder(config.replace(learned_positions=0))
    plain.load_state_dict({name: x for name, x in model.state_dict().items() if name != "positions.weight"})
    ids = torch.randint(0, 9, (2, 8))
    assert relative(plain(embeds=plain.embed(ids) + model.positions.weight), model(ids)) <= 1e-6
    for bad in ({"learned_positions": 7}, {"rotary": RotaryConfig(head_dim=6, layout="mrope", sections=(1, 1, 1))}):
        with pytest.raises(ConfigError, match="learned_positions"):
            config.replace(**bad)
