"""World rollouts with a Genie model: generate frame after frame in a few passes each, with cached history.

The codes of a generated frame enter the caches of the dynamics model and of the codec's decoder before the next frame
starts. Each row has its own random stream, so a row's world depends only on its own seed.

Shapes: B rows, T frames, C channels, H × W pixels, h × w codes per frame, N = h·w, K codebook entries.
"""

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.config import Config, PositiveInt
from vitrail.errors import ConfigError, DataError
from vitrail.generate.masked_decoding import count_hidden, find_active_passes, gumbel_noise, hide_least_confident
from vitrail.generate.sampling import RowRandom, SamplingConfig, process_logits, sample_tokens
from vitrail.models.genie_model import Genie
from vitrail.nn import AnyFrameCache, FrameCache, FrameRingCache, SpaceTimeTransformer

PredictLogitsFn = Callable[[Tensor, Tensor], Tensor]
"""(ids (B, 1, h, w) of a partial frame, mask of hidden codes) → logits (B, 1, h, w, K)"""


class RolloutConfig(Config):
    """Settings of a rollout.

    steps     passes per frame; one more pass adds the frame to the memory
    sampling  sampling parameters of the codes; the seed is that of the first row
    order     order in which codes are fixed: random (Genie), or by confidence. Unchanged codes are the most confident,
              so few passes in that order tend to copy the last frame.
    """

    steps: PositiveInt = 8
    sampling: SamplingConfig = SamplingConfig()
    order: Literal["random", "confidence"] = "random"

    def __post_init__(self) -> None:
        if self.sampling.repetition_penalty != 1:
            raise ConfigError(
                f"sampling.repetition_penalty is {self.sampling.repetition_penalty}", "give 1: frames repeat codes"
            )


class Rollout:
    """A rollout with one world per row: call `start` with frames, then `step` with actions, any number of times.

    The model's memory limits the history. Older frames are dropped, so the cost per step is constant.
    """

    def __init__(self, model: Genie, config: RolloutConfig | None = None):
        self.model, self.config = model.eval(), config or RolloutConfig()
        self._frame_codes: Tensor | None = None
        self._pending_actions: Tensor | None = (
            None  # action embeddings of frames that the dynamics cache does not contain yet
        )
        self._rings: dict[str, FrameRingCache] = {}

    @property
    def num_actions(self) -> int:
        return self.model.num_actions

    @property
    def frame_shape(self) -> tuple[int, int, int]:
        """(H, W, C) of the model's frames."""
        height, width = self.model.codec.image_size
        return height, width, self.model.config.codec.channels

    @torch.no_grad()
    def start(self, frames: Tensor, actions: Tensor | None = None, seed: int | None = None) -> Tensor:
        """Start from one frame (B, C, H, W) or several frames (B, T, C, H, W), uint8.

        `actions` (B, T − 1) are the actions between the frames; a model with latent actions can infer them. Returns
        the codec's reconstruction of the last frame, uint8 (B, C, H, W).
        """
        model = self.model
        video = model.codec.to_pixels(frames if frames.ndim == 5 else frames[:, None])
        B, T = video.shape[:2]
        if actions is None:
            actions = model.infer_actions(video) if T > 1 else torch.zeros(B, 0, dtype=torch.long, device=video.device)
        if actions.shape != (B, T - 1):
            raise DataError(f"actions have shape {tuple(actions.shape)}, with {B} × {T} frames", f"give ({B}, {T - 1})")
        model.check_actions(actions)
        self.rng = RowRandom(B, self.config.sampling.seed if seed is None else seed)
        self.dynamics_cache = model.dynamics.transformer.make_cache()
        self.decoder_cache = model.codec.decoder.make_cache()
        (K,) = model.codec.vocab_sizes
        self.codebook = model.codec.lookup(torch.arange(K, device=video.device))  # (K, d)
        reconstruction = self._decode_frames(
            model.encode_frames(video), model.dynamics.shift_actions(actions.to(video.device))
        )
        self.update_memory()
        return reconstruction

    def step(self, actions: Tensor) -> Tensor:
        """Return the next frame, uint8 (B, C, H, W), for one action per row (B,)."""
        frame = self.predict_frame(actions)
        self.update_memory()
        return frame

    @torch.no_grad()
    def predict_frame(self, actions: Tensor) -> Tensor:
        """Return the next frame like `step`, but without `update_memory`, which then runs before the next frame."""
        if self._frame_codes is None:
            raise ConfigError("the rollout has not started", "call start first")
        if actions.shape != (len(self._frame_codes),):
            raise DataError(
                f"actions have shape {tuple(actions.shape)}, with {len(self._frame_codes)} worlds",
                "give one action per world",
            )
        self.model.check_actions(actions)
        self.update_memory()
        chance = self.rng.uniform(self.config.steps, 2, self._frame_codes[0, 0].numel())
        return self._next(actions.to(self._frame_codes.device)[:, None], chance.to(self._frame_codes.device))

    @property
    def last_frame_codes(self) -> Tensor:
        """Codes (B, h, w) of the last frame."""
        assert self._frame_codes is not None
        return self._frame_codes[:, -1]

    def _next(self, shifted_actions: Tensor, chance: Tensor) -> Tensor:
        """Generate one frame from its actions (B, 1) and uniforms (B, steps, 2, N)."""

        def predict(ids: Tensor, hidden: Tensor) -> Tensor:
            return self.model.dynamics(ids, shifted_actions, hidden, self.dynamics_cache)

        return self._decode_frames(
            generate_frame(predict, self.last_frame_codes[:, None], self.config, chance), shifted_actions
        )

    def _decode_frames(self, ids: Tensor, shifted_actions: Tensor) -> Tensor:
        """Decode frames with codes (B, T, h, w) and return the last one, uint8 (B, C, H, W)."""
        codec = self.model.codec
        decoded = codec.decode(F.embedding(ids, self.codebook), self.decoder_cache)
        self.decoder_cache.commit()
        self.decoder_cache = self._to_ring("shown", codec.decoder, self.decoder_cache)
        self._frame_codes, self._pending_actions = ids, shifted_actions
        return codec.to_uint8(decoded[:, -1])

    @torch.no_grad()
    def update_memory(self) -> None:
        """Add the last frames to the dynamics cache, if they are missing. The caller can display them first."""
        if self._frame_codes is None or self._pending_actions is None:
            return
        dynamics = self.model.dynamics
        dynamics.forward_hidden(self._frame_codes, self._pending_actions, cache=self.dynamics_cache)
        self.dynamics_cache.commit()
        self.dynamics_cache = self._to_ring("past", dynamics.transformer, self.dynamics_cache)
        self._pending_actions = None

    def _to_ring(self, name: str, net: SpaceTimeTransformer, cache: AnyFrameCache) -> AnyFrameCache:
        """Convert a cache to a form that does not move its content.

        On a CPU this happens at once. On other devices, a full cache becomes a ring buffer, reused from an earlier
        rollout if it fits.
        """
        if not isinstance(cache, FrameCache):
            return cache
        if (lean := net.make_single_frame_runner(cache)) is not None:
            return lean
        if not cache.is_full:
            return cache
        if name in self._rings and self._rings[name].is_compatible(cache):
            self._rings[name].copy_from(cache)
        else:
            self._rings[name] = FrameRingCache(cache)
        return self._rings[name]


def generate_frame(predict_logits: PredictLogitsFn, empty: Tensor, config: RolloutConfig, uniforms: Tensor) -> Tensor:
    """Generate the codes (B, 1, h, w) of a frame with the shape of `empty`.

    Each pass uses two uniforms per code of (B, steps, 2, N): one to sample the code, one to choose the kept codes.
    """
    ids, (B, _, h, w) = torch.zeros_like(empty), empty.shape
    hidden = torch.ones_like(ids, dtype=torch.bool)
    total = torch.full((B,), h * w, device=ids.device)
    for step, is_active in enumerate(find_active_passes(torch.tensor([h * w]), config.steps)):
        if not is_active:
            continue
        logits = predict_logits(ids, hidden).flatten(0, -2)  # (B·N, K)
        found = sample_tokens(logits, config.sampling, uniforms[:, step, 0].flatten())
        ids = torch.where(hidden, found.view_as(ids), ids)
        sure = gumbel_noise(uniforms[:, step, 1])
        if config.order == "confidence":
            log_probs = process_logits(logits, config.sampling).log_softmax(-1)
            sure = log_probs.gather(-1, found[:, None]).view(B, h * w)
        hidden = hide_least_confident(sure, hidden.flatten(1), count_hidden(total, step, config.steps)).view_as(hidden)
    return ids


@torch.no_grad()
def rollout_frames(
    model: Genie,
    frames: Tensor,
    actions: Tensor,
    config: RolloutConfig | None = None,
    *,
    past_actions: Tensor | None = None,
    seed: int | None = None,
) -> Tensor:
    """Roll out n actions (B, n) from the start frames and return the n next frames, uint8 (B, n, C, H, W).

    `frames` and `past_actions` are the arguments of `Rollout.start`.
    """
    world = Rollout(model, config)
    world.start(frames, past_actions, seed)
    generated = [world.step(one) for one in actions.unbind(1)]
    return torch.stack(generated, 1) if generated else frames.new_zeros(len(frames), 0, *frames.shape[-3:])
