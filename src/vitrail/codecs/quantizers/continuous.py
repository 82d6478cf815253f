"""Latents that are not quantized, behind the same interface: as they are (AE), or drawn from a normal law (KL).

… any axes, D width of the latent
"""

from typing import Any

import torch
from torch import Tensor

from vitrail.codecs.quantizers.base import C, Quantized, Quantizer, wide
from vitrail.config import Config
from vitrail.errors import ConfigError

LOGS = -30.0, 20.0  # of the variance: beyond them it over- or underflows


class ContinuousConfig(Config, tag="continuous", tag_field="kind"):
    dim: int

    def __post_init__(self) -> None:
        if self.dim < 1:
            raise ConfigError(f"a latent of width {self.dim} is empty")


class Unquantized(Quantizer[C]):
    def lookup(self, ids: Tensor) -> Tensor:
        raise ConfigError(f"{type(self).__name__} has no ids: its codes are continuous", "keep the codes themselves")

    def split(self, ids: Tensor, groups: int) -> Tensor:
        return self.lookup(ids)

    def join(self, parts: Tensor) -> Tensor:
        return self.lookup(parts)


class Continuous(Unquantized[ContinuousConfig]):
    """Codes are the input; there are no ids and no losses."""

    Config = ContinuousConfig

    def __init__(self, config: ContinuousConfig | None = None, **fields: Any):
        super().__init__(config, **fields)
        self.dim = self.width = self.config.dim

    def forward(self, x: Tensor) -> Quantized:
        self.check(x)
        return Quantized(x, None, {})


class KLConfig(Config, tag="kl", tag_field="kind"):
    width: int

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ConfigError(f"a latent of width {self.width} is empty")


class KL(Unquantized[KLConfig]):
    """Reads a mean and the logarithm of a variance (…, 2D), gives a sample while it trains and else the mean (…, D).

    Loss: `kl`, to the standard normal distribution, in nats a vector.
    """

    Config = KLConfig

    def __init__(self, config: KLConfig | None = None, **fields: Any):
        super().__init__(config, **fields)
        self.width = self.config.width
        self.dim = 2 * self.width

    def forward(self, x: Tensor) -> Quantized:
        self.check(x)
        mean, log = wide(x).chunk(2, -1)
        log = log.clamp(*LOGS)
        kl = (mean.square() + log.exp() - 1 - log).sum() / (2 * max(mean[..., 0].numel(), 1))
        codes = mean + (log / 2).exp() * torch.randn_like(mean) if self.training else mean
        return Quantized(codes.to(x.dtype), None, {"kl": kl})
