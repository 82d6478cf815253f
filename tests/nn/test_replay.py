"""What can be said of a function to be replayed where there is no GPU."""

from typing import NamedTuple

import pytest
import torch

from vitrail.errors import ConfigError
from vitrail.nn.replay import Replayed, recording


class Made(NamedTuple):
    double: torch.Tensor
    table: tuple[torch.Tensor, ...]


def test_rows_that_would_be_cut_are_missed_on_a_cpu_too():
    """A graph is recorded for more numbers than are asked for, and of every tensor the first rows are given: one that
    is no row a number would lose its end, and only there."""
    index = torch.arange(5)
    whole = Replayed(lambda index: Made(2 * index, (index[:, None].expand(-1, 3),)))
    short = Replayed(lambda index: Made(2 * index, (torch.arange(3),)))
    single = Replayed(lambda index: index.sum())
    with recording():
        assert torch.equal(whole(index).double, 2 * index)
        for wrong in (short, single):
            with pytest.raises(ConfigError, match="row for each"):
                wrong(index)
