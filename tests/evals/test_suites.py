"""Suites compared with loops, closed forms and pairs with known results."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from evals.test_drawing_judge import NAMES, shapes
from vitrail.data.language import SceneLanguage
from vitrail.data.scenes.scene import COLOURS
from vitrail.data.scenes.scene_source import SceneSource, SceneSourceConfig
from vitrail.errors import ConfigError, DataError
from vitrail.evals.scores import Proportion
from vitrail.evals.suites.compositionality import sample_caption_pairs, sample_image_pairs, score_aro, score_winoground
from vitrail.evals.suites.linear_probe import PENALTIES, fit_classifier, penalized_loss, train_linear_probe
from vitrail.evals.suites.retrieval_metrics import (
    build_directions,
    chance_recall,
    first_match_ranks,
    score_directions,
    score_retrieval,
)
from vitrail.evals.suites.zero_shot import TEMPLATES, evaluate_zero_shot, zero_shot_classifier


def chance(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# ---- by prompt --------------------------------------------------------------------------------------------------


def spelled(texts):
    """(N, 26) letter counts of texts"""
    return torch.stack([torch.tensor([text.lower().count(chr(97 + i)) for i in range(26)]).float() for text in texts])


def test_prompt_embeddings_are_averaged_as_directions():
    names, templates = ["cat", "dog"], ["{}", "one {} here"]
    found = zero_shot_classifier(spelled, names, templates)
    for row, name in zip(found, names, strict=True):
        each = [F.normalize(spelled([t.replace("{}", name)])[0], dim=0) for t in templates]
        torch.testing.assert_close(row, F.normalize(sum(each) / 2, dim=0))


@pytest.mark.parametrize(("names", "templates"), [([], TEMPLATES), (["cat"], []), (["cat"], ["a photo"])])
def test_invalid_prompts_raise(names, templates):
    with pytest.raises(ConfigError):
        zero_shot_classifier(spelled, names, templates)


def test_zero_shot_scores_by_hand():
    classes = torch.eye(7)
    labels = torch.tensor([0, 0, 0, 1, 2, 3])
    pictures = classes[[0, 0, 1, 1, 2, 4]] + 0.1 * classes[[1, 1, 0, 0, 0, 3]]  # correct: 0 0 . 1 2 .
    scores = evaluate_zero_shot(pictures, labels, classes, list("abcdefg"))
    top1, top5, *each = scores
    assert (top1.name, top1.value, top1.count) == ("by prompt, top-1", 4 / 6, 6)
    assert top1.interval == Proportion(4, 6).interval
    assert top1.baselines == {"chance": 1 / 7, "majority": 3 / 6}
    assert (top5.value, top5.baselines["chance"], top5.baselines["majority"]) == (1.0, 5 / 7, 1.0)
    assert [(s.name.strip(), round(s.value * s.count), s.count) for s in each] == [
        ("a", 2, 3), ("b", 1, 1), ("c", 1, 1), ("d", 0, 1)
    ]  # fmt: skip
    assert evaluate_zero_shot(pictures, labels, classes, list("abcdefg"), zero_shot=True)[0].name == "zero-shot, top-1"
    with pytest.raises(DataError):
        evaluate_zero_shot(pictures, labels + 4, classes, list("abcdefg"))


# ---- retrieval --------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(st.integers(1, 12), st.integers(1, 15), st.integers(1, 5), st.integers(1, 9), st.integers(0, 999))
def test_ranks_match_a_sorted_list(Q, G, kinds, tile, seed):
    draw = chance(seed)
    held = torch.randint(kinds, (G,), generator=draw)
    asked = held[torch.randint(G, (Q,), generator=draw)]
    # Small integers: exact products in any tile, and many ties.
    queries, gallery = (torch.randint(-2, 3, (n, 3), generator=draw).float() for n in (Q, G))
    found = first_match_ranks(queries, gallery, asked, held, tile=tile)
    for q in range(Q):
        score = (gallery @ queries[q]).tolist()
        best = max(s for s, h in zip(score, held, strict=True) if h == asked[q])
        others = [s for s, h in zip(score, held, strict=True) if h != asked[q]]
        assert found[q] == 1 + sum(s > best for s in others) + sum(s == best for s in others) / 2


def test_constant_embeddings_are_at_chance():
    one, ids = torch.ones(101, 4), torch.arange(101)
    scores = {s.name: s for s in score_retrieval("x", one, one, ids, ids)}
    assert scores["x, recall@1"].value == scores["x, recall@10"].value == 0
    assert scores["x, median rank"].value == scores["x, median rank"].baselines["chance"] == 51


@pytest.mark.parametrize(("G", "r", "k"), list(itertools.product([6], [1, 2, 5], [1, 3, 5])))
def test_chance_recall_matches_enumeration(G, r, k):
    orders = list(itertools.combinations(range(G), r))  # positions of matches
    assert chance_recall(torch.tensor([r]), G, k) == pytest.approx(sum(min(o) < k for o in orders) / len(orders))


def test_intervals_cover_the_value_and_are_deterministic():
    """Queries succeed with a fixed probability: 95 % of the intervals contain it."""
    held = 0
    for seed in range(16):
        ids = torch.arange(60)
        gallery = torch.eye(60)
        miss = torch.rand(60, generator=chance(seed)) < 0.4
        queries = torch.where(miss[:, None], gallery.roll(1, 0), gallery)
        score = score_retrieval("x", queries, gallery, ids, ids)[0]
        assert score.value == pytest.approx(1 - float(miss.double().mean()))
        low, high = score.interval
        held += low <= 0.6 <= high
        assert low < score.value < high
    assert held >= 13
    assert score == score_retrieval("x", queries, gallery, ids, ids)[0]


def test_interval_of_perfect_recall_has_width():
    score = score_retrieval("x", torch.eye(8), torch.eye(8), torch.arange(8), torch.arange(8))[0]
    assert score.value == 1 and score.interval == Proportion(8, 8).interval and score.interval[0] < 0.7


def test_bootstrap_groups_captions_of_one_image():
    """The five captions of an image succeed or fail together: the interval is that of the images."""
    gallery, ids = torch.eye(40), torch.arange(40)
    queries = torch.where((ids % 2 == 0)[:, None], gallery, gallery.roll(1, 0))
    alone = score_retrieval("x", queries, gallery, ids, ids)[0]
    five = score_retrieval("x", queries.repeat(5, 1), gallery, ids.repeat(5), ids)[0]
    assert five.interval == pytest.approx(alone.interval) and five.count == 5 * alone.count


def test_all_retrieval_directions():
    pictures, shown = torch.eye(4), torch.arange(4)
    texts, result = torch.eye(4)[[0, 0, 1, 2, 2, 2]], torch.tensor([0, 0, 1, 2, 2, 2])  # no caption of image 3
    scores = score_directions(build_directions(pictures, texts, shown, result))
    of = {s.name: (s.value, s.count) for s in scores if "recall@1" in s.name}
    assert of == {
        "text→image, recall@1": (1, 6),
        "image→text, recall@1": (1, 3),
        "text→text, recall@1": (1, 2),  # images 0 and 2 have a second caption
    }
    with pytest.raises(DataError):
        score_retrieval("x", texts, pictures, result + 9, shown)


# ---- linear probe -----------------------------------------------------------------------------------------------


def blobs(n: int, seed: int, spread: float = 1.0):
    draw = chance(seed)
    y = torch.randint(3, (n,), generator=draw)
    corners = torch.tensor([[2.0, 0, 0, 0], [0, 2, 0, 0], [0, 0, 2, 0]])
    return corners[y] + spread * torch.randn(n, 4, generator=draw), y


@pytest.mark.parametrize("strength", [1.0, 1e-2, 1e-4])
def test_fit_reaches_the_minimum(strength):
    x, y = blobs(200, 0)
    linear = fit_classifier(x.double(), y, 3, strength)
    parts = [part.requires_grad_() for part in linear]
    grads = torch.autograd.grad(penalized_loss(linear, x.double(), y, strength), parts)
    assert max(float(g.norm()) for g in grads) < 1e-5  # the loss is convex with a unique minimum
    # Unpenalised biases reproduce the class frequencies exactly.
    with torch.no_grad():
        mean = linear(x.double()).softmax(1).mean(0)
    torch.testing.assert_close(mean, y.bincount(minlength=3).double() / 200, atol=1e-5, rtol=0)


def test_fit_matches_scikit_learn():
    from sklearn.linear_model import LogisticRegression

    x, y = blobs(200, 0)
    theirs = LogisticRegression(C=1 / (0.01 * 200), tol=1e-10, max_iter=5000).fit(x.numpy(), y.numpy())
    ours = fit_classifier(x.double(), y, 3, 0.01)
    torch.testing.assert_close(ours.weight, torch.from_numpy(theirs.coef_).double(), atol=1e-4, rtol=1e-4)


def test_probe_separates_signal_from_noise():
    (x, y), (u, v) = blobs(600, 1, 0.5), blobs(300, 2, 0.5)
    found = train_linear_probe(x, y, u, v, ("a", "b", "c"))
    assert found.scores[0].value > 0.9 and found.scores[0].count == 300
    assert found.scores[0].baselines == {
        "chance": 1 / 3, "majority": pytest.approx(float((v == y.bincount().argmax()).double().mean()))
    }  # fmt: skip
    assert found.penalty in found.penalty_scores and found.penalty_scores[found.penalty].total == 60
    blind = train_linear_probe(
        torch.randn(600, 4, generator=chance(3)), y, torch.randn(300, 4, generator=chance(4)), v, ("a", "b", "c")
    )
    low, high = blind.scores[0].interval
    assert low < 0.4 and high < 0.5
    with pytest.raises(DataError):
        train_linear_probe(x[:5], y[:5], u, v, ("a", "b", "c"))


def test_constant_features_are_harmless():
    (x, y), (u, v) = blobs(200, 1, 0.5), blobs(100, 2, 0.5)
    with_one = (torch.cat([part, torch.full((len(part), 1), 7.0)], 1) for part in (x, u))
    a, b = next(with_one), next(with_one)
    assert train_linear_probe(a, y, b, v, "abc").scores[0] == train_linear_probe(x, y, u, v, "abc").scores[0]


def test_penalty_search_continues_at_ties():
    """Strong penalties with the majority accuracy do not stop the search."""
    torch.manual_seed(0)
    y = (torch.rand(2000) < 0.1).long()
    x = torch.randn(2000, 8)
    x[:, 0] = y * 0.02 + torch.randn(2000) * 1e-4
    x[::2, 0] += 5  # its standard deviation hides the signal
    x = torch.cat([x, x[:, :1] * 0 + (torch.arange(2000) % 2)[:, None] * 5.0], 1)
    found = train_linear_probe(x[:1500], y[:1500], x[1500:], y[1500:], ["no", "yes"])
    assert len(found.penalty_scores) > 3 and found.scores[0].value > 0.99
    assert all(strength in PENALTIES for strength in found.penalty_scores)


# ---- pairs ------------------------------------------------------------------------------------------------------


def test_winoground_scores_by_hand():
    #                 c0p0 c0p1   c1p0 c1p1
    right = [[[3.0, 1], [2, 4]]]
    text_only = [[[3.0, 5], [2, 6]]]  # each image prefers its caption; caption 0 prefers the wrong image
    image_only = [[[3.0, 2], [4, 5]]]
    tie = [[[1.0, 1], [1, 1]]]
    table = [[s.value for s in score_winoground(torch.tensor(x))] for x in (right, text_only, image_only, tie)]
    assert table == [[1, 1, 1], [1, 0, 0], [0, 1, 0], [0, 0, 0]]


def test_winoground_chance_matches_random_scores():
    scores = score_winoground(torch.rand(40_000, 2, 2, generator=chance(0)))
    assert [s.name for s in scores] == ["text", "image", "group"]
    for score in scores:
        assert score.value == pytest.approx(score.baselines["chance"], abs=0.01)


def test_aro_score_and_blind_baseline():
    true, false = torch.eye(4)[[0, 1, 2, 3]], torch.eye(4)[[1, 0, 3, 2]]
    pictures = torch.eye(4)[[0, 1, 3, 3]]  # the third is wrong
    score = score_aro(pictures, true, false)
    assert (score.value, score.count, score.baselines["chance"]) == (3 / 4, 4, 1 / 2)
    assert score.baselines["blind"] == 1 / 4  # for the mean image only the fourth true caption is nearer


def scenes(preset, **scene) -> tuple[SceneSource, SceneLanguage]:
    config = SceneSourceConfig(atlas="-", preset=preset, scene={"combinations": "all"} | scene, image_size=32, seed=3)
    source = SceneSource(config, shapes())
    return source, SceneLanguage.build(source.atlas.table)


def things(made, names, b):
    """{(colour, name, centre)} of scene b"""
    s = made
    return [
        (COLOURS[int(c)].name, names[int(i)], tuple(xy.tolist()))
        for i, c, xy in zip(s.sprite[b], s.colour[b], s.doubled_centre[b], strict=True)
        if i >= 0
    ]


def test_swapped_colours_match_the_false_caption():
    source, words = scenes("colours")
    table = source.atlas.table
    names = [table.names[c] for c in table.concept.tolist()]
    made = sample_image_pairs(source, words, "colour", 50)
    assert len(made.true) == len(made.false) == len(made.pixels) == len(made.counterpart_pixels) == 50
    for b in range(50):
        here, there = ({f"{c} {n}" for c, n, _ in things(s, names, b)} for s in (made.scenes, made.counterpart_scenes))
        result, untold = ({f"{c.name} {n}" for c in COLOURS[1:] for n in NAMES if f"{c.name} {n}" in text}
                        for text in (made.true[b], made.false[b]))  # fmt: skip
        assert len(result) == len(untold) == 2
        assert result <= here and not result & there and untold <= there and not untold & here
    assert (made.pixels != made.counterpart_pixels).flatten(1).any(1).all()
    torch.testing.assert_close(made.scenes.box, made.counterpart_scenes.box)


def test_swapped_positions_match_the_false_caption():
    source, words = scenes("relations", objects=[2, 2])
    table = source.atlas.table
    names = [table.names[c] for c in table.concept.tolist()]
    made = sample_image_pairs(source, words, "relation", 40)
    side = {"left": (0, -1), "right": (0, 1), "above": (1, -1), "below": (1, 1), "over": (1, -1), "under": (1, 1)}
    read = 0
    for b in range(40):
        for text, shown in ((made.true[b], made.scenes), (made.false[b], made.counterpart_scenes)):
            at = {name: centre for _, name, centre in things(shown, names, b)}
            where = [(text.index(name), name) for name in at]
            if len(at) < 2 or not (axes := [side[w] for w in text.split() if w in side]):
                continue
            first, second = (name for _, name in sorted(where))
            axis, sign = axes[0]
            assert math.copysign(1, at[first][axis] - at[second][axis]) == sign, text
            read += 1
        assert ((made.counterpart_scenes.box[b] >= 0) & (made.counterpart_scenes.box[b] <= 4096)).all()
    assert read >= 20  # objects of one shape differ by colour only, which is not compared here


@pytest.mark.parametrize(("preset", "sort"), [("colours", "colour"), ("relations", "relation"), ("counting", "number")])
def test_swapped_captions_differ_and_vary(preset, sort):
    made = sample_caption_pairs(*scenes(preset), sort, 20)
    assert len(made.true) == len(made.false) == len(made.pixels) == 20 and made.counterpart_pixels is None
    assert all(made.true) and all(a != b for a, b in zip(made.true, made.false, strict=True))


def test_impossible_pairs_raise(monkeypatch):
    monkeypatch.setattr("vitrail.evals.suites.compositionality.MAX_BATCHES", 2)
    with pytest.raises(DataError, match="gave only 0"):
        sample_caption_pairs(*scenes("plain", objects=[1, 1]), "colour", 5)
    with pytest.raises(ConfigError, match="number"):
        sample_image_pairs(*scenes("counting"), "number", 5)
    with pytest.raises(ConfigError):
        sample_caption_pairs(*scenes("plain"), "verbs", 5)
