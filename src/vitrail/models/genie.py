"""A world to play in, learned from video alone (Genie): frames as codes, actions between them, and what follows.

    codec      frames ⇄ codes                                     vitrail.codecs.video
    latent     two frames → which of a few actions lies between   vitrail.models.latent_actions
    dynamics   codes and actions so far → the next frame's codes, those that are hidden, all at once

Where the controls are known, they take the place of latent actions, and there is no latent model.

B batch, T frames, h × w codes of a frame, K codes there are, A actions, W width
"""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.codecs.quantizers.base import Quantizer, check_range
from vitrail.codecs.video import VideoCodec, VideoCodecConfig
from vitrail.config import Config
from vitrail.errors import ConfigError, DataError
from vitrail.models.codes import CodeRows
from vitrail.models.latent_actions import LatentActions, LatentActionsConfig
from vitrail.nn import Frames, FramesWork, SpaceTime, SpaceTimeConfig, Work, cost
from vitrail.nn.learned import small


class DynamicsConfig(Config):
    """`acts`: how an action enters the frame it leads to: added to every code (the paper), or as a token beside them"""

    transformer: SpaceTimeConfig
    acts: Literal["added", "token"] = "added"


class Dynamics(nn.Module):
    """Which codes lie where there is none yet (MaskGIT), given the frames before and what was done.

    `hidden` says what is hidden, and ids stay the true ones as far as they are known: at hidden places they are not
    looked at, and are there to be learned from.
    """

    def __init__(self, config: DynamicsConfig, quantizer: Quantizer, actions: int, grid: tuple[int, int]):
        super().__init__()
        self.config, self.actions = config, actions
        W = config.transformer.block.width
        self.code, self.hides = CodeRows(quantizer, W), small(W)
        self.action = nn.Embedding(actions + 1, W)  # the last: none, before the first frame
        self.transformer = SpaceTime(config.transformer, grid, prefix=int(config.acts == "token"))
        nn.init.normal_(self.action.weight, std=0.02)

    def led(self, actions: Tensor) -> Tensor:
        """Actions (B, T − 1) from one frame to the next → those that led to each frame (B, T): to the first, none"""
        return F.pad(actions, (1, 0), value=self.actions)

    def hidden_states(
        self, ids: Tensor, led: Tensor, hidden: Tensor | None = None, cache: Frames | None = None
    ) -> Tensor:
        """What logits are made of, (B, T, h, w, W), of ids (B, T, h, w), actions that led there (B, T), and which codes
        are hidden (B, T, h, w); none unless given"""
        h, w = ids.shape[2:]
        x = self.code(ids)
        if hidden is not None:
            x = torch.where(hidden[..., None], self.hides, x)
        x, act = x.flatten(2, 3), self.action(led)[:, :, None]
        x = x + act if self.config.acts == "added" else torch.cat([act, x], 2)
        return self.transformer(x, (h, w), cache)[:, :, -h * w :].unflatten(2, (h, w))

    def forward(self, ids: Tensor, led: Tensor, hidden: Tensor | None = None, cache: Frames | None = None) -> Tensor:
        """Logits (B, T, h, w, K)"""
        return self.code.logits(self.hidden_states(ids, led, hidden, cache))

    def missed(self, ids: Tensor, led: Tensor, hidden: Tensor) -> Tensor:
        """(B, T, h, w): −log p of every code; of one in view it says nothing"""
        said = self(ids, led, hidden).float()
        return F.cross_entropy(said.flatten(0, -2), ids.flatten(), reduction="none").view_as(ids)


class GenieConfig(Config):
    """`latent` learns the actions; or there are so many known `controls`."""

    codec: VideoCodecConfig
    dynamics: DynamicsConfig
    latent: LatentActionsConfig | None = None
    controls: int | None = None

    def __post_init__(self) -> None:
        if (self.latent is None) == (self.controls is None):
            raise ConfigError("actions are learned or known", "give `latent`, or the number of `controls`")
        if self.controls is not None and self.controls < 1:
            raise ConfigError(f"{self.controls} controls", "give at least one")


class Genie(nn.Module):
    """Each part is a stage of training, and learns nothing in the others'."""

    def __init__(self, config: GenieConfig):
        super().__init__()
        self.config = config
        self.codec = VideoCodec(config.codec)
        if len(self.codec.sizes) != 1:
            raise ConfigError(
                f"{type(self.codec.quantizer).__name__} gives {len(self.codec.sizes) or 'no'} ids a code, "
                "and one is predicted",
                "use a quantizer with one id a code, such as VQ or FSQ",
            )
        self.latent = None if config.latent is None else LatentActions(config.latent)
        actions = config.controls if self.latent is None else self.latent.actions
        assert actions is not None
        self.dynamics = Dynamics(config.dynamics, self.codec.quantizer, actions, config.codec.grid)

    @property
    def actions(self) -> int:
        return self.dynamics.actions

    def train(self, mode: bool = True) -> "Genie":
        """A part of which a stage trains no weight stays as it is, its codebook's running means too."""
        super().train(mode)
        for part in (self.codec, self.latent):
            if part is not None and not any(p.requires_grad for p in part.parameters()):
                part.eval()
        return self

    @torch.no_grad()
    def look(self, video: Tensor) -> Tensor:
        """video (B, T, C, H, W) in −1 … 1 → ids (B, T, h, w)"""
        ids = self.codec.encode(video).ids
        assert ids is not None
        return ids

    @torch.no_grad()
    def infer(self, video: Tensor) -> Tensor:
        """video (B, T, C, H, W) in −1 … 1 → which action led from each frame to the next, (B, T − 1)"""
        if self.latent is None:
            raise DataError("this world's controls are known, and it cannot infer them", "give the actions")
        ids = self.latent.infer(video).ids
        assert ids is not None
        return ids

    def check_actions(self, actions: Tensor) -> None:
        check_range(actions, (self.actions,), "actions")

    def work(self, frames: int, batch: int = 1, past: int | None = None) -> FramesWork:
        """Of the dynamics: so many frames behind so many that are in a cache."""
        return self.dynamics.transformer.work(frames, batch, past=past)


@cost.flops.register
def _(module: Dynamics, work: Work) -> int:
    """An action's token has no logits."""
    S = module.transformer.prefix + (places := math.prod(module.transformer.positions.grid))
    asked = work.with_(tokens=work.tokens // S * places)
    return cost.flops(module.transformer, work) + cost.flops(module.code, asked)


cost.bytes.register(Dynamics, cost.sum_bytes)


@cost.flops.register
def _(module: Genie, work: Work) -> int:
    """Of the dynamics; the codec and the latent model have costs of their own."""
    return cost.flops(module.dynamics, work)


cost.bytes.register(Genie, cost.sum_bytes)
