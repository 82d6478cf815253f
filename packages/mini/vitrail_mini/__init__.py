"""Weights of the small models of Vitrail. `vitrail.load` finds them by name."""
