"""Learning rate schedules: closed forms at single steps, and properties of all steps."""

import math
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitrail.config import Config
from vitrail.errors import ConfigError
from vitrail.training.lr_schedule import ConstantSchedule, CosineSchedule, LinearSchedule, Schedule, WSDSchedule

STEPS = 100


class Holder(Config):
    schedule: Schedule


@pytest.mark.parametrize(
    ("schedule", "step", "value"),
    [
        (ConstantSchedule(), 0, 1),
        (ConstantSchedule(), 10**9, 1),
        (ConstantSchedule(warmup_steps=3), 0, 1 / 4),
        (ConstantSchedule(warmup_steps=3), 2, 3 / 4),
        (ConstantSchedule(warmup_steps=3), 3, 1),
        (LinearSchedule(), 0, 1),
        (LinearSchedule(), 25, 0.75),
        (LinearSchedule(min_lr_ratio=0.2), 50, 0.6),
        (LinearSchedule(warmup_steps=20), 60, 0.5),
        (LinearSchedule(min_lr_ratio=0.1), STEPS, 0.1),
        (CosineSchedule(), 50, 0.5),
        (CosineSchedule(), 25, (1 + math.sqrt(0.5)) / 2),
        (CosineSchedule(warmup_steps=50), 75, 0.5),
        (CosineSchedule(min_lr_ratio=0.1), 50, 0.55),
        (CosineSchedule(warmup_steps=STEPS), STEPS - 1, STEPS / (STEPS + 1)),
        (WSDSchedule(decay_steps=20), 80, 1),
        (WSDSchedule(decay_steps=20), 90, 0.5),
        (WSDSchedule(decay_steps=20, decay_curve="cosine"), 90, 0.5),
        (WSDSchedule(decay_steps=20, decay_curve="sqrt"), 85, 0.5),
        (WSDSchedule(decay_steps=20, decay_curve="sqrt", min_lr_ratio=0.2), 85, 0.6),
        (WSDSchedule(decay_steps=20, warmup_steps=9), 4, 0.5),
        (WSDSchedule(decay_steps=20, min_lr_ratio=0.3), STEPS + 5, 0.3),
        (WSDSchedule(decay_steps=0), STEPS - 1, 1),
    ],
)
def test_closed_forms(schedule, step, value):
    assert schedule.lr_factor(step, STEPS) == pytest.approx(value, abs=1e-12)


@st.composite
def runs(draw):
    warmup, stable, decay = (draw(st.integers(0, 60)) for _ in range(3))
    common = {"warmup_steps": warmup}
    falling = common | {"min_lr_ratio": draw(st.floats(0, 1))}
    schedule = draw(
        st.sampled_from(
            [ConstantSchedule(**common), LinearSchedule(**falling), CosineSchedule(**falling)]
            + [WSDSchedule(decay_steps=decay, decay_curve=tail, **falling) for tail in ("linear", "cosine", "sqrt")]
        )
    )
    return schedule, warmup, max(warmup + stable + decay, 1)


@given(runs())
def test_rate_rises_in_warmup_and_never_after(run):
    schedule, warmup, steps = run
    schedule.check_length(steps)
    values = [schedule.lr_factor(step, steps) for step in range(steps + 3)]
    assert all(0 <= v <= 1 for v in values) and values[0] > 0
    assert all(b > a for a, b in pairwise(values[:warmup]))
    assert all(b <= a + 1e-12 for a, b in pairwise(values[warmup:]))
    if warmup < steps and getattr(schedule, "decay_steps", 0) < steps - warmup:
        assert values[warmup] == 1
    assert values[steps] == values[-1] == pytest.approx(getattr(schedule, "min_lr_ratio", 1.0))


@given(runs())
def test_rate_has_no_jumps(run):
    """The rate changes per step by at most the steepest slope: the first step of √, π/2 of the cosine."""
    schedule, warmup, steps = run
    fall = getattr(schedule, "decay_steps", steps - warmup)
    tail = getattr(schedule, "decay_curve", "cosine")
    limit = 0.0 if fall == 0 else (fall**-0.5 if tail == "sqrt" else math.pi / 2 / fall)
    values = [schedule.lr_factor(step, steps) for step in range(steps)]
    for step, (a, b) in enumerate(pairwise(values)):
        assert abs(b - a) <= max(limit, 1 / (warmup + 1) if step < warmup else 0) + 1e-12


@given(runs(), st.integers(1, 50))
def test_longer_wsd_run_has_the_same_start(run, more):
    schedule, _, steps = run
    if isinstance(schedule, WSDSchedule):
        for step in range(steps - schedule.decay_steps):
            assert schedule.lr_factor(step, steps) == schedule.lr_factor(step, steps + more)


@given(runs())
def test_configs_round_trip(run):
    schedule, _, _ = run
    assert Holder.from_dict(Holder(schedule=schedule).to_dict()).schedule == schedule
    assert Holder.from_dict(msgspec.json.decode(msgspec.json.encode(Holder(schedule=schedule)))).schedule == schedule


@pytest.mark.parametrize(
    "make",
    [
        lambda: ConstantSchedule(warmup_steps=-1),
        lambda: CosineSchedule(min_lr_ratio=1.5),
        lambda: WSDSchedule(decay_steps=-1),
        lambda: WSDSchedule(decay_steps=5, decay_curve="cubic"),
        lambda: Holder.from_dict({"schedule": {"kind": "cosine", "warmpu": 3}}),
        lambda: Holder.from_dict({"schedule": {"kind": "cosinus"}}),
        lambda: CosineSchedule(warmup_steps=11).check_length(10),
        lambda: WSDSchedule(warmup_steps=6, decay_steps=5).check_length(10),
    ],
)
def test_invalid_schedules_raise(make):
    with pytest.raises(ConfigError):
        make()
