"""Encoding and decoding of causal video codecs beside diffusers' classes with the same weights.

    python perf/video_codecs.py --out results.json                      # on a CUDA device, else tiny networks on a CPU
    python perf/video_codecs.py --out results.json --codec cogvideox --part compare --part compile

Videos have 49 frames of 480 × 720 pixels, in bfloat16 on a GPU. Parts, in this order:

compare       beside diffusers, in one process, alternating, not compiled; `speedup` is the median of diffusers' time
              over ours, `ms` our fastest call; `gib` is the peak of memory of a call with the weights of that side;
              `chunks` is ours in chunks of 16 frames
convolutions  ways to compute a causal 3 × 3 × 3 convolution of channels-last frames
ways          the codecs with each of these ways
long          ten minutes of 1280 × 720 video, 24 frames a second, encoded by Cosmos in chunks of 16 frames, with
              temporal attention to 16 latent frames
compile       ours with compiled ResNet blocks (CogVideoX: with compiled chunks)

No part starts or continues after `--minutes`. Results are saved after each measurement.
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from record import make_parser, write_record
from timing import (
    CUDA,
    DEVICE,
    TimeLimitError,
    compare_alternating,
    describe_error,
    limit_time,
    measure_peak_mib,
    median_ms,
    relative_difference,
    time_alternating,
)
from torch import Tensor

from vitrail import hub
from vitrail.codecs import (
    CausalVideoCodec,
    CausalVideoCodecConfig,
    CogVideoXAutoencoderConfig,
    CosmosAutoencoderConfig,
    WanAutoencoderConfig,
)
from vitrail.codecs.causal_layers import FEW_CHANNELS, CausalConv, convolve_frames
from vitrail.codecs.cosmos_autoencoder import CosmosResNetBlock
from vitrail.codecs.presets import VIDEO_CODEC_PRESETS
from vitrail.codecs.wan_autoencoder import WanResNetBlock

DTYPE = torch.bfloat16 if CUDA else torch.float32
SHAPE = (1, 49, 3, 480, 720) if CUDA else (1, 17, 3, 16, 24)
LONG_SHAPE = (14_401, 720, 1280) if CUDA else (65, 16, 32)
LONG_WINDOW = 16
ROUNDS, WARMUP = (5, 2) if CUDA else (2, 1)
CHUNK_FRAMES = 16 if CUDA else 8
PART_SECONDS = 60
CLASSES = {"cosmos": "AutoencoderKLCosmos", "cogvideox": "AutoencoderKLCogVideoX", "wan": "AutoencoderKLWan"}
TINY_NETS = {
    "cosmos": CosmosAutoencoderConfig(
        encoder_widths=(8, 8, 16, 16), decoder_widths=(8, 8, 16, 16), layers=1, latent_channels=16
    ),
    "cogvideox": CogVideoXAutoencoderConfig(widths=(24, 24, 24, 32), layers=1, norm_groups=4),
    "wan": WanAutoencoderConfig(width=24, layers=1),
}
PARTS = ("compare", "convolutions", "ways", "long", "compile")
MEASURED = (
    "vitrail.codecs.causal_layers",
    "vitrail.codecs.causal_video_codec",
    "vitrail.codecs.cosmos_autoencoder",
    "vitrail.codecs.cogvideox_autoencoder",
    "vitrail.codecs.wan_autoencoder",
)


def make_config(name: str) -> CausalVideoCodecConfig:
    preset = {"cosmos": "cosmos-cv8x8x8", "cogvideox": "cogvideox", "wan": "wan2.1"}[name]
    config = VIDEO_CODEC_PRESETS[preset]
    return config if CUDA else config.replace(net=TINY_NETS[name])


def count_weight_gib(model: torch.nn.Module) -> float:
    return sum(p.nbytes for p in model.parameters()) / 2**30


# ---- ways to convolve -----------------------------------------------------------------------------------------------


def convolve_added(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Add three convolutions, as the layer does."""
    T = x.shape[1] - 2
    y = convolve_frames(x[:, :T], weight[:, :, 0], bias)
    for k in (1, 2):
        y += convolve_frames(x[:, k : k + T], weight[:, :, k])
    return y


def convolve_joined(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Convolve once, with three frames as channels of one."""
    T = x.shape[1] - 2
    joined = torch.cat([x[:, k : k + T] for k in range(3)], -1)
    return convolve_frames(joined, weight.transpose(1, 2).flatten(1, 2), bias)


def convolve_stacked(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Convolve once with three times the output channels, and add the parts of three frames."""
    T = x.shape[1] - 2
    parts = convolve_frames(x, weight.permute(2, 0, 1, 3, 4).flatten(0, 1)).chunk(3, -1)
    y = parts[0][:, :T] + bias
    for k in (1, 2):
        y += parts[k][:, k : k + T]
    return y


def convolve_volume(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Convolve in three dimensions, channels last."""
    weight = weight.contiguous(memory_format=torch.channels_last_3d)
    return F.conv3d(x.permute(0, 4, 1, 2, 3), weight, bias, padding=(0, 1, 1)).permute(0, 2, 3, 4, 1)


def convolve_planes(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Convolve in three dimensions, channels first. The input is copied outside of the timed call."""
    return F.conv3d(x, weight, bias, padding=(0, 1, 1))


WAYS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "added": convolve_added,
    "joined": convolve_joined,
    "stacked": convolve_stacked,
    "volume": convolve_volume,
}


def compare_convolutions() -> dict[str, Any]:
    """Time every way at the shapes of CogVideoX's levels, with and without the search for the fastest kernel."""
    shapes = [(8, 480, 720, 128, 128), (8, 240, 360, 256, 256), (8, 480, 720, 256, 128), (2, 60, 90, 512, 512)]
    rows = {}
    for T, H, W, C, out in shapes if CUDA else [(4, 6, 8, 20, 18)]:
        x = torch.randn(1, T + 2, H, W, C, device=DEVICE, dtype=DTYPE)
        weight = torch.randn(out, C, 3, 3, 3, device=DEVICE, dtype=DTYPE) * (27 * C) ** -0.5
        bias, planes = torch.randn(out, device=DEVICE, dtype=DTYPE), x.permute(0, 4, 1, 2, 3).contiguous()
        expected, row = convolve_added(x, weight, bias), {}
        for search in (False, True):
            torch.backends.cudnn.benchmark = search
            for name, way in WAYS.items():
                label = f"{name}, searched" if search else name
                try:
                    assert relative_difference(way(x, weight, bias), expected) < 0.05
                    row[label] = median_ms(lambda: way(x, weight, bias), 5, 2)  # noqa: B023
                except torch.OutOfMemoryError as error:
                    row[label] = describe_error(error)
            row["planes, searched" if search else "planes"] = median_ms(
                lambda: convolve_planes(planes, weight, bias),  # noqa: B023
                5,
                2,
            )
        torch.backends.cudnn.benchmark = False
        row["tflop"] = 54 * T * H * W * C * out / 1e12
        rows[f"{T} x {H} x {W}, {C} to {out}"] = row
    return rows


@contextmanager
def use_way(name: str) -> Iterator[None]:
    """Compute the causal convolutions of many channels in this way, with the frames before joined to the others."""
    original = CausalConv.convolve

    def convolve(self: CausalConv, x: Tensor, before: Tensor | None) -> Tensor:
        if min(self.weight.shape[:2]) <= FEW_CHANNELS:
            return original(self, x, before)
        before = torch.zeros_like(x[:, :1]).expand(-1, 2, -1, -1, -1) if before is None else before
        return WAYS[name](torch.cat([before, x], 1), self.weight, self.bias)

    CausalConv.convolve = convolve  # type: ignore[method-assign]
    try:
        yield
    finally:
        CausalConv.convolve = original


# ---- codecs ---------------------------------------------------------------------------------------------------------


def make_codec(name: str) -> CausalVideoCodec:
    torch.manual_seed(0)
    return CausalVideoCodec(make_config(name)).eval()


def make_video() -> Tensor:
    return torch.rand(SHAPE, device=DEVICE, dtype=DTYPE) * 2 - 1


def compare_codec(name: str, save: Callable[[str, Any], None]) -> None:
    """Compare a codec with diffusers' class, and with itself in chunks."""
    import diffusers

    ours = make_codec(name)
    with tempfile.TemporaryDirectory() as folder:
        hub.to_hf(ours, folder)
        theirs: Any = getattr(diffusers, CLASSES[name]).from_pretrained(folder, torch_dtype=DTYPE).eval().to(DEVICE)
    ours.to(DEVICE, DTYPE)
    video = make_video()
    planes = video.transpose(1, 2).contiguous()
    codes, latents = ours.encode(video).codes, theirs.encode(planes).latent_dist.mode()
    sample, pixels = theirs.decode(latents).sample, ours.decode(latents.movedim(1, -1)).transpose(1, 2)
    agree = {"latents": relative_difference(codes.movedim(-1, 1), latents)}
    save(f"{name} agree", agree | {"pixels": relative_difference(pixels.clamp(-1, 1), sample.clamp(-1, 1))})
    del pixels, sample
    calls = {
        "encode": (lambda: ours.encode(video), lambda: theirs.encode(planes)),
        "decode": (lambda: ours.decode(codes), lambda: theirs.decode(latents)),
    }
    for label, (our_call, their_call) in calls.items():
        row = compare_alternating(our_call, their_call, ROUNDS, WARMUP)
        row["gib"] = measure_peak_mib(our_call) / 1024 + count_weight_gib(ours)
        row["diffusers_gib"] = measure_peak_mib(their_call) / 1024 + count_weight_gib(theirs)
        save(f"{name} {label}", row)
    chunked = {"encode": lambda: encode_chunks(ours, video), "decode": lambda: decode_chunks(ours, codes)}
    for label, call in chunked.items():
        row = {"ms": median_ms(call, ROUNDS, WARMUP), "gib": measure_peak_mib(call) / 1024 + count_weight_gib(ours)}
        save(f"{name} {label} chunks", row)


def encode_chunks(codec: CausalVideoCodec, video: Tensor) -> None:
    cache, first = codec.make_cache(), 1 + CHUNK_FRAMES
    for chunk in (video[:, :first], *video[:, first:].split(CHUNK_FRAMES, 1)):
        codec.encode(chunk, cache)


def decode_chunks(codec: CausalVideoCodec, codes: Tensor) -> None:
    cache, step = codec.make_cache(), CHUNK_FRAMES // codec.temporal_factor
    for chunk in (codes[:, : 1 + step], *codes[:, 1 + step :].split(step, 1)):
        codec.decode(chunk, cache)


def compare_ways(name: str, save: Callable[[str, Any], None]) -> None:
    """Time a codec with each way to convolve."""
    codec, row = make_codec(name).to(DEVICE, DTYPE), {}
    for label, call in make_calls(codec).items():
        for way in WAYS:
            with use_way(way):
                try:
                    row[f"{way}, {label}"] = {
                        "ms": median_ms(call, 2, 1),
                        "gib": measure_peak_mib(call) / 1024 + count_weight_gib(codec),
                    }
                except torch.OutOfMemoryError as error:
                    row[f"{way}, {label}"] = describe_error(error)
            save(f"{name} ways", row)


def make_calls(codec: CausalVideoCodec) -> dict[str, Callable[[], object]]:
    video = make_video()
    codes = codec.encode(video).codes
    return {"encode": lambda: codec.encode(video), "decode": lambda: codec.decode(codes)}


def measure_compiled(name: str, save: Callable[[str, Any], None]) -> None:
    """Time a codec with compiled ResNet blocks. The chunks of CogVideoX are compiled as a whole."""
    torch._dynamo.config.recompile_limit = 64
    codec: Any = make_codec(name).to(DEVICE, DTYPE)
    calls = make_calls(codec)
    if name == "cogvideox":
        for network in (codec.encoder, codec.decoder):
            network.process_chunk = torch.compile(network.process_chunk, dynamic=False)
    else:
        for module in codec.modules():
            if isinstance(module, CosmosResNetBlock | WanResNetBlock):
                module.compile(dynamic=False)
    for label, call in calls.items():
        start = time.perf_counter()
        call()
        seconds = time.perf_counter() - start
        times = time_alternating({"ours": call}, ROUNDS, WARMUP)["ours"]
        row = {"ms": 1000 * min(times), "gib": measure_peak_mib(call) / 1024 + count_weight_gib(codec)}
        save(f"{name} {label} compiled", row | {"compile_s": seconds})


def encode_long_video() -> dict[str, Any]:
    """Encode ten minutes of video with Cosmos, chunk by chunk, and return the peak of memory at 5 % and at the end."""
    codec = CausalVideoCodec(make_config("cosmos")).eval().to(DEVICE, DTYPE)
    frames, H, W = LONG_SHAPE
    pool = torch.randint(0, 256, (1, CHUNK_FRAMES, 3, H, W), dtype=torch.uint8)
    pool = pool.pin_memory() if CUDA else pool
    cache, latent_frames, row = codec.make_cache(LONG_WINDOW), 0, {}

    def encode() -> None:
        nonlocal latent_frames
        for done in range(0, frames, CHUNK_FRAMES):
            chunk = pool[:, :1] if not done else pool
            codes = codec.encode(codec.to_pixels(chunk), cache).codes.cpu()
            latent_frames += codes.shape[1]
            if CUDA and not row and done > frames / 20:
                row["early_gib"] = torch.cuda.max_memory_allocated() / 2**30

    start = time.perf_counter()
    peak = measure_peak_mib(encode) / 1024 + count_weight_gib(codec)
    assert codec.count_frames(latent_frames) == frames
    return row | {"frames": frames, "gib": peak, "seconds": time.perf_counter() - start}


@torch.no_grad()
def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--codec", action="append", choices=list(CLASSES), help="may be repeated; default: all")
    parser.add_argument("--part", action="append", choices=PARTS, help="may be repeated; default: all")
    parser.add_argument("--minutes", type=float, default=4, help="end of the last part")
    arguments = parser.parse_args()
    end, names = time.monotonic() + 60 * arguments.minutes, arguments.codec or list(CLASSES)
    figures: dict[str, Any] = {"device": DEVICE, "shape": list(SHAPE), "dtype": str(DTYPE).removeprefix("torch.")}

    def save(name: str, row: Any) -> None:
        figures[name] = row
        print(f"{name:28}", row, flush=True)
        write_record(arguments.out, figures, MEASURED)

    parts: dict[str, list[Callable[[], object]]] = {
        "compare": [lambda name=name: compare_codec(name, save) for name in names],
        "convolutions": [lambda: save("convolutions", compare_convolutions())],
        "ways": [lambda name=name: compare_ways(name, save) for name in names if name != "cosmos"],
        "long": [lambda: save("long", encode_long_video())],
        "compile": [lambda name=name: measure_compiled(name, save) for name in names],
    }
    for part in arguments.part or PARTS:
        for call in parts[part]:
            left = end - time.monotonic()
            try:
                if left < 1:
                    raise TimeLimitError(f"{arguments.minutes} minutes are over")
                with limit_time(min(PART_SECONDS, left)):
                    call()
            except (TimeLimitError, RuntimeError) as error:
                save(f"{part} error", describe_error(error))


if __name__ == "__main__":
    main()
