"""Captions beside people's, and what they name that is not there."""

from collections.abc import Callable

from vitrail.errors import ConfigError, DataError, nearest
from vitrail.evals.metrics import captions as told
from vitrail.evals.metrics import chair as hallucinated
from vitrail.evals.metrics.java import meteor as by_meteor
from vitrail.evals.metrics.java import ptb
from vitrail.evals.shares import Score
from vitrail.evals.suites.scored import Said, Values
from vitrail.evals.suites.scored.depicted import MOST, Depicted
from vitrail.evals.suites.sheets import Sheet, mean, measured


def consensus(sheet: Sheet, said: Said, *, tokenizer: str = "plain") -> Values:
    """CIDEr of each caption."""
    words, references = _words(sheet, said, tokenizer)
    return told.cider(words, references).tolist()


def captions(
    sheet: Sheet, said: Said, *, tokenizer: str = "plain", meteor: bool = False, clip: Depicted | None = None
) -> list[Score]:
    words, references = _words(sheet, said, tokenizer)
    counts = told.bleu_counts(words, references)
    scores = [
        measured(f"BLEU-{n}", counts, lambda sums, n=n: told.bleu(sums, n), sheet.pictures)
        for n in range(1, told.ORDERS + 1)
    ]
    rest = {"ROUGE-L": told.rouge_l, "CIDEr": told.cider} | ({"METEOR": by_meteor} if meteor else {})
    for name, measure in rest.items():
        each = measure(words, references).tolist()
        scores.append(mean(name, each, sheet.pictures, most=10.0 if name == "CIDEr" else 1.0))
    for name, each in ({} if clip is None else clip.scores(sheet, said)).items():
        scores.append(mean(name, each, sheet.pictures, most=MOST[name]))
    return scores


def of_another(sheet: Sheet) -> list[str]:
    """What people say of the next picture."""
    first = [sample.captions[0] for sample in sheet.samples]
    return [*first[1:], first[0]]


TOKENIZERS: dict[str, Callable[[list[str]], list[list[str]]]] = {
    "plain": lambda texts: [told.words_of(text) for text in texts],
    "ptb": ptb,
}


def _words(sheet: Sheet, said: Said, tokenizer: str) -> tuple[list[list[str]], list[list[list[str]]]]:
    if tokenizer not in TOKENIZERS:
        raise ConfigError(f"captions are not cut by {tokenizer!r}", nearest(tokenizer, TOKENIZERS))
    bare = next((sample.id for sample in sheet.samples if not sample.captions), None)
    if bare is not None:
        raise DataError(f"picture {bare!r} has no caption", "leave it out of the file")
    texts = [*said, *(caption for sample in sheet.samples for caption in sample.captions)]
    words = iter(TOKENIZERS[tokenizer](texts))
    return [next(words) for _ in said], [[next(words) for _ in sample.captions] for sample in sheet.samples]


def things(sheet: Sheet, said: Said, *, synonyms: hallucinated.Things) -> list[Score]:
    """CHAIR, with what is annotated and what the reference captions name as what is there."""
    present = []
    for sample in sheet.samples:
        named = [*(thing.category for thing in sample.instances), *sample.captions]
        present.append({thing for text in named for thing in synonyms.named(text)})
    table = hallucinated.chair(said, present, synonyms)
    return [measured(name, table, measure, sheet.pictures) for name, measure in hallucinated.MEASURES.items()]
