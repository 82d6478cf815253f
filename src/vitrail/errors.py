"""Error classes. Each error states the problem and its remedy."""

import difflib
from collections.abc import Iterable

MAX_LISTED_NAMES = 24  # longest list of names beside a suggestion


class VitrailError(Exception):
    """Base class of errors that the user can fix: a bad file, config or argument.

    The command line prints `problem` and `remedy` without a traceback and exits with status 2.
    """

    def __init__(self, problem: str, remedy: str = ""):
        super().__init__(f"{problem}\n  → {remedy}" if remedy else problem)
        self.problem = problem
        self.remedy = remedy

    def __reduce__(self) -> tuple[type["VitrailError"], tuple[str, str]]:
        """Make the error picklable, so that worker processes can raise it."""
        return type(self), (self.problem, self.remedy)

    def with_prefix(self, place: object) -> "VitrailError":
        """Return the error with a place, such as a file, before its problem."""
        kind, (problem, remedy) = self.__reduce__()
        return kind(f"{place}: {problem}", remedy)


class ConfigError(VitrailError):
    """Invalid config: unknown key, wrong type, or sizes that do not match."""


class ConfigKeyError(ConfigError):
    """Error about one key of a config. The templates contain {config}, the class, and {key}, the dotted key."""

    def __init__(self, config: type, key: str, problem: str, remedy: str):
        self.key, self.templates = key, (problem, remedy)
        texts = (
            text.replace("{config}", config.__name__).replace("{key}", key or config.__name__)
            for text in self.templates
        )
        super().__init__(*texts)

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, str]]:
        return ConfigError, (self.problem, self.remedy)

    def move_to(self, config: type, parent: str) -> "ConfigKeyError":
        """Return the error of a config that contains this one under the key `parent`."""
        return ConfigKeyError(config, join_keys(parent, self.key), *self.templates)


def join_keys(parent: str, key: str) -> str:
    """Join a dotted key and a key below it."""
    return ".".join(filter(None, (parent, key)))


class ImageError(VitrailError):
    """Invalid or unreadable image."""


class DataError(VitrailError):
    """Dataset that cannot be downloaded, or one of its files, samples or videos that cannot be read."""


class TextError(VitrailError):
    """Invalid tokenizer, vocabulary or chat template."""


class CheckpointError(VitrailError):
    """Checkpoint that cannot be read or does not match the model."""


class TrainError(VitrailError):
    """Training run that cannot continue. Its saved checkpoints remain valid."""


class TrainingInterrupted(TrainError):
    """Training run that a signal stopped. The signal addresses all runs; this run did not fail."""


class StreamError(VitrailError):
    """Sample that cannot form a stream: its tokens, features, spans or losses do not match."""


def suggest_name(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """Return a remedy for an unknown name: the closest known name, and all known names or what `otherwise` says.

    A long list of names is omitted if one is close.
    """
    known = list(known)
    rest = otherwise or f"known: {', '.join(known)}"
    close = difflib.get_close_matches(name, known, n=1) or difflib.get_close_matches(name.lower(), known, n=1)
    if not close:
        return rest
    return f"did you mean {close[0]!r}?" + (f" {rest}" if len(known) <= MAX_LISTED_NAMES else "")
