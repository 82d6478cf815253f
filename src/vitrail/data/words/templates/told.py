"""Captions, pairs of a true and a false sentence, and prompts to draw."""

from vitrail.data.words.templates.kind import Kind

CAPTIONS: dict[str, Kind] = {
    "caption_short": Kind(
        train=(
            "Describe the picture briefly.",
            "What is in the picture?",
            "Give a short caption.",
            "Sum up the image in one sentence.",
            "What do you see?",
            "Write a short caption for this image.",
            "What does this image show?",
            "What can be seen here?",
            "What is this a picture of?",
            "Which things are in the picture?",
            "How would you caption this image?",
            "Tell me briefly what you see.",
            "Describe the image in a few words.",
            "Put the picture into a few words.",
            "Give a one-sentence description.",
            "In one sentence, what does the scene show?",
            "Write one line about this picture.",
            "Name what is in the image.",
            "List what you see.",
            "Summarise the scene.",
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
            "Describe the image at length.",
            "Write a detailed description.",
            "Give a full account of the image.",
            "Tell me about the picture in full.",
            "Explain in detail what the picture shows.",
            "Say everything that can be seen, and where.",
            "What is in the image? Give every detail.",
            "Which things are there, and where do they lie?",
            "Name all things in the picture and their places.",
            "List everything in the scene and say how it is placed.",
            "Look closely and describe all that is shown.",
            "Take your time and tell me all about this image.",
            "In as many words as you need, describe the scene.",
            "I cannot see the picture: describe it to me in detail.",
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

_ONE = Kind(
    (
        "a photo of {a x}",
        "draw {a x}",
        "a picture of {a x}",
        "an image of {a x}",
        "a drawing of {a x}",
        "paint {a x}",
        "make a picture of {a x}",
        "{a x}",
    ),
    ("show me {a x}",),
)
_TWO = Kind(
    (
        "a photo of {a x} and {a y}",
        "draw {a x} and {a y}",
        "a picture with {a x} and {a y}",
        "an image of {a x} and {a y}",
        "a drawing of {a x} and {a y}",
        "paint {a x} and {a y}",
        "make a picture with {a x} and {a y}",
        "a scene with {a x} and {a y}",
        "{a x} and {a y}",
    ),
    ("show me {a x} together with {a y}",),
)

#: GenEval's six kinds of prompts
DRAWINGS: dict[str, Kind] = {
    "single": _ONE,
    "two": _TWO,
    "counting": Kind(
        (
            "a photo of {number n} {plural x}",
            "draw {number n} {plural x}",
            "a picture of {number n} {plural x}",
            "an image of {number n} {plural x}",
            "a drawing of {number n} {plural x}",
            "paint {number n} {plural x}",
            "make a picture of {number n} {plural x}",
            "{number n} {plural x}",
        ),
        ("show me {number n} {plural x}",),
    ),
    "colours": _ONE,
    "position": Kind(
        (
            "a photo of {a x} {side r} {a y}",
            "draw {a x} {relation r} {a y}",
            "a picture of {a x} {relation r} {a y}",
            "an image of {a x} {side r} {a y}",
            "a drawing of {a x} {relation r} {a y}",
            "paint {a x} {side r} {a y}",
            "make a picture of {a x} {relation r} {a y}",
            "{a x} {relation r} {a y}",
            "{a x} {side r} {a y}",
        ),
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
