"""Trainer: resuming after an interruption, reproducibility, validation and errors."""

import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from vitrail.backbones.decoder import Decoder, DecoderConfig
from vitrail.codecs.quantizers import VQ
from vitrail.data.sampler import MixtureConfig
from vitrail.errors import CheckpointError, ConfigError, TrainError, TrainingInterrupted
from vitrail.nn import AttentionConfig, BlockConfig, GatedMLPConfig, RotaryConfig
from vitrail.tasks.text_task import TextTask
from vitrail.training import checkpoint
from vitrail.training import trainer as trainer_module
from vitrail.training.lora import LoRAConfig, add_lora
from vitrail.training.lr_schedule import CosineSchedule
from vitrail.training.optimizer import OptimConfig
from vitrail.training.stage_config import StageConfig
from vitrail.training.trainer import Trainer, _derive_seed, has_uninitialized_modules

CONFIG = DecoderConfig(
    vocab_size=30,
    layers=2,
    tie_word_embeddings=True,
    block=BlockConfig(
        width=16, attention=AttentionConfig(heads=2, kv_heads=1), mlp=GatedMLPConfig(intermediate_size=24), norm="rms"
    ),
    rotary=RotaryConfig(head_dim=8),
)
SOURCES = {
    name: [np.random.default_rng(i + 100 * k).integers(0, 30, 12) for i in range(40)] for k, name in enumerate("ab")
}


def stage(**more) -> StageConfig:
    settings = {
        "name": "s",
        "task": "text",
        "steps": 12,
        "batch_size": 4,
        "mixture": MixtureConfig(weights={"a": 2.0, "b": 1.0}),
        "optim": OptimConfig(lr=1e-2),
        "schedule": CosineSchedule(warmup_steps=2),
        "save_every": 3,
    }
    return StageConfig(**(settings | more))


def model() -> Decoder:
    torch.manual_seed(7)
    return Decoder(CONFIG)


def trainer(folder, config=None, made=None, **more) -> Trainer:
    return Trainer(config or stage(), TextTask(made or model()), SOURCES, folder, seed=3, quiet=True, **more)


def weights(m) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in m.named_parameters()}


def same(a, b) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


class Halt(Exception):
    pass


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"ema_decay": 0.9},
        {"dtype": "bfloat16"},
        {"gradient_accumulation_steps": 2},
        {"gradient_checkpointing": True},
    ],
)
def test_interrupted_run_ends_with_equal_weights(tmp_path, more, monkeypatch):
    whole = weights(trainer(tmp_path / "whole", stage(**more)).train())
    plain = Trainer._train_step
    for stop in (1, 4, 8, 11):
        folder = tmp_path / f"stop{stop}"

        def one_step(self, *given, stop=stop):
            if self.step == stop:
                raise Halt
            return plain(self, *given)

        monkeypatch.setattr(Trainer, "_train_step", one_step)
        with pytest.raises(Halt):
            trainer(folder, stage(**more)).train()
        monkeypatch.setattr(Trainer, "_train_step", plain)
        again = trainer(folder, stage(**more))
        assert same(weights(again.train()), whole)
        rows = [json.loads(line)["step"] for line in (folder / "log.jsonl").read_text().splitlines()]
        assert rows == list(range(1, 13))  # every step is logged once


def test_random_numbers_depend_on_the_step(tmp_path, monkeypatch):
    """Dropout is equal after a resume, and differs between steps and ranks."""
    lora = LoRAConfig(rank=2, alpha=4.0, target_modules=("*.qkv",), dropout=0.5)

    def made() -> Trainer:
        return trainer(tmp_path / "broken", stage(trainable=("*.lora",)), add_lora(model(), lora))

    settings = stage(trainable=("*.lora",))
    whole = weights(trainer(tmp_path / "whole", settings, add_lora(model(), lora)).train())
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "validate", lambda self: os.kill(os.getpid(), signal.SIGTERM) or {})
        stopped = trainer(
            tmp_path / "broken", settings.replace(validate=("a",), validate_every=5), add_lora(model(), lora)
        )
        with pytest.raises(TrainError, match="after step 5"):
            stopped.train()
    torch.rand(7)
    assert same(weights(made().train()), whole)
    other = Trainer(settings, TextTask(add_lora(model(), lora)), SOURCES, tmp_path / "other", seed=4, quiet=True)
    assert not same(weights(other.train()), whole)
    assert len({_derive_seed(seed, step, rank) for seed in range(3) for step in range(9) for rank in range(3)}) == 81


SCRIPT = """
import sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
import test_trainer as t
made = t.trainer(Path(sys.argv[1]), t.stage(steps=40, save_every=1))
if sys.argv[3] == "wait":
    plain = made._train_step
    def one_step(*given):
        if made.step == 39:
            t.time.sleep(3600)
        return plain(*given)
    made._train_step = one_step
made = made.train()
from safetensors.torch import save_file
save_file({k: v.contiguous() for k, v in t.weights(made).items()}, sys.argv[1] + "/end.safetensors")
"""


def run(folder, kill_after=None) -> int:
    here = Path(__file__).parent
    path = os.pathsep.join([str(here.parents[1] / "src"), str(here.parent)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    saves = folder / "checkpoints"
    before, end = checkpoint.list_steps(saves)[-1:], "go on" if kill_after is None else "wait"
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, str(folder), str(here), end], env=environment)
    if kill_after is not None:
        while process.poll() is None and checkpoint.list_steps(saves)[-1:] == before != [39]:
            time.sleep(0.01)
        time.sleep(kill_after)
        process.send_signal(signal.SIGKILL)
    return process.wait()


@pytest.mark.slow
def test_run_killed_at_random_times(tmp_path):
    """Save every step, so that many kills happen during a save."""
    from safetensors.torch import load_file

    (tmp_path / "whole").mkdir()
    assert run(tmp_path / "whole") == 0
    broken = tmp_path / "broken"
    broken.mkdir()
    draw = random.Random(0)
    for _ in range(6):
        assert run(broken, kill_after=draw.uniform(0, 0.05)) == -signal.SIGKILL
    assert run(broken) == 0
    assert same(load_file(broken / "end.safetensors"), load_file(tmp_path / "whole" / "end.safetensors"))
    assert not list((broken / "checkpoints").glob(".*"))


def test_accumulation_and_checkpointing_differ_only_by_rounding(tmp_path):
    plain = weights(trainer(tmp_path / "a").train())
    for i, more in enumerate(
        ({"gradient_accumulation_steps": 2}, {"gradient_accumulation_steps": 4}, {"gradient_checkpointing": True})
    ):
        other = weights(trainer(tmp_path / f"b{i}", stage(**more)).train())
        for name, value in plain.items():
            torch.testing.assert_close(other[name], value, rtol=1e-4, atol=1e-5)


def test_training_reduces_the_loss(tmp_path):
    settings = stage(
        steps=60, validate=("a",), validate_every=30, ema_decay=0.8, mixture=MixtureConfig(weights={"a": 1.0})
    )
    trainer(tmp_path, settings).train()
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.2  # from about ln 30: memorizes 40 random windows
    assert rows[-1]["validation/a/text"] < rows[29]["validation/a/text"]
    assert "validation/ema/a/text" in rows[-1]
    assert 0 <= rows[-1]["wait"] <= 1
    assert rows[-1]["samples_per_s"] > 0 and "mfu" not in rows[-1]  # the peak rate of a CPU is unknown


def test_cudnn_attention_is_disabled(tmp_path, monkeypatch):
    """cuDNN attention has a NaN bug (pytorch/pytorch#196678). Other settings stay, and are restored after an error."""
    settings, fused = [], torch.nn.functional.scaled_dot_product_attention

    def spy(*args, **kwargs):
        tag = torch.compiler.config.cache_key_tag  # keeps graphs compiled with cuDNN out of the cache
        settings.append((torch.backends.cuda.cudnn_sdp_enabled(), torch.backends.cuda.math_sdp_enabled(), bool(tag)))
        if len(settings) > 30:  # in the second run
            raise Halt
        return fused(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    torch.backends.cuda.enable_math_sdp(False)
    try:
        trainer(tmp_path / "a").train()
        assert set(settings) == {(False, False, True)} and torch.backends.cuda.cudnn_sdp_enabled()
        with pytest.raises(Halt):
            trainer(tmp_path / "b").train()
        assert torch.backends.cuda.cudnn_sdp_enabled() and not torch.backends.cuda.math_sdp_enabled()
        assert not torch.compiler.config.cache_key_tag
    finally:
        torch.backends.cuda.enable_math_sdp(True)


def test_frozen_parts_do_not_change(tmp_path):
    before, made = weights(model()), model()
    trainer(tmp_path, stage(trainable=("blocks.1",)), made).train()
    moved = {name for name, value in weights(made).items() if not torch.equal(value, before[name])}
    assert moved
    assert all(name.startswith("blocks.1") for name in moved)


def test_nan_loss_is_reported_with_its_batch(tmp_path):
    made = model()
    run_ = trainer(tmp_path, made=made)
    plain = run_._train_step

    def poison(*given):
        if run_.step == 5:
            with torch.no_grad():
                made.norm.weight[0] = float("nan")
        return plain(*given)

    run_._train_step = poison
    with pytest.raises(TrainError, match="infinite loss in step 6"):
        run_.train()
    report = json.loads((tmp_path / "bad-step-00000006" / "samples.json").read_text())
    assert [draw["source"] for draw in report["samples"][0]] == [run_.loader.order[i].source for i in range(20, 24)]
    assert (tmp_path / "bad-step-00000006" / "batch.safetensors").exists()
    assert checkpoint.list_steps(tmp_path / "checkpoints") == [3]  # the last checkpoint


def test_nan_gradient_is_located(tmp_path):
    """The loss is finite, and so are the gradients of all blocks after the bad one."""
    made = model()
    run_ = trainer(tmp_path, made=made)

    def spoil(grad):
        return torch.full_like(grad, float("nan")) if run_.step == 2 else None

    made.blocks[0].register_forward_hook(lambda _module, _args, out: out.register_hook(spoil) and None)
    with pytest.raises(TrainError, match=r"step 3: losses \{'text': \d.* last blocks\.0\."):
        run_.train()
    broken = json.loads((tmp_path / "bad-step-00000003" / "samples.json").read_text())["broken gradients"]
    whole = [name for name, _ in made.named_parameters() if name not in broken]
    assert broken and all(name.startswith(("embed.", "blocks.0.")) for name in broken)
    assert {name for name in whole if name.startswith("blocks.1.")} and "norm.weight" in whole
    assert broken == [name for name, _ in made.named_parameters() if name in broken]


def test_full_disk_keeps_the_last_checkpoint(tmp_path, monkeypatch):
    whole = weights(trainer(tmp_path / "whole").train())
    plain = checkpoint.write_tensor_file

    def full(path, *given):
        if "00000006" in str(path) and path.name == "optim.safetensors":
            raise OSError(errno.ENOSPC, "No space left on device")
        return plain(path, *given)

    monkeypatch.setattr(checkpoint, "write_tensor_file", full)
    with pytest.raises(CheckpointError, match=r"No space left.*\n.*resumes from step 3"):
        trainer(tmp_path / "full").train()
    assert [p.name for p in (tmp_path / "full" / "checkpoints").iterdir()] == ["step-00000003"]
    monkeypatch.undo()
    assert same(weights(trainer(tmp_path / "full").train()), whole)


def test_checkpoint_is_published_by_a_rename(tmp_path, monkeypatch):
    """A process killed before the rename leaves no checkpoint."""

    def die(*_given):
        raise KeyboardInterrupt

    state = {"w": torch.ones(3)}
    checkpoint.save_checkpoint(tmp_path, 1, {"model": state}, {"step": 1})
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", die)
        with pytest.raises(KeyboardInterrupt):
            checkpoint.save_checkpoint(tmp_path, 2, {"model": state}, {"step": 2})
    assert checkpoint.list_steps(tmp_path) == [1]
    checkpoint.remove_partial_checkpoints(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_signal_finishes_the_step(tmp_path):
    whole = weights(trainer(tmp_path / "whole").train())
    run_ = trainer(tmp_path / "cut")
    plain = run_._train_step

    def asked(*given):
        if run_.step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return plain(*given)

    run_._train_step = asked
    with pytest.raises(TrainingInterrupted, match="SIGTERM after step 5 of 12"):
        run_.train()
    assert checkpoint.list_steps(tmp_path / "cut" / "checkpoints")[-1] == 5
    assert same(weights(trainer(tmp_path / "cut").train()), whole)


def test_resume_with_another_recipe_raises(tmp_path):
    trainer(tmp_path, identity="one").train()
    with pytest.raises(TrainError, match="another recipe"):
        trainer(tmp_path, identity="two").train()


def truncate_weights(path):
    (path / "optim.safetensors").write_bytes((path / "optim.safetensors").read_bytes()[:100])


def change_a_weight(path):
    data = bytearray((path / "model.safetensors").read_bytes())
    data[-3] ^= 1
    (path / "model.safetensors").write_bytes(data)


def empty_state(path):
    (path / "state.json").write_text("")


@pytest.mark.parametrize("damage", [truncate_weights, change_a_weight, empty_state])
def test_damaged_newest_checkpoint_falls_back_to_the_previous_one(tmp_path, damage, capsys):
    whole = weights(trainer(tmp_path).train())
    saves = tmp_path / "checkpoints"
    damage(checkpoint.get_checkpoint_path(saves, 12))
    run_ = trainer(tmp_path)
    steps, plain = [], run_._train_step
    run_._train_step = lambda *given: steps.append(run_.step) or plain(*given)
    assert same(weights(run_.train()), whole)
    assert steps == [9, 10, 11]
    message = capsys.readouterr().err
    assert "step-00000012 cannot be read" in message and "training resumes from step 9" in message
    assert (saves / "damaged-step-00000012").is_dir()  # kept, and not in the way of the new one
    assert checkpoint.list_steps(saves) == [9, 12]


def test_run_without_a_readable_checkpoint_raises(tmp_path):
    trainer(tmp_path).train()
    for step in (9, 12):
        truncate_weights(checkpoint.get_checkpoint_path(tmp_path / "checkpoints", step))
    with pytest.raises(CheckpointError, match="step-00000012"):
        trainer(tmp_path).train()
    assert checkpoint.list_steps(tmp_path / "checkpoints") == [9, 12]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"steps": 0}, "at least 1"),
        ({"gradient_accumulation_steps": 3}, "3 micro-batches"),
        ({"trainable": ("tower",)}, "'tower'"),
        ({"validate": ("c",), "validate_every": 3}, "'c'"),
        ({"validate": ("a",)}, "validate names a, but validate_every is 0 and validate_first is false"),
        ({"validate_every": 3}, "validate_every is 3, but validate names no source"),
        ({"validate_first": True}, "validate_first is True, but validate names no source"),
        ({"validate": ("a",), "validate_every": -3}, "validate_every is -3"),
        ({"mixture": MixtureConfig(weights={"c": 1.0})}, "'c'"),
        ({"schedule": CosineSchedule(warmup_steps=50)}, "50"),
        ({"optim": {"rate": 1}}, "optim"),
    ],
)
def test_invalid_stages_raise(tmp_path, bad, message):
    with pytest.raises(ConfigError, match=message):
        trainer(tmp_path, stage(**bad))


def test_randomized_source_gets_a_seed_per_sample(tmp_path):
    class Jittered(list):
        def sample(self, item, seed):
            seen.append((item, seed))
            return self[item]

    seen: list = []
    sources = {"a": Jittered(SOURCES["a"][:5]), "b": SOURCES["b"]}
    Trainer(stage(steps=6, save_every=6), TextTask(model()), sources, tmp_path, seed=3, quiet=True).train()
    assert len(seen) > 10 and len({seed for _, seed in seen}) == len(seen)  # an item repeats, its seed does not


def test_state_of_another_step_raises(tmp_path):
    trainer(tmp_path, stage(steps=3)).train()
    file = tmp_path / "checkpoints" / "step-00000003" / "state.json"
    file.write_text(file.read_text().replace('"step": 3', '"step": 9'))
    with pytest.raises(CheckpointError, match="belongs to step 9"):
        trainer(tmp_path).train()


def test_signal_in_the_last_step_raises(tmp_path, monkeypatch):
    plain = Trainer._train_step

    def one_step(self, *given):
        if self.step == 11:
            os.kill(os.getpid(), signal.SIGTERM)
        return plain(self, *given)

    monkeypatch.setattr(Trainer, "_train_step", one_step)
    with pytest.raises(TrainingInterrupted, match="SIGTERM after step 12 of 12"):
        trainer(tmp_path).train()
    assert checkpoint.list_steps(tmp_path / "checkpoints")[-1] == 12


def test_bfloat16_stage_returns_master_weights(tmp_path):
    run = trainer(tmp_path, stage(dtype="bfloat16"))
    made = run.train()
    masters = run.optimizer.master_weights()
    assert masters and {p.dtype for p in made.parameters()} == {torch.float32}
    assert all(torch.equal(p, masters[name]) for name, p in made.named_parameters())
    again = trainer(tmp_path, stage(dtype="bfloat16")).train()  # a finished stage returns the same model
    assert same(weights(again), weights(made))


def test_gradient_checkpointing_is_removed_after_the_stage(tmp_path):
    made = trainer(tmp_path, stage(gradient_checkpointing=True)).train()
    assert not any("forward" in vars(module) for module in made.modules())


def test_unwritable_log_raises(tmp_path, monkeypatch):
    def full(self, *_):
        raise OSError(errno.ENOSPC, "No space left on device")

    run = trainer(tmp_path)
    monkeypatch.setattr("vitrail.training.train_logger.json.dumps", full)
    with pytest.raises(TrainError, match=r"log\.jsonl.*No space"):
        run.train()


@pytest.mark.parametrize("begun", [False, True])
def test_first_pass_with_uninitialized_module_is_not_compiled(tmp_path, monkeypatch, begun):
    compiled, passes = [], []

    def compile_(whole, mode=None):
        return lambda batch: (compiled.append(len(passes)), whole(batch))[1]

    monkeypatch.setattr(torch, "compile", compile_)
    made = model()
    made.is_initialized = begun
    run = trainer(tmp_path, stage(steps=3, compile=True), made)

    def ran(*_) -> None:
        passes.append(1)
        made.is_initialized = True

    run.module.register_forward_hook(ran)
    run.train()
    assert len(passes) == 3 and compiled == ([0, 1, 2] if begun else [1, 2])


def test_frozen_module_needs_no_initialization():
    """A frozen codec runs in eval mode, so its codebook is not initialized."""
    book = VQ(codebook_size=4, dim=2)
    assert has_uninitialized_modules(book) and not has_uninitialized_modules(book.eval())
    book.train()(torch.randn(20, 2))
    assert not has_uninitialized_modules(book)
    again = VQ(codebook_size=4, dim=2)
    assert has_uninitialized_modules(again)
    again.load_state_dict(book.state_dict())
    assert not has_uninitialized_modules(again)
    assert not has_uninitialized_modules(VQ(codebook_size=4, dim=2, kmeans_iters=0))


def test_validation_before_the_first_step(tmp_path, monkeypatch):
    """It happens once, with the initial weights, even if the run is killed before its first checkpoint."""
    how = stage(steps=6, validate=("b",), validate_every=3, validate_first=True)
    first = trainer(tmp_path / "none", how).validate()
    plain = Trainer._train_step

    def one_step(self, *given):
        if self.step == 2:
            raise Halt
        return plain(self, *given)

    monkeypatch.setattr(Trainer, "_train_step", one_step)
    with pytest.raises(Halt):
        trainer(tmp_path / "run", how).train()
    monkeypatch.setattr(Trainer, "_train_step", plain)
    ended = weights(trainer(tmp_path / "run", how).train())
    rows = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(7)) and rows[0] == {"step": 0, **first}
    assert same(ended, weights(trainer(tmp_path / "other", how.replace(validate_first=False)).train()))


def test_mfu_is_the_fraction_of_the_peak_rate(tmp_path, monkeypatch):
    """FLOPs of a step are three forward passes, as torch counts them."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    monkeypatch.setattr(trainer_module, "get_peak_flops", lambda _device, _dtype: 1e9)
    run = trainer(tmp_path, stage(steps=2, schedule=CosineSchedule()))
    run.train()
    row = json.loads((tmp_path / "log.jsonl").read_text().splitlines()[-1])
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        run.task(run.task.collate([SOURCES["a"][i] for i in range(4)]))
    spent = 4 / row["samples_per_s"]
    assert row["mfu"] == pytest.approx(3 * counter.get_total_flops() / spent / 1e9, rel=0.15)
    assert row["tokens_per_s"] == pytest.approx(4 * 11 / spent)


def test_progress_without_a_terminal(tmp_path, capsys):
    """A summary before the first step, lines with progress, and every validation result."""
    settings = stage(steps=40, validate=("b",), validate_every=20)
    Trainer(settings, TextTask(model()), SOURCES, tmp_path, seed=3).train()
    lines = capsys.readouterr().err.splitlines()
    head = "\n".join(lines[:9])
    for text in (
        "Decoder, ",
        " trainable",
        "a (40 samples, 67%), b (40 samples, 33%)",
        "cpu (1 thread), float32",
        "GB for weights",
    ):
        assert text in head
    assert "40 steps of 4 samples" in head and str(tmp_path) in head and "every 20 steps" in head
    steps = [line for line in lines if line.startswith("s: step ")]
    assert steps[0].startswith("s: step 1/40, loss ") and steps[-1].startswith("s: step 40/40")
    assert len(steps) >= 20 and "ETA 0:00:0" in steps[-1]
    for text in ("lr ", "samples/s ", "tokens/s "):
        assert text in steps[-1]
    assert [line.split(",")[0] for line in lines if "validation after" in line] == [
        f"s: validation after step {step}" for step in (20, 40)
    ]


def test_images_are_not_called_tokens(tmp_path, capsys):
    class ImageTask(TextTask):
        count_tokens = property()  # hides the method: the task is no TokenTask

    Trainer(stage(), ImageTask(model()), SOURCES, tmp_path, seed=3).train()
    assert "samples/s" in (output := capsys.readouterr().err) and "tokens/s" not in output


def test_interrupt_during_compilation(tmp_path, monkeypatch, capsys):
    """Ctrl-C during compilation stops the run with a short error."""

    def compile_(_module, mode=None):
        return lambda _batch: os.kill(os.getpid(), signal.SIGINT) or time.sleep(600)

    monkeypatch.setattr(torch, "compile", compile_)
    with pytest.raises(TrainingInterrupted, match="during compilation in step 1 of 12") as error:
        Trainer(stage(compile=True), TextTask(model()), SOURCES, tmp_path, seed=3).train()
    assert error.value.__suppress_context__ and "compiling the model in step 1" in capsys.readouterr().err
