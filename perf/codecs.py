"""Images per second of codecs, their agreement with diffusers' AutoencoderKL, and token files.

    python perf/codecs.py --out results.json                 # on a CUDA device if there is one, else on the CPU
    python perf/codecs.py --out results.json --preset sd-vae --preset bsq-vit-b16-28

Presets have random weights and run at their own image size, in bfloat16 on a GPU and in float32 on a CPU. A CPU
measures only a few of them, one image at a time. AutoencoderKL has the same weights; both sides alternate in float32,
without compilation. `speedup` is the median of its time over ours, and `agree` the largest difference of the outputs
relative to the largest value. Token files are written and read one record at a time. `write_s` includes the flush to
disk.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from record import make_parser, write_record
from timing import CUDA, DEVICE, compare_alternating, median_seconds, relative_difference

from vitrail import hub
from vitrail.codecs.codec import Codec, CodecConfig
from vitrail.codecs.conv_autoencoder import ConvAutoencoderConfig
from vitrail.codecs.presets import CODEC_PRESETS
from vitrail.codecs.quantizers import KLConfig
from vitrail.codecs.token_file import TokenFile, TokenFileHeader
from vitrail.codecs.token_file_writer import TokenFileWriter
from vitrail.errors import ConfigError, suggest_name

DTYPE = torch.bfloat16 if CUDA else torch.float32
CPU_PRESETS = ("bsq-vit-b16-28", "vqgan-f16-16384", "sd-vae")
PIXELS_PER_BATCH = 2**22 if CUDA else 2**16
REPEATS = 10 if CUDA else 2
ROUNDS = 15
MEASURED = (
    "vitrail.codecs.codec",
    "vitrail.codecs.token_file",
    "vitrail.codecs.conv_autoencoder",
    "vitrail.codecs.bit_packing",
    "vitrail.codecs.vit_autoencoder",
    "vitrail.codecs.token_file_writer",
)


def measure_rate(count: int, call: Callable[[], object]) -> float:
    """Return items per second of a call that handles `count` items."""
    return count / median_seconds(call, REPEATS)


def measure_preset(name: str) -> dict[str, Any]:
    config = CODEC_PRESETS[name]
    codec = Codec(config).to(DEVICE, DTYPE).eval()
    H, W = codec.image_size
    batch = max(1, PIXELS_PER_BATCH // (H * W))
    images = torch.randint(0, 256, (batch, 3, H, W), dtype=torch.uint8)
    codes = codec.encode(codec.to_pixels(images)).codes
    return {
        "size": [H, W],
        "batch": batch,
        "dtype": str(DTYPE).removeprefix("torch."),
        "parameters": sum(p.numel() for p in codec.parameters()),
        "encode_s": measure_rate(batch, lambda: codec.encode(codec.to_pixels(images))),
        "decode_s": measure_rate(batch, lambda: codec.to_uint8(codec.decode(codes))),
    }


def compare_autoencoder(widths: tuple[int, ...], side: int, batch: int) -> dict[str, Any]:
    """Compare our autoencoder with diffusers' on the same weights."""
    from diffusers import AutoencoderKL

    net = ConvAutoencoderConfig(widths=widths, latent_channels=4, image_size=(side, side))
    ours = Codec(CodecConfig(net=net, quantizer=KLConfig(width=4))).eval()
    with tempfile.TemporaryDirectory() as folder:
        hub.to_hf(ours, folder)
        reference: Any = AutoencoderKL.from_pretrained(folder).eval().to(DEVICE)
    ours.to(DEVICE)
    pixels = torch.rand(batch, 3, side, side, device=DEVICE) * 2 - 1
    codes, mean = ours.encode(pixels).codes, reference.encode(pixels).latent_dist.mean
    image, reference_image = ours.decode(codes), reference.decode(mean).sample
    return {
        "widths": list(widths),
        "side": side,
        "batch": batch,
        "agree": max(relative_difference(codes.movedim(-1, 1), mean), relative_difference(image, reference_image)),
        "encode": compare_alternating(lambda: ours.encode(pixels), lambda: reference.encode(pixels), ROUNDS),
        "decode": compare_alternating(lambda: ours.decode(codes), lambda: reference.decode(mean), ROUNDS),
    }


def measure_token_file(count: int, side: int, bits: int) -> dict[str, Any]:
    """Write and read a token file of `count` images with side × side ids."""
    header = TokenFileHeader(model="0", name="none", sizes=(2**bits,), groups=False, factor=16, fit={})
    ids = torch.randint(0, 2**bits, (count, side, side))
    size = (16 * side, 16 * side)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokens"

        def write() -> None:
            path.unlink(missing_ok=True)
            with TokenFileWriter(path, header) as writer:
                for n, image_ids in enumerate(ids):
                    writer.add(str(n), image_ids, size)
                writer.finish()

        def read() -> None:
            with TokenFile(path) as file:
                assert all(torch.equal(file[n].ids, ids[n]) for n in range(count))

        def check() -> None:
            with TokenFile(path) as file:
                file.verify_digest()

        write()
        num_bytes = path.stat().st_size
        return {
            "bytes": num_bytes,
            "over_nominal": 8 * num_bytes / (count * side * side * bits),
            "write_s": measure_rate(count, write),
            "read_s": measure_rate(count, read),
            "check_mb_s": measure_rate(num_bytes, check) / 1e6,
        }


@torch.no_grad()
def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--preset", action="append", help="a codec preset; may be repeated")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    figures: dict[str, Any] = {"device": DEVICE}

    def save(name: str, row: dict[str, Any]) -> None:
        figures[name] = row
        print(f"{name:32}", row, flush=True)
        write_record(arguments.out, figures, MEASURED)

    for bits in (10, 18, 28):
        save(f"container 16 x 16, {bits} bits", measure_token_file(2000, 16, bits))
    try:
        sizes = [((128, 256, 512, 512), 256, 8), ((64, 128, 128), 128, 4)][0 if CUDA else 1 :]
        for widths, side, batch in sizes:
            save(f"AutoencoderKL {'-'.join(map(str, widths))} at {side}", compare_autoencoder(widths, side, batch))
    except ImportError:
        print("diffusers is not installed: without the comparison")
    for name in arguments.preset or (CODEC_PRESETS if CUDA else CPU_PRESETS):
        if name not in CODEC_PRESETS:
            raise ConfigError(f"there is no codec {name!r}", suggest_name(name, CODEC_PRESETS))
        save(name, measure_preset(name))


if __name__ == "__main__":
    main()
