"""Systems as short compositions of parts."""
