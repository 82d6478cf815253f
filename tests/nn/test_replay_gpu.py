"""What is recorded as a CUDA graph gives what is launched kernel by kernel."""

import json
from contextvars import Context
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
import torch

from evals.test_judge import shapes
from vitrail.backbones.decoder import Decoder, DecoderConfig
from vitrail.data.captions import captions
from vitrail.data.order import Mixture
from vitrail.data.scenes.chance import bits
from vitrail.data.scenes.source import ScenesConfig, SceneSource
from vitrail.nn import AttentionConfig, BlockConfig, GatedConfig, Rotary, RotaryConfig
from vitrail.nn.beside import Beside
from vitrail.nn.replay import MOST, Replayed, recording
from vitrail.tasks.text import TextTask
from vitrail.train.optim import OptimConfig
from vitrail.train.stage import StageConfig
from vitrail.train.trainer import Trainer

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def asked():
    with recording():
        yield


def test_draws_are_those_of_the_cpu():
    index = torch.cat([torch.arange(500), torch.randint(-(2**62), 2**62, (500,))])
    for shape in ((), (3,), (2, 5)):
        assert torch.equal(bits(7, index.cuda()[::2], "a draw", *shape).cpu(), bits(7, index[::2], "a draw", *shape))


class Made(NamedTuple):
    double: torch.Tensor
    chance: torch.Tensor
    nothing: None


def make(index: torch.Tensor) -> Made:
    return Made(index * 2, torch.rand(len(index), 3, device=index.device) + index[:, None], None)


@pytest.mark.parametrize("count", [1, 63, 64, 65, 200])
def test_equal_to_launching_each(count):
    replayed = Replayed(make)
    for seed in range(3):
        index = torch.randperm(1000, device="cuda")[:count]
        torch.manual_seed(seed)
        found = replayed(index)
        after = torch.rand(4, device="cuda")
        assert torch.equal(found.double, index * 2) and found.nothing is None
        assert found.chance.shape == (count, 3)
        torch.manual_seed(seed)
        again = replayed(index)
        assert torch.equal(again.chance, found.chance)  # recorded in this call or before, the seed decides
        assert torch.equal(after, torch.rand(4, device="cuda"))
        share = found.chance - index[:, None]
        assert (share >= 0).all() and (count == 1 or share.std() > 0.1)


def test_only_those_who_ask_are_recorded():
    replayed = Replayed(make)
    Context().run(replayed, torch.arange(10, device="cuda"))  # in which nobody has asked
    assert not replayed._recorded
    replayed(torch.arange(10, device="cuda"))
    assert len(replayed._recorded) == 1


def test_copies_stay_and_sizes_end():
    replayed = Replayed(make)
    first = replayed(torch.arange(10, device="cuda"))
    kept = first.chance.clone()
    replayed(torch.arange(10, 20, device="cuda"))
    assert torch.equal(first.chance, kept)
    for size in range(1, MOST + 5):
        assert len(replayed(torch.arange(64 * size, device="cuda")).double) == 64 * size


def test_scenes_are_the_cpu_s():
    source = SceneSource(ScenesConfig(atlas="-", preset="plain", side=48, seed=5), shapes())
    here, there = captions(source), captions(source)
    for start in (0, 77):
        index = torch.arange(start, start + 70)
        plain, recorded = here.pair(index), there.pair(index.cuda())
        assert torch.equal(recorded.pixels.cpu(), plain.pixels) and torch.equal(recorded.true.cpu(), plain.true)
        assert torch.equal(there.again(index.cuda()).cpu(), here.again(index))


def test_chains_beside_each_other_are_those_one_behind_the_other():
    """Long chains of short kernels on numbers that come from where they are called, and random ones between."""

    def chain(index):
        for _ in range(300):
            index = (index * 3 + 1) % 1_000_003
        return index

    recorded = [Replayed(chain) for _ in range(6)]

    def made(index, which):
        return {"x": recorded[which](index), "y": torch.rand(len(index), device=index.device)}

    beside = Beside()
    for seed in range(5):
        index = torch.randint(1000, (64,), device="cuda")
        torch.manual_seed(seed)
        found = beside(index.device, [partial(made, index, which) for which in range(6)])
        sums = [(one["x"] + one["y"]).double() for one in found]
        del found
        torch.manual_seed(seed)
        for which, ours in enumerate(sums):
            one = made(index, which)
            assert torch.equal((one["x"] + one["y"]).double(), ours)


@pytest.mark.parametrize("layout", ["1d", "mrope"])
def test_a_compiled_rotation_is_the_same(layout):
    rotary = Rotary(RotaryConfig(32, layout=layout, **({"sections": (4, 6, 6)} if layout == "mrope" else {}))).cuda()
    positions = torch.randint(0, 500, (2, 9, 3), device="cuda")
    positions = positions if layout == "mrope" else positions[..., 0]
    compiled = torch.compile(lambda x: rotary(x)[:2], fullgraph=True)(positions)
    for ours, theirs in zip(compiled, rotary(positions)[:2], strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_recorded_step_trains_alike(tmp_path, accumulate):
    """As a compiled one does, to rounding: the same order of samples, the same seeds."""
    curves = []
    for how in (True, "graphs"):
        torch.manual_seed(0)
        block = BlockConfig(width=64, attention=AttentionConfig(heads=2), mlp=GatedConfig(hidden=128))
        model = Decoder(DecoderConfig(vocab=64, layers=2, block=block, rotary=RotaryConfig(32)))
        source = [np.random.default_rng(i).integers(0, 64, 33) for i in range(64)]
        stage = StageConfig(
            name="learn", task="text", steps=12, batch=8, accumulate=accumulate, dtype="bfloat16", compile=how,
            mixture=Mixture(weights={"random": 1.0}), optim=OptimConfig(lr=1e-3), save_every=100,
        )  # fmt: skip
        folder = tmp_path / str(how)
        Trainer(stage, TextTask(model), {"random": source}, folder, device="cuda", quiet=True).train()
        curves.append([json.loads(line)["loss"] for line in (folder / "log.jsonl").read_text().splitlines()])
    assert curves[0][-1] < curves[0][0]
    torch.testing.assert_close(torch.tensor(curves[0]), torch.tensor(curves[1]), rtol=2e-2, atol=2e-2)
