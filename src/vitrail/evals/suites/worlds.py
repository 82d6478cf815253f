"""A Genie judged on videos it has not seen: what its codec keeps, whether its actions steer, what they mean, its drift.

B videos, T frames, H, W pixels
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vitrail.errors import DataError
from vitrail.evals.metrics.estimate import Estimate, estimate
from vitrail.evals.metrics.worlds import Purity, decibels, delta_psnr, drift, left_from_right, purity
from vitrail.generate.rollout import Rolling, roll
from vitrail.models.genie import Genie

AT = 4  # the frame at which Genie measures control


class WorldReport(NamedTuple):
    codec: Estimate  # PSNR of frames by way of their codes: what is lost before anything is predicted
    still: Estimate  # PSNR at `AT` of the first frame, by way of its codes too: a world in which nothing moves
    control: Estimate  # Δ_tPSNR
    drift: list[Estimate]  # PSNR of each frame after the first, by the actions that were taken
    purity: Purity | None  # of latent actions against true controls, where both are there
    sides: Estimate | None  # left told from right by latent actions, where controls are called so

    def __str__(self) -> str:
        lines = (self.codec, self.still, self.control, *self.drift, self.purity, self.sides)
        return "\n".join(str(line) for line in lines if line is not None)


@torch.no_grad()
def judge_world(
    model: Genie,
    video: Tensor,
    controls: Tensor | None = None,
    rolling: Rolling | None = None,
    *,
    names: Sequence[str] = (),
    seed: int = 0,
) -> WorldReport:
    """Videos uint8 (B, T, C, H, W) of more than `AT` frames and, where they are known, true controls (B, T − 1) and
    their names. Each is rolled out from its first frame, by the actions that were taken and by random ones, with the
    same chance."""
    B, T = video.shape[:2]
    if T <= AT:
        raise DataError(f"videos of {T} frames", f"control is measured {AT} frames after the first: give longer ones")
    pixels = model.codec.pixels(video)
    if model.latent is None and controls is None:
        raise DataError("this world's controls are known, and none were given", "give what was done in the videos")
    actions = model.infer(pixels) if model.latent is not None else controls
    assert actions is not None
    chance = torch.Generator().manual_seed(seed)
    other = torch.randint(0, model.actions, (B, AT), generator=chance).to(actions.device)
    drawn = roll(model, video[:, 0], actions, rolling, seed=seed).to(video.device)
    strayed = roll(model, video[:, 0], other, rolling, seed=seed)[:, -1].to(video.device)
    kept = model.codec.bytes(model.codec.reconstruct(pixels)).to(video.device)
    pure = sides = None
    if model.latent is not None and controls is not None:
        pure = purity(actions, controls.to(actions.device))
        sides = left_from_right(actions, controls, names) if names else None
    return WorldReport(
        estimate("codec psnr", decibels(video.flatten(0, 1), kept.flatten(0, 1)).view(B, T).mean(1)),
        estimate(f"still psnr@{AT}", decibels(video[:, AT], kept[:, 0])),
        estimate(f"Δpsnr@{AT}", delta_psnr(video[:, AT], drawn[:, AT - 1], strayed)),
        drift(video[:, 1:], drawn),
        pure,
        sides,
    )
