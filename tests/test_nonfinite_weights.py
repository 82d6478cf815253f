"""Weights that are NaN or infinite are refused by name: at load, at save, after an update, and while sampling."""

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from hub.test_safetensors_files import CONFIG
from models.test_unified_model import made
from vitrail import hub, recipe
from vitrail.backbones.decoder import Decoder
from vitrail.errors import CheckpointError, TrainError
from vitrail.generate.bulk_generation import generate_many
from vitrail.generate.image_generation import ImageGenerationConfig, generate_images
from vitrail.generate.sampling import SamplingConfig
from vitrail.generate.text_generation import generate_texts
from vitrail.nn.parameters import find_nonfinite
from vitrail.training import checkpoint
from vitrail.training.lr_schedule import ConstantSchedule

NAME = "blocks.1.branches.mlp.op.down.weight"


def damage(model, value=torch.nan):
    with torch.no_grad():
        model.get_parameter(NAME).view(-1)[3] = value
    return model


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_find_nonfinite(value, dtype):
    tensors = {"a": torch.ones(9), "b": torch.full((3, 5), 6e4, dtype=dtype), "c": torch.arange(3), "d": torch.ones(0)}
    assert find_nonfinite(tensors) == []
    tensors["b"] = tensors["b"].clone()
    tensors["b"][1, 2] = value
    tensors["e"] = torch.tensor(value)
    assert find_nonfinite(tensors) == ["b", "e"]
    assert find_nonfinite({"m": torch.empty(2, device="meta"), "f": torch.ones(2).to(torch.float8_e4m3fn)}) == []


@pytest.mark.parametrize("native", [True, False])
def test_load(native, tmp_path):
    (hub.save if native else hub.to_hf)(Decoder(CONFIG), tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    name = NAME if native else "model.layers.1.mlp.down_proj.weight"
    tensors[name].view(-1)[3] = torch.nan
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=rf"tensor '{NAME}' of .* contains NaN"):
        hub.load(tmp_path)


def test_refused_save_keeps_the_old_file(tmp_path):
    model = Decoder(CONFIG)
    hub.save(model, tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    with pytest.raises(CheckpointError, match=f"not saved: its tensor '{NAME}'"):
        hub.save(damage(model), tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_sampling():
    model = damage(Decoder(CONFIG).eval())
    with pytest.raises(CheckpointError, match=f"NaN or infinite logits: its tensor '{NAME}'"):
        generate_texts(model, [[1, 2]], max_new_tokens=3)
    with pytest.raises(CheckpointError, match=NAME):
        list(generate_many(model, [1, 2], 2, max_new_tokens=3, stop_ids=(), sampling=SamplingConfig()))


def test_image_sampling():
    model = made()
    with torch.no_grad():
        next(model.head.parameters()).fill_(torch.nan)
    with pytest.raises(CheckpointError, match=r"its tensor 'head\."):
        generate_images(model, torch.ones(1, 2, dtype=torch.long), torch.tensor([2]), ImageGenerationConfig())


def make_recipe(folder, lr: float, steps: int = 3):
    (folder / "a.txt").write_text("one two three four five six seven eight nine ten\n" * 400)
    small = recipe.load_recipe("smoke", {"tokenizer.vocab_size": "280", "model.config.layers": "1"})
    optim = small.stages[0].optim.replace(lr=lr)
    stage = small.stages[0].replace(
        steps=steps, batch_size=2, save_every=1, validate=(), validate_every=0, schedule=ConstantSchedule(), optim=optim
    )
    docs = small.sources["docs"].replace(package=None, files=(str(folder / "a.txt"),))
    return small.replace(sources={"docs": docs}, stages=(stage,))


def train(folder, lr: float):
    return recipe.train_recipe(make_recipe(folder, lr), folder / "out", device="cpu", quiet=True, loggers=())


def test_update(tmp_path):
    with pytest.raises(
        TrainError, match=r"step 1 made \d+ weights, first '.*weight', NaN or infinite; there is no"
    ) as e:
        train(tmp_path, 1e38 * 9)
    assert "learning rate" in e.value.remedy
    assert not (tmp_path / "out/final").exists()
    assert checkpoint.list_steps(tmp_path / "out/learn/checkpoints") == []


@pytest.mark.parametrize("deferred", [False, True])
def test_update_keeps_the_previous_checkpoint(tmp_path, monkeypatch, deferred):
    """Also if the check is read in the next step, as on a GPU."""
    from vitrail.training.optimizer import Optimizer
    from vitrail.training.trainer import Trainer

    monkeypatch.setattr(Trainer, "_defers_check", deferred)

    plain, calls = Optimizer.step, []

    def step(self, factor):
        calls.append(factor)
        plain(self, factor if len(calls) < 3 else 1e42)

    monkeypatch.setattr(Optimizer, "step", step)
    with pytest.raises(TrainError, match=r"step 3 made .* the checkpoint of step 2 is kept"):
        train(tmp_path, 1e-3)
    monkeypatch.undo()
    train(tmp_path, 1e-3)
    rows = [json.loads(line)["step"] for line in (tmp_path / "out/learn/log.jsonl").read_text().splitlines()]
    assert rows == [1, 2, 3]


def test_deferred_check_names_the_step_before(tmp_path, monkeypatch):
    from training.test_trainer import stage, trainer
    from vitrail.training.optimizer import Optimizer
    from vitrail.training.trainer import Trainer

    plain, calls = Optimizer.step, []

    def step(self, factor):
        calls.append(factor)
        plain(self, factor if len(calls) < 5 else 1e42)

    monkeypatch.setattr(Optimizer, "step", step)
    monkeypatch.setattr(Trainer, "_defers_check", True)
    run = trainer(tmp_path, stage(steps=50, save_every=4))
    with pytest.raises(TrainError, match=r"step 5 made .* the checkpoint of step 4 is kept"):
        run.train()
    assert len(calls) == 5 and checkpoint.list_steps(tmp_path / "checkpoints") == [4]


RECIPE = """
base = "smoke"
remove = ["sources.docs.package", "sources.docs-test"]
tokenizer = {{ vocab_size = 280 }}
model = {{ config = {{ layers = 1 }} }}
sources = {{ docs = {{ files = [{file}] }} }}
[[stages]]
name = "learn"
steps = 2
validate = []
validate_every = 0
schedule = {{ kind = "constant" }}
optim = {{ lr = 9e38 }}
"""


@pytest.mark.slow
def test_command_exits_with_an_error(tmp_path):
    (tmp_path / "a.txt").write_text("one two three four five\n" * 400)
    (tmp_path / "r.toml").write_text(RECIPE.format(file=json.dumps(str(tmp_path / "a.txt"))))
    command = [sys.executable, "-m", "vitrail", "train", str(tmp_path / "r.toml"), "--out", str(tmp_path / "out")]
    run = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert run.returncode == 2, run.stderr[-2000:]
    assert "NaN or infinite" in run.stderr and not (tmp_path / "out/final").exists()
