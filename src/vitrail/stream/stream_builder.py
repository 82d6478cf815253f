"""Build a stream from parts: ids, kinds, (t, h, w) positions, spans, loss mask and feature sources.

Invalid input raises an error on the CPU that names the sample and the part. The text around vision tokens (start and
end tokens, timestamps) consists of ordinary parts, which the caller provides; see `timestamps`.

Shapes: L tokens of a sample, N tokens of a part.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from vitrail.config import Config
from vitrail.errors import ConfigError, StreamError, suggest_name
from vitrail.stream.position_rules import POSITION_RULES, compute_part_positions
from vitrail.stream.stream_parts import NEWLINE_FEED, TABLE_FEEDS, TOKEN_KINDS, Part
from vitrail.stream.timestamps import TimestampStyle


class StreamRules(Config):
    """Rules for building streams.

    positions             name of a rule in `POSITION_RULES`
    bidirectional         kinds with bidirectional attention inside each part (Gemma 3: image)
    bidirectional_prompt  whether all tokens before the first target form one bidirectional span (PaliGemma)
    vocab_size            if given, larger ids raise an error
    fill_id               id of placeholder tokens, which features replace
    tokens_per_second     scale of absolute time; 2 in every released Qwen2.5-VL
    timestamps            style of the text before each temporal patch, for rules that write one: seconds (Qwen3-VL), or
                          hms for hours, minutes and seconds
    """

    positions: str = "1d"
    bidirectional: tuple[str, ...] = ()
    bidirectional_prompt: bool = False
    vocab_size: int | None = None
    fill_id: int = 0
    tokens_per_second: float = 2.0
    timestamps: TimestampStyle = "seconds"

    def __post_init__(self) -> None:
        if self.positions not in POSITION_RULES:
            raise ConfigError(f"unknown position rule {self.positions!r}", suggest_name(self.positions, POSITION_RULES))
        for kind in self.bidirectional:
            if kind not in TOKEN_KINDS:
                raise ConfigError(f"unknown token kind {kind!r}", suggest_name(kind, TOKEN_KINDS))
        if self.bidirectional and self.bidirectional_prompt:
            raise ConfigError(
                f"bidirectional is {', '.join(self.bidirectional)} with bidirectional_prompt", "set one of the two"
            )
        if self.fill_id < 0 or (self.vocab_size is not None and self.fill_id >= self.vocab_size):
            raise ConfigError(
                f"StreamRules.fill_id {self.fill_id} is not in the vocabulary", "give an id with an embedding"
            )
        if self.tokens_per_second <= 0:
            raise ConfigError(f"StreamRules.tokens_per_second is {self.tokens_per_second}", "give a number above 0")
        if self.timestamps != "seconds" and self.positions != "qwen3-vl":
            raise ConfigError(
                f"StreamRules.timestamps is {self.timestamps!r}, but positions {self.positions!r} writes no timestamps",
                'set positions = "qwen3-vl", or remove timestamps',
            )


class FeatureSource(NamedTuple):
    """A block of features that replaces placeholder tokens.

    feed  kind of features: image, video, query, …
    rows  number of feature vectors
    part  label of the part, for error messages
    """

    feed: str
    rows: int
    part: str


STREAM_FIELDS = ("ids", "kinds", "positions", "spans", "loss_mask", "source", "row")


@dataclass(frozen=True, eq=False)
class Stream:
    """One sample as a token sequence.

    Placeholder tokens have a `source` (index into `sources`) and a `row` of that block; other tokens have −1 in both.
    Spans are numbered from 1; 0 is outside of spans. `loss_mask[n]` is True if the model is trained on token n.
    """

    ids: Tensor  # (L,)
    kinds: Tensor  # (L,)
    positions: Tensor  # (L, 3)
    spans: Tensor  # (L,)
    loss_mask: Tensor  # (L,) booleans
    source: Tensor  # (L,)
    row: Tensor  # (L,)
    sources: tuple[FeatureSource, ...] = ()
    name: str = ""

    def __len__(self) -> int:
        return len(self.ids)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Stream)
            and (self.name, self.sources) == (other.name, other.sources)
            and all(torch.equal(getattr(self, field), getattr(other, field)) for field in STREAM_FIELDS)
        )

    @property
    def num_target_tokens(self) -> int:
        """Number of training targets. The first token is never a target, because nothing predicts it."""
        return int(self.loss_mask[1:].sum())


def build_stream(parts: Sequence[Part], rules: StreamRules | None = None, *, name: str = "") -> Stream:
    """Build the stream of the parts, in their order. `name` identifies the sample in errors."""
    rules = StreamRules() if rules is None else rules
    sample_name = name or "the sample"
    labels = [f"part {i} ({part})" for i, part in enumerate(parts)]
    start, pieces, blocks = 0, [], _FeatureBlocks()
    for part, label in zip(parts, labels, strict=True):
        where = f"{sample_name}, {label}"
        _check_part(part, where)
        newline_rows = part.newline_rows()  # (N,)
        ids = _build_ids(part, newline_rows >= 0, rules, where)
        source, row = blocks.places(part, newline_rows, label)
        positions, start = compute_part_positions(
            POSITION_RULES[rules.positions], part.shape, start, part.seconds * rules.tokens_per_second
        )
        kinds = torch.full_like(ids, TOKEN_KINDS[part.kind].id)
        pieces.append((ids, kinds, positions, _build_loss_mask(part, source < 0, where), source, row))
    if not sum(len(piece[0]) for piece in pieces):
        raise StreamError(f"{sample_name} is empty", "remove the sample, or add a part with tokens")
    ids, kinds, positions, loss, source, row = (torch.cat(column) for column in zip(*pieces, strict=True))
    spans = _build_spans(parts, labels, rules, sample_name)
    if rules.bidirectional_prompt:
        spans[: int(loss.nonzero()[0]) if loss.any() else len(loss)] = 1
    _check_target_leak(parts, labels, spans, loss, sample_name)
    return Stream(ids, kinds, positions, spans, loss, source, row, blocks.to_sources(source, row, sample_name), name)


# ---- ids and loss masks of parts --------------------------------------------------------------------------------


def _check_part(part: Part, where: str) -> None:
    if part.kind not in TOKEN_KINDS:
        raise StreamError(f"{where}: unknown token kind {part.kind!r}", f"kinds: {', '.join(TOKEN_KINDS)}")
    if part.num_tokens < 0 or part.first_row < 0:
        raise StreamError(
            f"{where}: {part.num_tokens} tokens from first_row {part.first_row}", "give numbers that are not negative"
        )
    if part.ids is None and TOKEN_KINDS[part.kind].features == "none":
        raise StreamError(f"{where}: ids are missing", f"give the ids of the {part.kind} tokens")
    if not part.seconds > 0:
        raise StreamError(f"{where}: a temporal patch has {part.seconds} seconds", "give a number above 0")


def _build_ids(part: Part, newline: Tensor, rules: StreamRules, where: str) -> Tensor:
    ids = torch.full((part.num_tokens,), rules.fill_id)
    if part.newline_id is not None:
        ids[newline] = torch.as_tensor(part.newline_id)
    if part.ids is not None:
        part_ids, expected = torch.as_tensor(part.ids, dtype=torch.long), int((~newline).sum())
        if part_ids.shape != (expected,):
            number = len(part_ids) if part_ids.ndim == 1 else tuple(part_ids.shape)
            raise StreamError(
                f"{where}: expected {expected} ids, got {number}", "give one id per token, without newlines"
            )
        ids[~newline] = part_ids
    limit = torch.iinfo(torch.long).max if rules.vocab_size is None else rules.vocab_size
    wrong = ((ids < 0) | (ids >= limit)).nonzero()
    if len(wrong):
        at = int(wrong[0])
        raise StreamError(
            f"{where}: token {at} has id {int(ids[at])}, outside the vocabulary of "
            f"{rules.vocab_size or 'ids from 0 on'}",
            "use the model's tokenizer, or enlarge the vocabulary",
        )
    return ids


def _build_loss_mask(part: Part, has_id: Tensor, where: str) -> Tensor:
    if isinstance(part.loss_mask, bool):
        loss, has_unlabeled = (
            has_id & part.loss_mask,
            part.loss_mask and part.ids is None,
        )  # newline tokens without ids have no loss
    else:
        loss = torch.as_tensor(part.loss_mask, dtype=torch.bool)
        if loss.shape != has_id.shape:
            expected = f"expected {len(has_id)} loss flags, got {len(loss)}"
            raise StreamError(f"{where}: {expected}", "give one flag per token, or one for all")
        has_unlabeled = bool((loss & ~has_id).any())
    if has_unlabeled:
        raise StreamError(
            f"{where}: a loss mask on tokens without ids", "give the part's codes as ids, or remove the loss mask"
        )
    return loss


class _FeatureBlocks:
    """Feature blocks of a sample, in order of first use."""

    def __init__(self) -> None:
        self.index: dict[tuple[str, object], int] = {}
        self.labels: list[tuple[str, str]] = []

    def _block_index(self, feed: str, key: object, label: str) -> int:
        if (feed, key) not in self.index:
            self.index[feed, key] = len(self.labels)
            self.labels.append((feed, label))
        return self.index[feed, key]

    def places(self, part: Part, newline_rows: Tensor, label: str) -> tuple[Tensor, Tensor]:
        """Return the block index and the row of each token (N,); −1 for tokens with an id."""
        source, row = torch.full((2, part.num_tokens), -1)
        newline = newline_rows >= 0
        if part.newline_id is None and newline.any():
            source[newline], row[newline] = self._block_index(NEWLINE_FEED, None, label), newline_rows[newline]
        if part.ids is None and not newline.all():
            key = None if part.kind in TABLE_FEEDS else label if part.source is None else part.source
            count = int((~newline).sum())
            source[~newline] = self._block_index(part.kind, key, label)
            row[~newline] = torch.arange(part.first_row, part.first_row + count)
        return source, row

    def to_sources(self, source: Tensor, row: Tensor, sample_name: str) -> tuple[FeatureSource, ...]:
        """Return the blocks with their sizes. An unused feature row raises an error."""
        found = []
        for i, (feed, label) in enumerate(self.labels):
            used = row[source == i].unique()
            rows = int(used[-1]) + 1
            if len(used) < rows and feed not in TABLE_FEEDS:
                missing = sorted(set(range(rows)) - set(used.tolist()))[0]
                raise StreamError(
                    f"{sample_name}, {label}: feature row {missing} of {rows} is unused",
                    "make the parts of one source cover its rows from 0 on, without gaps",
                )
            found.append(FeatureSource(feed, rows, label))
        return tuple(found)


# ---- bidirectional spans ----------------------------------------------------------------------------------------


def _build_spans(parts: Sequence[Part], labels: Sequence[str], rules: StreamRules, sample_name: str) -> Tensor:
    """Return the span numbers (L,). A named span joins adjacent parts, such as PaliGemma's image and question."""
    numbers: dict[object, int] = {}
    last, spans = None, []
    for i, (part, label) in enumerate(zip(parts, labels, strict=True)):
        if not part.num_tokens:
            continue
        both = part.kind in rules.bidirectional if part.bidirectional is None else part.bidirectional
        key = None if both is False else i if both is True else both
        if isinstance(key, str) and key in numbers and key != last:
            # Tokens between the two halves would see later tokens through the first half of the span.
            raise StreamError(
                f"{sample_name}, {label}: the span {key!r} is not contiguous",
                "put the parts of the span next to each other, or use different names",
            )
        number = 0 if key is None else numbers.setdefault(key, len(numbers) + 1)
        spans.append(torch.full((part.num_tokens,), number))
        last = key
    return torch.cat(spans)


def _check_target_leak(
    parts: Sequence[Part], labels: Sequence[str], spans: Tensor, loss: Tensor, sample_name: str
) -> None:
    """Check that no token inside a bidirectional span is a target: the token before it could see it."""
    leaks = (loss[1:] & (spans[1:] > 0) & (spans[1:] == spans[:-1])).nonzero()
    if len(leaks):
        ends = torch.tensor([part.num_tokens for part in parts]).cumsum(0)
        label = labels[int(torch.searchsorted(ends, leaks[0] + 1, right=True))]
        raise StreamError(
            f"{sample_name}, {label}: a loss mask inside a bidirectional span: each token attends to its target",
            "use causal attention (bidirectional=False), or train with a masked-token loss",
        )
