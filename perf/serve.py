"""Throughput of the engine with continuous batching on one GPU.

    python perf/serve.py --out results.json         # needs a CUDA device; under 3 minutes
    python perf/serve.py --out results.json --tiny  # the same script with tiny models, on the CPU

| part | model | prompts | new tokens |
|---|---|---|---|
| `rows` | Qwen3-VL-2B's language model | 64 of 64 tokens | 600 each |
| `mixed` | a 1.1B Llama | 256 of 64 to 1,024 tokens, included in the time | 256 each |
| `one_row` | a 1.1B Llama, by the engine and by `generate_texts` | 1 of 128 tokens | 256 |

Random weights in bf16, greedy. Lower bound: the weights and the KV cache of every decoding step, read once at the copy
bandwidth of the same run. Reference of `mixed`: transformers' continuous batching, in a separate process. Figures are
printed and written after each part.
"""

import gc
import json
import random
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
from decode import CONFIG, make_llama_config
from record import make_parser, write_record
from timing import describe_error, measure_bandwidth, measure_seconds, median_ms, synchronize, time_calls

from vitrail.backbones.decoder import Decoder, DecoderConfig
from vitrail.generate import GREEDY, generate_texts
from vitrail.models.presets import VLM_PRESETS
from vitrail.nn import PagedKVCache, Workload, cost
from vitrail.serve.engine import Engine
from vitrail.serve.engine_request import EnginePrompt, SamplingParams
from vitrail.serve.engine_scheduler import EngineConfig

TRANSFORMERS_SECONDS = 120
TRANSFORMERS_PROMPTS = 64  # of the 256, because transformers' batching is slow
MEASURED = (
    "vitrail.serve.engine",
    "vitrail.serve.captured_decode",
    "vitrail.serve.model_runner",
    "vitrail.generate.fused_paged_decoder",
    "vitrail.nn.kernels.paged_attention_triton",
    "vitrail.nn.kernels.token_kernels",
)


def make_model(config: DecoderConfig, device: str) -> Decoder:
    with torch.device(device):
        model = Decoder(config)
    return (model.bfloat16() if device == "cuda" else model).eval()


def shrink_config(config: DecoderConfig) -> DecoderConfig:
    attention = config.block.attention.replace(heads=4, kv_heads=2, head_dim=16)
    block = config.block.replace(width=64, attention=attention, mlp=config.block.mlp.replace(intermediate_size=96))
    sections = None if config.rotary.sections is None else (4, 2, 2)
    rotary = config.rotary.replace(head_dim=16, sections=sections)
    return config.replace(layers=4, vocab_size=512, block=block, rotary=rotary)


def make_mixed_prompts(tiny: bool) -> list[list[int]]:
    rng = random.Random(0)
    count, low, high = (8, 4, 20) if tiny else (256, 64, 1024)
    return [[rng.randrange(500) for _ in range(rng.randint(low, high))] for _ in range(count)]


def run_engine(model: Decoder, prompts: list[list[int]], new: int, budget: int, repeats: int = 2) -> dict[str, Any]:
    """Return tokens per second with all prompts submitted at once: the best run after one warm-up run."""
    pages = sum(-(-(len(ids) + new + 1) // 16) for ids in prompts) + len(prompts) + 2
    config = EngineConfig(
        max_num_seqs=len(prompts),
        max_batched_tokens=budget,
        num_pages=pages,
        max_waiting=len(prompts),
        prefix_caching=False,  # the runs have the same prompts
    )
    engine = Engine(model, config)
    found: dict[str, Any] = {"capture_s": measure_seconds(engine.warm_up)}
    params = SamplingParams(max_new_tokens=new)
    for attempt in range(repeats + 1):
        steps, start = engine.num_steps, time.perf_counter()
        outputs = engine.generate([EnginePrompt(ids) for ids in prompts], params)
        synchronize()
        seconds = time.perf_counter() - start
        assert all(len(output.ids) == new for output in outputs), [output.end for output in outputs][:3]
        rate = len(prompts) * new / seconds
        print(f"  run {attempt}: {rate:,.0f} tokens/s, {engine.num_steps - steps} steps in {seconds:.3f} s", flush=True)
        if attempt:
            found["tokens_per_s"] = max(found.get("tokens_per_s", 0.0), rate)
            found["steps"] = engine.num_steps - steps
    captured = engine.runner.captured
    if captured is not None:  # the CUDA graph alone, at the mean length of the run
        middle = int(sum(map(len, prompts)) / len(prompts)) + new // 2
        for slot in range(len(prompts)):
            engine.runner.tables[slot, : -(-(middle + 1) // 16)] = 1 + slot
        rows = list(range(len(prompts)))
        lengths = [middle] * len(rows)
        found["step_ms"] = median_ms(lambda: [captured(rows, lengths, lengths) for _ in range(20)], 1) / 20
    return found


def check_logits(model: Decoder, device: str) -> dict[str, float]:
    """Compare the engine's next logits with a full pass of the model, relative to the largest logit."""
    engine = Engine(model, EngineConfig(max_num_seqs=2, num_pages=40, max_batched_tokens=24))
    ids = torch.randint(0, 500, (50,)).tolist()
    rows: list[torch.Tensor] = []
    decode, prefill = engine.runner.decode, engine.runner.prefill

    def keep_logits(result: Any) -> Any:
        logits = result if isinstance(result, torch.Tensor) else getattr(result, "logits", None)
        if logits is not None:
            rows.append(logits[0].float().clone())
        return result

    engine.runner.decode = lambda sequences, **options: keep_logits(decode(sequences, **options))  # type: ignore[method-assign]
    engine.runner.prefill = lambda chunks: keep_logits(prefill(chunks))  # type: ignore[method-assign]
    (output,) = engine.generate([EnginePrompt(ids)], SamplingParams(max_new_tokens=8))
    with torch.no_grad():
        full = model(torch.tensor([ids + output.ids], device=device))[0, len(ids) - 1 :].float()
    pairs = list(zip(rows[:8], full[:8], strict=True))
    worst = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
    same = sum(int(a.argmax() == b.argmax()) for a, b in pairs)
    return {"relative_difference": worst, "same_of_8": same}


def try_check_logits(model: Decoder, device: str) -> dict[str, Any]:
    """Check the logits. An error is reported, not raised, and the speed is measured nevertheless."""
    try:
        return check_logits(model, device)
    except Exception as error:
        traceback.print_exc()
        return {"error": describe_error(error)}


def compute_floor_rate(model: Decoder, prompts: list[list[int]], new: int, bandwidth: float) -> float:
    """Return tokens per second if every step reads the weights and the KV cache once."""
    weights = cost.count_bytes(model, Workload.decode(1)).read
    page = PagedKVCache.count_page_bytes(model.kv_shapes, 1, model.embed.weight.dtype)
    cached = sum(len(ids) + new / 2 for ids in prompts) * page
    return len(prompts) * bandwidth / (weights + cached)


def measure_rows(device: str, bandwidth: float, tiny: bool) -> dict[str, Any]:
    config = VLM_PRESETS["qwen3-vl-2b"].decoder
    model = make_model(shrink_config(config) if tiny else config, device)
    count, length, new = (4, 8, 12) if tiny else (64, 64, 600)
    prompts = [[(7 * row + i) % 500 for i in range(length)] for row in range(count)]
    found: dict[str, Any] = {"check": try_check_logits(model, device)}
    print(found, flush=True)
    found |= run_engine(model, prompts, new, 4096, repeats=1)
    return found | {"floor_tokens_per_s": compute_floor_rate(model, prompts, new, bandwidth)}


def measure_mixed(device: str, bandwidth: float, tiny: bool) -> dict[str, Any]:
    model = make_model(shrink_config(CONFIG) if tiny else CONFIG, device)
    prompts, new = make_mixed_prompts(tiny), 12 if tiny else 256
    found: dict[str, Any] = {"check": try_check_logits(model, device)}
    print(found, flush=True)
    for budget in (64,) if tiny else (8192, 16384):
        found[f"budget_{budget}"] = run_engine(model, prompts, new, budget)
    best = max(one["tokens_per_s"] for name, one in found.items() if name.startswith("budget"))
    return found | {"tokens_per_s": best, "floor_tokens_per_s": compute_floor_rate(model, prompts, new, bandwidth)}


def measure_one_row(device: str, bandwidth: float, tiny: bool) -> dict[str, Any]:
    model = make_model(shrink_config(CONFIG) if tiny else CONFIG, device)
    ids, new = list(range(16 if tiny else 128)), 8 if tiny else 256
    engine = Engine(model, EngineConfig(max_num_seqs=1, num_pages=100, prefix_caching=False))
    engine.warm_up()

    def measure_rate(call: Callable[[], Any]) -> float:
        return new / min(time_calls(call, 3))

    return {
        "engine_tokens_per_s": measure_rate(
            lambda: engine.generate([EnginePrompt(ids)], SamplingParams(max_new_tokens=new))
        ),
        "generate_tokens_per_s": measure_rate(
            lambda: generate_texts(model, [ids], max_new_tokens=new, sampling=GREEDY)
        ),
        "floor_tokens_per_s": compute_floor_rate(model, [ids], new, bandwidth),
    }


def measure_transformers(tiny: bool) -> dict[str, Any]:
    """Measure transformers' continuous batching in this process."""
    from transformers import GenerationConfig, LlamaForCausalLM

    device = "cpu" if tiny else "cuda"
    with torch.device(device):
        config = make_llama_config(max_position_embeddings=4096, eos_token_id=None, pad_token_id=0)
        model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    model.set_attn_implementation("paged|sdpa")
    prompts, new = make_mixed_prompts(tiny)[:TRANSFORMERS_PROMPTS], 256
    settings = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    start = time.perf_counter()
    outputs = model.generate_batch(inputs=prompts, generation_config=settings)
    seconds = time.perf_counter() - start
    count = sum(len(output.generated_tokens) for output in outputs.values())
    return {"tokens_per_s": count / seconds, "tokens": count, "seconds": seconds, "prompts": len(prompts)}


def run_transformers() -> dict[str, Any]:
    command = [sys.executable, __file__, "--out", "-", "--peer"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TRANSFORMERS_SECONDS, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return json.loads(lines[-1]) if lines else {"error": (done.stderr or done.stdout)[-800:]}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--peer", action="store_true", help="only measure transformers, and print its figures")
    parser.add_argument("--parts", nargs="+", default=["mixed", "rows", "one_row", "transformers"])
    arguments = parser.parse_args()
    if arguments.peer:
        print(json.dumps(measure_transformers(arguments.tiny)), flush=True)
        return
    torch.manual_seed(0)
    device = "cpu" if arguments.tiny else "cuda"
    bandwidth = measure_bandwidth()
    result: dict[str, Any] = {"copy_bytes_per_s": bandwidth}
    parts: dict[str, Callable[[], Any]] = {
        "mixed": lambda: measure_mixed(device, bandwidth, arguments.tiny),
        "rows": lambda: measure_rows(device, bandwidth, arguments.tiny),
        "one_row": lambda: measure_one_row(device, bandwidth, arguments.tiny),
        "transformers": run_transformers,
    }
    for name in arguments.parts:
        if arguments.tiny and name == "transformers":
            continue
        print(name, flush=True)
        start = time.perf_counter()
        try:
            result[name] = parts[name]()
        except Exception as error:
            traceback.print_exc()
            result[name] = {"error": describe_error(error)}
        result[name]["section_s"] = time.perf_counter() - start
        print(json.dumps({name: result[name]}, indent=1), flush=True)
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
        write_record(arguments.out, result, MEASURED)


if __name__ == "__main__":
    main()
