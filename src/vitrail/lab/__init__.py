"""Measuring: what a design costs and keeps."""
