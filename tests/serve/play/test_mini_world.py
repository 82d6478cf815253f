"""The world that ships: small, loaded by its name, and moved by its keys as CoinRun is."""

import pytest
import torch
from torch import Tensor

import vitrail
from vitrail.hub.checkpoint_info import BUNDLED_MODELS_FOLDER
from vitrail.pipelines.controls import list_player_actions

REACH = 24  # pixels


@pytest.fixture(scope="module")
def world():
    return vitrail.load("mini-world", device="cpu")


def after(world, *names: str) -> Tensor:
    """All its starts, uint8 (N, 64, 64, 3), and where keys lead from each of them."""
    done = [world.controls.codes[name] for name in names]
    worlds = world.create_vector_env(len(world.start_images))
    worlds.reset(seed=0, options={"images": world.start_images.numpy()})
    for code in done:
        seen, *_ = worlds.step(torch.full((len(world.start_images),), code).numpy())
    return torch.from_numpy(seen)


def moved(world, seen: Tensor, axis: int) -> list[int]:
    """By how many pixels each picture is moved against its start along an axis, by what overlaps."""
    apart = []
    for by in range(-REACH, REACH + 1):
        there = [slice(None)] * 4
        there[axis] = slice(max(by, 0), seen.shape[axis] + min(by, 0))
        off = world.start_images.float().roll(by, axis)[tuple(there)] - seen.float()[tuple(there)]
        apart.append(off.square().flatten(1).mean(1))
    return (torch.stack(apart).argmin(0) - REACH).tolist()


def test_size_and_controls(world):
    assert sum(file.stat().st_size for file in (BUNDLED_MODELS_FOLDER / "mini-world").iterdir()) <= 16e6
    assert world.model.num_actions == 8 and len(world.start_images) == 16 and world.controls.repeat == 3
    named = {
        a.name: a for a in list_player_actions(world.model, world.controls, has_simulator=False) if not a.name.isdigit()
    }
    assert set(named) == {"left", "right", "up", "left up", "right up", "nothing"}
    assert named["right up"].keys == ("ArrowRight", "ArrowUp") and named["nothing"].keys == ()


def test_reconstruction_quality(world):
    ids = world.tokenize(list(world.start_images.numpy()))
    assert ids.shape == (16, 8, 8)
    pictures = torch.stack([torch.frombuffer(bytearray(p.tobytes()), dtype=torch.uint8) for p in world.detokenize(ids)])
    error = (pictures.float() - world.start_images.flatten(1).float()).square().mean(1)
    assert (10 * (255**2 / error).log10()).median() > 30  # dB, of single frames


def test_controls_move_the_view(world):
    """The view follows who runs: to the right, the picture goes to the left. Levels begin at a wall on the left."""
    assert moved(world, still := after(world, *["nothing"] * 3), 2) == [0] * 16 == moved(world, still, 1)
    assert all(by <= -3 for by in moved(world, after(world, *["right"] * 3), 2))
    assert moved(world, after(world, *["left"] * 3), 2) == [0] * 16
    assert all(by >= 8 for by in moved(world, after(world, "right up", "right up"), 1))


def test_moving_forth_and_back_returns(world):
    back = moved(world, after(world, *["right"] * 3, *["left"] * 5), 2)
    assert sum(abs(by) <= 1 for by in back) >= 14


def test_gymnasium_checker(world):
    from gymnasium.utils.env_checker import check_env

    env = world.create_env(max_episode_steps=10)
    check_env(env, skip_render_check=True)
    seen, _ = env.reset(seed=3)
    assert seen.shape == (64, 64, 3)
