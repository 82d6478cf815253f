"""External simulators through a pipe: same results every time, and PushT rendered like its own simulator."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from vitrail.data.episodes import WORLDS, ContinuousActions, EpisodeDataset, RecordConfig, record_episodes
from vitrail.data.episodes import simulators as module
from vitrail.data.episodes.pusht_renderer import render_pusht
from vitrail.data.episodes.recorder import play_episode
from vitrail.data.episodes.simulators import EPISODES_FOLDER, SimulatorProcess, find_python, open_simulator
from vitrail.errors import DataError

EXTERNAL = [name for name, world in WORLDS.items() if world.packages]


@pytest.fixture
def remote_simulator():
    """The pocket world in a separate process."""
    simulator = SimulatorProcess("pocket", Path(sys.executable), EPISODES_FOLDER / "worlds" / "pocket.py", 16)
    yield simulator
    simulator.close()


def test_remote_world_equals_local_world(remote_simulator):
    manifest = RecordConfig(world="pocket", steps=30, image_size=16).build_manifest()
    for number in (0, 3):
        local, remote = (
            play_episode(simulator, manifest, number) for simulator in (open_simulator("pocket", 16), remote_simulator)
        )
        assert np.array_equal(local.frames, remote.frames) and np.array_equal(local.actions, remote.actions)
        assert np.array_equal(local.tracks["labels"], remote.tracks["labels"]) and local.terminated == remote.terminated


def test_error_of_a_stopped_simulator_is_quoted(remote_simulator):
    remote_simulator.reset(0)
    with pytest.raises(DataError, match="the simulator of pocket has stopped: IndexError"):
        remote_simulator.step(99)


def test_missing_package_is_quoted(tmp_path):
    (tmp_path / "world.py").write_text("import a_package_that_nobody_has")
    simulator = SimulatorProcess("strange", Path(sys.executable), tmp_path / "world.py", 16)
    with pytest.raises(DataError, match=r"strange has stopped: ModuleNotFoundError.*a_package_that_nobody_has"):
        simulator.reset(0)
    simulator.close()


def test_hanging_simulator_times_out(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "TIMEOUT_SECONDS", 0.2)
    (tmp_path / "world.py").write_text("import time\ntime.sleep(600)")
    simulator = SimulatorProcess("slow", Path(sys.executable), tmp_path / "world.py", 16)
    with pytest.raises(DataError, match=r"simulator of slow has not responded for 0.2 seconds"):
        simulator.reset(0)
    simulator.close()
    assert simulator.process.returncode


def test_simulator_output_is_ignored(tmp_path):
    source = (EPISODES_FOLDER / "worlds" / "pocket.py").read_text()
    (tmp_path / "loud.py").write_text(source + "\nprint('hello from a library', flush=True)\n")
    simulator = SimulatorProcess("loud", Path(sys.executable), tmp_path / "loud.py", 16)
    assert simulator.reset(0)["frame"].shape == (16, 16, 3)
    simulator.close()


def test_failed_installation_names_the_packages(tmp_path, monkeypatch):
    monkeypatch.setenv("VITRAIL_HOME", str(tmp_path))
    monkeypatch.setattr(module.venv, "create", lambda *args, **options: None)
    failed = subprocess.CompletedProcess([], 1, "", "ERROR: No matching distribution found for vizdoom==1.3.2\n")
    monkeypatch.setattr(module.subprocess, "run", lambda *args, **options: failed)
    with pytest.raises(DataError, match=r"doom needs vizdoom==1.3.2: ERROR: No matching") as error:
        find_python("doom", WORLDS["doom"]._replace(packages=("vizdoom==1.3.2",)))
    assert "pip install vizdoom==1.3.2" in error.value.remedy


def test_interpreter_with_packages_is_used():
    here = f"numpy=={np.__version__}"
    assert find_python("pocket", WORLDS["pocket"]._replace(packages=(here,))) == Path(sys.executable)


@pytest.mark.parametrize("name", WORLDS)
def test_policies_give_valid_actions(name):
    world = WORLDS[name]
    assert "random" in world.policies
    for policy_name, make in world.policies.items():
        rng = np.random.default_rng(0)
        policy = make(rng)
        chosen = []
        for _ in range(200):
            state = rng.uniform(-500, 500, len(world.state_names)).astype(np.float32)
            chosen.append(policy.select_action({"state": state, "labels": rng.integers(0, 4, (64, 64))}))
        actions = np.stack(chosen)
        world.action_space.check_actions(actions)
        if isinstance(world.action_space, ContinuousActions):
            assert (actions.std(0) > 0).all()
        elif policy_name != "seeker":  # which depends on observations
            repeated = (actions[1:] == actions[:-1]).mean()
            assert len(np.unique(actions)) > 2 and repeated > 1 / len(np.unique(actions)) + 0.1  # actions repeat


def test_strolling_policy_statistics():
    def measure(policy_name):
        policy, names = (
            WORLDS["coinrun"].policies[policy_name](np.random.default_rng(0)),
            WORLDS["coinrun"].action_space.names,
        )
        actions = [names[int(policy.select_action({}))] for _ in range(4000)]
        repeated = np.mean([a == b for a, b in itertools.pairwise(actions)])
        return {word: np.mean([word in name for name in actions]) for word in ("left", "right", "up")} | {
            "same": repeated
        }

    strolling, onward = measure("strolling"), measure("onward")
    assert 0.6 < strolling["left"] / strolling["right"] < 0.9 and onward["left"] < onward["right"] / 2
    assert strolling["up"] < 0.2 < 0.4 < onward["up"] and strolling["same"] < onward["same"]
    assert next(iter(WORLDS["coinrun"].policies)) == "onward"  # the default policy must not change


# ---- PushT's pictures -------------------------------------------------------------------------------------------


def test_rendered_objects_match_the_state():
    states = np.array([[100, 300, 400, 150, 0.0], [400, 100, 120, 300, np.pi]], np.float32)
    for side in (64, 96, 512):
        for state, picture in zip(states, render_pusht(states, side), strict=True):
            agent = np.argwhere((picture[..., 2] > 220) & (picture[..., 0] < 100))
            centre = (agent.mean(0)[::-1] + 0.5) * 512 / side
            assert np.abs(centre - state[:2]).max() < 512 / side
            block = np.argwhere(np.abs(picture.astype(int) - (142, 163, 183)).max(2) < 6)
            centre = (block.mean(0)[::-1] + 0.5) * 512 / side
            direction = np.array([-np.sin(state[4]), np.cos(state[4])])
            # Centre of the area of a bar of 120 × 30 and a stem of 30 × 90.
            area = (3600 * 15 + 2700 * 75) / 6300
            assert np.abs(centre - (state[2:4] + area * direction)).max() < 4 + 512 / side


def test_state_of_wrong_shape_is_refused():
    with pytest.raises(DataError, match=r"PushT states have the shape \(3, 4\)"):
        render_pusht(np.zeros((3, 4), np.float32), 96)


def test_rendering_is_independent_within_a_batch():
    rng = np.random.default_rng(0)
    states = rng.uniform(50, 450, (6, 5)).astype(np.float32)
    assert np.array_equal(render_pusht(states, 48)[2:4], render_pusht(states[2:4], 48))


# ---- the simulators themselves ----------------------------------------------------------------------------------


def python_of(name: str) -> Path:
    try:
        return find_python(name, WORLDS[name])
    except DataError as error:
        pytest.skip(error.problem)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", EXTERNAL)
def test_recording_does_not_depend_on_workers(name, tmp_path):
    python_of(name)
    config = RecordConfig(world=name, steps=40)
    for workers in (1, 2):
        record_episodes(config, tmp_path / str(workers), episodes=3, num_workers=workers, quiet=True)
    one, two = (EpisodeDataset(tmp_path / str(workers)) for workers in (1, 2))
    for number in range(3):
        a, b = one[number], two[number]
        assert np.array_equal(a.frames, b.frames) and np.array_equal(a.actions, b.actions)
        assert np.array_equal(a.rewards, b.rewards) and set(a.tracks) == set(WORLDS[name].tracks)
        assert all(np.array_equal(a.tracks[track], b.tracks[track]) for track in a.tracks)
        assert (a.frames[0] != a.frames[-1]).any() and max(a.frames.shape[1:3]) == WORLDS[name].image_size
        if "labels" in a.tracks:
            assert a.tracks["labels"].max() < len(WORLDS[name].label_names)
    assert not np.array_equal(one[0].frames[0], one[1].frames[0])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_pusht_renderer_matches_the_simulator(tmp_path):
    python = python_of("pusht")
    script = """
import sys, gym_pusht, gymnasium, numpy as np
env = gymnasium.make("gym_pusht/PushT-v0", obs_type="state", disable_env_checker=True).unwrapped
states, pictures = [], []
for seed in range(20):
    env.reset(seed=seed)
    states.append(env.get_obs().astype(np.float32))
    pictures.append(env._render())
np.savez(sys.argv[1], states=states, pictures=pictures)
"""
    file = tmp_path / "simulator.npz"
    subprocess.run([python, "-c", script, file], check=True, env={**os.environ, "SDL_VIDEODRIVER": "dummy"})
    expected = np.load(file)
    difference = np.abs(render_pusht(expected["states"], 96).astype(int) - expected["pictures"])  # (T, H, W, 3)
    psnr = 10 * np.log10(255**2 / (difference**2).mean((1, 2, 3)))
    assert psnr.min() > 34  # dB of the worst image
    assert (difference.max(3) > 8).mean() < 0.01  # fraction of visibly different pixels
