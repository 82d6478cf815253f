"""Concept names of a sprite table: nouns, names that overlap in meaning, and pools for sampling concepts.

Shapes: S sprites, C concepts, n concepts in use, m things.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vitrail.data.language import english
from vitrail.data.language.compiled_templates import Noun
from vitrail.data.scenes.scene import SpriteTable
from vitrail.errors import ConfigError


class ConceptNames:
    """Names of the table's concepts.

    Colour words are removed from names, because a tint could contradict them. Concepts that then have equal names
    become one concept.
    """

    def __init__(self, table: SpriteTable, sprite_rows: Tensor | None):
        concept = table.concept.cpu()
        words = {c for c, kind in zip(concept.tolist(), table.kind, strict=True) if kind == "word"}
        rows: dict[tuple[bool, str], int] = {}
        self.texts, self.nouns, self.category, merged = [], [], [], []
        for c, (name, plural) in enumerate(zip(table.names, table.plurals, strict=True)):
            if not name.strip():
                raise ConfigError(f"concept {c} of the sprite table has no name", "name it, or remove it")
            text = name if c in words else english.strip_colour(name)
            key = (c in words, text.lower())
            if key not in rows:
                rows[key] = len(rows)
                single, many = english.countable_noun(text, english.strip_colour(plural))
                self.texts.append(text)
                self.nouns.append(Noun(f'word "{text}"', f'words "{text}"', True) if c in words else Noun(single, many))
                self.category.append(table.category[c])
            merged.append(rows[key])
        self.nouns.append(Noun("word", "words"))  # for any word
        self.concept = torch.tensor(merged)[concept]  # (S,)
        self.is_word = torch.tensor([word for word, _ in rows])
        used = self.concept if sprite_rows is None else self.concept[sprite_rows.cpu()]
        self.is_used = torch.bincount(used, minlength=len(rows)) > 0
        things = ~self.is_word
        self.name_index = torch.where(things, things.cumsum(0) - 1, things.sum())


def match_overlapping_names(names: Sequence[str]) -> Tensor:
    """Return pairs of names (m, m) of which one can describe the other. The last row and column (words) are False."""
    name_words = [frozenset(name.lower().split()) for name in names]
    bags = [english.name_synonyms(name) for name in names]
    holders: dict[str, set[int]] = {}
    for i, bag in enumerate(bags):
        for word in bag:
            holders.setdefault(word, set()).add(i)
    found = torch.zeros(len(names) + 1, len(names) + 1, dtype=torch.bool)
    for i, words in enumerate(name_words):
        wider = sorted(set.intersection(*(holders[word] for word in words)))
        found[i, wider] = True
        found[wider, i] = True
    return found


@dataclass(frozen=True, eq=False)
class ConceptPools:
    """Pools for weighted sampling of concepts. A concept has one ticket per weight unit; a pool is a ticket range."""

    concept: Tensor  # (n,) concepts in use: things sorted by category, then words
    ticket_ends: Tensor  # (n,) cumulative sum of the tickets
    category_start: Tensor  # (C,) first ticket of a concept's category
    category_tickets: Tensor  # (C,) number of tickets of that category
    thing_tickets: int  # number of tickets of all things
    word_tickets: int  # number of tickets of all words

    @classmethod
    def from_weights(cls, names: ConceptNames, weight: Tensor) -> "ConceptPools":
        """Build pools from weights (C,), which are 0 for unused concepts."""
        order = sorted(weight.nonzero()[:, 0].tolist(), key=lambda c: (bool(names.is_word[c]), names.category[c]))
        concept = torch.tensor(order, dtype=torch.int64)
        ends = weight[concept].cumsum(0)
        runs: dict[str, list[int]] = {}
        for c, end in zip(order, ends.tolist(), strict=True):
            runs.setdefault(names.category[c], [end - int(weight[c]), end])[1] = end
        run = torch.tensor([runs.get(kind, [0, 0]) for kind in names.category])
        words = int((weight * names.is_word).sum())
        return cls(concept, ends, run[:, 0], run[:, 1] - run[:, 0], int(weight.sum()) - words, words)

    def to(self, device: torch.device | str) -> "ConceptPools":
        concept, ends, first, many = (
            t.to(device) for t in (self.concept, self.ticket_ends, self.category_start, self.category_tickets)
        )
        return ConceptPools(concept, ends, first, many, self.thing_tickets, self.word_tickets)

    def concept_at(self, ticket: Tensor) -> Tensor:
        """Return the concepts of tickets."""
        place = torch.searchsorted(self.ticket_ends, ticket, right=True)
        return self.concept[place.clamp(max=len(self.concept) - 1)]
