"""The page of positions and timestamps of videos."""

import json

import pytest

from experiments.claims.claims import load_claims
from experiments.video.__main__ import write_video_page
from experiments.video.video_page import SWEEP, read_cells, render_video_page
from vitrail.data.clips.clip_questions import QUESTION_KINDS
from vitrail.errors import DataError
from vitrail.recipe import sweep as sweeps


def make_table(score_of, seeds=3):
    """Make a complete table of the sweep: `score_of` gives the score of a variant at a seed."""
    sweep, rows = sweeps.load_sweep(SWEEP), []
    for variant in sweep.variants:
        for test, words in sweep.tests.items():
            frames = [words[n + 1] for n, word in enumerate(words) if word == "--num-frames"]
            contexts = [words[n + 1] for n, word in enumerate(words) if word == "--extend"] or ["none"]
            names = [
                f"{kind}, frames {n}, context {c}"
                for kind in (*QUESTION_KINDS, "when, near")
                for n in frames
                for c in contexts
            ]
            values = {seed: score_of(variant.name, seed) for seed in range(seeds)}
            intervals = {seed: (value - 0.05, value + 0.05) for seed, value in values.items()}
            rows += [
                sweeps.SweepRow(
                    variant.name, test, name, values, {"blind": 0.04, "majority": 0.03}, intervals
                ).to_dict()
                for name in names
            ]
    return rows


def write_page(tmp_path, rows, *, chart=False):
    results, page = tmp_path / "video-time.json", tmp_path / "page.md"
    results.write_text(json.dumps({"origin": {"device": "a GPU"}, "table": rows}))
    if chart:
        write_video_page(results=results, out=page)
        return page.read_text()
    return render_video_page(results, "page.svg")


def test_page_has_scores_of_all_variants_and_verdicts_that_can_fail(tmp_path):
    good = {"seconds": 0.9, "interleaved": 0.8, "h:m:s": 0.9, "absolute": 0.6, "chunked": 0.7, "plain frames": 0.65}
    text = write_page(tmp_path, make_table(lambda name, seed: good[name] + seed / 1000), chart=True)
    sweep = sweeps.load_sweep(SWEEP)
    assert all(text.count(f"\n| {variant.name} |") == len(QUESTION_KINDS) + 1 for variant in sweep.variants)
    assert "90.1 %" in text and "| *blind* | 4.0 %" in text and "| 512 frames | 512 frames, yarn |" in text
    assert "–" not in text and (tmp_path / "page.svg").stat().st_size > 1000
    claims = [claim for claim in load_claims().values() if claim.sweep == SWEEP]
    assert len(claims) == 6 and text.count(": holds |") == 6
    text = write_page(
        tmp_path, make_table(lambda name, seed: 1.2 - good[name] + 0.15 * (name == "h:m:s") + seed / 1000)
    )
    assert text.count(": does not hold |") == 6
    text = write_page(tmp_path, make_table(lambda name, seed: 0.05 + seed / 1000))  # at the baseline
    assert text.count(": undecided") == 6


def test_one_seed_has_the_interval_of_the_questions_and_other_files_are_refused(tmp_path):
    text = write_page(tmp_path, make_table(lambda _name, _seed: 0.5, seeds=1))
    assert "50.0 % [45.0, 55.0] (1 seed)" in text
    file = tmp_path / "other.json"
    file.write_text(json.dumps({"table": [{"variant": "a", "test": "b", "score": "loss", "values": {"0": 1}}]}))
    with pytest.raises(DataError, match="no scores of the suite clips"):
        read_cells(file)
    file.write_text(json.dumps({"rows": []}))
    with pytest.raises(DataError, match="not the table of a sweep"):
        read_cells(file)
