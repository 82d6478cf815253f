"""Words about scenes: captions, questions with their answers, prompts to draw, and pairs to prefer."""

from vitrail.data.words.ask import DRAFTS, ask, ask_several, converse, longest
from vitrail.data.words.balance import Baseline, balanced, baselines, table
from vitrail.data.words.captions import INVENTED, Pair, preference, swap
from vitrail.data.words.pieces import Pieces, TokenTable
from vitrail.data.words.prompts import Prompt, Spec, matches, prompt, prompts
from vitrail.data.words.said import KINDS, Said
from vitrail.data.words.vocabulary import train_tokenizer
from vitrail.data.words.words import Words

__all__ = [
    "DRAFTS",
    "INVENTED",
    "KINDS",
    "Baseline",
    "Pair",
    "Pieces",
    "Prompt",
    "Said",
    "Spec",
    "TokenTable",
    "Words",
    "ask",
    "ask_several",
    "balanced",
    "baselines",
    "converse",
    "longest",
    "matches",
    "preference",
    "prompt",
    "prompts",
    "swap",
    "table",
    "train_tokenizer",
]
