"""Mutations of valid files, as functions of a random number generator."""

import copy
import json
import math
import random
import struct
from collections.abc import Callable, Iterator
from typing import Any

Mutation = Callable[[bytes, random.Random], bytes]

VALUES = [
    None,
    True,
    -1,
    0,
    7,
    2**31,
    2**63,
    10**30,
    10**400,
    1e308,
    math.inf,
    math.nan,
    -0.5,
    1e-300,
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
    "\ud800",
    [],
    [[]],
    [1, 2, 3, 4],
    {},
    {"size": [10**9, 10**9], "counts": [10**18]},
    {"id": 1},
]
BYTES = [
    b"\xef\xbb\xbf",
    b"\xff\xfe",
    b"\x00",
    b'"',
    b"\t",
    b"\n",
    b"\r",
    b"{",
    b"]",
    b",",
    b"9" * 5000,
    b"[" * 5000,
    b'{"a":' * 5000,
    b"1e999",
]
NUMBERS = [0, 1, 0x7F, 0x80, 0xFF, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1]


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    """Change, remove, insert or repeat bytes at one to four places, half of them near the start or the end."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        near = rng.randrange(4)
        reach = min(len(changed), 400)
        position = rng.randrange(reach + 1) if near == 0 else rng.randrange(len(changed) + 1)
        if near == 1:
            position = len(changed) - rng.randrange(reach + 1)
        _change_at(changed, position, rng)
    return bytes(changed)


def _change_at(changed: bytearray, position: int, rng: random.Random) -> None:
    match rng.randrange(8):
        case 0:
            if position < len(changed):
                changed[position] ^= 1 << rng.randrange(8)
        case 1:
            del changed[position:]
        case 2:
            changed[position:position] = rng.choice(BYTES)
        case 3:
            del changed[position : position + rng.choice((1, 4, 20, 512))]
        case 4:
            changed[position : position + 4] = rng.randbytes(4)
        case 5:
            changed[position:position] = changed[position : position + rng.randint(1, 200)]
        case 6:  # a number that a length or an offset may be
            form = rng.choice(("<H", "<I", "<Q", ">I", "B"))
            size = struct.calcsize(form)
            changed[position : position + size] = struct.pack(form, rng.choice(NUMBERS) % 2 ** (8 * size))
        case _:
            start, length = rng.randrange(len(changed) + 1), rng.choice((1, 30, 512))
            changed[position : position + length] = changed[start : start + length]


def mutate_tree(tree: Any, rng: random.Random, values: list[Any] = VALUES) -> Any:
    """Delete, rename, repeat, move or replace something at a random position of plain data."""
    places = list(list_places(tree))
    if not places:
        return copy.deepcopy(rng.choice(values))
    holder, key = rng.choice(places)
    match rng.randrange(6):
        case 0:
            del holder[key]
        case 1 if isinstance(holder, list):
            holder.insert(key, holder[key])
        case 1:
            holder[rng.choice(["id", "x", "type", "question", key.upper()])] = holder.pop(key)
        case 2:
            other, name = rng.choice(places)
            holder[key] = json.loads(json.dumps(other[name]))
        case 3 if isinstance(holder[key], int | float) and not isinstance(holder[key], bool):
            holder[key] = rng.choice([holder[key] * 2, holder[key] + 1, holder[key] // 2, -holder[key], 10**9])
        case _:
            holder[key] = copy.deepcopy(rng.choice(values))  # a later mutation may change it
    return tree


def list_places(tree: Any) -> Iterator[tuple[Any, Any]]:
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        yield tree, key
        yield from list_places(value)


def mutate_json(data: bytes, rng: random.Random, values: list[Any] = VALUES) -> bytes:
    """Mutate the values of JSON or of one row of JSON lines, or else the bytes."""
    if rng.random() < 0.35:
        return mutate_bytes(data, rng)
    if rng.random() < 0.03:
        return nest(rng)
    try:
        tree = json.loads(data)
    except ValueError:
        return mutate_rows(data, rng, values)
    for _ in range(rng.choice((1, 1, 2, 3))):
        tree = mutate_tree(tree, rng, values)
    return json.dumps(tree, ensure_ascii=True).encode()


def mutate_rows(data: bytes, rng: random.Random, values: list[Any] = VALUES) -> bytes:
    """Mutate one row of JSON lines, or else the bytes."""
    rows = data.splitlines()
    try:
        position = rng.randrange(len(rows))
        rows[position] = json.dumps(mutate_tree(json.loads(rows[position]), rng, values)).encode()
    except ValueError:
        return mutate_bytes(data, rng)
    return b"\n".join(rows)


def nest(rng: random.Random) -> bytes:
    """Deeply nested JSON."""
    depth, (opening, closing) = rng.choice((100, 1000, 100_000)), rng.choice((("[", "]"), ('{"a":', "}")))
    return (opening * depth + "1" + closing * depth).encode()


def mutate_header(data: bytes, rng: random.Random) -> bytes:
    """Mutate the JSON header of a safetensors file, or the bytes of the file."""
    if rng.random() < 0.3 or len(data) < 8:
        return mutate_bytes(data, rng)
    length = struct.unpack("<Q", data[:8])[0]
    try:
        header = mutate_json(data[8 : 8 + length], rng)
    except ValueError:
        return mutate_bytes(data, rng)
    size = len(header) if rng.random() < 0.9 else rng.choice(NUMBERS)
    return struct.pack("<Q", size) + header + data[8 + length :]


def mutate_text(words: list[str]) -> Mutation:
    """Return a mutation that inserts, replaces and repeats words and characters of a text."""

    def mutate(data: bytes, rng: random.Random) -> bytes:
        if rng.random() < 0.4:
            return mutate_bytes(data, rng)
        lines = data.decode().splitlines(keepends=True) or [""]
        for _ in range(rng.choice((1, 1, 2, 3))):
            n = rng.randrange(len(lines))
            match rng.randrange(5):
                case 0:
                    lines.insert(n, lines[rng.randrange(len(lines))])
                case 1 if len(lines) > 1:
                    del lines[n]
                case 2:
                    lines.insert(n, rng.choice(words) + "\n")
                case 3:
                    at = rng.randrange(len(lines[n]) + 1)
                    lines[n] = lines[n][:at] + rng.choice(words) + lines[n][at:]
                case _:
                    parts = lines[n].split(" ")
                    parts[rng.randrange(len(parts))] = rng.choice(words)
                    lines[n] = " ".join(parts)
        return "".join(lines).encode()

    return mutate
