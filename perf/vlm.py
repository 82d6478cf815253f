"""Talking to a vision-language model, one prompt at a time: a picture of 640 × 480 among 64 words, then 256 new ones.

    python perf/vlm.py --out results.json           # needs a CUDA device
    python perf/vlm.py --out results.json --tiny    # the same script with tiny models, on the CPU
    python perf/vlm.py --out results.json --only qwen3_vl --peers 480 --way 160    # time for transformers to compile

Qwen3-VL-2B's shape and LLaVA-1.5-7B's, against transformers' best and what the device allows: for the first token each
part's products at 790 TFLOP/s or its bytes at the copy bandwidth of the same run, whichever takes longer; for
every other token the weights read once. bf16, greedy, batch 1; both sides have the same random weights, in memory, and
pixels and ids lie ready. `first` is a call that writes one token, `decode` what each of 256 more takes, on either side
by its own `generate`; a bare forward pass counts as transformers' first token too. `step` is our captured step alone.
Figures are written as they come, so that what was measured stays when the script is stopped.
"""

import argparse
import gc
import inspect
import json
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from record import record

from vitrail.generate import GREEDY
from vitrail.generate.captured import CapturedStep, capturable
from vitrail.generate.seen import Seeing, write
from vitrail.hub.families import FAMILIES
from vitrail.models.vlm import VLM, Shown
from vitrail.nn import Work, cost
from vitrail.stream import Stream, build, words

RATE = 790e12
SIDE = {"model", "language_model", "vision_model"}  # what files and modules of transformers name differently
CUDA = torch.cuda.is_available()
LOGITS = 0.02 if CUDA else 1e-4  # what may differ, relative; or thrice what two ways of transformers do


MEASURED = (
    *(f"vitrail.generate.{name}" for name in ("captured", "prefill", "seen", "text")),
    "vitrail.nn.kernels.decode",
)


class Size(NamedTuple):
    picture: tuple[int, int]  # width and height
    words: int
    new: int
    peers_s: float  # for all of transformers' ways of one model
    way_s: float  # and for one of them


FULL, TINY = Size((640, 480), 64, 256, 80, 40), Size((64, 48), 8, 4, 8, 3)


def qwen3_vl(tiny: bool) -> Any:
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


def llava(tiny: bool) -> Any:
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


# ---- one model on both sides ------------------------------------------------------------------------------------


class Pair(NamedTuple):
    ours: VLM
    theirs: Any
    stream: Stream
    shown: Shown
    inputs: dict[str, torch.Tensor]  # of transformers


def shared(family: str, theirs: torch.nn.Module) -> VLM:
    """Our model, made of their tensors."""
    row = FAMILIES[family]
    config = row.read(theirs.config.to_dict())
    state, ours = {_bare(name): tensor for name, tensor in theirs.state_dict().items()}, {}
    for move in row.moves(config):
        ours |= zip(move.ours, move.pull([state[_bare(name)] for name in move.theirs]), strict=True)
    with torch.device("meta"):
        model = VLM(config)
    model.load_state_dict(ours, assign=True)
    for module in model.modules():
        if hasattr(module, "fill"):
            module.fill(next(iter(ours.values())).device)  # rotary frequencies, which no file holds
    return model.eval()


def _bare(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in SIDE)


def pair(family: str, config: Any, size: Size) -> Pair:
    import transformers

    kind = {"qwen3_vl": "Qwen3VLForConditionalGeneration", "llava": "LlavaForConditionalGeneration"}[family]
    torch.manual_seed(0)
    with torch.device("cuda" if CUDA else "cpu"):
        theirs = getattr(transformers, kind)._from_config(config, dtype=torch.bfloat16 if CUDA else torch.float32)
    theirs.eval().requires_grad_(False)
    theirs.generation_config.eos_token_id = None
    theirs.generation_config.pad_token_id = 0
    ours = shared(family, theirs)
    noise = torch.randint(0, 256, (*size.picture[::-1], 3), dtype=torch.uint8)
    shown = ours.prepare([Image.fromarray(noise.numpy())])
    ids = torch.randint(5, 30_000, (size.words,)).tolist()
    half = size.words // 2
    if "vision_start" in ours.config.marks:
        ids[half - 1], ids[half] = ours.config.marks["vision_start"], ours.config.marks["vision_end"]
    parts = [words(ids[:half]), ours.config.part(shown.shapes[0]), words(ids[half:])]
    stream = build(parts, ours.config.rules)
    device = shown.pixels.device
    inputs = {"input_ids": stream.ids[None].to(device), "pixel_values": shown.pixels}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    if family == "qwen3_vl":
        inputs["image_grid_thw"] = torch.tensor([[g.t, g.h, g.w] for g in shown.shapes], device=device)
        if "mm_token_type_ids" in inspect.signature(type(theirs).forward).parameters:
            inputs["mm_token_type_ids"] = (stream.kinds == 1).long()[None].to(device)
    return Pair(ours, theirs, stream, shown, inputs)


# ---- time -------------------------------------------------------------------------------------------------------


def wait() -> None:
    if CUDA:
        torch.cuda.synchronize()


def milliseconds(call: Callable[[], object], repeats: int = 7, rehearsed: int = 1) -> float:
    """The median, after so many calls that are not counted."""
    times = []
    for _ in range(rehearsed + repeats):
        wait()
        start = time.perf_counter()
        call()
        wait()
        times.append(time.perf_counter() - start)
    return 1000 * statistics.median(times[rehearsed:])


def bandwidth() -> float:
    """Bytes a second of a large copy, read and written."""
    a = torch.empty(2**31 if CUDA else 2**24, dtype=torch.uint8, device="cuda" if CUDA else "cpu")
    b = torch.empty_like(a)
    return 20_000 * a.numel() / milliseconds(lambda: [b.copy_(a) for _ in range(10)])


class TooLongError(Exception):
    pass


@contextmanager
def limit(seconds: float) -> Iterator[None]:
    late = False

    def stop(*_: object) -> None:
        nonlocal late
        late = True
        raise TooLongError(f"over {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, 5)  # again and again: it may be swallowed where it strikes
    try:
        yield
    except Exception as error:
        if late:  # a compiler that is stopped says that it failed
            raise TooLongError(f"over {seconds:.0f} s") from error
        raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def talked(write_tokens: Callable[[int], object], new: int, repeats: int = 2) -> dict[str, float]:
    first = milliseconds(lambda: write_tokens(1))
    whole = milliseconds(lambda: write_tokens(1 + new), repeats, rehearsed=0)
    return {"first_ms": first, "decode_ms": (whole - first) / new}


# ---- ours -------------------------------------------------------------------------------------------------------


def ours(it: Pair, new: int) -> dict[str, Any]:
    """As it comes, and compiled first; the step alone where there is one."""
    result: dict[str, Any] = {}
    capacity = len(it.stream) + new + 8
    for name in ("captured", "compiled"):

        def write_tokens(count: int, compiled: bool = name == "compiled") -> None:
            write(it.ours, [it.stream], it.shown, max_new=count, sampling=GREEDY, compiled=compiled)

        try:
            with limit(60):
                write_tokens(1 + new)
                write_tokens(1 + new)  # the second prompt of a kind makes its graph
                result[name] = talked(write_tokens, new)
        except Exception as error:  # the other figures stand without it
            result[name] = told(error)
        show(f"ours, {name}", result[name])
    if capturable(it.ours.decoder, 1, capacity):
        result["step_ms"] = step(it, new, capacity)
    return result


def step(it: Pair, new: int, capacity: int) -> float:
    plain = Seeing(it.ours, [it.stream], it.shown, None)
    plain.cache = it.ours.decoder.cache(1, capacity)
    first = plain.prefill(torch.empty(0), torch.tensor([len(it.stream)])).argmax(-1)
    captured = CapturedStep(it.ours.decoder, plain.cache, greedy=True)
    captured.stand([int(plain.next) - len(it.stream)])
    captured(first)
    start, filled = plain.cache.lengths.clone(), plain.cache.filled

    def follow() -> None:
        plain.cache.lengths, plain.cache.filled = start.clone(), filled
        captured.follow(new)

    return milliseconds(follow, 3) / new


# ---- theirs -----------------------------------------------------------------------------------------------------


def theirs(it: Pair, size: Size, ways: dict[str, dict[str, Any]]) -> Iterator[tuple[str, dict[str, float] | str]]:
    """Each way in a time of its own; one that fails is told, and costs nothing else."""
    start = time.perf_counter()
    for name, way in ways.items():
        left = min(size.way_s, start + size.peers_s - (begun := time.perf_counter()))
        if left < 1:
            yield name, "no time was left"
            continue
        try:
            with limit(left):
                found: dict[str, float] | str = _way(it, size.new, **way)
        except Exception as error:  # whatever it is, the next way may work
            found = told(error)
        finally:
            torch._dynamo.reset()
        show(f"transformers, {name}, {time.perf_counter() - begun:.0f} s", found)
        yield name, found


def _way(
    it: Pair, new: int, attention: str = "sdpa", compiled: dict[str, Any] | None = None, **generation: Any
) -> dict[str, float]:
    model = it.theirs
    model.set_attn_implementation(attention)
    if compiled is not None:  # the prompt alone, and no cache to fill: `generate` compiles its own steps
        with _compiled(model, **compiled) as forward:
            return {"first_ms": milliseconds(lambda: forward(**it.inputs, logits_to_keep=1, use_cache=False).logits)}

    def write_tokens(count: int) -> None:
        model.generate(**it.inputs, min_new_tokens=count, max_new_tokens=count, do_sample=False, **generation)

    if generation:  # a static cache, with which it compiles the step
        write_tokens(1 + new)
        return talked(write_tokens, new)
    bare = milliseconds(lambda: model(**it.inputs, logits_to_keep=1).logits)
    return {"forward_ms": bare, **talked(write_tokens, new, repeats=1)}


@contextmanager
def _compiled(model: Any, whole: bool, **how: Any) -> Iterator[Callable[..., Any]]:
    """A model whose forward pass, or whose blocks, each by itself, are compiled for a while."""
    if whole:
        yield torch.compile(model.forward, **how)
        return
    blocks = [m for m in model.modules() if type(m).__name__.endswith(("DecoderLayer", "EncoderLayer", "VisionBlock"))]
    for block in blocks:
        block.compile(**how)
    try:
        yield model
    finally:
        for block in blocks:
            block._compiled_call_impl = None


WAYS: dict[str, dict[str, Any]] = {
    "sdpa": {},
    "static cache": {"cache_implementation": "static"},
    "eager": {"attention": "eager"},
    "blocks compiled": {"compiled": {"whole": False, "dynamic": False}},
    "compiled, reduce-overhead": {"compiled": {"whole": True, "mode": "reduce-overhead"}},
    "compiled, max-autotune-no-cudagraphs": {"compiled": {"whole": True, "mode": "max-autotune-no-cudagraphs"}},
}


# ---- the rows ---------------------------------------------------------------------------------------------------


@torch.no_grad()
def difference(it: Pair) -> dict[str, float]:
    """Of the first token's logits, relative to transformers': ours, and its own by another attention."""
    steps = Seeing(it.ours, [it.stream], it.shown, None)
    mine = steps.prefill(torch.empty(0), torch.tensor([len(it.stream)]))
    found = {}
    for attention in ("eager", "sdpa"):
        it.theirs.set_attn_implementation(attention)
        found[attention] = it.theirs(**it.inputs, logits_to_keep=1).logits[:, -1].float()
    scale = found["sdpa"].norm()
    others = {"ours": mine.float(), "transformers": found["eager"]}
    return {name: ((logits - found["sdpa"]).norm() / scale).item() for name, logits in others.items()}


def floors(it: Pair, size: Size, copy: float) -> dict[str, float]:
    """Milliseconds that a first token and another need at least."""
    width, height = size.picture
    legs = it.ours.legs(it.ours.work([(height, width)], size.words))
    times = {name: 1000 * max(leg.flops / RATE, leg.bytes.read / copy) for name, leg in legs.items()}
    read = cost.bytes(it.ours.decoder, Work.decode(len(it.stream) + size.new // 2)).read
    return {"first_ms": sum(times.values()), "decode_ms": 1000 * read / copy, **times}


def best(result: dict[str, Any], *keys: str) -> float:
    return min(way[key] for way in result.values() if isinstance(way, dict) for key in keys if key in way)


Save = Callable[[dict[str, Any]], object]


def row(
    family: str, config: Any, size: Size, copy: float, ways: dict[str, dict[str, Any]], save: Save = lambda _: None
) -> dict[str, Any]:
    """The figures of a model, which are saved as they come."""
    it = pair(family, config, size)
    result: dict[str, Any] = {"tokens": len(it.stream), "difference": difference(it)}
    show(family, result)
    allowed = max(LOGITS, 3 * result["difference"]["transformers"])
    if not result["difference"]["ours"] <= allowed:
        return result | {"wrong": f"logits differ by more than {allowed:.3g}: nothing was timed"}
    result["floor"] = floors(it, size, copy)
    with torch.no_grad():
        result["ours"], result["transformers"] = ours(it, size.new), {}
        save(result | ratios(result))
        for name, found in theirs(it, size, ways):
            result["transformers"][name] = found
            save(result | ratios(result))
    return result | ratios(result)


def ratios(result: dict[str, Any]) -> dict[str, Any]:
    """Ours to the floor and, where any way of transformers worked, the best of them to ours."""
    first, decode = best(result["ours"], "first_ms"), best(result["ours"], "decode_ms")
    found = {
        "first": {"ours_to_floor": first / result["floor"]["first_ms"]},
        "decode": {"share_of_bandwidth": result["floor"]["decode_ms"] / decode},
    }
    if "step_ms" in result["ours"]:
        found["decode"]["step_share_of_bandwidth"] = result["floor"]["decode_ms"] / result["ours"]["step_ms"]
    with suppress(ValueError):  # every way failed, by a name that is printed
        found["first"]["speedup"] = best(result["transformers"], "first_ms", "forward_ms") / first
        found["decode"]["speedup"] = best(result["transformers"], "decode_ms") / decode
    return found


def told(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def show(what: str, figures: Any) -> None:
    print(f"{what}: {json.dumps(figures)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--only", choices=["llava", "qwen3_vl"], help="one of the two models")
    parser.add_argument("--peers", type=float, help="seconds for transformers' ways of a model, all together")
    parser.add_argument("--way", type=float, help="and for one of them: all of these unless given")
    parser.add_argument("--ways", nargs="+", choices=WAYS, help="some of transformers' ways, in place of all")
    arguments = parser.parse_args()
    if not (CUDA or arguments.tiny):
        parser.error("no CUDA device: --tiny runs on the CPU")
    size, copy = TINY if arguments.tiny else FULL, bandwidth()
    if arguments.peers is not None:
        size = size._replace(peers_s=arguments.peers, way_s=arguments.peers)
    if arguments.way is not None:
        size = size._replace(way_s=arguments.way)
    asked = {name: way for name, way in WAYS.items() if arguments.ways is None or name in arguments.ways}
    result: dict[str, Any] = {"copy_bytes_per_s": copy}
    # What is stopped in the midst of its work may leave the device unusable: --only measures a model by itself.
    for family, config in (("llava", llava), ("qwen3_vl", qwen3_vl)):
        if arguments.only not in (None, family):
            continue

        def save(figures: dict[str, Any], family: str = family) -> None:
            result[family] = figures
            record(arguments.out, result, *MEASURED)

        try:
            save(row(family, config(arguments.tiny), size, copy, asked, save))
        except Exception as error:  # the other model is measured all the same
            save(result.get(family, {}) | {"wrong": told(error)})
        print(json.dumps({family: result[family]}, indent=1), flush=True)
        gc.collect()


if __name__ == "__main__":
    main()
