"""CUDA graphs give the same results as single launches."""

import json
from contextvars import Context
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
import torch

from evals.test_drawing_judge import shapes
from vitrail.backbones.decoder import Decoder, DecoderConfig
from vitrail.data.image_captions import build_caption_source
from vitrail.data.sampler import MixtureConfig
from vitrail.data.scenes.counter_rng import random_bits
from vitrail.data.scenes.scene_source import SceneSource, SceneSourceConfig
from vitrail.nn import AttentionConfig, BlockConfig, GatedMLPConfig, RotaryConfig, RotaryEmbedding
from vitrail.nn.cuda_graphs import MAX_GRAPHS, CUDAGraphFunction, enable_cuda_graphs
from vitrail.nn.parallel_streams import ParallelStreams
from vitrail.tasks.text_task import TextTask
from vitrail.training.optimizer import OptimConfig
from vitrail.training.stage_config import StageConfig
from vitrail.training.trainer import Trainer

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def graphs_enabled():
    with enable_cuda_graphs():
        yield


def test_random_bits_equal_those_on_a_cpu():
    index = torch.cat([torch.arange(500), torch.randint(-(2**62), 2**62, (500,))])
    for shape in ((), (3,), (2, 5)):
        assert torch.equal(
            random_bits(7, index.cuda()[::2], "a draw", *shape).cpu(), random_bits(7, index[::2], "a draw", *shape)
        )


class Output(NamedTuple):
    double: torch.Tensor
    chance: torch.Tensor
    nothing: None


def compute_output(index: torch.Tensor) -> Output:
    return Output(index * 2, torch.rand(len(index), 3, device=index.device) + index[:, None], None)


@pytest.mark.parametrize("count", [1, 63, 64, 65, 200])
def test_replay_equals_single_launches(count):
    replayed = CUDAGraphFunction(compute_output)
    for seed in range(3):
        index = torch.randperm(1000, device="cuda")[:count]
        torch.manual_seed(seed)
        found = replayed(index)
        after = torch.rand(4, device="cuda")
        assert torch.equal(found.double, index * 2) and found.nothing is None
        assert found.chance.shape == (count, 3)
        torch.manual_seed(seed)
        again = replayed(index)
        assert torch.equal(again.chance, found.chance)  # the seed determines it, in a recording call or a replay
        assert torch.equal(after, torch.rand(4, device="cuda"))
        share = found.chance - index[:, None]
        assert (share >= 0).all() and (count == 1 or share.std() > 0.1)


def test_graphs_are_recorded_only_if_enabled():
    replayed = CUDAGraphFunction(compute_output)
    Context().run(replayed, torch.arange(10, device="cuda"))  # outside enable_cuda_graphs
    assert not replayed._recorded
    replayed(torch.arange(10, device="cuda"))
    assert len(replayed._recorded) == 1


def test_results_are_copies_and_sizes_are_limited():
    replayed = CUDAGraphFunction(compute_output)
    first = replayed(torch.arange(10, device="cuda"))
    kept = first.chance.clone()
    replayed(torch.arange(10, 20, device="cuda"))
    assert torch.equal(first.chance, kept)
    for size in range(1, MAX_GRAPHS + 5):
        assert len(replayed(torch.arange(64 * size, device="cuda")).double) == 64 * size


def test_scenes_equal_those_on_a_cpu():
    source = SceneSource(SceneSourceConfig(atlas="-", preset="plain", image_size=48, seed=5), shapes())
    cpu_source, gpu_source = build_caption_source(source), build_caption_source(source)
    for start in (0, 77):
        index = torch.arange(start, start + 70)
        plain, recorded = cpu_source.make_batch(index), gpu_source.make_batch(index.cuda())
        assert torch.equal(recorded.pixels.cpu(), plain.pixels) and torch.equal(recorded.captions.cpu(), plain.captions)
        assert torch.equal(gpu_source.resample_captions(index.cuda()).cpu(), cpu_source.resample_captions(index))


def test_parallel_chains_equal_sequential_ones():
    """Long chains of short kernels on inputs of the calling stream, with random numbers between."""

    def chain(index):
        for _ in range(300):
            index = (index * 3 + 1) % 1_000_003
        return index

    recorded = [CUDAGraphFunction(chain) for _ in range(6)]

    def make_sample(index, which):
        return {"x": recorded[which](index), "y": torch.rand(len(index), device=index.device)}

    streams = ParallelStreams()
    for seed in range(5):
        index = torch.randint(1000, (64,), device="cuda")
        torch.manual_seed(seed)
        found = streams(index.device, [partial(make_sample, index, which) for which in range(6)])
        sums = [(one["x"] + one["y"]).double() for one in found]
        del found
        torch.manual_seed(seed)
        for which, ours in enumerate(sums):
            one = make_sample(index, which)
            assert torch.equal((one["x"] + one["y"]).double(), ours)


@pytest.mark.parametrize("layout", ["1d", "mrope"])
def test_compiled_rotation_is_equal(layout):
    rotary = RotaryEmbedding(
        RotaryConfig(32, layout=layout, **({"sections": (4, 6, 6)} if layout == "mrope" else {}))
    ).cuda()
    positions = torch.randint(0, 500, (2, 9, 3), device="cuda")
    positions = positions if layout == "mrope" else positions[..., 0]
    compiled = torch.compile(lambda x: rotary(x)[:2], fullgraph=True)(positions)
    for ours, theirs in zip(compiled, rotary(positions)[:2], strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_step_with_graphs_trains_equally(tmp_path, accumulate):
    """A step with graphs equals a compiled step up to rounding."""
    curves = []
    for mode in (True, "graphs"):
        torch.manual_seed(0)
        block = BlockConfig(width=64, attention=AttentionConfig(heads=2), mlp=GatedMLPConfig(intermediate_size=128))
        model = Decoder(DecoderConfig(vocab_size=64, layers=2, block=block, rotary=RotaryConfig(32)))
        source = [np.random.default_rng(i).integers(0, 64, 33) for i in range(64)]
        stage = StageConfig(
            name="learn", task="text", steps=12, batch_size=8, gradient_accumulation_steps=accumulate,
            dtype="bfloat16", compile=mode,
            mixture=MixtureConfig(weights={"random": 1.0}), optim=OptimConfig(lr=1e-3), save_every=100,
        )  # fmt: skip
        folder = tmp_path / str(mode)
        Trainer(stage, TextTask(model), {"random": source}, folder, device="cuda", quiet=True).train()
        curves.append([json.loads(line)["loss"] for line in (folder / "log.jsonl").read_text().splitlines()])
    assert curves[0][-1] < curves[0][0]
    torch.testing.assert_close(torch.tensor(curves[0]), torch.tensor(curves[1]), rtol=2e-2, atol=2e-2)
