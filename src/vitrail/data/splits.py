"""Splits that test generalisation: concepts never seen, or a vendor never seen, with nothing that leaks across.

A side follows from hashes of keys, so it is the same on every machine and in every run. Pictures that look nearly alike
never lie on two sides: where concepts are split they stay together, where a vendor is held out its lookalikes of the
others are dropped, and counted.

Axes: N pictures, P pairs, S side of a thumbnail, F frequencies a side.
"""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import numpy as np
from PIL import Image

from vitrail.data.pictures.emoji import VENDORS, without_tone
from vitrail.data.pictures.record import About, Pictures
from vitrail.data.sources.progress import bar
from vitrail.errors import ConfigError, nearest

SIDE = 64  # at which pictures are looked at
S, F = 32, 8
NEAR = 6  # of 64 bits: the same drawing resized, re-encoded or slightly altered
BLOCK = 1024
Kind = Literal["concepts", "vendor"]


class Prints(NamedTuple):
    """Fingerprints: equal `exact` is the same picture, `look` of few different bits nearly the same."""

    exact: np.ndarray  # (N,) uint64
    look: np.ndarray  # (N,) uint64


class Split(NamedTuple):
    """Rows of each side, and the rows that would leak and are on neither."""

    train: np.ndarray
    test: np.ndarray
    dropped: np.ndarray

    def says(self) -> str:
        return f"{len(self.train):,} train, {len(self.test):,} test, {len(self.dropped):,} dropped"


def split(
    abouts: Sequence[About],
    kind: Kind,
    prints: Prints,
    *,
    vendor: str = "",
    share: float = 0.1,
    near: int = NEAR,
    seed: int = 0,
) -> Split:
    """Cut pictures in two.

    `concepts`: about a `share` of all concepts is for testing. Every vendor's picture of a codepoint, its skin tones,
    pictures of one name, and pictures that look nearly alike go to one side together.
    `vendor`: the pictures of `vendor` are for testing, those of the others for training.
    """
    if len(abouts) != len(prints.exact) or not 0 <= near < 64:
        raise ConfigError(
            f"{len(abouts)} pictures, {len(prints.exact)} prints, {near} of 64 bits", "give one print a picture"
        )
    if kind == "concepts":
        if not 0 < share < 1:
            raise ConfigError(f"a share of {share} leaves one side empty", "give a number between 0 and 1")
        groups = _together(abouts, prints, near)
        test = np.array([_part(group, seed) < share for group in groups], dtype=bool)
        drop = np.zeros_like(test)
    else:
        vendors = {about.vendor for about in abouts}
        if vendor not in vendors or len(vendors) < 2:
            raise ConfigError(f"no vendor {vendor!r} to hold out of others", nearest(vendor, sorted(vendors)))
        test = np.array([about.vendor == vendor for about in abouts])
        (held,), (others,) = test.nonzero(), (~test).nonzero()
        drop = np.zeros_like(test)
        drop[held[near_pairs(prints.look[held], prints.look[others], near)[0]]] = True
    return Split(*(mask.nonzero()[0] for mask in (~test & ~drop, test & ~drop, drop)))


def leaks(parts: Split, abouts: Sequence[About], prints: Prints, near: int = NEAR) -> dict[str, int]:
    """How much the two sides share: ids, (vendor, key) pairs, pictures, and pairs that look nearly alike."""
    sides = parts.train, parts.test
    ids, keys = ([{of(abouts[row]) for row in side} for side in sides] for of in (_id, _key))
    exact = [set(prints.exact[side].tolist()) for side in sides]
    pairs, _ = near_pairs(prints.look[parts.train], prints.look[parts.test], near)
    shared = {"ids": ids, "keys": keys, "pictures": exact}
    return {**{what: len(train & test) for what, (train, test) in shared.items()}, "lookalikes": len(pairs)}


def abouts(*sets: Pictures) -> list[About]:
    """What is known of the pictures of several sets, one behind the other."""
    return [pictures.about(item) for pictures in sets for item in range(len(pictures))]


def prints(*sets: Pictures) -> Prints:
    """The fingerprints of several sets, one behind the other."""
    total = sum(map(len, sets))
    exact, greys = np.zeros(total, np.uint64), np.zeros((total, S, S), np.float32)
    row = 0
    with bar("looking at pictures", total, unit="picture") as progress:
        for pictures in sets:
            for item in range(len(pictures)):
                rgba = pictures.rgba(item, SIDE)
                digest = hashlib.blake2b(repr(rgba.shape).encode() + rgba.tobytes(), digest_size=8).digest()
                exact[row], greys[row] = int.from_bytes(digest, "little"), thumbnail(rgba)
                row += 1
                progress.update()
    return Prints(exact, look(greys))


def thumbnail(rgba: np.ndarray) -> np.ndarray:
    """(H, W, 4) → (S, S) brightness over white, cropped to what is opaque: margins differ between vendors."""
    (x0, x1), (y0, y1) = (_extent(rgba[..., 3].max(axis) / 255) for axis in (0, 1))
    image = Image.fromarray(rgba).resize((S, S), Image.Resampling.BILINEAR, box=(x0, y0, x1, y1))
    small = np.asarray(image, np.float32)
    opacity = small[..., 3] / 255
    return small[..., :3] @ np.array([0.299, 0.587, 0.114], np.float32) * opacity + 255 * (1 - opacity)


def _extent(opacity: np.ndarray) -> tuple[float, float]:
    """From where to where a row of pixels is opaque, to a fraction of a pixel: the same at every size."""
    (filled,) = (opacity > 1 / 16).nonzero()
    if not len(filled):
        return 0, len(opacity)
    start, end = filled[0] + 1 - opacity[filled[0]], filled[-1] + opacity[filled[-1]]
    return (start, end) if end - start >= 1 else (filled[0], filled[-1] + 1)


def look(greys: np.ndarray) -> np.ndarray:
    """(N, S, S) → (N,) 64 bits: which of the F × F lowest cosine frequencies lie above their median."""
    angle = np.pi * (np.arange(S) + 0.5) * np.arange(F)[:, None] / S
    waves = np.cos(angle) * np.sqrt(2 / S)  # (F, S)
    strength = np.einsum("fi,nij,gj->nfg", waves, greys.astype(np.float64), waves).reshape(-1, F * F)
    strength = np.round(strength, 2)  # or noise decides where a symmetric picture has nothing
    middle = np.median(strength[:, 1:], axis=1, keepdims=True)
    bits = strength > middle
    bits[:, 0] = False  # mean brightness is no feature
    return np.packbits(bits, axis=1).view(np.uint64)[:, 0]


def near_pairs(a: np.ndarray, b: np.ndarray, within: int) -> tuple[np.ndarray, np.ndarray]:
    """The rows (P,) of `a` and of `b` whose looks differ in at most `within` bits."""
    right = _signs(b)
    rows, columns = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    with bar("comparing", len(a), unit="picture") as progress:
        for start in range(0, len(a), BLOCK):
            # Of 64 signs, each bit that differs takes two from the sum of products.
            found = _signs(a[start : start + BLOCK]) @ right.T >= 64 - 2 * within
            i, j = found.nonzero()
            rows.append(i + start)
            columns.append(j)
            progress.update(len(found))
    return np.concatenate(rows), np.concatenate(columns)


def _signs(looks: np.ndarray) -> np.ndarray:
    """(N,) 64 bits → (N, 64) of ±1, whose products add up exactly in float32"""
    bits = np.unpackbits(np.ascontiguousarray(looks).view(np.uint8).reshape(-1, 8), axis=1)
    return bits.astype(np.float32) * 2 - 1


def concept(about: About) -> str:
    """What a picture shows, whoever drew it: its codepoint without skin tone, or else its name."""
    return without_tone(about.key) if about.vendor in VENDORS else about.name.lower()


def _together(abouts: Sequence[About], prints: Prints, near: int) -> list[str]:
    """For every picture the name of the group that must not be parted: the smallest concept in it."""
    parent = list(range(len(abouts)))

    def root(row: int) -> int:
        while parent[row] != row:
            parent[row] = row = parent[parent[row]]
        return row

    def join(pairs: Iterable[tuple[int, int]]) -> None:
        for a, b in pairs:
            parent[root(a)] = root(b)

    first: dict[str, int] = {}
    for row, about in enumerate(abouts):
        join((row, first.setdefault(mark, row)) for mark in (f"concept {concept(about)}", f"name {about.name.lower()}"))
    join(zip(*(side.tolist() for side in near_pairs(prints.look, prints.look, near)), strict=True))
    names: dict[int, str] = {}
    for row, about in enumerate(abouts):
        names[root(row)] = min(names.get(root(row), concept(about)), concept(about))
    return [names[root(row)] for row in range(len(abouts))]


def _part(name: str, seed: int) -> float:
    """A number in [0, 1) that depends on the name and the seed only."""
    return int.from_bytes(hashlib.blake2b(f"{seed},{name}".encode(), digest_size=8).digest(), "little") / 2**64


def _id(about: About) -> str:
    return about.id


def _key(about: About) -> tuple[str, str]:
    return about.vendor, about.key
