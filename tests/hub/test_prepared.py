"""Preprocessing of vision-language models matches the processors of transformers exactly, on import and export."""

import json
import shutil

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from helpers import randomize
from vitrail.errors import CheckpointError, ConfigError, VitrailError
from vitrail.evals.image_feature_extractor import find_image_tower
from vitrail.hub import from_hf, load, save, to_hf
from vitrail.hub.checkpoint_info import read_config
from vitrail.models.cross_attention_vlm import CrossAttentionVLM
from vitrail.processing.image_preprocessor import PREPROCESSOR_FILE, PROCESSOR_FILE
from vitrail.processing.internvl_tiles import TilesPolicy
from vitrail.processing.mllama_canvas import CanvasPolicy
from vitrail.processing.resolution_policies import CropPolicy, LetterboxPolicy, NaivePolicy, NativePolicy
from vitrail.registry import FAMILIES

SIZES = [(40, 91), (33, 31), (64, 20), (7, 5), (28, 28), (3, 190), (101, 97)]
RNG = np.random.default_rng(0)
IMAGES = [Image.fromarray(RNG.integers(0, 256, (*size, 3), dtype=np.uint8)) for size in SIZES]
LEVELS = {"image_mean": [0.1, 0.3, 0.6], "image_std": [0.7, 0.4, 0.9]}

SIZE = {"hidden_size": 24, "intermediate_size": 30, "num_hidden_layers": 2, "num_attention_heads": 2}
WORDS = {**SIZE, "vocab_size": 99, "num_key_value_heads": 2, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5}
LLAMA = {"model_type": "llama", **WORDS}
TOWER = {**SIZE, "image_size": 28, "patch_size": 7}
LLAVA = {"text_config": LLAMA, "image_token_index": 98}
CLIP = {"vision_config": {"model_type": "clip_vision_model", **TOWER}}
SIGLIP = {"vision_config": {"model_type": "siglip_vision_model", **TOWER}, "vision_feature_select_strategy": "full"}
PINPOINTS = [[28, 56], [56, 28], [56, 56], [84, 28]]
QWEN = {
    "text_config": {
        **WORDS,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2]},
    },
    "image_token_id": 90,
}
PACKED = {"depth": 2, "num_heads": 1, "patch_size": 3, "temporal_patch_size": 2, "spatial_merge_size": 2}
SECOND = {**PACKED, "embed_dim": 12, "mlp_ratio": 2, "hidden_size": 24}
THIRD = {**PACKED, "hidden_size": 12, "intermediate_size": 20, "out_hidden_size": 24}
FAMILY = {  # name → config.json
    "llava": {**LLAVA, **CLIP},
    "llava, siglip": {**LLAVA, **SIGLIP},
    "llava_next": {**LLAVA, **CLIP, "image_grid_pinpoints": PINPOINTS},
    "llava_next_video": {**LLAVA, **CLIP, "image_grid_pinpoints": PINPOINTS},
    "llava_onevision": {**LLAVA, **SIGLIP, "image_grid_pinpoints": PINPOINTS},
    "qwen2_vl": {**QWEN, "vision_config": SECOND},
    "qwen2_5_vl": {**QWEN, "vision_config": {**THIRD, "window_size": 12, "fullatt_block_indexes": [1]}},
    "qwen3_vl": {
        **QWEN,
        "text_config": {**QWEN["text_config"], "head_dim": 12},
        "vision_config": {**THIRD, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
    },
    "internvl": {
        "vision_config": {**SIZE, "image_size": [12, 12], "patch_size": [3, 3]},
        "text_config": {"model_type": "qwen2", **WORDS},
        "image_token_id": 98,
    },
    "blip-2": {
        "vision_config": {**SIZE, "image_size": 15, "patch_size": 7},
        "qformer_config": SIZE,
        "text_config": LLAMA,
        "num_query_tokens": 3,
        "image_token_index": 98,
    },
    "mllama": {
        "vision_config": {
            **SIZE,
            "attention_heads": 2,
            "num_global_layers": 1,
            "image_size": 28,
            "patch_size": 7,
            "max_num_tiles": 4,
            "supported_aspect_ratios": [[1, 1], [1, 2], [1, 3], [1, 4], [2, 1], [2, 2], [3, 1], [4, 1]],
            "intermediate_layers_indices": [0],
            "vision_output_dim": 48,
        },
        "text_config": {**WORDS, "num_hidden_layers": 3, "cross_attention_layers": [1]},
        "image_token_index": 99,
    },
    "gemma3": {
        "text_config": {"model_type": "gemma3_text", **WORDS, "head_dim": 12},
        "vision_config": {"model_type": "siglip_vision_model", **TOWER},
        "mm_tokens_per_image": 4,
        "image_token_index": 98,
    },
    "idefics3": {"text_config": LLAMA, "vision_config": {**TOWER, "image_size": 31}, "image_token_id": 98},
    "smolvlm": {"text_config": LLAMA, "vision_config": TOWER, "image_token_id": 98, "scale_factor": 4},
    "paligemma": {
        "text_config": {"model_type": "gemma", **WORDS, "head_dim": 12},
        "vision_config": {"model_type": "siglip_vision_model", **TOWER},
        "projection_dim": 24,
        "image_token_index": 98,
    },
    "idefics": {
        **WORDS,
        "additional_vocab_size": 2,
        "vision_config": {**TOWER, "embed_dim": 24},
    },
}
SQUARE = {"height": 28, "width": 28}
SAID = [  # a family, and what its processor is told
    ("llava", {"size": {"shortest_edge": 28}, "crop_size": SQUARE}),
    ("llava", {"size": {"shortest_edge": 40}, "crop_size": SQUARE, "resample": 2, **LEVELS}),
    ("llava", {"size": {"shortest_edge": 28}, "crop_size": SQUARE, "do_pad": True}),
    ("llava", {"size": SQUARE, "do_pad": True, "do_center_crop": False, **LEVELS}),
    ("llava", {"size": SQUARE, "do_center_crop": False, "do_normalize": False}),
    ("llava", {"size": SQUARE, "crop_size": SQUARE, "do_center_crop": True}),
    ("llava, siglip", {"size": {"shortest_edge": 30}, "crop_size": SQUARE, **LEVELS}),
    ("llava_next", {"size": {"shortest_edge": 28}, "crop_size": SQUARE, "image_grid_pinpoints": PINPOINTS}),
    ("llava_next", {"size": SQUARE, "crop_size": SQUARE, "image_grid_pinpoints": PINPOINTS, "resample": 2, **LEVELS}),
    ("llava_next_video", {"size": {"shortest_edge": 28}, "crop_size": SQUARE, "image_grid_pinpoints": PINPOINTS}),
    ("llava_onevision", {"size": SQUARE, "image_grid_pinpoints": PINPOINTS}),
    ("llava_onevision", {"size": SQUARE, "image_grid_pinpoints": PINPOINTS, "resample": 2, **LEVELS}),
    *(
        (name, {"patch_size": 3, **budget, **LEVELS})
        for name in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
        for budget in (
            {"min_pixels": 500, "max_pixels": 3000},
            {"size": {"shortest_edge": 700, "longest_edge": 5000}, "resample": 1},
        )
    ),
    ("internvl", {"size": {"height": 12, "width": 12}, "crop_to_patches": True}),
    ("internvl", {"size": {"height": 12, "width": 12}, "crop_to_patches": True, "min_patches": 2, "max_patches": 7}),
    ("internvl", {"size": {"height": 12, "width": 12}, "crop_to_patches": True, "max_patches": 1, **LEVELS}),
    ("blip-2", {"size": {"height": 15, "width": 15}}),
    ("blip-2", {"size": {"height": 15, "width": 15}, "resample": 2, **LEVELS}),
    ("blip-2", {"size": {"shortest_edge": 20}, "do_center_crop": True, "crop_size": {"height": 15, "width": 15}}),
    ("mllama", {"size": SQUARE}),
    ("mllama", {"size": SQUARE, "resample": 3, **LEVELS}),
    ("gemma3", {"size": SQUARE}),
    ("gemma3", {"size": SQUARE, "resample": 3, "do_pan_and_scan": False, **LEVELS}),
    ("paligemma", {"size": SQUARE, "resample": 2, **LEVELS}),
    ("idefics3", {"size": {"longest_edge": 62}, "max_image_size": {"longest_edge": 31}}),
    ("smolvlm", {"size": {"longest_edge": 90}, "max_image_size": {"longest_edge": 28}, "resample": 2, **LEVELS}),
    (
        "smolvlm",
        {"size": {"longest_edge": 90}, "max_image_size": {"longest_edge": 28}, "do_image_splitting": False},
    ),
    ("idefics", {"size": SQUARE}),
    ("idefics", {"image_size": 28, "resample": 2, **LEVELS}),
]


def made(name: str):
    kind = name.partition(",")[0]
    family = FAMILIES[kind]
    return randomize(family.model_class(family.from_hf_config({"model_type": kind, **FAMILY[name]})).eval())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Map each name to a transformers folder without a preprocessor config."""
    kept = {}

    def of(name: str):
        if name not in kept:
            kept[name] = tmp_path_factory.mktemp("model")
            to_hf(made(name), kept[name])
            (kept[name] / PREPROCESSOR_FILE).unlink()
        return kept[name]

    return of


def processor_of(place):
    from transformers import AutoImageProcessor

    return AutoImageProcessor.from_pretrained(place)


def theirs(processor) -> list[torch.Tensor]:
    """Process each image on its own."""
    found = []
    for image in IMAGES:
        made = processor(image, return_tensors="pt")
        pixels = made if isinstance(made, torch.Tensor) else made["pixel_values"]
        found.append(pixels.flatten(0, -4) if pixels.ndim > 4 else pixels)
    return found


def ours(model) -> list[torch.Tensor]:
    if isinstance(model, CrossAttentionVLM):
        return [model.prepare_images([image]).pixels.flatten(0, -4) for image in IMAGES]
    return [model.prepare_images([image]).pixels for image in IMAGES]


def shown(config) -> tuple:
    return config.policy, config.mean, config.std


def same(a, b) -> None:
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)


@pytest.mark.parametrize("name", FAMILY)
def test_exported_preprocessing_matches_transformers(name, tmp_path):
    model = made(name)
    to_hf(model, tmp_path)
    processor = processor_of(tmp_path)
    kind = FAMILIES[name.partition(",")[0]].image_processor
    assert type(processor).__name__ == f"{kind.name}Pil"
    same(theirs(processor), ours(model))
    assert shown(read_config(tmp_path)) == shown(from_hf(tmp_path).config) == shown(model.config)


@pytest.mark.parametrize(("name", "output"), SAID, ids=lambda x: x if isinstance(x, str) else "")
def test_imported_preprocessing_matches_transformers(name, output, folder, tmp_path):
    """Reads preprocessor_config.json or processor_config.json; round trips keep it."""
    shutil.copytree(folder(name), tmp_path / "theirs")
    to_hf(made(name), tmp_path / "usual")
    processor = type(processor_of(tmp_path / "usual"))(**output)
    processor.save_pretrained(tmp_path / "theirs")
    model = from_hf(tmp_path / "theirs")
    expected = theirs(processor)
    same(ours(model), expected)

    save(model, tmp_path / "own")
    assert not (tmp_path / "own" / PREPROCESSOR_FILE).exists()  # the config says it all
    again = load(tmp_path / "own")
    assert again.config == model.config
    to_hf(again, tmp_path / "back")
    same(theirs(processor_of(tmp_path / "back")), expected)

    file = tmp_path / "theirs" / PREPROCESSOR_FILE
    (tmp_path / "theirs" / PROCESSOR_FILE).write_text(json.dumps({"image_processor": json.loads(file.read_text())}))
    file.write_text("{}")  # older than the whole's
    assert read_config(tmp_path / "theirs") == model.config
    to_hf(model, tmp_path / "theirs")
    whole = json.loads((tmp_path / "theirs" / PROCESSOR_FILE).read_text())
    assert "image_processor" not in whole  # which transformers would read first
    same(theirs(processor_of(tmp_path / "theirs")), expected)


@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.parametrize("output", [None, {}, {"image_mean": None, "processor_class": "X"}])
def test_missing_keys_use_defaults(name, output, folder, tmp_path):
    shutil.copytree(folder(name), tmp_path / "theirs")
    if output is not None:
        (tmp_path / "theirs" / PREPROCESSOR_FILE).write_text(json.dumps(output))
    assert shown(read_config(tmp_path / "theirs")) == shown(made(name).config)


def test_released_preprocessor_configs(folder, tmp_path):
    """Released files of Qwen2-VL, LLaVA-1.5, InternVL3 and Idefics."""
    released = {
        "qwen2_vl": ({"min_pixels": 3136, "max_pixels": 12_845_056, "patch_size": 3, "merge_size": 2}, NativePolicy),
        "llava": ({"crop_size": SQUARE, "do_center_crop": True, "size": {"shortest_edge": 28}}, CropPolicy),
        "internvl": ({"crop_size": None, "crop_to_patches": False, "min_patches": 1, "max_patches": 12}, TilesPolicy),
        "idefics": (
            {"image_num_channels": 3, "image_size": 28, "image_processor_type": "IdeficsImageProcessor"},
            NaivePolicy,
        ),
    }
    for name, (output, kind) in released.items():
        place = tmp_path / name
        shutil.copytree(folder(name), place)
        (place / PREPROCESSOR_FILE).write_text(json.dumps(output))
        policy = read_config(place).policy
        assert type(policy) is kind and policy == made(name).config.policy


WRONG = [
    ("llava", {"size": {"shortest_edge": 30}, "crop_size": {"height": 30, "width": 30}}, "28"),
    ("llava", {"size": {"shortest_edge": 40}, "crop_size": SQUARE, "do_pad": True}, "do_pad is true, with a crop from"),
    ("llava", {"do_pad": True, "image_processor_type": "CLIPImageProcessor"}, "do_pad is true in a CLIPImageProcessor"),
    ("llava", {"size": {"height": 28, "width": 30}, "do_center_crop": False}, "is not square"),
    ("llava", {"do_resize": False}, "do_resize is false"),
    ("llava", {"do_rescale": False}, "rescale"),
    ("llava", {"rescale_factor": 1 / 128}, "rescale"),
    ("llava", {"resample": 0}, "resample"),
    ("llava", {"image_mean": [0.5]}, "image_mean"),
    ("llava", {"image_std": [0, 0, 0]}, "image_std is"),
    ("llava_next", {"image_grid_pinpoints": [[28, 56]]}, "image_grid_pinpoints"),
    ("llava_next", {"size": {"shortest_edge": 56}}, "size"),
    ("llava_next", {"crop_size": {"height": 14, "width": 14}}, "crop_size"),
    ("llava_next_video", {"image_grid_pinpoints": [[28, 56]]}, "image_grid_pinpoints"),
    ("llava_onevision", {"image_grid_pinpoints": [[28, 56]]}, "image_grid_pinpoints"),
    ("llava_onevision", {"size": {"height": 56, "width": 56}}, "size"),
    ("qwen2_vl", {"patch_size": 14}, "and the model has"),
    ("qwen2_vl", {"merge_size": 1}, "merge_size"),
    ("qwen3_vl", {"temporal_patch_size": 1}, "temporal_patch_size"),
    ("qwen3_vl", {"size": {"shortest_edge": 100}}, "longest_edge"),
    ("qwen3_vl", {"size": 448}, "size is 448"),
    ("qwen3_vl", {"min_pixels": "many"}, "min_pixels"),
    ("qwen3_vl", {"min_pixels": 9, "max_pixels": 8}, "min_pixels"),
    ("internvl", {"size": {"height": 448, "width": 448}}, "448"),
    ("internvl", {"min_patches": 0}, "TilesPolicy: min_tiles"),
    ("internvl", {"max_patches": 10**12}, "max_patches"),
    ("llava", {"image_mean": [float("nan")] * 3}, "finite"),
    ("blip-2", {"size": {"height": 14, "width": 14}}, "15"),
    ("mllama", {"max_image_tiles": 3}, "max_image_tiles"),
    ("mllama", {"size": {"height": 560, "width": 560}}, "560"),
    ("gemma3", {"size": {"height": 896, "width": 896}}, "896"),
    ("gemma3", {"do_pan_and_scan": True}, "do_pan_and_scan is true"),
    ("paligemma", {"image_seq_length": 256}, "image_seq_length is 256, and the model has 16"),
    ("idefics3", {"max_image_size": {"longest_edge": 364}}, "max_image_size is .*364.*, and the model has"),
    ("idefics3", {"size": SQUARE}, "longest_edge"),
    ("smolvlm", {"size": {"longest_edge": 10**6}}, "longest_edge is 1000000"),
    ("idefics", {"image_size": 224}, "224"),
]


@pytest.mark.parametrize(("name", "output", "message"), WRONG)
def test_contradicting_settings_raise(name, output, message, folder, tmp_path):
    shutil.copytree(folder(name), tmp_path / "theirs")
    (tmp_path / "theirs" / PREPROCESSOR_FILE).write_text(json.dumps(output))
    with pytest.raises((CheckpointError, ConfigError), match=message) as caught:
        from_hf(tmp_path / "theirs")
    assert str(tmp_path / "theirs" / PREPROCESSOR_FILE) in caught.value.problem


KEYS = sorted({key for _, output in SAID for key in output} | {key for _, output, _ in WRONG for key in output})
VALUES = st.one_of(st.none(), st.booleans(), st.integers(-2, 10**30), st.floats(), st.text(max_size=3))
EDGES = st.sampled_from(["height", "width", "shortest_edge", "longest_edge"])
ANYTHING = st.one_of(VALUES, st.lists(VALUES, max_size=3), st.dictionaries(EDGES, VALUES, max_size=2))


@settings(max_examples=300)
@given(st.sampled_from(sorted(FAMILY)), st.dictionaries(st.sampled_from(KEYS), ANYTHING, max_size=4))
def test_random_settings_are_followed_or_raise(tmp_path_factory, name, output):
    """Random settings are followed or raise an error."""
    place = tmp_path_factory.mktemp("said")
    (place / PREPROCESSOR_FILE).write_text(json.dumps(output))
    kind = name.partition(",")[0]
    try:
        found = FAMILIES[kind].read_config({"model_type": kind, **FAMILY[name]}, place / "config.json")
    except VitrailError as error:
        assert PREPROCESSOR_FILE in error.problem
    else:
        assert FAMILIES[kind].supports(found) or isinstance(found.policy, LetterboxPolicy)  # see the next test


def test_padding_without_normalization(folder, tmp_path):
    """Padding is the mean, as in transformers; an export would pad with zeros."""
    from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil

    shutil.copytree(folder("llava"), tmp_path / "theirs")
    processor = LlavaImageProcessorPil(size=SQUARE, do_pad=True, do_center_crop=False, do_normalize=False)
    processor.save_pretrained(tmp_path / "theirs")
    model = from_hf(tmp_path / "theirs")
    same(ours(model), theirs(processor))
    assert not FAMILIES["llava"].supports(model.config)


def test_inexpressible_preprocessing_is_not_written(tmp_path):
    config = made("llava").config
    place = {"image_size": 28, "patch_size": 7}
    assert FAMILIES["llava"].supports(config.replace(policy=CropPolicy(shortest_edge=28, **place)))
    assert FAMILIES["llava"].supports(config.replace(policy=LetterboxPolicy(**place)))
    assert not FAMILIES["llava"].supports(config.replace(policy=LetterboxPolicy(fill_colour=(0, 0, 0), **place)))
    assert not FAMILIES["llava"].supports(config.replace(policy=TilesPolicy(tile_size=28, patch_size=7)))
    assert not FAMILIES["blip-2"].supports(
        made("blip-2").config.replace(policy=LetterboxPolicy(image_size=15, patch_size=7, unread_pixels=1))
    )
    tiled = made("llava_next").config
    assert not FAMILIES["llava_next"].supports(tiled.replace(policy=tiled.policy.replace(max_tiles=2)))
    assert not FAMILIES["llava_next"].supports(tiled.replace(policy=tiled.policy.replace(fill_colour=(9, 9, 9))))


@settings(max_examples=40)
@given(st.integers(36, 9999), st.integers(0, 9999), st.tuples(*[st.floats(0.01, 1.0)] * 3), st.integers(1, 9))
def test_round_trip(least, more, levels, tiles):
    native, cut = made("qwen2_vl").config, made("internvl").config
    native = native.replace(policy=native.policy.replace(min_pixels=least, max_pixels=least + more), std=levels)
    cut = cut.replace(
        policy=cut.policy.replace(min_tiles=tiles, max_tiles=tiles + more % 7, resample="bilinear"), mean=levels
    )
    for name, config in (("qwen2_vl", native), ("internvl", cut)):
        processor = FAMILIES[name].image_processor
        output = json.loads(json.dumps(processor.to_processor_config(config)))
        assert processor.apply_processor_config(made(name).config, output) == config


def test_suites_do_not_take_vlm_towers():
    """Their preprocessing follows the model config, which suites do not support."""
    assert all(find_image_tower(made(name)) is None for name in ("llava", "qwen2_vl", "mllama", "idefics"))
    assert find_image_tower(made("llava").tower) is not None


def test_views_of_cross_attention_vlm():
    """Images with different aspect ratios in one batch, through the model."""
    from transformers import MllamaImageProcessorPil

    model = made("mllama")
    views = model.prepare_images(IMAGES)
    processor = MllamaImageProcessorPil(
        size=SQUARE, image_mean=list(model.config.mean), image_std=list(model.config.std)
    )
    expected = processor([IMAGES], return_tensors="pt")
    torch.testing.assert_close(views.pixels, expected["pixel_values"][0], rtol=0, atol=0)
    ids = [1 + CanvasPolicy().tile_grids.index(ratio) for ratio in views.aspect_ratios]
    assert ids == expected["aspect_ratio_ids"][0].tolist() and len(set(ids)) > 3
    assert [len(seen) for seen in model.encode_images(views)] == [17 * n for n in expected["num_tiles"][0]]
    assert [len(seen) for seen in made("idefics").encode_images(made("idefics").prepare_images(IMAGES))] == [17] * len(
        IMAGES
    )
