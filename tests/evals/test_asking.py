"""What is asked of a gallery, on a small source whose truth is known: languages, categories, keywords, widths."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from vitrail.data.pictures import READERS, About
from vitrail.errors import ConfigError, DataError
from vitrail.evals.contrastive import narrowed
from vitrail.evals.suites import sets
from vitrail.evals.suites.asking import Asking, ask
from vitrail.evals.suites.retrieval import Way, scored, spread, ways

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
    """Pictures of one colour each."""

    def __len__(self) -> int:
        return len(ROWS)

    def about(self, item: int) -> About:
        name, keywords, category, german, french = ROWS[item]
        labels = {language: text for language, text in (("en", name), ("de", german), ("fr", french)) if text}
        return About(f"toy/{item}", "toy", str(item), name, keywords, category, labels)

    def rgba(self, item: int, side: int | None = None) -> np.ndarray:
        return np.full((side or 8, side or 8, 4), 20 * item, np.uint8)


class Known:
    """Embeds pictures and texts as it is told: row 0 is wrong at every width below 8, all else is right."""

    def __init__(self, wrong: tuple[str, ...] = ()):
        self.wrong, self.looked = wrong, 0

    def images(self, pictures):
        self.looked += 1
        return torch.eye(len(pictures))

    def texts(self, texts):
        columns = [[row[0], row[3], row[4], ", ".join(row[1])] for row in ROWS]
        rows = []
        for text in texts:
            row = torch.tensor([float(text in known) for known in columns])
            rows.append(row.roll(1) if text in self.wrong else row)
        return F.normalize(torch.stack(rows), dim=1)


@pytest.fixture
def album(monkeypatch) -> sets.Album:
    monkeypatch.setitem(READERS, "toy", lambda root: Toy())
    return sets.album("toy", side=4)


def found(answers, name: str, **part):
    (score,) = [score for score in answers.scores if (score.name, dict(score.part)) == (name, part)]
    return score


def test_every_picture_is_in_the_gallery_and_its_name_is_its_caption(album):
    """A skin tone is a picture of its own, with a name of its own."""
    assert album.pictures[2]().shape == (4, 4, 4)
    gallery = album.gallery()
    assert gallery.captions == [row[0] for row in ROWS] and torch.equal(gallery.shown, gallery.told)
    answers = ask(Known(), album, Asking())
    assert (answers.counts["pictures"], answers.counts["asked"], answers.counts["left_out"]) == (8, 8, {})
    assert [score.of for score in answers.scores] == [8] * len(answers.scores)
    assert {score.value for score in answers.scores} == {1}


def test_another_language_leaves_nameless_pictures_in_the_gallery(album):
    gallery = album.gallery("de")
    assert len(gallery.captions) == 6 and gallery.shown.tolist() == [0, 1, 2, 3, 4, 4, 5, -1]
    answers = ask(Known(), album, Asking(language="de"))
    assert answers.counts == {"pictures": 8, "captions": 6, "asked": 7, "left_out": {"no text": 1}}
    assert "8 pictures and 6 captions; pictures asked for: 7, left out: 1 without a text" in str(answers)
    recall = found(answers, "text→image, recall@1")
    # Two pictures are called Schloss, and either will do; five of the six names have one picture of eight.
    assert recall.of == 6 and recall.beside["chance"] == pytest.approx((5 * 1 + 2) / 6 / 8)
    assert found(answers, "image→text, recall@1").of == 7


def test_all_languages_look_at_the_pictures_once(album):
    known = Known(wrong=("Hund", "chien"))
    answers = ask(known, album, Asking(all_languages=True))
    assert known.looked == 1 and len(answers.scores) == 2 * 3
    values = {language: found(answers, "text→image, recall@1", language=language) for language in ("de", "en", "fr")}
    assert {language: (round(s.value * s.of), s.of) for language, s in values.items()} == {
        "de": (5, 6), "en": (8, 8), "fr": (4, 5)
    }  # fmt: skip
    assert answers.counts["languages"]["fr"]["left_out"] == {"no text": 3}
    assert str(answers) == "3 languages; pictures left out of the queries: de 1, fr 3"


def test_a_category_that_is_not_asked_for_stays_to_be_found(album):
    # What asks for the dog finds the flag of Mali, in which the rolled row ends.
    known = Known(wrong=("flag: Mali",))  # finds the dog
    whole, some = (ask(known, album, Asking(without=without)) for without in ((), ("flags", "places")))
    assert found(whole, "text→image, recall@1").value == 7 / 8
    recall = found(some, "text→image, recall@1")
    assert (recall.value, recall.of, recall.beside["chance"]) == (1, 5, pytest.approx(1 / 8))
    assert some.counts["asked"] == 5 and some.counts["left_out"] == {"flags": 2, "places": 1}
    assert found(some, "image→text, recall@1").of == 5
    assert found(some, "image→text, recall@1").beside["chance"] == pytest.approx(1 / 8)
    assert "2 of flags, 1 of places" in str(some)


def test_each_category_has_a_score_of_its_own(album):
    answers = ask(Known(wrong=("flag: Mali",)), album, Asking(by_category=True, without=("people",)))
    parts = {s.part["category"]: s for s in answers.scores if s.name == "text→image, recall@1" and s.part}
    assert list(parts) == ["animals", "flags", "objects", "places"]
    assert (parts["flags"].value, parts["flags"].of) == (0.5, 2) and parts["animals"].of == 2
    low, high = parts["flags"].interval
    assert low < 0.5 < high
    assert found(answers, "text→image, recall@1").of == 6
    with pytest.raises(DataError, match="of no category"):
        bare = sets.Album("bare", album.pictures, [About("a", "b", "c", "d")] * 8)
        ask(Known(), bare, Asking(by_category=True))


def test_a_shared_name_is_of_all_its_pictures_categories():
    """Red and blue both have a picture called 00: asked for once by text, and once in each category by picture."""
    shown, told = torch.tensor([0, 0, 1]), torch.tensor([0, 1])
    kinds = torch.tensor([[True, False], [False, True], [True, False]])
    assert spread(kinds, shown, told).tolist() == [[True, True], [True, False]]
    text, picture = ways(torch.eye(3), torch.tensor([[1.0, 1, 0], [0, 0, 1]]), shown, told, kinds)
    assert [s.of for s in scored([text], at=(1,), median=False, categories=["red", "blue"])] == [2, 2, 1]
    assert [s.of for s in scored([picture], at=(1,), median=False, categories=["red", "blue"])] == [3, 2, 1]
    assert [s.of for s in scored([text, picture], at=(1,), median=False, leave=[1])] == [2, 2]
    assert [s.of for s in scored([text, picture], at=(1,), median=False, leave=[0])] == [1, 1]
    with pytest.raises(DataError, match="0 queries"):
        scored([text], leave=[0, 1])


def test_keywords_find_names(album):
    words = album.keywords()
    assert words.phrases == ["pet, woof", "pet, meow", "adult, bro", "building", "closed"]
    assert words.held.tolist() == [0, 1, 2, 2, 3, 4, -1, -1]  # a skin tone has the keywords of its base
    known = Known()
    answers = ask(known, album, Asking(texts="keywords"))
    assert known.looked == 0 and answers.counts == {
        "names": 8, "phrases": 5, "asked": 6, "left_out": {"no text": 2}
    }  # fmt: skip
    recall = found(answers, "keywords→name, recall@1")
    assert (recall.value, recall.of) == (1, 5) and recall.beside["chance"] == pytest.approx((4 * 1 + 2) / 5 / 8)
    few = ask(known, album, Asking(texts="keywords", without=("people",), by_category=True))
    assert found(few, "keywords→name, recall@1").of == 4
    assert found(few, "keywords→name, recall@1", category="animals").of == 2
    # Pictures of one name put their keywords together.
    about = [About("x", "v", "x", "a", ("1", "2")), About("y", "v", "y", "a", ("2", "3")), About("z", "v", "z", "b")]
    assert sets.Album("t", [0] * 3, about).keywords().phrases == ["1, 2, 3"]
    with pytest.raises(DataError, match="no keywords"):
        sets.Album("t", [0], about[2:]).keywords()


def test_widths_cut_and_normalise_again(album):
    x = torch.tensor([[3.0, 4.0, 12.0]])
    torch.testing.assert_close(narrowed(x, 2), torch.tensor([[0.6, 0.8]]))
    torch.testing.assert_close(narrowed(x, 3), F.normalize(x, dim=1))
    answers = ask(Known(), album, Asking(widths=(8, 3)))
    wide, narrow = (found(answers, "text→image, recall@1", width=width) for width in (8, 3))
    # Of eight unit vectors three are left; the others are nothing, and nothing is like nothing.
    assert wide.value == 1 and narrow.value == 3 / 8
    assert wide.title == "text→image, recall@1, width 8" and wide.plain["part"] == {"width": 8}
    way = Way("x", torch.randn(5, 6), torch.randn(5, 6), torch.arange(5), torch.arange(5))
    assert way.narrowed(4).queries.norm(dim=1).allclose(torch.ones(5)) and way.narrowed(4).gallery.shape == (5, 4)


@pytest.mark.parametrize(
    ("asking", "error", "match"),
    [
        (Asking(language="dee"), ConfigError, "did you mean 'de'"),
        (Asking(language="xx"), ConfigError, "known: de, en, fr"),
        (Asking(without=("flag",)), ConfigError, "did you mean 'flags'"),
        (Asking(widths=(0,)), ConfigError, "give 1 … 8"),
        (Asking(widths=(9,)), ConfigError, "give 1 … 8"),
        (Asking(widths=(9,), texts="keywords"), ConfigError, "give 1 … 8"),
        (Asking(language="de", all_languages=True), ConfigError, "leave one of the two out"),
        (Asking(without=("animals", "people", "places", "objects", "flags")), DataError, "leave less out"),
    ],
)
def test_what_cannot_be_asked_is_refused(asking, error, match, album):
    known = Known()
    with pytest.raises(error, match=match):
        ask(known, album, asking)
    assert known.looked == 0 or "less" in match  # before the pictures are looked at


def test_captions_have_no_languages_and_no_keywords(album):
    told = sets.Album("coco.json", album.pictures, [], album.gallery())
    assert ask(Known(), told, Asking()).counts["asked"] == 8
    for asking, match in (
        (Asking(language="de"), "captions, not names"),
        (Asking(texts="keywords"), "captions, not names"),
        (Asking(all_languages=True), "no other language"),
        (Asking(by_category=True), "no category"),
    ):
        with pytest.raises(DataError, match=match):
            ask(Known(), told, asking)
    with pytest.raises(ConfigError, match="of no category: leave it out"):
        ask(Known(), told, Asking(without=("flags",)))
