"""Parts → one stream: ids, kinds, (t, h, w) positions, spans, loss, and what fills the places without ids.

Whatever cannot be is refused here, on the CPU, with the names of the sample and the part. The words around vision
(begin and end marks, timestamps) are parts like any other: the caller writes them, `stamps` helps.

L tokens of a sample
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from vitrail.config import Config
from vitrail.errors import ConfigError, StreamError, nearest
from vitrail.stream.parts import KINDS, NEWLINE, TABLES, Part
from vitrail.stream.positions import POSITIONS, part_positions


class Rules(Config):
    """How parts become a stream.

    `both`: the kinds read both ways (Gemma 3: image), each part by itself; LLaVA and Qwen read all of it causally.
    `fill` is the id that places filled by features hold. `tokens_per_second` is for absolute time: 2 in every released
    Qwen2.5-VL. With `vocab`, ids beyond it are refused.
    """

    positions: str = "1d"
    both: tuple[str, ...] = ()
    vocab: int | None = None
    fill: int = 0
    tokens_per_second: float = 2.0

    def __post_init__(self) -> None:
        if self.positions not in POSITIONS:
            raise ConfigError(f"no position rule is called {self.positions!r}", nearest(self.positions, POSITIONS))
        for kind in self.both:
            if kind not in KINDS:
                raise ConfigError(f"no kind is called {kind!r}", nearest(kind, KINDS))
        if self.fill < 0 or (self.vocab is not None and self.fill >= self.vocab):
            raise ConfigError(f"Rules.fill {self.fill} is no id of the vocabulary", "give one that can be embedded")
        if self.tokens_per_second <= 0:
            raise ConfigError(f"Rules.tokens_per_second is {self.tokens_per_second}", "time must go forward")


class Source(NamedTuple):
    """A block of features that places are filled from: which (image, query, …), how many rows, the part it is for."""

    feed: str
    rows: int
    part: str


FIELDS = ("ids", "kinds", "positions", "spans", "loss", "source", "row")


@dataclass(frozen=True, eq=False)
class Stream:
    """One sample. Places filled by features have a `source`, an index into `sources`, and a `row` of it; elsewhere
    both are −1. Spans are numbered from 1, with 0 outside. `loss[n]` says whether token n is to be learnt."""

    ids: Tensor  # (L,)
    kinds: Tensor  # (L,)
    positions: Tensor  # (L, 3)
    spans: Tensor  # (L,)
    loss: Tensor  # (L,) booleans
    source: Tensor  # (L,)
    row: Tensor  # (L,)
    sources: tuple[Source, ...] = ()
    name: str = ""

    def __len__(self) -> int:
        return len(self.ids)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Stream)
            and (self.name, self.sources) == (other.name, other.sources)
            and all(torch.equal(getattr(self, field), getattr(other, field)) for field in FIELDS)
        )

    @property
    def learnt(self) -> int:
        """How many tokens are learnt: those with a loss, the first aside, which nothing foretells."""
        return int(self.loss[1:].sum())


def build(parts: Sequence[Part], rules: Rules | None = None, *, name: str = "") -> Stream:
    """One stream of the parts, in their order. `name` is what errors call the sample."""
    rules = Rules() if rules is None else rules
    called = name or "the sample"
    labels = [f"part {i} ({part})" for i, part in enumerate(parts)]
    start, pieces, blocks = 0, [], _Blocks()
    for part, label in zip(parts, labels, strict=True):
        where = f"{called}, {label}"
        _check(part, where)
        newline = part.newlines()  # (N,)
        ids = _ids(part, newline, rules, where)
        source, row = blocks.places(part, newline, label)
        positions, start = part_positions(
            POSITIONS[rules.positions], part.shape, start, part.seconds * rules.tokens_per_second
        )
        kinds = torch.full_like(ids, KINDS[part.kind].id)
        pieces.append((ids, kinds, positions, _loss(part, source < 0, where), source, row))
    if not sum(len(piece[0]) for piece in pieces):
        raise StreamError(f"{called} is empty", "leave it out, or give it a part with tokens")
    ids, kinds, positions, loss, source, row = (torch.cat(column) for column in zip(*pieces, strict=True))
    spans = _spans(parts, labels, rules, called)
    _check_leak(parts, labels, spans, loss, called)
    return Stream(ids, kinds, positions, spans, loss, source, row, blocks.whole(source, row, called), name)


# ---- what a part says of its tokens -----------------------------------------------------------------------------


def _check(part: Part, where: str) -> None:
    if part.kind not in KINDS:
        raise StreamError(f"{where}: no kind is called {part.kind!r}", f"kinds: {', '.join(KINDS)}")
    if part.tokens < 0 or part.first < 0:
        raise StreamError(f"{where}: {part.tokens} tokens from row {part.first} on", "neither can be negative")
    if part.ids is None and KINDS[part.kind].features == "none":
        raise StreamError(f"{where}: no ids", f"{part.kind} is made of ids: give them")
    if not part.seconds > 0:
        raise StreamError(f"{where}: a temporal patch of {part.seconds} seconds", "time must go forward")


def _ids(part: Part, newline: Tensor, rules: Rules, where: str) -> Tensor:
    ids = torch.full((part.tokens,), rules.fill)
    if part.newline is not None:
        ids[newline] = part.newline
    if part.ids is not None:
        given, expected = torch.as_tensor(part.ids, dtype=torch.long), int((~newline).sum())
        if given.shape != (expected,):
            raise StreamError(
                f"{where}: expected {expected} ids, got {tuple(given.shape) if given.ndim != 1 else len(given)}",
                "give one id a token, newlines aside",
            )
        ids[~newline] = given
    limit = torch.iinfo(torch.long).max if rules.vocab is None else rules.vocab
    wrong = ((ids < 0) | (ids >= limit)).nonzero()
    if len(wrong):
        at = int(wrong[0])
        raise StreamError(
            f"{where}: token {at} has id {int(ids[at])}, outside the vocabulary of {rules.vocab or 'ids from 0 on'}",
            "use the tokenizer the model was made with, or enlarge the vocabulary",
        )
    return ids


def _loss(part: Part, has_id: Tensor, where: str) -> Tensor:
    if isinstance(part.loss, bool):
        loss, lost = has_id & part.loss, part.loss and part.ids is None  # a learned newline among codes is passed over
    else:
        loss = torch.as_tensor(part.loss, dtype=torch.bool)
        if loss.shape != has_id.shape:
            expected = f"expected {len(has_id)} loss flags, got {len(loss)}"
            raise StreamError(f"{where}: {expected}", "give one flag a token, or one for all")
        lost = bool((loss & ~has_id).any())
    if lost:
        raise StreamError(f"{where}: a loss on tokens without ids", "give the part's codes as ids, or drop the loss")
    return loss


class _Blocks:
    """The blocks of features the parts of a sample fill their places from, in the order they appear."""

    def __init__(self) -> None:
        self.index: dict[tuple[str, object], int] = {}
        self.labels: list[tuple[str, str]] = []

    def _number(self, feed: str, key: object, label: str) -> int:
        if (feed, key) not in self.index:
            self.index[feed, key] = len(self.labels)
            self.labels.append((feed, label))
        return self.index[feed, key]

    def places(self, part: Part, newline: Tensor, label: str) -> tuple[Tensor, Tensor]:
        """(N,) the block of each token and the row in it, −1 where it has an id."""
        source, row = torch.full((2, part.tokens), -1)
        if part.newline is None and newline.any():
            source[newline], row[newline] = self._number(NEWLINE, None, label), 0
        if part.ids is None and not newline.all():
            key = None if part.kind in TABLES else label if part.source is None else part.source
            count = int((~newline).sum())
            source[~newline] = self._number(part.kind, key, label)
            row[~newline] = torch.arange(part.first, part.first + count)
        return source, row

    def whole(self, source: Tensor, row: Tensor, called: str) -> tuple[Source, ...]:
        """The blocks with their sizes. A feature that no place reads would be lost unsaid: it is refused."""
        found = []
        for i, (feed, label) in enumerate(self.labels):
            used = row[source == i].unique()
            rows = int(used[-1]) + 1
            if len(used) < rows and feed not in TABLES:
                missing = sorted(set(range(rows)) - set(used.tolist()))[0]
                raise StreamError(
                    f"{called}, {label}: feature row {missing} of {rows} is read by no place",
                    "let the parts of one source cover its rows without a gap, from row 0 on",
                )
            found.append(Source(feed, rows, label))
        return tuple(found)


# ---- what is read both ways -------------------------------------------------------------------------------------


def _spans(parts: Sequence[Part], labels: Sequence[str], rules: Rules, called: str) -> Tensor:
    """(L,) span numbers. A named span holds neighbours together, such as PaliGemma's picture and question."""
    numbers: dict[object, int] = {}
    last, spans = None, []
    for i, (part, label) in enumerate(zip(parts, labels, strict=True)):
        if not part.tokens:
            continue
        both = part.kind in rules.both if part.both is None else part.both
        key = None if both is False else i if both is True else both
        if isinstance(key, str) and key in numbers and key != last:
            # Tokens between the halves would learn of what follows them through the span's first half.
            raise StreamError(
                f"{called}, {label}: the span {key!r} was left and is entered again",
                "a span is one unbroken run: put its parts side by side, or name them apart",
            )
        number = 0 if key is None else numbers.setdefault(key, len(numbers) + 1)
        spans.append(torch.full((part.tokens,), number))
        last = key
    return torch.cat(spans)


def _check_leak(parts: Sequence[Part], labels: Sequence[str], spans: Tensor, loss: Tensor, called: str) -> None:
    """A token inside a span is seen by the one before it, which is to foretell it."""
    seen = (loss[1:] & (spans[1:] > 0) & (spans[1:] == spans[:-1])).nonzero()
    if len(seen):
        ends = torch.tensor([part.tokens for part in parts]).cumsum(0)
        label = labels[int(torch.searchsorted(ends, seen[0] + 1, right=True))]
        raise StreamError(
            f"{called}, {label}: a loss inside a span read both ways, where each token sees its own answer",
            "read the part causally (both=False), or learn it with a masked-token loss",
        )
