"""English for templates: articles, uncountable nouns, synonyms, and phrases for numbers, positions and relations."""

import re
import tomllib
from collections.abc import Sequence
from pathlib import Path

from vitrail.data.scenes.scene import COLOURS

MAX_COUNT = 20  # largest count with a number word

NUMBER_WORDS = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty"),
)

# Ninths of an image in raster order.
PLACES = ("top left", "top", "top right", "left", "centre", "right", "bottom left", "bottom", "bottom right")
_PREPOSITIONS = ("in", "at", "in", "on", "in", "on", "in", "at", "in")

LEFT, RIGHT, ABOVE, BELOW, INSIDE = range(5)  # opposite relations of the first four differ in the last bit

#: kind of background → phrase
BACKGROUND_PHRASES = {
    "flat": "a plain colour",
    "gradient": "a gradient",
    "stripes": "stripes",
    "checks": "checks",
    "noise": "blotches",
    "photo": "a blurred view",
}

#: form → phrase of each value. A template names the form: "{relation r}".
PHRASE_FORMS: dict[str, Sequence[str]] = {
    "number": NUMBER_WORDS,
    "digit": tuple(map(str, range(MAX_COUNT + 1))),
    "colour": tuple(colour.name for colour in COLOURS),
    "place": PLACES,
    "at": tuple(f"{preposition} the {place}" for preposition, place in zip(_PREPOSITIONS, PLACES, strict=True)),
    "relation": ("to the left of", "to the right of", "above", "below", "inside"),
    "side": ("left of", "right of", "above", "below", "inside"),
    "size": ("bigger", "smaller"),
    "extent": ("larger", "smaller"),
    "amount": ("more", "fewer"),
    "letter": tuple("ABCD"),
}

_COLOUR_WORDS = frozenset(colour.name for colour in COLOURS[1:])

# Names with equal singular and plural: some are countable, others come in pairs or bunches, the rest are uncountable.
_COUNTABLE = re.compile(
    r".*(fish|sheep|deer|moose|bison|squid|shrimp|salmon|craft|series|species|moai|dango|oden)", re.IGNORECASE
)
_UNITS = {
    ("pair", "pairs"): "scissors glasses sunglasses goggles spectacles jeans trousers pants shorts briefs tongs pliers "
    "binoculars headphones earphones chopsticks gloves socks shoes boots skis eyes lips",
    ("bunch", "bunches"): "grapes cherries olives beans fries",
}
_UNIT_OF = {word: unit for unit, names in _UNITS.items() for word in names.split()}

_SOUNDS_LIKE_YOU = re.compile(r"(uni(?!n|m)|us[aeu]|ut[ei]|uk|ufo|ubi|ura|eu|ewe|one\b|once\b)", re.IGNORECASE)
_SILENT_H = re.compile(r"(hour|honest|honou?r|heir)", re.IGNORECASE)
_INITIALS = re.compile(r"[A-Z]{2,}\b|[A-Za-z]\b")  # spelled out: "an X-ray", "an SOS button", "a UFO"
_EIGHTS = re.compile(r"(8|11\b|18\b)")

_SYNONYMS_OF: dict[str, set[str]] = {}
for _also, _names in tomllib.loads(Path(__file__).with_name("synonyms.toml").read_text(encoding="utf-8")).items():
    for _name in _names.split():
        _SYNONYMS_OF.setdefault(_name, set()).add(_also)


def indefinite_article(noun: str) -> str:
    """Return “a” or “an”, by the sound of the first letters."""
    if _INITIALS.match(noun):
        return "an" if noun[0].upper() in "AEFHILMNORSX" else "a"
    if _SILENT_H.match(noun) or _EIGHTS.match(noun):
        return "an"
    return "an" if noun[0].lower() in "aeiou" and not _SOUNDS_LIKE_YOU.match(noun) else "a"


def with_indefinite_article(noun: str) -> str:
    return f"{indefinite_article(noun)} {noun}"


def capitalize_first(text: str) -> str:
    return text[:1].upper() + text[1:]


def strip_colour(name: str) -> str:
    """Remove colour words: “green apple” → “apple”, because a tint could contradict them. “orange” stays."""
    *before, last = name.split()
    return " ".join([*(word for word in before if word.lower() not in _COLOUR_WORDS), last])


def countable_noun(name: str, plural: str) -> tuple[str, str]:
    """Return singular and plural. Uncountable nouns get a unit: “a pair of”, “a bunch of”, “a piece of”."""
    last = name.rpartition(" ")[2].lower()
    if name != plural or _COUNTABLE.fullmatch(last):
        return name, plural
    one, many = _UNIT_OF.get(last, ("set", "sets") if last.endswith("s") else ("piece", "pieces"))
    return f"{one} of {name}", f"{many} of {name}"


def name_synonyms(name: str) -> frozenset[str]:
    """Return the words of a name and their synonyms. A name whose words are all included can describe the thing."""
    words = set(name.lower().split())
    return frozenset(words.union(*(_SYNONYMS_OF.get(word, ()) for word in words)))
