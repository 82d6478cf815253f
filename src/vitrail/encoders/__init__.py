"""Pixels and words to features."""
