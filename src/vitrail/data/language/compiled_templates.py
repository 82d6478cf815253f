"""Compiled templates: one gather fills a whole batch of sentences in different templates.

Each column of a sentence is a piece from a list: a literal (a list of one), the nouns in the form “{a x}”, the numbers,
and so on. One table contains the lists of all templates. For each column, a template stores the start of its list and
the value that selects the piece.

Shapes: B sentences, T templates, P pieces, G groups of a list, C concepts.
"""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vitrail.data.language import english
from vitrail.data.language.text_pieces import PieceTable, TokenTable
from vitrail.data.scenes.scene import COLOURS
from vitrail.errors import TextError


class ObjectPhrase(NamedTuple):
    """Value of an object placeholder: colour and concept."""

    colour: Tensor  # (B,) row of COLOURS, 0 for none
    concept: Tensor  # (B,)


class ObjectGroups(NamedTuple):
    """Value of “{list}”: groups of equal objects, as in “two red dogs, a cat and an apple”. Empty groups come last."""

    colour: Tensor  # (B, G)
    concept: Tensor  # (B, G)
    count: Tensor  # (B, G), 0 for an empty group


class Noun(NamedTuple):
    """Singular and plural of a concept."""

    singular: str
    plural: str
    is_quoted: bool = False  # a quoted word: “the word "stop"”, with “the” instead of “a”


class Lexicon:
    """Texts of all values, by grammatical form."""

    def __init__(self, nouns: Sequence[Noun], forms: Mapping[str, Sequence[str]], max_groups: int):
        self.singular = [noun.singular for noun in nouns]
        self.plural = [noun.plural for noun in nouns]
        the = [f"the {noun}" for noun in self.singular]
        a = [
            f"the {noun.singular}" if noun.is_quoted else english.with_indefinite_article(noun.singular)
            for noun in nouns
        ]
        self.nouns = {"": self.singular, "plural": self.plural, "the": the, "a": a}
        hues = [colour.name for colour in COLOURS[1:]]
        self.colours = {
            "": ["", *hues],
            "plural": ["", *hues],
            "the": ["", *(f"the {hue}" for hue in hues)],
            "a": ["", *map(english.with_indefinite_article, hues)],
        }
        for form in ("the", "a"):
            self.nouns[form.title()] = [english.capitalize_first(noun) for noun in self.nouns[form]]
            self.colours[form.title()] = [english.capitalize_first(colour) for colour in self.colours[form]]
        self.forms = {**english.PHRASE_FORMS, **forms}
        self.max_groups = max_groups

    def object_columns(self, form: str, lead: str, suffix: str) -> list[list[str]]:
        """Return the two columns of an object: article and colour (or nothing), and the noun.

        Without a colour, the article is part of the noun.
        """
        colour = ["", *(lead + text for text in self.colours[form][1:])]
        bare = self.plural if form == "plural" else self.singular
        return [colour, [lead + noun + suffix for noun in self.nouns[form]] + [f" {noun}{suffix}" for noun in bare]]

    def group_columns(self, suffix: str) -> list[list[str]]:
        """Return the four columns of a group: and, number, colour, noun with the punctuation of its list position."""
        one, many = self.colours["a"], self.colours["plural"]
        colour = [f" {text}" if text else "" for text in (*one, *many)]
        number = ["", "", *(f" {number}" for number in english.NUMBER_WORDS[2:])]
        noun = [
            f" {text}{end}"
            for end in (",", "", suffix)
            for text in (*self.nouns["a"], *self.singular, *self.plural, *self.plural)
        ]
        return [["", " and"], number, colour, [*noun, ""]]


_PLACEHOLDER = re.compile(r"(?P<lead> ?)(?P<prefix>[^\s{}]*)\{(?P<form>\w+)(?: (?P<name>\w+))?\}(?P<suffix>[^\s{}]*)")
_OBJECT_FORMS = ("a", "A", "the", "The", "plural")


class CompiledTemplates:
    """A compiled set of templates: training templates first, then held-out ones.

    `value_names` lists the values that the templates use. A template does not have to use all of them.
    """

    def __init__(
        self, train_templates: Sequence[str], test_templates: Sequence[str], lexicon: Lexicon, pieces: PieceTable
    ):
        self.num_train, self.num_test = len(train_templates), len(test_templates)
        self.num_nouns, self.max_groups = len(lexicon.singular), lexicon.max_groups
        self.value_names: list[str] = []
        flat: list[int] = []
        starts: dict[tuple[str, ...], int] = {}
        rows = []
        for template in (*train_templates, *test_templates):
            row = []
            for value, texts in _parse_columns(template, lexicon):
                if value and value not in self.value_names:
                    self.value_names.append(value)
                if (key := tuple(texts)) not in starts:
                    starts[key] = len(flat)
                    flat += pieces.add_all(texts).tolist()
                row.append((starts[key], self.value_names.index(value) + 1 if value else 0, len(texts)))
            rows.append(row)
        width = max(map(len, rows))
        empty = (len(flat), 0, 1)
        self.piece_rows = torch.tensor([*flat, 0])
        table = torch.tensor([row + [empty] * (width - len(row)) for row in rows])  # (T, P, 3)
        self.list_start, self.value_index, self.list_size = table.unbind(2)

    def __len__(self) -> int:
        return len(self.list_start)

    def to(self, device: torch.device | str) -> "CompiledTemplates":
        moved = CompiledTemplates.__new__(CompiledTemplates)
        moved.__dict__ = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in self.__dict__.items()}
        return moved

    def fill(self, template_index: Tensor, **template_values: Tensor | ObjectPhrase | ObjectGroups) -> Tensor:
        """Fill templates (B,) with values and return pieces (B, P)."""
        values = {"": torch.zeros_like(template_index)}
        for name, value in template_values.items():
            if isinstance(value, ObjectPhrase):
                values[f"{name}.colour"] = value.colour
                values[f"{name}.noun"] = value.concept + (value.colour > 0) * self.num_nouns
            elif isinstance(value, ObjectGroups):
                values |= self._list_values(value)
            else:
                values[name] = value
        stacked_values = torch.stack([values[name] for name in ("", *self.value_names)], 1)
        return self.piece_rows[
            self.list_start[template_index] + stacked_values.gather(1, self.value_index[template_index])
        ]

    def max_tokens(self, token_table: TokenTable) -> int:
        """Return an upper bound of the tokens of any sentence of these templates."""
        length = token_table.length.to(self.piece_rows.device)[self.piece_rows]
        sizes = zip(self.list_start.tolist(), self.list_size.tolist(), strict=True)
        return max(
            sum(int(length[b : b + n].max()) for b, n in zip(starts, counts, strict=True)) for starts, counts in sizes
        )

    def _list_values(self, group: ObjectGroups) -> dict[str, Tensor]:
        is_present, is_plural = group.count > 0, group.count > 1
        # −1: last group.
        place = torch.arange(is_present.shape[1], device=is_present.device) - is_present.sum(1, keepdim=True)
        end = (place + 3).clamp(min=0)  # 0: comma follows, 1: “and” follows, 2: end
        noun = ((end * 2 + is_plural) * 2 + (group.colour > 0)) * self.num_nouns + group.concept
        columns = {
            "and": (place == -1) & is_present & (is_present.sum(1, keepdim=True) > 1),
            "number": group.count,
            "colour": torch.where(is_present, group.colour + is_plural * len(COLOURS), 0),
            "noun": torch.where(is_present, noun, 12 * self.num_nouns),
        }
        return {f"{name}{g}": column[:, g].long() for name, column in columns.items() for g in range(self.max_groups)}


def _parse_columns(template: str, lexicon: Lexicon) -> list[tuple[str, list[str]]]:
    """Parse a template into columns: the name of the value ("" for none), and the list of texts."""
    columns: list[tuple[str, list[str]]] = []
    at = 0
    for slot in _PLACEHOLDER.finditer(template):
        lead, prefix, form, name, suffix = slot.group("lead", "prefix", "form", "name", "suffix")
        if slot.start() > 0 and not lead:
            raise TextError(
                f"{template!r}: there is no space before the placeholder {slot[0]!r}", "put a space before it"
            )
        if slot.start() > at:
            columns.append(("", [template[at : slot.start()]]))
        at = slot.end()
        if form == "list":
            parts = list(zip(("and", "number", "colour", "noun"), lexicon.group_columns(suffix), strict=True))
            columns += [(f"{part}{g}", texts) for g in range(lexicon.max_groups) for part, texts in parts]
        elif name is None or form in _OBJECT_FORMS:
            thing = lexicon.object_columns("" if name is None else form, lead, suffix)
            columns += [
                (f"{name or form}.{part}", texts) for part, texts in zip(("colour", "noun"), thing, strict=True)
            ]
        elif form in lexicon.forms:
            columns.append((name, [lead + prefix + text + suffix for text in lexicon.forms[form]]))
        else:
            raise TextError(
                f"{template!r}: unknown form {form!r}", f"known forms: {', '.join([*_OBJECT_FORMS, *lexicon.forms])}"
            )
    if at < len(template):
        columns.append(("", [template[at:]]))
    return columns
