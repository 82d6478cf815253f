"""A needle in a haystack of frames: where it lies, what is asked, and what answers score."""

import io
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from data.scenes.conftest import drawn
from vitrail.data.formats import Sample
from vitrail.data.formats.sample import asked
from vitrail.data.scenes.letters import BUILT_IN, word_sprites
from vitrail.data.scenes.sprites import Atlas
from vitrail.errors import ConfigError, DataError
from vitrail.evals.suites import haystacks
from vitrail.evals.suites.needle import depths_of, fits, hidden, place, right, searched

depths = st.one_of(st.fractions(0, 1, max_denominator=1000), st.integers(0, 100).map(lambda percent: percent / 100))


@given(st.integers(1, 5000), depths)
def test_a_needle_is_always_inside_at_its_depth(frames, depth):
    hay = list(range(frames))
    made = hidden(hay, "needle", depth)
    at = made.index("needle")
    assert at == place(frames, depth) and 0 <= at <= frames
    assert len(made) == frames + 1 and made[:at] + made[at + 1 :] == hay
    exact = Fraction(str(depth)) if isinstance(depth, float) else depth
    assert at <= exact * frames < at + 1


@given(st.integers(1, 400), st.integers(1, 60))
def test_depths_go_from_one_end_to_the_other(frames, count):
    found = [place(frames, depth) for depth in depths_of(count)]
    assert len(found) == count and found == sorted(found)
    assert found == [frames // 2] if count == 1 else (found[0], found[-1]) == (0, frames)


def test_places_are_those_of_v_niah():
    """`eval_vision_niah.py` goes through these lengths and depths, and puts the needle at int(depth * num_frames)."""
    for frames in range(200, 3001, 200):
        theirs = [int(depth * frames) for depth in np.arange(0, 1 + 0.1, 0.1)]
        assert [place(frames, depth) for depth in depths_of(11)] == theirs


def test_an_answer_begins_with_the_true_one():
    for said in ("Yellow", "yellow.", "Yellow, I think"):
        assert right(said, "Yellow")
    for said in ("", "It is yellow", "yellowish", "blue"):
        assert not right(said, "Yellow")
    assert right("B. University of California", "B") and not right("new", "New York")


def colours(count):
    return [Image.new("RGB", (8, 6), (level, 0, 0)) for level in range(count)]


def needle(colour, answer):
    file = io.BytesIO()
    Image.new("RGB", (4, 4), colour).save(file, "PNG")
    return Sample(id=answer, pictures=(file.getvalue(),), turns=asked(f"Which colour, {answer}?"), answers=(answer,))


def test_the_grid():
    """Who sees the first five frames alone finds what lies there."""
    needles, asked_of = [needle("blue", "blue"), needle("lime", "green"), needle("white", "white")], []

    def ask(frames, question):
        asked_of.append(len(frames))
        assert {frame.size for frame in frames} == {(8, 6)}
        seen = {frame.getpixel((4, 3)) for frame in frames[:5]}
        names = {(0, 0, 255): "blue", (0, 255, 0): "Green.", (255, 255, 255): "white"}
        return next((name for colour, name in names.items() if colour in seen), "blue")

    found = searched(ask, colours, needles, (4, 20), depths_of(3))
    assert len(found.trials) == 2 * (3 + 1) * 3 == len(asked_of)
    assert asked_of == [4] * 3 + [5] * 9 + [20] * 3 + [21] * 9
    values = {score.title: score.value for score in found.scores}
    assert values["needle found, frames 4"] == 1 and values["needle found, frames 20, depth 0%"] == 1
    assert values["needle found, frames 20, depth 50%"] == pytest.approx(1 / 3) == found.share(20, Fraction(1, 2))
    assert values["needle found"] == pytest.approx(14 / 18) and len(found.scores) == 1 + 2 + 6
    for score in found.scores:
        assert score.beside == {"no needle": pytest.approx(1 / 3), "majority": pytest.approx(1 / 3)}
        assert score.interval[0] <= score.value <= score.interval[1]


def test_what_cannot_be_searched_is_said():
    one = needle("blue", "blue")
    for lengths, at, needles in (((), depths_of(2), [one]), ((0,), depths_of(2), [one]), ((4,), depths_of(2), [])):
        with pytest.raises(ConfigError, match="at least one of each"):
            searched(lambda *_: "", colours, needles, lengths, at)
    with pytest.raises(DataError, match="'\\?' has no answer in words"):
        searched(lambda *_: "", colours, [needle("blue", "?")], (4,), depths_of(1))
    for wrong in (lambda: depths_of(0), lambda: place(0, 0.5), lambda: place(4, 1.5)):
        with pytest.raises(ConfigError):
            wrong()

    def count(frames, question):
        if len(frames) > 10:
            raise ConfigError(f"{len(frames)} tokens", "less")
        return len(frames)

    assert fits(count, colours, [one], (8, 4, 8)) == {4: 5, 8: 9}
    with pytest.raises(ConfigError, match="a haystack of 16 frames: 17 tokens"):
        fits(count, colours, [one], (16, 4))


def lettered() -> Atlas:
    """Shapes, and five words in one font."""
    return Atlas.build([*drawn(), *word_sprites(["tea", "red", "ten", "sun", "map"], BUILT_IN[:1])])


def test_scenes_and_words():
    atlas = lettered()
    hay = haystacks.scenes(atlas, "words", 32, 3)
    assert [frame.tobytes() for frame in hay(70)[:5]] == [frame.tobytes() for frame in hay(5)]
    assert {frame.size for frame in hay(5)} == {(32, 32)}
    words = haystacks.words(atlas, 5, 32, 3)
    assert {word.id for word in words} == {"tea", "red", "ten", "sun", "map"} == {word.answers[0] for word in words}
    assert len({word.pictures for word in words}) == 5 and words[0].image().size == (32, 32)
    with pytest.raises(ConfigError, match="6 needles"):
        haystacks.words(atlas, 6, 32, 3)
