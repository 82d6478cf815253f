"""Named images: collections, texts, and invalid settings."""

import numpy as np
import pytest
import torch
from PIL import Image

from vitrail.data import image_collection as collections
from vitrail.data.image_captions import build_caption_source
from vitrail.data.image_collection import ImageCollection, load_collection
from vitrail.data.image_readers import ImageRecord
from vitrail.data.named_images import NamedImagesConfig, NamedImageSource
from vitrail.errors import ConfigError, DataError

ABOUTS = (
    ImageRecord("a/1", "a", "1", "dog", ("pet", "animal"), "animals", {"de": "Hund"}),
    ImageRecord("a/2", "a", "2", "Owl", (), "animals", {"de": "Eule", "fr": "hibou"}),
    ImageRecord("a/3", "a", "3", "red car", ("drive",), "vehicles"),
)


@pytest.fixture
def gathered(monkeypatch):
    """Replace every collection by three images."""
    pixels = torch.randint(0, 256, (3, 4, 8, 8), dtype=torch.uint8)
    monkeypatch.setattr("vitrail.data.named_images.load_collection", lambda *_: ImageCollection(ABOUTS, pixels))
    return pixels


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("VITRAIL_HOME", str(tmp_path / "home"))
    root = tmp_path / "pictures"
    root.mkdir()
    Image.new("RGB", (20, 10), "red").save(root / "fox.png")
    Image.new("RGB", (10, 10), "blue").save(root / "hen.png")
    return root


# ---- collections ------------------------------------------------------------------------------------------------


def test_folder_collection_is_cached_until_it_changes(folder, monkeypatch):
    first = load_collection(str(folder), 10)
    assert [about.name for about in first.records] == ["fox", "hen"] and first.pixels.shape == (2, 3, 10, 10)
    # resized to a square, not padded
    assert first.pixels[0, :, 0, 0].tolist() == [255, 0, 0] == first.pixels[0, :, 5, 5].tolist()
    real = collections._collect_images
    monkeypatch.setattr(collections, "_collect_images", None)
    again = load_collection(str(folder), 10)
    assert again.records == first.records and torch.equal(again.pixels, first.pixels)
    monkeypatch.setattr(collections, "_collect_images", real)
    (folder / "hen.txt").write_text("a blue hen")
    assert load_collection(str(folder), 10).records[1].name == "a blue hen"


def test_images_with_opacity_have_four_channels(folder):
    Image.new("RGBA", (10, 10), (0, 0, 0, 9)).save(folder / "gnu.png")
    assert load_collection(str(folder), 6).pixels.shape == (3, 4, 6, 6)


def test_trimmed_collection_is_cached_separately(folder):
    drawing = np.zeros((40, 40, 4), np.uint8)
    drawing[4:34, 10:30] = (0, 200, 0, 255)
    Image.fromarray(drawing).save(folder / "gnu.png")
    plain, trim = load_collection(str(folder), 20), load_collection(str(folder), 20, trim=True)
    names = [about.name for about in trim.records]
    assert plain.records == trim.records and not torch.equal(plain.pixels, trim.pixels)
    gnu = trim.pixels[names.index("gnu")]
    assert gnu[3, [0, -1], 10].min() > 200 and gnu[3, 10].gt(127).sum() in (13, 14)  # 30 high, 20 wide
    for opaque in ("fox", "hen"):  # one of them is not square
        assert torch.equal(trim.pixels[names.index(opaque)], plain.pixels[names.index(opaque)])
    assert torch.equal(load_collection(str(folder), 20).pixels, plain.pixels)
    source = NamedImageSource(NamedImagesConfig(datasets=(str(folder),), image_size=20, trim=True))
    assert torch.equal(source.pixels(torch.arange(3)), trim.pixels)


def test_corrections_change_the_collection(monkeypatch):
    made = [collections._version_hash(name, 8, trim) for name in ("fluent", "noto") for trim in (False, True)]
    assert len(set(made)) == 4
    monkeypatch.setitem(collections.MISNAMED_TONES, "fluent", ())
    again = [collections._version_hash(name, 8, trim) for name in ("fluent", "noto") for trim in (False, True)]
    assert [one == two for one, two in zip(made, again, strict=True)] == [False, False, True, True]


def test_broken_images_are_skipped_and_counted(folder, capsys):
    (folder / "bad.png").write_bytes(b"\x89PNG no more")
    assert len(load_collection(str(folder), 8)) == 2
    assert "1 of 3" in capsys.readouterr().err


def test_broken_collection_file_is_refused(folder, tmp_path):
    made = load_collection(str(folder), 8)
    file = tmp_path / "c.safetensors"
    made.save(file)
    whole = file.read_bytes()
    for broken in (b"", whole[:-5], whole[:50], whole.replace(b"collection 2", b"collection 9")):
        file.write_bytes(broken)
        with pytest.raises(DataError, match=r"c\.safetensors"):
            ImageCollection.load(file)


# ---- what is said -----------------------------------------------------------------------------------------------


def test_names_and_templates(gathered):
    source = NamedImageSource(
        NamedImagesConfig(datasets=("x",), image_size=8, templates=("{}", "a photo of {a}.", "{a} is here"))
    )
    index = torch.tensor([0, 1, 2])
    assert source.pieces.to_texts(source.sample_texts(index, randomize=False)) == ["dog", "Owl", "red car"]
    texts = {text for _ in range(60) for text in source.pieces.to_texts(source.sample_texts(index[:2]))}
    assert texts == {"dog", "a photo of a dog.", "a dog is here", "Owl", "a photo of an Owl.", "an Owl is here"}


def test_keyword_and_translation_probabilities(gathered):
    config = NamedImagesConfig(
        datasets=("x",),
        image_size=8,
        keyword_probability=0.25,
        languages=("de", "fr"),
        translation_probability=0.5,
        templates=("{}",),
    )
    source = NamedImageSource(config)
    texts = source.pieces.to_texts(source.sample_texts(torch.zeros(4000, dtype=torch.int64)))
    fractions = {text: texts.count(text) / 4000 for text in set(texts)}
    assert fractions.keys() == {"dog", "pet, animal", "Hund"}
    assert (
        abs(fractions["pet, animal"] - 0.25) < 0.03 and abs(fractions["Hund"] - 0.25) < 0.03
    )  # there is no French name
    assert set(source.pieces.to_texts(source.sample_texts(torch.full((400,), 2)))) == {"red car", "drive"}


def test_images_by_index_and_shared_concepts(gathered):
    source = NamedImageSource(NamedImagesConfig(datasets=("x", "y"), image_size=8))
    assert len(source) == 6 and source.concepts == ["dog", "owl", "red car"] * 2
    assert torch.equal(source.pixels(torch.tensor([4, 0])), gathered[[1, 0]])
    assert source[5].index == 5
    with pytest.raises(IndexError):
        source[6]


def test_names_and_categories_can_be_excluded(gathered):
    assert NamedImageSource(NamedImagesConfig(datasets=("x",), image_size=8, exclude_names=("DOG",))).concepts == [
        "owl",
        "red car",
    ]
    assert NamedImageSource(
        NamedImagesConfig(datasets=("x",), image_size=8, include_categories=("vehicles",))
    ).concepts == ["red car"]
    one, two = (
        NamedImageSource(NamedImagesConfig(datasets=("x",), image_size=8, exclude_names=w)).fingerprint
        for w in ((), ("dog",))
    )
    assert one != two


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"templates": ("a photo",)}, "a photo"),
        ({"templates": ("{}{}",)}, "once"),
        ({"templates": ("{}s",)}, "between spaces"),
        ({"templates": ("#{}",)}, "between spaces"),
        ({"keyword_probability": 0.8, "translation_probability": 0.5, "languages": ("de",)}, "add up"),
        ({"translation_probability": 0.5}, "languages"),
        ({"datasets": ()}, "data"),
    ],
)
def test_invalid_settings_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        NamedImagesConfig(**{"datasets": ("x",), **change})


def test_unknown_names_and_empty_sources_are_refused(gathered):
    with pytest.raises(DataError, match=r"dgo[\s\S]*dog"):
        NamedImageSource(NamedImagesConfig(datasets=("x",), exclude_names=("dgo",)))
    for key, value in (("include_categories", "vehicle"), ("languages", "xx")):
        with pytest.raises(DataError, match=rf"{key}: no image has '{value}'"):
            NamedImageSource(NamedImagesConfig(datasets=("x",), **{key: (value,)}))
    with pytest.raises(DataError, match="empty"):
        NamedImageSource(NamedImagesConfig(datasets=("x",), exclude_names=("dog", "owl", "red car")))


def test_ambiguous_texts_are_not_used(monkeypatch):
    """Keywords of two concepts would make each a negative of the other."""
    records = tuple(ImageRecord(f"a/{n}", "a", str(n), name, ("sea",) if n < 2 else ("sky",), labels={"fr": "mot"})
                   for n, name in enumerate(("ship", "fish", "bird", "Bird")))  # fmt: skip
    pixels = torch.zeros(4, 3, 8, 8, dtype=torch.uint8)
    monkeypatch.setattr("vitrail.data.named_images.load_collection", lambda *_: ImageCollection(records, pixels))
    config = NamedImagesConfig(
        datasets=("x",),
        image_size=8,
        keyword_probability=0.5,
        languages=("fr",),
        translation_probability=0.5,
        templates=("{}",),
    )
    source = NamedImageSource(config)
    texts = [set(source.pieces.to_texts(source.sample_texts(torch.full((200,), n)))) for n in range(4)]
    assert texts == [{"ship"}, {"fish"}, {"bird", "sky"}, {"Bird", "sky"}]  # the last two are one concept


def test_splits_apply_to_sets_that_have_them(monkeypatch):
    image_records = (
        ImageRecord("cifar10/train-1", "cifar10", "train-1", "cat"),
        ImageRecord("cifar10/test-1", "cifar10", "test-1", "cat"),
        *ABOUTS,
    )
    pixels = torch.zeros(5, 3, 8, 8, dtype=torch.uint8)
    monkeypatch.setattr("vitrail.data.named_images.load_collection", lambda *_: ImageCollection(image_records, pixels))
    source = NamedImageSource(NamedImagesConfig(datasets=("noto",), image_size=8, split="train"))
    assert [about.key for about in source.records] == ["train-1", "1", "2", "3"]


def test_folder_of_classes_needs_categories_as_names(folder):
    for name in ("cat", "dog"):
        (folder / name).mkdir()
        Image.new("RGB", (8, 8)).save(folder / name / "0001.png")
    with pytest.raises(DataError, match="category"):
        NamedImageSource(NamedImagesConfig(datasets=(str(folder / "."),), image_size=8))
    (folder / "fox.png").unlink()
    (folder / "hen.png").unlink()
    source = NamedImageSource(NamedImagesConfig(datasets=(str(folder),), image_size=8, name_from="category"))
    assert source.concepts == ["cat", "dog"]


def test_fingerprint_depends_on_pixels(folder):
    before = NamedImageSource(NamedImagesConfig(datasets=(str(folder),), image_size=8)).fingerprint
    Image.new("RGB", (10, 10), "green").save(folder / "hen.png")
    assert NamedImageSource(NamedImagesConfig(datasets=(str(folder),), image_size=8)).fingerprint != before


def test_captions_of_named_images(gathered):
    caption_source = build_caption_source(
        NamedImageSource(NamedImagesConfig(datasets=("x",), image_size=8, templates=("{}",)))
    )
    batch = caption_source.make_batch(torch.tensor([2, 0]), swap_negatives=True)
    assert caption_source.pieces.to_texts(batch.captions) == ["red car", "dog"] and batch.negative_captions is None
    assert np.array_equal(batch.pixels.numpy(), gathered[[2, 0]].numpy())
    assert caption_source.pieces.to_texts(caption_source.resample_captions(torch.tensor([1]))) == ["Owl"]
