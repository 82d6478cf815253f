"""The table and the plot of rates: everything measured is in it, in its place, and can be read."""

import itertools
import math
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from vitrail.errors import DataError, VitrailError
from vitrail.evals.metrics import Estimate, Use
from vitrail.evals.shares import Score
from vitrail.evals.suites.reconstruction import CODED, DECODED, ENCODED, FILED, POOLED, Row
from vitrail.show import style
from vitrail.show.figure import Dot, Figure, Line, Words, _dashed, check_figure
from vitrail.show.rates import _apart, _labels, _powers, _short, _ticks, _wide, draw_rates, table


def row(name: str, kind: str, bits: float | None, psnr: float, lpips: float = 0.1, **more) -> Row:
    values = {"PSNR": psnr, "SSIM": 0.9, "LPIPS-vgg16": lpips, POOLED: psnr, ENCODED: 1234.5, DECODED: 60.0}
    if bits is not None:
        values |= {CODED: bits, FILED: 2 * bits}
    ends = (math.inf, math.inf) if math.isinf(psnr) else (-0.01, 0.02)
    scores = {n: Estimate(n, v, (v * (1 + ends[0]), v * (1 + ends[1])), 9) for n, v in values.items()}
    given = {"use": (), "read": (), "missing": {}, "about": {}} | more
    return Row(name, kind, 9, 9 * 1024, scores, "cpu", 0, **given)


ROWS = [
    *(row(f"jpeg q{q}", "jpeg", b, p, 1 / p) for q, b, p in ((50, 1.0, 28.0), (10, 0.5, 22.0), (90, 3.0, 35.0))),
    *(row(f"jpeg sheet q{q}", "jpeg sheet", b, p, 1 / p) for q, b, p in ((10, 0.25, 21.0), (90, 2.5, 34.0))),
    row("out/fsq/final", "codec", 0.75, 30.0, use=(Use(100, 50, 640, 3.0), Use(100, 100, 640, 5.0))),
    row("out/bsq/final", "codec", 1.5, 33.0),
    row("out/kl/final", "codec", None, 36.0),
]


def dots(figure: Figure, colour: style.Colour) -> list[tuple[float, float]]:
    return [shape.at for shape in figure.shapes if isinstance(shape, Dot) and shape.colour == colour]


def test_a_table_tells_every_number():
    lines = table(ROWS).splitlines()
    assert len(lines) == 1 + len(ROWS)
    head = " ".join(lines[0].split())
    assert head == "bits/px in files PSNR SSIM LPIPS-vgg16 encode/s decode/s used perplexity"
    assert len(set(map(len, lines))) == 1
    assert "28.00 ±0.56" in lines[1]
    assert lines[6].split()[-2:] == ["75.0%", "16.0"]
    assert lines[8].split()[:3] == ["out/kl/final", "–", "–"]
    read = (Score("by prompt, top-1", 0.5, (0.4, 0.6), 10, {"originals": 0.75}),)
    shown = table([row("same", "codec", 24.0, math.inf, read=read)])
    assert "∞" in shown
    assert "50.0% of 75.0%" in shown


def test_points_and_lines_are_where_they_belong():
    figure = draw_rates(ROWS, "title & more", "note")
    blue = [at for at in dots(figure, style.BLUE) if at[1] > 120]  # below the legend
    assert len(blue) == 3 * 2  # three panels, two codecs with bits
    (x0, y0), (x1, y1) = blue[:2]
    assert x0 < x1 and y0 > y1  # more bits to the right, a higher PSNR above
    gold = [at for at in dots(figure, style.GOLD) if at[1] > 120]
    assert len(gold) == 3 * 5
    lines = [s for s in figure.shapes if isinstance(s, Line) and s.colour == style.GOLD and len(s.points) > 2]
    assert len(lines) == 3
    for line in lines:
        assert [x for x, _ in line.points] == sorted(x for x, _ in line.points)
    # One line on two panels' axes: a doubling of bits is as wide everywhere.
    (a, _), (b, _), (c, _) = lines[0].points
    assert (c - b) / (b - a) == pytest.approx(math.log2(3))
    levels = [s for s in figure.shapes if isinstance(s, Line) and s.dash == (2, 3)]
    assert len(levels) == 3 and all(a[1] == b[1] for a, b in (s.points for s in levels))


def test_svg_and_picture_are_the_same_size_and_hold_the_names(tmp_path):
    figure = draw_rates(ROWS, "a < b & c", "note")
    root = ET.fromstring(figure.svg())
    words = [node.text for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"a < b & c", "fsq", "bsq", "kl, continuous", "jpeg", "jpeg sheet", "PSNR, dB", "LPIPS-vgg16"} <= set(words)
    figure.save(tmp_path / "deep" / "r.svg")
    figure.save(tmp_path / "r.png")
    assert (tmp_path / "deep" / "r.svg").read_text(encoding="utf-8") == figure.svg()
    picture = Image.open(tmp_path / "r.png").convert("RGB")
    assert picture.size == (figure.width, figure.height) == (int(root.get("width")), int(root.get("height")))
    for x, y in dots(figure, style.BLUE):
        assert picture.getpixel((round(x), round(y))) == style.BLUE
    for shape in figure.shapes:
        points = shape.points if isinstance(shape, Line) else [shape.at]
        assert all(0 <= x <= figure.width and 0 <= y <= figure.height for x, y in points)


def test_files_are_another_axis():
    coded, filed = (draw_rates(ROWS, "", bits=bits) for bits in ("coded", "file"))
    assert any(isinstance(s, Words) and s.words == FILED for s in filed.shapes)
    assert not any(isinstance(s, Words) and s.words == FILED for s in coded.shapes)


def test_what_is_infinite_stands_above():
    figure = draw_rates([*ROWS, row("same", "codec", 24.0, math.inf)], "")
    top = [at for at in dots(figure, style.BLUE) if at[1] > 120][2]
    assert top[1] < min(y for _, y in dots(figure, style.GOLD)[1:] if y > 120)
    assert "nan" not in figure.svg() and "inf" not in figure.svg()
    draw_rates([row("same", "codec", 24.0, math.inf)], "").svg()


def test_many_codecs_have_numbers():
    many = [row(f"c{n}", "codec", 0.1 * (n + 1), 20.0 + n) for n in range(14)]
    words = [s.words for s in draw_rates(many, "").shapes if isinstance(s, Words)]
    assert "14  c13" in words and words.count("14") == 3


def test_nothing_to_plot_is_said(tmp_path):
    with pytest.raises(DataError, match="nothing to plot"):
        draw_rates([ROWS[-1]], "")
    with pytest.raises(VitrailError, match="nothing"):
        check_figure(Path("rates.nothing"))
    check_figure(Path("rates.svg"))
    (tmp_path / "file").write_text("")
    with pytest.raises(VitrailError, match="cannot be written"):
        draw_rates(ROWS, "").save(tmp_path / "file" / "r.svg")


def test_names_say_what_differs():
    def short(*names):
        return _short([row(name, "codec", 1.0, 20.0) for name in names])

    assert short("out/a/final", "out/b/final") == ["a", "b"]
    assert short("out/a/final") == ["final"]
    assert short("out/a", "out/a/b") == ["a", "b"]
    assert short("x", "y/x") == ["x", "y"]


@given(st.floats(-1e4, 1e4), st.floats(1e-3, 1e4))
def test_ticks_go_around(low, spread):
    ticks = _ticks(low, low + spread)
    assert ticks == sorted(set(ticks)) and 2 <= len(ticks) <= 9
    assert ticks[0] <= low + 1e-6 * spread and ticks[-1] >= low + spread * (1 - 1e-6)


@given(st.floats(1e-5, 1e3), st.floats(1.0001, 1e5))
def test_powers_go_around(low, times):
    ticks = _powers(low, low * times)
    assert ticks == sorted(set(ticks)) and len(ticks) >= 2
    assert ticks[0] <= low * (1 + 1e-9) and ticks[-1] >= low * times * (1 - 1e-9)


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 100)), min_size=2, max_size=6))
def test_dashes_are_a_part_of_the_line(points):
    length = sum(math.dist(a, b) for a, b in itertools.pairwise(points))
    drawn = sum(math.dist(a, b) for a, b in _dashed(points, (7.0, 4.0)))
    assert abs(drawn - 7 / 11 * length) <= 7 + 1e-3 * len(points)


def test_names_of_near_points_stand_around_them():
    """Three points in one place push the name of a fourth, further down, nowhere."""
    points = [((100.0, y), f"codec-{y:g}") for y in (200.0, 202.0, 204.0, 232.0)]
    words = {s.words: s.at[1] for s in _labels(points, 300) if isinstance(s, Words)}
    assert words == pytest.approx({"codec-200": 187, "codec-202": 202, "codec-204": 217, "codec-232": 232})


@given(st.lists(st.floats(0, 500), min_size=1, max_size=9).map(sorted))
def test_names_move_as_little_as_can_be(wanted):
    places = _apart([200 + y for y in wanted])
    assert all(b - a >= 15 - 1e-6 for a, b in itertools.pairwise(places))
    if all(b - a >= 15 for a, b in itertools.pairwise(wanted)):
        assert places == pytest.approx([200 + y for y in wanted])


@given(st.lists(st.tuples(st.floats(0, 300), st.floats(0, 50)), min_size=1, max_size=9))
def test_labels_never_touch(points):
    words = [s for s in _labels([(at, f"codec-{n}") for n, at in enumerate(points)], 300) if isinstance(s, Words)]
    assert len(words) == len(points)
    for a, b in itertools.combinations(words, 2):
        apart = a.at[0] + _wide(a.words) <= b.at[0] or b.at[0] + _wide(b.words) <= a.at[0]
        assert apart or abs(a.at[1] - b.at[1]) >= 15 - 1e-6
