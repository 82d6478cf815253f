"""The reference page of recipe keys."""

import re

import pytest

from vitrail.config import Config
from vitrail.recipe.key_reference import build_key_reference
from vitrail.registry import DATA_SOURCES, MODELS, TASKS


@pytest.fixture(scope="module")
def rows() -> list[list[str]]:
    lines = [line for line in build_key_reference() if line.startswith("| `")]
    return [re.split(r"(?<!\\\\) \| ", line.strip("| ")) for line in lines]


def test_every_key_has_a_type_and_a_description(rows):
    assert len(rows) > 500
    for row in rows:
        assert len(row) == 4 and all(row), row
        assert not re.search(r"Annotated|typing|vitrail\.|Literal|Union", " ".join(row)), row


def test_types_are_those_of_toml(rows):
    types = {row[0].strip("`"): row[1] for row in reversed(rows)}  # the first config with the key
    assert (
        types["seed"] == "whole number ≥ 0" and types["name"] == "text" and types["compile"].startswith("true or false")
    )
    assert types["stages"] == "list: [StageConfig](#stageconfig)"
    assert types["optim"] == "[OptimConfig](#optimconfig)" and types["weights"] == "table: number"


def test_sources_tasks_and_models_are_complete():
    lines = list(build_key_reference())
    for spec in DATA_SOURCES.values():
        assert f"### {spec.config.__name__}" in lines
    for name, task in TASKS.items():
        assert task.settings_config is Config or f"### task `{name}`: {task.settings_config.__name__}" in lines
    for model in MODELS.values():
        assert f"### {model.Config.__name__}" in lines
    headings = [line for line in lines if line.startswith("### ")]
    assert len(headings) == len(set(headings))
