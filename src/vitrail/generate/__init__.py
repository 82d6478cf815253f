"""Sampling: from logits to tokens, one after another."""
