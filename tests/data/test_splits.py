"""Splits without leakage: on synthetic images, and nightly on the real emoji of four vendors."""

import shutil
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageDraw

from vitrail.data.image_readers import ImageRecord, open_images
from vitrail.data.sources import SOURCES
from vitrail.data.splits import (
    MAX_DISTANCE,
    ImageFingerprints,
    collect_records,
    compute_fingerprints,
    compute_perceptual_hash,
    count_leaks,
    find_near_pairs,
    get_concept,
    make_thumbnail,
    split_images,
)
from vitrail.errors import ConfigError, DataError

NO_LEAKS = {"ids": 0, "keys": 0, "images": 0, "near_duplicates": 0}


class SyntheticReader:
    """Images of one vendor: random shapes, determined by key and style."""

    def __init__(self, vendor: str, keys: Sequence[str], style: int):
        self.vendor, self.keys, self.style = vendor, keys, style

    def __len__(self) -> int:
        return len(self.keys)

    def get_record(self, item: int) -> ImageRecord:
        key = self.keys[item]
        return ImageRecord(f"{self.vendor}/{key}", self.vendor, key, f"thing {key}")

    def load_rgba(self, item: int, image_size: int | None = None) -> np.ndarray:
        side = image_size or 64
        rng = np.random.default_rng([self.style, *self.keys[item].encode()])
        image = Image.new("RGBA", (256, 256))
        for _ in range(6):
            x, y, w, h = rng.integers(0, 200, 4)
            colour = (*rng.integers(0, 256, 3).tolist(), 255)
            ImageDraw.Draw(image).ellipse((int(x), int(y), int(x + w / 2 + 20), int(y + h / 2 + 20)), fill=colour)
        return np.asarray(image.resize((side, side), Image.Resampling.LANCZOS))


def drawings(count: int = 60, borrowed: int = 0) -> tuple[SyntheticReader, SyntheticReader]:
    """Two vendors; some images of the second are copies of the first's."""
    keys = [f"1f{n:03x}" for n in range(count)]
    second = SyntheticReader("noto", keys, 2)
    first = SyntheticReader("twemoji", keys, 1)
    own = second.load_rgba
    second.load_rgba = lambda item, image_size=None: (first.load_rgba if item < borrowed else own)(item, image_size)  # type: ignore[method-assign]
    return first, second


# ---- looks ------------------------------------------------------------------------------------------------------


def hamming_distance(a: int, b: int) -> int:
    return int(int(a) ^ int(b)).bit_count()


def hash_of(rgba: np.ndarray) -> int:
    return int(compute_perceptual_hash(make_thumbnail(rgba)[None])[0])


@pytest.mark.parametrize("item", range(8))
def test_hash_is_stable_under_resizing_padding_and_darkening(item):
    picture = SyntheticReader("twemoji", [f"1f{n:03x}" for n in range(8)], 1)
    original, large = picture.load_rgba(item, 64), picture.load_rgba(item, 200)
    wider = np.zeros((90, 90, 4), np.uint8)
    wider[11:75, 9:73] = original
    darker = original.copy()
    darker[..., :3] = darker[..., :3] // 10 * 9
    for other in (large, wider, darker):
        assert hamming_distance(hash_of(original), hash_of(other)) <= MAX_DISTANCE


def test_hashes_of_different_images_differ():
    of = SyntheticReader("twemoji", [f"1f{n:03x}" for n in range(40)], 1)
    looks = compute_fingerprints(of).perceptual
    distances = [hamming_distance(looks[i], looks[j]) for i in range(40) for j in range(i)]
    assert min(distances) > MAX_DISTANCE and 24 < np.mean(distances) < 40


def test_noise_does_not_change_the_hash_of_flat_images():
    grey = np.full((1, 32, 32), 100.0)
    assert (
        compute_perceptual_hash(grey)
        == compute_perceptual_hash(grey + 1e-7 * np.random.default_rng(0).normal(size=grey.shape))
        == 0
    )


def test_thumbnail_of_a_transparent_image():
    assert make_thumbnail(np.zeros((5, 9, 4), np.uint8)).shape == (32, 32)


@given(
    st.lists(st.integers(0, 2**64 - 1), max_size=30),
    st.lists(st.integers(0, 2**64 - 1), max_size=30),
    st.integers(0, 40),
)
def test_near_pairs_equal_brute_force(a, b, within):
    b = [*b, *(value ^ 0b1011 for value in a[:5])]
    found = find_near_pairs(np.array(a, np.uint64), np.array(b, np.uint64), within)
    expected = {(i, j) for i, x in enumerate(a) for j, y in enumerate(b) if hamming_distance(x, y) <= within}
    assert set(zip(*(side.tolist() for side in found), strict=True)) == expected and len(found[0]) == len(expected)


# ---- splits -----------------------------------------------------------------------------------------------------


def test_unseen_concepts():
    sets = drawings()
    known, hash_of = collect_records(*sets), compute_fingerprints(*sets)
    parts = split_images(known, "concepts", hash_of, test_fraction=0.3)
    assert count_leaks(parts, known, hash_of) == NO_LEAKS and not len(parts.dropped)
    assert sorted([*parts.train, *parts.test]) == list(range(120)) and 15 < len(parts.test) < 60
    splits = [{known[row].key for row in side} for side in (parts.train, parts.test)]
    assert not splits[0] & splits[1]  # both vendors of a codepoint are in one split


def test_split_depends_on_the_concept_only():
    sets = drawings()
    known, hash_of = collect_records(*sets), compute_fingerprints(*sets)
    tests = {known[row].id for row in split_images(known, "concepts", hash_of, test_fraction=0.3).test}
    some = np.random.default_rng(0).permutation(120)[:70]  # a subset in another order
    fewer = [known[row] for row in some]
    parts = split_images(
        fewer, "concepts", ImageFingerprints(hash_of.exact[some], hash_of.perceptual[some]), test_fraction=0.3
    )
    assert {fewer[row].id for row in parts.test} == tests & {about.id for about in fewer}
    other = split_images(known, "concepts", hash_of, test_fraction=0.3, seed=1)
    assert {known[row].id for row in other.test} != tests


def test_groups_are_not_separated():
    rng = np.random.default_rng(0)
    known = [
        ImageRecord("noto/1f44b", "noto", "1f44b", "waving hand"),
        ImageRecord("noto/1f44b-1f3fd", "noto", "1f44b-1f3fd", "waving hand: medium skin tone"),
        ImageRecord("tuxpaint/a/hand", "tuxpaint", "a/hand", "Waving Hand"),  # the same name
        ImageRecord("tuxpaint/b/glove", "tuxpaint", "b/glove", "glove"),  # near-duplicate of the hand with a skin tone
    ]
    known += [ImageRecord(f"openclipart/{n}", "openclipart", f"{n}", f"thing {n}") for n in range(40)]
    looks = rng.integers(0, 2**63, 44, dtype=np.uint64)
    looks[3] = looks[1] ^ np.uint64(0b101)
    hash_of = ImageFingerprints(np.arange(44, dtype=np.uint64), looks)
    for seed in range(20):
        parts = split_images(known, "concepts", hash_of, test_fraction=0.5, seed=seed)
        assert len({0, 1, 2, 3} & set(parts.test.tolist())) in (0, 4)
        assert count_leaks(parts, known, hash_of) == NO_LEAKS
    # Without the near-duplicate they are separated, for some seed.
    apart = ImageFingerprints(hash_of.exact, np.where(np.arange(44) == 3, looks[3] ^ np.uint64(0xFFFFFFFF), looks))
    assert any(
        (split_images(known, "concepts", apart, test_fraction=0.5, seed=s).test[:4] == 3).any() for s in range(20)
    )


def test_an_unseen_vendor():
    sets = drawings(borrowed=7)
    known, hash_of = collect_records(*sets), compute_fingerprints(*sets)
    parts = split_images(known, "vendor", hash_of, vendor="noto")
    assert {known[row].vendor for row in parts.train} == {"twemoji"} and len(parts.train) == 60
    assert parts.dropped.tolist() == list(range(60, 67)) and parts.test.tolist() == list(range(67, 120))
    assert count_leaks(parts, known, hash_of) == NO_LEAKS
    assert parts.describe() == "60 train, 53 test, 7 dropped"


def test_leaks_are_counted():
    sets = drawings(borrowed=7)
    known, hash_of = collect_records(*sets), compute_fingerprints(*sets)
    careless = split_images(known, "vendor", hash_of, vendor="noto")._replace(
        test=np.arange(60, 120), dropped=np.arange(0)
    )
    assert count_leaks(careless, known, hash_of) == {"ids": 0, "keys": 0, "images": 7, "near_duplicates": 7}
    twice = careless._replace(test=careless.train[:3])
    assert count_leaks(twice, known, hash_of) == {"ids": 3, "keys": 3, "images": 3, "near_duplicates": 3}


def test_invalid_splits_are_refused():
    sets = drawings(3)
    known, hash_of = collect_records(*sets), compute_fingerprints(*sets)
    with pytest.raises(ConfigError, match="vendor 'notto' cannot be held out") as caught:
        split_images(known, "vendor", hash_of, vendor="notto")
    assert "'noto'" in caught.value.remedy
    with pytest.raises(ConfigError, match="leaves one split empty"):
        split_images(known, "concepts", hash_of, test_fraction=1.0)
    with pytest.raises(ConfigError, match="6 images, 5 fingerprints"):
        split_images(known, "concepts", ImageFingerprints(hash_of.exact[:5], hash_of.perceptual[:5]))
    with pytest.raises(ConfigError, match="cannot be held out"):
        split_images(
            known[:3], "vendor", ImageFingerprints(hash_of.exact[:3], hash_of.perceptual[:3]), vendor="twemoji"
        )


# ---- the real thing ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_real_emoji_of_four_vendors(record_property):
    pytest.importorskip("resvg_py")
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    vendors = [name for name in ("twemoji", "noto", "fluent", "openmoji") if name in SOURCES]
    try:
        sets = [open_images(name) for name in vendors]
    except DataError as error:
        if "failed to fetch" in error.problem:
            pytest.skip(error.problem)
        raise
    known, hash_of = collect_records(*sets), compute_fingerprints(*sets)
    for kind, vendor in [("concepts", ""), *(("vendor", vendor) for vendor in vendors)]:
        parts = split_images(known, kind, hash_of, vendor=vendor)
        record_property(f"{kind} {vendor}".strip(), parts.describe())
        assert count_leaks(parts, known, hash_of) == NO_LEAKS
        # The same, computed by brute force.
        for row in parts.test[:: max(1, len(parts.test) // 50)].tolist():
            assert (
                min(
                    hamming_distance(hash_of.perceptual[row], other)
                    for other in hash_of.perceptual[parts.train].tolist()
                )
                > MAX_DISTANCE
            )
        assert len(parts.train) > 8 * len(parts.dropped) and len(parts.test) > len(known) / 20
        assert len(parts.train) + len(parts.test) + len(parts.dropped) == len(known)
        if kind == "concepts":
            assert not {get_concept(known[row]) for row in parts.train} & {
                get_concept(known[row]) for row in parts.test
            }
