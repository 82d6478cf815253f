"""Pictures with names as a source of training samples: a sample is a number, and both the view of the picture and the
words for it are made where they are used.

N pictures, B samples, C channels, S side, K texts that a picture has, F forms of a text, T templates
"""

import hashlib
import re
from dataclasses import replace
from typing import Literal, NamedTuple

import msgspec
import torch
from torch import Tensor

from vitrail.config import Config
from vitrail.data.collection import Collection, collection
from vitrail.data.pictures import About
from vitrail.data.pictures.classes import READERS as CLASSES
from vitrail.data.scenes.source import Asked
from vitrail.data.sources import SOURCES
from vitrail.data.views import ViewsConfig
from vitrail.data.words.english import indefinite
from vitrail.data.words.pieces import Pieces, TokenTable
from vitrail.errors import ConfigError, DataError, nearest

TEMPLATES = (
    "{}",
    "{a}.",
    "the {}",
    "a picture of {}",
    "a picture of {a}.",
    "an image showing {a}",
    "an image of the {}.",
    "this picture shows {a}.",
    "here is {a}",
    "there is {a} in this image.",
    "we see {a} here",
    "one can see the {}.",
    "{} in a picture",
    "a photograph of {a}",
    "an old photograph of the {}.",
    "an icon of {}",
    "a small icon that shows {a}.",
    "somebody drew {a}.",
)
_SLOT = re.compile(r"\{a?\}")
# Of a name: alone and behind other words, without and with its article, before more words and at the end of a sentence.
_FORMS = ("{0}", " {0}", "{1}", " {1}", "{0}.", " {0}.", "{1}.", " {1}.")


class NamedConfig(Config, tag="named", tag_field="kind"):
    """
    data        sources of pictures (`vitrail data list`) or folders
    side        at which pictures are kept
    trim        cut each to what is opaque, so that all designs fill their frame alike
    part        of sets with classes: train, test or both; of others, all
    names       what a picture is called by: its own name, or its category (of a folder: the one that it lies in)
    only        categories that count; all unless given
    without     names that are left out
    templates   what is said around an English name: {} is the name, {a} the name with its article
    keywords    chance that a picture's keywords stand for its name, where it has some
    languages   languages besides English, and `foreign` the chance of one of them
    views       how pictures are varied in training
    """

    data: tuple[str, ...]
    side: int = 64
    trim: bool = False
    part: Literal["all", "train", "test"] = "all"
    names: Literal["own", "category"] = "own"
    only: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    templates: tuple[str, ...] = TEMPLATES
    keywords: float = 0.0
    languages: tuple[str, ...] = ()
    foreign: float = 0.0
    views: ViewsConfig = ViewsConfig()

    def __post_init__(self) -> None:
        if not self.data or not self.templates:
            raise ConfigError("named pictures need data and templates", "name at least one of each")
        for template in self.templates:
            parts = _SLOT.split(template)
            apart = parts[0][-1:] in ("", " ") and (parts[-1] in ("", ".") or parts[-1].startswith(" "))
            if len(parts) != 2 or not apart:
                raise ConfigError(
                    f"the template {template!r} has no one place for the name, between spaces or at an end",
                    'write "{}", or "{a}" for the name with its article, once',
                )
        if not (0 <= self.keywords and 0 <= self.foreign and self.keywords + self.foreign <= 1):
            raise ConfigError(f"chances of {self.keywords} and {self.foreign}", "give two that add up to at most 1")
        if self.foreign and not self.languages:
            raise ConfigError("other languages are asked for, and none is named", 'such as languages = ["de", "fr"]')


class _Tables(NamedTuple):
    """Pictures, and what can be said of them in rows of pieces."""

    pixels: Tensor  # uint8 (N, C, S, S)
    names: Tensor  # (N, F) the English name
    keywords: Tensor  # (N,) 0 without
    foreign: Tensor  # (N, languages) 0 without
    before: Tensor  # (T,)
    form: Tensor  # (T,)
    after: Tensor  # (T,)


class NamedSource:
    """item → `Asked`; `pixels` and `texts` give pictures and words, on whichever device the numbers lie."""

    def __init__(self, config: NamedConfig, name: str = "named"):
        self.config, self.name, self.pieces = config, name, Pieces()
        found = [_called(collection(data, config.side, config.trim), data, config.names) for data in config.data]
        _check_known([about for some in found for about in some.abouts], config)
        rows = [[row for row, about in enumerate(some.abouts) if _wanted(about, config)] for some in found]
        self.abouts = tuple(some.abouts[row] for some, kept in zip(found, rows, strict=True) for row in kept)
        if not self.abouts:
            raise DataError(f"source {name!r} is empty: no picture of {', '.join(config.data)} is left", "ask for more")
        channels = max(some.pixels.shape[1] for some in found)
        pixels = [_filled(some.pixels[kept], channels) for some, kept in zip(found, rows, strict=True)]
        self._ready = {torch.device("cpu"): self._tables(torch.cat(pixels))}

    def __len__(self) -> int:
        return len(self.abouts)

    def __getitem__(self, item: int) -> Asked:
        if not 0 <= item < len(self):
            raise IndexError(item)
        return Asked(self.name, item)

    @property
    def fingerprint(self) -> str:
        """Changes with the pictures there are, their pixels and what is known of them."""
        made = hashlib.blake2b(msgspec.json.encode(self.abouts), digest_size=8)
        made.update(self._on(torch.device("cpu")).pixels.numpy().data)
        return made.hexdigest()

    @property
    def concepts(self) -> list[str]:
        """What each picture shows (N): pictures of one name belong together, whoever drew them."""
        return [about.name.lower() for about in self.abouts]

    def pixels(self, index: Tensor) -> Tensor:
        """uint8 (B, C, S, S)"""
        return self._on(index.device).pixels[index]

    def texts(self, index: Tensor, *, vary: bool = True) -> Tensor:
        """(B, 3) rows of `pieces`: the name alone, or, varied, in some template, language or by keywords."""
        tables, none, config = self._on(index.device), torch.zeros_like(index), self.config
        if not vary:
            return torch.stack([none, tables.names[index, 0], none], 1)
        which, language = torch.rand(2, len(index), device=index.device)
        template = torch.randint(len(config.templates), index.shape, device=index.device)
        name = tables.names[index, tables.form[template]]
        foreign = tables.foreign[index, (language * tables.foreign.shape[1]).long()]
        other = torch.where(which < config.keywords, tables.keywords[index], foreign)
        other = torch.where(which < config.keywords + config.foreign, other, none)
        said = torch.stack([tables.before[template], name, tables.after[template]], 1)
        return torch.where((other > 0)[:, None], torch.stack([none, other, none], 1), said)

    def longest(self, tokens: TokenTable) -> int:
        """Tokens that no name in a template exceeds."""
        tables, length = self._on(torch.device("cpu")), tokens.length
        around = length[tables.before] + length[tables.after]  # (T,)
        return int((length[tables.names].amax(0)[tables.form] + around).max())

    def _tables(self, pixels: Tensor) -> _Tables:
        rows, config = self.pieces.rows, self.config
        parts = [_SLOT.split(template) for template in config.templates]
        form = [
            bool(before.strip()) + 2 * ("{a}" in template) + 4 * (after == ".")
            for template, (before, after) in zip(config.templates, parts, strict=True)
        ]
        called = [about.name.strip() for about in self.abouts]
        names = [[form.format(name, indefinite(name)) for form in _FORMS] for name in called]
        foreign = [rows(self._own([a.labels.get(code, "") for a in self.abouts])) for code in config.languages]
        return _Tables(
            pixels,
            torch.stack([rows(some) for some in names]),
            rows(self._own([", ".join(about.keywords[:6]) for about in self.abouts])),
            torch.stack(foreign or [torch.zeros(len(self), dtype=torch.int64)], 1),
            rows([before.rstrip() for before, _ in parts]),
            torch.tensor(form),
            rows([after.rstrip() if after != "." else "" for _, after in parts]),
        )

    def _own(self, texts: list[str]) -> list[str]:
        """The texts that tell of one concept alone: keywords of many things would make them each other's negatives."""
        concepts: dict[str, set[str]] = {}
        for text, concept in zip(texts, self.concepts, strict=True):
            concepts.setdefault(text.lower(), set()).add(concept)
        return [text if len(concepts[text.lower()]) == 1 else "" for text in texts]

    def _on(self, device: torch.device) -> _Tables:
        if device not in self._ready:
            self._ready[device] = _Tables(*(table.to(device) for table in self._ready[torch.device("cpu")]))
        return self._ready[device]


def _called(found: Collection, data: str, names: str) -> Collection:
    """With the names that are asked for."""
    if names == "category":
        abouts = tuple(replace(about, name=about.category) for about in found.abouts)
        return Collection(abouts, found.pixels)
    if data not in SOURCES:  # in a folder of classes, files are numbered
        first: dict[str, About] = {}
        for about in found.abouts:
            other = first.setdefault(about.name.lower(), about)
            if other.category != about.category:
                raise DataError(
                    f"{data}: {other.key} and {about.key} have one name, {about.name!r}",
                    'if folders are classes, set names = "category"; or rename one',
                )
    return found


def _check_known(abouts: list[About], config: NamedConfig) -> None:
    """What is left out, asked for or spoken must be there."""
    known = {
        "without": {about.name.lower() for about in abouts},
        "only": {about.category for about in abouts},
        "languages": {code for about in abouts for code in about.labels},
    }
    for key, there in known.items():
        for value in getattr(config, key):
            if (value.lower() if key == "without" else value) not in there:
                raise DataError(f"{key}: {value!r} is of no picture", nearest(value, sorted(there)))


def _wanted(about: About, config: NamedConfig) -> bool:
    return (
        bool(about.name.strip())
        and about.name.lower() not in {name.lower() for name in config.without}
        and (config.part == "all" or about.vendor not in CLASSES or about.key.startswith(f"{config.part}-"))
        and (not config.only or about.category in config.only)
    )


def _filled(pixels: Tensor, channels: int) -> Tensor:
    """With as many channels as the others have."""
    if pixels.shape[1] == channels:
        return pixels
    return torch.cat([pixels, torch.full_like(pixels[:, :1], 255)], 1)
