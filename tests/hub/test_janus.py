"""Janus matches transformers on random weights of unusual shapes: values, gradients, pixels, exports."""

import json
from pathlib import Path

import pytest
import torch
from transformers import JanusConfig, JanusForConditionalGeneration
from transformers.models.janus.image_processing_pil_janus import JanusImageProcessorPil

from helpers import randomize, relative
from hub.test_blip2_internvl import IMAGE, VALUES, asked, pictures
from vitrail.errors import VitrailError
from vitrail.hub import from_hf, load, save, to_hf
from vitrail.hub.janus import GENERATION_PREFIXES
from vitrail.hub.llava import normalize_llava_config
from vitrail.registry import FAMILIES
from vitrail.stream import pack_streams, split_by_sample

GRADIENTS = 1e-3  # max |Δ| / max |reference|
FAMILY = FAMILIES["janus"]
TEXT = {"hidden_size": 30, "num_hidden_layers": 2, "num_attention_heads": 3, "vocab_size": 99, "intermediate_size": 47}
TEXT |= {"model_type": "llama", "num_key_value_heads": 1}
VISION = {"hidden_size": 22, "mlp_ratio": 1.7, "num_attention_heads": 2, "num_hidden_layers": 2, "image_size": 17}
VISION |= {"patch_size": 5, "projection_dim": 30, "hidden_act": "gelu"}
CODEC = {"base_channels": 32, "channel_multiplier": [1], "num_res_blocks": 1, "latent_channels": 32}
CODEC |= {"embed_dim": 4, "num_embeddings": 8, "projection_dim": 30, "image_token_embed_dim": 30}
CASES = {
    "untied": {"tie_word_embeddings": False},
    "tied": {"tie_word_embeddings": True},
    "three layers": {"vision_config": VISION | {"depth": 3, "hidden_act": "gelu_pytorch_tanh", "mlp_ratio": 2}},
    "one layer": {"vision_config": VISION | {"depth": 1, "num_attention_heads": 1, "image_size": 20}},
}


def load_both(case: str, folder: Path):
    settings = {"vision_config": VISION, "text_config": TEXT, "vq_config": CODEC, "image_token_id": IMAGE}
    reference = JanusForConditionalGeneration(JanusConfig(**settings | CASES[case]))
    randomize(reference.eval(), spread=0.1).save_pretrained(folder)
    return reference, from_hf(folder).eval()


def compute_reference(reference, samples, pixels):
    """Run transformers sample by sample."""
    found, first = [], 0
    for sample in samples:
        n = sum(source.feed == "image" for source in sample.sources)
        ids = torch.where(sample.kinds == 1, IMAGE, sample.ids)[None]
        found.append(reference(input_ids=ids, pixel_values=pixels[first : first + n] if n else None).logits[0])
        first += n
    return found


@pytest.mark.parametrize("case", CASES)
def test_matches_transformers(case, tmp_path):
    """Values and gradients with no, one and several images, with pixels of the processor of transformers."""
    reference, ours = load_both(case, tmp_path)
    side = ours.config.policy.image_size
    about = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.25, 0.3], "min_size": 7, "resample": 2}
    processor = JanusImageProcessorPil(size={"height": side, "width": side}, **about)
    processor.save_pretrained(tmp_path)
    ours = from_hf(tmp_path).eval()
    images = pictures((40, 90), (33, 31), (64, 20))
    shown = ours.prepare_images(images)
    torch.testing.assert_close(
        shown.pixels, processor(images, return_tensors="pt")["pixel_values"], rtol=0, atol=0, check_dtype=False
    )
    samples = asked(ours, shown, 0, 1, 2)
    batch = pack_streams(samples, sum(map(len, samples)))
    logits = split_by_sample(batch, ours(batch, shown))
    expected = compute_reference(reference, samples, shown.pixels)
    for a, b in zip(logits, expected, strict=True):
        assert a.shape == b.shape and relative(a, b) <= VALUES
    weights = [torch.randn_like(b) for b in expected]
    for outputs in (logits, expected):
        sum((x * w).sum() for x, w in zip(outputs, weights, strict=True)).backward()
    mine, theirs = dict(ours.named_parameters()), dict(reference.named_parameters())
    for rule in FAMILY.tensor_rules(ours.config):
        for name, gradient in zip(rule.native, rule.load([theirs[x].grad for x in rule.hf]), strict=True):
            assert (mine[name].grad - gradient).abs().max() <= GRADIENTS * gradient.abs().max().clamp_min(1e-3), name


@pytest.mark.parametrize("case", CASES)
def test_round_trip(case, tmp_path):
    """An export has all tensors but those of image generation, and gives the same logits."""
    reference, ours = load_both(case, tmp_path / "hf")
    to_hf(ours, tmp_path / "back")
    about = json.loads((tmp_path / "back/config.json").read_text())
    assert about["architectures"] == ["JanusForConditionalGeneration"]
    again = FAMILY.from_hf_config(about)
    assert normalize_llava_config(again) == normalize_llava_config(ours.config)
    smaller = about | {"vq_config": CODEC}  # the default takes long to build
    (tmp_path / "back/config.json").write_text(json.dumps(smaller))
    back = JanusForConditionalGeneration.from_pretrained(tmp_path / "back").eval()
    a, b = reference.state_dict(), back.state_dict()
    assert a.keys() == b.keys()
    assert all(torch.equal(x, b[name]) for name, x in a.items() if not name.startswith(GENERATION_PREFIXES))
    shown = ours.prepare_images(pictures((40, 90), (64, 20)))
    samples = asked(ours, shown, 2)
    for x, y in zip(*(compute_reference(model, samples, shown.pixels) for model in (reference, back)), strict=True):
        assert torch.equal(x, y)
    save(ours, tmp_path / "own")
    own = load(tmp_path / "own")
    assert own.config == ours.config
    assert all(torch.equal(x, own.state_dict()[name]) for name, x in ours.state_dict().items())


def test_released_shape():
    """Janus-Pro-1B has the default tower and aligner."""
    text = {"model_type": "llama", "hidden_size": 2048, "vocab_size": 102_400}
    config = FAMILY.from_hf_config({"text_config": text})
    assert config.count_tokens(config.policy.layout(480, 640)) == 576
    assert FAMILY.supports(config)


@pytest.mark.parametrize(
    "about, why",
    [
        ({"vision_config": {"use_qk_norm": True}}, "use_qk_norm is True"),
        ({"vision_config": {"attention_bias": False}}, "attention_bias is false"),
        ({"vision_config": {"model_type": "siglip_vision_model"}}, "model_type 'siglip_vision_model'"),
        ({}, "projection_dim is 2048, but the width of the language model is 4096"),
    ],
)
def test_unsupported_settings_raise(about, why):
    with pytest.raises(VitrailError, match=why):
        FAMILY.read_config(about, Path("config.json"))
