"""Worlds that go on: frame after frame of a Genie, each drawn in a few passes, with what was seen kept in a cache.

What has been drawn is what the next frame is made of: its codes go into the caches of the dynamics and of the codec's
decoder before the next is begun. Chance is one stream a row, so that a row's world depends on its own seed alone.

B rows, T frames, C channels, H, W pixels, h × w codes of a frame, N = h·w, K codes there are
"""

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.config import Config
from vitrail.errors import ConfigError, DataError
from vitrail.generate.masked import gumbel, hide_least, settles, still_hidden
from vitrail.generate.sampling import Dice, Sampling, choose, shape
from vitrail.models.genie import Genie
from vitrail.nn import FrameCache, FrameRing, Frames, SpaceTime

Say = Callable[[Tensor, Tensor], Tensor]
"""ids (B, 1, h, w) of a frame as far as it is drawn, and where it is not → logits (B, 1, h, w, K)"""


class Rolling(Config):
    """
    steps     passes that draw a frame; one more takes it into the memory
    sampling  how a code is chosen; temperature divides logits, and the seed is the first row's
    order     which codes are settled first: any (Genie), or the surest. The surest are those that did not change, so
              that few passes in that order tend to copy the last frame.
    """

    steps: int = 8
    sampling: Sampling = Sampling()
    order: Literal["random", "sure"] = "random"

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ConfigError(f"a frame drawn in {self.steps} passes", "give at least one")
        if self.sampling.repetition != 1:
            raise ConfigError("codes may repeat: a sky is one code again and again", "leave repetition at 1")


class Rollout:
    """One world a row: `start` from frames, then `step` by actions, as often as one likes.

    Memory is the model's: frames beyond it are forgotten, so that a step costs the same however long the world runs.
    """

    def __init__(self, model: Genie, rolling: Rolling | None = None):
        self.model, self.rolling = model.eval(), rolling or Rolling()
        self._ids: Tensor | None = None
        self._led: Tensor | None = None  # what led to frames that the dynamics have yet to take in
        self._rings: dict[str, FrameRing] = {}

    @property
    def actions(self) -> int:
        return self.model.actions

    @property
    def shape(self) -> tuple[int, int, int]:
        """(H, W, C) of the frames the model was made for."""
        height, width = self.model.codec.size
        return height, width, self.model.config.codec.channels

    @torch.no_grad()
    def start(self, frames: Tensor, actions: Tensor | None = None, seed: int | None = None) -> Tensor:
        """uint8 (B, C, H, W), or several frames (B, T, C, H, W) and the actions between them (B, T − 1), which a model
        that learned actions can infer → the last frame as the codec shows it, uint8 (B, C, H, W)
        """
        model = self.model
        video = model.codec.pixels(frames if frames.ndim == 5 else frames[:, None])
        B, T = video.shape[:2]
        if actions is None:
            actions = model.infer(video) if T > 1 else torch.zeros(B, 0, dtype=torch.long, device=video.device)
        if actions.shape != (B, T - 1):
            raise DataError(f"actions {tuple(actions.shape)} between {B} × {T} frames", f"give ({B}, {T - 1})")
        model.check_actions(actions)
        self.chance = Dice(B, self.rolling.sampling.seed if seed is None else seed)
        self.past, self.shown = model.dynamics.transformer.cache(), model.codec.decoder.cache()
        (K,) = model.codec.sizes
        self.codes = model.codec.lookup(torch.arange(K, device=video.device))  # (K, d)
        shown = self._show(model.look(video), model.dynamics.led(actions.to(video.device)))
        self.settle()
        return shown

    def step(self, actions: Tensor) -> Tensor:
        """An action a row (B,) → the next frame, uint8 (B, C, H, W)"""
        frame = self.draw(actions)
        self.settle()
        return frame

    @torch.no_grad()
    def draw(self, actions: Tensor) -> Tensor:
        """What `step` gives, as soon as it can be seen: `settle` does the rest, at the latest before the next."""
        if self._ids is None:
            raise ConfigError("a world that has not begun cannot go on", "call start first")
        if actions.shape != (len(self._ids),):
            raise DataError(f"actions {tuple(actions.shape)} for {len(self._ids)} worlds", "give one each")
        self.model.check_actions(actions)
        self.settle()
        chance = self.chance.roll(self.rolling.steps, 2, self._ids[0, 0].numel())
        return self._next(actions.to(self._ids.device)[:, None], chance.to(self._ids.device))

    @property
    def ids(self) -> Tensor:
        """The codes (B, h, w) of the last frame."""
        assert self._ids is not None
        return self._ids[:, -1]

    def _next(self, led: Tensor, chance: Tensor) -> Tensor:
        """One frame, by the actions that lead to it (B, 1) and chance (B, steps, 2, N)"""

        def say(ids: Tensor, hidden: Tensor) -> Tensor:
            return self.model.dynamics(ids, led, hidden, self.past)

        return self._show(draw_frame(say, self.ids[:, None], self.rolling, chance), led)

    def _show(self, ids: Tensor, led: Tensor) -> Tensor:
        """Frames that are now past, ids (B, T, h, w) → the last of them, uint8 (B, C, H, W)"""
        codec = self.model.codec
        drawn = codec.decode(F.embedding(ids, self.codes), self.shown)
        self.shown.keep()
        self.shown = self._ring("shown", codec.decoder, self.shown)
        self._ids, self._led = ids, led
        return codec.bytes(drawn[:, -1])

    @torch.no_grad()
    def settle(self) -> None:
        """Take the last frames into the memory of the dynamics, if they are not there yet: nobody who looks at them has
        to wait for it."""
        if self._ids is None or self._led is None:
            return
        dynamics = self.model.dynamics
        dynamics.hidden_states(self._ids, self._led, cache=self.past)
        self.past.keep()
        self.past = self._ring("past", dynamics.transformer, self.past)
        self._led = None

    def _ring(self, name: str, net: SpaceTime, cache: Frames) -> Frames:
        """What is kept without being moved: on a CPU at once; elsewhere a full cache is a ring from then on, the one of
        an earlier start where it fits."""
        if not isinstance(cache, FrameCache):
            return cache
        if (lean := net.one_frame(cache)) is not None:
            return lean
        if not cache.full:
            return cache
        if name in self._rings and self._rings[name].fits(cache):
            self._rings[name].fill(cache)
        else:
            self._rings[name] = FrameRing(cache)
        return self._rings[name]


def draw_frame(say: Say, empty: Tensor, rolling: Rolling, chance: Tensor) -> Tensor:
    """Ids (B, 1, h, w) of a frame of which nothing is known, of the shape of `empty`, by chance (B, steps, 2, N): in
    every pass for the codes, and for which of them stay"""
    ids, (B, _, h, w) = torch.zeros_like(empty), empty.shape
    hidden = torch.ones_like(ids, dtype=torch.bool)
    total = torch.full((B,), h * w, device=ids.device)
    for step, settling in enumerate(settles(torch.tensor([h * w]), rolling.steps)):
        if not settling:
            continue
        logits = say(ids, hidden).flatten(0, -2)  # (B·N, K)
        found = choose(logits, rolling.sampling, chance[:, step, 0].flatten())
        ids = torch.where(hidden, found.view_as(ids), ids)
        sure = gumbel(chance[:, step, 1])
        if rolling.order == "sure":
            said = shape(logits, rolling.sampling).log_softmax(-1)
            sure = said.gather(-1, found[:, None]).view(B, h * w)
        hidden = hide_least(sure, hidden.flatten(1), still_hidden(total, step, rolling.steps)).view_as(hidden)
    return ids


@torch.no_grad()
def roll(
    model: Genie,
    frames: Tensor,
    actions: Tensor,
    rolling: Rolling | None = None,
    *,
    given: Tensor | None = None,
    seed: int | None = None,
) -> Tensor:
    """Frames to start from, as `Rollout.start` takes them with `given` as the actions between, and what is done then
    (B, n) → the n frames that follow, uint8 (B, n, C, H, W)"""
    world = Rollout(model, rolling)
    world.start(frames, given, seed)
    made = [world.step(one) for one in actions.unbind(1)]
    return torch.stack(made, 1) if made else frames.new_zeros(len(frames), 0, *frames.shape[-3:])
