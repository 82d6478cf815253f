"""Imitation from observation: a handful of labels goes further through latent actions, where these mean something."""

import pytest
import torch

from vitrail.control.imitation import CloneConfig, Policy, acting, clone, translation
from vitrail.data.episodes.policies import Seeker
from vitrail.data.episodes.worlds.pocket import Simulator
from vitrail.errors import ConfigError, DataError
from vitrail.evals.suites.imitation import judge_imitation, play, watch

SMALL = CloneConfig(width=8, rounds=40, batch=32)


def seen(frame) -> torch.Tensor:
    return torch.from_numpy(frame).movedim(-1, 0)


def walked(count: int, side: int = 8) -> list:
    """Episodes of one who knows the way."""
    import numpy as np

    found = []
    for seed in range(count):
        simulator, seeker = Simulator(side), Seeker(np.random.default_rng(seed), wrong=0)
        now, frames, done, ended = simulator.reset(seed), [], [], False
        while not ended:
            frames.append(seen(now["frame"]))
            done.append(int(seeker.act(now)))
            now, _, ended = simulator.step(done[-1])
        found.append((torch.stack([*frames, seen(now["frame"])]), torch.tensor(done)))
    return found


def test_the_seeker_finds_the_coin_by_the_shortest_way():
    episodes = walked(20)
    assert all(len(done) <= 20 for _, done in episodes) and len({len(done) for _, done in episodes}) > 3


def test_a_policy_learns_what_was_done():
    frames = torch.zeros(64, 3, 8, 8, dtype=torch.uint8)
    frames[::2] = 255
    chosen = torch.arange(64) % 2
    policy = clone(frames, chosen, 2, SMALL)
    assert torch.equal(policy(frames).argmax(1), 1 - (frames[:, 0, 0, 0] > 0).long())
    again, other = clone(frames, chosen, 2, SMALL), clone(frames, chosen, 2, SMALL, seed=1)
    assert torch.equal(policy.head.weight, again.head.weight) and not torch.equal(policy.head.weight, other.head.weight)
    assert Policy((3, 20, 33), 5)(torch.zeros(2, 3, 20, 33, dtype=torch.uint8)).shape == (2, 5)


def test_translation_is_what_was_done_where_a_code_was_seen():
    table = translation(torch.tensor([0, 0, 0, 2]), torch.tensor([1, 1, 1, 0]), 3, 2)
    assert torch.allclose(table.sum(1), torch.ones(3))
    assert table[0].argmax() == 1 and table[2].argmax() == 0
    assert torch.allclose(table[1], torch.tensor([0.25, 0.75]))  # never seen: as often as they occur
    policy = clone(torch.zeros(4, 3, 8, 8, dtype=torch.uint8), torch.zeros(4).long(), 3, SMALL)
    assert acting(policy, table)(torch.zeros(1, 3, 8, 8, dtype=torch.uint8))[0].argmax() == 1


def test_episodes_are_played_to_their_end_and_are_the_same_again():
    always = lambda frames: torch.tensor([[0.0, 1.0, 0.0, 0.0]])  # noqa: E731
    sums = play(Simulator(8), always, range(40), 10)
    assert torch.equal(sums, play(Simulator(8), always, range(40), 10)) and set(sums.tolist()) == {0.0, 1.0}


def test_an_action_lasts_as_it_did_in_what_was_watched():
    """Two steps a choice go as far as twice the choices, and stop at the end."""
    always = lambda frames: torch.tensor([[0.0, 1.0, 0.0, 0.0]])  # noqa: E731
    once, twice = play(Simulator(8), always, range(40), 4), play(Simulator(8), always, range(40), 2, repeat=2)
    assert torch.equal(once, twice) and not torch.equal(once, play(Simulator(8), always, range(40), 2))


def test_chance_of_acting_is_not_that_of_the_level():
    """A level drawn from the same stream would say what will be done in it."""
    import numpy as np

    class Level:
        def reset(self, seed):
            self.first = int(np.random.default_rng(seed).choice(4, p=[0.25] * 4))
            return {"frame": np.zeros((8, 8, 3), np.uint8)}

        def step(self, action):
            return {}, float(action == self.first), True

    sums = play(Level(), lambda frames: torch.ones(1, 4), range(200), 1)
    assert 0.1 < sums.mean() < 0.4


def watched(count: int):
    """By codes that are controls under other names, two for each."""
    videos, names = walked(count), torch.tensor([5, 2, 7, 0])
    told = iter([done for _, done in videos])

    def infer(video):
        done = next(told)
        assert video.shape[1] == len(done) + 1
        return (names[done] ^ (torch.arange(len(done)) % 2))[None]

    return watch(videos, infer, 8, 4)


def test_every_way_is_played():
    given = watched(8)
    assert len(given.frames) == len(given.codes) == len(given.controls) and given.codes.max() <= 7
    found = judge_imitation(given, Simulator(8), (4, 9), config=SMALL.with_(rounds=2), seeds=2, episodes=3, steps=4)
    assert [row.labels for row in found] == [0, len(given.frames), 4, 4, 9, 9]
    assert all(row.returns.of == row.success.of == 6 for row in found)
    assert all(row.success.interval[0] < row.success.interval[1] for row in found)  # none is sure, at 0 and 1 neither


@pytest.mark.slow
def test_latent_actions_make_a_handful_of_labels_go_further():
    given, config = watched(150), CloneConfig(width=16, rounds=500)
    found = judge_imitation(given, Simulator(8), (16,), config=config, seeds=1, episodes=60, steps=25)
    success = {row.name: row.success for row in found}
    assert success["through latent actions"].interval[0] > success["cloning the labels"].interval[1]


def test_what_cannot_be_is_refused():
    watched = watch(walked(2), lambda video: torch.zeros(1, video.shape[1] - 1).long(), 8, 4)
    with pytest.raises(DataError, match="labelled steps"):
        judge_imitation(watched, Simulator(8), (10_000,))
    with pytest.raises(DataError, match="nothing was done"):
        watch([(torch.zeros(1, 3, 8, 8), torch.zeros(0))], lambda video: video, 8, 4)
    with pytest.raises(DataError, match="0 frames"):
        clone(torch.zeros(0, 3, 8, 8), torch.zeros(0), 4)
    with pytest.raises(DataError, match="at least one step"):
        translation(torch.zeros(0).long(), torch.zeros(0).long(), 8, 4)
    with pytest.raises(ConfigError, match="a policy of"):
        CloneConfig(rounds=0)
