"""Templates, compiled: a frame is filled by one gather, for a whole batch of sentences in different templates.

A column of a sentence holds a piece out of some list: a literal (a list of one), the nouns as “{a x}” says them, the
numbers, … All lists of a set of templates lie in one table; a template says for each column where its list begins and
which of the given values counts from there.

B sentences, T templates, P pieces, G groups of a list, C concepts.
"""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vitrail.data.scenes.scene import COLOURS
from vitrail.data.words import english
from vitrail.data.words.pieces import Pieces, TokenTable
from vitrail.errors import TextError


class Thing(NamedTuple):
    """What a slot of a thing is filled with."""

    colour: Tensor  # (B,) row of COLOURS that is said, 0 for none
    concept: Tensor  # (B,)


class Group(NamedTuple):
    """What “{list}” is filled with, groups first: “two red dogs, a cat and an apple”."""

    colour: Tensor  # (B, G)
    concept: Tensor  # (B, G)
    number: Tensor  # (B, G), 0 where there is no group


class Noun(NamedTuple):
    single: str
    plural: str
    proper: bool = False  # a word in quotation marks: “the word "stop"”, also where others say “a”


class Lexicon:
    """How everything is said, form by form."""

    def __init__(self, nouns: Sequence[Noun], forms: Mapping[str, Sequence[str]], groups: int):
        self.single = [noun.single for noun in nouns]
        self.plural = [noun.plural for noun in nouns]
        the = [f"the {noun}" for noun in self.single]
        a = [f"the {noun.single}" if noun.proper else english.indefinite(noun.single) for noun in nouns]
        self.nouns = {"": self.single, "plural": self.plural, "the": the, "a": a}
        hues = [colour.name for colour in COLOURS[1:]]
        self.colours = {
            "": ["", *hues],
            "plural": ["", *hues],
            "the": ["", *(f"the {hue}" for hue in hues)],
            "a": ["", *map(english.indefinite, hues)],
        }
        for form in ("the", "a"):
            self.nouns[form.title()] = [english.capital(noun) for noun in self.nouns[form]]
            self.colours[form.title()] = [english.capital(colour) for colour in self.colours[form]]
        self.forms = {**english.FORMS, **forms}
        self.groups = groups

    def thing(self, form: str, lead: str, suffix: str) -> list[list[str]]:
        """Two columns: the colour with its article, or nothing; then the noun, with the article if it has no colour."""
        colour = ["", *(lead + said for said in self.colours[form][1:])]
        bare = self.plural if form == "plural" else self.single
        return [colour, [lead + noun + suffix for noun in self.nouns[form]] + [f" {noun}{suffix}" for noun in bare]]

    def group(self, suffix: str) -> list[list[str]]:
        """Four columns of one group: and, number, colour, noun; the noun ends as its place in the list asks."""
        one, many = self.colours["a"], self.colours["plural"]
        colour = [f" {said}" if said else "" for said in (*one, *many)]
        number = ["", "", *(f" {number}" for number in english.NUMBERS[2:])]
        noun = [
            f" {said}{end}"
            for end in (",", "", suffix)
            for said in (*self.nouns["a"], *self.single, *self.plural, *self.plural)
        ]
        return [["", " and"], number, colour, [*noun, ""]]


_SLOT = re.compile(r"(?P<lead> ?)(?P<prefix>[^\s{}]*)\{(?P<form>\w+)(?: (?P<name>\w+))?\}(?P<suffix>[^\s{}]*)")
_THINGS = ("a", "A", "the", "The", "plural")


class Frames:
    """A set of templates, compiled: those for training, then those that are held out. `slots` are the values they take,
    by name; a template need not take them all."""

    def __init__(self, train: Sequence[str], test: Sequence[str], lexicon: Lexicon, pieces: Pieces):
        self.train, self.test = len(train), len(test)
        self.nouns, self.groups = len(lexicon.single), lexicon.groups
        self.slots: list[str] = []
        flat: list[int] = []
        begins: dict[tuple[str, ...], int] = {}
        rows = []
        for template in (*train, *test):
            row = []
            for value, texts in _columns(template, lexicon):
                if value and value not in self.slots:
                    self.slots.append(value)
                if (key := tuple(texts)) not in begins:
                    begins[key] = len(flat)
                    flat += pieces.rows(texts).tolist()
                row.append((begins[key], self.slots.index(value) + 1 if value else 0, len(texts)))
            rows.append(row)
        width = max(map(len, rows))
        empty = (len(flat), 0, 1)
        self.flat = torch.tensor([*flat, 0])
        table = torch.tensor([row + [empty] * (width - len(row)) for row in rows])  # (T, P, 3)
        self.begin, self.value, self.size = table.unbind(2)

    def __len__(self) -> int:
        return len(self.begin)

    def to(self, device: torch.device | str) -> "Frames":
        moved = Frames.__new__(Frames)
        moved.__dict__ = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in self.__dict__.items()}
        return moved

    def fill(self, template: Tensor, **given: Tensor | Thing | Group) -> Tensor:
        """(B,) templates and what goes into them → (B, P) pieces"""
        values = {"": torch.zeros_like(template)}
        for name, value in given.items():
            if isinstance(value, Thing):
                values[f"{name}.colour"] = value.colour
                values[f"{name}.noun"] = value.concept + (value.colour > 0) * self.nouns
            elif isinstance(value, Group):
                values |= self._listed(value)
            else:
                values[name] = value
        held = torch.stack([values[name] for name in ("", *self.slots)], 1)
        return self.flat[self.begin[template] + held.gather(1, self.value[template])]

    def longest(self, tokens: TokenTable) -> int:
        """Tokens that no sentence of these frames exceeds, whatever fills it."""
        length = tokens.length.to(self.flat.device)[self.flat]
        sizes = zip(self.begin.tolist(), self.size.tolist(), strict=True)
        return max(
            sum(int(length[b : b + n].max()) for b, n in zip(begins, counts, strict=True)) for begins, counts in sizes
        )

    def _listed(self, group: Group) -> dict[str, Tensor]:
        there, many = group.number > 0, group.number > 1
        place = torch.arange(there.shape[1], device=there.device) - there.sum(1, keepdim=True)  # −1 the last, −2 …
        end = (place + 3).clamp(min=0)  # 0 a comma follows, 1 “and” follows, 2 the end
        noun = ((end * 2 + many) * 2 + (group.colour > 0)) * self.nouns + group.concept
        columns = {
            "and": (place == -1) & there & (there.sum(1, keepdim=True) > 1),
            "number": group.number,
            "colour": torch.where(there, group.colour + many * len(COLOURS), 0),
            "noun": torch.where(there, noun, 12 * self.nouns),
        }
        return {f"{name}{g}": column[:, g].long() for name, column in columns.items() for g in range(self.groups)}


def _columns(template: str, lexicon: Lexicon) -> list[tuple[str, list[str]]]:
    """The columns of one template: which value each takes ("" for none), and out of what."""
    columns: list[tuple[str, list[str]]] = []
    at = 0
    for slot in _SLOT.finditer(template):
        lead, prefix, form, name, suffix = slot.group("lead", "prefix", "form", "name", "suffix")
        if slot.start() > 0 and not lead:
            raise TextError(f"in {template!r} the slot {slot[0]!r} does not begin at a space", "put one before it")
        if slot.start() > at:
            columns.append(("", [template[at : slot.start()]]))
        at = slot.end()
        if form == "list":
            parts = list(zip(("and", "number", "colour", "noun"), lexicon.group(suffix), strict=True))
            columns += [(f"{part}{g}", texts) for g in range(lexicon.groups) for part, texts in parts]
        elif name is None or form in _THINGS:
            thing = lexicon.thing("" if name is None else form, lead, suffix)
            columns += [
                (f"{name or form}.{part}", texts) for part, texts in zip(("colour", "noun"), thing, strict=True)
            ]
        elif form in lexicon.forms:
            columns.append((name, [lead + prefix + said + suffix for said in lexicon.forms[form]]))
        else:
            raise TextError(
                f"{template!r} asks for the form {form!r}", f"known: {', '.join([*_THINGS, *lexicon.forms])}"
            )
    if at < len(template):
        columns.append(("", [template[at:]]))
    return columns
