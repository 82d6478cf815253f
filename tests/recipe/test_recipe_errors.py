"""Errors in recipes name the full key, the expected type, the choices and the nearest name."""

import pytest

from vitrail import recipe
from vitrail.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "key", "value", "problem", "remedy"),
    [
        (
            "mini-vlm",
            "sources.cifar.datasets",
            "pics",
            'sources.cifar.datasets: expected a list, got "pics"',
            "correct",
        ),
        ("smoke", "stages.0.steps", "abc", 'stages.0.steps: expected a whole number, got "abc"', "correct"),
        (
            "smoke",
            "stages.0.optim.kind",
            "adamx",
            'stages.0.optim.kind: "adamx" is not a valid value',
            "did you mean 'adamw'? known: adamw, adamw_8bit, lamb, muon",
        ),
        ("smoke", "stages.0.task", "txt", "stages.0.task: there is no task 'txt'", "did you mean 'text'? known: chat,"),
        ("smoke", "model.kind", "decodr", "model.kind: there is no model kind 'decodr'", "did you mean 'decoder'?"),
        ("smoke", "sources.docs.kind", "txt", "sources.docs.kind: there is no data source 'txt'", "'text'? known:"),
        ("smoke", "stages.0.stepz", 1, "no key 'stages.0.stepz'", "did you mean 'steps'?"),
        ("smoke", "stages.0.mixture.weights.dcs", 1, "stages.0.mixture.weights names 'dcs'", "'docs'? known: docs, "),
        (
            "mini-vlm",
            "model.config.connector.kind",
            "projectr",
            "model.config.connector.kind: there is no connector 'projectr'",
            "did you mean 'projector'? known: attention-pool,",
        ),
        ("mini-vlm", "model.config.tower.layerz", 1, "no key 'model.config.tower.layerz'", "did you mean 'layers'?"),
        (
            "mini-vlm",
            "stages.1.settings.turns",
            "apar",
            'stages.1.settings.turns: "apar" is not a valid value',
            "did you mean 'apart'? known: apart, together",
        ),
        # checks of a whole table
        ("codec-vq", "model.config.quantizer.dim", -3, "model.config.quantizer.dim is -3", "at least 1"),
        ("smoke", "stages.0.optim.lr", -1.0, "stages.0.optim: lr is -1.0", "use a finite number"),
        ("mini", "sources.few.image_size", -3, "sources.few: image_size is -3", "give at least"),
    ],
)
def test_an_error_names_the_key_and_what_is_possible(name, key, value, problem, remedy):
    with pytest.raises(ConfigError) as error:
        recipe.load_recipe(name, {key: value})
    assert problem in error.value.problem
    assert remedy in error.value.remedy


def test_an_unknown_recipe_is_answered_with_the_nearest_name():
    with pytest.raises(ConfigError) as error:
        recipe.load_recipe("mini-vml")
    assert error.value.remedy == "did you mean 'mini-vlm'?"  # there are too many names to list beside it


def test_unknown_stages_and_sources_are_answered_with_the_nearest_name():
    with pytest.raises(ConfigError, match=r"did you mean 'tune'\? known: tune, replay, anneal"):
        recipe.load_recipe("mini-vlm").stage_index("tunes")
    with pytest.raises(ConfigError, match=r"stages\.0\.validate names 'docs-tes'.*\n.*did you mean 'docs-test'"):
        recipe.load_recipe("smoke", {"stages.0.validate": ["docs-tes"]})
