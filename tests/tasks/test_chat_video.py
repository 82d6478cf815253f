"""Conversations about videos are learnt: as transformers learns them, packed as alone, and as they will be asked."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from helpers import randomize
from tasks.test_chat import gradients
from test_talker_video import save, write_clip
from train import ranks
from vitrail import hub, recipe
from vitrail.connectors import ResamplerConfig
from vitrail.data.conversations import ConversationsConfig, ConversationSource
from vitrail.data.formats import Part, Sample, Turn
from vitrail.errors import ConfigError, DataError, TextError
from vitrail.hub.families import FAMILIES
from vitrail.models.vlm import VLM
from vitrail.processing.chat import ChatTemplate
from vitrail.processing.grid import Grid
from vitrail.processing.text import Tokenizer
from vitrail.stream import KINDS, pack
from vitrail.talker import Talker
from vitrail.talker.speech import speech_of
from vitrail.tasks.chat import ChatSettings, ChatTask
from vitrail.tasks.told import IGNORED
from vitrail.train.task import PartedTask

TALKS = [
    ({"video": "b.mp4"}, ["<video>\nWhat happens?", "A ball rolls.", "And then?", "It stops."]),
    ({"video": "a.mp4", "image": "p.png"}, ["Is <image> in <video>?", "Yes."]),
    ({}, ["How many legs has a spider?", "Eight."]),
    ({"image": "p.png"}, ["<image>\nName it.", "A ball"]),
    ({"video": ["a.mp4", "b.mp4"]}, ["<video>Which is longer, this or\n<video>", "The second."]),
]
QWENS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
SIDES = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2}
SAID = [text for _, said in TALKS for text in said]
CHATML = ["<|im_start|>", "<|im_end|>"]


def intern() -> tuple[VLM, Tokenizer]:
    marks = [*CHATML, "<img>", "</img>", "<IMG_CONTEXT>", "<video>"]
    words = Tokenizer.train(SAID * 3, 330, specials=marks, eos=CHATML[1])
    about = {
        "vision_config": SIDES | {"image_size": [28, 28], "patch_size": [7, 7]},
        "text_config": SIDES | {"model_type": "qwen2", "vocab_size": words.size},
        "image_token_id": words.id("<IMG_CONTEXT>"),
    }
    return VLM(FAMILIES["internvl"].read(about)), words


def llava(family: str, tile: int, **words_of) -> tuple[VLM, Tokenizer]:
    words = Tokenizer.train(SAID * 3, 330, **words_of)
    about = {
        "vision_config": SIDES | {"image_size": tile, "patch_size": 7, "vision_use_head": False},
        "text_config": SIDES | {"vocab_size": words.size},
        "image_grid_pinpoints": [[tile, tile], [tile, 2 * tile], [2 * tile, tile]],
    }
    about["text_config"] |= {"model_type": "qwen2"} if family == "llava_onevision" else {}
    about |= {f"{mark}_token_index": words.id(f"<{mark}>") for mark in ("image", "video")}
    return VLM(FAMILIES[family].read(about)), words


VIEWS = {
    "internvl": intern,
    "llava_onevision": lambda: llava("llava_onevision", 21, specials=[*CHATML, "<image>", "<video>"], eos=CHATML[1]),
    "llava_next_video": lambda: llava("llava_next_video", 28, specials=["<image>", "<video>"], bos="<s>", eos="</s>"),
}
FRAMES = {"internvl": 3, "llava_onevision": 4, "llava_next_video": 2}


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("films")
    write_clip(folder / "a.mp4", 9)
    write_clip(folder / "b.mp4", 21)
    pixels = np.random.default_rng(0).integers(0, 256, (24, 32, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(folder / "p.png")
    rows = [
        {"id": n, "conversations": [{"from": ("human", "gpt")[k % 2], "value": text} for k, text in enumerate(said)]}
        | shown
        for n, (shown, said) in enumerate(TALKS)
    ]
    (folder / "talks.json").write_text(json.dumps(rows))
    return folder / "talks.json"


@pytest.fixture(scope="module")
def source(file) -> ConversationSource:
    return ConversationSource(ConversationsConfig(data=str(file)), "talks")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """family → its folder, and transformers' model where it was made by that."""
    made = {}

    def make(family: str):
        if family not in made:
            folder, reference = tmp_path_factory.mktemp(family), None
            if family in QWENS:
                reference = save(folder, family)
                budget = {"size": {"shortest_edge": 256, "longest_edge": 2048}, "patch_size": 4, "merge_size": 2}
                (folder / "preprocessor_config.json").write_text(json.dumps(budget))
            else:
                model, words = VIEWS[family]()
                films = model.config.films.with_(frames=FRAMES[family])
                hub.save(randomize(VLM(model.config.with_(footage=films)), 3, 0.1), folder, words)
            made[family] = folder, reference
        return made[family]

    return make


def task_of(folder, source=None, **settings) -> tuple[ChatTask, Talker]:
    talker = vitrail.load(folder, device="cpu")
    model, words = talker.model, talker.words
    chosen = ChatSettings(**{"length": 600} | settings)
    sources = {} if source is None else {"talks": source}
    return ChatTask(model, sources, words, chosen, speech_of(model, words)), talker


def messages(sample: Sample) -> list[dict]:
    held = {"image": sample.pictures, "video": sample.videos}
    return [
        {
            "role": turn.role,
            "content": [
                {"type": "text", "text": part.text}
                if part.kind == "text"
                else {"type": part.kind, part.kind: str(held[part.kind][part.index])}
                for part in turn.parts
            ],
        }
        for turn in sample.turns
    ]


@pytest.mark.parametrize("family", QWENS)
def test_as_transformers_learns(folders, source, family):
    folder, theirs = folders(family)
    task, talker = task_of(folder, source)
    if family != "qwen3_vl":  # what follows a video stands where theirs has it
        config = task.model.config
        rules = config.rules.with_(positions=f"{config.rules.positions}/transformers")
        task.config = task.model.config = config.with_(rules=rules)
    for item in range(len(TALKS)):
        said = task.said(source[item])
        stream, given = said.stream, {}
        ids = stream.ids.clone()
        ids[stream.kinds == KINDS["video"].id] = talker.marks["video"]
        for pixels, grid, shown in (
            ("pixel_values", "image_grid_thw", said.shown),
            ("pixel_values_videos", "video_grid_thw", said.films),
        ):
            if shown is not None:
                given |= {pixels: shown.pixels, grid: torch.tensor([(g.t, g.h, g.w) for g in shown.shapes])}
        if family == "qwen2_5_vl" and said.films is not None:
            given["second_per_grid_ts"] = [watched.seconds for watched in task._watched(source[item], _shown(item))]
        expected = theirs(
            input_ids=ids[None],
            labels=ids.where(stream.loss, -100)[None],
            attention_mask=torch.ones_like(ids)[None],
            mm_token_type_ids=stream.kinds[None],
            **given,
        ).loss
        batch = task.collate([source[item]])
        found = task(batch)["answers"] / task.counts(batch)["answers"]
        assert found.item() == pytest.approx(expected.item(), rel=1e-4)
        (grad,) = torch.autograd.grad(found, task.model.decoder.embed.weight)
        (reference,) = torch.autograd.grad(expected, theirs.get_input_embeddings().weight)
        assert (grad - reference).abs().max() <= 1e-3 * reference.abs().max()


def _shown(item: int) -> list[int]:
    """Which videos a talk shows, in turn."""
    return list(range(sum(text.count("<video>") for text in TALKS[item][1])))


@pytest.mark.parametrize("family", [*QWENS, *VIEWS])
def test_packed_as_alone_and_as_it_is_asked(folders, source, family):
    task, talker = task_of(folders(family)[0], source)
    task.model.eval()
    samples = [source[i] for i in range(len(source))]
    batch = task.collate(samples)
    assert len(batch["ids"]) < len(samples) and len(batch["videos"]) == 4
    loss, grads = gradients(task, batch)
    expected, alone = gradients(task, *(task.collate([sample]) for sample in samples))
    assert loss == pytest.approx(expected, rel=1e-4)
    assert grads.keys() == alone.keys()
    for name in grads:
        assert (grads[name] - alone[name]).abs().max() <= 1e-3 * alone[name].abs().max().clamp_min(1e-3), name
    total = 0.0
    for sample in samples:
        said = task.said(sample)
        asked = talker.prompt(messages(sample)[:1])
        own = asked.stream
        assert torch.equal(said.stream.ids[: len(own)], own.ids)
        assert torch.equal(said.stream.positions[: len(own)], own.positions)
        assert not said.stream.loss[: len(own)].any()
        for ours, shown in ((said.shown, asked.pictures), (said.films, asked.videos)):
            assert (ours is None) == (shown is None)
            assert ours is None or (torch.equal(ours.pixels, shown.pixels) and ours.shapes == shown.shapes)
        with torch.no_grad():
            logits = task.model(pack([said.stream], len(said.stream)), asked.pictures, asked.videos)[0]
        learnt = said.stream.loss[1:]
        total += torch.nn.functional.cross_entropy(
            logits[:-1][learnt], said.stream.ids[1:][learnt], reduction="sum"
        ).item()
    assert task(batch)["answers"].item() == pytest.approx(total, rel=1e-4)


@pytest.mark.parametrize("family", ["qwen3_vl", "internvl", "llava_onevision"])
def test_only_what_the_assistant_says_is_learnt(folders, source, family):
    """Also where words stand between the frames."""
    task, talker = task_of(folders(family)[0], source)
    for item, (_, said) in enumerate(TALKS):
        targets = task.collate([source[item]])["targets"]
        text = talker.words.decode(targets[targets != IGNORED].tolist(), skip_specials=True)
        assert text.replace("\n", "") == "".join(said[1::2])


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl", "internvl", "llava_next_video"])
def test_no_half_of_a_video_is_kept(folders, source, family):
    task, _ = task_of(folders(family)[0], source)
    full = task.said(source[4])
    places = (full.stream.kinds == KINDS["video"].id).nonzero().flatten().tolist()
    first, last = places[task.config.tokens(full.films.shapes[0]) - 1], places[-1]  # where each of the two ends
    for length in (first + 1, first + 2, (first + last) // 2, last - 1, last, last + 1, len(full.stream) - 1):
        task.settings = ChatSettings(length=length, long="cut")
        said = task.said(source[4])
        videos = int((said.stream.kinds == KINDS["video"].id).sum())
        assert len(said.stream) <= length and said.cut
        assert len(said.films.shapes) == (2 if length > last else 1)
        assert videos == sum(task.config.tokens(shape) for shape in said.films.shapes)
        packed = pack([said.stream], len(said.stream))
        assert torch.isfinite(task.model(packed, None, said.films)).all()
    task.settings = ChatSettings(length=first, long="cut")
    assert task.said(source[4]).films is None
    task.settings = ChatSettings(length=last)
    with pytest.raises(ConfigError, match="less of videos"):
        task.said(source[4])


@pytest.mark.parametrize("family", ["qwen2_5_vl", "internvl", "llava_onevision", "llava_next_video"])
def test_flops_are_those_of_what_is_shown(folders, source, family):
    task, _ = task_of(folders(family)[0], source)
    for item in (0, 1, 4):
        said, batch = task.said(source[item]), task.collate([source[item]])
        films = said.films.shapes
        sizes = said.sizes or [(32, 32)]  # a batch without a picture has a grey one
        text = len(said.stream) - sum(map(task.config.tokens, films)) - sum(map(task.config.tokens, _stills(said)))
        if said.sizes:
            work = task.model.work(sizes, text, films=films).with_(held=0, asked=said.stream.learnt)
            assert task.flops(batch) == sum(leg.flops for leg in task.model.legs(work).values())
        looks = task._work(batch).looks
        assert looks[0].tokens > task.model.work(sizes, 0).looks[0].tokens
    samples = [source[i] for i in (1, 3)]
    assert task.flops(task.collate(samples)) == sum(task.flops(task.collate([sample])) for sample in samples)


def _stills(said) -> tuple:
    return () if said.shown is None else said.shown.shapes


def tuned(folder, file, **stage) -> dict:
    return {
        "name": "tiny",
        "says": "videos",
        "model": {"kind": "vlm", "start": str(folder)},
        "tokenizer": {"start": str(folder)},
        "sources": {"talks": {"kind": "conversations", "data": str(file)}},
        "stages": [
            {
                "name": "talk",
                "task": "chat",
                "settings": {"length": 600},
                "mixture": {"weights": {"talks": 1}},
                "optim": {"lr": 1e-2},
            }
            | stage
        ],
    }


def test_a_recipe_learns_videos_and_is_asked_about_them(folders, file, tmp_path):
    folder, _ = folders("qwen3_vl")
    recipe.train(recipe.Recipe.read(tuned(folder, file, steps=3, batch=4, workers=1)), tmp_path, quiet=True)
    rows = [json.loads(line) for line in (tmp_path / "talk" / "log.jsonl").read_text().splitlines()]
    assert rows[-1]["loss"] < rows[0]["loss"] and all(row["mfu"] > 0 for row in rows)
    talker = vitrail.load(tmp_path / "final", device="cpu")
    assert isinstance(talker.ask(str(file.parent / "a.mp4"), "what happens?", max_new=3), str)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl", "llava_onevision"])
def test_how_much_is_read_of_a_video_can_be_said(folders, source, family):
    """Frames as asked for, or all that there are; so many a second; pixels by the model's budget."""
    folder, _ = folders(family)
    S = 1 if family == "llava_onevision" else 2

    def frames(item: int, **settings) -> list[int]:
        films = task_of(folder, source, **settings)[0].said(source[item]).films
        return [S * shape.t if S == 2 else len(shape.views) for shape in films.shapes]

    assert frames(4, frames=6) == [6, 6] and frames(4, frames=20)[0] in (8, 9, 10)  # of 9 and 21 frames
    assert frames(0, fps=4)[0] == 10  # 21 frames at 8 a second
    if S == 1:
        with pytest.raises(ConfigError, match=r"squares of 21.*\n.*leave pixels out"):
            task_of(folder, source, pixels=400)
        return
    for pixels in (128, 256, 512, 1024):  # of 2,240, in patches of 4 × 4
        (grid,) = task_of(folder, source, pixels=pixels)[0].said(source[0]).films.shapes
        assert 0.4 * min(pixels, 700) <= 16 * grid.h * grid.w <= 1.3 * pixels, (pixels, grid)
    with pytest.raises(ConfigError, match="one of the two"):
        ChatSettings(frames=4, fps=1)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl", "internvl", "llava_onevision"])
def test_a_batch_without_a_video_can_run_what_others_run_and_is_the_same(folders, source, family):
    task, _ = task_of(folders(family)[0], source)
    assert isinstance(task, PartedTask)
    batch = task.collate([source[2], source[3]])
    full = task.fill(batch, "video")
    assert (task.parts(batch), task.parts(full)) == ({"video": False}, {"video": True})
    assert task.counts(full) == task.counts(batch)
    (loss, grads), (plain, alone) = gradients(task, full), gradients(task, batch)
    assert loss == pytest.approx(plain, rel=1e-6) and grads.keys() == alone.keys()
    for name in grads:
        assert torch.allclose(grads[name], alone[name], atol=1e-6 * alone[name].abs().max().item()), name


def learn(folder, file, out) -> None:
    """By as many ranks as there are."""
    recipe.train(recipe.Recipe.read(tuned(folder, file, steps=4, batch=2)), out, quiet=True)


@pytest.mark.slow
def test_ranks_with_and_without_videos_learn_as_one(folders, file, tmp_path):
    folder, _ = folders("qwen2_vl")
    for name, count in (("one", 1), ("two", 2)):
        ranks.run(count, learn, folder, file, tmp_path / name)
    one, two = (
        [json.loads(line)["loss"] for line in (tmp_path / name / "talk" / "log.jsonl").read_text().splitlines()]
        for name in ("one", "two")
    )
    assert two == pytest.approx(one, rel=1e-3)


def test_in_half_precision(folders, source):
    task, _ = task_of(folders("llava_onevision")[0], source)
    whole = task(task.collate([source[0]]))["answers"].item()
    task.model.bfloat16()
    assert task(task.collate([source[0]]))["answers"].item() == pytest.approx(whole, rel=0.05)


@pytest.mark.parametrize("family", ["internvl", "qwen3_vl"])
def test_what_is_said_before_a_video_of_its_own_is_learnt(folders, family):
    task, talker = task_of(folders(family)[0])
    turns = (
        Turn("user", (Part("video"), Part("text", "what happens?"))),
        Turn("assistant", (Part("text", "it rolls and then rolls"), Part("video", index=1), Part("text", "over"))),
    )
    folder = folders(family)[0]
    clip = write_clip(folder / "c.mp4", 6)
    targets = task.collate([Sample(id="x", videos=(Path(clip),) * 2, turns=turns)])["targets"]
    text = talker.words.decode(targets[targets != IGNORED].tolist(), skip_specials=True)
    assert text.startswith("it rolls and then") and text.rstrip("\n").endswith("over") and "Frame" not in text


def test_a_template_that_makes_no_place_is_refused(folders, source):
    task, _ = task_of(folders("llava_onevision")[0], source)
    task.speech = task.speech._replace(template=ChatTemplate("{% for m in messages %}{{ m.role }}{% endfor %}"))
    with pytest.raises(TextError, match="0 places for 1 videos"):
        task.said(source[0])


def test_the_largest_video_is_tried_before_training(file, tmp_path):
    rows = json.loads(file.read_text())
    rows = [rows[2] | {"id": n} for n in range(12)] + [rows[0] | {"id": "last"}] + [rows[2] | {"id": "end"}]
    for name in ("a.mp4", "b.mp4", "p.png"):
        (tmp_path / name).write_bytes((file.parent / name).read_bytes())
    (tmp_path / "talks.json").write_text(json.dumps(rows))
    assert 12 in ConversationSource(ConversationsConfig(data=str(tmp_path / "talks.json"))).extremes


def test_work_of_pictures_and_videos_is_that_of_both(folders):
    """Of a connector that looks at features, too."""
    config = VIEWS["internvl"]()[0].config
    resampler = ResamplerConfig(reads=32, gives=32, latents=4, layers=1, heads=2)
    for one in (config, config.with_(connector=resampler)):
        model, films = VLM(one), (one.policy.film(3), one.policy.film(5))
        both, stills, played = (
            model.work([(28, 60)], 0, films=films),
            model.work([(28, 60)], 0),
            model.work([], 0, films=films),
        )
        for part in ("tower", "connector"):
            legs = [model.legs(work)[part].flops for work in (both, stills, played)]
            assert legs[0] == legs[1] + legs[2] and min(legs) > 0
        assert both.tokens == stills.tokens + played.tokens == both.context
    qwen = hub.load(folders("qwen2_vl")[0])
    seen = qwen.config.with_(rules=qwen.config.rules.with_(both=("video",)))
    n, plain = Grid(t=2, h=4, w=4, merge=2), qwen.work([(32, 32)], 3, films=[Grid(t=2, h=4, w=4, merge=2)])
    qwen.config = seen
    assert qwen.work([(32, 32)], 3, films=[n]).pairs == plain.pairs + n.tokens * (n.tokens - 1) // 2


def test_what_reads_no_videos_or_is_none_is_refused(folders, source, file, tmp_path):
    model, words = VIEWS["llava_next_video"]()
    plain = VLM(model.config.with_(policy=model.config.policy.with_(pool=None)))
    with pytest.raises(ConfigError, match=r"conversation .*the model reads none"):
        ChatTask(plain, {"talks": source}, words, ChatSettings(length=600), speech_of(plain, words))
    with pytest.raises(ConfigError, match="leave out frames"):
        ChatTask(plain, {}, words, ChatSettings(length=600, frames=4), speech_of(plain, words))
    model, _ = VIEWS["internvl"]()
    bare = Tokenizer.train(SAID * 3, 330, specials=[*CHATML, "<img>", "</img>", "<IMG_CONTEXT>"], eos=CHATML[1])
    with pytest.raises(ConfigError, match="there is no word for one"):
        ChatTask(model, {"talks": source}, bare, ChatSettings(length=600), speech_of(model, bare))
    rows = json.loads(file.read_text())[:1]
    (tmp_path / "b.mp4").write_bytes((file.parent / "b.mp4").read_bytes()[:300])
    (tmp_path / "talks.json").write_text(json.dumps(rows))
    broken = ConversationSource(ConversationsConfig(data=str(tmp_path / "talks.json")))
    with pytest.raises(DataError, match=r"conversation 0.*b\.mp4"):
        task_of(folders("internvl")[0], broken)
    (tmp_path / "b.mp4").unlink()
    with pytest.raises(DataError, match=r"b\.mp4"):
        ConversationSource(ConversationsConfig(data=str(tmp_path / "talks.json")))


def test_talks_about_one_video_stay_together(file, tmp_path):
    """And their names and sizes are part of what a run remembers of its data."""
    rows, turns = [], json.loads(file.read_text())[0]["conversations"]
    for number in range(40):
        (tmp_path / f"{number}.mp4").write_bytes(bytes(number + 1))
        rows += [{"id": f"{number} {n}", "video": f"{number}.mp4", "conversations": turns} for n in range(2)]
    (tmp_path / "talks.json").write_text(json.dumps(rows))

    def read(part: str) -> ConversationSource:
        return ConversationSource(ConversationsConfig(data=str(tmp_path / "talks.json"), part=part))

    train, test = ({source[n].videos[0].name for n in range(len(source))} for source in (read("train"), read("test")))
    assert not train & test and len(train | test) == 40 and 0 < len(test) < 20
    before = read("all").fingerprint
    (tmp_path / "7.mp4").write_bytes(b"longer than before")
    assert read("all").fingerprint != before
