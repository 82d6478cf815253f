"""Plurals of English names: rules, and lists of what does not follow them."""

import re

_PAIRS = (
    "child:children person:people tooth:teeth foot:feet goose:geese mouse:mice ox:oxen die:dice cactus:cacti "
    "leaf:leaves loaf:loaves knife:knives wolf:wolves calf:calves shelf:shelves elf:elves half:halves "
    "scarf:scarves life:lives wife:wives thief:thieves hoof:hooves potato:potatoes tomato:tomatoes mango:mangoes "
    "mosquito:mosquitoes volcano:volcanoes tornado:tornadoes hero:heroes quiz:quizzes fez:fezzes"
)
_IRREGULAR = {one: many for one, _, many in (pair.partition(":") for pair in _PAIRS.split())}
# One and many look alike, or the name is of many already.
_ALIKE = (
    "sheep deer bison squid shrimp salmon aircraft spacecraft series species rice bread bacon honey butter salt milk "
    "sushi broccoli garlic corn popcorn sake tofu spaghetti dango oden moai moose scissors glasses sunglasses "
    "goggles jeans shorts pants trousers binoculars chopsticks grapes cherries beans eyes lips headphones fries stairs "
    "clothes water fire ice lightning hair money furniture luggage skis gloves socks briefs shoes springs olives bricks"
)
_SAME = frozenset(_ALIKE.split())
_RULES = (
    (r"(?<!hu)(?<!ger)(?<!otto)(m)an$", r"\1en"),  # snowman, woman; but humans
    (r"fish$", "fish"),
    (r"([^aeiou])y$", r"\1ies"),
    (r"(s|x|z|ch|sh)$", r"\1es"),
    (r"$", "s"),
)
_TAIL = re.compile(r"(.+?)( (?:of|with|without|in|on|at|for) .+)")


def plural(name: str) -> str:
    """The plural of a name without an article: "slice of pizza" → "slices of pizza", "dog face" → "dog faces"."""
    tail = _TAIL.fullmatch(name)
    if tail:
        return plural(tail[1]) + tail[2]
    head, space, last = name.rpartition(" ")
    word = last.lower()
    if word in _SAME:
        return name
    if word in _IRREGULAR:
        return head + space + last[0] + _IRREGULAR[word][1:]
    pattern, ending = next((p, e) for p, e in _RULES if re.search(p, word))
    return head + space + re.sub(pattern, ending, last, count=1, flags=re.IGNORECASE)
