"""World model metrics: controllability, meaning of latent actions, and rollout error over time.

B videos, T frames, C channels, H, W pixels, K codes, A controls, D features of a frame
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.errors import DataError
from vitrail.evals.metrics.estimate import Estimate, estimate_mean
from vitrail.evals.metrics.frechet_distance import FeatureNetwork, extract_features
from vitrail.evals.metrics.image_similarity import psnr

MAX_PSNR = 60.0  # dB, for equal frames. An error of half a grey level in every pixel is 54 dB
SIDE_WORDS = ("left", "right")  # words in the names of controls


def cap_psnr(target: Tensor, prediction: Tensor) -> Tensor:
    """PSNR (B,) of frames (B, C, H, W), at most `MAX_PSNR`: equal frames would make a mean infinite."""
    return psnr(target, prediction).clamp_max(MAX_PSNR)


def delta_psnr(target: Tensor, from_inferred_actions: Tensor, from_random_actions: Tensor) -> Tensor:
    """Genie's Δ_tPSNR (B,) in dB: PSNR of frames from inferred actions minus PSNR of frames from random actions.

    All frames are (B, C, H, W). A value of 0 means that actions have no effect, or no useful one.
    """
    return cap_psnr(target, from_inferred_actions) - cap_psnr(target, from_random_actions)


class CodePurity(NamedTuple):
    """Purity of latent actions: the fraction of steps whose control is the most common one of their code.

    `majority` is the fraction of the most common control overall. `counts` (K, A) counts pairs of code and control.
    """

    value: float
    majority: float
    num_steps: int
    counts: Tensor

    @property
    def control_of_code(self) -> Tensor:
        """The most common control (K,) of each code; −1 for unused codes."""
        return torch.where(self.counts.sum(1) > 0, self.counts.argmax(1), -1)

    def __str__(self) -> str:
        return f"purity {self.value:.3f} of {self.num_steps:,} steps, majority {self.majority:.3f}"


def code_purity(codes: Tensor, controls: Tensor) -> CodePurity:
    """Purity of latent actions against true controls, two integer tensors of equal shape.

    Purity cannot decrease with more codes. Compare models with equal numbers of codes, on held-out steps.
    """
    if codes.shape != controls.shape or not codes.numel():
        raise DataError(
            f"shapes of codes {tuple(codes.shape)} and controls {tuple(controls.shape)} differ",
            "pass one of each per step",
        )
    for name, values in (("codes", codes), ("controls", controls)):
        if values.is_floating_point() or values.dtype == torch.bool or int(values.min()) < 0:
            raise DataError(f"{name} have type {values.dtype} and minimum {values.min()}", "pass integers >= 0")
    K, A = int(codes.max()) + 1, int(controls.max()) + 1
    counts = (codes.long() * A + controls).flatten().cpu().bincount(minlength=K * A).view(K, A)
    steps = int(counts.sum())
    return CodePurity(int(counts.amax(1).sum()) / steps, int(counts.sum(0).max()) / steps, steps, counts)


def left_right_accuracy(codes: Tensor, controls: Tensor, names: Sequence[str]) -> Estimate | None:
    """Balanced accuracy of classifying controls (B, T) as left or right from codes (B, T); chance is 0.5.

    Control names that contain "left" or "right" define the classes. Each code's class is estimated on every other
    video and tested on the rest; a code without a majority counts half. Returns None if one half of the videos lacks
    one of the classes.
    """
    if codes.ndim != 2 or codes.shape != controls.shape or int(controls.max()) >= len(names):
        problem = f"codes {tuple(codes.shape)} and controls {tuple(controls.shape)} of {len(names)} names"
        raise DataError(problem, "pass one of each per video step, and a name for every control")
    # (A, 2)
    is_side = torch.tensor([[side in name.split() for side in SIDE_WORDS] for name in names], dtype=torch.float64)
    steps = F.one_hot(codes.cpu()).double().mT @ is_side[controls.cpu()]  # (B, K, 2) co-occurrences of code and side
    totals = torch.stack([half.sum((0, 1)) for half in (steps[0::2], steps[1::2])])  # (2, 2)
    if not totals.all():
        return None
    predicted = torch.empty_like(steps)
    for half in (0, 1):
        side_fraction = steps[1 - half :: 2].sum(0) / totals[1 - half]  # (K, 2)
        predicted[half::2] = (side_fraction > side_fraction.flip(1)) + 0.5 * (side_fraction == side_fraction.flip(1))
    hits, side_steps = (steps * predicted).sum(1), steps.sum(1)  # (B, 2)
    recall = hits.sum(0) / side_steps.sum(0)  # (2,)
    # Per video: the overall value plus its influence on it. The mean over videos is the overall value.
    return estimate_mean("left from right", (recall + (hits - recall * side_steps) / side_steps.mean(0)).mean(1))


def rollout_psnr(target: Tensor, prediction: Tensor) -> list[Estimate]:
    """PSNR of every frame of a rollout (B, T, C, H, W) against the true frames."""
    if target.ndim != 5 or target.shape != prediction.shape:
        raise DataError(
            f"videos of shapes {tuple(target.shape)} and {tuple(prediction.shape)}",
            "pass two of equal shape (B, T, C, H, W)",
        )
    return [
        estimate_mean(f"psnr@{t}", cap_psnr(target[:, t - 1], prediction[:, t - 1]))
        for t in range(1, target.shape[1] + 1)
    ]


# ---- features of video sets ---------------------------------------------------------------------------------------


class PixelFeatureNetwork:
    """Feature network without weights: each frame as 4 × 4 mean colours in 0…255.

    It captures positions of objects but not their identity.
    """

    name, image_size = "pixels4", 4

    def __call__(self, pixels: Tensor, /) -> Tensor:
        return 127.5 * pixels.flatten(1)


def extract_clip_features(clips: Tensor, network: FeatureNetwork) -> Tensor:
    """Clip features (B, 2·D) of uint8 clips (B, T, C, H, W): mean frame feature, and mean absolute frame difference.

    This lets an image network capture motion. It is not I3D, so distances are named after the image network.
    """
    if clips.ndim != 5 or clips.shape[1] < 2:
        raise DataError(f"clips of shape {tuple(clips.shape)}", "pass (B, T, C, H, W) with two frames or more")
    B, T = clips.shape[:2]
    frame_features = extract_features(clips.flatten(0, 1), network).view(B, T, -1)
    return torch.cat([frame_features.mean(1), frame_features.diff(dim=1).abs().mean(1)], 1)
