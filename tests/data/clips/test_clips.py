"""Clips: determinism, disjoint splits, and questions whose answers are read from the pixels again."""

import pytest
import torch

from vitrail.data.clips.clip_questions import QUESTION_KINDS, get_piece_table
from vitrail.data.clips.clip_renderer import LANES, PALETTE, render_clips
from vitrail.data.clips.clip_sampler import CLIP_KINDS, COLOURS, EVENTS, MAX_JUMPS, sample_clips
from vitrail.data.clips.clip_source import ClipLayout, ClipSource, ClipSourceConfig
from vitrail.errors import ConfigError

LAYOUT = ClipLayout(16, 2.0)
VERBS = {"appear": "appears", "disappear": "disappears", "change its colour": "turns", "move": "moves"}


def open_clips(**settings) -> ClipSource:
    return ClipSource(ClipSourceConfig(num_frames=(16,), fps=(2.0,), noise=0, **settings))


def read_lanes(frames: torch.Tensor) -> list[list[tuple | None]]:
    """Read from the pixels (T, 3, 32, 32) of each lane and frame: (colour, mask, leftmost column), None if empty."""
    found = []
    for centre in LANES:
        lane = []
        for frame in frames:
            window = frame[:, max(0, centre - 5) : centre + 5].permute(1, 2, 0)
            colours = [
                name for name, rgb in zip(COLOURS, PALETTE, strict=False) if (window == torch.tensor(rgb)).all(2).any()
            ]
            if not colours:
                lane.append(None)
                continue
            rgb = PALETTE[COLOURS.index(colours[0])]
            mask = (window == torch.tensor(rgb, dtype=torch.uint8)).all(2)
            rows, columns = mask.any(1).nonzero()[:, 0], mask.any(0).nonzero()[:, 0]
            lane.append((colours[0], int(rows.min()), int(columns.min())))
        found.append(lane)
    return found


def find_change(lane: list) -> tuple[int, str]:
    """Find the first frame in which a lane changes, and what happens."""
    for t in range(1, len(lane)):
        before, now = lane[t - 1], lane[t]
        if before == now:
            continue
        if before is None:
            return t, "appears"
        if now is None:
            return t, "disappears"
        if before[0] != now[0]:
            return t, f"turns {now[0]}"
        return t, "moves to the right" if now[2] > before[2] else "moves to the left"
    raise AssertionError("nothing changes")


def test_answers_about_events_agree_with_the_pixels():
    source, table = open_clips(seed=3), get_piece_table()
    data = source.render_indices(torch.arange(60), LAYOUT)
    checked = 0
    for b in (data.clips.kind == CLIP_KINDS.index("events")).nonzero()[:, 0].tolist():
        lanes = read_lanes(data.frames[b])
        changes = sorted(find_change(lane) for lane in lanes)
        questions = table.to_texts(data.questions.question[b])
        answers = table.to_texts(data.questions.answer[b])
        assert answers[0].endswith(changes[0][1]) and answers[1].endswith(changes[-1][1])
        own = [(frame, what) for frame, what in changes if f"{answers[2]}" == f"{frame / 2:.1f} seconds"]
        verb = next(VERBS[key] for key in sorted(VERBS, key=len, reverse=True) if f" {key}?" in questions[2])
        assert own and own[0][1].startswith(verb)
        thirds = {("the beginning", "the middle", "the end")[frame * 3 // 16] for frame, _ in changes}
        assert answers[3] in thirds
        checked += 1
    assert checked > 25


def test_answers_about_jumps_and_needles_agree_with_the_pixels():
    source, table = open_clips(seed=4), get_piece_table()
    data = source.render_indices(torch.arange(120), LAYOUT)
    kinds = dict.fromkeys(("jumps", "needle"), 0)
    for b in range(120):
        kind = CLIP_KINDS[data.clips.kind[b]]
        if kind == "events":
            continue
        kinds[kind] += 1
        answers = table.to_texts(data.questions.answer[b])
        if kind == "jumps":
            # A jump changes the two rows below the centre, which no other lane reaches.
            centres = [LANES[lane] for lane in data.clips.lane[b].tolist()]
            rows = [data.frames[b, :, :, centre + 1 : centre + 3] for centre in centres]
            jumps = [[t for t in range(16) if not torch.equal(own[t], own[0])] for own in rows]
            assert [int(answers[0]), int(answers[1]), 0] == [len(own) for own in jumps]
            assert 1 <= len(jumps[0]) <= MAX_JUMPS and all(
                b - a > 1 for a, b in zip(jumps[0], jumps[0][1:], strict=False)
            )
            assert answers[2] == f"{jumps[0][0] / 2:.1f} seconds"
        else:
            lanes = read_lanes(data.frames[b])
            seen = [[t for t, frame in enumerate(lane) if frame] for lane in lanes]
            (lane,) = [n for n, frames in enumerate(seen) if len(frames) == 1]
            assert answers[0].startswith(f"a {lanes[lane][seen[lane][0]][0]}")
            assert answers[1] == f"{seen[lane][0] / 2:.1f} seconds"
            assert answers[3] == "0"
    assert min(kinds.values()) > 10


def test_clips_depend_on_seed_and_index_only():
    source = open_clips(seed=1)
    both, one = source.render_indices(torch.tensor([5, 9]), LAYOUT), source.render_indices(torch.tensor([9]), LAYOUT)
    assert torch.equal(both.frames[1:], one.frames) and torch.equal(both.questions.answer[1:], one.questions.answer)
    other = open_clips(seed=2).render_indices(torch.tensor([9]), LAYOUT)
    assert not torch.equal(other.frames, one.frames)
    noisy = render_clips(one.clips, 64, noise=5)
    clean = render_clips(one.clips, 64)
    assert noisy.shape == (1, 16, 3, 64, 64)
    assert 0 < (noisy.int() - clean.int()).abs().max() <= 5


def test_splits_share_no_combination():
    index = torch.arange(4000)
    found = []
    for split in ("train", "test"):
        clips = sample_clips(index, 8, split=split)
        rows = torch.cat([clips.shape, clips.colour, clips.background[:, None]], 1)
        found.append({tuple(row) for row in rows.tolist()})
        counts = clips.kind.bincount() / len(clips)
        assert torch.allclose(counts, torch.tensor([0.6, 0.2, 0.2]), atol=0.03)
        assert len(clips.event.unique()) == len(EVENTS) and int(clips.background.max()) == 5
    assert not found[0] & found[1]


def test_layouts_and_bad_input():
    source = ClipSource(ClipSourceConfig(num_frames=(8, 16), fps=(1.0, 4.0)))
    assert {source.select_layout([n, n + 7]) for n in range(200)} == set(source.layouts)
    assert source.layouts[3].timestamps[-1] == 15 / 4
    assert len(QUESTION_KINDS) == 6
    for wrong in (
        {"num_frames": (7,)},
        {"fps": (3.0,)},
        {"image_size": 40},
        {"noise": 90},
        {"fps": ()},
        {"num_frames": (2000,)},
    ):
        with pytest.raises(ConfigError):
            ClipSourceConfig(**wrong)
