"""Towers of released shapes on a GPU in bfloat16 are as precise as transformers."""

import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPVisionConfig,
    CLIPVisionModel,
    Dinov2Config,
    Dinov2Model,
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersModel,
    Siglip2VisionConfig,
    Siglip2VisionModel,
    SiglipTextConfig,
    SiglipTextModel,
    SiglipVisionConfig,
    SiglipVisionModel,
)

from hub.test_eva02 import plain, shapes
from vitrail.hub import from_hf

pytestmark = pytest.mark.gpu

L = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16}
SO400M = {"hidden_size": 1152, "num_hidden_layers": 27, "num_attention_heads": 16, "intermediate_size": 4304}
G = {"hidden_size": 1536, "num_hidden_layers": 40, "num_attention_heads": 24, "use_swiglu_ffn": True}

RELEASED = {
    "clip-l14-336": (CLIPVisionModel, CLIPVisionConfig(**L, intermediate_size=4096, patch_size=14, image_size=336)),
    "siglip-so400m-384": (SiglipVisionModel, SiglipVisionConfig(**SO400M, patch_size=14, image_size=384)),
    "siglip2-naflex-b16": (Siglip2VisionModel, Siglip2VisionConfig()),
    "dinov2-g14": (Dinov2Model, Dinov2Config(**G, image_size=518, patch_size=14)),
    "dinov2-l14-reg": (Dinov2WithRegistersModel, Dinov2WithRegistersConfig(**L, image_size=518, patch_size=14)),
}


@pytest.mark.parametrize("name", RELEASED)
@torch.no_grad()
def test_released_towers_match_in_bfloat16(name, tmp_path):
    model, config = RELEASED[name]
    with torch.device("cuda"):
        reference = model(config).bfloat16().eval()
    reference.save_pretrained(tmp_path)
    ours = from_hf(tmp_path, device="cuda")
    assert {p.dtype for p in ours.parameters()} == {torch.bfloat16}
    if name == "siglip2-naflex-b16":
        patches, grids = torch.randn(2, 256, 768, device="cuda", dtype=torch.bfloat16), [(16, 16), (12, 20)]
        shapes = torch.tensor(grids, device="cuda")
        mask = (torch.arange(256, device="cuda")[None] < shapes.prod(-1)[:, None]).int()
        theirs = reference(pixel_values=patches, pixel_attention_mask=mask, spatial_shapes=shapes).pooler_output
        inputs = (patches, grids)
    else:
        side = config.image_size
        inputs = (torch.randn(2, 3, side, side, device="cuda", dtype=torch.bfloat16),)
        theirs = reference(inputs[0]).pooler_output
    mine = ours.forward_pooled(*inputs)
    check_error(mine, theirs, ours.float().forward_pooled(inputs[0].float(), *inputs[1:]))


def check_error(ours, reference, exact):
    """Check that the error is at most 1.5 times that of transformers."""
    scale = exact.abs().max()
    error, reference_error = ((x.float() - exact).abs().max() / scale for x in (ours, reference))
    assert error <= max(1.5 * reference_error, 1e-2)


TEXTS = {
    "clip-l14": (
        CLIPTextModel,
        CLIPTextConfig(hidden_size=768, intermediate_size=3072, num_attention_heads=12, eos_token_id=49407),
    ),
    "siglip-so400m": (SiglipTextModel, SiglipTextConfig(**SO400M, projection_size=1152)),
}


@pytest.mark.parametrize("name", TEXTS)
@torch.no_grad()
def test_released_text_towers_match_in_bfloat16(name, tmp_path):
    model, config = TEXTS[name]
    with torch.device("cuda"):
        reference = model(config).bfloat16().eval()
    reference.save_pretrained(tmp_path)
    ours = from_hf(tmp_path, device="cuda")
    ids = torch.randint(3, 30_000, (4, config.max_position_embeddings), device="cuda")
    ids[:, -9] = 49407 if name == "clip-l14" else 7
    theirs = reference(input_ids=ids).pooler_output
    mine = ours.forward_pooled(ids)
    check_error(mine, theirs, ours.float().forward_pooled(ids))


@torch.no_grad()
def test_released_eva02_matches_equations_in_bfloat16(tmp_path):
    args = {"img_size": 224, "patch_size": 14, "in_chans": 3, "embed_dim": 1024, "depth": 24, "num_heads": 16}
    args |= {"mlp_ratio": 4 * 2 / 3, "swiglu_mlp": True, "scale_mlp": True, "qkv_fused": False}
    args |= {"scale_attn_inner": False, "use_rot_pos_emb": True, "ref_feat_shape": [16, 16], "global_pool": "avg"}
    tensors = {n: torch.randn(s) * (0.02 if len(s) > 1 else 0.1) for n, s in shapes(args, 0).items()}
    tensors = {n: (t + 1 if "norm" in n and n.endswith("weight") else t).bfloat16() for n, t in tensors.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    config = {"architecture": "eva02_large_patch14_224", "num_classes": 0, "model_args": args, "pretrained_cfg": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    ours = from_hf(tmp_path, device="cuda")
    assert {p.dtype for p in ours.parameters()} == {torch.bfloat16}
    pixels = torch.randn(2, 3, 224, 224, device="cuda", dtype=torch.bfloat16)
    on_gpu = {n: t.cuda() for n, t in tensors.items()}
    theirs = plain(args, on_gpu, pixels)[1]
    exact = plain(args, {n: t.float() for n, t in on_gpu.items()}, pixels.float())[1]
    check_error(ours.forward_pooled(pixels), theirs, exact)
    torch.testing.assert_close(ours.float().forward_pooled(pixels.float()), exact, rtol=1e-3, atol=1e-3)
