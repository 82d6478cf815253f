"""A unified model with fewer image tokens."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.token_scaling.exact_match import QuestionBatch, is_exact_match
from experiments.token_scaling.patch_reduction import REDUCTIONS
from experiments.token_scaling.token_reduction import (
    build_reduced_layout,
    encode_patches,
    reduce_patches,
    score_reductions,
)
from helpers import randomize
from models.test_unified_model import MROPE, codec, made
from vitrail.errors import ConfigError
from vitrail.generate.unified_generation import generate_answers
from vitrail.models.unified_model import UnifiedModel
from vitrail.nn import RotaryConfig
from vitrail.processing.tokenizer import Tokenizer
from vitrail.tasks.qa_tokens import IGNORE_INDEX

B, N, L = 3, 9, 5


def model(rotary=MROPE, **more) -> UnifiedModel:
    return randomize(made(rotary=rotary, order="masked", image_input="features", **more), 3, 0.4).eval()


@pytest.fixture(scope="module")
def pixels() -> torch.Tensor:
    return torch.randint(0, 256, (B, 3, 12, 12), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(0, 50, (B, L), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("rotary", [MROPE, RotaryConfig(16)])
@pytest.mark.parametrize("way", REDUCTIONS)
@torch.no_grad()
def test_keeping_all_patches_has_no_effect(rotary, way, pixels, ids):
    one = model(rotary)
    want = one(one.make_input_image_piece(one.encode_images(one.codec.to_pixels(pixels))[0]), one.make_text_piece(ids))
    laid_out = build_reduced_layout(
        one, reduce_patches(one, encode_patches(one, pixels), way, N), one.make_text_piece(ids)
    )
    torch.testing.assert_close(one.forward_hidden(laid_out), want)
    assert laid_out.ends == (1 + N, 1 + N + L)


@settings(max_examples=12)
@given(st.sampled_from(["VisPruner", "random"]), st.integers(1, N - 1), st.booleans())
@torch.no_grad()
def test_dropped_patches_are_as_if_masked(way, keep, flat):
    """The full sequence, with dropped patches masked for all tokens."""
    one = model(RotaryConfig(16) if flat else MROPE)
    pixels = torch.randint(0, 256, (B, 3, 12, 12), dtype=torch.uint8, generator=torch.Generator().manual_seed(keep))
    ids = torch.randint(0, 50, (B, L), generator=torch.Generator().manual_seed(2))
    kept = reduce_patches(one, encode_patches(one, pixels), way, keep)
    there = kept.patch_weights.sum(1) > 0  # (B, N)
    assert there.sum(1).tolist() == [keep] * B
    whole = one.build_layout(
        one.make_input_image_piece(one.encode_images(one.codec.to_pixels(pixels))[0]), one.make_text_piece(ids)
    )
    seen = torch.ones(B, 1 + N + L, dtype=torch.long)
    seen[:, 1 : 1 + N] = there.long()
    apart = whole._replace(plan=replace(whole.plan, segments=seen, key_segments=seen, prefix_length=0))
    found = one.forward_hidden(build_reduced_layout(one, kept, one.make_text_piece(ids)))
    torch.testing.assert_close(found[:, -L:], one.forward_hidden(apart)[:, -L:], atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_merged_tokens_have_mean_positions(pixels, ids):
    one = model(side=16)  # 4 × 4 codes
    pixels = torch.nn.functional.interpolate(pixels.float(), (16, 16)).to(torch.uint8)
    seen = encode_patches(one, pixels)
    kept = reduce_patches(one, seen, "pooling", 4)
    laid_out, cells = (
        build_reduced_layout(one, kept, one.make_text_piece(ids)),
        seen.features.view(B, 2, 2, 2, 2, -1).mean((2, 4)).flatten(1, 2),
    )
    torch.testing.assert_close(kept.tokens, cells)
    rows = one.position_embedding(4, 4).view(2, 2, 2, 2, -1).mean((1, 3)).flatten(0, 1)
    torch.testing.assert_close(laid_out.embeds[:, 1:5], one.image_proj(cells) + rows)
    assert laid_out.positions[0, 1:5].tolist() == [[1, 1.5, 1.5], [1, 1.5, 3.5], [1, 3.5, 1.5], [1, 3.5, 3.5]]
    assert laid_out.positions[0, 5].tolist() == [5, 5, 5]  # text positions do not change


@torch.no_grad()
def test_scores_match_generation(pixels):
    one = model()
    words = Tokenizer.train(["a red cube or a blue one?"] * 4, 300, special_tokens=("<|endoftext|>",))
    one = randomize(
        UnifiedModel(one.config.replace(decoder=one.config.decoder.replace(vocab_size=words.vocab_size))), 5, 0.4
    ).eval()
    seen = one.encode_images(one.codec.to_pixels(pixels))[0]
    question = [*words.encode("a red cube?"), words.eos_token_id]
    output = generate_answers(one, seen, ["a red cube?"] * B, words, max_new_tokens=3)
    ids = torch.tensor([[*question, *text.ids] for text in output])
    targets = torch.full_like(ids, IGNORE_INDEX)
    targets[:, len(question) - 1 : -1] = ids[:, len(question) :]
    wrong = targets.clone()
    wrong[1, -2] = (wrong[1, -2] + 1) % words.vocab_size
    for wanted, hits in ((targets, [True] * B), (wrong, [True, False, True])):
        sheet = QuestionBatch(pixels, ids, wanted, ids)
        for found in score_reductions(one, sheet, words, [("random", N), ("pooling", N)]):
            assert found.tolist() == hits
    assert is_exact_match(one.decoder, torch.zeros(B, ids.shape[1], 32), targets, 1).tolist() == [
        bool((row[row != IGNORE_INDEX] == 0).all()) for row in targets
    ]


def test_invalid_reductions_raise(pixels):
    one = model()
    seen = encode_patches(one, pixels)
    for way, keep, output in (("prune", 4, "'prune'"), ("pooling", 10, "10 of 9"), ("random", 0, "0 of 9")):
        with pytest.raises(ConfigError, match=output):
            reduce_patches(one, seen, way, keep)
    grey = made(order="masked", image_input="features")
    grey.codec.config = codec().replace(mean=(0.1, 0.1, 0.1))
    with pytest.raises(ConfigError, match="attention scores are not available"):
        encode_patches(grey, pixels)
