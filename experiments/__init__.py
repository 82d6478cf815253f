"""Experiments with Vitrail that reproduce or test published results. They are not part of the installed package."""
