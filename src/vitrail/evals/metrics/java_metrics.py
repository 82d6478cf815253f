"""METEOR and COCO's tokenizer. Both are Java programs of the package pycocoevalcap.

N pictures
"""

import shutil
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vitrail.errors import ConfigError

Words = Sequence[str]


def tokenize_ptb(texts: Sequence[str]) -> list[list[str]]:
    """Tokenize texts with Stanford's Penn Treebank tokenizer, without punctuation."""
    tokenizer = _import_pycocoevalcap("COCO's tokenizer").tokenizer.ptbtokenizer.PTBTokenizer()
    words_of = tokenizer.tokenize({n: [{"caption": " ".join(text.split())}] for n, text in enumerate(texts)})
    return [words_of[n][0].split() for n in range(len(texts))]


def meteor_scores(candidates: Sequence[Words], references: Sequence[Sequence[Words]]) -> Tensor:
    """METEOR 1.5 (N,): words are aligned by form, stem, synonym and paraphrase."""
    scorer = _import_pycocoevalcap("METEOR").meteor.meteor.Meteor()
    candidate_texts = {n: [" ".join(words)] for n, words in enumerate(candidates)}
    reference_texts = {
        n: [" ".join(words) for words in image_references] for n, image_references in enumerate(references)
    }
    try:
        return torch.tensor(scorer.compute_score(reference_texts, candidate_texts)[1], dtype=torch.float64)
    except (BrokenPipeError, ValueError) as error:  # the process has ended, or its output is not a number
        scorer.lock.release()  # its destructor waits for this lock
        raise ConfigError(
            f"METEOR's Java program failed: {error}", "check `java -version`, and that 2 GB of memory are free"
        ) from None


def _import_pycocoevalcap(tool: str) -> Any:
    if shutil.which("java") is None:
        raise ConfigError(f"{tool} needs Java, which is not installed", "install a Java runtime, or disable the metric")
    try:
        import pycocoevalcap.meteor.meteor
        import pycocoevalcap.tokenizer.ptbtokenizer
    except ImportError:
        raise ConfigError(f"{tool} needs the package pycocoevalcap", "pip install pycocoevalcap") from None
    return pycocoevalcap
