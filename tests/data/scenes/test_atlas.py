from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from vitrail.data.scenes.atlas import CELL_SIZES, Atlas, Sprite, find_sprites
from vitrail.data.scenes.atlas_file import write_atlas
from vitrail.data.scenes.scene import GRID
from vitrail.errors import DataError, ImageError


def test_a_sprite_is_cropped_fitted_and_keeps_its_shape(atlas):
    table = atlas.table
    row = table.id.index("left/bar")  # 120 × 40 pixels of 128 × 128
    assert table.aspect[row].tolist() == [GRID, round(40 * GRID / 120)]
    for side in CELL_SIZES:
        opacity = atlas.levels[side][row, 3].float() / 255
        assert not opacity[[0, -1]].any() and not opacity[:, [0, -1]].any()
        # Its area in texels, however the edges fall on them.
        assert opacity.sum().item() == pytest.approx((side - 2) ** 2 / 3, rel=0.06)


def test_one_concept_has_sprites_of_several_vendors_and_a_word_is_another(atlas, sprites):
    table = atlas.table
    balls = [i for i, key in enumerate(table.key) if key == "ball"]
    assert len(balls) == 2 and len(set(table.concept[balls].tolist())) == 1
    blank = np.full((8, 8, 4), 255, np.uint8)
    both = Atlas.build(
        [Sprite("a", "v", "a", kind, "fox", kind, blank)._replace(id=kind) for kind in ("thing", "word")]
    )
    assert both.table.names == ("fox", "fox") and both.table.category == ("thing", "word")
    assert [table.kind[i] for i in table.rows_of_kind("frame").tolist()] == ["frame"] * 6


def test_colours_are_multiplied_by_opacity(atlas):
    for level in atlas.levels.values():
        assert (level[:, :3] <= level[:, 3:]).all()


def test_select_keeps_names_and_pixels(atlas):
    rows = find_sprites(atlas.table, ["thing"], ["right"], ["ball", "moon"])
    small = atlas.select(rows)
    assert small.table.id == ("right/ball", "right/moon")
    assert [small.table.names[c] for c in small.table.concept.tolist()] == ["ball", "moon"]
    assert torch.equal(small.levels[32], atlas.levels[32][rows])
    with pytest.raises(DataError, match="did you mean 'right'"):
        find_sprites(atlas.table, vendors=["rigth"])
    with pytest.raises(DataError, match="no sprites"):
        atlas.select([])


def test_an_atlas_has_one_copy_on_another_device(atlas):
    there = atlas.to("meta")
    assert atlas.to("cpu") is atlas and atlas.to("meta") is there and there.to("meta") is there
    assert there.table.aspect.is_meta and all(level.is_meta for level in there.levels.values())
    assert there.table.id == atlas.table.id


def test_an_atlas_comes_back_from_its_file(atlas, tmp_path):
    atlas.save(tmp_path / "a.safetensors")
    again = Atlas.load(tmp_path / "a.safetensors")
    for column in ("id", "vendor", "key", "kind", "names", "plurals", "category"):
        assert getattr(again.table, column) == getattr(atlas.table, column)
    assert torch.equal(again.table.concept, atlas.table.concept)
    assert torch.equal(again.table.aspect, atlas.table.aspect)
    assert list(again.levels) == list(atlas.levels)
    assert all(torch.equal(again.levels[side], level) for side, level in atlas.levels.items())
    assert all(torch.equal(a, b) for a, b in zip(again.textures, atlas.textures, strict=True))


@pytest.fixture(scope="module")
def written(atlas, tmp_path_factory):
    path = tmp_path_factory.mktemp("atlas") / "small.safetensors"
    atlas.select(range(6)).save(path)
    return path.read_bytes()


@settings(max_examples=150)
@given(data=st.data())
def test_a_broken_file_is_refused_or_harmless(written, tmp_path_factory, data):
    broken = bytearray(written)
    if data.draw(st.booleans(), "cut"):
        broken = broken[: data.draw(st.integers(0, len(broken) - 1))]
    else:
        for _ in range(data.draw(st.integers(1, 4))):
            broken[data.draw(st.integers(0, len(broken) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "broken.safetensors"
    path.write_bytes(broken)
    try:
        atlas = Atlas.load(path)
    except DataError as error:
        assert str(path) in error.problem and error.remedy
    else:
        assert len(atlas.textures.texels)


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("concept", torch.tensor([0, 0, 1, 1, 2, 9]), "concepts"),
        ("concept", torch.zeros(6), "tensors"),
        ("aspect", torch.full((6, 2), 7), "aspects"),
        ("kind", ("thing",) * 5 + ("thought",), "kinds"),
        ("names", ("a",), "concepts"),
        ("plurals", (), "columns"),
        ("vendor", (1,) * 6, "texts"),
        ("id", ("a",) * 6, "ids"),
    ],
)
def test_a_table_that_does_not_fit_is_refused(atlas, tmp_path, column, value, message):
    small = atlas.select(range(6))
    table = replace(small.table, **{column: value})
    if column == "names":
        table = replace(table, plurals=("as",), category=("letter",))
    write_atlas(tmp_path / "wrong.safetensors", table, small.levels)
    with pytest.raises(DataError, match=f"its {message} are inconsistent"):
        Atlas.load(tmp_path / "wrong.safetensors")


def test_pixels_that_do_not_fit_are_refused(atlas, tmp_path):
    small = atlas.select(range(6))
    for level, message in ((small.levels[8][:5], "6 sprites"), (torch.full_like(small.levels[8], 255), "rim")):
        write_atlas(tmp_path / "wrong.safetensors", small.table, {8: level})
        with pytest.raises(DataError, match=message):
            Atlas.load(tmp_path / "wrong.safetensors")


def test_other_files_are_refused(tmp_path):
    with pytest.raises(DataError, match="cannot be read"):
        Atlas.load(tmp_path / "nothing")
    save_file({"x": torch.zeros(3)}, tmp_path / "weights.safetensors")
    with pytest.raises(DataError, match="it is not an atlas"):
        Atlas.load(tmp_path / "weights.safetensors")


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"kind": "things"}, DataError, "did you mean 'thing'"),
        ({"rgba": np.zeros((4, 4, 4), np.uint8)}, ImageError, "is fully transparent"),
        ({"rgba": np.zeros((4, 4, 3), np.uint8)}, ImageError, r"\(4, 4, 3\)"),
    ],
)
def test_what_is_no_sprite_is_named(change, kind, message):
    sprite = Sprite("v/a", "v", "a", "thing", "a", "", np.full((4, 4, 4), 255, np.uint8))
    with pytest.raises(kind, match=message):
        Atlas.build([sprite._replace(**change)])


def test_invalid_atlases():
    sprite = Sprite("v/a", "v", "a", "thing", "a", "", np.full((4, 4, 4), 255, np.uint8))
    with pytest.raises(DataError, match="v/a"):
        Atlas.build([sprite, sprite])
    with pytest.raises(DataError, match="no sprites"):
        Atlas.build([])
    with pytest.raises(DataError, match="at least 4"):
        Atlas.build([sprite], [2])
