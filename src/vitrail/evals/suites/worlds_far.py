"""A Genie over many frames: whether actions can be read back from what they led to, how far a world strays, how many
passes a frame needs, and whether what went out of sight comes back.

B videos, T frames, C channels, H, W pixels
"""

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vitrail.errors import DataError
from vitrail.evals.metrics.estimate import Estimate, estimate
from vitrail.evals.metrics.frechet import Network, frechet_distance
from vitrail.evals.metrics.worlds import clip_features, decibels, delta_psnr
from vitrail.evals.shares import Share
from vitrail.evals.suites.worlds import AT
from vitrail.generate.captured_world import CapturedRollout, unfit
from vitrail.generate.rollout import Rolling, Rollout, roll
from vitrail.models.genie import Genie

CLIP = 8  # frames of a clip that is compared as one of a set
LEAST = 4  # videos: halves of them are sets too


class Strayed(NamedTuple):
    """Frame `at` of worlds that run on: PSNR to what really followed, while that is known, and the Fréchet distance of
    the clips that end there to the last real ones of the same videos; `halves` is that of the worlds of every other
    video to the real clips of the videos between."""

    at: int
    psnr: Estimate | None
    frechet: Estimate
    halves: Estimate


class Far(NamedTuple):
    drawn: Tensor  # uint8 (B, frames, C, H, W)
    strayed: list[Strayed]
    apart: Estimate  # the Fréchet distance of the last real clips to the first of the same videos
    chance: Estimate  # that of the last real clips of every other video to those between: what `halves` can come to
    read: Estimate | None  # the share of actions that the latent model reads back from the frames they led to


@torch.no_grad()
def judge_far(
    model: Genie,
    video: Tensor,
    actions: Tensor,
    network: Network,
    rolling: Rolling | None = None,
    *,
    frames: int = 200,
    seed: int = 0,
) -> Far:
    """Videos uint8 (B, T, C, H, W), rolled out from their first frames by the actions between (B, T − 1) and, when they
    are at an end, by the same again. The Fréchet distance needs no truth, and so goes on."""
    B, T = video.shape[:2]
    if B < LEAST or T < 2 * CLIP or frames < CLIP:
        raise DataError(
            f"{B} videos of {T} frames, drawn {frames} far",
            f"give {LEAST} or more, of {2 * CLIP} frames, and draw {CLIP}",
        )
    again = -(-frames // actions.shape[1])
    drawn = roll(model, video[:, 0], actions.repeat(1, again)[:, :frames], rolling, seed=seed).cpu()
    real = video.cpu()
    first, last = (clip_features(clips, network) for clips in (real[:, 1 : CLIP + 1], real[:, -CLIP:]))

    def apart(clips: Tensor) -> Estimate:  # row by row of the same videos
        return frechet_distance(last, clips, network.name, paired=True)

    def halves(clips: Tensor) -> Estimate:  # of no video that both have
        return frechet_distance(last[: B // 2 * 2 : 2], clips[1::2], network.name)

    strayed = []
    for at in sorted({min(CLIP * 2**i, frames) for i in range(frames.bit_length())}):
        followed = decibels(real[:, at], drawn[:, at - 1]) if at < T else None
        psnr = None if followed is None else estimate(f"psnr@{at}", followed)
        clips = clip_features(drawn[:, at - CLIP : at], network)
        strayed.append(Strayed(at, psnr, apart(clips), halves(clips)))
    return Far(drawn, strayed, apart(first), halves(last), _read_back(model, video, rolling, seed))


def _read_back(model: Genie, video: Tensor, rolling: Rolling | None, seed: int) -> Estimate | None:
    """By random actions, so that none is read off what usually happens."""
    if model.latent is None:
        return None
    memory = model.latent.encoder.config.memory
    chance = torch.Generator().manual_seed(seed)
    given = torch.randint(0, model.actions, (len(video), 2 * memory), generator=chance)
    drawn = roll(model, video[:, 0], given, rolling, seed=seed)
    begun = Rollout(model).start(video[:, 0])  # as the codec shows it, or the first step would be one of style
    found = model.infer(model.codec.pixels(torch.cat([begun[:, None], drawn], 1))).cpu()
    return estimate("read back", (found == given).float().mean(1))


class Paced(NamedTuple):
    """What so many passes a frame are good for."""

    steps: int
    psnr: Estimate  # of frame `AT`
    control: Estimate  # Δ_tPSNR
    fps: float  # frames a second, one world alone


@torch.no_grad()
def judge_steps(
    model: Genie, video: Tensor, actions: Tensor, steps: Sequence[int], rolling: Rolling | None = None, *, seed: int = 0
) -> list[Paced]:
    rolling, found = rolling or Rolling(), []
    chance = torch.Generator().manual_seed(seed)
    other = torch.randint(0, model.actions, (len(video), AT), generator=chance)
    true = video[:, AT].cpu()
    for count in steps:
        how = rolling.with_(steps=count)
        taken, strayed = (
            roll(model, video[:, 0], some[:, :AT], how, seed=seed)[:, -1].cpu() for some in (actions, other)
        )
        control = estimate(f"Δpsnr@{AT}", delta_psnr(true, taken, strayed))
        found.append(Paced(count, estimate(f"psnr@{AT}", decibels(true, taken)), control, _speed(model, video, how)))
    return found


def _speed(model: Genie, video: Tensor, rolling: Rolling, frames: int = 8) -> float:
    """With a full memory; on a GPU as a graph."""
    world = (Rollout if unfit(model) else CapturedRollout)(model, rolling)
    action = torch.zeros(1, dtype=torch.long)
    world.start(video[:1, 0], seed=0)
    memory = max(part.config.memory for part in (model.dynamics.transformer, model.codec.decoder))
    for _ in range(memory + 1):
        world.step(action)
    world.step(action).cpu()  # waits for all of it
    start = time.perf_counter()
    for _ in range(frames):
        world.step(action).cpu()
    return frames / (time.perf_counter() - start)


# ---- out of sight ---------------------------------------------------------------------------------------------------

BEFORE, LONGEST = 3, 6  # frames in which a thing is seen first, and those in which it is not, at most


class Permanence(NamedTuple):
    """How often a thing that was out of sight is drawn where it comes back, by how many frames it was away; what the
    codec shows of the true frames; and a world that begins when it has gone already."""

    by_length: dict[int, Share]
    remembered: Share
    codec: Share
    forgetful: Share


def hidden_runs(labels: Tensor, thing: int) -> list[tuple[int, int]]:
    """labels (T, H, W) → (first frame without the thing, how many) wherever it is seen for `BEFORE` frames before, and
    in the frame after."""
    seen = (labels == thing).flatten(1).any(1).tolist()
    found, t = [], 0
    while t < len(seen):
        stop = t
        while stop < len(seen) and not seen[stop]:
            stop += 1
        if BEFORE <= t < stop < len(seen) and all(seen[t - BEFORE : t]) and stop - t <= LONGEST:
            found.append((t, stop - t))
        t = stop + 1
    return found


@torch.no_grad()
def judge_permanence(
    model: Genie,
    video: Tensor,
    labels: Tensor,
    actions: Tensor,
    thing: int,
    rolling: Rolling | None = None,
    seed: int = 0,
) -> Permanence | None:
    """Videos uint8 (B, T, C, H, W), what every pixel shows (B, T, H, W), and what was done (B, T − 1). None where
    nothing ever comes back."""
    runs = [(b, t, n) for b in range(len(video)) for t, n in hidden_runs(labels[b], thing)]
    tallies: dict[str, list[bool]] = {"remembered": [], "codec": [], "forgetful": []}
    by_length: dict[int, Share] = {}
    for length in sorted({n for *_, n in runs}):
        some = [(b, t) for b, t, n in runs if n == length]
        clip = torch.stack([video[b, t - BEFORE : t + length + 1] for b, t in some])
        done = torch.stack([actions[b, t - BEFORE : t + length] for b, t in some])
        there = torch.stack([labels[b, t + length] == thing for b, t in some]).cpu()
        shown = roll(model, clip[:, :BEFORE], done[:, BEFORE - 1 :], rolling, given=done[:, : BEFORE - 1], seed=seed)
        blind = roll(model, clip[:, BEFORE], done[:, BEFORE:], rolling, seed=seed)
        codec = model.codec.bytes(model.codec.reconstruct(model.codec.pixels(clip)))
        found = {"remembered": shown, "codec": codec, "forgetful": blind}
        right = {name: _is_there(drawn[:, -1].cpu(), clip.cpu(), there) for name, drawn in found.items()}
        for name, some_right in right.items():
            tallies[name] += some_right
        by_length[length] = Share(sum(right["remembered"]), len(some))
    if not runs:
        return None
    return Permanence(by_length, **{name: Share(sum(right), len(right)) for name, right in tallies.items()})


def _is_there(drawn: Tensor, clip: Tensor, there: Tensor) -> list[bool]:
    """Whether frames (B, C, H, W) show at `there` (B, H, W) rather what the last frame of a clip does than what the one
    before it does."""
    weight = there[:, None].float()

    def colour(frames: Tensor) -> Tensor:
        return (frames.float() * weight).sum((2, 3)) / weight.sum((2, 3))

    mine, thing, without = colour(drawn), colour(clip[:, -1]), colour(clip[:, -2])
    return ((mine - thing).norm(dim=1) < (mine - without).norm(dim=1)).tolist()
