"""The contrastive task: what it reads, the loss it gives, and that many processes give the same."""

import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from data.scenes.conftest import drawn
from helpers import randomize
from train.ranks import run
from vitrail import hub, recipe
from vitrail.data.captions import captions
from vitrail.data.collection import Collection
from vitrail.data.named import NamedConfig, NamedSource
from vitrail.data.pictures import About
from vitrail.data.scenes.source import Asked, ScenesConfig, SceneSource
from vitrail.data.scenes.sprites import Atlas
from vitrail.encoders import ConvConfig, TextConfig, ViTConfig
from vitrail.errors import ConfigError
from vitrail.evals.contrastive import to_ids
from vitrail.models.clip import Contrastive, ContrastiveConfig
from vitrail.nn import AttentionConfig, BlockConfig, PlainConfig, cost
from vitrail.objectives.contrastive import plain_clip_loss, plain_siglip_loss
from vitrail.processing.text import Tokenizer
from vitrail.tasks.contrast import MOST, ContrastSettings, ContrastTask
from vitrail.train import distributed
from vitrail.train.distributed import rank

NAMES = ("dog", "owl", "dog", "red car", "hat", "Dog")
BLOCK = BlockConfig(width=16, attention=AttentionConfig(heads=2), mlp=PlainConfig(hidden=20))
TOWERS = {
    "conv": ConvConfig(image=16, widths=(8, 8), blocks=(1, 1), groups=4),
    "vit": ViTConfig(image=16, patch=4, layers=1, block=BLOCK, pool="mean"),
}


def named(name: str = "named", **change) -> NamedSource:
    pixels = torch.randint(
        0, 256, (len(NAMES), 4, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(3)
    )
    abouts = tuple(About(f"a/{n}", "a", str(n), text, ("thing",)) for n, text in enumerate(NAMES))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vitrail.data.named.collection", lambda *_: Collection(abouts, pixels))
        return NamedSource(NamedConfig(data=("x",), side=16, **change), name)


def scenes() -> SceneSource:
    config = ScenesConfig(atlas="none.safetensors", preset="relations", side=16, seed=5)
    return SceneSource(config, Atlas.build(drawn()), "scenes")


def task(sources=None, tower="conv", bias=None, eos=True, **settings) -> ContrastTask:
    sources = {source.name: source for source in sources or [named()]}
    words = Tokenizer.train([t for s in sources.values() for t in captions(s).pieces.texts], 420)
    text = TextConfig(vocab=420, layers=1, block=BLOCK, context=64, eos=0)
    if not eos:
        text = text.with_(eos=None, pool="last", causal=False, head=12)
    config = ContrastiveConfig(image=TOWERS[tower], text=text, embed=12, bias=bias)
    model = randomize(Contrastive(config))
    return ContrastTask(model, sources, words, ContrastSettings(**settings))


def batch(made: ContrastTask, name: str = "named", count: int = 6):
    return made.collate([Asked(name, i) for i in range(count)])


def embedded(made: ContrastTask, name: str, index, texts: list[str]):
    """Both sides by the public way: pixels as they are, texts through `to_ids`."""
    source = made.captions[name].source
    x = source.pixels(index) if name == "named" else source.draw(index).pixels
    x = x / 255
    x = x[:, :3] * x[:, 3:] + 1 - x[:, 3:] if x.shape[1] == 4 else x
    ids, cut = to_ids(texts, made.words, made.model.config.text)
    assert not cut
    return made.model.encode_image(x * 2 - 1), made.model.encode_text(ids)


@pytest.mark.parametrize("tower", TOWERS)
@pytest.mark.parametrize("bias", [None, -3.0])
@pytest.mark.parametrize("eos", [True, False])
def test_the_loss_is_that_of_names_that_belong_together(tower, bias, eos):
    made = task(tower=tower, bias=bias, eos=eos)
    made.model.eval()
    loss = made(batch(made))
    u, v = (F.normalize(x, dim=-1) for x in embedded(made, "named", torch.arange(6), list(NAMES)))
    same = torch.tensor([[a.lower() == b.lower() for b in NAMES] for a in NAMES])
    scale = made.model.scale
    wanted = (
        plain_clip_loss(u, v, scale, same) if bias is None else plain_siglip_loss(u, v, scale, made.model.bias, same)
    )
    assert made.counts(batch(made)) == {"pairs": 6}
    torch.testing.assert_close(loss["pairs"], wanted * 6, rtol=1e-4, atol=1e-4)


def test_what_is_read_in_training_is_what_the_suites_would_read():
    """Pieces and whole texts give the same ids, for all that can be said."""
    sources = [named(keywords=0.3), scenes()]
    made = task(sources, swapped=True)
    for name, count in (("named", 6), ("scenes", 30)):
        told = made.captions[name]
        for _ in range(5):
            pair = told.pair(torch.arange(count), swapped=True)
            for rows in (pair.true, pair.false):
                if rows is not None:
                    wanted, cut = to_ids(told.pieces.read(rows), made.words, made.model.config.text)
                    assert not cut and torch.equal(made._ids(name, rows)[:, : wanted.shape[1]], wanted)


def test_false_captions_belong_to_nothing_and_count_as_negatives():
    made = task([scenes()], swapped=True)
    made.model.eval()
    index = torch.arange(8)
    torch.manual_seed(4)
    pair = made.captions["scenes"].pair(index, vary=False, swapped=True)
    read = made.captions["scenes"].pieces.read
    there = pair.false.any(1)
    assert there.float().mean() > 0.5 and read(pair.true)[0] != read(pair.false)[0]
    u, v = embedded(
        made,
        "scenes",
        index,
        read(pair.true) + [text for text, is_ in zip(read(pair.false), there, strict=True) if is_],
    )
    same = torch.cat([torch.eye(8, dtype=torch.bool), torch.zeros(8, int(there.sum()), dtype=torch.bool)], 1)
    wanted = plain_clip_loss(F.normalize(u, dim=-1), F.normalize(v, dim=-1), made.model.scale, same)
    torch.manual_seed(4)
    torch.testing.assert_close(made(batch(made, "scenes", 8))["pairs"], wanted * 8, rtol=1e-4, atol=1e-4)


def test_cut_embeddings_have_a_loss_of_their_own():
    made = task(widths=(3, 7))
    made.model.eval()
    u, v = embedded(made, "named", torch.arange(6), list(NAMES))
    same = torch.tensor([[a.lower() == b.lower() for b in NAMES] for a in NAMES])
    each = [
        plain_clip_loss(F.normalize(u[:, :w], dim=-1), F.normalize(v[:, :w], dim=-1), made.model.scale, same)
        for w in (3, 7, 12)
    ]
    torch.testing.assert_close(made(batch(made))["pairs"], sum(each) / 3 * 6, rtol=1e-4, atol=1e-4)
    with pytest.raises(ConfigError, match="12"):
        task(widths=(12,))


def test_scenes_of_one_caption_belong_together_and_a_false_one_may_be_true_of_another():
    from vitrail.tasks.captioned import mark

    ids = torch.tensor([[5, 6, 7, 0], [5, 6, 7, 0], [7, 6, 5, 0], [6, 5, 7, 0], [5, 6, 7, 1]])
    marks = mark(ids).tolist()
    assert marks[0] == marks[1] and len(set(marks)) == 4 and min(marks) >= 1 << 62
    many = torch.randint(0, 50, (20000, 6)).unique(dim=0)
    assert len(mark(many).unique()) == len(many)


def test_texts_learn_to_find_texts():
    made = task(texts=0.5)
    assert made.weights == {"pairs": 1.0, "texts": 0.5} == made.counts(batch(made)) | made.weights
    loss = made(batch(made))
    assert loss.keys() == made.weights.keys() == made.counts(batch(made)).keys()
    loss["texts"].backward()
    assert all(p.grad is None for p in made.model.image.parameters())
    assert made.model.text.embed.weight.grad.abs().sum() > 0


def test_every_text_that_is_read_is_counted():
    """Second captions and false ones cost as much as true ones."""
    plain, twice = task(), task(texts=0.5)
    text = plain.model.text
    assert twice.flops(batch(twice)) - plain.flops(batch(plain)) == cost.flops(text, text.work(6))
    one, false = (task([scenes()], swapped=swapped) for swapped in (False, True))
    given = batch(one, "scenes", 5)
    assert false.flops(given) - one.flops(given) == cost.flops(text, text.work(5))


def test_sources_of_one_name_are_positives_of_each_other_and_scenes_are_not():
    made = task([named("a"), named("b"), scenes()])
    made.model.eval()
    batches = made.collate([Asked("a", 0), Asked("b", 5), Asked("b", 1), Asked("scenes", 0), Asked("scenes", 1)])
    labels = made._made(batches).labels.tolist()
    assert labels[0] == labels[1] and len(set(labels)) == 4


@pytest.mark.parametrize(("start", "slope", "learns"), [(3.0, -1, True), (6.0, -1, False), (6.0, 1, True)])
def test_the_scale_stays_below_a_hundred_and_can_come_back(start, slope, learns):
    from vitrail.tasks.contrast import _AtMost

    x = torch.tensor(start, requires_grad=True)
    y = _AtMost.apply(x, MOST)
    assert y.item() == pytest.approx(min(start, math.log(100)))
    (slope * y).backward()
    assert (x.grad != 0) == learns


def test_what_cannot_be_is_refused():
    with pytest.raises(ConfigError, match="swapped"):
        task(swapped=True)
    other = task()
    wrong = Contrastive(other.model.config.with_(text=other.model.config.text.with_(eos=7)))
    with pytest.raises(ConfigError, match="eos to 0"):
        ContrastTask(wrong, {"named": named()}, other.words, ContrastSettings())
    with pytest.raises(ConfigError, match="tokenizer"):
        ContrastTask(task().model, {"named": named()}, None, ContrastSettings())
    long = named(templates=("1234567890" * 8 + " {}",))
    with pytest.raises(ConfigError, match="context"):
        task([long])


# ---- many processes ---------------------------------------------------------------------------------------------


def _gradients(bias: float | None) -> tuple[ContrastTask, list[torch.Tensor]]:
    made = task([named(templates=("{}",))], bias=bias, widths=(5,))  # nothing is left to chance
    made.model.train()
    return made, list(made.model.parameters())


def shared(bias: float | None, folder: str) -> None:
    """Each rank its share, unequal, with the gradients added up as the trainer does."""
    made, weights = _gradients(bias)
    mine = [[Asked("named", i) for i in share] for share in ((0, 1, 2, 3), (4, 5))][rank()]
    made.model.eval()
    judged = made(batch(made))["pairs"].item() / 6  # every rank has all of it
    made.model.train()
    given = made.collate(mine)
    losses, counts = made(given), distributed.total(made.counts(given))
    (losses["pairs"] / counts["pairs"]).backward()
    total = distributed.total({"pairs": losses["pairs"].item()})["pairs"] / counts["pairs"]
    for p in weights:
        grad = torch.zeros_like(p) if p.grad is None else p.grad
        torch.distributed.all_reduce(grad)
        p.grad = grad
    if rank() == 0:
        torch.save({"judged": judged, "loss": total, "grads": [p.grad for p in weights]}, Path(folder) / "found.pt")


@pytest.mark.slow
@pytest.mark.parametrize("bias", [None, -3.0])
def test_two_processes_give_the_gradients_of_one(bias, tmp_path):
    run(2, shared, bias, str(tmp_path))
    found = torch.load(tmp_path / "found.pt")
    made, weights = _gradients(bias)
    loss = made(batch(made))["pairs"] / 6
    loss.backward()
    assert found["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert found["judged"] == pytest.approx(loss.item(), rel=1e-5)
    for p, other in zip(weights, found["grads"], strict=True):
        torch.testing.assert_close(torch.zeros_like(p) if p.grad is None else p.grad, other, rtol=1e-3, atol=1e-5)


def trained(folder: str) -> None:
    """A run of the trainer itself, which shares out every weight."""
    kept = named()
    with pytest.MonkeyPatch.context() as patch:
        shown = Collection(kept.abouts, kept.pixels(torch.arange(len(kept))))
        patch.setattr("vitrail.data.named.collection", lambda *_: shown)
        plain = {**RECIPE["sources"]["shown"], "views": {}, "templates": ["{}"]}
        recipe.train(
            recipe.Recipe.read({**RECIPE, "sources": {"shown": plain}}), Path(folder), device="cpu", quiet=True
        )


@pytest.mark.slow
def test_a_run_of_two_processes_learns_as_one_does(tmp_path):
    run(2, trained, str(tmp_path / "two"))
    trained(str(tmp_path / "one"))
    one, two = (
        [json.loads(line)["loss"] for line in (tmp_path / name / "learn" / "log.jsonl").read_text().splitlines()]
        for name in ("one", "two")
    )
    assert two == pytest.approx(one, rel=1e-4) and len(one) == 3


# ---- recipes ----------------------------------------------------------------------------------------------------

RECIPE = {
    "name": "small",
    "says": "a test",
    "tokenizer": {"train": 300},
    "model": {
        "kind": "contrastive",
        "config": ContrastiveConfig(
            image=TOWERS["vit"],
            text=TextConfig(vocab=300, layers=1, block=BLOCK, context=40, eos=0),
            embed=8,
        ).plain(),
    },
    "sources": {"shown": {"kind": "named", "data": ["x"], "side": 16, "views": {"mirror": 0.5}}},
    "stages": [
        {
            "name": "learn",
            "task": "contrast",
            "steps": 3,
            "batch": 4,
            "mixture": {"weights": {"shown": 1.0}},
            "optim": {"lr": 1e-3},
            "settings": {"widths": [4]},
        }
    ],
}


@pytest.fixture
def pictured(monkeypatch):
    kept = named()
    monkeypatch.setattr(
        "vitrail.data.named.collection",
        lambda *_: Collection(kept.abouts, kept.pixels(torch.arange(len(kept)))),
    )


def test_a_recipe_trains_saves_and_a_part_starts_another(pictured, tmp_path, capsys):
    first = recipe.train(recipe.Recipe.read(RECIPE), tmp_path / "a", quiet=True)
    folder = tmp_path / "a" / "final"
    again = hub.load(folder)
    assert isinstance(again, Contrastive) and torch.equal(again.text.embed.weight, first.text.embed.weight)
    assert hub.tokenizer(folder).size <= 300
    config = RECIPE["model"]["config"]
    masked = {**config, "image": {**config["image"], "mask": True}}
    other = {**RECIPE, "model": {"kind": "contrastive", "config": masked, "parts": {"image": {"start": str(folder)}}}}
    model = recipe._model(recipe.Recipe.read(other), None)
    assert torch.equal(model.image.embed.proj.weight, again.image.embed.proj.weight)
    assert not torch.equal(model.text.embed.weight, again.text.embed.weight)
    assert "but for mask" in capsys.readouterr().err
    hub.save(again.image, tmp_path / "tower")  # a tower alone will do as well: all of it
    alone = {"image": {"start": str(tmp_path / "tower"), "part": ""}}
    model = recipe._model(recipe.Recipe.read({**RECIPE, "model": {**RECIPE["model"], "parts": alone}}), None)
    assert torch.equal(model.image.embed.proj.weight, again.image.embed.proj.weight)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"image": {"start": "FOLDER", "part": "nothing"}}, "nothing"),
        ({"image": {"start": "FOLDER", "part": "text"}}, "cannot start"),
        ({"tower": {"start": "FOLDER"}}, "tower"),
    ],
)
def test_a_part_that_does_not_fit_is_refused(change, says, pictured, tmp_path):
    recipe.train(recipe.tiny(recipe.Recipe.read(RECIPE)), tmp_path, quiet=True)
    for part in change.values():
        part["start"] = str(tmp_path / "final")
    other = {**RECIPE, "model": {**RECIPE["model"], "parts": change}}
    with pytest.raises(ConfigError, match=says):
        recipe._model(recipe.Recipe.read(other), None)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model": {"kind": "vit", "config": TOWERS["vit"].plain()}}, "trains a Contrastive"),
        ({"sources": {"shown": {"kind": "text", "package": "python-docs"}}}, "named or scenes"),
        ({"sources": {"shown": {"kind": "named", "data": ["x"], "sid": 3}}}, "side"),
        ({"sources": {"shown": {"kind": "named", "data": ["x"], "views": {"mirrow": 1}}}}, "mirror"),
    ],
)
def test_a_task_is_given_what_it_can_read(change, says):
    with pytest.raises(ConfigError, match=says):
        recipe.Recipe.read({**RECIPE, **change})


def test_unknown_settings_of_a_task_are_refused_by_name():
    stage = {**RECIPE["stages"][0], "settings": {"width": [4]}}
    with pytest.raises(ConfigError, match=r"stages\[0\].settings[\s\S]*widths"):
        recipe.Recipe.read({**RECIPE, "stages": [stage]})


def test_a_teacher_is_not_left_to_chance():
    tower = TOWERS["vit"].plain()
    model = {"kind": "masked", "config": {"image": {**tower, "mask": True}, "teacher": tower}}
    stage = {**RECIPE["stages"][0], "task": "mim", "settings": {}}
    read = recipe.Recipe.read({**RECIPE, "tokenizer": None, "model": model, "stages": [stage]})
    with pytest.raises(ConfigError, match="teacher"):
        recipe._model(read, None)
