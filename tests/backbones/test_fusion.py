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
from transformers import IdeficsConfig, MllamaForCausalLM, Qwen3VLTextConfig, Qwen3VLTextModel
from transformers.models.idefics.modeling_idefics import IdeficsGatedCrossAttentionLayer
from transformers.models.idefics.processing_idefics import image_attention_mask_for_packed_input_ids_pt
from transformers.models.mllama.configuration_mllama import MllamaTextConfig
from transformers.models.mllama.modeling_mllama import _prepare_cross_attention_mask
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
from vitrail.backbones.presets import DECODERS
from vitrail.errors import ConfigError, StreamError
from vitrail.hub import load, save
from vitrail.hub.decoders import decoder_moves
from vitrail.hub.maps import fuse_layer, layer, rename, under
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


@settings(max_examples=60, deadline=None)
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


# ---- transformers -----------------------------------------------------------------------------------------------


def pulled(moves, theirs: dict) -> dict:
    found = {}
    for move in moves:
        found.update(zip(move.ours, move.pull([theirs.pop(name) for name in move.theirs]), strict=True))
    assert not theirs
    return found


def same_gradients(ours: nn.Module, theirs: dict) -> None:
    for name, p in ours.named_parameters():
        wanted = theirs.pop(name)
        torch.testing.assert_close(p.grad, wanted, rtol=0, atol=1e-3 * wanted.abs().max() + 1e-6, msg=name)
    assert not theirs


def cross_moves(fusion: CrossConfig, block: BlockConfig, gates: tuple[str, str], names: tuple[str, str]):
    """One of our blocks against a gated cross-attention layer of transformers."""
    made = fusion.block(block)
    attention, op = made.attention, "branches.cross.op"
    rows = attention.groups * attention.channels(made.width)
    norms = [
        *layer(f"{op}.q_norm", f"cross_attn.{names[0]}", False),
        *layer(f"{op}.k_norm", f"cross_attn.{names[1]}", False),
    ]
    return [
        *layer(f"{op}.q", "cross_attn.q_proj", False),
        *fuse_layer(f"{op}.kv", ["cross_attn.k_proj", "cross_attn.v_proj"], [rows, rows], False),
        *layer(f"{op}.out", "cross_attn.o_proj", False),
        *(norms if attention.qk_norm else []),
        *layer("branches.cross.norm", "input_layernorm", False),
        *layer("branches.mlp.norm", "post_attention_layernorm", False),
        *fuse_layer("branches.mlp.op.gate_up", ["mlp.gate_proj", "mlp.up_proj"], [made.mlp.hidden] * 2, False),
        *layer("branches.mlp.op.down", "mlp.down_proj", False),
        rename("branches.cross.gate", gates[0]),
        rename("branches.mlp.gate", gates[1]),
    ]


def llama_vision(text: BlockConfig, crossed: tuple[int, ...], total: int, vocab: int, theta: float = 1e4):
    attention = AttentionConfig(
        heads=text.attention.heads, kv_heads=text.attention.kv_heads, qk_norm="rms", eps=text.eps
    )
    return DecoderConfig(
        vocab=vocab,
        layers=total - len(crossed),
        block=text,
        rotary=RotaryConfig(head_dim=text.attention.channels(text.width), theta=theta),
        fusion=CrossConfig(at=crossed, where="inserted", attention=attention, blind="skip"),
    )


@pytest.mark.parametrize(
    ("rows", "crossed"),
    [
        (("×·····", "×··×··"), (1, 4)),
        (("×××···", "×·××··"), (0, 1, 5)),
        (("·×··×·", "······"), (2,)),  # words that see nothing
        (("···××·", "·×·×·×"), (0, 3)),
    ],
)
def test_llama_vision(rows, crossed):
    heads, width, hidden, total, vocab, tokens = 6, 36, 22, 6, 31, 3
    theirs = MllamaTextConfig(
        vocab_size=vocab,
        hidden_size=width,
        num_hidden_layers=total,
        num_attention_heads=heads,
        num_key_value_heads=2,
        intermediate_size=hidden,
        cross_attention_layers=list(crossed),
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        rms_norm_eps=1e-5,
        pad_token_id=0,
    )
    theirs.head_dim = None
    theirs._attn_implementation = "eager"
    reference = randomize(MllamaForCausalLM(theirs), seed=3).eval()
    attention = AttentionConfig(heads=heads, kv_heads=2)
    text = BlockConfig(width=width, attention=attention, mlp=GatedConfig(hidden=hidden), norm="rms", eps=1e-5)
    ours = Decoder(llama_vision(text, crossed, total, vocab + 8)).eval()

    selfs = [i for i in range(total) if i not in crossed]
    moves = [
        move._replace(theirs=tuple(_renumbered(name, selfs) for name in move.theirs))
        for move in decoder_moves(ours.config)
    ]
    gates = ("cross_attn_attn_gate", "cross_attn_mlp_gate")
    one = cross_moves(ours.config.fusion, text, gates, ("q_norm", "k_norm"))
    for n, i in enumerate(crossed):
        moves += under(f"fusion.blocks.{n}.", f"model.layers.{i}.", one)

    def taken(tensors):  # eight rows more in the table than in the head
        tensors = dict(tensors)
        tensors["lm_head.weight"] = nn.functional.pad(tensors["lm_head.weight"], (0, 0, 0, 8))
        return pulled(moves, tensors)

    ours.load_state_dict(taken(reference.state_dict()))

    here, ids = marks(*rows), torch.randint(1, vocab, (2, 6))
    count = int(here.sum(1).max())
    tiles = torch.randint(1, 3, (2, count))  # one or two tiles a picture, of room for two
    sparse = [get_cross_attention_token_mask([int(m) for m in row], 1) for row in here.tolist()]
    dense = torch.from_numpy(convert_sparse_cross_attention_mask_to_dense(sparse, tiles.tolist(), 2, 6))
    mask, rows_seen = _prepare_cross_attention_mask(dense, tokens, torch.float32)
    states = torch.randn(2, count * 2 * tokens, width, requires_grad=True)
    if not rows_seen.all():
        # Llama's own code zeroes the attention of words that see nothing; transformers' lets them see every picture.
        for i in crossed:
            reference.model.layers[i].cross_attn.register_forward_hook(
                lambda _, __, out: (out[0] * rows_seen[:, 0], None)
            )

    logits = reference(
        ids, cross_attention_states=states, cross_attention_mask=mask, full_text_row_masked_out_mask=rows_seen
    ).logits
    plan = picture_plan(here, 2 * tokens, joined=True)
    there = (torch.arange(2) < tiles[..., None]).flatten(1).repeat_interleave(tokens, 1)
    plan = replace(plan, key_segments=plan.key_segments.where(there, -1))
    own = states.detach().clone().requires_grad_()
    found = ours(ids, pictures=Looked(own, plan))[..., :vocab]
    assert relative(found, logits) <= 1e-4
    weight = torch.randn_like(logits)
    (logits * weight).sum().backward()
    (found * weight).sum().backward()
    assert relative(own.grad, states.grad) <= 1e-4
    same_gradients(ours, taken({name: p.grad for name, p in reference.named_parameters()}))

    without = reference(ids).logits
    assert relative(ours(ids)[..., :vocab], without) <= 1e-4


def _renumbered(name: str, numbers: list[int]) -> str:
    parts = name.split(".")
    if parts[:2] == ["model", "layers"]:
        parts[2] = str(numbers[int(parts[2])])
    return ".".join(parts)


@pytest.mark.parametrize("alpha", ["float", "vector"])
@pytest.mark.parametrize("normed", [False, True])
def test_idefics_layer(alpha, normed):
    heads, width, hidden, eye = 3, 24, 17, 10
    theirs = IdeficsConfig(
        hidden_size=width,
        num_attention_heads=heads,
        intermediate_size=hidden,
        alpha_type=alpha,
        qk_layer_norms=normed,
        vision_config={"embed_dim": eye},
        rms_norm_eps=1e-5,
    )
    theirs._attn_implementation = "eager"
    reference = randomize(IdeficsGatedCrossAttentionLayer(theirs, layer_idx=0), seed=4, spread=0.3).eval()
    attention = AttentionConfig(heads=heads, qk_norm="rms" if normed else None, eps=1e-5)
    text = BlockConfig(width=width, attention=attention, mlp=GatedConfig(hidden=hidden), norm="rms", eps=1e-5)
    fusion = CrossConfig(at=(0,), context_width=eye, gated="channels" if alpha == "vector" else True)
    ours = Decoder(
        DecoderConfig(vocab=9, layers=1, block=text, rotary=RotaryConfig(head_dim=8), fusion=fusion)
    ).fusion.blocks[0]
    moves = cross_moves(fusion, text, ("alpha_cross_attn", "alpha_dense"), ("q_layer_norm", "k_layer_norm"))

    def taken(tensors):
        return {name: t.flatten() if name.endswith("gate") else t for name, t in pulled(moves, dict(tensors)).items()}

    ours.load_state_dict(taken(reference.state_dict()))
    plan = picture_plan(MARKS, EACH)  # with words that see nothing
    seen = plan.mask(11, 3 * EACH, MARKS.device)
    x, features = torch.randn(3, 11, width), torch.randn(3, 3 * EACH, eye)
    wanted = reference(
        x,
        image_hidden_states=features,
        image_attention_mask=torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min),
        cross_attention_gate=seen[:, 0].any(-1).float(),
    )
    found = ours(x, context=features, context_plan=plan)
    assert relative(found, wanted) <= 1e-5
    weight = torch.randn_like(wanted)
    (wanted * weight).sum().backward()
    (found * weight).sum().backward()
    same_gradients(ours, taken({name: p.grad for name, p in reference.named_parameters()}))


def test_blocks_stand_where_they_should():
    model = fused(CROSS["flamingo"])
    seen, x = pictures(CROSS["flamingo"], plan=False), model.embed(IDS)
    rotation = model.rotary(torch.arange(11)[None])
    for i, block in enumerate(model.blocks):
        if i in (0, 2):
            x = model.fusion.blocks[i // 2](x, context=seen.features)
        x = block(x, Plan(causal=True), rotation=rotation)
    assert torch.equal(model.hidden(IDS, pictures=seen), model.norm(x))


@pytest.mark.parametrize("depths", [1, 3])
def test_qwen3_vl(depths):
    heads, width, hidden, total, vocab, D = 4, 26, 19, 4, 41, 12
    theirs = Qwen3VLTextConfig(
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=hidden,
        num_hidden_layers=total,
        num_attention_heads=heads,
        num_key_value_heads=2,
        head_dim=D,
        rms_norm_eps=1e-6,
        rope_parameters={
            "rope_type": "default", "rope_theta": 5e4, "mrope_section": [2, 2, 2], "mrope_interleaved": True
        },
    )  # fmt: skip
    theirs._attn_implementation = "eager"
    reference = randomize(Qwen3VLTextModel(theirs), seed=6).eval()
    attention = AttentionConfig(heads=heads, kv_heads=2, head_dim=D, qk_norm="rms")
    ours = Decoder(
        DecoderConfig(
            vocab=vocab,
            layers=total,
            block=BlockConfig(width=width, attention=attention, mlp=GatedConfig(hidden=hidden), norm="rms"),
            rotary=RotaryConfig(head_dim=D, theta=5e4, layout="mrope_interleaved", sections=(2, 2, 2)),
            tied=True,
            fusion=DeepStackConfig(at=tuple(range(depths))),
        )
    ).eval()
    moves = [
        move._replace(theirs=tuple(name.removeprefix("model.") for name in move.theirs))
        for move in decoder_moves(ours.config)
    ]
    ours.load_state_dict(pulled(moves, dict(reference.state_dict())))
    ids, positions = torch.randint(0, vocab, (3, 11)), torch.randint(0, 30, (3, 3, 11))  # (t, h, w) first
    stack = torch.randn(depths, int(MASK.sum()), width, requires_grad=True)
    own = stack.detach().clone().requires_grad_()
    wanted = reference(
        ids, position_ids=positions, visual_pos_masks=MASK, deepstack_visual_embeds=list(stack)
    ).last_hidden_state
    found = ours.hidden(ids, positions=positions.permute(1, 2, 0), pictures=Stacked(MASK, own))
    assert relative(found, wanted) <= 1e-4
    weight = torch.randn_like(wanted)
    (wanted * weight).sum().backward()
    (found * weight).sum().backward()
    assert relative(own.grad, stack.grad) <= 1e-4
    same_gradients(ours, pulled(moves, {name: p.grad for name, p in reference.named_parameters()}))
    without = reference(ids, position_ids=positions).last_hidden_state
    assert relative(ours.hidden(ids, positions=positions.permute(1, 2, 0)), without) <= 1e-4


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
@settings(max_examples=12, deadline=None)
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


def test_llama_3_2_vision_at_its_published_size():
    crossed = tuple(range(3, 40, 5))
    text = DECODERS["llama-3.1-8b"].block
    with torch.device("meta"):
        ours = Decoder(llama_vision(text, crossed, 40, 128_256, theta=5e5))
        theirs = MllamaForCausalLM(MllamaTextConfig(cross_attention_layers=list(crossed)))
    extra = 8 * 4096  # rows of their table
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters()) - extra
    assert sum(p.numel() for p in fusion_parameters(ours).values()) == 8 * 218_112_258
