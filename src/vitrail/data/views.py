"""Views of a picture, made where it lies: cut out, turned, repainted, blurred, laid over some background.

All random numbers come from torch's own generator, which the trainer sets at every step, so a second call gives another
view of the same picture, and a run that goes on makes the views that it would have made.

B pictures, C channels (red, green, blue and perhaps opacity), h, w pixels of a picture, H, W of a view
"""

import math
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.config import Config
from vitrail.errors import ConfigError, ImageError


class ViewsConfig(Config):
    """Nothing is changed unless it is said.

    side      of a view; that of the picture unless given
    area      the smallest and the largest share of the picture that a view shows; above 1 it stands in empty space
    stretch   the most that one side is cut longer than the other: 1.33 is 3 : 4 … 4 : 3, or less where a view would not
              lie inside the picture
    shift     how far a view lies off the middle, at most, as a share of the picture's side. A view of another area than
              the picture's stays inside it, or has all of it inside (0.5 reaches every such place)
    turn      degrees, either way
    mirror    chance
    gamma     the least and the largest u, where colours in 0…1 are raised to e^u: below 0 middle tones get lighter
    colour    how far brightness, contrast, saturation and (a quarter as far) hue go astray
    repaint   chance of colours mixed anew, in which only shape is left to go by
    grey      chance
    blur      chance
    focus     the least and the largest f: what a picture has more than its 3 × 3 blur counts 1 + f times, so that below
              0 it is softer, at −1 the blur itself, and above 0 sharper
    noise     the strongest, where 1 is all of black to white
    erase     chance that a patch of at most a quarter of the view is one colour
    ground    chance that what is transparent shows another background than white
    """

    side: int | None = None
    area: tuple[float, float] = (1.0, 1.0)
    stretch: float = 1.0
    shift: float = 0.0
    turn: float = 0.0
    mirror: float = 0.0
    gamma: tuple[float, float] = (0.0, 0.0)
    colour: float = 0.0
    repaint: float = 0.0
    grey: float = 0.0
    blur: float = 0.0
    focus: tuple[float, float] = (0.0, 0.0)
    noise: float = 0.0
    erase: float = 0.0
    ground: float = 0.0

    def __post_init__(self) -> None:
        if self.side is not None and self.side < 1:
            raise ConfigError(f"views of {self.side} pixels", "give at least 1")
        if not 0 < self.area[0] <= self.area[1] <= 4:
            raise ConfigError(f"views of {self.area[0]:g} … {self.area[1]:g} of a picture", "give 0 < least ≤ most ≤ 4")
        if not 1 <= self.stretch <= 4:
            raise ConfigError(f"views stretched by {self.stretch:g}", "give 1 … 4")
        if not -2 <= self.gamma[0] <= self.gamma[1] <= 2:
            raise ConfigError(f"gamma = {self.gamma[0]:g} … {self.gamma[1]:g}", "give −2 ≤ least ≤ most ≤ 2")
        if not -1 <= self.focus[0] <= self.focus[1] <= 2:
            raise ConfigError(f"focus = {self.focus[0]:g} … {self.focus[1]:g}", "give −1 ≤ least ≤ most ≤ 2")
        for name in ("mirror", "repaint", "grey", "blur", "erase", "ground"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} is a chance of {getattr(self, name):g}", "give 0 … 1")
        for name, most in (("shift", 1), ("turn", 180), ("colour", 1), ("noise", 1)):
            if not 0 <= getattr(self, name) <= most:
                raise ConfigError(f"{name} = {getattr(self, name):g}", f"give 0 … {most}")


PLAIN = ViewsConfig()


def views(pixels: Tensor, config: ViewsConfig = PLAIN, size: tuple[int, int] | None = None) -> Tensor:
    """uint8 (B, 3 or 4, h, w) → float32 (B, 3, H, W) in −1…1, a view of each: of `size`, or square. For the latter what
    is not square is squashed first, as all pictures are that our towers see."""
    if pixels.dtype != torch.uint8 or pixels.ndim != 4 or pixels.shape[1] not in (3, 4):
        raise ImageError(
            f"views are made of uint8 (B, 3 or 4, h, w), not {pixels.dtype} {tuple(pixels.shape)}",
            "give red, green, blue and perhaps opacity",
        )
    x = pixels / 255
    if config.gamma != (0.0, 0.0):
        x = torch.cat([_bent(x[:, :3], config), x[:, 3:]], 1)
    if size is None and x.shape[2] != x.shape[3]:
        x = F.interpolate(x, (max(x.shape[2:]),) * 2, mode="bilinear")
    if pixels.shape[1] == 4:  # colours of what is transparent must not bleed into what is not
        x = torch.cat([x[:, :3] * x[:, 3:], x[:, 3:]], 1)
    side = config.side or x.shape[-1]
    x = _placed(x, config, size or (side, side))
    if pixels.shape[1] == 4:
        x = x[:, :3] + (1 - x[:, 3:]) * _grounds(x, config)
    if config.colour or config.grey or config.repaint:
        x = _painted(x, config)
    if config.blur:
        x = _blurred(x, config)
    if config.focus != (0.0, 0.0):
        x = _focused(x, config)
    if config.erase:
        x = _erased(x, config)
    if config.noise:
        x = x + config.noise * torch.rand(len(x), 1, 1, 1, device=x.device) * torch.randn_like(x)
    return (x * 2 - 1).clamp(-1, 1)


def _placed(x: Tensor, config: ViewsConfig, size: tuple[int, int]) -> Tensor:
    """(B, C, h, w) → (B, C, H, W): one affine map a picture"""
    (B, C, h, w), (H, W), device = x.shape, size, x.device
    moved = config.area != (1.0, 1.0) or config.stretch > 1 or config.shift or config.turn
    if not moved:
        if config.mirror:
            x = torch.where(_hits(B, config.mirror, device), x.flip(-1), x)
        return x if (h, w) == size else F.interpolate(x, size, mode="bilinear", antialias=True)
    area, ratio, turn, mirror = torch.rand(4, B, device=device)
    part = (config.area[0] + (config.area[1] - config.area[0]) * area).sqrt()
    ratio = torch.exp((ratio - 0.5) * math.log(config.stretch))  # √ of how much wider than high
    if config.area != (1.0, 1.0) and config.area[1] <= 1:  # what is cut out lies inside
        ratio = ratio.clamp(part, 1 / part)
    wide, high = part * ratio, part / ratio
    room = (1 - torch.stack([wide, high], 1)).abs() / 2  # how far it can go without leaving an edge
    reach = config.shift if config.area == (1.0, 1.0) else room.clamp(max=config.shift)
    middle = (torch.rand(B, 2, device=device) * 2 - 1) * reach * 2  # in −1…1 of the picture
    angle = (turn * 2 - 1) * math.radians(config.turn)
    sign = torch.where(mirror < config.mirror, -1.0, 1.0)
    cos, sin = angle.cos(), angle.sin()
    theta = torch.stack(
        [
            torch.stack([wide * cos * sign, -high * sin * (H / W), middle[:, 0]], 1),
            torch.stack([wide * sin * sign * (W / H), high * cos, middle[:, 1]], 1),
        ],
        1,
    )  # (B, 2, 3), in −1…1 of either side
    edge = "zeros" if C == 4 else "reflection"  # beyond a drawing is nothing, beyond a photograph more of the like
    # Pixels of which the closest view has two each: of more, some would go unseen.
    enough = [min(own, math.ceil(2 * n / math.sqrt(config.area[0]))) for own, n in zip((h, w), size, strict=True)]
    if enough != [h, w]:
        x = F.interpolate(x, enough, mode="bilinear", antialias=True)
    grid = F.affine_grid(theta, [B, C, H, W], align_corners=False)
    return F.grid_sample(x, grid, padding_mode=edge, align_corners=False)


def _bent(x: Tensor, config: ViewsConfig) -> Tensor:
    """Black and white stay, and what was darker stays so"""
    least, most = config.gamma
    return x ** torch.exp(least + (most - least) * torch.rand(len(x), 1, 1, 1, device=x.device))


def _grounds(x: Tensor, config: ViewsConfig) -> Tensor:
    """(B, 3, H, W): white, one colour, or two that run into each other"""
    (B, _, H, W), device = x.shape, x.device
    if not config.ground:
        return torch.ones(1, device=device)
    colours = torch.rand(2, B, 3, 1, 1, device=device)
    angle = torch.rand(B, 1, 1, 1, device=device) * 2 * math.pi
    down, across = (torch.linspace(-0.5, 0.5, n, device=device) for n in (H, W))
    along = (down[:, None] * angle.sin() + across * angle.cos() + 0.5).clamp(0, 1)  # (B, 1, H, W)
    plain = _hits(B, 0.5, device)
    other = torch.where(plain, colours[0], torch.lerp(colours[0], colours[1], along))
    return torch.where(_hits(B, config.ground, device), other, 1.0)


# Luma and two axes of hue: turning the two leaves brightness as it is.
_YIQ = torch.tensor([[0.299, 0.587, 0.114], [0.5959, -0.2746, -0.3213], [0.2115, -0.5227, 0.3112]])

_RGB = torch.linalg.inv(_YIQ)


@cache  # a host that sends something to a GPU waits until all before it is done there
def _kept(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return _YIQ.to(device, dtype), _RGB.to(device, dtype)


def colour_map(saturation: Tensor, turn: Tensor) -> Tensor:
    """(B,) each → (B, 3, 3): what colours, as they lie about grey, are multiplied by, so that their hue is turned"""
    cos, sin, zero = saturation * turn.cos(), saturation * turn.sin(), torch.zeros_like(turn)
    turned = torch.stack([torch.ones_like(zero), zero, zero, zero, cos, -sin, zero, sin, cos], 1).view(-1, 3, 3)
    # A compiler looks through a cache.
    there, back = (_YIQ.to(turn), _RGB.to(turn)) if torch.compiler.is_compiling() else _kept(turn.device, turn.dtype)
    return back @ turned @ there


def _painted(x: Tensor, config: ViewsConfig) -> Tensor:
    """One 3 × 3 matrix and one offset a picture"""
    B, device, far = len(x), x.device, config.colour
    bright, contrast, saturation, hue = 1 + (torch.rand(4, B, device=device) * 2 - 1) * far
    if config.grey:
        saturation = saturation * ~_hits(B, config.grey, device).flatten()
    matrix = colour_map(saturation, (hue - 1) * math.pi / 4)  # (B, 3, 3)
    if config.repaint:
        mixture = torch.randn(B, 3, 3, device=device)
        mixture = mixture / mixture.abs().sum(2, keepdim=True)
        matrix = torch.where(_hits(B, config.repaint, device).view(B, 1, 1), mixture, matrix)
    matrix = matrix * contrast.view(B, 1, 1)
    offset = 0.5 * bright.view(B, 1, 1, 1)  # brightness moves the middle that contrast stretches about
    return (torch.einsum("bij,bjhw->bihw", matrix, x - 0.5) + offset).clamp(0, 1)


def _blurred(x: Tensor, config: ViewsConfig) -> Tensor:
    """By a Gaussian of up to a sixteenth of the shorter side"""
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
    return torch.where(_hits(B, config.blur, device), soft, x)


def _focused(x: Tensor, config: ViewsConfig) -> Tensor:
    """Softer or sharper, by a binomial blur of three pixels each way"""
    least, most = config.focus
    far = least + (most - least) * torch.rand(len(x), 1, 1, 1, device=x.device)
    soft = F.pad(x, [1] * 4, mode="replicate")
    for axis in (2, 3):
        n = soft.shape[axis] - 2
        soft = (soft.narrow(axis, 0, n) + 2 * soft.narrow(axis, 1, n) + soft.narrow(axis, 2, n)) / 4
    return (x + far * (x - soft)).clamp(0, 1)


def _erased(x: Tensor, config: ViewsConfig) -> Tensor:
    (B, _, *size), device = x.shape, x.device
    share, middle = 0.1 + 0.4 * torch.rand(B, 2, 1, device=device), torch.rand(B, 2, 1, device=device)
    rows, columns = (
        (torch.arange(n, device=device) + 0.5 - middle[:, axis] * n).abs() < share[:, axis] * n / 2  # (B, n)
        for axis, n in enumerate(size)
    )
    patch = (rows[:, :, None] & columns[:, None])[:, None]  # (B, 1, H, W)
    return torch.where(patch & _hits(B, config.erase, device), torch.rand(B, 3, 1, 1, device=device), x)


def _hits(B: int, chance: float, device: torch.device) -> Tensor:
    """(B, 1, 1, 1) whether it happens"""
    return torch.rand(B, 1, 1, 1, device=device) < chance
