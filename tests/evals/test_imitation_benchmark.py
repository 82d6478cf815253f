"""Imitation benchmark: latent actions improve policies with few labels."""

import pytest
import torch

from vitrail.control.behavior_cloning import (
    BehaviorCloningConfig,
    ConvPolicy,
    build_action_fn,
    estimate_action_map,
    train_behavior_cloning,
)
from vitrail.data.episodes.policies import PocketPolicy
from vitrail.data.episodes.worlds.pocket import Simulator
from vitrail.errors import ConfigError, DataError
from vitrail.evals.suites.imitation_benchmark import evaluate_imitation, label_demonstrations, play_episodes

SMALL = BehaviorCloningConfig(width=8, steps=40, batch_size=32)


def seen(frame) -> torch.Tensor:
    return torch.from_numpy(frame).movedim(-1, 0)


def walked(count: int, side: int = 8) -> list:
    """Episodes of an expert."""
    import numpy as np

    found = []
    for seed in range(count):
        simulator, seeker = Simulator(side), PocketPolicy(np.random.default_rng(seed), error_probability=0)
        now, frames, done, ended = simulator.reset(seed), [], [], False
        while not ended:
            frames.append(seen(now["frame"]))
            done.append(int(seeker.select_action(now)))
            now, _, ended = simulator.step(done[-1])
        found.append((torch.stack([*frames, seen(now["frame"])]), torch.tensor(done)))
    return found


def test_expert_takes_the_shortest_path():
    episodes = walked(20)
    assert all(len(done) <= 20 for _, done in episodes) and len({len(done) for _, done in episodes}) > 3


def test_clone_learns_the_demonstrated_actions():
    frames = torch.zeros(64, 3, 8, 8, dtype=torch.uint8)
    frames[::2] = 255
    chosen = torch.arange(64) % 2
    policy = train_behavior_cloning(frames, chosen, 2, SMALL)
    assert torch.equal(policy(frames).argmax(1), 1 - (frames[:, 0, 0, 0] > 0).long())
    again, other = (
        train_behavior_cloning(frames, chosen, 2, SMALL),
        train_behavior_cloning(frames, chosen, 2, SMALL, seed=1),
    )
    assert torch.equal(policy.head.weight, again.head.weight) and not torch.equal(policy.head.weight, other.head.weight)
    assert ConvPolicy((3, 20, 33), 5)(torch.zeros(2, 3, 20, 33, dtype=torch.uint8)).shape == (2, 5)


def test_translation_counts_controls_per_code():
    table = estimate_action_map(torch.tensor([0, 0, 0, 2]), torch.tensor([1, 1, 1, 0]), 3, 2)
    assert torch.allclose(table.sum(1), torch.ones(3))
    assert table[0].argmax() == 1 and table[2].argmax() == 0
    assert torch.allclose(table[1], torch.tensor([0.25, 0.75]))  # unseen codes: frequencies of the controls
    policy = train_behavior_cloning(torch.zeros(4, 3, 8, 8, dtype=torch.uint8), torch.zeros(4).long(), 3, SMALL)
    assert build_action_fn(policy, table)(torch.zeros(1, 3, 8, 8, dtype=torch.uint8))[0].argmax() == 1


def test_episodes_end_and_are_reproducible():
    always = lambda frames: torch.tensor([[0.0, 1.0, 0.0, 0.0]])  # noqa: E731
    sums = play_episodes(Simulator(8), always, range(40), 10)
    assert torch.equal(sums, play_episodes(Simulator(8), always, range(40), 10)) and set(sums.tolist()) == {0.0, 1.0}


def test_actions_are_repeated_as_in_the_demonstrations():
    """Repeating each action twice moves as far as twice the actions, and stops at the end."""
    always = lambda frames: torch.tensor([[0.0, 1.0, 0.0, 0.0]])  # noqa: E731
    once, twice = (
        play_episodes(Simulator(8), always, range(40), 4),
        play_episodes(Simulator(8), always, range(40), 2, action_repeat=2),
    )
    assert torch.equal(once, twice) and not torch.equal(once, play_episodes(Simulator(8), always, range(40), 2))


def test_action_sampling_is_independent_of_the_level():
    """Level and action sampling use separate random streams."""
    import numpy as np

    class Level:
        def reset(self, seed):
            self.first = int(np.random.default_rng(seed).choice(4, p=[0.25] * 4))
            return {"frame": np.zeros((8, 8, 3), np.uint8)}

        def step(self, action):
            return {}, float(action == self.first), True

    sums = play_episodes(Level(), lambda frames: torch.ones(1, 4), range(200), 1)
    assert 0.1 < sums.mean() < 0.4


def watched(count: int):
    """Latent actions that are permuted controls, two per control."""
    videos, names = walked(count), torch.tensor([5, 2, 7, 0])
    result = iter([done for _, done in videos])

    def infer(video):
        done = next(result)
        assert video.shape[1] == len(done) + 1
        return (names[done] ^ (torch.arange(len(done)) % 2))[None]

    return label_demonstrations(videos, infer, 8, 4)


def test_all_policies_are_evaluated():
    given = watched(8)
    assert len(given.frames) == len(given.codes) == len(given.controls) and given.codes.max() <= 7
    found = evaluate_imitation(
        given, Simulator(8), (4, 9), config=SMALL.replace(steps=2), num_seeds=2, num_episodes=3, max_steps=4
    )
    assert [row.num_labels for row in found] == [0, len(given.frames), 4, 4, 9, 9]
    assert all(row.returns.count == row.success.total == 6 for row in found)
    assert all(row.success.interval[0] < row.success.interval[1] for row in found)  # no probability is exactly 0 or 1


@pytest.mark.slow
def test_latent_actions_improve_few_label_policies():
    given, config = watched(150), BehaviorCloningConfig(width=16, steps=500)
    found = evaluate_imitation(given, Simulator(8), (16,), config=config, num_seeds=1, num_episodes=60, max_steps=25)
    success = {row.name: row.success for row in found}
    assert success["through latent actions"].interval[0] > success["cloning the labels"].interval[1]


def test_invalid_arguments_raise():
    watched = label_demonstrations(walked(2), lambda video: torch.zeros(1, video.shape[1] - 1).long(), 8, 4)
    with pytest.raises(DataError, match="labelled steps"):
        evaluate_imitation(watched, Simulator(8), (10_000,))
    with pytest.raises(DataError, match="has an action"):
        label_demonstrations([(torch.zeros(1, 3, 8, 8), torch.zeros(0))], lambda video: video, 8, 4)
    with pytest.raises(DataError, match="0 frames"):
        train_behavior_cloning(torch.zeros(0, 3, 8, 8), torch.zeros(0), 4)
    with pytest.raises(DataError, match="at least one step"):
        estimate_action_map(torch.zeros(0).long(), torch.zeros(0).long(), 8, 4)
    with pytest.raises(ConfigError, match=r"BehaviorCloningConfig\.\w+ is"):
        BehaviorCloningConfig(steps=0)
