"""Gemma 4 with images matches transformers on random checkpoints of unusual shapes."""

import json
import random

import pytest
import torch
from transformers import Gemma4Config, Gemma4ForConditionalGeneration
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

from helpers import randomize, relative
from hub.test_llava import pictures
from vitrail.errors import VitrailError
from vitrail.hub import from_hf, load, save, to_hf
from vitrail.hub.checkpoint_info import find_checkpoint, read_config
from vitrail.hub.llava import normalize_llava_config
from vitrail.nn import cost
from vitrail.processing.resolution_policies import TokenBudgetPolicy
from vitrail.registry import FAMILIES
from vitrail.stream import build_stream, pack_streams, split_by_sample, text_part

IMAGE, START, END = 90, 91, 92
TEXT = {
    "vocab_size": 99,
    "hidden_size": 30,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "global_head_dim": 8,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "sliding_window": 50,
    "use_bidirectional_attention": "vision",
    "final_logit_softcapping": 3.0,
    "pad_token_id": 0,
}
EXPERTS = {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 9}
TOWER = {
    "hidden_size": 28,
    "intermediate_size": 36,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "head_dim": 12,
    "patch_size": 5,
    "pooling_kernel_size": 2,
    "position_embedding_size": 300,
    "standardize": True,
}
TOKENS = 70  # of an image at most
SAMPLES = ((), ((40, 90),), ((33, 31), (64, 20), (100, 7)))  # sizes (height, width) of the pictures of each sample


def gemma4_config(text=(), vision=(), **more):
    return Gemma4Config(
        text_config=TEXT | dict(text),
        vision_config=TOWER | dict(vision),
        image_token_id=IMAGE,
        boi_token_id=START,
        eoi_token_id=END,
        vision_soft_tokens_per_image=TOKENS,
        **more,
    )


def gemma4(text=(), vision=(), **more):
    config = gemma4_config(text, vision, **more)
    config._experts_implementation = config.text_config._experts_implementation = "eager"
    model = randomize(Gemma4ForConditionalGeneration(config).eval(), spread=0.1)
    draw = random.Random(0)
    for name, buffer in model.named_buffers():
        if name.endswith(("layer_scalar", "std_bias", "std_scale")):
            buffer.copy_(torch.tensor([draw.uniform(0.5, 1.5) for _ in buffer]))
    return model


CASES = {
    "dense": gemma4,
    "experts": lambda: gemma4(EXPERTS),
    "causal": lambda: gemma4({"use_bidirectional_attention": None, "attention_k_eq_v": False}),
    "short window": lambda: gemma4({"sliding_window": 4}),
    "grouped tower": lambda: gemma4(
        vision={"num_attention_heads": 4, "num_key_value_heads": 2, "standardize": False, "pooling_kernel_size": 3}
    ),
    "untied": lambda: gemma4({"tie_word_embeddings": False}, tie_word_embeddings=False),
}


def process(config, sizes):
    """Run the image processor of transformers."""
    policy = config.policy
    processor = Gemma4ImageProcessorPil(
        patch_size=policy.patch_size, pooling_kernel_size=policy.merge_size, max_soft_tokens=policy.max_tokens
    )
    found = processor(pictures(*sizes), return_tensors="pt")
    return {key: found[key] for key in ("pixel_values", "image_position_ids")}


def build_samples(ours):
    """Build samples with no, one and several pictures of unequal sizes between texts, and their pictures."""
    samples, images = [], [image for sizes in SAMPLES for image in pictures(*sizes)]
    shown = ours.prepare_images(images)
    layouts = iter(shown.layouts)
    for sizes in SAMPLES:
        parts = [text_part([1, 5])]
        for _ in sizes:
            parts += [text_part([START]), *ours.config.make_parts(next(layouts)), text_part([END, 8])]
        samples.append(build_stream([*parts, text_part([3, 2])], ours.config.rules))
    return samples, shown


def copy_gradients(model) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.zeros_like(p) if p.grad is None else p.grad)


def compute_expected(reference, ours, samples):
    expected = []
    for sample, sizes in zip(samples, SAMPLES, strict=True):
        given = process(ours.config, sizes) if sizes else {}
        kinds = (sample.ids == IMAGE).long()[None]
        expected.append(reference(input_ids=sample.ids[None], mm_token_type_ids=kinds, **given).logits[0])
    return expected


@pytest.mark.parametrize("case", CASES)
def test_matches_transformers(case, tmp_path):
    """Values and gradients of one packed row. Gradients are written and read as a checkpoint, which renames them."""
    reference = CASES[case]()
    reference.save_pretrained(tmp_path / "hf")
    ours = from_hf(tmp_path / "hf").eval()
    samples, shown = build_samples(ours)
    batch = pack_streams(samples, sum(map(len, samples)))
    logits = split_by_sample(batch, ours(batch, shown))
    expected = compute_expected(reference, ours, samples)
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


@pytest.mark.parametrize("case", ["dense", "experts"])
@torch.no_grad()
def test_cache_equals_no_cache(case, tmp_path):
    """A prompt with pictures, then one token at a time."""
    CASES[case]().save_pretrained(tmp_path)
    ours = from_hf(tmp_path).eval()
    samples, shown = build_samples(ours)
    (sample,) = samples[2:]
    shown = ours.prepare_images(pictures(*SAMPLES[2]))
    rest = [4, 9, 11, 6]
    whole = ours(pack_streams([build_longer(ours, rest)], len(sample) + len(rest)), shown)[0]
    cache = ours.decoder.make_cache(1)
    hidden = ours.forward_hidden(pack_streams([sample], len(sample)), shown, cache=cache)
    steps = [ours.decoder.compute_logits(hidden)[0]]
    steps += [ours.decoder(torch.tensor([[id]]), cache=cache)[0] for id in rest]
    assert relative(torch.cat(steps), whole) <= 1e-5


def build_longer(ours, rest):
    """Build the last sample with further tokens."""
    parts, layouts = [text_part([1, 5])], iter(ours.prepare_images(pictures(*SAMPLES[2])).layouts)
    for _ in SAMPLES[2]:
        parts += [text_part([START]), *ours.config.make_parts(next(layouts)), text_part([END, 8])]
    return build_stream([*parts, text_part([3, 2, *rest])], ours.config.rules)


@pytest.mark.parametrize("case", CASES)
def test_round_trip(case, tmp_path):
    reference = CASES[case]()
    reference.save_pretrained(tmp_path / "hf")
    ours = from_hf(tmp_path / "hf")
    to_hf(ours, tmp_path / "back")
    back = type(reference).from_pretrained(tmp_path / "back", experts_implementation="eager").eval()
    a, b = reference.state_dict(), back.state_dict()
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    samples, _ = build_samples(ours)
    with torch.no_grad():
        for x, y in zip(compute_expected(back, ours, samples), compute_expected(reference, ours, samples), strict=True):
            assert relative(x, y) <= 1e-6
    again = find_checkpoint(tmp_path / "back")
    assert again.family.supports(ours.config)
    assert normalize_llava_config(again.config) == normalize_llava_config(ours.config)
    save(ours, tmp_path / "own")
    again = load(tmp_path / "own")
    assert again.config == ours.config
    assert all(torch.equal(x, again.state_dict()[name]) for name, x in ours.state_dict().items())


def test_pixels_and_tokens_match_processor(tmp_path):
    gemma4().save_pretrained(tmp_path)
    ours = from_hf(tmp_path)
    sizes = [(40, 90), (33, 31), (300, 29), (2, 1), (70, 71), (5, 10), (9, 1400), (1400, 9)]
    shown, theirs = ours.prepare_images(pictures(*sizes)), process(ours.config, sizes)
    found = iter(shown.pixels.split([layout.num_patches for layout in shown.layouts]))
    for layout, values, cells in zip(shown.layouts, theirs["pixel_values"], theirs["image_position_ids"], strict=True):
        width, height = (cells.amax(0) + 1).tolist()
        assert (layout.h, layout.w) == (height, width) and height * width <= 4 * TOKENS
        patches = 2 * (values[: height * width] - 0.5)  # rows × columns, each of rows × columns × channels
        blocks = patches.view(height // 2, 2, width // 2, 2, 5, 5, 3).permute(0, 2, 1, 3, 6, 4, 5)
        torch.testing.assert_close(next(found), blocks.reshape(height * width, -1), rtol=0, atol=1e-6)
        assert ours.config.count_tokens(layout) == height * width // 4


def test_processor_file(tmp_path):
    """The image processor file sets the number of tokens, and is written back without a normalization."""
    gemma4().save_pretrained(tmp_path)
    file = tmp_path / "preprocessor_config.json"
    about = {"max_soft_tokens": 140, "patch_size": 5, "pooling_kernel_size": 2, "do_normalize": False}
    file.write_text(json.dumps(about))
    ours = from_hf(tmp_path)
    assert ours.config.policy == TokenBudgetPolicy(patch_size=5, merge_size=2, max_tokens=140)
    assert ours.config.mean == ours.config.std == (0.5, 0.5, 0.5)
    to_hf(ours, tmp_path / "back")
    assert read_config(tmp_path / "back") == ours.config
    wrong = [({"patch_size": 7}, "patch_size is 7"), ({"max_soft_tokens": 9}, "max_soft_tokens is 9")]
    normalized = {"do_normalize": True, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    for change, message in [*wrong, (normalized, "set do_normalize to false")]:
        file.write_text(json.dumps(about | change))
        with pytest.raises(VitrailError, match=message):
            from_hf(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"audio_config": {"hidden_size": 8}}, "audio tower of Gemma 4"),
        ({"vision_config": None}, "gemma4_text"),
        ({"vision_config": TOWER | {"use_clipped_linears": True}}, "E2B and E4B"),
        ({"vision_config": {"model_type": "clip_vision_model"}}, "clip_vision_model"),
        ({"text_config": TEXT | {"hidden_size_per_layer_input": 8}}, "E2B and E4B"),
        ({"text_config": {"model_type": "llama"}}, "llama"),
    ],
)
def test_unsupported_settings_raise(change, message, tmp_path):
    gemma4().save_pretrained(tmp_path)
    about = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(about | change))
    with pytest.raises(VitrailError, match=message):
        from_hf(tmp_path)


def test_cost_counts_spans_in_sliding_layers():
    """Image tokens attend to later ones in the two layers with a sliding window, not in the third."""
    flops = {}
    for spans in ("vision", None):
        text = {"layer_types": ["sliding_attention"] * 2 + ["full_attention"], "use_bidirectional_attention": spans}
        family = FAMILIES["gemma4"]
        with torch.device("meta"):
            config = gemma4_config(text | {"sliding_window": 500}).to_dict()
            model = family.model_class(family.from_hf_config(config))
        flops[spans] = cost.count_flops(model, model.workload([(40, 90)], 9))
    n = model.config.count_tokens(model.config.policy.layout(40, 90))
    per_pair = 4 * TEXT["num_attention_heads"] * TEXT["head_dim"]
    assert flops["vision"] - flops[None] == 2 * per_pair * n * (n - 1) // 2
