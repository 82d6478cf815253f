"""Towers that teach themselves, through the trainer: what is counted, resumed, compiled, shared out, and learned."""

import json
import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from train import ranks
from vitrail.data.named import NamedConfig, NamedSource
from vitrail.data.order import Mixture
from vitrail.data.scenes.source import Asked
from vitrail.data.views import ViewsConfig
from vitrail.encoders.vit import ViT, ViTConfig
from vitrail.errors import ConfigError, DataError
from vitrail.evals.shares import Score
from vitrail.evals.suites.probe import probe
from vitrail.models.dino import Dino, DinoConfig
from vitrail.models.masked import Masked, MaskedConfig
from vitrail.nn import AttentionConfig, BlockConfig
from vitrail.nn.mlp import PlainConfig
from vitrail.tasks.dino import DinoSettings, DinoTask
from vitrail.tasks.mim import MimSettings, MimTask
from vitrail.train import distributed
from vitrail.train.optim import OptimConfig
from vitrail.train.schedule import Cosine
from vitrail.train.stage import StageConfig
from vitrail.train.trainer import Trainer


class Kept:
    """Pictures by number, as `NamedSource` gives them: stripes of some width and colours, at some angle."""

    def __init__(self, name: str = "kept", channels: int = 3, side: int = 16, views: ViewsConfig | None = None):
        made = torch.Generator().manual_seed(1)
        angle, width = torch.rand(60, 1, 1, generator=made) * 3.14, 2 + 4 * torch.rand(60, 1, 1, generator=made)
        line = torch.arange(side)
        wave = torch.sin((line * angle.cos() + line[:, None] * angle.sin()) * 6.28 / width)  # (60, S, S)
        colour = torch.rand(60, channels, 1, 1, generator=made)
        self.table = ((wave[:, None] * colour + 1) * 127).to(torch.uint8)
        self.name, self.config = name, NamedConfig(data=("nothing",), side=side, views=views or ViewsConfig())
        self.fingerprint = name

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, item: int) -> Asked:
        return Asked(self.name, item)

    def pixels(self, index: torch.Tensor) -> torch.Tensor:
        return self.table[index]


class Scenes(Kept):
    """The same without views of its own, as scenes are."""

    def __init__(self, name: str = "scenes"):
        super().__init__(name)
        self.config = self


BLOCK = BlockConfig(width=16, attention=AttentionConfig(heads=2), mlp=PlainConfig(hidden=32))
TOWER = ViTConfig(layers=1, block=BLOCK, image=16, patch=4, cls=True, pool="cls", mask=True)


def mim(sources=None, teacher: ViTConfig | None = None, **settings) -> MimTask:
    torch.manual_seed(0)
    model = Masked(MaskedConfig(image=TOWER, teacher=teacher))
    return MimTask(model, {"kept": Kept()} if sources is None else sources, MimSettings(**settings))


SMALL = {"image": TOWER, "steps": 60, "momentum": 0.9, "prototypes": 24, "hidden": 32, "bottleneck": 12}


def dino(sources=None, config: dict | None = None, **settings) -> DinoTask:
    torch.manual_seed(0)
    model = Dino(DinoConfig(**(SMALL | (config or {}))))
    asked = DinoSettings(**({"locals": 2} | settings))
    return DinoTask(model, {"kept": Kept()} if sources is None else sources, asked)


MADE = {"mim": mim, "taught": lambda sources=None: mim(sources, TOWER), "dino": dino}


def stage(task: MimTask | DinoTask, **more) -> StageConfig:
    settings = {
        "name": "learn",
        "task": "any",
        "steps": 6,
        "batch": 8,
        "mixture": Mixture(weights=dict.fromkeys(task.sources, 1.0)),
        "optim": OptimConfig(lr=3e-3, betas=(0.9, 0.95), decay=0.05),
        "schedule": Cosine(warmup=2),
        "save_every": 3,
    }
    return StageConfig(**(settings | more))


def trainer(task: MimTask | DinoTask, folder: Path, **more) -> Trainer:
    return Trainer(stage(task, **more), task, task.sources, folder, seed=2, quiet=True)


def curve(folder: Path, key: str = "loss") -> list[float]:
    return [json.loads(line)[key] for line in (folder / "log.jsonl").read_text().splitlines()]


# ---- one pass ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MADE)
def test_losses_counts_and_weights_have_the_same_names_whatever_the_sources(kind):
    sources = {"kept": Kept(), "clear": Kept("clear", channels=4, side=20), "scenes": Scenes()}
    task = MADE[kind](sources)
    batch = task.collate([Asked("kept", 3), Asked("clear", 5), Asked("scenes", 7), Asked("kept", 9)])
    task.model.train()
    losses, counts = task(batch), task.counts(batch)
    assert losses.keys() == counts.keys() == task.weights.keys()
    assert all(loss.isfinite() and loss > 0 for loss in losses.values()) and task.flops(batch) > 0
    assert counts == ({"views": 4, "patches": 4 * 5, "entropy": 4} if kind == "dino" else {"masked": 4 * 6})


def test_dino_without_patches_has_no_such_loss():
    task = dino(patches=0.0, locals=0)
    assert (
        task(task.collate([Asked("kept", 0), Asked("kept", 1)])).keys() == task.weights.keys() == {"views", "entropy"}
    )


def test_pictures_are_varied_in_training_and_shown_as_they_are_when_judged():
    task = mim({"kept": Kept(views=ViewsConfig(noise=1.0))})
    shown = []
    plain = task.model.forward
    task.model.forward = lambda pixels, places: (shown.append(pixels), plain(pixels, places))[1]
    batch = {"kept": torch.arange(3)}
    for mode in (True, False):
        task.model.train(mode)
        task(batch)
    wanted = Kept().pixels(torch.arange(3)) / 127.5 - 1
    torch.testing.assert_close(shown[1], wanted)
    assert not torch.allclose(shown[0], wanted, atol=0.1)


def test_the_teacher_follows_in_training_alone():
    task = dino()
    batch = {"kept": torch.arange(4)}
    task.model.eval()
    task(batch)
    assert int(task.model.steps) == 0
    task.model.train()
    task(batch)
    assert int(task.model.steps) == 1


def test_what_cannot_be_is_refused():
    with pytest.raises(ConfigError, match="global_views"):
        dino({"kept": Kept(views=ViewsConfig(mirror=0.5))})
    with pytest.raises(ConfigError, match="mask token"):
        dino(config={"image": TOWER.with_(mask=False)})
    with pytest.raises(ConfigError, match="do not fill"):
        dino(local_views=ViewsConfig(side=10))
    with pytest.raises(ConfigError, match="temperatures"):
        dino(temperature=(0.1, 0.0))
    for made in (mim, dino):
        with pytest.raises(ConfigError, match="at least one"):
            made(ratio=0.0)


@pytest.mark.parametrize("kind", ["mim", "taught", pytest.param("dino", marks=pytest.mark.slow)])
def test_a_step_is_one_graph(kind):
    """Nothing in it asks the device for a number: no host waits, and the compiler sees it whole."""
    task, batch = MADE[kind](), {"kept": torch.arange(4)}
    task.model.train()
    torch.manual_seed(5)
    plain = task(batch)
    sum(plain.values()).backward()
    gradient = task.model.image.mask.grad.clone()
    again = MADE[kind]()
    again.model.train()
    torch._dynamo.reset()
    whole = torch.compile(again.__call__, fullgraph=True, backend="eager")
    torch.manual_seed(5)
    losses = whole(batch)
    sum(losses.values()).backward()
    for name, loss in plain.items():
        torch.testing.assert_close(losses[name], loss)
    torch.testing.assert_close(again.model.image.mask.grad, gradient)


# ---- a run ------------------------------------------------------------------------------------------------------


class Halt(Exception):
    pass


@pytest.mark.parametrize("kind", MADE)
@pytest.mark.parametrize("more", [{}, {"dtype": "bfloat16", "accumulate": 2}])
def test_a_run_broken_off_ends_the_same(kind, more, tmp_path, monkeypatch):
    whole = trainer(MADE[kind](), tmp_path / "whole", **more).train().state_dict()
    plain = Trainer._one_step

    def halting(self, *given):
        if self.step == 4:
            raise Halt
        return plain(self, *given)

    monkeypatch.setattr(Trainer, "_one_step", halting)
    with pytest.raises(Halt):
        trainer(MADE[kind](), tmp_path / "cut", **more).train()
    monkeypatch.setattr(Trainer, "_one_step", plain)
    again = trainer(MADE[kind](), tmp_path / "cut", **more).train().state_dict()
    assert all(torch.equal(again[name], value) for name, value in whole.items())


def test_a_stage_that_trains_everything_leaves_a_teacher_as_it_was(tmp_path):
    task = mim(teacher=TOWER)
    before = {name: t.clone() for name, t in task.model.state_dict().items()}
    after = trainer(task, tmp_path, train=("*",)).train().state_dict()
    for name, value in before.items():
        assert torch.equal(after[name], value) == name.startswith("teacher"), name


def test_the_average_in_a_run_in_bfloat16_is_that_of_its_weights(tmp_path, monkeypatch):
    """Each optimizer step once, though two passes collect its gradients; exact to float32's last digits."""
    plain, seen = Dino.follow, []

    def noted(self):
        seen.append({name: p.detach().double() for name, p in self.named_parameters()})
        plain(self)

    monkeypatch.setattr(Dino, "follow", noted)
    task = dino(config={"momentum": 0.996})
    trainer(task, tmp_path, dtype="bfloat16", accumulate=2).train()
    assert len(seen) == 12 and int(task.model.steps) == 6
    wanted = seen[0]
    for t, weights in enumerate(seen[::2]):
        share = 0.004 * (1 + math.cos(math.pi * t / 60)) / 2 if t else 1.0
        wanted = {name: (1 - share) * value + share * weights[name] for name, value in wanted.items()}
    for name, average in task.model.averages().items():
        torch.testing.assert_close(average.double(), wanted[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["mim", "taught"])
def test_what_is_hidden_is_guessed_ever_better(kind, tmp_path):
    trainer(MADE[kind](), tmp_path, steps=60, batch=16, save_every=60).train()
    losses = curve(tmp_path)
    assert sum(losses[-10:]) < 0.85 * sum(losses[:10])


def test_views_of_one_picture_come_together_without_a_collapse(tmp_path):
    """A student that says the same of everything misses log K, and targets that do leave as much open."""
    task = dino(temperature=(0.1, 0.03), locals=0, global_views=ViewsConfig(area=(0.5, 1.0), shift=0.5))
    trainer(task, tmp_path, steps=50, batch=32, save_every=50).train()
    for key in ("loss/views", "loss/entropy"):
        assert sum(curve(tmp_path, key)[-10:]) / 10 < 0.75 * math.log(24), key


# ---- many processes ---------------------------------------------------------------------------------------------


def learn(folder: Path) -> None:
    """A share of every picture's weights each, and one teacher: momentum 0 makes it the student of the step before."""
    task = dino(config={"momentum": 0.0, "steps": 10**9})
    model = trainer(task, folder, batch=7).train()
    model.follow()
    assert int(model.steps) == 7
    whole = dino().model
    distributed.put_together(model, whole, {})
    averages = whole.averages()
    assert all(torch.equal(averages[name], p) for name, p in whole.named_parameters())
    told = [torch.zeros(()) for _ in range(dist.get_world_size())]
    dist.all_gather(told, sum(average.sum() for average in averages.values()))
    assert told[0] == told[1]


@pytest.mark.slow
def test_ranks_have_one_teacher(tmp_path):
    ranks.run(2, learn, tmp_path)
    losses = curve(tmp_path)
    assert len(losses) == 6 and all(map(math.isfinite, losses))


# ---- real pictures ----------------------------------------------------------------------------------------------

CUT = ViewsConfig(area=(0.5, 1.0), shift=0.5, mirror=0.5)


def cifar(part: str, views: ViewsConfig | None = None) -> NamedSource:
    try:
        return NamedSource(NamedConfig(data=("cifar10",), side=32, part=part, views=views or ViewsConfig()), "cifar")
    except DataError as error:
        pytest.skip(str(error))


@torch.no_grad()
def probed(tower: ViT, train: NamedSource, test: NamedSource) -> Score:
    """A linear probe of the mean patch, of 4000 pictures for 2000 others."""
    names = sorted(set(train.concepts))

    def read(source: NamedSource, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        pixels = source.pixels(torch.arange(count)) / 127.5 - 1
        labels = torch.tensor([names.index(name) for name in source.concepts[:count]])
        return torch.cat([tower(some).mean(1) for some in pixels.split(500)]), labels

    return probe(*read(train, 4000), *read(test, 2000), names).scores[0]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_probe_finds_more_in_a_tower_that_guessed_pixels(tmp_path):
    train, test = cifar("train", CUT), cifar("test")
    block = BlockConfig(width=96, attention=AttentionConfig(heads=3), mlp=PlainConfig(hidden=384))
    torch.manual_seed(0)
    model = Masked(MaskedConfig(image=ViTConfig(layers=4, block=block, image=32, patch=8, pool="mean", mask=True)))
    before = probed(model.image, train, test)
    task = MimTask(model, {"cifar": train}, MimSettings(ratio=0.6, places="random"))
    more = {"steps": 600, "batch": 128, "save_every": 600, "schedule": Cosine(warmup=60)}
    trainer(task, tmp_path, **more).train()
    after = probed(model.image.eval(), train, test)
    assert curve(tmp_path)[-1] < 0.8
    assert after.value > before.value + 0.03, f"before {before}, after {after}"
