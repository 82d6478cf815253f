"""The decoder: what it refuses, the cache against none, and its costs against torch's counter."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from helpers import randomize, relative
from vitrail.backbones.decoder import Decoder, DecoderConfig
from vitrail.backbones.fusion import DeepStackConfig, ExpertConfig, PrefixConfig, Stacked
from vitrail.errors import ConfigError
from vitrail.nn import (
    AttentionConfig,
    BlockConfig,
    ExpertsConfig,
    GatedConfig,
    Plan,
    RotaryConfig,
    Work,
    attention_plan,
    cost,
)

EXPERTS = ExpertsConfig(count=5, active=2, hidden=12)


def config(mlp=None, kv_heads=4, tied=False, **more) -> DecoderConfig:
    attention = AttentionConfig(heads=4, kv_heads=kv_heads, head_dim=6, qk_norm="rms", bias="qkv")
    block = BlockConfig(width=20, attention=attention, mlp=mlp or GatedConfig(hidden=28), norm="rms")
    return DecoderConfig(vocab=37, layers=3, block=block, rotary=RotaryConfig(head_dim=6), tied=tied, **more)


KINDS = {
    "dense": config(),
    "grouped": config(kv_heads=2),
    "tied": config(kv_heads=1, tied=True),
    "experts": config(EXPERTS, kv_heads=2),
    "mixed": config(EXPERTS, dense=(0, 2), dense_mlp=GatedConfig(hidden=16)),
}


def decoder(kind: str) -> Decoder:
    return randomize(Decoder(KINDS[kind])).eval()


# ---- configs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"rotary": RotaryConfig(head_dim=8)}, "set rotary.head_dim to 6"),
        ({"dense": (3,), "dense_mlp": GatedConfig(hidden=8)}, "do not fit 3 layers"),
        ({"dense": (1,)}, "give both"),
        ({"dense_mlp": GatedConfig(hidden=8)}, "or neither"),
        ({"block": config().block.with_(chain=("mlp",))}, "needs self-attention"),
    ],
)
def test_what_cannot_be_is_refused(change, says):
    with pytest.raises(ConfigError, match=says):
        config().with_(**change)


def test_dense_layers_have_their_own_mlp():
    model = decoder("mixed")
    kinds = [type(block.branches["mlp"].op).__name__ for block in model.blocks]
    assert kinds == ["Gated", "Experts", "Gated"]


def test_ids_or_embeddings_and_not_both():
    model, ids = decoder("dense"), torch.randint(0, 37, (1, 5))
    with pytest.raises(ConfigError, match="one of the two"):
        model()
    with pytest.raises(ConfigError, match="one of the two"):
        model(ids, embeds=model.embed(ids))
    assert torch.equal(model(embeds=model.embed(ids)), model(ids))


# ---- what it computes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_forward_is_the_logits_of_the_hidden_states(kind):
    model, ids = decoder(kind), torch.randint(0, 37, (2, 7))
    hidden = model.hidden(ids)
    assert hidden.shape == (2, 7, 20)
    table = model.embed.weight if model.config.tied else model.head.weight
    assert torch.equal(model(ids), hidden @ table.T)


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_sees_only_its_past(kind):
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
    cache = model.cache(2, capacity)
    pieces = [model(piece, cache=cache) for piece in ids.split([5, 1, 4, 1], dim=1)]
    assert relative(torch.cat(pieces, 1), whole) <= 1e-5
    assert cache.lengths.tolist() == [11, 11]
    if capacity:
        with pytest.raises(ConfigError, match="holds 11 tokens"):
            model(ids[:, :1], cache=cache)


def test_rows_of_unequal_length_each_go_on_from_their_own_end():
    model = decoder("grouped")
    long, short = torch.randint(0, 37, (1, 9)), torch.randint(0, 37, (1, 6))
    padded = torch.nn.functional.pad(short[:, :4], (0, 3))  # four real tokens of seven
    cache = model.cache(2)
    start = model(torch.cat([long[:, :7], padded]), cache=cache, counts=torch.tensor([7, 4]))
    steps = [model(torch.cat([long[:, 7 + i : 8 + i], short[:, 4 + i : 5 + i]]), cache=cache) for i in range(2)]
    after = torch.cat(steps, 1)
    for row, ids, count in ((0, long, 7), (1, short, 4)):
        alone = model(ids)[0]
        assert relative(start[row, :count], alone[:count]) <= 1e-5
        assert relative(after[row], alone[count:]) <= 1e-5


@pytest.mark.parametrize("fusion", [PrefixConfig(), DeepStackConfig(at=(0, 1))], ids=["prefix", "deepstack"])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_tokens_asked_for_are_those_of_the_whole_pass(kind, fusion):
    model = randomize(Decoder(KINDS[kind].with_(fusion=fusion))).eval()
    x, positions, asked = torch.randn(3, 9, 20), torch.arange(9)[None], torch.tensor([8, 2, 5])
    seen = torch.zeros(3, 9, dtype=torch.bool)
    seen[:, 2:4] = True
    beside = None if isinstance(fusion, PrefixConfig) else Stacked(seen, torch.randn(2, 6, 20))
    caches, found, flops = [model.cache(3), model.cache(3)], [], []
    for cache, only in zip(caches, (None, asked), strict=True):
        with FlopCounterMode(display=False) as counter:
            found.append(model.through(x, positions, cache.extend(9), cache, beside, only))
        flops.append(counter.get_total_flops())
    assert found[1].shape == (3, 1, 20) and flops[1] < flops[0]
    assert relative(found[1][:, 0], found[0][torch.arange(3), asked]) <= 1e-6
    assert torch.equal(caches[0].k, caches[1].k) and torch.equal(caches[0].v, caches[1].v)


@pytest.mark.parametrize("fusion", [ExpertConfig(), DeepStackConfig(at=(0, 2))], ids=["expert", "behind the last"])
def test_no_token_is_asked_for_alone_where_pictures_act_behind_the_last_attention(fusion):
    model = Decoder(config(fusion=fusion))
    with pytest.raises(ConfigError, match="needs all tokens"):
        model.through(torch.randn(1, 4, 20), torch.arange(4)[None], Plan(causal=True), asked=torch.tensor([3]))


def test_cache_has_the_type_of_the_weights():
    cache = decoder("grouped").bfloat16().cache(3, 8)
    assert cache.k.dtype == cache.v.dtype == torch.bfloat16
    assert cache.k.shape == (3, 3, 8, 2, 6)


# ---- what it costs ----------------------------------------------------------------------------------------------


def counted(call) -> int:
    # torch's counter has no entry for the fused CPU kernel; of the plain one it counts the whole square
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [(1, 1), (2, 13)])
def test_flops_are_those_torch_counts(kind, size):
    model, ids = decoder(kind), torch.randint(0, 37, size)
    B, L = size
    assert cost.flops(model, Work.full(L, B)) == counted(lambda: model(ids, plan=Plan()))


@pytest.mark.parametrize("kind", ["dense", "grouped", "tied"])
def test_flops_on_the_meta_device(kind):
    with torch.device("meta"):
        model, ids = Decoder(KINDS[kind]), torch.zeros(3, 8, dtype=torch.long)
    assert cost.flops(model, Work.full(8, 3)) == counted(lambda: model(ids, plan=Plan()))


@pytest.mark.parametrize("kind", KINDS)
def test_decoding_with_a_cache_is_counted_by_torch_too(kind):
    model, ids = decoder(kind), torch.randint(0, 37, (2, 10))
    cache = model.cache(2, 10)
    model(ids[:, :9], cache=cache)
    assert cost.flops(model, Work.decode(10, batch=2)) == counted(lambda: model(ids[:, 9:], cache=cache))


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_is_asked_for_its_last_logits_alone(kind):
    model, ids = decoder(kind), torch.randint(0, 37, (2, 13))
    run = counted(lambda: model.logits(model.hidden(ids, plan=Plan())[:, -1:]))
    # torch counts the whole square of attention, we the pairs of a causal pass
    prefill = Work.prefill(13, batch=2)
    assert cost.flops(model, prefill.with_(pairs=2 * 13 * 13)) == run
    square = 4 * 4 * 6 * model.config.layers  # a pair: q·k and weights·v over four heads of six
    assert cost.flops(model, prefill) == run - square * (2 * 13 * 13 - 2 * 13 * 14 // 2)
    head = 2 * 37 * 20
    assert cost.flops(model, Work.causal(13, batch=2)) - cost.flops(model, prefill) == head * 2 * 12


def test_decoding_adds_up_to_a_causal_pass():
    model = decoder("experts")
    steps = sum(cost.flops(model, Work.decode(n)) for n in range(1, 18))
    assert steps == cost.flops(model, Work.causal(17))


@pytest.mark.parametrize("kind", ["dense", "tied"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_are_those_that_are_there(kind, dtype):
    model = decoder(kind).to(dtype)
    size = dtype.itemsize
    total = sum(p.numel() for p in model.parameters()) * size
    held = cost.bytes(model, Work.decode(12, batch=3))
    cache = model.cache(3, 12)
    assert held.weights == total
    assert held.cache == cache.k.nbytes + cache.v.nbytes
    # the head is read whole; of an embedding that is not the head, a row a token
    assert held.read == (total if model.config.tied else total - (37 - 3) * 20 * size)
    assert cost.bytes(model, Work.prefill(500)).read == total


CONFIG = DecoderConfig(
    vocab=40,
    layers=2,
    block=BlockConfig(width=32, attention=AttentionConfig(heads=4, kv_heads=2), mlp=GatedConfig(hidden=40), norm="rms"),
    rotary=RotaryConfig(head_dim=8),
)


def test_a_cache_makes_its_own_plan():
    model = Decoder(CONFIG).eval()
    ids = torch.randint(0, CONFIG.vocab, (2, 9))
    spans = torch.tensor([[0, 0, 1, 1, 1, 0, 0, 0, 0]] * 2)
    with torch.no_grad():
        whole = model(ids, plan=attention_plan(spans=spans, causal=True))
        cache, pieces = model.cache(2), []
        for start, end in ((0, 2), (2, 6), (6, 7), (7, 9)):
            pieces.append(model(ids[:, start:end], cache=cache, spans=spans[:, start:end]))
    assert relative(torch.cat(pieces, 1), whole) <= 1e-5
    with pytest.raises(ConfigError, match="its own plan"):
        model(ids, plan=Plan(causal=True), cache=model.cache(2))
    with pytest.raises(ConfigError, match="go with a cache"):
        model(ids, counts=torch.tensor([9, 9]))
