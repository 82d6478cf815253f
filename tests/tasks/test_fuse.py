"""The token-scaling paper's first stage: which answers are read, each loss by hand, who learns, and what is kept."""

import pytest
import torch
import torch.nn.functional as F

from helpers import randomize
from tasks.small_vlms import KINDS, made_of, scenes_of, small
from vitrail import hub
from vitrail.encoders import TextConfig
from vitrail.errors import ConfigError
from vitrail.models.answered import Answered, AnsweredConfig
from vitrail.models.vlm import VLM
from vitrail.nn import AttentionConfig, BlockConfig, PlainConfig
from vitrail.objectives.contrastive import plain_clip_loss
from vitrail.tasks.fuse import FuseSettings, FuseTask

BLOCK = BlockConfig(width=16, attention=AttentionConfig(heads=2), mlp=PlainConfig(hidden=20))
BATCH = {"scenes": torch.arange(6)}


@pytest.fixture
def make(atlas, words):
    def made(change=None, **settings) -> FuseTask:
        chosen = small("vlm-fused")
        text = TextConfig(vocab=420, layers=1, block=BLOCK, context=64, eos=words.eos).with_(**(change or {}))
        config = AnsweredConfig(vlm=chosen.model_config(), text=text, embed=12, log_scale=1.0)
        settings = {"kinds": KINDS, "length": 48} | settings
        task = FuseTask(
            randomize(Answered(config), spread=0.1),
            {"scenes": scenes_of(chosen, atlas)},
            words,
            FuseSettings(**settings),
        )
        task.model.eval()
        return task

    return made


def said(ids: list[int], end: int, questions: int) -> list[list[int]]:
    """What stands between every second pair of ends, with the end behind it."""
    parts = [[]]
    for id in ids:
        parts[-1].append(id)
        if id == end:
            parts.append([])
    found = parts[1 : 2 * questions : 2]
    return found + [[]] * (questions - len(found))


@pytest.mark.parametrize("questions", [1, 3])
def test_the_answers_are_what_is_said_behind_each_question(make, questions):
    task = make(questions=questions, length=64)
    made = made_of(task.talks, {"scenes": torch.arange(20)})
    answers, labels = task._answers(made.ids, made.since)
    end = task.talks.end
    assert answers.shape == (20 * questions, 64)
    texts = [tuple(row[: row.index(end) + 1]) for row in answers.tolist()]
    wanted = [part for row in made.ids.tolist() for part in said(row, end, questions)]
    whole = [(text, tuple(part)) for text, part in zip(texts, wanted, strict=True) if part[-1:] == [end]]
    assert len(whole) > 10 * questions and all(text == part for text, part in whole)  # others are cut by the length
    for text, label in zip(texts, labels.tolist(), strict=True):
        assert (label == -1) == (text == (end,))
        assert [other for other, same in zip(texts, labels.tolist(), strict=True) if same == label].count(text) >= 1
    assert len(set(texts)) == len(set(labels.tolist()))


@pytest.mark.parametrize("form", ["symmetric", "joint"])
def test_each_loss_is_what_it_says(make, form):
    task = make(form=form)
    found, made, model = task(BATCH), made_of(task.talks, BATCH), task.model
    groups = model.vlm.queries.fuse(model.vlm.soft(made.pixels), None, [made.asked[:, 0]])
    answers, labels = task._answers(made.ids, made.since)
    u = F.normalize(model.end_projection(groups.ends[:, 0]), dim=-1)
    v = F.normalize(model.text_projection(model.text.pool(answers)), dim=-1)
    own, scale = labels[:, None] == labels, model.log_scale.exp()
    wanted = plain_clip_loss(u, v, scale, own)
    if form == "joint":
        logp = (scale * u @ v.T).flatten().log_softmax(0).view(6, 6)
        wanted = -logp[own].mean()
    torch.testing.assert_close(found["contrast"], wanted * 6, rtol=1e-4, atol=1e-4)
    y = F.normalize(groups.queries[0], dim=-1)
    wanted = sum(((one @ one.T - torch.eye(len(one))) ** 2).sum() / len(one) for one in y)
    torch.testing.assert_close(found["orthogonal"], wanted, rtol=1e-4, atol=1e-4)
    assert task.counts(BATCH) == {"contrast": 6, "orthogonal": 6} and task.flops(BATCH) > 0


def test_all_learn_but_the_language_model_and_what_is_kept_has_no_text_tower(make, tmp_path):
    task = make(questions=2, length=64)
    sum(task(BATCH).values()).backward()
    idle = {"vlm.decoder", "vlm.queries.project"}  # which only the language model needs
    for name, p in task.model.named_parameters():
        assert (p.grad is None) == any(name.startswith(part) for part in idle), name
    hub.save(task.model.product, tmp_path, task.spoken)
    again = hub.load(tmp_path)
    assert isinstance(again, VLM) and torch.equal(again.queries.end, task.model.vlm.queries.end)


def test_queries_learn_to_tell_answers_apart(make):
    task = make()
    optim = torch.optim.AdamW([p for p in task.model.parameters() if p.requires_grad], lr=3e-3)
    losses = []
    for _ in range(6):
        found = task(BATCH)
        losses.append({name: loss.item() for name, loss in found.items()})
        optim.zero_grad()
        sum(found.values()).backward()
        optim.step()
    assert all(losses[-1][name] < losses[0][name] for name in losses[0])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"change": {"eos": 7}}, "text.eos to"),
        ({"change": {"context": 8}}, "context to 48"),
        ({"orthogonal": -1.0}, "0 or"),
    ],
)
def test_what_cannot_be_is_refused(make, change, says):
    with pytest.raises(ConfigError, match=says):
        make(**change)


def test_a_model_without_queries_is_refused():
    plain = small("mini-vlm-llava").model_config()
    text = TextConfig(vocab=420, layers=1, block=BLOCK, eos=0)
    with pytest.raises(ConfigError, match="queries"):
        AnsweredConfig(vlm=plain, text=text, embed=8)
