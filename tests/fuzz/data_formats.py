"""Token files, datasets, shards, images, videos and recipes, all tiny."""

import hashlib
import io
import random
import zlib
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from PIL import Image

from fuzz import mutations
from fuzz.target import FuzzFormat, Target
from vitrail.codecs.token_file import (
    CHECKSUM_STRUCT,
    FILE_MAGIC,
    FORMAT_VERSION,
    HEADER_STRUCT,
    RECORD_STRUCT,
    TRAILER_STRUCT,
    TokenFile,
    TokenFileHeader,
    VideoTokenSettings,
    compute_record_checksum,
    encode_trailer,
)
from vitrail.codecs.token_file_writer import TokenFileWriter
from vitrail.codecs.video_token_file import VideoRecord, VideoTokenFile, VideoTokenFileWriter, pack_steps
from vitrail.errors import VitrailError


def prepare_token_files(folder: Path) -> list[Target]:
    targets = []
    folder.mkdir(parents=True, exist_ok=True)
    for name, sizes in {"one": (1000,), "groups": (1000, 8), "wide": (2**63,)}.items():
        file, rng = folder / f"{name}.vtok", np.random.default_rng(0)
        fit = {"how": "cover", "size": [32, 48]}
        grouped = len(sizes) > 1
        head = TokenFileHeader(model="a" * 64, name="codec", sizes=sizes, groups=grouped, factor=16, fit=fit)
        with TokenFileWriter(file, head) as writer:
            for i in range(5):
                h, w = 1 + i % 3, 2 + i % 2
                ids = [torch.from_numpy(rng.integers(0, size - 1, (h, w), dtype=np.int64)) for size in sizes]
                writer.add(f"picture {i} é.jpg", torch.stack(ids, -1) if grouped else ids[0], (16 * h, 16 * w))
            writer.skip("broken.png", "it is corrupt")
            writer.finish()
        targets.append(Target(name, file, partial(read_token_file, file)))
    return targets


def read_token_file(path: Path) -> None:
    with TokenFile(path) as file:
        file.errors.items()
        with suppress(VitrailError):
            file.verify_digest()
        for number in range(len(file)):
            with suppress(VitrailError):
                file[number]


def prepare_video_token_files(folder: Path) -> list[Target]:
    targets = []
    folder.mkdir(parents=True, exist_ok=True)
    for name, dtype in {"ids": None, "latents": "bfloat16"}.items():
        file = folder / f"{name}.vt"
        settings = VideoTokenSettings(
            temporal_factor=4,
            frame_multiple=4,
            segment_frames=9,
            chunk_frames=4,
            latent_dtype=dtype,
            latent_width=2 if dtype else 0,
        )
        head = TokenFileHeader(
            model="a" * 64, name="codec", sizes=() if dtype else (64_000,), groups=False, factor=8, fit={"how": "pad"},
            video=settings,
        )  # fmt: skip
        with VideoTokenFileWriter(file, head) as writer:
            for number, counts in enumerate(((3, 2), (1,))):  # latent frames of each segment
                frames = 9 * (len(counts) - 1) + 4 * (counts[-1] - 1) + 1
                steps = pack_steps(np.arange(1, frames + 1))
                writer.start_video(
                    VideoRecord(f"{number}.mp4", None, frames, (1, 90_000), steps, (2, 3), (15, 24), (15, 24))
                )
                for count in counts:
                    ids = torch.arange(count * 6).reshape(count, 2, 3)
                    writer.add_segment(torch.stack([ids, -ids], -1).bfloat16() if dtype else ids)
            writer.skip("broken.mp4", "it is corrupt")
            writer.finish()
        targets.append(Target(name, file, partial(read_video_token_file, file)))
    return targets


def read_video_token_file(path: Path) -> None:
    with VideoTokenFile(path) as file:
        file.errors.items()
        with suppress(VitrailError):
            file.verify_digest()
        for number in range(len(file)):
            with suppress(VitrailError):
                video = file[number]
                video.read()
                video.read(video.duration / 2)


def mutate_token_file(data: bytes, rng: random.Random) -> bytes:
    """Mutate the bytes, or the header, a record or the index with correct checksums."""
    if rng.random() < 0.3:
        return mutations.mutate_bytes(data, rng)
    *_, length = HEADER_STRUCT.unpack_from(data)
    header = data[HEADER_STRUCT.size : HEADER_STRUCT.size + length]
    at = first = HEADER_STRUCT.size + length + CHECKSUM_STRUCT.size
    start, length, *_ = TRAILER_STRUCT.unpack(data[-TRAILER_STRUCT.size :])
    index, records = data[start : start + length], []
    while at < start:
        length, _ = RECORD_STRUCT.unpack_from(data, at)
        records.append(data[at + RECORD_STRUCT.size : at + RECORD_STRUCT.size + length])
        at += RECORD_STRUCT.size + length
    part = rng.randrange(3)
    if part == 0:
        header = mutations.mutate_json(header, rng)
        first = HEADER_STRUCT.size + len(header) + CHECKSUM_STRUCT.size
    elif part == 1:
        n = rng.randrange(len(records))
        records[n] = mutate_msgpack(records[n], rng)
    body, offsets = b"", []
    for record in records:
        offsets.append(first + len(body))
        check = compute_record_checksum(offsets[-1], record)
        body += RECORD_STRUCT.pack(len(record), check) + record
    tree = msgspec.msgpack.decode(index)
    tree[0] = np.array(
        offsets[: len(records) - len(tree[2])], "<i8"
    ).tobytes()  # records with errors come last and are not listed
    index = mutate_msgpack(msgspec.msgpack.encode(tree), rng) if part == 2 else msgspec.msgpack.encode(tree)
    lead = HEADER_STRUCT.pack(FILE_MAGIC, FORMAT_VERSION, len(header)) + header + _checksum(header)
    start = len(lead) + len(body)
    whole = lead + body + index + _checksum(index)
    return whole + encode_trailer(start, len(index), hashlib.sha256(whole).digest())


def mutate_msgpack(data: bytes, rng: random.Random) -> bytes:
    if rng.random() < 0.4:
        return mutations.mutate_bytes(data, rng)
    tree = msgspec.msgpack.decode(data)
    places = list(mutations.list_places(tree))
    holder, key = rng.choice(places)
    values = [0, 1, -1, 2**31, 2**63 - 1, -(2**63), "", "x", b"", b"x" * 9, [], {}, None, 1.5, float("inf"), 2**40]
    if isinstance(holder[key], bytes) and rng.random() < 0.7:
        holder[key] = mutations.mutate_bytes(holder[key], rng)
    elif isinstance(holder, list) and rng.random() < 0.2:
        del holder[key]
    else:
        holder[key] = rng.choice(values)
    return msgspec.msgpack.encode(tree)


def _checksum(data: bytes) -> bytes:
    return CHECKSUM_STRUCT.pack(zlib.crc32(data))


def prepare_datasets(folder: Path) -> list[Target]:
    from data.formats.conftest import MAKERS

    targets = []
    for name, (kind, maker) in MAKERS.items():
        (folder / name).mkdir(parents=True)
        made = maker(folder / name)
        for file in made.files:
            read = partial(read_dataset, kind, made.path, made.options)
            targets.append(Target(f"{name}-{file.stem}" if len(made.files) > 1 else name, file, read))
    return targets


def read_dataset(kind: str, path: Path, options: dict[str, Any]) -> None:
    """Use everything that the samples of a dataset offer."""
    from vitrail.data.formats import detect_format, open_dataset

    with suppress(VitrailError):
        detect_format(path)
    samples = open_dataset(kind, path, **options)
    for number in range(len(samples)):
        with suppress(VitrailError):
            sample = samples[number]
            sample.to_messages()
            for index in range(len(sample.images)):
                sample.load_image(index)
            for instance in sample.instances:
                instance.to_mask(sample.size or (6, 8))


def mutate_dataset(data: bytes, rng: random.Random) -> bytes:
    mutate = mutations.mutate_json if data[:1] in b"[{" else mutations.mutate_bytes
    return mutate(data, rng)


def prepare_parquet(folder: Path) -> list[Target]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from data.formats.test_parquet_benchmarks import ROWS

    targets = []
    folder.mkdir(parents=True, exist_ok=True)
    options = [
        {},
        {"compression": "none"},
        {"use_dictionary": False},
        {"data_page_version": "2.0"},
        {"compression": "zstd", "row_group_size": 1},
    ]
    for n, (kind, rows) in enumerate(ROWS.items()):
        file = folder / f"{kind}.parquet"
        pq.write_table(pa.Table.from_pylist(rows), file, **options[n % len(options)])
        targets.append(Target(kind, file, partial(read_dataset, kind, file, {})))
    return targets


def prepare_shards(folder: Path) -> list[Target]:
    from data.shards import test_fuzz
    from vitrail.data.shards import write_shards

    rng = np.random.default_rng(0)
    samples = []
    for i in range(4):
        pixels = Image.fromarray(np.kron(rng.integers(0, 256, (4, 6, 3), np.uint8), np.ones((8, 8, 1), np.uint8)))
        sample = {"__key__": f"part/{i:04}", "jpg": encode(pixels, "JPEG"), "txt": f"number {i}", "cls": i}
        samples.append(sample | {"json": {"n": i, "words": ["a"]}, "npy": rng.random((3, 2))})
    samples[1]["__key__"] = "long/" + "n" * 150  # with an extended header
    samples[2]["png"] = np.zeros((9, 9, 3), np.uint8)
    (path,) = write_shards(samples, folder, quiet=True)
    read_shards(path)  # writes the index
    index = path.with_name(path.name + test_fuzz.INDEX_SUFFIX)
    return [Target("tar", path, partial(read_shards, path)), Target("index", index, partial(read_shards, path))]


def read_shards(path: Path) -> None:
    from vitrail.data.shards import RandomCrop, ShardDataset, ShardsConfig

    shards = ShardDataset(ShardsConfig(paths=str(path), transform=RandomCrop(image_size=14), max_faults=10**6))
    for i in range(len(shards)):
        shards[i]
    str(shards.report())


def mutate_shard(data: bytes, rng: random.Random) -> bytes:
    from data.shards import test_fuzz

    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        rng.choice(test_fuzz.MUTATIONS)(changed, rng)
        if len(changed) <= test_fuzz.BLOCK:
            break
    return bytes(changed)


# ---- images and videos ----------------------------------------------------------------------------------------------


def encode(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def prepare_images(folder: Path) -> list[Target]:
    from processing.test_image_loading import SPECIMENS

    targets = []
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in SPECIMENS.items():
        file = folder / name
        file.write_bytes(data)
        targets.append(Target(name, file, partial(read_image, file)))
    return targets


def read_image(file: Path) -> None:
    from vitrail.processing.image_loading import load_image

    with suppress(VitrailError):
        load_image(file, frame=1)
    load_image(file)


def prepare_videos(folder: Path) -> list[Target]:
    from data import test_video_file as videos

    targets = []
    folder.mkdir(parents=True, exist_ok=True)
    made = {f"{codec}-{container}": videos.video(codec, container, frames=15) for codec, container in videos.WAYS}
    for name, data in made.items():
        file = folder / name
        file.write_bytes(data)
        targets.append(Target(name, file, partial(read_video, file)))
    return targets


def read_video(file: Path) -> None:
    from vitrail.data.video_file import open_video

    open_video(file).sample_frames(count=3, size=(16, 16))


# ---- recipes --------------------------------------------------------------------------------------------------------


def prepare_recipes(folder: Path) -> list[Target]:
    from vitrail.recipe.recipe_files import find_recipe_file

    targets = []
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("smoke", "clip-scenes", "genie-pocket", "mini-vlm", "codec-vq", "dino"):
        file = folder / f"{name}.toml"
        file.write_bytes(find_recipe_file(name).read_bytes())
        targets.append(Target(name, file, partial(read_recipe, file)))
    return targets


def read_recipe(file: Path) -> None:
    from vitrail import recipe

    recipe.load_recipe(file).build_model_config()


WORDS = [
    "-1",
    "0",
    "1e999",
    "nan",
    "inf",
    "2**64",
    "18446744073709551616",
    "'../x'",
    "[]",
    "{}",
    "true",
    "=",
    "[[stages]]",
    "[model.config]",
    "layers = 1000000",
    "base = 'smoke'",
    "remove = ['sources.docs']",
    "like = 'docs'",
    "a = " + "[" * 3000 + "]" * 3000,
    "1979-05-27",
    '"""',
    "kind = 'vlm'",
    "steps = 0",
    "seed = -1",
]


FORMATS = {
    "token-file": FuzzFormat(prepare_token_files, mutate_token_file),
    "video-token-file": FuzzFormat(prepare_video_token_files, mutate_token_file),
    "dataset": FuzzFormat(prepare_datasets, mutate_dataset),
    "parquet": FuzzFormat(prepare_parquet),
    "shard": FuzzFormat(prepare_shards, mutate_shard),
    "image": FuzzFormat(prepare_images),
    "video": FuzzFormat(prepare_videos),
    "recipe": FuzzFormat(prepare_recipes, mutations.mutate_text(WORDS)),
}
