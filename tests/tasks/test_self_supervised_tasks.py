"""Self-supervised tasks: losses, counts, resumed, compiled and sharded runs, and learning."""

import json
import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from training import ranks
from vitrail.data.augmentation import AugmentationConfig
from vitrail.data.named_images import NamedImagesConfig, NamedImageSource
from vitrail.data.sampler import MixtureConfig
from vitrail.data.scenes.scene_source import SceneSample
from vitrail.encoders.vit import ViT, ViTConfig
from vitrail.errors import ConfigError, DataError
from vitrail.evals.scores import Score
from vitrail.evals.suites.linear_probe import train_linear_probe
from vitrail.models.dino_model import DINOConfig, DINOModel
from vitrail.models.masked_image_model import MaskedImageConfig, MaskedImageModel
from vitrail.nn import AttentionConfig, BlockConfig
from vitrail.nn.mlp import PlainMLPConfig
from vitrail.tasks.dino_task import DinoSettings, DinoTask
from vitrail.tasks.mim_task import MimSettings, MimTask
from vitrail.training import distributed
from vitrail.training.lr_schedule import CosineSchedule
from vitrail.training.optimizer import OptimConfig
from vitrail.training.stage_config import StageConfig
from vitrail.training.trainer import Trainer


class StripeImageSource:
    """Source of images by index, like `NamedImageSource`: stripes of random width, colours and angle."""

    def __init__(self, name: str = "kept", channels: int = 3, side: int = 16, views: AugmentationConfig | None = None):
        made = torch.Generator().manual_seed(1)
        angle, width = torch.rand(60, 1, 1, generator=made) * 3.14, 2 + 4 * torch.rand(60, 1, 1, generator=made)
        line = torch.arange(side)
        wave = torch.sin((line * angle.cos() + line[:, None] * angle.sin()) * 6.28 / width)  # (60, S, S)
        colour = torch.rand(60, channels, 1, 1, generator=made)
        self.table = ((wave[:, None] * colour + 1) * 127).to(torch.uint8)
        self.name, self.config = (
            name,
            NamedImagesConfig(datasets=("nothing",), image_size=side, augmentation=views or AugmentationConfig()),
        )
        self.fingerprint = name

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, item: int) -> SceneSample:
        return SceneSample(self.name, item)

    def pixels(self, index: torch.Tensor) -> torch.Tensor:
        return self.table[index]


class StripeSceneSource(StripeImageSource):
    """The same without its own augmentation, like scenes."""

    def __init__(self, name: str = "scenes"):
        super().__init__(name)
        self.config = self


BLOCK = BlockConfig(width=16, attention=AttentionConfig(heads=2), mlp=PlainMLPConfig(intermediate_size=32))
TOWER = ViTConfig(layers=1, block=BLOCK, image_size=16, patch_size=4, cls_token=True, pool="cls", mask_token=True)


def make_mim_task(sources=None, teacher: ViTConfig | None = None, **settings) -> MimTask:
    torch.manual_seed(0)
    model = MaskedImageModel(MaskedImageConfig(image=TOWER, teacher=teacher))
    return MimTask(model, {"kept": StripeImageSource()} if sources is None else sources, MimSettings(**settings))


SMALL = {
    "image": TOWER,
    "momentum_steps": 60,
    "momentum": 0.9,
    "num_prototypes": 24,
    "intermediate_size": 32,
    "bottleneck_width": 12,
}


def make_dino_task(sources=None, config: dict | None = None, **settings) -> DinoTask:
    torch.manual_seed(0)
    model = DINOModel(DINOConfig(**(SMALL | (config or {}))))
    asked = DinoSettings(**({"num_local_views": 2} | settings))
    return DinoTask(model, {"kept": StripeImageSource()} if sources is None else sources, asked)


TASK_MAKERS = {
    "mim": make_mim_task,
    "mim-teacher": lambda sources=None: make_mim_task(sources, TOWER),
    "dino": make_dino_task,
}


def make_stage(task: MimTask | DinoTask, **more) -> StageConfig:
    settings = {
        "name": "learn",
        "task": "any",
        "steps": 6,
        "batch_size": 8,
        "mixture": MixtureConfig(weights=dict.fromkeys(task.sources, 1.0)),
        "optim": OptimConfig(lr=3e-3, betas=(0.9, 0.95), weight_decay=0.05),
        "schedule": CosineSchedule(warmup_steps=2),
        "save_every": 3,
    }
    return StageConfig(**(settings | more))


def make_trainer(task: MimTask | DinoTask, folder: Path, **more) -> Trainer:
    return Trainer(make_stage(task, **more), task, task.sources, folder, seed=2, quiet=True)


def read_log(folder: Path, key: str = "loss") -> list[float]:
    return [json.loads(line)[key] for line in (folder / "log.jsonl").read_text().splitlines()]


# ---- one pass ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TASK_MAKERS)
def test_losses_counts_and_weights_have_the_same_names(kind):
    sources = {
        "kept": StripeImageSource(),
        "clear": StripeImageSource("clear", channels=4, side=20),
        "scenes": StripeSceneSource(),
    }
    task = TASK_MAKERS[kind](sources)
    batch = task.collate(
        [SceneSample("kept", 3), SceneSample("clear", 5), SceneSample("scenes", 7), SceneSample("kept", 9)]
    )
    task.model.train()
    losses, counts = task(batch), task.count_loss_terms(batch)
    assert losses.keys() == counts.keys() == task.loss_weights.keys()
    assert all(loss.isfinite() and loss > 0 for loss in losses.values()) and task.count_flops(batch) > 0
    assert counts == ({"views": 4, "patches": 4 * 5, "entropy": 4} if kind == "dino" else {"masked": 4 * 6})


def test_dino_without_ibot_loss():
    task = make_dino_task(ibot_weight=0.0, num_local_views=0)
    assert (
        task(task.collate([SceneSample("kept", 0), SceneSample("kept", 1)])).keys()
        == task.loss_weights.keys()
        == {"views", "entropy"}
    )


def test_augmentation_only_in_training():
    task = make_mim_task({"kept": StripeImageSource(views=AugmentationConfig(max_noise=1.0))})
    shown = []
    plain = task.model.forward
    task.model.forward = lambda pixels, places: (shown.append(pixels), plain(pixels, places))[1]
    batch = {"kept": torch.arange(3)}
    for mode in (True, False):
        task.model.train(mode)
        task(batch)
    wanted = StripeImageSource().pixels(torch.arange(3)) / 127.5 - 1
    torch.testing.assert_close(shown[1], wanted)
    assert not torch.allclose(shown[0], wanted, atol=0.1)


def test_teacher_updates_only_in_training():
    task = make_dino_task()
    batch = {"kept": torch.arange(4)}
    task.model.eval()
    task(batch)
    assert int(task.model.steps) == 0
    task.model.train()
    task(batch)
    assert int(task.model.steps) == 1


def test_invalid_arguments_raise():
    with pytest.raises(ConfigError, match="global_views"):
        make_dino_task({"kept": StripeImageSource(views=AugmentationConfig(flip_probability=0.5))})
    with pytest.raises(ConfigError, match="mask token"):
        make_dino_task(config={"image": TOWER.replace(mask_token=False)})
    with pytest.raises(ConfigError, match="not multiples of the patch size"):
        make_dino_task(local_views=AugmentationConfig(image_size=10))
    with pytest.raises(ConfigError, match="temperatures"):
        make_dino_task(temperatures=(0.1, 0.0))
    for made in (make_mim_task, make_dino_task):
        with pytest.raises(ConfigError, match="at least one"):
            made(mask_ratio=0.0)


@pytest.mark.parametrize("kind", ["mim", "mim-teacher", pytest.param("dino", marks=pytest.mark.slow)])
def test_step_compiles_to_one_graph(kind):
    """The step does not synchronize with the device, so it compiles to one graph."""
    task, batch = TASK_MAKERS[kind](), {"kept": torch.arange(4)}
    task.model.train()
    torch.manual_seed(5)
    plain = task(batch)
    sum(plain.values()).backward()
    gradient = task.model.image.mask.grad.clone()
    again = TASK_MAKERS[kind]()
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


class Interruption(Exception):
    pass


@pytest.mark.parametrize("kind", TASK_MAKERS)
@pytest.mark.parametrize("more", [{}, {"dtype": "bfloat16", "gradient_accumulation_steps": 2}])
def test_resumed_run_matches_uninterrupted_run(kind, more, tmp_path, monkeypatch):
    whole = make_trainer(TASK_MAKERS[kind](), tmp_path / "whole", **more).train().state_dict()
    plain = Trainer._train_step

    def interrupted_step(self, *given):
        if self.step == 4:
            raise Interruption
        return plain(self, *given)

    monkeypatch.setattr(Trainer, "_train_step", interrupted_step)
    with pytest.raises(Interruption):
        make_trainer(TASK_MAKERS[kind](), tmp_path / "cut", **more).train()
    monkeypatch.setattr(Trainer, "_train_step", plain)
    again = make_trainer(TASK_MAKERS[kind](), tmp_path / "cut", **more).train().state_dict()
    assert all(torch.equal(again[name], value) for name, value in whole.items())


def test_teacher_is_not_trained(tmp_path):
    task = make_mim_task(teacher=TOWER)
    before = {name: t.clone() for name, t in task.model.state_dict().items()}
    after = make_trainer(task, tmp_path, trainable=("*",)).train().state_dict()
    for name, value in before.items():
        assert torch.equal(after[name], value) == name.startswith("teacher"), name


def test_teacher_average_in_bfloat16_runs(tmp_path, monkeypatch):
    """The teacher updates once per optimizer step, also with two accumulated passes."""
    plain, seen = DINOModel.update_teacher, []

    def noted(self):
        seen.append({name: p.detach().double() for name, p in self.named_parameters()})
        plain(self)

    monkeypatch.setattr(DINOModel, "update_teacher", noted)
    task = make_dino_task(config={"momentum": 0.996})
    make_trainer(task, tmp_path, dtype="bfloat16", gradient_accumulation_steps=2).train()
    assert len(seen) == 12 and int(task.model.steps) == 6
    wanted = seen[0]
    for t, weights in enumerate(seen[::2]):
        share = 0.004 * (1 + math.cos(math.pi * t / 60)) / 2 if t else 1.0
        wanted = {name: (1 - share) * value + share * weights[name] for name, value in wanted.items()}
    for name, average in task.model.teacher_weights().items():
        torch.testing.assert_close(average.double(), wanted[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["mim", "mim-teacher"])
def test_masked_loss_decreases(kind, tmp_path):
    make_trainer(TASK_MAKERS[kind](), tmp_path, steps=60, batch_size=16, save_every=60).train()
    losses = read_log(tmp_path)
    assert sum(losses[-10:]) < 0.85 * sum(losses[:10])


def test_dino_loss_decreases_without_collapse(tmp_path):
    """A constant student has loss log K, and constant targets have entropy log K."""
    task = make_dino_task(
        temperatures=(0.1, 0.03),
        num_local_views=0,
        global_views=AugmentationConfig(crop_area=(0.5, 1.0), max_shift=0.5),
    )
    make_trainer(task, tmp_path, steps=50, batch_size=32, save_every=50).train()
    for key in ("loss/views", "loss/entropy"):
        assert sum(read_log(tmp_path, key)[-10:]) / 10 < 0.75 * math.log(24), key


# ---- many processes ---------------------------------------------------------------------------------------------


def train_on_rank(folder: Path) -> None:
    """With sharded weights and momentum 0, the teacher is the student of the previous step."""
    task = make_dino_task(config={"momentum": 0.0, "momentum_steps": 10**9})
    model = make_trainer(task, folder, batch_size=7).train()
    model.update_teacher()
    assert int(model.steps) == 7
    whole = make_dino_task().model
    distributed.gather_weights(model, whole, {})
    averages = whole.teacher_weights()
    assert all(torch.equal(averages[name], p) for name, p in whole.named_parameters())
    result = [torch.zeros(()) for _ in range(dist.get_world_size())]
    dist.all_gather(result, sum(average.sum() for average in averages.values()))
    assert result[0] == result[1]


@pytest.mark.slow
def test_ranks_share_one_teacher(tmp_path):
    ranks.run(2, train_on_rank, tmp_path)
    losses = read_log(tmp_path)
    assert len(losses) == 6 and all(map(math.isfinite, losses))


# ---- real images ------------------------------------------------------------------------------------------------

CUT = AugmentationConfig(crop_area=(0.5, 1.0), max_shift=0.5, flip_probability=0.5)


def load_cifar(part: str, views: AugmentationConfig | None = None) -> NamedImageSource:
    try:
        return NamedImageSource(
            NamedImagesConfig(
                datasets=("cifar10",), image_size=32, split=part, augmentation=views or AugmentationConfig()
            ),
            "cifar",
        )
    except DataError as error:
        pytest.skip(str(error))


@torch.no_grad()
def probe_accuracy(tower: ViT, train: NamedImageSource, test: NamedImageSource) -> Score:
    """A linear probe of mean patch features, trained on 4000 images and tested on 2000."""
    names = sorted(set(train.concepts))

    def read(source: NamedImageSource, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        pixels = source.pixels(torch.arange(count)) / 127.5 - 1
        labels = torch.tensor([names.index(name) for name in source.concepts[:count]])
        return torch.cat([tower(some).mean(1) for some in pixels.split(500)]), labels

    return train_linear_probe(*read(train, 4000), *read(test, 2000), names).scores[0]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_pretraining_improves_the_linear_probe(tmp_path):
    train, test = load_cifar("train", CUT), load_cifar("test")
    block = BlockConfig(width=96, attention=AttentionConfig(heads=3), mlp=PlainMLPConfig(intermediate_size=384))
    torch.manual_seed(0)
    model = MaskedImageModel(
        MaskedImageConfig(
            image=ViTConfig(layers=4, block=block, image_size=32, patch_size=8, pool="mean", mask_token=True)
        )
    )
    before = probe_accuracy(model.image, train, test)
    task = MimTask(model, {"cifar": train}, MimSettings(mask_ratio=0.6, mask_strategy="random"))
    more = {"steps": 600, "batch_size": 128, "save_every": 600, "schedule": CosineSchedule(warmup_steps=60)}
    make_trainer(task, tmp_path, **more).train()
    after = probe_accuracy(model.image.eval(), train, test)
    assert read_log(tmp_path)[-1] < 0.8
    assert after.value > before.value + 0.03, f"before {before}, after {after}"
