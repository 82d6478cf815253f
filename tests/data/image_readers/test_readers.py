"""Every reader on a small source in the layout of its package; nightly on the real sources."""

import math
import re
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from vitrail.data.image_readers import READERS, ImageReader, load_labelled_images, open_images
from vitrail.data.image_readers.clipart import extract_name
from vitrail.data.image_readers.emoji import (
    MISNAMED_TONES,
    SKIN_TONES,
    VENDORS,
    get_depicted_key,
    normalize_codepoints,
    remove_skin_tone,
)
from vitrail.data.image_readers.reader_files import stem_to_words
from vitrail.data.image_readers.rgba import MAX_ZOOM, read_rgba, trim_rgba
from vitrail.data.sources import SOURCES
from vitrail.errors import DataError, ImageError

RED = np.full((8, 6, 4), (255, 0, 0, 128), np.uint8)


def dot(level: int) -> np.ndarray:
    return np.full((4, 4, 4), (level, level, level, 255), np.uint8)


# ---- emoji ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "key"),
    [
        ("1F436", "1f436"),
        ("1F468-200D-1F33E", "1f468-200d-1f33e"),
        ("0023-FE0F-20E3", "0023-20e3"),
        ("23-fe0f-20e3", "0023-20e3"),
        ("a9", "00a9"),
        ("1f3f4-e0067_e0062_e0077_e006c_e0073", "1f3f4-e0067-e0062-e0077-e006c-e0073-e007f"),
        ("1F3F4-E0067-E0062-E0077-E006C-E0073-E007F", "1f3f4-e0067-e0062-e0077-e006c-e0073-e007f"),
        ("E0AB", "e0ab"),  # a private-use codepoint, not a tag
    ],
)
def test_codepoints_are_normalized(written, key):
    assert normalize_codepoints(written) == key


@given(st.lists(st.integers(0x20, 0x1FFFF).map(lambda n: f"{n:x}"), min_size=1, max_size=5))
def test_normalization_is_idempotent(points):
    key = normalize_codepoints("-".join(points))
    assert normalize_codepoints(key) == key == normalize_codepoints(key.upper())
    assert remove_skin_tone(remove_skin_tone(key)) == remove_skin_tone(key)


def test_skin_tones_are_removed():
    assert remove_skin_tone("1f468-1f3fd-200d-1f33e") == remove_skin_tone("1f468-200d-1f33e") == "1f468-200d-1f33e"
    assert remove_skin_tone("1f3fb") == "1f3fb"


def test_vendors_share_names(place, names):
    place("twemoji", {"package/img/twitter/64/1f436.png": RED, "package/img/twitter/64/0023-fe0f-20e3.png": dot(9)})
    place("fluent", {"package/assets/1f436.webp": RED, "package/assets/23-fe0f-20e3.webp": dot(3)})
    for vendor in ("twemoji", "fluent"):
        opened = open_images(vendor, names)
        hash_, dog = opened.get_record(0), opened.get_record(1)
        assert len(opened) == 2 and (hash_.key, dog.key) == ("0023-20e3", "1f436") and hash_.category == "symbols"
        assert dog.id == f"{vendor}/1f436" and dog.vendor == vendor and dog.name == "dog face"
        assert dog.keywords == ("pet", "woof") and dog.category == "animals-nature"
        assert dog.labels == {"en": "dog face", "de": "Hundegesicht"}
        assert np.array_equal(opened.load_rgba(1), RED)


def test_skin_tones_share_keywords_of_their_base(place, names):
    place("noto", {"package/img/google/64/1f468-1f3fd-200d-1f33e.png": RED})
    about = open_images("noto", names).get_record(0)
    assert about.name == "man farmer, medium" and about.keywords == ("plow",) and about.category == "people-body"


@pytest.mark.parametrize(
    ("vendor", "file", "key"),
    [
        ("fluent", "1f44d-1f3fc", "1f44d-1f3fd"),
        ("fluent", "1f468-1f3fd-200d-1f33e", "1f468-1f3fc-200d-1f33e"),
        ("fluent-flat", "1f44d-1f3fd", "1f44d-1f3fc"),
        ("fluent", "1f44d-1f3fe", "1f44d-1f3fe"),
        ("fluent", "1f44d", "1f44d"),
        ("fluent", "1f469-1f3fc-200d-1f4bb", "1f469-1f3fc-200d-1f4bb"),
        ("fluent", "1f46c-1f3fc", "1f46c-1f3fc"),
        ("fluent", "1f469-1f3fc-200d-2764-200d-1f468-1f3fc", "1f469-1f3fc-200d-2764-200d-1f468-1f3fc"),
        ("fluent", "1f91d-1f3fc", "1f91d-1f3fd"),  # a handshake shows hands, not two people
        ("fluent", "1f6b5-1f3fb", "1f6b5-1f3ff"),
        ("fluent", "1f6b5-1f3fc-200d-2640", "1f6b5-1f3fd-200d-2640"),
        ("fluent-flat", "1f6b5-1f3fb", "1f6b5-1f3fb"),
        ("noto", "1f44d-1f3fc", "1f44d-1f3fc"),
    ],
)
def test_misnamed_skin_tones_are_corrected(vendor, file, key):
    assert get_depicted_key(vendor, file) == key


@pytest.mark.parametrize("vendor", MISNAMED_TONES)
@given(st.lists(st.sampled_from(["1f6b5", "1f468", "200d", "1f4bb", "2764", *sorted(SKIN_TONES)]), min_size=1))
def test_correction_permutes_skin_tones(vendor, points):
    """Within a family, tones are only exchanged among themselves."""
    key = "-".join(["1f44d", *points])
    family = {"-".join(tone if p in SKIN_TONES else p for p in key.split("-")) for tone in SKIN_TONES}
    assert {get_depicted_key(vendor, file) for file in family} == family


def test_corrected_emoji_has_the_right_name(place, names):
    place("fluent", {"package/assets/1f468-1f3fc-200d-1f33e.webp": dot(7)})
    opened = open_images("fluent", names)
    assert opened.get_record(0).name == "man farmer, medium" and opened.load_rgba(0)[0, 0, 0] == 7


@pytest.mark.parametrize(("vendor", "ending"), [("fluent", "webp"), ("fluent-flat", "svg")])
def test_flags_of_other_vendors_are_left_out(place, names, vendor, ending):
    flags = ["1f1eb-1f1f7", "1f3f4-e0067_e0062_e0077_e006c_e0073"]
    picture = RED if ending == "webp" else "<svg/>"
    place(vendor, {f"package/assets/{key}.{ending}": picture for key in ("1f436", *flags)})
    opened = open_images(vendor, names)
    assert len(opened) == 1 and opened.get_record(0).id == f"{vendor}/1f436"


def test_first_of_duplicate_files_is_used(place, names):
    place("fluent", {"package/assets/0023-fe0f-20e3.webp": dot(1), "package/assets/23-fe0f-20e3.webp": dot(2)})
    opened = open_images("fluent", names)
    assert len(opened) == 1 and opened.load_rgba(0)[0, 0, 0] == 1


def test_openmoji_supplies_missing_names(place, names):
    pytest.importorskip("resvg_py")
    svg = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 72 72"><circle cx="36" cy="36" r="20"/></svg>'
    rows = [
        {"hexcode": key, "annotation": name, "group": group, "tags": "", "openmoji_tags": "fish, water, fish"}
        for key, name, group in (
            ("E000", "goldfish", "extras-openmoji"),
            ("1F436", "hound", "animals"),
            ("1F1E6", "A", "extras-unicode"),
        )
    ]
    drawings = {f"package/color/svg/{key}.svg": svg for key in ("E000", "1F436", "1F1E6")}
    place("openmoji", {**drawings, "package/data/openmoji.json": rows})
    opened = open_images("openmoji", names)
    letter, dog, fish = map(opened.get_record, range(3))
    assert dog.name == "dog face" and dog.category == "animals-nature"
    assert letter.name == "letter A" and letter.category == "extras-unicode"
    assert fish.name == "goldfish" and fish.keywords == ("fish", "water") and fish.labels == {"en": "goldfish"}
    assert opened.load_rgba(0, 50).shape == (50, 50, 4)


def test_emoji_without_a_name_is_refused(place, names):
    place("noto", {"package/img/google/64/1f999.png": RED})
    with pytest.raises(DataError, match="noto has 1f999, which has no name"):
        open_images("noto", names).get_record(0)


# ---- trimming ---------------------------------------------------------------------------------------------------


@given(st.integers(8, 40), st.integers(8, 40), st.integers(1, 40), st.data())
def test_trimmed_images_are_centred_and_reach_two_edges(H, W, side, data):
    top, left = data.draw(st.integers(0, H - 1)), data.draw(st.integers(0, W - 1))
    high, wide = data.draw(st.integers(1, H - top)), data.draw(st.integers(1, W - left))
    rgba = np.zeros((H, W, 4), np.uint8)
    rgba[top : top + high, left : left + wide] = np.random.default_rng(0).integers(40, 255, (high, wide, 4))
    assert trim_rgba(rgba, side).shape == (side, side, 4)
    square = max(high, wide, math.ceil(max(H, W) / MAX_ZOOM))
    made = trim_rgba(rgba, square)  # no resizing
    (y, x), (low, right) = (edge(np.nonzero(made[..., 3]), axis=1) for edge in (np.min, np.max))
    assert np.array_equal(made[y : low + 1, x : right + 1], rgba[top : top + high, left : left + wide])
    assert abs(y - (square - 1 - low)) <= 1 and abs(x - (square - 1 - right)) <= 1
    if max(high, wide) * MAX_ZOOM > max(H, W):
        assert (y, low) == (0, square - 1) or (x, right) == (0, square - 1)


@pytest.mark.parametrize("shape", [(9, 9), (12, 30)])
def test_opaque_images_are_not_trimmed(shape):
    rgba = np.full((*shape, 4), 255, np.uint8)
    rgba[..., :3] = np.random.default_rng(0).integers(0, 256, (*shape, 3))
    assert np.array_equal(trim_rgba(rgba, max(shape)), rgba)


def test_faint_images_are_not_trimmed():
    faint = np.full((8, 8, 4), (9, 9, 9, 20), np.uint8)
    assert np.array_equal(trim_rgba(faint, 8), faint)


def test_trimming_keeps_the_order_of_sizes():
    sizes = []
    for size in (8, 16, 30):
        rgba = np.zeros((32, 32, 4), np.uint8)
        rgba[:size, :size] = 255
        sizes.append(int((trim_rgba(rgba, 32)[16, :, 3] > 127).sum()))
    assert sizes[0] < sizes[1] < sizes[2] == 32


# ---- clip art and stamps ----------------------------------------------------------------------------------------

DRAWING = """<?xml version="1.0"?>
<svg xmlns="http://www.w3.org/2000/svg" xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#"
     xmlns:dc="http://purl.org/dc/elements/1.1/" xmlns:cc="http://web.resource.org/cc/" width="20mm" height="10mm">
<metadata><rdf:RDF><cc:Work><dc:title>{title}</dc:title>
<dc:subject><rdf:Bag><rdf:li>hash</rdf:li><rdf:li></rdf:li><rdf:li>Frog</rdf:li><rdf:li>frog</rdf:li></rdf:Bag>
</dc:subject><dc:creator><cc:Agent><dc:title>A Painter</dc:title></cc:Agent></dc:creator></cc:Work></rdf:RDF></metadata>
<rect width="100%" height="100%" fill="#0f0"/></svg>"""


def test_clip_art_metadata(place):
    root = "usr/share/openclipart/svg"
    files: dict[str, object] = {f"{root}/theme/icon_{n}.svg": DRAWING.format(title="A theme") for n in range(5)}
    files |= {f"{root}/animals/frog_01.svg": DRAWING.format(title="B &amp;amp; W frog"), f"{root}/x/broken.svg": "<svg"}
    files |= {f"{root}/animals/wet/toad_02.svg": DRAWING.format(title="")}
    opened = open_images("openclipart", place("openclipart", files))
    frog, toad, icon, *_, broken = map(opened.get_record, range(len(opened)))
    assert frog.key == "animals/frog_01" and frog.name == "B & W frog" and frog.keywords == ("frog",)
    assert frog.category == toad.category == "animals" and toad.key == "animals/wet/toad_02"
    assert toad.name == "toad"  # not its author
    assert icon.name == "icon 0" and icon.key == "theme/icon_0"  # a shared title is not a name
    assert broken.name == "broken" and broken.keywords == ()


def test_svg_in_millimetres(place):
    pytest.importorskip("resvg_py")
    root = place("openclipart", {"usr/share/openclipart/svg/a/b.svg": DRAWING.format(title="x")})
    opened = open_images("openclipart", root)
    assert opened.load_rgba(0, 64).shape == (32, 64, 4) and (opened.load_rgba(0, 64)[16, 32] == (0, 255, 0, 255)).all()
    assert opened.load_rgba(0).shape[:2] == (38, 76)  # 96 dpi


def test_stamps_have_sentences(place):
    text = "A frog.\nde.utf8=Ein Frosch.\npt_BR.utf8=Um sapo.\nxx.utf8=\n"
    stamps = "usr/share/tuxpaint/stamps"
    files = {f"{stamps}/animals/wet/frog.png": RED, f"{stamps}/animals/wet/frog.txt": text}
    files |= {f"{stamps}/animals/wet/frog_mirror.png": RED, f"{stamps}/seasonal/gift.txt": "A gift.\n"}
    opened = open_images("tuxpaint", place("tuxpaint", files))
    frog = opened.get_record(0)
    assert len(opened) == 1 and frog.id == "tuxpaint/animals/wet/frog" and frog.name == "frog"
    assert frog.labels == {"en": "A frog.", "de": "Ein Frosch.", "pt_BR": "Um sapo."}
    assert frog.category == "animals" and frog.keywords == ("wet",) and np.array_equal(opened.load_rgba(0), RED)


@pytest.mark.parametrize(
    ("sentence", "name"),
    [
        ("A peacock (a male peafowl).", "peacock"),
        ("Uranus—one of the “gas giants”.", "Uranus"),
        ("The caboose.", "caboose"),
        ("Pawn. Can only move forward.", "Pawn"),
        ("A ripe, red tomato!", "ripe, red tomato"),
        ("Theatre.", "Theatre"),
        ("– Because…", ""),
    ],
)
def test_names_from_sentences(sentence, name):
    assert extract_name(sentence) == name


def test_file_names_to_words():
    assert (
        stem_to_words("what_s_up_doc_01") == "what s up doc"
        and stem_to_words("white_d_7") == "white d 7"
        and stem_to_words("_") == "_"
    )


# ---- sets with classes ------------------------------------------------------------------------------------------


def test_cifar_rows_become_images(place):
    rng = np.random.default_rng(0)
    parts = {
        "data_batch_1": 3,
        "data_batch_2": 1,
        "data_batch_3": 1,
        "data_batch_4": 1,
        "data_batch_5": 1,
        "test_batch": 2,
    }
    rows = {name: rng.integers(0, 256, (n, 1024, 3), dtype=np.uint8) for name, n in parts.items()}
    files: dict[str, object] = {f"package/{name}.png": pixels for name, pixels in rows.items()}
    files |= {"package/train_lables.json": [0, 5, 9, 1, 2, 3, 4], "package/test_lables.json": [7, 8]}
    root = place("cifar10", files)
    train, test = load_labelled_images("cifar10", "train", root), load_labelled_images("cifar10", "test", root)
    assert train.images.shape == (7, 32, 32, 3) and train.images.dtype == np.uint8 and train.labels.dtype == np.int64
    assert np.array_equal(train.images[1], rows["data_batch_1"][1].reshape(32, 32, 3))
    assert np.array_equal(test.images[1], rows["test_batch"][1].reshape(32, 32, 3)) and test.labels.tolist() == [7, 8]
    opened = open_images("cifar10", root)
    dog, ship = opened.get_record(1), opened.get_record(8)
    assert len(opened) == 9 and (dog.key, dog.name) == ("train-00001", "dog") and ship.id == "cifar10/test-00001"
    assert ship.name == "ship" and np.array_equal(opened.load_rgba(8)[..., :3], test.images[1])
    assert (opened.load_rgba(8)[..., 3] == 255).all() and opened.load_rgba(0, 64).shape == (64, 64, 4)
    with pytest.raises(IndexError):
        opened.get_record(9)


def test_labels_must_match_images(place):
    names = [*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"]
    files: dict[str, object] = {f"package/{name}.png": np.zeros((1, 1024, 3), np.uint8) for name in names}
    files |= {"package/train_lables.json": [0, 1, 2], "package/test_lables.json": [0]}
    with pytest.raises(DataError, match="5 images do not match 3 labels"):
        load_labelled_images("cifar10", "train", place("cifar10", files))


def test_fashion_mnist_is_split_by_class(place, monkeypatch):
    monkeypatch.setattr("vitrail.data.image_readers.class_images.TEST_IMAGES_PER_CLASS", 5)
    rows = {n: [[n * 10 + i] * 784 for i in range(8)] for n in range(10)}
    rows[0].insert(5, [])  # the package contains empty rows
    files: dict[str, object] = {f"package/src/clothes/{n}.json": {"data": data} for n, data in rows.items()}
    root = place("fashion-mnist", files)
    train, test = (
        load_labelled_images("fashion-mnist", "train", root),
        load_labelled_images("fashion-mnist", "test", root),
    )
    assert train.images.shape == (30, 28, 28, 3) and test.images.shape == (50, 28, 28, 3)
    assert Counter(test.labels.tolist()) == dict.fromkeys(range(10), 5)
    assert (train.images[:, 0, 0, 0] // 10 == train.labels).all() and train.class_names[9] == "ankle boot"


def test_only_classification_sets_have_splits(tmp_path, place, names):
    place("noto", {"package/img/google/64/1f436.png": RED})
    with pytest.raises(DataError, match="noto has no labelled splits"):
        load_labelled_images("noto", "train", names)


# ---- names ------------------------------------------------------------------------------------------------------


def test_every_image_source_has_a_reader():
    assert set(READERS) == set(SOURCES) - {"emojibase", "lpips", "resnet50"}


def test_sources_without_images_are_refused():
    with pytest.raises(DataError, match="'emojibase' holds no images"):
        open_images("emojibase")
    with pytest.raises(DataError, match="no source or folder is called 'twemojis'") as caught:
        open_images("twemojis")
    assert "'twemoji'" in caught.value.remedy


def test_missing_resvg(place, names, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "resvg_py", None)
    place("openmoji", {"package/color/svg/1F436.svg": "<svg/>"})
    with pytest.raises(DataError, match="needs resvg_py") as caught:
        open_images("openmoji", names).load_rgba(0)
    assert "vitrail[data]" in caught.value.remedy


@pytest.mark.parametrize("side", [0, -3, 100_000])
def test_invalid_sizes_are_refused(place, names, side):
    place("noto", {"package/img/google/64/1f436.png": RED})
    with pytest.raises(ImageError, match="longer side"):
        open_images("noto", names).load_rgba(0, side)


# ---- the real thing ---------------------------------------------------------------------------------------------

COUNTS = {
    "cifar10": 60_000,
    "fashion-mnist": 70_000,
    "twemoji": 3_786,
    "noto": 3_786,
    "fluent": 3_127,
    "openmoji": 4_495,
    "fluent-flat": 3_010,
    "noto-v1": 2_119,
    "emojione": 1_793,
    "openclipart": 7_458,
    "tuxpaint": 950,
}


def open_real_source(name: str) -> ImageReader:
    if shutil.which({"npm": "npm", "apt": "apt-get"}[SOURCES[name].client]) is None:
        pytest.skip("its client is not installed")
    try:
        return open_images(name)
    except DataError as error:
        if any(text in error.problem for text in ("failed to fetch", "apt has no package", "mirror has")):
            pytest.skip(error.problem)
        raise


def measure_tones(opened: ImageReader, items: list[int]) -> np.ndarray:
    """Median brightness (0…255, on white) of the pixels that differ between the first and the last of five
    skin tones."""
    rgba = np.stack([Image.fromarray(opened.load_rgba(item, 64)).resize((64, 64)) for item in items]) / 255.0
    over = rgba[..., :3] * rgba[..., 3:] + 1 - rgba[..., 3:]
    skin = np.abs(over[0] - over[-1]).sum(-1) > 0.4
    return np.median((over @ (0.299, 0.587, 0.114))[:, skin], axis=1) * 255


def find_tone_families(opened: ImageReader) -> dict[str, list[int]]:
    """Find emoji with one skin tone that exist in all five, from light to dark."""
    found: dict[str, dict[str, int]] = {}
    for item in range(len(opened)):
        key = opened.get_record(item).key
        tones = {point for point in key.split("-") if point in SKIN_TONES}
        if len(tones) == 1:
            found.setdefault(re.sub("1f3f[b-f]", "tone", key), {})[tones.pop()] = item
    return {key: [item for _, item in sorted(some.items())] for key, some in found.items() if len(some) == 5}


@pytest.mark.slow
@pytest.mark.parametrize("vendor", VENDORS)
def test_skin_tones_get_darker(vendor):
    """Hands, an ear and a nose, which have no hair. For packages with exchanged tones, all families."""
    opened = open_real_source(vendor)
    families_ = find_tone_families(opened)
    plain = [f"{point}-tone" for point in ("1f44d", "1f44b", "1f44f", "1f4aa", "1f442", "1f443", "270b")]
    assert set(plain) <= families_.keys()
    for key in families_ if vendor in MISNAMED_TONES else plain:
        brightness = measure_tones(opened, families_[key])
        # A jockey's face is so small that its edge matters, by 4 levels; tones differ by 20 and more.
        assert np.diff(brightness).max() < (0 if key in plain else 5), (key, brightness)


@pytest.mark.slow
@pytest.mark.parametrize("name", COUNTS)
def test_real_sources(name):
    opened = open_real_source(name)
    assert len(opened) == COUNTS[name]
    known = [opened.get_record(item) for item in range(len(opened))]
    assert len({about.id for about in known}) == len(known) == len({(about.vendor, about.key) for about in known})
    assert all(about.name and about.vendor == name and about.category for about in known)
    if name in ("twemoji", "noto", "fluent", "fluent-flat", "noto-v1", "emojione"):
        assert all(len(about.labels) == 28 for about in known)
    if name == "tuxpaint":
        assert len(set().union(*(about.labels for about in known))) == 78  # 77 and English
    for item in np.linspace(0, len(opened) - 1, 200).astype(int).tolist():
        pixels = opened.load_rgba(item, 48)
        assert pixels.dtype == np.uint8 and pixels.shape[2] == 4 and max(pixels.shape[:2]) == 48
        assert Path(known[item].id).parts[0] == name


@pytest.mark.parametrize("size", ['width="1" height="1000000"', 'width="1e9" height="1"'])
def test_svg_of_any_aspect_ratio_fits(tmp_path, size):
    """The other side never follows the drawing's proportions, which could need more memory than there is."""
    (tmp_path / "a.svg").write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}><rect width="9" height="9"/></svg>'
    )
    assert max(read_rgba(tmp_path / "a.svg", 64).shape) <= 64
