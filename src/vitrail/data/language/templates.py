"""Text templates of questions, answers, captions and prompts, read from `templates.toml`."""

import tomllib
from pathlib import Path
from typing import NamedTuple


class TemplateKind(NamedTuple):
    """Training and held-out templates of one kind."""

    train: tuple[str, ...]
    test: tuple[str, ...]
    answers: tuple[str, ...] = ()
    answers_test: tuple[str, ...] = ()  # if the answers are paraphrases that are sampled like questions


_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def _read_kinds(section: str) -> dict[str, TemplateKind]:
    kinds = _TABLES[section].items()
    return {name: TemplateKind(**{key: tuple(texts) for key, texts in kind.items()}) for name, kind in kinds}


def _add_options(stems: TemplateKind, form: str) -> TemplateKind:
    """Return the questions with four options appended, in formats of which some are held out."""

    def format_options(before: str, after: str) -> str:
        return "".join(f" {before}{letter}{after} {{{form} {letter.lower()}}}" for letter in "ABCD")

    train = tuple(stem + format_options(*("()" if i % 2 else ("", "."))) for i, stem in enumerate(stems.train))
    return TemplateKind(train, tuple(stem + format_options("", ")") for stem in stems.test), ("{letter l}",))


def _add_absent_answer(kind: TemplateKind, absent: str = "x") -> TemplateKind:
    """Return the kind with a first answer that rejects the question: the thing of this placeholder is absent."""
    return kind._replace(answers=(f"There is no {{{absent}}} in the picture.", *kind.answers))


_QUESTIONS, _EXTRA = _read_kinds("question"), _TABLES["extra"]
_EXISTENCE_KINDS = ("existence_random", "existence_popular", "existence_adversarial")

QUESTION_KINDS: dict[str, TemplateKind] = {
    **dict.fromkeys(_EXISTENCE_KINDS, _QUESTIONS["existence"]),
    **{kind: texts for kind, texts in _QUESTIONS.items() if kind not in ("existence", "choice_object", "grounding")},
    "choice_object": _add_options(_QUESTIONS["choice_object"], "a"),
    "choice_colour": _add_options(_QUESTIONS["colour"], "colour"),
    "choice_count": _add_options(_QUESTIONS["counting"], "digit"),
    "choice_position": _add_options(_QUESTIONS["position"], "place"),
    "choice_reading": _add_options(_QUESTIONS["reading"], "text"),
    "unanswerable_colour": _add_absent_answer(_QUESTIONS["colour"]),
    "unanswerable_position": _add_absent_answer(_QUESTIONS["position"]),
    "grounding": _QUESTIONS["grounding"],
    "unanswerable_relation": _add_absent_answer(_QUESTIONS["relation"], "z"),
}
#: kinds that mixtures contain only by name, so that default mixtures stay the same for the same seed
OPTIONAL_KINDS = ("unanswerable_relation",)
FOLLOW_UP_KINDS = _read_kinds("follow_up")
CAPTION_KINDS = _read_kinds("caption")
SWAP_KINDS = _read_kinds("swap")

NAMED_IMAGE_CAPTIONS: tuple[str, ...] = tuple(_TABLES["named_image"]["captions"])

#: GenEval's kinds of prompts → the kind with their texts
_PROMPT_TEXTS = {"single": "single", "two": "two", "counting": "counting"}
_PROMPT_TEXTS |= {"colours": "single", "position": "position", "attribution": "two"}
DRAWING_PROMPT_KINDS = {kind: _read_kinds("prompt")[texts] for kind, texts in _PROMPT_TEXTS.items()}

#: templates that are neither questions nor answers
SENTENCE_KINDS: dict[str, TemplateKind] = {
    **_read_kinds("caption_sentence"),
    **{f"swap_{name}": kind for name, kind in SWAP_KINDS.items()},
    **{f"draw_{name}": kind for name, kind in DRAWING_PROMPT_KINDS.items()},
}

#: kind of question, or “draw_” + kind of prompt → additional training templates
EXTRA_TEMPLATES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(_EXISTENCE_KINDS, tuple(_EXTRA["existence"])),
    **{kind: tuple(_EXTRA[kind]) for kind in ("counting", "relation")},
    "unanswerable_relation": tuple(_EXTRA["relation"]),
    **{
        f"draw_{kind}": tuple(
            f"{lead} {body}" for lead in _EXTRA["prompt_leads"] for body in _EXTRA["prompt_bodies"][texts]
        )
        for kind, texts in _PROMPT_TEXTS.items()
    },
}
