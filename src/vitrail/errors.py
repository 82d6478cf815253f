"""One kind of error for what a person can mend: it names the culprit and the remedy."""


class VitrailError(Exception):
    """Something outside the code is wrong: a file, a config, an argument.

    The command line prints `problem` and `remedy` without a traceback and exits with 2.
    """

    def __init__(self, problem: str, remedy: str = ""):
        super().__init__(f"{problem}\n  → {remedy}" if remedy else problem)
        self.problem = problem
        self.remedy = remedy


class ConfigError(VitrailError):
    """A config that cannot be: unknown key, wrong type, sizes that do not fit."""


class ImageError(VitrailError):
    """A picture that cannot be used."""


class TextError(VitrailError):
    """A tokenizer, vocabulary or chat template that cannot be used."""


class CheckpointError(VitrailError):
    """Weights that cannot be read, or do not fit the model."""
