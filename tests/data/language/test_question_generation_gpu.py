"""Questions and answers are the same on a GPU as on a CPU."""

import pytest
import torch

from data.language.question_outputs import everything
from vitrail.data.language import balance_answers


@pytest.mark.gpu
def test_questions_equal_those_on_a_cpu(words, scenes):
    batch = scenes(3, many=500)
    balanced = balance_answers(words, batch)
    for expected, found in zip(
        everything(balanced, batch, 1), everything(balanced.to("cuda"), batch.to("cuda"), 1), strict=True
    ):
        assert torch.equal(expected, found.cpu())
