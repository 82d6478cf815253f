"""Rotary angles of every `rope_scaling` equal those of transformers, in old and new spelling, beyond every length."""

import json

import pytest
import torch
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLRotaryEmbedding
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from vitrail.errors import VitrailError
from vitrail.hub.checkpoint_info import read_config
from vitrail.nn import RotaryEmbedding

CONTEXT, ORIGINAL = 96, 32
SHORT, LONG = [1.0 + i / 8 for i in range(8)], [1.0 + i for i in range(8)]
SCALINGS = {
    "none": {},
    "default": {"type": "default"},
    "linear": {"type": "linear", "factor": 4.0},
    "dynamic": {"type": "dynamic", "factor": 2.0},
    "yarn": {"type": "yarn", "factor": 3.0, "original_max_position_embeddings": ORIGINAL},
    "yarn with all options": {
        "type": "yarn",
        "factor": 3.0,
        "original_max_position_embeddings": ORIGINAL,
        "beta_fast": 20.0,
        "beta_slow": 2.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
        "truncate": False,
    },
    "yarn with a given amplitude": {
        "type": "yarn",
        "factor": 3.0,
        "original_max_position_embeddings": ORIGINAL,
        "attention_factor": 1.3,
    },
    "yarn without a factor": {"type": "yarn", "factor": None, "original_max_position_embeddings": ORIGINAL},
    "longrope": {"type": "longrope", "short_factor": SHORT, "long_factor": LONG},
    "longrope by its first name": {"type": "su", "short_factor": SHORT, "long_factor": LONG},
    "longrope with a given amplitude": {
        "type": "longrope",
        "short_factor": SHORT,
        "long_factor": LONG,
        "attention_factor": 1.3,
    },
    "llama3": {
        "type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
}
LENGTHS = (1, ORIGINAL, ORIGINAL + 1, CONTEXT, CONTEXT + 1, 5 * CONTEXT)
SIZES = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 8, "vocab_size": 9}


def spell(scaling: dict, spelling: str, **more) -> dict:
    """A config with rope_theta and rope_scaling, as before transformers 5, or with rope_parameters."""
    if spelling == "rope_parameters":
        renamed = {{"type": "rope_type"}.get(key, key): value for key, value in scaling.items()}
        renamed |= {"rope_type": {"su": "longrope"}.get(renamed.get("rope_type"), renamed.get("rope_type", "default"))}
        if "short_factor" in scaling:
            renamed["original_max_position_embeddings"] = ORIGINAL
        return {**SIZES, **more, "max_position_embeddings": CONTEXT, "rope_parameters": {"rope_theta": 1e4, **renamed}}
    hf_config = {**SIZES, **more, "max_position_embeddings": CONTEXT, "rope_theta": 1e4}
    hf_config["rope_scaling"] = scaling or None
    if "short_factor" in scaling:  # Phi-3 keeps it outside
        hf_config["original_max_position_embeddings"] = ORIGINAL
    return hf_config


def read_both(hf_config: dict, folder):
    (folder / "config.json").write_text(json.dumps(hf_config))
    theirs = hf_config
    if (hf_config.get("rope_scaling") or {}).get("type") == "su":  # transformers has dropped the name
        theirs = hf_config | {"rope_scaling": hf_config["rope_scaling"] | {"type": "longrope"}}
    return read_config(folder), AutoConfig.for_model(**theirs)


def check_angles(ours: RotaryEmbedding, build_reference, positions, reference_positions) -> None:
    rotation = ours(positions)
    cos, sin = build_reference()(torch.zeros(1), reference_positions)  # new: some keep the longest length
    slots = rotation.cos.shape[-1]
    for mine, reference in ((rotation.cos, cos), (rotation.sin, sin)):
        torch.testing.assert_close(mine, reference[..., :slots].float(), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("name", SCALINGS)
def test_angles_match_transformers(name, spelling, tmp_path):
    config, reference = read_both(spell(SCALINGS[name], spelling, model_type="llama", num_hidden_layers=1), tmp_path)
    for length in LENGTHS:
        positions = torch.arange(length)[None]
        check_angles(RotaryEmbedding(config.rotary), lambda: LlamaRotaryEmbedding(reference), positions, positions)


@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
def test_partial_rotation_with_longrope(spelling, tmp_path):
    """Phi-4-mini: three quarters of the channels, each with its factors."""
    factors = {"type": "longrope", "short_factor": SHORT[:6], "long_factor": LONG[:6]}
    hf_config = spell(factors, spelling, model_type="phi3", num_hidden_layers=1, pad_token_id=0)
    (hf_config if spelling == "rope_scaling" else hf_config["rope_parameters"])["partial_rotary_factor"] = 0.75
    config, reference = read_both(hf_config, tmp_path)
    assert config.rotary.num_rotated_channels == 12
    for length in LENGTHS:
        positions = torch.arange(length)[None]
        check_angles(RotaryEmbedding(config.rotary), lambda: Phi3RotaryEmbedding(reference), positions, positions)


VISION = {"depth": 1, "num_heads": 2, "patch_size": 16, "spatial_merge_size": 2}
MROPE = {
    "qwen2_vl": (Qwen2VLRotaryEmbedding, [2, 3, 3], {"embed_dim": 16, "hidden_size": 32, "mlp_ratio": 1}),
    "qwen2_5_vl": (
        Qwen2_5_VLRotaryEmbedding,
        [2, 3, 3],
        {"hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 8, "window_size": 64},
    ),
    "qwen3_vl": (
        Qwen3VLTextRotaryEmbedding,
        [4, 2, 2],
        {"hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 8, "deepstack_visual_indexes": [0]},
    ),
}


@pytest.mark.parametrize("family", MROPE)
@pytest.mark.parametrize("name", ["mrope", "yarn", "dynamic"])
def test_sections_match_transformers(family, name, tmp_path):
    """M-RoPE, also with a scaling to longer videos."""
    oracle, sections, vision = MROPE[family]
    scaling = {"type": "mrope"} if name == "mrope" else SCALINGS[name]
    if family == "qwen3_vl" and name == "mrope":
        scaling = {"type": "default"}
    text = spell(scaling | {"mrope_section": sections}, "rope_scaling", num_hidden_layers=2, vocab_size=151_700)
    if family == "qwen3_vl":
        text |= {"head_dim": 16, "model_type": "qwen3_vl_text"}
        text["rope_scaling"]["mrope_interleaved"] = True
        hf_config = {"model_type": family, "text_config": text, "vision_config": {**VISION, **vision}}
    else:
        hf_config = {"model_type": family, **text, "vision_config": {**VISION, **vision}}
    (tmp_path / "config.json").write_text(json.dumps(hf_config))
    config = read_config(tmp_path).decoder
    reference = AutoConfig.from_pretrained(tmp_path).get_text_config()
    for length in LENGTHS:
        positions = torch.randint(0, length, (1, length, 3))  # t, h and w differ
        check_angles(RotaryEmbedding(config.rotary), lambda: oracle(reference), positions, positions.movedim(-1, 0))


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"type": "linear"}, "'factor' is missing"),
        ({"type": "spiral"}, "rope_type 'spiral' is not supported"),
        ({"type": "longrope", "short_factor": SHORT}, "'long_factor' is missing"),
        ({"type": "longrope", "short_factor": SHORT[:3], "long_factor": LONG}, "short_factor .* has 3 values for 8"),
        ({"type": "llama3", "factor": 2.0}, "'original_max_position_embeddings' is missing"),
    ],
)
def test_incomplete_scaling_names_file_and_key(scaling, message, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(spell(scaling, "rope_scaling", model_type="llama")))
    with pytest.raises(VitrailError, match=message) as error:
        read_config(tmp_path)
    assert str(tmp_path / "config.json") in error.value.problem and error.value.remedy


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_samples_of_a_packed_row_have_their_own_length(name, tmp_path):
    """A short sample beside a long one in one row has the angles that it has alone."""
    config, _ = read_both(spell(SCALINGS[name], "rope_scaling", model_type="llama", num_hidden_layers=1), tmp_path)
    rotary, samples = RotaryEmbedding(config.rotary), [torch.arange(n)[None] for n in (max(LENGTHS), 3, min(LENGTHS))]
    packed = rotary(torch.cat(samples, 1)).cos.split([one.shape[1] for one in samples], 1)
    for one, cos in zip(samples, packed, strict=True):
        torch.testing.assert_close(cos, rotary(one).cos, rtol=0, atol=0)
