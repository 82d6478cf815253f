"""Interface of image encoders, and the field type of models that take any of them."""

from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from torch import nn

from vitrail.config import Config, make_registered_type
from vitrail.processing.image_layout import ImageView
from vitrail.registry import ENCODERS

InputKind = Literal["views", "patches", "tiles"]


class EncoderConfig(Config):
    """Base class of image encoder configs: what a model must know of the features before it builds an encoder.

    Every config also has the fields or properties

    image_size  native image size in pixels
    patch_size  side of the square that one feature stands for
    channels    channels of the pixels

    The encoder of a config is a module that maps its input to features (B, N, width) of all patches, row by row. An
    encoder with a `pooled_width` also has `forward_pooled(pixels)`, which gives one vector for each image, and
    `workload(batch_size)`.
    """

    @property
    def width(self) -> int:
        """Width of the features."""
        raise NotImplementedError

    @property
    def grid_size(self) -> int:
        """Patches along a side of the native image."""
        own: Any = self
        return own.image_size // own.patch_size

    @property
    def pooled_width(self) -> int:
        """Width of the output of `forward_pooled`; 0 if there is none."""
        return 0

    @property
    def num_prefix_tokens(self) -> int:
        """Number of tokens before the patches, such as CLS, that a model can keep."""
        return 0

    @property
    def input_kind(self) -> InputKind:
        """Input of the encoder: views of one size (B, C, H, W), patches of images of any size, or tiles of a canvas."""
        return "views"

    @property
    def normalizes_pixels(self) -> bool:
        """Whether the encoder takes pixels in 0…1 and normalizes them itself."""
        return False

    def check_view(self, view: ImageView) -> None:
        """Raise a `ConfigError` if the encoder cannot take the views of a resolution policy."""


if TYPE_CHECKING:
    AnyEncoderConfig: TypeAlias = Any
else:
    AnyEncoderConfig = make_registered_type(ENCODERS, EncoderConfig, lambda encoder: encoder.Config)


def make_encoder(config: EncoderConfig) -> nn.Module:
    """Build the encoder of a config."""
    return ENCODERS[str(config.__struct_config__.tag)](config)
