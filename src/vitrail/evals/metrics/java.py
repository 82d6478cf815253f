"""What only Java programs give: METEOR, and COCO's tokenizer. Both come with the package pycocoevalcap.

N pictures
"""

import shutil
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vitrail.errors import ConfigError
from vitrail.evals.metrics.captions import Words


def ptb(texts: Sequence[str]) -> list[list[str]]:
    """The words of each text, as Stanford's Penn treebank tokenizer has them, without punctuation."""
    tokenizer = _package("COCO's tokenizer").tokenizer.ptbtokenizer.PTBTokenizer()
    found = tokenizer.tokenize({n: [{"caption": " ".join(text.split())}] for n, text in enumerate(texts)})
    return [found[n][0].split() for n in range(len(texts))]


def meteor(candidates: Sequence[Words], references: Sequence[Sequence[Words]]) -> Tensor:
    """METEOR 1.5 (N,): words aligned by form, stem, synonym and paraphrase."""
    scorer = _package("METEOR").meteor.meteor.Meteor()
    said = {n: [" ".join(words)] for n, words in enumerate(candidates)}
    truths = {n: [" ".join(words) for words in several] for n, several in enumerate(references)}
    try:
        return torch.tensor(scorer.compute_score(truths, said)[1], dtype=torch.float64)
    except (BrokenPipeError, ValueError) as error:  # its process has ended, or says something else than numbers
        scorer.lock.release()  # which it waits for when it goes
        raise ConfigError(
            f"METEOR's Java program failed: {error}", "does `java -version` work, and are 2 GB free?"
        ) from None


def _package(what: str) -> Any:
    if shutil.which("java") is None:
        raise ConfigError(
            f"{what} is a Java program, and there is no java here", "install a Java runtime, or leave it out"
        )
    try:
        import pycocoevalcap.meteor.meteor
        import pycocoevalcap.tokenizer.ptbtokenizer
    except ImportError:
        raise ConfigError(f"{what} comes with a package that is not here", "pip install pycocoevalcap") from None
    return pycocoevalcap
