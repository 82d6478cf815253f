"""The modules whose speed a script measures exist: results are stale once these files change."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("script", sorted(path.name for path in (ROOT / "perf").glob("*.py")))
def test_measured_modules_exist(script):
    names = re.findall(r'"(vitrail(?:\.\w+)+)"', (ROOT / "perf" / script).read_text())
    files = [ROOT / "src" / name.replace(".", "/") for name in names]
    assert not [file for file in files if not (file.with_suffix(".py").exists() or (file / "__init__.py").exists())]
