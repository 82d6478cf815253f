"""Fusion points: agreement with transformers, and what must not change: the text model at the start, the cache."""

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
    CrossConfig,
    DeepStackConfig,
    ExpertConfig,
    Looked,
    Marked,
    PrefixConfig,
    Stacked,
    fusion_parameters,
    picture_plan,
)
from vitrail.errors import ConfigError, StreamError
from vitrail.hub import load, save
from vitrail.nn import AttentionConfig, BlockConfig, ExpertsConfig, GatedConfig, Plan, RotaryConfig, Work, cost
from vitrail.train.stage import choose_trainable

WIDTH, LAYERS, VOCAB, SEEN = 20, 3, 37, 14  # SEEN: width of the features of cross-attention


def config(fusion=None, **more) -> DecoderConfig:
    attention = AttentionConfig(heads=4, kv_heads=2, head_dim=6, bias="qkv")
    block = BlockConfig(width=WIDTH, attention=attention, mlp=GatedConfig(hidden=28), norm="rms")
    shape = {"vocab": VOCAB, "layers": LAYERS, "block": block, "rotary": RotaryConfig(head_dim=6), **more}
    return DecoderConfig(**shape, fusion=fusion or PrefixConfig())


CROSS = {
    "flamingo": CrossConfig(at=(0, 2), context_width=SEEN),
    "idefics": CrossConfig(at=(1,), context_width=SEEN, gated="channels"),
    "mllama": CrossConfig(
        at=(1, 2, 5),  # before layer 1, again before it, and behind the last of three
        where="inserted",
        context_width=SEEN,
        blind="skip",
        attention=AttentionConfig(heads=5, kv_heads=1, head_dim=3, qk_norm="rms"),
        mlp=GatedConfig(hidden=9),
    ),
}
KINDS = {
    **CROSS,
    "expert": ExpertConfig(),
    "some": ExpertConfig(at=(2,), out=False),
    "deepstack": DeepStackConfig(),
}


def plain(seed: int = 0, **more) -> Decoder:
    return randomize(Decoder(config(**more)), seed).eval()


def fused(fusion, gates: float = 0.7, seed: int = 0, **more) -> Decoder:
    """The plain decoder of that seed, with a fusion whose weights are random and whose gates stand at `gates`."""
    model = plain(seed, **more)
    model.fuse(fusion)
    if model.fusion is not None:
        randomize(model.fusion, seed + 1)
    with torch.no_grad():
        for name, p in fusion_parameters(model).items():
            if name.endswith(".gate"):
                p.fill_(gates)
    return model


def marks(*rows: str) -> torch.Tensor:
    """A picture stands at each ×."""
    return torch.tensor([[letter == "×" for letter in row] for row in rows])


MARKS = marks("·×···×··×··", "···········", "··××·······")  # three rows of eleven tokens, three pictures at most
MASK = marks("·×××·······", "···········", "·××××··××··")
EACH = 2  # features of a picture


def pictures(fusion, rows=slice(None), plan=True):
    """Something to see for the rows of MARKS or MASK."""
    torch.manual_seed(5)
    if isinstance(fusion, CrossConfig):
        seen = picture_plan(MARKS[rows], EACH, joined=fusion.where == "inserted") if plan else None
        features = torch.randn(len(MARKS[rows]), 3 * EACH, SEEN)
        return Looked(features[:, : seen.key_segments.shape[1]] if seen else features, seen)
    if isinstance(fusion, ExpertConfig):
        return Marked(MASK[rows])
    return Stacked(MASK[rows], torch.randn(3, int(MASK[rows].sum()), WIDTH))


IDS = torch.arange(33).reshape(3, 11) * 7 % VOCAB


# ---- configs and names ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fusion", "says"),
    [
        (CrossConfig(at=(3,)), "of 0 to 2"),
        (CrossConfig(at=(0, 5), where="inserted"), "of 0 to 4"),
        (CrossConfig(at=(1, 1)), "each once"),
        (CrossConfig(at=()), "at least one"),
        (CrossConfig(at=(0,), attention=AttentionConfig(heads=2, bias="all")), "see no picture"),
        (ExpertConfig(at=(-1,)), "expert layers"),
        (DeepStackConfig(at=(0, 4)), "deepstack layers"),
    ],
)
def test_what_cannot_be_is_refused(fusion, says):
    with pytest.raises(ConfigError, match=says):
        config(fusion)


def test_nothing_is_added_unless_asked_for():
    data = config().plain()
    assert data.pop("fusion") == {"kind": "prefix"}
    assert DecoderConfig.read(data) == config()  # what was saved before there was a choice
    assert fusion_parameters(plain()) == {}
    assert not [name for name in plain().state_dict() if "fusion" in name]


@pytest.mark.parametrize("kind", KINDS)
def test_a_config_is_read_as_it_was_written(kind):
    assert DecoderConfig.read(config(KINDS[kind]).plain()) == config(KINDS[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_pictures_of_another_kind_are_refused(kind):
    model = fused(KINDS[kind])
    with pytest.raises(ConfigError, match="this decoder takes its pictures as"):
        model(IDS, pictures=Marked(MASK) if kind in ("deepstack", *CROSS) else Looked(torch.zeros(3, 1, SEEN)))
    with pytest.raises(ConfigError, match="no place for them"):
        plain()(IDS, pictures=pictures(KINDS[kind]))


def test_what_does_not_fit_is_refused():
    with pytest.raises(StreamError, match="not those of 3 rows"):
        fused(CROSS["flamingo"])(IDS, pictures=Looked(torch.zeros(2, 4, SEEN)))
    with pytest.raises(StreamError, match="at least one"):
        fused(CROSS["flamingo"])(IDS, pictures=Looked(torch.zeros(3, 0, SEEN)))
    with pytest.raises(ConfigError, match="picture_plan"):
        fused(CROSS["flamingo"])(IDS, pictures=Looked(torch.zeros(3, 4, SEEN), Plan(causal=True)))
    with pytest.raises(StreamError, match="booleans"):
        fused(KINDS["expert"])(IDS, pictures=Marked(MASK.long()))
    with pytest.raises(StreamError, match=r"give \(9, 20\) for each"):
        fused(KINDS["deepstack"])(IDS, pictures=Stacked(MASK, torch.zeros(2, 9, WIDTH)))


@pytest.mark.parametrize("kind", ["flamingo", "mllama", "expert"])
def test_one_part_is_frozen_saved_and_counted_by_its_name(kind, tmp_path):
    whole = nn.ModuleDict({"eye": nn.Linear(2, 2), "decoder": fused(KINDS[kind])})
    choose_trainable(whole, ("decoder.fusion",))
    added = fusion_parameters(whole)
    assert {name for name, p in whole.named_parameters() if p.requires_grad} == added.keys() != set()
    model, bare = whole["decoder"], plain()
    assert sum(p.numel() for p in added.values()) == (
        sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in bare.parameters())
    )
    assert model.state_dict().keys() - bare.state_dict().keys() == {name.removeprefix("decoder.") for name in added}

    save(model, tmp_path / "own")
    again = load(tmp_path / "own")
    seen = pictures(KINDS[kind])
    assert torch.equal(again(IDS, pictures=seen), model(IDS, pictures=seen))


# ---- the text model stays as it is ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_picture_it_is_the_plain_decoder(kind):
    model, bare = fused(KINDS[kind]), plain()
    assert torch.equal(model(IDS), bare(IDS))
    cache, other = model.cache(3), bare.cache(3)
    for piece in IDS.split([4, 1, 6], dim=1):
        assert torch.equal(model(piece, cache=cache), bare(piece, cache=other))


@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("gated", [True, "channels"])
@pytest.mark.parametrize("kind", CROSS)
def test_closed_gates_leave_the_text_bit_for_bit(kind, gated, planned):
    fusion = CROSS[kind].with_(gated=gated)
    model, bare = fused(fusion, gates=0.0), plain()
    seen = pictures(fusion, plan=planned)
    assert torch.equal(model(IDS, pictures=seen), bare(IDS))
    start, rest = IDS[:, :6], IDS[:, 6:].split([1, 4], dim=1)
    if seen.plan is not None:
        first = picture_plan(MARKS[:, :6], EACH, joined=seen.plan.causal)
        seen = Looked(seen.features[:, : first.key_segments.shape[1]], first)
    cache, other = model.cache(3), bare.cache(3)
    assert torch.equal(model(start, cache=cache, pictures=seen), bare(start, cache=other))
    for piece in rest:
        assert torch.equal(model(piece, cache=cache), bare(piece, cache=other))


@pytest.mark.parametrize("kind", CROSS)
def test_new_fusions_start_closed_and_learn(kind):
    model = plain()
    model.fuse(CROSS[kind])
    seen = pictures(CROSS[kind])
    logits = model(IDS, pictures=seen)
    assert torch.equal(logits, plain()(IDS))
    (logits * torch.randn_like(logits)).sum().backward()
    gates = [p for name, p in fusion_parameters(model).items() if name.endswith(".gate")]
    assert len(gates) == 2 * len(CROSS[kind].at) and all(gate.grad.abs().min() > 0 for gate in gates)
    assert not torch.allclose(fused(CROSS[kind])(IDS, pictures=seen), logits)


@pytest.mark.parametrize("kind", CROSS)
def test_words_before_any_picture_see_none(kind):
    model, seen = fused(CROSS[kind]), pictures(CROSS[kind])
    other = Looked(torch.randn_like(seen.features), seen.plan)
    a, b = model(IDS, pictures=seen), model(IDS, pictures=other)
    assert torch.equal(a[1], b[1])  # a row without a picture
    assert torch.equal(a[0, :1], b[0, :1]) and torch.equal(a[2, :2], b[2, :2])
    assert not torch.allclose(a[0, 1:], b[0, 1:])
    if CROSS[kind].blind == "skip":
        torch.testing.assert_close(a[1], plain()(IDS)[1], rtol=1e-5, atol=1e-6)


# ---- the cache --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", CROSS)
def test_a_cache_of_pictures_equals_none_and_is_made_once(kind):
    model, seen = fused(CROSS[kind]), pictures(CROSS[kind])
    whole = model(IDS, pictures=seen)
    projected = []
    for block in model.fusion.blocks:
        block.branches["cross"].op.kv.register_forward_hook(lambda *_: projected.append(1))
    cache = model.cache(3)
    first = replace(seen.plan, segments=seen.plan.segments[:, :9])
    if first.index is not None:
        first = replace(first, index=first.index[:, :9])
    pieces = [model(IDS[:, :9], cache=cache, pictures=Looked(seen.features, first))]
    pieces += [model(piece, cache=cache) for piece in IDS[:, 9:].split(1, dim=1)]
    assert relative(torch.cat(pieces, 1), whole) <= 1e-5
    assert len(projected) == len(model.fusion.blocks)
    assert not cache.context.kept[0].k.requires_grad

    cache.clear()  # another text, without pictures
    assert torch.equal(model(IDS, cache=cache), model(IDS))


@pytest.mark.parametrize("kind", CROSS)
def test_rows_of_unequal_length_go_on_seeing_what_their_last_word_saw(kind):
    model = fused(CROSS[kind])
    rows = marks("·×···×·", "··××···")
    counts = torch.tensor([4, 7])  # the first row ends before its second picture would stand
    rows[0, 4:] = False
    seen = picture_plan(rows, EACH, joined=CROSS[kind].where == "inserted")
    features, ids = torch.randn(2, 2 * EACH, SEEN), IDS[:2]
    cache = model.cache(2)
    start = model(ids[:, :7], cache=cache, counts=counts, pictures=Looked(features, seen))
    more = torch.randint(0, VOCAB, (2, 3))
    steps = [model(more[:, :1], cache=cache), model(more[:, 1:], cache=cache)]
    for row, count in enumerate(counts.tolist()):
        text = torch.cat([ids[row, :count], more[row]])[None]
        here = torch.nn.functional.pad(rows[row : row + 1, :count], (0, 3))
        plan = picture_plan(here, EACH, joined=CROSS[kind].where == "inserted")
        alone = model(text, pictures=Looked(features[row : row + 1, : plan.key_segments.shape[1]], plan))[0]
        assert relative(start[row, :count], alone[:count]) <= 1e-5
        assert relative(torch.cat(steps, 1)[row], alone[count:]) <= 1e-5


@pytest.mark.parametrize("kind", ["expert", "some", "deepstack"])
def test_pictures_in_pieces_through_a_cache(kind):
    model, seen = fused(KINDS[kind]), pictures(KINDS[kind])
    whole = model(IDS, pictures=seen)
    cache, pieces = model.cache(3), []
    for start, end in ((0, 3), (3, 4), (4, 9), (9, 11)):
        mask = MASK[:, start:end]
        part = Marked(mask)
        if kind == "deepstack":
            spread = torch.zeros(3, *MASK.shape, WIDTH)
            spread[:, MASK] = seen.depths
            part = Stacked(mask, spread[:, :, start:end][:, mask])
        pieces.append(model(IDS[:, start:end], cache=cache, pictures=part if mask.any() else None))
    assert relative(torch.cat(pieces, 1), whole) <= 1e-5


# ---- who sees which picture -------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(st.lists(st.lists(st.booleans(), min_size=7, max_size=7), min_size=1, max_size=3), st.integers(1, 3))
def test_plans_are_those_of_the_processors(rows, each):
    here = torch.tensor(rows)
    most = int(here.sum(1).max())
    if not most:
        return
    sparse = [get_cross_attention_token_mask([int(m) for m in row], 1) for row in rows]
    dense = convert_sparse_cross_attention_mask_to_dense(sparse, [[1] * most] * len(rows), 1, 7)
    theirs = torch.from_numpy(dense)[..., 0].bool().repeat_interleave(each, -1)
    assert torch.equal(picture_plan(here, each, joined=True).mask(7, most * each, here.device)[:, 0], theirs)

    class Tokenizer:
        eos_token_id = 9

        def convert_tokens_to_ids(self, _):
            return 1

    last, _ = image_attention_mask_for_packed_input_ids_pt(here.long(), Tokenizer())
    theirs = (last[..., None] == torch.arange(most)).repeat_interleave(each, -1)
    assert torch.equal(picture_plan(here, each).mask(7, most * each, here.device)[:, 0], theirs)


# ---- the visual expert ------------------------------------------------------------------------------------------


def twin(model: Decoder, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """CogVLM's layer by the book: both sets of weights on every token, one result chosen by the mask."""
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
def test_an_expert_is_its_plain_twin(kind, data):
    L = data.draw(st.integers(1, 9))
    mask = torch.tensor(data.draw(st.lists(st.lists(st.booleans(), min_size=L, max_size=L), min_size=2, max_size=2)))
    model, ids = fused(KINDS[kind]), IDS[:2, :L]
    grads = []
    for run in (lambda: model.hidden(ids, pictures=Marked(mask)), lambda: twin(model, model.embed(ids), mask)):
        model.zero_grad()
        out = run()
        (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
        grads.append((out.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}))
    (found, ours), (wanted, theirs) = grads
    assert relative(found, wanted) <= 1e-5
    for name, grad in theirs.items():
        other = ours.get(name, torch.zeros_like(grad))
        torch.testing.assert_close(other, grad, rtol=0, atol=1e-4 * grad.abs().max() + 1e-6, msg=name)


def test_no_token_is_moved_or_changed_on_its_way():
    model = plain()
    model.fuse(ExpertConfig())
    start = model.fusion.start(torch.zeros(3, 11, WIDTH), Marked(MASK), None)
    x = torch.randint(-9, 9, (3, 11, WIDTH)).float()
    own, text = model.fusion.layers["1"]["qkv"], model.blocks[1].branches["self"].op.qkv
    with torch.no_grad():  # small integers add up exactly in any order
        for linear in (own, text):
            for p in linear.parameters():
                p.copy_(torch.randint(-9, 9, p.shape))
    assert torch.equal(start.route(1)("qkv", text, x), torch.where(MASK[..., None], own(x), text(x)))
    own.load_state_dict(text.state_dict())
    assert torch.equal(start.route(1)("qkv", text, x), text(x))


MLPS = {"gated": GatedConfig(hidden=28), "experts": ExpertsConfig(count=5, active=2, hidden=12)}


@pytest.mark.parametrize("mlp", MLPS)
def test_an_expert_starts_as_the_text(mlp):
    model = plain(block=config().block.with_(mlp=MLPS[mlp])).requires_grad_(False)
    bare = deepcopy(model)
    model.fuse(ExpertConfig())
    assert all(p.requires_grad for p in fusion_parameters(model).values())
    assert not any(p.requires_grad for p in bare.parameters())
    wanted = bare(IDS)
    # All tokens of one kind make the very products of the plain decoder; parts of them may be summed in other order.
    assert torch.equal(model(IDS, pictures=Marked(torch.ones_like(MASK))), wanted)
    assert torch.equal(model(IDS, pictures=Marked(torch.zeros_like(MASK))), wanted)
    model.double(), bare.double()
    assert relative(model(IDS, pictures=Marked(MASK)), bare(IDS)) <= 1e-13


# ---- what it costs ----------------------------------------------------------------------------------------------


def counted(call) -> int:
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


@pytest.mark.parametrize("kind", CROSS)
def test_flops_of_cross_attention(kind):
    model, bare, seen = fused(CROSS[kind]), plain(), pictures(CROSS[kind], plan=False)
    full = Work.full(11, 3)
    assert cost.flops(model, full) == cost.flops(bare, full) == counted(lambda: model(IDS, plan=Plan()))
    across = full.across(6, 3)
    assert cost.flops(model, across) == counted(lambda: model(IDS, plan=Plan(), pictures=seen))
    cache = model.cache(3, 11)
    model(IDS[:, :10], cache=cache, pictures=seen)
    step = Work.decode(11, 3).across(6, 3).with_(context=0)
    assert cost.flops(model, step) == counted(lambda: model(IDS[:, 10:], cache=cache))
    held = sum(k.nbytes + v.nbytes for k, v in cache.context.kept)
    for work in (step, Work.prefill(11, 3).across(6, 3)):
        found, without = cost.bytes(model, work), cost.bytes(bare, work)
        assert found.weights == sum(p.nbytes for p in model.parameters())
        assert found.cache == without.cache + held
    kv = sum(block.branches["cross"].op.kv.weight.nbytes for block in model.fusion.blocks)
    added = sum(p.nbytes for p in fusion_parameters(model).values())
    assert cost.bytes(model, step).read == cost.bytes(bare, step).read + added - kv
    assert cost.bytes(model, Work.decode(11, 3)).read == cost.bytes(bare, Work.decode(11, 3)).read


@pytest.mark.parametrize("kind", ["expert", "some", "deepstack"])
def test_flops_of_the_others_are_those_of_the_text(kind):
    model, seen, full = fused(KINDS[kind]), pictures(KINDS[kind]), Work.full(11, 3)
    assert cost.flops(model, full) == cost.flops(plain(), full)
    assert cost.flops(model, full) == counted(lambda: model(IDS, plan=Plan(), pictures=seen))
    added = sum(p.nbytes for p in fusion_parameters(model).values())
    bare = cost.bytes(plain(), full)
    assert cost.bytes(model, full) == bare._replace(weights=bare.weights + added)
    assert cost.bytes(model, full.with_(context=9)).read == bare.read + added
