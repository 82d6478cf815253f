"""DeepSeek-VL with one and two towers matches transformers on random checkpoints of unusual shapes.

Compares values, gradients, pixels and round trips."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForImageTextToText,
    DeepseekVLConfig,
    DeepseekVLForConditionalGeneration,
    DeepseekVLHybridConfig,
    DeepseekVLHybridForConditionalGeneration,
    Qwen2Config,
)
from transformers.models.deepseek_vl.image_processing_pil_deepseek_vl import DeepseekVLImageProcessorPil
from transformers.models.deepseek_vl_hybrid.image_processing_pil_deepseek_vl_hybrid import (
    DeepseekVLHybridImageProcessorPil,
)

from helpers import randomize, relative
from hub.test_blip2_internvl import IMAGE, VALUES, asked, comes_back, gradients, pictures, same_gradients
from vitrail.encoders.hybrid_tower import HybridTowerConfig, downscale_pixels
from vitrail.encoders.multi_tower import normalize_pixels
from vitrail.errors import VitrailError
from vitrail.hub import from_hf
from vitrail.hub.llava import normalize_llava_config
from vitrail.models.presets import VLM_PRESETS
from vitrail.models.vision_inputs import prepare_images
from vitrail.models.vlm import VLM
from vitrail.registry import FAMILIES
from vitrail.stream import pack_streams, split_by_sample

TEXT = {"hidden_size": 30, "num_hidden_layers": 2, "num_attention_heads": 3, "vocab_size": 99, "intermediate_size": 47}
TEXT |= {"num_key_value_heads": 1}
LOW = {"hidden_size": 22, "intermediate_size": 37, "num_attention_heads": 2, "num_hidden_layers": 2, "image_size": 15}
LOW |= {"patch_size": 5, "vision_use_head": False, "hidden_act": "gelu"}
HIGH = {"hidden_size": 18, "num_hidden_layers": 3, "num_attention_heads": 3, "mlp_dim": 25, "image_size": 42}
HIGH |= {"patch_size": 6, "window_size": 3, "global_attn_indexes": [1, 2], "output_channels": 5}


def deepseek(low=(), high=None, **more):
    config = {"vision_config": LOW | dict(low), "text_config": TEXT, "image_token_id": IMAGE, **more}
    if high is None:
        model = DeepseekVLForConditionalGeneration(DeepseekVLConfig(**config))
    else:
        config["high_res_vision_config"] = HIGH | high
        model = DeepseekVLHybridForConditionalGeneration(DeepseekVLHybridConfig(**config))
    return randomize(model.eval(), spread=0.1)


CASES = {
    "one tower": lambda: deepseek(tie_word_embeddings=False),
    "one tower, tied, with a pool and pixels left over": lambda: deepseek({"image_size": 17, "vision_use_head": True}),
    "one tower, qwen2": lambda: deepseek(text_config=Qwen2Config(**TEXT).to_dict(), tie_word_embeddings=False),
    "two towers": lambda: deepseek(high={}, tie_word_embeddings=False),
    "two towers, tied, of other shapes": lambda: deepseek(
        {"image_size": 28, "patch_size": 7},
        {"image_size": 55, "patch_size": 5, "window_size": 4, "use_abs_pos": False, "global_attn_indexes": [0]},
    ),
    "two towers, without relative places": lambda: deepseek(
        high={"use_rel_pos": False, "qkv_bias": False, "output_channels": 3}, tie_word_embeddings=False
    ),
}


def loaded(case, folder):
    reference = CASES[case]()
    reference.save_pretrained(folder)
    return reference, from_hf(folder).eval()


def processor(config, **more):
    """Build the transformers processor with the same sizes and non-default settings."""
    policy = config.policy
    sizes = {"size": {"height": policy.image_size, "width": policy.image_size}, "min_size": 7, "resample": 2, **more}
    norms = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.25, 0.3]}
    if policy.high_res_size is None:
        return DeepseekVLImageProcessorPil(**sizes, **norms)
    sizes["high_res_size"] = {"height": policy.view_size, "width": policy.view_size}
    return DeepseekVLHybridImageProcessorPil(**sizes, **norms)


def both_sizes(tower, shown):
    """Return the pixel arguments of transformers for both towers."""
    if not isinstance(tower, HybridTowerConfig):
        return {"pixel_values": shown.pixels}
    low = downscale_pixels(shown.pixels, tower.low.vit.image_size, tower.resample)
    return {
        "pixel_values": normalize_pixels(low, tower.low.mean, tower.low.std),
        "high_res_pixel_values": normalize_pixels(shown.pixels, tower.mean, tower.std),
    }


def theirs(reference, samples, pixels):
    """Run transformers sample by sample."""
    found, first = [], 0
    for sample in samples:
        n = sum(source.feed == "image" for source in sample.sources)
        ids = torch.where(sample.kinds == 1, IMAGE, sample.ids)[None]
        mine = {key: value[first : first + n] for key, value in pixels.items()} if n else {}
        found.append(reference(input_ids=ids, **mine).logits[0])
        first += n
    return found


@pytest.mark.parametrize("case", CASES)
def test_matches_transformers(case, tmp_path):
    """Values and gradients with zero, one and several images, with pixels of transformers' processor."""
    reference, _ = loaded(case, tmp_path)
    made = processor(
        FAMILIES[reference.config.model_type].from_hf_config(json.loads((tmp_path / "config.json").read_text()))
    )
    made.save_pretrained(tmp_path)
    ours = from_hf(tmp_path).eval()
    images = pictures((40, 90), (33, 31), (64, 20))
    shown, pixels = ours.prepare_images(images), made(images, return_tensors="pt")
    for name, mine in both_sizes(ours.config.tower, shown).items():
        torch.testing.assert_close(mine, pixels[name], rtol=0, atol=0)

    samples = asked(ours, shown, 0, 1, 2)
    batch = pack_streams(samples, sum(map(len, samples)))
    logits, expected = split_by_sample(batch, ours(batch, shown)), theirs(reference, samples, pixels)
    for a, b in zip(logits, expected, strict=True):
        assert a.shape == b.shape and relative(a, b) <= VALUES

    weights = [torch.randn_like(b) for b in expected]
    mine, other = gradients(logits, weights, ours), gradients(expected, weights, reference)
    same_gradients(reference, ours, mine, other)


@pytest.mark.parametrize("case", CASES)
def test_round_trip(case, tmp_path):
    comes_back(*loaded(case, tmp_path / "hf"), tmp_path)


def test_released_tensor_names(tmp_path):
    _, ours = loaded("two towers", tmp_path)
    file = tmp_path / "model.safetensors"
    older = {re.sub(r"^(model\.vision_model\.)", r"\1vision_model.", name): x for name, x in load_file(file).items()}
    assert "model.vision_model.vision_model.post_layernorm.weight" in older
    save_file(older, file)
    again = from_hf(tmp_path).state_dict()
    assert all(torch.equal(x, again[name]) for name, x in ours.state_dict().items())


@pytest.mark.parametrize("resample", [2, 3])
@pytest.mark.parametrize("size", [(1, 1), (3, 1000), (700, 701), (480, 640), (1500, 90)])
def test_pixels_match_at_released_sizes(size, resample):
    """384 and 1024 pixels, with noise as input to detect shifts."""
    [image] = pictures(size)
    config = VLM_PRESETS["deepseek-vl-7b"]
    made = DeepseekVLHybridImageProcessorPil(resample=resample)
    config = FAMILIES["deepseek_vl_hybrid"].image_processor.apply_processor_config(
        config, json.loads(made.to_json_string())
    )
    for name, mine in both_sizes(config.tower, prepare_images(config, [image])).items():
        torch.testing.assert_close(mine, made(image, return_tensors="pt")[name], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        ("one tower", {"vision_config": {"model_type": "clip_vision_model"}}, "clip_vision_model"),
        ("two towers", {"high_res_vision_config": {"model_type": "dinov2"}}, "dinov2"),
        ("two towers", {"high_res_vision_config": HIGH | {"global_attn_indexes": []}}, "no full attention"),
        ("two towers", {"high_res_vision_config": HIGH | {"window_size": -3}}, "window_size"),
        ("two towers", {"text_config": TEXT | {"model_type": "mamba"}}, "mamba"),
    ],
)
def test_unsupported_settings_raise(case, change, message, tmp_path):
    CASES[case]().save_pretrained(tmp_path)
    about = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(about | change))
    with pytest.raises(VitrailError, match=message):
        from_hf(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"do_pad": False}, "do_pad"),
        ({"size": {"height": 20, "width": 20}}, "size"),
        ({"high_res_size": {"height": 20, "width": 20}}, "size"),
        ({"resample": 1}, "lanczos"),
        ({"rescale_factor": 0.5}, "0.5"),
    ],
)
def test_unsupported_preprocessing_raises(change, message, tmp_path):
    _, ours = loaded("two towers", tmp_path)
    about = json.loads(processor(ours.config).to_json_string()) | change
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(about))
    with pytest.raises(VitrailError, match=message):
        from_hf(tmp_path)


# ---- published sizes --------------------------------------------------------------------------------------------

SIGLIP = {"hidden_size": 1024, "intermediate_size": 4096, "image_size": 384, "patch_size": 16, "hidden_act": "gelu"}
SIGLIP |= {"vision_use_head": False, "num_attention_heads": 16, "num_hidden_layers": 24}
WORDS = {"max_position_embeddings": 16_384, "vocab_size": 102_400}
SMALL = {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16, "num_hidden_layers": 24}
LARGE = {"hidden_size": 4096, "intermediate_size": 11_008, "num_attention_heads": 32, "num_hidden_layers": 30}
PUBLISHED = {
    "deepseek-vl-1.3b": (
        DeepseekVLConfig(vision_config=SIGLIP, text_config=SMALL | WORDS, tie_word_embeddings=False),
        1963,
    ),
    "deepseek-vl-7b": (
        DeepseekVLHybridConfig(vision_config=SIGLIP, text_config=LARGE | WORDS, tie_word_embeddings=False),
        7331,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes(name):
    about, millions = PUBLISHED[name]
    row = FAMILIES[about.model_type]
    config = row.from_hf_config(json.loads(about.to_json_string(use_diff=False)))
    assert row.supports(VLM_PRESETS[name]) and normalize_llava_config(config) == normalize_llava_config(
        VLM_PRESETS[name]
    )
    with torch.device("meta"):
        reference, ours = AutoModelForImageTextToText.from_config(about), VLM(config)
    count = sum(p.numel() for p in reference.parameters())
    assert sum(p.numel() for p in ours.parameters()) == count
    assert round(count / 1e6) == millions
