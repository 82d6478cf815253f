"""Choosing parts of a model by name, and what was saved by name.

A pattern is a dotted name or a glob over one, and takes everything below it: `image` is the whole tower,
`image.blocks.0` one block, `*.norm` every norm.
"""

import difflib
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from torch import Tensor

from vitrail.errors import CheckpointError, ConfigError


def matches(pattern: str, name: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


def refuse_idle(what: str, patterns: Iterable[str], names: Iterable[str]) -> None:
    """Refuse a pattern that matches none of the names: it is a slip of the pen more often than not."""
    names = list(names)
    for pattern in patterns:
        if not any(matches(pattern, name) for name in names):
            raise ConfigError(f"{what} {pattern!r} matches nothing in the model", _nearest(pattern, names))


def _nearest(pattern: str, names: list[str]) -> str:
    paths = {".".join(steps[:i]) for steps in (name.split(".") for name in names) for i in range(1, len(steps) + 1)}
    head, _, last = pattern.rpartition(".")
    if "*" in head:  # the slip is in the last step: look among the steps
        lead, wrong, known = f"{head}.", last, {step for name in names for step in name.split(".")}
    else:
        lead, wrong, known = "", pattern, paths
    close = difflib.get_close_matches(wrong, sorted(known), n=3)
    if close:
        return f"did you mean {' or '.join(repr(lead + name) for name in close)}?"
    return f"its parts are {', '.join(dict.fromkeys(name.split('.')[0] for name in names))}"


def refuse_other(what: str, saved: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    """Refuse a saved state whose names or shapes are not those of our own."""
    names = sorted(saved.keys() | own.keys())
    other = [n for n in names if n not in saved or n not in own or saved[n].shape != own[n].shape]
    if other:
        raise CheckpointError(
            f"the saved {what} and the model's differ in {len(other)} of {len(names)} entries, such as {other[0]!r}",
            "resume with the model, the trainable parts and the settings that were saved",
        )
