"""Genie tasks: losses, counts, frozen parts, resumed runs, and the whole recipe."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import worlds
from vitrail import hub, recipe
from vitrail.data.sampler import MixtureConfig
from vitrail.errors import ConfigError, DataError
from vitrail.generate.rollout import RolloutConfig, rollout_frames
from vitrail.hub.int8_weights import quantize_tensors
from vitrail.models.genie_model import Genie
from vitrail.models.latent_action_model import LatentActionModel
from vitrail.objectives.masking import sample_code_mask
from vitrail.objectives.reconstruction_loss import ReconstructionWeights
from vitrail.tasks.codec_task import QuantizerWeights
from vitrail.tasks.genie_task import (
    DynamicsSettings,
    DynamicsTask,
    VideoReconstructionSettings,
    make_reconstruction_task,
    mix_codes,
)
from vitrail.training.optimizer import OptimConfig
from vitrail.training.stage_config import StageConfig
from vitrail.training.trainer import Trainer


class MovingDotSource:
    """Source of windows of a moving dot, like `EpisodeSource`."""

    fingerprint = "played"

    def __init__(self, count: int = 24, frames: int = 3):
        video, actions = worlds.dots(count, frames)
        self.frames = ((video + 1) * 127.5).round().to(torch.uint8).movedim(2, -1).numpy()
        self.actions = actions.numpy()

    def __len__(self) -> int:
        return len(self.frames)

    def __getitem__(self, item: int) -> dict[str, np.ndarray]:
        return {"frames": self.frames[item], "actions": self.actions[item]}


def make_model(**given) -> Genie:
    torch.manual_seed(0)
    return Genie(worlds.genie_config(**({"codes": 16} | given)))


def make_tasks(made: Genie) -> dict:
    frames = VideoReconstructionSettings(weights=ReconstructionWeights(l1=0.5, l2=1.0, quantizer=1.0))
    found = {"codec": make_reconstruction_task(made, "codec", frames), "dynamics": DynamicsTask(made)}
    return found | (
        {}
        if made.latent is None
        else {"latent": make_reconstruction_task(made, "latent", VideoReconstructionSettings())}
    )


def make_stage(part: str, **more) -> StageConfig:
    given = {"name": part, "task": "any", "steps": 4, "batch_size": 8, "trainable": (part,), "save_every": 2}
    optim = OptimConfig(lr=3e-3, betas=(0.9, 0.95))
    return StageConfig(**(given | {"mixture": MixtureConfig(weights={"played": 1.0}), "optim": optim} | more))


@pytest.mark.parametrize("latent", [True, False])
def test_losses_counts_and_weights_have_the_same_names(latent):
    made, source = make_model(latent=latent).train(), MovingDotSource()
    for name, task in make_tasks(made).items():
        batch = task.collate([source[i] for i in range(5)])
        assert batch["frames"].shape == (5, 3, 3, 8, 8) and ("actions" in batch) == (name == "dynamics" and not latent)
        losses = task(batch)
        assert losses.keys() == task.count_loss_terms(batch).keys() == task.loss_weights.keys()
        assert set(task.count_loss_terms(batch).values()) == {5} and all(loss.isfinite() for loss in losses.values())
        assert task.count_flops(batch) > 0
    assert make_tasks(made)["codec"].loss_weights == {"l1": 0.5, "l2": 1.0, "commit": 0.25, "psnr": 0.0, "used": 0.0}
    if latent:  # a strong commitment would keep actions at their initial values
        assert make_tasks(made)["latent"].loss_weights == {"l2": 1.0, "commit": 0.01, "psnr": 0.0, "used": 0.0}


def test_metrics_match_the_outputs():
    made, source = make_model(), MovingDotSource()
    task = make_reconstruction_task(made.eval(), "latent", VideoReconstructionSettings())
    batch = task.collate([source[i] for i in range(6)])
    video = made.latent.to_pixels(batch["frames"])
    with torch.no_grad():
        losses, (drawn, found) = task(batch), made.latent(video)
    assert losses["l2"].item() / 6 == pytest.approx((drawn - video[:, 1:]).square().mean().item(), rel=1e-5)
    error = ((drawn.clamp(-1, 1) - video[:, 1:]) / 2).square().mean((2, 3, 4))
    assert losses["psnr"].item() / 6 == pytest.approx(-10 * error.log10().mean().item(), rel=1e-5)
    share = found.ids.flatten().bincount(minlength=8) / found.ids.numel()
    assert losses["used"].item() / 6 == pytest.approx(torch.special.entr(share).sum().exp().item(), rel=1e-5)


def test_dynamics_loss_of_masked_and_changed_codes():
    made, source = make_model(latent=False).eval(), MovingDotSource()
    task = DynamicsTask(made)
    batch = task.collate([source[i] for i in range(6)])
    with torch.no_grad():
        torch.manual_seed(1)
        losses = task(batch)
        ids, shifted_actions = (
            made.encode_frames(made.codec.to_pixels(batch["frames"])),
            made.dynamics.shift_actions(batch["actions"]),
        )
        torch.manual_seed(1)
        hidden = sample_code_mask(tuple(ids.shape), (0.5, 1.0))
        missed = made.dynamics.compute_code_losses(ids, shifted_actions, hidden)
    each = [missed[b][hidden[b]].mean().item() for b in range(6)]
    assert losses["dynamics"].item() == pytest.approx(sum(each), rel=1e-5)
    places = [tuple(at) for at in hidden.nonzero().tolist()]
    changed = [missed[b, t, h, w].item() for b, t, h, w in places if ids[b, t, h, w] != ids[b, t - 1, h, w]]
    assert 0 < len(changed) < len(places)
    assert losses["changed"].item() / 6 == pytest.approx(sum(changed) / len(changed), rel=1e-5)
    assert task.loss_weights["changed"] == 0


@pytest.mark.parametrize("part", ["codec", "latent", "dynamics"])
def test_stages_train_only_their_part(part, tmp_path):
    made = make_model()
    before = {name: tensor.clone() for name, tensor in made.state_dict().items()}
    Trainer(
        make_stage(part), make_tasks(made)[part], {"played": MovingDotSource()}, tmp_path, seed=0, quiet=True
    ).train()
    moved = {name.split(".")[0] for name, tensor in made.state_dict().items() if not torch.equal(tensor, before[name])}
    assert moved == {part}


@pytest.mark.parametrize("part", ["codec", "dynamics"])
def test_resumed_run_matches_uninterrupted_run(part, tmp_path):
    ends = []
    for cuts in ([4], [2, 4]):
        made, folder = make_model(), tmp_path / str(len(cuts))
        for steps in cuts:
            made = make_model()
            Trainer(
                make_stage(part, steps=steps),
                make_tasks(made)[part],
                {"played": MovingDotSource()},
                folder,
                seed=0,
                quiet=True,
            ).train()
        ends.append(made.state_dict())
    assert all(torch.equal(tensor, ends[1][name]) for name, tensor in ends[0].items())


@pytest.mark.slow
def test_three_stages_train_a_controllable_model(tmp_path):
    """Train on a dot with known controls: the predicted frame is nearer to the true frame than to the frame of the
    other action."""
    torch.manual_seed(0)
    made, source = (
        Genie(worlds.genie_config(latent=False, codes=64, layers=2, width=48)),
        {"played": MovingDotSource(1024, 2)},
    )
    for part, steps in (("codec", 300), ("dynamics", 300)):
        given = make_stage(part, steps=steps, batch_size=64, save_every=300)
        Trainer(given, make_tasks(made)[part], source, tmp_path / part, seed=0, quiet=True).train()
    video, actions = worlds.dots(128, 2, seed=9)
    start = made.codec.to_uint8(video[:, 0])
    rolling = RolloutConfig(steps=2)
    right, wrong = (rollout_frames(made, start, done, rolling, seed=0)[:, 0] for done in (actions, 1 - actions))
    true = made.codec.to_uint8(made.codec.reconstruct(video)[:, 1]).float()
    nearer = (right - true).square().mean((1, 2, 3)) < (wrong - true).square().mean((1, 2, 3))
    assert nearer.float().mean() > 0.9


def test_recipe_weights_fit_a_package():
    made = Genie(recipe.load_recipe("genie-coinrun").build_model_config())
    size = sum(tensor.nbytes for _, tensor in quantize_tensors(made.state_dict().items()))
    assert 14e6 < size < 15e6  # with the action encoder, which play does not need
    assert made.codec.image_size == (64, 64) and made.config.codec.grid == (8, 8)


def test_recipe_trains_latent_actions_before_dynamics():
    given = recipe.load_recipe("genie-coinrun")
    assert [make_stage.name for make_stage in given.stages] == ["actions", "codec", "dynamics", "extend"]
    assert {(make_stage.batch_size, make_stage.num_workers) for make_stage in given.stages} == {(64, 4)}


def test_recipe_recording_commands_parse(monkeypatch):
    """Parse the command in the recipe comment as it would be typed."""
    from vitrail.cli import data_command
    from vitrail.data.episodes import WORLDS, RecordConfig

    head = (recipe.recipe_folder() / "genie-coinrun.toml").read_text()
    (result,) = (line for line in head.splitlines() if line.startswith("#   vitrail data make"))
    seen = []
    monkeypatch.setattr(data_command, "_record_episodes", lambda *given: seen.append(given))
    data_command.app(result.split()[3:], result_action="return_value")
    ((world, out, episodes, _, side, _, options),) = seen
    manifest = RecordConfig(world=world, image_size=side, **options).build_manifest()
    assert str(out) == recipe.load_recipe("genie-coinrun").sources["played"].folder and episodes == 3600
    assert manifest.policy in WORLDS[world].policies and (manifest.policy, manifest.repeat) == ("strolling", 3)


LAYERED = ("codec.encoder", "codec.decoder", "latent.encoder", "latent.decoder", "dynamics.transformer")


def test_recipe_windows_fill_the_memory():
    given = recipe.load_recipe("genie-coinrun")
    config = given.build_model_config()
    parts = (config.codec.encoder, config.codec.decoder, config.latent.encoder, config.latent.decoder)
    memory = config.dynamics.transformer.context_frames
    assert {part.context_frames for part in parts} == {memory}
    assert all(source.window_length >= 2 * memory for source in given.sources.values())


def test_recipe_runs_and_its_model_can_be_played(tmp_path, monkeypatch):
    from vitrail.data.episodes import RecordConfig, record_episodes

    pytest.importorskip("av")
    monkeypatch.chdir(tmp_path)
    record_episodes(RecordConfig(world="pocket", steps=12), Path("out/episodes/coinrun"), episodes=11, quiet=True)
    less = {f"model.config.{part}.layers": 1 for part in LAYERED}
    given = recipe.load_recipe(
        "genie-coinrun", less | {"sources.unseen.window_length": 3, "sources.played.window_length": 3}
    )
    made = recipe.train_recipe(recipe.shrink_recipe(given), tmp_path / "run", quiet=True)
    again = hub.load(tmp_path / "run" / "final")
    assert isinstance(again, Genie) and again.num_actions == 8
    start = torch.zeros(1, 3, 32, 32, dtype=torch.uint8)
    actions, rolling = torch.tensor([[3, 7]]), RolloutConfig(steps=2)
    assert torch.equal(
        rollout_frames(again, start, actions, rolling, seed=0),
        rollout_frames(made.cpu(), start, actions, rolling, seed=0),
    )
    logs = [tmp_path / "run" / name / "log.jsonl" for name in ("codec", "actions", "dynamics")]
    assert all(np.isfinite(json.loads(log.read_text().splitlines()[0])["loss"]) for log in logs)


def test_invalid_arguments_raise():
    known = make_model(latent=False)
    with pytest.raises(ConfigError, match="its actions are known"):
        make_reconstruction_task(known, "latent", VideoReconstructionSettings())
    with pytest.raises(DataError, match="continuous actions"):
        DynamicsTask(known).collate([MovingDotSource()[0] | {"actions": np.zeros((2, 3), np.float32)}])
    with pytest.raises(DataError, match="outside"):
        DynamicsTask(known).collate([MovingDotSource()[0] | {"actions": np.full(2, 2)}])
    for wrong in (
        {"weights": ReconstructionWeights(l2=1.0, gan=1.0)},
        {"weights": ReconstructionWeights(quantizer=1.0)},
    ):
        with pytest.raises(ConfigError, match="set l1 or l2"):
            VideoReconstructionSettings(**wrong)
    alone = make_reconstruction_task(LatentActionModel(worlds.latent_config()), "latent", VideoReconstructionSettings())
    assert isinstance(alone.model, LatentActionModel)
    assert DynamicsSettings().mask_ratio_range == (0.5, 1.0) and QuantizerWeights().commit == 0.25


@pytest.mark.parametrize("name", ["genie-coinrun", "genie-pocket"])
def test_recipes_use_qk_norm(name):
    config = recipe.load_recipe(name).build_model_config()
    nets = [config.codec.encoder, config.codec.decoder, config.dynamics.transformer]
    nets += [config.latent.encoder, config.latent.decoder] if config.latent else []
    assert all(net.block.attention.qk_norm == "rms" for net in nets)


def test_noise_replaces_visible_codes_by_other_windows():
    ids = torch.arange(4)[:, None, None, None].expand(4, 5, 30, 30) * 1000 + torch.arange(900).view(30, 30)
    torch.manual_seed(0)
    found = mix_codes(ids, 0.5)
    other = found != ids
    assert torch.equal(found[other], ids.roll(1, 0)[other])  # codes of the next window at the same position
    shares = other.float().mean((1, 2, 3))
    assert shares.max() < 0.55 and shares.unique().numel() == 4 and shares.sum() > 0.1  # different in each window
    assert torch.equal(mix_codes(ids, 0.0), ids)


def test_noise_does_not_change_targets():
    """If all visible codes are equal, noise changes nothing and the loss is that without noise. Masked codes differ
    between windows, and targets stay those of each window."""
    made, source = make_model(latent=False).eval(), MovingDotSource()
    losses = []
    for noise in (0.0, 0.9):
        task = DynamicsTask(made, DynamicsSettings(mask_ratio_range=(1.0, 1.0), max_noise_fraction=noise))
        batch = task.collate([source[i] for i in range(6)])
        batch["frames"][:, 0] = batch["frames"][0, 0].clone()  # the visible code, equal in all windows
        torch.manual_seed(1)
        losses.append(task(batch)["dynamics"])
    torch.testing.assert_close(*losses)
    with pytest.raises(ConfigError, match="max_noise_fraction"):
        DynamicsSettings(max_noise_fraction=1.0)
