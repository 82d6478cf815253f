"""Distributed training of a model with optional parts, on batches with and without images."""

import contextlib
import json
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from training import ranks
from training.test_trainer import CONFIG, stage, weights
from vitrail.backbones.decoder import Decoder
from vitrail.data.sampler import MixtureConfig
from vitrail.encoders.vit import ViT, ViTConfig
from vitrail.errors import TrainError
from vitrail.nn import AttentionConfig, BlockConfig, PlainMLPConfig
from vitrail.objectives.fused_cross_entropy import linear_cross_entropy
from vitrail.training import distributed
from vitrail.training.lora import LoRAConfig, add_lora
from vitrail.training.task import Batch
from vitrail.training.trainer import Trainer

TOWER = ViTConfig(
    layers=2,
    image_size=8,
    patch_size=4,
    cls_token=True,
    block=BlockConfig(width=12, attention=AttentionConfig(heads=2), mlp=PlainMLPConfig(intermediate_size=20)),
)


class TextImageModel(nn.Module):
    """Adds the four patches of an image to the first four tokens of its row."""

    def __init__(self):
        super().__init__()
        self.tower, self.decoder = ViT(TOWER), Decoder(CONFIG)
        self.project = nn.Linear(12, 16)

    def hidden(self, ids: Tensor, pictures: Tensor, rows: Tensor) -> Tensor:
        x = self.decoder.embed(ids)
        if len(pictures):
            seen = self.project(self.tower(pictures))
            x = torch.cat([x[:, :4].index_add(0, rows, seen), x[:, 4:]], dim=1)
        return self.decoder.forward_hidden(embeds=x)


class TaskWithoutParts:
    """Task that does not report optional parts. Texts differ in length; images have a separate loss."""

    def __init__(self, model: TextImageModel):
        self.model, self.loss_weights = model, {"text": 1.0, "captions": 0.5}

    def collate(self, samples: Sequence[dict]) -> Batch:
        ids = pad_sequence([s["ids"][:-1] for s in samples], batch_first=True)
        targets = pad_sequence([s["ids"][1:] for s in samples], batch_first=True, padding_value=-100)
        seen = [i for i, s in enumerate(samples) if "picture" in s]
        pictures = torch.stack([samples[i]["picture"] for i in seen]) if seen else torch.empty(0, 3, 8, 8)
        return {"ids": ids, "targets": targets, "pictures": pictures, "rows": torch.tensor(seen, dtype=torch.long)}

    def count_loss_terms(self, batch: Batch) -> dict[str, int]:
        counted = (batch["targets"] >= 0).sum(1)
        captions = int(counted[batch["rows"]].sum())
        return {"text": int(counted.sum()) - captions, "captions": captions}

    def __call__(self, batch: Batch) -> dict[str, Tensor]:
        hidden, head = (
            self.model.hidden(batch["ids"], batch["pictures"], batch["rows"]),
            self.model.decoder.embed.weight,
        )
        seen = torch.zeros(len(hidden), 1, dtype=torch.bool).index_fill(0, batch["rows"], True)
        parts = {"text": batch["targets"].where(~seen, -100), "captions": batch["targets"].where(seen, -100)}
        return {
            name: linear_cross_entropy(hidden.flatten(0, 1), head, targets.flatten(), reduction="sum")
            for name, targets in parts.items()
        }

    def count_flops(self, batch: Batch) -> int:
        return batch["ids"].numel()


class TaskWithParts(TaskWithoutParts):
    filled = 0

    def used_parts(self, batch: Batch) -> dict[str, bool]:
        return {"tower": len(batch["pictures"]) > 0}

    def fill_part(self, batch: Batch, part: str) -> Batch:
        """Add a row with a grey image and no targets."""
        self.filled += 1
        return {
            "ids": nn.functional.pad(batch["ids"], (0, 0, 0, 1)),
            "targets": nn.functional.pad(batch["targets"], (0, 0, 0, 1), value=-100),
            "pictures": torch.zeros(1, *TOWER_INPUT),
            "rows": torch.tensor([len(batch["ids"])]),
        }


TOWER_INPUT = (3, 8, 8)
DRAW = torch.Generator().manual_seed(1)
SOURCES = {
    "text": [{"ids": torch.randint(0, 30, (5 + i % 7,), generator=DRAW)} for i in range(30)],
    "pictures": [
        {
            "ids": torch.randint(0, 30, (6 + i % 5,), generator=DRAW),
            "picture": torch.randn(TOWER_INPUT, generator=DRAW),
        }
        for i in range(20)
    ],
}
LORA = LoRAConfig(rank=2, alpha=4.0, target_modules=("*.qkv",))


def train_run(folder: Path, more: dict, kind: type = TaskWithParts, lora: bool = False) -> None:
    torch.manual_seed(7)
    model = TextImageModel()
    task = kind(add_lora(model, LORA) if lora else model)
    settings = {
        "steps": 10,
        "save_every": 5,
        "ema_decay": 0.9,
        "mixture": MixtureConfig(weights={"text": 3.0, "pictures": 1.0}),
    }
    run = Trainer(stage(**settings | more), task, SOURCES, folder, seed=4, quiet=True)
    kinds = [run.loader.order[i].source for i in range(run.stage.batch_size * 10)]
    run.train()
    whole = add_lora(TextImageModel(), LORA) if lora else TextImageModel()
    distributed.gather_weights(run.task.model, whole, run.optimizer.master_weights())
    steps = {name: slot.steps for name, slot in run.optimizer.parameter_states.items()}
    about = {"filled": distributed.gather_objects(getattr(task, "filled", 0)), "kinds": kinds, "steps": steps}
    if distributed.get_rank() == 0:
        save_file(weights(whole), folder / "end.safetensors")
        (folder / "about.json").write_text(json.dumps(about))


def curve(folder: Path) -> list[float]:
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [row[key] for row in rows for key in ("loss", "loss/text", "loss/captions", "grad_norm")]


def compare_with_one_rank(folder: Path, count: int, more: dict, lora: bool = False) -> dict:
    for name, ranks_ in (("alone", 1), ("many", count)):
        (folder / name).mkdir()
        ranks.run(ranks_, train_run, folder / name, more, TaskWithParts, lora)
    assert curve(folder / "many") == pytest.approx(curve(folder / "alone"), rel=1e-3)
    alone, many = (load_file(folder / name / "end.safetensors") for name in ("alone", "many"))
    for name, value in alone.items():
        assert (many[name] - value).abs().max() <= 2e-3 * value.abs().max(), name
    about, other = (json.loads((folder / name / "about.json").read_text()) for name in ("many", "alone"))
    assert about["steps"] == other["steps"]  # a step without images does not update the tower
    return about


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize(
    "more", [{"batch_size": 3}, {"batch_size": 8, "gradient_accumulation_steps": 2, "gradient_checkpointing": True}]
)
def test_ranks_without_images_have_no_effect(tmp_path, count, more):
    about = compare_with_one_rank(tmp_path, count, more)
    assert min(about["filled"]) > 0  # each rank filled a batch at some step
    size = more["batch_size"] // more.get("gradient_accumulation_steps", 1)
    batches = [set(about["kinds"][i : i + size]) for i in range(0, len(about["kinds"]), size)]
    assert {"text"} in batches  # and in some step no rank had an image
    assert about["steps"]["project.weight"] < about["steps"]["decoder.norm.weight"] == 10


@pytest.mark.slow
def test_fewer_samples_than_ranks(tmp_path):
    """The third rank has no sample of a micro-batch of two, and runs one of the first rank with weight 0."""
    compare_with_one_rank(tmp_path, 3, {"batch_size": 4, "gradient_accumulation_steps": 2})


@pytest.mark.slow
def test_adapters_train_equally(tmp_path):
    compare_with_one_rank(tmp_path, 2, {"batch_size": 3, "trainable": ("*.lora",)}, lora=True)


def train_with_short_timeout(folder: Path, more: dict) -> None:
    dist.destroy_process_group()
    dist.init_process_group("gloo", timeout=timedelta(seconds=8))
    train_run(folder, more, TaskWithoutParts)


@pytest.mark.slow
def test_task_without_parts_fails(tmp_path):
    """Without `used_parts`, ranks run different parts; gloo detects mismatched sizes."""
    codes = ranks.finish(ranks.spawn(2, train_with_short_timeout, tmp_path, {"batch_size": 3}))
    assert codes != [0, 0]
    assert not (tmp_path / "about.json").exists()


# ---- without processes ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def simulate_other_rank(others: dict[str, float]):
    """Simulate two ranks; `others` are the numbers of the other one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed, "get_world_size", lambda: 2)
        patch.setattr(distributed, "sum_over_ranks", lambda mine: {k: v + others.get(k, 0) for k, v in mine.items()})
        yield


def test_only_batches_that_skip_a_used_part_are_filled():
    task = TaskWithParts(TextImageModel())
    text, seen = task.collate(SOURCES["text"][:2]), task.collate(SOURCES["pictures"][:2])
    with simulate_other_rank({"0 tower": 1}):
        (full,) = distributed.fill_micro_batches(task, [text])
        assert task.used_parts(full) == {"tower": True}
        assert task.count_loss_terms(full) == task.count_loss_terms(text)
        assert distributed.fill_micro_batches(task, [seen])[0] is seen
    with simulate_other_rank({"1 tower": 1}):
        kept, filled = distributed.fill_micro_batches(task, [text, text])
        assert kept is text
        assert len(filled["pictures"]) == 1
    with simulate_other_rank({}):
        assert distributed.fill_micro_batches(task, [text])[0] is text
    assert distributed.fill_micro_batches(task, [text]) == [text]  # one rank


def test_fill_changes_no_loss_or_gradient():
    task = TaskWithParts(TextImageModel())
    text = task.collate(SOURCES["text"][:3])

    def gradients(batch):
        task.model.zero_grad()
        losses = task(batch)
        sum(losses.values()).backward()
        return losses, {n: p.grad for n, p in task.model.named_parameters()}

    plain, before = gradients(text)
    filled, after = gradients(task.fill_part(text, "tower"))
    torch.testing.assert_close(filled, plain)
    for name, grad in after.items():
        assert grad is not None or before[name] is None
        if name.startswith(("tower", "project")):
            assert before[name] is None
            assert not grad.any()
        else:
            torch.testing.assert_close(grad, before[name])


@pytest.mark.parametrize(
    "fill",
    [
        lambda task, batch, part: batch,
        lambda task, batch, part: {
            **TaskWithParts.fill_part(task, batch, part),
            "targets": torch.zeros(3, 4, dtype=torch.long),
        },
    ],
)
def test_wrong_fill_is_named(fill):
    task = type("Clumsy", (TaskWithParts,), {"fill_part": fill})(TextImageModel())
    with simulate_other_rank({"0 tower": 1}), pytest.raises(TrainError, match=r"Clumsy\.fill_part"):
        distributed.fill_micro_batches(task, [task.collate(SOURCES["text"][:2])])
