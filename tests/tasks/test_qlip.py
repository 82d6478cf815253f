"""QLIP in both its stages: what it loses by, what is handed on, and that its recipes run."""

import json
from pathlib import Path

import pytest
import torch

from helpers import randomize
from tasks.test_codec import networks
from tasks.test_contrast import named, scenes
from train import ranks
from vitrail import hub, recipe
from vitrail.codecs.codec import Codec
from vitrail.codecs.discriminator import DiscriminatorConfig
from vitrail.codecs.presets import vit_codec
from vitrail.codecs.quantizers import BSQConfig, ContinuousConfig, VQConfig
from vitrail.data.captions import captions
from vitrail.data.collection import Collection
from vitrail.data.order import Mixture
from vitrail.data.scenes.source import Asked
from vitrail.encoders import TextConfig, ViTConfig
from vitrail.errors import ConfigError
from vitrail.evals.contrastive import Embedder
from vitrail.evals.viewer import Viewer
from vitrail.models.masked import Masked, MaskedConfig
from vitrail.models.qlip import QLIP, QLIPConfig, TaughtCodecConfig
from vitrail.nn import AttentionConfig, BlockConfig, PlainConfig
from vitrail.objectives.reconstruction import Weights
from vitrail.processing.preprocessing import Preprocessing
from vitrail.processing.text import Tokenizer
from vitrail.tasks.codec import CodecSettings, CodecTask, QuantizerWeights, pulls
from vitrail.tasks.contrast import ContrastSettings, ContrastTask
from vitrail.tasks.qlip import QlipSettings, QlipTask
from vitrail.train import distributed
from vitrail.train.optim import OptimConfig
from vitrail.train.stage import StageConfig
from vitrail.train.trainer import Trainer

BLOCK = BlockConfig(width=16, attention=AttentionConfig(heads=2), mlp=PlainConfig(hidden=20))
TOWER = ViTConfig(image=16, patch=4, layers=1, block=BLOCK, pool="mean")
TEXT = TextConfig(vocab=420, layers=1, block=BLOCK, context=64, eos=0)
CRITIC = DiscriminatorConfig(width=16, layers=1, norm="group")
BSQ = BSQConfig(bits=6)


def task(sources=None, quantizer=BSQ, tower=TOWER, bias=None, critic=None, networks=None, **settings) -> QlipTask:
    sources = {source.name: source for source in sources or [named()]}
    words = Tokenizer.train([t for s in sources.values() for t in captions(s).pieces.texts], 420)
    torch.manual_seed(0)
    config = QLIPConfig(codec=vit_codec(tower, quantizer, 6), text=TEXT, embed=12, bias=bias, critic=critic)
    return QlipTask(randomize(QLIP(config)), sources, words, QlipSettings(**settings), networks)


def batch(made: ContrastTask, name: str = "named", count: int = 6):
    return made.collate([Asked(name, i) for i in range(count)])


def trainer(made, folder: Path, **more) -> Trainer:
    sources = {name: told.source for name, told in made.captions.items()} if hasattr(made, "captions") else made.sources
    settings = {
        "name": "learn",
        "task": "any",
        "steps": 6,
        "batch": 6,
        "mixture": Mixture(weights=dict.fromkeys(sources, 1.0)),
        "optim": OptimConfig(lr=3e-3, kind="lamb", decay=0.05, clip=5.0),
        "save_every": 3,
    }
    return Trainer(StageConfig(**(settings | more)), made, sources, folder, seed=2, quiet=True)


# ---- losses -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "bias"), [({}, None), ({"widths": (5,), "texts": 0.5}, None), ({"swapped": True}, -3.0)]
)
def test_words_are_those_of_the_contrastive_task(more, bias):
    """The same captions, labels and false captions give the same loss, and the picture is drawn beside."""
    made = task([named(), scenes()], bias=bias, **more)
    made.model.eval()
    given = made.collate([*(Asked("named", i) for i in range(5)), *(Asked("scenes", i) for i in range(4))])
    sources = {name: told.source for name, told in made.captions.items()}
    alone = ContrastTask(made.qlip.contrastive, sources, made.words, ContrastSettings(**more))
    torch.manual_seed(4)
    wanted = alone(given)
    torch.manual_seed(4)
    found = made(given)
    assert found.keys() == made.weights.keys() == made.counts(given).keys()
    assert found.keys() == wanted.keys() | {"l2", "commit", "entropy", "psnr"}
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value)
    assert made.flops(given) > alone.flops(given)


def test_the_drawn_side_is_that_of_the_codec():
    made = task()
    model = made.qlip.eval()
    x = made._made(batch(made)).pixels
    drawn, codes = model.codec(x)
    found = made(batch(made))
    torch.testing.assert_close(found["l2"], (drawn - x).square().mean() * 6)
    for name in ("commit", "entropy"):
        torch.testing.assert_close(found[name], codes.losses[name] * 6)


def test_weights_are_as_published_and_can_be_swept():
    weights = task().weights
    assert {name: weights[name] for name in ("pairs", "l2", "commit", "psnr")} == {
        "pairs": 1.0,
        "l2": 1000.0,
        "commit": 1.0,
        "psnr": 0.0,
    }
    for align, drawn in [(1.0, 0.0), (1.0, 1.0), (1.0, 1e4), (0.0, 1.0)]:
        read = QlipSettings.read({"align": align, "codec": {"weights": {"l2": drawn, "quantizer": 1.0}}})
        made = task(**{name: getattr(read, name) for name in ("align", "codec")})
        assert made.weights["pairs"] == align and made.weights.get("l2", 0.0) == drawn
        losses = made(batch(made))
        sum(made.weights[name] * loss for name, loss in losses.items()).backward()
        moved = made.qlip.codec.decoder.last.weight.grad
        assert (moved is not None and moved.abs().sum() > 0) == (drawn > 0)
        assert (made.qlip.text.embed.weight.grad.abs().sum() > 0) == (align > 0)
    with pytest.raises(ConfigError, match="-1"):
        QlipSettings(align=-1.0)
    with pytest.raises(ConfigError, match="side"):
        QlipSettings(codec=CodecSettings(side=8))


def test_a_picture_is_encoded_once():
    made, calls = task(), []
    run = made.qlip.codec.encoder._run
    made.qlip.codec.encoder._run = lambda *given: (calls.append(1), run(*given))[1]
    made(batch(made))
    assert len(calls) == 1


def test_perceptual_and_adversarial_losses_can_join_the_first_stage():
    """Which is what their memory is measured by."""
    codec = CodecSettings(weights=Weights(l2=1000.0, perceptual=0.1, gan=0.1, quantizer=1.0))
    made = task(critic=CRITIC, networks=networks, codec=codec)
    losses = made(batch(made))
    assert {"pairs", "perceptual", "gan", "critic"} <= losses.keys() == made.weights.keys()
    sum(made.weights[name] * loss for name, loss in losses.items()).backward()
    assert all(p.grad is not None for p in made.qlip.parameters())


def test_pulls_tell_words_from_pixels():
    made = task(texts=0.5)
    norms = pulls(made, batch(made))
    assert norms.keys() == {"pairs", "l2", "commit", "entropy"} and all(norm > 0 for norm in norms.values())
    at = made.qlip.codec.encoder.blocks[-1].branches["mlp"].op.down.weight
    made.model.eval()
    (made(batch(made))["pairs"] / 6).backward()
    assert norms["pairs"] == pytest.approx(at.grad.norm().item(), rel=1e-4)


# ---- runs and what they hand on ---------------------------------------------------------------------------------


class Halt(Exception):
    pass


@pytest.mark.parametrize("more", [{}, {"dtype": "bfloat16", "accumulate": 2}])
def test_a_run_broken_off_ends_the_same(more, tmp_path, monkeypatch):
    whole = trainer(task(), tmp_path / "whole", **more).train().state_dict()
    step = Trainer._one_step

    def halting(self, *given):
        if self.step == 4:
            raise Halt
        return step(self, *given)

    monkeypatch.setattr(Trainer, "_one_step", halting)
    with pytest.raises(Halt):
        trainer(task(), tmp_path / "cut", **more).train()
    monkeypatch.setattr(Trainer, "_one_step", step)
    again = trainer(task(), tmp_path / "cut", **more).train().state_dict()
    assert all(torch.equal(again[name], value) for name, value in whole.items())


def test_words_and_pictures_are_both_learned(tmp_path):
    made = task([named(without=("Dog",))])
    trainer(made, tmp_path, steps=60, batch=16, save_every=60, optim=OptimConfig(lr=6e-3, decay=0.0)).train()
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    for name, most in (("loss/pairs", 0.9), ("loss/l2", 0.8)):  # names come several times, and share a row's target
        assert sum(r[name] for r in rows[-10:]) < most * sum(r[name] for r in rows[:10]), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_second_stage_holds_the_encoder_and_what_words_say(tmp_path, dtype):
    first = task(critic=CRITIC)
    model = trainer(first, tmp_path / "align", dtype=dtype).train()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    source = first.captions["named"].source
    settings = CodecSettings(weights="qlip-stage-2", quantizer=QuantizerWeights(commit=0.0))
    second = CodecTask(model, {"named": source}, settings, networks)
    assert second.weights.keys() == {"l2", "perceptual", "gan", "entropy", "critic", "psnr"}
    parts = ("codec.into", "codec.decoder", "critic")
    after = trainer(second, tmp_path / "sharpen", train=parts, dtype=dtype).train().state_dict()
    for name, value in before.items():
        if not name.startswith((*parts, "critic.net.last.bias")):
            assert torch.equal(after[name], value), name
    assert not torch.equal(after["codec.decoder.last.weight"], before["codec.decoder.last.weight"])
    x = torch.rand(2, 3, 16, 16) * 2 - 1
    again = task(critic=CRITIC).qlip
    again.load_state_dict(before)
    assert torch.equal(again.encode_image(x), model.encode_image(x))


def test_suites_read_it():
    made = task()
    model = made.qlip
    looks = Preprocessing.own(model.config.image)
    viewer, embedder = Viewer(model, looks), Embedder(model.contrastive, looks, made.words)
    shown = [torch.randint(0, 256, (20, 24, 3), dtype=torch.uint8).numpy() for _ in range(3)]
    assert viewer.features(shown).shape == (3, 16) and embedder.images(shown).shape == (3, 12)
    assert embedder.texts(["a dog", "an owl"]).shape == (2, 12)


# ---- recipes ----------------------------------------------------------------------------------------------------


@pytest.fixture
def known(monkeypatch):
    """An LPIPS of no training, and pictures of no package."""
    monkeypatch.setattr("vitrail.tasks_known.load_lpips", networks)
    kept = named()
    monkeypatch.setattr(
        "vitrail.data.named.collection",
        lambda *_: Collection(kept.abouts, kept.pixels(torch.arange(len(kept)))),
    )


CODEC = vit_codec(TOWER, BSQ, 6)
DRAW = {"weights": {"l2": 1.0, "perceptual": 0.1, "gan": 0.1, "quantizer": 1.0}, "start": 1}
SMALL = {
    "name": "small",
    "says": "a test",
    "tokenizer": {"train": 300},
    "model": {
        "kind": "qlip",
        "config": QLIPConfig(codec=CODEC, text=TEXT.with_(vocab=300), embed=8, critic=CRITIC).plain(),
    },
    "sources": {"shown": {"kind": "named", "data": ["x"], "side": 16, "views": {"mirror": 0.5}}},
    "stages": [
        {
            "name": "align",
            "task": "qlip",
            "steps": 3,
            "batch": 4,
            "mixture": {"weights": {"shown": 1.0}},
            "optim": {"kind": "lamb", "lr": 1e-3, "rates": [{"part": "codec.encoder", "lr": 2e-3}]},
            "settings": {"widths": [4]},
        },
        {
            "name": "sharpen",
            "task": "codec",
            "steps": 2,
            "batch": 4,
            "train": ["codec.into", "codec.decoder", "critic"],
            "mixture": {"weights": {"shown": 1.0}},
            "optim": {"lr": 1e-3, "clip": 1.0},
            "settings": DRAW,
        },
    ],
}


def test_both_stages_in_one_recipe_leave_one_model(known, tmp_path):
    made = recipe.train(recipe.Recipe.read(SMALL), tmp_path, quiet=True)
    again, x = hub.load(tmp_path / "final"), torch.rand(2, 3, 16, 16) * 2 - 1
    assert isinstance(again, QLIP) and again.critic is None and int(made.critic.passes) == 2
    assert torch.equal(again.codec.encode(x).ids, made.eval().codec.encode(x).ids)
    assert hub.tokenizer(tmp_path / "final").size <= 300
    recipe.train(recipe.Recipe.read(SMALL), tmp_path, quiet=True)  # a finished run is not run again


def test_a_quantizer_can_come_later(known, tmp_path):
    """QLIP's second recipe: continuous codes first; then a quantizer between what they were made by and drawn from."""
    open_ = QLIPConfig(codec=CODEC.with_(quantizer=ContinuousConfig(dim=6)), text=TEXT.with_(vocab=300), embed=8)
    first = {**SMALL, "model": {"kind": "qlip", "config": open_.plain()}, "stages": SMALL["stages"][:1]}
    recipe.train(recipe.Recipe.read(first), tmp_path / "open", quiet=True)
    start = {"start": str(tmp_path / "open" / "final")}
    parts = {f"codec.{part}": start for part in ("encoder", "into", "decoder")}
    config = TaughtCodecConfig(codec=CODEC, critic=CRITIC).plain()
    late = {key: value for key, value in SMALL.items() if key != "tokenizer"}
    late |= {"model": {"kind": "taught-codec", "config": config, "parts": parts}, "stages": SMALL["stages"][1:]}
    model = recipe._model(recipe.Recipe.read(late), None)
    before = hub.load(tmp_path / "open" / "final")
    assert torch.equal(model.codec.into.weight, before.codec.into.weight)
    recipe.train(recipe.Recipe.read(late), tmp_path / "late", quiet=True)
    after = hub.load(tmp_path / "late" / "final")
    assert isinstance(after, Codec) and after.bits == 6
    x = torch.rand(2, 3, 16, 16) * 2 - 1
    assert torch.equal(after.features(x), before.codec.features(x))  # so words still fit


@pytest.mark.parametrize("kind", ["masked", "clip"])
def test_the_encoder_starts_from_another_tower(kind, known, tmp_path):
    if kind == "masked":
        other, part = Masked(MaskedConfig(image=TOWER.with_(mask=True))), "image"
    else:
        other, part = task().qlip.contrastive, "image"
    hub.save(other, tmp_path)
    parts = {"codec.encoder": {"start": str(tmp_path), "part": part}}
    read = recipe.Recipe.read({**SMALL, "model": {**SMALL["model"], "parts": parts}})
    model = recipe._model(read, None)
    for name, weight in model.codec.encoder.named_parameters():
        assert torch.equal(weight, other.image.get_parameter(name)), name


MINE = sorted(
    path
    for kind in ("codec", "qlip")
    for path in recipe.folder().glob(f"**/{kind}-*.toml")
    if path.parent.name != "sweeps"
)


@pytest.mark.parametrize("path", MINE, ids=lambda path: path.stem)
def test_recipes_are_read_and_share_a_shape(path, known):
    read = recipe.read(path)
    assert read.name == path.stem
    config = read.model_config()
    codec = getattr(config, "codec", config)
    with torch.device("meta"):
        made = Codec(codec)
    shape = codec.net.encoder
    assert (shape.layers, shape.block.width, shape.side, codec.net.decoder.layers) == (8, 256, 8, 8)
    alike = path.stem.startswith("codec-") and path.stem != "codec-kl"
    assert made.bits == (12 if alike else 0 if path.stem in ("codec-kl", "qlip-open") else 28)


def test_words_of_a_stage_that_others_follow(tmp_path):
    """A tokenizer is trained on what any stage tells, also where the last tells nothing."""
    read = recipe.read("qlip-cifar")
    assert [stage.task for stage in read.stages] == ["qlip", "codec"]
    words = recipe._tokenizer(read, tmp_path, {"train": named()})
    assert words is not None and words.size > 300


def _alone(read: recipe.Recipe) -> bool:
    """Whether it learns named pictures, and needs nothing trained before."""
    return "train" in read.sources and not any(start.startswith("out/") for start in recipe.started_from(read).values())


@pytest.mark.slow
@pytest.mark.parametrize("path", [p for p in MINE if _alone(recipe.read(p))], ids=lambda p: p.stem)
def test_recipes_run_a_step(path, known, tmp_path):
    sources = {"sources.train.side": "32", "sources.test.side": "32"}
    made = recipe.train(recipe.tiny(recipe.read(path, sources)), tmp_path, quiet=True)
    again, x = hub.load(tmp_path / "final"), torch.rand(2, 3, 32, 32) * 2 - 1
    codecs = [getattr(model, "codec", model).eval() for model in (made, again)]
    assert torch.equal(codecs[0].reconstruct(x), codecs[1].reconstruct(x))


# ---- many processes ---------------------------------------------------------------------------------------------


def shared(folder: str) -> None:
    """Each rank its share, unequal, with the gradients added up as the trainer does."""
    made = task([named(templates=("{}",))], widths=(5,))  # nothing is left to chance
    given = made.collate([[Asked("named", i) for i in share] for share in ((0, 1, 2, 3), (4, 5))][distributed.rank()])
    counts = distributed.total(made.counts(given))
    losses = made(given)
    sum(made.weights[name] * loss / counts[name] for name, loss in losses.items()).backward()
    found = {}
    for name, p in made.model.named_parameters():
        found[name] = torch.zeros_like(p) if p.grad is None else p.grad
        torch.distributed.all_reduce(found[name])
    if distributed.rank() == 0:
        torch.save(found, Path(folder) / "found.pt")


@pytest.mark.slow
def test_two_processes_give_the_gradients_of_one(tmp_path):
    ranks.run(2, shared, str(tmp_path))
    found, made = torch.load(tmp_path / "found.pt"), task([named(templates=("{}",))], widths=(5,))
    losses = made(batch(made))
    sum(made.weights[name] * loss / 6 for name, loss in losses.items()).backward()
    for name, p in made.model.named_parameters():
        mine = torch.zeros_like(p) if p.grad is None else p.grad
        torch.testing.assert_close(mine, found[name], rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def learn(folder: Path) -> None:
    made = task(critic=CRITIC, quantizer=VQConfig(codes=16, dim=6, start=1))
    trainer(made, folder, batch=7).train()


@pytest.mark.slow
def test_a_run_is_shared_out(tmp_path):
    """The critic, which has no part in this stage, waits on every rank alike."""
    ranks.run(2, learn, tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert len(rows) == 6 and rows[-1]["loss"] < 1.5 * rows[0]["loss"]
