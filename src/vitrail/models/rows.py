"""Rows of one shape: a few words or none, one picture, and so many words behind it, in every row alike.

What a stream says of each sample is said once for all of them, so that a step of training asks nothing of the host, and
a compiler sees one shape. `model.hidden(batch, pictures)` of the same samples gives the same.

B rows, C channels, S side, M tokens of a picture, n tokens before the words, L words, T words of a question, W width
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from vitrail.backbones.fusion import ExpertConfig, Looked, Marked, Pictures, picture_plan
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
    positions: Tensor  # (1, n + L) or, for rotary layouts of several axes, (1, n + L, 3)
    spans: Tensor | None  # (1, n + L), where something is read both ways
    shown: Tensor  # (1, n + L), where a picture's tokens stand, or its mark
    sees: Plan | None  # which words see the features beside them; all, unless some come before the picture


class Rows:
    """`lead` words, a picture, `length` words. `frame(device)` is made outside of what is compiled."""

    def __init__(self, model: SeeingModel, lead: Sequence[int], length: int):
        self.model, self.lead, self.length = model, list(lead), length
        config = model.config
        self.policy: Policy = policy_of(model)
        self.side = only_view(self.policy, 1, 1).canvas[0]
        if isinstance(config, VLMConfig):
            parts = config.parts(config.policy.cut(self.side, self.side))
            rules, self._laid = config.rules, config.laid(only_view(config.policy, self.side, self.side).grid)
        else:
            parts, rules = [words([config.mark])], None
        stream = build([*([words(self.lead)] if self.lead else []), *parts, words([0] * length)], rules)
        self.before = len(stream) - length
        flat = model.config.decoder.rotary.layout == "1d"
        kinds = torch.tensor([KINDS[feed].id for feed in SEEN])
        shown = torch.isin(stream.kinds, kinds) if isinstance(config, VLMConfig) else stream.ids == config.mark
        shown[self.before :] = False
        sees = None
        if isinstance(model, LookingVLM) and self.lead:
            sees = picture_plan(shown[None], model.work([(self.side, self.side)], 0).context)
        self._frames = {
            torch.device("cpu"): Frame(
                stream.ids[: self.before],
                (stream.positions[..., 0] if flat else stream.positions)[None],
                stream.spans[None] if bool(stream.spans.any()) else None,
                shown[None],
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
        """pixels (B, C, S, S), ids (B, L) → what the head reads behind each of the words (B, L, W). `asked` (B, T) are
        the questions that queries are fused with, −1 where there is none. Words in turns that know nothing of each
        other, each right behind the picture, have it said `since` which of them (B, L) their own turn goes."""
        model, B = self.model, len(ids)
        if isinstance(model, LookingVLM):
            x = model.decoder.embed(torch.cat([frame.before.expand(B, -1), ids], 1))
            # A copy: a plan keeps the masks it makes, and those made inside a recorded pass do not last.
            sees = None if frame.sees is None else frame.sees.to(ids.device)
            return self._through(frame, x, Looked(_features(model, pixels), sees), since)
        soft = model.connector(model.features(pixels), self._laid)  # (B, M, W)
        if model.queries is not None:
            soft = model.queries(soft, None, [asked] if asked is not None else 1)
        n = len(self.lead)
        lead, words = model.decoder.embed(frame.before[:n].expand(B, -1)), model.decoder.embed(ids)
        x = torch.cat([lead, soft.to(words.dtype), words], 1)
        fused = isinstance(model.config.decoder.fusion, ExpertConfig)
        return self._through(frame, x, Marked(frame.shown.expand(B, -1)) if fused else None, since)

    def text(self, ids: Tensor) -> Tensor:
        """ids (B, L) without a picture → (B, L, W)"""
        model = self.model
        beside = model.nothing(*ids.shape) if isinstance(model, LookingVLM) else None
        return model.decoder.hidden(ids, pictures=beside)

    def _through(self, frame: Frame, x: Tensor, beside: Pictures | None, since: Tensor | None) -> Tensor:
        plan = Plan(causal=True, spans=frame.spans, key_spans=frame.spans)
        positions = frame.positions.expand(len(x), *frame.positions.shape[1:])
        if since is not None:
            before = (self.before, 0)
            segments = pad(since + 1, before)  # (B, n + L), 0 of what all turns see
            spans = None if frame.spans is None else frame.spans.expand(len(x), -1)
            plan = Plan(
                causal=True, segments=segments, key_segments=segments, spans=spans, key_spans=spans, common=True
            )
            back = pad(since, before)
            positions = positions - (back if positions.ndim == 2 else back[..., None])
        return self.model.decoder.through(x, positions, plan, pictures=beside)[:, self.before :]

    def work(self, rows: int, asked: int | None = None) -> SeeingWork:
        """What `cost` needs to know of so many: the logits of so many words, or of all, are asked for."""
        model, size = self.model, (self.side, self.side)
        found = model.work([size], len(self.lead) + self.length, rows)
        return found.with_(held=0, asked=rows * self.length if asked is None else asked)


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
