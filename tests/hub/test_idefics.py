"""Idefics matches transformers: values, gradients and export."""

import json
import random

import pytest
import torch
from transformers import IdeficsConfig, IdeficsForVisionText2Text
from transformers.models.idefics.processing_idefics import (
    image_attention_mask_for_packed_input_ids,
    incremental_to_binary_attention_mask,
)

from helpers import randomize, relative
from vitrail.errors import VitrailError
from vitrail.hub import from_hf, load, save, to_hf
from vitrail.hub.idefics import DEFAULTS, IDEFICS, PERCEIVER_DEFAULTS, VISION_DEFAULTS
from vitrail.models.cross_attention_vlm import CrossAttentionVLM, ImageViews
from vitrail.stream import build_stream, pack_streams, text_part

VALUES, GRADIENTS = 1e-4, 1e-3
VOCAB, ADDED = 29, 3
MARK = VOCAB + 1


def model(draw: random.Random, **more) -> IdeficsForVisionText2Text:
    heads, each, patch = draw.choice([1, 2, 3]), draw.choice([1, 2]), draw.choice([2, 3])
    every = draw.choice([1, 2])
    config = IdeficsConfig(
        vocab_size=VOCAB,
        additional_vocab_size=ADDED,
        hidden_size=heads * draw.choice([4, 6]),
        num_attention_heads=heads,
        intermediate_size=draw.randint(7, 30),
        num_hidden_layers=every * draw.randint(1, 3),
        cross_layer_interval=every,
        rms_norm_eps=draw.choice([1e-6, 1e-3]),
        alpha_type=draw.choice(["float", "vector"]),
        qk_layer_norms=draw.random() < 0.5,
        use_resampler=draw.random() < 0.7,
        freeze_text_layers=False,
        freeze_vision_layers=False,
        vision_config={
            "embed_dim": each * draw.choice([4, 10]),
            "num_attention_heads": each,
            "num_hidden_layers": draw.randint(1, 3),
            "intermediate_size": draw.randint(7, 30),
            "hidden_act": draw.choice(["gelu", "quick_gelu"]),
            "patch_size": patch,
            "image_size": patch * draw.randint(1, 3),
            "num_channels": draw.choice([1, 3]),
        },
        perceiver_config={
            "resampler_n_latents": draw.randint(1, 4),
            "resampler_depth": draw.randint(1, 2),
            "resampler_n_heads": draw.randint(1, 3),
            "resampler_head_dim": draw.choice([4, 7]),
            "qk_layer_norms_perceiver": draw.random() < 0.5,
        },
        **more,
    )
    config._attn_implementation = "eager"
    reference = randomize(IdeficsForVisionText2Text(config), draw.randint(0, 999)).eval()
    reference.tie_weights()
    return reference


class Words:
    """Tokenizer stub for the processor."""

    eos_token_id = -1

    def convert_tokens_to_ids(self, _):
        return MARK


ROWS = {
    "one": ["×·····"],
    "after words": ["··×···"],
    "several": ["×··×··", "·××·×·"],
    "some without": ["·×····", "······", "×·×·"],
    "none": ["······", "··"],
}


def sample(draw: random.Random, ours: CrossAttentionVLM, rows: list[str]):
    """Draw samples with image tokens and images, in native form and for transformers."""
    config = ours.config.tower
    ids = [i for i in range(VOCAB + ADDED) if i != MARK]
    texts = [[MARK if c == "×" else draw.choice(ids) for c in row] for row in rows]
    length, counts = max(map(len, texts)), [row.count("×") for row in rows]
    pixels = torch.randn(sum(counts), config.channels, config.image_size, config.image_size)
    batch = pack_streams([build_stream([text_part(text)]) for text in texts], length, trim=True)
    room = torch.zeros(len(rows), max(1, *counts), *pixels.shape[1:])  # where there is none, its processor makes one up
    for row, own in zip(room, pixels.split(counts), strict=True):
        row[: len(own)] = own
    padded = torch.tensor([text + [0] * (length - len(text)) for text in texts])
    last, _ = image_attention_mask_for_packed_input_ids(padded, Words(), "pt")
    theirs = {
        "input_ids": padded,
        "attention_mask": torch.tensor([[int(i < len(text)) for i in range(length)] for text in texts]),
        "pixel_values": room,
        "image_attention_mask": incremental_to_binary_attention_mask(last, "pt", num_classes=room.shape[1]),
    }
    return batch, ImageViews(pixels) if len(pixels) else None, theirs


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("seed", range(3))
def test_logits_and_gradients(seed, rows, tmp_path):
    draw = random.Random(f"{seed} {rows}")
    reference = model(draw, tie_word_embeddings=seed == 2)
    reference.save_pretrained(tmp_path)
    ours = from_hf(tmp_path)
    batch, pictures, theirs = sample(draw, ours, ROWS[rows])
    wanted, found, real = reference(**theirs).logits, ours(batch, pictures), batch.segments >= 0
    assert found.shape == wanted.shape and wanted.shape[-1] == VOCAB + ADDED
    assert relative(found[real], wanted[real]) <= VALUES

    weight = torch.randn_like(wanted) * real[..., None]
    (found * weight).sum().backward()
    (wanted * weight).sum().backward()
    gradients = {k: torch.zeros_like(p) if p.grad is None else p.grad for k, p in reference.named_parameters()}
    pulled = {}
    for move in IDEFICS.tensor_rules(ours.config):
        pulled |= zip(move.native, move.load([gradients.pop(name) for name in move.hf]), strict=True)
    assert not gradients
    for name, p in ours.named_parameters():
        expected = pulled.pop(name)
        mine = torch.zeros_like(expected) if p.grad is None else p.grad
        # Below this a gradient is rounding alone: softmax drops a bias on k.
        assert (mine - expected).abs().max() <= GRADIENTS * expected.abs().max() + 1e-5, name
    assert not pulled


def test_generation_matches_transformers(tmp_path):
    """Greedy decoding with cached image keys equals `generate`."""
    draw = random.Random(8)
    reference = model(draw)
    reference.save_pretrained(tmp_path)
    ours = from_hf(tmp_path)
    batch, pictures, theirs = sample(draw, ours, ["×··×··"])
    wanted = reference.generate(**theirs, max_new_tokens=6, do_sample=False, eos_token_id=None)[0, 6:]
    cache, output = ours.decoder.make_cache(1), []
    hidden = ours.forward_hidden(batch, pictures, cache=cache)
    for _ in range(6):
        output.append(ours.decoder.compute_logits(hidden[:, -1:]).argmax(-1))
        hidden = ours.decoder.forward_hidden(output[-1], cache=cache)
    assert torch.cat(output, 1)[0].tolist() == wanted.tolist()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_round_trip(seed, tied, tmp_path):
    draw = random.Random(seed)
    reference = model(draw, tie_word_embeddings=tied)
    reference.save_pretrained(tmp_path / "theirs")
    ours = from_hf(tmp_path / "theirs")
    to_hf(ours, tmp_path / "back")
    back, info = IdeficsForVisionText2Text.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(info.values())
    theirs, again = reference.state_dict(), back.state_dict()
    assert theirs.keys() == again.keys() and all(torch.equal(theirs[name], again[name]) for name in theirs)
    for config in (json.loads(back.config.to_json_string(use_diff=False)), IDEFICS.to_hf_config(ours.config)):
        assert IDEFICS.from_hf_config(config) == ours.config
    save(ours, tmp_path / "own")
    batch, pictures, _ = sample(draw, ours, ROWS["several"])
    assert torch.equal(load(tmp_path / "own")(batch, pictures), ours(batch, pictures))


# ---- configs ----------------------------------------------------------------------------------------------------


def test_config_defaults():
    about = json.loads(IdeficsConfig(additional_vocab_size=2).to_json_string(use_diff=False))
    for found, ours in (
        (about, DEFAULTS),
        (about["vision_config"], VISION_DEFAULTS),
        (about["perceiver_config"], PERCEIVER_DEFAULTS),
    ):
        assert {key: found[key] for key in ours if key != "additional_vocab_size"} | {"additional_vocab_size": 0} == {
            **ours,
            "additional_vocab_size": 0,
        }
    assert IDEFICS.from_hf_config({"additional_vocab_size": 2}) == IDEFICS.from_hf_config(about)


def test_released_size():
    """Tensor names and shapes of Idefics-9B."""
    theirs = IdeficsConfig(
        additional_vocab_size=2,
        cross_layer_interval=4,
        qk_layer_norms=True,
        use_resampler=True,
        vision_config={"embed_dim": 1280},
        perceiver_config={"qk_layer_norms_perceiver": True, "use_resampler": True},
    )
    config = IDEFICS.from_hf_config(json.loads(theirs.to_json_string(use_diff=False)))
    assert IDEFICS.supports(config) and config.image_token_id == 32_001
    with torch.device("meta"):
        ours, reference = CrossAttentionVLM(config), IdeficsForVisionText2Text(theirs)
    count = sum(p.numel() for p in ours.parameters())
    assert count == sum(p.numel() for p in reference.parameters())
    mine, pushed = ours.state_dict(), {}
    for move in IDEFICS.tensor_rules(config):
        pushed |= zip(move.hf, move.export([mine[name] for name in move.native]), strict=True)
    assert {k: v.shape for k, v in pushed.items()} == {k: v.shape for k, v in reference.state_dict().items()}


@pytest.mark.parametrize(
    "about, why",
    [
        ({}, "second added token"),
        ({"additional_vocab_size": 2, "image_token_id": 32_000}, "second added token"),
        ({"additional_vocab_size": 2, "dropout": 0.1}, "dropout"),
        ({"additional_vocab_size": 2, "cross_layer_interval": 5}, "does not divide the number of layers"),
        ({"additional_vocab_size": 2, "alpha_type": "matrix"}, "alpha_type"),
        ({"additional_vocab_size": 2, "hidden_act": "mish"}, "mish"),
        ({"additional_vocab_size": 2, "vision_config": {"image_size": [224, 112]}}, "only square"),
    ],
)
def test_unsupported_settings_raise(about, why):
    with pytest.raises(VitrailError, match=why):
        IDEFICS.from_hf_config(about)


def test_other_model_is_not_exported():
    config = IDEFICS.from_hf_config({"additional_vocab_size": 2, "use_resampler": True})
    others = [
        config.replace(join_adjacent=True),
        config.replace(keep_prefix_tokens=False),
        config.replace(image_token_id=0),
        config.replace(decoder=config.decoder.replace(extra_embeddings=8)),
        config.replace(connector=config.connector.replace(activation="gelu")),
        config.replace(decoder=config.decoder.replace(fusion=config.cross_attention.replace(layer_indices=(0, 3)))),
        config.replace(decoder=config.decoder.replace(fusion=config.cross_attention.replace(gated=False))),
    ]
    assert IDEFICS.supports(config) and not any(map(IDEFICS.supports, others))
