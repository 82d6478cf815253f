"""Mutated files of every format give samples or a VitrailError, and no path leads out of the folder.

With the 2,000 videos of `tests/data/test_video.py`, the slow test covers 10,000 files.
"""

import json
import random
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from vitrail.data.formats import detect_format, open_dataset
from vitrail.errors import VitrailError

VALUES = [
    None,
    True,
    -1,
    0,
    7,
    10**30,
    10**400,
    1e308,
    -0.5,
    "",
    "a",
    "\x00",
    "yes",
    "../../../../etc/passwd",
    "/etc/passwd",
    "/dev/zero",
    "x" * 10_000,
    "<image>" * 50,
    "🙂\u2028",
    [],
    [[]],
    [1, 2, 3, 4],
    {},
    {"size": [10**9, 10**9], "counts": [10**18]},
    {"id": 1},
]
BYTES = [b"\xef\xbb\xbf", b"\xff\xfe", b"\x00", b'"', b"\t", b"\n", b"\r", b"{", b"]", b",", b"9" * 5000, b"[" * 5000]


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        position = rng.randrange(len(changed) + 1)
        choice = rng.randrange(6)
        if choice == 0 and position < len(changed):
            changed[position] ^= 1 << rng.randrange(8)
        elif choice == 1:
            del changed[position:]
        elif choice == 2:
            changed[position:position] = rng.choice(BYTES)
        elif choice == 3:
            del changed[position : position + rng.randint(1, 20)]
        elif choice == 4:
            changed[position : position + 4] = rng.randbytes(4)
        else:
            changed[position:position] = changed[position : position + rng.randint(1, 200)]
    return bytes(changed)


def mutate_tree(tree: Any, rng: random.Random) -> Any:
    """Delete, rename, repeat or replace something at a random position."""
    places = list(_places(tree))
    if not places:
        return rng.choice(VALUES)
    holder, key = rng.choice(places)
    match rng.randrange(4):
        case 0:
            del holder[key]
        case 1 if isinstance(holder, list):
            holder.insert(key, holder[key])
        case 1:
            holder[rng.choice(["id", "x", "question", key.upper()])] = holder.pop(key)
        case _:
            holder[key] = rng.choice(VALUES)
    return tree


def _places(tree: Any):
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        yield tree, key
        yield from _places(value)


def mutate(data: bytes, name: str, rng: random.Random) -> bytes:
    if rng.random() < 0.5 or not name.endswith((".json", ".jsonl")):
        return mutate_bytes(data, rng)
    try:
        return json.dumps(mutate_tree(json.loads(data), rng), ensure_ascii=rng.random() < 0.5).encode()
    except json.JSONDecodeError:  # JSON lines
        rows = data.splitlines()
        position = rng.randrange(len(rows))
        rows[position] = json.dumps(mutate_tree(json.loads(rows[position]), rng)).encode()
        return b"\n".join(rows)


def read_everything(kind: str, path: Path, options: dict[str, Any], root: Path) -> str:
    """Use everything that a sample offers."""
    with suppress(VitrailError):
        detect_format(path)
    try:
        samples = open_dataset(kind, path, **options)
    except VitrailError:
        return "not opened"
    outcome = "read"
    for number in range(len(samples)):
        try:
            sample = samples[number]
            assert sample.to_messages() is not None
            for index, picture in enumerate(sample.images):
                assert isinstance(picture, bytes) or picture.resolve().is_relative_to(root)
                sample.load_image(index)
            for thing in sample.instances:
                thing.to_mask(sample.size or (6, 8))
        except VitrailError:
            outcome = "partly read"
    return outcome


def fuzz(makers: dict[str, Any], root: Path, count: int) -> Counter[str]:
    rng = random.Random(0)
    made = {}
    for name, (kind, maker) in makers.items():
        (root / name).mkdir()
        made[name] = (kind, maker(root / name))
    valid = {file: file.read_bytes() for _, one in made.values() for file in one.files}
    outcomes: Counter[str] = Counter()
    names = list(made)
    for number in range(count):
        kind, one = made[names[number % len(names)]]
        file = rng.choice(one.files)
        file.write_bytes(mutate(valid[file], file.name, rng))
        try:
            outcomes[read_everything(kind, one.path, one.options, root.resolve())] += 1
        except BaseException as error:
            error.add_note(f"mutated file {number}, {file.name}: {file.read_bytes()[:2000]!r}")
            raise
        file.write_bytes(valid[file])
    assert sum(outcomes.values()) == count
    return outcomes


def test_three_hundred_mutated_files(makers, tmp_path):
    outcomes = fuzz(makers, tmp_path, 300)
    assert min(outcomes[outcome] for outcome in ("read", "partly read", "not opened")) > 5


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_eight_thousand_mutated_files(makers, tmp_path):
    outcomes = fuzz(makers, tmp_path, 8000)
    assert min(outcomes[outcome] for outcome in ("read", "partly read", "not opened")) > 100
