"""Collection retrieval on a small source with known results: languages, categories, keywords, widths."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from vitrail.data.image_readers import READERS, ImageRecord
from vitrail.errors import ConfigError, DataError
from vitrail.evals.contrastive_embedder import truncate_embeddings
from vitrail.evals.suites import image_collections
from vitrail.evals.suites.collection_retrieval import RetrievalOptions, evaluate_collection
from vitrail.evals.suites.retrieval_metrics import (
    RetrievalDirection,
    build_directions,
    score_directions,
    text_categories,
)

# name, keywords, category, German, French
ROWS = [
    ("dog", ("pet", "woof"), "animals", "Hund", "chien"),
    ("cat", ("pet", "meow"), "animals", "Katze", "chat"),
    ("man", ("adult", "bro"), "people", "Mann", "homme"),
    ("man: dark skin tone", ("adult", "bro"), "people", "Mann: dunkle Hautfarbe", ""),
    ("castle", ("building",), "places", "Schloss", "château"),
    ("lock", ("closed",), "objects", "Schloss", "cadenas"),
    ("flag: Chad", (), "flags", "Flagge: Tschad", ""),
    ("flag: Mali", (), "flags", "", ""),
]


class Toy:
    """Images of one colour each."""

    def __len__(self) -> int:
        return len(ROWS)

    def get_record(self, item: int) -> ImageRecord:
        name, keywords, category, german, french = ROWS[item]
        labels = {language: text for language, text in (("en", name), ("de", german), ("fr", french)) if text}
        return ImageRecord(f"toy/{item}", "toy", str(item), name, keywords, category, labels)

    def load_rgba(self, item: int, image_size: int | None = None) -> np.ndarray:
        return np.full((image_size or 8, image_size or 8, 4), 20 * item, np.uint8)


class Known:
    """Embedder with given embeddings: row 0 is wrong at widths below 8, all others are correct."""

    def __init__(self, wrong: tuple[str, ...] = ()):
        self.wrong, self.num_images = wrong, 0

    def embed_images(self, pictures):
        self.num_images += 1
        return torch.eye(len(pictures))

    def embed_texts(self, texts):
        columns = [[row[0], row[3], row[4], ", ".join(row[1])] for row in ROWS]
        rows = []
        for text in texts:
            row = torch.tensor([float(text in known) for known in columns])
            rows.append(row.roll(1) if text in self.wrong else row)
        return F.normalize(torch.stack(rows), dim=1)


@pytest.fixture
def album(monkeypatch) -> image_collections.ImageCollection:
    monkeypatch.setitem(READERS, "toy", lambda root: Toy())
    return image_collections.open_image_collection("toy", image_size=4)


def found(answers, name: str, **part):
    (score,) = [score for score in answers.scores if (score.name, dict(score.subset)) == (name, part)]
    return score


def test_names_are_captions(album):
    """A skin tone is a separate image with its own name."""
    assert album.images[2]().shape == (4, 4, 4)
    gallery = album.gallery()
    assert gallery.captions == [row[0] for row in ROWS] and torch.equal(gallery.image_ids, gallery.caption_ids)
    answers = evaluate_collection(Known(), album, RetrievalOptions())
    assert (answers.counts["images"], answers.counts["queries"], answers.counts["excluded"]) == (8, 8, {})
    assert [score.count for score in answers.scores] == [8] * len(answers.scores)
    assert {score.value for score in answers.scores} == {1}


def test_unnamed_images_stay_in_the_gallery(album):
    gallery = album.gallery("de")
    assert len(gallery.captions) == 6 and gallery.image_ids.tolist() == [0, 1, 2, 3, 4, 4, 5, -1]
    answers = evaluate_collection(Known(), album, RetrievalOptions(language="de"))
    assert answers.counts == {"images": 8, "captions": 6, "queries": 7, "excluded": {"no text": 1}}
    assert "8 images and 6 captions; queried images: 7, excluded: 1 without a text" in str(answers)
    recall = found(answers, "text→image, recall@1")
    # Two images are named Schloss and both match; five of the six names have one of eight images.
    assert recall.count == 6 and recall.baselines["chance"] == pytest.approx((5 * 1 + 2) / 6 / 8)
    assert found(answers, "image→text, recall@1").count == 7


def test_all_languages_embed_images_once(album):
    known = Known(wrong=("Hund", "chien"))
    answers = evaluate_collection(known, album, RetrievalOptions(all_languages=True))
    assert known.num_images == 1 and len(answers.scores) == 2 * 3
    values = {language: found(answers, "text→image, recall@1", language=language) for language in ("de", "en", "fr")}
    assert {language: (round(s.value * s.count), s.count) for language, s in values.items()} == {
        "de": (5, 6), "en": (8, 8), "fr": (4, 5)
    }  # fmt: skip
    assert answers.counts["languages"]["fr"]["excluded"] == {"no text": 3}
    assert str(answers) == "3 languages; images excluded from the queries: de 1, fr 3"


def test_excluded_categories_stay_in_the_gallery(album):
    # The query for the dog finds the flag of Mali, the end of the rolled row.
    known = Known(wrong=("flag: Mali",))  # finds the dog
    whole, some = (
        evaluate_collection(known, album, RetrievalOptions(exclude_category=without))
        for without in ((), ("flags", "places"))
    )
    assert found(whole, "text→image, recall@1").value == 7 / 8
    recall = found(some, "text→image, recall@1")
    assert (recall.value, recall.count, recall.baselines["chance"]) == (1, 5, pytest.approx(1 / 8))
    assert some.counts["queries"] == 5 and some.counts["excluded"] == {"flags": 2, "places": 1}
    assert found(some, "image→text, recall@1").count == 5
    assert found(some, "image→text, recall@1").baselines["chance"] == pytest.approx(1 / 8)
    assert "2 of flags, 1 of places" in str(some)


def test_scores_per_category(album):
    answers = evaluate_collection(
        Known(wrong=("flag: Mali",)), album, RetrievalOptions(by_category=True, exclude_category=("people",))
    )
    parts = {s.subset["category"]: s for s in answers.scores if s.name == "text→image, recall@1" and s.subset}
    assert list(parts) == ["animals", "flags", "objects", "places"]
    assert (parts["flags"].value, parts["flags"].count) == (0.5, 2) and parts["animals"].count == 2
    low, high = parts["flags"].interval
    assert low < 0.5 < high
    assert found(answers, "text→image, recall@1").count == 6
    with pytest.raises(DataError, match="no categories"):
        bare = image_collections.ImageCollection("bare", album.images, [ImageRecord("a", "b", "c", "d")] * 8)
        evaluate_collection(Known(), bare, RetrievalOptions(by_category=True))


def test_shared_names_have_all_categories():
    """Red and blue both have an image named 00: one text query, and one image query per category."""
    shown, result = torch.tensor([0, 0, 1]), torch.tensor([0, 1])
    kinds = torch.tensor([[True, False], [False, True], [True, False]])
    assert text_categories(kinds, shown, result).tolist() == [[True, True], [True, False]]
    text, picture = build_directions(torch.eye(3), torch.tensor([[1.0, 1, 0], [0, 0, 1]]), shown, result, kinds)
    assert [s.count for s in score_directions([text], cutoffs=(1,), with_median=False, categories=["red", "blue"])] == [
        2,
        2,
        1,
    ]
    assert [
        s.count for s in score_directions([picture], cutoffs=(1,), with_median=False, categories=["red", "blue"])
    ] == [3, 2, 1]
    assert [s.count for s in score_directions([text, picture], cutoffs=(1,), with_median=False, excluded=[1])] == [2, 2]
    assert [s.count for s in score_directions([text, picture], cutoffs=(1,), with_median=False, excluded=[0])] == [1, 1]
    with pytest.raises(DataError, match="0 queries"):
        score_directions([text], excluded=[0, 1])


def test_keywords_retrieve_names(album):
    words = album.keywords()
    assert words.phrases == ["pet, woof", "pet, meow", "adult, bro", "building", "closed"]
    assert words.name_ids.tolist() == [0, 1, 2, 2, 3, 4, -1, -1]  # a skin tone has the keywords of its base emoji
    known = Known()
    answers = evaluate_collection(known, album, RetrievalOptions(texts="keywords"))
    assert known.num_images == 0 and answers.counts == {
        "names": 8, "phrases": 5, "queries": 6, "excluded": {"no text": 2}
    }  # fmt: skip
    recall = found(answers, "keywords→name, recall@1")
    assert (recall.value, recall.count) == (1, 5) and recall.baselines["chance"] == pytest.approx((4 * 1 + 2) / 5 / 8)
    few = evaluate_collection(
        known, album, RetrievalOptions(texts="keywords", exclude_category=("people",), by_category=True)
    )
    assert found(few, "keywords→name, recall@1").count == 4
    assert found(few, "keywords→name, recall@1", category="animals").count == 2
    # Images with equal names combine their keywords.
    about = [
        ImageRecord("x", "v", "x", "a", ("1", "2")),
        ImageRecord("y", "v", "y", "a", ("2", "3")),
        ImageRecord("z", "v", "z", "b"),
    ]
    assert image_collections.ImageCollection("t", [0] * 3, about).keywords().phrases == ["1, 2, 3"]
    with pytest.raises(DataError, match="no keywords"):
        image_collections.ImageCollection("t", [0], about[2:]).keywords()


def test_truncated_widths_are_normalised(album):
    x = torch.tensor([[3.0, 4.0, 12.0]])
    torch.testing.assert_close(truncate_embeddings(x, 2), torch.tensor([[0.6, 0.8]]))
    torch.testing.assert_close(truncate_embeddings(x, 3), F.normalize(x, dim=1))
    answers = evaluate_collection(Known(), album, RetrievalOptions(matryoshka_width=(8, 3)))
    wide, narrow = (found(answers, "text→image, recall@1", width=width) for width in (8, 3))
    # Three of eight unit vectors remain; the others are zero and have zero similarity.
    assert wide.value == 1 and narrow.value == 3 / 8
    assert wide.title == "text→image, recall@1, width 8" and wide.as_dict["subset"] == {"width": 8}
    way = RetrievalDirection("x", torch.randn(5, 6), torch.randn(5, 6), torch.arange(5), torch.arange(5))
    assert way.truncate(4).queries.norm(dim=1).allclose(torch.ones(5)) and way.truncate(4).gallery.shape == (5, 4)


@pytest.mark.parametrize(
    ("asking", "error", "match"),
    [
        (RetrievalOptions(language="dee"), ConfigError, "did you mean 'de'"),
        (RetrievalOptions(language="xx"), ConfigError, "known: de, en, fr"),
        (RetrievalOptions(exclude_category=("flag",)), ConfigError, "did you mean 'flags'"),
        (RetrievalOptions(matryoshka_width=(0,)), ConfigError, "set 1 … 8"),
        (RetrievalOptions(matryoshka_width=(9,)), ConfigError, "set 1 … 8"),
        (RetrievalOptions(matryoshka_width=(9,), texts="keywords"), ConfigError, "set 1 … 8"),
        (RetrievalOptions(language="de", all_languages=True), ConfigError, "remove one of the two"),
        (
            RetrievalOptions(exclude_category=("animals", "people", "places", "objects", "flags")),
            DataError,
            "exclude fewer categories",
        ),
    ],
)
def test_invalid_options_raise(asking, error, match, album):
    known = Known()
    with pytest.raises(error, match=match):
        evaluate_collection(known, album, asking)
    assert known.num_images == 0 or "fewer" in match  # before images are embedded


def test_captions_have_no_languages_or_keywords(album):
    result = image_collections.ImageCollection("coco.json", album.images, [], album.gallery())
    assert evaluate_collection(Known(), result, RetrievalOptions()).counts["queries"] == 8
    for asking, match in (
        (RetrievalOptions(language="de"), "captions, not names"),
        (RetrievalOptions(texts="keywords"), "captions, not names"),
        (RetrievalOptions(all_languages=True), "names in one language only"),
        (RetrievalOptions(by_category=True), "no categories"),
    ):
        with pytest.raises(DataError, match=match):
            evaluate_collection(Known(), result, asking)
    with pytest.raises(ConfigError, match="have no categories: remove"):
        evaluate_collection(Known(), result, RetrievalOptions(exclude_category=("flags",)))
