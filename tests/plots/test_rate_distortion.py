"""The rate–distortion table and plot."""

import math

import pytest

from vitrail.errors import DataError
from vitrail.evals.metrics import CodebookUsage, Estimate
from vitrail.evals.scores import Score
from vitrail.evals.suites.codec_benchmark import CODED_BPP, DECODE_RATE, ENCODE_RATE, FILE_BPP, POOLED_PSNR, CoderResult
from vitrail.plots.rate_distortion import _shorten_names, draw_rate_distortion, format_rate_table


def row(name: str, kind: str, bits: float | None, psnr: float, lpips: float = 0.1, **more) -> CoderResult:
    values = {
        "PSNR": psnr,
        "SSIM": 0.9,
        "LPIPS-vgg16": lpips,
        POOLED_PSNR: psnr,
        ENCODE_RATE: 1234.5,
        DECODE_RATE: 60.0,
    }
    if bits is not None:
        values |= {CODED_BPP: bits, FILE_BPP: 2 * bits}
    ends = (math.inf, math.inf) if math.isinf(psnr) else (-0.01, 0.02)
    scores = {n: Estimate(n, v, (v * (1 + ends[0]), v * (1 + ends[1])), 9) for n, v in values.items()}
    given = {"codebook_usage": (), "recognition_scores": (), "missing_scores": {}, "metadata": {}} | more
    return CoderResult(name, kind, 9, 9 * 1024, scores, "cpu", 0, **given)


ROWS = [
    *(row(f"jpeg q{q}", "jpeg", b, p, 1 / p) for q, b, p in ((50, 1.0, 28.0), (10, 0.5, 22.0), (90, 3.0, 35.0))),
    *(row(f"jpeg sheet q{q}", "jpeg sheet", b, p, 1 / p) for q, b, p in ((10, 0.25, 21.0), (90, 2.5, 34.0))),
    row(
        "out/fsq/final",
        "codec",
        0.75,
        30.0,
        codebook_usage=(CodebookUsage(100, 50, 640, 3.0), CodebookUsage(100, 100, 640, 5.0)),
    ),
    row("out/bsq/final", "codec", 1.5, 33.0),
    row("out/kl/final", "codec", None, 36.0),
]


def test_table_has_every_number():
    lines = format_rate_table(ROWS).splitlines()
    assert len(lines) == 1 + len(ROWS)
    head = " ".join(lines[0].split())
    assert head == "bits/px in files PSNR SSIM LPIPS-vgg16 encode/s decode/s used perplexity"
    assert len(set(map(len, lines))) == 1
    assert "28.00 ±0.56" in lines[1]
    assert lines[6].split()[-2:] == ["75.0%", "16.0"]
    assert lines[8].split()[:3] == ["out/kl/final", "–", "–"]
    read = (Score("by prompt, top-1", 0.5, (0.4, 0.6), 10, {"originals": 0.75}),)
    shown = format_rate_table([row("same", "codec", 24.0, math.inf, recognition_scores=read)])
    assert "∞" in shown
    assert "50.0% of 75.0%" in shown


def test_points_and_lines_have_correct_positions():
    figure = draw_rate_distortion(ROWS, "title", "note")
    psnr = figure.axes[0]
    lines = {line.get_label(): line.get_xydata().tolist() for line in psnr.lines}
    assert lines["jpeg"] == [[0.5, 22.0], [1.0, 28.0], [3.0, 35.0]]
    assert lines["fsq"] == [[0.75, 30.0]] and lines["bsq"] == [[1.5, 33.0]]
    assert [y for _, y in lines["kl, continuous"]] == [36.0, 36.0]
    assert [axes.get_title(loc="left").split()[0] for axes in figure.axes] == ["PSNR,", "SSIM", "LPIPS-vgg16"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "jpeg", "jpeg sheet", "fsq", "bsq", "kl, continuous",
    ]  # fmt: skip


def test_file_bits_are_another_axis():
    coded, filed = (draw_rate_distortion(ROWS, "", bits=bits).axes[0] for bits in ("coded", "file"))
    assert (coded.get_xlabel(), filed.get_xlabel()) == (CODED_BPP, FILE_BPP)


def test_infinite_values_are_left_out():
    figure = draw_rate_distortion([*ROWS, row("same", "codec", 24.0, math.inf)], "")
    [line] = [line for line in figure.axes[0].lines if line.get_label() == "same"]
    assert not len(line.get_xdata())
    draw_rate_distortion([row("same", "codec", 24.0, math.inf)], "")


def test_nothing_to_plot_raises():
    with pytest.raises(DataError, match="nothing to plot"):
        draw_rate_distortion([ROWS[-1]], "")


def test_names_drop_common_parts():
    def short(*names):
        return _shorten_names([row(name, "codec", 1.0, 20.0) for name in names])

    assert short("out/a/final", "out/b/final") == ["a", "b"]
    assert short("out/a/final") == ["final"]
    assert short("out/a", "out/a/b") == ["a", "b"]
    assert short("x", "y/x") == ["x", "y"]
