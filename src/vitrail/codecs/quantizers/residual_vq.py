"""Residual VQ: each codebook quantizes the residual of the ones before.

Shapes: … any axes, G layers, D width.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.codecs.quantizers.gradient_estimators import pass_gradient
from vitrail.codecs.quantizers.quantizer import Quantizer, QuantizerOutput, upcast
from vitrail.codecs.quantizers.vq import VQ, VQConfig
from vitrail.config import LayerCount
from vitrail.errors import ConfigError
from vitrail.registry import QUANTIZERS


class ResidualVQConfig(VQConfig, tag="residual", tag_field="kind"):
    layers: LayerCount = 4

    def __post_init__(self) -> None:
        VQConfig.__post_init__(self)
        if self.metric != "euclid":
            raise ConfigError(f"residual VQ does not support metric {self.metric!r}", 'use "euclid"')


@QUANTIZERS.register("residual")
class ResidualVQ(Quantizer[ResidualVQConfig]):
    """Residual vector quantizer with ids (…, G). Codes and losses are sums over the layers.

    Gradients pass the total sum once, not once for each layer, so their size does not grow with the number of layers.
    """

    Config = ResidualVQConfig

    def __init__(self, config: ResidualVQConfig | None = None, **fields: Any):
        super().__init__(config, **fields)
        c = self.config
        self.dim = c.dim
        self.width = self.dim
        self.vocab_sizes = (c.codebook_size,) * c.layers
        self.layers: Sequence[VQ] = nn.ModuleList(VQ(to_vq_config(c)) for _ in range(c.layers))  # pyrefly: ignore

    def forward(self, x: Tensor) -> QuantizerOutput:
        self.check_input(x)
        z = upcast(x)
        residual, codes, ids, losses = z, torch.zeros_like(z), [], {}
        for layer in self.layers:
            _, hard, layer_ids, own = layer.assign_codes(residual)
            codes, residual = codes + hard, residual - hard.detach()
            ids.append(layer_ids)
            losses = {name: losses.get(name, 0) + value for name, value in own.items()}
        return QuantizerOutput(
            pass_gradient(z, codes, self.config.gradient_estimator).to(x.dtype), torch.stack(ids, -1), losses
        )

    def lookup(self, ids: Tensor) -> Tensor:
        self.check_ids(ids)
        codes = torch.zeros((), device=ids.device)
        for layer, own in zip(self.layers, ids.unbind(-1), strict=True):
            codes = codes + upcast(layer.lookup(own))
        return codes


def to_vq_config(config: VQConfig, **changes: Any) -> VQConfig:
    """Reduce a subclass config to the fields of `VQConfig`."""
    return VQConfig(**{name: getattr(config, name) for name in VQConfig.__struct_fields__}).replace(**changes)
