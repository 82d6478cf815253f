"""Generation by a vision-language model: a prompt of a 640 × 480 image in 64 text tokens, and 256 new tokens.

    python perf/vlm.py --out results.json           # needs a CUDA device
    python perf/vlm.py --out results.json --tiny    # the same script with tiny models, on the CPU
    python perf/vlm.py --out results.json --only qwen3_vl --total-seconds 480 --variant-seconds 160

The models have the shapes of Qwen3-VL-2B and LLaVA-1.5-7B. References: the fastest variant of transformers, and a lower
bound. For the first token, the bound of each component is its products at the matrix rate of an H200 or its bytes at
the copy bandwidth of the same run, whichever takes longer. For further tokens it is the weights read once. bf16,
greedy, batch size 1, the same random weights on both sides, with pixels and ids on the device.

`first` is a call of `generate` for one token, `decode` the time of each of 256 further tokens. For transformers, a bare
forward pass also counts as the first token. `step` is our CUDA graph step alone. Figures are written after each
measurement, so an interrupted run keeps them.
"""

import gc
import inspect
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from PIL import Image
from record import make_parser, write_record
from timing import CUDA, DEVICE, H200_MATRIX_RATE, describe_error, limit_time, measure_bandwidth, median_ms

from vitrail.generate import GREEDY
from vitrail.generate.cuda_graph_decode import CUDAGraphDecodeStep, can_capture
from vitrail.generate.vlm_generation import VLMStepper, generate_from_streams
from vitrail.models.vision_inputs import VisionInputs
from vitrail.models.vlm import VLM
from vitrail.nn import RotaryEmbedding, Workload, cost
from vitrail.registry import FAMILIES
from vitrail.stream import Stream, build_stream, text_part

OPTIONAL_PREFIXES = {"model", "language_model", "vision_model"}  # in names of files or of modules only
TOLERANCE = 0.02 if CUDA else 1e-4  # relative difference of logits; or 3 times that of two transformers backends
MEASURED = (
    "vitrail.generate.cuda_graph_decode",
    "vitrail.generate.cuda_graph_prefill",
    "vitrail.generate.vlm_generation",
    "vitrail.generate.text_generation",
    "vitrail.nn.kernels.decode_kernels",
)


class Size(NamedTuple):
    image: tuple[int, int]  # width and height
    text_tokens: int
    new_tokens: int
    total_s: float  # time limit of all transformers variants of a model
    variant_s: float  # time limit of one variant


FULL_SIZE, TINY_SIZE = Size((640, 480), 64, 256, 80, 40), Size((64, 48), 8, 4, 8, 3)


def make_qwen3_vl_config(tiny: bool) -> Any:
    from transformers import Qwen3VLConfig

    text = {"vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28}
    text |= {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 262_144}
    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20], "mrope_interleaved": True}
    vision = {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16, "out_hidden_size": 2048}
    vision |= {"patch_size": 16, "deepstack_visual_indexes": [5, 11, 17], "num_position_embeddings": 2304}
    if tiny:
        text |= {"vocab_size": 160_000, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
        text |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
        rope |= {"mrope_section": [4, 2, 2]}
        vision |= {"depth": 3, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32}
        vision |= {"deepstack_visual_indexes": [0, 1]}
    text |= {"rope_parameters": rope, "rms_norm_eps": 1e-6, "tie_word_embeddings": True}
    return Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True)


def make_llava_config(tiny: bool) -> Any:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig

    vision = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
    vision |= {"image_size": 336, "patch_size": 14, "projection_dim": 768}
    text = {"vocab_size": 32_064, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5}  # the other defaults are 7B
    if tiny:
        vision |= {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2}
        vision |= {"image_size": 56}
        text |= {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    text |= {"num_key_value_heads": text.get("num_attention_heads", 32)}
    return LlavaConfig(
        vision_config=CLIPVisionConfig(**vision), text_config=LlamaConfig(**text), image_token_index=32_000
    )


CONFIGS = {"llava": make_llava_config, "qwen3_vl": make_qwen3_vl_config}

# ---- models ---------------------------------------------------------------------------------------------------------


class ModelPair(NamedTuple):
    """Our model and transformers' with shared weights, and the inputs of both."""

    ours: VLM
    reference: Any
    stream: Stream
    images: VisionInputs
    reference_inputs: dict[str, torch.Tensor]


def share_weights(family: str, reference: torch.nn.Module) -> VLM:
    """Build our model from the tensors of transformers' model."""
    row = FAMILIES[family]
    config = row.from_hf_config(reference.config.to_dict())
    tensors = {strip_prefixes(name): tensor for name, tensor in reference.state_dict().items()}
    state: dict[str, torch.Tensor] = {}
    for rule in row.tensor_rules(config):
        state |= zip(rule.native, rule.load([tensors[strip_prefixes(name)] for name in rule.hf]), strict=True)
    with torch.device("meta"):
        model = VLM(config)
    model.load_state_dict(state, assign=True)
    for module in model.modules():
        if isinstance(module, RotaryEmbedding):
            module.reset_frequencies(next(iter(state.values())).device)  # not in the state dict
    return model.eval()


def strip_prefixes(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in OPTIONAL_PREFIXES)


def build_pair(family: str, config: Any, size: Size) -> ModelPair:
    import transformers

    class_name = {"qwen3_vl": "Qwen3VLForConditionalGeneration", "llava": "LlavaForConditionalGeneration"}[family]
    torch.manual_seed(0)
    with torch.device(DEVICE):
        dtype = torch.bfloat16 if CUDA else torch.float32
        reference = getattr(transformers, class_name)._from_config(config, dtype=dtype)
    reference.eval().requires_grad_(False)
    reference.generation_config.eos_token_id = None
    reference.generation_config.pad_token_id = 0
    ours = share_weights(family, reference)
    noise = torch.randint(0, 256, (*size.image[::-1], 3), dtype=torch.uint8)
    images = ours.prepare_images([Image.fromarray(noise.numpy())])
    ids, half = torch.randint(5, 30_000, (size.text_tokens,)).tolist(), size.text_tokens // 2
    token_ids = ours.config.vision_token_ids
    if "vision_start" in token_ids:
        ids[half - 1], ids[half] = token_ids["vision_start"], token_ids["vision_end"]
    parts = [text_part(ids[:half]), ours.config.make_part(images.layouts[0]), text_part(ids[half:])]
    stream = build_stream(parts, ours.config.rules)
    device = images.pixels.device
    inputs = {"input_ids": stream.ids[None].to(device), "pixel_values": images.pixels}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    if family == "qwen3_vl":
        inputs["image_grid_thw"] = torch.tensor([[g.t, g.h, g.w] for g in images.layouts], device=device)
        if "mm_token_type_ids" in inspect.signature(type(reference).forward).parameters:
            inputs["mm_token_type_ids"] = (stream.kinds == 1).long()[None].to(device)
    return ModelPair(ours, reference, stream, images, inputs)


def measure_generation(generate: Callable[[int], object], num_tokens: int, repeats: int = 2) -> dict[str, float]:
    """Time the first token, and each of `num_tokens` further tokens."""
    first = median_ms(lambda: generate(1), 7)
    total = median_ms(lambda: generate(1 + num_tokens), repeats, warmup=0)
    return {"first_ms": first, "decode_ms": (total - first) / num_tokens}


# ---- our model ------------------------------------------------------------------------------------------------------


def measure_ours(pair: ModelPair, num_tokens: int) -> dict[str, Any]:
    """Measure generation with CUDA graphs and with a compiled prefill, and the CUDA graph step alone."""
    result: dict[str, Any] = {}
    capacity = len(pair.stream) + num_tokens + 8
    for name in ("captured", "compiled"):

        def generate(count: int, compiled: bool = name == "compiled") -> None:
            generate_from_streams(
                pair.ours, [pair.stream], pair.images, max_new_tokens=count, sampling=GREEDY, compiled=compiled
            )

        try:
            with limit_time(60):
                generate(1 + num_tokens)
                generate(1 + num_tokens)  # the second prompt of a shape captures its graph
                result[name] = measure_generation(generate, num_tokens)
        except Exception as error:  # the other figures are kept
            result[name] = describe_error(error)
        print_figures(f"ours, {name}", result[name])
    if can_capture(pair.ours.decoder, 1, capacity):
        result["step_ms"] = measure_step(pair, num_tokens, capacity)
    return result


def measure_step(pair: ModelPair, num_tokens: int, capacity: int) -> float:
    stepper = VLMStepper(pair.ours, [pair.stream], pair.images, None)
    cache = stepper.cache = pair.ours.decoder.make_cache(1, capacity)
    first = stepper.prefill(torch.empty(0), torch.tensor([len(pair.stream)])).argmax(-1)
    step = CUDAGraphDecodeStep(pair.ours.decoder, cache, greedy=True)
    step.set_position_shift([int(stepper.next_position) - len(pair.stream)])
    step(first)
    lengths, max_row_length = cache.lengths.clone(), cache.max_row_length

    def generate() -> None:
        cache.lengths, cache.max_row_length = lengths.clone(), max_row_length
        step.generate_greedy(num_tokens)

    return median_ms(generate, 3) / num_tokens


# ---- transformers ---------------------------------------------------------------------------------------------------


def measure_variants(
    pair: ModelPair, size: Size, variants: dict[str, dict[str, Any]]
) -> Iterator[tuple[str, dict[str, float] | str]]:
    """Measure each variant within its time limit. A variant that fails yields its error."""
    start = time.perf_counter()
    for name, options in variants.items():
        left = min(size.variant_s, start + size.total_s - (variant_start := time.perf_counter()))
        if left < 1:
            yield name, "no time was left"
            continue
        try:
            with limit_time(left):
                figures: dict[str, float] | str = measure_variant(pair, size.new_tokens, **options)
        except Exception as error:  # the next variant may work
            figures = describe_error(error)
        finally:
            torch._dynamo.reset()
        print_figures(f"transformers, {name}, {time.perf_counter() - variant_start:.0f} s", figures)
        yield name, figures


def measure_variant(
    pair: ModelPair,
    num_tokens: int,
    attention: str = "sdpa",
    compiled: dict[str, Any] | None = None,
    **generation: Any,
) -> dict[str, float]:
    model, inputs = pair.reference, pair.reference_inputs
    model.set_attn_implementation(attention)
    if compiled is not None:  # only the prompt, without a cache: `generate` compiles its own steps
        with compile_model(model, **compiled) as forward:
            return {"first_ms": median_ms(lambda: forward(**inputs, logits_to_keep=1, use_cache=False).logits, 7)}

    def generate(count: int) -> None:
        model.generate(**inputs, min_new_tokens=count, max_new_tokens=count, do_sample=False, **generation)

    if generation:  # a static cache, with which `generate` compiles the step
        generate(1 + num_tokens)
        return measure_generation(generate, num_tokens)
    forward_ms = median_ms(lambda: model(**inputs, logits_to_keep=1).logits, 7)
    return {"forward_ms": forward_ms, **measure_generation(generate, num_tokens, repeats=1)}


@contextmanager
def compile_model(model: Any, whole: bool, **options: Any) -> Iterator[Callable[..., Any]]:
    """Compile the forward pass of a model, or each of its blocks, within the block."""
    if whole:
        yield torch.compile(model.forward, **options)
        return
    blocks = [m for m in model.modules() if type(m).__name__.endswith(("DecoderLayer", "EncoderLayer", "VisionBlock"))]
    for block in blocks:
        block.compile(**options)
    try:
        yield model
    finally:
        for block in blocks:
            block._compiled_call_impl = None


VARIANTS: dict[str, dict[str, Any]] = {
    "sdpa": {},
    "static cache": {"cache_implementation": "static"},
    "eager": {"attention": "eager"},
    "blocks compiled": {"compiled": {"whole": False, "dynamic": False}},
    "compiled, reduce-overhead": {"compiled": {"whole": True, "mode": "reduce-overhead"}},
    "compiled, max-autotune-no-cudagraphs": {"compiled": {"whole": True, "mode": "max-autotune-no-cudagraphs"}},
}


# ---- figures of a model ---------------------------------------------------------------------------------------------


@torch.no_grad()
def compare_logits(pair: ModelPair) -> dict[str, float]:
    """Return relative differences of the first token's logits to transformers': of ours, and of its eager attention."""
    stepper = VLMStepper(pair.ours, [pair.stream], pair.images, None)
    ours = stepper.prefill(torch.empty(0), torch.tensor([len(pair.stream)]))
    logits = {}
    for attention in ("eager", "sdpa"):
        pair.reference.set_attn_implementation(attention)
        logits[attention] = pair.reference(**pair.reference_inputs, logits_to_keep=1).logits[:, -1].float()
    scale = logits["sdpa"].norm()
    others = {"ours": ours.float(), "transformers": logits["eager"]}
    return {name: ((other - logits["sdpa"]).norm() / scale).item() for name, other in others.items()}


def compute_floors(pair: ModelPair, size: Size, bandwidth: float) -> dict[str, float]:
    """Return the lower bounds of the first and of a further token in milliseconds."""
    width, height = size.image
    components = pair.ours.cost_components(pair.ours.workload([(height, width)], size.text_tokens))
    times = {
        name: 1000 * max(component.flops / H200_MATRIX_RATE, component.bytes.read / bandwidth)
        for name, component in components.items()
    }
    read = cost.count_bytes(pair.ours.decoder, Workload.decode(len(pair.stream) + size.new_tokens // 2)).read
    return {"first_ms": sum(times.values()), "decode_ms": 1000 * read / bandwidth, **times}


def find_fastest(result: dict[str, Any], *keys: str) -> float:
    return min(row[key] for row in result.values() if isinstance(row, dict) for key in keys if key in row)


SaveFunction = Callable[[dict[str, Any]], object]


def measure_model(
    family: str,
    config: Any,
    size: Size,
    bandwidth: float,
    variants: dict[str, dict[str, Any]],
    save: SaveFunction = lambda _: None,
) -> dict[str, Any]:
    """Return the figures of a model, and save them after each measurement."""
    pair = build_pair(family, config, size)
    result: dict[str, Any] = {"tokens": len(pair.stream), "difference": compare_logits(pair)}
    print_figures(family, result)
    tolerance = max(TOLERANCE, 3 * result["difference"]["transformers"])
    if not result["difference"]["ours"] <= tolerance:
        return result | {"error": f"logits differ by more than {tolerance:.3g}, so nothing was timed"}
    result["floor"] = compute_floors(pair, size, bandwidth)
    with torch.no_grad():
        result["ours"], result["transformers"] = measure_ours(pair, size.new_tokens), {}
        save(result | compute_ratios(result))
        for name, figures in measure_variants(pair, size, variants):
            result["transformers"][name] = figures
            save(result | compute_ratios(result))
    return result | compute_ratios(result)


def compute_ratios(result: dict[str, Any]) -> dict[str, Any]:
    """Compare ours with the lower bound, and with the fastest transformers variant if any worked."""
    first, decode = find_fastest(result["ours"], "first_ms"), find_fastest(result["ours"], "decode_ms")
    ratios = {
        "first": {"ours_to_floor": first / result["floor"]["first_ms"]},
        "decode": {"share_of_bandwidth": result["floor"]["decode_ms"] / decode},
    }
    if "step_ms" in result["ours"]:
        ratios["decode"]["step_share_of_bandwidth"] = result["floor"]["decode_ms"] / result["ours"]["step_ms"]
    with suppress(ValueError):  # all variants failed
        ratios["first"]["speedup"] = find_fastest(result["transformers"], "first_ms", "forward_ms") / first
        ratios["decode"]["speedup"] = find_fastest(result["transformers"], "decode_ms") / decode
    return ratios


def print_figures(label: str, figures: Any) -> None:
    print(f"{label}: {json.dumps(figures)}", flush=True)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--only", choices=CONFIGS, help="one of the two models")
    parser.add_argument("--total-seconds", type=float, help="seconds for all transformers variants of a model")
    parser.add_argument("--variant-seconds", type=float, help="seconds for one variant (default: the same)")
    parser.add_argument(
        "--variants", nargs="+", choices=VARIANTS, help="some of the transformers variants, instead of all"
    )
    arguments = parser.parse_args()
    if not (CUDA or arguments.tiny):
        parser.error("no CUDA device: --tiny runs on the CPU")
    size, bandwidth = TINY_SIZE if arguments.tiny else FULL_SIZE, measure_bandwidth()
    if arguments.total_seconds is not None:
        size = size._replace(total_s=arguments.total_seconds, variant_s=arguments.total_seconds)
    if arguments.variant_seconds is not None:
        size = size._replace(variant_s=arguments.variant_seconds)
    variants = {name: VARIANTS[name] for name in arguments.variants or VARIANTS}
    result: dict[str, Any] = {"copy_bytes_per_s": bandwidth}
    # An interrupted variant may leave the device unusable. --only measures one model in a process of its own.
    for family, make_config in CONFIGS.items():
        if arguments.only not in (None, family):
            continue

        def save(figures: dict[str, Any], family: str = family) -> None:
            result[family] = figures
            write_record(arguments.out, result, MEASURED)

        try:
            save(measure_model(family, make_config(arguments.tiny), size, bandwidth, variants, save))
        except Exception as error:  # the other model is still measured
            save(result.get(family, {}) | {"error": describe_error(error)})
        print(json.dumps({family: result[family]}, indent=1), flush=True)
        gc.collect()


if __name__ == "__main__":
    main()
