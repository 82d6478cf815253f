"""Asks a text model about every image, filters its output, and writes conversations in LLaVA's format.

A folder of instruction data holds

answers.jsonl    all model outputs in order; an interrupted run resumes from it
instruct.jsonl   pairs that passed the filter
refused.jsonl    outputs with rejected pairs, and the reasons
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from vitrail.data.instruct.image_descriptions import ImageDescription
from vitrail.data.instruct.instruction_prompts import INSTRUCTION_KINDS, build_prompt, choose_question, get_kind
from vitrail.data.instruct.pair_filter import finalize_pair, find_rejection_reason
from vitrail.data.instruct.pair_parser import QAPair, parse_pairs
from vitrail.errors import ConfigError, DataError

GenerateFn = Callable[[str, int], str | None]
"""Generates text from a prompt and a seed; returns None if the prompt does not fit the model."""


@dataclass
class KindStatistics:
    """Counts for one kind: texts, pairs, pairs kept, and reasons of rejections. `answer_counts` covers closed
    questions.

    A text that does not fit the model, or holds no pair, counts as one rejection.
    """

    num_texts: int = 0
    num_pairs: int = 0
    num_kept: int = 0
    rejections: Counter[str] = field(default_factory=Counter)
    answer_counts: Counter[str] = field(default_factory=Counter)


def make_instruction_data(
    images: Iterable[ImageDescription],
    generate: GenerateFn,
    folder: Path,
    *,
    kinds: Sequence[str] = tuple(INSTRUCTION_KINDS),
    seed: int = 0,
    settings: Mapping[str, Any] | None = None,
) -> dict[str, KindStatistics]:
    """Write instruction data of `kinds` about images into a folder.

    Prompts are a function of seed, image and kind. `settings` are all other settings that affect the output; a folder
    cannot be resumed with different ones.
    """
    for kind in kinds:
        get_kind(kind)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"the folder {folder} cannot be created: {error.strerror}", "give another folder") from None
    _check_settings(folder / "settings.json", {**(settings or {}), "seed": seed})
    answers, statistics = _read_outputs(folder / "answers.jsonl"), {kind: KindStatistics() for kind in kinds}
    kept, refused = ((folder / f"{name}.jsonl").with_suffix(".partial") for name in ("instruct", "refused"))
    with (
        (folder / "answers.jsonl").open("a", encoding="utf-8") as journal,
        kept.open("w", encoding="utf-8") as accepted_file,
        refused.open("w", encoding="utf-8") as rejected_file,
    ):
        for image in images:
            asked_questions: set[str] = set()  # questions about this image
            for kind in kinds:
                if (image.id, kind) not in answers:
                    output = generate(build_prompt(image, kind), _seed(seed, image.id, kind))
                    answers[image.id, kind] = output
                    _write_line(journal, {"id": image.id, "kind": kind, "answer": output})
                    journal.flush()
                accepted, reasons = _filter_output(
                    image, kind, answers[image.id, kind], seed, asked_questions, statistics[kind]
                )
                if accepted:
                    _write_line(accepted_file, _to_conversation(image, kind, accepted))
                if reasons:
                    entry = {"id": image.id, "kind": kind, "reasons": reasons}
                    _write_line(rejected_file, entry | {"answer": answers[image.id, kind]})
    for partial in (kept, refused):
        partial.replace(partial.with_suffix(".jsonl"))
    return statistics


def _filter_output(
    image: ImageDescription,
    kind: str,
    text: str | None,
    seed: int,
    asked_questions: set[str],
    statistics: KindStatistics,
) -> tuple[list[QAPair], list[str]]:
    """Return the pairs that pass, and the reasons of rejected ones."""
    statistics.num_texts += 1
    fixed_question = choose_question(image, kind, seed)
    if text is None:
        pairs, reasons = [], ["prompt does not fit the model"]
    elif fixed_question:
        pairs, reasons = [QAPair(fixed_question, " ".join(text.split()))], []
    else:
        pairs = parse_pairs(text, allow_paragraphs=INSTRUCTION_KINDS[kind].allow_paragraphs)
        reasons = [] if pairs else ["no question-answer pair"]
    statistics.num_pairs += len(pairs)
    accepted = []
    for pair in pairs:
        normalized = " ".join(pair.question.lower().split())
        if (
            reason := find_rejection_reason(kind, pair, [thing.name for thing in image.objects])
        ) or normalized in asked_questions:
            reasons.append(reason or "duplicate question")
            continue
        asked_questions.add(normalized)
        accepted.append(finalize_pair(kind, pair, f"{seed}/{image.id}/{pair.question}"))
        if INSTRUCTION_KINDS[kind].answer_format:
            statistics.answer_counts[accepted[-1].answer] += 1
    statistics.num_kept += len(accepted)
    statistics.rejections.update(reasons)
    return accepted, reasons


def _to_conversation(image: ImageDescription, kind: str, pairs: Sequence[QAPair]) -> dict[str, Any]:
    turns = []
    for number, pair in enumerate(pairs):
        lines = [
            pair.question,
            *(f"{letter}. {text}" for letter, text in pair.options),
            INSTRUCTION_KINDS[kind].answer_format,
        ]
        question = "\n".join(line for line in lines if line)
        turns.append({"from": "human", "value": f"<image>\n{question}" if not number else question})
        turns.append({"from": "gpt", "value": pair.answer})
    return {"id": f"{image.id}-{kind}", "image": image.image, "conversations": turns}


def _seed(seed: int, id: str, kind: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{id}/{kind}".encode()).digest()[:4], "big") >> 1


def _write_line(file: IO[str], row: Mapping[str, Any]) -> None:
    file.write(json.dumps(row, ensure_ascii=False) + "\n")


def _read_outputs(file: Path) -> dict[tuple[str, str], str | None]:
    """Read the outputs of an earlier run. An incomplete last line is removed, and generated again."""
    if not file.is_file():
        return {}
    data = file.read_bytes()
    complete = data[: data.rfind(b"\n") + 1]
    if len(complete) < len(data):
        file.write_bytes(complete)
    try:
        rows = (json.loads(line) for line in complete.splitlines() if line.strip())
        return {(row["id"], row["kind"]): row["answer"] for row in rows}
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{file} cannot be resumed: {error!r}", "correct the line, or use another folder") from None


def _check_settings(file: Path, settings: dict[str, Any]) -> None:
    text = json.dumps(settings, indent=1, sort_keys=True) + "\n"
    if not file.is_file():
        file.write_text(text, encoding="utf-8")
    elif file.read_text(encoding="utf-8") != text:
        raise ConfigError(
            f"{file.parent} was started with other settings: see {file.name}", "use one folder for each setting"
        )
