"""On the CPU: a ViT-S forward and a decoder's prefill, ours against transformers with the same weights, in turn.

    python perf/cpu.py

Only the ratios mean anything; both sides run eagerly in float32 with transformers' own choice of attention.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from record import record

from vitrail.hub import from_hf


def in_turn(ours: Callable[[], Any], theirs: Callable[[], Any], rounds: int = 25) -> dict[str, float]:
    """Median of theirs / ours over rounds in which each runs once, after two rounds that do not count."""
    ratios, times = [], []
    for i in range(rounds + 2):
        spent = []
        for call in (ours, theirs) if i % 2 else (theirs, ours):
            start = time.perf_counter()
            call()
            spent.append(time.perf_counter() - start)
        mine, other = spent if i % 2 else reversed(spent)
        if i >= 2:
            ratios.append(other / mine)
            times.append(mine)
    return {"speedup": statistics.median(ratios), "least": min(ratios), "most": max(ratios), "ms": 1000 * min(times)}


def imported(model: torch.nn.Module) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)  # pyrefly: ignore
        return from_hf(folder)


@torch.no_grad()
def main() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM, SiglipVisionConfig, SiglipVisionModel

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    size = {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 12, "num_attention_heads": 6}
    tower = SiglipVisionModel(SiglipVisionConfig(**size, image_size=224, patch_size=16)).eval()
    shape = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}
    decoder = LlamaForCausalLM(LlamaConfig(**shape, num_key_value_heads=3, vocab_size=49152)).eval()
    pixels, ids = torch.randn(8, 3, 224, 224), torch.randint(0, 49152, (1, 512))
    mine, own = imported(tower), imported(decoder)
    result = {
        "threads": torch.get_num_threads(),
        "ViT-S/16, 8 pictures of 224": in_turn(lambda: mine.pool(pixels), lambda: tower(pixels)),
        "135M Llama, prefill of 512": in_turn(
            lambda: own(ids, cache=own.cache(1, 512)), lambda: decoder(ids, use_cache=True)
        ),
    }
    print(json.dumps(result, indent=1))
    if arguments.out:
        record(
            arguments.out,
            result,
            "vitrail.encoders.vit",
            "vitrail.backbones.decoder",
            "vitrail.nn.attend",
            "vitrail.nn.mlp",
        )


if __name__ == "__main__":
    main()
