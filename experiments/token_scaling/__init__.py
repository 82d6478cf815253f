"""The token-scaling experiment: scores over the number of visual tokens."""
