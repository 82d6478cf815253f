"""Codecs: pictures a second there and back, against diffusers' AutoencoderKL with the same weights; files of tokens.

    python perf/codecs.py --out results.json                 # on a CUDA device where there is one, else on the CPU
    python perf/codecs.py --out results.json --preset sd-vae --preset bsq-vit-b16-28

Presets have random weights and run at their own size: in bfloat16 on a GPU, in float32 on a CPU, where only a few of
them do, one picture at a time. The peer runs in turn with ours, in float32, eagerly, in the same process: `speedup` is
the median of its time over ours, and `agree` the largest difference of what comes out over the largest value. A file of
tokens is written and read record by record, `write` with what makes it whole on the disk.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from record import record
from torch import Tensor

from vitrail import hub
from vitrail.codecs.codec import Codec, CodecConfig
from vitrail.codecs.container import Header, TokenFile
from vitrail.codecs.conv import ConvPairConfig
from vitrail.codecs.presets import CODECS
from vitrail.codecs.quantizers import KLConfig
from vitrail.codecs.writer import TokenWriter
from vitrail.errors import ConfigError, nearest

CUDA = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if CUDA else ("cpu", torch.float32)
LIGHT = ("bsq-vit-b16-28", "vqgan-f16-16384", "sd-vae")  # what a CPU is asked for
PIXELS = 2**22 if CUDA else 2**16  # at once
REPEATS = 10 if CUDA else 2
MEASURED = (
    "vitrail.codecs.codec",
    "vitrail.codecs.container",
    "vitrail.codecs.conv",
    "vitrail.codecs.packing",
    "vitrail.codecs.vit",
    "vitrail.codecs.writer",
)


def seconds(call: Callable[[], object]) -> float:
    if CUDA:
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def rate(count: int, call: Callable[[], object]) -> float:
    """A second, by the median of some calls after one that does not count."""
    call()
    return count / statistics.median(seconds(call) for _ in range(REPEATS))


def in_turn(ours: Callable[[], object], theirs: Callable[[], object], rounds: int = 15) -> dict[str, float]:
    """Median of theirs / ours over rounds in which each runs once, after two that do not count."""
    ratios = []
    for i in range(rounds + 2):
        order = (ours, theirs) if i % 2 else (theirs, ours)
        spent = dict(zip(order, map(seconds, order), strict=True))
        if i >= 2:
            ratios.append(spent[theirs] / spent[ours])
    return {"speedup": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}


def of_preset(name: str) -> dict[str, Any]:
    config = CODECS[name]
    codec = Codec(config).to(DEVICE, DTYPE).eval()
    H, W = codec.size
    batch = max(1, PIXELS // (H * W))
    bytes = torch.randint(0, 256, (batch, 3, H, W), dtype=torch.uint8)
    found = codec.encode(codec.pixels(bytes))
    codes = found.codes
    return {
        "size": [H, W],
        "batch": batch,
        "dtype": str(DTYPE).removeprefix("torch."),
        "parameters": sum(p.numel() for p in codec.parameters()),
        "encode_s": rate(batch, lambda: codec.encode(codec.pixels(bytes))),
        "decode_s": rate(batch, lambda: codec.bytes(codec.decode(codes))),
    }


def of_autoencoder(widths: tuple[int, ...], side: int, batch: int) -> dict[str, Any]:
    """Ours and diffusers' with the same weights."""
    from diffusers import AutoencoderKL

    net = ConvPairConfig(widths=widths, latent=4, size=(side, side))
    ours = Codec(CodecConfig(net=net, quantizer=KLConfig(width=4))).eval()
    with tempfile.TemporaryDirectory() as folder:
        hub.to_hf(ours, folder)
        theirs: Any = AutoencoderKL.from_pretrained(folder).eval().to(DEVICE)
    ours.to(DEVICE)
    pixels = torch.rand(batch, 3, side, side, device=DEVICE) * 2 - 1
    codes, mean = ours.encode(pixels).codes, theirs.encode(pixels).latent_dist.mean
    drawn, other = ours.decode(codes), theirs.decode(mean).sample
    return {
        "widths": list(widths),
        "side": side,
        "batch": batch,
        "agree": max(_apart(codes.movedim(-1, 1), mean), _apart(drawn, other)),
        "encode": in_turn(lambda: ours.encode(pixels), lambda: theirs.encode(pixels)),
        "decode": in_turn(lambda: ours.decode(codes), lambda: theirs.decode(mean)),
    }


def of_container(count: int, side: int, bits: int) -> dict[str, Any]:
    """`count` pictures of side × side ids."""
    header = Header(model="0", name="none", sizes=(2**bits,), groups=False, factor=16, fit={})
    ids = torch.randint(0, 2**bits, (count, side, side))
    size = (16 * side, 16 * side)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokens"

        def write() -> None:
            path.unlink(missing_ok=True)
            with TokenWriter(path, header) as writer:
                for n, own in enumerate(ids):
                    writer.add(str(n), own, size)
                writer.finish()

        def read() -> None:
            with TokenFile(path) as file:
                assert all(torch.equal(file[n].ids, ids[n]) for n in range(count))

        def check() -> None:
            with TokenFile(path) as file:
                file.check()

        write()
        weight = path.stat().st_size
        return {
            "bytes": weight,
            "over_nominal": 8 * weight / (count * side * side * bits),
            "write_s": rate(count, write),
            "read_s": rate(count, read),
            "check_mb_s": rate(weight, check) / 1e6,
        }


def _apart(a: Tensor, b: Tensor) -> float:
    return ((a - b).abs().max() / b.abs().max()).item()


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--preset", action="append", help="of the codecs; may be repeated")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    figures: dict[str, Any] = {"device": DEVICE}

    def keep(name: str, row: dict[str, Any]) -> None:
        figures[name] = row
        print(f"{name:32}", row, flush=True)
        record(arguments.out, figures, *MEASURED)

    for bits in (10, 18, 28):
        keep(f"container 16 x 16, {bits} bits", of_container(2000, 16, bits))
    try:
        sizes = [((128, 256, 512, 512), 256, 8), ((64, 128, 128), 128, 4)][0 if CUDA else 1 :]
        for widths, side, batch in sizes:
            keep(f"AutoencoderKL {'-'.join(map(str, widths))} at {side}", of_autoencoder(widths, side, batch))
    except ImportError:
        print("diffusers is not installed: ours alone")
    for name in arguments.preset or (CODECS if CUDA else LIGHT):
        if name not in CODECS:
            raise ConfigError(f"there is no codec {name!r}", nearest(name, CODECS))
        keep(name, of_preset(name))


if __name__ == "__main__":
    main()
