"""Example of a third-party package that extends Vitrail."""
