"""Mutated shards give samples or a VitrailError, never another exception."""

import random

import numpy as np
import pytest

from vitrail.data.shards import RandomCrop, ShardDataset, ShardsConfig, write_shards
from vitrail.data.shards.shard_index import INDEX_SUFFIX
from vitrail.errors import VitrailError
from vitrail.processing.resolution_policies import CropPolicy

BLOCK = 512


def flip_bits(data: bytearray, chance: random.Random) -> None:
    for _ in range(chance.choice((1, 1, 2, 20))):
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)


def truncate(data: bytearray, chance: random.Random) -> None:
    del data[chance.randrange(len(data)) :]


def remove_bytes(data: bytearray, chance: random.Random) -> None:
    at = chance.randrange(len(data))
    del data[at : at + chance.choice((1, 7, BLOCK, 3000))]


def insert_bytes(data: bytearray, chance: random.Random) -> None:
    at = chance.randrange(len(data))
    data[at:at] = chance.choice((bytes(BLOCK), chance.randbytes(chance.randrange(1, 2000)), data[:2048]))


def overwrite_bytes(data: bytearray, chance: random.Random) -> None:
    at, length = chance.randrange(len(data)), chance.choice((1, 30, BLOCK, 5000))
    data[at : at + length] = chance.choice((bytes(length), b"\xff" * length, chance.randbytes(length)))


def change_header(data: bytearray, chance: random.Random) -> None:
    """Change one field of a header (size, kind, name, magic, prefix), with a valid checksum."""
    headers = [i for i in range(0, len(data) - BLOCK, BLOCK) if data[i + 257 : i + 262] == b"ustar"]
    at = chance.choice(headers or [0])
    start, stop = chance.choice(((124, 136), (124, 136), (156, 157), (0, 100), (257, 265), (345, 500)))
    sizes = (b"00000000000\0", b"77777777777\0", b"\x80" + bytes(10) + b"\x05", b"\xff" * 12, b"-1\0" + bytes(9))
    kinds = b"0123456789xgLKSMVD\0Z"
    new = chance.choice(sizes) if start == 124 else bytes([chance.choice(kinds)]) if start == 156 else None
    data[at + start : at + stop] = chance.randbytes(stop - start) if new is None else new
    data[at + 148 : at + 156] = b" " * 8
    data[at + 148 : at + 156] = b"%06o\0 " % sum(data[at : at + BLOCK])


MUTATIONS = (flip_bits, truncate, remove_bytes, insert_bytes, overwrite_bytes, change_header, change_header)


def fuzz(folder, samples, rounds: int, seed: int) -> dict[str, int]:
    samples_ = samples(4)
    samples_[1]["__key__"] = "long/" + "n" * 150  # with an extended header
    samples_[2]["png"], samples_[3]["webp"] = np.zeros((9, 9, 3), np.uint8), np.zeros((9, 9, 3), np.uint8)
    (path,) = write_shards(samples_, folder, quiet=True)
    original, index_path = path.read_bytes(), path.with_name(path.name + INDEX_SUFFIX)
    rng, outcomes = random.Random(seed), {"refused": 0, "faulty": 0, "sound": 0, "stale index": 0}
    for number in range(rounds):
        data = bytearray(original)
        for _ in range(rng.choice((1, 1, 2, 4))):
            rng.choice(MUTATIONS)(data, rng)
            if len(data) <= BLOCK:
                break
        if number % 10 == 0:  # corrupt the index instead of the shard
            index = bytearray(index_path.read_bytes()) if index_path.exists() else bytearray(b"x")
            rng.choice(MUTATIONS[:5])(index, rng)
            index_path.write_bytes(index)
            outcomes["stale index"] += 1
        path.write_bytes(data)
        look = CropPolicy(image_size=14) if number % 2 else RandomCrop(image_size=14)
        try:
            shards = ShardDataset(ShardsConfig(paths=str(path), transform=look, max_faults=10**6))
            for i in range(len(shards)):
                assert shards[i]["__key__"]
            assert len(shards) <= 12  # inserted bytes may repeat samples
            outcomes["faulty" if shards.report().faults else "sound"] += 1
            assert str(shards.report())
        except VitrailError as error:
            assert error.problem and error.remedy
            outcomes["refused"] += 1
    return outcomes


def test_a_few_mutated_shards(samples, tmp_path):
    outcomes = fuzz(tmp_path, samples, 300, seed=1)
    assert min(outcomes.values()) > 5, outcomes  # every outcome occurs


@pytest.mark.slow
def test_ten_thousand_mutated_shards(samples, tmp_path):
    outcomes = fuzz(tmp_path, samples, 10_000, seed=0)
    assert min(outcomes.values()) > 100, outcomes
