"""Benchmarks: each takes embeddings or features and gives `Score`s, every one with its interval and its baselines."""
