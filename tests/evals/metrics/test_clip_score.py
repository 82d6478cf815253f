"""CLIPScore and RefCLIPScore, compared with the original program on a small CLIP of transformers."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from evals.test_suites_models import PICTURES, embedder, theirs
from vitrail.data.formats import Sample
from vitrail.errors import DataError
from vitrail.evals.metrics.clip_score import (
    CLIP_SCORE_PREFIX,
    MAX_SCORES,
    ClipCaptionScorer,
    clip_score,
    ref_clip_score,
    reference_similarity,
)
from vitrail.evals.metrics.scoring_table import ScoringTable

SAID = ["a cat on the sea", "two", "a very small boat"]
TOLD = [["a cat", "the sea and a dog"], ["two dogs", "far", "two boats on it"], ["a photo"]]


def as_program(images, output, result):
    """CLIPScore and RefCLIPScore of raw features, as in jmhessel/clipscore with numpy 1.21 or newer."""

    def unit(x):
        return x / np.sqrt(np.sum(x**2, axis=1, keepdims=True))

    clip = 2.5 * np.clip(np.sum(unit(images) * unit(output), axis=1), 0, None)
    near = np.array(
        [np.max(one.dot(unit(several).transpose())) for one, several in zip(unit(output), result, strict=True)]
    )
    return clip, near, 2 * clip * near / (clip + near)


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_matches_the_program_with_a_transformers_model(kind, tmp_path):
    import transformers as hf

    model, processor = theirs(kind, tmp_path)
    words = hf.PreTrainedTokenizerFast.from_pretrained(tmp_path)

    def texts(several):
        ids = words([f"A photo depicts {text}" for text in several], padding="max_length", truncation=True,
                    max_length=12, return_tensors="pt")["input_ids"]  # fmt: skip
        with torch.no_grad():
            return _tensor(model.get_text_features(input_ids=ids)).numpy()

    with torch.no_grad():
        pixels = processor([Image.fromarray(p) for p in PICTURES], return_tensors="pt")["pixel_values"]
        images = _tensor(model.get_image_features(pixel_values=pixels)).numpy()
    clip, near, both = as_program(images, texts(SAID), [texts(several) for several in TOLD])
    samples = []
    for n, (picture, captions) in enumerate(zip(PICTURES, TOLD, strict=True)):
        Image.fromarray(picture).save(tmp_path / f"{n}.png")
        samples.append(Sample(id=str(n), images=(tmp_path / f"{n}.png",), captions=tuple(captions)))
    found = ClipCaptionScorer(embedder(tmp_path), samples).score_captions(ScoringTable.from_samples(samples), SAID)
    assert (near > 0).all() and len(set(clip.tolist())) > 1
    np.testing.assert_allclose(found["CLIPScore"], clip, atol=1e-5, rtol=0)
    np.testing.assert_allclose(found["RefCLIPScore"], np.nan_to_num(both), atol=1e-5, rtol=0)
    back = ClipCaptionScorer(embedder(tmp_path), samples).score_captions(
        ScoringTable.from_samples(samples[::-1]), SAID[::-1]
    )
    assert back["CLIPScore"] == pytest.approx(found["CLIPScore"][::-1], abs=1e-6)  # matched by id, not by position


def _tensor(found):
    return found if isinstance(found, torch.Tensor) else found.pooler_output


@given(st.integers(0, 10_000), st.lists(st.integers(1, 4), min_size=1, max_size=5))
def test_matches_the_program_on_random_features(seed, counts):
    draw = np.random.default_rng(seed)
    images, output = (draw.normal(size=(len(counts), 6)) for _ in range(2))
    result = [draw.normal(size=(count, 6)) for count in counts]
    clip, near, both = as_program(images, output, result)
    ours = clip_score(torch.from_numpy(images), torch.from_numpy(output))
    refs = reference_similarity(torch.from_numpy(output), [torch.from_numpy(several) for several in result])
    np.testing.assert_allclose(ours, clip, atol=1e-12)
    np.testing.assert_allclose(refs, np.maximum(near, 0), atol=1e-12)  # the clamp of the paper, which the program lacks
    mean = ref_clip_score(ours, refs).numpy()
    some = (clip > 0) & (near > 0)
    np.testing.assert_allclose(mean[some], both[some], atol=1e-12)
    assert (mean[~some] == 0).all() and (mean <= MAX_SCORES["RefCLIPScore"] + 1e-12).all()


def test_worked_examples():
    picture, aside = torch.tensor([[3.0, 4.0]]), torch.tensor([[4.0, -3.0]])
    assert clip_score(picture, torch.tensor([[6.0, 0.0]])).item() == pytest.approx(1.5)  # 2.5 · 3/5
    assert clip_score(picture, -picture).item() == 0 and clip_score(picture, aside).item() == 0
    near = reference_similarity(torch.tensor([[6.0, 0.0]]), [torch.cat([aside, -picture])])
    assert near.item() == pytest.approx(0.8)
    assert ref_clip_score(torch.tensor([1.5]), near).item() == pytest.approx(2 * 1.5 * 0.8 / 2.3)
    assert ref_clip_score(torch.zeros(1), torch.zeros(1)).item() == 0  # the program computes 0 / 0
    assert CLIP_SCORE_PREFIX == "A photo depicts "


def test_mismatched_inputs_raise():
    x = torch.ones(2, 3)
    with pytest.raises(DataError, match="captions"):
        clip_score(x, x[:1])
    with pytest.raises(DataError, match="references of 1 images for 2"):
        reference_similarity(x, [x])
    with pytest.raises(DataError, match="image 1 has no reference"):
        reference_similarity(x, [x, x[:0]])
    with pytest.raises(DataError, match="sample 'a' has 0 images and 1 captions"):
        ClipCaptionScorer(None, [Sample(id="a", captions=("a",))])


def test_other_images_raise(tmp_path):
    theirs("clip", tmp_path)
    Image.fromarray(PICTURES[0]).save(tmp_path / "0.png")
    one, other = (Sample(id=name, images=(tmp_path / "0.png",), captions=("a",)) for name in "ab")
    with pytest.raises(DataError, match="image 'b' was not embedded"):
        ClipCaptionScorer(embedder(tmp_path), [one]).score_captions(ScoringTable.from_samples([other]), ["a"])
