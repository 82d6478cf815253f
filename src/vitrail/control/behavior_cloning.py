"""Behavior cloning, and imitation from observation as in Genie.

A policy over latent actions is trained from videos without labels. A few labelled steps map latent actions to controls.
Behavior cloning of these few steps is the baseline.

Axes: N frames, C channels, H, W pixels, K latent actions, A controls.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.config import Config, PositiveFloat, PositiveInt
from vitrail.errors import DataError

ActionProbabilityFn = Callable[[Tensor], Tensor]
"""frames uint8 (B, C, H, W) → probabilities of controls (B, A)"""


class BehaviorCloningConfig(Config):
    """A small convolutional policy and its training.

    width           channels of the first layer; they double whenever the resolution halves
    min_resolution  smallest side of the feature map
    """

    width: PositiveInt = 32
    min_resolution: PositiveInt = 8
    steps: PositiveInt = 600
    batch_size: PositiveInt = 64
    lr: PositiveFloat = 1e-3
    weight_decay: float = 1e-2


class ConvPolicy(nn.Module):
    """A convolutional policy: frames uint8 (B, C, H, W) → logits (B, num_actions)."""

    def __init__(self, shape: tuple[int, int, int], num_actions: int, config: BehaviorCloningConfig | None = None):
        super().__init__()
        config = config or BehaviorCloningConfig()
        channels, *size = shape
        layers: list[nn.Module] = [nn.Conv2d(channels, config.width, 3, padding=1), nn.ReLU()]
        width = config.width
        while min(size) >= 2 * config.min_resolution:
            layers += [nn.Conv2d(width, 2 * width, 3, stride=2, padding=1), nn.ReLU()]
            width, size = 2 * width, [-(-side // 2) for side in size]
        self.layers = nn.Sequential(*layers, nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.Flatten())
        self.head = nn.Linear(width * size[0] * size[1], num_actions)

    def forward(self, frames: Tensor) -> Tensor:
        weight = self.head.weight
        return self.head(self.layers(frames.to(weight.device, weight.dtype) / 127.5 - 1))


def train_behavior_cloning(
    frames: Tensor,
    actions: Tensor,
    num_actions: int,
    config: BehaviorCloningConfig | None = None,
    *,
    seed: int = 0,
    device: str = "cpu",
) -> ConvPolicy:
    """Train a policy by behavior cloning on frames uint8 (N, C, H, W) and actions (N,)."""
    if len(frames) != len(actions) or not len(frames):
        raise DataError(
            f"there are {len(frames)} frames and {len(actions)} actions", "give one action a frame, at least one"
        )
    config = config or BehaviorCloningConfig()
    _, C, H, W = frames.shape
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        policy = ConvPolicy((C, H, W), num_actions, config).to(device).train()
        optimizer = torch.optim.AdamW(policy.parameters(), lr=config.lr, weight_decay=config.weight_decay)
        for step in range(config.steps):
            optimizer.param_groups[0]["lr"] = config.lr * (1 - step / config.steps)
            some = torch.randint(len(frames), (min(config.batch_size, len(frames)),))
            F.cross_entropy(policy(frames[some]), actions[some].to(device)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return policy.eval()


def estimate_action_map(latent_actions: Tensor, controls: Tensor, num_latent_actions: int, num_controls: int) -> Tensor:
    """Estimate p(control | latent action) from labelled steps (N,) → (K, A).

    Counts are smoothed with the marginal distribution of controls, which latent actions without a label get.
    """
    if latent_actions.shape != controls.shape or not latent_actions.numel():
        raise DataError(
            f"there are {len(latent_actions)} latent actions and {len(controls)} controls", "label at least one step"
        )
    counts = (
        (latent_actions * num_controls + controls)
        .bincount(minlength=num_latent_actions * num_controls)
        .view(num_latent_actions, num_controls)
        .float()
    )
    usual = counts.sum(0, keepdim=True) / counts.sum()
    return (counts + 0.5 * usual) / (counts.sum(1, keepdim=True) + 0.5)


def build_action_fn(policy: ConvPolicy, action_map: Tensor | None = None) -> ActionProbabilityFn:
    """Build a function from frames to probabilities of controls.

    `action_map` maps the latent actions of the policy to controls; without it the policy predicts controls.
    """

    @torch.no_grad()
    def act(frames: Tensor) -> Tensor:
        likely = policy(frames).softmax(-1).cpu()
        return likely if action_map is None else likely @ action_map

    return act
