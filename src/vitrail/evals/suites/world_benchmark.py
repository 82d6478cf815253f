"""World model benchmark on held-out videos: codec quality, controllability, meaning of latent actions, rollout error.

B videos, T frames, H, W pixels
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vitrail.errors import DataError
from vitrail.evals.metrics.estimate import Estimate, estimate_mean
from vitrail.evals.metrics.world_metrics import (
    CodePurity,
    cap_psnr,
    code_purity,
    delta_psnr,
    left_right_accuracy,
    rollout_psnr,
)
from vitrail.generate.rollout import RolloutConfig, rollout_frames
from vitrail.models.genie_model import Genie

CONTROL_FRAME = 4  # frame at which Genie measures controllability


class WorldReport(NamedTuple):
    """Results of the world model benchmark."""

    codec_psnr: Estimate  # PSNR of reconstructed frames: an upper bound of predictions
    still_psnr: (
        Estimate  # PSNR of the reconstructed first frame against frame `CONTROL_FRAME`: the baseline without motion
    )
    delta_psnr: Estimate  # Δ_tPSNR
    rollout_psnr: list[Estimate]  # PSNR of each frame after the first, with the inferred actions
    code_purity: CodePurity | None  # of latent actions against true controls, if both exist
    left_right_accuracy: Estimate | None  # left/right classification by latent actions, if controls have these names

    def __str__(self) -> str:
        lines = (
            self.codec_psnr,
            self.still_psnr,
            self.delta_psnr,
            *self.rollout_psnr,
            self.code_purity,
            self.left_right_accuracy,
        )
        return "\n".join(str(line) for line in lines if line is not None)


@torch.no_grad()
def evaluate_world(
    model: Genie,
    video: Tensor,
    controls: Tensor | None = None,
    rollout_config: RolloutConfig | None = None,
    *,
    names: Sequence[str] = (),
    seed: int = 0,
) -> WorldReport:
    """Evaluate a world model on videos uint8 (B, T, C, H, W) of more than `CONTROL_FRAME` frames.

    Each video is rolled out from its first frame with the true or inferred actions, and with random actions, using the
    same random numbers. `controls` (B, T − 1) and their names are optional for models with latent actions.
    """
    B, T = video.shape[:2]
    if T <= CONTROL_FRAME:
        raise DataError(f"videos of {T} frames are too short", f"use videos of more than {CONTROL_FRAME} frames")
    pixels = model.codec.to_pixels(video)
    if model.latent is None and controls is None:
        raise DataError("the model needs known actions, but no controls are given", "pass the controls of the videos")
    actions = model.infer_actions(pixels) if model.latent is not None else controls
    assert actions is not None
    generator = torch.Generator().manual_seed(seed)
    random_actions = torch.randint(0, model.num_actions, (B, CONTROL_FRAME), generator=generator).to(actions.device)
    rollout = rollout_frames(model, video[:, 0], actions, rollout_config, seed=seed).to(video.device)
    random_frame = rollout_frames(model, video[:, 0], random_actions, rollout_config, seed=seed)[:, -1].to(video.device)
    reconstructions = model.codec.to_uint8(model.codec.reconstruct(pixels)).to(video.device)
    action_purity = None
    left_right = None
    if model.latent is not None and controls is not None:
        action_purity = code_purity(actions, controls.to(actions.device))
        left_right = left_right_accuracy(actions, controls, names) if names else None
    return WorldReport(
        estimate_mean("codec psnr", cap_psnr(video.flatten(0, 1), reconstructions.flatten(0, 1)).view(B, T).mean(1)),
        estimate_mean(f"still psnr@{CONTROL_FRAME}", cap_psnr(video[:, CONTROL_FRAME], reconstructions[:, 0])),
        estimate_mean(
            f"Δpsnr@{CONTROL_FRAME}", delta_psnr(video[:, CONTROL_FRAME], rollout[:, CONTROL_FRAME - 1], random_frame)
        ),
        rollout_psnr(video[:, 1:], rollout),
        action_purity,
        left_right,
    )
