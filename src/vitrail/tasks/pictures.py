"""The pictures of a batch, which is sample numbers by the name of their source.

B pictures, H, W pixels
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
def viewed(
    batch: Batch, sources: Mapping[str, Any], how: Mapping[str, ViewsConfig], size: tuple[int, int] | None = None
) -> Tensor:
    """(B, 3, H, W) in −1 … 1, each source's pictures viewed in its own way; square, unless a `size` is given"""
    return torch.cat([views(sources[name].pixels(index), how[name], size) for name, index in batch.items()])
