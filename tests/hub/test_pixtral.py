"""Mistral 3 and LLaVA with the tower of Pixtral match transformers on random checkpoints of unusual shapes."""

import json

import pytest
import torch
from transformers import (
    LlavaConfig,
    LlavaForConditionalGeneration,
    Ministral3Config,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    MistralConfig,
    PixtralVisionConfig,
    PixtralVisionModel,
    Qwen3Config,
)
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

from helpers import randomize, relative
from hub.test_llava import pictures
from vitrail.errors import VitrailError
from vitrail.hub import from_hf, load, save, to_hf
from vitrail.hub.checkpoint_info import find_checkpoint, read_config
from vitrail.hub.pixtral import normalize_pixtral_config
from vitrail.processing.resolution_policies import LongestEdgePolicy
from vitrail.registry import FAMILIES
from vitrail.stream import build_stream, pack_streams, split_by_sample, text_part

IMAGE = 10
SIZE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 99}
TEXT = {**SIZE, "num_key_value_heads": 2, "head_dim": 6, "pad_token_id": None}
TOWER = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 70}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 8.0,
    "original_max_position_embeddings": 9,  # shorter than a sample
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.3,
}
SAMPLES = ((), ((40, 90),), ((33, 31), (64, 20), (100, 7)))  # sizes (height, width) of the pictures of each sample


def mistral3(text=None, vision=None, **more):
    config = Mistral3Config(
        vision_config=PixtralVisionConfig(**TOWER | (vision or {}), patch_size=5),
        text_config=text or MistralConfig(**TEXT, sliding_window=None),
        image_token_index=IMAGE,
        **{"tie_word_embeddings": False, **more},
    )
    return randomize(Mistral3ForConditionalGeneration(config).eval(), spread=0.1)


def pixtral(**more):
    config = LlavaConfig(
        vision_config=PixtralVisionConfig(**TOWER, patch_size=7, hidden_act="silu"),
        text_config=MistralConfig(**TEXT, sliding_window=11),
        image_token_index=IMAGE,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        **more,
    )
    return randomize(LlavaForConditionalGeneration(config).eval(), spread=0.1)


CASES = {
    "mistral3": mistral3,
    "tied, sliding window": lambda: mistral3(MistralConfig(**TEXT, sliding_window=7), tie_word_embeddings=True),
    "ministral3": lambda: mistral3(Ministral3Config(**TEXT, rope_parameters=YARN), spatial_merge_size=1),
    "qwen3, bias": lambda: mistral3(
        Qwen3Config(**TEXT), multimodal_projector_bias=True, spatial_merge_size=3, projector_hidden_act="silu"
    ),
    "rope of the tower": lambda: mistral3(vision={"rope_parameters": {"rope_theta": 50.0}, "num_attention_heads": 3}),
    "llava": pixtral,
    "llava, no bias": lambda: pixtral(multimodal_projector_bias=False, projector_hidden_act="quick_gelu"),
}


def process(config, sizes):
    """Run the image processor of transformers."""
    edge = {"longest_edge": config.policy.longest_edge}
    side = config.policy.patch_size * config.policy.merge_size  # as PixtralProcessor passes it
    processor = PixtralImageProcessorPil(size=edge, patch_size={"height": side, "width": side})
    return processor(pictures(*sizes), return_tensors="pt")


def build_samples(ours):
    """Build samples with no, one and several pictures of unequal sizes between texts, and their pictures."""
    samples, images = [], [image for sizes in SAMPLES for image in pictures(*sizes)]
    shown = ours.prepare_images(images)
    layouts = iter(shown.layouts)
    for sizes in SAMPLES:
        parts = [text_part([1, 5])]
        for _ in sizes:
            parts += [*ours.config.make_parts(next(layouts)), text_part([7, 8])]
        samples.append(build_stream([*parts, text_part([3, 2])], ours.config.rules))
    return samples, shown


def copy_gradients(model) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.zeros_like(p) if p.grad is None else p.grad)


@pytest.mark.parametrize("case", CASES)
def test_matches_transformers(case, tmp_path):
    """Values and gradients of one packed row. Gradients are written and read as a checkpoint, which renames them."""
    reference = CASES[case]()
    reference.save_pretrained(tmp_path / "hf")
    ours = from_hf(tmp_path / "hf").eval()
    samples, shown = build_samples(ours)
    batch = pack_streams(samples, sum(map(len, samples)))
    logits = split_by_sample(batch, ours(batch, shown))
    expected = []
    for sample, sizes in zip(samples, SAMPLES, strict=True):
        given = process(ours.config, sizes) if sizes else {}
        expected.append(reference(input_ids=sample.ids[None], **given).logits[0])
    for a, b in zip(logits, expected, strict=True):
        assert relative(a, b) <= 1e-4
    weights = [torch.randn_like(b) for b in expected]
    for outputs in (logits, expected):
        sum((x * w).sum() for x, w in zip(outputs, weights, strict=True)).backward()
    copy_gradients(reference)
    reference.save_pretrained(tmp_path / "gradients")
    wanted = dict(from_hf(tmp_path / "gradients").named_parameters())
    for name, p in ours.named_parameters():
        g = torch.zeros_like(p) if p.grad is None else p.grad
        assert (g - wanted[name]).abs().max() <= 1e-3 * wanted[name].abs().max().clamp_min(1e-2), name


@pytest.mark.parametrize("case", CASES)
def test_round_trip(case, tmp_path):
    reference = CASES[case]()
    reference.save_pretrained(tmp_path / "hf")
    ours = from_hf(tmp_path / "hf")
    to_hf(ours, tmp_path / "back")
    back = type(reference).from_pretrained(tmp_path / "back")
    a, b = reference.state_dict(), back.state_dict()
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    again = find_checkpoint(tmp_path / "back")
    assert again.family.supports(ours.config)
    assert normalize_pixtral_config(again.config) == normalize_pixtral_config(ours.config)
    save(ours, tmp_path / "own")
    again = load(tmp_path / "own")
    assert again.config == ours.config
    assert all(torch.equal(x, again.state_dict()[name]) for name, x in ours.state_dict().items())


@pytest.mark.parametrize("merge", [1, 2])
def test_pixels_and_tokens_match_processor(merge, tmp_path):
    """Pixels and ids: rows of an image end with [IMG_BREAK], the last with [IMG_END], as the processor writes them."""
    mistral3(spatial_merge_size=merge).save_pretrained(tmp_path)
    ours = from_hf(tmp_path)
    sizes = [(40, 90), (33, 31), (300, 29), (1, 1), (70, 71), (5, 10)]
    shown, theirs = ours.prepare_images(pictures(*sizes)), process(ours.config, sizes)
    found = iter(shown.pixels.split([layout.num_patches for layout in shown.layouts]))
    for layout, values, (height, width) in zip(shown.layouts, theirs.pixel_values, theirs.image_sizes, strict=True):
        assert (layout.h, layout.w) == (height // 5, width // 5)
        patches = values[:, :height, :width].unflatten(1, (-1, merge, 5)).unflatten(-1, (-1, merge, 5))
        assert torch.equal(next(found), patches.permute(1, 4, 2, 5, 0, 3, 6).flatten(4).flatten(0, 3))
        (part,) = ours.config.make_parts(layout)
        stream = build_stream([part], ours.config.rules)
        rows, columns = layout.num_rows, layout.num_columns
        expected = ([IMAGE] * columns + [12]) * (rows - 1) + [IMAGE] * columns + [13]
        assert stream.ids.tolist() == expected and len(stream) == ours.config.count_tokens(layout)


def test_processor_file(tmp_path):
    """The image processor file sets the longest edge, and is written back."""
    mistral3().save_pretrained(tmp_path)
    file = tmp_path / "preprocessor_config.json"
    file.write_text(json.dumps({"size": {"longest_edge": 33}, "patch_size": {"height": 5, "width": 5}}))
    ours = from_hf(tmp_path)
    assert ours.config.policy == LongestEdgePolicy(patch_size=5, merge_size=2, longest_edge=33)
    to_hf(ours, tmp_path / "back")
    assert read_config(tmp_path / "back").policy == ours.config.policy
    file.write_text(json.dumps({"size": {"longest_edge": 33}, "patch_size": 7}))
    with pytest.raises(VitrailError, match="patch_size is 7"):
        from_hf(tmp_path)


def test_tower_matches_transformers(tmp_path):
    reference = PixtralVisionModel(PixtralVisionConfig(**TOWER, patch_size=7)).eval()
    randomize(reference, spread=0.1).save_pretrained(tmp_path)
    ours = from_hf(tmp_path)
    pixels = torch.randn(1, 3, 28, 35)
    patches = pixels[0].unflatten(1, (-1, 7)).unflatten(-1, (-1, 7)).permute(1, 3, 0, 2, 4).flatten(2).flatten(0, 1)
    assert relative(ours(patches, [(1, 4, 5)]), reference(pixels).last_hidden_state[0]) <= 1e-5
    to_hf(ours, tmp_path / "back")
    assert read_config(tmp_path / "back") == ours.config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vision_feature_layer": -2}, "vision_feature_layer"),
        ({"vision_config": {"model_type": "clip_vision_model"}}, "clip_vision_model"),
        ({"text_config": {"model_type": "mamba"}}, "mamba"),
        ({"projector_hidden_act": "tanh"}, "tanh"),
        ({"image_break_token_id": 10**6}, "image_break"),
    ],
)
def test_unsupported_settings_raise(change, message, tmp_path):
    mistral3().save_pretrained(tmp_path)
    about = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(about | change))
    with pytest.raises(VitrailError, match=message):
        from_hf(tmp_path)


@pytest.mark.parametrize(
    ("keys", "tied"),
    [
        ({}, True),
        ({"tie_word_embeddings": False}, False),
        ({"transformers_version": "4.50.0.dev0"}, False),
        (
            {"transformers_version": "4.50.0", "text_config": {"model_type": "mistral", "tie_word_embeddings": True}},
            True,
        ),
    ],
)
def test_tied_head(keys, tied):
    """Released files leave the key out. Before version 5 of transformers, that of text_config counted."""
    assert FAMILIES["mistral3"].from_hf_config(keys).decoder.tie_word_embeddings == tied
