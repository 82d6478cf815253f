"""Independent turns: each question has the result that it has alone."""

from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from helpers import randomize
from tasks.small_vlms import KINDS, made_of, scenes_of, small
from tasks.test_contrastive_task import make_named_source
from vitrail import recipe
from vitrail.data.qa import build_qa_dataset
from vitrail.data.scenes.atlas import Atlas
from vitrail.data.scenes.scene_source import SceneSource
from vitrail.encoders.vit import cut_patches
from vitrail.errors import ConfigError
from vitrail.models.cross_attention_vlm import CrossAttentionVLM, ImageViews
from vitrail.models.vision_inputs import VisionInputs
from vitrail.models.vlm import VLM
from vitrail.processing.tokenizer import Tokenizer
from vitrail.registry import FAMILIES
from vitrail.stream import build_stream, pack_streams
from vitrail.stream import text_part as text_part
from vitrail.tasks.qa_tokens import IGNORE_INDEX
from vitrail.tasks.vlm_task import VLMSettings, VLMTask

MROPE = {"head_dim": 16, "layout": "mrope", "sections": [4, 2, 2]}
# Every model kind of the task: a recipe, and changes of its model config.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "prefix": ("mini-vlm-llava", {}),
    "mrope": ("mini-vlm-llava", {"decoder": {"rotary": MROPE}, "rules": {"positions": "qwen2-vl"}}),
    "both ways": ("mini-vlm-llava", {"rules": {"bidirectional": ["image"]}}),
    "learned positions": (
        "mini-vlm-llava",
        {"decoder": {"learned_positions": 258, "rotary": {"head_dim": 16, "rotary_dim": 0}}},
    ),
    "condensed": ("vlm-qformer", {}),
    "towers": ("vlm-towers", {}),
    "codes": ("vlm-codes", {}),
    "expert": ("vlm-expert", {}),
    "deepstack": ("system-deepstack", {}),
    "voco": ("system-voco", {}),
    "experts": ("system-experts", {}),
    "gated, blind words skip": ("mini-vlm-gated", {}),
    "gated, blind words go on": ("mini-vlm-gated", {"decoder": {"fusion": {"without_image": "mlp"}}}),
}


@pytest.fixture(scope="module")
def words(atlas) -> Tokenizer:
    """With bos, so that a token precedes the image."""
    texts = build_qa_dataset(scenes_of(small("mini-vlm-llava"), atlas), 1).pieces.texts[1:]
    return Tokenizer.train(texts, 420, special_tokens=("<|endoftext|>", "<image>"), bos="<s>")


def merged(config: dict, changes: dict) -> dict:
    inner = {key: merged(config.get(key) or {}, new) for key, new in changes.items() if isinstance(new, dict)}
    return config | changes | inner


def task_of(name: str, changes: dict, atlas: Atlas, words: Tokenizer, **settings) -> VLMTask:
    plain = small(name).to_dict()
    plain["model"]["config"] = merged(plain["model"]["config"], merged({"decoder": {"layers": 2}}, changes))
    chosen = recipe.Recipe.from_dict(plain)
    model = randomize(recipe.build_model(chosen, words)).eval()
    chosen_settings = VLMSettings(**{"num_questions": 3, "question_kinds": KINDS, "max_length": 100} | settings)
    return VLMTask(model, {"scenes": scenes_of(chosen, atlas)}, words, chosen_settings)


def alone(task: VLMTask, pixels: Tensor, ids: Tensor) -> Tensor:
    """Hidden states (1, n, W) of the model for a stream of one image (1, C, S, S) and one turn (n,)."""
    model, lead = task.model, [text_part(task.row_template.ids[: task.row_template.num_prefix_ids])]
    if isinstance(model, CrossAttentionVLM):
        stream, shown = (
            build_stream([*lead, text_part([model.config.image_token_id]), text_part(ids)]),
            ImageViews(pixels),
        )
    else:
        cut = model.config.policy.layout(task.image_size, task.image_size)
        stream = build_stream([*lead, *model.config.make_parts(cut), text_part(ids)], model.config.rules)
        question = ids[: int((ids == task.eos_token_id).nonzero()[0])]
        shown = VisionInputs(pixels, (cut,), ([question],) if task.has_queries else ())
    return model.forward_hidden(pack_streams([stream], len(stream)), shown)[:, task.row_template.prefix_length :]


def hidden(task: VLMTask, index: Tensor) -> tuple[Any, Tensor]:
    made = made_of(task, {"scenes": index})
    return made, task.model.forward_rows(made.template, made.pixels, made.ids, made.question_ids, made.turn_starts)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_turns_do_not_attend_to_each_other(name, atlas, words):
    task, index = task_of(*MODELS[name], atlas, words), torch.arange(2)
    made, found = hidden(task, index)
    task.independent_turns = False
    other, together = hidden(task, index)
    assert torch.equal(made.ids, other.ids) and torch.equal(made.targets, other.targets)
    for b in range(len(index)):
        starts = made.turn_starts[b, made.targets[b] != IGNORE_INDEX].unique().tolist()
        assert starts[0] == 0 and len(starts) > 1
        for start in starts:
            own = made.turn_starts[b] == start
            wanted = alone(task, made.pixels[b : b + 1], made.ids[b, own])
            torch.testing.assert_close(found[b : b + 1, own], wanted, atol=1e-4, rtol=1e-3)
            same = torch.allclose(together[b : b + 1, own], wanted, atol=1e-4, rtol=1e-3)
            assert same == (start == 0)  # in one conversation only the first question is independent


@torch.no_grad()
def test_one_question_needs_no_mask(atlas, words):
    """Queries are fused with one question; a single question needs no attention mask."""
    task = task_of("vlm-fused", {}, atlas, words, num_questions=1)
    made, found = hidden(task, torch.arange(2))
    assert made.turn_starts is None
    for b in range(2):
        wanted = alone(task, made.pixels[b : b + 1], made.ids[b])
        torch.testing.assert_close(found[b : b + 1], wanted, atol=1e-4, rtol=1e-3)


@torch.no_grad()
def test_fused_questions_become_rows(atlas, words):
    """Each question of an image gives what it gives alone; targets are those of one row with all turns."""
    task, plain = (task_of(name, {}, atlas, words) for name in ("system-fused", "system-projector"))
    index, K = torch.arange(3), 3
    made, found = hidden(task, index)
    row = made_of(plain, {"scenes": index})
    assert len(made.pixels) == 3 and len(made.ids) == len(made.question_ids) == 3 * K and made.turn_starts is None
    assert task.row_length < plain.row_length
    for b in range(3):
        starts = row.turn_starts[b, row.targets[b] != IGNORE_INDEX].unique().tolist()
        for k, start in enumerate(starts):
            own, at = row.turn_starts[b] == start, b * K + k
            targets, ids = row.targets[b, own], row.ids[b, own]
            keep = int((targets != IGNORE_INDEX).nonzero().max()) + 1  # without the end and padding
            assert (
                made.targets[at][made.targets[at] != IGNORE_INDEX].tolist() == targets[targets != IGNORE_INDEX].tolist()
            )
            assert made.ids[at, :keep].tolist() == ids[:keep].tolist()
            wanted = alone(task, made.pixels[b : b + 1], ids[:keep])
            torch.testing.assert_close(found[at : at + 1, :keep], wanted, atol=1e-4, rtol=1e-3)
    batch = {"scenes": index}
    assert task.count_tokens(task.prepare_batch(batch)) > plain.count_tokens(plain.prepare_batch(batch))


TILE = {"tile_size": 16, "patch_size": 4}
NEWLINE = {"newline": True}
MERGER = {"kind": "merger", "in_features": 16, "out_features": 32, "merge": 2}
# Policies with several views or native sizes, for images of 24 × 48 pixels: changes of the model config.
POLICIES: dict[str, dict[str, Any]] = {
    "anyres": {"policy": {"policy": "anyres", "grids": [[1, 2], [2, 2]], **TILE}, **NEWLINE},
    "anyres, padding": {"policy": {"policy": "anyres", "grids": [[1, 1], [2, 2]], **TILE}, **NEWLINE},
    "hd9": {"policy": {"policy": "hd9", **TILE}, "connector": MERGER, **NEWLINE},
    "tiles": {"policy": {"policy": "tiles", "max_tiles": 4, "merge_size": 1, **TILE}},
    "tiles, voco": {"policy": {"policy": "tiles", "max_tiles": 4, "merge_size": 1, **TILE}, "voco_tokens": 2},
    "native": {"policy": {"policy": "naflex", "patch_size": 4, "max_patches": 40}, "position_embedding": False},
}


@pytest.mark.parametrize("name", POLICIES)
@torch.no_grad()
def test_rows_with_views_equal_packed_streams(name, atlas, words):
    """Views are those of the policy for PIL images, and rows give what a packed stream of the same image gives."""
    plain = small("system-projector").to_dict()
    config = plain["model"]["config"] = plain["model"]["config"] | POLICIES[name]
    config["decoder"]["layers"] = 2
    for stage in plain["stages"]:
        stage["trainable"] = ["connector"]
    plain["sources"]["scenes"]["scene"]["aspect_ratio"] = [2, 1]
    plain["sources"]["scenes"]["image_size"] = 24
    chosen = recipe.Recipe.from_dict(plain)
    model, source = randomize(recipe.build_model(chosen, words)).eval(), scenes_of(chosen, atlas)
    task = VLMTask(model, {"scenes": source}, words, VLMSettings(num_questions=2, question_kinds=KINDS, max_length=60))
    index = torch.arange(2)
    made, found = hidden(task, index)
    images = [Image.fromarray(one.permute(1, 2, 0).numpy()) for one in source.render_indices(index).pixels]
    lead = [text_part(task.row_template.ids[: task.row_template.num_prefix_ids])]
    for b, image in enumerate(images):
        shown = model.prepare_images([image])
        views = made.pixels[b] if made.pixels.ndim == 5 else made.pixels[b : b + 1]
        own = cut_patches(views, model.tower.config)[0][0] if name == "native" else views
        assert (own - shown.pixels).abs().max() < 2 * 3 / 255  # both resizes round
        own_turn = made.turn_starts[b] == 0
        parts = [*lead, *model.config.make_parts(shown.layouts[0]), text_part(made.ids[b, own_turn])]
        stream = build_stream(parts, model.config.rules)
        wanted = model.forward_hidden(pack_streams([stream], len(stream)), shown._replace(pixels=own))
        wanted = wanted[:, task.row_template.prefix_length :]
        torch.testing.assert_close(found[b : b + 1, own_turn], wanted, atol=1e-4, rtol=1e-3)
    batch = {"scenes": index}
    assert task.count_flops(batch) > 0
    losses = [task(one)["answers"] for one in (batch, task.fill_part(batch, "answers"))]
    torch.testing.assert_close(*losses)


def test_views_of_several_image_shapes_raise(atlas, words):
    plain = small("system-projector").to_dict()
    plain["model"]["config"] |= POLICIES["anyres"]
    chosen = recipe.Recipe.from_dict(plain)
    model, source = recipe.build_model(chosen, words), scenes_of(chosen, atlas)
    wide = SceneSource(source.config.replace(image_size=32), atlas, "wide")
    with pytest.raises(ConfigError, match=r"gives images of .* pixels different views"):
        VLMTask(model, {"scenes": source, "wide": wide}, words, VLMSettings(question_kinds=KINDS, num_questions=2))
    plain["model"]["config"]["policy"] |= {"grids": [[2, 4]], "max_tiles": 2}
    model = recipe.build_model(recipe.Recipe.from_dict(plain), words)
    with pytest.raises(ConfigError, match="do not support interpolated tokens"):
        VLMTask(model, {"scenes": source}, words, VLMSettings(question_kinds=KINDS, num_questions=2))


def test_images_with_one_and_several_turns_share_a_batch(atlas, words):
    plain = task_of("mini-vlm-llava", {}, atlas, words)
    source = make_named_source()
    task = VLMTask(plain.model, {"scenes": plain.datasets["scenes"].source, "named": source}, words, plain.settings)
    made = made_of(task, {"scenes": torch.arange(2), "named": torch.arange(2)})
    assert bool((made.turn_starts[:2] > 0).any()) and not bool((made.turn_starts[2:] > 0).any())
    assert (
        made_of(VLMTask(plain.model, {"named": source}, words, plain.settings), {"named": torch.arange(2)}).turn_starts
        is None
    )


def test_blank_inputs_have_one_turn(atlas, words):
    task, batch = task_of("mini-vlm-llava", {}, atlas, words), {"scenes": torch.arange(2)}
    losses = [task(one)["answers"] for one in (batch, task.fill_part(batch, "answers"))]
    torch.testing.assert_close(*losses)


def test_deepstack_with_packed_tower_raises(words):
    """Its images have different numbers of tokens, independent of turns."""
    tower = {"depth": 2, "num_heads": 2, "hidden_size": 16, "intermediate_size": 32, "patch_size": 4}
    tower |= {"out_hidden_size": 32, "deepstack_visual_indexes": [0]}
    decoder = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    decoder |= {"head_dim": 16, "num_key_value_heads": 2, "vocab_size": words.vocab_size}
    decoder |= {"rope_parameters": {"mrope_section": [4, 2, 2]}}
    marks = {"image_token_id": 1, "video_token_id": 2, "vision_start_token_id": 3, "vision_end_token_id": 4}
    model = VLM(FAMILIES["qwen3_vl"].from_hf_config({"vision_config": tower, "text_config": decoder} | marks))
    with pytest.raises(ConfigError, match="policy NativePolicy gives images different numbers of"):
        VLMTask(model, {}, words, VLMSettings())
