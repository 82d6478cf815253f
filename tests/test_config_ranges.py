"""Numbers out of range are refused with the valid range, from recipes and from Python."""

import pytest

from vitrail import recipe
from vitrail.config import (
    Config,
    Fraction,
    FractionBelowOne,
    LayerCount,
    OptionalLayerCount,
    PositiveFloat,
    PositiveInt,
)
from vitrail.connectors import ProjectorConfig
from vitrail.encoders.presets import VIT_PRESETS
from vitrail.errors import ConfigError
from vitrail.generate.sampling import SamplingConfig
from vitrail.hub.checkpoint_info import LAYER_COUNT_KEYS, count_layers
from vitrail.recipe.key_reference import build_key_reference
from vitrail.recipe.schema_reference import build_json_schema
from vitrail.recipe.sweep import Sweep
from vitrail.registry import CONNECTORS, ENCODERS, MODELS, QUANTIZERS

LAYERS, WORKERS, SEEDS = "1 … 10,000", "0 … 1,024", "0 … 9,223,372,036,854,775,807"


@pytest.mark.parametrize(
    ("key", "value", "valid"),
    [
        ("model.config.layers", "0", LAYERS),
        ("model.config.layers", "-3", LAYERS),
        ("model.config.layers", "1000000", LAYERS),
        ("stages.0.num_workers", "-1", WORKERS),
        ("stages.0.num_workers", "5000", WORKERS),
        ("seed", str(2**64), SEEDS),
        ("seed", "-1", SEEDS),
        ("stages.0.steps", "0", "at least 1"),
    ],
)
def test_recipe(key, value, valid):
    with pytest.raises(ConfigError) as error:
        recipe.load_recipe("smoke", {key: value})
    assert error.value.problem.endswith(f"{key} is {value}")
    assert error.value.remedy == f"give a whole number of {valid}"


class Ranges(Config):
    positive: PositiveFloat = 1.0
    fraction: Fraction | None = None
    below_one: FractionBelowOne = 0.0
    widths: tuple[PositiveInt, ...] = ()


@pytest.mark.parametrize(
    ("field", "value", "remedy"),
    [
        ("positive", 0.0, "give a number above 0"),
        ("positive", -1.0, "give a number above 0"),
        ("fraction", 1.5, "give a number of 0 … 1"),
        ("below_one", 1.0, "give a number of at least 0 and below 1"),
    ],
)
def test_ranges_of_numbers(field, value, remedy):
    for build in (lambda: Ranges(**{field: value}), lambda: Ranges.from_dict({field: value})):
        with pytest.raises(ConfigError, match=f"{field} is {value}") as error:
            build()
        assert error.value.remedy == remedy


def test_nan_is_in_no_range():
    for field in ("positive", "fraction", "below_one"):
        with pytest.raises(ConfigError, match=f"{field} is nan"):
            Ranges(**{field: float("nan")})


def test_ranges_of_items():
    with pytest.raises(ConfigError, match=r"Ranges\.widths is \(4, 0\)") as error:
        Ranges(widths=(4, 0))
    assert error.value.remedy == "give a whole number of at least 1"
    with pytest.raises(ConfigError, match=r"widths\.1 is 0"):
        Ranges.from_dict({"widths": [4, 0]})


def test_the_schema_of_recipes_has_the_ranges():
    steps = build_json_schema()["$defs"]["StageConfig"]["properties"]["steps"]
    assert steps["type"] == "integer" and steps["minimum"] == 1
    reference = "\n".join(build_key_reference())
    assert "| `save_every` | whole number ≥ 1 |" in reference and "| number ≥ 0, < 1 |" in reference


def test_python():
    for wrong in (0, 10_001):
        with pytest.raises(ConfigError, match=f"ProjectorConfig.layers is {wrong}") as error:
            ProjectorConfig(in_features=4, out_features=4, layers=wrong)
        assert LAYERS in error.value.remedy
    with pytest.raises(ConfigError, match=SEEDS):
        SamplingConfig(seed=2**64)
    assert ProjectorConfig(in_features=4, out_features=4, layers=10_000).layers == 10_000
    with pytest.raises(ConfigError, match="layers is 0"):
        recipe.load_recipe("smoke").build_model_config().replace(layers=0)


def test_seeds_of_sweeps():
    given = {"name": "s", "description": "", "recipe": "smoke", "variants": [{"name": "v"}], "tests": {"t": ["text"]}}
    with pytest.raises(ConfigError, match=SEEDS):
        Sweep.from_dict({**given, "seeds": [0, 2**64]})


def test_other_wrong_types_keep_their_message():
    class OwnConfig(Config):
        layers: LayerCount

    with pytest.raises(ConfigError, match="expected a whole number"):
        OwnConfig.from_dict({"layers": "two"})


class Quotient(Config):
    size: int = 8
    patch: int = 2
    crop: bool = False

    def __post_init__(self) -> None:
        assert self.size // self.patch


def test_a_size_of_zero_is_named_where_it_divides():
    with pytest.raises(ConfigError, match="Quotient do not fit together") as error:
        Quotient(patch=0)
    assert error.value.remedy == "use 1 or more for patch"
    with pytest.raises(ConfigError, match="patch_size is 0"):
        next(iter(VIT_PRESETS.values())).replace(patch_size=0)


def test_checkpoints_are_checked_for_the_number_of_all_layers():
    """A key that holds a number of layers is one that `count_layers` adds up."""
    for registry in (MODELS, ENCODERS, CONNECTORS, QUANTIZERS):
        list(registry.values())  # imports the components
    configs, keys = [Config], set()
    for config in configs:
        configs += config.__subclasses__()
        keys |= {name for name, kind in config.__annotations__.items() if kind in (LayerCount, OptionalLayerCount)}
    assert keys >= {"layers", "global_layers"} and keys == set(LAYER_COUNT_KEYS)
    assert count_layers({"tower": {"layers": 3, "global_layers": 2}, "decoder": {"layers": 4}}) == 9
