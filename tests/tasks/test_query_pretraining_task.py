"""Query pretraining task: answers, losses by hand, trainable parts, and the saved model."""

import pytest
import torch
import torch.nn.functional as F

from helpers import randomize
from tasks.small_vlms import KINDS, made_of, scenes_of, small
from vitrail import hub
from vitrail.encoders import TextTowerConfig
from vitrail.errors import ConfigError
from vitrail.models.query_pretraining import QueryPretrainingConfig, QueryPretrainingModel
from vitrail.models.vlm import VLM
from vitrail.nn import AttentionConfig, BlockConfig, PlainMLPConfig
from vitrail.objectives.contrastive_loss import reference_clip_loss
from vitrail.tasks.query_pretraining_task import QueryPretrainingSettings, QueryPretrainingTask

BLOCK = BlockConfig(width=16, attention=AttentionConfig(heads=2), mlp=PlainMLPConfig(intermediate_size=20))
BATCH = {"scenes": torch.arange(6)}


@pytest.fixture
def make_task(atlas, words):
    def made(change=None, **settings) -> QueryPretrainingTask:
        chosen = small("vlm-fused")
        text = TextTowerConfig(
            vocab_size=420, layers=1, block=BLOCK, context_length=64, eos_token_id=words.eos_token_id
        ).replace(**(change or {}))
        config = QueryPretrainingConfig(vlm=chosen.build_model_config(), text=text, embed_dim=12, log_scale=1.0)
        settings = {"question_kinds": KINDS, "max_length": 48} | settings
        task = QueryPretrainingTask(
            randomize(QueryPretrainingModel(config), spread=0.1),
            {"scenes": scenes_of(chosen, atlas)},
            words,
            QueryPretrainingSettings(**settings),
        )
        task.model.eval()
        return task

    return made


def find_answers(ids: list[int], end: int, questions: int) -> list[list[int]]:
    """Tokens after every odd end token up to the next one, inclusive."""
    parts = [[]]
    for id in ids:
        parts[-1].append(id)
        if id == end:
            parts.append([])
    found = parts[1 : 2 * questions : 2]
    return found + [[]] * (questions - len(found))


@pytest.mark.parametrize("questions", [1, 3])
def test_answers_follow_their_questions(make_task, questions):
    task = make_task(num_questions=questions, max_length=64)
    made = made_of(task.vlm_task, {"scenes": torch.arange(20)})
    answers, labels = task._split_answers(made.ids, made.turn_starts)
    end = task.vlm_task.eos_token_id
    assert answers.shape == (20 * questions, 64)
    texts = [tuple(row[: row.index(end) + 1]) for row in answers.tolist()]
    wanted = [part for row in made.ids.tolist() for part in find_answers(row, end, questions)]
    whole = [(text, tuple(part)) for text, part in zip(texts, wanted, strict=True) if part[-1:] == [end]]
    assert len(whole) > 10 * questions and all(text == part for text, part in whole)  # other samples are truncated
    for text, label in zip(texts, labels.tolist(), strict=True):
        assert (label == -1) == (text == (end,))
        assert [other for other, same in zip(texts, labels.tolist(), strict=True) if same == label].count(text) >= 1
    assert len(set(texts)) == len(set(labels.tolist()))


@pytest.mark.parametrize("form", ["symmetric", "joint"])
def test_losses_match_their_definitions(make_task, form):
    task = make_task(contrastive_form=form)
    found, made, model = task(BATCH), made_of(task.vlm_task, BATCH), task.model
    groups = model.vlm.queries.encode_queries(model.vlm.encode_views(made.pixels), None, [made.question_ids[:, 0]])
    answers, labels = task._split_answers(made.ids, made.turn_starts)
    u = F.normalize(model.end_projection(groups.end_states[:, 0]), dim=-1)
    v = F.normalize(model.text_projection(model.text.forward_pooled(answers)), dim=-1)
    own, scale = labels[:, None] == labels, model.log_scale.exp()
    wanted = reference_clip_loss(u, v, scale, own)
    if form == "joint":
        logp = (scale * u @ v.T).flatten().log_softmax(0).view(6, 6)
        wanted = -logp[own].mean()
    torch.testing.assert_close(found["contrast"], wanted * 6, rtol=1e-4, atol=1e-4)
    y = F.normalize(groups.queries[0], dim=-1)
    wanted = sum(((one @ one.T - torch.eye(len(one))) ** 2).sum() / len(one) for one in y)
    torch.testing.assert_close(found["orthogonal"], wanted, rtol=1e-4, atol=1e-4)
    assert task.count_loss_terms(BATCH) == {"contrast": 6, "orthogonal": 6} and task.count_flops(BATCH) > 0


def test_trainable_parts_and_saved_model(make_task, tmp_path):
    task = make_task(num_questions=2, max_length=64)
    sum(task(BATCH).values()).backward()
    idle = {"vlm.decoder", "vlm.queries.project"}  # needed by the language model only
    for name, p in task.model.named_parameters():
        assert (p.grad is None) == any(name.startswith(part) for part in idle), name
    hub.save(task.model.final_model, tmp_path, task.chat_tokenizer)
    again = hub.load(tmp_path)
    assert isinstance(again, VLM) and torch.equal(again.queries.end, task.model.vlm.queries.end)


def test_queries_learn_to_separate_answers(make_task):
    task = make_task()
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
    ("change", "message"),
    [
        ({"change": {"eos_token_id": 7}}, "the text tower"),
        ({"change": {"context_length": 8}}, "exceeds the text tower"),
        ({"orthogonality_weight": -1.0}, "orthogonality_weight"),
    ],
)
def test_invalid_arguments_raise(make_task, change, message):
    with pytest.raises(ConfigError, match=message):
        make_task(**change)


def test_model_without_queries_raises():
    plain = small("mini-vlm-llava").build_model_config()
    text = TextTowerConfig(vocab_size=420, layers=1, block=BLOCK, eos_token_id=0)
    with pytest.raises(ConfigError, match="queries"):
        QueryPretrainingConfig(vlm=plain, text=text, embed_dim=8)
