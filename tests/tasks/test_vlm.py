"""Vision-language models learn: what is asked of them, what it costs, and that every variant in the docs trains."""

import itertools
import json
from itertools import groupby

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from PIL import Image

import vitrail
from tasks.small_vlms import KINDS, VARIANTS, made_of, scenes_of, small, task_of
from tasks.test_contrast import named
from vitrail import hub, recipe
from vitrail import sweep as sweeps
from vitrail.cli.eval import app as evals
from vitrail.data.scenes.letters import BUILT_IN
from vitrail.data.text import TextConfig, TextWindows
from vitrail.data.words import ask_several
from vitrail.errors import ConfigError
from vitrail.models.looking import LookingVLM
from vitrail.nn import cost, replay
from vitrail.processing.text import Tokenizer
from vitrail.stream import build, pack
from vitrail.stream import words as text_part
from vitrail.talker import Talker
from vitrail.tasks.told import IGNORED, TEXT
from vitrail.tasks.vlm import BLANK, VLMSettings, VLMTask
from vitrail.train.distributed import Whole
from vitrail.train.stage import choose_trainable
from vitrail.train.task import MadeTask

# ---- what is learnt ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_learns(name, atlas, words):
    """One step down the gradient of whatever its last stage trains lowers the loss."""
    task = task_of(name, atlas, words)
    batch = {"scenes": torch.arange(6)}
    task.model.eval()
    optim = torch.optim.AdamW([p for p in task.model.parameters() if p.requires_grad], lr=3e-3)
    losses = []
    for _ in range(3):
        loss = task(batch)["answers"] / 6
        losses.append(loss.item())
        optim.zero_grad()
        loss.backward()
        optim.step()
    assert losses[2] < losses[1] < losses[0]
    assert 0 < task.flops(batch) < task.step_flops(batch)


@pytest.mark.parametrize(
    "name", ["mini-vlm-llava", "mini-vlm-gated", "vlm-fused", "vlm-towers", "vlm-codes", "vlm-expert"]
)
@pytest.mark.parametrize("bos", [None, "<s>"])
def test_the_loss_is_cross_entropy_over_answers(name, bos, atlas, both):
    """Against the model's own forward pass over streams that are built sample by sample, of texts and PIL pictures."""
    words, questions = both[bos], 2
    task = task_of(name, atlas, words, questions=questions, length=80, turns="together")
    model, index = task.model.eval(), torch.arange(3)
    _randomize(model)
    source, told = scenes_of(small(name), atlas), task.talks["scenes"]
    said = ask_several(told.words, source.scenes(index), source.config.seed, KINDS, questions)
    asked, answered = told.pieces.read(said.question), told.pieces.read(said.answer)
    images = [Image.fromarray(one.permute(1, 2, 0).numpy()) for one in source.draw(index).pixels]
    shown, streams, told_of = model.prepare(images), [], []
    for b in range(3):
        turns = [t for t in range(b * questions, (b + 1) * questions) if said.valid[t]]
        parts = [] if bos is None else [text_part([words.bos])]
        looking = isinstance(model, LookingVLM)
        before = [text_part([model.config.mark])] if looking else model.config.parts(shown.shapes[b], len(turns))
        for n, t in enumerate(turns):
            parts += before[n : n + 1]  # the picture or its mark before the first; queries before every question
            parts.append(text_part([*words.encode(asked[t]), words.eos]))
            parts.append(text_part([*words.encode(answered[t]), words.eos], loss=True))
        told_of.append([torch.tensor(words.encode(asked[t])) for t in turns])
        streams.append(build(parts, None if looking else model.config.rules))
    if name == "vlm-fused":
        shown = shown._replace(questions=tuple(told_of))
        assert max(map(len, told_of)) == 2  # of one scene at least two things are asked
    packed = pack(streams, max(map(len, streams)))
    with torch.no_grad():
        logits = model(packed, shown)
        wanted = F.cross_entropy(logits.flatten(0, 1), packed.targets.flatten(), ignore_index=IGNORED)
        torch.testing.assert_close(task({"scenes": index})["answers"] / 3, wanted, rtol=1e-4, atol=1e-5)
    made = made_of(task, {"scenes": index})
    assert int((made.targets != IGNORED).sum()) == sum(stream.learnt for stream in streams)
    assert task.useful(task.made({"scenes": index})) == sum(map(len, streams))
    for b, stream in enumerate(streams):  # a talk begins where the picture ends
        talk = stream.ids[task.rows.before :][stream.kinds[task.rows.before :] == 0]
        assert talk.tolist() == made.ids[b, : len(talk)].tolist()
        positions = stream.positions[:, 0]
        assert torch.equal(task.rows.frame(positions.device).positions[0, : len(stream)], positions)


def _randomize(model) -> None:
    """Gates and experts that start without effect would hide what they do."""
    torch.manual_seed(5)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "fusion" in name:
                p.add_(torch.randn_like(p) * 0.3)


@pytest.mark.parametrize(
    ("name", "train", "learns"),
    [
        ("mini-vlm-llava", ("connector",), {"connector"}),
        ("mini-vlm-llava", ("connector", "decoder"), {"connector", "decoder"}),
        ("vlm-tuned", ("connector", "decoder", "tower"), {"connector", "decoder", "tower"}),
        ("mini-vlm-gated", ("connector", "decoder.fusion"), {"connector", "decoder.fusion"}),
        ("vlm-fused", ("connector", "queries"), {"connector", "queries"}),
        ("vlm-codes", ("connector", "tower"), {"connector", "tower"}),
    ],
)
def test_gradients_reach_what_is_trained_and_nothing_else(name, train, learns, atlas, words):
    task = task_of(name, atlas, words)
    _randomize(task.model)
    choose_trainable(task.model, train)
    task({"scenes": torch.arange(4)})["answers"].backward()
    unread = {"tower.norm_last", "decoder.head", "queries.end"}
    for key, p in task.model.named_parameters():
        mine = any(key.startswith(f"{part}.") for part in learns)
        if not any(key.startswith(part) for part in unread):
            assert (p.grad is not None and bool(p.grad.any())) == mine, key


def test_eight_scenes_are_learnt_by_heart(atlas, words, tmp_path):
    """And the answers come back through a saved folder, by whoever asks."""
    torch.manual_seed(0)
    task = task_of("vlm-tuned", atlas, words, kinds=("colour", "counting", "what"), questions=1, length=24)
    made = made_of(task, {"scenes": torch.arange(8)})  # once, or most of the time would go into drawing
    optim = torch.optim.AdamW(task.model.parameters(), lr=8e-3, weight_decay=0.0)
    for step in range(70):
        loss = task._said(task.rows.hidden(made.frame, made.pixels, made.ids), made.targets, "mean")
        optim.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(task.model.parameters(), 1.0)
        for group in optim.param_groups:
            group["lr"] = 8e-3 * min(1, (70 - step) / 30)
        optim.step()
    assert loss < 0.1
    hub.save(task.model, tmp_path, task.spoken)
    talker, source = vitrail.load(tmp_path, device="cpu"), scenes_of(small("mini-vlm-llava"), atlas)
    told = task.talks["scenes"]
    said = ask_several(told.words, source.scenes(torch.arange(8)), source.config.seed, task.settings.kinds, 1)
    rows = said.valid.nonzero()[:, 0].tolist()
    questions, answers = told.pieces.read(said.question[rows]), told.pieces.read(said.answer[rows])
    pictures = [Image.fromarray(source.draw(torch.tensor([b])).pixels[0].permute(1, 2, 0).numpy()) for b in rows]
    assert len(rows) > 5 and talker.answers(pictures, questions, max_new=16) == answers
    assert talker.ask(pictures[0], questions[0], max_new=16) == answers[0]
    stream = talker.prompt([talker.turn(pictures[0], questions[0])]).stream
    ids = made_of(task, {"scenes": torch.tensor(rows[:1])}).ids[0]
    assert stream.ids[task.rows.before :].tolist() == ids[: len(stream) - task.rows.before].tolist()
    assert task.rows.frame(ids.device).before.tolist() == stream.ids[: task.rows.before].tolist()


@pytest.mark.parametrize("name", ["mini-vlm-llava", "mini-vlm-gated", "vlm-fused"])
def test_its_answers_are_counted_by_kind(name, atlas, words, tmp_path, monkeypatch, capsys):
    """`vitrail eval FOLDER questions`, of a vendor and in paraphrases that it did not learn."""
    monkeypatch.setattr("vitrail.data.scenes.library.open_atlas", lambda name: atlas)
    task = task_of(name, atlas, words)
    hub.save(task.model, tmp_path / "model", task.spoken)
    how = ["--kinds", "counting", "--kinds", "colour", "--count", "4", "--vendors", "right", "--unseen"]
    how += ["--preset", "colours", "--device", "cpu", "--out", str(tmp_path / "found.json")]
    how += [] if name == "mini-vlm-gated" else ["--reduce", "pool", "--keep", "1"]  # which looks at no tokens
    evals([str(tmp_path / "model"), "questions", *how], result_action="return_value")
    found = json.loads((tmp_path / "found.json").read_text())
    assert [(score["name"], score["of"]) for score in found["scores"][:2]] == [("counting", 4), ("colour", 4)]
    assert found["unseen"] and found["vendors"] == ["right"] and "blind" in capsys.readouterr().out
    assert found.get("reduce") == (None if name == "mini-vlm-gated" else "pool")


def test_fused_queries_are_asked_on_and_on(atlas, words, tmp_path):
    """One question each, side by side, several in turn, and about several pictures."""
    task = task_of("vlm-fused", atlas, words, questions=2, turns="together")
    hub.save(task.model.eval(), tmp_path, task.spoken)
    talker, picture = Talker.load(tmp_path, device="cpu"), Image.new("RGB", (16, 16), "red")
    said = [talker.ask(picture, question, max_new=4) for question in ("what is this?", "how many dogs are there?")]
    assert talker.answers([picture, picture], ["what is this?", "how many dogs are there?"], max_new=4) == said
    first = talker.turn(picture, "what is this?")
    talk = [first, {"role": "assistant", "content": said[0]}, talker.turn([], "how many dogs are there?")]
    talker.chat(talk, max_new=4)
    stream, shown, _ = talker.prompt(talk)
    n, m = task.model.config.queries.groups(2)
    runs = [len(list(run)) for kind, run in groupby(stream.kinds.tolist()) if kind == 1]
    assert runs == [n, m] and [len(own) for own in shown.questions] == [2]
    # The row of training that says the same has the same ids at the same places.
    wanted = [*words.encode("what is this?"), words.eos, *words.encode(said[0]), words.eos]
    behind = [*words.encode("how many dogs are there?"), words.eos]
    assert stream.ids[stream.kinds == 0].tolist() == wanted + behind
    assert stream.ids[-len(behind) :].tolist() == behind and stream.kinds[-len(behind) - 1] == 1
    talker.ask([picture, picture], "what are these?", max_new=4)


@pytest.mark.parametrize("name", ["vlm-wide", "vlm-letterbox", "vlm-crop"])
def test_wide_pictures_are_fitted_as_by_the_model(name, atlas, words):
    task = task_of(name, atlas, words)
    task.model.eval()
    pixels = scenes_of(small(name), atlas).draw(torch.arange(5)).pixels
    assert pixels.shape == (5, 3, 16, 32)
    theirs = task.model.prepare([Image.fromarray(one.permute(1, 2, 0).numpy()) for one in pixels]).pixels
    ours = task.viewed(pixels, "scenes")
    assert ours.shape == theirs.shape and (ours - theirs).abs().mean() < 0.005


def test_named_pictures_are_asked_for_their_names(atlas, words):
    source = named()
    task = task_of("mini-vlm-llava", atlas, words, {"named": source})
    made = made_of(task, {"scenes": torch.arange(2), "named": torch.arange(3)})
    assert len(made.ids) == 5
    for b in range(3):
        targets = made.targets[2 + b]
        assert words.decode(targets[targets != IGNORED][:-1].tolist()) == source.abouts[b].name
    assert task.counts({"scenes": torch.arange(2), "named": torch.arange(3)}) == {"answers": 5}


# ---- text -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pages(words, tmp_path_factory) -> TextWindows:
    file = tmp_path_factory.mktemp("text") / "a.txt"
    file.write_text("a dog and a cat. " * 200)
    return TextWindows(TextConfig(files=(str(file),), length=16), words)


@pytest.mark.parametrize("name", ["mini-vlm-llava", "vlm-expert", "mini-vlm-gated"])
def test_text_is_continued_as_by_the_decoder_alone(name, atlas, words, pages):
    task = task_of(name, atlas, words, {"text": pages})
    _randomize(task.model.eval())
    samples = [pages[0], scenes_of(small(name), atlas)[3], pages[1]]
    batch = task.collate(samples)
    assert set(batch) == {TEXT, "scenes"} and task.counts(batch) == {"answers": 1, "text": 32}
    with torch.no_grad():
        logits = task.model.decoder(batch[TEXT][:, :-1])
        wanted = F.cross_entropy(logits.flatten(0, 1), batch[TEXT][:, 1:].flatten().long(), reduction="sum")
        torch.testing.assert_close(task(batch)["text"], wanted, rtol=1e-4, atol=1e-4)
    assert task.useful(task.made(batch)) > 32 + task.rows.before  # the text's, the picture's and the talk's


def test_logits_are_held_in_training_alone(atlas, words, pages):
    """What is judged is the loss without its penalty, so that stages with and without one can be compared."""
    task = task_of("mini-vlm-llava", atlas, words, {"text": pages})
    found = {}
    for training in (True, False):
        task.model.train(training)
        for z in (0.0, 0.1):
            task.settings = task.settings.with_(z=z)
            found[training, z] = task(task.collate([pages[0], pages[1]]))["text"]
    assert found[True, 0.1] > found[True, 0.0] + 0.1 and found[False, 0.1] == found[False, 0.0]


def test_words_are_read_in_a_font_that_was_not_learnt():
    chosen = sweeps.read("vlm-towers")
    for variant in chosen.variants:
        sources = chosen.read_recipe(variant, 0).sources
        learnt, judged = (set(sources[name].scene["fonts"]) for name in ("scenes", "unseen"))
        asked = chosen.tests["reading"]
        tested = {word for flag, word in itertools.pairwise(asked) if flag == "--fonts"}
        assert learnt and tested == judged and not learnt & tested
        assert learnt | tested == {font.name for font in BUILT_IN}


def test_gates_leave_the_text_as_it_was(atlas, words, pages):
    task = task_of("mini-vlm-gated", atlas, words, {"text": pages})
    batch = {TEXT: task.collate([pages[0], pages[1]])[TEXT]}
    with torch.no_grad():
        before = task(batch)["text"]
    optim = torch.optim.AdamW([p for p in task.model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(3):
        task({"scenes": torch.arange(4)})["answers"].backward()
        optim.step()
    with torch.no_grad():
        assert torch.equal(task(batch)["text"], before)
    plain = task_of("vlm-gates-none", atlas, words, {"text": pages})  # the other side of the claim: no gates at all
    mine = task.model.decoder.state_dict()
    plain.model.decoder.load_state_dict({k: v for k, v in mine.items() if not k.startswith("fusion.")})
    with torch.no_grad():
        torch.testing.assert_close(plain(batch)["text"], before)
    task.model.train()
    with pytest.raises(ConfigError, match="nothing that text reaches"):
        task(batch)


# ---- many processes, and costs ----------------------------------------------------------------------------------


def test_a_blank_runs_a_part_and_changes_nothing(atlas, words, pages):
    task = task_of("mini-vlm-llava", atlas, words, {"text": pages})
    task.model.eval()
    seen, read = {"scenes": torch.arange(3)}, {TEXT: task.collate([pages[0]])[TEXT]}
    for batch, part, other in ((seen, "text", "answers"), (read, "answers", "text")):
        full = task.fill(batch, part)
        assert task.parts(batch) == {part: False, other: True} and all(task.parts(full).values())
        assert task.counts(full) == task.counts(batch)
        found = []
        for one in (batch, full):
            task.model.zero_grad()
            losses = task(one)
            sum(losses.values()).backward()
            found.append((losses, {k: p.grad.clone() for k, p in task.model.named_parameters() if p.grad is not None}))
        (plain, gradients), (filled, same) = found
        assert filled[part] == 0 and plain[part] == 0 and filled[part].requires_grad
        torch.testing.assert_close(filled[other], plain[other])
        assert all(torch.allclose(same[k], gradient, atol=1e-5) for k, gradient in gradients.items())
    both = task.fill(seen, "answers")  # what has pictures of its own may be given a blank one too
    torch.testing.assert_close(task(both)["answers"], task(seen)["answers"])
    assert BLANK + "answers" in both


def test_a_frozen_tower_runs_forward_alone(atlas, words, pages):
    task = task_of("mini-vlm-llava", atlas, words, {"text": pages})
    batch = {"scenes": torch.arange(4)}
    legs = {name: leg.flops for name, leg in task.model.legs(task.rows.work(4)).items()}
    assert task.flops(batch) == sum(legs.values())
    assert task.step_flops(batch) == legs["tower"] + 3 * legs["connector"] + 3 * legs["decoder"]
    choose_trainable(task.model, ("connector", "place"))
    assert task.step_flops(batch) == legs["tower"] + 3 * legs["connector"] + 2 * legs["decoder"]
    choose_trainable(task.model, ("*",))
    assert task.step_flops(batch) == 3 * sum(legs.values())
    text = task.collate([pages[0], pages[1]])
    assert task.flops(text) == cost.flops(task.model.decoder, cost.Work.causal(16, 2))


# ---- how it runs ------------------------------------------------------------------------------------------------

COMPILED = ("vlm-towers", "vlm-qformer", "vlm-letterbox", "vlm-pruned", "vlm-voco", "vlm-talks")
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in COMPILED]


@pytest.mark.parametrize("name", ["mini-vlm-llava", "mini-vlm-gated", "vlm-codes", *SLOW])
def test_a_step_is_one_graph_for_the_compiler(name, atlas, both):
    """Behind the making of talks, which goes ahead of it; and no batch makes another one."""
    torch._dynamo.reset()
    task = task_of(name, atlas, both["<s>"])
    task.model.train()
    graphs: list[int] = []

    def backend(module, _):
        graphs.append(len(module.graph.nodes))
        return module.forward

    whole = Whole(task)
    compiled = torch.compile(whole, backend=backend)
    for step in range(2):
        batch = task.made({"scenes": torch.arange(4) + 4 * step})
        torch.testing.assert_close(compiled(batch)["answers"], whole(batch)["answers"], rtol=1e-4, atol=1e-4)
    assert [count for count in graphs if count > 8] == [
        max(graphs)
    ]  # before the talks is a zero, behind them a product
    torch._dynamo.reset()


def test_what_is_made_ahead_is_what_a_pass_would_make(atlas, words):
    task = task_of("mini-vlm-llava", atlas, words, {"named": named()})
    assert isinstance(task, MadeTask)
    task.model.train()
    batch = {"scenes": torch.arange(3), "named": torch.arange(2)}
    torch.manual_seed(0)
    useful = task.useful(task.made(batch))
    for filled in (batch, task.fill(batch, "answers")):  # something blank is read, and counts for nothing
        torch.manual_seed(0)
        wanted = task(filled)["answers"]
        torch.manual_seed(0)
        made = task.made(filled)
        assert torch.equal(task(made)["answers"], wanted) and task.useful(made) == useful


def test_what_training_makes_is_recorded(atlas, monkeypatch, tmp_path):
    monkeypatch.setattr("vitrail.recipe.open_atlas", lambda name: atlas)
    seen = []

    class Watched(VLMTask):
        def made(self, batch):
            seen.append(replay._ASKED.get())
            return super().made(batch)

    monkeypatch.setitem(recipe.TASKS, "vlm", recipe.TASKS["vlm"]._replace(make=Watched))
    recipe.train(small("mini-vlm-llava"), tmp_path, device="cpu", quiet=True)
    assert seen and all(seen) and not replay._ASKED.get()


def test_the_log_shows_useful_tokens_the_tower_s_work_and_the_wait(atlas, monkeypatch, tmp_path):
    monkeypatch.setattr("vitrail.recipe.open_atlas", lambda name: atlas)
    monkeypatch.setattr("vitrail.train.trainer._matrix_rate", lambda device, dtype: 1e9)
    made = []

    class Kept(VLMTask):
        def __init__(self, *given):
            super().__init__(*given)
            made.append(self)

        def useful(self, batch):
            self.told = super().useful(batch)
            return self.told

    kind = recipe.TASKS["vlm"]
    monkeypatch.setitem(recipe.TASKS, "vlm", kind._replace(make=Kept))
    recipe.train(small("mini-vlm-llava"), tmp_path, device="cpu", quiet=True)
    for task, stage in zip(made, ("align", "tune"), strict=True):
        [*_, row] = map(json.loads, (tmp_path / stage / "log.jsonl").read_text().splitlines())
        spent = task.told / row["tokens_per_s"]
        assert 4 * task.rows.before < task.told < 4 * (task.rows.before + task.settings.length)
        batch = {"scenes": torch.arange(4)}
        choose_trainable(task.model, ("connector", "place", *(() if stage == "align" else ("decoder",))))
        assert row["mfu"] == pytest.approx(task.step_flops(batch) / spent / 1e9)
        legs = task.model.legs(task.rows.work(4, round(4 * task._learnt)))
        assert task.step_flops(batch) > legs["tower"].flops + 2 * legs["decoder"].flops and legs["tower"].flops > 0
        assert 0 < row["wait"] < 1


def test_the_head_is_counted_for_what_is_learnt(atlas, words):
    task = task_of("mini-vlm-llava", atlas, words)
    batch = {"scenes": torch.arange(6)}
    before = task.flops(batch)
    made = made_of(task, batch)
    assert task.useful(task.made(batch)) > 0 and task._learnt == int((made.targets != IGNORED).sum()) / 6
    head = 2 * task.model.decoder.logits(torch.zeros(1, 32)).shape[-1] * 32
    assert before - task.flops(batch) == head * (6 * task.settings.length - int((made.targets != IGNORED).sum()))


def test_a_picture_is_not_marked_by_the_start(atlas, both):
    words = both["<s>"]
    chosen = small("mini-vlm-llava").plain()
    chosen["model"]["config"]["rules"]["fill"] = words.bos
    model = recipe._model(recipe.Recipe.read(chosen), words)
    with pytest.raises(ConfigError, match="the start aside"):
        VLMTask(model, {}, words, VLMSettings(length=8))


def test_rows_fit_the_context(atlas, words):
    task = task_of("mini-vlm-llava", atlas, words)
    room = task.model.config.decoder.context - task.rows.before
    task_of("mini-vlm-llava", atlas, words, length=room)
    with pytest.raises(ConfigError, match=f"{task.rows.before} before a talk"):
        task_of("mini-vlm-llava", atlas, words, length=room + 1)


def test_what_cannot_be_is_refused(atlas, words):
    with pytest.raises(ConfigError, match="tokenizer"):
        VLMTask(recipe._model(small("mini-vlm-llava"), None), {}, None, VLMSettings())
    with pytest.raises(ConfigError, match=r'settings\.turns = "together"'):
        task_of("vlm-fused", atlas, words, questions=2)
    with pytest.raises(ConfigError, match="not one has an answer"):
        task_of("mini-vlm-llava", atlas, words, questions=1, kinds=("reading",))
    for wrong in ({"weights": {"read": 1.0}}, {"z": -1.0}, {"length": 4}):
        with pytest.raises(ConfigError):
            VLMSettings(**wrong)
    plain = Tokenizer.train(["what is this? a dog"], 300)  # its only special is the end
    with pytest.raises(ConfigError, match="stands for a picture"):
        task_of("mini-vlm-llava", atlas, plain)
    with pytest.raises(ConfigError, match="specials"):
        recipe.TokenizerPart(start="stories15M", specials=("<image>",))
