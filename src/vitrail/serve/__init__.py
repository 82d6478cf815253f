"""Serving: pages and servers that run on this machine."""
