"""Worlds as environments: Gymnasium's own checks, the same from the same seed, and many side by side as one."""

import sys
import warnings

import numpy as np
import pytest
import torch

import worlds
from helpers import randomize
from vitrail.control import ImaginedWorld
from vitrail.errors import ConfigError, DataError
from vitrail.generate.rollout import Rollout, RolloutConfig

pytest.importorskip("gymnasium")


def world(**more) -> ImaginedWorld:
    model = worlds.genie(latent=False, layers=2)
    randomize(model)
    starts = torch.randint(0, 256, (4, 8, 8, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return ImaginedWorld(lambda: Rollout(model, RolloutConfig(steps=2)), starts, **more)


def test_gymnasium_checker():
    from gymnasium.utils.env_checker import check_env

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*spec.*")  # it is not registered under a name
        warnings.filterwarnings("ignore", message=".*render.*")
        check_env(world(max_episode_steps=5).create_env(), skip_render_check=True)


def play(env, actions, **given):
    seen = [env.reset(**given)[0]]
    return np.stack(seen + [env.step(action)[0] for action in actions])


def test_seed_determines_the_world():
    env, actions = world().create_env(), [0, 1, 1, 0]
    first, again, other = (play(env, actions, seed=seed) for seed in (1, 1, 2))
    assert first.shape == (5, 8, 8, 3) and first.dtype == np.uint8
    assert np.array_equal(first, again) and not np.array_equal(first, other)
    assert not np.array_equal(play(env, [1, 0, 0, 1], seed=1)[1:], first[1:])
    assert np.array_equal(play(world().create_env(), actions, seed=1), first)  # whoever plays it


def test_environments_are_independent():
    made = world()
    a, b = made.create_env(), made.create_env()
    alone = play(made.create_env(), [0, 1, 0], seed=1)
    seen = [a.reset(seed=1)[0]]
    for action in (0, 1, 0):
        b.reset(seed=7)
        seen.append(a.step(action)[0])
        b.step(1)
    assert np.array_equal(np.stack(seen), alone)


def test_start_image_option():
    made = world()
    env, picture = made.create_env(), np.full((8, 8, 3), 200, np.uint8)
    shown, result = env.reset(seed=0, options={"image": picture})
    wanted = made.create_rollout().start(torch.from_numpy(picture).movedim(-1, 0)[None])
    assert result == {} and np.array_equal(shown, wanted[0].movedim(0, -1).numpy())
    assert np.array_equal(env.render(), shown)
    assert env.reset(seed=0)[1]["start"] in range(4)


def test_truncation_and_rewards():
    env = world(max_episode_steps=3, reward_fn=lambda before, after: after.float().mean((1, 2, 3))).create_env()
    env.reset(seed=0)
    ends = [env.step(1) for _ in range(3)]
    assert [cut for *_, cut, _ in ends] == [False, False, True] and not any(done for _, _, done, _, _ in ends)
    assert all(worth == pytest.approx(shown.mean()) for shown, worth, *_ in ends)


def test_vector_environment():
    made = world(max_episode_steps=2)
    many, pictures = made.create_vector_env(3), made.start_images[:3].movedim(1, -1).numpy()
    assert many.observation_space.shape == (3, 8, 8, 3)
    shown, _ = many.reset(seed=4, options={"images": pictures})
    assert many.observation_space.contains(shown)
    first = many.step(many.action_space.sample())
    assert first[1].shape == (3,) and not first[3].any()
    assert many.step(np.array([0, 1, 0]))[3].all()
    anew = many.step(np.array([0, 1, 0]))  # begins again, whatever is done
    assert not anew[3].any() and "start" in anew[4] and many.step_count == 0
    assert len(many.render()) == 3
    again = [made.create_vector_env(2).reset(seed=9) for _ in range(2)]
    assert np.array_equal(again[0][0], again[1][0])


def test_invalid_inputs_are_refused(monkeypatch):
    made = world()
    for env, actions in ((made.create_env(), 0), (made.create_vector_env(2), np.zeros(2, int))):
        with pytest.raises(ConfigError, match="not reset"):
            env.step(actions)
        with pytest.raises(ConfigError, match="colour"):
            env.reset(options={"colour_jitter": 1})
    with pytest.raises(DataError, match="start images are"):
        made.create_env().reset(options={"image": np.zeros((9, 8, 3), np.uint8)})
    with pytest.raises(ConfigError, match="2 worlds"):
        made.create_vector_env(2).reset(options={"images": np.zeros((3, 8, 8, 3), np.uint8)})
    with pytest.raises(DataError, match="outside"):
        env = made.create_env()
        env.reset()
        env.step(2)
    with pytest.raises(DataError, match="start images are"):
        ImaginedWorld(made.create_rollout, np.zeros((0, 8, 8, 3), np.uint8))
    with pytest.raises(ConfigError, match="max_episode_steps is 0"):
        ImaginedWorld(made.create_rollout, made.start_images.movedim(1, -1), max_episode_steps=0)
    with pytest.raises(ConfigError, match="num_envs is 0"):
        made.create_vector_env(0)
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    monkeypatch.delitem(sys.modules, "vitrail.control.gym_env")
    monkeypatch.delattr("vitrail.control.gym_env")
    with pytest.raises(ConfigError, match=r"vitrail\[sim\]"):
        made.create_env()
