"""Parts become one stream: order, kinds, ids, spans, loss, and what fills the places."""

import pytest
import torch

from vitrail.errors import ConfigError, StreamError
from vitrail.processing.grid import Grid
from vitrail.processing.resolution_policies import get_policy
from vitrail.processing.tokenizer import Tokenizer
from vitrail.stream import (
    TOKEN_KINDS,
    Part,
    StreamRules,
    action_part,
    build_stream,
    compute_patch_times,
    format_timestamp,
    image_part,
    interleave_patches,
    query_part,
    text_part,
    video_part,
)

GRID = Grid(h=4, w=6, merge_size=2)  # 2 × 3 tokens


def kinds(stream) -> list[str]:
    names = {kind.id: name for name, kind in TOKEN_KINDS.items()}
    return [names[k] for k in stream.kinds.tolist()]


def test_every_kind_in_any_order():
    parts = [
        query_part(2),
        text_part([5, 6], loss_mask=[False, True]),
        video_part(Grid(t=2, h=2, w=2, merge_size=2)),
        image_part(GRID),
        action_part([30, 31], loss_mask=True),
        image_part(4),
        text_part([7]),
    ]
    stream = build_stream(parts, StreamRules(fill_id=9, vocab_size=32))
    expected = ["query"] * 2 + ["text"] * 2 + ["video"] * 2 + ["image"] * 6 + ["action"] * 2 + ["image"] * 4 + ["text"]
    assert kinds(stream) == expected
    assert stream.ids.tolist() == [9, 9, 5, 6, 9, 9, *[9] * 6, 30, 31, *[9] * 4, 7]
    assert stream.loss_mask.nonzero()[:, 0].tolist() == [3, 12, 13] and stream.num_target_tokens == 3
    assert stream.source.tolist() == [0, 0, -1, -1, 1, 1, *[2] * 6, -1, -1, *[3] * 4, -1]
    assert stream.row.tolist() == [0, 1, -1, -1, 0, 1, *range(6), -1, -1, *range(4), -1]
    assert [source[:2] for source in stream.sources] == [("query", 2), ("video", 2), ("image", 6), ("image", 4)]
    assert not stream.spans.any()  # causal unless it is asked for


def test_spans():
    rules = StreamRules(bidirectional=("image",))
    parts = [
        image_part(GRID),
        image_part(2),
        text_part([1]),
        image_part(3, bidirectional=False),
        video_part(1),
        video_part(2, bidirectional=True),
    ]
    spans = build_stream(parts, rules).spans.tolist()
    assert spans == [1] * 6 + [2] * 2 + [0] + [0] * 3 + [0] + [3] * 2  # neighbours stay apart

    prefix = [
        image_part(GRID, bidirectional="prefix"),
        text_part([1, 2], bidirectional="prefix"),
        text_part([3], loss_mask=True),
    ]
    assert build_stream(prefix).spans.tolist() == [1] * 8 + [0]
    with pytest.raises(StreamError, match=r"part 2 .* 'prefix' is not contiguous"):
        build_stream(
            [image_part(2, bidirectional="prefix"), text_part([1]), text_part([2], bidirectional="prefix")],
            name="split",
        )


def test_loss_inside_a_bidirectional_span_is_refused():
    codes = image_part(GRID, ids=range(6), loss_mask=True)
    assert build_stream([text_part([1]), codes]).num_target_tokens == 6
    with pytest.raises(
        StreamError, match=r"drawn, part 1 \(image, 2×3\): a loss mask inside a bidirectional span"
    ) as caught:
        build_stream([text_part([1]), codes], StreamRules(bidirectional=("image",)), name="drawn")
    assert "bidirectional=False" in caught.value.remedy
    first = image_part(
        GRID, ids=range(6), loss_mask=[True] + [False] * 5
    )  # the word before it foretells it, from outside
    assert build_stream([text_part([1]), first], StreamRules(bidirectional=("image",))).num_target_tokens == 1


def test_newlines_by_id_or_from_the_learned_table():
    cut = get_policy("llava-next").layout(336, 672)
    rows = cut.spans[1].size[0]
    learned = build_stream([image_part(cut)])
    assert [source[:2] for source in learned.sources] == [("newline", 1), ("image", cut.num_tokens - rows)]
    newline = learned.source == 0
    assert int(newline.sum()) == rows and set(learned.row[newline].tolist()) == {0}
    assert learned.row[~newline].tolist() == list(range(cut.num_tokens - rows))
    spelled = build_stream([image_part(cut, newline_id=13)], StreamRules(fill_id=2))
    assert (spelled.ids == 13).tolist() == newline.tolist() and (spelled.ids[~newline] == 2).all()
    hd9 = build_stream([image_part(2), image_part(get_policy("hd9").layout(300, 400))])
    assert [source[:2] for source in hd9.sources] == [("image", 2), ("newline", 1), ("image", 1440)]
    assert hd9.source[:2].tolist() == [0, 0] and (hd9.source[2:].view(10, 145)[:, -1] == 1).all()
    codes = build_stream([image_part(cut, ids=[5] * (cut.num_tokens - rows), loss_mask=True)])
    assert torch.equal(codes.loss_mask, ~newline)  # the learned newline among codes has no id to learn


def test_a_timestamped_video_is_one_block_of_features():
    tokenizer = Tokenizer.train(["a pane of glass, seconds, 0.5 1.5"], vocab_size=300)
    tokenizer.add_special_tokens(["<|vision_start|>", "<|vision_end|>"])
    frames = [0.25, 0.75, 1.25, 1.75, 2.25]
    times = compute_patch_times(frames)
    assert times == [0.5, 1.5, 2.25]
    stamps = [format_timestamp(t) + "<|vision_start|>" for t in times]
    assert stamps[0] == "<0.5 seconds><|vision_start|>"
    clip = video_part(Grid(t=3, h=4, w=4, merge_size=2), seconds=1.0)
    before = [text_part(tokenizer.encode(text)) for text in stamps]
    stream = build_stream(interleave_patches(clip, before, after=[text_part(tokenizer.encode("<|vision_end|>"))]))
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
    assert format_timestamp(seconds) == plain and format_timestamp(seconds, "hms") == clock


def test_equality():
    one, other = (build_stream([text_part([1, 2]), image_part(GRID)], name="a") for _ in range(2))
    assert one == other
    assert one != build_stream([text_part([1, 3]), image_part(GRID)], name="a")
    assert one != build_stream([text_part([1, 2]), image_part(GRID)], name="b")


@pytest.mark.parametrize(
    ("parts", "rules", "message"),
    [
        ([], {}, "s-7 is empty"),
        ([text_part([])], {}, "s-7 is empty"),
        ([text_part([1]), text_part([2, 40])], {"vocab_size": 40}, r"part 1 \(text, 2 tokens\): token 1 has id 40"),
        ([text_part([1, -1])], {}, "token 1 has id -1"),
        ([image_part(GRID, newline_id=99, ids=range(6))], {"vocab_size": 3}, "token 3 has id 3"),
        ([image_part(GRID, ids=range(5))], {}, r"part 0 \(image, 2×3\): expected 6 ids, got 5"),
        ([text_part([1, 2], loss_mask=[True])], {}, "expected 2 loss flags, got 1"),
        ([image_part(GRID, loss_mask=[True] * 6)], {}, "a loss mask on tokens without ids"),
        ([image_part(GRID, loss_mask=True)], {}, "a loss mask on tokens without ids"),
        ([Part(kind="text", shape=3)], {}, r"part 0 \(text, 3 tokens\): ids are missing"),
        ([Part(kind="smell", shape=3)], {}, "unknown token kind 'smell'"),
        ([query_part(-1)], {}, "-1 tokens"),
        ([video_part(GRID, seconds=0)], {}, "0 seconds"),
        (
            [image_part(2, source="a"), image_part(2, source="a", first_row=3)],
            {},
            "feature row 2 of 5 is unused",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(parts, rules, message):
    with pytest.raises(StreamError, match=message) as caught:
        build_stream(parts, StreamRules(**rules), name="s-7")
    assert "s-7" in caught.value.problem and caught.value.remedy


def test_helpers_refuse():
    with pytest.raises(StreamError, match="temporal patches"):
        image_part(Grid(t=2, h=2, w=2))
    with pytest.raises(StreamError, match="1 parts for the temporal patches"):
        interleave_patches(video_part(Grid(t=2, h=2, w=2)), [text_part([1])])
    with pytest.raises(StreamError, match="timestamp"):
        format_timestamp(-1)
    with pytest.raises(StreamError, match="choose from seconds, hms"):
        format_timestamp(1, "minutes")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"positions": "qwen2vl"}, "did you mean 'qwen2-vl'"),
        ({"bidirectional": ("pictures",)}, "unknown token kind 'pictures'"),
        ({"fill_id": 9, "vocab_size": 9}, "is not in the vocabulary"),
        ({"tokens_per_second": 0.0}, "give a number above 0"),
        ({"position": "1d"}, "did you mean 'positions'"),
    ],
)
def test_rules_check_themselves(given, message):
    with pytest.raises(ConfigError, match=message):
        StreamRules.from_dict(given)
