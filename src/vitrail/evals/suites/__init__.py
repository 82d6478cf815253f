"""Evaluation suites: benchmarks and the measurements behind `vitrail eval`."""
