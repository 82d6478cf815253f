"""The report: complete, escaped, with origins, and errors that name malformed files."""

import base64
import hashlib
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from experiments.report import report_computed
from experiments.report.report_inputs import detect_kind
from experiments.report.report_page import SECTION_BUILDERS, build_report
from experiments.report.report_results import flatten_results
from vitrail.errors import ConfigError, DataError
from vitrail.plots.html_page import SORT_SCRIPT, Section, render_page

ROOT = Path(__file__).parents[2]
NASTY = "<script>alert(1)</script>\"'&<img src=x onerror=y>"
ORIGIN = {
    "date": "2026-01-02",
    "command": f"vitrail {NASTY}",
    "commit": "abc1234",
    "device": "NVIDIA H200",
    "torch": "2",
}
KEPT = ("experiment", "divergence", "information", "rates", "sweeps", "trainings", "speed")
POINT = {"method": "a", "tokens": 1, "seed": 0, "kind": "b", "value": 0.5, "count": 9}
VOID = {"meta", "img", "br"}


def experiment(point, contrast=None) -> str:
    return json.dumps({"contrasts": {"a": contrast}, "laws": {}, "scores": [point]})


class Whole(HTMLParser):
    """Parses a page. Mismatched tags are an error."""

    def __init__(self, text: str):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.texts, self.captions = [], [], [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag in ("caption", "figcaption"):
            self.captions.append({"text": "", "origin": ""})
        if tag not in VOID:
            self.open.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        self.texts.append((self.open[-1][0] if self.open else "", data))
        inside = [tag for tag, _ in self.open]
        if {"caption", "figcaption"} & set(inside):
            within = any(attrs.get("class") == "origin" for _, attrs in self.open)
            self.captions[-1]["origin" if within else "text"] += data

    def under(self, tag):
        return [text for name, text in self.texts if name == tag]

    def alone(self):
        """Assert that nothing is fetched and that only the sorting script runs."""
        names = [tag for tag, _ in self.tags]
        assert names.count("script") <= 1 and not {"link", "iframe", "object", "embed", "base", "form", "img"} & set(
            names
        )
        for _, attrs in self.tags:
            assert not {"src", "srcset", "xlink:href", "action", "poster", "xmlns"} & attrs.keys()
            assert "url(" not in attrs.get("style", "")
            assert not [key for key in attrs if key.startswith("on")]
            assert attrs.get("href", "#").startswith("#")
        policy = next(attrs["content"] for tag, attrs in self.tags if attrs.get("http-equiv"))
        digest = base64.b64encode(hashlib.sha256("".join(self.under("script")).encode()).digest()).decode()
        assert "default-src 'none'" in policy and f"'sha256-{digest}'" in policy
        assert not re.search(r"url\(|@import|https?:", "".join(self.under("style")) + SORT_SCRIPT)


@pytest.fixture
def folders(tmp_path):
    """Write a file of every kind, with markup in all names."""
    results, speed = tmp_path / "results", tmp_path / "speed"
    results.mkdir()
    speed.mkdir()
    score = {"value": 0.5, "interval": [0.25, 0.75], "count": 12}
    cell = {"variant": NASTY, "test": NASTY, "score": NASTY, "values": {"0": 0.5, "1": 0.25}, "mean": 0.375}
    reading = {"value": 0.5, "interval": [0.4, 0.6], "count": 10, "blind": 0.1}
    line = {
        "name": NASTY, "after": "", "tokens": 4, "width": 3, "bits": 12, "ratio": 2.0, "max_bits": 12, "bound": 3,
        "rank": 1.5, "spread": 2.0, "dimension": None, "probes": {NASTY: reading},
    }  # fmt: skip
    rate = {
        name: {"value": value, "interval": [None, None], "count": 5}
        for name, value in [("PSNR", None), ("bits a pixel", 0.5)]
    }
    row = {
        "name": NASTY,
        "kind": "codec",
        "num_images": 5,
        "num_pixels": 320,
        "num_identical": 5,
        "device": "cpu",
        "scores": rate,
    }
    files = {
        results / "sweep.json": {"origin": ORIGIN, "table": [{**cell, "interval": [0.1, 0.6]}]},
        results / "training.json": {
            "origin": {**ORIGIN, "note": NASTY},
            "curve": [{"step": 1, "loss": 2.0}, {"step": 10, "loss": 1.0}],
            "evals": {NASTY: {"command": NASTY, "scores": {NASTY: score}, "list": [1, NASTY]}},
        },
        results / "rates.json": {"runs": [{"suite": "reconstruction", "origin": ORIGIN, "data": NASTY, "rows": [row]}]},
        results / "experiment.json": {
            "origin": ORIGIN, "design": {}, "questions": {},
            "scores": [
                {"method": NASTY, "tokens": n, "seed": 0, "kind": NASTY, "value": n / 9, "count": 9} for n in (1, 8, 9)
            ],
            "laws": {},
            "contrasts": {
                NASTY: {"value": -0.25, "low": -0.5, "high": -0.125, "count": 6, "over": NASTY, "declared": True,
                        "sign": "below 0"},
                "other": None,
            },
        },
        results / "divergence.json": {
            "origin": ORIGIN, "model": NASTY, "pairs": 3, "lambda": 1.0, "M": 1.0, "tightness": 0.9,
            "columns": {"D": [1.0, 2.0], "λ√Υ": [1.1, 1.9], "ψ_AA": [None, 0.5]},
        },
        results / "information.json": {"origin": ORIGIN, "model": NASTY, "data": NASTY, "bottlenecks": [line]},
        results / "other.json": {"pass_name": "is this"},
        speed / "speed.json": {"origin": ORIGIN, "figures": {NASTY: {"ms": 1.5, "route": NASTY}}},
    }  # fmt: skip
    for file, data in files.items():
        file.write_text(json.dumps(data), encoding="utf-8")
    return results, speed


def read(results, speed, *names) -> Whole:
    return Whole(render_page("page", [], build_report(results, speed, names), is_long=True))


def test_all_results_are_shown_escaped_with_their_origin(folders):
    found = read(*folders, *KEPT)
    found.alone()
    assert found.under("h2") == [SECTION_BUILDERS[name].title for name in KEPT]
    assert len(found.captions) == 13
    for one in found.captions:
        origin = one["origin"]
        assert ORIGIN["command"] in origin or NASTY in origin  # a test has a command of its own
        assert {"2026-01-02", "NVIDIA H200", "commit abc1234"} <= set(re.split(", |[.] Note|[.]$", origin))
        assert re.search(r"read from \S+/(results|speed)/\w+[.]json", origin)
    assert sum(attrs.get("class") == "drawn" for tag, attrs in found.tags) == 5
    assert all(attrs.get("aria-label") for tag, attrs in found.tags if tag == "svg")
    assert (
        "1.5" in found.under("td")
        and {"-0.2500 [-0.5000, -0.1250]", "below 0", "-1.0000 [-1.0000, -1.0000]"} <= set(found.under("td"))
        and "0.5 [0.25, 0.75] of 12" in found.under("td")
        and "inf" in found.under("td")
    )


def test_missing_sections_are_listed(tmp_path):
    (tmp_path / "other.json").write_text("{}")
    found = read(tmp_path, tmp_path / "none", *KEPT)
    found.alone()
    assert found.under("h2") == ["Not on this page"]
    assert [row for row in found.under("th") if row in {SECTION_BUILDERS[name].title for name in KEPT}] == [
        SECTION_BUILDERS[name].title for name in KEPT
    ]


def test_unknown_files_are_listed(folders, monkeypatch):
    monkeypatch.setattr("experiments.report.report_page.SECTION_BUILDERS", {"speed": SECTION_BUILDERS["speed"]})
    assert str(folders[0] / "other.json") in read(*folders).under("th")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("sweep.json", '{"table": [{"variant": "a"}]}'),
        ("sweep.json", '{"table": 3}'),
        ("training.json", '{"curve": [{"step": "x", "loss": []}, {}]}'),
        ("training.json", '{"curve": [], "origin": [1], "evals": {"a": {"x": 1}}}'),
        ("rates.json", '{"runs": [{"rows": []}]}'),
        ("rates.json", '{"runs": 3}'),
        ("speed.json", '{"origin": {}, "figures": {"ms": 1' + "0" * 400 + "}}"),
        ("experiment.json", '{"contrasts": {}, "laws": {}, "scores": [{}]}'),
        ("experiment.json", experiment({**POINT, "value": math.nan})),
        ("experiment.json", experiment({**POINT, "value": math.inf})),
        ("experiment.json", experiment(POINT, {"value": math.nan, "low": 0, "high": 0, "count": 3, "over": "seeds"})),
        ("divergence.json", '{"lambda": 1, "columns": {}}'),
        ("information.json", '{"bottlenecks": [], "model": "m"}'),
        ("information.json", '{"bottlenecks": [{"name": "x"}], "model": "m"}'),
        ("other.json", '{"table": ['),
        ("other.json", "[" * 100_000),
    ],
)
def test_malformed_file_is_named(folders, name, text):
    (folders[name == "speed.json"] / name).write_text(text)
    with pytest.raises((DataError, ConfigError), match=name):
        build_report(*folders, KEPT)


def test_unknown_sections_and_folders_raise(folders, tmp_path):
    with pytest.raises(ConfigError, match="did you mean 'claims'"):
        build_report(*folders, ["clams"])
    with pytest.raises(ConfigError, match="nowhere is not a folder"):
        build_report(tmp_path / "nowhere", folders[1])


def test_claims_name_their_results_files():
    found = read(ROOT / "results", ROOT / "perf" / "results", "claims")
    found.alone()
    kept = {text for text in found.under("td") if re.fullmatch(r"[\w-]+[.]json \(2026-\d\d-\d\d, .*\)", text)}
    assert any(text.startswith("qlip-weights.json") for text in kept)
    assert all(one["origin"] for one in found.captions)


def test_files_of_the_repository_have_known_kinds():
    for file in [*ROOT.glob("results/*.json"), *ROOT.glob("perf/results/*.json")]:
        assert detect_kind(json.loads(file.read_text(encoding="utf-8"))), file


def test_laws_match_the_table_of_the_paper():
    found = Whole(_page(report_computed.build_law_section()))
    found.alone()
    assert "65.1966" in found.under("td") and any(text.startswith("−0.0503 [") for text in found.under("td"))
    assert len(found.captions) == 4 and all(
        "commit" in one["origin"] or "torch" in one["origin"] for one in found.captions
    )


def test_bounds_match_published_ratios_and_sort_by_value(monkeypatch):
    some = ("gaia1", "qlip-b16-256", "qlip-l14-392", "sd-vae")
    monkeypatch.setattr(report_computed, "CODEC_PRESETS", {name: report_computed.CODEC_PRESETS[name] for name in some})
    text = _page(report_computed.build_bounds_section())
    assert {"472.6", "219.4", "168"} <= set(Whole(text).under("td"))
    assert 'data-n="7488"' in text  # 576 · 13 bits, written as 7.49 kbit


def _page(body) -> str:
    return render_page("page", [], [Section("one", body)], is_long=True)


def test_nested_results_are_flattened_with_paths():
    nested = {"a": {"b": 1, "c": [1, 2]}, "d": [{"e": True}], "f": None, "g": {"value": 1.0, "interval": [0, 2]}}
    assert dict(flatten_results(nested)) == {
        "a · b": "1", "a · c": "1, 2", "d · 0 · e": "True", "f": "none", "g": "1 [0, 2]",
    }  # fmt: skip


def test_diverged_training_is_shown_up_to_the_failure(folders):
    points = [
        {"step": 1, "loss": 2.0},
        {"step": 2, "loss": 1.0},
        {"step": 3, "loss": math.nan},
        {"step": 4, "loss": None},
    ]
    (folders[0] / "training.json").write_text(json.dumps({"origin": ORIGIN, "curve": points}))
    found = read(*folders, "trainings")
    assert "1 after 2 steps" in found.under("text") and not [text for text in found.under("text") if "nan" in text]


@pytest.mark.slow
def test_the_whole_page(tmp_path):
    found = read(ROOT / "results", ROOT / "perf" / "results")
    found.alone()
    shown = found.under("h2")
    assert {
        SECTION_BUILDERS[name].title for name in ("law", "plan", "ledger", "figures", "claims", "rates", "speed")
    } <= set(shown)
    assert all(one["origin"] for one in found.captions if one["text"].strip() != "What was left out")
