"""Grouped VQ (product quantization): split a vector into groups, each with its own codebook.

Shapes: … any axes, G groups, D width.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.codecs.quantizers.quantizer import Quantizer, QuantizerOutput
from vitrail.codecs.quantizers.residual_vq import to_vq_config
from vitrail.codecs.quantizers.vq import VQ, VQConfig
from vitrail.errors import ConfigError
from vitrail.registry import QUANTIZERS


class GroupedVQConfig(VQConfig, tag="grouped", tag_field="kind"):
    """Config of `GroupedVQ`. `dim` is the width of the whole vector."""

    groups: int = 2

    def __post_init__(self) -> None:
        VQConfig.__post_init__(self)
        if self.groups < 1 or self.dim % self.groups:
            raise ConfigError(
                f"dim {self.dim} does not divide into {self.groups} groups", "set groups to a divisor of dim"
            )


@QUANTIZERS.register("grouped")
class GroupedVQ(Quantizer[GroupedVQConfig]):
    """Grouped vector quantizer with ids (…, G). Losses are means over the groups."""

    Config = GroupedVQConfig

    def __init__(self, config: GroupedVQConfig | None = None, **fields: Any):
        super().__init__(config, **fields)
        c = self.config
        self.dim = c.dim
        self.width = self.dim
        self.vocab_sizes = (c.codebook_size,) * c.groups
        self.parts: Sequence[VQ] = nn.ModuleList(VQ(to_vq_config(c, dim=c.dim // c.groups)) for _ in range(c.groups))  # pyrefly: ignore

    def forward(self, x: Tensor) -> QuantizerOutput:
        self.check_input(x)
        outputs = [part(own) for part, own in zip(self.parts, x.chunk(len(self.parts), -1), strict=True)]
        losses = {name: torch.stack([q.losses[name] for q in outputs]).mean() for name in outputs[0].losses}
        return QuantizerOutput(
            torch.cat([q.codes for q in outputs], -1), torch.stack([q.ids for q in outputs], -1), losses
        )

    def lookup(self, ids: Tensor) -> Tensor:
        self.check_ids(ids)
        return torch.cat([part.lookup(own) for part, own in zip(self.parts, ids.unbind(-1), strict=True)], -1)
