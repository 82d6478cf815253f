"""BLIP-2 and InternVL match transformers on random checkpoints of unusual shapes: values, gradients, round trips."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    AutoModelForImageTextToText,
    Blip2Config,
    Blip2ForConditionalGeneration,
    Blip2VisionConfig,
    Blip2VisionModel,
    InternVLConfig,
    InternVLForConditionalGeneration,
    LlamaConfig,
    OPTConfig,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

from helpers import randomize, relative
from vitrail.errors import VitrailError
from vitrail.hub import from_hf, load, save, to_hf
from vitrail.hub.llava import normalize_llava_config
from vitrail.models.vlm import VLM
from vitrail.processing.image_loading import NORMALIZATIONS
from vitrail.registry import FAMILIES
from vitrail.stream import build_stream, pack_streams, split_by_sample, text_part

VALUES, GRADIENTS = 1e-4, 1e-3  # max |Δ| / max |reference|
IMAGE = 98
SIZE = {"hidden_size": 30, "num_hidden_layers": 2, "num_attention_heads": 3, "vocab_size": 99}
GATED = {"intermediate_size": 47, "num_key_value_heads": 1}
OPT = {"ffn_dim": 47, "max_position_embeddings": 140}
BLIP_TOWER = {"hidden_size": 22, "intermediate_size": 37, "num_attention_heads": 2, "image_size": 15, "patch_size": 5}
QUERIES = {"hidden_size": 18, "num_hidden_layers": 3, "num_attention_heads": 3, "intermediate_size": 29}
TILES_TOWER = {"hidden_size": 22, "intermediate_size": 37, "num_attention_heads": 2, "patch_size": [3, 3]}


def blip2(text=None, vision=(), queries=(), **more):
    config = Blip2Config(
        vision_config={**BLIP_TOWER, "num_hidden_layers": 2, **dict(vision)},
        qformer_config=QUERIES | dict(queries),
        text_config=(text or OPTConfig(**SIZE, **OPT)).to_dict(),
        num_query_tokens=5,
        image_token_index=IMAGE,
        **more,
    )
    return randomize(Blip2ForConditionalGeneration(config).eval(), spread=0.1)


def internvl(text=None, side=12, vision=(), **more):
    vision = {**TILES_TOWER, "num_hidden_layers": 2, "image_size": [side, side], **dict(vision)}
    text = text or Qwen2Config(**SIZE, **GATED)
    config = InternVLConfig(vision_config=vision, text_config=text, image_token_id=IMAGE, **more)
    return randomize(InternVLForConditionalGeneration(config).eval(), spread=0.1)


CASES = {
    "blip2-opt": lambda: blip2(),
    "blip2, untied": lambda: blip2(text=OPTConfig(**SIZE, **OPT, tie_word_embeddings=False)),
    "blip2, no bias": lambda: blip2(
        text=OPTConfig(**SIZE, **OPT, enable_bias=False, activation_function="gelu"),
        vision={"qkv_bias": False, "layer_norm_eps": 1e-3, "image_size": 17},
        queries={"cross_attention_frequency": 3, "layer_norm_eps": 1e-5},
    ),
    "blip2-llama": lambda: blip2(
        text=LlamaConfig(**SIZE, **GATED), queries={"cross_attention_frequency": 1, "use_qformer_text_input": True}
    ),
    "internvl-qwen2": lambda: internvl(tie_word_embeddings=False, vision={"attention_bias": True}),
    "internvl, tied": lambda: internvl(text=Qwen3Config(**SIZE, **GATED, head_dim=8), vision={"use_qk_norm": True}),
    "internvl, one layer down": lambda: internvl(
        vision_feature_layer=-2,
        projector_hidden_act="relu",
        tie_word_embeddings=False,
        text=LlamaConfig(**SIZE, **GATED),
    ),
    "internvl, merged by 4": lambda: internvl(
        downsample_ratio=0.25, tie_word_embeddings=False, vision={"norm_type": "rms_norm"}
    ),
    "internvl, a norm at the end": lambda: internvl(
        side=6, downsample_ratio=1.0, tie_word_embeddings=False, vision={"use_mean_pooling": False}
    ),
}


def pictures(*sizes):
    chance = np.random.default_rng(0)
    return [Image.fromarray(chance.integers(0, 256, (h, w, 3), dtype=np.uint8)) for h, w in sizes]


def loaded(case, folder):
    reference = CASES[case]()
    reference.save_pretrained(folder)
    return reference, from_hf(folder).eval()


def asked(ours, shown, *groups):
    """Build samples with the given number of images between texts."""
    shapes, samples = list(shown.layouts), []
    for n in groups:
        parts = [text_part([4, 5])]
        for _ in range(n):
            parts += [ours.config.make_part(shapes.pop(0)), text_part([7, 8])]
        samples.append(build_stream([*parts, text_part([3])], ours.config.rules))
    return samples


def theirs(reference, samples, shown):
    """Run transformers sample by sample; text-only samples of BLIP-2 use its language model."""
    views, found = list(shown.pixels.split([len(shape.views) for shape in shown.layouts])), []
    for sample in samples:
        n = sum(source.feed == "image" for source in sample.sources)
        ids, mine, views = torch.where(sample.kinds == 1, IMAGE, sample.ids)[None], views[:n], views[n:]
        if n:
            found.append(reference(input_ids=ids, pixel_values=torch.cat(mine)).logits[0])
        else:
            alone = reference.language_model if hasattr(reference, "qformer") else reference
            found.append(alone(input_ids=ids).logits[0])
    return found


def on_disk(reference, tensors):
    """Rename tensors to checkpoint names: in memory InternVL's parts are under `model.`, and the head is not."""
    if hasattr(reference, "qformer"):
        return tensors
    spelt = {
        name.removeprefix("model.").replace("language_model.", "language_model.model.", 1): x
        for name, x in tensors.items()
    }
    if type(reference).__name__.startswith("Llava"):  # released LLaVA checkpoints name the tower's module too
        spelt = {name.replace("vision_tower.", "vision_tower.vision_model.", 1): x for name, x in spelt.items()}
    return spelt | ({"language_model.lm_head.weight": x} if (x := tensors.get("lm_head.weight")) is not None else {})


def gradients(outputs, weights, model):
    names, parameters = zip(*model.named_parameters(), strict=True)
    total = sum((x * w).sum() for x, w in zip(outputs, weights, strict=True))
    found = torch.autograd.grad(total, parameters, allow_unused=True)
    return {n: torch.zeros_like(p) if g is None else g for n, p, g in zip(names, parameters, found, strict=True)}


def same_gradients(reference, ours, mine, other):
    """Compare native gradients with those of the reference under checkpoint names."""
    for move in FAMILIES[reference.config.model_type].tensor_rules(ours.config):
        for name, g in zip(move.native, move.load([other[x] for x in move.hf]), strict=True):
            # Below this a gradient is rounding alone: without rotation softmax drops a bias on k.
            assert (mine.pop(name) - g).abs().max() <= GRADIENTS * g.abs().max().clamp_min(1e-2), name
    assert not mine


def comes_back(reference, ours, folder):
    """Export and native round trips keep weights and config."""
    to_hf(ours, folder / "back")
    about = json.loads((folder / "back/config.json").read_text())
    assert about["architectures"] == [type(reference).__name__]
    back = AutoModelForImageTextToText.from_pretrained(folder / "back")
    a, b = reference.state_dict(), back.state_dict()
    assert type(back) is type(reference)
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    again = FAMILIES[about["model_type"]].from_hf_config(about)
    assert normalize_llava_config(again) == normalize_llava_config(ours.config)
    save(ours, folder / "own")
    again = load(folder / "own")
    assert again.config == ours.config
    assert all(torch.equal(x, again.state_dict()[name]) for name, x in ours.state_dict().items())


@pytest.mark.parametrize("case", CASES)
def test_matches_transformers(case, tmp_path):
    """Values and gradients with zero, one and several images: one packed row against single samples."""
    reference, ours = loaded(case, tmp_path)
    shown = ours.prepare_images(pictures((40, 90), (33, 31), (64, 20)))
    samples = asked(ours, shown, 0, 1, 2)
    batch = pack_streams(samples, sum(map(len, samples)))
    logits, expected = split_by_sample(batch, ours(batch, shown)), theirs(reference, samples, shown)
    for a, b in zip(logits, expected, strict=True):
        assert a.shape == b.shape and relative(a, b) <= VALUES

    weights = [torch.randn_like(b) for b in expected]
    mine = gradients(logits, weights, ours)
    other = on_disk(reference, gradients(expected, weights, reference))
    same_gradients(reference, ours, mine, other)


@pytest.mark.parametrize("case", CASES)
def test_round_trip(case, tmp_path):
    comes_back(*loaded(case, tmp_path / "hf"), tmp_path)


def test_separate_tower(tmp_path):
    config = Blip2VisionConfig(**BLIP_TOWER, num_hidden_layers=3)
    reference = randomize(Blip2VisionModel(config).eval())
    reference.save_pretrained(tmp_path / "hf")
    ours, pixels = from_hf(tmp_path / "hf"), torch.randn(2, 3, 15, 15)
    assert relative(ours.forward_tokens(pixels), reference(pixels).last_hidden_state) <= VALUES
    to_hf(ours, tmp_path / "back", family="blip_2_vision_model")
    back = Blip2VisionModel.from_pretrained(tmp_path / "back").state_dict()
    assert all(torch.equal(x, back[name]) for name, x in reference.state_dict().items())


def test_pixels_match_processors(tmp_path):
    images = pictures((40, 90), (33, 31), (300, 29))
    _, ours = loaded("blip2-opt", tmp_path / "blip2")
    processor = BlipImageProcessorPil(size={"height": 15, "width": 15})
    assert torch.equal(ours.prepare_images(images).pixels, processor(images, return_tensors="pt")["pixel_values"])
    _, ours = loaded("internvl-qwen2", tmp_path / "internvl")
    norm = {"image_mean": NORMALIZATIONS["imagenet"].mean, "image_std": NORMALIZATIONS["imagenet"].std}
    processor = GotOcr2ImageProcessorPil(size={"height": 12, "width": 12}, crop_to_patches=True, **norm)
    expected, shown = processor(images, return_tensors="pt"), ours.prepare_images(images)
    assert torch.equal(shown.pixels, expected["pixel_values"])
    tokens = [4 * len(shape.views) for shape in shown.layouts]
    assert (
        [ours.config.count_tokens(shape) for shape in shown.layouts] == tokens == (4 * expected["num_patches"]).tolist()
    )


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        ("blip2-opt", {"text_config": {"model_type": "t5"}}, "encoder-decoder language models are not supported"),
        ("blip2-opt", {"text_config": {"model_type": "mamba"}}, "mamba"),
        ("blip2-opt", {"image_token_index": None}, "image_token_index"),
        ("blip2-opt", {"qformer_config": QUERIES | {"hidden_act": "relu"}}, "gelu"),
        ("blip2-opt", {"vision_config": BLIP_TOWER | {"hidden_act": "mish"}}, "mish"),
        ("internvl-qwen2", {"vision_feature_layer": [-2, -1]}, "several layers"),
        ("internvl-qwen2", {"vision_feature_layer": 7}, "no layer 7"),
        ("internvl-qwen2", {"vision_feature_select_strategy": "full"}, "vision_feature_select_strategy is"),
        ("internvl-qwen2", {"downsample_ratio": 0.3}, "0.3"),
        ("internvl-qwen2", {"downsample_ratio": 0.125}, "patches is not divisible into blocks of"),
        ("internvl-qwen2", {"projector_hidden_act": "mish"}, "mish"),
        ("internvl-qwen2", {"vision_config": {"model_type": "siglip_vision_model"}}, "siglip"),
    ],
)
def test_unsupported_settings_raise(case, change, message, tmp_path):
    CASES[case]().save_pretrained(tmp_path)
    about = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(about | change))
    with pytest.raises(VitrailError, match=message):
        from_hf(tmp_path)


# ---- published sizes ---------------------------------------------------------------------------------------------

OPT_2_7B = {"hidden_size": 2560, "ffn_dim": 10_240, "num_hidden_layers": 32, "num_attention_heads": 32}
QWEN = {
    "1b": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "2b": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
    "8b": {"hidden_size": 3584, "intermediate_size": 18_944, "num_hidden_layers": 28, "num_attention_heads": 28},
}
PUBLISHED = {
    "blip2-opt-2.7b": lambda: Blip2Config(
        text_config=OPTConfig(**OPT_2_7B, vocab_size=50_304).to_dict(), image_token_index=50_265
    ),
    **{
        f"internvl3-{size}": lambda own=own, size=size: InternVLConfig(
            vision_config={"attention_bias": True},
            text_config=Qwen2Config(**own, num_key_value_heads=4 if size == "8b" else 2, vocab_size=151_674),
            tie_word_embeddings=False,
        )
        for size, own in QWEN.items()
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes(name):
    about = PUBLISHED[name]()
    with torch.device("meta"):
        reference = AutoModelForImageTextToText.from_config(about)
        ours = VLM(FAMILIES[about.model_type].from_hf_config(json.loads(about.to_json_string(use_diff=False))))
    count = sum(p.numel() for p in reference.parameters())
    assert sum(p.numel() for p in ours.parameters()) == count
    millions = {"blip2-opt-2.7b": 3745, "internvl3-1b": 938, "internvl3-2b": 2089, "internvl3-8b": 7944}
    assert round(count / 1e6) == millions[name]
