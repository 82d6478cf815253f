"""Needle search: positions, prompts and scores."""

import io
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from data.scenes.conftest import drawn
from vitrail.data.formats import Sample
from vitrail.data.formats.sample import build_question_turns
from vitrail.data.scenes.atlas import Atlas
from vitrail.data.scenes.word_sprites import BUILT_IN_FONTS, draw_word_sprites
from vitrail.errors import ConfigError, DataError
from vitrail.evals.suites import haystack_sources
from vitrail.evals.suites.needle_search import (
    answer_starts_with,
    count_prompt_tokens,
    insert_needle,
    needle_index,
    run_needle_search,
    spread_depths,
)

depths = st.one_of(st.fractions(0, 1, max_denominator=1000), st.integers(0, 100).map(lambda percent: percent / 100))


@given(st.integers(1, 5000), depths)
def test_needles_are_inserted_at_their_depth(frames, depth):
    hay = list(range(frames))
    made = insert_needle(hay, "needle", depth)
    at = made.index("needle")
    assert at == needle_index(frames, depth) and 0 <= at <= frames
    assert len(made) == frames + 1 and made[:at] + made[at + 1 :] == hay
    exact = Fraction(str(depth)) if isinstance(depth, float) else depth
    assert at <= exact * frames < at + 1


@given(st.integers(1, 400), st.integers(1, 60))
def test_depths_span_the_video(frames, count):
    found = [needle_index(frames, depth) for depth in spread_depths(count)]
    assert len(found) == count and found == sorted(found)
    assert found == [frames // 2] if count == 1 else (found[0], found[-1]) == (0, frames)


def test_needle_positions_match_v_niah():
    """`eval_vision_niah.py` uses these lengths and depths, and inserts the needle at int(depth * num_frames)."""
    for frames in range(200, 3001, 200):
        theirs = [int(depth * frames) for depth in np.arange(0, 1 + 0.1, 0.1)]
        assert [needle_index(frames, depth) for depth in spread_depths(11)] == theirs


def test_response_must_start_with_the_answer():
    for output in ("Yellow", "yellow.", "Yellow, I think"):
        assert answer_starts_with(output, "Yellow")
    for output in ("", "It is yellow", "yellowish", "blue"):
        assert not answer_starts_with(output, "Yellow")
    assert answer_starts_with("B. University of California", "B") and not answer_starts_with("new", "New York")


def colours(count):
    return [Image.new("RGB", (8, 6), (level, 0, 0)) for level in range(count)]


def needle(colour, answer):
    file = io.BytesIO()
    Image.new("RGB", (4, 4), colour).save(file, "PNG")
    return Sample(
        id=answer, images=(file.getvalue(),), turns=build_question_turns(f"Which colour, {answer}?"), answers=(answer,)
    )


def test_grid_of_scores():
    """A model that uses the first five frames only finds needles there."""
    needles, asked_of = [needle("blue", "blue"), needle("lime", "green"), needle("white", "white")], []

    def ask(frames, question):
        asked_of.append(len(frames))
        assert {frame.size for frame in frames} == {(8, 6)}
        seen = {frame.getpixel((4, 3)) for frame in frames[:5]}
        names = {(0, 0, 255): "blue", (0, 255, 0): "Green.", (255, 255, 255): "white"}
        return next((name for colour, name in names.items() if colour in seen), "blue")

    found = run_needle_search(ask, colours, needles, (4, 20), spread_depths(3))
    assert len(found.trials) == 2 * (3 + 1) * 3 == len(asked_of)
    assert asked_of == [4] * 3 + [5] * 9 + [20] * 3 + [21] * 9
    values = {score.title: score.value for score in found.scores}
    assert values["needle found, frames 4"] == 1 and values["needle found, frames 20, depth 0%"] == 1
    assert values["needle found, frames 20, depth 50%"] == pytest.approx(1 / 3) == found.accuracy(20, Fraction(1, 2))
    assert values["needle found"] == pytest.approx(14 / 18) and len(found.scores) == 1 + 2 + 6
    for score in found.scores:
        assert score.baselines == {"no needle": pytest.approx(1 / 3), "majority": pytest.approx(1 / 3)}
        assert score.interval[0] <= score.value <= score.interval[1]


def test_invalid_searches_raise():
    one = needle("blue", "blue")
    for lengths, at, needles in (
        ((), spread_depths(2), [one]),
        ((0,), spread_depths(2), [one]),
        ((4,), spread_depths(2), []),
    ):
        with pytest.raises(ConfigError, match="at least one of each"):
            run_needle_search(lambda *_: "", colours, needles, lengths, at)
    with pytest.raises(DataError, match="'\\?' has no text answer"):
        run_needle_search(lambda *_: "", colours, [needle("blue", "?")], (4,), spread_depths(1))
    for wrong in (lambda: spread_depths(0), lambda: needle_index(0, 0.5), lambda: needle_index(4, 1.5)):
        with pytest.raises(ConfigError):
            wrong()

    def count(frames, question):
        if len(frames) > 10:
            raise ConfigError(f"{len(frames)} tokens", "less")
        return len(frames)

    assert count_prompt_tokens(count, colours, [one], (8, 4, 8)) == {4: 5, 8: 9}
    with pytest.raises(ConfigError, match="a haystack of 16 frames: 17 tokens"):
        count_prompt_tokens(count, colours, [one], (16, 4))


def lettered() -> Atlas:
    """Atlas of shapes, and of five words in one font."""
    return Atlas.build([*drawn(), *draw_word_sprites(["tea", "red", "ten", "sun", "map"], BUILT_IN_FONTS[:1])])


def test_scene_haystacks_and_word_needles():
    atlas = lettered()
    hay = haystack_sources.scene_haystack(atlas, "words", 32, 3)
    assert [frame.tobytes() for frame in hay(70)[:5]] == [frame.tobytes() for frame in hay(5)]
    assert {frame.size for frame in hay(5)} == {(32, 32)}
    words = haystack_sources.make_word_needles(atlas, 5, 32, 3)
    assert {word.id for word in words} == {"tea", "red", "ten", "sun", "map"} == {word.answers[0] for word in words}
    assert len({word.images for word in words}) == 5 and words[0].load_image().size == (32, 32)
    with pytest.raises(ConfigError, match="6 word needles"):
        haystack_sources.make_word_needles(atlas, 6, 32, 3)
