"""Runs of a codec: broken off, in half precision, against a critic, over many processes, on photographs."""

import json
from pathlib import Path

import pytest
import torch

from tasks.test_codec import QUANTIZERS, QUICK, TOWER, Kept, plain, taught, trainer
from train import ranks
from vitrail import hub
from vitrail.cli.tokenize import tokenize
from vitrail.codecs import quantizers as q
from vitrail.codecs.codec import Codec
from vitrail.codecs.container import TokenFile
from vitrail.codecs.presets import vit_codec
from vitrail.data.named import NamedConfig, NamedSource
from vitrail.data.views import ViewsConfig
from vitrail.errors import ConfigError, DataError
from vitrail.evals.metrics import psnr
from vitrail.nn import AttentionConfig, BlockConfig, PlainConfig
from vitrail.objectives.reconstruction import Weights
from vitrail.tasks.codec import CodecTask, QuantizerWeights
from vitrail.train import distributed
from vitrail.train.optim import OptimConfig
from vitrail.train.schedule import Cosine
from vitrail.train.trainer import Trainer

# ---- a run ------------------------------------------------------------------------------------------------------


class Halt(Exception):
    pass


@pytest.mark.parametrize(
    ("kind", "more"),
    [("bsq", {}), ("vq", {"dtype": "bfloat16", "accumulate": 2}), ("kl", {"accumulate": 2, "ema": 0.9})],
)
def test_a_run_broken_off_ends_the_same(kind, more, tmp_path, monkeypatch):
    def made(folder):
        task = taught(kind, Kept(views=ViewsConfig(mirror=0.5, colour=0.2)), start=4, weights=QUICK)
        return trainer(task, tmp_path / folder, **more)

    whole = made("whole").train().state_dict()
    step = Trainer._one_step

    def halting(self, *given):
        if self.step == 4:
            raise Halt
        return step(self, *given)

    monkeypatch.setattr(Trainer, "_one_step", halting)
    with pytest.raises(Halt):
        made("cut").train()
    monkeypatch.setattr(Trainer, "_one_step", step)
    again = made("cut").train().state_dict()
    assert all(torch.equal(again[name], value) for name, value in whole.items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_frozen_encoder_stays_as_it_was_bit_for_bit(tmp_path, dtype):
    task = taught(weights=QUICK)
    before = {name: t.clone() for name, t in task.model.state_dict().items()}
    parts = ("codec.into", "codec.out_of", "codec.decoder", "critic", "tell")
    rates = [{"part": "critic", "lr": 1e-3}, {"part": "codec.into", "times": 5.0}]
    with pytest.raises(ConfigError, match="out_of"):  # this codec has none
        trainer(task, tmp_path, train=parts)
    optim = OptimConfig.read({"lr": 1e-3, "rates": rates})
    trained = [part for part in parts if part != "codec.out_of"]
    after = trainer(task, tmp_path, train=trained, optim=optim, dtype=dtype).train().state_dict()
    for name, value in before.items():
        if name != "critic.net.last.bias":  # whose gradient cancels between the two kinds of pictures
            assert torch.equal(after[name], value) == name.startswith(("codec.encoder", "teacher")), name


@torch.no_grad()
def quality(codec: Codec, source) -> float:
    """Mean PSNR, in dB, of the first hundred pictures."""
    x = source.pixels(torch.arange(min(len(source), 100)))
    return psnr(x, codec.eval().bytes(codec.reconstruct(codec.pixels(x)))).mean().item()


@pytest.mark.parametrize(
    "kind", [k if k in ("bsq", "vq", "kl") else pytest.param(k, marks=pytest.mark.slow) for k in QUANTIZERS]
)
def test_pictures_never_seen_come_back_better(kind, tmp_path):
    task, unseen = plain(kind, weights=Weights(l1=1.0, quantizer=0.1)), Kept(seed=5)
    before = quality(task.codec, unseen)
    codec = trainer(task, tmp_path, steps=40, batch=32, save_every=40).train()
    after = quality(codec, unseen)
    assert after > before + 4, f"{before:.1f} → {after:.1f} dB"


def test_a_run_against_a_critic_leaves_a_codec_that_tokenizes(tmp_path, capsys):
    from PIL import Image

    task = taught(source=Kept(12), quantizer=QuantizerWeights(commit=1.0))
    model = trainer(task, tmp_path / "run", steps=2, judge=("kept",), judge_every=2).train()
    rows = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert {f"judge/kept/{name}" for name in task.weights} <= rows[1].keys() and rows[1]["loss/psnr"] > 0
    hub.save(model.product, tmp_path / "final")
    x = Kept().pixels(torch.arange(3))
    (tmp_path / "shown").mkdir()
    for n, one in enumerate(x):
        Image.fromarray(one.permute(1, 2, 0).contiguous().numpy()).save(tmp_path / "shown" / f"{n}.png")
    tokenize([str(tmp_path / "shown")], codec=str(tmp_path / "final"), out=tmp_path / "a.vtok", device="cpu")
    codec = model.codec.eval()
    with TokenFile(tmp_path / "a.vtok") as file:
        assert len(file) == 3
        wanted = codec.encode(codec.pixels(x)).ids
        for n in range(3):
            assert torch.equal(torch.as_tensor(file[n].ids).view(4, 4), wanted[n])


# ---- many processes ---------------------------------------------------------------------------------------------


def shared(kind: str, folder: str) -> None:
    """Each rank its share, unequal, with the gradients added up as the trainer does."""
    task = taught(kind)
    batch = {"kept": torch.tensor([[0, 1, 2, 3, 4], [5, 6]][distributed.rank()])}
    counts = distributed.total(task.counts(batch))
    losses = task(batch)
    sum(task.weights[name] * loss / counts[name] for name, loss in losses.items()).backward()
    found = {}
    for name, p in task.model.named_parameters():
        found[name] = torch.zeros_like(p) if p.grad is None else p.grad
        torch.distributed.all_reduce(found[name])
    if distributed.rank() == 0:
        torch.save(found, Path(folder) / "found.pt")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bsq", "simvq", "fsq"])
def test_two_processes_give_the_gradients_of_one(kind, tmp_path):
    ranks.run(2, shared, kind, str(tmp_path))
    found, task = torch.load(tmp_path / "found.pt"), taught(kind)
    losses = task({"kept": torch.arange(7)})
    sum(task.weights[name] * loss / 7 for name, loss in losses.items()).backward()
    for name, p in task.model.named_parameters():
        mine = torch.zeros_like(p) if p.grad is None else p.grad
        torch.testing.assert_close(mine, found[name], rtol=1e-3, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def learn(folder: Path) -> None:
    task = taught(start=2)
    trainer(task, folder, batch=7, train=("codec.decoder", "codec.into", "critic", "tell")).train()
    whole = taught().model
    distributed.put_together(task.model, whole, {})
    assert int(whole.critic.passes) == 6
    for name, p in taught().model.named_parameters():
        if name.startswith("codec.encoder"):
            assert torch.equal(p, dict(whole.named_parameters())[name]), name


@pytest.mark.slow
def test_a_game_is_played_over_shared_out_weights(tmp_path):
    ranks.run(2, learn, tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    alone = trainer(
        taught(start=2), tmp_path / "alone", batch=7, train=("codec.decoder", "codec.into", "critic", "tell")
    )
    alone.train()
    wanted = [json.loads(line) for line in (tmp_path / "alone" / "log.jsonl").read_text().splitlines()]
    for ours, theirs in zip(rows, wanted, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-3)


# ---- real pictures ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_photographs_never_seen_come_back_better(tmp_path):
    try:
        kept = {
            part: NamedSource(NamedConfig(data=("cifar10",), side=32, part=part), "kept") for part in ("train", "test")
        }
    except DataError as error:
        pytest.skip(str(error))
    block = BlockConfig(width=96, attention=AttentionConfig(heads=3), mlp=PlainConfig(hidden=384))
    torch.manual_seed(0)
    config = vit_codec(TOWER.with_(image=32, layers=2, block=block), q.BSQConfig(bits=24), 24)
    task = CodecTask(Codec(config), {"kept": kept["train"]})
    before = quality(task.codec, kept["test"])
    trainer(task, tmp_path, steps=150, batch=64, save_every=150, schedule=Cosine(warmup=20)).train()
    after = quality(task.codec, kept["test"])
    assert after > max(before + 6, 18), f"{before:.1f} → {after:.1f} dB"
