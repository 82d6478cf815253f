"""Ask a text model about every picture, filter what it writes, and keep the rest as LLaVA's conversations.

A folder of instruction data holds

    answers.jsonl    all that was written, in the order it was asked for: what makes the same call go on after any death
    instruct.jsonl   what passed the filter
    refused.jsonl    what did not, with the reasons
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from vitrail.data.instruct.checks import refuse, settle
from vitrail.data.instruct.parse import Pair, parse
from vitrail.data.instruct.prompts import KINDS, kind_of, prompt, question
from vitrail.data.instruct.seen import Seen
from vitrail.errors import ConfigError, DataError

Writer = Callable[[str, int], str | None]
"""prompt, seed → what a text model writes; None if the prompt does not fit it"""


@dataclass
class Yield:
    """What came of one kind: texts asked for, pairs in them, pairs kept, and the reasons of all refusals. Of what does
    not fit the model, or holds no pair at all, the text counts once. `answers` are those of closed questions."""

    asked: int = 0
    pairs: int = 0
    kept: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    answers: Counter[str] = field(default_factory=Counter)


def make(
    pictures: Iterable[Seen],
    writer: Writer,
    out: Path,
    *,
    kinds: Sequence[str] = tuple(KINDS),
    seed: int = 0,
    settings: Mapping[str, Any] | None = None,
) -> dict[str, Yield]:
    """Write instruction data of `kinds` about pictures into a folder. What is asked is a function of seed, picture and
    kind; `settings` are what else decides the answers, and a folder takes no others than those it was begun with."""
    for kind in kinds:
        kind_of(kind)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{out} cannot be a folder: {error.strerror}", "give another folder") from None
    _same_settings(out / "settings.json", {**(settings or {}), "seed": seed})
    answers, found = _answers(out / "answers.jsonl"), {kind: Yield() for kind in kinds}
    kept, refused = ((out / f"{name}.jsonl").with_suffix(".partial") for name in ("instruct", "refused"))
    with (
        (out / "answers.jsonl").open("a", encoding="utf-8") as journal,
        kept.open("w", encoding="utf-8") as good,
        refused.open("w", encoding="utf-8") as bad,
    ):
        for seen in pictures:
            put: set[str] = set()  # questions of this picture
            for kind in kinds:
                if (seen.id, kind) not in answers:
                    answers[seen.id, kind] = written = writer(prompt(seen, kind), _seed(seed, seen.id, kind))
                    _line(journal, {"id": seen.id, "kind": kind, "answer": written})
                    journal.flush()
                passed, reasons = _sift(seen, kind, answers[seen.id, kind], seed, put, found[kind])
                if passed:
                    _line(good, _conversation(seen, kind, passed))
                if reasons:
                    about = {"id": seen.id, "kind": kind, "reasons": reasons}
                    _line(bad, about | {"answer": answers[seen.id, kind]})
    for partial in (kept, refused):
        partial.replace(partial.with_suffix(".jsonl"))
    return found


def _sift(
    seen: Seen, kind: str, text: str | None, seed: int, put: set[str], found: Yield
) -> tuple[list[Pair], list[str]]:
    """The pairs that pass, and the reasons of those that do not."""
    found.asked += 1
    given = question(seen, kind, seed)
    if text is None:
        pairs, reasons = [], ["the prompt does not fit the model"]
    elif given:
        pairs, reasons = [Pair(given, " ".join(text.split()))], []
    else:
        pairs = parse(text, paragraphs=KINDS[kind].paragraphs)
        reasons = [] if pairs else ["no question and answer"]
    found.pairs += len(pairs)
    passed = []
    for pair in pairs:
        same = " ".join(pair.question.lower().split())
        if (reason := refuse(kind, pair, [thing.name for thing in seen.things])) or same in put:
            reasons.append(reason or "asked before")
            continue
        put.add(same)
        passed.append(settle(kind, pair, f"{seed}/{seen.id}/{pair.question}"))
        if KINDS[kind].form:
            found.answers[passed[-1].answer] += 1
    found.kept += len(passed)
    found.refused.update(reasons)
    return passed, reasons


def _conversation(seen: Seen, kind: str, pairs: Sequence[Pair]) -> dict[str, Any]:
    said = []
    for number, pair in enumerate(pairs):
        lines = [pair.question, *(f"{letter}. {text}" for letter, text in pair.options), KINDS[kind].form]
        asked = "\n".join(line for line in lines if line)
        said.append({"from": "human", "value": f"<image>\n{asked}" if not number else asked})
        said.append({"from": "gpt", "value": pair.answer})
    return {"id": f"{seen.id}-{kind}", "image": seen.image, "conversations": said}


def _seed(seed: int, id: str, kind: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{id}/{kind}".encode()).digest()[:4], "big") >> 1


def _line(file: IO[str], row: Mapping[str, Any]) -> None:
    file.write(json.dumps(row, ensure_ascii=False) + "\n")


def _answers(file: Path) -> dict[tuple[str, str], str | None]:
    """What was written before. A last line that was cut off is cut away, and asked for again."""
    if not file.is_file():
        return {}
    data = file.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        file.write_bytes(whole)
    try:
        rows = (json.loads(line) for line in whole.splitlines() if line.strip())
        return {(row["id"], row["kind"]): row["answer"] for row in rows}
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{file} cannot be gone on with: {error!r}", "mend the line, or take another folder") from None


def _same_settings(file: Path, settings: dict[str, Any]) -> None:
    text = json.dumps(settings, indent=1, sort_keys=True) + "\n"
    if not file.is_file():
        file.write_text(text, encoding="utf-8")
    elif file.read_text(encoding="utf-8") != text:
        raise ConfigError(f"{file.parent} was begun with other settings: see {file.name}", "give each a folder")
