"""JPEGs of 1024 pixels out of shards to 224, ours against webdataset with Pillow, in turn in one run.

    python perf/shards.py

Both sides read the same tars with two workers and give batches of uint8 (B, 224, 224, 3) and labels. The peer lets
Pillow decode in small (`draft`) and resizes with Pillow's bicubic, in torch's DataLoader; once as it streams, once with
the shuffle buffer of 1,000 that its guide advises. Ours reads in a fully shuffled order throughout, once with threads
(`batches`) and once in the same DataLoader. Only the ratios mean anything, and on an idle machine alone.
"""

import argparse
import io
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from record import record
from torch.utils.data import DataLoader

from vitrail.data.shards import Shards, ShardsConfig, Shuffled, batches, decode_picture, write_shards
from vitrail.processing.resolution import Naive

PHOTOGRAPHS = ("astronaut", "chelsea", "coffee", "rocket", "retina", "hubble_deep_field")
SIDE, SIZE, BATCH, WORKERS = 1024, 224, 32, 2
LOOK = Naive(size=SIZE)
BICUBIC = Image.Resampling.BICUBIC


def photographs(count: int) -> Iterator[dict[str, Any]]:
    """Squares cut out of scikit-image's photographs, brought to 1024 × 1024, as JPEGs of quality 90."""
    import skimage.data

    sources = [Image.fromarray(getattr(skimage.data, name)()).convert("RGB") for name in PHOTOGRAPHS]
    random = np.random.default_rng(0)
    for i in range(count):
        image = sources[i % len(sources)]
        side = int(random.uniform(0.7, 1) * min(image.size))
        left, top = (int(random.uniform(0, length - side)) for length in image.size)
        image = image.resize((SIDE, SIDE), BICUBIC, (left, top, left + side, top + side))
        file = io.BytesIO()
        image.save(file, "JPEG", quality=90, subsampling="4:2:0")
        yield {"__key__": f"{i:06}", "jpg": file.getvalue(), "cls": i % 10}


# ── the two sides ──────────────────────────────────────────────────────────────────────────────────────────────


def their_picture(data: bytes) -> np.ndarray:
    image = Image.open(io.BytesIO(data))
    image.draft("RGB", (SIZE, SIZE))
    return np.array(image.convert("RGB").resize((SIZE, SIZE), BICUBIC))


def theirs(paths: list[str], shuffle: int = 0) -> DataLoader:
    import webdataset

    samples = webdataset.WebDataset(paths, shardshuffle=False)
    samples = samples.shuffle(shuffle) if shuffle else samples
    samples = samples.to_tuple("jpg", "cls").map_tuple(their_picture, int)
    return DataLoader(samples, BATCH, num_workers=WORKERS, persistent_workers=True)


class OurThreads:
    """A pass over the samples, as often as it is asked for."""

    def __init__(self, samples: Shuffled, count: int):
        self.samples, self.numbers = samples, [range(i, min(i + BATCH, count)) for i in range(0, count, BATCH)]

    def __iter__(self) -> Iterator[Any]:
        return batches(self.samples, self.numbers, workers=WORKERS)


def our_processes(samples: Shuffled, count: int) -> DataLoader:
    return DataLoader(samples, BATCH, sampler=range(count), num_workers=WORKERS, persistent_workers=True)


# ── measuring ──────────────────────────────────────────────────────────────────────────────────────────────────


def rate(loader: Iterable[Any], count: int) -> float:
    """Pictures a second over one pass."""
    start, seen = time.perf_counter(), 0
    for batch in loader:
        pixels = batch["jpg"] if isinstance(batch, dict) else batch[0]
        assert pixels.dtype == torch.uint8 and pixels.shape[1:] == (SIZE, SIZE, 3)
        seen += len(pixels)
    assert seen == count
    return count / (time.perf_counter() - start)


def in_turn(sides: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Each side once a round, each round beginning with another; the first round does not count."""
    names, rates = list(sides), {name: [] for name in sides}
    for i in range(rounds + 1):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            measured = sides[name]()
            if i:
                rates[name].append(measured)
    return rates


def ratio(rates: dict[str, list[float]], ours: str, peer: str) -> dict[str, float]:
    each = [a / b for a, b in zip(rates[ours], rates[peer], strict=True)]
    return {"speedup": statistics.median(each), "least": min(each), "most": max(each)}


def decoding(pictures: list[bytes], rounds: int) -> dict[str, float]:
    """One thread, the bytes in memory: decode and resize alone."""

    def side(decode: Callable[[bytes], np.ndarray]) -> Callable[[], float]:
        def run() -> float:
            start = time.perf_counter()
            for data in pictures:
                decode(data)
            return len(pictures) / (time.perf_counter() - start)

        return run

    rates = in_turn({"ours": side(lambda data: decode_picture(data, LOOK)), "peer": side(their_picture)}, rounds)
    return ratio(rates, "ours", "peer")


def likeness(pictures: list[bytes]) -> dict[str, float]:
    """What each side gives against a whole decode and Pillow's bicubic, and against each other."""
    noise, found = {"ours": [], "peer": []}, {"ours": decode_picture, "peer": lambda data, _: their_picture(data)}
    apart = 0
    for data in pictures:
        exact = np.asarray(Image.open(io.BytesIO(data)).resize((SIZE, SIZE), BICUBIC), dtype=np.float64)
        seen = {name: decode(data, LOOK).astype(np.float64) for name, decode in found.items()}
        apart = max(apart, int(np.abs(seen["ours"] - seen["peer"]).max()))
        for name, pixels in seen.items():
            noise[name].append(10 * np.log10(255**2 / np.mean((pixels - exact) ** 2)))
    table = {
        f"{name}, {what} dB": float(f(noise[name]))
        for name in noise
        for what, f in (("mean", np.mean), ("least", np.min))
    }
    return {**table, "ours from peer, levels at most": apart}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=24)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        count = arguments.samples // (WORKERS * BATCH) * WORKERS * BATCH
        paths = [str(p) for p in write_shards(photographs(count), folder, count=count // 4)]
        shards = Shards(ShardsConfig(paths=tuple(paths), fields=("jpg", "cls"), look=LOOK))
        samples = Shuffled(shards)
        loaders: dict[str, Iterable[Any]] = {
            "ours, threads": OurThreads(samples, count),
            "ours, DataLoader": our_processes(samples, count),
            "webdataset": theirs(paths),
            "webdataset, shuffled": theirs(paths, 1000),
        }
        raw = Shards(ShardsConfig(paths=tuple(paths), fields=("jpg",)), decoders={"jpg": bytes})
        some = [raw[i]["jpg"] for i in range(60)]
        alike, alone = likeness(some), decoding(some, arguments.rounds)
        rates = in_turn({name: lambda own=own: rate(own, count) for name, own in loaders.items()}, arguments.rounds)
    figures = {
        "pictures": count,
        "workers": WORKERS,
        "KB a picture": round(sum(map(len, some)) / len(some) / 1000),
        "pictures a second": {name: statistics.median(each) for name, each in rates.items()},
        "ratios": {
            f"{ours} against {peer}": ratio(rates, ours, peer) for ours in list(rates)[:2] for peer in list(rates)[2:]
        },
        "decode and resize alone, one thread": alone,
        "likeness to a whole decode": alike,
    }
    for name, each in figures["pictures a second"].items():
        print(f"{name:24}{each:8,.0f} pictures a second")
    for name, each in {**figures["ratios"], "decode and resize alone": alone}.items():
        print(f"{name:48}{each['speedup']:6.2f} × ({each['least']:.2f} … {each['most']:.2f})")
    for name, value in alike.items():
        print(f"{name:48}{value:6.1f}")
    if arguments.out:
        modules = ("decode", "index", "load", "read")
        record(arguments.out, figures, *(f"vitrail.data.shards.{name}" for name in modules))


if __name__ == "__main__":
    main()
