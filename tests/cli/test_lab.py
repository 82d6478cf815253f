"""`vitrail lab`: the page is written where it is asked for, and what is wrong is said."""

import json

import pytest

from vitrail.cli import main
from vitrail.lab import told


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results").mkdir()

    def run(*words) -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", ["vitrail", "lab", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            main()
        code, said = int(end.value.code or 0), capsys.readouterr()
        return code, said.err if code else said.out

    return run


def test_the_page_is_written(run, tmp_path):
    figures = {"origin": {"command": "python perf/x.py", "device": "NVIDIA H200"}, "figures": {"ours": 1.5}}
    (tmp_path / "results" / "x.json").write_text(json.dumps(figures))
    code, said = run("report", "-o", "out/page.html", "--section", "speed")
    assert not code and said.strip() == "out/page.html"
    text = (tmp_path / "out" / "page.html").read_text(encoding="utf-8")
    assert "python perf/x.py" in text and "NVIDIA H200" in text and ">1.5<" in text
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["page.html"]


def test_what_is_wrong_is_said(run, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "results" / "bad.json").write_text("{")
    for words, says in (
        (["-o", "file/page.html"], "page.html cannot be written"),
        (["--results", "none"], "none is no folder"),
        (["--section", "speeed"], "did you mean 'speed'"),
        (["--section", "speed"], "bad.json is no JSON"),
    ):
        code, said = run("report", *words)
        assert code == 2 and says in said and "Traceback" not in said
    assert not (tmp_path / "report.html").exists()


def test_figures_are_listed_with_ours(run, monkeypatch):
    about = ("tokens, of two tiles", "frames of a clip")
    right = told.Told("a text", about[0], "≈ 2", 2, lambda: 2.0, "1 + 1")
    wrong = told.Told("a text", about[1], "3", 3, lambda: 4.0, "2 · 2", 0.0, "two too few")
    monkeypatch.setattr(told, "FIGURES", (right, wrong))
    code, said = run("figures")
    assert not code and said.splitlines() == [
        f"✓ {about[0]} (a text): ≈ 2; ours 2, by 1 + 1",
        f"✗ {about[1]} (a text): 3; ours 4, by 2 · 2",
        "    two too few",
    ]
    assert run("figures", "--broken")[1].splitlines() == said.splitlines()[1:]
