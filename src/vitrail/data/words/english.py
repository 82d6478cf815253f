"""The little English that templates need: articles, nouns that will not be counted, names that hold each other, and how
numbers, places and relations are put into words."""

import re
from collections.abc import Sequence

from vitrail.data.scenes.scene import COLOURS

MOST = 20  # objects that can be counted in words

NUMBERS = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty"),
)

# Nine parts of a picture, by thirds, row by row.
PLACES = ("top left", "top", "top right", "left", "centre", "right", "bottom left", "bottom", "bottom right")
_PREPOSITIONS = ("in", "at", "in", "on", "in", "on", "in", "at", "in")

LEFT, RIGHT, ABOVE, BELOW, INSIDE = range(5)  # the opposite of one of the first four differs in the last bit

#: kind of background → what one sees there
BACKGROUNDS = {
    "flat": "a plain colour",
    "gradient": "a gradient",
    "stripes": "stripes",
    "checks": "checks",
    "noise": "blotches",
    "photo": "a blurred view",
}

#: form → how each value is said. A template names the form: "{relation r}".
FORMS: dict[str, Sequence[str]] = {
    "number": NUMBERS,
    "digit": tuple(map(str, range(MOST + 1))),
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

_HUES = frozenset(colour.name for colour in COLOURS[1:])

# Names that are their own plural: a few can be counted, others come in pairs or bunches, the rest are stuff.
_COUNTED = re.compile(
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
_INITIALS = re.compile(r"[A-Z]{2,}\b|[A-Za-z]\b")  # read letter by letter: "an X-ray", "an SOS button", "a UFO"
_EIGHTS = re.compile(r"(8|11\b|18\b)")

# What a thing may also be called. More would do no harm: it only means that a question is not asked.
_ALSO = {
    "person": "man woman boy girl baby child adult human king queen prince princess police guard worker farmer doctor "
    "student teacher cook singer artist pilot astronaut firefighter detective santa bride dancer",
    "bird": "eagle duck swan owl parrot flamingo peacock penguin turkey rooster chicken chick dove dodo goose hen",
    "flower": "rose tulip hibiscus sunflower blossom lotus hyacinth bouquet daisy",
    "tree": "evergreen palm oak pine",
    "dog": "poodle puppy",
    "bus": "trolleybus minibus",
    "bug": "beetle ant cockroach ladybug",
    "automobile": "car taxi",
    "chicken": "rooster hen",
    "optical": "dvd",
    "disk": "dvd",
    "cat": "kitten",
    "fish": "blowfish shark salmon carp",
    "car": "automobile taxi",
    "train": "tram locomotive railway",
    "boat": "ship ferry sailboat speedboat canoe",
    "plane": "airplane aeroplane jet",
    "bicycle": "bike",
    "phone": "telephone smartphone",
    "book": "notebook ledger books",
    "clock": "watch",
    "star": "sparkles",
    "fruit": "apple pear banana cherry cherries grapes lemon mango melon orange peach pineapple strawberry tangerine",
    "hat": "cap",
    "shoe": "sneaker boot sandal",
    "house": "home hut",
    "computer": "laptop",
    "ball": "football basketball baseball volleyball",
}
_ALSO_OF: dict[str, set[str]] = {}
for _also, _names in _ALSO.items():
    for _name in _names.split():
        _ALSO_OF.setdefault(_name, set()).add(_also)


def article(noun: str) -> str:
    """“a” or “an”, by how the word begins to sound."""
    if _INITIALS.match(noun):
        return "an" if noun[0].upper() in "AEFHILMNORSX" else "a"
    if _SILENT_H.match(noun) or _EIGHTS.match(noun):
        return "an"
    return "an" if noun[0].lower() in "aeiou" and not _SOUNDS_LIKE_YOU.match(noun) else "a"


def indefinite(noun: str) -> str:
    return f"{article(noun)} {noun}"


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def without_colour(name: str) -> str:
    """“green apple” → “apple”: a tint would give the lie to it. “orange” stays, and “leafy green”."""
    *before, last = name.split()
    return " ".join([*(word for word in before if word.lower() not in _HUES), last])


def noun(name: str, plural: str) -> tuple[str, str]:
    """One and many. What cannot be counted is said by the pair, the bunch or the piece."""
    last = name.rpartition(" ")[2].lower()
    if name != plural or _COUNTED.fullmatch(last):
        return name, plural
    one, many = _UNIT_OF.get(last, ("set", "sets") if last.endswith("s") else ("piece", "pieces"))
    return f"{one} of {name}", f"{many} of {name}"


def meanings(name: str) -> frozenset[str]:
    """The words of a name and what else its thing is called: one that has them all may be meant by this name."""
    words = set(name.lower().split())
    return frozenset(words.union(*(_ALSO_OF.get(word, ()) for word in words)))
