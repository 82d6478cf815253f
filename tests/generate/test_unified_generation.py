"""Answers with a cache equal those of full passes."""

import pytest
import torch

from models.test_unified_model import MROPE, made
from vitrail.errors import ConfigError
from vitrail.generate.sampling import SamplingConfig
from vitrail.generate.unified_generation import generate_answers
from vitrail.models.unified_model import UnifiedModel
from vitrail.nn import RotaryConfig
from vitrail.processing.tokenizer import Tokenizer

TEXTS = ["how many dogs are there?", "what is this?", "describe the picture.", "a dog and two cats on a red ground"]


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    return Tokenizer.train(TEXTS * 3, 300)


def unified(rotary=MROPE, order="raster") -> UnifiedModel:
    config = made(order, rotary=rotary).config
    torch.manual_seed(2)
    model = UnifiedModel(config.replace(decoder=config.decoder.replace(vocab_size=300))).eval()
    with torch.no_grad():
        model.decoder.head.weight.normal_(std=0.3)
        model.position_embedding.table.normal_(std=0.5)
    return model


@torch.no_grad()
def by_whole_passes(model, seen, question, words, count):
    ids = [*words.encode(question), words.eos_token_id]
    start = len(ids)
    for _ in range(count):
        pieces = [model.make_text_piece(torch.tensor([ids]))]
        pieces = pieces if seen is None else [model.make_input_image_piece(seen), *pieces]
        logits = model.decoder.compute_logits(model(*pieces)[0, -1])
        ids.append(int(logits[: words.vocab_size].argmax()))
        if ids[-1] == words.eos_token_id:
            break
    return ids[start:]


@pytest.mark.parametrize("rotary", [MROPE, RotaryConfig(16)])
@pytest.mark.parametrize("looks", [True, False])
def test_equal_to_whole_passes(rotary, looks, words):
    model = unified(rotary)
    seen = model.encode_images(torch.rand(3, 3, 12, 12) * 2 - 1)[0] if looks else None
    found = generate_answers(model, seen, TEXTS[:3], words, max_new_tokens=12)
    for row in range(3):
        one = None if seen is None else seen[row : row + 1]
        assert found[row].ids == by_whole_passes(model, one, TEXTS[row], words, 12)


def test_what_is_seen_matters(words):
    model = unified()
    pictures = torch.rand(8, 3, 12, 12) * 2 - 1
    found = generate_answers(
        model,
        model.encode_images(pictures)[0],
        [TEXTS[1]] * 8,
        words,
        max_new_tokens=8,
        sampling=SamplingConfig(seed=0),
    )
    assert len({tuple(one.ids) for one in found}) > 1


def test_what_cannot_be_is_refused(words):
    model = unified()
    seen = model.encode_images(torch.rand(2, 3, 12, 12) * 2 - 1)[0]
    with pytest.raises(ConfigError, match="2 images and 1 questions"):
        generate_answers(model, seen, ["what?"], words)
    with pytest.raises(ConfigError, match="the tokenizer has no EOS token"):
        generate_answers(model, seen, ["what?"] * 2, Tokenizer.train(TEXTS, 300, special_tokens=("<x>",), eos=None))
