"""Encoders match transformers on random checkpoints of unusual shapes: states, embeddings, gradients, export."""

import json
import random

import pytest
import torch
from transformers import (
    CLIPConfig,
    CLIPModel,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPVisionConfig,
    CLIPVisionModel,
    Dinov2Config,
    Dinov2Model,
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersModel,
    Siglip2Config,
    Siglip2Model,
    Siglip2VisionConfig,
    Siglip2VisionModel,
    SiglipConfig,
    SiglipModel,
    SiglipTextConfig,
    SiglipTextModel,
    SiglipVisionConfig,
    SiglipVisionModel,
)
from transformers.core_model_loading import revert_weight_conversion

from helpers import randomize, relative
from vitrail.encoders import TextTower, ViT
from vitrail.encoders.presets import TEXT_TOWER_PRESETS, VIT_PRESETS
from vitrail.errors import CheckpointError, VitrailError
from vitrail.hub import from_hf, load, save, to_hf
from vitrail.hub.checkpoint_info import read_config
from vitrail.hub.encoder_families import DEFAULTS, ENCODER_FAMILIES
from vitrail.models.contrastive_model import CONTRASTIVE_PRESETS, ContrastiveModel
from vitrail.nn import PlainMLPConfig
from vitrail.processing.patchify import patchify_rows
from vitrail.registry import FAMILIES

CASES = 24
VALUES, GRADIENTS = 1e-4, 1e-3  # max |Δ| / max |reference|


# ---- configs nobody would choose --------------------------------------------------------------------------------


def tower(draw: random.Random) -> dict:
    heads = draw.choice([1, 2, 3])
    return {
        "hidden_size": heads * draw.choice([4, 6, 10]),
        "num_attention_heads": heads,
        "num_hidden_layers": draw.randint(1, 4),
        "intermediate_size": draw.randint(7, 50),
        "layer_norm_eps": draw.choice([1e-5, 1e-6, 1e-3]),
        "hidden_act": draw.choice(["quick_gelu", "gelu", "gelu_pytorch_tanh"]),
    }


def vision(draw: random.Random) -> dict:
    patch = draw.choice([2, 3, 5, 7])
    spare = draw.choice([0, 0, 1])  # pixels that patches leave over
    sizes = {"patch_size": patch, "image_size": patch * draw.randint(2, 5) + spare}
    return {**tower(draw), **sizes, "num_channels": draw.choice([1, 3, 4])}


def text(draw: random.Random) -> dict:
    return {**tower(draw), "vocab_size": draw.randint(20, 90), "max_position_embeddings": draw.randint(6, 15)}


def clip(draw: random.Random):
    words = text(draw)
    words["eos_token_id"] = draw.choice([2, words["vocab_size"] - 1, 7])
    sizes = {"projection_dim": draw.randint(5, 30), "logit_scale_init_value": draw.choice([2.6592, 1.5])}
    return CLIPModel(CLIPConfig(text_config=words, vision_config=vision(draw), **sizes))


def siglip(draw: random.Random):
    picture = vision(draw)
    words = {**text(draw), "projection_size": picture["hidden_size"]}
    return SiglipModel(SiglipConfig(text_config=words, vision_config=picture))


def siglip2(draw: random.Random):
    picture = vision(draw)
    picture["num_patches"] = (picture.pop("image_size") // picture["patch_size"]) ** 2
    words = {**text(draw), "projection_size": picture["hidden_size"]}
    return Siglip2Model(Siglip2Config(text_config=words, vision_config=picture))


def dino(draw: random.Random) -> dict:
    settings = vision(draw)
    settings.pop("intermediate_size")
    settings["image_size"] -= settings["image_size"] % settings["patch_size"]
    more = {"mlp_ratio": draw.choice([1, 2, 4]), "layerscale_value": draw.choice([1.0, 1e-5])}
    return {**settings, **more, "use_swiglu_ffn": draw.random() < 0.5, "qkv_bias": draw.random() < 0.7}


def dinov2(draw: random.Random):
    return Dinov2Model(Dinov2Config(**dino(draw), use_mask_token=draw.random() < 0.7))


def dinov2_with_registers(draw: random.Random):
    return Dinov2WithRegistersModel(Dinov2WithRegistersConfig(**dino(draw), num_register_tokens=draw.randint(1, 5)))


BUILDERS = {
    "clip": clip,
    "siglip": siglip,
    "siglip2": siglip2,
    "dinov2": dinov2,
    "dinov2_with_registers": dinov2_with_registers,
}


def checkpoint(family: str, seed: int, folder):
    reference = randomize(BUILDERS[family](random.Random(seed)), seed=seed).eval()
    reference.save_pretrained(folder)
    return reference, from_hf(folder)


def close(ours, reference, limit=VALUES):
    assert ours.shape == reference.shape
    assert relative(ours, reference) <= limit


def same_gradients(ours, mine: list, reference, theirs: list):
    weight = torch.randn_like(ours)
    a = torch.autograd.grad((ours * weight).sum(), mine)
    b = torch.autograd.grad((reference * weight).sum(), theirs)
    for got, want in zip(a, b, strict=True):
        close(got.view_as(want), want, GRADIENTS)


# ---- towers -----------------------------------------------------------------------------------------------------


def pictures(vit: ViT, seed: int):
    """Random pixels of the native size and of another size."""
    draw, config = random.Random(seed), vit.config
    native = torch.randn(2, config.channels, config.image_size, config.image_size)
    # Not one patch wide: there torch resizes the reference's positions wrongly (see tests/nn/test_patches.py).
    h, w = config.patch_size * draw.randint(1, 7), config.patch_size * draw.randint(2, 7)
    return native, torch.randn(2, config.channels, h, w)


def same_tower(vit: ViT, theirs, pixels, layers: int, prefix: int, **given):
    """Compare features of several layers, pooled vectors and gradients."""
    pixels = pixels.clone().requires_grad_()
    states = theirs(pixels, output_hidden_states=True, **given)
    close(vit(pixels), states.last_hidden_state[:, prefix:])
    for layer in {0, 1, layers, -1, -2}:
        close(vit(pixels, layer=layer), states.hidden_states[layer][:, prefix:])
        close(vit.forward_tokens(pixels, layer=layer), states.hidden_states[layer])
    pooled = vit.forward_pooled(pixels)
    close(pooled, states.pooler_output)
    table = vit.positions.table
    reference = theirs.embeddings
    where = getattr(reference, "position_embeddings", None)
    where = reference.position_embedding.weight if where is None else where
    same_gradients(pooled, [pixels, table], states.pooler_output, [pixels, where])


def same_words(tower: TextTower, theirs, ids):
    states = theirs(ids, output_hidden_states=True)
    close(tower(ids), states.last_hidden_state)
    for layer in {0, 1, -1, -2}:
        close(tower(ids, layer=layer), states.hidden_states[layer])
    close(tower.forward_pooled(ids), states.pooler_output)


def words(tower: TextTower, count: int = 3):
    config = tower.config
    ids = torch.randint(3, config.vocab_size, (count, config.context_length))
    if config.eos_token_id is not None:
        ids[torch.arange(count), torch.randint(1, config.context_length, (count,))] = config.eos_token_id
    return ids


def same_pair(ours: ContrastiveModel, theirs, ids, pixels, grids=None, **given):
    pixels = pixels.detach().clone().requires_grad_()
    image, text = ours.encode_image(pixels, grids), ours.encode_text(ids)
    reference = theirs(pixel_values=pixels, input_ids=ids, **given)
    close(image, theirs.get_image_features(pixel_values=pixels, **given).pooler_output)
    close(text, theirs.get_text_features(input_ids=ids).pooler_output)
    logits = ours(pixels, ids, grids)
    close(logits, reference.logits_per_image)
    mine = [pixels, ours.text.embed.weight, ours.text.norm.weight]
    words = theirs.text_model
    other = [pixels, words.embeddings.token_embedding.weight, words.final_layer_norm.weight]
    same_gradients(logits, mine, reference.logits_per_image, other)


def comes_back(ours, reference, tmp_path, run):
    """Exports give the same results in transformers; native round trips are exact."""
    to_hf(ours, tmp_path / "back")
    about = json.loads((tmp_path / "back" / "config.json").read_text())
    assert about["architectures"] == [type(reference).__name__]
    assert about["model_type"] == reference.config.model_type
    back = type(reference).from_pretrained(tmp_path / "back").eval()
    theirs, again = reference.state_dict(), back.state_dict()
    assert theirs.keys() == again.keys()
    assert all(torch.equal(theirs[name], again[name]) for name in theirs)
    save(ours, tmp_path / "own")
    loaded = load(tmp_path / "own")
    assert loaded.config == ours.config
    assert torch.equal(run(loaded), run(ours))


@pytest.mark.parametrize("family", ["clip", "siglip"])
@pytest.mark.parametrize("seed", range(CASES))
def test_contrastive_models_match_transformers(family, seed, tmp_path):
    reference, ours = checkpoint(family, seed, tmp_path / "theirs")
    native, other = pictures(ours.image, seed)
    ids, resized = words(ours.text), {"interpolate_pos_encoding": True}
    layers, prefix = ours.config.image.layers, ours.config.image.num_prefix_tokens
    for pixels, given in ((native, {}), (other, resized)):
        same_tower(ours.image, reference.vision_model, pixels, layers, prefix, **given)
    same_words(ours.text, reference.text_model, ids)
    same_pair(ours, reference, ids, native)
    if seed % 4 == 0:
        comes_back(ours, reference, tmp_path, lambda model: model(native, ids))


@pytest.mark.parametrize("seed", range(CASES))
def test_unequal_image_sizes(seed, tmp_path):
    """NaFlex: each image has its own grid, with padding at the end."""
    reference, ours = checkpoint("siglip2", seed, tmp_path / "theirs")
    draw, config = random.Random(seed), ours.config.image
    side = config.grid_size
    grids = [(side, side), (draw.randint(1, 6), draw.randint(1, 6)), (1, draw.randint(1, 9)), (draw.randint(1, 9), 1)]
    N = max(h * w for h, w in grids) + draw.choice([0, 3])
    patches = torch.randn(4, N, config.channels * config.patch_size**2, requires_grad=True)
    real = torch.tensor([[i < h * w for i in range(N)] for h, w in grids])
    given = {"pixel_attention_mask": real.int(), "spatial_shapes": torch.tensor(grids)}

    states = reference.vision_model(patches, output_hidden_states=True, **given)
    close(ours.image(patches, grids)[real], states.last_hidden_state[real])
    for layer in {0, 1, -1, -2}:
        close(ours.image(patches, torch.tensor(grids), layer=layer)[real], states.hidden_states[layer][real])
    pooled = ours.image.forward_pooled(patches, grids)
    close(pooled, states.pooler_output)
    table = reference.vision_model.embeddings.position_embedding.weight
    same_gradients(pooled, [patches, ours.image.positions.table], states.pooler_output, [patches, table])

    ids = words(ours.text)
    same_words(ours.text, reference.text_model, ids)
    same_pair(ours, reference, ids, patches, grids, **given)
    if seed % 4 == 0:
        comes_back(ours, reference, tmp_path, lambda model: model(patches, ids, grids))


@pytest.mark.parametrize("family", ["dinov2", "dinov2_with_registers"])
@pytest.mark.parametrize("seed", range(CASES))
def test_dinov2_matches_transformers(family, seed, tmp_path):
    reference, ours = checkpoint(family, seed, tmp_path / "theirs")
    native, other = pictures(ours, seed)
    for pixels in (native, other):
        same_tower(ours, reference, pixels, ours.config.layers, ours.config.num_prefix_tokens)
    if ours.config.mask_token:
        masked = torch.rand(2, ours.config.grid_size**2) < 0.4
        theirs = reference(native, bool_masked_pos=masked).last_hidden_state
        close(ours(native, patch_mask=masked), theirs[:, ours.config.num_prefix_tokens :])
    if seed % 4 == 0:
        comes_back(ours, reference, tmp_path, lambda model: model(native))


TOWERS_ALONE = {
    "clip_vision_model": (CLIPVisionModel, CLIPVisionConfig, vision, "vision_model."),
    "siglip_vision_model": (SiglipVisionModel, SiglipVisionConfig, vision, "vision_model."),
    "clip_text_model": (CLIPTextModel, CLIPTextConfig, text, "text_model."),
    "siglip_text_model": (SiglipTextModel, SiglipTextConfig, text, "text_model."),
}


@pytest.mark.parametrize("name", TOWERS_ALONE)
@pytest.mark.parametrize("seed", range(3))
def test_separate_towers(name, seed, tmp_path):
    model, config, settings, outer = TOWERS_ALONE[name]
    more = {"eos_token_id": 5} if name == "clip_text_model" else {}
    reference = randomize(model(config(**settings(random.Random(seed)), **more)), seed=seed).eval()
    reference.save_pretrained(tmp_path / "theirs")
    ours = from_hf(tmp_path / "theirs")
    given = words(ours) if isinstance(ours, TextTower) else pictures(ours, seed)[0]
    close(ours.forward_pooled(given), reference(given).pooler_output)
    comes_back(ours, reference, tmp_path, lambda model: model.forward_pooled(given))

    # Older versions wrote the part's name before every tensor's.
    from safetensors.torch import load_file, save_file

    file = tmp_path / "theirs" / "model.safetensors"
    save_file({outer + name: tensor for name, tensor in load_file(file).items()}, file)
    assert torch.equal(from_hf(tmp_path / "theirs").forward_pooled(given), ours.forward_pooled(given))


def test_siglip_tower_without_head(tmp_path):
    config = SiglipVisionConfig(**vision(random.Random(1)))
    config.vision_use_head = False
    reference = randomize(SiglipVisionModel(config)).eval()
    reference.save_pretrained(tmp_path / "theirs")
    ours = from_hf(tmp_path / "theirs")
    assert ours.config.pool == "none"
    pixels = pictures(ours, 0)[0]
    close(ours(pixels), reference(pixels).last_hidden_state)
    comes_back(ours, reference, tmp_path, lambda model: model(pixels))


def test_naflex_accepts_pixels_and_patch_rows(tmp_path):
    """Patches from preprocessing and from the tower are equal."""
    _, ours = checkpoint("siglip2", 5, tmp_path / "theirs")
    P, C = ours.config.image.patch_size, ours.config.image.channels
    picture = torch.randn(C, 3 * P, 4 * P)
    rows, grid = patchify_rows(picture, P)
    assert torch.allclose(ours.image(rows[None], [(grid.h, grid.w)]), ours.image(picture[None]), atol=1e-6)


@pytest.mark.parametrize("family", BUILDERS)
def test_dtype_is_kept(family, tmp_path):
    reference = BUILDERS[family](random.Random(3)).bfloat16()
    reference.save_pretrained(tmp_path / "theirs")
    ours = from_hf(tmp_path / "theirs")
    assert {p.dtype for p in ours.parameters()} == {torch.bfloat16}
    vit = ours.image if isinstance(ours, ContrastiveModel) else ours
    assert vit(pictures(vit, 0)[0]).dtype == torch.bfloat16  # float pixels are cast on the way in
    assert from_hf(tmp_path / "theirs", dtype=torch.float32).state_dict().keys() == ours.state_dict().keys()
    to_hf(ours, tmp_path / "back")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == "bfloat16"


# ---- released shapes, on the meta device ------------------------------------------------------------------------

L14 = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
SO400M = {"hidden_size": 1152, "num_hidden_layers": 27, "num_attention_heads": 16, "intermediate_size": 4304}
DINO_L = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16}
DINO_G = {"hidden_size": 1536, "num_hidden_layers": 40, "num_attention_heads": 24}


def released(name: str):
    """Build a preset, and the transformers model from the released config.json."""
    match name:
        case "clip":
            words = {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072}
            picture = {**L14, "patch_size": 14, "image_size": 336}
            config = CLIPConfig(text_config=words, vision_config=picture, projection_dim=768)
            return CONTRASTIVE_PRESETS["clip-l14-336"], ContrastiveModel, config, CLIPModel
        case "siglip":
            picture = {**SO400M, "patch_size": 14, "image_size": 384}
            config = SiglipConfig(text_config=SO400M, vision_config=picture)
            return CONTRASTIVE_PRESETS["siglip-so400m-384"], ContrastiveModel, config, SiglipModel
        case "siglip2":
            config = Siglip2Config(text_config={"vocab_size": 256_000})
            return CONTRASTIVE_PRESETS["siglip2-naflex-b16"], ContrastiveModel, config, Siglip2Model
        case "clip_vision_model":
            config = CLIPVisionConfig(**L14, patch_size=14)
            return VIT_PRESETS["clip-l14"], ViT, config, CLIPVisionModel
        case "siglip_vision_model":
            return VIT_PRESETS["siglip-b16-256"], ViT, SiglipVisionConfig(image_size=256), SiglipVisionModel
        case "siglip2_vision_model":
            return VIT_PRESETS["siglip2-naflex-so400m"], ViT, Siglip2VisionConfig(**SO400M), Siglip2VisionModel
        case "dinov2":
            config = Dinov2Config(**DINO_G, image_size=518, patch_size=14, use_swiglu_ffn=True)
            return VIT_PRESETS["dinov2-g14"], ViT, config, Dinov2Model
        case "dinov2_with_registers":
            config = Dinov2WithRegistersConfig(**DINO_L, image_size=518, patch_size=14)
            return VIT_PRESETS["dinov2-l14-reg"], ViT, config, Dinov2WithRegistersModel
        case "clip_text_model":
            return TEXT_TOWER_PRESETS["clip-b"], TextTower, CLIPTextConfig(), CLIPTextModel
        case "siglip_text_model":
            return TEXT_TOWER_PRESETS["siglip-b"], TextTower, SiglipTextConfig(), SiglipTextModel
    raise AssertionError(name)


@pytest.mark.parametrize("name", [family.name for family in ENCODER_FAMILIES])
def test_released_shapes(name):
    preset, model, theirs, reference = released(name)
    row = FAMILIES[name]
    with torch.device("meta"):
        ours, other = model(preset).state_dict(), reference(theirs)
    other = revert_weight_conversion(other, other.state_dict())  # the names on disk
    assert row.from_hf_config(json.loads(theirs.to_json_string(use_diff=False))) == preset.replace(
        **({"log_scale": 2.6592} if name == "clip" else {})
    )
    assert row.from_hf_config(row.to_hf_config(preset)) == preset
    pulled, pushed = {}, {}
    for move in row.tensor_rules(preset):
        pulled |= zip(move.native, move.load([other[x] for x in move.hf]), strict=True)
        pushed |= zip(move.hf, move.export([ours[x] for x in move.native]), strict=True)
    assert {k: v.shape for k, v in pulled.items()} == {k: v.shape for k, v in ours.items()}
    assert {k: v.shape for k, v in pushed.items()} == {k: v.shape for k, v in other.items()}


CONFIGS = {
    "clip_vision_model": CLIPVisionConfig,
    "clip_text_model": CLIPTextConfig,
    "siglip_vision_model": SiglipVisionConfig,
    "siglip_text_model": SiglipTextConfig,
    "siglip2_vision_model": Siglip2VisionConfig,
    "dinov2": Dinov2Config,
    "dinov2_with_registers": Dinov2WithRegistersConfig,
}


@pytest.mark.parametrize("name", CONFIGS)
def test_config_defaults(name):
    """The table of defaults equals the defaults of transformers."""
    theirs = CONFIGS[name]().to_dict()
    assert {key: theirs[key] for key in DEFAULTS[name]} == DEFAULTS[name]
    assert FAMILIES[name].from_hf_config({}) == FAMILIES[name].from_hf_config(theirs)


def test_sparse_and_duplicate_configs():
    """google/siglip-base-patch16-224 is sparse; early OpenAI configs have duplicate keys, the second is right."""
    bare = FAMILIES["siglip"].from_hf_config({"text_config": {"vocab_size": 32_000}, "vision_config": {}})
    assert (bare.image, bare.text) == (VIT_PRESETS["siglip-b16-224"], TEXT_TOWER_PRESETS["siglip-b"])
    doubled = {
        "vision_config": {"patch_size": 32},
        "vision_config_dict": {"patch_size": 16},
        "text_config": {"eos_token_id": 2},
        "text_config_dict": None,
    }
    read = FAMILIES["clip"].from_hf_config(doubled)
    assert read.image == VIT_PRESETS["clip-b16"] and read.text.pool == "largest"


# ---- refusals ---------------------------------------------------------------------------------------------------


def test_export_error_lists_families(tmp_path):
    vit = ViT(VIT_PRESETS["siglip-b16-224"].replace(layers=1))
    with pytest.raises(CheckpointError, match="siglip_vision_model"):
        to_hf(vit, tmp_path, family="dinov2")
    odd = vit.config.replace(block=vit.config.block.replace(norm="rms"))
    with pytest.raises(CheckpointError, match="no Hugging Face family"):
        to_hf(ViT(odd), tmp_path)


@pytest.mark.parametrize(
    "kind, about, why",
    [
        ("siglip_vision_model", {"hidden_act": "mish"}, "mish"),
        ("siglip_vision_model", {"image_size": [224, 256]}, "only square"),
        ("siglip2_vision_model", {"num_patches": 250}, "num_patches"),
        ("clip_text_model", {"eos_token_id": [1, 2]}, "eos_token_id"),
    ],
)
def test_unsupported_settings_raise(kind, about, why):
    with pytest.raises(CheckpointError, match=why):
        FAMILIES[kind].from_hf_config(about)


def test_families_are_disjoint():
    """No config is supported by two families of one model."""
    for name, config in {**VIT_PRESETS, **TEXT_TOWER_PRESETS, **CONTRASTIVE_PRESETS}.items():
        assert sum(row.supports(config) for row in FAMILIES.values() if _can(row, config)) == 1, name
    gated = VIT_PRESETS["dinov2-l14"].replace(
        block=VIT_PRESETS["dinov2-l14"].block.replace(mlp=PlainMLPConfig(intermediate_size=1000))
    )
    assert not FAMILIES["dinov2"].supports(gated)  # no whole ratio


def _can(row, config) -> bool:
    return {"ViTConfig": ViT, "TextTowerConfig": TextTower, "ContrastiveConfig": ContrastiveModel}[
        type(config).__name__
    ] is row.model_class


@pytest.mark.parametrize(
    ("about", "message"),
    [
        ({"model_type": "clip", "vision_config": "x"}, "vision_config"),
        ({"model_type": "clip", "vision_config": {"hidden_size": "7"}}, r"vision_config\.hidden_size"),
        ({"model_type": "clip", "projection_dim": [1]}, "projection_dim"),
        ({"model_type": "clip_text_model", "eos_token_id": "x"}, "eos_token_id"),
        ({"model_type": "dinov2", "patch_size": 0}, "patch_size"),
        ({"model_type": "dinov2", "mlp_ratio": "4"}, "mlp_ratio"),
        ({"model_type": "siglip2_vision_model", "num_patches": -4}, "num_patches"),
        ({"model_type": "siglip_vision_model", "hidden_act": ["gelu"]}, "hidden_act"),
        ({"architecture": "eva02_base_patch14_224", "model_args": "x"}, "model_args"),
        ({"architecture": "eva02_base_patch14_224", "model_args": {"ref_feat_shape": 16}}, "ref_feat_shape"),
        ({"architecture": "eva02_base_patch14_224", "num_classes": "x"}, "num_classes"),
        ({"architecture": ["eva02"]}, "architecture"),
        ({"model_type": ["clip"]}, "model_type"),
    ],
)
def test_invalid_config_error_names_file_and_key(about, message, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(about))
    for read in (from_hf, read_config):
        with pytest.raises(VitrailError, match=message) as error:
            read(tmp_path)
        assert str(tmp_path / "config.json") in error.value.problem
