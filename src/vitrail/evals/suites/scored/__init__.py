"""From answers to scores: what each kind of benchmark makes of them. Baselines are answers too, scored alike."""

from collections.abc import Sequence

Said = Sequence[str]
Values = list[float]
