"""Video codec pipeline: frames to code ids or latents, and back, chunk by chunk.

Shapes: T frames, H, W pixels, t × h × w codes, d width of a code.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitrail.codecs.causal_video_codec import CausalVideoCodec, CausalVideoCodecConfig
from vitrail.errors import CheckpointError, ConfigError, ImageError
from vitrail.pipelines.base import load_model, read_config_of
from vitrail.processing.image_loading import load_image


class VideoCodecPipeline:
    """Encode and decode videos with a causal video codec: `vitrail.load(folder)`.

    A video is a uint8 array or tensor (T, H, W, 3), or a list of images. `downsample_factor` of the model must divide
    both sides. The last frame is repeated until the codec can restore all frames.

    chunk_frames  frames that are processed at a time, rounded to what the codec supports: fewer need less memory. The
                  result does not depend on it.
    max_frames    latent frames that temporal attention of Cosmos reads, so that memory does not grow with the video;
                  values differ from those of the whole video. None for all.
    """

    def __init__(self, model: CausalVideoCodec, *, chunk_frames: int = 16, max_frames: int | None = None):
        if chunk_frames < 1:
            raise ConfigError(f"chunk_frames is {chunk_frames}", "use at least 1")
        self.model, self.max_frames = model.eval(), max_frames
        net = model.config.net
        steps = max(1, chunk_frames // net.chunk_frames)
        self.chunk_frames = steps * net.chunk_frames
        self.chunk_latent_frames = max(1, self.chunk_frames // net.temporal_factor // net.chunk_latent_frames)
        self.chunk_latent_frames *= net.chunk_latent_frames

    @classmethod
    def load(
        cls,
        name_or_path: str | Path,
        *,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        chunk_frames: int = 16,
        max_frames: int | None = None,
    ) -> "VideoCodecPipeline":
        """Load a causal video codec."""
        config = read_config_of(name_or_path)
        if not isinstance(config, CausalVideoCodecConfig):
            kind = type(config).__name__.removesuffix("Config")
            raise CheckpointError(
                f"{name_or_path} is a {kind}, not a causal video codec",
                "give the folder of AutoencoderKLCosmos, AutoencoderKLCogVideoX or AutoencoderKLWan",
            )
        model: Any = load_model(name_or_path, device, dtype)
        return cls(model, chunk_frames=chunk_frames, max_frames=max_frames)

    def encode(self, video: Any) -> Tensor:
        """Encode one video as code ids (1, t, h, w)."""
        if not self.model.vocab_sizes:
            raise ConfigError("the codec has continuous latents, which have no ids", "use encode_latents")
        return torch.cat([chunk.ids for chunk in self._encode_chunks(self.prepare_frames(video))], 1)

    def encode_latents(self, video: Any) -> Tensor:
        """Encode one video as codes (1, t, h, w, d): code vectors or continuous latents."""
        return torch.cat([chunk.codes for chunk in self._encode_chunks(self.prepare_frames(video))], 1)

    def decode(self, codes: Tensor, num_frames: int | None = None) -> np.ndarray:
        """Decode code ids (1, t, h, w) or codes (1, t, h, w, d) to frames, uint8 (T, H, W, 3).

        With `num_frames`, the result is cut to that many frames: those that were encoded.
        """
        codes = torch.as_tensor(codes).to(self.model.device)
        if codes.ndim == 4:
            codes = self.model.lookup(codes)
        return np.concatenate(list(self._decode_chunks(codes)))[:num_frames]

    def reconstruct(self, video: Any) -> np.ndarray:
        """Encode and decode one video: uint8 (T, H, W, 3), with as many frames."""
        frames = self.prepare_frames(video)
        codes = torch.cat([chunk.codes for chunk in self._encode_chunks(frames)], 1)
        return self.decode(codes, len(frames))

    def prepare_frames(self, video: Any) -> Tensor:
        """Convert a video to uint8 (T, H, W, 3)."""
        if isinstance(video, list | tuple):
            video = np.stack([np.asarray(load_image(image)) for image in video]) if video else np.empty(0, np.uint8)
        frames = torch.as_tensor(video)
        if frames.dtype != torch.uint8 or frames.ndim != 4 or frames.shape[-1] != 3 or not len(frames):
            raise ImageError(
                f"a video has shape {tuple(frames.shape)} and type {frames.dtype}",
                "give frames as uint8 (T, H, W, 3), or a list of images",
            )
        return frames

    @torch.no_grad()
    def _encode_chunks(self, frames: Tensor) -> Iterator[Any]:
        net, cache = self.model.config.net, self.model.make_cache(self.max_frames)
        count = net.round_up_frames(len(frames))
        for start, end in _split(count, net.chunk_frames, self.chunk_frames):
            chunk = frames[torch.arange(start, end).clamp_max(len(frames) - 1)]
            yield self.model.encode(self.model.to_pixels(chunk.movedim(-1, 1)[None]), cache)

    @torch.no_grad()
    def _decode_chunks(self, codes: Tensor) -> Iterator[np.ndarray]:
        cache, unit = self.model.make_cache(self.max_frames), self.model.config.net.chunk_latent_frames
        for start, end in _split(codes.shape[1], unit, self.chunk_latent_frames):
            pixels = self.model.decode(codes[:, start:end], cache)[0]
            yield self.model.to_uint8(pixels).movedim(1, -1).cpu().numpy()


def _split(count: int, unit: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield chunks of `size`, a multiple of `unit`. The first also takes the remainder of `count` by `unit`."""
    start, end = 0, min(count, count % unit + size)
    while start < count:
        yield start, end
        start, end = end, min(count, end + size)
