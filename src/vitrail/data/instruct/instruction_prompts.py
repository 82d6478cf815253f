"""Prompts that ask a text model for instruction data, by kind."""

import tomllib
from pathlib import Path
from random import Random

from vitrail.config import Config
from vitrail.data.instruct.image_descriptions import ImageDescription
from vitrail.errors import ConfigError, suggest_name

MAX_OBJECTS = 12  # objects described in a prompt, the largest first
KNOWN_PHRASE, SIDES_PHRASE = "what is known of it", "shares of its sides"
PROMPT_PHRASES = (KNOWN_PHRASE, SIDES_PHRASE)  # phrases that only occur in an output if it copies the prompt


class InstructionKind(Config):
    """A kind of instruction data.

    instruction       what the model is asked to write
    answer_words      least and most words of an answer
    fixed_questions   questions of ours; one is used, so that the output is the answer alone
    answer_format     appended to the question, to state the form of the answer
    allow_paragraphs  whether an answer may continue after a blank line
    """

    instruction: str
    answer_words: tuple[int, int]
    fixed_questions: tuple[str, ...] = ()
    answer_format: str = ""
    allow_paragraphs: bool = False


_ROWS = tomllib.loads(Path(__file__).with_name("instruction_kinds.toml").read_text(encoding="utf-8"))
INSTRUCTION_KINDS = {name: InstructionKind.from_dict(row) for name, row in _ROWS.items()}


def get_kind(name: str) -> InstructionKind:
    """Look up a kind by name."""
    if name not in INSTRUCTION_KINDS:
        raise ConfigError(f"unknown kind of instruction {name!r}", suggest_name(name, INSTRUCTION_KINDS))
    return INSTRUCTION_KINDS[name]


def build_prompt(image: ImageDescription, kind: str) -> str:
    """Build the prompt of the text model. Each caption is one line, so that a caption cannot add lines of its own."""
    lines = [f"Somebody shows you a picture. This is {KNOWN_PHRASE}."]
    lines += [f"- {_to_line(caption)}" for caption in image.captions]
    if image.objects:
        lines.append(f"Its things, with left, top, right and bottom as {SIDES_PHRASE}:")
        largest = sorted(image.objects, key=lambda thing: -_area(thing.box))
        lines += [f"- {_to_line(name)}: {', '.join(f'{x:.2f}' for x in box)}" for name, box in largest[:MAX_OBJECTS]]
        if len(largest) > MAX_OBJECTS:
            lines.append(f"- and {len(largest) - MAX_OBJECTS} smaller things")
    lines.append(
        "Speak as one who sees the picture: never of captions, boxes or coordinates, and only of what is sure."
    )
    return "\n".join([*lines, get_kind(kind).instruction, ""])


def _to_line(text: str) -> str:
    return " ".join(text.split())


def _area(box: tuple[float, float, float, float]) -> float:
    left, top, right, bottom = box
    return (right - left) * (bottom - top)


def choose_question(image: ImageDescription, kind: str, seed: int) -> str:
    """Choose the fixed question for an output that is an answer alone; "" for other kinds."""
    candidates = get_kind(kind).fixed_questions
    return Random(f"{seed}/{image.id}/{kind}").choice(candidates) if candidates else ""
