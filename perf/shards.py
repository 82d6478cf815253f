"""JPEGs of 1024 pixels from shards, resized to 224 pixels: ours against webdataset with Pillow, in alternation.

    python perf/shards.py

Both sides read the same tars with two workers, and return batches of uint8 (B, 224, 224, 3) and labels. The reference
is torch's DataLoader with Pillow's reduced decoding (`draft`) and bicubic resize: once as a stream, and once with the
shuffle buffer of 1,000 samples that webdataset's guide recommends. Ours always reads in a fully shuffled order, once
with threads (`load_batches`) and once in torch's DataLoader. Only the ratios are meaningful, on an idle machine.
"""

import io
import statistics
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from PIL import Image
from record import make_parser, write_record
from timing import summarize_speedup, time_alternating
from torch.utils.data import DataLoader

from vitrail.data.shards import ShardDataset, ShardsConfig, ShuffledDataset, decode_image, load_batches, write_shards
from vitrail.processing.resolution_policies import NaivePolicy

PHOTOGRAPHS = ("astronaut", "chelsea", "coffee", "rocket", "retina", "hubble_deep_field")
SIDE, SIZE, BATCH, WORKERS = 1024, 224, 32, 2
TRANSFORM = NaivePolicy(image_size=SIZE)
BICUBIC = Image.Resampling.BICUBIC
MEASURED = (
    "vitrail.data.shards.image_decoding",
    "vitrail.data.shards.shard_index",
    "vitrail.data.shards.batch_loader",
    "vitrail.data.shards.shard_dataset",
)


def make_photographs(count: int) -> Iterator[dict[str, Any]]:
    """Crop squares from scikit-image's photographs, resized to 1024 × 1024, as JPEGs of quality 90."""
    import skimage.data

    sources = [Image.fromarray(getattr(skimage.data, name)()).convert("RGB") for name in PHOTOGRAPHS]
    rng = np.random.default_rng(0)
    for i in range(count):
        image = sources[i % len(sources)]
        side = int(rng.uniform(0.7, 1) * min(image.size))
        left, top = (int(rng.uniform(0, length - side)) for length in image.size)
        image = image.resize((SIDE, SIDE), BICUBIC, (left, top, left + side, top + side))
        file = io.BytesIO()
        image.save(file, "JPEG", quality=90, subsampling="4:2:0")
        yield {"__key__": f"{i:06}", "jpg": file.getvalue(), "cls": i % 10}


# ---- loaders --------------------------------------------------------------------------------------------------------


def decode_with_pillow(data: bytes) -> np.ndarray:
    image = Image.open(io.BytesIO(data))
    image.draft("RGB", (SIZE, SIZE))
    return np.array(image.convert("RGB").resize((SIZE, SIZE), BICUBIC))


def make_webdataset_loader(paths: list[str], shuffle: int = 0) -> DataLoader:
    import webdataset

    samples = webdataset.WebDataset(paths, shardshuffle=False)
    samples = samples.shuffle(shuffle) if shuffle else samples
    samples = samples.to_tuple("jpg", "cls").map_tuple(decode_with_pillow, int)
    return DataLoader(samples, BATCH, num_workers=WORKERS, persistent_workers=True)


class ThreadLoader:
    """Load the samples with threads. Every iteration is one pass over them."""

    def __init__(self, samples: ShuffledDataset, count: int):
        self.samples, self.numbers = samples, [range(i, min(i + BATCH, count)) for i in range(0, count, BATCH)]

    def __iter__(self) -> Iterator[Any]:
        return load_batches(self.samples, self.numbers, num_workers=WORKERS)


def make_process_loader(samples: ShuffledDataset, count: int) -> DataLoader:
    return DataLoader(samples, BATCH, sampler=range(count), num_workers=WORKERS, persistent_workers=True)


# ---- measurements ---------------------------------------------------------------------------------------------------


def iterate_loader(loader: Iterable[Any], count: int) -> None:
    """Load all batches, and check their shapes and number."""
    loaded = 0
    for batch in loader:
        pixels = batch["jpg"] if isinstance(batch, dict) else batch[0]
        assert pixels.dtype == torch.uint8 and pixels.shape[1:] == (SIZE, SIZE, 3)
        loaded += len(pixels)
    assert loaded == count


def compare_decoding(files: list[bytes], rounds: int) -> dict[str, float]:
    """Compare decoding and resizing alone, on one thread with the files in memory."""
    calls: dict[str, Callable[[], object]] = {
        "ours": lambda: [decode_image(data, TRANSFORM) for data in files],
        "reference": lambda: [decode_with_pillow(data) for data in files],
    }
    times = time_alternating(calls, rounds, warmup=1)
    return summarize_speedup(times["ours"], times["reference"])


def measure_similarity(files: list[bytes]) -> dict[str, float]:
    """Return the PSNR of each side to a full decode with Pillow's bicubic, and the largest difference of the sides."""
    psnr = {"ours": [], "peer": []}
    decoders = {"ours": lambda data: decode_image(data, TRANSFORM), "peer": decode_with_pillow}
    largest_difference = 0
    for data in files:
        exact = np.asarray(Image.open(io.BytesIO(data)).resize((SIZE, SIZE), BICUBIC), dtype=np.float64)
        decoded = {name: decode(data).astype(np.float64) for name, decode in decoders.items()}
        largest_difference = max(largest_difference, int(np.abs(decoded["ours"] - decoded["peer"]).max()))
        for name, pixels in decoded.items():
            psnr[name].append(10 * np.log10(255**2 / np.mean((pixels - exact) ** 2)))
    table = {
        f"{name}, {statistic} dB": float(function(psnr[name]))
        for name in psnr
        for statistic, function in (("mean", np.mean), ("least", np.min))
    }
    return {**table, "ours from peer, levels at most": largest_difference}


def main() -> None:
    parser = make_parser(__doc__, require_out=False)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=24)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        count = arguments.samples // (WORKERS * BATCH) * WORKERS * BATCH
        paths = [str(p) for p in write_shards(make_photographs(count), folder, max_samples=count // 4)]
        shards = ShardDataset(ShardsConfig(paths=tuple(paths), fields=("jpg", "cls"), transform=TRANSFORM))
        samples = ShuffledDataset(shards)
        loaders: dict[str, Iterable[Any]] = {
            "ours, threads": ThreadLoader(samples, count),
            "ours, DataLoader": make_process_loader(samples, count),
            "webdataset": make_webdataset_loader(paths),
            "webdataset, shuffled": make_webdataset_loader(paths, 1000),
        }
        raw = ShardDataset(ShardsConfig(paths=tuple(paths), fields=("jpg",)), decoders={"jpg": bytes})
        files = [raw[i]["jpg"] for i in range(60)]
        similarity, decoding = measure_similarity(files), compare_decoding(files, arguments.rounds)
        times = time_alternating(
            {name: lambda loader=loader: iterate_loader(loader, count) for name, loader in loaders.items()},
            arguments.rounds,
            warmup=1,
        )
    rates = {name: count / statistics.median(seconds) for name, seconds in times.items()}
    figures = {
        "pictures": count,
        "workers": WORKERS,
        "KB a picture": round(sum(map(len, files)) / len(files) / 1000),
        "pictures a second": rates,
        "ratios": {
            f"{ours} against {peer}": summarize_speedup(times[ours], times[peer])
            for ours in list(times)[:2]
            for peer in list(times)[2:]
        },
        "decode and resize alone, one thread": decoding,
        "likeness to a whole decode": similarity,
    }
    for name, rate in rates.items():
        print(f"{name:24}{rate:8,.0f} images per second")
    for name, row in {**figures["ratios"], "decode and resize alone": decoding}.items():
        print(f"{name:48}{row['speedup']:6.2f} × ({row['least']:.2f} … {row['most']:.2f})")
    for name, value in similarity.items():
        print(f"{name:48}{value:6.1f}")
    write_record(arguments.out, figures, MEASURED)


if __name__ == "__main__":
    main()
