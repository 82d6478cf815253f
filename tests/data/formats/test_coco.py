"""COCO files, and masks identical to pycocotools and to closed forms."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.data.formats import Instance, Polygons, Rle, open_dataset, rasterize_mask
from vitrail.data.formats.masks import decompress_rle
from vitrail.errors import DataError


def test_captions_are_grouped_by_image(make):
    made = make("coco-captions")
    samples = open_dataset("coco-captions", made.path, **made.options)
    assert [(s.id, s.captions, s.size) for s in samples] == [
        ("42", ("a card", "a teal card"), (6, 8)),
        ("7", ("red",), (6, 8)),
    ]


def test_instances(make):
    made = make("coco-instances")
    samples = open_dataset("coco-instances", made.path, **made.options)
    dog, crowd, packed = samples[0].instances
    assert samples.names == ("person", "dog")
    assert (dog.category, dog.box, dog.is_crowd, dog.area) == ("dog", (1, 1, 4, 3), False, 6.0)
    assert dog.to_mask((6, 8)).nonzero() == pytest.approx(np.array([(1, 1, 1, 2, 2, 2), (1, 2, 3, 1, 2, 3)]))
    assert crowd.is_crowd and crowd.category == "person" and packed.box == (0.5, 0, 2.75, 1)
    column = np.zeros((6, 8), bool)
    column[:, 1] = True
    assert (crowd.to_mask((6, 8)) == column).all() and (packed.to_mask((6, 8)) == column).all()
    assert samples[1].instances == ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d["annotations"][0].update(image_id=1), "annotation 1 has image 1, which is not in images"),
        (lambda d: d["annotations"][0].update(category_id=99), "annotation 1 has category 99"),
        (lambda d: d["annotations"][0].update(bbox=[1, 2, 3]), r"length 4.* at `\$.annotations\[0\].bbox`"),
        (lambda d: d["annotations"][0].update(bbox=[1, 2, -3, 4]), "annotation 1 has a box -3.0 wide"),
        (lambda d: d["annotations"][1].update(id=1), "samples 0 and 1 have the same id '1'"),
        (lambda d: d["images"][1].update(id=42), "samples 0 and 1 have the same id '42'"),
        (lambda d: d["categories"][1].update(id=1), "the same id '1'"),
        (lambda d: d["images"][0].update(height=0), "sample 42 has a size of 0×8 pixels"),
        (lambda d: d["annotations"][0].update(segmentation="circle"), "annotation 1, segmentation"),
        (lambda d: d["annotations"][0].update(segmentation=[1, 2, 3]), "annotation 1, segmentation"),
        (lambda d: d.pop("categories"), "missing required field `categories`"),
    ],
)
def test_invalid_annotations_are_named(make, change, message):
    made = make("coco-instances")
    data = json.loads(made.path.read_text())
    change(data)
    made.path.write_text(json.dumps(data))
    with pytest.raises(DataError, match=message):
        open_dataset("coco-instances", made.path, **made.options)[0]


@pytest.mark.parametrize(
    ("segmentation", "size", "message"),
    [
        (Rle((2, 2), (1, 2)), (2, 2), "add up to 3 for"),
        (Rle((2, 2), (1, -2, 5)), (2, 2), "add up to 4 for"),
        (Rle((2, 2), (4,)), (2, 3), "expected 2×3"),
        (Rle((2, 2), "\x01"), (2, 2), "invalid character '.x01'"),
        (Rle((2, 2), "o" * 30), (2, 2), "invalid character 'o'"),
        (Rle((2, 2), "o"), (2, 2), "end in the middle"),
        (Polygons(((1.0, 2.0),)), (2, 2), "a polygon has 2 numbers"),
        (Polygons(((1, 2, 3, 4, 5, 1e300),)), (2, 2), "reaches coordinate 1e\\+300"),
        (Polygons(((1, 2, 3, 4, 5, float("nan")),)), (2, 2), "reaches coordinate nan"),
        (Polygons(()), (0, 2), "a mask has 0×2"),
        (Rle((10**9, 10**9), (10**18,)), (10**9, 10**9), "a mask has 1000000000×"),
    ],
)
def test_invalid_masks_are_refused(segmentation, size, message):
    with pytest.raises(DataError, match=message):
        rasterize_mask(segmentation, size)


def test_instance_without_segmentation_is_refused():
    with pytest.raises(DataError, match="this cat has no segmentation"):
        Instance("cat", (0, 0, 1, 1)).to_mask((2, 2))


@given(st.data())
def test_run_lengths_round_trip(data):
    H, W = data.draw(st.tuples(st.integers(1, 9), st.integers(1, 9)))
    is_on = np.array(data.draw(st.lists(st.booleans(), min_size=H * W, max_size=H * W))).reshape(H, W)
    counts, value = [0], False
    for pixel in is_on.T.reshape(-1):  # column by column
        if pixel != value:
            counts.append(0)
            value = pixel
        counts[-1] += 1
    assert (rasterize_mask(Rle((H, W), tuple(counts)), (H, W)) == is_on).all()
    tools = pytest.importorskip("pycocotools.mask")
    compressed = tools.encode(np.asfortranarray(is_on.astype(np.uint8)))["counts"].decode()
    assert decompress_rle(compressed) == counts
    assert (rasterize_mask(Rle((H, W), compressed), (H, W)) == is_on).all()


@given(st.integers(0, 8), st.integers(0, 8), st.integers(1, 8), st.integers(1, 8))
def test_integer_rectangles_are_exact(x, y, w, h):
    want = np.zeros((12, 11), bool)
    want[y : y + h, x : x + w] = True
    corners = (x, y, x + w, y, x + w, y + h, x, y + h)
    assert (rasterize_mask(Polygons((corners,)), (12, 11)) == want).all()


_coordinate = st.floats(-20, 60, width=32)


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # pycocotools and numpy 2
@settings(max_examples=150)
@given(
    st.lists(st.lists(st.tuples(_coordinate, _coordinate), min_size=3, max_size=8), min_size=1, max_size=3),
    st.integers(1, 40),
    st.integers(1, 40),
)
def test_polygons_match_pycocotools(outlines, H, W):
    tools = pytest.importorskip("pycocotools.mask")
    outlines = [tuple(float(c) for corner in corners for c in corner) for corners in outlines]
    # pycocotools divides zero by zero where two corners coincide; our code draws nothing there
    for corners in outlines:
        fine = (5 * np.array(corners).reshape(-1, 2) + 0.5).astype(int)
        if (fine == np.roll(fine, -1, axis=0)).all(1).any():
            return
        if np.abs(np.array(corners)).max() > 4 * max(H, W):
            return  # refused by our code
    want = tools.decode(tools.merge(tools.frPyObjects([list(c) for c in outlines], H, W)))
    assert (rasterize_mask(Polygons(tuple(outlines)), (H, W)) == want.astype(bool)).all()
