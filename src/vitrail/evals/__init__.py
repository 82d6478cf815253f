"""Measuring what models can do: judges, metrics and suites."""
