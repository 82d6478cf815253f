"""A tower and a decoder on batches that mix mere text with pictures: no rank waits for a part that another skips."""

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

from train import ranks
from train.test_trainer import CONFIG, stage, weights
from vitrail.backbones.decoder import Decoder
from vitrail.data.order import Mixture
from vitrail.encoders.vit import ViT, ViTConfig
from vitrail.errors import TrainError
from vitrail.nn import AttentionConfig, BlockConfig, PlainConfig
from vitrail.objectives.cross_entropy import linear_cross_entropy
from vitrail.train import distributed
from vitrail.train.lora import LoRAConfig, add_lora
from vitrail.train.task import Batch
from vitrail.train.trainer import Trainer

TOWER = ViTConfig(
    layers=2,
    image=8,
    patch=4,
    cls=True,
    block=BlockConfig(width=12, attention=AttentionConfig(heads=2), mlp=PlainConfig(hidden=20)),
)


class Seeing(nn.Module):
    """A picture's four patches are added to the first four tokens of its row."""

    def __init__(self):
        super().__init__()
        self.tower, self.decoder = ViT(TOWER), Decoder(CONFIG)
        self.project = nn.Linear(12, 16)

    def hidden(self, ids: Tensor, pictures: Tensor, rows: Tensor) -> Tensor:
        x = self.decoder.embed(ids)
        if len(pictures):
            seen = self.project(self.tower(pictures))
            x = torch.cat([x[:, :4].index_add(0, rows, seen), x[:, 4:]], dim=1)
        return self.decoder.hidden(embeds=x)


class Unruly:
    """A task that does not tell which parts a batch runs. Texts differ in length; pictures have a loss of their own."""

    def __init__(self, model: Seeing):
        self.model, self.weights = model, {"text": 1.0, "captions": 0.5}

    def collate(self, samples: Sequence[dict]) -> Batch:
        ids = pad_sequence([s["ids"][:-1] for s in samples], batch_first=True)
        targets = pad_sequence([s["ids"][1:] for s in samples], batch_first=True, padding_value=-100)
        seen = [i for i, s in enumerate(samples) if "picture" in s]
        pictures = torch.stack([samples[i]["picture"] for i in seen]) if seen else torch.empty(0, 3, 8, 8)
        return {"ids": ids, "targets": targets, "pictures": pictures, "rows": torch.tensor(seen, dtype=torch.long)}

    def counts(self, batch: Batch) -> dict[str, int]:
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

    def flops(self, batch: Batch) -> int:
        return batch["ids"].numel()


class Ruly(Unruly):
    filled = 0

    def parts(self, batch: Batch) -> dict[str, bool]:
        return {"tower": len(batch["pictures"]) > 0}

    def fill(self, batch: Batch, part: str) -> Batch:
        """One more row, of a grey picture and no targets."""
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
LORA = LoRAConfig(rank=2, alpha=4.0, targets=("*.qkv",))


def learn(folder: Path, more: dict, kind: type = Ruly, lora: bool = False) -> None:
    torch.manual_seed(7)
    model = Seeing()
    task = kind(add_lora(model, LORA) if lora else model)
    settings = {"steps": 10, "save_every": 5, "ema": 0.9, "mixture": Mixture(weights={"text": 3.0, "pictures": 1.0})}
    run = Trainer(stage(**settings | more), task, SOURCES, folder, seed=4, quiet=True)
    kinds = [run.order[i].source for i in range(run.stage.batch * 10)]
    run.train()
    whole = add_lora(Seeing(), LORA) if lora else Seeing()
    distributed.put_together(run.task.model, whole, run.optimizer.masters())
    steps = {name: slot.steps for name, slot in run.optimizer.slots.items()}
    about = {"filled": distributed.gather(getattr(task, "filled", 0)), "kinds": kinds, "steps": steps}
    if distributed.rank() == 0:
        save_file(weights(whole), folder / "end.safetensors")
        (folder / "about.json").write_text(json.dumps(about))


def curve(folder: Path) -> list[float]:
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [row[key] for row in rows for key in ("loss", "loss/text", "loss/captions", "norm")]


def same_as_alone(folder: Path, count: int, more: dict, lora: bool = False) -> dict:
    for name, ranks_ in (("alone", 1), ("many", count)):
        (folder / name).mkdir()
        ranks.run(ranks_, learn, folder / name, more, Ruly, lora)
    assert curve(folder / "many") == pytest.approx(curve(folder / "alone"), rel=1e-3)
    alone, many = (load_file(folder / name / "end.safetensors") for name in ("alone", "many"))
    for name, value in alone.items():
        assert (many[name] - value).abs().max() <= 2e-3 * value.abs().max(), name
    about, other = (json.loads((folder / name / "about.json").read_text()) for name in ("many", "alone"))
    assert about["steps"] == other["steps"]  # a step without any picture leaves the tower as it was
    return about


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("more", [{"batch": 3}, {"batch": 8, "accumulate": 2, "recompute": True}])
def test_ranks_without_pictures_change_nothing(tmp_path, count, more):
    about = same_as_alone(tmp_path, count, more)
    assert min(about["filled"]) > 0  # each rank had to, at some step
    size = more["batch"] // more.get("accumulate", 1)
    batches = [set(about["kinds"][i : i + size]) for i in range(0, len(about["kinds"]), size)]
    assert {"text"} in batches  # and at another none did
    assert about["steps"]["project.weight"] < about["steps"]["decoder.norm.weight"] == 10


@pytest.mark.slow
def test_fewer_samples_than_ranks(tmp_path):
    """Of two samples a micro-batch, the third rank has none of its own, and runs the first rank's at no weight."""
    same_as_alone(tmp_path, 3, {"batch": 4, "accumulate": 2})


@pytest.mark.slow
def test_adapters_learn_the_same(tmp_path):
    same_as_alone(tmp_path, 2, {"batch": 3, "train": ("*.lora",)}, lora=True)


def learn_with_little_patience(folder: Path, more: dict) -> None:
    dist.destroy_process_group()
    dist.init_process_group("gloo", timeout=timedelta(seconds=8))
    learn(folder, more, Unruly)


@pytest.mark.slow
def test_without_telling_the_ranks_would_wait_for_each_other(tmp_path):
    """What `parts` is for: the same batches, from a task that does not tell. Gloo notices that the sizes do not fit."""
    codes = ranks.finish(ranks.spawn(2, learn_with_little_patience, tmp_path, {"batch": 3}), timeout=40)
    assert codes != [0, 0]
    assert not (tmp_path / "about.json").exists()


# ---- without processes ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def beside(others: dict[str, float]):
    """As one of two ranks, whose sums are these."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed, "size", lambda: 2)
        patch.setattr(distributed, "total", lambda mine: {k: v + others.get(k, 0) for k, v in mine.items()})
        yield


def test_only_a_batch_that_lacks_what_another_runs_is_filled():
    task = Ruly(Seeing())
    text, seen = task.collate(SOURCES["text"][:2]), task.collate(SOURCES["pictures"][:2])
    with beside({"0 tower": 1}):
        (full,) = distributed.filled(task, [text])
        assert task.parts(full) == {"tower": True}
        assert task.counts(full) == task.counts(text)
        assert distributed.filled(task, [seen])[0] is seen
    with beside({"1 tower": 1}):
        kept, filled = distributed.filled(task, [text, text])
        assert kept is text
        assert len(filled["pictures"]) == 1
    with beside({}):
        assert distributed.filled(task, [text])[0] is text
    assert distributed.filled(task, [text]) == [text]  # alone


def test_what_fills_adds_nothing():
    task = Ruly(Seeing())
    text = task.collate(SOURCES["text"][:3])

    def gradients(batch):
        task.model.zero_grad()
        losses = task(batch)
        sum(losses.values()).backward()
        return losses, {n: p.grad for n, p in task.model.named_parameters()}

    plain, before = gradients(text)
    filled, after = gradients(task.fill(text, "tower"))
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
        lambda task, batch, part: {**Ruly.fill(task, batch, part), "targets": torch.zeros(3, 4, dtype=torch.long)},
    ],
)
def test_a_task_that_fills_badly_is_named(fill):
    task = type("Clumsy", (Ruly,), {"fill": fill})(Seeing())
    with beside({"0 tower": 1}), pytest.raises(TrainError, match=r"Clumsy\.fill"):
        distributed.filled(task, [task.collate(SOURCES["text"][:2])])
