"""Continuous latents behind the quantizer interface: unchanged (AE), or sampled from a normal distribution (KL).

Shapes: … any axes, D width of the latent.
"""

from typing import Any

import torch
from torch import Tensor

from vitrail.codecs.quantizers.quantizer import C, Quantizer, QuantizerOutput, upcast
from vitrail.config import Config, PositiveInt
from vitrail.errors import ConfigError
from vitrail.registry import QUANTIZERS

LOG_VARIANCE_RANGE = -30.0, 20.0  # range of log variances without overflow and underflow


class IdentityQuantizerConfig(Config, tag="continuous", tag_field="kind"):
    dim: PositiveInt


class ContinuousQuantizer(Quantizer[C]):
    """Base class of quantizers with continuous codes and no ids."""

    def lookup(self, ids: Tensor) -> Tensor:
        raise ConfigError(f"{type(self).__name__} has continuous codes and no ids", "use the codes")

    def split_ids(self, ids: Tensor, num_groups: int) -> Tensor:
        return self.lookup(ids)

    def join_ids(self, parts: Tensor) -> Tensor:
        return self.lookup(parts)


@QUANTIZERS.register("continuous")
class IdentityQuantizer(ContinuousQuantizer[IdentityQuantizerConfig]):
    """Identity: codes are the input; there are no ids and no losses."""

    Config = IdentityQuantizerConfig

    def __init__(self, config: IdentityQuantizerConfig | None = None, **fields: Any):
        super().__init__(config, **fields)
        self.dim = self.config.dim
        self.width = self.dim

    def forward(self, x: Tensor) -> QuantizerOutput:
        self.check_input(x)
        return QuantizerOutput(x, None, {})


class KLConfig(Config, tag="kl", tag_field="kind"):
    width: PositiveInt


@QUANTIZERS.register("kl")
class KL(ContinuousQuantizer[KLConfig]):
    """Gaussian latent: takes a mean and a log variance (…, 2D), returns a sample in training and else the mean (…, D).

    Loss: `kl`, the divergence from the standard normal distribution, in nats for each vector.
    """

    Config = KLConfig

    def __init__(self, config: KLConfig | None = None, **fields: Any):
        super().__init__(config, **fields)
        self.width = self.config.width
        self.dim = 2 * self.width

    def forward(self, x: Tensor) -> QuantizerOutput:
        self.check_input(x)
        mean, log = upcast(x).chunk(2, -1)
        log = log.clamp(*LOG_VARIANCE_RANGE)
        kl = (mean.square() + log.exp() - 1 - log).sum() / (2 * max(mean[..., 0].numel(), 1))
        codes = mean + (log / 2).exp() * torch.randn_like(mean) if self.training else mean
        return QuantizerOutput(codes.to(x.dtype), None, {"kl": kl})
