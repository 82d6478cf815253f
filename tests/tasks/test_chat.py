"""Conversations are learnt by models of every kind of picture: packed as alone, as transformers learns them, and of
nothing but what the assistant says."""

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor

import vitrail
from helpers import randomize
from vitrail import recipe, sweep
from vitrail.backbones.decoder import DecoderConfig
from vitrail.backbones.fusion import DeepStackConfig, ExpertConfig
from vitrail.connectors import FusedConfig, MergerConfig, ProjectorConfig
from vitrail.connectors.reduce import VisPrunerConfig
from vitrail.data.conversations import ConversationsConfig, ConversationSource
from vitrail.data.formats import Part, Sample, Turn
from vitrail.encoders.packed import PackedViTConfig
from vitrail.encoders.vit import ViTConfig
from vitrail.errors import ConfigError, TextError
from vitrail.models.vlm import VLM, VLMConfig, prepare, shapes
from vitrail.nn import AttentionConfig, BlockConfig, GatedConfig, PlainConfig, RotaryConfig
from vitrail.processing.anyres import AnyRes
from vitrail.processing.resolution import Naive, Native
from vitrail.processing.text import Tokenizer
from vitrail.processing.tiles import Tiles
from vitrail.stream import KINDS, Rules
from vitrail.talker import Talker
from vitrail.talker.speech import speech_of
from vitrail.tasks.chat import ChatSettings, ChatTask
from vitrail.tasks.told import IGNORED
from vitrail.train.task import MeteredTask

END, IMAGE = "<|endoftext|>", "<image>"
VOCAB, FILL = 320, 1
SIZES = {"wide": (20, 44), "tall": (50, 18), "square": (17, 17)}
TALKS = [
    ("wide", ["<image>\nWhat is this?", "A red cube.", "And behind it?", "Nothing at all."]),
    ("tall square", ["Is <image> taller than <image>?", "Yes."]),
    (None, ["How many legs has a spider?", "Eight."]),
    ("square", ["Name it.\n<image>", "A ball"]),
]

BLOCK = BlockConfig(width=16, attention=AttentionConfig(heads=2, bias="all"), mlp=PlainConfig(hidden=24))
TOWER = ViTConfig(layers=2, block=BLOCK, image=16, patch=4, positions="patches")
TEXT = BlockConfig(width=32, attention=AttentionConfig(heads=2), mlp=GatedConfig(hidden=40), norm="rms")
DECODER = DecoderConfig(vocab=VOCAB, layers=2, block=TEXT, rotary=RotaryConfig(16), context=512)
PROJECTOR, MERGER = ProjectorConfig(reads=16, gives=32), MergerConfig(reads=16, gives=32)
BLOCKS = MERGER.with_(order="blocks")
TURNED = RotaryConfig(16, layout="mrope_interleaved", sections=(4, 2, 2))
PLAIN = {"decoder": DECODER, "rules": Rules(fill=FILL)}
KINDS_OF = {
    "one view": VLMConfig(tower=TOWER, connector=PROJECTOR, policy=Naive(size=16, patch=4), **PLAIN),
    "anyres": VLMConfig(
        tower=TOWER,
        connector=PROJECTOR,
        policy=AnyRes(tile=16, patch=4, grids=((1, 2), (2, 1), (2, 2))),
        newline=True,
        **PLAIN,
    ),
    "tiles": VLMConfig(tower=TOWER, connector=MERGER, policy=Tiles(tile=16, patch=4, most=4), **PLAIN),
    "native": VLMConfig(
        tower=PackedViTConfig(layers=3, block=BLOCK, patch=4, taps=(1, 2)),
        connector=BLOCKS,
        stack=BLOCKS.with_(norm_at="after"),
        policy=Native(patch=4, min_pixels=64, max_pixels=2048),
        decoder=DECODER.with_(rotary=TURNED, fusion=DeepStackConfig(at=(0, 1))),
        rules=Rules(positions="qwen3-vl", fill=FILL),
    ),
}
FUSED = FusedConfig(reads=16, gives=32, vocab=VOCAB, first=5, later=2, layers=1, width=16, heads=2, hidden=24)
ASKED = {
    "fused": KINDS_OF["one view"].with_(connector=PROJECTOR.with_(gives=16), queries=FUSED),
    "voco": KINDS_OF["anyres"].with_(voco=3),
    "one voco": KINDS_OF["one view"].with_(voco=3),
    "reduced": KINDS_OF["anyres"].with_(reduce=VisPrunerConfig(keep=6)),
}
# Beside these: pictures that are read both ways, through weights of their own.
EVERY = (KINDS_OF | ASKED) | {
    "expert": KINDS_OF["tiles"].with_(
        decoder=DECODER.with_(fusion=ExpertConfig()), rules=Rules(fill=FILL, both=("image",))
    )
}


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("talks")
    chance = np.random.default_rng(0)
    for name, size in SIZES.items():
        Image.fromarray(chance.integers(0, 256, (*size, 3), dtype=np.uint8)).save(folder / f"{name}.png")
    rows = []
    for number, (shown, said) in enumerate(TALKS):
        turns = [{"from": ("human", "gpt")[n % 2], "value": text} for n, text in enumerate(said)]
        image = {} if shown is None else {"image": [f"{name}.png" for name in shown.split()]}
        rows.append({"id": number, "conversations": turns} | image)
    (folder / "talks.json").write_text(json.dumps(rows))
    return folder / "talks.json"


@pytest.fixture(scope="module")
def source(file) -> ConversationSource:
    return ConversationSource(ConversationsConfig(data=str(file)), "talks")


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    said = [text.replace(IMAGE, "") for _, turns in TALKS for text in turns]
    return Tokenizer.train(said * 3, VOCAB, specials=(END, IMAGE), eos=END)


def task_of(kind: str, source, words, **more) -> ChatTask:
    return ChatTask(randomize(VLM(EVERY[kind])), {"talks": source}, words, ChatSettings(**{"length": 200} | more))


def gradients(task: ChatTask, *batches) -> tuple[float, dict[str, Tensor]]:
    loss = sum(task(batch)["answers"] for batch in batches) / sum(task.counts(batch)["answers"] for batch in batches)
    task.model.zero_grad()
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in task.model.named_parameters() if p.grad is not None}


# ---- what is learnt ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", EVERY)
def test_packed_as_alone(kind, source, words):
    """The loss of a packed batch is the mean over the same conversations, each by itself; gradients too."""
    task = task_of(kind, source, words)
    samples = [source[i] for i in range(len(source))]
    batch = task.collate(samples)
    assert len(batch["ids"]) < len(samples)  # some share a row
    loss, grads = gradients(task, batch)
    expected, alone = gradients(task, *(task.collate([sample]) for sample in samples))
    assert loss == pytest.approx(expected, rel=1e-5)
    assert grads.keys() == alone.keys()
    for name in grads:
        assert (grads[name] - alone[name]).abs().max() <= 1e-4 * alone[name].abs().max().clamp_min(1e-3), name
    learnt = {name for name in grads if grads[name].any()}
    assert any(name.startswith("tower") for name in learnt) and any(name.startswith("connector") for name in learnt)
    if kind == "native":
        assert any(name.startswith("stack") for name in learnt)
    if kind == "anyres":
        assert "newline" in learnt
    if kind in ("fused", "voco"):
        assert any(name.startswith(("queries", "voco")) for name in learnt)


@pytest.mark.parametrize("kind", EVERY)
def test_the_loss_is_cross_entropy(kind, source, words):
    """Against logits of the model's own forward pass over the streams, unpacked, with the pictures it prepares."""
    task = task_of(kind, source, words)
    task.model.eval()
    total = 0.0
    for item in range(len(source)):
        sample = source[item]
        stream = task.said(sample).stream
        images = [sample.image(i) for i in range(len(sample.pictures))]
        shown = task.model.prepare(images) if images else None
        if shown is not None and kind == "fused":
            asked = [
                words.encode("".join(p.text for p in turn.parts if p.kind == "text")) for turn in sample.turns[::2]
            ]
            shown = shown._replace(questions=tuple([torch.tensor(ids) for ids in asked] for _ in images))
        logits = task.model(vitrail.stream.pack([stream], len(stream)), shown)[0]
        total += torch.nn.functional.cross_entropy(
            logits[:-1][stream.loss[1:]], stream.ids[1:][stream.loss[1:]], reduction="sum"
        ).item()
    batch = task.collate([source[item] for item in range(len(source))])
    assert task(batch)["answers"].item() == pytest.approx(total, rel=1e-5)


turn = st.tuples(st.lists(st.sampled_from(["image", "who", "is", "it"]), min_size=1, max_size=5), st.integers(0, 999))


@cache
def empty(kind: str) -> VLM:
    return VLM(KINDS_OF[kind])


@settings(max_examples=20)
@given(st.lists(turn, min_size=1, max_size=4), st.sampled_from(sorted(KINDS_OF)))
def test_only_what_the_assistant_says_is_learnt(words, turns, kind):
    """The user spells words and shows pictures, the assistant says numbers: the targets are these, and their ends."""
    task = ChatTask(empty(kind), {}, words, ChatSettings(length=512))
    said, pictures = [], 0
    for parts, answer in turns:
        asked = []
        for part in parts:
            asked.append(Part("image", index=pictures) if part == "image" else Part("text", f" {part}"))
            pictures += part == "image"
        said += [Turn("user", tuple(asked)), Turn("assistant", (Part("text", str(answer)),))]
    sample = Sample(id="x", pictures=(_png(),) * pictures, turns=tuple(said))
    batch = task.collate([sample])
    targets, ids, kinds = (batch[name][batch["segments"] == 0] for name in ("targets", "ids", "kinds"))
    answers = "".join(f"{answer}{END}" for _, answer in turns)
    assert words.decode(targets[targets != IGNORED].tolist()) == answers
    followed = torch.cat([ids[1:], ids.new_tensor([IGNORED])])
    assert torch.equal(targets.where(targets == IGNORED, followed), targets)  # what is learnt is what comes next
    image = kinds == KINDS["image"].id
    assert (targets[:-1][image[1:]] == IGNORED).all()
    # All else that has words is the user's.
    rest = torch.cat([targets.new_tensor([IGNORED]), targets[:-1]]) == IGNORED
    asked = "".join("".join(f" {part}" for part in parts if part != "image") + END for parts, _ in turns)
    assert words.decode(ids[rest & ~image].tolist()) == asked


def _png() -> bytes:
    from io import BytesIO

    file = BytesIO()
    Image.new("RGB", (9, 6), "red").save(file, "PNG")
    return file.getvalue()


def test_a_sample_is_a_function_of_its_number(source, words):
    one, other = (task_of("native", source, words) for _ in range(2))
    first, second = (task.collate([source[2], source[0]]) for task in (one, other))
    assert first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize("kind", KINDS_OF)
def test_pictures_are_those_that_the_model_prepares(kind, source, words):
    model = VLM(KINDS_OF[kind])
    images = [source[1].image(i) for i in range(2)]
    ready, there = prepare(model.config, images), model.prepare(images)
    assert torch.equal(ready.pixels, there.pixels) and ready.shapes == there.shapes
    assert shapes(model.config, [(image.height, image.width) for image in images]) == there.shapes


# ---- rows -------------------------------------------------------------------------------------------------------


def test_a_batch_without_a_picture_runs_the_tower_all_the_same(source, words):
    task = task_of("anyres", source, words)
    batch = task.collate([source[2]])
    loss, grads = gradients(task, batch)
    assert not any(grads[name].any() for name in grads if name.startswith(("tower", "connector")))
    assert {name.split(".")[0] for name in grads} == {"tower", "connector", "decoder", "newline"}
    stream = task.said(source[2]).stream
    logits = task.model(vitrail.stream.pack([stream], len(stream)))[0]
    expected = torch.nn.functional.cross_entropy(logits[:-1][stream.loss[1:]], stream.ids[1:][stream.loss[1:]])
    assert loss == pytest.approx(expected.item(), rel=1e-5)


def test_what_is_longer_than_a_row_is_refused_or_cut(source, words):
    whole = task_of("one view", source, words)
    length = len(whole.said(source[0]).stream)
    with pytest.raises(ConfigError, match=r"conversation 0: .*more than a row(.|\n)*settings.long"):
        task_of("one view", source, words, length=length - 1)
    task = task_of("one view", source, words, length=length - 1, long="cut")
    batch = task.collate([source[0], source[2]])
    assert task.counts(batch)["cut"] == 2 and task(batch)["cut"] == 1
    assert torch.equal(task.said(source[0]).stream.ids, whole.said(source[0]).stream.ids[:-1])
    short = task_of("one view", source, words, length=30, long="cut")  # two pictures are 32: the second is left out
    said = short.said(source[1])
    assert said.cut and len(said.sizes) == 1 and int((said.stream.kinds == KINDS["image"].id).sum()) == 16
    assert said.stream.learnt == 0
    short.collate([source[1]])
    with pytest.raises(ConfigError, match="not one has an answer"):
        ChatTask(whole.model, {"two": _Only(source, 1)}, words, ChatSettings(length=30, long="cut"))  # pyrefly: ignore


def test_questions_that_do_not_fit_are_cut_with_their_queries(source, words):
    whole = task_of("fused", source, words)
    length = len(whole.said(source[0]).stream)
    behind = len(words.encode("And behind it?")) + 1 + len(words.encode("Nothing at all.")) + 1
    for less, questions in ((1, 2), (behind, 2), (behind + 1, 1)):
        task = task_of("fused", source, words, length=length - less, long="cut")
        said = task.said(source[0])
        assert said.cut and [len(own) for own in said.questions] == [questions] and len(said.sizes) == 1
        assert int((said.stream.kinds == KINDS["image"].id).sum()) == 5 + 2 * (questions - 1)
        assert task(task.collate([source[0]]))["answers"] > 0
    task = task_of("one voco", source, words, long="cut")
    for length in range(19, 60):  # no picture without what stands for it
        task.settings = ChatSettings(length=length, long="cut")
        cut = task.said(source[1])
        kinds = [int((cut.stream.kinds == KINDS[kind].id).sum()) for kind in ("image", "query")]
        assert kinds == [16 * len(cut.sizes), 3 * len(cut.sizes)] and len(cut.stream) <= length


class _Only:
    extremes = ()

    def __init__(self, source, item):
        self.source, self.item = source, item

    def __len__(self):
        return 1

    def __getitem__(self, _):
        return self.source[self.item]


def test_what_does_not_fit_is_refused(source, words):
    with pytest.raises(ConfigError, match="a decoder made for 512"):
        task_of("tiles", source, words, length=600)
    with pytest.raises(ConfigError, match="a small picture is 16 tokens"):
        task_of("one view", source, words, length=15)
    with pytest.raises(ConfigError, match="no special token"):
        task_of("one view", source, Tokenizer.train(["a b"], 300, eos=END))
    with pytest.raises(ConfigError, match="tokenizer"):
        task_of("one view", source, None)
    with pytest.raises(ConfigError, match="length"):
        ChatSettings(length=4)
    task = task_of("one view", source, words)
    with pytest.raises(TextError, match=r"conversation y: .*system"):
        task.said(Sample(id="y", turns=(Turn("system", (Part("text", "Be brief."),)), *source[2].turns)))


# ---- what it costs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [kind for kind in EVERY if kind != "fused"])
def test_flops_are_those_of_the_conversations(kind, source, words):
    task = task_of(kind, source, words)
    assert isinstance(task, MeteredTask)
    one = task.collate([source[0]])
    said = task.said(source[0])
    assert said.shown is not None
    text = len(said.stream) - task.config.tokens(said.shown.shapes[0])
    work = task.model.work(said.sizes, text).with_(held=0, asked=said.stream.learnt)
    assert task.flops(one) == sum(leg.flops for leg in task.model.legs(work).values())
    samples = [source[i] for i in (0, 1, 3)]
    assert task.flops(task.collate(samples)) == sum(task.flops(task.collate([sample])) for sample in samples)
    assert task.useful(one) == len(said.stream)
    assert task.step_flops(one) == 3 * task.flops(one)
    task.model.tower.requires_grad_(False)
    assert task.flops(one) < task.step_flops(one) < 3 * task.flops(one)


def test_flops_of_fused_queries_are_those_of_their_questions(source, words):
    """All pictures are read side by side, each with the longest first and second question."""
    task = task_of("fused", source, words)
    batch = task.collate([source[0], source[3]])
    asked = [
        [len(ids) for ids in own] for said in (task.said(source[0]), task.said(source[3])) for own in said.questions
    ]
    assert [len(own) for own in asked] == [2, 1] and batch["questions"].tolist() == [2, 1]
    legs = task.model.legs(task._work(batch))
    assert legs["queries"].work == task.model.queries.work(16, 2, (max(asked[0][0], asked[1][0]), asked[0][1]))
    lengths = [len(task.said(source[item]).stream) for item in (0, 3)]
    assert legs["decoder"].work.tokens == sum(lengths)


# ---- recipes ----------------------------------------------------------------------------------------------------


def plain(kind: str, file: Path, **stage) -> dict:
    stage = {
        "name": "talk",
        "task": "chat",
        "steps": 2,
        "batch": 4,
        "settings": {"length": 200},
        "mixture": {"weights": {"talks": 1}},
        "optim": {"lr": 1e-2},
    } | stage
    return {
        "name": "tiny",
        "says": "conversations",
        "model": {"kind": "vlm", "config": EVERY[kind].plain()},
        "tokenizer": {"train": VOCAB, "specials": [IMAGE]},
        "sources": {"talks": {"kind": "conversations", "data": str(file)}},
        "stages": [stage],
    }


@pytest.mark.parametrize("kind", [*KINDS_OF, "fused", "voco"])
def test_every_kind_trains(kind, file, source, tmp_path):
    """Two steps from a recipe, and the result can be asked: its prompt is what was learnt to be answered."""
    more = {"workers": 1} if kind == "native" else {"judge": ["talks"], "judge_every": 2}
    recipe.train(recipe.Recipe.read(plain(kind, file, **more)), tmp_path, quiet=True)
    rows = [json.loads(line) for line in (tmp_path / "talk" / "log.jsonl").read_text().splitlines()]
    assert len(rows) == 2 and rows[1]["loss"] < rows[0]["loss"]
    assert all(row["tokens_per_s"] > 0 and row["mfu"] > 0 for row in rows)
    talker = vitrail.load(tmp_path / "final", device="cpu")
    assert isinstance(talker, Talker)
    sample = source[1]
    said = ChatTask(talker.model, {}, talker.words, ChatSettings(length=200), speech_of(talker.model, talker.words))
    learnt, asked = said.said(sample).stream, talker.prompt([_message(sample)]).stream
    assert torch.equal(learnt.ids[: len(asked)], asked.ids) and int(learnt.loss[: len(asked)].sum()) == 0
    assert learnt.loss[len(asked) :].all()


def _message(sample: Sample) -> dict:
    shown = [
        {"type": "image", "image": str(sample.pictures[part.index])}
        if part.kind == "image"
        else {"type": "text", "text": part.text}
        for part in sample.turns[0].parts
    ]
    return {"role": "user", "content": shown}


def test_recipes_refuse_what_the_task_cannot_read(file):
    with pytest.raises(ConfigError, match="cannot read"):
        recipe.Recipe.read(plain("tiles", file, task="vlm", settings={"length": 20}))
    with pytest.raises(ConfigError, match=r"settings.*long"):
        recipe.Recipe.read(plain("tiles", file, settings={"long": "drop"}))
    with pytest.raises(ConfigError, match="another shape"):
        recipe.Recipe.read(plain("tiles", file, compile=True))


def test_the_recipe_runs_a_step(file, tmp_path):
    """chat-llava with fewer layers and words of its own."""
    changes = {"tokenizer": {"train": VOCAB, "specials": [IMAGE]}, "model.parts": {}, "model.config.rules.fill": FILL}
    changes |= {f"sources.{name}": {"kind": "conversations", "data": str(file)} for name in ("talks", "talks-test")}
    changes |= {f"stages.{n}.dtype": "float32" for n in range(2)}
    changes |= {"model.config.decoder.vocab": VOCAB, "model.config.decoder.layers": 1, "model.config.tower.layers": 1}
    made = recipe.train(recipe.tiny(recipe.read("untested/chat-llava", changes)), tmp_path, quiet=True)
    assert isinstance(made, VLM)
    row = json.loads((tmp_path / "tune" / "log.jsonl").read_text())
    assert row["loss/cut"] == 0 and row["loss"] == row["loss/answers"]


SYSTEMS = sweep.read("chat-systems")


@pytest.mark.parametrize("number", range(len(SYSTEMS.variants)), ids=[one.name for one in SYSTEMS.variants])
def test_systems_of_the_field_run_a_step(number, file, tmp_path):
    """Each of the sweep's with words of its own, from nothing."""
    plain = SYSTEMS.read_recipe(SYSTEMS.variants[number], 0).plain()
    plain["tokenizer"], plain["model"]["parts"] = {"train": VOCAB, "specials": [IMAGE]}, {}
    plain["model"]["config"]["rules"]["fill"] = FILL
    plain["model"]["config"]["decoder"]["vocab"] = VOCAB
    plain["sources"] = {name: {"kind": "conversations", "data": str(file)} for name in plain["sources"]}
    plain["stages"] = [stage | {"dtype": "float32"} for stage in plain["stages"]]
    made = recipe.train(recipe.tiny(recipe.Recipe.read(plain)), tmp_path, quiet=True)
    talker = Talker.load(tmp_path / "final", device="cpu")
    assert isinstance(talker.ask(Image.new("RGB", (70, 40), "red"), "what is this?", max_new=2), str)
    assert isinstance(made, VLM)
