"""Decoding one row of text with a 1.1B Llama: our captured step against transformers, and the weight-read floor.

    python perf/decode.py --out results.json        # needs a CUDA device

Greedy, after a prompt of 128 tokens, 256 new ones. Peer: `generate` with its static, compiled cache. Floor: every
weight the step needs, read once at the copy bandwidth measured in the same run.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from record import record

from vitrail.backbones.decoder import Decoder, DecoderConfig
from vitrail.generate.captured import CapturedStep
from vitrail.nn import AttentionConfig, BlockConfig, GatedConfig, RotaryConfig, Work, cost

PROMPT, NEW = 128, 256
CONFIG = DecoderConfig(
    vocab=32_768,
    layers=16,
    block=BlockConfig(
        width=2048, attention=AttentionConfig(heads=32, kv_heads=8), mlp=GatedConfig(hidden=8192), norm="rms"
    ),
    rotary=RotaryConfig(head_dim=64),
)


def bandwidth() -> float:
    """Bytes a second of a large copy, read and written."""
    a = torch.empty(2**31, dtype=torch.uint8, device="cuda")
    b = torch.empty_like(a)
    b.copy_(a)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(10):
        b.copy_(a)
    torch.cuda.synchronize()
    return 20 * a.numel() / (time.perf_counter() - start)


def seconds(call, repeats: int = 3) -> float:
    best = float("inf")
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best


@torch.no_grad()
def ours(prompt: torch.Tensor) -> dict[str, float]:
    with torch.device("cuda"):
        model = Decoder(CONFIG).bfloat16().eval()
    for block in model.blocks:  # a trained model's scale, so that logits do not all tie
        torch.nn.init.normal_(block.branches["mlp"].op.down.weight, std=0.02)

    def run() -> tuple[CapturedStep, torch.Tensor]:
        cache = model.cache(1, PROMPT + NEW + 8)
        logits = model.logits(model.hidden(prompt, cache=cache)[:, -1])
        step = CapturedStep(model, cache, greedy=True)
        return step, logits.argmax(-1)

    step, first = run()
    captured = step(first).float().clone()
    eager = model(torch.cat([prompt, first[:, None]], 1))[:, -1].float()
    difference = ((captured - eager).abs().max() / eager.abs().max()).item()
    start, filled = step.cache.lengths.clone(), step.cache.filled

    def decode() -> None:
        step.cache.lengths, step.cache.filled = start.clone(), filled
        step.follow(NEW)

    decode()
    time_ = seconds(decode)
    needed = cost.bytes(model.blocks, Work.decode(PROMPT + NEW // 2)).read + model.head.weight.nbytes
    return {"tokens_per_s": NEW / time_, "ms": 1000 * time_ / NEW, "difference": difference, "bytes": needed}


@torch.no_grad()
def theirs(prompt: torch.Tensor) -> dict[str, float]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=CONFIG.vocab,
        hidden_size=2048,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        intermediate_size=8192,
        max_position_embeddings=4096,
        eos_token_id=None,
        pad_token_id=0,
    )
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).bfloat16().eval()
    out = {}
    for name, more in (("dynamic", {}), ("static", {"cache_implementation": "static"})):

        def call(more=more, n=NEW) -> None:
            model.generate(prompt, max_new_tokens=n, min_new_tokens=n, do_sample=False, **more)

        call()
        call()
        out[f"{name}_tokens_per_s"] = NEW / seconds(call, 2)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    prompt = torch.randint(0, CONFIG.vocab, (1, PROMPT), device="cuda")
    result = {"ours": ours(prompt)}
    result["copy_bytes_per_s"] = bandwidth()
    result["floor_tokens_per_s"] = result["copy_bytes_per_s"] / result["ours"]["bytes"]
    print(json.dumps(result, indent=1), flush=True)
    result["transformers"] = theirs(prompt)
    result["speedup"] = result["ours"]["tokens_per_s"] / result["transformers"]["static_tokens_per_s"]
    print(json.dumps(result["transformers"], indent=1))
    record(arguments.out, result, "vitrail.generate.captured", "vitrail.nn.kernels.decode")


if __name__ == "__main__":
    main()
