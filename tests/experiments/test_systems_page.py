"""The page of systems under one decoder."""

import json

import pytest

from experiments.systems.__main__ import write_systems_page
from experiments.systems.systems_page import SECTIONS, render_systems_page
from vitrail.errors import DataError
from vitrail.recipe import sweep as sweeps


def make_row(variant, test, score, values, **more):
    row = sweeps.SweepRow(variant, test, score, dict(enumerate(values)), **more).to_dict()
    return json.loads(json.dumps(row))  # as in the file: keys are texts


def make_results(folder, rows, name="systems"):
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps({"origin": {"device": "a GPU"}, "table": rows}))


def test_page_has_scores_intervals_baselines_and_verdicts(tmp_path):
    baselines = {"majority": 0.12, "blind": 0.13}
    rows = [
        make_row("projector", "unseen", "position", [0.9, 0.92, 0.94], baselines=baselines),
        make_row("Q-Former", "unseen", "position", [0.5, 0.52, 0.54], baselines=baselines),
        make_row("gated", "unseen", "position", [0.4], baselines=baselines, item_intervals={0: (0.35, 0.45)}),
        make_row("projector", "tune", "validation/text-test/text", [3.5, 3.6, 3.7]),
    ]
    make_results(tmp_path, rows)
    text = render_systems_page(tmp_path)
    assert "| projector | 64 |" in text and "92.0 % [87.0, 97.0]" in text
    assert "40.0 % [35.0, 45.0] (1 seed)" in text and "| gated | none (64 features) |" in text
    assert (
        "| *majority* |  |  | 12.0 % |" in text and "| *blind* |  |  | 13.0 % |" in text and "3.60 [3.35, 3.85]" in text
    )
    [verdict] = [line for line in text.splitlines() if "a Q-Former loses the position" in line]
    assert "Q-Former: 52.0 %; projector: 92.0 %" in verdict and verdict.endswith(": holds |")
    assert "counting" not in text and "resampler |" not in text  # no scores of them


def test_columns_and_variants_exist_in_the_sweeps(tmp_path):
    """A complete sweep fills every column of every table, for every variant."""
    for section in SECTIONS:
        sweep = sweeps.load_sweep(section.sweep)
        rows = []
        for variant in sweep.variants:
            for test, words in sweep.tests.items():
                kinds = [words[n + 1] for n, word in enumerate(words) if word == "--kinds"]
                rows += [make_row(variant.name, test, kind, [0.5]) for kind in kinds]
        make_results(tmp_path, rows, section.sweep)
        text = render_systems_page(tmp_path)
        assert "–" not in text and all(f"| {variant.name} |" in text for variant in sweep.variants)
    assert text.count("\n## ") == len(SECTIONS)


def test_command_writes_the_page_and_names_missing_results(tmp_path):
    with pytest.raises(DataError, match=r"contains none of systems\.json"):
        render_systems_page(tmp_path)
    make_results(tmp_path, [make_row("projector", "unseen", "position", [0.9])])
    write_systems_page(results=tmp_path, out=tmp_path / "docs" / "page.md")
    assert "90.0 %" in (tmp_path / "docs" / "page.md").read_text()
    (tmp_path / "systems.json").write_text('{"table": [1]}')
    with pytest.raises(DataError, match="not the table of a sweep"):
        render_systems_page(tmp_path)
