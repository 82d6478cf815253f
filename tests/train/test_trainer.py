"""A trainer that survives: killed anywhere, it goes on and ends with the same weights, bit for bit."""

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
from vitrail.data.order import Mixture
from vitrail.errors import CheckpointError, ConfigError, Stopped, TrainError
from vitrail.nn import AttentionConfig, BlockConfig, GatedConfig, RotaryConfig
from vitrail.tasks.text import TextTask
from vitrail.train import checkpoint
from vitrail.train.lora import LoRAConfig, add_lora
from vitrail.train.optim import OptimConfig
from vitrail.train.schedule import Cosine
from vitrail.train.stage import StageConfig
from vitrail.train.trainer import Trainer, _seed, unbegun

CONFIG = DecoderConfig(
    vocab=30,
    layers=2,
    tied=True,
    block=BlockConfig(width=16, attention=AttentionConfig(heads=2, kv_heads=1), mlp=GatedConfig(hidden=24), norm="rms"),
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
        "batch": 4,
        "mixture": Mixture(weights={"a": 2.0, "b": 1.0}),
        "optim": OptimConfig(lr=1e-2),
        "schedule": Cosine(warmup=2),
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


@pytest.mark.parametrize("more", [{}, {"ema": 0.9}, {"dtype": "bfloat16"}, {"accumulate": 2}, {"recompute": True}])
def test_a_run_broken_off_anywhere_ends_the_same(tmp_path, more, monkeypatch):
    whole = weights(trainer(tmp_path / "whole", stage(**more)).train())
    plain = Trainer._one_step
    for stop in (1, 4, 8, 11):
        folder = tmp_path / f"stop{stop}"

        def one_step(self, *given, stop=stop):
            if self.step == stop:
                raise Halt
            return plain(self, *given)

        monkeypatch.setattr(Trainer, "_one_step", one_step)
        with pytest.raises(Halt):
            trainer(folder, stage(**more)).train()
        monkeypatch.setattr(Trainer, "_one_step", plain)
        again = trainer(folder, stage(**more))
        assert same(weights(again.train()), whole)
        rows = [json.loads(line)["step"] for line in (folder / "log.jsonl").read_text().splitlines()]
        assert rows == list(range(1, 13))  # one curve, nothing told twice


def test_random_numbers_follow_from_the_step(tmp_path, monkeypatch):
    """Dropout draws the same after a break, whatever was drawn in between, and other numbers at every step and rank."""
    lora = LoRAConfig(rank=2, alpha=4.0, targets=("*.qkv",), dropout=0.5)

    def made() -> Trainer:
        return trainer(tmp_path / "broken", stage(train=("*.lora",)), add_lora(model(), lora))

    settings = stage(train=("*.lora",))
    whole = weights(trainer(tmp_path / "whole", settings, add_lora(model(), lora)).train())
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "judge", lambda self: os.kill(os.getpid(), signal.SIGTERM) or {})
        stopped = trainer(tmp_path / "broken", settings.with_(judge_every=5), add_lora(model(), lora))
        with pytest.raises(TrainError, match="after step 5"):
            stopped.train()
    torch.rand(7)
    assert same(weights(made().train()), whole)
    other = Trainer(settings, TextTask(add_lora(model(), lora)), SOURCES, tmp_path / "other", seed=4, quiet=True)
    assert not same(weights(other.train()), whole)
    assert len({_seed(seed, step, rank) for seed in range(3) for step in range(9) for rank in range(3)}) == 81


SCRIPT = """
import sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
import test_trainer as t
made = t.trainer(Path(sys.argv[1]), t.stage(steps=40, save_every=1)).train()
from safetensors.torch import save_file
save_file({k: v.contiguous() for k, v in t.weights(made).items()}, sys.argv[1] + "/end.safetensors")
"""


def run(folder, kill_after=None) -> int:
    here = Path(__file__).parent
    path = os.pathsep.join([str(here.parents[1] / "src"), str(here.parent)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, str(folder), str(here)], env=environment)
    if kill_after is not None:
        saves = folder / "checkpoints"
        while process.poll() is None and not checkpoint.steps(saves):
            time.sleep(0.01)
        time.sleep(kill_after)
        process.send_signal(signal.SIGKILL)
    return process.wait()


@pytest.mark.slow
def test_killed_at_random_instants(tmp_path):
    """A save every step, so that many of the kills fall inside one."""
    from safetensors.torch import load_file

    (tmp_path / "whole").mkdir()
    assert run(tmp_path / "whole") == 0
    broken = tmp_path / "broken"
    broken.mkdir()
    draw, kills = random.Random(0), 0
    for _ in range(6):
        if run(broken, kill_after=draw.uniform(0, 0.25)) == -signal.SIGKILL:
            kills += 1
    assert kills >= 2
    assert run(broken) == 0
    assert same(load_file(broken / "end.safetensors"), load_file(tmp_path / "whole" / "end.safetensors"))
    assert not list((broken / "checkpoints").glob(".*"))


def test_micro_batches_and_recomputing_change_nothing_but_rounding(tmp_path):
    plain = weights(trainer(tmp_path / "a").train())
    for i, more in enumerate(({"accumulate": 2}, {"accumulate": 4}, {"recompute": True})):
        other = weights(trainer(tmp_path / f"b{i}", stage(**more)).train())
        for name, value in plain.items():
            torch.testing.assert_close(other[name], value, rtol=1e-4, atol=1e-5)


def test_it_learns(tmp_path):
    settings = stage(steps=60, judge=("a",), judge_every=30, ema=0.8, mixture=Mixture(weights={"a": 1.0}))
    trainer(tmp_path, settings).train()
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.2  # nearly ln 30: 40 random windows, learnt by heart
    assert rows[-1]["judge/a/text"] < rows[29]["judge/a/text"]
    assert "judge/ema/a/text" in rows[-1]
    assert 0 <= rows[-1]["wait"] <= 1
    assert rows[-1]["mfu"] > 0


def test_no_gradient_is_made_by_cudnns_attention(tmp_path, monkeypatch):
    """It makes NaN of some (pytorch/pytorch#196678). What else is turned off stays so, and all is as before behind
    a failure too."""
    seen, fused = [], torch.nn.functional.scaled_dot_product_attention

    def spy(*args, **kwargs):
        tag = torch.compiler.config.cache_key_tag  # or a graph compiled before would bring it back
        seen.append((torch.backends.cuda.cudnn_sdp_enabled(), torch.backends.cuda.math_sdp_enabled(), bool(tag)))
        if len(seen) > 30:  # in the second run
            raise Halt
        return fused(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    torch.backends.cuda.enable_math_sdp(False)
    try:
        trainer(tmp_path / "a").train()
        assert set(seen) == {(False, False, True)} and torch.backends.cuda.cudnn_sdp_enabled()
        with pytest.raises(Halt):
            trainer(tmp_path / "b").train()
        assert torch.backends.cuda.cudnn_sdp_enabled() and not torch.backends.cuda.math_sdp_enabled()
        assert not torch.compiler.config.cache_key_tag
    finally:
        torch.backends.cuda.enable_math_sdp(True)


def test_frozen_parts_stay(tmp_path):
    before, made = weights(model()), model()
    trainer(tmp_path, stage(train=("blocks.1",)), made).train()
    moved = {name for name, value in weights(made).items() if not torch.equal(value, before[name])}
    assert moved
    assert all(name.startswith("blocks.1") for name in moved)


def test_a_step_that_is_not_a_number_is_reported_with_its_batch(tmp_path):
    made = model()
    run_ = trainer(tmp_path, made=made)
    plain = run_._one_step

    def poison(*given):
        if run_.step == 5:
            with torch.no_grad():
                made.norm.weight[0] = float("nan")
        return plain(*given)

    run_._one_step = poison
    with pytest.raises(TrainError, match="step 6 is not a number"):
        run_.train()
    about = json.loads((tmp_path / "bad-step-00000006" / "samples.json").read_text())
    assert [draw["source"] for draw in about["samples"][0]] == [run_.order[i].source for i in range(20, 24)]
    assert (tmp_path / "bad-step-00000006" / "batch.safetensors").exists()
    assert checkpoint.steps(tmp_path / "checkpoints") == [3]  # the last good one


def test_a_gradient_that_breaks_says_where(tmp_path):
    """The loss is a number, and so are the gradients of all that comes behind the block where one is not."""
    made = model()
    run_ = trainer(tmp_path, made=made)

    def spoil(grad):
        return torch.full_like(grad, float("nan")) if run_.step == 2 else None

    made.blocks[0].register_forward_hook(lambda _module, _args, out: out.register_hook(spoil) and None)
    with pytest.raises(TrainError, match=r"step 3 is not a number: losses \{'text': \d.* the last of them blocks\.0\."):
        run_.train()
    broken = json.loads((tmp_path / "bad-step-00000003" / "samples.json").read_text())["broken gradients"]
    whole = [name for name, _ in made.named_parameters() if name not in broken]
    assert broken and all(name.startswith(("embed.", "blocks.0.")) for name in broken)
    assert {name for name in whole if name.startswith("blocks.1.")} and "norm.weight" in whole
    assert broken == [name for name, _ in made.named_parameters() if name in broken]


def test_a_full_disk_loses_nothing(tmp_path, monkeypatch):
    whole = weights(trainer(tmp_path / "whole").train())
    plain = checkpoint.save_file

    def full(tensors, path, **more):
        if "00000006" in str(path) and path.name == "optim.safetensors":
            raise OSError(errno.ENOSPC, "No space left on device")
        return plain(tensors, path, **more)

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(CheckpointError, match=r"No space left.*\n.*goes on from step 3"):
        trainer(tmp_path / "full").train()
    assert [p.name for p in (tmp_path / "full" / "checkpoints").iterdir()] == ["step-00000003"]
    monkeypatch.undo()
    assert same(weights(trainer(tmp_path / "full").train()), whole)


def test_a_checkpoint_appears_by_one_rename(tmp_path, monkeypatch):
    """Killed just before it, everything is written and nothing is there."""

    def die(*_given):
        raise KeyboardInterrupt

    state = {"w": torch.ones(3)}
    checkpoint.save(tmp_path, 1, {"model": state}, {"step": 1})
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", die)
        with pytest.raises(KeyboardInterrupt):
            checkpoint.save(tmp_path, 2, {"model": state}, {"step": 2})
    assert checkpoint.steps(tmp_path) == [1]
    checkpoint.sweep(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_a_signal_lets_the_step_end(tmp_path):
    whole = weights(trainer(tmp_path / "whole").train())
    run_ = trainer(tmp_path / "cut")
    plain = run_._one_step

    def asked(*given):
        if run_.step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return plain(*given)

    run_._one_step = asked
    with pytest.raises(Stopped, match="SIGTERM after step 5 of 12"):
        run_.train()
    assert checkpoint.steps(tmp_path / "cut" / "checkpoints")[-1] == 5
    assert same(weights(trainer(tmp_path / "cut").train()), whole)


def test_another_recipe_is_not_resumed(tmp_path):
    trainer(tmp_path, identity="one").train()
    with pytest.raises(TrainError, match="another recipe"):
        trainer(tmp_path, identity="two").train()


def test_a_spoilt_checkpoint_is_named(tmp_path):
    trainer(tmp_path).train()
    spoilt = checkpoint.path_of(tmp_path / "checkpoints", 12) / "optim.safetensors"
    spoilt.write_bytes(spoilt.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="step-00000012"):
        trainer(tmp_path).train()


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"steps": 0}, "at least 1"),
        ({"accumulate": 3}, "3 micro-batches"),
        ({"train": ("tower",)}, "'tower'"),
        ({"judge": ("c",)}, "'c'"),
        ({"mixture": Mixture(weights={"c": 1.0})}, "'c'"),
        ({"schedule": Cosine(warmup=50)}, "50"),
        ({"optim": {"rate": 1}}, "optim"),
    ],
)
def test_impossible_stages_are_refused(tmp_path, bad, says):
    with pytest.raises(ConfigError, match=says):
        trainer(tmp_path, stage(**bad))


def test_a_varied_source_is_told_the_chance_of_every_sample(tmp_path):
    class Jittered(list):
        def sample(self, item, chance):
            seen.append((item, chance))
            return self[item]

    seen: list = []
    sources = {"a": Jittered(SOURCES["a"][:5]), "b": SOURCES["b"]}
    Trainer(stage(steps=6, save_every=6), TextTask(model()), sources, tmp_path, seed=3, quiet=True).train()
    assert len(seen) > 10 and len({chance for _, chance in seen}) == len(
        seen
    )  # an item comes again, its chance does not


def test_a_state_of_another_step_is_refused(tmp_path):
    trainer(tmp_path, stage(steps=6)).train()
    file = tmp_path / "checkpoints" / "step-00000006" / "state.json"
    file.write_text(file.read_text().replace('"step": 6', '"step": 9'))
    with pytest.raises(CheckpointError, match="that of step 9"):
        trainer(tmp_path).train()


def test_a_signal_in_the_last_step_stops_what_would_follow(tmp_path, monkeypatch):
    plain = Trainer._one_step

    def one_step(self, *given):
        if self.step == 11:
            os.kill(os.getpid(), signal.SIGTERM)
        return plain(self, *given)

    monkeypatch.setattr(Trainer, "_one_step", one_step)
    with pytest.raises(Stopped, match="SIGTERM after step 12 of 12"):
        trainer(tmp_path).train()
    assert checkpoint.steps(tmp_path / "checkpoints")[-1] == 12


def test_a_stage_in_half_precision_hands_on_its_masters(tmp_path):
    run = trainer(tmp_path, stage(dtype="bfloat16"))
    made = run.train()
    masters = run.optimizer.masters()
    assert masters and {p.dtype for p in made.parameters()} == {torch.float32}
    assert all(torch.equal(p, masters[name]) for name, p in made.named_parameters())
    again = trainer(tmp_path, stage(dtype="bfloat16")).train()  # a finished stage gives the same
    assert same(weights(again), weights(made))


def test_recomputing_ends_with_its_stage(tmp_path):
    made = trainer(tmp_path, stage(recompute=True)).train()
    assert not any("forward" in vars(module) for module in made.modules())


def test_a_log_that_cannot_be_written_is_said(tmp_path, monkeypatch):
    def full(self, *_):
        raise OSError(errno.ENOSPC, "No space left on device")

    run = trainer(tmp_path)
    monkeypatch.setattr("vitrail.train.log.json.dumps", full)
    with pytest.raises(TrainError, match=r"log\.jsonl.*No space"):
        run.train()


@pytest.mark.parametrize("begun", [False, True])
def test_the_first_pass_is_not_compiled_where_a_part_begins_in_it(tmp_path, monkeypatch, begun):
    compiled, passes = [], []

    def compile_(whole, mode=None):
        return lambda batch: (compiled.append(len(passes)), whole(batch))[1]

    monkeypatch.setattr(torch, "compile", compile_)
    made = model()
    made.begun = begun
    run = trainer(tmp_path, stage(steps=3, compile=True), made)

    def ran(*_) -> None:
        passes.append(1)
        made.begun = True

    run.whole.register_forward_hook(ran)
    run.train()
    assert len(passes) == 3 and compiled == ([0, 1, 2] if begun else [1, 2])


def test_what_learns_nothing_has_nothing_to_begin():
    """A frozen codec runs in eval mode, and its codebook is as it came."""
    book = VQ(codes=4, dim=2)
    assert unbegun(book) and not unbegun(book.eval())
    book.train()(torch.randn(20, 2))
    assert not unbegun(book)
    again = VQ(codes=4, dim=2)
    assert unbegun(again)
    again.load_state_dict(book.state_dict())
    assert not unbegun(again)
    assert not unbegun(VQ(codes=4, dim=2, start=0))


def test_a_run_may_be_judged_before_its_first_step(tmp_path, monkeypatch):
    """Once, though it be killed before its first checkpoint, and by the weights that it starts from."""
    how = stage(steps=6, judge=("b",), judge_every=3, judge_first=True)
    first = trainer(tmp_path / "none", how).judge()
    plain = Trainer._one_step

    def one_step(self, *given):
        if self.step == 2:
            raise Halt
        return plain(self, *given)

    monkeypatch.setattr(Trainer, "_one_step", one_step)
    with pytest.raises(Halt):
        trainer(tmp_path / "run", how).train()
    monkeypatch.setattr(Trainer, "_one_step", plain)
    ended = weights(trainer(tmp_path / "run", how).train())
    rows = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(7)) and rows[0] == {"step": 0, **first}
    assert same(ended, weights(trainer(tmp_path / "other", how.with_(judge_first=False)).train()))
