"""Simulators of others: asked through a pipe, the same every time, and PushT drawn as its own simulator draws it."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from vitrail.data.episodes import WORLDS, Dials, Episodes, RecordConfig, record
from vitrail.data.episodes import remote as module
from vitrail.data.episodes.draw import draw_pusht
from vitrail.data.episodes.record import play
from vitrail.data.episodes.remote import HERE, Remote, open_simulator, python_with
from vitrail.errors import DataError

ABROAD = [name for name, world in WORLDS.items() if world.packages]


@pytest.fixture
def away():
    """The pocket world behind a pipe."""
    simulator = Remote("pocket", Path(sys.executable), HERE / "worlds" / "pocket.py", 16)
    yield simulator
    simulator.close()


def test_a_world_behind_a_pipe_is_the_world(away):
    manifest = RecordConfig(world="pocket", steps=30, side=16).manifest()
    for number in (0, 3):
        here, there = (play(simulator, manifest, number) for simulator in (open_simulator("pocket", 16), away))
        assert np.array_equal(here.frames, there.frames) and np.array_equal(here.actions, there.actions)
        assert np.array_equal(here.tracks["labels"], there.tracks["labels"]) and here.ended == there.ended


def test_a_simulator_that_stops_is_quoted(away):
    away.reset(0)
    with pytest.raises(DataError, match="the simulator of pocket has stopped: IndexError"):
        away.step(99)


def test_a_simulator_whose_package_is_missing_is_quoted(tmp_path):
    (tmp_path / "world.py").write_text("import a_package_that_nobody_has")
    simulator = Remote("strange", Path(sys.executable), tmp_path / "world.py", 16)
    with pytest.raises(DataError, match=r"strange has stopped: ModuleNotFoundError.*a_package_that_nobody_has"):
        simulator.reset(0)
    simulator.close()


def test_a_simulator_that_does_not_answer_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "PATIENCE", 0.2)
    (tmp_path / "world.py").write_text("import time\ntime.sleep(600)")
    simulator = Remote("slow", Path(sys.executable), tmp_path / "world.py", 16)
    with pytest.raises(DataError, match=r"simulator of slow has not answered for 0.2 seconds"):
        simulator.reset(0)
    simulator.close()
    assert simulator.process.returncode


def test_what_a_simulator_prints_does_no_harm(tmp_path):
    source = (HERE / "worlds" / "pocket.py").read_text()
    (tmp_path / "loud.py").write_text(source + "\nprint('hello from a library', flush=True)\n")
    simulator = Remote("loud", Path(sys.executable), tmp_path / "loud.py", 16)
    assert simulator.reset(0)["frame"].shape == (16, 16, 3)
    simulator.close()


def test_packages_that_cannot_be_had_are_named(tmp_path, monkeypatch):
    monkeypatch.setenv("VITRAIL_HOME", str(tmp_path))
    monkeypatch.setattr(module.venv, "create", lambda *args, **options: None)
    failed = subprocess.CompletedProcess([], 1, "", "ERROR: No matching distribution found for vizdoom==1.3.2\n")
    monkeypatch.setattr(module.subprocess, "run", lambda *args, **options: failed)
    with pytest.raises(DataError, match=r"doom needs vizdoom==1.3.2: ERROR: No matching") as error:
        python_with("doom", WORLDS["doom"]._replace(packages=("vizdoom==1.3.2",)))
    assert "pip install vizdoom==1.3.2" in error.value.remedy


def test_an_interpreter_that_has_the_packages_is_taken():
    here = f"numpy=={np.__version__}"
    assert python_with("pocket", WORLDS["pocket"]._replace(packages=(here,))) == Path(sys.executable)


@pytest.mark.parametrize("name", WORLDS)
def test_every_policy_keeps_to_what_can_be_done(name):
    world = WORLDS[name]
    assert "random" in world.policies
    for named, make in world.policies.items():
        chance = np.random.default_rng(0)
        policy = make(chance)
        acts = []
        for _ in range(200):
            state = chance.uniform(-500, 500, len(world.state)).astype(np.float32)
            acts.append(policy.act({"state": state, "labels": chance.integers(0, 4, (64, 64))}))
        actions = np.stack(acts)
        world.actions.check(actions)
        if isinstance(world.actions, Dials):
            assert (actions.std(0) > 0).all()
        elif named != "seeker":  # which goes by what it sees
            same = (actions[1:] == actions[:-1]).mean()
            assert len(np.unique(actions)) > 2 and same > 1 / len(np.unique(actions)) + 0.1  # it sticks


def test_who_strolls_goes_both_ways_seldom_jumps_and_often_changes_his_mind():
    def shares(named):
        policy, names = WORLDS["coinrun"].policies[named](np.random.default_rng(0)), WORLDS["coinrun"].actions.names
        done = [names[int(policy.act({}))] for _ in range(4000)]
        same = np.mean([a == b for a, b in itertools.pairwise(done)])
        return {word: np.mean([word in name for name in done]) for word in ("left", "right", "up")} | {"same": same}

    strolling, onward = shares("strolling"), shares("onward")
    assert 0.6 < strolling["left"] / strolling["right"] < 0.9 and onward["left"] < onward["right"] / 2
    assert strolling["up"] < 0.2 < 0.4 < onward["up"] and strolling["same"] < onward["same"]
    assert next(iter(WORLDS["coinrun"].policies)) == "onward"  # what was recorded unless told stays what it is


# ---- PushT's pictures -------------------------------------------------------------------------------------------


def test_drawn_things_lie_where_the_state_says():
    states = np.array([[100, 300, 400, 150, 0.0], [400, 100, 120, 300, np.pi]], np.float32)
    for side in (64, 96, 512):
        for state, picture in zip(states, draw_pusht(states, side), strict=True):
            blue = np.argwhere((picture[..., 2] > 220) & (picture[..., 0] < 100))
            middle = (blue.mean(0)[::-1] + 0.5) * 512 / side
            assert np.abs(middle - state[:2]).max() < 512 / side
            slate = np.argwhere(np.abs(picture.astype(int) - (142, 163, 183)).max(2) < 6)
            middle = (slate.mean(0)[::-1] + 0.5) * 512 / side
            turned = np.array([-np.sin(state[4]), np.cos(state[4])])
            # The middle of the area: of a bar 120 × 30 and a stem 30 × 90.
            area = (3600 * 15 + 2700 * 75) / 6300
            assert np.abs(middle - (state[2:4] + area * turned)).max() < 4 + 512 / side


def test_a_state_of_another_shape_is_refused():
    with pytest.raises(DataError, match=r"a state of PushT is \(3, 4\)"):
        draw_pusht(np.zeros((3, 4), np.float32), 96)


def test_drawing_part_of_a_batch_is_part_of_drawing_it():
    chance = np.random.default_rng(0)
    states = chance.uniform(50, 450, (6, 5)).astype(np.float32)
    assert np.array_equal(draw_pusht(states, 48)[2:4], draw_pusht(states[2:4], 48))


# ---- the simulators themselves ----------------------------------------------------------------------------------


def python_of(name: str) -> Path:
    try:
        return python_with(name, WORLDS[name])
    except DataError as error:
        pytest.skip(error.problem)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ABROAD)
def test_a_world_is_recorded_the_same_by_others(name, tmp_path):
    python_of(name)
    config = RecordConfig(world=name, steps=40)
    for workers in (1, 2):
        record(config, tmp_path / str(workers), episodes=3, workers=workers, quiet=True)
    one, two = (Episodes(tmp_path / str(workers)) for workers in (1, 2))
    for number in range(3):
        a, b = one[number], two[number]
        assert np.array_equal(a.frames, b.frames) and np.array_equal(a.actions, b.actions)
        assert np.array_equal(a.rewards, b.rewards) and set(a.tracks) == set(WORLDS[name].tracks)
        assert all(np.array_equal(a.tracks[track], b.tracks[track]) for track in a.tracks)
        assert (a.frames[0] != a.frames[-1]).any() and max(a.frames.shape[1:3]) == WORLDS[name].side
        if "labels" in a.tracks:
            assert a.tracks["labels"].max() < len(WORLDS[name].labels)
    assert not np.array_equal(one[0].frames[0], one[1].frames[0])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_pusht_is_drawn_as_its_simulator_draws_it(tmp_path):
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
    file = tmp_path / "theirs.npz"
    subprocess.run([python, "-c", script, file], check=True, env={**os.environ, "SDL_VIDEODRIVER": "dummy"})
    theirs = np.load(file)
    off = np.abs(draw_pusht(theirs["states"], 96).astype(int) - theirs["pictures"])  # (T, H, W, 3)
    likeness = 10 * np.log10(255**2 / (off**2).mean((1, 2, 3)))
    assert likeness.min() > 34  # dB, the least like of all
    assert (off.max(3) > 8).mean() < 0.01  # pixels that can be told apart
