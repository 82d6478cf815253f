"""Residual VQ: each codebook quantizes what the ones before it have left over.

… any axes, G layers, D width
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.codecs.quantizers.base import Quantized, Quantizer, wide
from vitrail.codecs.quantizers.gradients import through
from vitrail.codecs.quantizers.vq import VQ, VQConfig
from vitrail.errors import ConfigError


class ResidualVQConfig(VQConfig, tag="residual", tag_field="kind"):
    layers: int = 4

    def __post_init__(self) -> None:
        VQConfig.__post_init__(self)
        if self.layers < 1:
            raise ConfigError(f"{self.layers} layers quantize nothing", "use at least 1")
        if self.metric != "euclid":
            raise ConfigError("what is left over has no fixed length, so residual VQ has no cosine", "use euclid")


class ResidualVQ(Quantizer[ResidualVQConfig]):
    """ids (…, G). Codes are the sum over the layers; losses too. The gradient passes the whole sum once, not once a
    layer, so that its size does not grow with their number."""

    Config = ResidualVQConfig

    def __init__(self, config: ResidualVQConfig | None = None, **fields: Any):
        super().__init__(config, **fields)
        c = self.config
        self.dim = self.width = c.dim
        self.sizes = (c.codes,) * c.layers
        self.layers: Sequence[VQ] = nn.ModuleList(VQ(plain(c)) for _ in range(c.layers))  # pyrefly: ignore

    def forward(self, x: Tensor) -> Quantized:
        self.check(x)
        z = wide(x)
        left, codes, ids, losses = z, torch.zeros_like(z), [], {}
        for layer in self.layers:
            _, hard, chosen, own = layer.choose(left)
            codes, left = codes + hard, left - hard.detach()
            ids.append(chosen)
            losses = {name: losses.get(name, 0) + value for name, value in own.items()}
        return Quantized(through(z, codes, self.config.through).to(x.dtype), torch.stack(ids, -1), losses)

    def lookup(self, ids: Tensor) -> Tensor:
        self.check_ids(ids)
        codes = torch.zeros((), device=ids.device)
        for layer, own in zip(self.layers, ids.unbind(-1), strict=True):
            codes = codes + wide(layer.lookup(own))
        return codes


def plain(config: VQConfig, **changes: Any) -> VQConfig:
    """The fields that a VQ has, of a config that has more."""
    return VQConfig(**{name: getattr(config, name) for name in VQConfig.__struct_fields__}).with_(**changes)
