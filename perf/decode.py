"""Decoding one row of text with a 1.1B Llama: our captured step against transformers, and the weight-read floor.

    python perf/decode.py --out results.json        # needs a CUDA device

Greedy, after a prompt of 128 tokens, 256 new ones. `generate` on both sides includes the prompt and the host's loop;
`step` is our captured step alone, choosing the next token itself. Peer: transformers' static, compiled cache. Floor:
every weight the step needs, read once at the copy bandwidth measured in the same run. `rows` is the same for eight
rows side by side, where the captured step is the model itself, plain or compiled.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from record import record

from vitrail.backbones.decoder import Decoder
from vitrail.backbones.presets import DECODERS
from vitrail.generate import GREEDY, generate
from vitrail.generate.captured import CapturedStep
from vitrail.nn import Work, cost

PROMPT, NEW, ROWS = 128, 256, 8
CONFIG = DECODERS["perf-1.1b"]


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
    cache = model.cache(1, PROMPT + NEW + 8)
    first = model.logits(model.hidden(prompt, cache=cache)[:, -1]).argmax(-1)
    step = CapturedStep(model, cache, greedy=True)
    captured = step(first).float().clone()
    eager = model(torch.cat([prompt, first[:, None]], 1))[:, -1].float()
    start, filled = cache.lengths.clone(), cache.filled

    def follow() -> None:
        cache.lengths, cache.filled = start.clone(), filled
        step.follow(NEW)

    ids = prompt[0].tolist()

    def whole() -> None:
        generate(model, [ids], max_new=NEW, sampling=GREEDY)

    follow()
    whole()
    step_s, whole_s = seconds(follow) / NEW, seconds(whole) / NEW
    return {
        "step_tokens_per_s": 1 / step_s,
        "generate_tokens_per_s": 1 / whole_s,
        "step_ms": 1000 * step_s,
        "difference": ((captured - eager).abs().max() / eager.abs().max()).item(),
        "bytes": cost.bytes(model, Work.decode(PROMPT + NEW // 2)).read,
    }


@torch.no_grad()
def rows() -> dict[str, float]:
    """Tokens a second over all rows."""
    with torch.device("cuda"):
        model = Decoder(CONFIG).bfloat16().eval()
    prompt = torch.randint(0, CONFIG.vocab, (ROWS, PROMPT), device="cuda")
    result = {}
    for name, compiled in (("captured", False), ("compiled", True)):
        cache = model.cache(ROWS, PROMPT + NEW + 8)
        first = model.logits(model.hidden(prompt, cache=cache)[:, -1]).argmax(-1)
        step = CapturedStep(model, cache, greedy=True, compiled=compiled)
        step(first)
        start, filled = cache.lengths.clone(), cache.filled

        def follow(cache=cache, step=step, start=start, filled=filled) -> None:
            cache.lengths, cache.filled = start.clone(), filled
            step.follow(NEW)

        follow()
        result[f"{name}_tokens_per_s"] = ROWS * NEW / seconds(follow)
    return result


def llama_config(**more: Any) -> Any:
    """The same model for transformers."""
    from transformers import LlamaConfig

    from vitrail.hub.families import FAMILIES

    return LlamaConfig(**{**FAMILIES["llama"].write(CONFIG), **more})


@torch.no_grad()
def theirs(prompt: torch.Tensor) -> dict[str, float]:
    from transformers import LlamaForCausalLM

    config = llama_config(max_position_embeddings=4096, eos_token_id=None, pad_token_id=0)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).bfloat16().eval()

    def call() -> None:
        new = {"max_new_tokens": NEW, "min_new_tokens": NEW}
        model.generate(prompt, **new, do_sample=False, cache_implementation="static")

    call()
    call()
    return {"static_tokens_per_s": len(prompt) * NEW / seconds(call, 2)}


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
    static = result["transformers"]["static_tokens_per_s"]
    result["speedup"] = {k: result["ours"][f"{k}_tokens_per_s"] / static for k in ("step", "generate")}
    result["rows"] = rows() | {
        "transformers_static_tokens_per_s": theirs(prompt.expand(ROWS, -1))["static_tokens_per_s"]
    }
    print(json.dumps(result["transformers"] | result["rows"], indent=1))
    record(arguments.out, result, "vitrail.generate.captured", "vitrail.generate.text", "vitrail.nn.kernels.decode")


if __name__ == "__main__":
    main()
