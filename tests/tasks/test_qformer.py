"""BLIP-2's first stage: each loss by hand, what may be a false pair, and that many processes give the same."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from helpers import randomize
from tasks.test_contrast import BLOCK, NAMES, named, scenes
from train.ranks import run
from vitrail import hub, recipe
from vitrail.connectors import QFormerConfig
from vitrail.data.captions import captions
from vitrail.data.collection import Collection
from vitrail.data.scenes.source import Asked
from vitrail.encoders import ViTConfig
from vitrail.errors import ConfigError
from vitrail.models.qformer import TextQFormer, TextQFormerConfig
from vitrail.processing.text import Tokenizer
from vitrail.tasks.qformer import QFormerSettings, QFormerTask
from vitrail.train import distributed
from vitrail.train.distributed import rank

SPECIALS = ("<|endoftext|>", "[CLS]", "[DEC]")
CONFIG = TextQFormerConfig(
    tower=ViTConfig(image=16, patch=4, layers=1, block=BLOCK),
    qformer=QFormerConfig(reads=16, gives=12, queries=3, layers=2, width=20, heads=2, hidden=24, text=True),
    vocab=420,
    context=64,
    cls=1,
    eos=0,
    dec=2,
    log_scale=1.0,
)
SAME = torch.tensor([[a.lower() == b.lower() for b in NAMES] for a in NAMES])


def task(sources=None, config=CONFIG, specials=SPECIALS, **settings) -> QFormerTask:
    sources = {source.name: source for source in sources or [named(templates=("{}",))]}
    texts = [text for source in sources.values() for text in captions(source).pieces.texts]
    words = Tokenizer.train(texts, 420, specials=specials, eos=specials[0])
    return QFormerTask(randomize(TextQFormer(config)), sources, words, QFormerSettings(**settings))


def batch(made: QFormerTask, name: str = "named", count: int = 6):
    return made.collate([Asked(name, i) for i in range(count)])


def alike(logits, own):
    """The likeliest negative, and no chance."""
    found = logits.detach().masked_fill(own, -torch.inf).argmax(1)
    return found.masked_fill(own.all(1), -1)


@pytest.fixture
def sure(monkeypatch):
    monkeypatch.setattr("vitrail.tasks.qformer.hard_negatives", alike)


def test_a_text_has_a_beginning_and_an_end_and_nothing_behind_it():
    made = task()
    ids = made._made(batch(made)).true
    assert ids[:, 0].tolist() == [1] * 6 and ids.shape == (6, 64)
    for row in ids.tolist():
        end = row.index(0)
        assert set(row[end + 1 :]) == {-1} and min(row[1:end]) > 2


@pytest.mark.parametrize("training", [True, False])
def test_each_loss_is_what_it_says(training, sure):
    made = task()
    made.model.train(training)
    smoothing = 0.1 if training else 0.0
    found, model = made(batch(made)), made.model
    given = made._made(batch(made))
    features, ids = model.features(given.pixels), given.true
    # Contrast: all pairs, each by itself.
    scale = model.log_scale.exp()
    sims = torch.stack(
        [torch.cat([model(given.pixels[i : i + 1], ids[j : j + 1])[0] for j in range(6)]) for i in range(6)]
    )
    target = SAME / SAME.sum(1, keepdim=True) * (1 - smoothing) + smoothing / 6
    logits = scale * sims
    wanted = -(target * (logits.log_softmax(1) + logits.T.log_softmax(1))).sum() / 2
    torch.testing.assert_close(found["itc"], wanted, rtol=1e-4, atol=1e-4)
    # Matching: the true pairs, and the likeliest false ones.
    pictures, texts = alike(logits.T, SAME), alike(logits, SAME)
    pairs = [(i, i, 1) for i in range(6)]
    pairs += [(int(pictures[i]), i, 0) for i in range(6)] + [(i, int(texts[i]), 0) for i in range(6)]
    each = [
        F.cross_entropy(model.match(features[i : i + 1], ids[j : j + 1]), torch.tensor([answer]))
        for i, j, answer in pairs
    ]
    torch.testing.assert_close(found["itm"], torch.stack(each).mean() * 6, rtol=1e-4, atol=1e-4)
    # Writing: text by text, word by word, without padding.
    each = []
    for i in range(6):
        text = ids[i : i + 1, ids[i] >= 0]
        logits = model.logits(model.write(features[i : i + 1], text)[1])[0]
        logp = logits.log_softmax(-1)
        each += [
            -(1 - smoothing) * logp[t, text[0, t + 1]] - smoothing * logp[t].mean() for t in range(text.shape[1] - 1)
        ]
    torch.testing.assert_close(found["itg"], torch.stack(each).mean() * 6, rtol=1e-4, atol=1e-4)
    assert made.counts(batch(made)) == dict.fromkeys(("itc", "itm", "itg"), 6) and made.flops(batch(made)) > 0


def test_pictures_of_one_name_are_no_false_pair(monkeypatch):
    made, seen = task(), []
    monkeypatch.setattr(
        made, "_matched", lambda features, ids, picture, text: seen.append((picture, text)) or ids.sum()
    )
    for _ in range(20):
        made(batch(made))
    for drawn in (torch.stack(column) for column in zip(*seen, strict=True)):
        assert drawn.shape == (20, 6) and (drawn >= 0).all()
        assert not SAME[torch.arange(6).expand(20, -1), drawn].any()
        assert len(drawn[:, 0].unique()) > 1  # and another at another time
    same = made.collate([Asked("named", 0), Asked("named", 2)])  # two dogs: there is no false pair
    made(same)
    assert seen[-1][0].tolist() == seen[-1][1].tolist() == [-1, -1]


def test_where_all_belong_together_only_true_pairs_are_matched():
    made = task()
    dogs = made.collate([Asked("named", 0), Asked("named", 2)])
    given = made._made(dogs)
    features = made.model.features(given.pixels)
    wanted = F.cross_entropy(made.model.match(features, given.true), torch.tensor([1, 1])) * 2
    torch.testing.assert_close(made(dogs)["itm"], wanted)


def test_scenes_and_names_share_a_batch_and_everything_that_learns_is_reached():
    made = task([named(), scenes()])
    made.model.train()
    for p in made.model.tower.parameters():
        p.requires_grad_(False)
    found = made(made.collate([*(Asked("named", i) for i in range(3)), *(Asked("scenes", i) for i in range(3))]))
    sum(found.values()).backward()
    for name, p in made.model.named_parameters():
        assert (p.grad is None) == name.startswith("tower."), name


@pytest.mark.slow
def test_six_pictures_are_learnt_by_heart():
    """Contrast comes down to what smoothing leaves of it, and the matcher tells every pair, also those that were never
    drawn as false ones."""
    made = task()
    torch.manual_seed(0)
    made.model = TextQFormer(CONFIG).train()
    optim = torch.optim.AdamW(made.model.parameters(), lr=3e-3)
    for _ in range(240):
        found = {name: loss / 6 for name, loss in made(batch(made)).items()}
        optim.zero_grad()
        sum(found.values()).backward()
        optim.step()
    target = SAME / SAME.sum(1, keepdim=True) * 0.9 + 0.1 / 6
    floor = -(target * target.log()).sum(1).mean()
    assert floor <= found["itc"] < floor + 0.02 and found["itm"] < 0.05
    given, model = made._made(batch(made)), made.model.eval()
    pictures, texts = (index.flatten() for index in torch.meshgrid(torch.arange(6), torch.arange(6), indexing="ij"))
    belongs = model.match(model.features(given.pixels)[pictures], given.true[texts]).argmax(1)
    assert torch.equal(belongs.view(6, 6).bool(), SAME)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"config": CONFIG.with_(dec=None)}, "dec"),
        ({"config": CONFIG.with_(log_scale=None)}, "scale"),
        ({"config": CONFIG.with_(dec=40)}, "model.config.dec is 40"),
        ({"config": CONFIG.with_(context=3)}, "set model.config.context"),
        ({"smoothing": 1.0}, "smoothing"),
        ({"weights": {"itx": 1.0}}, "itc, itm, itg"),
        ({"weights": {"itm": -1.0}}, "0 or more"),
    ],
)
def test_what_cannot_be_is_refused(change, says):
    with pytest.raises(ConfigError, match=says):
        task(**change)


# ---- many processes ---------------------------------------------------------------------------------------------


def gradients(made: QFormerTask, given, everywhere: dict[str, int]) -> dict[str, float]:
    found = made(given)
    (found["itc"] / everywhere["itc"] + found["itm"] / everywhere["itm"]).backward()
    return {name: loss.item() for name, loss in found.items()}


def shared(folder: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vitrail.tasks.qformer.hard_negatives", alike)
        made = task()
        made.model.train()
        given = made.collate([[Asked("named", i) for i in share] for share in ((0, 1, 2, 3), (4, 5))][rank()])
        found = gradients(made, given, distributed.total(made.counts(given)))
    found, grads = distributed.total(found), []
    for p in made.model.parameters():
        grads.append(torch.zeros_like(p) if p.grad is None else p.grad)
        torch.distributed.all_reduce(grads[-1])
    if rank() == 0:
        torch.save({"found": found, "grads": grads}, Path(folder) / "found.pt")


@pytest.mark.slow
def test_two_processes_give_the_gradients_of_one(tmp_path, sure):
    """False pairs are taken from the other process too, and the tower learns through them."""
    run(2, shared, str(tmp_path))
    saved = torch.load(tmp_path / "found.pt")
    made = task()
    made.model.train()
    found = gradients(made, batch(made), made.counts(batch(made)))
    for name in ("itc", "itm"):
        assert saved["found"][name] == pytest.approx(found[name], rel=1e-4)
    for p, other in zip(made.model.parameters(), saved["grads"], strict=True):
        torch.testing.assert_close(torch.zeros_like(p) if p.grad is None else p.grad, other, rtol=1e-3, atol=1e-4)


# ---- recipes ----------------------------------------------------------------------------------------------------

RECIPE = {
    "name": "small",
    "says": "a test",
    "tokenizer": {"train": 300, "specials": ["[CLS]", "[DEC]"]},
    "model": {"kind": "text-qformer", "config": CONFIG.with_(vocab=300).plain()},
    "sources": {"shown": {"kind": "named", "data": ["x"], "side": 16}},
    "stages": [
        {
            "name": "learn",
            "task": "qformer",
            "steps": 2,
            "batch": 4,
            "train": ["qformer", "embed", "positions", "text_projection", "matcher", "writer", "log_scale"],
            "mixture": {"weights": {"shown": 1.0}},
            "optim": {"lr": 1e-3},
        }
    ],
}


def test_a_recipe_trains_it_and_its_queries_start_a_connector(tmp_path, monkeypatch):
    kept = named()
    shown = Collection(kept.abouts, kept.pixels(torch.arange(len(kept))))
    monkeypatch.setattr("vitrail.data.named.collection", lambda *_: shown)
    made = recipe.train(recipe.Recipe.read(RECIPE), tmp_path, quiet=True)
    again = hub.load(tmp_path / "final")
    assert isinstance(again, TextQFormer) and torch.equal(again.qformer.queries, made.qformer.queries)
    plain = CONFIG.qformer.with_(text=False, gives=8)
    vlm = torch.nn.ModuleDict({"connector": type(made.qformer)(plain)})
    before = vlm["connector"].project.weight.clone()
    part = recipe.StartPart(start=str(tmp_path / "final"), part="qformer", fresh=("project",))
    recipe._start(vlm, "connector", part)
    assert torch.equal(vlm["connector"].queries, made.qformer.queries)
    assert torch.equal(vlm["connector"].project.weight, before)  # the second stage has a projection of its own
    features = torch.randn(2, 9, 16)
    assert torch.equal(vlm["connector"].look(features), again.eval().qformer.look(features))
    with pytest.raises(ConfigError, match=r"project.*\n.*fresh"):
        recipe._start(vlm, "connector", recipe.StartPart(start=part.start, part="qformer"))
    with pytest.raises(ConfigError, match="nothing"):
        recipe._start(vlm, "connector", recipe.StartPart(start=part.start, part="qformer", fresh=("nothing",)))
