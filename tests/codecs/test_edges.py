"""Edge cases of quantizers and token files: extreme values, sizes and names."""

import pickle

import pytest
import torch
from PIL import Image

from tests.codecs.test_codec import QUANTIZERS, conv
from vitrail import hub
from vitrail.codecs.codec import Codec
from vitrail.codecs.image_sources import ImageResizeConfig, find_images
from vitrail.codecs.image_tokenization import detokenize_images, tokenize_images
from vitrail.codecs.quantizers import BSQ, FSQ, KL, VQ, FSQConfig, nearest_codes
from vitrail.codecs.quantizers.gradient_estimators import apply_rotation_trick
from vitrail.codecs.token_file import TokenFileHeader
from vitrail.codecs.token_file_writer import TokenFileWriter
from vitrail.errors import CheckpointError, ConfigError, DataError
from vitrail.hub.lpips_weights import read_pickled_tensors


@pytest.mark.parametrize("name", QUANTIZERS)
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_loaded_codec_has_the_same_codes(name, kind, tmp_path):
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


def test_fsq_second_derivative_raises():
    x = torch.full((1, 2), 0.3, requires_grad=True)
    (slope,) = torch.autograd.grad(FSQ(levels=(8, 5))(x).codes.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(slope.sum(), x)


@pytest.mark.parametrize(("K", "D"), [(1000, 256), (1000, 17), (512, 32)])
def test_first_of_equal_codes_is_taken(K, D):
    table = torch.randn(K // 4, D).repeat(4, 1)
    x = torch.randn(300, D)
    ids = nearest_codes.find_nearest_tiled(x, table)
    assert ids.max() < K // 4 and torch.equal(ids, nearest_codes.find_nearest_exhaustive(x, table))
    assert torch.equal(torch.cat([nearest_codes.find_nearest_tiled(row[None], table) for row in x[:40]]), ids[:40])


@pytest.mark.parametrize("scale", [1e19, 1e-22, 1e-30])
def test_search_with_float32_overflow_and_underflow(scale):
    x, table = torch.randn(200, 8) * scale, torch.randn(64, 8) * scale
    assert torch.equal(nearest_codes.find_nearest_tiled(x, table), nearest_codes.find_nearest_exhaustive(x, table))


@pytest.mark.parametrize("size", [0.0, 1e-20, 1e-8])
def test_zero_vector_has_a_straight_through_gradient(size):
    x = torch.full((1, 4), size, requires_grad=True)
    apply_rotation_trick(x, torch.ones(1, 4)).sum().backward()
    assert torch.equal(x.grad, torch.ones(1, 4))
    y = torch.full((1, 4), size, requires_grad=True)
    BSQ(bits=4)(y).codes.sum().backward()
    assert y.grad.abs().max() < 1e7


def test_ids_of_large_vectors_and_small_integers():
    x = torch.tensor([[1.0, -1.0, 1.0, -1.0]])
    q = BSQ(bits=4)
    assert q(x * 1e19).ids.item() == q(x).ids.item() == 10
    assert torch.equal(q.split_ids(torch.tensor([10], dtype=torch.uint8), 2), torch.tensor([[2, 2]]))
    f = FSQ(levels=(8, 8, 8, 5, 5, 5))
    assert torch.equal(f.lookup(torch.tensor([99], dtype=torch.uint8)), f.lookup(torch.tensor([99])))
    with pytest.raises(DataError, match="outside"):
        VQ(codebook_size=4, dim=2).lookup(torch.tensor(9))
    with pytest.raises(ConfigError, match="float32"):
        FSQConfig(levels=(2**31, 2))
    assert KL(width=3)(torch.empty(0, 6)).losses["kl"] == 0


# ---- pictures and files -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", [392, 336, 224, 28])
def test_every_image_size_can_be_covered(side):
    fit = ImageResizeConfig(size=(side, side))
    for width in range(1, 120):
        assert fit.apply(Image.new("RGB", (width, width)), 4)[0].shape == (3, side, side)
        assert fit.apply(Image.new("RGB", (width, 53)), 4)[0].shape == (3, side, side)


@pytest.fixture(scope="module")
def codec() -> Codec:
    return Codec(conv(QUANTIZERS["fsq"])).eval()


def header(codec: Codec) -> TokenFileHeader:
    return TokenFileHeader(
        model="a" * 64, name="x", sizes=codec.vocab_sizes, groups=False, factor=4, fit={"how": "cover", "size": [8, 8]}
    )


@pytest.mark.parametrize("size", [(99, 99), (0, 4), (9, 8)])
def test_writer_rejects_invalid_sizes(size, codec, tmp_path):
    with (
        TokenFileWriter(tmp_path / "a.vtok", header(codec)) as writer,
        pytest.raises(DataError, match="does not match"),
    ):
        writer.add("a", torch.zeros(2, 2, dtype=torch.int64), size)
    with (
        TokenFileWriter(tmp_path / "b.vtok", header(codec)) as writer,
        pytest.raises(DataError, match="not valid text"),
    ):
        writer.add("\udcff", torch.zeros(2, 2, dtype=torch.int64), (8, 8))


def test_invalid_names_raise_before_encoding(codec, tmp_path):
    folder = tmp_path / "pictures"
    folder.mkdir()
    Image.new("RGB", (16, 16)).save(folder / "a\\b.png")
    with pytest.raises(DataError, match="rename"):
        tokenize_images(codec, find_images([folder]), tmp_path / "out.vtok")
    assert not list(tmp_path.glob("out*"))


def test_resume_with_a_renamed_codec(codec, tmp_path):
    Image.new("RGB", (16, 16)).save(tmp_path / "a.png")
    out = tmp_path / "out.vtok"
    tokenize_images(codec, find_images([tmp_path / "a.png"]), out, codec_name="here")
    file = tokenize_images(codec, find_images([tmp_path / "a.png"]), out, codec_name="there")
    for batch in (0, -3):
        with pytest.raises(ConfigError, match="batch_size"):
            detokenize_images(codec, file, tmp_path / "back", batch_size=batch)
    with pytest.raises(DataError, match="does not exist"):
        find_images(["x" * 300])


@pytest.mark.parametrize("thing", [{1: {"kernel": 2}}, {"a": [1]}, "text"])
def test_unsafe_pickles_raise(thing, tmp_path):
    (tmp_path / "p").write_bytes(pickle.dumps(thing))
    with pytest.raises(CheckpointError):
        read_pickled_tensors(tmp_path / "p")
    loop: dict = {}
    loop["x"] = loop
    (tmp_path / "p").write_bytes(pickle.dumps(loop))
    with pytest.raises(CheckpointError):
        read_pickled_tensors(tmp_path / "p")
    (tmp_path / "p").write_bytes(b"\x80\x03N" + b"r" + (1 << 28).to_bytes(4, "little") + b".")  # a place far away
    with pytest.raises(CheckpointError):
        read_pickled_tensors(tmp_path / "p")
