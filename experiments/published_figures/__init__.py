"""Published figures and their recomputed values."""
