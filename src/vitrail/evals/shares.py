"""Scores with their intervals, and what they stand beside."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

EVERYTHING: Mapping[str, str | int] = MappingProxyType({})


@dataclass(frozen=True)
class Share:
    """So many of so many, with Wilson's interval of 95 %."""

    hits: int
    of: int

    @property
    def value(self) -> float:
        return self.hits / self.of if self.of else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        n, p, z = self.of, self.value, 1.959964
        if not n:
            return 0.0, 1.0
        middle, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        return max(0.0, (middle - half) / (1 + z * z / n)), min(1.0, (middle + half) / (1 + z * z / n))

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.value:.1%} [{low:.1%}, {high:.1%}] of {self.of}"


@dataclass(frozen=True)
class Score:
    """One line of a suite's table. `beside` is what can be had without the model: chance, the majority, not looking.
    `rank` says that the value is a rank, counted from 1, and no share; `points` that it is a sum of points. `part` is
    what of the data or the model it is for: a width, a language, a category."""

    name: str
    value: float
    interval: tuple[float, float]
    of: int
    beside: Mapping[str, float] = field(default_factory=dict)
    rank: bool = False
    part: Mapping[str, str | int] = field(default_factory=dict)
    points: bool = False

    @classmethod
    def counted(cls, name: str, share: Share, **beside: float) -> "Score":
        return cls(name, share.value, share.interval, share.of, beside)

    def __str__(self) -> str:
        low, high = (self._told(x) for x in self.interval)
        return f"{self._told(self.value)} [{low}, {high}] of {self.of:,}"

    @property
    def title(self) -> str:
        return ", ".join([self.name, *(f"{key} {value}" for key, value in self.part.items())])

    @property
    def plain(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "name": self.name.strip(),
            **({"part": dict(self.part)} if self.part else {}),
            "value": self.value,
            "interval": list(self.interval),
            "of": self.of,
            "beside": dict(self.beside),
            "rank": self.rank,
            **({"points": True} if self.points else {}),
        }

    @property
    def baselines(self) -> str:
        return ", ".join(f"{name} {self._told(value)}" for name, value in self.beside.items())

    def _told(self, value: float) -> str:
        return f"{value:.1f}" if self.rank or self.points else f"{value:.1%}"
