"""The pictures of a batch, which is sample numbers by the name of their source.

B pictures, H, W pixels, S side
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vitrail.data.views import ViewsConfig, views
from vitrail.train.task import Batch


def size(batch: Batch) -> int:
    return sum(len(index) for index in batch.values())


@torch.no_grad()
def viewed(batch: Batch, sources: Mapping[str, Any], how: Mapping[str, ViewsConfig]) -> Tensor:
    """(B, 3, S, S) in −1 … 1, each source's pictures viewed in its own way"""
    return torch.cat([views(sources[name].pixels(index), how[name]) for name, index in batch.items()])
