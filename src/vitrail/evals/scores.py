"""Scores with confidence intervals and baselines."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, get_args

Unit = Literal["fraction", "rank", "points", "distance", "dB"]
"""Unit of a score. Fractions lie in 0 … 1 and are printed as percentages; ranks count from 1."""

NO_SUBSET: Mapping[str, str | int] = MappingProxyType({})


@dataclass(frozen=True)
class Proportion:
    """A proportion of hits with its 95 % Wilson interval."""

    hits: int
    total: int

    @property
    def value(self) -> float:
        return self.hits / self.total if self.total else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        n, p, z = self.total, self.value, 1.959964
        if not n:
            return 0.0, 1.0
        middle, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        return max(0.0, (middle - half) / (1 + z * z / n)), min(1.0, (middle + half) / (1 + z * z / n))

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.value:.1%} [{low:.1%}, {high:.1%}] of {self.total}"


@dataclass(frozen=True)
class Score:
    """One row of a suite's results.

    value             in the given unit
    interval          95 % confidence interval
    count             number of items
    baselines         scores without the model: chance, majority, blind answers
    subset            part of the data or the model that the score covers, such as a width, language or category
    unit              unit of value, interval and baselines
    higher_is_better  direction of the score
    """

    name: str
    value: float
    interval: tuple[float, float]
    count: int
    baselines: Mapping[str, float] = field(default_factory=dict)
    subset: Mapping[str, str | int] = field(default_factory=dict)
    unit: Unit = "fraction"
    higher_is_better: bool = True

    @classmethod
    def from_proportion(cls, name: str, proportion: Proportion, **baselines: float) -> "Score":
        return cls(name, proportion.value, proportion.interval, proportion.total, baselines)

    @classmethod
    def from_dict(cls, name: str, data: Mapping[str, Any]) -> "Score":
        """Read a score from JSON."""
        unit = data.get("unit", "fraction")
        if unit not in get_args(Unit):
            raise ValueError(f"unknown unit {unit!r}")
        low, high = data["interval"]
        baselines, subset = data.get("baselines", {}), data.get("subset", {})
        higher = bool(data.get("higher_is_better", unit not in ("rank", "distance")))
        return cls(name, data["value"], (low, high), data["count"], baselines, subset, unit, higher)

    def __str__(self) -> str:
        low, high = (self._format_value(x) for x in self.interval)
        return f"{self._format_value(self.value)} [{low}, {high}]{' dB' * (self.unit == 'dB')} of {self.count:,}"

    @property
    def title(self) -> str:
        return ", ".join([self.name, *(f"{key} {value}" for key, value in self.subset.items())])

    @property
    def as_dict(self) -> dict[str, Any]:
        """The score as a JSON object."""
        return {
            "name": self.name.strip(),
            **({"subset": dict(self.subset)} if self.subset else {}),
            "value": self.value,
            "interval": list(self.interval),
            "count": self.count,
            "baselines": dict(self.baselines),
            "unit": self.unit,
            "higher_is_better": self.higher_is_better,
        }

    @property
    def beats_baselines(self) -> bool:
        """Whether the whole interval is better than every baseline; True without baselines."""
        if self.higher_is_better:
            return all(self.interval[0] > value for value in self.baselines.values())
        return all(self.interval[1] < value for value in self.baselines.values())

    @property
    def baselines_text(self) -> str:
        return ", ".join(f"{name} {self._format_value(value)}" for name, value in self.baselines.items())

    def _format_value(self, value: float) -> str:
        return f"{value:.1%}" if self.unit == "fraction" else f"{value:.1f}"
