"""Towers of InternVL, Llama-3.2-Vision and SAM match transformers on random checkpoints."""

import json
import random

import pytest
import torch
from transformers import InternVLVisionConfig, InternVLVisionModel, MllamaVisionModel
from transformers.models.mllama.configuration_mllama import MllamaVisionConfig
from transformers.models.sam.configuration_sam import SamVisionConfig
from transformers.models.sam.modeling_sam import SamVisionModel

from helpers import randomize, relative
from vitrail.encoders import SAM, TiledViT, ViT
from vitrail.encoders.presets import SAM_PRESETS, TILED_VIT_PRESETS, VIT_PRESETS
from vitrail.errors import CheckpointError
from vitrail.hub import from_hf, load, save, to_hf
from vitrail.hub.vlm_towers import DEFAULTS, VLM_TOWERS

CASES = 8
VALUES, GRADIENTS = 1e-4, 1e-3  # max |Δ| / max |reference|
ROWS = {row.name: row for row in VLM_TOWERS}


def close(ours, reference, limit=VALUES):
    assert ours.shape == reference.shape
    assert relative(ours, reference) <= limit


def same_gradients(ours, mine, model, reference, theirs, other):
    """Compare gradients of the input and of all used weights."""
    weight = torch.randn_like(ours)
    names, parameters = zip(*model.named_parameters(), strict=True)
    a = torch.autograd.grad((ours * weight).sum(), [mine, *parameters], allow_unused=True)
    kept = dict(other.named_parameters())
    b = torch.autograd.grad((reference * weight).sum(), [theirs, *kept.values()], allow_unused=True)
    close(a[0], b[0], GRADIENTS)
    b = {k: torch.zeros_like(p) if g is None else g for (k, p), g in zip(kept.items(), b[1:], strict=True)}
    moves = ROWS[other.config.model_type].tensor_rules(model.config)
    pulled = {k: v for m in moves for k, v in zip(m.native, m.load([b[x] for x in m.hf]), strict=True)}
    for name, gradient in zip(names, a[1:], strict=True):
        expected = pulled[name]
        if gradient is None:
            assert not expected.any(), name
        else:
            # Below this a gradient is rounding alone: without rotation softmax drops a bias on k.
            assert (gradient - expected).abs().max() <= GRADIENTS * expected.abs().max().clamp_min(1e-2), name


def comes_back(ours, reference, folder, run):
    """Exports load in transformers with equal weights; native round trips are exact."""
    to_hf(ours, folder / "back")
    about = json.loads((folder / "back" / "config.json").read_text())
    assert about["architectures"] == [type(reference).__name__]
    back = type(reference).from_pretrained(folder / "back").eval()
    theirs, again = reference.state_dict(), back.state_dict()
    assert theirs.keys() == again.keys()
    assert all(torch.equal(theirs[name], again[name]) for name in theirs)
    assert (
        ROWS[about["model_type"]].from_hf_config(json.loads(back.config.to_json_string(use_diff=False))) == ours.config
    )
    save(ours, folder / "own")
    loaded = load(folder / "own")
    assert loaded.config == ours.config
    assert torch.equal(run(loaded), run(ours))


# ---- InternViT --------------------------------------------------------------------------------------------------


def internvl(draw: random.Random) -> InternVLVisionModel:
    heads, patch = draw.choice([1, 2, 3]), draw.choice([2, 3, 5])
    rms = draw.random() < 0.5
    return InternVLVisionModel(
        InternVLVisionConfig(
            hidden_size=heads * draw.choice([4, 6, 10]),
            num_attention_heads=heads,
            num_hidden_layers=draw.randint(1, 4),
            intermediate_size=draw.randint(7, 50),
            layer_norm_eps=draw.choice([1e-5, 1e-6, 1e-3]),
            hidden_act=draw.choice(["gelu", "gelu_pytorch_tanh"]),
            attention_bias=draw.random() < 0.5,
            use_qk_norm=draw.random() < 0.5,
            norm_type="rms_norm" if rms else "layer_norm",
            patch_size=patch,
            image_size=patch * draw.randint(2, 5),
            num_channels=draw.choice([1, 3]),
            use_mask_token=draw.random() < 0.5,
            use_absolute_position_embeddings=draw.random() < 0.8,
            use_mean_pooling=rms or draw.random() < 0.6,
        )
    )


@pytest.mark.parametrize("seed", range(2 * CASES))
def test_internvit_matches_transformers(seed, tmp_path):
    reference = randomize(internvl(random.Random(seed)), seed=seed).eval()
    reference.save_pretrained(tmp_path / "theirs")
    ours, draw = from_hf(tmp_path / "theirs"), random.Random(seed)
    config, P = ours.config, ours.config.patch_size
    native = torch.randn(2, config.channels, config.image_size, config.image_size)
    other = torch.randn(2, config.channels, P * draw.randint(1, 7), P * draw.randint(2, 7))
    for pixels in (native, other):
        mine, theirs = pixels.clone().requires_grad_(), pixels.clone().requires_grad_()
        want = reference(theirs, output_hidden_states=True)
        close(ours.forward_tokens(mine), want.last_hidden_state)
        close(ours(mine), want.last_hidden_state[:, 1:])
        for layer in {0, 1, -1, -2}:
            close(ours.forward_tokens(mine, layer=layer), want.hidden_states[layer])
        same_gradients(ours.forward_tokens(mine), mine, ours, want.last_hidden_state, theirs, reference)
    if config.mask_token:
        masked = torch.rand(2, config.grid_size**2) < 0.4
        close(
            ours.forward_tokens(native, patch_mask=masked), reference(native, bool_masked_pos=masked).last_hidden_state
        )
    comes_back(ours, reference, tmp_path, lambda model: model(native))


# ---- Llama-3.2-Vision -------------------------------------------------------------------------------------------


def mllama(draw: random.Random) -> MllamaVisionModel:
    """Draw a config whose taps can be shifted by one block, as transformers does."""
    heads, patch, layers = draw.choice([1, 2, 3]), draw.choice([2, 3]), draw.randint(2, 5)
    tiles = draw.randint(2, 5)
    ratios = [[a, b] for a in range(1, tiles + 1) for b in range(1, tiles + 1) if a * b <= tiles]
    taps = [i for i in range(layers) if draw.random() < 0.5] or [0]
    width = heads * draw.choice([4, 6, 10])
    return MllamaVisionModel(
        MllamaVisionConfig(
            hidden_size=width,
            attention_heads=heads,
            num_hidden_layers=layers,
            num_global_layers=draw.randint(1, 3),
            intermediate_size=draw.randint(7, 50),
            norm_eps=draw.choice([1e-5, 1e-3]),
            hidden_act=draw.choice(["gelu", "quick_gelu"]),
            patch_size=patch,
            image_size=patch * draw.randint(1, 4),
            num_channels=draw.choice([1, 3]),
            max_num_tiles=tiles,
            supported_aspect_ratios=ratios,
            intermediate_layers_indices=taps,
            vision_output_dim=width * (1 + len(taps)),
        )
    )


def pictures(ours: TiledViT, seed: int, count: int = 3):
    """Return tiles, ratios and arguments of transformers. Missing tiles are noise, because they affect the result."""
    draw, config = random.Random(seed), ours.config
    ratios = [draw.choice(config.aspect_ratios) for _ in range(count)]
    tiles = torch.randn(count, config.max_tiles, config.channels, config.image_size, config.image_size)
    ids = torch.tensor([[1 + config.aspect_ratios.index(r)] for r in ratios])
    mask = torch.tensor([[[int(t < h * w) for t in range(config.max_tiles)]] for h, w in ratios])
    return tiles, ratios, {"aspect_ratio_ids": ids, "aspect_ratio_mask": mask}


@pytest.mark.parametrize("seed", range(2 * CASES))
def test_mllama_tower_matches_transformers(seed, tmp_path):
    reference = randomize(mllama(random.Random(seed)), seed=seed).eval()
    reference.save_pretrained(tmp_path / "theirs")
    ours = from_hf(tmp_path / "theirs")
    tiles, ratios, given = pictures(ours, seed)
    comes_back(ours, reference, tmp_path, lambda model: model(tiles, ratios))

    later = TiledViT(ours.config.replace(feature_layers=tuple(i + 1 for i in ours.config.feature_layers))).eval()
    later.load_state_dict(ours.state_dict())
    mine, theirs = tiles.clone().requires_grad_(), tiles.clone().requires_grad_()
    got, want = later(mine, ratios), reference(theirs[:, None], **given).last_hidden_state[:, 0]
    close(got, want)
    same_gradients(got, mine, later, want, theirs, reference)

    # Meta's own code keeps what enters the block of an index, and transformers' blocks say what that is.
    entered = {}
    for i, block in enumerate(reference.transformer.layers):
        block.register_forward_pre_hook(
            lambda _, __, kw, i=i: entered.update({i: kw["hidden_state"]}), with_kwargs=True
        )
    reference(tiles[:, None], **given)
    config, D = ours.config, ours.config.block.width
    states = [
        entered[i].view(3, config.max_tiles, config.padded_tokens_per_tile, D)[:, :, : config.tokens_per_tile]
        for i in config.feature_layers
    ]
    close(ours(tiles, ratios)[..., D:], torch.stack(states, dim=-1).flatten(-2))


# ---- Segment Anything -------------------------------------------------------------------------------------------


def sam(draw: random.Random) -> SamVisionModel:
    heads, patch, layers = draw.choice([1, 2, 3]), draw.choice([2, 3, 5]), draw.randint(1, 4)
    return SamVisionModel(
        SamVisionConfig(
            hidden_size=heads * draw.choice([4, 6, 10]),
            num_attention_heads=heads,
            num_hidden_layers=layers,
            mlp_dim=draw.randint(7, 50),
            layer_norm_eps=draw.choice([1e-6, 1e-3]),
            hidden_act=draw.choice(["gelu", "gelu_pytorch_tanh"]),
            qkv_bias=draw.random() < 0.7,
            use_abs_pos=draw.random() < 0.8,
            use_rel_pos=draw.random() < 0.8,
            patch_size=patch,
            image_size=patch * draw.randint(2, 9),
            num_channels=draw.choice([1, 3]),
            window_size=draw.choice([0, 2, 3, 4]),
            global_attn_indexes=[i for i in range(layers) if draw.random() < 0.4],
            output_channels=draw.randint(3, 12),
        )
    )


@pytest.mark.parametrize("seed", range(3 * CASES))
def test_sam_matches_transformers(seed, tmp_path):
    reference = randomize(sam(random.Random(seed)), seed=seed).eval()
    reference.save_pretrained(tmp_path / "theirs")
    ours = from_hf(tmp_path / "theirs")
    pixels = torch.randn(2, ours.config.channels, ours.config.image_size, ours.config.image_size)
    mine, theirs = pixels.clone().requires_grad_(), pixels.clone().requires_grad_()
    want, got = reference(theirs, output_hidden_states=True), ours(mine)
    last = want.last_hidden_state.flatten(2).mT
    close(got, last)
    for layer, state in enumerate(ours.forward_layers(pixels, range(ours.config.layers + 1))):
        close(state, want.hidden_states[layer])
    same_gradients(got, mine, ours, last, theirs, reference)
    comes_back(ours, reference, tmp_path, lambda model: model(pixels))


# ---- configs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, theirs",
    [
        ("internvl_vision", InternVLVisionConfig),
        ("mllama_vision_model", MllamaVisionConfig),
        ("sam_vision_model", SamVisionConfig),
    ],
)
def test_config_defaults(name, theirs):
    about = json.loads(theirs().to_json_string(use_diff=False))
    assert {key: about[key] for key in DEFAULTS[name]} == DEFAULTS[name]
    assert ROWS[name].from_hf_config({}) == ROWS[name].from_hf_config(about)


LARGE = {"hidden_size": 3200, "num_hidden_layers": 45, "num_attention_heads": 25, "intermediate_size": 12_800}
HUGE = {"hidden_size": 1280, "num_hidden_layers": 32, "num_attention_heads": 16}
RELEASED = {
    # The settings of the released config.json; millions of parameters, as the model cards and reports round them.
    "internvit-300m": (InternVLVisionModel, InternVLVisionConfig(attention_bias=True), 304),
    "internvit-6b": (InternVLVisionModel, InternVLVisionConfig(**LARGE, use_qk_norm=True, norm_type="rms_norm"), 5540),
    "llama-3.2-vision": (MllamaVisionModel, MllamaVisionConfig(image_size=560), 850),
    "sam-b": (SamVisionModel, SamVisionConfig(), 90),
    "sam-h": (SamVisionModel, SamVisionConfig(**HUGE, global_attn_indexes=[7, 15, 23, 31]), 637),
}


@pytest.mark.parametrize("name", RELEASED)
def test_released_shapes(name):
    model, theirs, millions = RELEASED[name]
    row = ROWS[theirs.model_type]
    preset = {**VIT_PRESETS, **TILED_VIT_PRESETS, **SAM_PRESETS}[name]
    kind = next(
        kind for kind, rows in ((ViT, VIT_PRESETS), (TiledViT, TILED_VIT_PRESETS), (SAM, SAM_PRESETS)) if name in rows
    )
    with torch.device("meta"):
        ours, reference = kind(preset), model(theirs)
    assert (
        row.from_hf_config(json.loads(theirs.to_json_string(use_diff=False)))
        == preset
        == row.from_hf_config(row.to_hf_config(preset))
    )
    state, mine = reference.state_dict(), ours.state_dict()
    pulled, pushed = {}, {}
    for move in row.tensor_rules(preset):
        pulled |= zip(move.native, move.load([state[x] for x in move.hf]), strict=True)
        pushed |= zip(move.hf, move.export([mine[x] for x in move.native]), strict=True)
    assert {k: v.shape for k, v in pulled.items()} == {k: v.shape for k, v in mine.items()}
    assert {k: v.shape for k, v in pushed.items()} == {k: v.shape for k, v in state.items()}
    assert sum(p.numel() for p in ours.parameters()) / 1e6 == pytest.approx(millions, rel=0.02)


@pytest.mark.parametrize(
    "name, about, why",
    [
        (
            "internvl_vision",
            {"norm_type": "rms_norm", "use_mean_pooling": False},
            "a last LayerNorm among RMS norms is",
        ),
        ("internvl_vision", {"image_size": [448, 224]}, "image_size"),
        ("mllama_vision_model", {"hidden_act": "mish"}, "mish"),
    ],
)
def test_unsupported_settings_raise(name, about, why):
    with pytest.raises(CheckpointError, match=why):
        ROWS[name].from_hf_config(about)
