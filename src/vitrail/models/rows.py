"""Rows of one shape: a few words or none, one picture, and so many words behind it, in every row alike.

What a stream says of each sample is said once for all of them, so that a step of training asks nothing of the host, and
a compiler sees one shape. `model.hidden(batch, pictures)` of the same samples gives the same. Queries that are fused
with later questions stand among the words, before each of these questions: where, differs from row to row.

B rows, C channels, S side, M tokens of a picture, n tokens before the words, L words, K questions, T words of a
question, m queries of a later one, R = L + (K − 1)·m, W width
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from vitrail.backbones.fusion import ExpertConfig, Looked, Marked, Pictures, picture_plan
from vitrail.connectors.voco import voco_groups, voco_plan
from vitrail.errors import ConfigError
from vitrail.models.looking import LookingVLM
from vitrail.models.seeing import SeeingWork
from vitrail.models.vlm import SEEN, VLM
from vitrail.models.vlm_config import VLMConfig
from vitrail.nn import Plan
from vitrail.processing.canvas import Canvas
from vitrail.processing.cut import Policy
from vitrail.processing.fit import only_view
from vitrail.processing.resolution import Native
from vitrail.stream import KINDS, build, words

SeeingModel = VLM | LookingVLM


class Frame(NamedTuple):
    """What is the same in every row, on one device."""

    before: Tensor  # (n,) ids; of a picture's own tokens they are not read
    positions: Tensor  # (1, n + R) or, for rotary layouts of several axes, (1, n + R, 3)
    spans: Tensor | None  # (1, n + R), where something is read both ways
    shown: Tensor  # (1, n + R), where a picture's tokens stand, or its mark
    groups: Tensor | None  # (1, n + R), where other tokens stand for the picture: see `voco_plan`
    sees: Plan | None  # which words see the features beside them; all, unless some come before the picture


class Rows:
    """`lead` words, a picture, `length` words in which so many questions are asked. `frame(device)` is made outside of
    what is compiled."""

    def __init__(self, model: SeeingModel, lead: Sequence[int], length: int, questions: int = 1):
        self.model, self.lead, self.length = model, list(lead), length
        config = model.config
        self.policy: Policy = policy_of(model)
        self.side = only_view(self.policy, 1, 1).canvas[0]
        self.groups = [] if isinstance(model, LookingVLM) or model.queries is None else _groups(model, questions)
        self.questions, self.later = max(1, len(self.groups)), sum(self.groups[1:])
        if isinstance(config, VLMConfig):
            parts, rules = config.parts(config.policy.cut(self.side, self.side)), config.rules
        else:
            parts, rules = [words([config.mark])], None
        behind = length + self.later
        stream = build([*([words(self.lead)] if self.lead else []), *parts, words([0] * behind)], rules)
        self.before = len(stream) - behind
        flat = model.config.decoder.rotary.layout == "1d"
        kinds = torch.tensor([KINDS[feed].id for feed in SEEN])
        shown = torch.isin(stream.kinds, kinds) if isinstance(config, VLMConfig) else stream.ids == config.mark
        shown[self.before :] = False
        sees, standing = None, stream.kinds == KINDS["query"].id
        if isinstance(model, LookingVLM) and self.lead:
            sees = picture_plan(shown[None], model.work([(self.side, self.side)], 0).context)
        self._frames = {
            torch.device("cpu"): Frame(
                stream.ids[: self.before],
                (stream.positions[..., 0] if flat else stream.positions)[None],
                stream.spans[None] if bool(stream.spans.any()) else None,
                shown[None],
                voco_groups(shown[None], standing[None]) if bool(standing.any()) else None,
                sees,
            )
        }

    def frame(self, device: torch.device) -> Frame:
        if device not in self._frames:
            here = self._frames[torch.device("cpu")]
            moved: list[Any] = [None if part is None else part.to(device) for part in here]
            self._frames[device] = Frame(*moved)
        return self._frames[device]

    # ---- passes -------------------------------------------------------------------------------------------------

    def hidden(
        self,
        frame: Frame,
        pixels: Tensor,
        ids: Tensor,
        asked: Tensor | None = None,
        since: Tensor | None = None,
    ) -> Tensor:
        """pixels (B, C, S, S), ids (B, L) → what the head reads behind each of the words (B, L, W). `asked` (B, K, T)
        are the questions that queries are fused with, −1 where there is none. `since` says with which of the words
        (B, L) the turn of each begins: queries stand before later ones or, where there are none, turns know nothing of
        each other, each right behind the picture."""
        model, B = self.model, len(ids)
        if isinstance(model, LookingVLM):
            x = model.decoder.embed(torch.cat([frame.before.expand(B, -1), ids], 1))
            # A copy: a plan keeps the masks it makes, and those made inside a recorded pass do not last.
            sees = None if frame.sees is None else frame.sees.to(ids.device)
            return self._through(frame, x, Looked(_features(model, pixels), sees), since)
        soft, words = model.soft(pixels), model.decoder.embed(ids)  # (B, M, W), (B, L, W)
        if model.queries is not None:
            soft = model.queries(soft, None, self.questions if asked is None else asked.unbind(1))
        if model.voco is not None:
            soft = torch.cat([soft, model.voco.expand(B, -1, -1)], 1)
        lead = model.decoder.embed(frame.before[: len(self.lead)].expand(B, -1))
        soft = soft.to(words.dtype)
        if self.later:
            assert since is not None
            return self._among(frame, lead, soft, words, since)
        return self._through(frame, torch.cat([lead, soft, words], 1), self._marked(frame.shown, B), since)

    def _among(self, frame: Frame, lead: Tensor, soft: Tensor, words: Tensor, since: Tensor) -> Tensor:
        """Each group of queries before its question, and what no question needs behind all: (B, L, W)"""
        first, later = soft.split([self.groups[0], self.later], 1)
        places, among = _places(turn_of(since), self.groups[1:])  # (B, R), which words and queries take; (B, R)
        source = torch.cat([words, later], 1)
        rest = torch.zeros_like(source).scatter(1, places[..., None].expand_as(source), source)
        before, B = self.before, len(words)
        shown = torch.cat([frame.shown[:, :before].expand(B, -1), among > 0], 1)
        spans = None
        if frame.spans is not None:
            spans = torch.cat([frame.spans[:, :before].expand(B, -1), torch.where(among > 0, among + 1, 0)], 1)
        framed = frame._replace(spans=spans)
        hidden = self._through(framed, torch.cat([lead, first, rest], 1), self._marked(shown, B), None)
        at = places[:, : words.shape[1], None].expand(-1, -1, hidden.shape[-1])
        return hidden.gather(1, at)

    def _marked(self, shown: Tensor, rows: int) -> Marked | None:
        fused = isinstance(self.model.config.decoder.fusion, ExpertConfig)
        return Marked(shown.expand(rows, -1)) if fused else None

    def text(self, ids: Tensor) -> Tensor:
        """ids (B, L) without a picture → (B, L, W)"""
        model = self.model
        beside = model.nothing(*ids.shape) if isinstance(model, LookingVLM) else None
        return model.decoder.hidden(ids, pictures=beside)

    def _through(self, frame: Frame, x: Tensor, beside: Pictures | None, since: Tensor | None) -> Tensor:
        plan = Plan(causal=True, spans=frame.spans, key_spans=frame.spans)
        groups = None if frame.groups is None else frame.groups.expand(len(x), -1)
        if groups is not None:
            plan = voco_plan(groups)
        positions = frame.positions.expand(len(x), *frame.positions.shape[1:])
        if since is not None:
            before = (self.before, 0)
            segments = pad(since + 1, before)  # (B, n + L), 0 of what all turns see
            spans = None if frame.spans is None else frame.spans.expand(len(x), -1)
            plan = Plan(
                causal=True, segments=segments, key_segments=segments, spans=spans, key_spans=spans, common=True
            )
            if groups is not None:
                plan = voco_plan(groups, segments, common=True)
            back = pad(since, before)
            positions = positions - (back if positions.ndim == 2 else back[..., None])
        return self.model.decoder.through(x, positions, plan, pictures=beside)[:, self.before :]

    def work(self, rows: int, asked: int | None = None) -> SeeingWork:
        """What `cost` needs to know of so many: the logits of so many words, or of all, are asked for."""
        model, size = self.model, (self.side, self.side)
        asked_for: dict[str, Any] = {} if isinstance(model, LookingVLM) else {"questions": self.questions}
        found = model.work([size], len(self.lead) + self.length, rows, **asked_for)
        return found.with_(held=0, asked=rows * self.length if asked is None else asked)


def turn_of(since: Tensor) -> Tensor:
    """(B, L) the place where each word's turn begins → the number of its turn, from 0 on (B, L)"""
    return pad((since[:, 1:] != since[:, :-1]).long().cumsum(1), (1, 0))


def _places(turn: Tensor, groups: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Where L words and the queries of later turns go, each group before its turn, and those of no turn behind all:
    (B, R) of the words and then the queries; and whose queries stand at each place, 0 where words do (B, R)."""
    B, L = turn.shape
    m, later = groups[0], len(groups)
    place = torch.arange(L, device=turn.device).expand(B, -1)
    first = turn.new_full((B, later + 1), L).scatter_reduce(1, turn, place, "amin")  # (B, K) of each turn
    number = torch.arange(1, later + 1, device=turn.device)
    begins = first[:, 1:] + (number - 1) * m  # (B, K − 1)
    queries = (begins[..., None] + torch.arange(m, device=turn.device)).flatten(1)
    whose = torch.cat([torch.zeros_like(turn), number.repeat_interleave(m).expand(B, -1)], 1)
    places = torch.cat([place + turn * m, queries], 1)
    return places, torch.zeros_like(whose).scatter(1, places, whose)


def _groups(model: VLM, questions: int) -> list[int]:
    assert model.queries is not None
    return model.queries.config.groups(questions)


def policy_of(model: SeeingModel) -> Policy:
    """That of a model whose pictures all have one shape; others are refused."""
    config = model.config
    policy = config.policy if isinstance(config, VLMConfig) else config.fitted
    if isinstance(policy, Canvas | Native):
        raise ConfigError(
            f"{type(policy).__name__} gives pictures of unequal numbers of tokens",
            "use naive, letterbox or crop, and a tower that reads pictures of one size",
        )
    only_view(policy, 1, 1)
    return policy


def mark_of(model: SeeingModel) -> int:
    """The id that stands for a picture."""
    config = model.config
    return config.rules.fill if isinstance(config, VLMConfig) else config.mark


def _features(model: LookingVLM, pixels: Tensor) -> Tensor:
    """(B, C, S, S) → what is looked at (B, N, D)"""
    features = model.features(pixels)
    return features if model.connector is None else model.connector(features)
