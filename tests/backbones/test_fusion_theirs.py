"""Agreement of fusion with transformers: Llama 3.2 Vision, IDEFICS and Qwen3-VL; values and gradients."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import IdeficsConfig, MllamaForCausalLM, Qwen3VLTextConfig, Qwen3VLTextModel
from transformers.models.idefics.modeling_idefics import IdeficsGatedCrossAttentionLayer
from transformers.models.mllama.configuration_mllama import MllamaTextConfig
from transformers.models.mllama.modeling_mllama import _prepare_cross_attention_mask
from transformers.models.mllama.processing_mllama import (
    convert_sparse_cross_attention_mask_to_dense,
    get_cross_attention_token_mask,
)

from backbones.test_fusion import CROSS, EACH, IDS, MARKS, MASK, make_fused, marks, pictures
from helpers import randomize, relative
from vitrail.backbones.decoder import Decoder, DecoderConfig
from vitrail.backbones.fusion import (
    CrossAttentionFusionConfig,
    CrossAttentionInputs,
    DeepStackConfig,
    DeepStackInputs,
    get_fusion_parameters,
    make_image_plan,
)
from vitrail.backbones.presets import DECODER_PRESETS
from vitrail.hub.decoder_families import build_decoder_rules
from vitrail.hub.tensor_rules import add_prefix, fuse_layer, rename, rename_layer
from vitrail.nn import AttentionConfig, AttentionPlan, BlockConfig, GatedMLPConfig, RotaryConfig


def convert_state(moves, theirs: dict) -> dict:
    found = {}
    for move in moves:
        found.update(zip(move.native, move.load([theirs.pop(name) for name in move.hf]), strict=True))
    assert not theirs
    return found


def assert_same_gradients(ours: nn.Module, theirs: dict) -> None:
    for name, p in ours.named_parameters():
        wanted = theirs.pop(name)
        torch.testing.assert_close(p.grad, wanted, rtol=0, atol=1e-3 * wanted.abs().max() + 1e-6, msg=name)
    assert not theirs


def cross_attention_rules(
    fusion: CrossAttentionFusionConfig, block: BlockConfig, gates: tuple[str, str], names: tuple[str, str]
):
    """Rules between a cross-attention block and a gated cross-attention layer of transformers."""
    made = fusion.block_config(block)
    attention, op = made.attention, "branches.cross.op"
    rows = attention.num_kv_heads * attention.resolve_head_dim(made.width)
    norms = [
        *rename_layer(f"{op}.q_norm", f"cross_attn.{names[0]}", False),
        *rename_layer(f"{op}.k_norm", f"cross_attn.{names[1]}", False),
    ]
    return [
        *rename_layer(f"{op}.q", "cross_attn.q_proj", False),
        *fuse_layer(f"{op}.kv", ["cross_attn.k_proj", "cross_attn.v_proj"], [rows, rows], False),
        *rename_layer(f"{op}.out", "cross_attn.o_proj", False),
        *(norms if attention.qk_norm else []),
        *rename_layer("branches.cross.norm", "input_layernorm", False),
        *rename_layer("branches.mlp.norm", "post_attention_layernorm", False),
        *fuse_layer(
            "branches.mlp.op.gate_up", ["mlp.gate_proj", "mlp.up_proj"], [made.mlp.intermediate_size] * 2, False
        ),
        *rename_layer("branches.mlp.op.down", "mlp.down_proj", False),
        rename("branches.cross.gate", gates[0]),
        rename("branches.mlp.gate", gates[1]),
    ]


def llama_vision(text: BlockConfig, crossed: tuple[int, ...], total: int, vocab: int, theta: float = 1e4):
    attention = AttentionConfig(
        heads=text.attention.heads, kv_heads=text.attention.kv_heads, qk_norm="rms", eps=text.eps
    )
    return DecoderConfig(
        vocab_size=vocab,
        layers=total - len(crossed),
        block=text,
        rotary=RotaryConfig(head_dim=text.attention.resolve_head_dim(text.width), theta=theta),
        fusion=CrossAttentionFusionConfig(
            layer_indices=crossed, placement="inserted", attention=attention, without_image="skip"
        ),
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
    text = BlockConfig(
        width=width, attention=attention, mlp=GatedMLPConfig(intermediate_size=hidden), norm="rms", eps=1e-5
    )
    ours = Decoder(llama_vision(text, crossed, total, vocab + 8)).eval()

    selfs = [i for i in range(total) if i not in crossed]
    moves = [
        move._replace(hf=tuple(_renumber(name, selfs) for name in move.hf)) for move in build_decoder_rules(ours.config)
    ]
    gates = ("cross_attn_attn_gate", "cross_attn_mlp_gate")
    one = cross_attention_rules(ours.config.fusion, text, gates, ("q_norm", "k_norm"))
    for n, i in enumerate(crossed):
        moves += add_prefix(f"fusion.blocks.{n}.", f"model.layers.{i}.", one)

    def taken(tensors):  # eight rows more in the table than in the head
        tensors = dict(tensors)
        tensors["lm_head.weight"] = nn.functional.pad(tensors["lm_head.weight"], (0, 0, 0, 8))
        return convert_state(moves, tensors)

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
    plan = make_image_plan(here, 2 * tokens, join_adjacent=True)
    there = (torch.arange(2) < tiles[..., None]).flatten(1).repeat_interleave(tokens, 1)
    plan = replace(plan, key_segments=plan.key_segments.where(there, -1))
    own = states.detach().clone().requires_grad_()
    found = ours(ids, fusion_inputs=CrossAttentionInputs(own, plan))[..., :vocab]
    assert relative(found, logits) <= 1e-4
    weight = torch.randn_like(logits)
    (logits * weight).sum().backward()
    (found * weight).sum().backward()
    assert relative(own.grad, states.grad) <= 1e-4
    assert_same_gradients(ours, taken({name: p.grad for name, p in reference.named_parameters()}))

    without = reference(ids).logits
    assert relative(ours(ids)[..., :vocab], without) <= 1e-4


def _renumber(name: str, numbers: list[int]) -> str:
    parts = name.split(".")
    if parts[:2] == ["model", "layers"]:
        parts[2] = str(numbers[int(parts[2])])
    return ".".join(parts)


@pytest.mark.parametrize("alpha", ["float", "vector"])
@pytest.mark.parametrize("normed", [False, True])
def test_idefics_layer(alpha, normed):
    heads, width, hidden, image_embedder = 3, 24, 17, 10
    theirs = IdeficsConfig(
        hidden_size=width,
        num_attention_heads=heads,
        intermediate_size=hidden,
        alpha_type=alpha,
        qk_layer_norms=normed,
        vision_config={"embed_dim": image_embedder},
        rms_norm_eps=1e-5,
    )
    theirs._attn_implementation = "eager"
    reference = randomize(IdeficsGatedCrossAttentionLayer(theirs, layer_idx=0), seed=4, spread=0.3).eval()
    attention = AttentionConfig(heads=heads, qk_norm="rms" if normed else None, eps=1e-5)
    text = BlockConfig(
        width=width, attention=attention, mlp=GatedMLPConfig(intermediate_size=hidden), norm="rms", eps=1e-5
    )
    fusion = CrossAttentionFusionConfig(
        layer_indices=(0,), context_width=image_embedder, gated="channels" if alpha == "vector" else True
    )
    ours = Decoder(
        DecoderConfig(vocab_size=9, layers=1, block=text, rotary=RotaryConfig(head_dim=8), fusion=fusion)
    ).fusion.blocks[0]
    moves = cross_attention_rules(fusion, text, ("alpha_cross_attn", "alpha_dense"), ("q_layer_norm", "k_layer_norm"))

    def taken(tensors):
        return {
            name: t.flatten() if name.endswith("gate") else t for name, t in convert_state(moves, dict(tensors)).items()
        }

    ours.load_state_dict(taken(reference.state_dict()))
    plan = make_image_plan(MARKS, EACH)  # with words that see nothing
    seen = plan.mask(11, 3 * EACH, MARKS.device)
    x, features = torch.randn(3, 11, width), torch.randn(3, 3 * EACH, image_embedder)
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
    assert_same_gradients(ours, taken({name: p.grad for name, p in reference.named_parameters()}))


def test_insertion_points():
    model = make_fused(CROSS["flamingo"])
    seen, x = pictures(CROSS["flamingo"], plan=False), model.embed(IDS)
    rotation = model.rotary(torch.arange(11)[None])
    for i, block in enumerate(model.blocks):
        if i in (0, 2):
            x = model.fusion.blocks[i // 2](x, context=seen.features)
        x = block(x, AttentionPlan(causal=True), rotation=rotation)
    assert torch.equal(model.forward_hidden(IDS, fusion_inputs=seen), model.norm(x))


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
            vocab_size=vocab,
            layers=total,
            block=BlockConfig(
                width=width, attention=attention, mlp=GatedMLPConfig(intermediate_size=hidden), norm="rms"
            ),
            rotary=RotaryConfig(head_dim=D, theta=5e4, layout="mrope_interleaved", sections=(2, 2, 2)),
            tie_word_embeddings=True,
            fusion=DeepStackConfig(layer_indices=tuple(range(depths))),
        )
    ).eval()
    moves = [
        move._replace(hf=tuple(name.removeprefix("model.") for name in move.hf))
        for move in build_decoder_rules(ours.config)
    ]
    ours.load_state_dict(convert_state(moves, dict(reference.state_dict())))
    ids, positions = torch.randint(0, vocab, (3, 11)), torch.randint(0, 30, (3, 3, 11))  # (t, h, w) first
    stack = torch.randn(depths, int(MASK.sum()), width, requires_grad=True)
    own = stack.detach().clone().requires_grad_()
    wanted = reference(
        ids, position_ids=positions, visual_pos_masks=MASK, deepstack_visual_embeds=list(stack)
    ).last_hidden_state
    found = ours.forward_hidden(ids, positions=positions.permute(1, 2, 0), fusion_inputs=DeepStackInputs(MASK, own))
    assert relative(found, wanted) <= 1e-4
    weight = torch.randn_like(wanted)
    (wanted * weight).sum().backward()
    (found * weight).sum().backward()
    assert relative(own.grad, stack.grad) <= 1e-4
    assert_same_gradients(ours, convert_state(moves, {name: p.grad for name, p in reference.named_parameters()}))
    without = reference(ids, position_ids=positions).last_hidden_state
    assert relative(ours.forward_hidden(ids, positions=positions.permute(1, 2, 0)), without) <= 1e-4


def test_llama_3_2_vision_published_size():
    crossed = tuple(range(3, 40, 5))
    text = DECODER_PRESETS["llama-3.1-8b"].block
    with torch.device("meta"):
        ours = Decoder(llama_vision(text, crossed, 40, 128_256, theta=5e5))
        theirs = MllamaForCausalLM(MllamaTextConfig(cross_attention_layers=list(crossed)))
    extra = 8 * 4096  # rows of their table
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters()) - extra
    assert sum(p.numel() for p in get_fusion_parameters(ours).values()) == 8 * 218_112_258
