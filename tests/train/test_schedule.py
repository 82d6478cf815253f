"""Schedules: closed forms at chosen steps, and properties at all of them."""

import math
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitrail.config import Config
from vitrail.errors import ConfigError
from vitrail.train.schedule import WSD, Constant, Cosine, Linear, Schedule

STEPS = 100


class Holder(Config):
    schedule: Schedule


@pytest.mark.parametrize(
    ("schedule", "step", "value"),
    [
        (Constant(), 0, 1),
        (Constant(), 10**9, 1),
        (Constant(warmup=3), 0, 1 / 4),
        (Constant(warmup=3), 2, 3 / 4),
        (Constant(warmup=3), 3, 1),
        (Linear(), 0, 1),
        (Linear(), 25, 0.75),
        (Linear(end=0.2), 50, 0.6),
        (Linear(warmup=20), 60, 0.5),
        (Linear(end=0.1), STEPS, 0.1),
        (Cosine(), 50, 0.5),
        (Cosine(), 25, (1 + math.sqrt(0.5)) / 2),
        (Cosine(warmup=50), 75, 0.5),
        (Cosine(end=0.1), 50, 0.55),
        (Cosine(warmup=STEPS), STEPS - 1, STEPS / (STEPS + 1)),
        (WSD(decay=20), 80, 1),
        (WSD(decay=20), 90, 0.5),
        (WSD(decay=20, tail="cosine"), 90, 0.5),
        (WSD(decay=20, tail="sqrt"), 85, 0.5),
        (WSD(decay=20, tail="sqrt", end=0.2), 85, 0.6),
        (WSD(decay=20, warmup=9), 4, 0.5),
        (WSD(decay=20, end=0.3), STEPS + 5, 0.3),
        (WSD(decay=0), STEPS - 1, 1),
    ],
)
def test_closed_forms(schedule, step, value):
    assert schedule.scale(step, STEPS) == pytest.approx(value, abs=1e-12)


@st.composite
def runs(draw):
    warmup, stable, decay = (draw(st.integers(0, 60)) for _ in range(3))
    common = {"warmup": warmup}
    falling = common | {"end": draw(st.floats(0, 1))}
    schedule = draw(
        st.sampled_from(
            [Constant(**common), Linear(**falling), Cosine(**falling)]
            + [WSD(decay=decay, tail=tail, **falling) for tail in ("linear", "cosine", "sqrt")]
        )
    )
    return schedule, warmup, max(warmup + stable + decay, 1)


@given(runs())
def test_rises_to_the_peak_then_never_again(run):
    schedule, warmup, steps = run
    schedule.check(steps)
    values = [schedule.scale(step, steps) for step in range(steps + 3)]
    assert all(0 <= v <= 1 for v in values) and values[0] > 0
    assert all(b > a for a, b in pairwise(values[:warmup]))
    assert all(b <= a + 1e-12 for a, b in pairwise(values[warmup:]))
    if warmup < steps and getattr(schedule, "decay", 0) < steps - warmup:
        assert values[warmup] == 1
    assert values[steps] == values[-1] == pytest.approx(getattr(schedule, "end", 1.0))


@given(runs())
def test_no_jumps(run):
    """One step moves the rate by no more than the steepest slope of its shape: √'s first step, π/2 of the cosine."""
    schedule, warmup, steps = run
    fall = getattr(schedule, "decay", steps - warmup)
    tail = getattr(schedule, "tail", "cosine")
    limit = 0.0 if fall == 0 else (fall**-0.5 if tail == "sqrt" else math.pi / 2 / fall)
    values = [schedule.scale(step, steps) for step in range(steps)]
    for step, (a, b) in enumerate(pairwise(values)):
        assert abs(b - a) <= max(limit, 1 / (warmup + 1) if step < warmup else 0) + 1e-12


@given(runs(), st.integers(1, 50))
def test_a_longer_wsd_run_shares_its_beginning(run, more):
    schedule, _, steps = run
    if isinstance(schedule, WSD):
        for step in range(steps - schedule.decay):
            assert schedule.scale(step, steps) == schedule.scale(step, steps + more)


@given(runs())
def test_rows_round_trip(run):
    schedule, _, _ = run
    assert Holder.read(Holder(schedule=schedule).plain()).schedule == schedule
    assert Holder.read(msgspec.json.decode(msgspec.json.encode(Holder(schedule=schedule)))).schedule == schedule


@pytest.mark.parametrize(
    "make",
    [
        lambda: Constant(warmup=-1),
        lambda: Cosine(end=1.5),
        lambda: WSD(decay=-1),
        lambda: WSD(decay=5, tail="cubic"),
        lambda: Holder.read({"schedule": {"kind": "cosine", "warmpu": 3}}),
        lambda: Holder.read({"schedule": {"kind": "cosinus"}}),
        lambda: Cosine(warmup=11).check(10),
        lambda: WSD(warmup=6, decay=5).check(10),
    ],
)
def test_what_cannot_be_is_refused(make):
    with pytest.raises(ConfigError):
        make()
