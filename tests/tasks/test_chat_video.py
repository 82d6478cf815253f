"""Chat task on videos, compared with transformers, with single samples and with inference."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from helpers import randomize
from pipelines.test_chat_video import save, write_clip
from tasks.test_chat_task import gradients
from training import ranks
from vitrail import hub, recipe
from vitrail.connectors import ResamplerConfig
from vitrail.data.conversations import ConversationsConfig, ConversationSource
from vitrail.data.formats import ContentPart, Sample, Turn
from vitrail.errors import ConfigError, DataError, TextError
from vitrail.models.vlm import VLM
from vitrail.pipelines import ChatPipeline
from vitrail.pipelines.chat_settings import build_training_chat_format
from vitrail.processing.chat_template import ChatTemplate
from vitrail.processing.grid import Grid
from vitrail.processing.tokenizer import Tokenizer
from vitrail.registry import FAMILIES
from vitrail.stream import TOKEN_KINDS, pack_streams
from vitrail.tasks.chat_task import ChatSettings, ChatTask
from vitrail.tasks.qa_tokens import IGNORE_INDEX
from vitrail.training.task import OptionalPartsTask

TALKS = [
    ({"video": "b.mp4"}, ["<video>\nWhat happens?", "A ball rolls.", "And then?", "It stops."]),
    ({"video": "a.mp4", "image": "p.png"}, ["Is <image> in <video>?", "Yes."]),
    ({}, ["How many legs has a spider?", "Eight."]),
    ({"image": "p.png"}, ["<image>\nName it.", "A ball"]),
    ({"video": ["a.mp4", "b.mp4"]}, ["<video>Which is longer, this or\n<video>", "The second."]),
]
QWENS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
SIDES = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2}
KV_HEADS = {"num_key_value_heads": 2}
SAID = [text for _, output in TALKS for text in output]
CHATML = ["<|im_start|>", "<|im_end|>"]


def make_internvl() -> tuple[VLM, Tokenizer]:
    marks = [*CHATML, "<img>", "</img>", "<IMG_CONTEXT>", "<video>"]
    words = Tokenizer.train(SAID * 3, 330, special_tokens=marks, eos=CHATML[1])
    about = {
        "vision_config": SIDES | {"image_size": [28, 28], "patch_size": [7, 7]},
        "text_config": SIDES | KV_HEADS | {"model_type": "qwen2", "vocab_size": words.vocab_size},
        "image_token_id": words.token_to_id("<IMG_CONTEXT>"),
    }
    return VLM(FAMILIES["internvl"].from_hf_config(about)), words


def make_llava(family: str, tile: int, **words_of) -> tuple[VLM, Tokenizer]:
    words = Tokenizer.train(SAID * 3, 330, **words_of)
    about = {
        "vision_config": SIDES | {"image_size": tile, "patch_size": 7, "vision_use_head": False},
        "text_config": SIDES | KV_HEADS | {"vocab_size": words.vocab_size},
        "image_grid_pinpoints": [[tile, tile], [tile, 2 * tile], [2 * tile, tile]],
    }
    about["text_config"] |= {"model_type": "qwen2"} if family == "llava_onevision" else {}
    about |= {f"{mark}_token_index": words.token_to_id(f"<{mark}>") for mark in ("image", "video")}
    return VLM(FAMILIES[family].from_hf_config(about)), words


VIEWS = {
    "internvl": make_internvl,
    "llava_onevision": lambda: make_llava(
        "llava_onevision", 21, special_tokens=[*CHATML, "<image>", "<video>"], eos=CHATML[1]
    ),
    "llava_next_video": lambda: make_llava(
        "llava_next_video", 28, special_tokens=["<image>", "<video>"], bos="<s>", eos="</s>"
    ),
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
        {"id": n, "conversations": [{"from": ("human", "gpt")[k % 2], "value": text} for k, text in enumerate(output)]}
        | shown
        for n, (shown, output) in enumerate(TALKS)
    ]
    (folder / "talks.json").write_text(json.dumps(rows))
    return folder / "talks.json"


@pytest.fixture(scope="module")
def source(file) -> ConversationSource:
    return ConversationSource(ConversationsConfig(path=str(file)), "talks")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """family → its folder, and the transformers model if there is one"""
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
                films = model.config.resolved_video_sampling.replace(num_frames=FRAMES[family])
                hub.save(randomize(VLM(model.config.replace(video_sampling=films)), 3, 0.1), folder, words)
            made[family] = folder, reference
        return made[family]

    return make


def task_of(folder, source=None, **settings) -> tuple[ChatTask, ChatPipeline]:
    chat_pipeline = vitrail.load(folder, device="cpu")
    model, words = chat_pipeline.model, chat_pipeline.tokenizer
    chosen = ChatSettings(**{"max_length": 600} | settings)
    sources = {} if source is None else {"talks": source}
    return ChatTask(model, sources, words, chosen, build_training_chat_format(model, words)), chat_pipeline


def messages(sample: Sample) -> list[dict]:
    held = {"image": sample.images, "video": sample.videos}
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
def test_gradients_match_transformers(folders, source, family):
    folder, theirs = folders(family)
    task, chat_pipeline = task_of(folder, source)
    if family != "qwen3_vl":  # text after a video has the same positions
        config = task.model.config
        rules = config.rules.replace(positions=f"{config.rules.positions}/transformers")
        task.config = task.model.config = config.replace(rules=rules)
    for item in range(len(TALKS)):
        output = task.encode_conversation(source[item])
        stream, given = output.stream, {}
        ids = stream.ids.clone()
        ids[stream.kinds == TOKEN_KINDS["video"].id] = chat_pipeline.vision_token_ids["video"]
        for pixels, grid, shown in (
            ("pixel_values", "image_grid_thw", output.images),
            ("pixel_values_videos", "video_grid_thw", output.videos),
        ):
            if shown is not None:
                given |= {pixels: shown.pixels, grid: torch.tensor([(g.t, g.h, g.w) for g in shown.layouts])}
        if family == "qwen2_5_vl" and output.videos is not None:
            given["second_per_grid_ts"] = [
                watched.seconds_per_patch for watched in task._sample_videos(source[item], _video_indices(item))
            ]
        expected = theirs(
            input_ids=ids[None],
            labels=ids.where(stream.loss_mask, -100)[None],
            attention_mask=torch.ones_like(ids)[None],
            mm_token_type_ids=stream.kinds[None],
            **given,
        ).loss
        batch = task.collate([source[item]])
        found = task(batch)["answers"] / task.count_loss_terms(batch)["answers"]
        assert found.item() == pytest.approx(expected.item(), rel=1e-4)
        (grad,) = torch.autograd.grad(found, task.model.decoder.embed.weight)
        (reference,) = torch.autograd.grad(expected, theirs.get_input_embeddings().weight)
        assert (grad - reference).abs().max() <= 1e-3 * reference.abs().max()


def _video_indices(item: int) -> list[int]:
    """Names of the videos of a conversation, in order."""
    return list(range(sum(text.count("<video>") for text in TALKS[item][1])))


@pytest.mark.parametrize("family", [*QWENS, *VIEWS])
def test_packed_loss_matches_single_samples_and_inference(folders, source, family):
    task, chat_pipeline = task_of(folders(family)[0], source)
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
        output = task.encode_conversation(sample)
        asked = chat_pipeline.build_prompt(messages(sample)[:1])
        own = asked.stream
        assert torch.equal(output.stream.ids[: len(own)], own.ids)
        assert torch.equal(output.stream.positions[: len(own)], own.positions)
        assert not output.stream.loss_mask[: len(own)].any()
        for ours, shown in ((output.images, asked.images), (output.videos, asked.videos)):
            assert (ours is None) == (shown is None)
            assert ours is None or (torch.equal(ours.pixels, shown.pixels) and ours.layouts == shown.layouts)
        with torch.no_grad():
            logits = task.model(pack_streams([output.stream], len(output.stream)), asked.images, asked.videos)[0]
        learnt = output.stream.loss_mask[1:]
        total += torch.nn.functional.cross_entropy(
            logits[:-1][learnt], output.stream.ids[1:][learnt], reduction="sum"
        ).item()
    assert task(batch)["answers"].item() == pytest.approx(total, rel=1e-4)


@pytest.mark.parametrize("family", ["qwen3_vl", "internvl", "llava_onevision"])
def test_only_assistant_turns_are_targets(folders, source, family):
    """Also if text stands between the frames."""
    task, chat_pipeline = task_of(folders(family)[0], source)
    for item, (_, output) in enumerate(TALKS):
        targets = task.collate([source[item]])["targets"]
        text = chat_pipeline.tokenizer.decode(targets[targets != IGNORE_INDEX].tolist(), skip_special_tokens=True)
        assert text.replace("\n", "") == "".join(output[1::2])


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl", "internvl", "llava_next_video"])
def test_truncation_never_splits_a_video(folders, source, family):
    task, _ = task_of(folders(family)[0], source)
    full = task.encode_conversation(source[4])
    places = (full.stream.kinds == TOKEN_KINDS["video"].id).nonzero().flatten().tolist()
    first, last = places[task.config.count_tokens(full.videos.layouts[0]) - 1], places[-1]  # end of each of the two
    for length in (first + 1, first + 2, (first + last) // 2, last - 1, last, last + 1, len(full.stream) - 1):
        task.settings = ChatSettings(max_length=length, overflow="cut")
        output = task.encode_conversation(source[4])
        videos = int((output.stream.kinds == TOKEN_KINDS["video"].id).sum())
        assert len(output.stream) <= length and output.truncated
        assert len(output.videos.layouts) == (2 if length > last else 1)
        assert videos == sum(task.config.count_tokens(shape) for shape in output.videos.layouts)
        packed = pack_streams([output.stream], len(output.stream))
        assert torch.isfinite(task.model(packed, None, output.videos)).all()
    task.settings = ChatSettings(max_length=first, overflow="cut")
    assert task.encode_conversation(source[4]).videos is None
    task.settings = ChatSettings(max_length=last)
    with pytest.raises(ConfigError, match="fewer or smaller video frames"):
        task.encode_conversation(source[4])


@pytest.mark.parametrize("family", ["qwen2_5_vl", "internvl", "llava_onevision", "llava_next_video"])
def test_flops_match_the_videos(folders, source, family):
    task, _ = task_of(folders(family)[0], source)
    for item in (0, 1, 4):
        output, batch = task.encode_conversation(source[item]), task.collate([source[item]])
        films = output.videos.layouts
        sizes = output.image_sizes or [(32, 32)]  # a batch without images has a grey image
        text = (
            len(output.stream)
            - sum(map(task.config.count_tokens, films))
            - sum(map(task.config.count_tokens, _image_layouts(output)))
        )
        if output.image_sizes:
            work = task.model.workload(sizes, text, videos=films).replace(
                cached_tokens=0, logit_tokens=output.stream.num_target_tokens
            )
            assert task.count_flops(batch) == sum(
                component.flops for component in task.model.cost_components(work).values()
            )
        looks = task._workload(batch).vision_workloads
        assert looks[0].tokens > task.model.workload(sizes, 0).vision_workloads[0].tokens
    samples = [source[i] for i in (1, 3)]
    assert task.count_flops(task.collate(samples)) == sum(
        task.count_flops(task.collate([sample])) for sample in samples
    )


def _image_layouts(output) -> tuple:
    return () if output.images is None else output.images.layouts


def recipe_on_videos(folder, file, **stage) -> dict:
    return {
        "name": "tiny",
        "description": "videos",
        "model": {"kind": "vlm", "checkpoint": str(folder)},
        "tokenizer": {"checkpoint": str(folder)},
        "sources": {"talks": {"kind": "conversations", "path": str(file)}},
        "stages": [
            {
                "name": "talk",
                "task": "chat",
                "settings": {"max_length": 600},
                "mixture": {"weights": {"talks": 1}},
                "optim": {"lr": 1e-2},
            }
            | stage
        ],
    }


def test_recipe_trains_on_videos(folders, file, tmp_path):
    folder, _ = folders("qwen3_vl")
    recipe.train_recipe(
        recipe.Recipe.from_dict(recipe_on_videos(folder, file, steps=3, batch_size=4, num_workers=1)),
        tmp_path,
        quiet=True,
    )
    rows = [json.loads(line) for line in (tmp_path / "talk" / "log.jsonl").read_text().splitlines()]
    assert rows[-1]["loss"] < rows[0]["loss"]
    chat_pipeline = vitrail.load(tmp_path / "final", device="cpu")
    assert isinstance(chat_pipeline.ask(str(file.parent / "a.mp4"), "what happens?", max_new_tokens=3), str)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl", "llava_onevision"])
def test_video_sampling_settings(folders, source, family):
    """num_frames, or all frames; fps; max_pixels by the budget of the model."""
    folder, _ = folders(family)
    S = 1 if family == "llava_onevision" else 2

    def frames(item: int, **settings) -> list[int]:
        films = task_of(folder, source, **settings)[0].encode_conversation(source[item]).videos
        return [S * shape.t if S == 2 else len(shape.views) for shape in films.layouts]

    assert frames(4, num_frames=6) == [6, 6] and frames(4, num_frames=20)[0] in (8, 9, 10)  # videos of 9 and 21 frames
    assert frames(0, fps=4)[0] == 10  # 21 frames at 8 fps
    if S == 1:
        with pytest.raises(ConfigError, match=r"resizes frames to 21.*\n.*remove max_pixels"):
            task_of(folder, source, max_pixels=400)
        return
    for pixels in (128, 256, 512, 1024):  # of 2,240 pixels, in patches of 4 × 4
        (grid,) = task_of(folder, source, max_pixels=pixels)[0].encode_conversation(source[0]).videos.layouts
        assert 0.4 * min(pixels, 700) <= 16 * grid.h * grid.w <= 1.3 * pixels, (pixels, grid)
    with pytest.raises(ConfigError, match="one of the two"):
        ChatSettings(num_frames=4, fps=1)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl", "internvl", "llava_onevision"])
def test_blank_video_does_not_change_losses(folders, source, family):
    task, _ = task_of(folders(family)[0], source)
    assert isinstance(task, OptionalPartsTask)
    batch = task.collate([source[2], source[3]])
    full = task.fill_part(batch, "video")
    assert (task.used_parts(batch), task.used_parts(full)) == ({"video": False}, {"video": True})
    assert task.count_loss_terms(full) == task.count_loss_terms(batch)
    (loss, grads), (plain, alone) = gradients(task, full), gradients(task, batch)
    assert loss == pytest.approx(plain, rel=1e-6) and grads.keys() == alone.keys()
    for name in grads:
        assert torch.allclose(grads[name], alone[name], atol=1e-6 * alone[name].abs().max().item()), name


def train_on_rank(folder, file, out) -> None:
    """Run on all ranks."""
    recipe.train_recipe(recipe.Recipe.from_dict(recipe_on_videos(folder, file, steps=4, batch_size=2)), out, quiet=True)


@pytest.mark.slow
def test_ranks_with_and_without_videos_match_one_process(folders, file, tmp_path):
    folder, _ = folders("qwen2_vl")
    for name, count in (("one", 1), ("two", 2)):
        ranks.run(count, train_on_rank, folder, file, tmp_path / name)
    one, two = (
        [json.loads(line)["loss"] for line in (tmp_path / name / "talk" / "log.jsonl").read_text().splitlines()]
        for name in ("one", "two")
    )
    assert two == pytest.approx(one, rel=1e-3)


def test_half_precision(folders, source):
    task, _ = task_of(folders("llava_onevision")[0], source)
    whole = task(task.collate([source[0]]))["answers"].item()
    task.model.bfloat16()
    assert task(task.collate([source[0]]))["answers"].item() == pytest.approx(whole, rel=0.05)


@pytest.mark.parametrize("family", ["internvl", "qwen3_vl"])
def test_text_before_a_video_is_a_target(folders, family):
    task, chat_pipeline = task_of(folders(family)[0])
    turns = (
        Turn("user", (ContentPart("video"), ContentPart("text", "what happens?"))),
        Turn(
            "assistant",
            (
                ContentPart("text", "it rolls and then rolls"),
                ContentPart("video", index=1),
                ContentPart("text", "over"),
            ),
        ),
    )
    folder = folders(family)[0]
    clip = write_clip(folder / "c.mp4", 6)
    targets = task.collate([Sample(id="x", videos=(Path(clip),) * 2, turns=turns)])["targets"]
    text = chat_pipeline.tokenizer.decode(targets[targets != IGNORE_INDEX].tolist(), skip_special_tokens=True)
    assert text.startswith("it rolls and then") and text.rstrip("\n").endswith("over") and "Frame" not in text


def test_template_without_video_token_raises(folders, source):
    task, _ = task_of(folders("llava_onevision")[0], source)
    task.chat_format = task.chat_format._replace(
        template=ChatTemplate("{% for m in messages %}{{ m.role }}{% endfor %}")
    )
    with pytest.raises(TextError, match="wrote 0 placeholders for 1 videos"):
        task.encode_conversation(source[0])


def test_largest_video_is_checked_before_training(file, tmp_path):
    rows = json.loads(file.read_text())
    rows = [rows[2] | {"id": n} for n in range(12)] + [rows[0] | {"id": "last"}] + [rows[2] | {"id": "end"}]
    for name in ("a.mp4", "b.mp4", "p.png"):
        (tmp_path / name).write_bytes((file.parent / name).read_bytes())
    (tmp_path / "talks.json").write_text(json.dumps(rows))
    assert 12 in ConversationSource(ConversationsConfig(path=str(tmp_path / "talks.json"))).extreme_items


def test_workload_adds_images_and_videos(folders):
    """Also with a connector that attends to features."""
    config = VIEWS["internvl"]()[0].config
    resampler = ResamplerConfig(in_features=32, out_features=32, num_latents=4, layers=1, heads=2)
    for one in (config, config.replace(connector=resampler)):
        model, films = VLM(one), (one.policy.layout_video(3), one.policy.layout_video(5))
        both, stills, played = (
            model.workload([(28, 60)], 0, videos=films),
            model.workload([(28, 60)], 0),
            model.workload([], 0, videos=films),
        )
        for part in ("tower", "connector"):
            component_costs = [model.cost_components(work)[part].flops for work in (both, stills, played)]
            assert component_costs[0] == component_costs[1] + component_costs[2] and min(component_costs) > 0
        assert both.tokens == stills.tokens + played.tokens == both.context_tokens
    qwen = hub.load(folders("qwen2_vl")[0])
    seen = qwen.config.replace(rules=qwen.config.rules.replace(bidirectional=("video",)))
    n, plain = (
        Grid(t=2, h=4, w=4, merge_size=2),
        qwen.workload([(32, 32)], 3, videos=[Grid(t=2, h=4, w=4, merge_size=2)]),
    )
    qwen.config = seen
    assert (
        qwen.workload([(32, 32)], 3, videos=[n]).attention_pairs
        == plain.attention_pairs + n.num_tokens * (n.num_tokens - 1) // 2
    )


def test_unsupported_videos_raise(folders, source, file, tmp_path):
    model, words = VIEWS["llava_next_video"]()
    plain = VLM(model.config.replace(policy=model.config.policy.replace(video_pool_size=None)))
    with pytest.raises(ConfigError, match=r"conversation .*the model does not support videos"):
        ChatTask(
            plain, {"talks": source}, words, ChatSettings(max_length=600), build_training_chat_format(plain, words)
        )
    with pytest.raises(ConfigError, match="remove num_frames"):
        ChatTask(plain, {}, words, ChatSettings(max_length=600, num_frames=4), build_training_chat_format(plain, words))
    model, _ = VIEWS["internvl"]()
    bare = Tokenizer.train(SAID * 3, 330, special_tokens=[*CHATML, "<img>", "</img>", "<IMG_CONTEXT>"], eos=CHATML[1])
    with pytest.raises(ConfigError, match="the tokenizer has no video token"):
        ChatTask(model, {"talks": source}, bare, ChatSettings(max_length=600), build_training_chat_format(model, bare))
    rows = json.loads(file.read_text())[:1]
    (tmp_path / "b.mp4").write_bytes((file.parent / "b.mp4").read_bytes()[:300])
    (tmp_path / "talks.json").write_text(json.dumps(rows))
    broken = ConversationSource(ConversationsConfig(path=str(tmp_path / "talks.json")))
    with pytest.raises(DataError, match=r"conversation 0.*b\.mp4"):
        task_of(folders("internvl")[0], broken)
    (tmp_path / "b.mp4").unlink()
    with pytest.raises(DataError, match=r"b\.mp4"):
        ConversationSource(ConversationsConfig(path=str(tmp_path / "talks.json")))


def test_conversations_about_one_video_share_a_split(file, tmp_path):
    """Names and sizes of videos are part of the identity of the data."""
    rows, turns = [], json.loads(file.read_text())[0]["conversations"]
    for number in range(40):
        (tmp_path / f"{number}.mp4").write_bytes(bytes(number + 1))
        rows += [{"id": f"{number} {n}", "video": f"{number}.mp4", "conversations": turns} for n in range(2)]
    (tmp_path / "talks.json").write_text(json.dumps(rows))

    def read(part: str) -> ConversationSource:
        return ConversationSource(ConversationsConfig(path=str(tmp_path / "talks.json"), split=part))

    train, test = ({source[n].videos[0].name for n in range(len(source))} for source in (read("train"), read("test")))
    assert not train & test and len(train | test) == 40 and 0 < len(test) < 20
    before = read("all").fingerprint
    (tmp_path / "7.mp4").write_bytes(b"longer than before")
    assert read("all").fingerprint != before
