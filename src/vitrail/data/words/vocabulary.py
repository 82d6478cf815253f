"""A small vocabulary for models that read and write nothing else."""

from collections.abc import Sequence

from vitrail.data.words.words import Words
from vitrail.processing.text import Tokenizer


def train_tokenizer(words: Words, size: int, *, specials: Sequence[str] = ("<|endoftext|>",)) -> Tokenizer:
    """A byte-level tokenizer trained on every piece that can be written, each counted once; it has ids for all text."""
    return Tokenizer.train(words.pieces.texts[1:], size, specials=specials)
