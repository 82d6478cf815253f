"""Text towers: pooling, errors and costs. tests/hub compares them with transformers."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from helpers import randomize
from vitrail.encoders import TextTower, TextTowerConfig
from vitrail.errors import ConfigError, TextError
from vitrail.nn import AttentionConfig, BlockConfig, PlainMLPConfig, Workload, cost

BLOCK = BlockConfig(width=16, attention=AttentionConfig(heads=2, bias="all"), mlp=PlainMLPConfig(intermediate_size=20))
SIGLIP = {"causal": False, "pool": "last", "head_width": 10}


def tower(**more) -> TextTower:
    settings = {"vocab_size": 50, "layers": 2, "block": BLOCK, "context_length": 9, **more}
    if "pool" not in settings:
        settings["eos_token_id"] = 7
    return randomize(TextTower(TextTowerConfig(**settings))).eval()


def test_configs_round_trip():
    for model in (tower(), tower(**SIGLIP)):
        assert TextTowerConfig.from_dict(model.config.to_dict()) == model.config


def test_pools_the_first_end_token():
    model = tower()
    ids = torch.tensor([[3, 9, 7, 7, 7], [7, 1, 2, 3, 4]])
    states = model(ids)
    assert torch.equal(model.forward_pooled(ids), torch.stack([states[0, 2], states[1, 0]]))
    # Tokens after the end have no effect.
    assert torch.allclose(model.forward_pooled(torch.tensor([[3, 9, 7, 1, 2]]))[0], model.forward_pooled(ids)[0])


def test_pools_the_largest_id():
    model, ids = tower(pool="largest"), torch.tensor([[3, 49, 7, 49], [4, 1, 2, 3]])
    states = model(ids)
    assert torch.equal(model.forward_pooled(ids), torch.stack([states[0, 1], states[1, 0]]))


def test_pools_the_last_token():
    model, ids = tower(**SIGLIP), torch.randint(0, 50, (2, 9))
    assert torch.equal(model.forward_pooled(ids), model.head(model(ids)[:, -1]))
    assert model.forward_pooled(ids).shape == (2, model.config.pooled_width) == (2, 10)


def test_causal_and_bidirectional():
    ids = torch.randint(8, 50, (1, 9))
    other = ids.clone()
    other[0, -1] = 1
    causal, both = tower(), tower(**SIGLIP)
    assert torch.allclose(causal(ids)[:, :-1], causal(other)[:, :-1])
    assert not torch.allclose(both(ids)[:, :-1], both(other)[:, :-1])


def test_invalid_inputs_raise():
    with pytest.raises(TextError, match="10 tokens exceed"):
        tower()(torch.zeros(1, 10, dtype=torch.long))
    with pytest.raises(TextError, match="text 1 has no end token"):
        tower().forward_pooled(torch.tensor([[7, 1], [1, 2]]))
    with pytest.raises(ConfigError, match="eos"):
        TextTowerConfig(vocab_size=5, layers=1, block=BLOCK)
    with pytest.raises(ConfigError, match="self, mlp"):
        tower(block=BLOCK.replace(branches=("cross", "mlp")))


@pytest.mark.parametrize("settings", [{}, SIGLIP], ids=["clip", "siglip"])
def test_costs(settings):
    with torch.device("meta"):
        model, ids = TextTower(tower(**settings).config), torch.empty(3, 9, dtype=torch.long)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(ids)
    # torch counts all pairs, also masked ones.
    assert cost.count_flops(model, Workload.full_attention(9, batch_size=3)) == counter.get_total_flops()
    assert model.workload(3).attention_pairs == 3 * (81 if settings else 45)
    held = cost.count_bytes(model, model.workload(3))
    assert held.weights == sum(p.numel() * 4 for p in model.parameters())
    assert held.cache == 0 and held.read < held.weights  # only the looked-up embeddings are read
