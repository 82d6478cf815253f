"""Splits that nothing leaks across: on made-up pictures here, nightly on the real emoji of four vendors."""

import shutil
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageDraw

from vitrail.data.pictures import About, pictures
from vitrail.data.sources import SOURCES
from vitrail.data.splits import NEAR, Prints, abouts, concept, leaks, look, near_pairs, prints, split, thumbnail
from vitrail.errors import ConfigError, DataError

NOTHING = {"ids": 0, "keys": 0, "pictures": 0, "lookalikes": 0}


class Drawn:
    """Pictures of one vendor: a few random shapes, the same for the same (key, style)."""

    def __init__(self, vendor: str, keys: Sequence[str], style: int):
        self.vendor, self.keys, self.style = vendor, keys, style

    def __len__(self) -> int:
        return len(self.keys)

    def about(self, item: int) -> About:
        key = self.keys[item]
        return About(f"{self.vendor}/{key}", self.vendor, key, f"thing {key}")

    def rgba(self, item: int, side: int | None = None) -> np.ndarray:
        side = side or 64
        rng = np.random.default_rng([self.style, *self.keys[item].encode()])
        image = Image.new("RGBA", (256, 256))
        for _ in range(6):
            x, y, w, h = rng.integers(0, 200, 4)
            colour = (*rng.integers(0, 256, 3).tolist(), 255)
            ImageDraw.Draw(image).ellipse((int(x), int(y), int(x + w / 2 + 20), int(y + h / 2 + 20)), fill=colour)
        return np.asarray(image.resize((side, side), Image.Resampling.LANCZOS))


def drawings(count: int = 60, borrowed: int = 0) -> tuple[Drawn, Drawn]:
    """Two vendors; of the second, some pictures are the first's."""
    keys = [f"1f{n:03x}" for n in range(count)]
    second = Drawn("noto", keys, 2)
    first = Drawn("twemoji", keys, 1)
    own = second.rgba
    second.rgba = lambda item, side=None: (first.rgba if item < borrowed else own)(item, side)  # type: ignore[method-assign]
    return first, second


# ---- looks ------------------------------------------------------------------------------------------------------


def bits(a: int, b: int) -> int:
    return int(int(a) ^ int(b)).bit_count()


def seen(rgba: np.ndarray) -> int:
    return int(look(thumbnail(rgba)[None])[0])


@pytest.mark.parametrize("item", range(8))
def test_one_picture_looks_alike_however_it_is_kept(item):
    picture = Drawn("twemoji", [f"1f{n:03x}" for n in range(8)], 1)
    whole, large = picture.rgba(item, 64), picture.rgba(item, 200)
    wider = np.zeros((90, 90, 4), np.uint8)
    wider[11:75, 9:73] = whole
    darker = whole.copy()
    darker[..., :3] = darker[..., :3] // 10 * 9
    for other in (large, wider, darker):
        assert bits(seen(whole), seen(other)) <= NEAR


def test_different_pictures_look_different():
    of = Drawn("twemoji", [f"1f{n:03x}" for n in range(40)], 1)
    looks = prints(of).look
    distances = [bits(looks[i], looks[j]) for i in range(40) for j in range(i)]
    assert min(distances) > NEAR and 24 < np.mean(distances) < 40


def test_noise_does_not_decide_where_there_is_nothing():
    grey = np.full((1, 32, 32), 100.0)
    assert look(grey) == look(grey + 1e-7 * np.random.default_rng(0).normal(size=grey.shape)) == 0


def test_nothing_to_see():
    assert thumbnail(np.zeros((5, 9, 4), np.uint8)).shape == (32, 32)


@given(
    st.lists(st.integers(0, 2**64 - 1), max_size=30),
    st.lists(st.integers(0, 2**64 - 1), max_size=30),
    st.integers(0, 40),
)
def test_near_pairs_are_all_and_only_those(a, b, within):
    b = [*b, *(value ^ 0b1011 for value in a[:5])]
    found = near_pairs(np.array(a, np.uint64), np.array(b, np.uint64), within)
    expected = {(i, j) for i, x in enumerate(a) for j, y in enumerate(b) if bits(x, y) <= within}
    assert set(zip(*(side.tolist() for side in found), strict=True)) == expected and len(found[0]) == len(expected)


# ---- splits -----------------------------------------------------------------------------------------------------


def test_unseen_concepts():
    sets = drawings()
    known, seen = abouts(*sets), prints(*sets)
    parts = split(known, "concepts", seen, share=0.3)
    assert leaks(parts, known, seen) == NOTHING and not len(parts.dropped)
    assert sorted([*parts.train, *parts.test]) == list(range(120)) and 15 < len(parts.test) < 60
    sides = [{known[row].key for row in side} for side in (parts.train, parts.test)]
    assert not sides[0] & sides[1]  # both vendors of a codepoint on one side


def test_a_side_depends_on_the_concept_alone():
    sets = drawings()
    known, seen = abouts(*sets), prints(*sets)
    tests = {known[row].id for row in split(known, "concepts", seen, share=0.3).test}
    some = np.random.default_rng(0).permutation(120)[:70]  # fewer, in another order
    fewer = [known[row] for row in some]
    parts = split(fewer, "concepts", Prints(seen.exact[some], seen.look[some]), share=0.3)
    assert {fewer[row].id for row in parts.test} == tests & {about.id for about in fewer}
    other = split(known, "concepts", seen, share=0.3, seed=1)
    assert {known[row].id for row in other.test} != tests


def test_what_must_not_be_parted_is_not():
    rng = np.random.default_rng(0)
    known = [
        About("noto/1f44b", "noto", "1f44b", "waving hand"),
        About("noto/1f44b-1f3fd", "noto", "1f44b-1f3fd", "waving hand: medium skin tone"),
        About("tuxpaint/a/hand", "tuxpaint", "a/hand", "Waving Hand"),  # the same name
        About("tuxpaint/b/glove", "tuxpaint", "b/glove", "glove"),  # looks like the hand with a skin tone
    ]
    known += [About(f"openclipart/{n}", "openclipart", f"{n}", f"thing {n}") for n in range(40)]
    looks = rng.integers(0, 2**63, 44, dtype=np.uint64)
    looks[3] = looks[1] ^ np.uint64(0b101)
    seen = Prints(np.arange(44, dtype=np.uint64), looks)
    for seed in range(20):
        parts = split(known, "concepts", seen, share=0.5, seed=seed)
        assert len({0, 1, 2, 3} & set(parts.test.tolist())) in (0, 4)
        assert leaks(parts, known, seen) == NOTHING
    # Without the print they part, for some seed.
    apart = Prints(seen.exact, np.where(np.arange(44) == 3, looks[3] ^ np.uint64(0xFFFFFFFF), looks))
    assert any((split(known, "concepts", apart, share=0.5, seed=s).test[:4] == 3).any() for s in range(20))


def test_an_unseen_vendor():
    sets = drawings(borrowed=7)
    known, seen = abouts(*sets), prints(*sets)
    parts = split(known, "vendor", seen, vendor="noto")
    assert {known[row].vendor for row in parts.train} == {"twemoji"} and len(parts.train) == 60
    assert parts.dropped.tolist() == list(range(60, 67)) and parts.test.tolist() == list(range(67, 120))
    assert leaks(parts, known, seen) == NOTHING
    assert parts.says() == "60 train, 53 test, 7 dropped"


def test_leaks_are_found():
    sets = drawings(borrowed=7)
    known, seen = abouts(*sets), prints(*sets)
    careless = split(known, "vendor", seen, vendor="noto")._replace(test=np.arange(60, 120), dropped=np.arange(0))
    assert leaks(careless, known, seen) == {"ids": 0, "keys": 0, "pictures": 7, "lookalikes": 7}
    twice = careless._replace(test=careless.train[:3])
    assert leaks(twice, known, seen) == {"ids": 3, "keys": 3, "pictures": 3, "lookalikes": 3}


def test_splits_that_cannot_be():
    sets = drawings(3)
    known, seen = abouts(*sets), prints(*sets)
    with pytest.raises(ConfigError, match="no vendor 'notto'") as caught:
        split(known, "vendor", seen, vendor="notto")
    assert "'noto'" in caught.value.remedy
    with pytest.raises(ConfigError, match="leaves one side empty"):
        split(known, "concepts", seen, share=1.0)
    with pytest.raises(ConfigError, match="6 pictures, 5 prints"):
        split(known, "concepts", Prints(seen.exact[:5], seen.look[:5]))
    with pytest.raises(ConfigError, match="no vendor"):
        split(known[:3], "vendor", Prints(seen.exact[:3], seen.look[:3]), vendor="twemoji")


# ---- the real thing ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_real_emoji_of_four_vendors(record_property):
    pytest.importorskip("resvg_py")
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    vendors = [name for name in ("twemoji", "noto", "fluent", "openmoji") if name in SOURCES]
    try:
        sets = [pictures(name) for name in vendors]
    except DataError as error:
        if "could not fetch" in error.problem:
            pytest.skip(error.problem)
        raise
    known, seen = abouts(*sets), prints(*sets)
    for kind, vendor in [("concepts", ""), *(("vendor", vendor) for vendor in vendors)]:
        parts = split(known, kind, seen, vendor=vendor)
        record_property(f"{kind} {vendor}".strip(), parts.says())
        assert leaks(parts, known, seen) == NOTHING
        # The same, counted another way.
        for row in parts.test[:: max(1, len(parts.test) // 50)].tolist():
            assert min(bits(seen.look[row], other) for other in seen.look[parts.train].tolist()) > NEAR
        assert len(parts.train) > 8 * len(parts.dropped) and len(parts.test) > len(known) / 20
        assert len(parts.train) + len(parts.test) + len(parts.dropped) == len(known)
        if kind == "concepts":
            assert not {concept(known[row]) for row in parts.train} & {concept(known[row]) for row in parts.test}
