"""How a tour tells where it is."""

from collections.abc import Callable
from typing import Any

Step = Callable[[str], Callable[[int, int], Any]]
"""What begins now → a function that is told how far it is"""
