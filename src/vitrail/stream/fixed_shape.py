"""Fixed-shape rows: all rows of a batch have the same parts, with the same number of tokens in each.

Positions, spans and masks are computed on the device, from shapes and from where the turns of a text start. So a
training step does not synchronize with the host, and a compiler sees one shape. A packed batch of the same samples
(see `packing`) gives the same result.

Shapes: B rows, n tokens of a part, L tokens of a row, p shared tokens, K questions, m queries of a later question,
R = n + (K − 1)·m, W width.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from vitrail.nn import AttentionPlan
from vitrail.stream.position_rules import POSITION_RULES, compute_run_positions
from vitrail.stream.stream_builder import StreamRules, build_stream
from vitrail.stream.stream_parts import TOKEN_KINDS, Part, TokenRun, text_part
from vitrail.stream.voco_plan import VoCoPlan, voco_groups


class BlockPositions(NamedTuple):
    """Positions of tokens that do not count on like text, such as an image."""

    positions: Tensor  # (n, 3), relative to the start of the block
    length: int  # position at which the next part starts, relative to the start of the block


class RowPart(NamedTuple):
    """A part of all rows: text, or a block of tokens with positions of its own."""

    embeds: Tensor  # (B, n, W)
    block: BlockPositions | TokenRun | None = None  # a run has a start token before it; None: text, which counts up
    bidirectional: bool = False  # whether the part is one bidirectional span
    spans: Tensor | None = None  # (1 or B, n) numbers of the spans in the part; 0: causal
    mask: Tensor | None = None  # (B, n) valid tokens of a text; None: all
    turn_starts: Tensor | None = None  # (B, n) index in the text at which the turn of each token starts


class RowLayout(NamedTuple):
    """Rows with positions and attention plan."""

    embeds: Tensor  # (B, L, W)
    positions: Tensor  # (B, L) or, for rotary layouts of several axes, (B, L, 3)
    plan: AttentionPlan
    ends: tuple[int, ...]  # end of each part


def build_rows(parts: Sequence[RowPart], *, is_1d: bool, plan_class: type[AttentionPlan] = AttentionPlan) -> RowLayout:
    """Concatenate parts, with positions and attention plan. The text after a block continues at its furthest position.

    Turns attend to themselves and to the parts without turns. Valid tokens do not attend to padding.
    """
    embeds = torch.cat([part.embeds for part in parts], 1)
    ends = tuple(accumulate(part.embeds.shape[1] for part in parts))
    positions: list[Tensor] = []
    start: int | Tensor = 0
    for part in parts:
        part_positions, start = _part_positions(part, start, is_1d=is_1d)
        positions.append(part_positions.expand(len(embeds), -1, 3))
    where = torch.cat(positions, 1)
    has_turns = any(part.turn_starts is not None for part in parts)
    has_segments = has_turns or any(part.mask is not None for part in parts)
    segments = torch.cat([_part_segments(part) for part in parts], 1) if has_segments else None
    spans = _join_spans(parts, ends, len(embeds) if has_segments else 1)
    first = parts[0]
    plan = plan_class(
        causal=True,
        segments=segments,
        key_segments=segments,
        spans=spans,
        key_spans=spans,
        shares_segment_zero=has_turns,
        prefix_length=ends[0] if first.bidirectional and first.mask is None and len(parts) > 1 else 0,
    )
    return RowLayout(embeds, where[..., 0] if is_1d else where, plan, ends)


def _part_positions(part: RowPart, start: int | Tensor, *, is_1d: bool) -> tuple[Tensor, int | Tensor]:
    """Return the positions (n or B × n, 1 or 3) of a part that begins at `start`, and the start of the next part.

    A start is a number or (B, 1, 1).
    """
    n, device = part.embeds.shape[1], part.embeds.device
    if part.block is not None:
        block = _run_block(part.block, device, is_1d=is_1d) if isinstance(part.block, TokenRun) else part.block
        return block.positions + start, start + block.length
    if part.mask is None:  # no sum: torch 2.11's compiler simplifies it and then fails
        steps, length = torch.arange(n, device=device), n
    else:
        steps, length = (part.mask.long().cumsum(1) - 1).clamp(min=0), part.mask.sum(1)[:, None, None]
    steps = steps if part.turn_starts is None else steps - part.turn_starts
    return steps[..., None] + start, start + length


def _run_block(run: TokenRun, device: torch.device, *, is_1d: bool) -> BlockPositions:
    """Return the positions of a start token and a run: those of Qwen2-VL, or one running index."""
    rule = POSITION_RULES["1d" if is_1d else "qwen2-vl"]
    positions, length = compute_run_positions(rule, [run], 1, 1.0, device)
    return BlockPositions(pad(positions, (0, 0, 1, 0)), length)


def _part_segments(part: RowPart) -> Tensor:
    """Return segments (B, n): 0 for shared tokens, turns from 1, −1 for padding."""
    B, n = part.embeds.shape[:2]
    if part.turn_starts is None:
        turns = torch.zeros(B, n, dtype=torch.long, device=part.embeds.device)
    else:
        turns = part.turn_starts + 1
    return turns if part.mask is None else torch.where(part.mask, turns, -1)


def _join_spans(parts: Sequence[RowPart], ends: Sequence[int], num_rows: int) -> Tensor | None:
    """Return span numbers (1 or B, L) that differ between parts, or None if all tokens are causal."""
    if not any(part.bidirectional or part.spans is not None for part in parts):
        return None
    num_rows = max([num_rows, *(len(part.spans) for part in parts if part.spans is not None)])
    joined = []
    for part, end in zip(parts, ends, strict=True):
        if part.spans is None:
            spans = torch.full((1, part.embeds.shape[1]), end * part.bidirectional, device=part.embeds.device)
        else:  # a part has no more spans than tokens
            spans = part.spans + (end - part.embeds.shape[1]) * part.spans.sign()
        joined.append(spans.expand(num_rows, -1))
    return torch.cat(joined, 1)


# ---- rows with a shared image -----------------------------------------------------------------------------------


class TemplateRows(NamedTuple):
    """Rows of a template: their layout, and which of their tokens are image and text."""

    layout: RowLayout
    image_mask: Tensor  # (B, L)
    text_index: Tensor | None  # (B, n) index of each text token behind the shared ones, if queries are in between

    def select_text(self, hidden: Tensor) -> Tensor:
        """Return the states (B, n, ·) of the text tokens from the states (B, L, ·) of all tokens."""
        states = hidden[:, self.layout.ends[-2] :]
        if self.text_index is None:
            return states
        return states.gather(1, self.text_index[..., None].expand(-1, -1, states.shape[-1]))


@dataclass(frozen=True, eq=False)
class RowTemplate:
    """What rows share: a text prefix and one image before their own text. Build it with `build_row_template`.

    Queries that are fused with later questions are placed before each of these questions, at positions that differ
    between rows. Call `to` outside of compiled code.

    query_groups  number of queries of each question; those of the first belong to the image
    context_plan  plan of the attention to features outside of the rows, if a model has one
    feature_order index (n,) of each image token among the tokens of all views and the newline after them; None if the
                  image is one view without newlines
    """

    prefix_length: int  # p
    text_length: int
    query_groups: tuple[int, ...]
    ids: Tensor  # (p,), of which placeholders for features are not used
    num_prefix_ids: int  # text tokens before the image
    block: BlockPositions  # of the image
    image_mask: Tensor  # (1, n) image tokens of the block; the others are VoCo tokens
    spans: Tensor | None  # (1, n) bidirectional spans of the block, or its VoCo groups
    has_voco: bool
    context_plan: AttentionPlan | None = None
    feature_order: Tensor | None = None

    @property
    def num_questions(self) -> int:
        return max(1, len(self.query_groups))

    @property
    def num_later_queries(self) -> int:
        return sum(self.query_groups[1:])

    def to(self, device: torch.device | str) -> "RowTemplate":
        return replace(
            self,
            ids=self.ids.to(device),
            block=self.block._replace(positions=self.block.positions.to(device)),
            image_mask=self.image_mask.to(device),
            spans=None if self.spans is None else self.spans.to(device),
            context_plan=None if self.context_plan is None else self.context_plan.to(device),
            feature_order=None if self.feature_order is None else self.feature_order.to(device),
        )

    def build_rows(
        self, prefix: Tensor, visual: Tensor, text: Tensor, turn_starts: Tensor | None = None, *, is_1d: bool
    ) -> TemplateRows:
        """Lay out embeddings of the prefix, of the image with all queries, and of the text (B, n, W).

        `turn_starts` (B, n) is the index at which the turn of each token starts. Later queries are inserted before
        their turns. Without them, turns do not attend to each other, and each directly follows the image.
        """
        B, num_later = len(text), self.num_later_queries
        visual, later = visual.split([visual.shape[1] - num_later, num_later], 1)
        text_row, text_index = RowPart(text, turn_starts=turn_starts), None
        text_image_mask = torch.zeros(1, 1, dtype=torch.bool, device=text.device).expand(B, text.shape[1])
        if num_later:
            assert turn_starts is not None
            index, query_turns = interleave_queries(count_turns(turn_starts), self.query_groups[1:])
            source = torch.cat([text, later], 1)
            joined = torch.zeros_like(source).scatter(1, index[..., None].expand_as(source), source)
            text_row = RowPart(joined, spans=None if self.spans is None else query_turns)
            text_image_mask, text_index = query_turns > 0, index[:, : text.shape[1]]
        parts = [RowPart(prefix), RowPart(visual, self.block, spans=self.spans), text_row]
        layout = build_rows(parts, is_1d=is_1d, plan_class=VoCoPlan if self.has_voco else AttentionPlan)
        image_mask = torch.cat([pad(self.image_mask, (prefix.shape[1], 0)).expand(B, -1), text_image_mask], 1)
        return TemplateRows(layout, image_mask, text_index)


def build_row_template(
    prefix_ids: Sequence[int],
    image_parts: Sequence[Part],
    text_length: int,
    rules: StreamRules | None = None,
    query_groups: Sequence[int] = (),
) -> RowTemplate:
    """Build the template of rows with a prefix, the parts of one image, and `text_length` tokens of text."""
    prefix = [text_part(prefix_ids)] if len(prefix_ids) else []
    stream = build_stream([*prefix, *image_parts, text_part([0])], rules)
    start, end = len(prefix_ids), len(stream) - 1
    kinds, spans = stream.kinds[None, start:end], stream.spans[None, start:end]
    voco_mask = kinds == TOKEN_KINDS["query"].id
    has_voco, image_mask = bool(voco_mask.any()), ~voco_mask
    if has_voco:
        spans = voco_groups(image_mask, voco_mask)
    return RowTemplate(
        prefix_length=end,
        text_length=text_length,
        query_groups=tuple(query_groups),
        ids=stream.ids[:end],
        num_prefix_ids=start,
        block=BlockPositions(stream.positions[start:end] - start, int(stream.positions[end, 0]) - start),
        image_mask=image_mask,
        spans=spans if bool(spans.any()) else None,
        has_voco=has_voco,
    )


def count_turns(turn_starts: Tensor) -> Tensor:
    """Convert turn starts (B, n) to turn numbers (B, n), from 0."""
    return pad((turn_starts[:, 1:] != turn_starts[:, :-1]).long().cumsum(1), (1, 0))


def interleave_queries(turns: Tensor, groups: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Place the queries of later turns among text tokens with turn numbers (B, n): each group of m before its turn.

    Returns the index (B, R) of all text tokens and then of all queries, unused ones at the end; and the turn (B, R) of
    the query at each index, 0 for text.
    """
    B, n = turns.shape
    m, later = groups[0], len(groups)
    place = torch.arange(n, device=turns.device).expand(B, -1)
    first = turns.new_full((B, later + 1), n).scatter_reduce(1, turns, place, "amin")  # (B, K) first token of each turn
    number = torch.arange(1, later + 1, device=turns.device)
    query_starts = first[:, 1:] + (number - 1) * m  # (B, K − 1)
    queries = (query_starts[..., None] + torch.arange(m, device=turns.device)).flatten(1)
    turn_of = torch.cat([torch.zeros_like(turns), number.repeat_interleave(m).expand(B, -1)], 1)
    index = torch.cat([place + turns * m, queries], 1)
    return index, torch.zeros_like(turn_of).scatter(1, index, turn_of)
