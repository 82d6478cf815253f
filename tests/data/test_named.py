"""Named pictures: what is gathered, what is said of them, and what is refused."""

import numpy as np
import pytest
import torch
from PIL import Image

from vitrail.data import collection as collections
from vitrail.data.captions import captions
from vitrail.data.collection import Collection, collection
from vitrail.data.named import NamedConfig, NamedSource
from vitrail.data.pictures import About
from vitrail.errors import ConfigError, DataError

ABOUTS = (
    About("a/1", "a", "1", "dog", ("pet", "animal"), "animals", {"de": "Hund"}),
    About("a/2", "a", "2", "Owl", (), "animals", {"de": "Eule", "fr": "hibou"}),
    About("a/3", "a", "3", "red car", ("drive",), "vehicles"),
)


@pytest.fixture
def gathered(monkeypatch):
    """Three pictures that are there whatever is asked for."""
    pixels = torch.randint(0, 256, (3, 4, 8, 8), dtype=torch.uint8)
    monkeypatch.setattr("vitrail.data.named.collection", lambda *_: Collection(ABOUTS, pixels))
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


def test_a_folder_is_gathered_once_and_again_when_it_changes(folder, monkeypatch):
    first = collection(str(folder), 10)
    assert [about.name for about in first.abouts] == ["fox", "hen"] and first.pixels.shape == (2, 3, 10, 10)
    assert first.pixels[0, :, 0, 0].tolist() == [255, 0, 0] == first.pixels[0, :, 5, 5].tolist()  # squashed, not padded
    real = collections._gathered
    monkeypatch.setattr(collections, "_gathered", None)
    again = collection(str(folder), 10)
    assert again.abouts == first.abouts and torch.equal(again.pixels, first.pixels)
    monkeypatch.setattr(collections, "_gathered", real)
    (folder / "hen.txt").write_text("a blue hen")
    assert collection(str(folder), 10).abouts[1].name == "a blue hen"


def test_pictures_with_opacity_have_four_channels(folder):
    Image.new("RGBA", (10, 10), (0, 0, 0, 9)).save(folder / "gnu.png")
    assert collection(str(folder), 6).pixels.shape == (3, 4, 6, 6)


def test_trimmed_pictures_fill_their_frame_and_are_kept_apart(folder):
    drawing = np.zeros((40, 40, 4), np.uint8)
    drawing[4:34, 10:30] = (0, 200, 0, 255)
    Image.fromarray(drawing).save(folder / "gnu.png")
    plain, trim = collection(str(folder), 20), collection(str(folder), 20, trim=True)
    names = [about.name for about in trim.abouts]
    assert plain.abouts == trim.abouts and not torch.equal(plain.pixels, trim.pixels)
    gnu = trim.pixels[names.index("gnu")]
    assert gnu[3, [0, -1], 10].min() > 200 and gnu[3, 10].gt(127).sum() in (13, 14)  # 30 high, 20 wide
    for opaque in ("fox", "hen"):  # one of them is not square
        assert torch.equal(trim.pixels[names.index(opaque)], plain.pixels[names.index(opaque)])
    assert torch.equal(collection(str(folder), 20).pixels, plain.pixels)
    source = NamedSource(NamedConfig(data=(str(folder),), side=20, trim=True))
    assert torch.equal(source.pixels(torch.arange(3)), trim.pixels)


def test_what_a_reader_mends_makes_another_collection(monkeypatch):
    made = [collections._made_of(name, 8, trim) for name in ("fluent", "noto") for trim in (False, True)]
    assert len(set(made)) == 4
    monkeypatch.setitem(collections.MISNAMED, "fluent", ())
    again = [collections._made_of(name, 8, trim) for name in ("fluent", "noto") for trim in (False, True)]
    assert [one == two for one, two in zip(made, again, strict=True)] == [False, False, True, True]


def test_broken_pictures_are_left_out_and_counted(folder, capsys):
    (folder / "bad.png").write_bytes(b"\x89PNG no more")
    assert len(collection(str(folder), 8)) == 2
    assert "1 of 3" in capsys.readouterr().err


def test_a_broken_file_is_refused_by_name(folder, tmp_path):
    made = collection(str(folder), 8)
    file = tmp_path / "c.safetensors"
    made.save(file)
    whole = file.read_bytes()
    for broken in (b"", whole[:-5], whole[:50], whole.replace(b"collection 2", b"collection 9")):
        file.write_bytes(broken)
        with pytest.raises(DataError, match=r"c\.safetensors"):
            Collection.load(file)


# ---- what is said -----------------------------------------------------------------------------------------------


def test_names_alone_and_in_templates(gathered):
    source = NamedSource(NamedConfig(data=("x",), side=8, templates=("{}", "a photo of {a}.", "{a} is here")))
    index = torch.tensor([0, 1, 2])
    assert source.pieces.read(source.texts(index, vary=False)) == ["dog", "Owl", "red car"]
    said = {text for _ in range(60) for text in source.pieces.read(source.texts(index[:2]))}
    assert said == {"dog", "a photo of a dog.", "a dog is here", "Owl", "a photo of an Owl.", "an Owl is here"}


def test_keywords_and_languages_come_as_often_as_asked_where_there_are_any(gathered):
    config = NamedConfig(data=("x",), side=8, keywords=0.25, languages=("de", "fr"), foreign=0.5, templates=("{}",))
    source = NamedSource(config)
    said = source.pieces.read(source.texts(torch.zeros(4000, dtype=torch.int64)))
    share = {text: said.count(text) / 4000 for text in set(said)}
    assert share.keys() == {"dog", "pet, animal", "Hund"}
    assert abs(share["pet, animal"] - 0.25) < 0.03 and abs(share["Hund"] - 0.25) < 0.03  # French has no word for it
    assert set(source.pieces.read(source.texts(torch.full((400,), 2)))) == {"red car", "drive"}


def test_pictures_come_by_number_and_concepts_are_shared(gathered):
    source = NamedSource(NamedConfig(data=("x", "y"), side=8))
    assert len(source) == 6 and source.concepts == ["dog", "owl", "red car"] * 2
    assert torch.equal(source.pixels(torch.tensor([4, 0])), gathered[[1, 0]])
    assert source[5].index == 5
    with pytest.raises(IndexError):
        source[6]


def test_some_may_be_left_out(gathered):
    assert NamedSource(NamedConfig(data=("x",), side=8, without=("DOG",))).concepts == ["owl", "red car"]
    assert NamedSource(NamedConfig(data=("x",), side=8, only=("vehicles",))).concepts == ["red car"]
    one, two = (NamedSource(NamedConfig(data=("x",), side=8, without=w)).fingerprint for w in ((), ("dog",)))
    assert one != two


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"templates": ("a photo",)}, "a photo"),
        ({"templates": ("{}{}",)}, "once"),
        ({"templates": ("{}s",)}, "space"),
        ({"templates": ("#{}",)}, "space"),
        ({"keywords": 0.8, "foreign": 0.5, "languages": ("de",)}, "add up"),
        ({"foreign": 0.5}, "languages"),
        ({"data": ()}, "data"),
    ],
)
def test_what_cannot_be_is_refused(change, says):
    with pytest.raises(ConfigError, match=says):
        NamedConfig(**{"data": ("x",), **change})


def test_unknown_names_and_empty_sources_are_refused(gathered):
    with pytest.raises(DataError, match=r"dgo[\s\S]*dog"):
        NamedSource(NamedConfig(data=("x",), without=("dgo",)))
    for key, value in (("only", "vehicle"), ("languages", "xx")):
        with pytest.raises(DataError, match=rf"{key}: '{value}'"):
            NamedSource(NamedConfig(data=("x",), **{key: (value,)}))
    with pytest.raises(DataError, match="empty"):
        NamedSource(NamedConfig(data=("x",), without=("dog", "owl", "red car")))


def test_texts_that_tell_of_several_things_are_not_said(monkeypatch):
    """Keywords of two concepts would make each a negative of the other's words."""
    abouts = tuple(About(f"a/{n}", "a", str(n), name, ("sea",) if n < 2 else ("sky",), labels={"fr": "mot"})
                   for n, name in enumerate(("ship", "fish", "bird", "Bird")))  # fmt: skip
    pixels = torch.zeros(4, 3, 8, 8, dtype=torch.uint8)
    monkeypatch.setattr("vitrail.data.named.collection", lambda *_: Collection(abouts, pixels))
    config = NamedConfig(data=("x",), side=8, keywords=0.5, languages=("fr",), foreign=0.5, templates=("{}",))
    source = NamedSource(config)
    said = [set(source.pieces.read(source.texts(torch.full((200,), n)))) for n in range(4)]
    assert said == [{"ship"}, {"fish"}, {"bird", "sky"}, {"Bird", "sky"}]  # the last two are one concept


def test_parts_are_those_of_sets_that_have_any(monkeypatch):
    abouts = (
        About("cifar10/train-1", "cifar10", "train-1", "cat"),
        About("cifar10/test-1", "cifar10", "test-1", "cat"),
        *ABOUTS,
    )
    pixels = torch.zeros(5, 3, 8, 8, dtype=torch.uint8)
    monkeypatch.setattr("vitrail.data.named.collection", lambda *_: Collection(abouts, pixels))
    source = NamedSource(NamedConfig(data=("noto",), side=8, part="train"))
    assert [about.key for about in source.abouts] == ["train-1", "1", "2", "3"]


def test_a_folder_of_classes_is_not_taken_for_one_of_names(folder):
    for name in ("cat", "dog"):
        (folder / name).mkdir()
        Image.new("RGB", (8, 8)).save(folder / name / "0001.png")
    with pytest.raises(DataError, match="category"):
        NamedSource(NamedConfig(data=(str(folder / "."),), side=8))
    (folder / "fox.png").unlink()
    (folder / "hen.png").unlink()
    source = NamedSource(NamedConfig(data=(str(folder),), side=8, names="category"))
    assert source.concepts == ["cat", "dog"]


def test_other_pixels_are_another_source(folder):
    before = NamedSource(NamedConfig(data=(str(folder),), side=8)).fingerprint
    Image.new("RGB", (10, 10), "green").save(folder / "hen.png")
    assert NamedSource(NamedConfig(data=(str(folder),), side=8)).fingerprint != before


def test_captions_of_named_pictures(gathered):
    told = captions(NamedSource(NamedConfig(data=("x",), side=8, templates=("{}",))))
    made = told.pair(torch.tensor([2, 0]), swapped=True)
    assert told.pieces.read(made.true) == ["red car", "dog"] and made.false is None
    assert np.array_equal(made.pixels.numpy(), gathered[[2, 0]].numpy())
    assert told.pieces.read(told.again(torch.tensor([1]))) == ["Owl"]
