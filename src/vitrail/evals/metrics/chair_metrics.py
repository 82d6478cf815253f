"""CHAIR: objects that a caption names but that are not in the image.

N captions
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path

import torch
from torch import Tensor

from vitrail.errors import DataError
from vitrail.evals.metrics.resampling import SumsMeasure, ratio_of_columns
from vitrail.evals.metrics.scoring_table import AnswerTexts, ScoringTable, score_from_sums
from vitrail.evals.scores import Score

HALLUCINATED_MENTIONS, MENTIONS, HALLUCINATED_CAPTIONS, CAPTIONS = range(4)  # columns of `chair`

# COCO phrases with a meaning of their own: a baby bird is not a person.
_ANIMALS = "bird cat dog horse sheep cow elephant bear zebra giraffe animal cub"
COCO_PHRASES = {
    **{f"{age} {animal}": animal for age in ("baby", "adult") for animal in _ANIMALS.split()},
    "passenger jet": "jet", "passenger train": "train", "bow tie": "tie", "toilet seat": "toilet",
    "home plate": "", "train track": "",
}  # fmt: skip

_IRREGULAR_PLURALS = {
    "men": "man",
    "women": "woman",
    "children": "child",
    "people": "person",
    "mice": "mouse",
    "feet": "foot",
    "geese": "goose",
    "knives": "knife",
    "leaves": "leaf",
    "teeth": "tooth",
}
_WORD = re.compile(r"[^\W_]+(?:-[^\W_]+)*")


class ObjectVocabulary:
    """Table of object names and their synonyms, of one or more words.

    `phrases` map phrases with a meaning of their own to a word of the table, or to "" for no object.
    """

    def __init__(self, synonyms: Iterable[Sequence[str]], phrases: Mapping[str, str] | None = None):
        self.object_of_word: dict[str, str | None] = {}
        for name, *others in synonyms:
            for word in (name, *others):
                self.object_of_word[word.strip().lower()] = name.strip().lower()
        for phrase, meaning in (phrases or {}).items():
            self.object_of_word[phrase] = self.object_of_word.get(meaning)
        if not self.object_of_word:
            raise DataError("the synonym table is empty", "write one line per object: name, synonym, …")
        self.max_words = max(len(word.split()) for word in self.object_of_word)

    @classmethod
    def from_file(cls, path: str | Path, phrases: Mapping[str, str] | None = None) -> "ObjectVocabulary":
        """Read COCO's `synonyms.txt`: one line per object, words separated by commas, the name first."""
        from vitrail.data.formats.data_files import read_text

        rows = []
        for number, line in enumerate(read_text(Path(path)).splitlines(), start=1):
            words = [word.strip() for word in line.split(",")]
            if not line.strip():
                continue
            if not all(words):
                raise DataError(f"{path}, line {number}: empty synonym", "write name, synonym, synonym")
            rows.append(words)
        return cls(rows, phrases)

    def find_objects(self, caption: str) -> list[str]:
        """Find all object mentions of a caption; of overlapping phrases the longest known one counts."""
        words = _WORD.findall(caption.lower())
        mentions, position = [], 0
        while position < len(words):
            for length in range(min(self.max_words, len(words) - position), 0, -1):
                if entry := self._find_entry(words[position : position + length]):
                    mentions += filter(None, [self.object_of_word[entry]])
                    position += length
                    break
            else:
                position += 1
        return mentions

    def _find_entry(self, words: list[str]) -> str | None:
        """Find the table entry of a phrase; its last word may be a plural."""
        forms = (" ".join([*words[:-1], form]) for form in _singular_forms(words[-1]))
        return next((form for form in forms if form in self.object_of_word), None)


def count_hallucinations(
    captions: Sequence[str], present_objects: Sequence[AbstractSet[str]], vocabulary: ObjectVocabulary
) -> Tensor:
    """Count hallucinated objects per caption: (N, 4).

    Columns: hallucinated mentions, mentions, whether any mention is hallucinated, and 1. `present_objects` are the
    objects of each image: the annotated ones and, as in CHAIR, those named by its reference captions.
    """
    if len(captions) != len(present_objects):
        raise DataError(f"{len(captions):,} captions for {len(present_objects):,} images", "pass one caption per image")
    rows = []
    for caption, image_objects in zip(captions, present_objects, strict=True):
        mentions = vocabulary.find_objects(caption)
        hallucinated = sum(thing not in image_objects for thing in mentions)
        rows.append([hallucinated, len(mentions), hallucinated > 0, 1])
    return torch.tensor(rows, dtype=torch.float64)


CHAIR_MEASURES: dict[str, SumsMeasure] = {
    "CHAIR_i": ratio_of_columns(HALLUCINATED_MENTIONS, MENTIONS),
    "CHAIR_s": ratio_of_columns(HALLUCINATED_CAPTIONS, CAPTIONS),
}


def _singular_forms(word: str) -> list[str]:
    """Possible singular forms of a word, the word itself first."""
    forms = [word]
    if word in _IRREGULAR_PLURALS:
        forms.append(_IRREGULAR_PLURALS[word])
    for ending, replacement in (("ies", "y"), ("ves", "f"), ("es", ""), ("s", "")):
        if word.endswith(ending) and len(word) > len(ending) + 1:
            forms.append(word.removesuffix(ending) + replacement)
    return forms


def score_chair(table: ScoringTable, answers: AnswerTexts, *, synonyms: str | Path | ObjectVocabulary) -> list[Score]:
    """Score CHAIR. Objects of an image are the annotated ones and those that the reference captions name.

    synonyms  a vocabulary, or a file with one line an object: its name and synonyms, separated by commas
    """
    if not isinstance(synonyms, ObjectVocabulary):
        synonyms = ObjectVocabulary.from_file(synonyms, COCO_PHRASES)
    present = []
    for sample in table.samples:
        texts = [*(thing.category for thing in sample.instances), *sample.captions]
        present.append({thing for text in texts for thing in synonyms.find_objects(text)})
    counts = count_hallucinations(answers, present, synonyms)
    return [score_from_sums(name, counts, measure, table.image_keys) for name, measure in CHAIR_MEASURES.items()]
