"""The suites' arithmetic, against loops, closed forms and pairs whose truth is known."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from evals.test_judge import NAMES, shapes
from vitrail.data.scenes.scene import COLOURS
from vitrail.data.scenes.source import ScenesConfig, SceneSource
from vitrail.data.words import Words
from vitrail.errors import ConfigError, DataError
from vitrail.evals.shares import Share
from vitrail.evals.suites.pairs import aro, captioned, twins, winoground
from vitrail.evals.suites.probe import STRENGTHS, fit, loss, probe
from vitrail.evals.suites.retrieval import both_ways, by_chance, ranks, retrieval
from vitrail.evals.suites.zeroshot import TEMPLATES, classifier, zeroshot


def chance(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# ---- by prompt --------------------------------------------------------------------------------------------------


def spelled(texts):
    """(N, 26) how often each letter stands in a text"""
    return torch.stack([torch.tensor([text.lower().count(chr(97 + i)) for i in range(26)]).float() for text in texts])


def test_prompts_are_averaged_as_directions():
    names, templates = ["cat", "dog"], ["{}", "one {} here"]
    found = classifier(spelled, names, templates)
    for row, name in zip(found, names, strict=True):
        each = [F.normalize(spelled([t.replace("{}", name)])[0], dim=0) for t in templates]
        torch.testing.assert_close(row, F.normalize(sum(each) / 2, dim=0))


@pytest.mark.parametrize(("names", "templates"), [([], TEMPLATES), (["cat"], []), (["cat"], ["a photo"])])
def test_prompts_that_cannot_be_are_refused(names, templates):
    with pytest.raises(ConfigError):
        classifier(spelled, names, templates)


def test_scores_by_prompt_count_and_name_what_they_are():
    classes = torch.eye(7)
    labels = torch.tensor([0, 0, 0, 1, 2, 3])
    pictures = classes[[0, 0, 1, 1, 2, 4]] + 0.1 * classes[[1, 1, 0, 0, 0, 3]]  # right: 0 0 . 1 2 .
    scores = zeroshot(pictures, labels, classes, list("abcdefg"))
    top1, top5, *each = scores
    assert (top1.name, top1.value, top1.of) == ("by prompt, top-1", 4 / 6, 6)
    assert top1.interval == Share(4, 6).interval
    assert top1.beside == {"chance": 1 / 7, "majority": 3 / 6}
    assert (top5.value, top5.beside["chance"], top5.beside["majority"]) == (1.0, 5 / 7, 1.0)
    assert [(s.name.strip(), round(s.value * s.of), s.of) for s in each] == [
        ("a", 2, 3), ("b", 1, 1), ("c", 1, 1), ("d", 0, 1)
    ]  # fmt: skip
    assert zeroshot(pictures, labels, classes, list("abcdefg"), unseen=True)[0].name == "zero-shot, top-1"
    with pytest.raises(DataError):
        zeroshot(pictures, labels + 4, classes, list("abcdefg"))


# ---- retrieval --------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(st.integers(1, 12), st.integers(1, 15), st.integers(1, 5), st.integers(1, 9), st.integers(0, 999))
def test_ranks_are_those_of_a_sorted_list(Q, G, kinds, tile, seed):
    draw = chance(seed)
    held = torch.randint(kinds, (G,), generator=draw)
    asked = held[torch.randint(G, (Q,), generator=draw)]
    # Small whole numbers: products are exact in any tile, and ties are many.
    queries, gallery = (torch.randint(-2, 3, (n, 3), generator=draw).float() for n in (Q, G))
    found = ranks(queries, gallery, asked, held, tile=tile)
    for q in range(Q):
        score = (gallery @ queries[q]).tolist()
        best = max(s for s, h in zip(score, held, strict=True) if h == asked[q])
        others = [s for s, h in zip(score, held, strict=True) if h != asked[q]]
        assert found[q] == 1 + sum(s > best for s in others) + sum(s == best for s in others) / 2


def test_a_model_that_sees_no_difference_is_at_chance():
    one, ids = torch.ones(101, 4), torch.arange(101)
    scores = {s.name: s for s in retrieval("x", one, one, ids, ids)}
    assert scores["x, recall@1"].value == scores["x, recall@10"].value == 0
    assert scores["x, median rank"].value == scores["x, median rank"].beside["chance"] == 51


@pytest.mark.parametrize(("G", "r", "k"), list(itertools.product([6], [1, 2, 5], [1, 3, 5])))
def test_chance_is_that_of_all_orders(G, r, k):
    orders = list(itertools.combinations(range(G), r))  # places of what belongs
    assert by_chance(torch.tensor([r]), G, k) == pytest.approx(sum(min(o) < k for o in orders) / len(orders))


def test_intervals_hold_the_truth_and_are_the_same_twice():
    """Queries that succeed by a coin: 95 % of the intervals hold the coin's bias."""
    held = 0
    for seed in range(16):
        ids = torch.arange(60)
        gallery = torch.eye(60)
        miss = torch.rand(60, generator=chance(seed)) < 0.4
        queries = torch.where(miss[:, None], gallery.roll(1, 0), gallery)
        score = retrieval("x", queries, gallery, ids, ids)[0]
        assert score.value == pytest.approx(1 - float(miss.double().mean()))
        low, high = score.interval
        held += low <= 0.6 <= high
        assert low < score.value < high
    assert held >= 13
    assert score == retrieval("x", queries, gallery, ids, ids)[0]


def test_all_right_is_not_beyond_doubt():
    score = retrieval("x", torch.eye(8), torch.eye(8), torch.arange(8), torch.arange(8))[0]
    assert score.value == 1 and score.interval == Share(8, 8).interval and score.interval[0] < 0.7


def test_captions_of_one_picture_stand_and_fall_together():
    """Each picture's five captions succeed or fail as one: the interval is that of the pictures."""
    gallery, ids = torch.eye(40), torch.arange(40)
    queries = torch.where((ids % 2 == 0)[:, None], gallery, gallery.roll(1, 0))
    alone = retrieval("x", queries, gallery, ids, ids)[0]
    five = retrieval("x", queries.repeat(5, 1), gallery, ids.repeat(5), ids)[0]
    assert five.interval == pytest.approx(alone.interval) and five.of == 5 * alone.of


def test_both_ways_and_text_to_text():
    pictures, shown = torch.eye(4), torch.arange(4)
    texts, told = torch.eye(4)[[0, 0, 1, 2, 2, 2]], torch.tensor([0, 0, 1, 2, 2, 2])  # nothing of picture 3
    of = {s.name: (s.value, s.of) for s in both_ways(pictures, texts, shown, told) if "recall@1" in s.name}
    assert of == {
        "text→image, recall@1": (1, 6),
        "image→text, recall@1": (1, 3),
        "text→text, recall@1": (1, 2),  # pictures 0 and 2 have a second caption
    }
    with pytest.raises(DataError):
        retrieval("x", texts, pictures, told + 9, shown)


# ---- linear probe -----------------------------------------------------------------------------------------------


def blobs(n: int, seed: int, spread: float = 1.0):
    draw = chance(seed)
    y = torch.randint(3, (n,), generator=draw)
    corners = torch.tensor([[2.0, 0, 0, 0], [0, 2, 0, 0], [0, 0, 2, 0]])
    return corners[y] + spread * torch.randn(n, 4, generator=draw), y


@pytest.mark.parametrize("strength", [1.0, 1e-2, 1e-4])
def test_a_fit_is_the_minimum(strength):
    x, y = blobs(200, 0)
    linear = fit(x.double(), y, 3, strength)
    parts = [part.requires_grad_() for part in linear]
    grads = torch.autograd.grad(loss(linear, x.double(), y, strength), parts)
    assert max(float(g.norm()) for g in grads) < 1e-5  # the loss is convex: nowhere else is it as low
    # Free biases reproduce the classes' shares exactly, whatever the penalty.
    with torch.no_grad():
        mean = linear(x.double()).softmax(1).mean(0)
    torch.testing.assert_close(mean, y.bincount(minlength=3).double() / 200, atol=1e-5, rtol=0)


def test_a_fit_is_scikit_learns():
    from sklearn.linear_model import LogisticRegression

    x, y = blobs(200, 0)
    theirs = LogisticRegression(C=1 / (0.01 * 200), tol=1e-10, max_iter=5000).fit(x.numpy(), y.numpy())
    ours = fit(x.double(), y, 3, 0.01)
    torch.testing.assert_close(ours.weight, torch.from_numpy(theirs.coef_).double(), atol=1e-4, rtol=1e-4)


def test_a_probe_finds_what_is_there_and_nothing_else():
    (x, y), (u, v) = blobs(600, 1, 0.5), blobs(300, 2, 0.5)
    found = probe(x, y, u, v, ("a", "b", "c"))
    assert found.scores[0].value > 0.9 and found.scores[0].of == 300
    assert found.scores[0].beside == {
        "chance": 1 / 3, "majority": pytest.approx(float((v == y.bincount().argmax()).double().mean()))
    }  # fmt: skip
    assert found.strength in found.tried and found.tried[found.strength].of == 60
    blind = probe(
        torch.randn(600, 4, generator=chance(3)), y, torch.randn(300, 4, generator=chance(4)), v, ("a", "b", "c")
    )
    low, high = blind.scores[0].interval
    assert low < 0.4 and high < 0.5
    with pytest.raises(DataError):
        probe(x[:5], y[:5], u, v, ("a", "b", "c"))


def test_a_feature_that_never_changes_does_no_harm():
    (x, y), (u, v) = blobs(200, 1, 0.5), blobs(100, 2, 0.5)
    with_one = (torch.cat([part, torch.full((len(part), 1), 7.0)], 1) for part in (x, u))
    a, b = next(with_one), next(with_one)
    assert probe(a, y, b, v, "abc").scores[0] == probe(x, y, u, v, "abc").scores[0]


def test_a_probe_does_not_stop_at_ties():
    """Strong penalties that all leave the commonest answer say nothing of weaker ones."""
    torch.manual_seed(0)
    y = (torch.rand(2000) < 0.1).long()
    x = torch.randn(2000, 8)
    x[:, 0] = y * 0.02 + torch.randn(2000) * 1e-4
    x[::2, 0] += 5  # its deviation hides what it says
    x = torch.cat([x, x[:, :1] * 0 + (torch.arange(2000) % 2)[:, None] * 5.0], 1)
    found = probe(x[:1500], y[:1500], x[1500:], y[1500:], ["no", "yes"])
    assert len(found.tried) > 3 and found.scores[0].value > 0.99
    assert all(strength in STRENGTHS for strength in found.tried)


# ---- pairs ------------------------------------------------------------------------------------------------------


def test_winoground_scores_by_hand():
    #                 c0p0 c0p1   c1p0 c1p1
    right = [[[3.0, 1], [2, 4]]]
    text_only = [[[3.0, 5], [2, 6]]]  # each picture prefers its caption; caption 0 prefers the wrong picture
    image_only = [[[3.0, 2], [4, 5]]]
    tie = [[[1.0, 1], [1, 1]]]
    table = [[s.value for s in winoground(torch.tensor(x))] for x in (right, text_only, image_only, tie)]
    assert table == [[1, 1, 1], [1, 0, 0], [0, 1, 0], [0, 0, 0]]


def test_winoground_chance_is_that_of_random_numbers():
    scores = winoground(torch.rand(40_000, 2, 2, generator=chance(0)))
    assert [s.name for s in scores] == ["text", "image", "group"]
    for score in scores:
        assert score.value == pytest.approx(score.beside["chance"], abs=0.01)


def test_aro_counts_and_says_what_words_alone_give():
    true, false = torch.eye(4)[[0, 1, 2, 3]], torch.eye(4)[[1, 0, 3, 2]]
    pictures = torch.eye(4)[[0, 1, 3, 3]]  # the third is wrong
    score = aro(pictures, true, false)
    assert (score.value, score.of, score.beside["chance"]) == (3 / 4, 4, 1 / 2)
    assert score.beside["blind"] == 1 / 4  # of the mean picture only the fourth true caption is the nearer


def scenes(preset, **scene) -> tuple[SceneSource, Words]:
    config = ScenesConfig(atlas="-", preset=preset, scene={"combinations": "all"} | scene, side=32, seed=3)
    source = SceneSource(config, shapes())
    return source, Words.of(source.atlas.table)


def things(made, names, b):
    """{(colour, name, centre)} of scene b"""
    s = made
    return [
        (COLOURS[int(c)].name, names[int(i)], tuple(xy.tolist()))
        for i, c, xy in zip(s.sprite[b], s.colour[b], s.centre[b], strict=True)
        if i >= 0
    ]


def test_exchanged_colours_make_the_false_caption_true():
    source, words = scenes("colours")
    table = source.atlas.table
    names = [table.names[c] for c in table.concept.tolist()]
    made = twins(source, words, "colour", 50)
    assert len(made.true) == len(made.false) == len(made.pixels) == len(made.other) == 50
    for b in range(50):
        here, there = ({f"{c} {n}" for c, n, _ in things(s, names, b)} for s in (made.scenes, made.others))
        told, untold = ({f"{c.name} {n}" for c in COLOURS[1:] for n in NAMES if f"{c.name} {n}" in text}
                        for text in (made.true[b], made.false[b]))  # fmt: skip
        assert len(told) == len(untold) == 2
        assert told <= here and not told & there and untold <= there and not untold & here
    assert (made.pixels != made.other).flatten(1).any(1).all()
    torch.testing.assert_close(made.scenes.box, made.others.box)


def test_exchanged_places_make_the_false_caption_true():
    source, words = scenes("relations", objects=[2, 2])
    table = source.atlas.table
    names = [table.names[c] for c in table.concept.tolist()]
    made = twins(source, words, "relation", 40)
    side = {"left": (0, -1), "right": (0, 1), "above": (1, -1), "below": (1, 1), "over": (1, -1), "under": (1, 1)}
    read = 0
    for b in range(40):
        for text, shown in ((made.true[b], made.scenes), (made.false[b], made.others)):
            at = {name: centre for _, name, centre in things(shown, names, b)}
            where = [(text.index(name), name) for name in at]
            if len(at) < 2 or not (axes := [side[w] for w in text.split() if w in side]):
                continue
            first, second = (name for _, name in sorted(where))
            axis, sign = axes[0]
            assert math.copysign(1, at[first][axis] - at[second][axis]) == sign, text
            read += 1
        assert ((made.others.box[b] >= 0) & (made.others.box[b] <= 4096)).all()
    assert read >= 20  # two of one shape are told apart by colour, and not read here


@pytest.mark.parametrize(("preset", "sort"), [("colours", "colour"), ("relations", "relation"), ("counting", "number")])
def test_captions_differ_and_are_many(preset, sort):
    made = captioned(*scenes(preset), sort, 20)
    assert len(made.true) == len(made.false) == len(made.pixels) == 20 and made.other is None
    assert all(made.true) and all(a != b for a, b in zip(made.true, made.false, strict=True))


def test_pairs_that_cannot_be_made_are_refused(monkeypatch):
    monkeypatch.setattr("vitrail.evals.suites.pairs.PATIENCE", 2)
    with pytest.raises(DataError, match="gave 0 pairs"):
        captioned(*scenes("plain", objects=[1, 1]), "colour", 5)
    with pytest.raises(ConfigError, match="number"):
        twins(*scenes("counting"), "number", 5)
    with pytest.raises(ConfigError):
        captioned(*scenes("plain"), "verbs", 5)
