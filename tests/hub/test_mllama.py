"""Llama-3.2-Vision matches transformers: values, gradients and export."""

import json
import random

import pytest
import torch
from transformers import MllamaConfig, MllamaForConditionalGeneration
from transformers.models.mllama.configuration_mllama import MllamaTextConfig, MllamaVisionConfig
from transformers.models.mllama.processing_mllama import (
    convert_sparse_cross_attention_mask_to_dense,
    get_cross_attention_token_mask,
)

from helpers import randomize, relative
from vitrail.errors import CheckpointError, VitrailError
from vitrail.hub import from_hf, load, save, to_hf
from vitrail.hub.mllama import IMAGE_TOKEN_ID, MLLAMA, TEXT_DEFAULTS
from vitrail.models.cross_attention_vlm import CrossAttentionVLM, ImageViews
from vitrail.stream import build_stream, pack_streams, text_part

VALUES, GRADIENTS = 1e-4, 1e-3
VOCAB, MARK = 31, 33  # the mark is one of the ids that are never said


def model(draw: random.Random, **text) -> MllamaForConditionalGeneration:
    heads, patch, layers, tiles = draw.choice([1, 2, 3]), draw.choice([2, 3]), draw.randint(2, 4), draw.randint(2, 4)
    taps = [i for i in range(layers) if draw.random() < 0.5]
    width, total = heads * draw.choice([4, 6]), draw.randint(3, 6)
    vision = MllamaVisionConfig(
        hidden_size=width,
        attention_heads=heads,
        num_hidden_layers=layers,
        num_global_layers=draw.randint(1, 2),
        intermediate_size=draw.randint(7, 30),
        norm_eps=draw.choice([1e-5, 1e-3]),
        hidden_act=draw.choice(["gelu", "quick_gelu"]),
        patch_size=patch,
        image_size=patch * draw.randint(1, 3),
        num_channels=draw.choice([1, 3]),
        max_num_tiles=tiles,
        supported_aspect_ratios=[[a, b] for a in range(1, 5) for b in range(1, 5) if a * b <= tiles],
        intermediate_layers_indices=taps or [0],
        vision_output_dim=width * (1 + len(taps or [0])),
    )
    groups, each = draw.choice([1, 2]), draw.choice([1, 2, 3])
    rope = {"rope_type": "default", "rope_theta": draw.choice([1e4, 5e5])}
    if draw.random() < 0.5:
        rope |= {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        rope |= {"original_max_position_embeddings": 16}
    settings = {
        "vocab_size": VOCAB,
        "hidden_size": groups * each * draw.choice([6, 10]),
        "num_hidden_layers": total,
        "num_attention_heads": groups * each,
        "num_key_value_heads": groups,
        "intermediate_size": draw.randint(7, 40),
        "cross_attention_layers": sorted(draw.sample(range(total), draw.randint(1, total - 1))),
        "rms_norm_eps": draw.choice([1e-5, 1e-3]),
        "rope_parameters": rope,
        "pad_token_id": None,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **text,
    }
    whole = MllamaConfig(vision_config=vision, text_config=MllamaTextConfig(**settings), image_token_index=MARK)
    whole._attn_implementation = "eager"
    return randomize(MllamaForConditionalGeneration(whole), draw.randint(0, 999)).eval()


def taken_one_later(ours: CrossAttentionVLM) -> CrossAttentionVLM:
    """Shift the taps in the config to match transformers."""
    tower = ours.config.tower.replace(feature_layers=tuple(i + 1 for i in ours.config.tower.feature_layers))
    other = CrossAttentionVLM(ours.config.replace(tower=tower)).eval()
    other.load_state_dict(ours.state_dict())
    return other


ROWS = {
    "one": ["×·····"],
    "after words": ["··×···"],
    "several": ["×··×··", "·××·×·"],
    "some without": ["·×····", "······", "×·×·"],
    "side by side": ["×××···", "··××"],
}


def sample(draw: random.Random, ours: CrossAttentionVLM, rows: list[str]):
    """Draw samples with images of different tile counts, in native form and for transformers.

    Also returns the mask (B, L) of tokens that see no image."""
    config = ours.config.tower
    texts = [[MARK if c == "×" else draw.randrange(VOCAB) for c in row] for row in rows]
    ratios = [[draw.choice(config.aspect_ratios) for _ in range(row.count("×"))] for row in rows]
    count, length = max(map(len, ratios)), max(map(len, texts))
    flat = [ratio for row in ratios for ratio in row]
    tiles = torch.randn(len(flat), config.max_tiles, config.channels, config.image_size, config.image_size)
    batch = pack_streams([build_stream([text_part(text)]) for text in texts], length, trim=True)

    room = torch.zeros(len(rows), count, *tiles.shape[1:])
    ids, mask = torch.zeros(len(rows), count, dtype=torch.long), torch.zeros(len(rows), count, config.max_tiles)
    mask[:, :, 0] = 1  # as the processor has it
    held = iter(tiles)
    for b, row in enumerate(ratios):
        for p, (h, w) in enumerate(row):
            room[b, p], ids[b, p], mask[b, p, : h * w] = next(held), 1 + config.aspect_ratios.index((h, w)), 1
    sparse = [get_cross_attention_token_mask(text, MARK) for text in texts]
    dense = convert_sparse_cross_attention_mask_to_dense(
        sparse, [[h * w for h, w in row] for row in ratios], config.max_tiles, length
    )
    dense = torch.from_numpy(dense)
    padded = torch.tensor([text + [0] * (length - len(text)) for text in texts])
    theirs = {
        "input_ids": padded,
        "attention_mask": torch.tensor([[int(i < len(text)) for i in range(length)] for text in texts]),
        "pixel_values": room,
        "aspect_ratio_ids": ids,
        "aspect_ratio_mask": mask,
        "cross_attention_mask": dense,
    }
    return batch, ImageViews(tiles, flat), theirs, ~dense.flatten(2).any(-1)


def blinded(reference: MllamaForConditionalGeneration, blind: torch.Tensor) -> None:
    """Zero the cross-attention of tokens that see no image, as in Meta's code."""
    for i in reference.config.text_config.cross_attention_layers:
        reference.model.language_model.layers[i].cross_attn.register_forward_hook(
            lambda _, __, out: (out[0].masked_fill(blind[..., None], 0.0), out[1])
        )


def in_files(name: str) -> str:
    """Return the checkpoint name of a parameter."""
    if name.startswith("lm_head"):
        return f"language_model.{name}"
    return name.removeprefix("model.").replace("language_model.", "language_model.model.")


def same_gradients(ours: CrossAttentionVLM, logits, reference, wanted, real) -> None:
    weight = torch.randn_like(wanted) * real[..., None]
    (logits * weight).sum().backward()
    (wanted * weight).sum().backward()
    theirs = {in_files(k): torch.zeros_like(p) if p.grad is None else p.grad for k, p in reference.named_parameters()}
    pulled = {}
    for move in MLLAMA.tensor_rules(ours.config):
        pulled |= zip(move.native, move.load([theirs.pop(name) for name in move.hf]), strict=True)
    assert not theirs
    for name, p in ours.named_parameters():
        expected = pulled.pop(name)
        found = torch.zeros_like(expected) if p.grad is None else p.grad
        assert (found - expected).abs().max() <= GRADIENTS * expected.abs().max() + 1e-6, name
    assert not pulled


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("seed", range(3))
def test_logits_and_gradients(seed, rows, tmp_path):
    draw = random.Random(f"{seed} {rows}")
    reference = model(draw)
    reference.save_pretrained(tmp_path)
    ours = taken_one_later(from_hf(tmp_path))
    batch, pictures, theirs, blind = sample(draw, ours, ROWS[rows])
    blinded(reference, blind)
    wanted = reference(**theirs).logits
    found, real = ours(batch, pictures), batch.segments >= 0
    assert found.shape == wanted.shape and wanted.shape[-1] == VOCAB
    assert relative(found[real], wanted[real]) <= VALUES
    same_gradients(ours, found, reference, wanted, real)


def test_known_differences_from_transformers(tmp_path):
    """Differences in taps and in text without images exceed rounding."""
    draw = random.Random(5)
    reference = model(draw)
    reference.save_pretrained(tmp_path)
    ours = from_hf(tmp_path)
    batch, pictures, theirs, blind = sample(draw, ours, ["··×···"])
    as_it_is, later = reference(**theirs).logits, taken_one_later(ours)(batch, pictures)
    assert relative(later[:, :2], as_it_is[:, :2]) > 0.01
    blinded(reference, blind)
    assert relative(later, reference(**theirs).logits) <= VALUES
    assert relative(ours(batch, pictures)[:, 2:], as_it_is[:, 2:]) > 0.01


def test_taps_match_meta(tmp_path):
    """With block inputs as taps, transformers matches."""
    draw = random.Random(6)
    reference = model(draw)
    reference.save_pretrained(tmp_path)
    ours = from_hf(tmp_path)
    batch, pictures, theirs, blind = sample(draw, ours, ["×··××·"])
    blinded(reference, blind)
    encoder = reference.model.vision_model.transformer
    entered = []
    for block in encoder.layers:
        block.register_forward_pre_hook(lambda _, __, kw: entered.append(kw["hidden_state"]), with_kwargs=True)

    def instead(_, __, out):
        out.hidden_states = tuple(entered)
        return out

    encoder.register_forward_hook(instead)
    wanted = reference(**theirs).logits
    assert relative(ours(batch, pictures), wanted) <= VALUES


def test_text_only(tmp_path):
    draw = random.Random(7)
    reference = model(draw)
    reference.save_pretrained(tmp_path)
    ours = from_hf(tmp_path)
    ids = torch.randint(0, VOCAB, (1, 9))
    batch = pack_streams([build_stream([text_part(ids[0])])], 9)
    found, wanted = ours(batch), reference(ids).logits
    assert relative(found, wanted) <= VALUES
    same_gradients(ours, found, reference, wanted, torch.ones(1, 9, dtype=torch.bool))


def test_generation_matches_transformers(tmp_path):
    """Greedy decoding with cached image keys equals `generate`."""
    draw = random.Random(8)
    # Its cache counts words by the first layer, which must not be one that holds pictures.
    reference = model(draw, num_hidden_layers=4, cross_attention_layers=[1, 3])
    reference.save_pretrained(tmp_path)
    ours = taken_one_later(from_hf(tmp_path))
    batch, pictures, theirs, _ = sample(draw, ours, ["×··××·"])
    wanted = reference.generate(**theirs, max_new_tokens=6, do_sample=False, eos_token_id=None)[0, 6:]
    cache, output = ours.decoder.make_cache(1), []
    hidden = ours.forward_hidden(batch, pictures, cache=cache)
    for _ in range(6):
        output.append(ours.decoder.compute_logits(hidden[:, -1:]).argmax(-1))
        hidden = ours.decoder.forward_hidden(output[-1], cache=cache)
    assert torch.cat(output, 1)[0].tolist() == wanted.tolist()


@pytest.mark.parametrize("seed", range(4))
def test_round_trip(seed, tmp_path):
    draw = random.Random(seed)
    reference = model(draw)
    reference.save_pretrained(tmp_path / "theirs")
    ours = from_hf(tmp_path / "theirs")
    to_hf(ours, tmp_path / "back")
    back, info = MllamaForConditionalGeneration.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(info.values())
    theirs, again = reference.state_dict(), back.state_dict()
    assert theirs.keys() == again.keys() and all(torch.equal(theirs[name], again[name]) for name in theirs)
    for config in (json.loads(back.config.to_json_string(use_diff=False)), MLLAMA.to_hf_config(ours.config)):
        assert MLLAMA.from_hf_config(config) == ours.config
    save(ours, tmp_path / "own")
    batch, pictures, *_ = sample(draw, ours, ROWS["several"])
    assert torch.equal(load(tmp_path / "own")(batch, pictures), ours(batch, pictures))


# ---- configs ----------------------------------------------------------------------------------------------------


def test_config_defaults():
    about = json.loads(MllamaConfig().to_json_string(use_diff=False))
    text = about["text_config"]
    assert {key: text[key] for key in TEXT_DEFAULTS if key != "rope_theta"} | {
        "rope_theta": TEXT_DEFAULTS["rope_theta"]
    } == TEXT_DEFAULTS
    assert (
        text["rope_parameters"]["rope_theta"] == TEXT_DEFAULTS["rope_theta"]
        and about["image_token_index"] == IMAGE_TOKEN_ID
    )
    assert MLLAMA.from_hf_config({}) == MLLAMA.from_hf_config(about)


ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    "text, billions",
    [
        ({}, 10.67),
        (
            {
                "hidden_size": 8192,
                "num_hidden_layers": 100,
                "num_attention_heads": 64,
                "intermediate_size": 28_672,
                "cross_attention_layers": list(range(3, 100, 5)),
            },
            88.6,
        ),
    ],
)
def test_released_sizes(text, billions):
    """Tensor names and shapes of Llama-3.2-11B-Vision and 90B."""
    theirs = MllamaConfig(
        vision_config=MllamaVisionConfig(image_size=560), text_config=MllamaTextConfig(rope_parameters=ROPE, **text)
    )
    config = MLLAMA.from_hf_config(json.loads(theirs.to_json_string(use_diff=False)))
    assert MLLAMA.supports(config)
    with torch.device("meta"):
        ours, reference = CrossAttentionVLM(config), MllamaForConditionalGeneration(theirs)
    count = sum(p.numel() for p in ours.parameters())
    assert count == sum(p.numel() for p in reference.parameters())
    assert count / 1e9 == pytest.approx(billions, abs=0.05)
    mine, pushed = ours.state_dict(), {}
    for move in MLLAMA.tensor_rules(config):
        pushed |= zip(move.hf, move.export([mine[name] for name in move.native]), strict=True)
    assert {k: v.shape for k, v in pushed.items()} == {in_files(k): v.shape for k, v in reference.state_dict().items()}


@pytest.mark.parametrize(
    "about, why",
    [
        ({"text_config": {"tie_word_embeddings": True}}, "fewer rows"),
        ({"text_config": {"dropout": 0.1}}, "dropout"),
        ({"text_config": {"attention_bias": True}}, "attention_bias"),
        ({"text_config": {"head_dim": 64}}, "head_dim"),
        ({"text_config": {"hidden_act": "mish"}}, "mish"),
        ({"text_config": {"cross_attention_layers": [3, 40]}}, "are not layers of the decoder"),
        ({"text_config": {"rope_parameters": {"rope_type": "dynamic"}}}, "dynamic"),
        ({"vision_config": {"vision_output_dim": 1280}}, "vision_output_dim"),
        ({"image_token_index": 128_264}, "image_token_id is 128264"),
    ],
)
def test_unsupported_settings_raise(about, why):
    with pytest.raises(VitrailError, match=why):
        MLLAMA.from_hf_config(about)


def test_other_model_is_not_exported(tmp_path):
    config = MLLAMA.from_hf_config({"vision_config": {"image_size": 28}})
    tied = config.replace(decoder=config.decoder.replace(extra_embeddings=0), image_token_id=5)
    alone = config.replace(join_adjacent=False)
    blind = config.replace(decoder=config.decoder.replace(fusion=config.cross_attention.replace(without_image="mlp")))
    assert MLLAMA.supports(config) and not any(map(MLLAMA.supports, (tied, alone, blind)))
    with torch.device("meta"), pytest.raises(CheckpointError, match="no Hugging Face family"):
        to_hf(CrossAttentionVLM(alone), tmp_path)
