"""Evaluation: `run`, the benchmark suites, metrics, and the detector that judges generated images."""

from vitrail.evals.evaluation import EvaluationResult, Suite, find_suite, list_suites, run
from vitrail.evals.scores import Score

__all__ = ["EvaluationResult", "Score", "Suite", "find_suite", "list_suites", "run"]
