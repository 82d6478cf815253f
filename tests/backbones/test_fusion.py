"""Fusion points: agreement with transformers, initialization without effect, and the KV cache."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.idefics.processing_idefics import image_attention_mask_for_packed_input_ids_pt
from transformers.models.mllama.processing_mllama import (
    convert_sparse_cross_attention_mask_to_dense,
    get_cross_attention_token_mask,
)

from helpers import randomize, relative
from vitrail.backbones.decoder import Decoder, DecoderConfig
from vitrail.backbones.fusion import (
    CrossAttentionFusionConfig,
    CrossAttentionInputs,
    DeepStackConfig,
    DeepStackInputs,
    ImageLoRAConfig,
    ImageLoRAInputs,
    PrefixFusionConfig,
    VisualExpertConfig,
    VisualExpertInputs,
    get_fusion_parameters,
    make_image_plan,
)
from vitrail.errors import ConfigError, StreamError
from vitrail.hub import load, save
from vitrail.nn import (
    AttentionConfig,
    AttentionPlan,
    BlockConfig,
    GatedMLPConfig,
    MoEConfig,
    RotaryConfig,
    Workload,
    cost,
)
from vitrail.training.stage_config import set_trainable_parts

WIDTH, LAYERS, VOCAB, SEEN = 20, 3, 37, 14  # SEEN: width of the features of cross-attention


def config(fusion=None, **more) -> DecoderConfig:
    attention = AttentionConfig(heads=4, kv_heads=2, head_dim=6, bias="qkv")
    block = BlockConfig(width=WIDTH, attention=attention, mlp=GatedMLPConfig(intermediate_size=28), norm="rms")
    shape = {"vocab_size": VOCAB, "layers": LAYERS, "block": block, "rotary": RotaryConfig(head_dim=6), **more}
    return DecoderConfig(**shape, fusion=fusion or PrefixFusionConfig())


CROSS = {
    "flamingo": CrossAttentionFusionConfig(layer_indices=(0, 2), context_width=SEEN),
    "idefics": CrossAttentionFusionConfig(layer_indices=(1,), context_width=SEEN, gated="channels"),
    "mllama": CrossAttentionFusionConfig(
        layer_indices=(1, 2, 5),  # before layer 1, again before it, and behind the last of three
        placement="inserted",
        context_width=SEEN,
        without_image="skip",
        attention=AttentionConfig(heads=5, kv_heads=1, head_dim=3, qk_norm="rms"),
        mlp=GatedMLPConfig(intermediate_size=9),
    ),
}
KINDS = {
    **CROSS,
    "expert": VisualExpertConfig(),
    "some": VisualExpertConfig(layer_indices=(2,), output_projection=False),
    "deepstack": DeepStackConfig(),
    "image_lora": ImageLoRAConfig(rank=2, alpha=3.0),
}


def plain(seed: int = 0, **more) -> Decoder:
    return randomize(Decoder(config(**more)), seed).eval()


def make_fused(fusion, gates: float = 0.7, seed: int = 0, **more) -> Decoder:
    """Decoder of this seed with a fusion of random weights, whose gates are `gates`."""
    model = plain(seed, **more)
    model.add_fusion(fusion)
    if model.fusion is not None:
        randomize(model.fusion, seed + 1)
    with torch.no_grad():
        for name, p in get_fusion_parameters(model).items():
            if name.endswith(".gate"):
                p.fill_(gates)
    return model


def marks(*rows: str) -> torch.Tensor:
    """Parse a mask with an image at each ×."""
    return torch.tensor([[letter == "×" for letter in row] for row in rows])


MARKS = marks("·×···×··×··", "···········", "··××·······")  # three rows of eleven tokens, three pictures at most
MASK = marks("·×××·······", "···········", "·××××··××··")
EACH = 2  # features of a picture


def pictures(fusion, rows=slice(None), plan=True):
    """Random fusion inputs for the rows of MARKS or MASK."""
    torch.manual_seed(5)
    if isinstance(fusion, CrossAttentionFusionConfig):
        seen = make_image_plan(MARKS[rows], EACH, join_adjacent=fusion.placement == "inserted") if plan else None
        features = torch.randn(len(MARKS[rows]), 3 * EACH, SEEN)
        return CrossAttentionInputs(features[:, : seen.key_segments.shape[1]] if seen else features, seen)
    if isinstance(fusion, VisualExpertConfig):
        return VisualExpertInputs(MASK[rows])
    if isinstance(fusion, ImageLoRAConfig):
        return ImageLoRAInputs(MASK[rows].any(1, keepdim=True).expand_as(MASK[rows]))
    return DeepStackInputs(MASK[rows], torch.randn(3, int(MASK[rows].sum()), WIDTH))


IDS = torch.arange(33).reshape(3, 11) * 7 % VOCAB


# ---- configs and names ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fusion", "message"),
    [
        (CrossAttentionFusionConfig(layer_indices=(3,)), "from 0 to 2"),
        (CrossAttentionFusionConfig(layer_indices=(0, 5), placement="inserted"), "from 0 to 4"),
        (CrossAttentionFusionConfig(layer_indices=(1, 1)), "each once"),
        (CrossAttentionFusionConfig(layer_indices=()), "at least one"),
        (
            CrossAttentionFusionConfig(layer_indices=(0,), attention=AttentionConfig(heads=2, bias="all")),
            "have no image",
        ),
        (VisualExpertConfig(layer_indices=(-1,)), "expert layer_indices"),
        (DeepStackConfig(layer_indices=(0, 4)), "deepstack layer_indices"),
    ],
)
def test_invalid_configs_raise(fusion, message):
    with pytest.raises(ConfigError, match=message):
        config(fusion)


def test_prefix_fusion_adds_nothing():
    data = config().to_dict()
    assert data.pop("fusion") == {"kind": "prefix"}
    assert DecoderConfig.from_dict(data) == config()  # what was saved before there was a choice
    assert get_fusion_parameters(plain()) == {}
    assert not [name for name in plain().state_dict() if "fusion" in name]


@pytest.mark.parametrize("kind", KINDS)
def test_config_round_trip(kind):
    assert DecoderConfig.from_dict(config(KINDS[kind]).to_dict()) == config(KINDS[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_of_another_fusion_raise(kind):
    model = make_fused(KINDS[kind])
    with pytest.raises(ConfigError, match="this decoder needs"):
        model(
            IDS,
            fusion_inputs=VisualExpertInputs(MASK)
            if kind in ("deepstack", *CROSS)
            else CrossAttentionInputs(torch.zeros(3, 1, SEEN)),
        )
    with pytest.raises(ConfigError, match="has no fusion"):
        plain()(IDS, fusion_inputs=pictures(KINDS[kind]))


def test_invalid_inputs_raise():
    with pytest.raises(StreamError, match="there are 3 rows"):
        make_fused(CROSS["flamingo"])(IDS, fusion_inputs=CrossAttentionInputs(torch.zeros(2, 4, SEEN)))
    with pytest.raises(StreamError, match="at least 1"):
        make_fused(CROSS["flamingo"])(IDS, fusion_inputs=CrossAttentionInputs(torch.zeros(3, 0, SEEN)))
    with pytest.raises(ConfigError, match="make_image_plan"):
        make_fused(CROSS["flamingo"])(
            IDS, fusion_inputs=CrossAttentionInputs(torch.zeros(3, 4, SEEN), AttentionPlan(causal=True))
        )
    with pytest.raises(StreamError, match="boolean mask"):
        make_fused(KINDS["expert"])(IDS, fusion_inputs=VisualExpertInputs(MASK.long()))
    with pytest.raises(StreamError, match=r"give features \(9, 20\) for each"):
        make_fused(KINDS["deepstack"])(IDS, fusion_inputs=DeepStackInputs(MASK, torch.zeros(2, 9, WIDTH)))


@pytest.mark.parametrize("kind", ["flamingo", "mllama", "expert", "image_lora"])
def test_fusion_parameters_are_one_part(kind, tmp_path):
    whole = nn.ModuleDict({"eye": nn.Linear(2, 2), "decoder": make_fused(KINDS[kind])})
    set_trainable_parts(whole, ("decoder.fusion",))
    added = get_fusion_parameters(whole)
    assert {name for name, p in whole.named_parameters() if p.requires_grad} == added.keys() != set()
    model, bare = whole["decoder"], plain()
    assert sum(p.numel() for p in added.values()) == (
        sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in bare.parameters())
    )
    assert model.state_dict().keys() - bare.state_dict().keys() == {name.removeprefix("decoder.") for name in added}

    save(model, tmp_path / "own")
    again = load(tmp_path / "own")
    seen = pictures(KINDS[kind])
    assert torch.equal(again(IDS, fusion_inputs=seen), model(IDS, fusion_inputs=seen))


# ---- the text model stays as it is ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_without_images_equals_plain_decoder(kind):
    model, bare = make_fused(KINDS[kind]), plain()
    assert torch.equal(model(IDS), bare(IDS))
    cache, other = model.make_cache(3), bare.make_cache(3)
    for piece in IDS.split([4, 1, 6], dim=1):
        assert torch.equal(model(piece, cache=cache), bare(piece, cache=other))


@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("gated", [True, "channels"])
@pytest.mark.parametrize("kind", CROSS)
def test_closed_gates_do_not_change_text(kind, gated, planned):
    fusion = CROSS[kind].replace(gated=gated)
    model, bare = make_fused(fusion, gates=0.0), plain()
    seen = pictures(fusion, plan=planned)
    assert torch.equal(model(IDS, fusion_inputs=seen), bare(IDS))
    start, rest = IDS[:, :6], IDS[:, 6:].split([1, 4], dim=1)
    if seen.plan is not None:
        first = make_image_plan(MARKS[:, :6], EACH, join_adjacent=seen.plan.causal)
        seen = CrossAttentionInputs(seen.features[:, : first.key_segments.shape[1]], first)
    cache, other = model.make_cache(3), bare.make_cache(3)
    assert torch.equal(model(start, cache=cache, fusion_inputs=seen), bare(start, cache=other))
    for piece in rest:
        assert torch.equal(model(piece, cache=cache), bare(piece, cache=other))


@pytest.mark.parametrize("kind", CROSS)
def test_new_fusions_start_without_effect_and_learn(kind):
    model = plain()
    model.add_fusion(CROSS[kind])
    seen = pictures(CROSS[kind])
    logits = model(IDS, fusion_inputs=seen)
    assert torch.equal(logits, plain()(IDS))
    (logits * torch.randn_like(logits)).sum().backward()
    gates = [p for name, p in get_fusion_parameters(model).items() if name.endswith(".gate")]
    assert len(gates) == 2 * len(CROSS[kind].layer_indices) and all(gate.grad.abs().min() > 0 for gate in gates)
    assert not torch.allclose(make_fused(CROSS[kind])(IDS, fusion_inputs=seen), logits)


@pytest.mark.parametrize("kind", CROSS)
def test_text_before_images_attends_to_none(kind):
    model, seen = make_fused(CROSS[kind]), pictures(CROSS[kind])
    other = CrossAttentionInputs(torch.randn_like(seen.features), seen.plan)
    a, b = model(IDS, fusion_inputs=seen), model(IDS, fusion_inputs=other)
    assert torch.equal(a[1], b[1])  # a row without a picture
    assert torch.equal(a[0, :1], b[0, :1]) and torch.equal(a[2, :2], b[2, :2])
    assert not torch.allclose(a[0, 1:], b[0, 1:])
    if CROSS[kind].without_image == "skip":
        torch.testing.assert_close(a[1], plain()(IDS)[1], rtol=1e-5, atol=1e-6)


# ---- the cache --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", CROSS)
def test_cached_image_features_equal_uncached(kind):
    model, seen = make_fused(CROSS[kind]), pictures(CROSS[kind])
    whole = model(IDS, fusion_inputs=seen)
    projected = []
    for block in model.fusion.blocks:
        block.branches["cross"].op.kv.register_forward_hook(lambda *_: projected.append(1))
    cache = model.make_cache(3)
    first = replace(seen.plan, segments=seen.plan.segments[:, :9])
    if first.query_slots is not None:
        first = replace(first, query_slots=first.query_slots[:, :9])
    pieces = [model(IDS[:, :9], cache=cache, fusion_inputs=CrossAttentionInputs(seen.features, first))]
    pieces += [model(piece, cache=cache) for piece in IDS[:, 9:].split(1, dim=1)]
    assert relative(torch.cat(pieces, 1), whole) <= 1e-5
    assert len(projected) == len(model.fusion.blocks)
    assert not cache.context.key_values[0].k.requires_grad

    cache.clear()  # another text, without pictures
    assert torch.equal(model(IDS, cache=cache), model(IDS))


@pytest.mark.parametrize("kind", CROSS)
def test_decoding_keeps_the_images_of_the_last_token(kind):
    model = make_fused(CROSS[kind])
    rows = marks("·×···×·", "··××···")
    counts = torch.tensor([4, 7])  # the first row ends before its second picture would stand
    rows[0, 4:] = False
    seen = make_image_plan(rows, EACH, join_adjacent=CROSS[kind].placement == "inserted")
    features, ids = torch.randn(2, 2 * EACH, SEEN), IDS[:2]
    cache = model.make_cache(2)
    start = model(ids[:, :7], cache=cache, counts=counts, fusion_inputs=CrossAttentionInputs(features, seen))
    more = torch.randint(0, VOCAB, (2, 3))
    steps = [model(more[:, :1], cache=cache), model(more[:, 1:], cache=cache)]
    for row, count in enumerate(counts.tolist()):
        text = torch.cat([ids[row, :count], more[row]])[None]
        here = torch.nn.functional.pad(rows[row : row + 1, :count], (0, 3))
        plan = make_image_plan(here, EACH, join_adjacent=CROSS[kind].placement == "inserted")
        alone = model(
            text, fusion_inputs=CrossAttentionInputs(features[row : row + 1, : plan.key_segments.shape[1]], plan)
        )[0]
        assert relative(start[row, :count], alone[:count]) <= 1e-5
        assert relative(torch.cat(steps, 1)[row], alone[count:]) <= 1e-5


@pytest.mark.parametrize("kind", ["expert", "some", "deepstack"])
def test_chunked_prefill_with_images(kind):
    model, seen = make_fused(KINDS[kind]), pictures(KINDS[kind])
    whole = model(IDS, fusion_inputs=seen)
    cache, pieces = model.make_cache(3), []
    for start, end in ((0, 3), (3, 4), (4, 9), (9, 11)):
        mask = MASK[:, start:end]
        part = VisualExpertInputs(mask)
        if kind == "deepstack":
            spread = torch.zeros(3, *MASK.shape, WIDTH)
            spread[:, MASK] = seen.features
            part = DeepStackInputs(mask, spread[:, :, start:end][:, mask])
        pieces.append(model(IDS[:, start:end], cache=cache, fusion_inputs=part if mask.any() else None))
    assert relative(torch.cat(pieces, 1), whole) <= 1e-5


# ---- who sees which picture -------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(st.lists(st.lists(st.booleans(), min_size=7, max_size=7), min_size=1, max_size=3), st.integers(1, 3))
def test_plans_match_transformers_processors(rows, each):
    here = torch.tensor(rows)
    most = int(here.sum(1).max())
    if not most:
        return
    sparse = [get_cross_attention_token_mask([int(m) for m in row], 1) for row in rows]
    dense = convert_sparse_cross_attention_mask_to_dense(sparse, [[1] * most] * len(rows), 1, 7)
    theirs = torch.from_numpy(dense)[..., 0].bool().repeat_interleave(each, -1)
    assert torch.equal(make_image_plan(here, each, join_adjacent=True).mask(7, most * each, here.device)[:, 0], theirs)

    class Tokenizer:
        eos_token_id = 9

        def convert_tokens_to_ids(self, _):
            return 1

    last, _ = image_attention_mask_for_packed_input_ids_pt(here.long(), Tokenizer())
    theirs = (last[..., None] == torch.arange(most)).repeat_interleave(each, -1)
    assert torch.equal(make_image_plan(here, each).mask(7, most * each, here.device)[:, 0], theirs)


# ---- the visual expert ------------------------------------------------------------------------------------------


def twin(model: Decoder, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """CogVLM's layer written out: both weight sets on every token, selected by the mask."""
    at, L = mask[..., None], x.shape[1]
    rotation = model.rotary(torch.arange(L)[None])
    for i, block in enumerate(model.blocks):
        own = dict(model.fusion.layers.items()).get(str(i), {})
        attention, mlp = block.branches["self"], block.branches["mlp"]
        h, op = attention.norm(x), attention.op
        qkv = torch.where(at, own["qkv"](h), op.qkv(h)) if "qkv" in own else op.qkv(h)
        q, k, v = qkv.unflatten(-1, (-1, 6)).split([4, 2, 2], dim=-2)
        q, k = _turned(q, rotation), _turned(k, rotation)
        k, v = (t.repeat_interleave(2, 2) for t in (k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * 6**-0.5
        scores = scores.masked_fill(~torch.ones(L, L, dtype=torch.bool).tril(), -torch.inf)
        y = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).flatten(2)
        x = x + (torch.where(at, own["out"](y), op.out(y)) if "out" in own else op.out(y))
        h = mlp.norm(x)
        x = x + (torch.where(at, own["mlp"](h), mlp.op(h)) if "mlp" in own else mlp.op(h))
    return model.norm(x)


def _turned(x, rotation):
    a, b = x.chunk(2, -1)
    cos, sin = rotation.cos[:, :, None], rotation.sin[:, :, None]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


@pytest.mark.parametrize("kind", ["expert", "some"])
@settings(max_examples=12)
@given(data=st.data())
def test_visual_expert_matches_reference(kind, data):
    L = data.draw(st.integers(1, 9))
    mask = torch.tensor(data.draw(st.lists(st.lists(st.booleans(), min_size=L, max_size=L), min_size=2, max_size=2)))
    model, ids = make_fused(KINDS[kind]), IDS[:2, :L]
    grads = []
    for run in (
        lambda: model.forward_hidden(ids, fusion_inputs=VisualExpertInputs(mask)),
        lambda: twin(model, model.embed(ids), mask),
    ):
        model.zero_grad()
        out = run()
        (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
        grads.append((out.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}))
    (found, ours), (wanted, theirs) = grads
    assert relative(found, wanted) <= 1e-5
    for name, grad in theirs.items():
        other = ours.get(name, torch.zeros_like(grad))
        torch.testing.assert_close(other, grad, rtol=0, atol=1e-4 * grad.abs().max() + 1e-6, msg=name)


def test_routing_keeps_token_order():
    model = plain()
    model.add_fusion(VisualExpertConfig())
    start = model.fusion.start_pass(torch.zeros(3, 11, WIDTH), VisualExpertInputs(MASK), None)
    x = torch.randint(-9, 9, (3, 11, WIDTH)).float()
    own, text = model.fusion.layers["1"]["qkv"], model.blocks[1].branches["self"].op.qkv
    with torch.no_grad():  # small integers add up exactly in any order
        for linear in (own, text):
            for p in linear.parameters():
                p.copy_(torch.randint(-9, 9, p.shape))
    assert torch.equal(start.route(1)("qkv", text, x), torch.where(MASK[..., None], own(x), text(x)))
    own.load_state_dict(text.state_dict())
    assert torch.equal(start.route(1)("qkv", text, x), text(x))


MLPS = {
    "gated": GatedMLPConfig(intermediate_size=28),
    "experts": MoEConfig(num_experts=5, experts_per_token=2, intermediate_size=12),
}


@pytest.mark.parametrize("mlp", MLPS)
def test_visual_expert_starts_as_text_weights(mlp):
    model = plain(block=config().block.replace(mlp=MLPS[mlp])).requires_grad_(False)
    bare = deepcopy(model)
    model.add_fusion(VisualExpertConfig())
    assert all(p.requires_grad for p in get_fusion_parameters(model).values())
    assert not any(p.requires_grad for p in bare.parameters())
    wanted = bare(IDS)
    # All tokens of one kind make the very products of the plain decoder; parts of them may be summed in other order.
    assert torch.equal(model(IDS, fusion_inputs=VisualExpertInputs(torch.ones_like(MASK))), wanted)
    assert torch.equal(model(IDS, fusion_inputs=VisualExpertInputs(torch.zeros_like(MASK))), wanted)
    model.double(), bare.double()
    assert relative(model(IDS, fusion_inputs=VisualExpertInputs(MASK)), bare(IDS)) <= 1e-13


# ---- what it costs ----------------------------------------------------------------------------------------------


def count_torch_flops(call) -> int:
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


@pytest.mark.parametrize("kind", CROSS)
def test_cross_attention_flops(kind):
    model, bare, seen = make_fused(CROSS[kind]), plain(), pictures(CROSS[kind], plan=False)
    full = Workload.full_attention(11, 3)
    assert (
        cost.count_flops(model, full)
        == cost.count_flops(bare, full)
        == count_torch_flops(lambda: model(IDS, plan=AttentionPlan()))
    )
    across = full.with_context(6, 3)
    assert cost.count_flops(model, across) == count_torch_flops(
        lambda: model(IDS, plan=AttentionPlan(), fusion_inputs=seen)
    )
    cache = model.make_cache(3, 11)
    model(IDS[:, :10], cache=cache, fusion_inputs=seen)
    step = Workload.decode(11, 3).with_context(6, 3).replace(context_tokens=0)
    assert cost.count_flops(model, step) == count_torch_flops(lambda: model(IDS[:, 10:], cache=cache))
    held = sum(k.nbytes + v.nbytes for k, v in cache.context.key_values)
    for work in (step, Workload.prefill(11, 3).with_context(6, 3)):
        found, without = cost.count_bytes(model, work), cost.count_bytes(bare, work)
        assert found.weights == sum(p.nbytes for p in model.parameters())
        assert found.cache == without.cache + held
    kv = sum(block.branches["cross"].op.kv.weight.nbytes for block in model.fusion.blocks)
    added = sum(p.nbytes for p in get_fusion_parameters(model).values())
    assert cost.count_bytes(model, step).read == cost.count_bytes(bare, step).read + added - kv
    assert cost.count_bytes(model, Workload.decode(11, 3)).read == cost.count_bytes(bare, Workload.decode(11, 3)).read


@pytest.mark.parametrize("kind", ["expert", "some", "deepstack"])
def test_other_fusions_add_no_flops(kind):
    model, seen, full = make_fused(KINDS[kind]), pictures(KINDS[kind]), Workload.full_attention(11, 3)
    assert cost.count_flops(model, full) == cost.count_flops(plain(), full)
    assert cost.count_flops(model, full) == count_torch_flops(
        lambda: model(IDS, plan=AttentionPlan(), fusion_inputs=seen)
    )
    added = sum(p.nbytes for p in get_fusion_parameters(model).values())
    bare = cost.count_bytes(plain(), full)
    assert cost.count_bytes(model, full) == bare._replace(weights=bare.weights + added)
    assert cost.count_bytes(model, full.replace(context_tokens=9)).read == bare.read + added
