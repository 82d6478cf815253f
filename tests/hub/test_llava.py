"""LLaVA and LLaVA-NeXT match transformers on random checkpoints of unusual shapes."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    CLIPImageProcessor,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    MistralConfig,
    Qwen2Config,
    SiglipVisionConfig,
)

from helpers import randomize, relative
from vitrail.errors import VitrailError
from vitrail.hub import from_hf, load, save, to_hf
from vitrail.hub.llava import normalize_llava_config
from vitrail.processing.anyres import AnyResPolicy
from vitrail.registry import FAMILIES
from vitrail.stream import build_stream, pack_streams, split_by_sample, text_part

IMAGE = 98
SIZE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
TOWER = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 28}
TILES = [[28, 56], [56, 28], [56, 56], [84, 28]]


def llava(**more):
    text = more.pop("text", LlamaConfig(**SIZE, num_key_value_heads=2, vocab_size=99))
    vision = more.pop("vision", CLIPVisionConfig(**TOWER, patch_size=7))
    kind = (LlavaNextConfig, LlavaNextForConditionalGeneration) if "image_grid_pinpoints" in more else None
    config, model = kind or (LlavaConfig, LlavaForConditionalGeneration)
    made = model(config(vision_config=vision, text_config=text, image_token_index=IMAGE, **more))
    return randomize(made.eval(), spread=0.1)


CASES = {
    "llava": lambda: llava(),
    "one layer up": lambda: llava(vision_feature_layer=-1, projector_hidden_act="quick_gelu"),
    "two layers": lambda: llava(vision_feature_layer=[-1, 1]),
    "with CLS": lambda: llava(vision_feature_select_strategy="full"),
    "no bias": lambda: llava(
        multimodal_projector_bias=False, text=Qwen2Config(**SIZE, num_key_value_heads=1, vocab_size=99)
    ),
    "siglip": lambda: llava(vision=SiglipVisionConfig(**TOWER, patch_size=7), vision_feature_select_strategy="full"),
    "next": lambda: llava(image_grid_pinpoints=TILES),
    "next, mistral": lambda: llava(
        image_grid_pinpoints=TILES,
        text=MistralConfig(**SIZE, num_key_value_heads=2, vocab_size=99, sliding_window=9),
    ),
    "next, 5 × 5 patches": lambda: llava(
        image_grid_pinpoints=[[30, 60], [60, 30]], vision=CLIPVisionConfig(**(TOWER | {"image_size": 30}), patch_size=6)
    ),
}


def pictures(*sizes):
    chance = np.random.default_rng(0)
    return [Image.fromarray(chance.integers(0, 256, (h, w, 3), dtype=np.uint8)) for h, w in sizes]


def asked(ours, shown, *groups):
    """Build samples with the given number of images between texts."""
    shapes, samples = list(shown.layouts) if shown else [], []
    for n in groups:
        parts = [text_part([1, 5])]
        for _ in range(n):
            parts += [ours.config.make_part(shapes.pop(0)), text_part([7, 8])]
        samples.append(build_stream([*parts, text_part([3], loss_mask=True)], ours.config.rules))
    return samples


def theirs(reference, samples, shown):
    """Run transformers sample by sample."""
    views = list(shown.pixels.split([len(s.views) for s in shown.layouts])) if shown else []
    shapes, found = list(shown.layouts) if shown else [], []
    for sample in samples:
        n = sum(source.feed == "image" for source in sample.sources)
        mine, sizes, views, shapes = views[:n], shapes[:n], views[n:], shapes[n:]
        given = {}
        if n and isinstance(reference, LlavaNextForConditionalGeneration):
            given["pixel_values"] = torch.nn.utils.rnn.pad_sequence(mine, batch_first=True)
            given["image_sizes"] = torch.tensor([[s.height, s.width] for s in sizes])
        elif n:
            given["pixel_values"] = torch.cat(mine)
        ids = torch.where(sample.kinds == 1, IMAGE, sample.ids)
        found.append(reference(input_ids=ids[None], **given).logits[0])
    return found


@pytest.mark.parametrize("case", CASES)
def test_matches_transformers(case, tmp_path):
    """Values and gradients with zero, one and several images: one packed row against single samples."""
    reference = CASES[case]()
    reference.save_pretrained(tmp_path / "hf")
    ours = from_hf(tmp_path / "hf").eval()
    shown = ours.prepare_images(pictures((40, 90), (33, 31), (64, 20)))
    samples = asked(ours, shown, 0, 1, 2)
    batch = pack_streams(samples, sum(map(len, samples)))
    logits = split_by_sample(batch, ours(batch, shown))
    expected = theirs(reference, samples, shown)
    for a, b in zip(logits, expected, strict=True):
        assert relative(a, b) <= 1e-5

    weights = [torch.randn_like(b) for b in expected]
    mine = dict(ours.named_parameters())
    got = torch.autograd.grad(
        sum((a * w).sum() for a, w in zip(logits, weights, strict=True)), list(mine.values()), allow_unused=True
    )
    other = dict(reference.named_parameters())
    gradients = torch.autograd.grad(
        sum((b * w).sum() for b, w in zip(expected, weights, strict=True)), list(other.values()), allow_unused=True
    )
    kept = {
        name: torch.zeros_like(p) if g is None else g for (name, p), g in zip(other.items(), gradients, strict=True)
    }
    # In memory the parts stand under `model.`, and the head beside them.
    kept = {
        name.removeprefix("model.")
        .replace("language_model.", "language_model.model.", 1)
        .replace("vision_tower.", "vision_tower.vision_model.", 1): g
        for name, g in kept.items()
    } | {"language_model.lm_head.weight": kept["lm_head.weight"]}
    family = FAMILIES[reference.config.model_type]
    for move in family.tensor_rules(ours.config):
        for name, g in zip(move.native, move.load([kept[x] for x in move.hf]), strict=True):
            found = dict(zip(mine, got, strict=True))[name]
            found = torch.zeros_like(mine[name]) if found is None else found
            assert (found - g).abs().max() <= 1e-3 * g.abs().max().clamp_min(1e-2), name


@pytest.mark.parametrize("case", CASES)
def test_round_trip(case, tmp_path):
    reference = CASES[case]()
    reference.save_pretrained(tmp_path / "hf")
    ours = from_hf(tmp_path / "hf")
    to_hf(ours, tmp_path / "back")
    back = type(reference).from_pretrained(tmp_path / "back")
    a, b = reference.state_dict(), back.state_dict()
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    again = FAMILIES[back.config.model_type].from_hf_config(json.loads((tmp_path / "back/config.json").read_text()))
    assert normalize_llava_config(again) == normalize_llava_config(ours.config)
    save(ours, tmp_path / "own")
    again = load(tmp_path / "own")
    assert again.config == ours.config
    assert all(torch.equal(x, again.state_dict()[name]) for name, x in ours.state_dict().items())


STORED_NAMES = {
    "released files": lambda name: name,
    "transformers 5": lambda name: name.replace("vision_tower.vision_model.", "vision_tower."),
    "in memory": lambda name: (
        name
        if name.startswith("lm_head.")
        else "model." + name.replace("vision_model.", "").replace("language_model.model.", "language_model.")
    ),
}


@pytest.mark.parametrize("layout", STORED_NAMES)
@pytest.mark.parametrize("case", ["llava", "next"])
def test_tensor_names_of_all_versions(layout, case, tmp_path):
    """Exports have the names of the released files. Those of all versions are read."""
    from safetensors.torch import load_file, save_file

    reference = CASES[case]()
    reference.save_pretrained(tmp_path)
    ours = from_hf(tmp_path)
    to_hf(ours, tmp_path / "export")
    file = tmp_path / "export/model.safetensors"
    released = load_file(file)
    assert "vision_tower.vision_model.embeddings.class_embedding" in released
    assert "language_model.model.embed_tokens.weight" in released and "language_model.lm_head.weight" in released
    rename = STORED_NAMES[layout]
    renamed = {
        rename("lm_head.weight" if layout == "in memory" and "lm_head" in name else name): tensor
        for name, tensor in released.items()
    }
    if layout == "in memory":
        assert renamed.keys() == reference.state_dict().keys()
    save_file(renamed, file, {"format": "pt"})
    again = from_hf(tmp_path / "export")
    assert all(torch.equal(p, again.state_dict()[name]) for name, p in ours.state_dict().items())


def test_pixels_match_processor(tmp_path):
    llava().save_pretrained(tmp_path)
    ours = from_hf(tmp_path)
    size = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}
    processor = CLIPImageProcessor(**size)
    images = pictures((40, 90), (33, 31), (300, 29))
    expected = processor(images, return_tensors="pt")["pixel_values"]
    assert torch.equal(ours.prepare_images(images).pixels, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vision_feature_layer": [-2, -5]}, "no layer -5"),
        ({"vision_feature_select_strategy": "some"}, "default, full"),
        ({"vision_config": {"model_type": "dinov2"}}, "dinov2"),
        ({"text_config": {"model_type": "mamba"}}, "mamba"),
        ({"model_type": "llava_next", "image_grid_pinpoints": [[28, 57]]}, "not a multiple of the tile size"),
        ({"model_type": "llava_next", "image_grid_pinpoints": [[28 * 10**5, 28 * 10**5]]}, "tiles"),
        ({"image_token_index": 10**9}, "rules.fill_id"),
    ],
)
def test_unsupported_settings_raise(change, message, tmp_path):
    llava().save_pretrained(tmp_path)
    about = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(about | change))
    with pytest.raises(VitrailError, match=message):
        from_hf(tmp_path)


def test_tied_head_from_either_config(tmp_path):
    reference = llava(text=LlamaConfig(**SIZE, vocab_size=99, tie_word_embeddings=False), tie_word_embeddings=True)
    reference.tie_weights()
    reference.save_pretrained(tmp_path)
    ours = from_hf(tmp_path)
    assert ours.config.decoder.tie_word_embeddings == (
        reference.lm_head.weight is reference.get_input_embeddings().weight
    )


def test_pinpoints(tmp_path):
    llava(image_grid_pinpoints=TILES).save_pretrained(tmp_path)
    policy = from_hf(tmp_path).config.policy
    assert isinstance(policy, AnyResPolicy) and policy.grids == ((1, 2), (2, 1), (2, 2), (3, 1))
