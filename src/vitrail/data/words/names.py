"""What the sprite table's concepts are called here, which of them one name may mean, and how they are drawn.

S sprites, C concepts, n concepts in use, m things.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vitrail.data.scenes.scene import SpriteTable
from vitrail.data.words import english
from vitrail.data.words.frames import Noun
from vitrail.errors import ConfigError


class Names:
    """What the table's concepts are called here. Names lose their colours, for a tint may contradict them, and concepts
    that then have one name are one concept."""

    def __init__(self, table: SpriteTable, sprites: Tensor | None):
        concept = table.concept.cpu()
        words = {c for c, kind in zip(concept.tolist(), table.kind, strict=True) if kind == "word"}
        rows: dict[tuple[bool, str], int] = {}
        self.texts, self.nouns, self.category, merged = [], [], [], []
        for c, (name, plural) in enumerate(zip(table.names, table.plurals, strict=True)):
            if not name.strip():
                raise ConfigError(f"concept {c} of the sprite table has no name", "name it, or leave it out")
            text = name if c in words else english.without_colour(name)
            key = (c in words, text.lower())
            if key not in rows:
                rows[key] = len(rows)
                single, many = english.noun(text, english.without_colour(plural))
                self.texts.append(text)
                self.nouns.append(Noun(f'word "{text}"', f'words "{text}"', True) if c in words else Noun(single, many))
                self.category.append(table.category[c])
            merged.append(rows[key])
        self.nouns.append(Noun("word", "words"))  # whatever it says
        self.concept = torch.tensor(merged)[concept]  # (S,)
        self.is_word = torch.tensor([word for word, _ in rows])
        used = self.concept if sprites is None else self.concept[sprites.cpu()]
        self.used = torch.bincount(used, minlength=len(rows)) > 0
        things = ~self.is_word
        self.place = torch.where(things, things.cumsum(0) - 1, things.sum())


def alike(names: Sequence[str]) -> Tensor:
    """(m, m): the words of one name are all said of the other's thing. The last row and column, of words, are False."""
    said = [frozenset(name.lower().split()) for name in names]
    bags = [english.meanings(name) for name in names]
    holders: dict[str, set[int]] = {}
    for i, bag in enumerate(bags):
        for word in bag:
            holders.setdefault(word, set()).add(i)
    found = torch.zeros(len(names) + 1, len(names) + 1, dtype=torch.bool)
    for i, words in enumerate(said):
        wider = sorted(set.intersection(*(holders[word] for word in words)))
        found[i, wider] = True
        found[wider, i] = True
    return found


@dataclass(frozen=True, eq=False)
class Pools:
    """Concepts to draw from. A concept has as many tickets as its weight; a pool is a run of tickets."""

    concept: Tensor  # (n,) those in use: words last, before them things, one category behind the other
    ends: Tensor  # (n,) running sum of the tickets
    first: Tensor  # (C,) the first ticket of a concept's category
    many: Tensor  # (C,) tickets of that category
    things: int  # tickets of all things
    words: int  # tickets of all words

    @classmethod
    def of(cls, names: Names, weight: Tensor) -> "Pools":
        """`weight` (C,) is 0 for what is not in use."""
        order = sorted(weight.nonzero()[:, 0].tolist(), key=lambda c: (bool(names.is_word[c]), names.category[c]))
        concept = torch.tensor(order, dtype=torch.int64)
        ends = weight[concept].cumsum(0)
        runs: dict[str, list[int]] = {}
        for c, end in zip(order, ends.tolist(), strict=True):
            runs.setdefault(names.category[c], [end - int(weight[c]), end])[1] = end
        run = torch.tensor([runs.get(kind, [0, 0]) for kind in names.category])
        words = int((weight * names.is_word).sum())
        return cls(concept, ends, run[:, 0], run[:, 1] - run[:, 0], int(weight.sum()) - words, words)

    def to(self, device: torch.device | str) -> "Pools":
        concept, ends, first, many = (t.to(device) for t in (self.concept, self.ends, self.first, self.many))
        return Pools(concept, ends, first, many, self.things, self.words)

    def at(self, ticket: Tensor) -> Tensor:
        """Tickets → concepts"""
        place = torch.searchsorted(self.ends, ticket, right=True)
        return self.concept[place.clamp(max=len(self.concept) - 1)]
