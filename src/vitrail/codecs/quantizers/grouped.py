"""Grouped VQ: a vector is cut into groups, each with a codebook of its own (product quantization).

… any axes, G groups, D width
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.codecs.quantizers.base import Quantized, Quantizer
from vitrail.codecs.quantizers.residual import plain
from vitrail.codecs.quantizers.vq import VQ, VQConfig
from vitrail.errors import ConfigError


class GroupedVQConfig(VQConfig, tag="grouped", tag_field="kind"):
    """`dim` is the width of the whole vector."""

    groups: int = 2

    def __post_init__(self) -> None:
        VQConfig.__post_init__(self)
        if self.groups < 1 or self.dim % self.groups:
            raise ConfigError(
                f"{self.dim} numbers cannot be cut into {self.groups} equal groups", "choose a divisor of dim"
            )


class GroupedVQ(Quantizer[GroupedVQConfig]):
    """ids (…, G). Losses are means over the groups, as they are over the numbers of a vector."""

    Config = GroupedVQConfig

    def __init__(self, config: GroupedVQConfig | None = None, **fields: Any):
        super().__init__(config, **fields)
        c = self.config
        self.dim = self.width = c.dim
        self.sizes = (c.codes,) * c.groups
        self.parts: Sequence[VQ] = nn.ModuleList(VQ(plain(c, dim=c.dim // c.groups)) for _ in range(c.groups))  # pyrefly: ignore

    def forward(self, x: Tensor) -> Quantized:
        self.check(x)
        found = [part(own) for part, own in zip(self.parts, x.chunk(len(self.parts), -1), strict=True)]
        losses = {name: torch.stack([q.losses[name] for q in found]).mean() for name in found[0].losses}
        return Quantized(torch.cat([q.codes for q in found], -1), torch.stack([q.ids for q in found], -1), losses)

    def lookup(self, ids: Tensor) -> Tensor:
        self.check_ids(ids)
        return torch.cat([part.lookup(own) for part, own in zip(self.parts, ids.unbind(-1), strict=True)], -1)
