"""Further wordings to train in, where a task asks for many (`wordings = "many"`): questions that begin like those of
another kind. None is a wording that tests hold out, or nearly one, or was written to have a word of theirs.
"""

_EXISTENCE = (
    "Can you confirm that there is {a x}?",
    "Is {a x} one of the things here?",
    "Is {a x} among the things you see?",
    "Is {a x} part of the image?",
    "Is there any sign of {a x}?",
    "Is it true that there is {a x} here?",
    "Does this picture have {a x}?",
    "Did somebody draw {a x} here?",
    "Do you notice {a x} anywhere?",
    "Could you point to {a x} in the image?",
    "Have you found {a x} in the picture?",
    "How about {a x}: is it shown?",
    "Answer yes or no: do you see {a x}?",
)

_LEADS = (
    "please draw",
    "can you draw",
    "could you paint",
    "i would like",
    "i want to see",
    "create an image of",
    "sketch",
    "a page with",
    "there should be",
)
_BOTH = ("{a x} and {a y}", "{a x} as well as {a y}", "both {a x} and {a y}", "{a x} along with {a y}")

#: kind of question, or of prompt with “draw_” before it → wordings
MANY: dict[str, tuple[str, ...]] = {
    "existence_random": _EXISTENCE,
    "existence_popular": _EXISTENCE,
    "existence_adversarial": _EXISTENCE,
    "counting": (
        "How many {plural x} can be counted here?",
        "How many of the things here are {plural x}?",
        "How numerous are the {plural x}?",
        "The number of {plural x}, please.",
        "Say which number of {plural x} you see.",
        "How large is the number of {plural x}?",
        "Do you know how many {plural x} there are?",
        "Can you count the {plural x}?",
        "Could you say how many {plural x} the image holds?",
        "Does the scene have {plural x}, and how many?",
        "What is the count of {plural x}?",
        "What is the total number of {plural x}?",
        "What do you get when you count {plural x}?",
        "I want to know how many {plural x} there are.",
        "There are how many {plural x} in the scene?",
        "You see how many {plural x}?",
        "Count every {x} in the image.",
        "In total, how many {plural x} does the image have?",
        "Of {plural x}, how many have you got there?",
        "As for {plural x}, how many are shown?",
        "Answer with a number: how many {plural x} are there?",
        "Add up the {plural x}: what is the sum?",
        "If each {x} counts one, what is the total?",
        "At how many places is there {a x}?",
        "Exactly how many {plural x} did somebody draw?",
    ),
    "relation": (
        "Have a look: is {the x} {side r} {the y}?",
        "From what you see, is {the x} {relation r} {the y}?",
        "Is {the x} to be found {relation r} {the y}?",
        "Has {the x} its place {side r} {the y}?",
        "Looking at the scene, does {the x} lie {relation r} {the y}?",
        "Can you confirm that {the x} is {side r} {the y}?",
    ),
    **{
        f"draw_{kind}": tuple(f"{lead} {body}" for lead in _LEADS for body in bodies)
        for kind, bodies in {
            "single": ("{a x}",),
            "two": _BOTH,
            "counting": ("{number n} {plural x}",),
            "colours": ("{a x}",),
            "position": ("{a x} {relation r} {a y}", "{a x} {side r} {a y}"),
            "attribution": _BOTH,
        }.items()
    },
}
