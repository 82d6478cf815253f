"""What the fuzzer needs to know of a format."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from fuzz import mutations
from fuzz.mutations import Mutation


class Target(NamedTuple):
    """A valid file to mutate, and a function that reads all it holds. It raises VitrailError if it refuses the file."""

    name: str
    file: Path
    read: Callable[[], Any]


class FuzzFormat(NamedTuple):
    """A function that writes the targets of a format to a new folder, and the mutation of their bytes."""

    prepare: Callable[[Path], list[Target]]
    mutate: Mutation = mutations.mutate_bytes
