"""docs/models.md is up to date with the registry of checkpoint families."""

import runpy
from pathlib import Path

from vitrail.registry import FAMILIES

DOCS = Path(__file__).parents[1] / "docs"
GENERATOR = runpy.run_path(str(DOCS / "models_page.py"))


def test_page_is_up_to_date():
    page = GENERATOR["build_page"]()
    assert (DOCS / "models.md").read_text(encoding="utf-8") == page, "run: python docs/models_page.py"
    assert all(f"| `{name}`" in page for name in FAMILIES.own_names)
