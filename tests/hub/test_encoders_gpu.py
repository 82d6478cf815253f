"""Towers of released shapes on a GPU in bfloat16: as near to the exact result as transformers is."""

import pytest
import torch
from transformers import (
    CLIPVisionConfig,
    CLIPVisionModel,
    Dinov2Config,
    Dinov2Model,
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersModel,
    Siglip2VisionConfig,
    Siglip2VisionModel,
    SiglipVisionConfig,
    SiglipVisionModel,
)

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
def test_released_towers_agree_in_bfloat16(name, tmp_path):
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
        given = (patches, grids)
    else:
        side = config.image_size
        given = (torch.randn(2, 3, side, side, device="cuda", dtype=torch.bfloat16),)
        theirs = reference(given[0]).pooler_output
    mine = ours.pool(*given).float()
    exact = ours.float().pool(given[0].float(), *given[1:])
    scale = exact.abs().max()
    assert (mine - exact).abs().max() / scale <= max(1.5 * (theirs.float() - exact).abs().max() / scale, 1e-2)
