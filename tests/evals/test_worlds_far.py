"""Worlds over many frames: what is read back, how far they stray, what passes are worth, and what comes back."""

import pytest
import torch

import worlds
from vitrail.errors import DataError
from vitrail.evals.metrics.worlds import MOST, Pixels, clip_features, decibels
from vitrail.evals.suites import worlds_far as suite
from vitrail.generate.rollout import Rolling


def shown(count=6, frames=17):
    video, actions = worlds.dots(count, frames)
    return ((video + 1) * 127.5).round().to(torch.uint8), actions


def test_equal_frames_have_a_number():
    video, _ = shown(2)
    assert decibels(video[:, 0], video[:, 0]).tolist() == [MOST, MOST]
    assert (decibels(video[:, 0], video[:, 1]) < MOST).all()


def test_clips_are_told_apart_by_what_they_show_and_by_how_it_moves():
    video, _ = shown(4)
    still = video[:, :1].expand_as(video)
    moving, frozen = clip_features(video, Pixels()), clip_features(still, Pixels())
    assert moving.shape == (4, 96) and (frozen[:, 48:] == 0).all() and (moving[:, 48:].sum(1) > 0).all()
    with pytest.raises(DataError, match="two frames"):
        clip_features(video[:, :1], Pixels())


@pytest.mark.filterwarnings("ignore:FD-")
def test_far_is_measured_beyond_the_truth():
    model, (video, actions) = worlds.genie(), shown()
    latent = model.infer(model.codec.pixels(video))
    one, two = (suite.judge_far(model, video, latent, Pixels(), Rolling(steps=1), frames=20) for _ in range(2))
    assert torch.equal(one.drawn, two.drawn) and one.drawn.shape == (6, 20, 3, 8, 8)
    assert [stray.at for stray in one.strayed] == [8, 16, 20]
    assert [stray.psnr is None for stray in one.strayed] == [False, False, True]
    assert one.read.of == 6 and 0 <= one.read.value <= 1 and one.apart.name == "FD-pixels4"
    assert (one.apart.of, one.chance.of) == (6, 3) and all((s.frechet.of, s.halves.of) == (6, 3) for s in one.strayed)
    known = worlds.genie(latent=False)
    assert suite.judge_far(known, video, actions, Pixels(), Rolling(steps=1), frames=8).read is None
    with pytest.raises(DataError, match="videos of"):
        suite.judge_far(model, video[:, :9], latent, Pixels())
    with pytest.raises(DataError, match="4 or more"):
        suite.judge_far(model, video[:3], latent[:3], Pixels())


@pytest.mark.filterwarnings("ignore:FD-")
def test_a_world_that_is_the_truth_is_as_far_away_as_chance(monkeypatch):
    """Of the same videos it is nowhere else; of others, where real clips are."""
    model, (video, actions) = worlds.genie(latent=False), shown(7)
    monkeypatch.setattr(suite, "roll", lambda _, start, *rest, **more: video[:, 1:])
    *_, last = (found := suite.judge_far(model, video, actions, Pixels(), frames=16)).strayed
    assert last.frechet.value < 1e-3 * found.apart.value and last.frechet.interval[1] < 1e-3 * found.apart.value
    assert last.halves == found.chance and found.chance.value > 0


@pytest.mark.filterwarnings("ignore:FD-")
def test_a_world_that_obeys_is_read_back(monkeypatch):
    model, (video, _) = worlds.genie(), shown()
    given = {}

    def remembered(_, start, actions, *rest, **more):
        given["actions"] = actions
        return start[:, None].expand(-1, actions.shape[1], -1, -1, -1)

    monkeypatch.setattr(suite, "roll", remembered)
    monkeypatch.setattr(model, "infer", lambda pixels: given["actions"])
    assert suite._read_back(model, video, None, 0).value == 1


def test_passes_against_quality_against_speed():
    model, (video, actions) = worlds.genie(latent=False), shown()
    found = suite.judge_steps(model, video, actions, (1, 3))
    assert [one.steps for one in found] == [1, 3] and all(one.fps > 0 for one in found)
    assert found[0].psnr.of == 6 and found[0].control.name == "Δpsnr@4"


def test_runs_out_of_sight_are_found():
    seen = [1, 1, 1, 0, 0, 1, 1, 0, 1, 1, 1, 0]  # three before; only one before; never again
    labels = torch.tensor(seen)[:, None, None].expand(-1, 2, 2) * 2
    assert suite.hidden_runs(labels, 2) == [(3, 2)]
    assert suite.hidden_runs(torch.zeros(9, 2, 2), 2) == []


def test_what_comes_back_is_looked_for_where_it_is(monkeypatch):
    """A dot at a corner, two frames behind a curtain, then at another corner; a world that draws it there, and one that
    does not."""
    video = torch.zeros(1, 6, 3, 8, 8, dtype=torch.uint8)
    labels = torch.zeros(1, 6, 8, 8, dtype=torch.uint8)
    for t, at in enumerate((0, 0, 0, None, None, 4)):
        if at is not None:
            video[:, t, :, at : at + 4, at : at + 4], labels[:, t, at : at + 4, at : at + 4] = 255, 2
    model, done = worlds.genie(latent=False), torch.zeros(1, 5, dtype=torch.long)
    monkeypatch.setattr(suite, "roll", lambda _, start, actions, *rest, **more: video[:, -actions.shape[1] :])
    found = suite.judge_permanence(model, video, labels, done, 2)
    assert (found.remembered.hits, found.remembered.of, found.forgetful.hits) == (1, 1, 1)
    assert found.by_length.keys() == {2}
    monkeypatch.setattr(suite, "roll", lambda _, start, actions, *rest, **more: video[:, 3:5])
    assert suite.judge_permanence(model, video, labels, done, 2).remembered.hits == 0
    monkeypatch.undo()
    assert suite.judge_permanence(model, video, labels, done, 2).codec.of == 1  # with a rollout of its own
    assert suite.judge_permanence(model, video, labels, done, 3) is None
