"""Synthetic scenes composed of sprites, with known ground truth: objects, positions, colours and depth order."""
