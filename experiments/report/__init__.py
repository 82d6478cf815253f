"""The HTML report of computed figures and stored results."""
