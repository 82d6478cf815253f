"""Registries: names without imports, errors with all choices, and lazy loading."""

import subprocess
import sys

import pytest

from vitrail import registry
from vitrail.connectors import Projector
from vitrail.errors import ConfigError
from vitrail.models.presets import VLM_PRESETS
from vitrail.models.vlm_config import VLMConfig
from vitrail.registry import CONNECTORS, QUANTIZERS, Registry


def test_listing_names_does_not_import_torch():
    code = "import sys; from vitrail.registry import CONNECTORS; print(*CONNECTORS); assert 'torch' not in sys.modules"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "projector" in run.stdout


def test_lookup_imports_the_component():
    assert CONNECTORS["projector"] is Projector
    assert set(QUANTIZERS) >= {"vq", "fsq", "kl", "continuous"}


def test_unknown_names_list_the_choices():
    with pytest.raises(ConfigError, match="did you mean 'projector'"):
        CONNECTORS["projektor"]
    with pytest.raises(ConfigError, match="known: attention-pool, conv-merger, fused"):
        CONNECTORS["xyz"]
    assert "xyz" not in CONNECTORS and CONNECTORS.get("xyz") is None


def test_two_components_with_one_name_raise():
    things = Registry("thing", "THINGS")
    things.register("a", 1)
    with pytest.raises(ConfigError, match="two components of kind thing"):
        things.register("a", 2)
    assert dict(things) == {"a": 1} and things.plugin_names == ("a",)


def test_plugins_that_cannot_be_imported_are_named():
    with pytest.raises(ConfigError, match="plugin no_such_module"):
        registry.load_plugins(["no_such_module"])


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("layerz", 1, "has no key 'tower.layerz'"),
        ("layers", "many", 'tower.layers: expected a whole number, got "many"'),
        ("kind", "vitt", "tower.kind: there is no encoder 'vitt'"),
    ],
)
def test_errors_name_the_whole_key_of_a_registered_config(key, value, problem):
    plain = VLM_PRESETS["llava-1.5-7b"].to_dict()
    with pytest.raises(ConfigError) as error:
        VLMConfig.from_dict(plain | {"tower": plain["tower"] | {key: value}})
    assert problem in error.value.problem
