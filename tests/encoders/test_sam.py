"""Properties of the SAM encoder. tests/hub compares it with transformers."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from helpers import randomize, relative
from vitrail.encoders import SAM, SAMConfig
from vitrail.encoders.presets import SAM_PRESETS
from vitrail.errors import ConfigError, ImageError
from vitrail.nn import AttentionConfig, BlockConfig, PlainMLPConfig, Workload, cost

BLOCK = BlockConfig(width=16, attention=AttentionConfig(heads=2, bias="all"), mlp=PlainMLPConfig(intermediate_size=20))


def config(**more) -> SAMConfig:
    settings = {
        "layers": 3,
        "block": BLOCK,
        "image_size": 20,
        "patch_size": 4,
        "window_size": 3,
        "full_attention_layers": (1,),
        "out_features": 7,
        **more,
    }
    return SAMConfig(**settings)


def tower(seed=0, **more) -> SAM:
    return randomize(SAM(config(**more)), seed).eval()


def test_config_round_trips():
    assert SAMConfig.from_dict(config().to_dict()) == config()


def test_windows_are_independent_and_full_attention_is_not():
    pixels = torch.randn(1, 3, 20, 20)
    moved = pixels.clone()
    moved[..., :4, :4] += 1.0  # a patch of the first of four windows
    inside, whole = tower(layers=1, full_attention_layers=()), tower(layers=1, full_attention_layers=(0,))
    for model, reach in ((inside, 3), (whole, 5)):
        [before], [after] = model.forward_layers(pixels), model.forward_layers(moved)
        changed = (before - after).abs().amax((0, 3)) > 0
        assert changed[:reach, :reach].all() and changed.sum() == reach**2


def test_relative_positions_equal_the_formula():
    """Scores are q·k / √D plus query terms for relative rows and columns."""
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


def test_images_of_any_size():
    model = tower()
    assert model(torch.randn(2, 3, 12, 28)).shape == (2, 21, 7)
    assert torch.equal(tower(image_size=22)(x := torch.randn(1, 3, 22, 22)), tower(image_size=22)(x[..., :20, :20]))
    with pytest.raises(ImageError, match="21"):
        model(torch.randn(1, 3, 21, 20))


def test_gradients_reach_every_parameter():
    model = tower()
    model(torch.randn(2, 3, 20, 20)).square().sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize(
    "more, why",
    [
        ({"image_size": 3}, "smaller than patch_size"),
        ({"window_size": -1}, r"window_size is -1\n.*at least 0"),
        ({"full_attention_layers": (3,)}, "exceed 3 layers"),
        ({"block": BLOCK.replace(gated=True)}, "no gates"),
        ({"block": BLOCK.replace(branches=("self", "cross", "mlp"))}, "self, mlp"),
    ],
)
def test_invalid_configs_raise(more, why):
    with pytest.raises(ConfigError, match=why):
        config(**more)


@pytest.mark.parametrize(
    "more", [{}, {"window_size": 0}, {"use_relative_positions": False}, {"window_size": 2, "full_attention_layers": ()}]
)
@pytest.mark.parametrize("size", [(20, 20), (12, 36)])
def test_flops_equal_those_counted(more, size):
    model = tower(**more)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(torch.randn(2, 3, *size))
    work = model.workload(2, *size)
    assert cost.count_flops(model, work) == counter.get_total_flops()
    size = sum(p.numel() * 4 for p in model.parameters())
    assert cost.count_bytes(model, work) == cost.MemoryBytes(weights=size, read=size)
    with pytest.raises(ConfigError, match="depends on the grid"):
        cost.count_flops(model, Workload.full_attention(25))


def test_presets_build():
    """Numbers of parameters as in the paper."""
    with torch.device("meta"):
        sizes = {name: sum(p.numel() for p in SAM(row).parameters()) / 1e6 for name, row in SAM_PRESETS.items()}
    assert {name: round(size) for name, size in sizes.items()} == {"sam-b": 90, "sam-l": 308, "sam-h": 637}
