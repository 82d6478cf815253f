"""Decoder: validation, KV cache against no cache, and costs against torch's counter."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from helpers import randomize, relative
from vitrail.backbones.decoder import Decoder, DecoderConfig
from vitrail.backbones.fusion import DeepStackConfig, DeepStackInputs, PrefixFusionConfig, VisualExpertConfig
from vitrail.errors import ConfigError
from vitrail.nn import (
    AttentionConfig,
    AttentionPlan,
    BlockConfig,
    GatedMLPConfig,
    MoEConfig,
    RotaryConfig,
    Workload,
    attention_plan,
    cost,
)

EXPERTS = MoEConfig(num_experts=5, experts_per_token=2, intermediate_size=12)


def config(mlp=None, kv_heads=4, tied=False, **more) -> DecoderConfig:
    attention = AttentionConfig(heads=4, kv_heads=kv_heads, head_dim=6, qk_norm="rms", bias="qkv")
    block = BlockConfig(width=20, attention=attention, mlp=mlp or GatedMLPConfig(intermediate_size=28), norm="rms")
    return DecoderConfig(
        vocab_size=37, layers=3, block=block, rotary=RotaryConfig(head_dim=6), tie_word_embeddings=tied, **more
    )


KINDS = {
    "dense": config(),
    "grouped": config(kv_heads=2),
    "tied": config(kv_heads=1, tied=True),
    "experts": config(EXPERTS, kv_heads=2),
    "mixed": config(EXPERTS, dense_layers=(0, 2), dense_mlp=GatedMLPConfig(intermediate_size=16)),
}


def decoder(kind: str) -> Decoder:
    return randomize(Decoder(KINDS[kind])).eval()


# ---- configs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rotary": RotaryConfig(head_dim=8)}, "set rotary.head_dim to 6"),
        ({"dense_layers": (3,), "dense_mlp": GatedMLPConfig(intermediate_size=8)}, "do not match 3 layers"),
        ({"dense_layers": (1,)}, "give both"),
        ({"dense_mlp": GatedMLPConfig(intermediate_size=8)}, "or neither"),
        ({"block": config().block.replace(branches=("mlp",))}, "without self-attention"),
    ],
)
def test_invalid_configs_raise(change, message):
    with pytest.raises(ConfigError, match=message):
        config().replace(**change)


def test_dense_layers_have_their_own_mlp():
    model = decoder("mixed")
    kinds = [type(block.branches["mlp"].op).__name__ for block in model.blocks]
    assert kinds == ["GatedMLP", "MoE", "GatedMLP"]


def test_ids_and_embeds_are_exclusive():
    model, ids = decoder("dense"), torch.randint(0, 37, (1, 5))
    with pytest.raises(ConfigError, match="give one of them"):
        model()
    with pytest.raises(ConfigError, match="give one of them"):
        model(ids, embeds=model.embed(ids))
    assert torch.equal(model(embeds=model.embed(ids)), model(ids))


# ---- what it computes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_forward_is_the_logits_of_the_hidden_states(kind):
    model, ids = decoder(kind), torch.randint(0, 37, (2, 7))
    hidden = model.forward_hidden(ids)
    assert hidden.shape == (2, 7, 20)
    table = model.embed.weight if model.config.tie_word_embeddings else model.head.weight
    assert torch.equal(model(ids), hidden @ table.T)


@pytest.mark.parametrize("kind", KINDS)
def test_causality(kind):
    model, ids = decoder(kind), torch.randint(0, 37, (1, 9))
    other = ids.clone()
    other[:, 6:] = (ids[:, 6:] + 5) % 37
    a, b = model(ids), model(other)
    assert relative(b[:, :6], a[:, :6]) <= 1e-6
    assert not torch.allclose(a[:, 6], b[:, 6])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("capacity", [None, 11], ids=["growing", "fixed"])
def test_cache_equals_no_cache(kind, capacity):
    model, ids = decoder(kind), torch.randint(0, 37, (2, 11))
    whole = model(ids)
    cache = model.make_cache(2, capacity)
    pieces = [model(piece, cache=cache) for piece in ids.split([5, 1, 4, 1], dim=1)]
    assert relative(torch.cat(pieces, 1), whole) <= 1e-5
    assert cache.lengths.tolist() == [11, 11]
    if capacity:
        with pytest.raises(ConfigError, match="capacity of 11 tokens"):
            model(ids[:, :1], cache=cache)


def test_cached_rows_of_unequal_length():
    model = decoder("grouped")
    long, short = torch.randint(0, 37, (1, 9)), torch.randint(0, 37, (1, 6))
    padded = torch.nn.functional.pad(short[:, :4], (0, 3))  # four real tokens of seven
    cache = model.make_cache(2)
    start = model(torch.cat([long[:, :7], padded]), cache=cache, counts=torch.tensor([7, 4]))
    steps = [model(torch.cat([long[:, 7 + i : 8 + i], short[:, 4 + i : 5 + i]]), cache=cache) for i in range(2)]
    after = torch.cat(steps, 1)
    for row, ids, count in ((0, long, 7), (1, short, 4)):
        alone = model(ids)[0]
        assert relative(start[row, :count], alone[:count]) <= 1e-5
        assert relative(after[row], alone[count:]) <= 1e-5


@pytest.mark.parametrize(
    "fusion", [PrefixFusionConfig(), DeepStackConfig(layer_indices=(0, 1))], ids=["prefix", "deepstack"]
)
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_output_positions_equal_full_pass(kind, fusion):
    model = randomize(Decoder(KINDS[kind].replace(fusion=fusion))).eval()
    x, positions, asked = torch.randn(3, 9, 20), torch.arange(9)[None], torch.tensor([8, 2, 5])
    seen = torch.zeros(3, 9, dtype=torch.bool)
    seen[:, 2:4] = True
    neighbour = None if isinstance(fusion, PrefixFusionConfig) else DeepStackInputs(seen, torch.randn(2, 6, 20))
    caches, found, flops = [model.make_cache(3), model.make_cache(3)], [], []
    for cache, only in zip(caches, (None, asked), strict=True):
        with FlopCounterMode(display=False) as counter:
            found.append(model.forward_embeddings(x, positions, cache.extend(9), cache, neighbour, only))
        flops.append(counter.get_total_flops())
    assert found[1].shape == (3, 1, 20) and flops[1] < flops[0]
    assert relative(found[1][:, 0], found[0][torch.arange(3), asked]) <= 1e-6
    assert all(map(torch.equal, [*caches[0].k, *caches[0].v], [*caches[1].k, *caches[1].v]))


@pytest.mark.parametrize(
    "fusion", [VisualExpertConfig(), DeepStackConfig(layer_indices=(0, 2))], ids=["expert", "behind the last"]
)
def test_output_positions_raise_with_late_fusion(fusion):
    model = Decoder(config(fusion=fusion))
    with pytest.raises(ConfigError, match="needs all tokens"):
        model.forward_embeddings(
            torch.randn(1, 4, 20), torch.arange(4)[None], AttentionPlan(causal=True), output_positions=torch.tensor([3])
        )


def test_cache_dtype():
    cache = decoder("grouped").bfloat16().make_cache(3, 8)
    assert {x.dtype for x in (*cache.k, *cache.v)} == {cache.dtype} == {torch.bfloat16}
    assert [x.shape for x in cache.k] == [(3, 8, 2, 6)] * 3


# ---- what it costs ----------------------------------------------------------------------------------------------


def count_torch_flops(call) -> int:
    # torch's counter has no entry for the fused CPU kernel; of the plain one it counts the whole square
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [(1, 1), (2, 13)])
def test_flops_match_torch_counter(kind, size):
    model, ids = decoder(kind), torch.randint(0, 37, size)
    B, L = size
    assert cost.count_flops(model, Workload.full_attention(L, B)) == count_torch_flops(
        lambda: model(ids, plan=AttentionPlan())
    )


@pytest.mark.parametrize("kind", ["dense", "grouped", "tied"])
def test_flops_on_the_meta_device(kind):
    with torch.device("meta"):
        model, ids = Decoder(KINDS[kind]), torch.zeros(3, 8, dtype=torch.long)
    assert cost.count_flops(model, Workload.full_attention(8, 3)) == count_torch_flops(
        lambda: model(ids, plan=AttentionPlan())
    )


@pytest.mark.parametrize("kind", KINDS)
def test_cached_decoding_flops_match_torch_counter(kind):
    model, ids = decoder(kind), torch.randint(0, 37, (2, 10))
    cache = model.make_cache(2, 10)
    model(ids[:, :9], cache=cache)
    assert cost.count_flops(model, Workload.decode(10, batch_size=2)) == count_torch_flops(
        lambda: model(ids[:, 9:], cache=cache)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_prefill_counts_last_logits_only(kind):
    model, ids = decoder(kind), torch.randint(0, 37, (2, 13))
    run = count_torch_flops(lambda: model.compute_logits(model.forward_hidden(ids, plan=AttentionPlan())[:, -1:]))
    # torch counts the whole square of attention, we the pairs of a causal pass
    prefill = Workload.prefill(13, batch_size=2)
    assert cost.count_flops(model, prefill.replace(attention_pairs=2 * 13 * 13)) == run
    square = 4 * 4 * 6 * model.config.layers  # a pair: q·k and weights·v over four heads of six
    assert cost.count_flops(model, prefill) == run - square * (2 * 13 * 13 - 2 * 13 * 14 // 2)
    head = 2 * 37 * 20
    assert (
        cost.count_flops(model, Workload.causal_attention(13, batch_size=2)) - cost.count_flops(model, prefill)
        == head * 2 * 12
    )


def test_decoding_steps_add_up_to_a_causal_pass():
    model = decoder("experts")
    steps = sum(cost.count_flops(model, Workload.decode(n)) for n in range(1, 18))
    assert steps == cost.count_flops(model, Workload.causal_attention(17))


@pytest.mark.parametrize("kind", ["dense", "tied"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_bytes(kind, dtype):
    model = decoder(kind).to(dtype)
    size = dtype.itemsize
    total = sum(p.numel() for p in model.parameters()) * size
    held = cost.count_bytes(model, Workload.decode(12, batch_size=3))
    cache = model.make_cache(3, 12)
    assert held.weights == total
    assert held.cache == sum(x.nbytes for x in (*cache.k, *cache.v))
    # the head is read whole; of an embedding that is not the head, a row a token
    assert held.read == (total if model.config.tie_word_embeddings else total - (37 - 3) * 20 * size)
    assert cost.count_bytes(model, Workload.prefill(500)).read == total


CONFIG = DecoderConfig(
    vocab_size=40,
    layers=2,
    block=BlockConfig(
        width=32, attention=AttentionConfig(heads=4, kv_heads=2), mlp=GatedMLPConfig(intermediate_size=40), norm="rms"
    ),
    rotary=RotaryConfig(head_dim=8),
)


def test_a_cache_makes_its_own_plan():
    model = Decoder(CONFIG).eval()
    ids = torch.randint(0, CONFIG.vocab_size, (2, 9))
    spans = torch.tensor([[0, 0, 1, 1, 1, 0, 0, 0, 0]] * 2)
    with torch.no_grad():
        whole = model(ids, plan=attention_plan(spans=spans, causal=True))
        cache, pieces = model.make_cache(2), []
        for start, end in ((0, 2), (2, 6), (6, 7), (7, 9)):
            pieces.append(model(ids[:, start:end], cache=cache, spans=spans[:, start:end]))
    assert relative(torch.cat(pieces, 1), whole) <= 1e-5
    with pytest.raises(ConfigError, match="its own plan"):
        model(ids, plan=AttentionPlan(causal=True), cache=model.make_cache(2))
    with pytest.raises(ConfigError, match="need a cache"):
        model(ids, counts=torch.tensor([9, 9]))
