"""What Segment Anything's tower promises whatever its config. Agreement with the field is in tests/hub."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from helpers import randomize, relative
from vitrail.encoders import SAM, SAMConfig
from vitrail.encoders.presets import SAMS
from vitrail.errors import ConfigError, ImageError
from vitrail.nn import AttentionConfig, BlockConfig, PlainConfig, Work, cost

BLOCK = BlockConfig(width=16, attention=AttentionConfig(heads=2, bias="all"), mlp=PlainConfig(hidden=20))


def config(**more) -> SAMConfig:
    settings = {"layers": 3, "block": BLOCK, "image": 20, "patch": 4, "window": 3, "full": (1,), "gives": 7, **more}
    return SAMConfig(**settings)


def tower(seed=0, **more) -> SAM:
    return randomize(SAM(config(**more)), seed).eval()


def test_config_is_plain_data():
    assert SAMConfig.read(config().plain()) == config()


def test_a_window_sees_itself_alone_and_a_full_block_sees_all():
    pixels = torch.randn(1, 3, 20, 20)
    moved = pixels.clone()
    moved[..., :4, :4] += 1.0  # the first patch: of the four windows, the first
    inside, whole = tower(layers=1, full=()), tower(layers=1, full=(0,))
    for model, reach in ((inside, 3), (whole, 5)):
        [before], [after] = model.states(pixels), model.states(moved)
        changed = (before - after).abs().amax((0, 3)) > 0
        assert changed[:reach, :reach].all() and changed.sum() == reach**2


def test_relative_places_are_what_the_formula_says():
    """Scores are q·k / √D and, of the query as it is, a term for the rows between and one for the columns."""
    model = tower().blocks[1].attention
    x = torch.randn(2, 5, 4, 16)
    q, k, v = (part.view(2, 20, 2, 8) for part in model.qkv(x.flatten(1, 2)).chunk(3, -1))
    rows = torch.nn.functional.interpolate(model.columns.T[None], size=7, mode="linear")[0].T
    scores = torch.zeros(2, 2, 20, 20)
    for i in range(20):
        for j in range(20):
            (y, z), (u, w) = divmod(i, 4), divmod(j, 4)
            near = model.rows[y - u + 4] + rows[z - w + 3]
            scores[:, :, i, j] = (q[:, i] * k[:, j]).sum(-1) / 8**0.5 + q[:, i] @ near
    wanted = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v).flatten(2)
    assert relative(model(x).flatten(1, 2), model.out(wanted)) <= 1e-5


def test_pictures_of_any_size_the_patch_divides():
    model = tower()
    assert model(torch.randn(2, 3, 12, 28)).shape == (2, 21, 7)
    assert torch.equal(tower(image=22)(x := torch.randn(1, 3, 22, 22)), tower(image=22)(x[..., :20, :20]))
    with pytest.raises(ImageError, match="21"):
        model(torch.randn(1, 3, 21, 20))


def test_gradients_reach_every_parameter():
    model = tower()
    model(torch.randn(2, 3, 20, 20)).square().sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize(
    "more, why",
    [
        ({"image": 3}, "no patch"),
        ({"window": -1}, "0 for none"),
        ({"full": (3,)}, "3 blocks"),
        ({"block": BLOCK.with_(gated=True)}, "weighs"),
        ({"block": BLOCK.with_(chain=("self", "cross", "mlp"))}, "self, mlp"),
    ],
)
def test_what_is_refused(more, why):
    with pytest.raises(ConfigError, match=why):
        config(**more)


@pytest.mark.parametrize("more", [{}, {"window": 0}, {"relative": False}, {"window": 2, "full": ()}])
@pytest.mark.parametrize("size", [(20, 20), (12, 36)])
def test_flops_are_those_counted(more, size):
    model = tower(**more)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(torch.randn(2, 3, *size))
    work = model.work(2, *size)
    assert cost.flops(model, work) == counter.get_total_flops()
    size = sum(p.numel() * 4 for p in model.parameters())
    assert cost.bytes(model, work) == cost.Bytes(weights=size, read=size)
    with pytest.raises(ConfigError, match="how patches lie"):
        cost.flops(model, Work.full(25))


def test_every_row_can_be_built():
    """Millions of parameters, as the paper's image towers have them."""
    with torch.device("meta"):
        sizes = {name: sum(p.numel() for p in SAM(row).parameters()) / 1e6 for name, row in SAMS.items()}
    assert {name: round(size) for name, size in sizes.items()} == {"sam-b": 90, "sam-l": 308, "sam-h": 637}
