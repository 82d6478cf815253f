"""Select parameters by name pattern, and check saved tensors against those of the model.

A pattern is a dotted name or a glob, and matches everything below it: `image` is the whole tower, `image.blocks.0` one
block, `*.norm` every norm.
"""

import difflib
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from torch import Tensor

from vitrail.errors import CheckpointError, ConfigError


def matches_pattern(pattern: str, name: str) -> bool:
    """Return whether the pattern matches the name or a prefix of it."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


def check_patterns_match(key: str, patterns: Iterable[str], names: Iterable[str]) -> None:
    """Raise if a pattern matches none of the names; most such patterns are typing errors."""
    names = list(names)
    for pattern in patterns:
        if not any(matches_pattern(pattern, name) for name in names):
            raise ConfigError(f"{key} {pattern!r} matches nothing in the model", _nearest(pattern, names))


def _nearest(pattern: str, names: list[str]) -> str:
    paths = {".".join(steps[:i]) for steps in (name.split(".") for name in names) for i in range(1, len(steps) + 1)}
    parent, _, last = pattern.rpartition(".")
    if "*" in parent:  # the error is in the last component: compare with all components
        prefix, wrong, known = f"{parent}.", last, {step for name in names for step in name.split(".")}
    else:
        prefix, wrong, known = "", pattern, paths
    close = difflib.get_close_matches(wrong, sorted(known), n=3)
    if close:
        return f"did you mean {' or '.join(repr(prefix + name) for name in close)}?"
    return f"its parts are {', '.join(dict.fromkeys(name.split('.')[0] for name in names))}"


def check_state_matches(state_name: str, saved: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Raise if the names or shapes of a saved state differ from those of the model."""
    names = sorted(saved.keys() | expected.keys())
    different = [n for n in names if n not in saved or n not in expected or saved[n].shape != expected[n].shape]
    if different:
        raise CheckpointError(
            f"the saved {state_name} and the model differ in {len(different)} of {len(names)} entries, "
            f"such as {different[0]!r}",
            "resume with the same model, trainable parts and settings as the saved run",
        )
