"""Several questions about an image with fused queries: in one pass, turn by turn, and in training."""

from itertools import groupby

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.test_vlm import DECODER, WHOLE, asked, made, pictures
from vitrail.backbones.fusion import VisualExpertConfig
from vitrail.connectors import FusedQueryConfig, ProjectorConfig
from vitrail.errors import TextError
from vitrail.models.chat_layout import build_image_parts, place_questions
from vitrail.models.vlm import VLM, VLMConfig
from vitrail.models.vlm_cost import make_row_workload
from vitrail.stream import StreamRules, build_stream, count_turns, pack_streams, split_by_sample, text_part
from vitrail.stream.fixed_shape import interleave_queries
from vitrail.stream.packing import pad_streams

FUSED = FusedQueryConfig(
    in_features=16,
    out_features=32,
    vocab_size=50,
    first_queries=5,
    later_queries=2,
    layers=2,
    width=24,
    heads=2,
    intermediate_size=32,
)
BETWEEN = {"connector": ProjectorConfig(in_features=16, out_features=16), "queries": FUSED}
TALK = [[7, 8], [9], [4, 6, 5]]
ANSWERS = [[11, 12], [13], [14, 15, 16]]
CASES = {
    "plain": {},
    "expert": {"decoder": DECODER.replace(fusion=VisualExpertConfig())},
    "both ways": {"rules": StreamRules(bidirectional=("image",))},
    "unread": {"queries": FUSED.replace(question_mode="never")},
}


def fused(case: str = "plain") -> VLM:
    return made(VLMConfig(**WHOLE | BETWEEN | CASES[case]))


def result(model: VLM, image, conversation=TALK, answers=ANSWERS):
    """Stream of a conversation, and its image."""
    shown = model.prepare_images([image])
    groups = model.config.make_parts(shown.layouts[0], len(conversation))
    parts = [text_part([3])]
    for group, question, answer in zip(groups, conversation, answers, strict=True):
        parts += [group, text_part(question), text_part(answer, loss_mask=True)]
    questions = ([torch.tensor(question) for question in conversation],)
    return build_stream(parts, model.config.rules), shown._replace(questions=questions)


def test_turn_by_turn_equals_one_pass():
    """With a cache, logits turn by turn equal those of one pass over the conversation."""
    model = fused()
    (image,) = pictures((30, 50))
    stream, shown = result(model, image)
    wanted = model(pack_streams([stream], len(stream)), shown)[0]
    first, own = result(model, image, TALK[:1], ANSWERS[:1])
    cache = model.decoder.make_cache(1)
    found = [model.decoder.compute_logits(model.forward_hidden(pad_streams([first]), own, cache=cache))]
    for n in (1, 2):
        soon = shown._replace(questions=([torch.tensor(question) for question in TALK[: n + 1]],))
        group = model.encode_images(soon).features[0][
            -FUSED.queries_per_question(n + 1)[-1] :
        ]  # what the new question has been fused with
        output = model.decoder.embed(torch.tensor([*TALK[n], *ANSWERS[n]]))
        found.append(model.decoder(embeds=torch.cat([group, output])[None], cache=cache))
    assert torch.allclose(torch.cat(found, 1)[0], wanted, atol=1e-4)


def test_later_questions_do_not_change_earlier_logits():
    """A later question does not change earlier logits, also with other conversations in the batch."""
    model = fused()
    one, two = pictures((30, 50), (24, 24))
    stream, shown = result(model, one)
    whole = model(pack_streams([stream], len(stream)), shown)[0]
    for n in (1, 2):
        part, own = result(model, one, TALK[:n], ANSWERS[:n])
        assert torch.allclose(model(pack_streams([part], len(part)), own)[0], whole[: len(part)], atol=1e-4)
    other, own = result(model, one, [*TALK[:2], [1, 2]], [*ANSWERS[:2], [3]])
    changed = model(pack_streams([other], len(other)), own)[0]
    before = len(result(model, one, TALK[:2], ANSWERS[:2])[0])
    assert torch.allclose(changed[:before], whole[:before], atol=1e-4)
    assert not torch.allclose(changed[before], whole[before], atol=1e-3)  # the first query of the third
    short, neighbour = result(model, two, TALK[1:2], ANSWERS[1:2])
    together = shown._replace(
        pixels=torch.cat([shown.pixels, neighbour.pixels]),
        layouts=(*shown.layouts, *neighbour.layouts),
        questions=(*shown.questions, *neighbour.questions),
    )
    batch = pack_streams([stream, short], len(stream) + len(short))
    found = split_by_sample(batch, model(batch, together))
    assert torch.allclose(found[0], whole, atol=1e-4)
    assert torch.allclose(found[1], model(pack_streams([short], len(short)), neighbour)[0], atol=1e-4)


def test_first_part_has_all_query_groups():
    model = fused()
    (sample,), shown = asked(model, model.prepare_images(pictures((30, 50))), [TALK])
    assert [source.rows for source in sample.sources] == [5 + 2 + 2]
    assert [len(block) for block in model.encode_images(shown).features] == [9]


# ---- rows of training --------------------------------------------------------------------------------------------


@settings(max_examples=100)
@given(st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=4), min_size=1, max_size=3), st.integers(1, 3))
def test_query_positions(conversations, m):
    """Every position is used once, text keeps its order, and unused queries are at the end."""
    L, K = max(map(sum, conversations)) + 2, 4
    since = torch.zeros(len(conversations), L, dtype=torch.long)
    for b, sizes in enumerate(conversations):
        starts = [sum(sizes[:n]) for n in range(len(sizes))]
        since[b] = torch.tensor([max(s for s in starts if s <= j) for j in range(L)])
    places, whose = interleave_queries(count_turns(since), [m] * (K - 1))
    for b, sizes in enumerate(conversations):
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
def test_fixed_shape_training_equals_the_model(case):
    """Conversations of three, two and one question in rows of one shape, with gradients."""
    model = fused(case)
    images = pictures((24, 24), (24, 24), (24, 24))
    L, K, T = 14, 3, 3
    conversations = [(TALK, ANSWERS), (TALK[1:], ANSWERS[1:]), (TALK[:1], ANSWERS[:1])]
    ids, since = torch.zeros(3, L, dtype=torch.long), torch.zeros(3, L, dtype=torch.long)
    told_of = torch.full((3, K, T), -1)
    for b, (questions, answers) in enumerate(conversations):
        at = 0
        for n, (question, answer) in enumerate(zip(questions, answers, strict=True)):
            told_of[b, n, : len(question)] = torch.tensor(question)
            turn = torch.tensor([*question, *answer])
            ids[b, at : at + len(turn)], since[b, at:] = turn, at
            at += len(turn)
    template = model.make_row_template([3], L, K)
    shown = model.prepare_images(images)
    found = model.forward_rows(template, shown.pixels, ids, told_of, since)
    assert template.num_later_queries == 4 and found.shape == (3, L, 32)
    losses = []
    for b, (questions, answers) in enumerate(conversations):
        stream, own = result(model, images[b], questions, answers)
        text = (stream.kinds == 0).nonzero()[1:, 0]  # the lead aside
        wanted = model.forward_hidden(pack_streams([stream], len(stream)), own)[0, text]
        assert torch.allclose(found[b, : len(wanted)], wanted, atol=1e-4)
        losses.append((found[b, : len(wanted)].square().sum(), wanted.square().sum()))
    weights = [p for p in (*model.queries.parameters(), *model.connector.parameters()) if p.requires_grad]
    ours, theirs = (torch.autograd.grad(sum(side), weights, allow_unused=True) for side in zip(*losses, strict=True))
    for a, b in zip(ours, theirs, strict=True):
        none = [one is None or not one.any() for one in (a, b)]
        assert none[0] == none[1] and (none[0] or torch.allclose(a, b, rtol=1e-3, atol=1e-3))


def test_fixed_shape_workload():
    model = fused()
    one, three = (make_row_workload(model, model.make_row_template([3], 14, n), 2) for n in (1, 3))
    assert three.tokens - one.tokens == 2 * 4 and three.context_tokens - one.context_tokens == 2 * 4
    assert three.vision_workloads[2].tokens - one.vision_workloads[2].tokens == 2 * (4 + 2)  # two ends more


# ---- conversations -----------------------------------------------------------------------------------------------

PICTURE = {"type": "image"}


def output(text: str, *before) -> dict:
    return {"role": "user", "content": [*before, {"type": "text", "text": text}]}


def test_questions_apply_to_all_earlier_images():
    answer = {"role": "assistant", "content": "yes"}
    found = place_questions(
        [output("hello"), answer, output("this?", PICTURE), answer, output("that?", PICTURE), answer, output("all?")]
    )
    assert found.placements == [(0, 0), (0, 1), (1, 0), (0, 2), (1, 1)]
    assert found.questions == [["this?", "that?", "all?"], ["that?", "all?"]]
    marks = [sum(part["type"] == "image" for part in one["content"]) for one in found.messages if one["role"] == "user"]
    assert marks == [0, 1, 2, 2]
    few = found.truncate_placements(3)
    assert few.questions == [["this?", "that?"], ["that?"]] and few.placements == found.placements[:3]
    assert place_questions([output("this?", PICTURE)]).truncate_placements(0).questions == []
    with pytest.raises(TextError, match="user turn"):
        place_questions([{"role": "assistant", "content": [PICTURE]}])


def test_queries_of_two_images_alternate():
    """Queries of two images alternate in the stream, and each image has one block of features."""
    model = fused()
    answer = {"role": "assistant", "content": "yes"}
    conversation = place_questions([output("a", PICTURE), answer, output("b", PICTURE), answer, output("c")])
    shown = model.prepare_images(pictures((30, 50), (24, 24)))
    marks = build_image_parts(model.config, shown.layouts, conversation)
    stream = build_stream(
        [part for n, own in enumerate(marks) for part in (*own, text_part([20 + n]))], model.config.rules
    )
    assert [len(list(run)) for kind, run in groupby(stream.kinds.tolist()) if kind == 1] == [5, 2, 5, 2, 2]
    assert [source.rows for source in stream.sources] == [5 + 2 + 2, 5 + 2]
    told_of = tuple([torch.tensor([7 + n]) for n in range(len(own))] for own in conversation.questions)
    logits = model(pack_streams([stream], len(stream)), shown._replace(questions=told_of))
    blocks = model.encode_images(shown._replace(questions=told_of)).features
    soft = torch.cat([blocks[0][:7], blocks[1][:5], blocks[0][7:], blocks[1][5:]])
    embeds = model.decoder.embed(stream.ids)
    embeds[stream.kinds == 1] = soft
    assert torch.allclose(logits, model.decoder(embeds=embeds[None]), atol=1e-4)
