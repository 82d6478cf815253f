"""The defaults for keys that a config.json leaves out equal those of the config classes of transformers."""

import dataclasses

import pytest
from transformers import CONFIG_MAPPING, PreTrainedConfig

from vitrail.registry import FAMILIES

FAMILIES_WITH_DEFAULTS = [name for name, row in FAMILIES.items() if row.class_defaults or row.part_defaults]


def list_defaults(config: PreTrainedConfig) -> dict:
    """Return the values of a new config, and its fields that unset flags replace when the config is built.

    transformers reads these keys from a config.json, but keeps them elsewhere.
    """
    values = config.to_dict()
    fields = {field.name: field.default for field in dataclasses.fields(config)}
    if "use_sliding_window" in fields:
        values["sliding_window"] = fields["sliding_window"]
    rope = values.get("rope_parameters") or {}
    if "full_attention" in rope:  # one table for each layer type
        values["rope_theta"] = rope["full_attention"]["rope_theta"]
        values["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
    else:
        values |= {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
    if hasattr(config, "_sliding_window_pattern"):
        values["sliding_window_pattern"] = config._sliding_window_pattern
    return values


@pytest.mark.parametrize("name", FAMILIES_WITH_DEFAULTS)
def test_defaults_are_those_of_transformers(name):
    row, config = FAMILIES[name], CONFIG_MAPPING[name]()
    tables = {"": (row.class_defaults, list_defaults(config))} | {
        key: (defaults, list_defaults(getattr(config, key) or CONFIG_MAPPING[f"{name}_{key.split('_')[0]}"]()))
        for key, defaults in row.part_defaults.items()
    }
    for part, (ours, theirs) in tables.items():
        # None is a value that transformers computes from others when it builds the config.
        stated = {key: value for key, value in ours.items() if value is not None}
        assert stated == {key: theirs[key] for key in stated}, part
