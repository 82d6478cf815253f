"""Parts become one stream: order, kinds, ids, spans, loss, and what fills the places."""

import pytest
import torch

from vitrail.errors import ConfigError, StreamError
from vitrail.processing.grid import Grid
from vitrail.processing.resolution import named
from vitrail.processing.text import Tokenizer
from vitrail.stream import (
    KINDS,
    Part,
    Rules,
    actions,
    build,
    patch_by_patch,
    patch_times,
    picture,
    queries,
    stamp,
    video,
    words,
)

GRID = Grid(h=4, w=6, merge=2)  # 2 × 3 tokens


def kinds(stream) -> list[str]:
    names = {kind.id: name for name, kind in KINDS.items()}
    return [names[k] for k in stream.kinds.tolist()]


def test_every_kind_in_any_order():
    parts = [
        queries(2),
        words([5, 6], loss=[False, True]),
        video(Grid(t=2, h=2, w=2, merge=2)),
        picture(GRID),
        actions([30, 31], loss=True),
        picture(4),
        words([7]),
    ]
    stream = build(parts, Rules(fill=9, vocab=32))
    expected = ["query"] * 2 + ["text"] * 2 + ["video"] * 2 + ["image"] * 6 + ["action"] * 2 + ["image"] * 4 + ["text"]
    assert kinds(stream) == expected
    assert stream.ids.tolist() == [9, 9, 5, 6, 9, 9, *[9] * 6, 30, 31, *[9] * 4, 7]
    assert stream.loss.nonzero()[:, 0].tolist() == [3, 12, 13] and stream.learnt == 3
    assert stream.source.tolist() == [0, 0, -1, -1, 1, 1, *[2] * 6, -1, -1, *[3] * 4, -1]
    assert stream.row.tolist() == [0, 1, -1, -1, 0, 1, *range(6), -1, -1, *range(4), -1]
    assert [source[:2] for source in stream.sources] == [("query", 2), ("video", 2), ("image", 6), ("image", 4)]
    assert not stream.spans.any()  # causal unless it is asked for


def test_spans():
    rules = Rules(both=("image",))
    parts = [picture(GRID), picture(2), words([1]), picture(3, both=False), video(1), video(2, both=True)]
    spans = build(parts, rules).spans.tolist()
    assert spans == [1] * 6 + [2] * 2 + [0] + [0] * 3 + [0] + [3] * 2  # neighbours stay apart

    prefix = [picture(GRID, both="prefix"), words([1, 2], both="prefix"), words([3], loss=True)]
    assert build(prefix).spans.tolist() == [1] * 8 + [0]
    with pytest.raises(StreamError, match=r"part 2 .* 'prefix' was left and is entered again"):
        build([picture(2, both="prefix"), words([1]), words([2], both="prefix")], name="split")


def test_a_loss_that_sees_its_answer_is_refused():
    codes = picture(GRID, ids=range(6), loss=True)
    assert build([words([1]), codes]).learnt == 6
    with pytest.raises(StreamError, match=r"drawn, part 1 \(image, 2×3\): a loss inside a span") as caught:
        build([words([1]), codes], Rules(both=("image",)), name="drawn")
    assert "both=False" in caught.value.remedy
    first = picture(GRID, ids=range(6), loss=[True] + [False] * 5)  # the word before it foretells it, from outside
    assert build([words([1]), first], Rules(both=("image",))).learnt == 1


def test_newlines_by_id_or_from_the_learned_table():
    cut = named("llava-next").cut(336, 672)
    rows = cut.spans[1].size[0]
    learned = build([picture(cut)])
    assert [source[:2] for source in learned.sources] == [("newline", 1), ("image", cut.tokens - rows)]
    newline = learned.source == 0
    assert int(newline.sum()) == rows and set(learned.row[newline].tolist()) == {0}
    assert learned.row[~newline].tolist() == list(range(cut.tokens - rows))
    spelled = build([picture(cut, newline=13)], Rules(fill=2))
    assert (spelled.ids == 13).tolist() == newline.tolist() and (spelled.ids[~newline] == 2).all()
    hd9 = build([picture(2), picture(named("hd9").cut(300, 400))])
    assert [source[:2] for source in hd9.sources] == [("image", 2), ("newline", 1), ("image", 1440)]
    assert hd9.source[:2].tolist() == [0, 0] and (hd9.source[2:].view(10, 145)[:, -1] == 1).all()
    codes = build([picture(cut, ids=[5] * (cut.tokens - rows), loss=True)])
    assert torch.equal(codes.loss, ~newline)  # the learned newline among codes has no id to learn


def test_a_timestamped_video_is_one_block_of_features():
    tokenizer = Tokenizer.train(["a pane of glass, seconds, 0.5 1.5"], vocab_size=300)
    tokenizer.add_specials(["<|vision_start|>", "<|vision_end|>"])
    frames = [0.25, 0.75, 1.25, 1.75, 2.25]
    times = patch_times(frames)
    assert times == [0.5, 1.5, 2.25]
    stamps = [stamp(t) + "<|vision_start|>" for t in times]
    assert stamps[0] == "<0.5 seconds><|vision_start|>"
    clip = video(Grid(t=3, h=4, w=4, merge=2), seconds=1.0)
    before = [words(tokenizer.encode(text)) for text in stamps]
    stream = build(patch_by_patch(clip, before, after=[words(tokenizer.encode("<|vision_end|>"))]))
    assert [source[:2] for source in stream.sources] == [("video", 12)]
    assert stream.row[stream.source == 0].tolist() == list(range(12))
    assert tokenizer.decode(stream.ids[stream.source < 0].tolist()) == "".join(s + "<|vision_end|>" for s in stamps)


@pytest.mark.parametrize(
    ("seconds", "plain", "clock"),
    [
        (3, "<3.0 seconds>", "<00:00:03.0>"),
        (0.25, "<0.2 seconds>", "<00:00:00.2>"),
        (59.96, "<60.0 seconds>", "<00:01:00.0>"),
        (7384.5, "<7384.5 seconds>", "<02:03:04.5>"),
    ],
)
def test_stamps(seconds, plain, clock):
    assert stamp(seconds) == plain and stamp(seconds, "hms") == clock


def test_equality():
    one, other = (build([words([1, 2]), picture(GRID)], name="a") for _ in range(2))
    assert one == other
    assert one != build([words([1, 3]), picture(GRID)], name="a")
    assert one != build([words([1, 2]), picture(GRID)], name="b")


@pytest.mark.parametrize(
    ("parts", "rules", "says"),
    [
        ([], {}, "s-7 is empty"),
        ([words([])], {}, "s-7 is empty"),
        ([words([1]), words([2, 40])], {"vocab": 40}, r"part 1 \(text, 2 tokens\): token 1 has id 40"),
        ([words([1, -1])], {}, "token 1 has id -1"),
        ([picture(GRID, newline=99, ids=range(6))], {"vocab": 3}, "token 3 has id 3"),
        ([picture(GRID, ids=range(5))], {}, r"part 0 \(image, 2×3\): expected 6 ids, got 5"),
        ([words([1, 2], loss=[True])], {}, "expected 2 loss flags, got 1"),
        ([picture(GRID, loss=[True] * 6)], {}, "a loss on tokens without ids"),
        ([picture(GRID, loss=True)], {}, "a loss on tokens without ids"),
        ([Part(kind="text", shape=3)], {}, r"part 0 \(text, 3 tokens\): no ids"),
        ([Part(kind="smell", shape=3)], {}, "no kind is called 'smell'"),
        ([queries(-1)], {}, "-1 tokens"),
        ([video(GRID, seconds=0)], {}, "0 seconds"),
        ([picture(2, source="a"), picture(2, source="a", first=3)], {}, "feature row 2 of 5 is read by no place"),
    ],
)
def test_what_cannot_be_is_refused_by_name(parts, rules, says):
    with pytest.raises(StreamError, match=says) as caught:
        build(parts, Rules(**rules), name="s-7")
    assert "s-7" in caught.value.problem and caught.value.remedy


def test_helpers_refuse():
    with pytest.raises(StreamError, match="temporal patches"):
        picture(Grid(t=2, h=2, w=2))
    with pytest.raises(StreamError, match="1 parts to stand before"):
        patch_by_patch(video(Grid(t=2, h=2, w=2)), [words([1])])
    with pytest.raises(StreamError, match="timestamp"):
        stamp(-1)
    with pytest.raises(StreamError, match="choose from seconds, hms"):
        stamp(1, "minutes")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"positions": "qwen2vl"}, "did you mean 'qwen2-vl'"),
        ({"both": ("pictures",)}, "no kind is called 'pictures'"),
        ({"fill": 9, "vocab": 9}, "no id of the vocabulary"),
        ({"tokens_per_second": 0.0}, "forward"),
        ({"position": "1d"}, "did you mean 'positions'"),
    ],
)
def test_rules_check_themselves(given, says):
    with pytest.raises(ConfigError, match=says):
        Rules.read(given)
