"""Phi-3-vision and Phi-4-multimodal generate the same tokens on a GPU, with CUDA graphs, as on a CPU."""

import pytest
import torch

from helpers import randomize
from hub.test_llava import pictures
from vitrail.backbones.decoder import DecoderConfig
from vitrail.backbones.fusion import ImageLoRAConfig, PrefixFusionConfig
from vitrail.connectors import MergerConfig
from vitrail.encoders import ViTConfig
from vitrail.generate.sampling import GREEDY
from vitrail.generate.vlm_generation import generate_from_streams
from vitrail.models.vlm import VLM, VLMConfig
from vitrail.nn import AttentionConfig, BlockConfig, GatedMLPConfig, PlainMLPConfig, RotaryConfig
from vitrail.processing.hd_tiles import DynamicHDPolicy, HDTransformPolicy
from vitrail.stream import StreamRules, build_stream, text_part

pytestmark = pytest.mark.gpu

LORA = ImageLoRAConfig(rank=4, alpha=8.0)
MODELS = {
    "phi3_v": (HDTransformPolicy(tile_size=32, patch_size=4, max_tiles=4), "concatenate", PrefixFusionConfig()),
    "phi4_multimodal": (DynamicHDPolicy(tile_size=32, patch_size=4, max_tiles=6), "mean", PrefixFusionConfig()),
    "phi4mm": (DynamicHDPolicy(tile_size=32, patch_size=4, max_tiles=6), "mean", LORA),
}


def build_model(name: str) -> VLM:
    policy, reduction, fusion = MODELS[name]
    block = BlockConfig(
        width=32, attention=AttentionConfig(heads=2, bias="all"), mlp=PlainMLPConfig(intermediate_size=48)
    )
    text = BlockConfig(
        width=64, attention=AttentionConfig(heads=4), mlp=GatedMLPConfig(intermediate_size=96), norm="rms"
    )
    config = VLMConfig(
        tower=ViTConfig(layers=2, block=block, image_size=32, patch_size=4, position_interpolation="bucket"),
        connector=MergerConfig(
            in_features=32,
            out_features=64,
            intermediate_size=64,
            norm_position="none",
            reduction=reduction,
            separators=True,
        ),
        decoder=DecoderConfig(vocab_size=97, layers=2, block=text, rotary=RotaryConfig(16), fusion=fusion),
        policy=policy,
        vision_feature_layer=-2,
        rules=StreamRules(fill_id=96),
    )
    return randomize(VLM(config).eval(), spread=0.3)


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_answers_equal_those_on_a_cpu(name):
    model = build_model(name)
    answers = []
    for device in ("cpu", "cuda"):
        model.to(device)
        for size in ((40, 90), (40, 90), (33, 31)):  # the second prompt of a shape uses a CUDA graph
            images = model.prepare_images(pictures(size))
            parts = [text_part([1, 5]), *model.config.make_parts(images.layouts[0]), text_part([7, 8])]
            stream = build_stream(parts, model.config.rules)
            [output] = generate_from_streams(model, [stream], images, max_new_tokens=6, sampling=GREEDY)
            answers.append(output.ids)
    assert answers[:3] == answers[3:]
