"""Short answers to questions about pictures, each held against the right ones: 0 … 1.

`exact` is GQA's, `verbatim` OCR-VQA's, `soft` VQAv2's and TextVQA's, `anls` DocVQA's, `relaxed` ChartQA's, `holds`
OCRBench's.
"""

import re
from collections.abc import Sequence
from functools import lru_cache

from vitrail.errors import DataError

PUNCTUATION = ';/[]"{}()=+\\_-><@`,?!'
_COUNTED = "zero one two three four five six seven eight nine ten"
NUMBERS = {word: str(n) for n, word in enumerate(_COUNTED.split())} | {"none": "0"}
ARTICLES = {"a", "an", "the"}
_SHORT = """
ain't aren't can't could've couldn't couldn't've didn't doesn't don't hadn't hadn't've hasn't haven't he'd he'd've
he's how'd how'll how's isn't it'd it'd've it'll ma'am mightn't mightn't've might've mustn't must've needn't not've
o'clock oughtn't 'ow's'at shan't she'd've should've shouldn't shouldn't've somebody'd've somebody'll somebody's
someone'd someone'd've someone'll someone's something'd something'd've something'll that's there'd there'd've there're
there's they'd they'd've they'll they're they've 'twas wasn't we'd've we've weren't what'll what're what's what've
when's where'd where's where've who'd who'd've who'll who's who've why'll why're why's won't would've wouldn't
wouldn't've y'all y'all'll y'all'd've you'd you'd've you'll you're you've
"""
# Whichever one apostrophe is missing; the one entry that takes an apostrophe away is the script's own.
CONTRACTIONS = {word[:at] + word[at + 1 :]: word for word in _SHORT.split() for at, c in enumerate(word) if c == "'"}
CONTRACTIONS["somebody'd"] = "somebodyd"

_THOUSANDS = re.compile(r"\d,\d")
_FULL_STOP = re.compile(r"\.(?!\d)")


@lru_cache(1 << 16)
def normal(text: str) -> str:
    """As VQA's script writes answers before it compares them: numbers as digits, no articles, no punctuation."""
    text = re.sub(r"[\n\t]", " ", text).strip()
    given, joined = text, bool(_THOUSANDS.search(text))
    for mark in PUNCTUATION:
        beside_space = f"{mark} " in given or f" {mark}" in given
        text = text.replace(mark, "" if joined or beside_space else " ")
    words = (NUMBERS.get(word, word) for word in _FULL_STOP.sub("", text).lower().split())
    return " ".join(CONTRACTIONS.get(word, word) for word in words if word not in ARTICLES)


def exact(answer: str, truths: Sequence[str]) -> float:
    """Whether it is one of the right answers, whatever the case and with or without a full stop."""
    return float(_plain(answer) in {_plain(truth) for truth in truths})


def verbatim(answer: str, truths: Sequence[str]) -> float:
    """The same, and a full stop counts: VLMEvalKit's and Qwen-VL's rule for OCR-VQA."""
    return float(answer.strip().lower() in {truth.strip().lower() for truth in truths})


def soft(answer: str, truths: Sequence[str], *, as_script: bool = False) -> float:
    """What people agree on: min(those who said so / 3, 1), averaged over all ways of leaving one of them out.

    VQA's script leaves words as they are where all people said the same, so that "Yes" is wrong beside ten times "yes";
    so does this where it is to score `as_script` does.
    """
    if len(truths) < 4:
        raise DataError(
            f"{len(truths)} people's answers ({', '.join(truths):.80})", "this measure needs at least 4: ten"
        )
    if as_script and len({_spaced(truth) for truth in truths}) == 1:
        said = sum(_spaced(truth) == _spaced(answer) for truth in truths)
    else:
        answer = normal(answer)
        said = sum(normal(truth) == answer for truth in truths)
    n = len(truths)
    return (said * min((said - 1) / 3, 1) + (n - said) * min(said / 3, 1)) / n


def anls(answer: str, truths: Sequence[str], *, threshold: float = 0.5) -> float:
    """1 − edits / length of the longer, of the nearest right answer; 0 from `threshold` on. Spaces that say nothing are
    left out, of the length too, to which DocVQA's script counts them."""
    far = min((_far(_squeezed(answer), _squeezed(truth)) for truth in truths), default=1.0)
    return 1 - far if far < threshold else 0.0


def relaxed(answer: str, truths: Sequence[str], *, within: float = 0.05) -> float:
    """A number within 5 % of the right one, or the same words whatever the case. 5% is 0.05; 1,000 is no number."""
    return float(any(_near(answer.strip(), truth.strip(), within) for truth in truths))


def holds(answer: str, truths: Sequence[str], *, formula: bool = False) -> float:
    """Whether a right answer occurs in it, whatever the case; of a formula, whatever the spaces, case counting."""
    shown = _formula if formula else _lined
    return float(any(shown(truth) in shown(answer) for truth in truths))


def edits(a: str, b: str) -> int:
    """Levenshtein's distance: characters put in, left out or exchanged."""
    row = list(range(len(b) + 1))
    for i, c in enumerate(a, start=1):
        corner, row[0] = row[0], i
        for j, d in enumerate(b, start=1):
            corner, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, corner + (c != d))
    return row[-1]


def _plain(text: str) -> str:
    return text.strip().rstrip(".").rstrip().lower()


def _spaced(text: str) -> str:
    return re.sub(r"[\n\t]", " ", text).strip()


def _squeezed(text: str) -> str:
    return " ".join(text.lower().split())


def _far(a: str, b: str) -> float:
    longer = max(len(a), len(b))
    return edits(a, b) / longer if longer else 0.0


def _near(answer: str, truth: str, within: float) -> bool:
    a, b = _number(answer), _number(truth)
    if a is not None and b:  # of 0 there are no percents
        return abs(a - b) / abs(b) <= within
    return answer.lower() == truth.lower()


def _number(text: str) -> float | None:
    try:
        return float(text.rstrip("%")) / 100 if text.endswith("%") else float(text)
    except ValueError:
        return None


def _lined(text: str) -> str:
    return text.lower().strip().replace("\n", " ")


def _formula(text: str) -> str:
    return "".join(text.split())
