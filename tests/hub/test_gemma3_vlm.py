"""Gemma 3 with images matches transformers on random checkpoints of unusual shapes."""

import json

import pytest
import torch
import transformers as T

from helpers import randomize
from hub.vlm_parity import check_exports, check_parity
from vitrail.errors import VitrailError
from vitrail.hub import from_hf, to_hf
from vitrail.hub.llava import normalize_llava_config
from vitrail.hub.safetensors_files import SafetensorsWeights

TEXT = {"hidden_size": 24, "intermediate_size": 46, "num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 10}
TEXT |= {"num_key_value_heads": 2, "vocab_size": 99, "query_pre_attn_scalar": 7, "layer_types": None}
TOWER = {"hidden_size": 22, "intermediate_size": 37, "num_hidden_layers": 2, "num_attention_heads": 2}
TOWER |= {"image_size": 24, "patch_size": 4, "vision_use_head": False}
IDS = {"image_token_index": 98, "boi_token_index": 96, "eoi_token_index": 97}


def gemma3(text=(), vision=(), **more):
    config = T.Gemma3Config(
        text_config=T.Gemma3TextConfig(**TEXT | dict(text)),
        vision_config=T.SiglipVisionConfig(**TOWER | dict(vision)),
        **{"mm_tokens_per_image": 9, **IDS, **more},
    )
    return randomize(T.Gemma3ForConditionalGeneration(config).eval(), spread=0.1)


CASES = {
    "window over an image": lambda: gemma3({"sliding_window": 12, "sliding_window_pattern": 2}),
    "window within an image": lambda: gemma3({"sliding_window": 4, "sliding_window_pattern": 2}),
    "untied, one patch a token, 5 unread pixels": lambda: gemma3(
        {"num_key_value_heads": 1, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        {"image_size": 29, "patch_size": 8, "layer_norm_eps": 1e-3},
        tie_word_embeddings=False,
    ),
    "one token an image, pooled": lambda: gemma3(vision={"vision_use_head": True}, mm_tokens_per_image=1),
}


def inputs(sample, mask, views):
    given = {"token_type_ids": mask.long()[None]}  # tokens of an image attend to each other
    return given | ({"pixel_values": torch.cat(views)} if views else {})


@pytest.mark.parametrize("case", CASES)
def test_matches_transformers(case, tmp_path):
    check_parity(CASES[case](), tmp_path, inputs)


@pytest.mark.parametrize("case", CASES)
def test_round_trip(case, tmp_path):
    check_exports(CASES[case](), tmp_path, normalize_llava_config)


def test_exports_have_the_released_names(tmp_path):
    gemma3().save_pretrained(tmp_path / "hf")
    to_hf(from_hf(tmp_path / "hf"), tmp_path / "back")
    names = set(SafetensorsWeights(tmp_path / "back"))
    assert {
        "language_model.model.embed_tokens.weight",
        "multi_modal_projector.mm_input_projection_weight",
        "multi_modal_projector.mm_soft_emb_norm.weight",
        "vision_tower.vision_model.embeddings.patch_embedding.weight",
    } <= names and not any(name.startswith(("model.", "lm_head")) for name in names)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mm_tokens_per_image": 16}, "mm_tokens_per_image is 16, but an image has 6 × 6 patches"),
        ({"mm_tokens_per_image": 8}, "mm_tokens_per_image is 8"),
        ({"vision_config": {"model_type": "clip_vision_model"}}, "vision_config.model_type 'clip_vision_model'"),
        ({"text_config": {"model_type": "llama"}}, "text_config.model_type 'llama'"),
        ({"image_token_index": 10**9}, "rules.fill_id"),
    ],
)
def test_unsupported_settings_raise(change, message, tmp_path):
    gemma3().save_pretrained(tmp_path)
    about = json.loads((tmp_path / "config.json").read_text())
    about.pop("image_token_id", None)
    (tmp_path / "config.json").write_text(json.dumps(about | change))
    with pytest.raises(VitrailError, match=message):
        from_hf(tmp_path)
