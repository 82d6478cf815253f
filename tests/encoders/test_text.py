"""Text towers: where they pool, what they refuse, what they cost. Agreement with the field is in tests/hub."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from helpers import randomize
from vitrail.encoders import TextConfig, TextTower
from vitrail.errors import ConfigError, TextError
from vitrail.nn import AttentionConfig, BlockConfig, PlainConfig, Work, cost

BLOCK = BlockConfig(width=16, attention=AttentionConfig(heads=2, bias="all"), mlp=PlainConfig(hidden=20))
SIGLIP = {"causal": False, "pool": "last", "head": 10}


def tower(**more) -> TextTower:
    settings = {"vocab": 50, "layers": 2, "block": BLOCK, "context": 9, **more}
    if "pool" not in settings:
        settings["eos"] = 7
    return randomize(TextTower(TextConfig(**settings))).eval()


def test_configs_are_plain_data():
    for model in (tower(), tower(**SIGLIP)):
        assert TextConfig.read(model.config.plain()) == model.config


def test_pools_at_the_first_end():
    model = tower()
    ids = torch.tensor([[3, 9, 7, 7, 7], [7, 1, 2, 3, 4]])
    states = model(ids)
    assert torch.equal(model.pool(ids), torch.stack([states[0, 2], states[1, 0]]))
    # What follows the end is never seen.
    assert torch.allclose(model.pool(torch.tensor([[3, 9, 7, 1, 2]]))[0], model.pool(ids)[0])


def test_pools_at_the_largest_id():
    model, ids = tower(pool="largest"), torch.tensor([[3, 49, 7, 49], [4, 1, 2, 3]])
    states = model(ids)
    assert torch.equal(model.pool(ids), torch.stack([states[0, 1], states[1, 0]]))


def test_pools_at_the_last_token():
    model, ids = tower(**SIGLIP), torch.randint(0, 50, (2, 9))
    assert torch.equal(model.pool(ids), model.head(model(ids)[:, -1]))
    assert model.pool(ids).shape == (2, model.config.pooled) == (2, 10)


def test_direction():
    ids = torch.randint(8, 50, (1, 9))
    other = ids.clone()
    other[0, -1] = 1
    causal, both = tower(), tower(**SIGLIP)
    assert torch.allclose(causal(ids)[:, :-1], causal(other)[:, :-1])
    assert not torch.allclose(both(ids)[:, :-1], both(other)[:, :-1])


def test_refusals():
    with pytest.raises(TextError, match="10 tokens do not fit"):
        tower()(torch.zeros(1, 10, dtype=torch.long))
    with pytest.raises(TextError, match="text 1 has no end token"):
        tower().pool(torch.tensor([[7, 1], [1, 2]]))
    with pytest.raises(ConfigError, match="eos"):
        TextConfig(vocab=5, layers=1, block=BLOCK)
    with pytest.raises(ConfigError, match="self, mlp"):
        tower(block=BLOCK.with_(chain=("cross", "mlp")))


@pytest.mark.parametrize("settings", [{}, SIGLIP], ids=["clip", "siglip"])
def test_costs(settings):
    with torch.device("meta"):
        model, ids = TextTower(tower(**settings).config), torch.empty(3, 9, dtype=torch.long)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(ids)
    # torch counts every pair, those that a causal tower never looks at included.
    assert cost.flops(model, Work.full(9, batch=3)) == counter.get_total_flops()
    assert model.work(3).pairs == 3 * (81 if settings else 45)
    held = cost.bytes(model, model.work(3))
    assert held.weights == sum(p.numel() * 4 for p in model.parameters())
    assert held.cache == 0 and held.read < held.weights  # of the vocabulary only what is looked up
