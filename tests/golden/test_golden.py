"""Behaviour is frozen: data to the last bit, models and training within 1e-5.

A failure means that data, a shipped model or training changes. See `make.py` where the change is intended.
"""

import json
import shutil
from typing import Any

import pytest

from golden.measurements import FETCHED, FILE, MEASUREMENTS, environment, missing_data

GOLDEN = json.loads(FILE.read_text())
SLOW = {"emoji", "mini", "mini-vlm", "smoke losses", "mini losses", "mini-vlm losses"}
NEEDS_NPM = {"mini-vlm", "mini-vlm losses"}  # the package of stories15M
EXACT = {"recipes", "results"}  # do not depend on versions
RELATIVE, ABSOLUTE = 1e-5, 1e-6


def assert_same(found: Any, golden: Any, where: str) -> None:
    """Compare nested data: floats within the tolerance, all else exactly."""
    if isinstance(golden, dict):
        assert sorted(found) == sorted(golden), where
        for key, value in golden.items():
            assert_same(found[key], value, f"{where}: {key}")
    elif isinstance(golden, list):
        assert len(found) == len(golden), where
        for number, (one, value) in enumerate(zip(found, golden, strict=True)):
            assert_same(one, value, f"{where}[{number}]")
    elif isinstance(golden, float):
        assert found == pytest.approx(golden, rel=RELATIVE, abs=ABSOLUTE), where
    else:
        assert found == golden, where


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in MEASUREMENTS]
)
@pytest.mark.timeout(900)
def test_behaviour_is_unchanged(name, tmp_path):
    if name not in EXACT and environment() != GOLDEN["environment"]:
        pytest.skip(f"the numbers are of {GOLDEN['environment']}")
    if name in FETCHED and (missing := missing_data(*FETCHED[name])):
        pytest.skip(f"fetch the data first: vitrail data get {' '.join(missing)}")
    if name in NEEDS_NPM and shutil.which("npm") is None:
        pytest.skip("stories15M comes with npm")
    assert_same(MEASUREMENTS[name](tmp_path), GOLDEN[name], name)
