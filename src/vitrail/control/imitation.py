"""A policy from watching: which latent action a frame calls for, learned from video alone, and which control that is,
learned from a handful of labelled steps (Genie's imitation from observation). Cloning the handful is its measure.

N frames, C channels, H, W pixels, K latent actions, A controls
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.config import Config
from vitrail.errors import ConfigError, DataError

Act = Callable[[Tensor], Tensor]
"""uint8 (B, C, H, W) → how likely each control is, (B, A)"""


class CloneConfig(Config):
    """A small convolutional network: `width` channels, twice as many at every halving, until `least` places a side."""

    width: int = 32
    least: int = 8
    rounds: int = 600
    batch: int = 64
    rate: float = 1e-3
    decay: float = 1e-2

    def __post_init__(self) -> None:
        if min(self.width, self.least, self.rounds, self.batch) < 1 or not self.rate > 0:
            raise ConfigError(f"a policy of {self.plain()}", "give numbers from 1 on, and a rate above 0")


class Policy(nn.Module):
    """uint8 (B, C, H, W) → logits (B, choices)"""

    def __init__(self, shape: tuple[int, int, int], choices: int, config: CloneConfig | None = None):
        super().__init__()
        config = config or CloneConfig()
        channels, *size = shape
        layers: list[nn.Module] = [nn.Conv2d(channels, config.width, 3, padding=1), nn.ReLU()]
        width = config.width
        while min(size) >= 2 * config.least:
            layers += [nn.Conv2d(width, 2 * width, 3, stride=2, padding=1), nn.ReLU()]
            width, size = 2 * width, [-(-side // 2) for side in size]
        self.layers = nn.Sequential(*layers, nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.Flatten())
        self.head = nn.Linear(width * size[0] * size[1], choices)

    def forward(self, frames: Tensor) -> Tensor:
        weight = self.head.weight
        return self.head(self.layers(frames.to(weight.device, weight.dtype) / 127.5 - 1))


def clone(
    frames: Tensor,
    chosen: Tensor,
    choices: int,
    config: CloneConfig | None = None,
    *,
    seed: int = 0,
    device: str = "cpu",
) -> Policy:
    """A policy that does in frames uint8 (N, C, H, W) what was done there (N,)."""
    if len(frames) != len(chosen) or not len(frames):
        raise DataError(f"{len(frames)} frames and {len(chosen)} actions", "give one of each a step, at least one")
    config = config or CloneConfig()
    _, C, H, W = frames.shape
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        policy = Policy((C, H, W), choices, config).to(device).train()
        optimizer = torch.optim.AdamW(policy.parameters(), lr=config.rate, weight_decay=config.decay)
        for step in range(config.rounds):
            optimizer.param_groups[0]["lr"] = config.rate * (1 - step / config.rounds)
            some = torch.randint(len(frames), (min(config.batch, len(frames)),))
            F.cross_entropy(policy(frames[some]), chosen[some].to(device)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return policy.eval()


def translation(codes: Tensor, controls: Tensor, latent: int, choices: int) -> Tensor:
    """(K, A): how often each control was done where a latent action was seen, by a few steps (N,) of which both are
    known. One that never was seen stands for any, as often as they occur."""
    if codes.shape != controls.shape or not codes.numel():
        raise DataError(f"{len(codes)} latent actions and {len(controls)} controls", "label at least one step")
    counts = (codes * choices + controls).bincount(minlength=latent * choices).view(latent, choices).float()
    usual = counts.sum(0, keepdim=True) / counts.sum()
    return (counts + 0.5 * usual) / (counts.sum(1, keepdim=True) + 0.5)


def acting(policy: Policy, translated: Tensor | None = None) -> Act:
    """A policy over controls, or one over latent actions with their translation, as one that acts."""

    @torch.no_grad()
    def act(frames: Tensor) -> Tensor:
        likely = policy(frames).softmax(-1).cpu()
        return likely if translated is None else likely @ translated

    return act
