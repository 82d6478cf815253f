"""All that can be asked and said, as text. What stands in braces is filled in: “{a x}” is thing x with its article,
“{plural x}” its plural, “{relation r}” the relation r; see `english.FORMS` and `frames.py`.

`train` and `test` are paraphrases of one question; a model is tested on those it never saw. Of the answers, the ones
that a question's kind chooses by itself are numbered by their place.
"""

from typing import NamedTuple


class Kind(NamedTuple):
    train: tuple[str, ...]
    test: tuple[str, ...]
    answers: tuple[str, ...] = ()
    answers_test: tuple[str, ...] = ()  # where answers are paraphrases of each other, and drawn like questions


NO_YES = ("No", "Yes")

_EXISTENCE = Kind(
    train=(
        "Is there {a x} in the picture?",
        "Is there {a x}?",
        "Do you see {a x}?",
        "Can you see {a x} in the image?",
        "Does the picture show {a x}?",
        "Does the image contain {a x}?",
        "Can {a x} be seen here?",
    ),
    test=(
        "Is {a x} present in this scene?",
        "Would you say there is {a x} in this picture?",
        "Look at the scene: is {a x} in it?",
    ),
    answers=NO_YES,
)

_COUNTING = Kind(
    train=(
        "How many {plural x} are there?",
        "How many {plural x} are in the picture?",
        "How many {plural x} do you see?",
        "How many {plural x} does the picture show?",
        "Count the {plural x}.",
        "What is the number of {plural x} in the image?",
    ),
    test=("Tell me how many {plural x} can be seen.", "How often do {plural x} appear in this scene?"),
    answers=("{digit n}",),
)

_COLOUR = Kind(
    train=(
        "What colour is {the x}?",
        "Which colour does {the x} have?",
        "What is the colour of {the x}?",
        "Tell me the colour of {the x}.",
        "In the picture, what colour is {the x}?",
        "{The x} is which colour?",
    ),
    test=("Name the colour of {the x}.", "Looking at {the x}, what colour do you see?"),
    answers=("{colour c}",),
)

_POSITION = Kind(
    train=(
        "Where is {the x}?",
        "Where in the picture is {the x}?",
        "Which part of the picture is {the x} in?",
        "In which part of the image is {the x}?",
        "What part of the scene holds {the x}?",
        "In what region of the image does {the x} lie?",
    ),
    test=("Say in which area of the picture {the x} can be found.", "Roughly where has {the x} been put?"),
    answers=("{place p}",),
)

_READING = Kind(
    train=(
        "What does {the x} say?",
        "Read {the x}.",
        "What can you read in {the x}?",
        "Tell me what {the x} says.",
        "Please read {the x} in the picture.",
        "What is the text of {the x}?",
    ),
    test=("Spell out {the x}.", "Which letters make up {the x}?"),
    answers=("{text w}",),
)

_NONE = ("There is no {x} in the picture.",)


def _choices(stems: Kind, form: str) -> Kind:
    """The same questions with four options behind them, in ways of writing them that are held out too."""

    def written(before: str, after: str) -> str:
        return "".join(f" {before}{letter}{after} {{{form} {letter.lower()}}}" for letter in "ABCD")

    train = tuple(stem + written(*("()" if i % 2 else ("", "."))) for i, stem in enumerate(stems.train))
    return Kind(train, tuple(stem + written("", ")") for stem in stems.test), ("{letter l}",))


_WHICH = Kind(
    train=(
        "Which of these is in the picture?",
        "What does the picture show?",
        "Which of these do you see?",
        "Pick what can be seen in the image.",
        "One of these is in the scene: which?",
        "What is there in the image?",
    ),
    test=("Which of the following appears here?", "Choose what the scene contains."),
)

QUESTIONS: dict[str, Kind] = {
    "existence_random": _EXISTENCE,
    "existence_popular": _EXISTENCE,
    "existence_adversarial": _EXISTENCE,
    "counting": _COUNTING,
    "colour": _COLOUR,
    "position": _POSITION,
    "relation": Kind(
        train=(
            "Is {the x} {relation r} {the y}?",
            "Is {the x} {side r} {the y}?",
            "Would you say {the x} is {relation r} {the y}?",
            "Does the picture show {the x} {relation r} {the y}?",
            "Is it true that {the x} is {relation r} {the y}?",
            "{The x} is {side r} {the y}: is that right?",
        ),
        test=(
            "Judging by the image, is {the x} {relation r} {the y}?",
            "Do you find {the x} {side r} {the y}?",
        ),
        answers=NO_YES,
    ),
    "inside": Kind(
        train=(
            "Is {the x} inside {the y}?",
            "Is {the x} in {the y}?",
            "Does {the y} have {the x} inside?",
            "Does {the y} hold {the x}?",
            "Is it true that {the x} is inside {the y}?",
            "Can you see {the x} within {the y}?",
        ),
        test=("Does {the x} lie within {the y}?", "Judging by the image, is {the x} inside {the y}?"),
        answers=NO_YES,
    ),
    "what": Kind(
        train=(
            "What is {relation r} {the y}?",
            "What do you see {relation r} {the y}?",
            "Which thing is {relation r} {the y}?",
            "What can be found {relation r} {the y}?",
            "Name what is {side r} {the y}.",
            "What lies {relation r} {the y} in the picture?",
        ),
        test=("Which object appears {relation r} {the y}?", "Say what is located {side r} {the y}."),
        answers=("{a x}",),
    ),
    "size": Kind(
        train=(
            "Is {the x} {size s} than {the y}?",
            "Is {the x} {extent s} than {the y}?",
            "Does {the x} look {size s} than {the y}?",
            "Is it true that {the x} is {extent s} than {the y}?",
            "Compared with {the y}, is {the x} {size s}?",
            "Is {the x} drawn {size s} than {the y}?",
        ),
        test=("Next to {the y}, does {the x} look {extent s}?", "Would you call {the x} {size s} than {the y}?"),
        answers=NO_YES,
    ),
    "which": Kind(
        train=(
            "Which is {size s}, {the x} or {the y}?",
            "Which is {extent s}: {the x} or {the y}?",
            "What is {size s}, {the x} or {the y}?",
            "Of {the x} and {the y}, which is {size s}?",
            "Which looks {size s}, {the x} or {the y}?",
            "Which one is drawn {extent s}, {the x} or {the y}?",
        ),
        test=("Take {the x} and {the y}: which is {size s}?", "Name the {extent s} one, {the x} or {the y}."),
        answers=("{the z}",),
    ),
    "amount": Kind(
        train=(
            "Are there {amount q} {plural x} than {plural y}?",
            "Do you see {amount q} {plural x} than {plural y}?",
            "Does the picture show {amount q} {plural x} than {plural y}?",
            "Is it true that there are {amount q} {plural x} than {plural y}?",
            "Does the image contain {amount q} {plural x} than {plural y}?",
            "Compared with {plural y}, are there {amount q} {plural x}?",
        ),
        test=(
            "Would you count {amount q} {plural x} than {plural y}?",
            "Counting them all, are there {amount q} {plural x} than {plural y}?",
        ),
        answers=NO_YES,
    ),
    "reading": _READING,
    "choice_object": _choices(_WHICH, "a"),
    "choice_colour": _choices(_COLOUR, "colour"),
    "choice_count": _choices(_COUNTING, "digit"),
    "choice_position": _choices(_POSITION, "place"),
    "choice_reading": _choices(_READING, "text"),
    "unanswerable_colour": _COLOUR._replace(answers=_NONE + _COLOUR.answers),
    "unanswerable_position": _POSITION._replace(answers=_NONE + _POSITION.answers),
    "grounding": Kind(
        train=(
            "Give the box of {the x}.",
            "Where exactly is {the x}? Answer with a box.",
            "Locate {the x} with a box.",
            "Draw a box around {the x}.",
            "What are the box coordinates of {the x}?",
            "Point out {the x} with a bounding box.",
        ),
        test=("Return the bounding box of {the x}.", "Mark the place of {the x} with a box."),
        answers=("[{box left}, {box top}, {box right}, {box bottom}]",),
    ),
}

CAPTIONS: dict[str, Kind] = {
    "caption_short": Kind(
        train=(
            "Describe the picture briefly.",
            "What is in the picture?",
            "Give a short caption.",
            "Sum up the image in one sentence.",
            "What do you see?",
            "Write a short caption for this image.",
        ),
        test=("Say in one sentence what is here.", "Caption this scene briefly."),
        answers=(
            "A picture of {list}.",
            "An image with {list}.",
            "This picture shows {list}.",
            "Here we see {list}.",
            "The scene shows {list}.",
            "A scene with {list}.",
            "The image contains {list}.",
        ),
        answers_test=("In this image you can see {list}.", "A drawing that shows {list}."),
    ),
    "caption_long": Kind(
        train=(
            "Describe the picture in detail.",
            "Give a detailed caption.",
            "Tell me all that you see, and where it is.",
            "Describe everything in the image.",
            "Write a long caption for this image.",
            "What is in the picture, and how is it arranged?",
        ),
        test=("Describe the whole scene carefully.", "Go through the picture in several sentences."),
        answers=(
            "The picture shows {list}.",
            "We see {list}.",
            "In the image we find {list}.",
            "What there is to see: {list}.",
            "The scene is made of {list}.",
        ),
        answers_test=("This scene holds {list}.", "Visible in the picture: {list}."),
    ),
}

#: second questions of a conversation, about what the first was about
FOLLOW_UPS: dict[str, Kind] = {
    "it_colour": Kind(
        train=(
            "What colour is it?",
            "And what colour is it?",
            "Which colour does it have?",
            "What is its colour?",
            "And its colour?",
            "Tell me its colour.",
        ),
        test=("Name its colour.", "What colour do you see on it?"),
        answers=_COLOUR.answers,
    ),
    "it_position": Kind(
        train=(
            "Where is it?",
            "And where is it?",
            "Which part of the picture is it in?",
            "Where in the image is it?",
            "In which part of the picture does it lie?",
            "Tell me where it is.",
        ),
        test=("Say in which area it can be found.", "Roughly where has it been put?"),
        answers=_POSITION.answers,
    ),
}

#: sentences that follow in a long caption, each after a space
_TOLD: dict[str, Kind] = {
    "related": Kind(
        (
            " {The x} is {relation r} {the y}.",
            " {The x} can be seen {side r} {the y}.",
            " You find {the x} {relation r} {the y}.",
        ),
        (" Notice {the x} {relation r} {the y}.",),
    ),
    "placed": Kind(
        (" {The x} is {at p}.", " {The x} lies {at p} of the picture.", " Look {at p} for {the x}."),
        (" One can find {the x} {at p}.",),
    ),
    "behind": Kind(
        (" The background shows {background b}.", " Behind everything one sees {background b}."),
        (" All of it lies before {background b}.",),
    ),
}

#: two captions of the same words, of which one is true: the second is the first with its parts exchanged
SWAPS: dict[str, Kind] = {
    "colour": Kind(
        ("{a x} and {a y}", "a picture of {a x} and {a y}", "an image with {a x} and {a y}"),
        ("{a x} together with {a y}",),
    ),
    "relation": Kind(
        ("{a x} {relation r} {a y}", "{a x} {side r} {a y}", "{the x} is {relation r} {the y}"),
        ("{the x} stands {relation r} {the y}",),
    ),
    "size": Kind(
        ("{the x} is bigger than {the y}", "{the x} is larger than {the y}", "{a x} that is bigger than {a y}"),
        ("{a x} drawn larger than {a y}",),
    ),
    "number": Kind(
        (
            "{number m} {plural x} and {number n} {plural y}",
            "a picture of {number m} {plural x} and {number n} {plural y}",
        ),
        ("{number m} {plural x} together with {number n} {plural y}",),
    ),
}

_ONE = Kind(("a photo of {a x}", "draw {a x}", "a picture of {a x}"), ("show me {a x}",))
_TWO = Kind(
    ("a photo of {a x} and {a y}", "draw {a x} and {a y}", "a picture with {a x} and {a y}"),
    ("show me {a x} together with {a y}",),
)

#: GenEval's six kinds of prompts
DRAWINGS: dict[str, Kind] = {
    "single": _ONE,
    "two": _TWO,
    "counting": Kind(
        ("a photo of {number n} {plural x}", "draw {number n} {plural x}", "a picture of {number n} {plural x}"),
        ("show me {number n} {plural x}",),
    ),
    "colours": _ONE,
    "position": Kind(
        ("a photo of {a x} {side r} {a y}", "draw {a x} {relation r} {a y}", "a picture of {a x} {relation r} {a y}"),
        ("show me {a x} {side r} {a y}",),
    ),
    "attribution": _TWO,
}

#: all that is neither question nor answer
LOOSE: dict[str, Kind] = {
    **_TOLD,
    **{f"swap_{name}": kind for name, kind in SWAPS.items()},
    **{f"draw_{name}": kind for name, kind in DRAWINGS.items()},
}
