"""Reading, drawing and text in one step: what is asked of the model, and what it costs, written out."""

import json
import math
from functools import partial

import pytest
import torch

from data.scenes.conftest import drawn
from models.test_unified import made
from tasks.test_contrast import named
from vitrail import hub, recipe
from vitrail.codecs.codec import Codec
from vitrail.data.order import Mixture
from vitrail.data.scenes.source import Asked, ScenesConfig, SceneSource
from vitrail.data.scenes.sprites import Atlas
from vitrail.data.talks import QUESTIONS, SceneTalks, talks
from vitrail.data.text import TextConfig, TextWindows
from vitrail.data.views import PLAIN, ViewsConfig, views
from vitrail.data.words import ask, ask_several
from vitrail.errors import ConfigError
from vitrail.models.unified import Unified
from vitrail.processing.text import Tokenizer
from vitrail.tasks.told import IGNORED, TEXT, TRIED
from vitrail.tasks.unified import UnifiedSettings, UnifiedTask
from vitrail.train import trainer
from vitrail.train.ahead import Ahead
from vitrail.train.distributed import Whole
from vitrail.train.optim import OptimConfig
from vitrail.train.stage import StageConfig
from vitrail.train.task import MadeTask


@pytest.fixture(scope="module")
def scenes() -> SceneSource:
    return SceneSource(ScenesConfig(atlas="-", preset="relations", side=12, seed=5), Atlas.build(drawn()), "scenes")


@pytest.fixture(scope="module")
def words(scenes) -> Tokenizer:
    return Tokenizer.train([*talks(scenes, 1).pieces.texts, *talks(named(), 1).pieces.texts], 420)


def unified(order="raster", vocab=420, **more) -> Unified:
    config = made(order, **more).config
    torch.manual_seed(1)
    return Unified(config.with_(decoder=config.decoder.with_(vocab=vocab)))


def task(scenes, words, order="raster", text=None, **settings) -> UnifiedTask:
    sources = {"scenes": scenes, "named": named(), "drawn": scenes} | ({} if text is None else {"text": text})
    return UnifiedTask(unified(order), sources, words, UnifiedSettings(draw=("drawn",), **settings))


def test_only_answers_are_learnt(scenes, words):
    made = task(scenes, words, questions=3, length=200)
    index = torch.arange(6)
    pixels, ids, targets, since = made._talk("scenes", index).values()
    told = made.talks["scenes"]
    assert isinstance(told, SceneTalks)
    said = ask_several(told.words, scenes.scenes(index), scenes.config.seed, QUESTIONS, 3)
    questions, answers = told.pieces.read(said.question), told.pieces.read(said.answer)
    for b in range(6):
        turns = [t for t in range(3 * b, 3 * b + 3) if said.valid[t]]
        whole = [
            i for t in turns for i in (*words.encode(questions[t]), words.eos, *words.encode(answers[t]), words.eos)
        ]
        assert ids[b, : len(whole)].tolist() == whole
        learnt = [i for t in turns for i in (*words.encode(answers[t]), words.eos)]
        assert targets[b][targets[b] != IGNORED].tolist() == learnt
        sizes = [len([*words.encode(questions[t]), *words.encode(answers[t])]) + 2 for t in turns]
        starts = [sum(sizes[:n]) for n in range(len(sizes))]
        assert since[b, : len(whole)].tolist() == [at for at, n in zip(starts, sizes, strict=True) for _ in range(n)]
        places = (targets[b] != IGNORED).nonzero()[:, 0]
        assert torch.equal(ids[b, places + 1], targets[b, places])  # each is the token that follows
    assert torch.equal(pixels, views(scenes.draw(index).pixels, PLAIN.with_(side=12)))


def test_sources_are_read_in_one_pass_as_each_alone(scenes, words):
    made = task(scenes, words, questions=2, z=0.0)
    made.model.eval()
    index = {"scenes": torch.arange(3), "named": torch.arange(2)}
    batch = made.made(index)
    alone = [made({key: value for key, value in batch.items() if key.startswith(name)})["read"] for name in index]
    torch.testing.assert_close(made(batch)["read"], torch.stack(alone).sum())


@pytest.mark.parametrize("last", [None, "caption_long"])
def test_each_question_is_as_if_it_alone_were_asked(scenes, words, last):
    made = task(scenes, words, questions=3, last=last, length=300)
    model, batch = made.model.eval(), made.made({"scenes": torch.arange(3)})
    ids, targets, since = (batch[f"scenes:{part}"] for part in ("ids", "targets", "since"))
    seen, _ = model.look(batch["scenes:pixels"])
    hidden = model(model.shown(seen), model.words(ids, since=since))[:, -ids.shape[1] :]
    for b in range(3):
        starts = since[b, targets[b] != IGNORED].unique().tolist()
        assert len(starts) > 1
        for start in starts:
            own = since[b] == start
            alone = model(model.shown(seen[b : b + 1]), model.words(ids[b : b + 1, own]))[:, -int(own.sum()) :]
            torch.testing.assert_close(hidden[b : b + 1, own], alone, atol=1e-5, rtol=1e-4)


def test_a_talk_that_is_too_long_is_cut(scenes, words):
    whole, cut = (task(scenes, words, questions=4, length=length) for length in (300, 20))
    a, b = (made._talk("scenes", torch.arange(5)) for made in (whole, cut))
    assert torch.equal(a["ids"][:, :20], b["ids"]) and torch.equal(a["targets"][:, :20], b["targets"])


def test_names_are_asked_for(scenes, words):
    made = task(scenes, words)
    _, ids, targets, _ = made._talk("named", torch.arange(4)).values()
    source = made.talks["named"].source
    for b in range(4):
        name = source.pieces.read(source.texts(torch.tensor([b]), vary=False))[0]
        assert words.decode(targets[b][targets[b] != IGNORED][:-1].tolist()) == name
        assert "?" in words.decode(ids[b].tolist()) or "name" in words.decode(ids[b].tolist())


@pytest.mark.parametrize("order", ["raster", "masked"])
def test_the_losses_are_those_of_the_formula(scenes, words, order):
    made = task(scenes, words, order, questions=2, z=0.0, drop=0.0)
    model, index = made.model.eval(), torch.arange(3)
    batch = {"scenes": index, "drawn": index}
    torch.manual_seed(7)
    losses = made(batch)
    assert made.counts(batch) == {"read": 3, "draw": 3}
    with torch.no_grad():
        pixels, ids, targets, since = made._talk("scenes", index).values()
        seen, codes = model.look(pixels)
        said = model(model.shown(seen), model.words(ids, since=since))
        logits = model.decoder.logits(said)[:, 10:].log_softmax(-1)
        each = [-logits[b, t, targets[b, t]] for b in range(3) for t in range(256) if targets[b, t] != IGNORED]
        torch.testing.assert_close(losses["read"], torch.stack(each).mean() * 3)
        torch.manual_seed(7)
        wish = made._wish("drawn", index)
        ids, counts, hidden = wish["ids"], wish["counts"], wish.get("hidden")
        total = 0.0
        for b in range(3):
            one = None if hidden is None else hidden[b : b + 1]
            laid = model.lay(model.words(ids[b : b + 1, : counts[b]]), model.drawn(codes[b : b + 1], one))
            states = model.drawing_states(laid, model.hidden(laid))[0]
            asked = torch.arange(9) if one is None else one.flatten().nonzero()[:, 0]
            total += model.code_losses(states[asked], codes[b].flatten()[asked]).mean()
        torch.testing.assert_close(losses["draw"], total)


def test_wishes_say_what_is_there(scenes, words):
    made = task(scenes, words, drop=0.0)
    _, ids, counts = made._wish("drawn", torch.arange(20)).values()
    told = made.talks["drawn"]
    torch.manual_seed(3)
    texts = told.pieces.read(told.wish(torch.arange(20)).rows[:, :-1])
    torch.manual_seed(3)
    _, ids, counts = made._wish("drawn", torch.arange(20)).values()
    for b in range(20):
        assert ids[b, : counts[b]].tolist() == [*words.encode(texts[b]), words.eos]
    assert len(set(texts)) > 10


def test_a_prompt_that_is_cut_keeps_its_end(scenes, words):
    made = task(scenes, words, prompt=8)
    made.model.eval()
    _, ids, counts = made._wish("drawn", torch.arange(10)).values()
    assert ids.shape == (10, 8) and bool((ids[:, -1] == made.end).all()) and bool((counts <= 8).all())
    assert task(scenes, words).prompt["drawn"] > 8  # it is the setting that cuts


def test_weights_z_and_views(scenes, words):
    source = named(views=ViewsConfig(area=(0.2, 0.4), shift=0.5))
    made = UnifiedTask(
        unified(), {"named": source, "d": scenes}, words,
        UnifiedSettings(draw=("d",), weights={"draw": 3.0}, z=0.0),
    )  # fmt: skip
    assert made.weights == {"read": 1.0, "draw": 3.0}
    made.model.eval()
    shown = made._talk("named", torch.arange(4))["pixels"]
    assert torch.equal(shown, views(source.pixels(torch.arange(4)), PLAIN.with_(side=12)))
    made.model.train()
    assert not torch.equal(shown, made._talk("named", torch.arange(4))["pixels"])
    batch, losses = {"d": torch.arange(3)}, {}
    for training in (True, False):
        made.model.train(training)
        for z in (0.0, 0.1):
            made.settings = made.settings.with_(z=z)
            torch.manual_seed(0)
            losses[training, z] = made(batch)["draw"]
    assert losses[True, 0.1] > losses[True, 0.0] + 0.01
    assert losses[False, 0.1] == losses[False, 0.0]  # what is judged has no penalty


def test_what_is_never_learnt_is_refused(scenes, words):
    with pytest.raises(ConfigError, match=r"not one has an answer within 8 tokens"):
        task(scenes, words, length=8, questions=1, kinds=("choice_object",))
    with pytest.raises(ConfigError, match="'scenes' not one"):
        task(scenes, words, questions=1, kinds=("reading",))


def test_prompts_are_left_out_in_training_alone(scenes, words):
    made = task(scenes, words, drop=1.0)
    made.model.train()
    assert not made._wish("drawn", torch.arange(5))["counts"].any()
    made.model.eval()
    assert made._wish("drawn", torch.arange(5))["counts"].all()


def test_shares_that_are_hidden(scenes, words):
    made = task(scenes, words, "masked")
    count = made._hidden(torch.zeros(4000)).flatten(1).sum(1)
    assert count.min() >= 1 and count.max() == 9
    # ⌈9 cos(πu/2)⌉ ≥ 5 where u < 2/π · arccos(4/9)
    assert abs((count >= 5).float().mean() - 2 / math.pi * math.acos(4 / 9)) < 0.03


def test_text_is_continued(scenes, words, tmp_path):
    (tmp_path / "a.txt").write_text("a dog and a cat. " * 200)
    text = TextWindows(TextConfig(files=(str(tmp_path / "a.txt"),), length=16), words)
    made = task(scenes, words, text=text)
    batch = made.collate([text[0], scenes[3], text[1]])
    assert set(batch) == {TEXT, "scenes"} and made.counts(batch) == {"text": 32, "read": 1, "draw": 0}
    with torch.no_grad():
        logits = made.model.decoder(batch[TEXT][:, :-1]).log_softmax(-1)
        wanted = -logits.gather(-1, batch[TEXT][:, 1:, None].long()).sum()
        found = made({TEXT: batch[TEXT]})
    z = made.settings.z * made.model.decoder(batch[TEXT][:, :-1]).logsumexp(-1).square().sum()
    torch.testing.assert_close(found["text"], wanted + z.detach(), rtol=1e-4, atol=1e-4)
    assert made.flops(batch) > 0


def test_what_cannot_be_is_refused(scenes, words):
    with pytest.raises(ConfigError, match="tokenizer"):
        UnifiedTask(unified(), {"scenes": scenes}, None, UnifiedSettings())
    with pytest.raises(ConfigError, match="no source of pictures"):
        UnifiedTask(unified(), {"scenes": scenes}, words, UnifiedSettings(draw=("skenes",)))
    for wrong in ({"weights": {"reed": 1.0}}, {"drop": 2.0}, {"z": -1.0}):
        with pytest.raises(ConfigError):
            UnifiedSettings(**wrong)
    with pytest.raises(ConfigError, match="questions"):
        task(scenes, words, questions=100)


@pytest.mark.parametrize("order", ["raster", "masked"])
def test_a_recipe_trains_it_with_a_codec_of_before(order, tmp_path, scenes, monkeypatch):
    """From a saved codec to a saved model that loads and draws; the codec is as it was."""
    monkeypatch.setattr("vitrail.recipe.open_atlas", lambda name: scenes.atlas)
    torch.manual_seed(0)
    config = made(order).config
    hub.save(Codec(config.codec), tmp_path / "codec")
    plain = {
        "name": "unified", "says": "x", "seed": 0, "tokenizer": {"train": 400},
        "model": {
            "kind": "unified",
            "config": config.with_(decoder=config.decoder.with_(vocab=400)).plain(),
            "parts": {"codec": {"start": str(tmp_path / "codec"), "part": ""}},
        },
        "sources": {
            name: {"kind": "scenes", "atlas": "-", "preset": "relations", "side": 12, "seed": i}
            for i, name in enumerate("rd")
        },
        "stages": [{
            "name": "learn", "task": "unified", "steps": 6, "batch": 8, "dtype": "bfloat16",
            "train": ["decoder", "read", "code", "marks", "head"],
            "settings": {"draw": ["d"], "questions": 2, "length": 64},
            "mixture": {"weights": {"r": 1, "d": 1}}, "optim": {"lr": 1e-2},
        }],
    }  # fmt: skip
    chosen = recipe.Recipe.read(plain)
    trained = recipe.train(chosen, tmp_path / "out", quiet=True)
    rows = [json.loads(line) for line in (tmp_path / "out" / "learn" / "log.jsonl").read_text().splitlines()]
    assert rows[-1]["loss"] < rows[0]["loss"]
    again = hub.load(tmp_path / "out" / "final")
    before = hub.load(tmp_path / "codec").state_dict()
    for name, weight in again.codec.state_dict().items():
        assert torch.equal(weight, before[name]), name
    ids = torch.arange(4)[None]
    assert torch.equal(again(again.words(ids)), trained.eval()(trained.words(ids)))
    del plain["model"]["parts"]
    with pytest.raises(ConfigError, match="left to chance"):
        recipe.train(recipe.Recipe.read(plain), tmp_path / "other", quiet=True)


@pytest.mark.parametrize("order", ["raster", "masked"])
def test_a_step_whose_samples_are_made_is_one_graph(order, scenes, words):
    """Whatever order sources come in, and equal to a step that makes them itself."""
    torch._dynamo.reset()
    task_ = task(scenes, words, order, questions=2, length=64)
    task_.model.train()
    graphs: list[int] = []

    def backend(module, _):
        graphs.append(len(module.graph.nodes))
        return module.forward

    compiled = torch.compile(Whole(task_), backend=backend)
    for names in (("scenes", "drawn", "named"), ("drawn", "named", "scenes")):
        batch = task_.collate([Asked(name, i) for i in range(3) for name in names])
        assert isinstance(task_, MadeTask) and list(batch) == sorted(names)
        torch.manual_seed(0)
        told = compiled(task_.made(batch))
        torch.manual_seed(0)
        torch.testing.assert_close(told, task_(batch), rtol=1e-4, atol=1e-4)
    assert len(graphs) == 1
    torch._dynamo.reset()


def test_a_caption_ends_a_talk(scenes, words):
    plain, more = (task(scenes, words, questions=2, length=400, last=last) for last in (None, "caption_long"))
    index = torch.arange(6)
    a, b = (made._talk("scenes", index) for made in (plain, more))
    told = more.talks["scenes"]
    said = ask(told.words, scenes.scenes(index), scenes.config.seed, "caption_long")
    asked = zip(told.pieces.read(said.question), told.pieces.read(said.answer), strict=True)
    for row, (question, answer) in enumerate(asked):
        before = int((a["targets"][row] != IGNORED).nonzero().max()) + 2
        whole = [*words.encode(question), words.eos, *words.encode(answer), words.eos]
        assert torch.equal(a["ids"][row, :before], b["ids"][row, :before])
        assert b["ids"][row, before : before + len(whole)].tolist() == whole
        learnt = b["targets"][row, before - 1 :]
        assert learnt[learnt != IGNORED].tolist() == [*words.encode(answer), words.eos]
    with pytest.raises(ConfigError, match="caption_lung"):
        task(scenes, words, last="caption_lung")


def test_making_samples_early_changes_nothing(tmp_path, scenes, words, monkeypatch):
    curves = []
    for early in (False, True):
        monkeypatch.setattr(trainer, "Ahead", partial(Ahead, early=early))
        torch.manual_seed(0)
        task_ = task(scenes, words, "masked", questions=2, length=64)
        stage = StageConfig(
            name="learn", task="unified", steps=4, batch=6, accumulate=2, save_every=100,
            mixture=Mixture(weights={"scenes": 1.0, "drawn": 1.0}), optim=OptimConfig(lr=1e-2),
        )  # fmt: skip
        sources = {"scenes": scenes, "drawn": SceneSource(scenes.config, scenes.atlas, "drawn")}
        folder = tmp_path / str(early)
        trainer.Trainer(stage, task_, sources, folder, quiet=True).train()
        curves.append([json.loads(line)["loss"] for line in (folder / "log.jsonl").read_text().splitlines()])
    assert curves[0] == curves[1] and curves[0][0] != curves[0][1]


def test_scenes_are_varied_in_training_and_judged_as_they_are(scenes, words):
    how = ViewsConfig(colour=0.05, gamma=(-0.05, 0.05), focus=(-0.5, 0.5), noise=0.05)
    varied = SceneSource(scenes.config.with_(views=how), scenes.atlas, "scenes")
    made, index = task(varied, words, questions=2, length=120), torch.arange(4)
    plain = task(scenes, words, questions=2, length=120)
    made.model.train()
    seen = made._talk("scenes", index)
    still = plain._talk("scenes", index)
    assert torch.equal(seen["ids"], still["ids"]) and not torch.equal(seen["pixels"], still["pixels"])
    assert (seen["pixels"] - still["pixels"]).abs().mean() < 0.2
    made.model.eval()
    assert torch.equal(made._talk("scenes", index)["pixels"], still["pixels"])


def test_many_wordings_ask_the_same_otherwise(scenes, words):
    """The prompts that are drawn from as well; and each answer is learnt as before."""
    usual, many = (task(scenes, words, kinds=("existence_random",), questions=1, wordings=w) for w in ("usual", "many"))
    index, heard = torch.arange(100), []
    for one in (usual, many):
        told = one.talks["scenes"]
        rows = told.talk(index).rows
        texts = told.pieces.read(torch.where(rows == len(told.pieces), 0, rows))
        heard.append(sum(text.startswith(("Can you confirm", "Is there any sign", "Do you notice")) for text in texts))
    assert heard[0] == 0 < heard[1]
    answers = [
        [i for i in one._talk("scenes", index)["targets"].flatten().tolist() if i != IGNORED] for one in (usual, many)
    ]
    assert answers[0] == answers[1]
    with pytest.raises(ConfigError, match="wordings"):
        UnifiedSettings(wordings="some")  # type: ignore[arg-type]


def test_what_is_cut_is_said(scenes, words, capsys):
    task(scenes, words, questions=2, length=400)
    assert not capsys.readouterr().err
    task(scenes, words, questions=2, length=24)
    told = talks(scenes, 2)
    assert isinstance(told, SceneTalks)
    said = ask_several(told.words, scenes.scenes(torch.arange(TRIED)), scenes.config.seed, QUESTIONS, 2)
    turns = zip(told.pieces.read(said.question), told.pieces.read(said.answer), said.valid.tolist(), strict=True)
    sizes = [valid * (len(words.encode(q)) + len(words.encode(a)) + 2) for q, a, valid in turns]
    whole = [a + b for a, b in zip(sizes[::2], sizes[1::2], strict=True)]
    cut = sum(size > 25 for size in whole)
    want = f"scenes: of {TRIED} talks {cut} are longer than 24 tokens, and cut; the longest has {max(whole)}"
    assert want in capsys.readouterr().err
