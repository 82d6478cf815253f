"""The safety checker matches diffusers: scores, flags, export, and the names of released and new files."""

import json

import pytest
import torch
from diffusers.pipelines.stable_diffusion.safety_checker import StableDiffusionSafetyChecker, cosine_distance
from safetensors.torch import load_file, save_file
from torch.utils.flop_counter import FlopCounterMode
from transformers import CLIPConfig

from helpers import randomize
from vitrail.hub import from_hf, load, save, to_hf
from vitrail.models.safety_checker import SafetyChecker
from vitrail.nn import cost

VISION = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
VISION |= {"image_size": 12, "patch_size": 4}
TEXT = {"hidden_size": 8, "intermediate_size": 9, "num_hidden_layers": 1, "num_attention_heads": 2}


PIXELS = torch.randn(60, 3, 12, 12, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def reference(tmp_path):
    """A random safety checker, whose thresholds flag a part of the images."""
    config = CLIPConfig(vision_config=VISION, text_config=TEXT, projection_dim=10)
    made = randomize(StableDiffusionSafetyChecker(config), seed=1, spread=0.5).eval()
    with torch.no_grad():
        embeddings = made.visual_projection(made.vision_model(PIXELS).pooler_output)
        made.concept_embeds_weights.copy_(cosine_distance(embeddings, made.concept_embeds).quantile(0.97, dim=0))
        made.special_care_embeds_weights.copy_(
            cosine_distance(embeddings, made.special_care_embeds).quantile(0.8, dim=0)
        )
    made.save_pretrained(tmp_path / "theirs")
    return made


def test_scores_and_flags_match_diffusers(reference, tmp_path):
    ours, pixels = from_hf(tmp_path / "theirs"), PIXELS
    with torch.no_grad():
        embeddings = reference.visual_projection(reference.vision_model(pixels).pooler_output)
        special = cosine_distance(embeddings, reference.special_care_embeds) - reference.special_care_embeds_weights
        scores = cosine_distance(embeddings, reference.concept_embeds) - reference.concept_embeds_weights
        expected = scores + 0.01 * (special.round(decimals=3) > 0).any(1, keepdim=True)
    torch.testing.assert_close(ours(pixels), expected, rtol=0, atol=6e-4)  # rounded to three decimals
    _, flags = reference(pixels, [torch.ones(1)] * 60)
    assert ours.is_flagged(pixels).tolist() == flags and 5 < sum(flags) < 55
    assert any((special > 0).any(1)) and not all((special > 0).any(1))


def test_scores_that_are_not_finite_are_flagged(reference, tmp_path):
    ours = from_hf(tmp_path / "theirs")
    assert ours.is_flagged(torch.full((1, 3, 12, 12), torch.nan)).tolist() == [True]


def test_export_and_names_of_released_files(reference, tmp_path):
    ours = from_hf(tmp_path / "theirs")
    to_hf(ours, tmp_path / "back")
    hf_config = json.loads((tmp_path / "back/config.json").read_text())
    assert (hf_config["model_type"], hf_config["architectures"]) == ("clip", ["StableDiffusionSafetyChecker"])
    stored = load_file(tmp_path / "back/model.safetensors")
    assert "vision_model.vision_model.embeddings.class_embedding" in stored  # as in the released files
    again = from_hf(tmp_path / "back")
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in ours.state_dict().items())
    new_names = {name.replace("vision_model.vision_model.", "vision_model."): x for name, x in stored.items()}
    save_file(new_names, tmp_path / "back/model.safetensors", metadata={"format": "pt"})
    back = StableDiffusionSafetyChecker.from_pretrained(tmp_path / "back")
    theirs, found = reference.state_dict(), back.state_dict()
    assert theirs.keys() == found.keys() and all(torch.equal(theirs[name], found[name]) for name in theirs)
    save(ours, tmp_path / "native")
    assert load(tmp_path / "native").config == ours.config


def test_cost_is_that_of_the_real_model(reference, tmp_path):
    with torch.device("meta"):
        model = SafetyChecker(from_hf(tmp_path / "theirs").config)
        pixels = torch.empty(2, 3, 12, 12)
    with FlopCounterMode(display=False) as counter:
        model(pixels)
    assert cost.count_flops(model, model.workload(2)) == counter.get_total_flops()
