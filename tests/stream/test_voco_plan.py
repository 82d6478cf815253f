"""VoCo attention plan: text attends to VoCo tokens and not to the image."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import randomize
from vitrail.errors import ConfigError
from vitrail.nn import AttentionConfig, Block, BlockConfig, GatedMLPConfig, compute_attention
from vitrail.stream.voco_plan import voco_groups, voco_plan

CPU = torch.device("cpu")


def groups(row: str) -> torch.Tensor:
    """Parse a pattern: t text, p image, v VoCo token."""
    one, two = (torch.tensor([[c == letter for c in row]]) for letter in "pv")
    return voco_groups(one, two)


def test_mask():
    assert groups("tppvtt").tolist() == [[0, 1, 1, -1, 0, 0]]
    seen = voco_plan(groups("tppvtt")).mask(6, 6, CPU)[0, 0]
    assert seen.int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 0, 0, 1, 1, 0],
        [1, 0, 0, 1, 1, 1],
    ]


@settings(max_examples=100)
@given(st.lists(st.sampled_from(["t", "tt", "pv", "ppvv", "pppv"]), min_size=1, max_size=6), st.data())
def test_mask_rule(parts, data):
    """Random rows of images and text, in samples or in turns with a common prefix."""
    row = "".join(parts)
    owner = [n for n, part in enumerate(parts) for _ in part]  # whose each token is
    cut = data.draw(st.integers(0, len(row)))
    segments = torch.tensor([[int(n >= cut) for n in range(len(row))]])
    for common in (False, True):
        seen = voco_plan(groups(row), segments, common=common).mask(len(row), len(row), CPU)[0, 0]
        for q in range(len(row)):
            for k in range(len(row)):
                apart = (q >= cut) != (k >= cut) and not (common and k < cut)
                hidden = row[k] == "p" and owner[q] != owner[k]
                assert bool(seen[q, k]) == (k <= q and not apart and not hidden)


def test_plan_type_is_preserved():
    plan = voco_plan(groups("tppvtt"))
    assert torch.equal(plan.to("cpu").mask(6, 6, CPU), plan.mask(6, 6, CPU))
    turns = voco_plan(groups("tppvtt"), torch.tensor([[0, 0, 0, 0, 1, 2]]), common=True)
    assert torch.equal(turns.to("cpu").mask(6, 6, CPU), turns.mask(6, 6, CPU))
    three = plan.expand_rows(3, 6, 6)
    assert torch.equal(three.mask(6, 6, CPU), plan.mask(6, 6, CPU).expand(3, -1, -1, -1))
    with pytest.raises(ConfigError, match="integers"):
        voco_plan(torch.zeros(1, 3))
    q = torch.randn(3, 6, 2, 4)
    assert torch.allclose(compute_attention(q, q, q, plan, "plain"), compute_attention(q, q, q, plan), atol=1e-6)


def test_text_reaches_the_image_through_voco_only():
    """In two layers: without the values of VoCo tokens, no gradient reaches the image."""
    config = BlockConfig(
        width=8, attention=AttentionConfig(heads=2), mlp=GatedMLPConfig(intermediate_size=8), norm="rms"
    )
    blocks = [randomize(Block(config), seed=i) for i in range(2)]

    def reached(kinds: str) -> torch.Tensor:
        x = torch.randn(1, len(kinds), 8, requires_grad=True)
        y, plan = x, voco_plan(groups(kinds))
        for block in blocks:
            y = block(y, plan)
        (grad,) = torch.autograd.grad((y[:, -1] * torch.randn(8)).sum(), x)
        return grad[0].ne(0).any(-1)

    assert reached("tppvt").all()
    assert reached("tpptt").tolist() == [True, False, False, True, True]
