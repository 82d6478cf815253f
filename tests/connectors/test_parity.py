"""Agreement with transformers: values and gradients of odd shapes, with converted weights."""

import pytest
import torch
from torch import Tensor, nn

from helpers import randomize, relative
from vitrail.connectors import (
    FusedQueryConfig,
    FusedQueryConnector,
    Merger,
    MergerConfig,
    Projector,
    ProjectorConfig,
    QFormer,
    QFormerConfig,
    Resampler,
    ResamplerConfig,
    make_connector,
)
from vitrail.connectors.feature_reduction import compute_attention_scores
from vitrail.connectors.presets import CONNECTOR_PRESETS
from vitrail.hub.blip2 import build_qformer_rules
from vitrail.hub.tensor_rules import TensorRule, add_prefix, fuse, fuse_layer, rename, rename_layer
from vitrail.processing.grid import Grid

transformers = pytest.importorskip("transformers")

CLOSE = 1e-5


def convert_state(moves: list[TensorRule], theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert a transformers state dict to native names; assert that every tensor is used."""
    assert {name for move in moves for name in move.hf} == set(theirs)
    ours = {}
    for move in moves:
        ours |= dict(zip(move.native, move.load([theirs[name] for name in move.hf]), strict=True))
    return ours


def load(ours: nn.Module, theirs: nn.Module, moves: list[TensorRule], missing: set[str] = frozenset()) -> None:
    """Load random weights into both models; `missing` are native tensors that transformers does not have."""
    randomize(ours, seed=1)
    randomize(theirs)
    theirs.eval()
    lacking, unexpected = ours.load_state_dict(convert_state(moves, theirs.state_dict()), strict=False)
    assert not unexpected and set(lacking) == set(missing)
    for move in moves:  # export is import read backwards
        back = move.export([ours.state_dict()[name] for name in move.native])
        assert all(torch.equal(a, theirs.state_dict()[n]) for a, n in zip(back, move.hf, strict=True))


def assert_agreement(
    ours: nn.Module, theirs: nn.Module, moves: list[TensorRule], mine: Tensor, reference: Tensor, *inputs
) -> None:
    """Compare values, and gradients of all weights and inputs."""
    assert mine.shape == reference.shape and relative(mine, reference) <= CLOSE
    pull = torch.randn(mine.shape)
    (mine * pull).sum().backward()
    (reference * pull).sum().backward()
    grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in theirs.named_parameters()}
    wanted, own = convert_state(moves, grads), dict(ours.named_parameters())
    scale = max(grad.abs().max() for grad in wanted.values())
    for name, grad in wanted.items():
        got = torch.zeros_like(grad) if own[name].grad is None else own[name].grad
        assert (got - grad).abs().max() <= 3 * CLOSE * max(scale, 1), name
    for a, b in inputs:
        assert relative(a.grad, b.grad.reshape(a.shape)) <= 3 * CLOSE


def twins(*shape: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(*shape)
    return x.clone().requires_grad_(), x.clone().requires_grad_()


# ---- projector and mergers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("input_width, output_width, bias", [(7, 10, True), (13, 6, False)])
def test_llava(input_width, output_width, bias):
    from transformers.models.llava.modeling_llava import LlavaConfig, LlavaMultiModalProjector

    config = LlavaConfig(
        vision_config={"model_type": "clip_vision_model", "hidden_size": input_width, "num_attention_heads": 1},
        text_config={"model_type": "llama", "hidden_size": output_width, "num_attention_heads": 1},
        multimodal_projector_bias=bias,
    )
    theirs = LlavaMultiModalProjector(config)
    ours = Projector(ProjectorConfig(in_features=input_width, out_features=output_width, bias=bias))
    moves = rename_layer("layers.linears.0", "linear_1", bias) + rename_layer("layers.linears.1", "linear_2", bias)
    load(ours, theirs, moves)
    a, b = twins(3, 17, input_width)
    assert_agreement(ours, theirs, moves, ours(a), theirs(b), (a, b))


def to_raster_order(blocks: Tensor, grid: Grid, m: int) -> Tensor:
    """Reorder features (B, N, …) from block order to to_raster_order order."""
    out = torch.empty_like(blocks)
    i = 0
    for t in range(grid.t):
        for top in range(0, grid.h, m):
            for left in range(0, grid.w, m):
                for y in range(top, top + m):
                    for x in range(left, left + m):
                        out[:, (t * grid.h + y) * grid.w + x] = blocks[:, i]
                        i += 1
    return out


@pytest.mark.parametrize("order", ["blocks", "raster"])
@pytest.mark.parametrize("m, t, h, w", [(2, 1, 2, 6), (2, 3, 4, 2), (3, 1, 3, 6)])
def test_qwen2_vl(order, m, t, h, w):
    from transformers.models.qwen2_vl.modeling_qwen2_vl import PatchMerger

    theirs = PatchMerger(9, 5, m)
    ours = Merger(MergerConfig(in_features=5, out_features=9, merge=m, order=order))
    moves = (
        rename_layer("norm", "ln_q")
        + rename_layer("layers.linears.0", "mlp.0")
        + rename_layer("layers.linears.1", "mlp.2")
    )
    load(ours, theirs, moves)
    grid, x = Grid(t=t, h=h, w=w), torch.randn(2, t * h * w, 5)
    ours_in = (x if order == "blocks" else to_raster_order(x, grid, m)).requires_grad_()
    theirs_in = x.detach().clone().requires_grad_()
    assert_agreement(ours, theirs, moves, ours(ours_in, grid), theirs(theirs_in).view(2, -1, 9))
    wanted = theirs_in.grad if order == "blocks" else to_raster_order(theirs_in.grad, grid, m)
    assert relative(ours_in.grad, wanted) <= 3 * CLOSE


@pytest.mark.parametrize("after", [False, True], ids=["main", "deepstack"])
def test_qwen3_vl(after):
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionPatchMerger

    config = Qwen3VLVisionConfig(hidden_size=6, out_hidden_size=7, spatial_merge_size=2)
    theirs = Qwen3VLVisionPatchMerger(config, use_postshuffle_norm=after)
    norm_at = "after" if after else "before"
    ours = Merger(MergerConfig(in_features=6, out_features=7, norm_position=norm_at, order="blocks"))
    moves = (
        rename_layer("norm", "norm")
        + rename_layer("layers.linears.0", "linear_fc1")
        + rename_layer("layers.linears.1", "linear_fc2")
    )
    load(ours, theirs, moves)
    a, b = twins(3, 4 * 6, 6)
    assert_agreement(ours, theirs, moves, ours(a, Grid(h=4, w=6)), theirs(b.flatten(0, 1)).view(3, -1, 7), (a, b))


@pytest.mark.parametrize("h, w", [(4, 4), (2, 6), (8, 2)])
def test_internvl(h, w):
    from transformers.models.internvl.modeling_internvl import (
        InternVLConfig,
        InternVLModel,
        InternVLMultiModalProjector,
    )

    config = InternVLConfig(
        vision_config={"hidden_size": 5, "num_attention_heads": 1},
        text_config={"model_type": "qwen2", "hidden_size": 7, "num_attention_heads": 1},
        downsample_ratio=0.5,
    )
    theirs = InternVLMultiModalProjector(config)
    ours = Merger(MergerConfig(in_features=5, out_features=7, intermediate_size=7, norm_position="after", eps=1e-5))
    moves = (
        rename_layer("norm", "layer_norm")
        + rename_layer("layers.linears.0", "linear_1")
        + rename_layer("layers.linears.1", "linear_2")
    )
    load(ours, theirs, moves)
    a, b = twins(2, h * w, 5)
    shuffled = InternVLModel.pixel_shuffle(None, b.reshape(2, h, w, 5), 0.5)
    assert_agreement(ours, theirs, moves, ours(a, Grid(h=h, w=w)), theirs(shuffled).flatten(1, 2), (a, b))


# ---- Q-Former ----------------------------------------------------------------------------------------------------


def qformers(**more) -> tuple[QFormer, nn.Module, list[TensorRule]]:
    config = QFormerConfig(
        **{
            "in_features": 10,
            "out_features": 6,
            "num_queries": 5,
            "layers": 3,
            "width": 12,
            "heads": 3,
            "intermediate_size": 20,
            "use_text": True,
        }
        | more
    )
    theirs = transformers.Blip2QFormerModel(
        transformers.Blip2QFormerConfig(
            hidden_size=config.width,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            intermediate_size=config.intermediate_size,
            encoder_hidden_size=config.in_features,
            cross_attention_frequency=config.cross_attention_frequency,
            use_qformer_text_input=config.use_text,
        )
    )
    ours, moves = QFormer(config), build_qformer_rules(config)
    load(ours, theirs, moves, {"queries", "project.weight", "project.bias"})
    return ours, theirs, moves


@pytest.mark.parametrize("every, text", [(2, False), (1, True), (3, True)])
def test_qformer_image_pass(every, text):
    ours, theirs, moves = qformers(cross_attention_frequency=every, use_text=text)
    a, b = twins(2, 7, 10)
    queries = ours.queries.detach().expand(2, -1, -1)
    reference = theirs(query_embeds=queries, encoder_hidden_states=b).last_hidden_state
    assert_agreement(ours, theirs, moves, ours.encode_queries(a), reference, (a, b))
    assert torch.equal(ours(a), ours.project(ours.encode_queries(a)))


def test_qformer_text_pass():
    ours, theirs, moves = qformers()
    real = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]).bool()
    a, b = twins(2, 4, 12)
    mine = ours.encode_text(a, real)
    reference = theirs(query_embeds=b, query_length=0, attention_mask=real.long()).last_hidden_state
    assert_agreement(ours, theirs, moves, mine[real], reference[real], (a, b))


@pytest.mark.parametrize("task", ["itc", "itm", "itg"])
def test_qformer_joint_passes(task):
    """Compare with the transformers model, with each task's mask written out."""
    ours, theirs, moves = qformers()
    Q, T = 5, 4
    real = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]]).bool()
    seen = torch.zeros(2, 1, Q + T, Q + T, dtype=torch.bool)
    for b in range(2):
        for i in range(Q + T):
            for j in range(Q + T):
                words = i >= Q, j >= Q
                if task == "itc":
                    see = words[0] == words[1]
                elif task == "itm":
                    see = True
                else:
                    see = not words[1] or (words[0] and j <= i)
                seen[b, 0, i, j] = see and (not words[1] or bool(real[b, j - Q]))
    a, b = twins(2, 7, 10)
    text_a, text_b = twins(2, T, 12)
    embeds = torch.cat([ours.queries.detach().expand(2, -1, -1), text_b], dim=1)
    reference = theirs(
        query_embeds=embeds, query_length=Q, attention_mask=seen, encoder_hidden_states=b
    ).last_hidden_state
    queries, words = ours.encode_jointly(a, text_a, task, text_mask=real)
    mine = torch.cat([queries.flatten(0, 1), words[real]])
    wanted = torch.cat([reference[:, :Q].flatten(0, 1), reference[:, Q:][real]])
    assert_agreement(ours, theirs, moves, mine, wanted, (a, b), (text_a, text_b))


# ---- resampler ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads, head_dim, qk_norm", [(3, 5, False), (2, 4, True)])
def test_idefics(heads, head_dim, qk_norm):
    from transformers.models.idefics.configuration_idefics import IdeficsConfig
    from transformers.models.idefics.perceiver import IdeficsPerceiverResampler

    width, depth, M = 9, 2, 4
    about = IdeficsConfig(vision_config={"embed_dim": width}, perceiver_config={"qk_layer_norms_perceiver": qk_norm})
    theirs = IdeficsPerceiverResampler(about, width, depth, heads, head_dim, M)
    config = ResamplerConfig(
        in_features=width,
        out_features=width,
        num_latents=M,
        layers=depth,
        heads=heads,
        head_dim=head_dim,
        activation="relu",
        qk_norm="layer" if qk_norm else None,
    )
    ours = Resampler(config)
    moves = [rename("latents", "latents"), *rename_layer("norm", "layer_norm")]
    for i in range(depth):
        joint, mlp, rows = f"blocks.{i}.branches.joint", f"blocks.{i}.branches.mlp", heads * head_dim
        one = rename_layer(f"{joint}.norm", "0.latents_layer_norm") + rename_layer(
            f"{joint}.context_norm", "0.context_layer_norm"
        )
        one += [rename(f"{joint}.op.q.weight", "0.q_proj.weight")]
        one += [fuse(f"{joint}.op.kv.weight", ["0.k_proj.weight", "0.v_proj.weight"], [rows] * 2)]
        one += [rename(f"{joint}.op.out.weight", "0.output_proj.weight")]
        if qk_norm:
            one += rename_layer(f"{joint}.op.q_norm", "0.q_layer_norm") + rename_layer(
                f"{joint}.op.k_norm", "0.k_layer_norm"
            )
        one += rename_layer(f"{mlp}.norm", "1.ln")
        one += [rename(f"{mlp}.op.up.weight", "1.fc.weight"), rename(f"{mlp}.op.down.weight", "1.c_proj.weight")]
        moves += add_prefix("", f"blocks.{i}.", one)
    load(ours, theirs, moves)
    a, b = twins(3, 11, width)
    assert_agreement(ours, theirs, moves, ours(a), theirs(b), (a, b))


# ---- fused queries -----------------------------------------------------------------------------------------------


def test_fused_queries_match_llama():
    """Build the whole sequence by hand, without padding, one row at a time."""
    config = FusedQueryConfig(
        in_features=6,
        out_features=5,
        vocab_size=20,
        first_queries=4,
        later_queries=2,
        layers=2,
        width=8,
        heads=2,
        intermediate_size=12,
    )
    ours = FusedQueryConnector(config)
    about = transformers.LlamaConfig(
        hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=12, vocab_size=20,
        rms_norm_eps=1e-5, attn_implementation="eager",
    )  # fmt: skip
    theirs = transformers.LlamaModel(about)
    moves = [rename("embed.weight", "embed_tokens.weight"), rename("norm.weight", "norm.weight")]
    for i in range(2):
        own, other = f"blocks.{i}.branches", f"layers.{i}"
        moves += [
            rename(f"{own}.self.norm.weight", f"{other}.input_layernorm.weight"),
            rename(f"{own}.mlp.norm.weight", f"{other}.post_attention_layernorm.weight"),
            fuse(f"{own}.self.op.qkv.weight", [f"{other}.self_attn.{p}_proj.weight" for p in "qkv"], [8] * 3),
            rename(f"{own}.self.op.out.weight", f"{other}.self_attn.o_proj.weight"),
            fuse(f"{own}.mlp.op.gate_up.weight", [f"{other}.mlp.{p}_proj.weight" for p in ("gate", "up")], [12] * 2),
            rename(f"{own}.mlp.op.down.weight", f"{other}.mlp.down_proj.weight"),
        ]
    load(
        ours,
        theirs,
        moves,
        {"queries", "end", "width_proj.weight", "width_proj.bias", "project.weight", "project.bias"},
    )
    shown = [5, 3]
    questions = [torch.tensor([[3, 4, 5], [6, 7, -1]]), torch.tensor([[8, -1], [-1, -1]])]
    features = torch.randn(2, 5, 6)
    groups = ours.encode_queries(features, shown, questions)
    references = []
    for row in range(2):
        parts = [ours.width_proj(features[row, : shown[row]])]
        for ids, n in zip(questions, (4, 2), strict=True):
            words = theirs.embed_tokens(ids[row][ids[row] >= 0])
            parts += [words, ours.queries[:n], ours.end[None]]
        hidden = theirs(inputs_embeds=torch.cat(parts)[None]).last_hidden_state[0]
        cut = hidden.split([len(part) for part in parts])
        references += [cut[2], cut[3], cut[5], cut[6]]
    mine = [
        x for row in range(2) for k in range(2) for x in (groups.queries[k][row], groups.end_states[row, k : k + 1])
    ]
    assert_agreement(ours, theirs, moves, torch.cat(mine), torch.cat(references))
    assert torch.equal(ours(features, shown, questions), ours.project(torch.cat(groups.queries, dim=1)))


# ---- what CLS looks at -------------------------------------------------------------------------------------------


def test_attention_scores_match_clip():
    from vitrail.nn import AttentionConfig, Block, BlockConfig, PlainMLPConfig

    about = transformers.CLIPVisionConfig(
        hidden_size=12, num_attention_heads=3, intermediate_size=16, num_hidden_layers=3, image_size=12, patch_size=4,
        attn_implementation="eager",
    )  # fmt: skip
    theirs = randomize(transformers.CLIPVisionModel(about)).eval()
    out = theirs(torch.randn(2, 3, 12, 12), output_attentions=True, output_hidden_states=True)
    block = Block(
        BlockConfig(
            width=12,
            attention=AttentionConfig(heads=3, bias="all"),
            mlp=PlainMLPConfig(intermediate_size=16, activation="quick_gelu"),
            eps=about.layer_norm_eps,
        )
    )
    tower = getattr(theirs, "vision_model", theirs)
    one = tower.encoder.layers[-2]
    moves = rename_layer("self.norm", "layer_norm1") + rename_layer("mlp.norm", "layer_norm2")
    moves += fuse_layer("self.op.qkv", [f"self_attn.{p}_proj" for p in "qkv"], [12] * 3)
    moves += (
        rename_layer("self.op.out", "self_attn.out_proj")
        + rename_layer("mlp.op.up", "mlp.fc1")
        + rename_layer("mlp.op.down", "mlp.fc2")
    )
    block.load_state_dict(convert_state(add_prefix("branches.", "", moves), one.state_dict()))
    entering = out.hidden_states[-3]
    assert relative(block(entering), out.hidden_states[-2]) <= CLOSE
    found = compute_attention_scores(block, entering)
    assert relative(found.scores, out.attentions[-2][:, :, 0, 1:].mean(1)) <= CLOSE
    keys = one.self_attn.k_proj(one.layer_norm1(entering))[:, 1:].unflatten(-1, (3, 4)).mean(2)
    assert relative(found.keys, keys) <= CLOSE


# ---- published sizes ---------------------------------------------------------------------------------------------


def size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def test_published_parameter_counts():
    from transformers.models.qwen2_vl.modeling_qwen2_vl import PatchMerger

    with torch.device("meta"):
        made = {name: make_connector(config) for name, config in CONNECTOR_PRESETS.items()}
        merger = PatchMerger(3584, 1280, 2)
        stage1 = transformers.Blip2QFormerModel(transformers.Blip2QFormerConfig(use_qformer_text_input=True))
        stage2 = transformers.Blip2QFormerModel(transformers.Blip2QFormerConfig())
    queries = 32 * 768
    assert size(made["llava-1.5-7b"]) == 1024 * 4096 + 4096 + 4096 * 4096 + 4096
    assert size(made["qwen2-vl-7b"]) == size(merger)
    assert size(made["blip2-stage1"]) == size(stage1) + queries + 769 * 256
    assert size(made["blip2-opt-2.7b"]) == size(stage2) + queries + 769 * 2560
