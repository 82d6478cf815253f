"""Where quantizers and files of tokens meet odd numbers, odd sizes and odd names."""

import pickle

import pytest
import torch
from PIL import Image
from tests.codecs.test_codec import QUANTIZERS, conv

from vitrail import hub
from vitrail.codecs.codec import Codec
from vitrail.codecs.container import Header
from vitrail.codecs.fit import Fit, find_pictures
from vitrail.codecs.quantizers import BSQ, FSQ, KL, VQ, FSQConfig, search
from vitrail.codecs.quantizers.gradients import rotated
from vitrail.codecs.tokens import detokenize, tokenize
from vitrail.codecs.writer import TokenWriter
from vitrail.errors import CheckpointError, ConfigError, DataError
from vitrail.hub.lpips import read


@pytest.mark.parametrize("name", QUANTIZERS)
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_a_codec_from_its_folder_gives_the_codes_of_its_ids(name, kind, tmp_path):
    made = Codec(conv(QUANTIZERS[name])).eval()
    hub.save(made, tmp_path)
    again, x = hub.load(tmp_path, dtype=kind), torch.rand(2, 3, 16, 16) * 2 - 1
    found = again.encode(x.to(kind))
    assert found.codes.dtype == kind
    if found.ids is not None:
        assert torch.equal(again.quantizer.lookup(found.ids).to(kind), found.codes)
        if kind == torch.float32:
            assert torch.equal(found.ids, made.encode(x).ids)
    assert all(b.dtype != torch.bfloat16 for b in again.quantizer.buffers())


def test_the_second_derivative_of_fsq_is_refused_and_not_wrong():
    x = torch.full((1, 2), 0.3, requires_grad=True)
    (slope,) = torch.autograd.grad(FSQ(levels=(8, 5))(x).codes.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(slope.sum(), x)


@pytest.mark.parametrize(("K", "D"), [(1000, 256), (1000, 17), (512, 32)])
def test_of_equal_codes_the_first_is_taken_alone_and_in_a_batch(K, D):
    table = torch.randn(K // 4, D).repeat(4, 1)
    x = torch.randn(300, D)
    ids = search.tiled(x, table)
    assert ids.max() < K // 4 and torch.equal(ids, search.exhaustive(x, table))
    assert torch.equal(torch.cat([search.tiled(row[None], table) for row in x[:40]]), ids[:40])


@pytest.mark.parametrize("scale", [1e19, 1e-22, 1e-30])
def test_the_search_holds_where_float32_over_or_underflows(scale):
    x, table = torch.randn(200, 8) * scale, torch.randn(64, 8) * scale
    assert torch.equal(search.tiled(x, table), search.exhaustive(x, table))


@pytest.mark.parametrize("size", [0.0, 1e-20, 1e-8])
def test_a_vector_of_no_direction_passes_its_gradient_on(size):
    x = torch.full((1, 4), size, requires_grad=True)
    rotated(x, torch.ones(1, 4)).sum().backward()
    assert torch.equal(x.grad, torch.ones(1, 4))
    y = torch.full((1, 4), size, requires_grad=True)
    BSQ(bits=4)(y).codes.sum().backward()
    assert y.grad.abs().max() < 1e7


def test_ids_of_large_vectors_and_small_integers():
    x = torch.tensor([[1.0, -1.0, 1.0, -1.0]])
    q = BSQ(bits=4)
    assert q(x * 1e19).ids.item() == q(x).ids.item() == 10
    assert torch.equal(q.split(torch.tensor([10], dtype=torch.uint8), 2), torch.tensor([[2, 2]]))
    f = FSQ(levels=(8, 8, 8, 5, 5, 5))
    assert torch.equal(f.lookup(torch.tensor([99], dtype=torch.uint8)), f.lookup(torch.tensor([99])))
    with pytest.raises(DataError, match="outside"):
        VQ(codes=4, dim=2).lookup(torch.tensor(9))
    with pytest.raises(ConfigError, match="float32"):
        FSQConfig(levels=(2**31, 2))
    assert KL(width=3)(torch.empty(0, 6)).losses["kl"] == 0


# ---- pictures and files -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", [392, 336, 224, 28])
def test_every_picture_can_be_covered(side):
    fit = Fit(size=(side, side))
    for width in range(1, 120):
        assert fit.apply(Image.new("RGB", (width, width)), 4)[0].shape == (3, side, side)
        assert fit.apply(Image.new("RGB", (width, 53)), 4)[0].shape == (3, side, side)


@pytest.fixture(scope="module")
def codec() -> Codec:
    return Codec(conv(QUANTIZERS["fsq"])).eval()


def header(codec: Codec) -> Header:
    return Header(
        model="a" * 64, name="x", sizes=codec.sizes, groups=False, factor=4, fit={"how": "cover", "size": [8, 8]}
    )


@pytest.mark.parametrize("size", [(99, 99), (0, 4), (9, 8)])
def test_a_size_that_no_reader_takes_is_not_written(size, codec, tmp_path):
    with TokenWriter(tmp_path / "a.vtok", header(codec)) as writer, pytest.raises(DataError, match="codes show"):
        writer.add("a", torch.zeros(2, 2, dtype=torch.int64), size)
    with TokenWriter(tmp_path / "b.vtok", header(codec)) as writer, pytest.raises(DataError, match="no text"):
        writer.add("\udcff", torch.zeros(2, 2, dtype=torch.int64), (8, 8))


def test_names_that_cannot_be_unpacked_are_refused_before_anything_is_encoded(codec, tmp_path):
    folder = tmp_path / "pictures"
    folder.mkdir()
    Image.new("RGB", (16, 16)).save(folder / "a\\b.png")
    with pytest.raises(DataError, match="rename"):
        tokenize(codec, find_pictures([folder]), tmp_path / "out.vtok")
    assert not list(tmp_path.glob("out*"))


def test_a_moved_codec_goes_on_and_batches_are_at_least_one(codec, tmp_path):
    Image.new("RGB", (16, 16)).save(tmp_path / "a.png")
    out = tmp_path / "out.vtok"
    tokenize(codec, find_pictures([tmp_path / "a.png"]), out, name="here")
    file = tokenize(codec, find_pictures([tmp_path / "a.png"]), out, name="there")
    for batch in (0, -3):
        with pytest.raises(ConfigError, match="batches"):
            detokenize(codec, file, tmp_path / "back", batch=batch)
    with pytest.raises(DataError, match="does not exist"):
        find_pictures(["x" * 300])


@pytest.mark.parametrize("thing", [{1: {"kernel": 2}}, {"a": [1]}, "text"])
def test_strange_pickles_of_weights_are_refused(thing, tmp_path):
    (tmp_path / "p").write_bytes(pickle.dumps(thing))
    with pytest.raises(CheckpointError):
        read(tmp_path / "p")
    loop: dict = {}
    loop["x"] = loop
    (tmp_path / "p").write_bytes(pickle.dumps(loop))
    with pytest.raises(CheckpointError):
        read(tmp_path / "p")
    (tmp_path / "p").write_bytes(b"\x80\x03N" + b"r" + (1 << 28).to_bytes(4, "little") + b".")  # a place far away
    with pytest.raises(CheckpointError):
        read(tmp_path / "p")
