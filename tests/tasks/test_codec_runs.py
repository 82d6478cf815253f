"""Codec runs: resumed, in half precision, with a critic, on several processes, on photos."""

import json
from pathlib import Path

import pytest
import torch

from tasks.test_codec_task import (
    QUANTIZERS,
    QUICK,
    TOWER,
    SyntheticImageSource,
    make_task,
    make_trainer,
    make_training_task,
)
from training import ranks
from vitrail import hub
from vitrail.cli.tokenize_command import tokenize_files
from vitrail.codecs import quantizers as q
from vitrail.codecs.codec import Codec
from vitrail.codecs.presets import make_vit_codec_config
from vitrail.codecs.token_file import TokenFile
from vitrail.data.augmentation import AugmentationConfig
from vitrail.data.named_images import NamedImagesConfig, NamedImageSource
from vitrail.errors import ConfigError, DataError
from vitrail.evals.metrics import psnr
from vitrail.nn import AttentionConfig, BlockConfig, PlainMLPConfig
from vitrail.objectives.reconstruction_loss import ReconstructionWeights
from vitrail.tasks.codec_task import CodecTask, QuantizerWeights
from vitrail.training import distributed
from vitrail.training.lr_schedule import CosineSchedule
from vitrail.training.optimizer import OptimConfig
from vitrail.training.trainer import Trainer

# ---- a run ------------------------------------------------------------------------------------------------------


class Interruption(Exception):
    pass


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("bsq", {}),
        ("vq", {"dtype": "bfloat16", "gradient_accumulation_steps": 2}),
        ("kl", {"gradient_accumulation_steps": 2, "ema_decay": 0.9}),
    ],
)
def test_resumed_run_matches_uninterrupted_run(kind, more, tmp_path, monkeypatch):
    def make_run(folder):
        task = make_training_task(
            kind,
            SyntheticImageSource(views=AugmentationConfig(flip_probability=0.5, colour_jitter=0.2)),
            gan_start=4,
            weights=QUICK,
        )
        return make_trainer(task, tmp_path / folder, **more)

    whole = make_run("whole").train().state_dict()
    step = Trainer._train_step

    def interrupted_step(self, *given):
        if self.step == 4:
            raise Interruption
        return step(self, *given)

    monkeypatch.setattr(Trainer, "_train_step", interrupted_step)
    with pytest.raises(Interruption):
        make_run("cut").train()
    monkeypatch.setattr(Trainer, "_train_step", step)
    again = make_run("cut").train().state_dict()
    assert all(torch.equal(again[name], value) for name, value in whole.items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_frozen_encoder_is_unchanged(tmp_path, dtype):
    task = make_training_task(weights=QUICK)
    before = {name: t.clone() for name, t in task.model.state_dict().items()}
    parts = ("codec.pre_quant_proj", "codec.post_quant_proj", "codec.decoder", "critic", "teacher_projection")
    rates = [{"part": "critic", "lr": 1e-3}, {"part": "codec.pre_quant_proj", "lr_multiplier": 5.0}]
    with pytest.raises(ConfigError, match="post_quant_proj"):  # this codec has no such loss
        make_trainer(task, tmp_path, trainable=parts)
    optim = OptimConfig.from_dict({"lr": 1e-3, "param_groups": rates})
    trained = [part for part in parts if part != "codec.post_quant_proj"]
    after = make_trainer(task, tmp_path, trainable=trained, optim=optim, dtype=dtype).train().state_dict()
    for name, value in before.items():
        if name != "critic.net.last.bias":  # its gradient cancels between true and generated images
            assert torch.equal(after[name], value) == name.startswith(("codec.encoder", "teacher.")), name


@torch.no_grad()
def measure_psnr(codec: Codec, source) -> float:
    """Mean PSNR in dB of the first 100 images."""
    x = source.pixels(torch.arange(min(len(source), 100)))
    return psnr(x, codec.eval().to_uint8(codec.reconstruct(codec.to_pixels(x)))).mean().item()


@pytest.mark.parametrize(
    "kind", [k if k in ("bsq", "vq", "kl") else pytest.param(k, marks=pytest.mark.slow) for k in QUANTIZERS]
)
def test_reconstruction_of_held_out_images_improves(kind, tmp_path):
    task, unseen = make_task(kind, weights=ReconstructionWeights(l1=1.0, quantizer=0.1)), SyntheticImageSource(seed=5)
    before = measure_psnr(task.codec, unseen)
    codec = make_trainer(task, tmp_path, steps=40, batch_size=32, save_every=40).train()
    after = measure_psnr(codec, unseen)
    assert after > before + 4, f"{before:.1f} → {after:.1f} dB"


def test_gan_run_leaves_a_usable_codec(tmp_path, capsys):
    from PIL import Image

    task = make_training_task(source=SyntheticImageSource(12), quantizer=QuantizerWeights(commit=1.0))
    model = make_trainer(task, tmp_path / "run", steps=2, validate=("kept",), validate_every=2).train()
    rows = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert {f"validation/kept/{name}" for name in task.loss_weights} <= rows[1].keys() and rows[1]["loss/psnr"] > 0
    hub.save(model.final_model, tmp_path / "final")
    x = SyntheticImageSource().pixels(torch.arange(3))
    (tmp_path / "shown").mkdir()
    for n, one in enumerate(x):
        Image.fromarray(one.permute(1, 2, 0).contiguous().numpy()).save(tmp_path / "shown" / f"{n}.png")
    tokenize_files([str(tmp_path / "shown")], codec=str(tmp_path / "final"), out=tmp_path / "a.vtok", device="cpu")
    codec = model.codec.eval()
    with TokenFile(tmp_path / "a.vtok") as file:
        assert len(file) == 3
        wanted = codec.encode(codec.to_pixels(x)).ids
        for n in range(3):
            assert torch.equal(torch.as_tensor(file[n].ids).view(4, 4), wanted[n])


# ---- many processes ---------------------------------------------------------------------------------------------


def save_summed_gradients(kind: str, folder: str) -> None:
    """Each rank has an unequal part of the batch; gradients are summed as in the trainer."""
    task = make_training_task(kind)
    batch = {"kept": torch.tensor([[0, 1, 2, 3, 4], [5, 6]][distributed.get_rank()])}
    counts = distributed.sum_over_ranks(task.count_loss_terms(batch))
    losses = task(batch)
    sum(task.loss_weights[name] * loss / counts[name] for name, loss in losses.items()).backward()
    found = {}
    for name, p in task.model.named_parameters():
        found[name] = torch.zeros_like(p) if p.grad is None else p.grad
        torch.distributed.all_reduce(found[name])
    if distributed.get_rank() == 0:
        torch.save(found, Path(folder) / "found.pt")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bsq", "simvq", "fsq"])
def test_two_processes_match_the_gradients_of_one(kind, tmp_path):
    ranks.run(2, save_summed_gradients, kind, str(tmp_path))
    found, task = torch.load(tmp_path / "found.pt"), make_training_task(kind)
    losses = task({"kept": torch.arange(7)})
    sum(task.loss_weights[name] * loss / 7 for name, loss in losses.items()).backward()
    for name, p in task.model.named_parameters():
        mine = torch.zeros_like(p) if p.grad is None else p.grad
        torch.testing.assert_close(mine, found[name], rtol=1e-3, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def train_on_rank(folder: Path) -> None:
    task = make_training_task(gan_start=2)
    make_trainer(
        task, folder, batch_size=7, trainable=("codec.decoder", "codec.pre_quant_proj", "critic", "teacher_projection")
    ).train()
    whole = make_training_task().model
    distributed.gather_weights(task.model, whole, {})
    assert int(whole.critic.passes) == 6
    for name, p in make_training_task().model.named_parameters():
        if name.startswith("codec.encoder"):
            assert torch.equal(p, dict(whole.named_parameters())[name]), name


@pytest.mark.slow
def test_gan_training_with_sharded_weights(tmp_path):
    ranks.run(2, train_on_rank, tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    alone = make_trainer(
        make_training_task(gan_start=2),
        tmp_path / "alone",
        batch_size=7,
        trainable=("codec.decoder", "codec.pre_quant_proj", "critic", "teacher_projection"),
    )
    alone.train()
    wanted = [json.loads(line) for line in (tmp_path / "alone" / "log.jsonl").read_text().splitlines()]
    for ours, theirs in zip(rows, wanted, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-3)


# ---- real images ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_reconstruction_of_held_out_photos_improves(tmp_path):
    try:
        kept = {
            part: NamedImageSource(NamedImagesConfig(datasets=("cifar10",), image_size=32, split=part), "kept")
            for part in ("train", "test")
        }
    except DataError as error:
        pytest.skip(str(error))
    block = BlockConfig(width=96, attention=AttentionConfig(heads=3), mlp=PlainMLPConfig(intermediate_size=384))
    torch.manual_seed(0)
    config = make_vit_codec_config(TOWER.replace(image_size=32, layers=2, block=block), q.BSQConfig(bits=24), 24)
    task = CodecTask(Codec(config), {"kept": kept["train"]})
    before = measure_psnr(task.codec, kept["test"])
    make_trainer(
        task, tmp_path, steps=150, batch_size=64, save_every=150, schedule=CosineSchedule(warmup_steps=20)
    ).train()
    after = measure_psnr(task.codec, kept["test"])
    assert after > max(before + 6, 18), f"{before:.1f} → {after:.1f} dB"
