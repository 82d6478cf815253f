"""Codec pipeline: images to code ids or latents, and back.

Shapes: B images, H, W pixels, h × w codes.
"""

from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from vitrail.codecs.causal_video_codec import CausalVideoCodecConfig
from vitrail.codecs.codec import Codec, CodecConfig
from vitrail.codecs.image_sources import ImageResizeConfig
from vitrail.errors import CheckpointError, ConfigError
from vitrail.models.qlip_model import CodecTrainingConfig, QLIPConfig
from vitrail.models.unified_model import UnifiedConfig
from vitrail.pipelines.base import find_bundled_model, load_model, read_config_of
from vitrail.processing.image_loading import load_image


class CodecPipeline:
    """Encode and decode images with a codec: `vitrail.load(folder)`.

    Images are cropped to the aspect ratio of the codec and resized to its image size, unless `resize` says otherwise.
    """

    def __init__(self, model: Codec, resize: ImageResizeConfig | None = None, *, name: str = "codec"):
        self.model, self.resize = model.eval(), (resize or ImageResizeConfig()).resolve_size(model)
        self.name = name  # written to token files

    @classmethod
    def load(
        cls,
        name_or_path: str | Path,
        *,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        resize: ImageResizeConfig | None = None,
    ) -> "CodecPipeline":
        """Load a codec, or the codec of a model that contains one."""
        config = read_config_of(find_bundled_model(name_or_path))
        if isinstance(config, CausalVideoCodecConfig):
            raise CheckpointError(
                f"{name_or_path} is a codec of videos, not of images",
                "use vitrail.load(…), or vitrail.pipelines.VideoCodecPipeline, on videos (docs/video-codecs.md)",
            )
        if not isinstance(config, CodecConfig | CodecTrainingConfig | QLIPConfig | UnifiedConfig):
            kind = type(config).__name__.removesuffix("Config")
            raise CheckpointError(
                f"{name_or_path} is a {kind} and has no codec", "give a codec: a folder that `vitrail train` wrote"
            )
        model: Any = load_model(find_bundled_model(name_or_path), device, dtype)
        return cls(getattr(model, "codec", model), resize, name=Path(name_or_path).resolve().name)

    @torch.no_grad()
    def encode(self, images: Any) -> Tensor:
        """Encode one image or a list of images as code ids (B, h, w), with a last axis for codecs with id groups."""
        ids = self.model.encode(self.model.to_pixels(self.prepare_pixels(images))).ids
        if ids is None:
            raise ConfigError("the codec has continuous latents, which have no ids", "use encode_latents")
        return ids

    @torch.no_grad()
    def encode_latents(self, images: Any) -> Tensor:
        """Encode one image or a list of images as codes (B, D, h, w): code vectors or continuous latents."""
        return self.model.encode(self.model.to_pixels(self.prepare_pixels(images))).codes

    @torch.no_grad()
    def decode(self, ids: Tensor) -> list[Image.Image]:
        """Decode code ids."""
        return self._to_images(self.model.decode(self.model.lookup(torch.as_tensor(ids).to(self.model.device))))

    @torch.no_grad()
    def reconstruct(self, images: Any) -> list[Image.Image]:
        """Encode and decode one image or a list of images."""
        return self._to_images(self.model.reconstruct(self.model.to_pixels(self.prepare_pixels(images))))

    def prepare_pixels(self, images: Any) -> Tensor:
        """Load and resize one image or a list of images of one size: uint8 (B, 3, H, W)."""
        several = list(images) if isinstance(images, list | tuple) else [images]
        if not several:
            raise ConfigError("there is no image", "give at least one image")
        factor = self.model.downsample_factor
        return torch.stack([self.resize.apply(load_image(image), factor)[0] for image in several])

    def _to_images(self, pixels: Tensor) -> list[Image.Image]:
        arrays = self.model.to_uint8(pixels).cpu().permute(0, 2, 3, 1).contiguous().numpy()
        return [Image.fromarray(array) for array in arrays]
