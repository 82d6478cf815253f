"""The three stages of a Genie through the trainer: what is counted and learned, what stays, and the recipe whole."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import worlds
from vitrail import hub, recipe
from vitrail.data.order import Mixture
from vitrail.errors import ConfigError, DataError
from vitrail.generate.rollout import Rolling, roll
from vitrail.hub.rows8 import packed
from vitrail.models.genie import Genie
from vitrail.models.latent_actions import LatentActions
from vitrail.objectives.masked import hide_codes
from vitrail.objectives.reconstruction import Weights
from vitrail.tasks.codec import QuantizerWeights
from vitrail.tasks.genie import DynamicsSettings, DynamicsTask, FramesSettings, make_frames_task, mixed
from vitrail.train.optim import OptimConfig
from vitrail.train.stage import StageConfig
from vitrail.train.trainer import Trainer


class Played:
    """Windows of a moving dot, as `EpisodeSource` gives them."""

    fingerprint = "played"

    def __init__(self, count: int = 24, frames: int = 3):
        video, actions = worlds.dots(count, frames)
        self.frames = ((video + 1) * 127.5).round().to(torch.uint8).movedim(2, -1).numpy()
        self.actions = actions.numpy()

    def __len__(self) -> int:
        return len(self.frames)

    def __getitem__(self, item: int) -> dict[str, np.ndarray]:
        return {"frames": self.frames[item], "actions": self.actions[item]}


def model(**given) -> Genie:
    torch.manual_seed(0)
    return Genie(worlds.genie_config(**({"codes": 16} | given)))


def tasks(made: Genie) -> dict:
    frames = FramesSettings(weights=Weights(l1=0.5, l2=1.0, quantizer=1.0))
    found = {"codec": make_frames_task(made, "codec", frames), "dynamics": DynamicsTask(made)}
    return found | ({} if made.latent is None else {"latent": make_frames_task(made, "latent", FramesSettings())})


def stage(part: str, **more) -> StageConfig:
    given = {"name": part, "task": "any", "steps": 4, "batch": 8, "train": (part,), "save_every": 2}
    optim = OptimConfig(lr=3e-3, betas=(0.9, 0.95))
    return StageConfig(**(given | {"mixture": Mixture(weights={"played": 1.0}), "optim": optim} | more))


@pytest.mark.parametrize("latent", [True, False])
def test_losses_counts_and_weights_have_the_same_names(latent):
    made, source = model(latent=latent).train(), Played()
    for name, task in tasks(made).items():
        batch = task.collate([source[i] for i in range(5)])
        assert batch["frames"].shape == (5, 3, 3, 8, 8) and ("actions" in batch) == (name == "dynamics" and not latent)
        losses = task(batch)
        assert losses.keys() == task.counts(batch).keys() == task.weights.keys()
        assert set(task.counts(batch).values()) == {5} and all(loss.isfinite() for loss in losses.values())
        assert task.flops(batch) > 0
    assert tasks(made)["codec"].weights == {"l1": 0.5, "l2": 1.0, "commit": 0.25, "psnr": 0.0, "used": 0.0}
    if latent:  # a strong one would keep actions what chance made them
        assert tasks(made)["latent"].weights == {"l2": 1.0, "commit": 0.01, "psnr": 0.0, "used": 0.0}


def test_what_is_shown_is_what_was_measured():
    made, source = model(), Played()
    task = make_frames_task(made.eval(), "latent", FramesSettings())
    batch = task.collate([source[i] for i in range(6)])
    video = made.latent.pixels(batch["frames"])
    with torch.no_grad():
        losses, (drawn, found) = task(batch), made.latent(video)
    assert losses["l2"].item() / 6 == pytest.approx((drawn - video[:, 1:]).square().mean().item(), rel=1e-5)
    error = ((drawn.clamp(-1, 1) - video[:, 1:]) / 2).square().mean((2, 3, 4))
    assert losses["psnr"].item() / 6 == pytest.approx(-10 * error.log10().mean().item(), rel=1e-5)
    share = found.ids.flatten().bincount(minlength=8) / found.ids.numel()
    assert losses["used"].item() / 6 == pytest.approx(torch.special.entr(share).sum().exp().item(), rel=1e-5)


def test_dynamics_learn_from_what_is_hidden_and_show_what_changed():
    made, source = model(latent=False).eval(), Played()
    task = DynamicsTask(made)
    batch = task.collate([source[i] for i in range(6)])
    with torch.no_grad():
        torch.manual_seed(1)
        losses = task(batch)
        ids, led = made.look(made.codec.pixels(batch["frames"])), made.dynamics.led(batch["actions"])
        torch.manual_seed(1)
        hidden = hide_codes(tuple(ids.shape), (0.5, 1.0))
        missed = made.dynamics.missed(ids, led, hidden)
    each = [missed[b][hidden[b]].mean().item() for b in range(6)]
    assert losses["dynamics"].item() == pytest.approx(sum(each), rel=1e-5)
    places = [tuple(at) for at in hidden.nonzero().tolist()]
    changed = [missed[b, t, h, w].item() for b, t, h, w in places if ids[b, t, h, w] != ids[b, t - 1, h, w]]
    assert 0 < len(changed) < len(places)
    assert losses["changed"].item() / 6 == pytest.approx(sum(changed) / len(changed), rel=1e-5)
    assert task.weights["changed"] == 0


@pytest.mark.parametrize("part", ["codec", "latent", "dynamics"])
def test_a_stage_changes_its_own_part_alone(part, tmp_path):
    made = model()
    before = {name: tensor.clone() for name, tensor in made.state_dict().items()}
    Trainer(stage(part), tasks(made)[part], {"played": Played()}, tmp_path, seed=0, quiet=True).train()
    moved = {name.split(".")[0] for name, tensor in made.state_dict().items() if not torch.equal(tensor, before[name])}
    assert moved == {part}


@pytest.mark.parametrize("part", ["codec", "dynamics"])
def test_a_run_that_is_cut_goes_on_as_if_it_had_not_been(part, tmp_path):
    ends = []
    for cuts in ([4], [2, 4]):
        made, folder = model(), tmp_path / str(len(cuts))
        for steps in cuts:
            made = model()
            Trainer(
                stage(part, steps=steps), tasks(made)[part], {"played": Played()}, folder, seed=0, quiet=True
            ).train()
        ends.append(made.state_dict())
    assert all(torch.equal(tensor, ends[1][name]) for name, tensor in ends[0].items())


@pytest.mark.slow
def test_three_stages_make_a_world_that_answers(tmp_path):
    """Of a dot that is moved by known controls: after an action the drawn frame is nearer to the true one than the
    frame of the other action is."""
    torch.manual_seed(0)
    made, source = Genie(worlds.genie_config(latent=False, codes=64, layers=2, width=48)), {"played": Played(1024, 2)}
    for part, steps in (("codec", 300), ("dynamics", 300)):
        given = stage(part, steps=steps, batch=64, save_every=300)
        Trainer(given, tasks(made)[part], source, tmp_path / part, seed=0, quiet=True).train()
    video, actions = worlds.dots(128, 2, seed=9)
    start = made.codec.bytes(video[:, 0])
    rolling = Rolling(steps=2)
    right, wrong = (roll(made, start, done, rolling, seed=0)[:, 0] for done in (actions, 1 - actions))
    true = made.codec.bytes(made.codec.reconstruct(video)[:, 1]).float()
    nearer = (right - true).square().mean((1, 2, 3)) < (wrong - true).square().mean((1, 2, 3))
    assert nearer.float().mean() > 0.9


def test_the_recipes_weights_fit_a_package():
    made = Genie(recipe.read("genie-coinrun").model_config())
    size = sum(tensor.nbytes for _, tensor in packed(made.state_dict().items()))
    assert 14e6 < size < 15e6  # with what infers actions, which playing can do without
    assert made.codec.size == (64, 64) and made.config.codec.grid == (8, 8)


def test_the_recipe_learns_actions_before_anything_is_made_of_them():
    given = recipe.read("genie-coinrun")
    assert [stage.name for stage in given.stages] == ["actions", "codec", "dynamics", "further"]
    assert {(stage.batch, stage.workers) for stage in given.stages} == {(64, 4)}


def test_what_the_recipe_says_to_record_can_be_recorded(monkeypatch):
    """The command at its head, as one would type it, with nothing behind it."""
    from vitrail.cli import data
    from vitrail.data.episodes import WORLDS, RecordConfig

    head = (recipe.folder() / "genie-coinrun.toml").read_text()
    (told,) = (line for line in head.splitlines() if line.startswith("#   vitrail data make"))
    seen = []
    monkeypatch.setattr(data, "_record", lambda *given: seen.append(given))
    data.app(told.split()[3:], result_action="return_value")
    ((world, out, episodes, _, side, _, options),) = seen
    manifest = RecordConfig(world=world, side=side, **options).manifest()
    assert str(out) == recipe.read("genie-coinrun").sources["played"].folder and episodes == 3600
    assert manifest.policy in WORLDS[world].policies and (manifest.policy, manifest.repeat) == ("strolling", 3)


LAYERED = ("codec.encoder", "codec.decoder", "latent.encoder", "latent.decoder", "dynamics.transformer")


def test_the_recipe_learns_with_a_full_memory():
    given = recipe.read("genie-coinrun")
    config = given.model_config()
    parts = (config.codec.encoder, config.codec.decoder, config.latent.encoder, config.latent.decoder)
    memory = config.dynamics.transformer.memory
    assert {part.memory for part in parts} == {memory}
    assert all(source.length >= 2 * memory for source in given.sources.values())


def test_the_recipe_runs_and_what_comes_of_it_plays(tmp_path, monkeypatch):
    from vitrail.data.episodes import RecordConfig, record

    pytest.importorskip("av")
    monkeypatch.chdir(tmp_path)
    record(RecordConfig(world="pocket", steps=12), Path("out/episodes/coinrun"), episodes=11, quiet=True)
    less = {f"model.config.{part}.layers": 1 for part in LAYERED}
    given = recipe.read("genie-coinrun", less | {"sources.unseen.length": 3, "sources.played.length": 3})
    made = recipe.train(recipe.tiny(given), tmp_path / "run", quiet=True)
    again = hub.load(tmp_path / "run" / "final")
    assert isinstance(again, Genie) and again.actions == 8
    start = torch.zeros(1, 3, 32, 32, dtype=torch.uint8)
    actions, rolling = torch.tensor([[3, 7]]), Rolling(steps=2)
    assert torch.equal(roll(again, start, actions, rolling, seed=0), roll(made.cpu(), start, actions, rolling, seed=0))
    logs = [tmp_path / "run" / name / "log.jsonl" for name in ("codec", "actions", "dynamics")]
    assert all(np.isfinite(json.loads(log.read_text().splitlines()[0])["loss"]) for log in logs)


def test_what_cannot_be_is_refused():
    known = model(latent=False)
    with pytest.raises(ConfigError, match="no actions are learned"):
        make_frames_task(known, "latent", FramesSettings())
    with pytest.raises(DataError, match="dials"):
        DynamicsTask(known).collate([Played()[0] | {"actions": np.zeros((2, 3), np.float32)}])
    with pytest.raises(DataError, match="outside"):
        DynamicsTask(known).collate([Played()[0] | {"actions": np.full(2, 2)}])
    for wrong in ({"weights": Weights(l2=1.0, gan=1.0)}, {"weights": Weights(quantizer=1.0)}):
        with pytest.raises(ConfigError, match="learned by"):
            FramesSettings(**wrong)
    alone = make_frames_task(LatentActions(worlds.latent_config()), "latent", FramesSettings())
    assert isinstance(alone.model, LatentActions)
    assert DynamicsSettings().rate == (0.5, 1.0) and QuantizerWeights().commit == 0.25


@pytest.mark.parametrize("name", ["genie-coinrun", "genie-pocket"])
def test_the_recipes_normalise_queries_and_keys(name):
    config = recipe.read(name).model_config()
    nets = [config.codec.encoder, config.codec.decoder, config.dynamics.transformer]
    nets += [config.latent.encoder, config.latent.decoder] if config.latent else []
    assert all(net.block.attention.qk_norm == "rms" for net in nets)


def test_noise_puts_codes_of_another_window_where_codes_are_in_view():
    ids = torch.arange(4)[:, None, None, None].expand(4, 5, 30, 30) * 1000 + torch.arange(900).view(30, 30)
    torch.manual_seed(0)
    found = mixed(ids, 0.5)
    other = found != ids
    assert torch.equal(found[other], ids.roll(1, 0)[other])  # the next window's, at the same place
    shares = other.float().mean((1, 2, 3))
    assert shares.max() < 0.55 and shares.unique().numel() == 4 and shares.sum() > 0.1  # each window has its own
    assert torch.equal(mixed(ids, 0.0), ids)


def test_what_is_learned_under_noise_is_still_the_truth():
    """Where all that is in view is alike, there is nothing to mix, and the loss is that without noise: what is hidden
    and to be guessed differs from window to window, and stays each one's own."""
    made, source = model(latent=False).eval(), Played()
    losses = []
    for noise in (0.0, 0.9):
        task = DynamicsTask(made, DynamicsSettings(rate=(1.0, 1.0), noise=noise))
        batch = task.collate([source[i] for i in range(6)])
        batch["frames"][:, 0] = batch["frames"][0, 0].clone()  # the one that is in view: mixed, it is the same
        torch.manual_seed(1)
        losses.append(task(batch)["dynamics"])
    torch.testing.assert_close(*losses)
    with pytest.raises(ConfigError, match="codes in view"):
        DynamicsSettings(noise=1.0)
