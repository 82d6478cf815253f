"""LLaVA and LLaVA-NeXT against transformers on random checkpoints of odd shapes."""

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
    Qwen2Config,
    SiglipVisionConfig,
)

from helpers import randomize, relative
from vitrail.errors import VitrailError
from vitrail.hub import from_hf, load, save, to_hf
from vitrail.hub.families import FAMILIES
from vitrail.hub.llava import whole_spelt
from vitrail.processing.anyres import AnyRes
from vitrail.stream import build, pack, split, words

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
    "with CLS": lambda: llava(vision_feature_select_strategy="full"),
    "no bias": lambda: llava(
        multimodal_projector_bias=False, text=Qwen2Config(**SIZE, num_key_value_heads=1, vocab_size=99)
    ),
    "siglip": lambda: llava(vision=SiglipVisionConfig(**TOWER, patch_size=7), vision_feature_select_strategy="full"),
    "next": lambda: llava(image_grid_pinpoints=TILES),
    "next, 5 × 5 patches": lambda: llava(
        image_grid_pinpoints=[[30, 60], [60, 30]], vision=CLIPVisionConfig(**(TOWER | {"image_size": 30}), patch_size=6)
    ),
}


def pictures(*sizes):
    chance = np.random.default_rng(0)
    return [Image.fromarray(chance.integers(0, 256, (h, w, 3), dtype=np.uint8)) for h, w in sizes]


def asked(ours, shown, *groups):
    """Samples with so many pictures each, words around them."""
    shapes, samples = list(shown.shapes) if shown else [], []
    for n in groups:
        parts = [words([1, 5])]
        for _ in range(n):
            parts += [ours.config.part(shapes.pop(0)), words([7, 8])]
        samples.append(build([*parts, words([3], loss=True)], ours.config.rules))
    return samples


def theirs(reference, samples, shown):
    """Every sample by itself, as transformers takes it."""
    views = list(shown.pixels.split([len(s.views) for s in shown.shapes])) if shown else []
    shapes, found = list(shown.shapes) if shown else [], []
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
def test_agrees(case, tmp_path):
    """No picture, one, and several of unequal sizes; packed in one row here, each by itself there; gradients too."""
    reference = CASES[case]()
    reference.save_pretrained(tmp_path / "hf")
    ours = from_hf(tmp_path / "hf").eval()
    shown = ours.prepare(pictures((40, 90), (33, 31), (64, 20)))
    samples = asked(ours, shown, 0, 1, 2)
    batch = pack(samples, sum(map(len, samples)))
    logits = split(batch, ours(batch, shown))
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
        name.removeprefix("model.").replace("language_model.", "language_model.model.", 1): g
        for name, g in kept.items()
    } | {"language_model.lm_head.weight": kept["lm_head.weight"]}
    family = FAMILIES[reference.config.model_type]
    for move in family.moves(ours.config):
        for name, g in zip(move.ours, move.pull([kept[x] for x in move.theirs]), strict=True):
            found = dict(zip(mine, got, strict=True))[name]
            found = torch.zeros_like(mine[name]) if found is None else found
            assert (found - g).abs().max() <= 1e-3 * g.abs().max().clamp_min(1e-2), name


@pytest.mark.parametrize("case", CASES)
def test_comes_back(case, tmp_path):
    reference = CASES[case]()
    reference.save_pretrained(tmp_path / "hf")
    ours = from_hf(tmp_path / "hf")
    to_hf(ours, tmp_path / "back")
    back = type(reference).from_pretrained(tmp_path / "back")
    a, b = reference.state_dict(), back.state_dict()
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    again = FAMILIES[back.config.model_type].read(json.loads((tmp_path / "back/config.json").read_text()))
    assert whole_spelt(again) == whole_spelt(ours.config)
    save(ours, tmp_path / "own")
    again = load(tmp_path / "own")
    assert again.config == ours.config
    assert all(torch.equal(x, again.state_dict()[name]) for name, x in ours.state_dict().items())


def test_names_of_released_files(tmp_path):
    """Files of before have the tower one level deeper."""
    from safetensors.torch import load_file, save_file

    llava().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    old = {k.replace("vision_tower.", "vision_tower.vision_model.", 1): v for k, v in load_file(file).items()}
    save_file(old, file, {"format": "pt"})
    ours = from_hf(tmp_path)
    assert torch.equal(ours.tower.cls.flatten(), old["vision_tower.vision_model.embeddings.class_embedding"])


def test_pixels_are_those_of_the_processor(tmp_path):
    llava().save_pretrained(tmp_path)
    ours = from_hf(tmp_path)
    size = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}
    processor = CLIPImageProcessor(**size)
    images = pictures((40, 90), (33, 31), (300, 29))
    expected = processor(images, return_tensors="pt")["pixel_values"]
    assert torch.equal(ours.prepare(images).pixels, expected)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"vision_feature_layer": [-2, -5]}, "several layers"),
        ({"vision_feature_select_strategy": "some"}, "default, full"),
        ({"vision_config": {"model_type": "pixtral"}}, "pixtral"),
        ({"text_config": {"model_type": "mamba"}}, "mamba"),
        ({"model_type": "llava_next", "image_grid_pinpoints": [[28, 57]]}, "whole number of tiles"),
        ({"model_type": "llava_next", "image_grid_pinpoints": [[28 * 10**5, 28 * 10**5]]}, "tiles"),
        ({"image_token_index": 10**9}, "rules.fill"),
    ],
)
def test_what_is_not_built_is_refused(change, says, tmp_path):
    llava().save_pretrained(tmp_path)
    about = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(about | change))
    with pytest.raises(VitrailError, match=says):
        from_hf(tmp_path)


def test_a_head_is_tied_where_either_place_says_so(tmp_path):
    reference = llava(text=LlamaConfig(**SIZE, vocab_size=99, tie_word_embeddings=False), tie_word_embeddings=True)
    reference.tie_weights()
    reference.save_pretrained(tmp_path)
    ours = from_hf(tmp_path)
    assert ours.config.decoder.tied == (reference.lm_head.weight is reference.get_input_embeddings().weight)


def test_tiles(tmp_path):
    llava(image_grid_pinpoints=TILES).save_pretrained(tmp_path)
    policy = from_hf(tmp_path).config.policy
    assert isinstance(policy, AnyRes) and policy.grids == ((1, 2), (2, 1), (2, 2), (3, 1))
