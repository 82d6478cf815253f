"""One kind of error for what a person can mend: it names the culprit and the remedy."""

import difflib
from collections.abc import Iterable


class VitrailError(Exception):
    """Something outside the code is wrong: a file, a config, an argument.

    The command line prints `problem` and `remedy` without a traceback and exits with 2.
    """

    def __init__(self, problem: str, remedy: str = ""):
        super().__init__(f"{problem}\n  → {remedy}" if remedy else problem)
        self.problem = problem
        self.remedy = remedy

    def __reduce__(self) -> tuple[type["VitrailError"], tuple[str, str]]:
        """The same in another process."""
        return type(self), (self.problem, self.remedy)


class ConfigError(VitrailError):
    """A config that cannot be: unknown key, wrong type, sizes that do not fit."""


class ImageError(VitrailError):
    """A picture that cannot be used."""


class DataError(VitrailError):
    """A data set that cannot be fetched, or a file, sample or video of it that cannot be read as what it should be."""


class TextError(VitrailError):
    """A tokenizer, vocabulary or chat template that cannot be used."""


class CheckpointError(VitrailError):
    """Weights that cannot be read, or do not fit the model."""


class TrainError(VitrailError):
    """A run that cannot go on, with all that was done kept."""


class Stopped(TrainError):
    """A run that a signal ended, which is meant for all runs, and no fault of this one."""


class StreamError(VitrailError):
    """A sample that cannot be one stream: tokens, features, spans or losses that do not fit each other."""


def nearest(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """A remedy for a name that nobody knows: the one it comes closest to, or `otherwise`, or all that there are."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1) or difflib.get_close_matches(name.lower(), known, n=1)
    return f"did you mean {close[0]!r}?" if close else otherwise or f"known: {', '.join(known)}"
