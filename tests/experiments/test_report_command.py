"""The commands `python -m experiments.report` and `python -m experiments.published_figures`."""

import json
from pathlib import Path

import pytest

from experiments.published_figures import figure_table
from experiments.published_figures.__main__ import list_published_figures
from experiments.report.__main__ import write_report
from vitrail.errors import VitrailError


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results").mkdir()
    return tmp_path


def test_page_is_written(folder, capsys):
    figures = {"origin": {"command": "python perf/x.py", "device": "NVIDIA H200"}, "figures": {"ours": 1.5}}
    (folder / "results" / "x.json").write_text(json.dumps(figures))
    write_report(out=Path("out/page.html"), section=("speed",))
    assert capsys.readouterr().out.strip() == "out/page.html"
    text = (folder / "out" / "page.html").read_text(encoding="utf-8")
    assert "python perf/x.py" in text and "NVIDIA H200" in text and ">1.5<" in text
    assert [file.name for file in (folder / "out").iterdir()] == ["page.html"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"out": Path("file/page.html")}, "page.html cannot be written"),
        ({"results": Path("none")}, "none is not a folder"),
        ({"section": ("speeed",)}, "did you mean 'speed'"),
        ({"section": ("speed",)}, "bad.json is not valid JSON"),
    ],
)
def test_errors(options, message, folder):
    (folder / "file").write_text("")
    (folder / "results" / "bad.json").write_text("{")
    with pytest.raises(VitrailError, match=message):
        write_report(**options)
    assert not (folder / "report.html").exists()


def test_published_figures_are_listed_with_ours(monkeypatch, capsys):
    right = figure_table.PublishedFigure("a paper", "tokens of two tiles", "≈ 2", 2, lambda: 2.0, "1 + 1")
    wrong = figure_table.PublishedFigure("a paper", "frames", "3", 3, lambda: 4.0, "2 · 2", 0.0, "one too few")
    monkeypatch.setattr(figure_table, "PUBLISHED_FIGURES", (right, wrong))
    list_published_figures()
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "✓ tokens of two tiles (a paper): ≈ 2; recomputed 2, by 1 + 1",
        "✗ frames (a paper): 3; recomputed 4, by 2 · 2",
        "    one too few",
    ]
    list_published_figures(inconsistent=True)
    assert capsys.readouterr().out.splitlines() == lines[1:]
