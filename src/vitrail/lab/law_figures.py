"""Figures of fitted laws, clustered score curves and differences between two tables."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from vitrail.lab import score_curves
from vitrail.lab.scaling_law import ScalingLaw
from vitrail.lab.score_tables import ScoreColumn
from vitrail.plots.scaling_plots import LawPanel, draw_clusters, draw_differences, draw_laws

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def build_laws_figure(laws: Mapping[str, ScalingLaw], table_name: str) -> "Figure":
    """Plot each task's scores with its fitted law."""
    panels = []
    for name, law in laws.items():
        n = np.geomspace(*law.token_range, 60)
        value, low, high = (list(zip(n.tolist(), line.tolist(), strict=True)) for line in law.predict(n))
        formula = f"{law.form}: " + "  ".join(f"{key} {x:.4g}" for key, x in law.parameters.items())
        panels.append(LawPanel(name, formula, list(zip(law.n, law.s, strict=True)), value, low, high, law.outliers))
    note = "score over visual tokens; dashed: 95 % interval of a new measurement; red: outliers"
    return draw_laws(panels, f"Laws of {table_name}", note)


def build_clusters_figure(columns: Mapping[str, ScoreColumn], num_clusters: int, table_name: str) -> "Figure":
    """Plot clusters of tasks with similar score curves."""
    groups = [
        {task: list(zip(columns[task].n, score_curves.rescale_scores(columns[task]), strict=True)) for task in group}
        for group in score_curves.cluster_curves(columns, num_clusters)
    ]
    note = "rescaled scores over visual tokens"
    return draw_clusters(groups, f"Similar score curves of {table_name}", note)


def build_differences_figure(differences: Mapping[str, ScoreColumn], table_name: str, baseline_name: str) -> "Figure":
    """Plot the difference between two tables, one panel per task."""
    points = {name: list(zip(*gap, strict=True)) for name, gap in differences.items()}
    signs = [value > 0 for gap in differences.values() for value in gap.s]
    note = f"{table_name} is better (green) in {sum(signs)} of {len(signs)} cases; tokens increase downwards"
    return draw_differences(points, f"{table_name} minus {baseline_name}", note)
