"""World model learned from video (Genie): frames as codes, latent actions, and next-frame prediction.

    codec      frames ⇄ codes                                           vitrail.codecs.video_codec
    latent     two frames → one of a few latent actions between them    vitrail.models.latent_action_model
    dynamics   previous codes and actions → masked codes of the next frame, all at once

If actions are known, they replace latent actions and there is no latent action model.

Shapes: B batch, T frames, h × w codes of a frame, K codebook size, A actions, W width.
"""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.codecs.quantizers.quantizer import Quantizer, check_id_range
from vitrail.codecs.video_codec import VideoCodec, VideoCodecConfig
from vitrail.config import Config, PositiveInt
from vitrail.errors import ConfigError, DataError
from vitrail.models.code_embedding import CodeEmbedding
from vitrail.models.latent_action_model import LatentActionConfig, LatentActionModel
from vitrail.nn import AnyFrameCache, FramesWorkload, SpaceTimeConfig, SpaceTimeTransformer, Workload, cost
from vitrail.nn.parameters import make_small_parameter
from vitrail.registry import MODELS


class GenieDynamicsConfig(Config):
    """Config of `GenieDynamics`. `action_conditioning`: add the action to every code of its frame (paper), or insert a
    token.
    """

    transformer: SpaceTimeConfig
    action_conditioning: Literal["added", "token"] = "added"


class GenieDynamics(nn.Module):
    """MaskGIT transformer that predicts masked codes from previous frames and actions.

    `masked` marks masked codes. Their ids are not used as input, so they can be the targets.
    """

    def __init__(self, config: GenieDynamicsConfig, quantizer: Quantizer, num_actions: int, grid: tuple[int, int]):
        super().__init__()
        self.config, self.num_actions = config, num_actions
        W = config.transformer.block.width
        self.code_embed, self.mask_embedding = CodeEmbedding(quantizer, W), make_small_parameter(W)
        self.action = nn.Embedding(num_actions + 1, W)  # the last row: no action, before the first frame
        self.transformer = SpaceTimeTransformer(
            config.transformer, grid, num_prefix_tokens=int(config.action_conditioning == "token")
        )
        nn.init.normal_(self.action.weight, std=0.02)

    def shift_actions(self, actions: Tensor) -> Tensor:
        """Shift actions between frames (B, T − 1) to the actions that led to each frame (B, T); the first frame has
        none.
        """
        return F.pad(actions, (1, 0), value=self.num_actions)

    def forward_hidden(
        self, ids: Tensor, incoming_actions: Tensor, masked: Tensor | None = None, cache: AnyFrameCache | None = None
    ) -> Tensor:
        """Return hidden states (B, T, h, w, W) of ids (B, T, h, w) and incoming actions (B, T), with masked codes (B,
        T, h, w).
        """
        h, w = ids.shape[2:]
        x = self.code_embed(ids)
        if masked is not None:
            x = torch.where(masked[..., None], self.mask_embedding, x)
        x, act = x.flatten(2, 3), self.action(incoming_actions)[:, :, None]
        x = x + act if self.config.action_conditioning == "added" else torch.cat([act, x], 2)
        return self.transformer(x, (h, w), cache)[:, :, -h * w :].unflatten(2, (h, w))

    def forward(
        self, ids: Tensor, incoming_actions: Tensor, masked: Tensor | None = None, cache: AnyFrameCache | None = None
    ) -> Tensor:
        """Return logits (B, T, h, w, K)."""
        return self.code_embed.compute_logits(self.forward_hidden(ids, incoming_actions, masked, cache))

    def compute_code_losses(self, ids: Tensor, incoming_actions: Tensor, masked: Tensor) -> Tensor:
        """Compute the cross-entropy (B, T, h, w) of every code; it is meaningful for masked codes only."""
        logits = self(ids, incoming_actions, masked).float()
        return F.cross_entropy(logits.flatten(0, -2), ids.flatten(), reduction="none").view_as(ids)


class GenieConfig(Config):
    """Config of a `Genie`. Set `latent` to learn actions, or `num_controls` for known actions."""

    codec: VideoCodecConfig
    dynamics: GenieDynamicsConfig
    latent: LatentActionConfig | None = None
    num_controls: PositiveInt | None = None

    def __post_init__(self) -> None:
        if (self.latent is None) == (self.num_controls is None):
            raise ConfigError("both or neither of latent and num_controls are set", "set one of them")


@MODELS.register("genie")
class Genie(nn.Module):
    """World model of codec, latent action model and dynamics. Each part is trained in its own stage."""

    Config = GenieConfig

    def __init__(self, config: GenieConfig):
        super().__init__()
        self.config = config
        self.codec = VideoCodec(config.codec)
        if len(self.codec.vocab_sizes) != 1:
            raise ConfigError(
                f"{type(self.codec.quantizer).__name__} has {len(self.codec.vocab_sizes) or 'no'} ids for each code, "
                "but the dynamics predict one",
                "use a quantizer with one id for each code, such as VQ or FSQ",
            )
        self.latent = None if config.latent is None else LatentActionModel(config.latent)
        actions = config.num_controls if self.latent is None else self.latent.num_actions
        assert actions is not None
        self.dynamics = GenieDynamics(config.dynamics, self.codec.quantizer, actions, config.codec.grid)

    @property
    def num_actions(self) -> int:
        return self.dynamics.num_actions

    def train(self, mode: bool = True) -> "Genie":
        """Keep parts without trainable weights in eval mode, so that codebook statistics do not change."""
        super().train(mode)
        for part in (self.codec, self.latent):
            if part is not None and not any(p.requires_grad for p in part.parameters()):
                part.eval()
        return self

    @torch.no_grad()
    def encode_frames(self, video: Tensor) -> Tensor:
        """Encode video (B, T, C, H, W) in −1 … 1 to ids (B, T, h, w)."""
        ids = self.codec.encode(video).ids
        assert ids is not None
        return ids

    @torch.no_grad()
    def infer_actions(self, video: Tensor) -> Tensor:
        """Infer the action (B, T − 1) between consecutive frames of a video (B, T, C, H, W) in −1 … 1."""
        if self.latent is None:
            raise DataError("this model has no latent action model, so it cannot infer actions", "give the actions")
        ids = self.latent.infer_actions(video).ids
        assert ids is not None
        return ids

    def check_actions(self, actions: Tensor) -> None:
        check_id_range(actions, (self.num_actions,), "actions")

    def workload(self, num_frames: int, batch_size: int = 1, num_past_frames: int | None = None) -> FramesWorkload:
        """Return the workload of the dynamics for new frames after a number of cached frames."""
        return self.dynamics.transformer.workload(num_frames, batch_size, past_frames=num_past_frames)


@cost.count_flops.register
def _(module: GenieDynamics, work: Workload) -> int:
    """Count the dynamics; action tokens have no logits."""
    S = module.transformer.num_prefix_tokens + (places := math.prod(module.transformer.positions.grid_size))
    logit_work = work.replace(tokens=work.tokens // S * places)
    return cost.count_flops(module.transformer, work) + cost.count_flops(module.code_embed, logit_work)


cost.count_bytes.register(GenieDynamics, cost.sum_child_bytes)


@cost.count_flops.register
def _(module: Genie, work: Workload) -> int:
    """Count the dynamics only; codec and latent action model have their own costs."""
    return cost.count_flops(module.dynamics, work)


cost.count_bytes.register(Genie, cost.sum_child_bytes)
