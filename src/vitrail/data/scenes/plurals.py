"""Plurals of English nouns: rules, and lists of exceptions."""

import re

_IRREGULAR_PAIRS = (
    "child:children person:people tooth:teeth foot:feet goose:geese mouse:mice ox:oxen die:dice cactus:cacti "
    "leaf:leaves loaf:loaves knife:knives wolf:wolves calf:calves shelf:shelves elf:elves half:halves "
    "scarf:scarves life:lives wife:wives thief:thieves hoof:hooves potato:potatoes tomato:tomatoes mango:mangoes "
    "mosquito:mosquitoes volcano:volcanoes tornado:tornadoes hero:heroes quiz:quizzes fez:fezzes"
)
_IRREGULAR = {one: many for one, _, many in (pair.partition(":") for pair in _IRREGULAR_PAIRS.split())}
# Singular and plural are equal, or the name is already a plural.
_UNCHANGED_WORDS = (
    "sheep deer bison squid shrimp salmon aircraft spacecraft series species rice bread bacon honey butter salt milk "
    "sushi broccoli garlic corn popcorn sake tofu spaghetti dango oden moai moose scissors glasses sunglasses "
    "goggles jeans shorts pants trousers binoculars chopsticks grapes cherries beans eyes lips headphones fries stairs "
    "clothes water fire ice lightning hair money furniture luggage skis gloves socks briefs shoes springs olives bricks"
)
_UNCHANGED = frozenset(_UNCHANGED_WORDS.split())
_RULES = (
    (r"(?<!hu)(?<!ger)(?<!otto)(m)an$", r"\1en"),  # snowman, woman; but humans
    (r"fish$", "fish"),
    (r"([^aeiou])y$", r"\1ies"),
    (r"(s|x|z|ch|sh)$", r"\1es"),
    (r"$", "s"),
)
_PREPOSITION_PATTERN = re.compile(r"(.+?)( (?:of|with|without|in|on|at|for) .+)")


def pluralize(name: str) -> str:
    """Return the plural of a name without article: "slice of pizza" → "slices of pizza"."""
    tail = _PREPOSITION_PATTERN.fullmatch(name)
    if tail:
        return pluralize(tail[1]) + tail[2]
    head, space, last = name.rpartition(" ")
    word = last.lower()
    if word in _UNCHANGED:
        return name
    if word in _IRREGULAR:
        return head + space + last[0] + _IRREGULAR[word][1:]
    pattern, ending = next((p, e) for p, e in _RULES if re.search(p, word))
    return head + space + re.sub(pattern, ending, last, count=1, flags=re.IGNORECASE)
