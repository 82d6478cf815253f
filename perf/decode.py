"""Decoding with a 1.1B Llama: our CUDA graph step against transformers and the lower bound.

    python perf/decode.py --out results.json        # needs a CUDA device

Greedy, one row, a prompt of 128 tokens and 256 new tokens. `generate` includes the prompt and the Python loop on both
sides. `step` is our CUDA graph step alone, which also selects the next token. Reference: transformers' static, compiled
cache. Lower bound: all weights of a step, read once at the copy bandwidth of the same run. `rows` has eight rows, where
the step is the model itself, plain or compiled.
"""

import json
from collections.abc import Callable
from typing import Any

import torch
from record import make_parser, write_record
from timing import measure_bandwidth, relative_difference, time_calls

from vitrail.backbones.decoder import Decoder
from vitrail.backbones.presets import DECODER_PRESETS
from vitrail.generate import GREEDY, generate_texts
from vitrail.generate.cuda_graph_decode import CUDAGraphDecodeStep
from vitrail.nn import Workload, cost

PROMPT, NEW, ROWS = 128, 256, 8
CONFIG = DECODER_PRESETS["perf-1.1b"]
MEASURED = (
    "vitrail.generate.cuda_graph_decode",
    "vitrail.generate.text_generation",
    "vitrail.nn.kernels.decode_kernels",
)


def make_step(
    model: Decoder, prompt: torch.Tensor, compiled: bool = False
) -> tuple[dict[str, Any], Callable[[], None]]:
    """Prefill a prompt and capture a greedy step.

    Returns the first token and the logits after it, and a function that generates NEW tokens from there.
    """
    cache = model.make_cache(len(prompt), PROMPT + NEW + 8)
    first = model.compute_logits(model.forward_hidden(prompt, cache=cache)[:, -1]).argmax(-1)
    step = CUDAGraphDecodeStep(model, cache, greedy=True, use_compile=compiled)
    logits = step(first).float().clone()
    lengths, max_row_length = cache.lengths.clone(), cache.max_row_length

    def generate() -> None:
        cache.lengths, cache.max_row_length = lengths.clone(), max_row_length
        step.generate_greedy(NEW)

    return {"first": first, "logits": logits}, generate


@torch.no_grad()
def measure_ours(prompt: torch.Tensor) -> dict[str, float]:
    with torch.device("cuda"):
        model = Decoder(CONFIG).bfloat16().eval()
    output, generate_with_step = make_step(model, prompt)
    eager = model(torch.cat([prompt, output["first"][:, None]], 1))[:, -1].float()
    ids = prompt[0].tolist()

    def generate() -> None:
        generate_texts(model, [ids], max_new_tokens=NEW, sampling=GREEDY)

    step_s, generate_s = (min(time_calls(call, 3)) / NEW for call in (generate_with_step, generate))
    return {
        "step_tokens_per_s": 1 / step_s,
        "generate_tokens_per_s": 1 / generate_s,
        "step_ms": 1000 * step_s,
        "difference": relative_difference(output["logits"], eager),
        "bytes": cost.count_bytes(model, Workload.decode(PROMPT + NEW // 2)).read,
    }


@torch.no_grad()
def measure_rows() -> dict[str, float]:
    """Return tokens per second of ROWS rows together."""
    with torch.device("cuda"):
        model = Decoder(CONFIG).bfloat16().eval()
    prompt = torch.randint(0, CONFIG.vocab_size, (ROWS, PROMPT), device="cuda")
    result = {}
    for name, compiled in (("captured", False), ("compiled", True)):
        _, generate = make_step(model, prompt, compiled)
        result[f"{name}_tokens_per_s"] = ROWS * NEW / min(time_calls(generate, 3))
    return result


def make_llama_config(**changes: Any) -> Any:
    """Return the config of the same model for transformers."""
    from transformers import LlamaConfig

    from vitrail.registry import FAMILIES

    return LlamaConfig(**{**FAMILIES["llama"].to_hf_config(CONFIG), **changes})


@torch.no_grad()
def measure_transformers(prompt: torch.Tensor) -> dict[str, float]:
    from transformers import LlamaForCausalLM

    config = make_llama_config(max_position_embeddings=4096, eos_token_id=None, pad_token_id=0)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).bfloat16().eval()

    def generate() -> None:
        new = {"max_new_tokens": NEW, "min_new_tokens": NEW}
        model.generate(prompt, **new, do_sample=False, cache_implementation="static")

    return {"static_tokens_per_s": len(prompt) * NEW / min(time_calls(generate, 2, warmup=2))}


def main() -> None:
    arguments = make_parser(__doc__).parse_args()
    torch.manual_seed(0)
    prompt = torch.randint(0, CONFIG.vocab_size, (1, PROMPT), device="cuda")
    result = {"ours": measure_ours(prompt)}
    result["copy_bytes_per_s"] = measure_bandwidth()
    result["floor_tokens_per_s"] = result["copy_bytes_per_s"] / result["ours"]["bytes"]
    print(json.dumps(result, indent=1), flush=True)
    result["transformers"] = measure_transformers(prompt)
    static = result["transformers"]["static_tokens_per_s"]
    result["speedup"] = {k: result["ours"][f"{k}_tokens_per_s"] / static for k in ("step", "generate")}
    result["rows"] = measure_rows() | {
        "transformers_static_tokens_per_s": measure_transformers(prompt.expand(ROWS, -1))["static_tokens_per_s"]
    }
    print(json.dumps(result["transformers"] | result["rows"], indent=1))
    write_record(arguments.out, result, MEASURED)


if __name__ == "__main__":
    main()
