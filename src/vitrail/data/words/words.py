"""Everything that is compiled once: the pieces, the templates of each kind, and what the concepts are to each other.

S sprites, C concepts, m things.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vitrail.data.scenes.backgrounds import NAMES
from vitrail.data.scenes.scene import SpriteTable
from vitrail.data.words import english, templates
from vitrail.data.words.english import MOST
from vitrail.data.words.frames import Frames, Lexicon
from vitrail.data.words.names import Names, Pools, alike
from vitrail.data.words.pieces import Pieces
from vitrail.errors import ConfigError

ALWAYS = 1 << 32  # of as many: a chance that is a certainty


class Sort(NamedTuple):
    """The templates of one kind."""

    question: Frames
    answer: Frames


@dataclass(frozen=True, eq=False, repr=False)
class Words:
    """Made by `Words.of`; moved by `to`. All that follows reads from it and makes no string."""

    pieces: Pieces
    objects: int  # slots that a scene may have
    grid: int  # boxes are written in whole numbers below this
    concepts: int  # C; the noun behind the last is “word”, whatever it says
    backgrounds: int  # kinds of them that have a name
    sorts: dict[str, Sort]
    loose: dict[str, Frames]  # templates that are no question and no answer
    concept: Tensor  # (S,) the concept that words know a sprite by
    is_frame: Tensor  # (S,)
    is_word: Tensor  # (C,)
    names: Names
    even: Pools  # every concept in use alike
    popular: Pools  # every concept as often as in the data, as far as that was measured (`balanced`)
    place: Tensor  # (C,) row of `alike`; the last one for words
    alike: Tensor  # (m, m) two names of which one may be said of the other: “dog” and “dog face”
    weight: dict[str, Tensor]  # kind → (labels,) how much candidates of each label weigh when one is chosen
    keep: dict[str, Tensor]  # kind → (labels,) how often, of ALWAYS, a question with this label is asked at all

    @classmethod
    def of(
        cls,
        table: SpriteTable,
        *,
        objects: int = 8,
        sprites: Tensor | None = None,
        backgrounds: Sequence[str] = tuple(english.BACKGROUNDS.get(name, name) for name in NAMES),
        grid: int = 100,
        many: bool = False,
    ) -> "Words":
        """`sprites` are the rows that scenes draw from (all, if not said): nothing else is asked about. `backgrounds`
        say what each kind of background shows; with none of them captions are silent about it. `many` has more
        wordings than are usual in training."""
        if not 1 <= objects <= MOST:
            raise ConfigError(f"objects = {objects}: scenes of 1 to {MOST} objects can be told", "use fewer")

        def wordings(kind: str, texts: templates.Kind) -> tuple[str, ...]:
            return texts.train + (templates.MANY.get(kind, ()) if many else ())

        names = Names(table, sprites)
        C = len(names.texts)
        pieces = Pieces()
        forms = {"box": [*map(str, range(grid))], "background": backgrounds, "text": [*names.texts, ""]}
        lexicon = Lexicon(names.nouns, forms, objects)
        even = Pools.of(names, names.used.long())
        counted = torch.arange(LABELS["counting"]) <= objects
        return cls(
            pieces=pieces,
            objects=objects,
            grid=grid,
            concepts=C,
            backgrounds=len(backgrounds),
            sorts={
                kind: Sort(
                    Frames(wordings(kind, texts), texts.test, lexicon, pieces),
                    Frames(texts.answers, texts.answers_test, lexicon, pieces),
                )
                for kind, texts in (templates.QUESTIONS | templates.CAPTIONS | templates.FOLLOW_UPS).items()
            },
            loose={
                name: Frames(wordings(name, texts), texts.test, lexicon, pieces)
                for name, texts in templates.LOOSE.items()
                if backgrounds or name != "behind"
            },
            concept=names.concept,
            is_frame=torch.tensor([kind == "frame" for kind in table.kind], dtype=torch.bool),
            is_word=names.is_word,
            names=names,
            even=even,
            popular=even,
            place=names.place,
            alike=alike([names.texts[c] for c in (~names.is_word).nonzero()[:, 0].tolist()]),
            weight={kind: torch.ones(labels, dtype=torch.int64) for kind, labels in LABELS.items()},
            keep={
                kind: torch.full((labels,), ALWAYS) * (counted if kind == "counting" else 1)
                for kind, labels in LABELS.items()
            },
        )

    def to(self, device: torch.device | str) -> "Words":
        return replace(self, **{key: _moved(value, device) for key, value in vars(self).items()})

    def same(self, a: Tensor, b: Tensor) -> Tensor:
        """Whether a name may be taken for the other's: the same concept, or names of which one holds the other."""
        return (a == b) | self.alike[self.place[a], self.place[b]]


#: kinds whose answers follow from the scene and are evened out (`balance`), and how many labels they have
LABELS: Mapping[str, int] = {"counting": MOST + 1, "colour": 11, "position": 9}


def _moved(x: Any, device: torch.device | str) -> Any:
    if isinstance(x, Tensor | Frames | Pools):
        return x.to(device)
    if isinstance(x, dict):
        return {key: _moved(value, device) for key, value in x.items()}
    return Sort(*(part.to(device) for part in x)) if isinstance(x, Sort) else x
