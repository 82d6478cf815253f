"""Laws, groups of tasks and differences of two tables, laid out as figures."""

from collections.abc import Mapping

import numpy as np

from vitrail.lab import curves
from vitrail.lab.scaling import Law
from vitrail.lab.scores import Column
from vitrail.show.figure import Figure
from vitrail.show.scaling import Fitted, draw_clusters, draw_differences, draw_laws


def laws_figure(laws: Mapping[str, Law], scores: str) -> Figure:
    panels = []
    for name, law in laws.items():
        n = np.geomspace(*law.ends, 60)
        value, low, high = (list(zip(n.tolist(), line.tolist(), strict=True)) for line in law.predict(n))
        told = f"{law.form}: " + "  ".join(f"{key} {x:.4g}" for key, x in law.parameters.items())
        panels.append(Fitted(name, told, list(zip(law.n, law.s, strict=True)), value, low, high, law.outliers))
    note = "score over visual tokens; dashes hold 95 % of new measurements, red ones are outliers"
    return draw_laws(panels, f"Laws of {scores}", note)


def clusters_figure(columns: Mapping[str, Column], count: int, scores: str) -> Figure:
    groups = [
        {task: list(zip(columns[task].n, curves.scaled(columns[task]), strict=True)) for task in group}
        for group in curves.clusters(columns, count)
    ]
    note = "scores between the least and the most, over visual tokens"
    return draw_clusters(groups, f"Curves of {scores} that are alike", note)


def differences_figure(gaps: Mapping[str, Column], scores: str, against: str) -> Figure:
    points = {name: list(zip(*gap, strict=True)) for name, gap in gaps.items()}
    signs = [value > 0 for gap in gaps.values() for value in gap.s]
    note = f"{scores} is better (green) in {sum(signs)} of {len(signs)}; from few tokens, above, to many"
    return draw_differences(points, f"What {scores} has over {against}", note)
