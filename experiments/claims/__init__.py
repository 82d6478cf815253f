"""Claims of published papers, tested with small models."""
