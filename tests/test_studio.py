"""A unified model at work, from Python and from the command line."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from generate.test_answers import TEXTS, unified
from vitrail import hub
from vitrail.cli import main
from vitrail.cli.studio import draw as draw_command
from vitrail.data.words.checks import checks
from vitrail.errors import ConfigError, ImageError, VitrailError
from vitrail.generate.ahead import draw_ahead
from vitrail.generate.answers import Reading
from vitrail.generate.pictures import Drawing, draw
from vitrail.generate.sampling import GREEDY, Sampling
from vitrail.generate.text import Written
from vitrail.processing.text import Tokenizer
from vitrail.studio import APART, DESCRIBE, Studio


@pytest.fixture(scope="module", params=["raster", "masked"])
def folder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    hub.save(unified(order=request.param), folder / "model", Tokenizer.train(TEXTS * 3, 300))
    pixels = np.random.default_rng(0).integers(0, 256, (2, 30, 40, 3), dtype=np.uint8)
    for name, one in zip("ab", pixels, strict=True):
        Image.fromarray(one).save(folder / f"{name}.png")
    return folder


@pytest.fixture
def studio(folder) -> Studio:
    return Studio.load(folder / "model", device="cpu", dtype=torch.float32)


def same(a: Image.Image, b: Image.Image) -> bool:
    return np.array_equal(np.asarray(a), np.asarray(b))


def test_tokens_there_and_back(studio, folder):
    ids = studio.tokenize([folder / "a.png", Image.open(folder / "b.png")])
    assert ids.shape == (2, 3, 3) and ids.dtype == torch.int64
    pictures = studio.detokenize(ids)
    assert [picture.size for picture in pictures] == [(12, 12)] * 2
    with torch.no_grad():
        wanted = studio.model.codec.decode(studio.model.codec.lookup(ids))
    assert np.array_equal(np.asarray(pictures[1]), studio.model.codec.bytes(wanted)[1].permute(1, 2, 0).numpy())
    found = studio.embed([folder / "a.png", folder / "b.png"])
    with torch.no_grad():
        hidden = studio.model(studio.model.shown(studio._look(folder / "b.png")[0]))[0, 1:].mean(0)
    torch.testing.assert_close(found[1], hidden / hidden.norm())


def test_an_answer_begins_with_its_word(studio, folder, monkeypatch):
    said = Written([1], " Yes, it is", "stop")
    monkeypatch.setattr("vitrail.studio.answer", lambda *given, **more: [said])
    assert studio.ask(folder / "a.png", TEXTS[0]) == "Yes, it is"


def test_one_or_many(studio, folder):
    a, b = str(folder / "a.png"), str(folder / "b.png")
    one = studio.ask(a, TEXTS[0], max_new=6)
    assert isinstance(one, str)
    assert studio.ask(a, TEXTS[:2], max_new=6) == [one, studio.ask(a, TEXTS[1], max_new=6)]
    assert studio.ask([a, b], TEXTS[0], max_new=6) == [one, studio.ask(b, TEXTS[0], max_new=6)]
    assert studio.ask([a, b], TEXTS[:2], max_new=6) == [one, studio.ask(b, TEXTS[1], max_new=6)]
    assert studio.caption(a, max_new=6) == studio.ask(a, DESCRIBE, max_new=6)


@torch.no_grad()
def test_options_are_weighed_as_they_would_be_written(studio, folder):
    """The sum over tokens, one by one, of what a stepper gives each of them after those before it."""
    a, b, words = str(folder / "a.png"), str(folder / "b.png"), studio.words
    asked = [(a, TEXTS[0], [TEXTS[1], TEXTS[2]]), ([b], TEXTS[3], [TEXTS[1]])]
    found = studio.likelihoods(asked)
    assert [len(row) for row in found] == [2, 1]
    for (shown, question, options), row in zip(asked, found, strict=True):
        for option, value in zip(options, row, strict=True):
            stepper = Reading(studio.model, studio._look(shown)[0], 1)
            ids = torch.tensor([[*words.encode(question), words.eos]])
            logits, total = stepper.prefill(ids, torch.tensor([ids.shape[1]])), 0.0
            for token in [*words.encode(option), words.eos]:
                total += float(logits.log_softmax(-1)[0, token])
                logits = stepper.step(torch.tensor([token]))
            assert value == pytest.approx(total, rel=1e-5)
    with pytest.raises(ConfigError, match="one picture at a time"):
        studio.likelihoods([([a, b], TEXTS[0], [TEXTS[1]])])
    with pytest.raises(ConfigError, match="no option"):
        studio.likelihoods([(a, TEXTS[0], [])])


def test_of_several_tries_the_one_is_kept_that_answers_as_the_prompt(studio):
    how = {"steps": 3, "guidance": 2.0}
    prompts, told = ["a red dog", "two cats above an owl"], []
    each = [studio.draw(prompts, seed=5 + n * APART, **how) for n in range(3)]
    best = studio.draw(prompts, seed=5, tries=3, progress=lambda done, of: told.append(done / of), **how)
    for row, prompt in enumerate(prompts):
        sure = [
            sum(studio.likelihoods([(some[row], *(check.question, [check.answer]))])[0][0] for check in checks(prompt))
            for some in each
        ]
        assert same(best[row], each[sure.index(max(sure))][row])
    assert told == sorted(told) and told[-1] == 1
    assert same(studio.draw(prompts[0], seed=5, tries=1, **how), each[0][0])
    with pytest.raises(ConfigError, match="0 tries"):
        studio.draw(prompts, tries=0)
    with pytest.raises(ConfigError, match="'something nice' names nothing"):
        studio.draw([*prompts, "something nice"], tries=2)


def test_a_drawing_is_what_the_model_draws(studio):
    words, model = studio.words, studio.model
    picture = studio.draw(TEXTS[3], seed=4, guidance=2.0, steps=3, top_p=0.9)
    ids = torch.tensor([[*words.encode(TEXTS[3]), words.eos]])
    how = Drawing(guidance=2.0, steps=3, sampling=Sampling(top_p=0.9, seed=4))
    assert same(picture, studio.detokenize(draw(model, ids, torch.tensor([ids.shape[1]]), how))[0])
    both = studio.draw([TEXTS[1], TEXTS[3]], seed=3, guidance=2.0, steps=3, top_p=0.9)
    assert same(both[1], picture)  # the second has seed 3 + 1
    assert len(studio.draw(["", "a dog"], negative="a cat", seed=0)) == 2
    wide = [[*words.encode(text), words.eos] for text in (TEXTS[1], "a cat")]
    asked, against = ((torch.tensor([row]), torch.tensor([len(row)])) for row in wide)
    how = Drawing(guidance=4.0, steps=3, sampling=Sampling(seed=9))
    wanted = draw(model, *asked, how, negative=against)
    assert torch.equal(studio.draw_ids([TEXTS[1]], negative="a cat", guidance=4.0, steps=3, seed=9), wanted)


def test_another_model_may_draft(studio, folder, tmp_path, capsys):
    """What comes of it is what `draw_ahead` gives; only models that draw code after code have drafts."""
    small = Studio(unified(order=studio.model.config.order), studio.words)
    if studio.model.config.order == "masked":
        with pytest.raises(ConfigError, match="code after code"):
            studio.draw("a dog", draft=small)
        return
    words = studio.words
    ids = torch.tensor([[*words.encode(TEXTS[3]), words.eos]])
    how = Drawing(guidance=2.0, sampling=Sampling(seed=4))
    wanted = draw_ahead(studio.model, small.model, ids, torch.tensor([ids.shape[1]]), how).ids
    assert torch.equal(studio.draw_ids([TEXTS[3]], draft=small, guidance=2.0, seed=4), wanted)
    with pytest.raises(ConfigError, match="led away from nothing"):
        studio.draw("a dog", draft=small, negative="a cat")
    other = Studio(small.model, Tokenizer.train(TEXTS[:2], 280))
    with pytest.raises(ConfigError, match="other tokens"):
        studio.draw(TEXTS[3], draft=other)
    draw_command(TEXTS[3], out=tmp_path / "dog.png", model=str(folder / "model"), draft=str(folder / "model"), seed=1)
    assert Image.open(tmp_path / "dog.png").size == (12, 12)
    with pytest.raises(ConfigError, match="whole picture"):
        draw_command("a", out=tmp_path / "x.png", draft="mini", over="a.png", vary=0.5)


def test_a_part_is_drawn_anew(studio, folder):
    ids = studio.tokenize([folder / "a.png"])
    kept = []
    plain = studio.detokenize
    studio.detokenize = lambda found: kept.append(found) or plain(found)
    studio.inpaint(folder / "a.png", "a dog", (0.0, 0.0, 0.4, 0.4), seed=1)
    changed = (kept[-1] != ids)[0]
    assert not changed[2:].any() and not changed[:, 2:].any()  # 0.4 of three codes touches two
    where = torch.zeros(3, 3, dtype=torch.bool)
    for seed in range(6):
        studio.inpaint(folder / "a.png", "a dog", (0.7, 0.0, 1.0, 0.6), seed=seed)
        where |= (kept[-1] != ids)[0]
    assert where[:2, 2].any() and not where[2].any() and not where[:, :2].any()  # the right column, two rows of it
    some = [studio.vary(folder / "a.png", share=0.4, count=2, seed=3) and kept[-1] for _ in range(2)]
    assert torch.equal(*some) and 0 < int((some[0] != ids).flatten(1).sum(1).max()) <= 4
    assert len(studio.vary(folder / "a.png", share=0.0, count=3, seed=2)) == 3
    assert torch.equal(kept[-1], ids.expand(3, -1, -1))


def test_what_cannot_be_is_refused(studio, folder, tmp_path):
    with pytest.raises(ConfigError, match="box"):
        studio.inpaint(folder / "a.png", "x", (0.5, 0.0, 0.2, 1.0))
    with pytest.raises(ConfigError, match="without words"):
        studio.ask(folder / "a.png", " ")
    a = folder / "a.png"
    for nothing in (
        lambda: studio.draw([]), lambda: studio.tokenize([]), lambda: studio.ask(a, []), lambda: studio.ask([], "x"),
        lambda: studio.caption([]), lambda: studio.vary(a, count=0), lambda: studio.vary(a, seed=-1),
        lambda: studio.ask([a, a], ["x", "y", "z"]),
    ):  # fmt: skip
        with pytest.raises(ConfigError):
            nothing()
    assert studio.tokenize(str(a)).shape == studio.tokenize(Image.open(a)).shape == (1, 3, 3)
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="no CUDA"):
            Studio.load(folder / "model", device="cuda")
    with pytest.raises(ConfigError, match="end token"):
        Studio(studio.model, Tokenizer.train(TEXTS, 300, specials=("<x>",), eos=None))
    assert Studio.load(folder / "model", device=torch.device("cpu")).model.codec.device.type == "cpu"
    (tmp_path / "broken.png").write_bytes(b"no picture")
    with pytest.raises(ImageError, match=r"broken\.png"):
        studio.caption(tmp_path / "broken.png")
    hub.save(studio.model.codec, tmp_path / "codec")
    with pytest.raises(ConfigError, match="only a unified model"):
        Studio.load(tmp_path / "codec")


def test_what_is_of_another_type_is_named(studio, folder):
    a, ids = folder / "a.png", studio.tokenize(folder / "a.png")
    assert same(studio.detokenize(ids.numpy())[0], studio.detokenize(ids)[0])
    assert same(studio.detokenize(ids.tolist())[0], studio.detokenize(ids)[0])
    for wrong, says in (
        (lambda: studio.detokenize("ids"), "no table of ids"), (lambda: studio.detokenize(ids[0]), r"shape \(3, 3\)"),
        (lambda: studio.detokenize(ids.to("meta")), "on no device"), (lambda: studio.ask(a, None), "no question"),
        (lambda: studio.ask(a, b"hi"), "no question"), (lambda: studio.draw(None), "None is no prompt"),
        (lambda: studio.draw(["a", 3]), "3 is no prompt"), (lambda: studio.draw("a", negative=3), "lead away"),
        (lambda: studio.draw("a", seed="x"), "seed of 'x'"), (lambda: vitrail.load(None), "None names no model"),
        (lambda: studio.inpaint(a, "x", (0, 1)), "2 numbers"), (lambda: studio.ask(a, "x", temprature=1), "temper"),
        (lambda: studio.ask(a, "x", sampling=GREEDY, seed=1), "beside it"),
        (lambda: studio.ask(a, "x", tokenizer=studio.words), "no 'tokenizer'"),
        (lambda: studio.draw("a dog " * 9999), r"pass the \d+ the model was made for"),
        (lambda: studio.draw("a", negative="a dog " * 9999), "shorten the prompt"),
    ):  # fmt: skip
        with pytest.raises(VitrailError, match=says):
            wrong()


def test_answers_are_drawn_by_name(studio, folder):
    a, how = folder / "a.png", Sampling(temperature=2.0, seed=3)
    assert studio.ask(a, "x", temperature=2.0, seed=3, max_new=8) == studio.ask(a, "x", sampling=how, max_new=8)
    assert studio.ask(a, "x", seed=3, max_new=8) == studio.ask(a, "x", max_new=8)  # the likeliest has no chance in it


def test_drawings_are_written_as_they_are_done(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("vitrail.cli.studio.AT_ONCE", 2)
    kept, plain = [], Studio.draw

    def draw(self, prompts, **how):
        kept.append(sorted(path.name for path in tmp_path.glob("*.png")))
        return plain(self, prompts, **how)

    monkeypatch.setattr(Studio, "draw", draw)
    draw_command("a dog", out=tmp_path / "d.png", model=str(folder / "model"), count=5, seed=7, device="cpu")
    assert [len(some) for some in kept] == [0, 2, 4] and len(list(tmp_path.glob("*.png"))) == 5
    studio = vitrail.load(folder / "model", device="cpu")
    with Image.open(tmp_path / "d-4.png") as fourth:
        assert same(fourth, plain(studio, "a dog", seed=10))


def test_from_the_command_line(folder, tmp_path, capsys, monkeypatch):
    studio = vitrail.load(folder / "model", device="cpu")

    def run(*words) -> int:
        monkeypatch.setattr("sys.argv", ["vitrail", *map(str, words)])
        try:
            main()
        except SystemExit as end:
            return int(end.code or 0)
        return 0

    model = ["--model", folder / "model", "--device", "cpu"]
    assert not run("ask", folder / "a.png", TEXTS[0], TEXTS[1], *model)
    assert capsys.readouterr().out.splitlines() == "\n".join(studio.ask(folder / "a.png", TEXTS[:2])).splitlines()
    assert not run("caption", folder / "a.png", folder / "b.png", *model)
    assert str(folder / "b.png") in capsys.readouterr().out
    assert not run("draw", "a dog", "-o", tmp_path / "dog.png", "--count", 2, "--seed", 5, *model)
    assert capsys.readouterr().out.split() == [str(tmp_path / f"dog-{i}.png") for i in (1, 2)]
    with Image.open(tmp_path / "dog-2.png") as second:
        assert same(second, studio.draw("a dog", seed=6))
    for more in (["--box", "0", "0", "0.5", "0.5"], ["--vary", "0.5"]):
        assert not run("draw", "a dog", "-o", tmp_path / "new.png", "--over", folder / "a.png", *more, *model)
    over = ["--over", folder / "a.png", "--box", "0", "0", "1", "1", "--seed", 2, "--count", 2]
    assert not run("draw", "a dog", "-o", tmp_path / "two.png", *over, *model)
    with Image.open(tmp_path / "two-2.png") as second:
        assert same(second, studio.inpaint(folder / "a.png", "a dog", (0, 0, 1, 1), seed=3))
    capsys.readouterr()
    for wrong, says in (("x.jpg", "PNG"), ("none/x.png", "no folder")):
        assert run("draw", "a dog", "-o", tmp_path / wrong, *model)
        assert says in capsys.readouterr().err
    assert run("draw", "a dog", "-o", tmp_path / "x.png", "--over", folder / "a.png", "--empty-box", *model)
    assert "--empty-box" in capsys.readouterr().err
    assert run("draw", "a dog", "-o", tmp_path / "x.png", "--vary", "0.5", *model)
    assert "--over goes with" in capsys.readouterr().err
    assert not run("ask", folder / "a.png", TEXTS[0], "--show", tmp_path / "where.png", *model)
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / "where.png")
    with Image.open(tmp_path / "where.png") as where:
        assert where.size == (12, 12)
    assert run("ask", folder / "a.png", TEXTS[0], TEXTS[1], "--show", tmp_path / "where.png", *model)
    assert "one at a time" in capsys.readouterr().err
    assert run("ask", folder / "a.png", *model)
    assert "no question" in capsys.readouterr().err


def test_a_type_that_is_named_is_kept(folder):
    assert Studio.load(folder / "model", device="cpu", dtype=torch.float32).model.code.weight.dtype == torch.float32
    half = Studio.load(folder / "model", device="cpu", dtype=torch.bfloat16)
    assert half.model.code.weight.dtype == torch.bfloat16
    assert half.draw("a dog", seed=1, steps=3).size == (12, 12) and isinstance(half.caption(folder / "a.png"), str)


def test_a_drawing_as_it_comes_about(studio):
    stages = studio.stages("two cats", 3, seed=4, steps=6)
    whole = studio.draw("two cats", seed=4, steps=6)
    grey = [(np.asarray(one.resize((3, 3), Image.Resampling.NEAREST)) == 128).all(-1).sum() for one in stages]
    assert same(stages[-1], whole) and list(grey) == sorted(grey, reverse=True) and grey[0] > 0 == grey[-1]
    passed = []
    ids = studio.draw_ids(["two cats"], watch=lambda ids, hidden: passed.append((ids.clone(), hidden)), seed=4, steps=6)
    for (_, before), (now, hidden) in pairwise(passed):
        assert not (hidden & ~before).any()  # what is settled stays so
        assert torch.equal(now[~hidden], ids[~hidden])  # and what it is


@pytest.mark.parametrize("halves", [True, False])
def test_half_precision_is_for_cpus_that_multiply_it(folder, monkeypatch, halves):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: halves, raising=False)
    kinds = {weight.dtype for weight in Studio.load(folder / "model", device="cpu").model.parameters()}
    assert kinds == {torch.bfloat16 if halves else torch.float32}
