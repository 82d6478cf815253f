"""CLIPScore and RefCLIPScore beside the formula of their authors' program, on a small CLIP of transformers."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from evals.test_suites_models import PICTURES, embedder, theirs
from vitrail.data.formats import Sample
from vitrail.errors import DataError
from vitrail.evals.metrics.clipscore import PREFIX, clip_score, ref_clip_score, reference_score
from vitrail.evals.suites.scored.depicted import MOST, Depicted
from vitrail.evals.suites.sheets import Sheet

SAID = ["a cat on the sea", "two", "a very small boat"]
TOLD = [["a cat", "the sea and a dog"], ["two dogs", "far", "two boats on it"], ["a photo"]]


def as_program(images, said, told):
    """Each of CLIPScore and RefCLIPScore, of features as a model gives them, as jmhessel/clipscore does with numpy
    from 1.21 on."""

    def unit(x):
        return x / np.sqrt(np.sum(x**2, axis=1, keepdims=True))

    clip = 2.5 * np.clip(np.sum(unit(images) * unit(said), axis=1), 0, None)
    near = np.array([np.max(one.dot(unit(several).transpose())) for one, several in zip(unit(said), told, strict=True)])
    return clip, near, 2 * clip * near / (clip + near)


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_as_the_program_with_transformers_model(kind, tmp_path):
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
        samples.append(Sample(id=str(n), pictures=(tmp_path / f"{n}.png",), captions=tuple(captions)))
    found = Depicted(embedder(tmp_path), samples).scores(Sheet.of(samples), SAID)
    assert (near > 0).all() and len(set(clip.tolist())) > 1
    np.testing.assert_allclose(found["CLIPScore"], clip, atol=1e-5, rtol=0)
    np.testing.assert_allclose(found["RefCLIPScore"], np.nan_to_num(both), atol=1e-5, rtol=0)
    back = Depicted(embedder(tmp_path), samples).scores(Sheet.of(samples[::-1]), SAID[::-1])
    assert back["CLIPScore"] == pytest.approx(found["CLIPScore"][::-1], abs=1e-6)  # told apart by id, not by place


def _tensor(found):
    return found if isinstance(found, torch.Tensor) else found.pooler_output


@given(st.integers(0, 10_000), st.lists(st.integers(1, 4), min_size=1, max_size=5))
def test_as_the_program_of_any_features(seed, counts):
    draw = np.random.default_rng(seed)
    images, said = (draw.normal(size=(len(counts), 6)) for _ in range(2))
    told = [draw.normal(size=(count, 6)) for count in counts]
    clip, near, both = as_program(images, said, told)
    ours = clip_score(torch.from_numpy(images), torch.from_numpy(said))
    refs = reference_score(torch.from_numpy(said), [torch.from_numpy(several) for several in told])
    np.testing.assert_allclose(ours, clip, atol=1e-12)
    np.testing.assert_allclose(refs, np.maximum(near, 0), atol=1e-12)  # the paper's max, which the program lacks
    mean = ref_clip_score(ours, refs).numpy()
    some = (clip > 0) & (near > 0)
    np.testing.assert_allclose(mean[some], both[some], atol=1e-12)
    assert (mean[~some] == 0).all() and (mean <= MOST["RefCLIPScore"] + 1e-12).all()


def test_worked():
    picture, aside = torch.tensor([[3.0, 4.0]]), torch.tensor([[4.0, -3.0]])
    assert clip_score(picture, torch.tensor([[6.0, 0.0]])).item() == pytest.approx(1.5)  # 2.5 · 3/5
    assert clip_score(picture, -picture).item() == 0 and clip_score(picture, aside).item() == 0
    near = reference_score(torch.tensor([[6.0, 0.0]]), [torch.cat([aside, -picture])])
    assert near.item() == pytest.approx(0.8)
    assert ref_clip_score(torch.tensor([1.5]), near).item() == pytest.approx(2 * 1.5 * 0.8 / 2.3)
    assert ref_clip_score(torch.zeros(1), torch.zeros(1)).item() == 0  # where the program has 0 / 0
    assert PREFIX == "A photo depicts "


def test_what_does_not_fit_is_said():
    x = torch.ones(2, 3)
    with pytest.raises(DataError, match="captions"):
        clip_score(x, x[:1])
    with pytest.raises(DataError, match="references of 1 pictures beside 2"):
        reference_score(x, [x])
    with pytest.raises(DataError, match="picture 1 has no reference"):
        reference_score(x, [x, x[:0]])
    with pytest.raises(DataError, match="sample 'a' has 0 pictures and 1 captions"):
        Depicted(None, [Sample(id="a", captions=("a",))])


def test_other_pictures_are_refused(tmp_path):
    theirs("clip", tmp_path)
    Image.fromarray(PICTURES[0]).save(tmp_path / "0.png")
    one, other = (Sample(id=name, pictures=(tmp_path / "0.png",), captions=("a",)) for name in "ab")
    with pytest.raises(DataError, match="picture 'b' was not looked at"):
        Depicted(embedder(tmp_path), [one]).scores(Sheet.of([other]), ["a"])
