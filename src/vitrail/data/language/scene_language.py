"""Language of a sprite table, compiled once: text pieces, templates of each kind, and relations between concept names.

Shapes: S sprites, C concepts, m things.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vitrail.data.language import english, templates
from vitrail.data.language.compiled_templates import CompiledTemplates, Lexicon
from vitrail.data.language.concept_names import ConceptNames, ConceptPools, match_overlapping_names
from vitrail.data.language.english import MAX_COUNT
from vitrail.data.language.text_pieces import PieceTable
from vitrail.data.scenes.backgrounds import BACKGROUND_NAMES
from vitrail.data.scenes.scene import SpriteTable
from vitrail.errors import ConfigError
from vitrail.processing.tokenizer import Tokenizer

CERTAIN = 1 << 32  # threshold of 32-bit random numbers with probability 1


class QATemplates(NamedTuple):
    """Question and answer templates of one kind."""

    question: CompiledTemplates
    answer: CompiledTemplates


@dataclass(frozen=True, eq=False, repr=False)
class SceneLanguage:
    """Compiled language of a sprite table. Create it with `build`. Text generation uses only its tensors."""

    pieces: PieceTable
    max_objects: int  # maximum slots of a scene
    box_grid: int  # box coordinates are written as integers below this
    num_concepts: int  # C; the noun after the last concept is “word”, for any word
    num_backgrounds: int  # number of background kinds with a name
    qa_templates: dict[str, QATemplates]
    sentence_templates: dict[str, CompiledTemplates]  # templates that are neither questions nor answers
    concept: Tensor  # (S,) concept of each sprite
    is_frame: Tensor  # (S,)
    is_word: Tensor  # (C,)
    names: ConceptNames
    uniform_pools: ConceptPools  # all used concepts with equal probability
    frequency_pools: ConceptPools  # concepts with the frequency in the data, if measured (`balance_answers`)
    name_index: Tensor  # (C,) row of `overlapping_names`; the last one for words
    overlapping_names: Tensor  # (m, m) pairs of names of which one can describe the other: “dog” and “dog face”
    answer_weights: dict[str, Tensor]  # kind → (labels,) sampling weights of candidates, by label
    # Kind → (labels,) probability, in 1/CERTAIN, that a question with this label is kept.
    keep_thresholds: dict[str, Tensor]
    _copies: dict[torch.device, "SceneLanguage"] = field(default_factory=dict, init=False)

    @classmethod
    def build(
        cls,
        table: SpriteTable,
        *,
        max_objects: int = 8,
        sprite_rows: Tensor | None = None,
        backgrounds: Sequence[str] = tuple(english.BACKGROUND_PHRASES.get(name, name) for name in BACKGROUND_NAMES),
        box_grid: int = 100,
        extra_templates: bool = False,
    ) -> "SceneLanguage":
        """Compile the language of a sprite table.

        max_objects      maximum objects in a scene
        sprite_rows      rows of the sprites in use (default: all). Questions name only their concepts.
        backgrounds      phrases for the kinds of background; empty: captions do not mention the background
        box_grid         range of box coordinates in texts
        extra_templates  include additional question wordings
        """
        if not 1 <= max_objects <= MAX_COUNT:
            raise ConfigError(f"max_objects is {max_objects}", f"give 1 to {MAX_COUNT}")

        def wordings(kind: str, texts: templates.TemplateKind) -> tuple[str, ...]:
            return texts.train + (templates.EXTRA_TEMPLATES.get(kind, ()) if extra_templates else ())

        names = ConceptNames(table, sprite_rows)
        C = len(names.texts)
        pieces = PieceTable()
        forms = {"box": [*map(str, range(box_grid))], "background": backgrounds, "text": [*names.texts, ""]}
        lexicon = Lexicon(names.nouns, forms, max_objects)
        even = ConceptPools.from_weights(names, names.is_used.long())
        counted = torch.arange(NUM_LABELS["counting"]) <= max_objects
        return cls(
            pieces=pieces,
            max_objects=max_objects,
            box_grid=box_grid,
            num_concepts=C,
            num_backgrounds=len(backgrounds),
            qa_templates={
                kind: QATemplates(
                    CompiledTemplates(wordings(kind, texts), texts.test, lexicon, pieces),
                    CompiledTemplates(texts.answers, texts.answers_test, lexicon, pieces),
                )
                for kind, texts in (
                    templates.QUESTION_KINDS | templates.CAPTION_KINDS | templates.FOLLOW_UP_KINDS
                ).items()
            },
            sentence_templates={
                name: CompiledTemplates(wordings(name, texts), texts.test, lexicon, pieces)
                for name, texts in templates.SENTENCE_KINDS.items()
                if backgrounds or name != "behind"
            },
            concept=names.concept,
            is_frame=torch.tensor([kind == "frame" for kind in table.kind], dtype=torch.bool),
            is_word=names.is_word,
            names=names,
            uniform_pools=even,
            frequency_pools=even,
            name_index=names.name_index,
            overlapping_names=match_overlapping_names(
                [names.texts[c] for c in (~names.is_word).nonzero()[:, 0].tolist()]
            ),
            answer_weights={kind: torch.ones(labels, dtype=torch.int64) for kind, labels in NUM_LABELS.items()},
            keep_thresholds={
                kind: torch.full((labels,), CERTAIN) * (counted if kind == "counting" else 1)
                for kind, labels in NUM_LABELS.items()
            },
        )

    def to(self, device: torch.device | str) -> "SceneLanguage":
        """Return the language on a device. Each device has one cached copy."""
        device = torch.device(device)
        if device not in self._copies:
            parts = {key: _move(value, device) for key, value in vars(self).items() if key != "_copies"}
            self._copies[device] = replace(self, **parts)
        return self._copies[device]

    def is_same_name(self, a: Tensor, b: Tensor) -> Tensor:
        """Return whether two concepts are equal, or one name can describe the other."""
        return (a == b) | self.overlapping_names[self.name_index[a], self.name_index[b]]


#: kinds with balanced answers (`answer_balance`), and their number of labels
NUM_LABELS: Mapping[str, int] = {"counting": MAX_COUNT + 1, "colour": 11, "position": 9}


def _move(x: Any, device: torch.device | str) -> Any:
    if isinstance(x, Tensor | CompiledTemplates | ConceptPools):
        return x.to(device)
    if isinstance(x, dict):
        return {key: _move(value, device) for key, value in x.items()}
    return QATemplates(*(part.to(device) for part in x)) if isinstance(x, QATemplates) else x


def train_tokenizer(
    language: SceneLanguage, vocab_size: int, *, special_tokens: Sequence[str] = ("<|endoftext|>",)
) -> Tokenizer:
    """Train a byte-level tokenizer on all text pieces, each counted once. It can encode any text."""
    return Tokenizer.train(language.pieces.texts[1:], vocab_size, special_tokens=special_tokens)
