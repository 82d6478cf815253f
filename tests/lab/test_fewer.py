"""A unified model asked with fewer tokens: as if the others could not be seen, and all of them the model itself."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import randomize
from models.test_unified import MROPE, codec, made
from vitrail.errors import ConfigError
from vitrail.generate.answers import answer
from vitrail.lab.exact import Sheet, right
from vitrail.lab.fewer import answered, fewer, lay_fewer, patches
from vitrail.lab.reduced import REDUCTIONS
from vitrail.models.unified import Unified
from vitrail.nn import RotaryConfig
from vitrail.processing.text import Tokenizer
from vitrail.tasks.told import IGNORED

B, N, L = 3, 9, 5


def model(rotary=MROPE, **more) -> Unified:
    return randomize(made(rotary=rotary, order="masked", sees="features", **more), 3, 0.4).eval()


@pytest.fixture(scope="module")
def pixels() -> torch.Tensor:
    return torch.randint(0, 256, (B, 3, 12, 12), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(0, 50, (B, L), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("rotary", [MROPE, RotaryConfig(16)])
@pytest.mark.parametrize("way", REDUCTIONS)
@torch.no_grad()
def test_all_patches_are_the_model_itself(rotary, way, pixels, ids):
    one = model(rotary)
    want = one(one.shown(one.look(one.codec.pixels(pixels))[0]), one.words(ids))
    laid = lay_fewer(one, fewer(one, patches(one, pixels), way, N), one.words(ids))
    torch.testing.assert_close(one.hidden(laid), want)
    assert laid.ends == (1 + N, 1 + N + L)


@settings(max_examples=12)
@given(st.sampled_from(["VisPruner", "random"]), st.integers(1, N - 1), st.booleans())
@torch.no_grad()
def test_what_is_left_out_is_as_if_unseen(way, keep, flat):
    """Whole rows in which nothing may look at the patches that are left out."""
    one = model(RotaryConfig(16) if flat else MROPE)
    pixels = torch.randint(0, 256, (B, 3, 12, 12), dtype=torch.uint8, generator=torch.Generator().manual_seed(keep))
    ids = torch.randint(0, 50, (B, L), generator=torch.Generator().manual_seed(2))
    kept = fewer(one, patches(one, pixels), way, keep)
    there = kept.places.sum(1) > 0  # (B, N)
    assert there.sum(1).tolist() == [keep] * B
    whole = one.lay(one.shown(one.look(one.codec.pixels(pixels))[0]), one.words(ids))
    seen = torch.ones(B, 1 + N + L, dtype=torch.long)
    seen[:, 1 : 1 + N] = there.long()
    apart = whole._replace(plan=replace(whole.plan, segments=seen, key_segments=seen, lead=0))
    found = one.hidden(lay_fewer(one, kept, one.words(ids)))
    torch.testing.assert_close(found[:, -L:], one.hidden(apart)[:, -L:], atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_means_stand_at_the_mean_of_their_places(pixels, ids):
    one = model(side=16)  # 4 × 4 codes
    pixels = torch.nn.functional.interpolate(pixels.float(), (16, 16)).to(torch.uint8)
    seen = patches(one, pixels)
    kept = fewer(one, seen, "pooling", 4)
    laid, cells = lay_fewer(one, kept, one.words(ids)), seen.features.view(B, 2, 2, 2, 2, -1).mean((2, 4)).flatten(1, 2)
    torch.testing.assert_close(kept.tokens, cells)
    rows = one.place(4, 4).view(2, 2, 2, 2, -1).mean((1, 3)).flatten(0, 1)
    torch.testing.assert_close(laid.x[:, 1:5], one.read(cells) + rows)
    assert laid.positions[0, 1:5].tolist() == [[1, 1.5, 1.5], [1, 1.5, 3.5], [1, 3.5, 1.5], [1, 3.5, 3.5]]
    assert laid.positions[0, 5].tolist() == [5, 5, 5]  # where words begin behind all of it


@torch.no_grad()
def test_right_is_what_the_model_would_write(pixels):
    one = model()
    words = Tokenizer.train(["a red cube or a blue one?"] * 4, 300, specials=("<|endoftext|>",))
    one = randomize(Unified(one.config.with_(decoder=one.config.decoder.with_(vocab=words.size))), 5, 0.4).eval()
    seen = one.look(one.codec.pixels(pixels))[0]
    question = [*words.encode("a red cube?"), words.eos]
    said = answer(one, seen, ["a red cube?"] * B, words, max_new=3)
    ids = torch.tensor([[*question, *text.ids] for text in said])
    targets = torch.full_like(ids, IGNORED)
    targets[:, len(question) - 1 : -1] = ids[:, len(question) :]
    wrong = targets.clone()
    wrong[1, -2] = (wrong[1, -2] + 1) % words.size
    for wanted, hits in ((targets, [True] * B), (wrong, [True, False, True])):
        sheet = Sheet(pixels, ids, wanted, ids)
        for found in answered(one, sheet, words, [("random", N), ("pooling", N)]):
            assert found.tolist() == hits
    assert right(one.decoder, torch.zeros(B, ids.shape[1], 32), targets, 1).tolist() == [
        bool((row[row != IGNORED] == 0).all()) for row in targets
    ]


def test_what_cannot_be_left(pixels):
    one = model()
    seen = patches(one, pixels)
    for way, keep, said in (("prune", 4, "'prune'"), ("pooling", 10, "10 of 9"), ("random", 0, "0 of 9")):
        with pytest.raises(ConfigError, match=said):
            fewer(one, seen, way, keep)
    grey = made(order="masked", sees="features")
    grey.codec.config = codec().with_(mean=(0.1, 0.1, 0.1))
    with pytest.raises(ConfigError, match="no looks"):
        patches(grey, pixels)
