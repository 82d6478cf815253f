"""What a text model is asked for, by kind, in words alone."""

from random import Random
from typing import NamedTuple

from vitrail.data.instruct.seen import Seen
from vitrail.errors import ConfigError, nearest

MOST = 12  # things told of a picture, the largest first
KNOWN, SIDES = "what is known of it", "shares of its sides"
ECHOES = (KNOWN, SIDES)  # words of the prompt that a text repeats only where it copies


class Kind(NamedTuple):
    """`task` is what to write. `words` are the least and the most words of an answer. `given` are questions of ours, of
    which one is put, so that the text is the answer alone. `form` is added to a question, so that its reader knows the
    form of the answer. An answer of several `paragraphs` is not cut after the first."""

    task: str
    words: tuple[int, int]
    given: tuple[str, ...] = ()
    form: str = ""
    paragraphs: bool = False


_PAIR = "Write each as two lines:\nQuestion: ...\nAnswer: ..."
KINDS: dict[str, Kind] = {
    "conversation": Kind(
        "Write three short questions that somebody asks about the picture, and their answers: what there is, how many, "
        f"which colour, where. {_PAIR}",
        (1, 60),
    ),
    "detail": Kind(
        "Describe the picture in full, from what is largest to what is smallest, and where each thing is.",
        (20, 300),
        given=(
            "Describe the picture in detail.",
            "What is to be seen here? Leave nothing out.",
            "Tell me all that this picture shows, and where it is.",
            "Walk me through the picture.",
        ),
    ),
    "reasoning": Kind(
        "Write one question about the picture that takes thought: why, what for, what may come next. Answer it step by "
        f"step. {_PAIR}",
        (8, 200),
        paragraphs=True,
    ),
    "yesno": Kind(
        "Write four questions about the picture that are answered by yes or no alone, two by yes and two by no. "
        f"{_PAIR}",
        (1, 1),
        form="Answer yes or no.",
    ),
    "choice": Kind(
        "Write two questions about the picture with four options, of which one is right. Write each as six lines:\n"
        "Question: ...\nA. ...\nB. ...\nC. ...\nD. ...\nAnswer: the letter",
        (1, 1),
        form="Answer with the letter alone.",
    ),
}


def kind_of(name: str) -> Kind:
    if name not in KINDS:
        raise ConfigError(f"there is no kind of instruction {name!r}", nearest(name, KINDS))
    return KINDS[name]


def prompt(seen: Seen, kind: str) -> str:
    """All that the text model is told, a line for each thing: whoever wrote a caption adds no lines of their own."""
    lines = [f"Somebody shows you a picture. This is {KNOWN}."]
    lines += [f"- {_line(caption)}" for caption in seen.captions]
    if seen.things:
        lines.append(f"Its things, with left, top, right and bottom as {SIDES}:")
        largest = sorted(seen.things, key=lambda thing: -_area(thing.box))
        lines += [f"- {_line(name)}: {', '.join(f'{x:.2f}' for x in box)}" for name, box in largest[:MOST]]
        if len(largest) > MOST:
            lines.append(f"- and {len(largest) - MOST} smaller things")
    lines.append(
        "Speak as one who sees the picture: never of captions, boxes or coordinates, and only of what is sure."
    )
    return "\n".join([*lines, kind_of(kind).task, ""])


def _line(text: str) -> str:
    return " ".join(text.split())


def _area(box: tuple[float, float, float, float]) -> float:
    left, top, right, bottom = box
    return (right - left) * (bottom - top)


def question(seen: Seen, kind: str, seed: int) -> str:
    """The question of ours that goes with a text which is an answer alone; "" for the other kinds."""
    given = kind_of(kind).given
    return Random(f"{seed}/{seen.id}/{kind}").choice(given) if given else ""
