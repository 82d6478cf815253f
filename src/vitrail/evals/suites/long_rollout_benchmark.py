"""Long rollouts of a world model: action consistency, drift, number of sampling steps, and object permanence.

B videos, T frames, C channels, H, W pixels
"""

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vitrail.errors import DataError
from vitrail.evals.metrics.estimate import Estimate, estimate_mean
from vitrail.evals.metrics.frechet_distance import FeatureNetwork, frechet_distance
from vitrail.evals.metrics.world_metrics import cap_psnr, delta_psnr, extract_clip_features
from vitrail.evals.scores import Proportion
from vitrail.evals.suites.world_benchmark import CONTROL_FRAME
from vitrail.generate.cuda_graph_rollout import CUDAGraphRollout, explain_unsupported
from vitrail.generate.rollout import Rollout, RolloutConfig, rollout_frames
from vitrail.models.genie_model import Genie

CLIP_FRAMES = 8  # frames per clip of the Fréchet distance
MIN_VIDEOS = 4  # videos, so that halves of them are sets


class RolloutDistance(NamedTuple):
    """Distances of rollouts from real videos at one frame.

    psnr                 against the true frame, while one exists
    frechet_distance     of the clips that end at the frame to the last real clips of the same videos
    split_half_distance  the same between the rollouts of one half of the videos and real clips of the other half
    """

    frame: int
    psnr: Estimate | None
    frechet_distance: Estimate
    split_half_distance: Estimate


class LongRolloutReport(NamedTuple):
    """Results of long rollouts."""

    frames: Tensor  # uint8 (B, frames, C, H, W)
    distances: list[RolloutDistance]
    start_end_distance: Estimate  # Fréchet distance between the last and the first real clips of the same videos
    split_half_baseline: (
        Estimate  # Fréchet distance between the last real clips of both halves: the optimum of `split_half_distance`
    )
    # Fraction of actions that the latent action model infers back from the generated frames.
    action_accuracy: Estimate | None


@torch.no_grad()
def evaluate_long_rollout(
    model: Genie,
    video: Tensor,
    actions: Tensor,
    network: FeatureNetwork,
    rollout_config: RolloutConfig | None = None,
    *,
    num_frames: int = 200,
    seed: int = 0,
) -> LongRolloutReport:
    """Evaluate rollouts from the first frames of videos uint8 (B, T, C, H, W) with the actions (B, T − 1).

    Actions repeat when they are at an end. The Fréchet distance needs no ground truth, so it covers all frames.
    """
    B, T = video.shape[:2]
    if B < MIN_VIDEOS or T < 2 * CLIP_FRAMES or num_frames < CLIP_FRAMES:
        raise DataError(
            f"{B} videos of {T} frames, rollouts of {num_frames} frames",
            f"use at least {MIN_VIDEOS} videos of {2 * CLIP_FRAMES} frames, and rollouts of {CLIP_FRAMES} frames",
        )
    repeats = -(-num_frames // actions.shape[1])
    rollout = rollout_frames(
        model, video[:, 0], actions.repeat(1, repeats)[:, :num_frames], rollout_config, seed=seed
    ).cpu()
    real = video.cpu()
    first_features, last_features = (
        extract_clip_features(clips, network) for clips in (real[:, 1 : CLIP_FRAMES + 1], real[:, -CLIP_FRAMES:])
    )

    def paired_distance(clips: Tensor) -> Estimate:  # paired by video
        return frechet_distance(last_features, clips, network.name, paired=True)

    def split_distance(clips: Tensor) -> Estimate:  # without common videos
        return frechet_distance(last_features[: B // 2 * 2 : 2], clips[1::2], network.name)

    distances = []
    for at in sorted({min(CLIP_FRAMES * 2**i, num_frames) for i in range(num_frames.bit_length())}):
        frame_psnr = cap_psnr(real[:, at], rollout[:, at - 1]) if at < T else None
        psnr = None if frame_psnr is None else estimate_mean(f"psnr@{at}", frame_psnr)
        clips = extract_clip_features(rollout[:, at - CLIP_FRAMES : at], network)
        distances.append(RolloutDistance(at, psnr, paired_distance(clips), split_distance(clips)))
    return LongRolloutReport(
        rollout,
        distances,
        paired_distance(first_features),
        split_distance(last_features),
        _read_back_actions(model, video, rollout_config, seed),
    )


def _read_back_actions(model: Genie, video: Tensor, rollout_config: RolloutConfig | None, seed: int) -> Estimate | None:
    """Accuracy of inferring random actions from the rollout; random, so that habits of the data do not help."""
    if model.latent is None:
        return None
    memory = model.latent.encoder.config.context_frames
    generator = torch.Generator().manual_seed(seed)
    random_actions = torch.randint(0, model.num_actions, (len(video), 2 * memory), generator=generator)
    rollout = rollout_frames(model, video[:, 0], random_actions, rollout_config, seed=seed)
    first_frame = Rollout(model).start(video[:, 0])  # reconstructed, so that the first step has no change of style
    inferred = model.infer_actions(model.codec.to_pixels(torch.cat([first_frame[:, None], rollout], 1))).cpu()
    return estimate_mean("read back", (inferred == random_actions).float().mean(1))


class StepCountResult(NamedTuple):
    """Quality and speed at one number of sampling steps per frame."""

    steps: int
    psnr: Estimate  # of frame `CONTROL_FRAME`
    delta_psnr: Estimate  # Δ_tPSNR
    fps: float  # frames per second, batch size 1


@torch.no_grad()
def evaluate_step_counts(
    model: Genie,
    video: Tensor,
    actions: Tensor,
    step_counts: Sequence[int],
    rollout_config: RolloutConfig | None = None,
    *,
    seed: int = 0,
) -> list[StepCountResult]:
    rollout_config, results = rollout_config or RolloutConfig(), []
    generator = torch.Generator().manual_seed(seed)
    random_actions = torch.randint(0, model.num_actions, (len(video), CONTROL_FRAME), generator=generator)
    target = video[:, CONTROL_FRAME].cpu()
    for count in step_counts:
        step_options = rollout_config.replace(steps=count)
        from_actions, from_random = (
            rollout_frames(model, video[:, 0], chosen_actions[:, :CONTROL_FRAME], step_options, seed=seed)[:, -1].cpu()
            for chosen_actions in (actions, random_actions)
        )
        control = estimate_mean(f"Δpsnr@{CONTROL_FRAME}", delta_psnr(target, from_actions, from_random))
        results.append(
            StepCountResult(
                count,
                estimate_mean(f"psnr@{CONTROL_FRAME}", cap_psnr(target, from_actions)),
                control,
                _measure_fps(model, video, step_options),
            )
        )
    return results


def _measure_fps(model: Genie, video: Tensor, rollout_config: RolloutConfig, num_frames: int = 8) -> float:
    """Frames per second with a full KV cache; with CUDA graphs if possible."""
    world = (Rollout if explain_unsupported(model) else CUDAGraphRollout)(model, rollout_config)
    action = torch.zeros(1, dtype=torch.long)
    world.start(video[:1, 0], seed=0)
    memory = max(part.config.context_frames for part in (model.dynamics.transformer, model.codec.decoder))
    for _ in range(memory + 1):
        world.step(action)
    world.step(action).cpu()  # synchronize
    start = time.perf_counter()
    for _ in range(num_frames):
        world.step(action).cpu()
    return num_frames / (time.perf_counter() - start)


# ---- object permanence ----------------------------------------------------------------------------------------------

VISIBLE_FRAMES, MAX_HIDDEN_FRAMES = 3, 6  # frames with the object before it is hidden; maximum frames without it


class PermanenceReport(NamedTuple):
    """Fraction of hidden objects that the model draws where they reappear, by number of hidden frames.

    `codec` is the fraction in reconstructed true frames; `without_memory` that of rollouts that start when the object
    is already hidden.
    """

    by_length: dict[int, Proportion]
    remembered: Proportion
    codec: Proportion
    without_memory: Proportion


def find_hidden_runs(labels: Tensor, object_label: int) -> list[tuple[int, int]]:
    """Find runs of frames without an object: (first frame, length), from labels (T, H, W).

    The object is visible in `VISIBLE_FRAMES` frames before, and in the frame after.
    """
    is_visible = (labels == object_label).flatten(1).any(1).tolist()
    runs, t = [], 0
    while t < len(is_visible):
        stop = t
        while stop < len(is_visible) and not is_visible[stop]:
            stop += 1
        if (
            VISIBLE_FRAMES <= t < stop < len(is_visible)
            and all(is_visible[t - VISIBLE_FRAMES : t])
            and stop - t <= MAX_HIDDEN_FRAMES
        ):
            runs.append((t, stop - t))
        t = stop + 1
    return runs


@torch.no_grad()
def evaluate_permanence(
    model: Genie,
    video: Tensor,
    labels: Tensor,
    actions: Tensor,
    object_label: int,
    rollout_config: RolloutConfig | None = None,
    seed: int = 0,
) -> PermanenceReport | None:
    """Evaluate object permanence on videos uint8 (B, T, C, H, W) with labels (B, T, H, W) and actions (B, T − 1).

    Returns None if no object reappears.
    """
    runs = [(b, t, n) for b in range(len(video)) for t, n in find_hidden_runs(labels[b], object_label)]
    tallies: dict[str, list[bool]] = {"remembered": [], "codec": [], "forgetful": []}
    by_length: dict[int, Proportion] = {}
    for length in sorted({n for *_, n in runs}):
        starts = [(b, t) for b, t, n in runs if n == length]
        clip = torch.stack([video[b, t - VISIBLE_FRAMES : t + length + 1] for b, t in starts])
        clip_actions = torch.stack([actions[b, t - VISIBLE_FRAMES : t + length] for b, t in starts])
        object_mask = torch.stack([labels[b, t + length] == object_label for b, t in starts]).cpu()
        remembered = rollout_frames(
            model,
            clip[:, :VISIBLE_FRAMES],
            clip_actions[:, VISIBLE_FRAMES - 1 :],
            rollout_config,
            past_actions=clip_actions[:, : VISIBLE_FRAMES - 1],
            seed=seed,
        )
        without_memory = rollout_frames(
            model, clip[:, VISIBLE_FRAMES], clip_actions[:, VISIBLE_FRAMES:], rollout_config, seed=seed
        )
        codec = model.codec.to_uint8(model.codec.reconstruct(model.codec.to_pixels(clip)))
        rollouts = {"remembered": remembered, "codec": codec, "forgetful": without_memory}
        correct_of = {
            name: _shows_object(frames_of[:, -1].cpu(), clip.cpu(), object_mask) for name, frames_of in rollouts.items()
        }
        for name, batch_correct in correct_of.items():
            tallies[name] += batch_correct
        by_length[length] = Proportion(sum(correct_of["remembered"]), len(starts))
    if not runs:
        return None
    total = {name: Proportion(sum(correct), len(correct)) for name, correct in tallies.items()}
    return PermanenceReport(by_length, total["remembered"], total["codec"], total["forgetful"])


def _shows_object(rollout: Tensor, clip: Tensor, object_mask: Tensor) -> list[bool]:
    """Whether frames (B, C, H, W) are nearer to a clip's last frame than to the one before, in a mask (B, H, W)."""
    weight = object_mask[:, None].float()

    def colour(frames: Tensor) -> Tensor:
        return (frames.float() * weight).sum((2, 3)) / weight.sum((2, 3))

    rollout_colour, object_colour, hidden_colour = colour(rollout), colour(clip[:, -1]), colour(clip[:, -2])
    return ((rollout_colour - object_colour).norm(dim=1) < (rollout_colour - hidden_colour).norm(dim=1)).tolist()
