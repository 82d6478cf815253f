"""A ViT-S forward pass and the prefill of a 135M decoder on the CPU, against transformers with the same weights.

    python perf/cpu.py

Both sides alternate and run eagerly in float32 with transformers' default attention. Only the ratios are meaningful.
"""

import json
import tempfile
from typing import Any

import torch
from record import make_parser, write_record
from timing import compare_alternating

from vitrail.hub import from_hf

MEASURED = (
    "vitrail.encoders.vit",
    "vitrail.backbones.decoder",
    "vitrail.nn.attention_backends",
    "vitrail.nn.mlp",
)


def convert_model(model: torch.nn.Module) -> Any:
    """Load the weights of a transformers model into ours."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)  # pyrefly: ignore
        return from_hf(folder)


@torch.no_grad()
def main() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM, SiglipVisionConfig, SiglipVisionModel

    arguments = make_parser(__doc__, require_out=False).parse_args()
    torch.manual_seed(0)
    size = {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 12, "num_attention_heads": 6}
    reference_tower = SiglipVisionModel(SiglipVisionConfig(**size, image_size=224, patch_size=16)).eval()
    shape = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}
    reference_decoder = LlamaForCausalLM(LlamaConfig(**shape, num_key_value_heads=3, vocab_size=49152)).eval()
    pixels, ids = torch.randn(8, 3, 224, 224), torch.randint(0, 49152, (1, 512))
    tower, decoder = convert_model(reference_tower), convert_model(reference_decoder)
    result = {
        "threads": torch.get_num_threads(),
        "ViT-S/16, 8 images of 224": compare_alternating(
            lambda: tower.forward_pooled(pixels), lambda: reference_tower(pixels), rounds=25
        ),
        "135M Llama, prefill of 512": compare_alternating(
            lambda: decoder(ids, cache=decoder.make_cache(1, 512)),
            lambda: reference_decoder(ids, use_cache=True),
            rounds=25,
        ),
    }
    print(json.dumps(result, indent=1))
    write_record(arguments.out, result, MEASURED)


if __name__ == "__main__":
    main()
