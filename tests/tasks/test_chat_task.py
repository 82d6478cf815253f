"""Chat task: packing, targets and losses for every kind of image input, compared with single samples."""

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
from vitrail import recipe
from vitrail.backbones.decoder import DecoderConfig
from vitrail.backbones.fusion import DeepStackConfig, VisualExpertConfig
from vitrail.connectors import FusedQueryConfig, MergerConfig, ProjectorConfig
from vitrail.connectors.feature_reduction import VisPrunerConfig
from vitrail.data.conversations import ConversationsConfig, ConversationSource
from vitrail.data.formats import ContentPart, Sample, Turn
from vitrail.encoders.packed_vit import PackedViTConfig
from vitrail.encoders.vit import ViTConfig
from vitrail.errors import ConfigError, TextError
from vitrail.models.vision_inputs import get_image_layouts, prepare_images
from vitrail.models.vlm import VLM, VLMConfig
from vitrail.nn import AttentionConfig, BlockConfig, GatedMLPConfig, PlainMLPConfig, RotaryConfig
from vitrail.pipelines import ChatPipeline
from vitrail.pipelines.chat_settings import build_training_chat_format
from vitrail.processing.anyres import AnyResPolicy
from vitrail.processing.internvl_tiles import TilesPolicy
from vitrail.processing.resolution_policies import NaivePolicy, NativePolicy
from vitrail.processing.tokenizer import Tokenizer
from vitrail.recipe import sweep
from vitrail.stream import TOKEN_KINDS, StreamRules
from vitrail.tasks.chat_task import ChatSettings, ChatTask
from vitrail.tasks.qa_tokens import IGNORE_INDEX
from vitrail.training.task import MeteredTask

END, IMAGE = "<|endoftext|>", "<image>"
VOCAB, FILL = 320, 1
SIZES = {"wide": (20, 44), "tall": (50, 18), "square": (17, 17)}
TALKS = [
    ("wide", ["<image>\nWhat is this?", "A red cube.", "And behind it?", "Nothing at all."]),
    ("tall square", ["Is <image> taller than <image>?", "Yes."]),
    (None, ["How many legs has a spider?", "Eight."]),
    ("square", ["Name it.\n<image>", "A ball"]),
]

BLOCK = BlockConfig(width=16, attention=AttentionConfig(heads=2, bias="all"), mlp=PlainMLPConfig(intermediate_size=24))
TOWER = ViTConfig(layers=2, block=BLOCK, image_size=16, patch_size=4, positions="patches")
TEXT = BlockConfig(width=32, attention=AttentionConfig(heads=2), mlp=GatedMLPConfig(intermediate_size=40), norm="rms")
DECODER = DecoderConfig(vocab_size=VOCAB, layers=2, block=TEXT, rotary=RotaryConfig(16), context_length=512)
PROJECTOR, MERGER = ProjectorConfig(in_features=16, out_features=32), MergerConfig(in_features=16, out_features=32)
BLOCKS = MERGER.replace(order="blocks")
TURNED = RotaryConfig(16, layout="mrope_interleaved", sections=(4, 2, 2))
PLAIN = {"decoder": DECODER, "rules": StreamRules(fill_id=FILL)}
KINDS_OF = {
    "one view": VLMConfig(tower=TOWER, connector=PROJECTOR, policy=NaivePolicy(image_size=16, patch_size=4), **PLAIN),
    "anyres": VLMConfig(
        tower=TOWER,
        connector=PROJECTOR,
        policy=AnyResPolicy(tile_size=16, patch_size=4, grids=((1, 2), (2, 1), (2, 2))),
        newline=True,
        **PLAIN,
    ),
    "tiles": VLMConfig(
        tower=TOWER, connector=MERGER, policy=TilesPolicy(tile_size=16, patch_size=4, max_tiles=4), **PLAIN
    ),
    "native": VLMConfig(
        tower=PackedViTConfig(layers=3, block=BLOCK, patch_size=4, feature_layers=(1, 2)),
        connector=BLOCKS,
        stack=BLOCKS.replace(norm_position="after"),
        policy=NativePolicy(patch_size=4, min_pixels=64, max_pixels=2048),
        decoder=DECODER.replace(rotary=TURNED, fusion=DeepStackConfig(layer_indices=(0, 1))),
        rules=StreamRules(positions="qwen3-vl", fill_id=FILL),
    ),
}
FUSED = FusedQueryConfig(
    in_features=16,
    out_features=32,
    vocab_size=VOCAB,
    first_queries=5,
    later_queries=2,
    layers=1,
    width=16,
    heads=2,
    intermediate_size=24,
)
ASKED = {
    "fused": KINDS_OF["one view"].replace(connector=PROJECTOR.replace(out_features=16), queries=FUSED),
    "voco": KINDS_OF["anyres"].replace(voco_tokens=3),
    "one voco": KINDS_OF["one view"].replace(voco_tokens=3),
    "reduced": KINDS_OF["anyres"].replace(feature_reduction=VisPrunerConfig(keep=6)),
}
# In addition: bidirectional image tokens with separate weights (visual expert).
EVERY = (KINDS_OF | ASKED) | {
    "expert": KINDS_OF["tiles"].replace(
        decoder=DECODER.replace(fusion=VisualExpertConfig()), rules=StreamRules(fill_id=FILL, bidirectional=("image",))
    )
}


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("talks")
    chance = np.random.default_rng(0)
    for name, size in SIZES.items():
        Image.fromarray(chance.integers(0, 256, (*size, 3), dtype=np.uint8)).save(folder / f"{name}.png")
    rows = []
    for number, (shown, output) in enumerate(TALKS):
        turns = [{"from": ("human", "gpt")[n % 2], "value": text} for n, text in enumerate(output)]
        image = {} if shown is None else {"image": [f"{name}.png" for name in shown.split()]}
        rows.append({"id": number, "conversations": turns} | image)
    (folder / "talks.json").write_text(json.dumps(rows))
    return folder / "talks.json"


@pytest.fixture(scope="module")
def source(file) -> ConversationSource:
    return ConversationSource(ConversationsConfig(path=str(file)), "talks")


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    output = [text.replace(IMAGE, "") for _, turns in TALKS for text in turns]
    return Tokenizer.train(output * 3, VOCAB, special_tokens=(END, IMAGE), eos=END)


def task_of(kind: str, source, words, **more) -> ChatTask:
    return ChatTask(randomize(VLM(EVERY[kind])), {"talks": source}, words, ChatSettings(**{"max_length": 200} | more))


def gradients(task: ChatTask, *batches) -> tuple[float, dict[str, Tensor]]:
    loss = sum(task(batch)["answers"] for batch in batches) / sum(
        task.count_loss_terms(batch)["answers"] for batch in batches
    )
    task.model.zero_grad()
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in task.model.named_parameters() if p.grad is not None}


# ---- targets ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", EVERY)
def test_packed_loss_matches_single_samples(kind, source, words):
    """Loss and gradients of a packed batch equal the mean over single conversations."""
    task = task_of(kind, source, words)
    samples = [source[i] for i in range(len(source))]
    batch = task.collate(samples)
    assert len(batch["ids"]) < len(samples)  # some conversations share a row
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
def test_loss_is_cross_entropy(kind, source, words):
    """Compare with logits of the model's forward pass over unpacked streams."""
    task = task_of(kind, source, words)
    task.model.eval()
    total = 0.0
    for item in range(len(source)):
        sample = source[item]
        stream = task.encode_conversation(sample).stream
        images = [sample.load_image(i) for i in range(len(sample.images))]
        shown = task.model.prepare_images(images) if images else None
        if shown is not None and kind == "fused":
            asked = [
                words.encode("".join(p.text for p in turn.parts if p.kind == "text")) for turn in sample.turns[::2]
            ]
            shown = shown._replace(questions=tuple([torch.tensor(ids) for ids in asked] for _ in images))
        logits = task.model(vitrail.stream.pack_streams([stream], len(stream)), shown)[0]
        total += torch.nn.functional.cross_entropy(
            logits[:-1][stream.loss_mask[1:]], stream.ids[1:][stream.loss_mask[1:]], reduction="sum"
        ).item()
    batch = task.collate([source[item] for item in range(len(source))])
    assert task(batch)["answers"].item() == pytest.approx(total, rel=1e-5)


turn = st.tuples(st.lists(st.sampled_from(["image", "who", "is", "it"]), min_size=1, max_size=5), st.integers(0, 999))


@cache
def untrained_model(kind: str) -> VLM:
    return VLM(KINDS_OF[kind])


@settings(max_examples=20)
@given(st.lists(turn, min_size=1, max_size=4), st.sampled_from(sorted(KINDS_OF)))
def test_only_assistant_turns_are_targets(words, turns, kind):
    """User turns have words and images, assistant turns numbers: only the numbers and end tokens are targets."""
    task = ChatTask(untrained_model(kind), {}, words, ChatSettings(max_length=512))
    output, pictures = [], 0
    for parts, answer in turns:
        asked = []
        for part in parts:
            asked.append(ContentPart("image", index=pictures) if part == "image" else ContentPart("text", f" {part}"))
            pictures += part == "image"
        output += [Turn("user", tuple(asked)), Turn("assistant", (ContentPart("text", str(answer)),))]
    sample = Sample(id="x", images=(_encode_png(),) * pictures, turns=tuple(output))
    batch = task.collate([sample])
    targets, ids, kinds = (batch[name][batch["segments"] == 0] for name in ("targets", "ids", "kinds"))
    answers = "".join(f"{answer}{END}" for _, answer in turns)
    assert words.decode(targets[targets != IGNORE_INDEX].tolist()) == answers
    followed = torch.cat([ids[1:], ids.new_tensor([IGNORE_INDEX])])
    assert torch.equal(targets.where(targets == IGNORE_INDEX, followed), targets)  # targets are the next tokens
    image = kinds == TOKEN_KINDS["image"].id
    assert (targets[:-1][image[1:]] == IGNORE_INDEX).all()
    # All other text is from the user.
    rest = torch.cat([targets.new_tensor([IGNORE_INDEX]), targets[:-1]]) == IGNORE_INDEX
    asked = "".join("".join(f" {part}" for part in parts if part != "image") + END for parts, _ in turns)
    assert words.decode(ids[rest & ~image].tolist()) == asked


def _encode_png() -> bytes:
    from io import BytesIO

    file = BytesIO()
    Image.new("RGB", (9, 6), "red").save(file, "PNG")
    return file.getvalue()


def test_samples_are_a_function_of_their_index(source, words):
    one, other = (task_of("native", source, words) for _ in range(2))
    first, second = (task.collate([source[2], source[0]]) for task in (one, other))
    assert first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize("kind", KINDS_OF)
def test_images_match_model_preprocessing(kind, source, words):
    model = VLM(KINDS_OF[kind])
    images = [source[1].load_image(i) for i in range(2)]
    ready, there = prepare_images(model.config, images), model.prepare_images(images)
    assert torch.equal(ready.pixels, there.pixels) and ready.layouts == there.layouts
    assert get_image_layouts(model.config, [(image.height, image.width) for image in images]) == there.layouts


# ---- rows -------------------------------------------------------------------------------------------------------


def test_batch_without_images_runs_the_tower(source, words):
    task = task_of("anyres", source, words)
    batch = task.collate([source[2]])
    loss, grads = gradients(task, batch)
    assert not any(grads[name].any() for name in grads if name.startswith(("tower", "connector")))
    assert {name.split(".")[0] for name in grads} == {"tower", "connector", "decoder", "newline"}
    stream = task.encode_conversation(source[2]).stream
    logits = task.model(vitrail.stream.pack_streams([stream], len(stream)))[0]
    expected = torch.nn.functional.cross_entropy(
        logits[:-1][stream.loss_mask[1:]], stream.ids[1:][stream.loss_mask[1:]]
    )
    assert loss == pytest.approx(expected.item(), rel=1e-5)


def test_long_conversations_raise_or_are_truncated(source, words):
    whole = task_of("one view", source, words)
    length = len(whole.encode_conversation(source[0]).stream)
    with pytest.raises(ConfigError, match=r"conversation 0: .*exceed max_length(.|\n)*settings.overflow"):
        task_of("one view", source, words, max_length=length - 1)
    task = task_of("one view", source, words, max_length=length - 1, overflow="cut")
    batch = task.collate([source[0], source[2]])
    assert task.count_loss_terms(batch)["cut"] == 2 and task(batch)["cut"] == 1
    assert torch.equal(
        task.encode_conversation(source[0]).stream.ids, whole.encode_conversation(source[0]).stream.ids[:-1]
    )
    short = task_of(
        "one view", source, words, max_length=30, overflow="cut"
    )  # two images take 32 tokens: the second is dropped
    output = short.encode_conversation(source[1])
    assert (
        output.truncated
        and len(output.image_sizes) == 1
        and int((output.stream.kinds == TOKEN_KINDS["image"].id).sum()) == 16
    )
    assert output.stream.num_target_tokens == 0
    short.collate([source[1]])
    with pytest.raises(ConfigError, match="no answer within"):
        ChatTask(
            whole.model, {"two": _SingleSampleSource(source, 1)}, words, ChatSettings(max_length=30, overflow="cut")
        )  # pyrefly: ignore


def test_truncation_drops_questions_with_their_queries(source, words):
    whole = task_of("fused", source, words)
    length = len(whole.encode_conversation(source[0]).stream)
    behind = len(words.encode("And behind it?")) + 1 + len(words.encode("Nothing at all.")) + 1
    for less, questions in ((1, 2), (behind, 2), (behind + 1, 1)):
        task = task_of("fused", source, words, max_length=length - less, overflow="cut")
        output = task.encode_conversation(source[0])
        assert (
            output.truncated and [len(own) for own in output.questions] == [questions] and len(output.image_sizes) == 1
        )
        assert int((output.stream.kinds == TOKEN_KINDS["image"].id).sum()) == 5 + 2 * (questions - 1)
        assert task(task.collate([source[0]]))["answers"] > 0
    task = task_of("one voco", source, words, overflow="cut")
    for length in range(19, 60):  # images are dropped together with their queries
        task.settings = ChatSettings(max_length=length, overflow="cut")
        cut = task.encode_conversation(source[1])
        kinds = [int((cut.stream.kinds == TOKEN_KINDS[kind].id).sum()) for kind in ("image", "query")]
        assert kinds == [16 * len(cut.image_sizes), 3 * len(cut.image_sizes)] and len(cut.stream) <= length


class _SingleSampleSource:
    extreme_items = ()

    def __init__(self, source, item):
        self.source, self.item = source, item

    def __len__(self):
        return 1

    def __getitem__(self, _):
        return self.source[self.item]


def test_incompatible_settings_raise(source, words):
    with pytest.raises(ConfigError, match="decoder's context length of 512"):
        task_of("tiles", source, words, max_length=600)
    with pytest.raises(ConfigError, match="a small image takes 16 tokens"):
        task_of("one view", source, words, max_length=15)
    with pytest.raises(ConfigError, match="is not a separate special token of"):
        task_of("one view", source, Tokenizer.train(["a b"], 300, eos=END))
    with pytest.raises(ConfigError, match="tokenizer"):
        task_of("one view", source, None)
    with pytest.raises(ConfigError, match="length"):
        ChatSettings(max_length=4)
    task = task_of("one view", source, words)
    with pytest.raises(TextError, match=r"conversation y: .*system"):
        task.encode_conversation(
            Sample(id="y", turns=(Turn("system", (ContentPart("text", "Be brief."),)), *source[2].turns))
        )


# ---- cost -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [kind for kind in EVERY if kind != "fused"])
def test_flops_match_the_conversations(kind, source, words):
    task = task_of(kind, source, words)
    assert isinstance(task, MeteredTask)
    one = task.collate([source[0]])
    output = task.encode_conversation(source[0])
    assert output.images is not None
    text = len(output.stream) - task.config.count_tokens(output.images.layouts[0])
    work = task.model.workload(output.image_sizes, text).replace(
        cached_tokens=0, logit_tokens=output.stream.num_target_tokens
    )
    assert task.count_flops(one) == sum(component.flops for component in task.model.cost_components(work).values())
    samples = [source[i] for i in (0, 1, 3)]
    assert task.count_flops(task.collate(samples)) == sum(
        task.count_flops(task.collate([sample])) for sample in samples
    )
    assert task.count_tokens(one) == len(output.stream)
    assert task.count_step_flops(one) == 3 * task.count_flops(one)
    task.model.tower.requires_grad_(False)
    assert task.count_flops(one) < task.count_step_flops(one) < 3 * task.count_flops(one)


def test_flops_of_fused_queries(source, words):
    """All images are processed in one batch, padded to the longest first and second question."""
    task = task_of("fused", source, words)
    batch = task.collate([source[0], source[3]])
    asked = [
        [len(ids) for ids in own]
        for output in (task.encode_conversation(source[0]), task.encode_conversation(source[3]))
        for own in output.questions
    ]
    assert [len(own) for own in asked] == [2, 1] and batch["questions"].tolist() == [2, 1]
    component_costs = task.model.cost_components(task._workload(batch))
    assert component_costs["queries"].workload == task.model.queries.workload(
        16, 2, (max(asked[0][0], asked[1][0]), asked[0][1])
    )
    lengths = [len(task.encode_conversation(source[item]).stream) for item in (0, 3)]
    assert component_costs["decoder"].workload.tokens == sum(lengths)


# ---- recipes ----------------------------------------------------------------------------------------------------


def plain(kind: str, file: Path, **stage) -> dict:
    stage = {
        "name": "talk",
        "task": "chat",
        "steps": 2,
        "batch_size": 4,
        "settings": {"max_length": 200},
        "mixture": {"weights": {"talks": 1}},
        "optim": {"lr": 1e-2},
    } | stage
    return {
        "name": "tiny",
        "description": "conversations",
        "model": {"kind": "vlm", "config": EVERY[kind].to_dict()},
        "tokenizer": {"vocab_size": VOCAB, "special_tokens": [IMAGE]},
        "sources": {"talks": {"kind": "conversations", "path": str(file)}},
        "stages": [stage],
    }


@pytest.mark.parametrize("kind", [*KINDS_OF, "fused", "voco"])
def test_every_architecture_trains(kind, file, source, tmp_path):
    """Train two steps from a recipe and ask the model: the inference prompt matches training."""
    more = {"num_workers": 1} if kind == "native" else {"validate": ["talks"], "validate_every": 2}
    recipe.train_recipe(recipe.Recipe.from_dict(plain(kind, file, **more)), tmp_path, quiet=True)
    rows = [json.loads(line) for line in (tmp_path / "talk" / "log.jsonl").read_text().splitlines()]
    assert len(rows) == 2 and rows[1]["loss"] < rows[0]["loss"]
    assert all(row["tokens_per_s"] > 0 for row in rows)
    chat_pipeline = vitrail.load(tmp_path / "final", device="cpu")
    assert isinstance(chat_pipeline, ChatPipeline)
    sample = source[1]
    output = ChatTask(
        chat_pipeline.model,
        {},
        chat_pipeline.tokenizer,
        ChatSettings(max_length=200),
        build_training_chat_format(chat_pipeline.model, chat_pipeline.tokenizer),
    )
    learnt, asked = output.encode_conversation(sample).stream, chat_pipeline.build_prompt([_message(sample)]).stream
    assert torch.equal(learnt.ids[: len(asked)], asked.ids) and int(learnt.loss_mask[: len(asked)].sum()) == 0
    assert learnt.loss_mask[len(asked) :].all()


def _message(sample: Sample) -> dict:
    shown = [
        {"type": "image", "image": str(sample.images[part.index])}
        if part.kind == "image"
        else {"type": "text", "text": part.text}
        for part in sample.turns[0].parts
    ]
    return {"role": "user", "content": shown}


def test_recipes_with_unsupported_sources_raise(file):
    with pytest.raises(ConfigError, match="does not support"):
        recipe.Recipe.from_dict(plain("tiles", file, task="vlm", settings={"max_length": 20}))
    with pytest.raises(ConfigError, match=r"settings.*overflow"):
        recipe.Recipe.from_dict(plain("tiles", file, settings={"overflow": "drop"}))
    with pytest.raises(ConfigError, match="compile is set, but batches of the"):
        recipe.Recipe.from_dict(plain("tiles", file, compile=True))


def test_recipe_runs_a_step(file, tmp_path):
    """The recipe chat-llava with fewer layers and its own tokenizer."""
    changes = {
        "tokenizer": {"vocab_size": VOCAB, "special_tokens": [IMAGE]},
        "model.parts": {},
        "model.config.rules.fill_id": FILL,
    }
    changes |= {f"sources.{name}": {"kind": "conversations", "path": str(file)} for name in ("talks", "talks-test")}
    changes |= {f"stages.{n}.dtype": "float32" for n in range(2)}
    changes |= {
        "model.config.decoder.vocab_size": VOCAB,
        "model.config.decoder.layers": 1,
        "model.config.tower.layers": 1,
    }
    made = recipe.train_recipe(
        recipe.shrink_recipe(recipe.load_recipe("untested/chat-llava", changes)), tmp_path, quiet=True
    )
    assert isinstance(made, VLM)
    row = json.loads((tmp_path / "tune" / "log.jsonl").read_text())
    assert row["loss/cut"] == 0 and row["loss"] == row["loss/answers"]


SYSTEMS = sweep.load_sweep("chat-systems")


@pytest.mark.parametrize("number", range(len(SYSTEMS.variants)), ids=[one.name for one in SYSTEMS.variants])
def test_published_systems_run_a_step(number, file, tmp_path):
    """Each system of the sweep, untrained and with its own tokenizer."""
    plain = SYSTEMS.load_recipe(SYSTEMS.variants[number], 0).to_dict()
    plain["tokenizer"], plain["model"]["parts"] = {"vocab_size": VOCAB, "special_tokens": [IMAGE]}, {}
    plain["model"]["config"]["rules"]["fill_id"] = FILL
    plain["model"]["config"]["decoder"]["vocab_size"] = VOCAB
    plain["sources"] = {name: {"kind": "conversations", "path": str(file)} for name in plain["sources"]}
    plain["stages"] = [stage | {"dtype": "float32"} for stage in plain["stages"]]
    made = recipe.train_recipe(recipe.shrink_recipe(recipe.Recipe.from_dict(plain)), tmp_path, quiet=True)
    chat_pipeline = ChatPipeline.load(tmp_path / "final", device="cpu")
    assert isinstance(chat_pipeline.ask(Image.new("RGB", (70, 40), "red"), "what is this?", max_new_tokens=2), str)
    assert isinstance(made, VLM)
