"""Idefics 3 and SmolVLM match transformers on random checkpoints of unusual shapes."""

import json

import numpy as np
import pytest
import torch
import transformers as T
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

from helpers import randomize
from hub.test_llava import pictures
from hub.vlm_parity import check_exports, check_parity
from vitrail.errors import VitrailError
from vitrail.hub import from_hf
from vitrail.hub.idefics3 import write_image_text
from vitrail.hub.llava import normalize_llava_config
from vitrail.processing.split_tiles import SplitPolicy

TEXT = {"hidden_size": 30, "intermediate_size": 46, "num_hidden_layers": 2, "num_attention_heads": 5, "vocab_size": 99}
TOWER = {"hidden_size": 22, "intermediate_size": 37, "num_hidden_layers": 2, "num_attention_heads": 2}
TOWER |= {"image_size": 25, "patch_size": 4}


def idefics3(text=T.LlamaConfig, vision=(), kind="Idefics3", **more):
    config = getattr(T, f"{kind}Config")(
        text_config=text(**TEXT, num_key_value_heads=more.pop("kv", 1)),
        vision_config={**TOWER, **dict(vision)},
        image_token_id=98,
        **more,
    )
    return randomize(getattr(T, f"{kind}ForConditionalGeneration")(config).eval(), spread=0.1)


CASES = {
    "idefics3": lambda: idefics3(),
    "idefics3, tied, merged by 3": lambda: idefics3(scale_factor=3, tie_word_embeddings=True),
    "smolvlm, Qwen2, not merged": lambda: idefics3(
        T.Qwen2Config, {"hidden_act": "gelu", "layer_norm_eps": 1e-3}, "SmolVLM", kv=5, scale_factor=1
    ),
}


def inputs(sample, mask, views):
    return {"pixel_values": torch.cat(views)[None]} if views else {}


@pytest.mark.parametrize("case", CASES)
def test_matches_transformers(case, tmp_path):
    ours = check_parity(CASES[case](), tmp_path, inputs)
    assert isinstance(ours.config.policy, SplitPolicy)


@pytest.mark.parametrize("case", CASES)
def test_round_trip(case, tmp_path):
    check_exports(CASES[case](), tmp_path, normalize_llava_config)


@pytest.mark.parametrize("size", [(40, 90), (33, 31), (100, 7), (24, 24), (12, 200), (301, 299)])
@pytest.mark.parametrize("edge", [24, 48, 70, 96])
def test_tiles_and_texts_match_the_processor(size, edge):
    """Pixels, rows and columns of tiles; the texts are those of the processor."""
    policy = SplitPolicy(tile_size=24, patch_size=4, longest_edge=edge)
    [image] = pictures(size)
    sizes = {"size": {"longest_edge": edge}, "max_image_size": {"longest_edge": 24}}
    found = Idefics3ImageProcessorPil(**sizes, do_normalize=False)(image, return_row_col_info=True, return_tensors="pt")
    views = torch.stack([torch.tensor(np.array(view)).movedim(-1, 0) for view in policy.apply(image)])
    torch.testing.assert_close(views / 255, found["pixel_values"][0], rtol=0, atol=1e-6)
    layout = policy.layout(*size)
    processor = object.__new__(T.Idefics3Processor)
    processor.fake_image_token, processor.global_image_tag = "<fake_token_around_image>", "<global-img>"
    processor.image_token, processor.image_seq_len = "<image>", 9
    assert "<image>".join(write_image_text(layout)) == processor.replace_image_token(found, 0).replace(
        "<image>" * 9, "<image>"
    )
    assert layout.num_tokens == 9 * len(layout.views)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scale_factor": 4}, "patches is not divisible into blocks of"),
        ({"text_config": {"model_type": "mamba"}}, "mamba"),
        ({"vision_config": {"hidden_act": "mish"}}, "mish"),
        ({"image_token_id": 10**9}, "rules.fill_id"),
    ],
)
def test_unsupported_settings_raise(change, message, tmp_path):
    idefics3().save_pretrained(tmp_path)
    about = json.loads((tmp_path / "config.json").read_text())
    for key, value in change.items():
        about[key] = {**about[key], **value} if isinstance(value, dict) else value
    (tmp_path / "config.json").write_text(json.dumps(about))
    with pytest.raises(VitrailError, match=message):
        from_hf(tmp_path)
