"""Benchmarks that people publish, read from their own files: a row each says how it is asked and how it is scored."""

import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from vitrail.data.formats import Sample, Samples, open_format
from vitrail.data.formats.sample import asked
from vitrail.errors import ConfigError, DataError, nearest
from vitrail.evals.metrics.answers import exact
from vitrail.evals.metrics.chair import COCO_PHRASES, Things
from vitrail.evals.metrics.choice import turned
from vitrail.evals.metrics.opened import opened
from vitrail.evals.metrics.paired import Paired, paired
from vitrail.evals.metrics.spoken import spoken
from vitrail.evals.shares import Score
from vitrail.evals.suites.scored import aro, boxes, captions, choices, moments, short, yesno
from vitrail.evals.suites.sets import some_of
from vitrail.evals.suites.sheets import Sheet

ALONE = "{question}"
SHORT = "{question}\nAnswer the question using a single word or phrase."
YES_NO = "{question}\nPlease answer yes or no."
LETTER = "{question}\n{choices}\nAnswer with the option's letter from the given choices directly."
FITS = "Which caption fits the picture?"
CAPTION = "Provide a one-sentence caption for the picture."
WHEN = """When does this happen in the video: {question}
Answer with its start and end in seconds, in the form: start - end seconds"""

Guess = Callable[[Sheet], list[str]]


class Compared(NamedTuple):
    """Two models on all samples, or on a part of them: the mean of each, and their difference."""

    title: str
    first: float
    second: float
    paired: Paired


class Benchmark(NamedTuple):
    """prompt   how a sample is asked: {question}, {choices} and {hint} stand for its own
    scorer   answers to scores, with options of its own
    each     the value of every item, where models can be compared by it
    guesses  answers that need no model, whose scores stand beside
    unfold   samples as the file has them to samples as they are asked
    open     the file, where that takes more than a format
    whole    what a sample is scored together with, of which a limit takes all or none
    parts    the note that models are also compared by
    unread   which answers could not be read
    weighed  how it is asked where options are chosen by their likelihood; empty where there are none
    bare     how a sample without options is asked, where others have some
    """

    format: str
    prompt: str
    scorer: Callable[..., list[Score]]
    each: Callable[..., list[float]] | None = None
    guesses: Mapping[str, Guess] = {"majority": short.majority}
    unfold: Callable[..., Samples] | None = None
    open: Callable[..., Samples] | None = None
    whole: Callable[[Sample], Hashable] | None = None
    parts: str = ""
    unread: Callable[..., list[bool]] | None = None
    weighed: str = ""
    bare: str = ""

    def read(self, path: str | Path, *, limit: int | None = None, circular: bool = False, **options: Any) -> Samples:
        """The samples as they are asked. `options` are the format's; `limit` takes so many at most, drawn alike,
        or so many of those that are scored together; with `circular` a multiple choice is asked once for every order
        that turning its options round gives."""
        samples = self.open(path, **options) if self.open else open_format(self.format, path, **options)
        if limit is not None:
            samples = samples.only(self._some(samples, limit))
        if circular and self.unfold is not circle:
            raise ConfigError(f"{self.format} is no multiple choice that could be turned round", "leave circular out")
        if self.unfold is circle:
            return circle(samples, turns=circular)
        return self.unfold(samples) if self.unfold else samples

    def _some(self, samples: Samples, limit: int) -> list[int]:
        if self.whole is None:
            return some_of(len(samples), limit)
        groups: dict[Hashable, list[int]] = {}
        for n, sample in enumerate(samples):
            groups.setdefault(self.whole(sample), []).append(n)
        rows = list(groups.values())
        return sorted(n for row in some_of(len(rows), limit) for n in rows[row])

    def question(self, sample: Sample, prompt: str | None = None) -> str:
        """What a model is asked about the sample's pictures."""
        said = {
            "question": sample.turns[0].text if sample.turns else "",
            "choices": "\n".join(f"{letter}. {text}" for letter, text in sample.choices.items()),
            "hint": sample.hint,
        }
        try:
            own = self.bare if self.bare and not sample.choices else self.prompt
            text = (own if prompt is None else prompt).format(**said)
        except (LookupError, ValueError, AttributeError, TypeError) as error:
            fields = ", ".join(f"{{{name}}}" for name in said)
            raise ConfigError(f"the prompt {prompt!r} cannot be filled in: {error}", f"it may use {fields}") from None
        return f"{sample.hint}\n{text}" if sample.hint and prompt is None else text

    def score(
        self, samples: Sequence[Sample], answers: Sequence[str], blind: Sequence[str] | None = None, **options: Any
    ) -> list[Score]:
        """The scores of answers, one a sample in their order, beside those of guesses and, if they are given, of
        answers that the model gave `blind`, without the pictures. Thoughts before an answer are passed over."""
        self.check(options)
        sheet = Sheet.of(samples)
        said = {name: guess(sheet) for name, guess in self.guesses.items()}
        said |= {} if blind is None else {"blind": [spoken(text) for text in blind]}
        answers = [spoken(text) for text in answers]
        for name, texts in {"answers": answers, **said}.items():
            if len(texts) != len(sheet):
                raise DataError(f"{len(texts):,} {name} to {len(sheet):,} samples", "give one to each")
        beside: dict[str, dict[str, float]] = {}
        for name, texts in said.items():
            for score in self.scorer(sheet, texts, **options):
                beside.setdefault(score.title, {})[name] = score.value
        scores = self.scorer(sheet, answers, **options)
        return [replace(score, beside={**score.beside, **beside.get(score.title, {})}) for score in scores]

    def compare(self, samples: Sequence[Sample], first: Sequence[str], second: Sequence[str], **options: Any) -> Paired:
        """Two models' answers to the same samples. Where several questions are about one picture, pictures are drawn
        anew."""
        return self.compare_parts(samples, first, second, **options)[0].paired

    def compare_parts(
        self, samples: Sequence[Sample], first: Sequence[str], second: Sequence[str], **options: Any
    ) -> list[Compared]:
        """The same of all samples, and then of each part of them, where there are several."""
        if self.each is None:
            raise ConfigError(f"{self.format} has no value for every sample", "compare the scores of both")
        self.check(options)
        sheet = Sheet.of(samples)
        values = [self._values(sheet, said, options) for said in (first, second)]
        noted = sheet.noted(self.parts) if self.parts else []
        parts = [part for part in dict.fromkeys(noted) if part]
        rows = {"": list(range(len(sheet)))}
        for part in parts if len(parts) > 1 else ():
            rows[f"{self.parts} {part}"] = [n for n, at in enumerate(noted) if at == part]
        found = []
        for title, some in rows.items():
            of = [sheet.pictures[n] for n in some]
            a, b = ([each[n] for n in some] for each in values)
            groups = of if len(set(of)) < len(of) else None
            found.append(Compared(title or "all", sum(a) / len(a), sum(b) / len(b), paired(a, b, groups)))
        return found

    def verdicts(
        self, samples: Sequence[Sample], said: Sequence[str], **options: Any
    ) -> list[tuple[str, float | None]]:
        """Of each answer "right", "wrong" or "unread", and its value. Captions are neither right nor wrong."""
        if self.each is None:
            return [("", None)] * len(said)
        sheet = Sheet.of(samples)
        values = self._values(sheet, said, options)
        if self.each is captions.consensus:
            return [("", value) for value in values]
        answers = [spoken(text) for text in said]
        lost = [False] * len(said) if self.unread is None else self.unread(sheet, answers, **options)
        told = (
            "unread" if none else "right" if value >= 0.5 else "wrong" for none, value in zip(lost, values, strict=True)
        )
        return list(zip(told, values, strict=True))

    def _values(self, sheet: Sheet, said: Sequence[str], options: Mapping[str, Any]) -> Sequence[float]:
        """Of each answer, by those options that its value hangs on."""
        assert self.each is not None
        known = inspect.signature(self.each).parameters
        answers = [spoken(text) for text in said]
        return self.each(sheet, answers, **{name: option for name, option in options.items() if name in known})

    def check(self, options: Mapping[str, Any]) -> None:
        """Refuse what the scorer does not take, and the lack of what it needs."""
        known = dict(list(inspect.signature(self.scorer).parameters.items())[2:])
        for name in options:
            if name not in known:
                remedy = nearest(name, known) if known else "leave it out"
                raise ConfigError(f"{self.format} has no option {name!r} of scoring", remedy)
        for name, about in known.items():
            if about.default is about.empty and name not in options:
                raise ConfigError(f"this cannot be scored without {name}", f"give {name}")


def benchmark(name: str) -> Benchmark:
    if name not in BENCHMARKS:
        raise ConfigError(f"there is no benchmark {name!r}", nearest(name, BENCHMARKS))
    return BENCHMARKS[name]


# ---- samples as they are asked ----------------------------------------------------------------------------------


def circle(samples: Samples, turns: bool = False) -> Samples:
    """Every question once, or in all orders of its options. MMBench's own files hold such orders too, 1,000,000 apart:
    `notes["circle"]` is alike for those of one question."""
    rows = [(n, 0) for n in range(len(samples))]
    if turns:
        rows = [(n, turn) for n, sample in enumerate(samples) for turn in range(max(1, len(sample.choices)))]

    def make(row: tuple[int, int]) -> Sample:
        sample, turn = samples[row[0]], row[1]
        notes = {**sample.notes, "circle": _circle_of(sample)}
        if not turn:
            return replace(sample, notes=notes)
        if not sample.answers:
            raise DataError(f"the answer to {sample.id!r} is not known", "ask it in one order")
        options, right = turned(sample.choices, sample.answers[0], turn)
        return replace(sample, id=f"{sample.id}+{turn}", choices=options, answers=(right,), notes=notes)

    return Samples(samples.kind, samples.path, rows, make)


def _circle_of(sample: Sample) -> tuple[str, str]:
    number = str(int(sample.id) % 1_000_000) if sample.id.isdecimal() else sample.id
    return number, sample.turns[0].text


def _set_of(sample: Sample) -> str:
    """HallusionBench's: figures and the questions about all of them."""
    return str(sample.notes["question"]).rpartition("_")[0]


def _lettered(options: Sequence[str]) -> dict[str, str]:
    first, second = options
    return {"A": first, "B": second}


def _both_ways(samples: Samples) -> Samples:
    """Winoground as four choices: of each picture its caption, and of each caption its picture."""
    rows = [(n, side, which) for n in range(len(samples)) for side in ("text", "image") for which in (0, 1)]

    def make(row: tuple[int, str, int]) -> Sample:
        sample, side, which = samples[row[0]], row[1], row[2]
        question, options, shown = FITS, sample.captions, sample.pictures[which : which + 1]
        if side == "image":
            question = f"Which of the two pictures fits the caption: {sample.captions[which]}"
            options, shown = ("the first picture", "the second picture"), sample.pictures
        notes = {**sample.notes, "example": sample.id, "side": side}
        if side == "image":
            notes["fits"] = sample.captions[which]
        return Sample(
            id=f"{sample.id}/{side}/{which}", pictures=shown, turns=asked(question, len(shown)),
            choices=_lettered(options), answers=("AB"[which],), notes=notes,
        )  # fmt: skip

    return Samples(samples.kind, samples.path, rows, make)


def _true_or_false(samples: Samples) -> Samples:
    """ARO as a choice, with the true caption first in every other one."""

    def make(n: int) -> Sample:
        sample = samples[n]
        both = sample.captions if n % 2 == 0 else sample.captions[::-1]
        right = "AB"[n % 2]
        return replace(sample, captions=(), turns=asked(FITS), choices=_lettered(both), answers=(right,))

    return Samples(samples.kind, samples.path, range(len(samples)), make)


def _captions_and_things(path: str | Path, *, instances: str | Path | None = None, **options: Any) -> Samples:
    """COCO's captions, with the instances of the same pictures from their own file."""
    if instances is None:
        raise ConfigError("CHAIR needs to know what is in the pictures", "give COCO's instances_*.json as instances")
    told = open_format("coco-captions", path, **options)
    things = {sample.id: sample.instances for sample in open_format("coco-instances", instances, **options)}

    def make(sample: Sample) -> Sample:
        if sample.id not in things:
            raise DataError(f"picture {sample.id} of {path} is not in {instances}", "give the file of the same split")
        return replace(sample, instances=things[sample.id])

    return Samples("coco-captions", Path(path), list(told), make)


def _chair(sheet: Sheet, said: Sequence[str], *, synonyms: str | Path | Things) -> list[Score]:
    known = synonyms if isinstance(synonyms, Things) else Things.read(synonyms, COCO_PHRASES)
    return captions.things(sheet, said, synonyms=known)


# ---- the rows ---------------------------------------------------------------------------------------------------

_YES = {"always yes": yesno.always_yes}
_ANOTHER = {"of another picture": captions.of_another}
_SPANS = {"whole video": moments.whole, "middle half": moments.middle_half, "majority": moments.majority}


def _when(kind: str) -> Benchmark:
    return Benchmark(kind, WHEN, moments.localised, moments.overlaps, _SPANS, unread=moments.unread)


def _mixed(kind: str, rule: choices.Rule) -> Benchmark:
    """Multiple choice, with questions among them that have an answer of their own."""
    score, each = choices.choices_or(rule), choices.chosen_or(rule)
    return Benchmark(
        kind, LETTER, score, each, unfold=circle, whole=_circle_of, parts="category", unread=choices.unread, bare=SHORT
    )


BENCHMARKS: dict[str, Benchmark] = {
    "vqav2": Benchmark(
        "vqa", SHORT, short.averaged("accuracy", short.softly, "answers", "answer_type"), short.softly,
        parts="answer_type",
    ),
    "textvqa": Benchmark("textvqa", SHORT, short.averaged("accuracy", short.softly), short.softly),
    "gqa": Benchmark("gqa", SHORT, short.averaged("accuracy", short.exactly, binary=True), short.exactly),
    "docvqa": Benchmark("docvqa", SHORT, short.averaged("ANLS", short.by_edits), short.by_edits),
    "chartqa": Benchmark(
        "chartqa", SHORT, short.averaged("relaxed accuracy", short.relaxedly, binary=True), short.relaxedly
    ),
    "ocrbench": Benchmark(
        "ocrbench", ALONE, short.averaged("accuracy", short.holding, "type", "type", binary=True), short.holding,
        parts="type",
    ),
    "ocrvqa": Benchmark("ocrvqa", SHORT, short.averaged("accuracy", short.verbatim, binary=True), short.verbatim),
    "pope": Benchmark("pope", YES_NO, yesno.pope, yesno.yes_or_no, _YES, parts="split", unread=yesno.untold),
    "mme": Benchmark(
        "mme", ALONE, yesno.mme, yesno.at_once, _YES, whole=lambda sample: sample.pictures, parts="category",
        unread=yesno.untold_at_once,
    ),
    "hallusionbench": Benchmark(
        "hallusion", YES_NO, yesno.hallusion, yesno.told_apart, _YES, whole=_set_of, unread=yesno.untold_apart
    ),
    "mmbench": Benchmark(
        "mmbench", LETTER, choices.choices, choices.chosen, unfold=circle, whole=_circle_of, parts="category",
        unread=choices.unread, weighed=ALONE,
    ),
    "mmmu": _mixed("mmmu", opened),
    "realworldqa": _mixed("realworldqa", exact),
    "winoground": Benchmark(
        "winoground", LETTER, choices.pairs, choices.chosen, unfold=_both_ways, parts="side", unread=choices.unread,
        weighed=CAPTION,
    ),
    "aro": Benchmark(
        "aro", LETTER, aro.kinds, choices.chosen, unfold=_true_or_false, parts="part", unread=choices.unread,
        weighed=CAPTION,
    ),
    "captions": Benchmark(
        "coco-captions", CAPTION, captions.captions, captions.consensus,
        _ANOTHER,
    ),
    "chair": Benchmark(
        "coco-captions", "Please describe the picture in detail.", _chair, None, _ANOTHER, open=_captions_and_things
    ),
    "refcoco": Benchmark(
        "refcoco", 'Locate "{question}" and give its box as JSON: {{"bbox_2d": [x1, y1, x2, y2]}}', boxes.located,
        boxes.overlaps, {}, unread=boxes.unread,
    ),
    "charades": _when("charades-sta"),
    "qvhighlights": _when("qvhighlights"),
    "activitynet": _when("activitynet-captions"),
}  # fmt: skip
