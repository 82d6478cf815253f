"""Mutated shards give samples or a VitrailError, never anything else."""

import random

import numpy as np
import pytest

from vitrail.data.shards import RandomCrop, Shards, ShardsConfig, write_shards
from vitrail.data.shards.index import SUFFIX
from vitrail.errors import VitrailError
from vitrail.processing.resolution import Crop

BLOCK = 512


def flip(data: bytearray, chance: random.Random) -> None:
    for _ in range(chance.choice((1, 1, 2, 20))):
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)


def truncate(data: bytearray, chance: random.Random) -> None:
    del data[chance.randrange(len(data)) :]


def remove(data: bytearray, chance: random.Random) -> None:
    at = chance.randrange(len(data))
    del data[at : at + chance.choice((1, 7, BLOCK, 3000))]


def insert(data: bytearray, chance: random.Random) -> None:
    at = chance.randrange(len(data))
    data[at:at] = chance.choice((bytes(BLOCK), chance.randbytes(chance.randrange(1, 2000)), data[:2048]))


def overwrite(data: bytearray, chance: random.Random) -> None:
    at, length = chance.randrange(len(data)), chance.choice((1, 30, BLOCK, 5000))
    data[at : at + length] = chance.choice((bytes(length), b"\xff" * length, chance.randbytes(length)))


def header(data: bytearray, chance: random.Random) -> None:
    """One field of one header changed, with a checksum that fits: size, kind, name, magic, front of the name."""
    headers = [i for i in range(0, len(data) - BLOCK, BLOCK) if data[i + 257 : i + 262] == b"ustar"]
    at = chance.choice(headers or [0])
    start, stop = chance.choice(((124, 136), (124, 136), (156, 157), (0, 100), (257, 265), (345, 500)))
    sizes = (b"00000000000\0", b"77777777777\0", b"\x80" + bytes(10) + b"\x05", b"\xff" * 12, b"-1\0" + bytes(9))
    kinds = b"0123456789xgLKSMVD\0Z"
    new = chance.choice(sizes) if start == 124 else bytes([chance.choice(kinds)]) if start == 156 else None
    data[at + start : at + stop] = chance.randbytes(stop - start) if new is None else new
    data[at + 148 : at + 156] = b" " * 8
    data[at + 148 : at + 156] = b"%06o\0 " % sum(data[at : at + BLOCK])


MUTATIONS = (flip, truncate, remove, insert, overwrite, header, header)


def fuzz(folder, samples, rounds: int, seed: int) -> dict[str, int]:
    made = samples(4)
    made[1]["__key__"] = "long/" + "n" * 150  # with an extended header
    made[2]["png"], made[3]["webp"] = np.zeros((9, 9, 3), np.uint8), np.zeros((9, 9, 3), np.uint8)
    (path,) = write_shards(made, folder, quiet=True)
    whole, kept = path.read_bytes(), path.with_name(path.name + SUFFIX)
    chance, seen = random.Random(seed), {"refused": 0, "faulty": 0, "sound": 0, "stale index": 0}
    for number in range(rounds):
        data = bytearray(whole)
        for _ in range(chance.choice((1, 1, 2, 4))):
            chance.choice(MUTATIONS)(data, chance)
            if len(data) <= BLOCK:
                break
        if number % 10 == 0:  # as if someone had changed the index, and not the shard
            index = bytearray(kept.read_bytes()) if kept.exists() else bytearray(b"x")
            chance.choice(MUTATIONS[:5])(index, chance)
            kept.write_bytes(index)
            seen["stale index"] += 1
        path.write_bytes(data)
        look = Crop(size=14) if number % 2 else RandomCrop(size=14)
        try:
            shards = Shards(ShardsConfig(paths=str(path), look=look, patience=10**6))
            for i in range(len(shards)):
                assert shards[i]["__key__"]
            assert len(shards) <= 12  # what is inserted may repeat samples, and be read as several
            seen["faulty" if shards.report().faults else "sound"] += 1
            assert str(shards.report())
        except VitrailError as error:
            assert error.problem and error.remedy
            seen["refused"] += 1
    return seen


def test_a_few_mutated_shards(samples, tmp_path):
    seen = fuzz(tmp_path, samples, 300, seed=1)
    assert min(seen.values()) > 5, seen  # every outcome is met


@pytest.mark.slow
def test_ten_thousand_mutated_shards(samples, tmp_path):
    seen = fuzz(tmp_path, samples, 10_000, seed=0)
    assert min(seen.values()) > 100, seen
