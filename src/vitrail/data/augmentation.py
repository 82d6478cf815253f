"""Random image augmentation on the device of the images: crop, rotation, colour, blur, erasing, background.

All random numbers come from torch's default generator. The trainer seeds it at every step, so a second call gives
another augmentation, and a resumed run repeats the same ones.

Shapes: B images, C channels (RGB and optionally opacity), h and w input pixels, H and W output pixels.
"""

import math
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.config import Config, Fraction, PositiveInt
from vitrail.errors import ConfigError, ImageError


class AugmentationConfig(Config):
    """Augmentation settings. The defaults change nothing.

    image_size             size of the output; that of the input if not given
    crop_area              least and largest fraction of the input area that the crop covers; above 1 the image is
                           padded with empty space
    max_aspect_ratio       largest aspect ratio of the crop: 1.33 is 3 : 4 … 4 : 3; less where the crop would not fit
    max_shift              largest offset of the crop's centre, as a fraction of the image side. A crop of another area
                           than the image stays inside it, or contains all of it (0.5 reaches every such place)
    max_rotation           degrees, either way
    flip_probability       probability of a horizontal flip
    log_gamma              least and largest u; colours in 0…1 are raised to e^u, so u < 0 brightens the middle tones
    colour_jitter          strength of random brightness, contrast, saturation and (a quarter as strong) hue
    recolour_probability   probability of randomly mixed colour channels, which leaves only shapes to learn from
    grayscale_probability  probability of grayscale
    blur_probability       probability of a Gaussian blur
    sharpness              least and largest f; the difference to a 3 × 3 blur is scaled by 1 + f, so −1 is the blur
                           itself, f < 0 is softer and f > 0 is sharper
    max_noise              largest standard deviation of the noise, where 1 is the range from black to white
    erase_probability      probability that a patch of up to a quarter of the image is replaced by one colour
    background_probability  probability that transparent pixels get another background than white
    """

    image_size: PositiveInt | None = None
    crop_area: tuple[float, float] = (1.0, 1.0)
    max_aspect_ratio: float = 1.0
    max_shift: Fraction = 0.0
    max_rotation: float = 0.0
    flip_probability: Fraction = 0.0
    log_gamma: tuple[float, float] = (0.0, 0.0)
    colour_jitter: Fraction = 0.0
    recolour_probability: Fraction = 0.0
    grayscale_probability: Fraction = 0.0
    blur_probability: Fraction = 0.0
    sharpness: tuple[float, float] = (0.0, 0.0)
    max_noise: Fraction = 0.0
    erase_probability: Fraction = 0.0
    background_probability: Fraction = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.crop_area[0] <= self.crop_area[1] <= 4:
            raise ConfigError(
                f"augmentation.crop_area is {self.crop_area[0]:g} … {self.crop_area[1]:g}",
                "give 0 < least ≤ largest ≤ 4",
            )
        if not 1 <= self.max_aspect_ratio <= 4:
            raise ConfigError(f"augmentation.max_aspect_ratio is {self.max_aspect_ratio:g}", "give 1 … 4")
        if not -2 <= self.log_gamma[0] <= self.log_gamma[1] <= 2:
            raise ConfigError(
                f"augmentation.log_gamma is {self.log_gamma[0]:g} … {self.log_gamma[1]:g}",
                "give −2 ≤ least ≤ largest ≤ 2",
            )
        if not -1 <= self.sharpness[0] <= self.sharpness[1] <= 2:
            raise ConfigError(
                f"augmentation.sharpness is {self.sharpness[0]:g} … {self.sharpness[1]:g}",
                "give −1 ≤ least ≤ largest ≤ 2",
            )
        if not 0 <= self.max_rotation <= 180:
            raise ConfigError(f"augmentation.max_rotation is {self.max_rotation:g}", "give 0 … 180")


NO_AUGMENTATION = AugmentationConfig()


def augment_images(
    pixels: Tensor, config: AugmentationConfig = NO_AUGMENTATION, size: tuple[int, int] | None = None
) -> Tensor:
    """Augment images: uint8 (B, 3 or 4, h, w) → float32 (B, 3, H, W) in −1…1.

    The output has `size` (height, width), or is a square of the configured size. For a square, images that are not
    square are first resized to one.
    """
    if pixels.dtype != torch.uint8 or pixels.ndim != 4 or pixels.shape[1] not in (3, 4):
        raise ImageError(
            f"images are {pixels.dtype} {tuple(pixels.shape)}", "give uint8 (B, 3 or 4, h, w): RGB or RGB and opacity"
        )
    x = pixels / 255
    if config.log_gamma != (0.0, 0.0):
        x = torch.cat([_apply_gamma(x[:, :3], config), x[:, 3:]], 1)
    if size is None and x.shape[2] != x.shape[3]:
        x = F.interpolate(x, (max(x.shape[2:]),) * 2, mode="bilinear")
    if pixels.shape[1] == 4:  # premultiply, so that colours of transparent pixels do not bleed into opaque ones
        x = torch.cat([x[:, :3] * x[:, 3:], x[:, 3:]], 1)
    side = config.image_size or x.shape[-1]
    x = _apply_crop(x, config, size or (side, side))
    if pixels.shape[1] == 4:
        x = x[:, :3] + (1 - x[:, 3:]) * _make_backgrounds(x, config)
    if config.colour_jitter or config.grayscale_probability or config.recolour_probability:
        x = _apply_colour_jitter(x, config)
    if config.blur_probability:
        x = _apply_blur(x, config)
    if config.sharpness != (0.0, 0.0):
        x = _apply_sharpness(x, config)
    if config.erase_probability:
        x = _apply_erasing(x, config)
    if config.max_noise:
        x = x + config.max_noise * torch.rand(len(x), 1, 1, 1, device=x.device) * torch.randn_like(x)
    return (x * 2 - 1).clamp(-1, 1)


def _apply_crop(x: Tensor, config: AugmentationConfig, size: tuple[int, int]) -> Tensor:
    """Crop, rotate and flip (B, C, h, w) to (B, C, H, W) by one affine map for each image."""
    (B, C, h, w), (H, W), device = x.shape, size, x.device
    has_crop = config.crop_area != (1.0, 1.0) or config.max_aspect_ratio > 1 or config.max_shift or config.max_rotation
    if not has_crop:
        if config.flip_probability:
            x = torch.where(_draw_mask(B, config.flip_probability, device), x.flip(-1), x)
        return x if (h, w) == size else F.interpolate(x, size, mode="bilinear", antialias=True)
    area, ratio, turn, mirror = torch.rand(4, B, device=device)
    scale = (config.crop_area[0] + (config.crop_area[1] - config.crop_area[0]) * area).sqrt()
    ratio = torch.exp((ratio - 0.5) * math.log(config.max_aspect_ratio))  # square root of the aspect ratio
    if config.crop_area != (1.0, 1.0) and config.crop_area[1] <= 1:  # the crop lies inside the image
        ratio = ratio.clamp(scale, 1 / scale)
    crop_width, crop_height = scale * ratio, scale / ratio
    margin = (1 - torch.stack([crop_width, crop_height], 1)).abs() / 2  # largest offset that stays inside the image
    limit = config.max_shift if config.crop_area == (1.0, 1.0) else margin.clamp(max=config.max_shift)
    middle = (torch.rand(B, 2, device=device) * 2 - 1) * limit * 2  # in −1…1 of the image
    angle = (turn * 2 - 1) * math.radians(config.max_rotation)
    sign = torch.where(mirror < config.flip_probability, -1.0, 1.0)
    cos, sin = angle.cos(), angle.sin()
    theta = torch.stack(
        [
            torch.stack([crop_width * cos * sign, -crop_height * sin * (H / W), middle[:, 0]], 1),
            torch.stack([crop_width * sin * sign * (W / H), crop_height * cos, middle[:, 1]], 1),
        ],
        1,
    )  # (B, 2, 3), in −1…1 of each side
    edge = "zeros" if C == 4 else "reflection"  # pad drawings with nothing, photographs by reflection
    # Downscale so that the smallest crop reads two input pixels for each output pixel. With more, some would be
    # skipped.
    input_size = [
        min(current, math.ceil(2 * n / math.sqrt(config.crop_area[0]))) for current, n in zip((h, w), size, strict=True)
    ]
    if input_size != [h, w]:
        x = F.interpolate(x, input_size, mode="bilinear", antialias=True)
    grid = F.affine_grid(theta, [B, C, H, W], align_corners=False)
    return F.grid_sample(x, grid, padding_mode=edge, align_corners=False)


def _apply_gamma(x: Tensor, config: AugmentationConfig) -> Tensor:
    """Raise colours to a random power. Black, white and the order of brightness stay."""
    low, high = config.log_gamma
    return x ** torch.exp(low + (high - low) * torch.rand(len(x), 1, 1, 1, device=x.device))


def _make_backgrounds(x: Tensor, config: AugmentationConfig) -> Tensor:
    """Make backgrounds (B, 3, H, W): white, one colour, or a gradient of two."""
    (B, _, H, W), device = x.shape, x.device
    if not config.background_probability:
        return torch.ones(1, device=device)
    colours = torch.rand(2, B, 3, 1, 1, device=device)
    angle = torch.rand(B, 1, 1, 1, device=device) * 2 * math.pi
    vertical, horizontal = (torch.linspace(-0.5, 0.5, n, device=device) for n in (H, W))
    gradient = (vertical[:, None] * angle.sin() + horizontal * angle.cos() + 0.5).clamp(0, 1)  # (B, 1, H, W)
    is_plain = _draw_mask(B, 0.5, device)
    background = torch.where(is_plain, colours[0], torch.lerp(colours[0], colours[1], gradient))
    return torch.where(_draw_mask(B, config.background_probability, device), background, 1.0)


# Luma and two chroma axes. A rotation of the two keeps brightness.
_YIQ = torch.tensor([[0.299, 0.587, 0.114], [0.5959, -0.2746, -0.3213], [0.2115, -0.5227, 0.3112]])

_RGB = torch.linalg.inv(_YIQ)


@cache  # a host-to-device copy waits for all earlier work on the device
def _matrices_on(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Colour matrices on a device, cached."""
    return _YIQ.to(device, dtype), _RGB.to(device, dtype)


def build_hue_saturation_matrix(saturation: Tensor, hue_rotation: Tensor) -> Tensor:
    """Return (B, 3, 3) matrices that scale saturation (B,) and rotate hue (B,) of colours relative to grey."""
    cos, sin, zero = saturation * hue_rotation.cos(), saturation * hue_rotation.sin(), torch.zeros_like(hue_rotation)
    rotation = torch.stack([torch.ones_like(zero), zero, zero, zero, cos, -sin, zero, sin, cos], 1).view(-1, 3, 3)
    # torch.compile cannot trace the cache.
    to_yiq, to_rgb = (
        (_YIQ.to(hue_rotation), _RGB.to(hue_rotation))
        if torch.compiler.is_compiling()
        else _matrices_on(hue_rotation.device, hue_rotation.dtype)
    )
    return to_rgb @ rotation @ to_yiq


def _apply_colour_jitter(x: Tensor, config: AugmentationConfig) -> Tensor:
    """Apply one 3 × 3 matrix and one offset to each image."""
    B, device, strength = len(x), x.device, config.colour_jitter
    bright, contrast, saturation, hue = 1 + (torch.rand(4, B, device=device) * 2 - 1) * strength
    if config.grayscale_probability:
        saturation = saturation * ~_draw_mask(B, config.grayscale_probability, device).flatten()
    matrix = build_hue_saturation_matrix(saturation, (hue - 1) * math.pi / 4)  # (B, 3, 3)
    if config.recolour_probability:
        mixture = torch.randn(B, 3, 3, device=device)
        mixture = mixture / mixture.abs().sum(2, keepdim=True)
        matrix = torch.where(_draw_mask(B, config.recolour_probability, device).view(B, 1, 1), mixture, matrix)
    matrix = matrix * contrast.view(B, 1, 1)
    offset = 0.5 * bright.view(B, 1, 1, 1)  # brightness moves the midpoint of the contrast change
    return (torch.einsum("bij,bjhw->bihw", matrix, x - 0.5) + offset).clamp(0, 1)


def _apply_blur(x: Tensor, config: AugmentationConfig) -> Tensor:
    """Blur by a Gaussian with a random standard deviation of up to 1/32 of the shorter side."""
    (B, _, H, W), device = x.shape, x.device
    S = min(H, W)
    reach = max(1, min(S // 8, 12))
    sigma = 0.3 + torch.rand(B, 1, device=device) * S / 32
    taps = torch.arange(-reach, reach + 1, device=device)
    kernel = torch.exp(-((taps / sigma) ** 2) / 2)  # (B, taps)
    kernel = (kernel / kernel.sum(1, keepdim=True)).repeat_interleave(3, 0)  # (B · 3, taps)
    flat = F.pad(x, [reach] * 4, mode="replicate").view(1, B * 3, H + 2 * reach, W + 2 * reach)
    flat = F.conv2d(flat, kernel[:, None, :, None], groups=B * 3)
    soft = F.conv2d(flat, kernel[:, None, None, :], groups=B * 3).view(B, 3, H, W)
    return torch.where(_draw_mask(B, config.blur_probability, device), soft, x)


def _apply_sharpness(x: Tensor, config: AugmentationConfig) -> Tensor:
    """Soften or sharpen with a 3 × 3 binomial blur."""
    low, high = config.sharpness
    amount = low + (high - low) * torch.rand(len(x), 1, 1, 1, device=x.device)
    blurred = F.pad(x, [1] * 4, mode="replicate")
    for axis in (2, 3):
        length = blurred.shape[axis] - 2
        blurred = (
            blurred.narrow(axis, 0, length) + 2 * blurred.narrow(axis, 1, length) + blurred.narrow(axis, 2, length)
        ) / 4
    return (x + amount * (x - blurred)).clamp(0, 1)


def _apply_erasing(x: Tensor, config: AugmentationConfig) -> Tensor:
    """Replace a random rectangle by one colour."""
    (B, _, *size), device = x.shape, x.device
    extent, middle = 0.1 + 0.4 * torch.rand(B, 2, 1, device=device), torch.rand(B, 2, 1, device=device)
    rows, columns = (
        (torch.arange(n, device=device) + 0.5 - middle[:, axis] * n).abs() < extent[:, axis] * n / 2  # (B, n)
        for axis, n in enumerate(size)
    )
    patch = (rows[:, :, None] & columns[:, None])[:, None]  # (B, 1, H, W)
    return torch.where(
        patch & _draw_mask(B, config.erase_probability, device), torch.rand(B, 3, 1, 1, device=device), x
    )


def _draw_mask(B: int, probability: float, device: torch.device) -> Tensor:
    """Draw a random mask (B, 1, 1, 1), True with the given probability."""
    return torch.rand(B, 1, 1, 1, device=device) < probability
