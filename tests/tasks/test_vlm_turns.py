"""Questions about a picture that are apart: each is read as if it alone were asked, whatever the model."""

from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import randomize
from tasks.small_vlms import KINDS, made_of, scenes_of, small
from tasks.test_contrast import named
from vitrail import recipe
from vitrail.data.scenes.sprites import Atlas
from vitrail.data.talks import talks
from vitrail.errors import ConfigError
from vitrail.hub.families import FAMILIES
from vitrail.models.looking import LookingVLM, Views
from vitrail.models.vlm import VLM, Shown
from vitrail.processing.text import Tokenizer
from vitrail.stream import build, pack
from vitrail.stream import words as text_part
from vitrail.tasks.told import IGNORED
from vitrail.tasks.vlm import VLMSettings, VLMTask

MROPE = {"head_dim": 16, "layout": "mrope", "sections": [4, 2, 2]}
# Every kind of model that the task trains: a recipe, and what is changed in its model's config.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "prefix": ("mini-vlm-llava", {}),
    "mrope": ("mini-vlm-llava", {"decoder": {"rotary": MROPE}, "rules": {"positions": "qwen2-vl"}}),
    "both ways": ("mini-vlm-llava", {"rules": {"both": ["image"]}}),
    "learned positions": ("mini-vlm-llava", {"decoder": {"learned": 258, "rotary": {"head_dim": 16, "dim": 0}}}),
    "condensed": ("vlm-qformer", {}),
    "towers": ("vlm-towers", {}),
    "codes": ("vlm-codes", {}),
    "expert": ("vlm-expert", {}),
    "gated, blind words skip": ("mini-vlm-gated", {}),
    "gated, blind words go on": ("mini-vlm-gated", {"decoder": {"fusion": {"blind": "mlp"}}}),
}


@pytest.fixture(scope="module")
def words(atlas) -> Tokenizer:
    """With a bos, so that something comes before the picture too."""
    texts = talks(scenes_of(small("mini-vlm-llava"), atlas), 1).pieces.texts[1:]
    return Tokenizer.train(texts, 420, specials=("<|endoftext|>", "<image>"), bos="<s>")


def merged(config: dict, changes: dict) -> dict:
    inner = {key: merged(config.get(key) or {}, new) for key, new in changes.items() if isinstance(new, dict)}
    return config | changes | inner


def task_of(name: str, changes: dict, atlas: Atlas, words: Tokenizer, **settings) -> VLMTask:
    plain = small(name).plain()
    plain["model"]["config"] = merged(plain["model"]["config"], merged({"decoder": {"layers": 2}}, changes))
    chosen = recipe.Recipe.read(plain)
    model = randomize(recipe._model(chosen, words)).eval()
    chosen_settings = VLMSettings(**{"questions": 3, "kinds": KINDS, "length": 100} | settings)
    return VLMTask(model, {"scenes": scenes_of(chosen, atlas)}, words, chosen_settings)


def alone(task: VLMTask, pixels: Tensor, ids: Tensor) -> Tensor:
    """What the model itself makes of a stream of one picture (1, C, S, S) and one turn (n,): (1, n, W)"""
    model, lead = task.model, [text_part(task.rows.lead)]
    if isinstance(model, LookingVLM):
        stream, shown = build([*lead, text_part([model.config.mark]), text_part(ids)]), Views(pixels)
    else:
        cut = model.config.policy.cut(task.rows.side, task.rows.side)
        stream = build([*lead, *model.config.parts(cut), text_part(ids)], model.config.rules)
        question = ids[: int((ids == task.end).nonzero()[0])]
        shown = Shown(pixels, (cut,), ([question],) if task.fused else ())
    return model.hidden(pack([stream], len(stream)), shown)[:, task.rows.before :]


def hidden(task: VLMTask, index: Tensor) -> tuple[Any, Tensor]:
    made = made_of(task, {"scenes": index})
    return made, task.rows.hidden(made.frame, made.pixels, made.ids, made.asked, made.since)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_each_turn_is_as_if_it_alone_were_asked(name, atlas, words):
    task, index = task_of(*MODELS[name], atlas, words), torch.arange(2)
    made, found = hidden(task, index)
    task.apart = False
    other, together = hidden(task, index)
    assert torch.equal(made.ids, other.ids) and torch.equal(made.targets, other.targets)
    for b in range(len(index)):
        starts = made.since[b, made.targets[b] != IGNORED].unique().tolist()
        assert starts[0] == 0 and len(starts) > 1
        for start in starts:
            own = made.since[b] == start
            wanted = alone(task, made.pixels[b : b + 1], made.ids[b, own])
            torch.testing.assert_close(found[b : b + 1, own], wanted, atol=1e-4, rtol=1e-3)
            same = torch.allclose(together[b : b + 1, own], wanted, atol=1e-4, rtol=1e-3)
            assert same == (start == 0)  # in one conversation only the first knows of no other


@torch.no_grad()
def test_one_question_is_a_plain_row(atlas, words):
    """Queries are fused with one question; and where none is asked beside it, kernels need no mask."""
    task = task_of("vlm-fused", {}, atlas, words, questions=1)
    made, found = hidden(task, torch.arange(2))
    assert made.since is None
    for b in range(2):
        wanted = alone(task, made.pixels[b : b + 1], made.ids[b])
        torch.testing.assert_close(found[b : b + 1], wanted, atol=1e-4, rtol=1e-3)


def test_pictures_of_one_turn_and_of_several_are_one_batch(atlas, words):
    plain = task_of("mini-vlm-llava", {}, atlas, words)
    source = named()
    task = VLMTask(plain.model, {"scenes": plain.talks["scenes"].source, "named": source}, words, plain.settings)
    made = made_of(task, {"scenes": torch.arange(2), "named": torch.arange(2)})
    assert bool((made.since[:2] > 0).any()) and not bool((made.since[2:] > 0).any())
    assert (
        made_of(VLMTask(plain.model, {"named": source}, words, plain.settings), {"named": torch.arange(2)}).since
        is None
    )


def test_a_blank_has_one_turn(atlas, words):
    task, batch = task_of("mini-vlm-llava", {}, atlas, words), {"scenes": torch.arange(2)}
    losses = [task(one)["answers"] for one in (batch, task.fill(batch, "answers"))]
    torch.testing.assert_close(*losses)


def test_deepstack_is_refused_with_its_packed_tower(words):
    """Its pictures have unequal numbers of tokens, whatever the turns."""
    tower = {"depth": 2, "num_heads": 2, "hidden_size": 16, "intermediate_size": 32, "patch_size": 4}
    tower |= {"out_hidden_size": 32, "deepstack_visual_indexes": [0]}
    decoder = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    decoder |= {"head_dim": 16, "num_key_value_heads": 2, "vocab_size": words.size}
    decoder |= {"rope_parameters": {"mrope_section": [4, 2, 2]}}
    marks = {"image_token_id": 1, "video_token_id": 2, "vision_start_token_id": 3, "vision_end_token_id": 4}
    model = VLM(FAMILIES["qwen3_vl"].read({"vision_config": tower, "text_config": decoder} | marks))
    with pytest.raises(ConfigError, match="Native gives pictures of unequal numbers"):
        VLMTask(model, {}, words, VLMSettings())
