"""CHAIR: which things a caption names that are not in the picture.

N captions
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path

import torch
from torch import Tensor

from vitrail.errors import DataError
from vitrail.evals.metrics.resample import Measure, share_of

HALLUCINATED, MENTIONS, CAPTIONS_WITH, CAPTIONS = range(4)  # columns of `chair`

# What of COCO's words goes together or means something else than its parts: a baby bird is no person.
_ANIMALS = "bird cat dog horse sheep cow elephant bear zebra giraffe animal cub"
COCO_PHRASES = {
    **{f"{age} {animal}": animal for age in ("baby", "adult") for animal in _ANIMALS.split()},
    "passenger jet": "jet", "passenger train": "train", "bow tie": "tie", "toilet seat": "toilet",
    "home plate": "", "train track": "",
}  # fmt: skip

_IRREGULAR = {"men": "man", "women": "woman", "children": "child", "people": "person", "mice": "mouse", "feet": "foot",
              "geese": "goose", "knives": "knife", "leaves": "leaf", "teeth": "tooth"}  # fmt: skip
_WORD = re.compile(r"[^\W_]+(?:-[^\W_]+)*")


class Things:
    """What can be named: for each thing its name and the synonyms of it, of one word or more. `phrases` are words that
    together mean something else than they do apart: a word of the table, or nothing in it."""

    def __init__(self, synonyms: Iterable[Sequence[str]], phrases: Mapping[str, str] | None = None):
        self.thing: dict[str, str | None] = {}
        for name, *others in synonyms:
            for word in (name, *others):
                self.thing[word.strip().lower()] = name.strip().lower()
        for phrase, meant in (phrases or {}).items():
            self.thing[phrase] = self.thing.get(meant)
        if not self.thing:
            raise DataError("a table of synonyms without a word", "give a line for each thing: name, synonym, …")
        self.longest = max(len(word.split()) for word in self.thing)

    @classmethod
    def read(cls, path: str | Path, phrases: Mapping[str, str] | None = None) -> "Things":
        """COCO's `synonyms.txt`: a line a thing, words apart by commas, its name first."""
        from vitrail.data.formats.files import read_text

        rows = []
        for number, line in enumerate(read_text(Path(path)).splitlines(), start=1):
            words = [word.strip() for word in line.split(",")]
            if not line.strip():
                continue
            if not all(words):
                raise DataError(f"{path}, line {number}: a comma beside nothing", "write name, synonym, synonym")
            rows.append(words)
        return cls(rows, phrases)

    def named(self, caption: str) -> list[str]:
        """The things that a caption names, as often as it does; of words that overlap, the longest that are known."""
        words = _WORD.findall(caption.lower())
        found, at = [], 0
        while at < len(words):
            for length in range(min(self.longest, len(words) - at), 0, -1):
                if known := self._known(words[at : at + length]):
                    found += filter(None, [self.thing[known]])
                    at += length
                    break
            else:
                at += 1
        return found

    def _known(self, words: list[str]) -> str | None:
        """The entry of the table that they are; the last may be a plural."""
        forms = (" ".join([*words[:-1], form]) for form in _singular(words[-1]))
        return next((form for form in forms if form in self.thing), None)


def chair(captions: Sequence[str], present: Sequence[AbstractSet[str]], things: Things) -> Tensor:
    """(N, 4): mentions of what is not there, mentions, whether there is one of the former, one. `present` are the
    things in each picture: those annotated and, as CHAIR has it, those that its reference captions name."""
    if len(captions) != len(present):
        raise DataError(f"{len(captions):,} captions of {len(present):,} pictures", "give one of each")
    rows = []
    for caption, there in zip(captions, present, strict=True):
        named = things.named(caption)
        wrong = sum(thing not in there for thing in named)
        rows.append([wrong, len(named), wrong > 0, 1])
    return torch.tensor(rows, dtype=torch.float64)


MEASURES: dict[str, Measure] = {
    "CHAIR_i": share_of(HALLUCINATED, MENTIONS),
    "CHAIR_s": share_of(CAPTIONS_WITH, CAPTIONS),
}


def _singular(word: str) -> list[str]:
    """What a word may be the plural of, itself first: the table of things decides."""
    forms = [word]
    if word in _IRREGULAR:
        forms.append(_IRREGULAR[word])
    for ending, instead in (("ies", "y"), ("ves", "f"), ("es", ""), ("s", "")):
        if word.endswith(ending) and len(word) > len(ending) + 1:
            forms.append(word.removesuffix(ending) + instead)
    return forms
