"""How well a world answers to what is done in it: control, meaning of its actions, and drift.

B videos, T frames, C channels, H, W pixels, K codes, A controls, D features of a frame
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.errors import DataError
from vitrail.evals.metrics.estimate import Estimate, estimate
from vitrail.evals.metrics.frechet import Network, features
from vitrail.evals.metrics.similarity import psnr

MOST = 60.0  # dB: what frames without a difference count as. An error of half a level in every byte is 54
SIDES = ("left", "right")  # words of a control's name


def decibels(true: Tensor, drawn: Tensor) -> Tensor:
    """PSNR of frames (B, C, H, W) → (B,), of equal ones `MOST`: where nothing moved, a mean would be infinite."""
    return psnr(true, drawn).clamp_max(MOST)


def delta_psnr(true: Tensor, inferred: Tensor, random: Tensor) -> Tensor:
    """Genie's Δ_tPSNR, (B,) in dB: how much nearer to the true frame (B, C, H, W) the one drawn by the actions that
    were taken is than the one drawn by random actions. 0: actions change nothing, or nothing for the better."""
    return decibels(true, inferred) - decibels(true, random)


class Purity(NamedTuple):
    """The share of steps whose control is the commonest of their code, and what always saying the commonest of all
    would have. `counts` (K, A) says how often each code and control met."""

    value: float
    majority: float
    of: int
    counts: Tensor

    @property
    def meaning(self) -> Tensor:
        """(K,) the commonest control of each code; −1 for codes that never occurred"""
        return torch.where(self.counts.sum(1) > 0, self.counts.argmax(1), -1)

    def __str__(self) -> str:
        return f"purity {self.value:.3f} of {self.of:,} steps, majority {self.majority:.3f}"


def purity(codes: Tensor, controls: Tensor) -> Purity:
    """Of latent actions against true controls, integers of one shape. More codes are never less pure: compare at equal
    numbers of them, and on steps that were not learned from."""
    if codes.shape != controls.shape or not codes.numel():
        raise DataError(f"codes {tuple(codes.shape)} and controls {tuple(controls.shape)}", "give one of each a step")
    for name, some in (("codes", codes), ("controls", controls)):
        if some.is_floating_point() or some.dtype == torch.bool or int(some.min()) < 0:
            raise DataError(f"{name} are numbers from 0 on", f"not {some.dtype} from {some.min()}")
    K, A = int(codes.max()) + 1, int(controls.max()) + 1
    counts = (codes.long() * A + controls).flatten().cpu().bincount(minlength=K * A).view(K, A)
    steps = int(counts.sum())
    return Purity(int(counts.amax(1).sum()) / steps, int(counts.sum(0).max()) / steps, steps, counts)


def left_from_right(codes: Tensor, controls: Tensor, names: Sequence[str]) -> Estimate | None:
    """How well codes (B, T) tell controls (B, T) to the left from those to the right, as their `names` say: the mean of
    the shares of either that are told, 0.5 by chance however many codes there are. What a code stands for is learned
    on every other video and told on those between; one that stands for neither is half right. None where half of the
    videos have no steps to both sides."""
    if codes.ndim != 2 or codes.shape != controls.shape or int(controls.max()) >= len(names):
        wrong = f"codes {tuple(codes.shape)} and controls {tuple(controls.shape)} of {len(names)} names"
        raise DataError(wrong, "give one of each a step of a video, and a name for every control")
    to = torch.tensor([[side in name.split() for side in SIDES] for name in names], dtype=torch.float64)  # (A, 2)
    steps = F.one_hot(codes.cpu()).double().mT @ to[controls.cpu()]  # (B, K, 2): how often a code met a side
    totals = torch.stack([half.sum((0, 1)) for half in (steps[0::2], steps[1::2])])  # (2, 2)
    if not totals.all():
        return None
    told = torch.empty_like(steps)
    for half in (0, 1):
        share = steps[1 - half :: 2].sum(0) / totals[1 - half]  # (K, 2)
        told[half::2] = (share > share.flip(1)) + 0.5 * (share == share.flip(1))
    hits, each = (steps * told).sum(1), steps.sum(1)  # (B, 2)
    right = hits.sum(0) / each.sum(0)  # (2,)
    # A value for every video: what all have, and how far this one moves it. Their mean is the share itself.
    return estimate("left from right", (right + (hits - right * each) / each.mean(0)).mean(1))


def drift(true: Tensor, drawn: Tensor) -> list[Estimate]:
    """PSNR of every frame of a rollout (B, T, C, H, W) against what really followed: how fast a world leaves it."""
    if true.ndim != 5 or true.shape != drawn.shape:
        raise DataError(f"videos of {tuple(true.shape)} and {tuple(drawn.shape)}", "give two (B, T, C, H, W)")
    return [estimate(f"psnr@{t}", decibels(true[:, t - 1], drawn[:, t - 1])) for t in range(1, true.shape[1] + 1)]


# ---- videos as sets -----------------------------------------------------------------------------------------------


class Pixels:
    """A network that is none: every frame as 4 × 4 colours, in levels of a byte. It needs no weights, and sees where
    something is but not what."""

    name, side = "pixels4", 4

    def __call__(self, pixels: Tensor, /) -> Tensor:
        return 127.5 * pixels.flatten(1)


def clip_features(clips: Tensor, network: Network) -> Tensor:
    """uint8 (B, T, C, H, W) → (B, 2·D): what the frames show, and how much that changes from each to the next, both on
    average. A network of single frames sees motion so; it is not I3D, and distances are named after it."""
    if clips.ndim != 5 or clips.shape[1] < 2:
        raise DataError(f"clips of shape {tuple(clips.shape)}", "give (B, T, C, H, W), two frames or more")
    B, T = clips.shape[:2]
    seen = features(clips.flatten(0, 1), network).view(B, T, -1)
    return torch.cat([seen.mean(1), seen.diff(dim=1).abs().mean(1)], 1)
