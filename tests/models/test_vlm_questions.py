"""Several questions about a picture whose tokens are fused with them: in one pass, turn by turn, and in training."""

from itertools import groupby

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.test_vlm import DECODER, WHOLE, asked, made, pictures
from vitrail.backbones.fusion import ExpertConfig
from vitrail.connectors import FusedConfig, ProjectorConfig
from vitrail.errors import TextError
from vitrail.models.rows import Rows, _places, turn_of
from vitrail.models.spoken import asked_of, standing
from vitrail.models.vlm import VLM, VLMConfig
from vitrail.stream import Rules, build, pack, split, words
from vitrail.stream.pack import rows

FUSED = FusedConfig(reads=16, gives=32, vocab=50, first=5, later=2, layers=2, width=24, heads=2, hidden=32)
BETWEEN = {"connector": ProjectorConfig(reads=16, gives=16), "queries": FUSED}
TALK = [[7, 8], [9], [4, 6, 5]]
ANSWERS = [[11, 12], [13], [14, 15, 16]]
CASES = {
    "plain": {},
    "expert": {"decoder": DECODER.with_(fusion=ExpertConfig())},
    "both ways": {"rules": Rules(both=("image",))},
    "unread": {"queries": FUSED.with_(question="never")},
}


def fused(case: str = "plain") -> VLM:
    return made(VLMConfig(**WHOLE | BETWEEN | CASES[case]))


def told(model: VLM, image, talk=TALK, answers=ANSWERS):
    """The stream of a talk, and its picture."""
    shown = model.prepare([image])
    groups = model.config.parts(shown.shapes[0], len(talk))
    parts = [words([3])]
    for group, question, answer in zip(groups, talk, answers, strict=True):
        parts += [group, words(question), words(answer, loss=True)]
    questions = ([torch.tensor(question) for question in talk],)
    return build(parts, model.config.rules), shown._replace(questions=questions)


def test_a_talk_is_its_turns():
    """With a cache that is read on, turn after turn, every logit is that of one pass over the whole talk."""
    model = fused()
    (image,) = pictures((30, 50))
    stream, shown = told(model, image)
    wanted = model(pack([stream], len(stream)), shown)[0]
    first, own = told(model, image, TALK[:1], ANSWERS[:1])
    cache = model.decoder.cache(1)
    found = [model.decoder.logits(model.hidden(rows([first]), own, cache=cache))]
    for n in (1, 2):
        soon = shown._replace(questions=([torch.tensor(question) for question in TALK[: n + 1]],))
        group = model.look(soon).blocks[0][-FUSED.groups(n + 1)[-1] :]  # what the new question has been fused with
        said = model.decoder.embed(torch.tensor([*TALK[n], *ANSWERS[n]]))
        found.append(model.decoder(embeds=torch.cat([group, said])[None], cache=cache))
    assert torch.allclose(torch.cat(found, 1)[0], wanted, atol=1e-4)


def test_what_is_asked_later_changes_nothing_before():
    """Neither the words of a later question nor that there is one; and pictures with other talks beside it."""
    model = fused()
    one, two = pictures((30, 50), (24, 24))
    stream, shown = told(model, one)
    whole = model(pack([stream], len(stream)), shown)[0]
    for n in (1, 2):
        part, own = told(model, one, TALK[:n], ANSWERS[:n])
        assert torch.allclose(model(pack([part], len(part)), own)[0], whole[: len(part)], atol=1e-4)
    other, own = told(model, one, [*TALK[:2], [1, 2]], [*ANSWERS[:2], [3]])
    changed = model(pack([other], len(other)), own)[0]
    before = len(told(model, one, TALK[:2], ANSWERS[:2])[0])
    assert torch.allclose(changed[:before], whole[:before], atol=1e-4)
    assert not torch.allclose(changed[before], whole[before], atol=1e-3)  # the first query of the third
    short, beside = told(model, two, TALK[1:2], ANSWERS[1:2])
    together = shown._replace(
        pixels=torch.cat([shown.pixels, beside.pixels]),
        shapes=(*shown.shapes, *beside.shapes),
        questions=(*shown.questions, *beside.questions),
    )
    batch = pack([stream, short], len(stream) + len(short))
    found = split(batch, model(batch, together))
    assert torch.allclose(found[0], whole, atol=1e-4)
    assert torch.allclose(found[1], model(pack([short], len(short)), beside)[0], atol=1e-4)


def test_the_first_block_of_a_picture_holds_all_its_groups():
    model = fused()
    (sample,), shown = asked(model, model.prepare(pictures((30, 50))), [TALK])
    assert [source.rows for source in sample.sources] == [5 + 2 + 2]
    assert [len(block) for block in model.look(shown).blocks] == [9]


# ---- rows of training --------------------------------------------------------------------------------------------


@settings(max_examples=100)
@given(st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=4), min_size=1, max_size=3), st.integers(1, 3))
def test_every_group_stands_before_its_turn(talks, m):
    """Whatever turns rows have: each place is taken once, words stay in order, and what no turn needs lies behind."""
    L, K = max(map(sum, talks)) + 2, 4
    since = torch.zeros(len(talks), L, dtype=torch.long)
    for b, sizes in enumerate(talks):
        starts = [sum(sizes[:n]) for n in range(len(sizes))]
        since[b] = torch.tensor([max(s for s in starts if s <= j) for j in range(L)])
    places, whose = _places(turn_of(since), [m] * (K - 1))
    for b, sizes in enumerate(talks):
        assert sorted(places[b].tolist()) == list(range(L + (K - 1) * m))
        wanted: list[tuple[str, int]] = []
        for n, size in enumerate(sizes):
            last = n == len(sizes) - 1
            wanted += [("query", n)] * m * (n > 0) + [("word", n)] * (size if not last else L - sum(sizes[:-1]))
        wanted += [("query", n) for n in range(len(sizes), K) for _ in range(m)]
        found = [("query", int(n)) if n else ("word", 0) for n in whose[b]]
        assert [kind for kind, _ in found] == [kind for kind, _ in wanted]
        assert [n for kind, n in found if kind == "query"] == [n for kind, n in wanted if kind == "query"]
        assert (places[b, :L].diff() > 0).all()


@pytest.mark.parametrize("case", CASES)
def test_training_reads_what_the_model_reads(case):
    """Talks of three questions, of two and of one, in rows of one shape, with gradients."""
    model = fused(case)
    images = pictures((24, 24), (24, 24), (24, 24))
    L, K, T = 14, 3, 3
    talks = [(TALK, ANSWERS), (TALK[1:], ANSWERS[1:]), (TALK[:1], ANSWERS[:1])]
    ids, since = torch.zeros(3, L, dtype=torch.long), torch.zeros(3, L, dtype=torch.long)
    told_of = torch.full((3, K, T), -1)
    for b, (questions, answers) in enumerate(talks):
        at = 0
        for n, (question, answer) in enumerate(zip(questions, answers, strict=True)):
            told_of[b, n, : len(question)] = torch.tensor(question)
            turn = torch.tensor([*question, *answer])
            ids[b, at : at + len(turn)], since[b, at:] = turn, at
            at += len(turn)
    grid = Rows(model, [3], L, K)
    shown = model.prepare(images)
    found = grid.hidden(grid.frame(torch.device("cpu")), shown.pixels, ids, told_of, since)
    assert grid.later == 4 and found.shape == (3, L, 32)
    losses = []
    for b, (questions, answers) in enumerate(talks):
        stream, own = told(model, images[b], questions, answers)
        text = (stream.kinds == 0).nonzero()[1:, 0]  # the lead aside
        wanted = model.hidden(pack([stream], len(stream)), own)[0, text]
        assert torch.allclose(found[b, : len(wanted)], wanted, atol=1e-4)
        losses.append((found[b, : len(wanted)].square().sum(), wanted.square().sum()))
    weights = [p for p in (*model.queries.parameters(), *model.connector.parameters()) if p.requires_grad]
    ours, theirs = (torch.autograd.grad(sum(side), weights, allow_unused=True) for side in zip(*losses, strict=True))
    for a, b in zip(ours, theirs, strict=True):
        none = [one is None or not one.any() for one in (a, b)]
        assert none[0] == none[1] and (none[0] or torch.allclose(a, b, rtol=1e-3, atol=1e-3))


def test_rows_cost_all_their_groups():
    model = fused()
    one, three = (Rows(model, [3], 14, n).work(2) for n in (1, 3))
    assert three.tokens - one.tokens == 2 * 4 and three.context - one.context == 2 * 4
    assert three.looks[2].tokens - one.looks[2].tokens == 2 * (4 + 2)  # two ends more


# ---- conversations -----------------------------------------------------------------------------------------------

PICTURE = {"type": "image"}


def said(text: str, *before) -> dict:
    return {"role": "user", "content": [*before, {"type": "text", "text": text}]}


def test_a_question_is_asked_of_every_picture_so_far():
    answer = {"role": "assistant", "content": "yes"}
    found = asked_of(
        [said("hello"), answer, said("this?", PICTURE), answer, said("that?", PICTURE), answer, said("all?")]
    )
    assert found.places == [(0, 0), (0, 1), (1, 0), (0, 2), (1, 1)]
    assert found.questions == [["this?", "that?", "all?"], ["that?", "all?"]]
    marks = [sum(part["type"] == "image" for part in one["content"]) for one in found.messages if one["role"] == "user"]
    assert marks == [0, 1, 2, 2]
    few = found.until(3)
    assert few.questions == [["this?", "that?"], ["that?"]] and few.places == found.places[:3]
    assert asked_of([said("this?", PICTURE)]).until(0).questions == []
    with pytest.raises(TextError, match="turn of the user"):
        asked_of([{"role": "assistant", "content": [PICTURE]}])


def test_groups_of_two_pictures_take_turns():
    """In the stream they alternate, and each picture fills its own from one block."""
    model = fused()
    answer = {"role": "assistant", "content": "yes"}
    talk = asked_of([said("a", PICTURE), answer, said("b", PICTURE), answer, said("c")])
    shown = model.prepare(pictures((30, 50), (24, 24)))
    marks = standing(model.config, shown.shapes, talk)
    stream = build([part for n, own in enumerate(marks) for part in (*own, words([20 + n]))], model.config.rules)
    assert [len(list(run)) for kind, run in groupby(stream.kinds.tolist()) if kind == 1] == [5, 2, 5, 2, 2]
    assert [source.rows for source in stream.sources] == [5 + 2 + 2, 5 + 2]
    told_of = tuple([torch.tensor([7 + n]) for n in range(len(own))] for own in talk.questions)
    logits = model(pack([stream], len(stream)), shown._replace(questions=told_of))
    blocks = model.look(shown._replace(questions=told_of)).blocks
    soft = torch.cat([blocks[0][:7], blocks[1][:5], blocks[0][7:], blocks[1][5:]])
    embeds = model.decoder.embed(stream.ids)
    embeds[stream.kinds == 1] = soft
    assert torch.allclose(logits, model.decoder(embeds=embeds[None]), atol=1e-4)
