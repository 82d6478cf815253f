"""Clips: short videos of moving shapes with events at known times, and questions about them."""
