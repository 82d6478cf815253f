"""Qwen towers match transformers on random weights of unusual shapes: values and gradients."""

import json
import random

import pytest
import torch
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

from helpers import randomize, relative
from vitrail.encoders import PackedViT
from vitrail.encoders.presets import PACKED_VIT_PRESETS
from vitrail.errors import CheckpointError
from vitrail.hub.qwen_vl_towers import DEFAULTS, QWEN_VL_TOWERS
from vitrail.processing.patchify import patchify_blocks

CASES = 8
VALUES, GRADIENTS = 1e-4, 1e-3  # max |Δ| / max |reference|


# ---- configs nobody would choose --------------------------------------------------------------------------------


def tower(draw: random.Random) -> dict:
    heads = draw.choice([1, 2, 3])
    return {
        "hidden_size": heads * draw.choice([4, 8, 12]),
        "num_heads": heads,
        "depth": draw.randint(2, 4),
        "intermediate_size": draw.randint(7, 50),
        "patch_size": draw.choice([2, 3]),
        "temporal_patch_size": draw.choice([1, 2, 3]),
        "spatial_merge_size": draw.choice([1, 2, 3]),
        "in_channels": draw.choice([1, 3]),
        "rope_parameters": {"rope_type": "axial", "rope_theta": draw.choice([10_000.0, 500.0])},
    }


def qwen2(draw: random.Random):
    settings = tower(draw)
    settings["embed_dim"], settings["hidden_size"] = settings["hidden_size"], 10  # what the merger gives
    settings["mlp_ratio"] = settings.pop("intermediate_size") % 4 + 1
    act = draw.choice(["quick_gelu", "gelu"])
    return Qwen2VisionTransformerPretrainedModel(Qwen2VLVisionConfig(**settings, hidden_act=act))


def qwen2_5(draw: random.Random):
    settings = tower(draw)
    token = settings["patch_size"] * settings["spatial_merge_size"]
    more = {
        "window_size": token * draw.randint(1, 3) + draw.choice([0, token - 1]),
        "fullatt_block_indexes": [i for i in range(9) if draw.random() < 0.4],  # some past the end
    }
    return Qwen2_5_VisionTransformerPretrainedModel(Qwen2_5_VLVisionConfig(**settings, **more, out_hidden_size=10))


def qwen3(draw: random.Random):
    settings = tower(draw)
    more = {
        "num_position_embeddings": draw.randint(2, 7) ** 2,
        "deepstack_visual_indexes": [i for i in range(settings["depth"]) if draw.random() < 0.6],
        "out_hidden_size": 10,
    }
    return Qwen3VLVisionModel(Qwen3VLVisionConfig(**settings, **more))


BUILDERS = {"qwen2_vl": qwen2, "qwen2_5_vl": qwen2_5, "qwen3_vl": qwen3}


def about_of(reference) -> dict:
    return json.loads(reference.config.to_json_string(use_diff=False))


def without_merger(reference) -> dict:
    return {k: v for k, v in reference.state_dict().items() if not k.startswith(("merger.", "deepstack_merger_list."))}


def pull(row, config, state) -> dict:
    moves = row.tensor_rules(config)
    assert sorted(name for move in moves for name in move.hf) == sorted(state)
    return {k: v for m in moves for k, v in zip(m.native, m.load([state[x] for x in m.hf]), strict=True)}


def both(family: str, seed: int):
    reference = randomize(BUILDERS[family](random.Random(seed)), seed=seed).eval()
    row = QWEN_VL_TOWERS[family]
    ours = PackedViT(row.from_hf_config(about_of(reference))).eval()
    ours.load_state_dict(pull(row, ours.config, without_merger(reference)))
    return reference, ours


def items(ours: PackedViT, kind: str, seed: int):
    """Return patches from preprocessing and their grids."""
    draw, config = random.Random(seed), ours.config
    P, M, S, C = config.patch_size, config.spatial_merge_size, config.temporal_patch_size, config.channels
    token = P * M

    def still():
        return torch.randn(C, token * draw.randint(1, 6), token * draw.randint(1, 6))

    def video():
        return torch.randn(S * draw.randint(2, 4), C, token * draw.randint(1, 4), token * draw.randint(1, 4))

    made = {"picture": [still], "pictures": [still] * 4, "video": [video], "mixed": [still, video, still, video]}
    cut = [patchify_blocks(make(), P, merge_size=M, temporal_patch_size=S) for make in made[kind]]
    return torch.cat([patches for patches, _ in cut]), [grid for _, grid in cut]


def close(ours, reference, limit=VALUES):
    assert ours.shape == reference.shape
    assert relative(ours, reference) <= limit


# ---- agreement --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["picture", "pictures", "video", "mixed"])
@pytest.mark.parametrize("family", BUILDERS)
@pytest.mark.parametrize("seed", range(CASES))
def test_towers_match_transformers(family, kind, seed):
    reference, ours = both(family, seed)
    patches, grids = items(ours, kind, seed)
    thw = torch.tensor([[g.t, g.h, g.w] for g in grids])
    mine, theirs = patches.clone().requires_grad_(), patches.clone().requires_grad_()
    want = reference(theirs, grid_thw=thw)
    *taps, last = ours.forward_layers(mine, grids)
    # transformers leaves Qwen2.5's features in the order of windows, and puts in order what the merger makes of them.
    if family != "qwen2_5_vl":
        close(last, want.last_hidden_state)
    merged, wanted = [reference.merger(last)], [want.pooler_output]
    if family == "qwen3_vl":
        assert len(taps) == len(want.deepstack_features) == len(reference.deepstack_visual_indexes)
        merged += [merge(tap) for merge, tap in zip(reference.deepstack_merger_list, taps, strict=True)]
        wanted += want.deepstack_features
    for got, expected in zip(merged, wanted, strict=True):
        close(got, expected)

    # The gradients of every weight, brought to our names by the map.
    weights = [torch.randn_like(x) for x in wanted]
    names, parameters = zip(*ours.named_parameters(), strict=True)
    a = torch.autograd.grad(sum((x * w).sum() for x, w in zip(merged, weights, strict=True)), [mine, *parameters])
    kept = {k: p for k, p in reference.named_parameters() if "merger" not in k}
    b = torch.autograd.grad(sum((x * w).sum() for x, w in zip(wanted, weights, strict=True)), [theirs, *kept.values()])
    close(a[0], b[0], GRADIENTS)
    pulled = pull(QWEN_VL_TOWERS[family], ours.config, dict(zip(kept, b[1:], strict=True)))
    for name, gradient in zip(names, a[1:], strict=True):
        if name.endswith("qkv.bias"):  # k's is rounding alone where nothing turns
            assert (gradient - pulled[name]).abs().max() <= GRADIENTS * gradient.abs().max().clamp_min(1e-3)
        else:
            close(gradient, pulled[name], GRADIENTS)


@pytest.mark.parametrize("family", BUILDERS)
@pytest.mark.parametrize("seed", range(4))
def test_hidden_states_match_transformers(family, seed):
    """Hidden states of all blocks; those of Qwen2.5 are reordered from windows."""
    from transformers.vision_utils import get_vision_window_index

    reference, ours = both(family, seed)
    patches, grids = items(ours, "mixed", seed)
    thw = torch.tensor([[g.t, g.h, g.w] for g in grids])
    states = []
    for block in reference.blocks:
        block.register_forward_hook(lambda _, __, out: states.append(out))
    reference(patches, grid_thw=thw)
    if family == "qwen2_5_vl":
        M, config = ours.config.spatial_merge_size, reference.config
        order, _ = get_vision_window_index(thw, M, config.window_size, config.patch_size)
        states = [x.unflatten(0, (-1, M * M))[order.argsort()].flatten(0, 1) for x in states]
    for k, state in enumerate(states, 1):
        close(ours(patches, thw, layer=k), state)
    some = ours.forward_layers(patches, grids, [-1, 1, 1])
    assert all(torch.equal(x, ours(patches, grids, layer=layer)) for x, layer in zip(some, [-1, 1, 1], strict=True))


# ---- maps -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", BUILDERS)
@pytest.mark.parametrize("seed", range(CASES))
def test_round_trip(family, seed):
    """Configs round trip in both libraries, and tensors are equal."""
    reference, ours = both(family, seed)
    row, theirs, state = QWEN_VL_TOWERS[family], without_merger(reference), ours.state_dict()
    assert row.supports(ours.config)
    pushed = {
        k: v
        for m in row.tensor_rules(ours.config)
        for k, v in zip(m.hf, m.export([state[x] for x in m.native]), strict=True)
    }
    assert pushed.keys() == theirs.keys()
    assert all(torch.equal(pushed[name], theirs[name]) for name in theirs)
    again = type(reference)(type(reference.config)(**{**row.to_hf_config(ours.config), **width(family)}))
    again.load_state_dict({**reference.state_dict(), **pushed})
    patches, grids = items(ours, "mixed", seed)
    thw = torch.tensor([[g.t, g.h, g.w] for g in grids])
    assert torch.equal(again(patches, grid_thw=thw).pooler_output, reference(patches, grid_thw=thw).pooler_output)


def width(family: str) -> dict:
    """Output width of the merger, which the whole model sets."""
    return {"hidden_size": 10} if family == "qwen2_vl" else {"out_hidden_size": 10}


MODELS = {
    "qwen2_vl": Qwen2VisionTransformerPretrainedModel,
    "qwen2_5_vl": Qwen2_5_VisionTransformerPretrainedModel,
    "qwen3_vl": Qwen3VLVisionModel,
}
CONFIGS = {
    "qwen2_vl": Qwen2VLVisionConfig,
    "qwen2_5_vl": Qwen2_5_VLVisionConfig,
    "qwen3_vl": Qwen3VLVisionConfig,
}


@pytest.mark.parametrize("family", CONFIGS)
def test_config_defaults(family):
    row, theirs = QWEN_VL_TOWERS[family], CONFIGS[family]().to_dict()
    assert {key: theirs[key] for key in DEFAULTS[row.name]} == DEFAULTS[row.name]
    assert row.from_hf_config({}) == row.from_hf_config(theirs)


@pytest.mark.parametrize(
    "family, about, why",
    [
        ("qwen2_vl", {"patch_size": [14, 16]}, "patch_size"),
        ("qwen2_vl", {"hidden_act": "mish"}, "mish"),
        ("qwen2_vl", {"rope_parameters": {"rope_type": "yarn"}}, "yarn"),
        ("qwen2_5_vl", {"window_size": 14}, "window_size"),
        ("qwen3_vl", {"num_position_embeddings": 2303}, "square"),
        ("qwen3_vl", {"deepstack_visual_indexes": [16, 8]}, "must increase"),
    ],
)
def test_unsupported_settings_raise(family, about, why):
    with pytest.raises(CheckpointError, match=why):
        QWEN_VL_TOWERS[family].from_hf_config(about)


# ---- released shapes, on the meta device ------------------------------------------------------------------------

L = {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "deepstack_visual_indexes": [5, 11, 17]}
RELEASED = {
    # The family and the settings of the released config.json, the merger's width first.
    "qwen2-vl": ("qwen2_vl", {"hidden_size": 3584}),
    "qwen2.5-vl": ("qwen2_5_vl", {"out_hidden_size": 3584, "hidden_size": 1280}),
    "qwen2.5-vl-large": ("qwen2_5_vl", {"out_hidden_size": 8192, "hidden_size": 1280, "intermediate_size": 3456}),
    "qwen3-vl-l": ("qwen3_vl", {"out_hidden_size": 2560, **L}),
    "qwen3-vl-so400m": ("qwen3_vl", {"out_hidden_size": 4096}),
}
CALLED = {
    # What the reports call the towers, in millions: Qwen2-VL's counts the merger of the 7B.
    "qwen2-vl": (675, True),
    "qwen3-vl-l": (300, False),
    "qwen3-vl-so400m": (400, False),
}


def on_meta(name: str):
    family, settings = RELEASED[name]
    with torch.device("meta"):
        return PackedViT(PACKED_VIT_PRESETS[name]), MODELS[family](CONFIGS[family](**settings))


@pytest.mark.parametrize("name", RELEASED)
def test_released_shapes(name):
    ours, reference = on_meta(name)
    row, preset, state = QWEN_VL_TOWERS[RELEASED[name][0]], PACKED_VIT_PRESETS[name], without_merger(reference)
    assert row.from_hf_config(about_of(reference)) == preset == row.from_hf_config(row.to_hf_config(preset))
    pulled = pull(row, preset, state)
    assert {k: v.shape for k, v in pulled.items()} == {k: v.shape for k, v in ours.state_dict().items()}
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in state.values())


@pytest.mark.parametrize("name", CALLED)
def test_published_sizes(name):
    millions, merged = CALLED[name]
    ours, reference = on_meta(name)
    counted = sum(p.numel() for p in (reference if merged else ours).parameters()) / 1e6
    assert counted == pytest.approx(millions, rel=2e-3 if merged else 0.04)
