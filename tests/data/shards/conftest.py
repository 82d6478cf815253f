"""Small tar files and real photographs."""

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image


@pytest.fixture(scope="session")
def photographs() -> dict[str, Image.Image]:
    import skimage.data

    names = ("astronaut", "chelsea", "coffee", "rocket", "retina")
    return {name: Image.fromarray(getattr(skimage.data, name)()).convert("RGB") for name in names}


@pytest.fixture(scope="session")
def jpeg():
    """Return a function that encodes an image as JPEG bytes."""

    def encode(image: Image.Image, **options) -> bytes:
        file = io.BytesIO()
        image.copy().save(file, "JPEG", **{"quality": 90, **options})
        return file.getvalue()

    return encode


@pytest.fixture
def tar(tmp_path):
    """Return a function that writes members (name, bytes) with Python's tarfile."""

    def write(members, name: str = "a.tar", form: int = tarfile.PAX_FORMAT) -> Path:
        path = tmp_path / name
        with tarfile.open(path, "w", format=form) as file:
            for member, data in members:
                info = tarfile.TarInfo(member)
                info.size = len(data)
                file.addfile(info, io.BytesIO(data))
        return path

    return write


@pytest.fixture(scope="session")
def samples(jpeg):
    """Return a function that makes small, different samples with all kinds of members."""

    def make(count: int) -> list[dict]:
        rng = np.random.default_rng(0)
        samples_ = []
        for i in range(count):
            pixels = np.kron(rng.integers(0, 256, (4, 6, 3), dtype=np.uint8), np.ones((8, 8, 1), np.uint8))
            document = {"n": i, "words": ["a", "b"], "none": None}
            samples_.append(
                {
                    "__key__": f"part/{i:04}",
                    "jpg": jpeg(Image.fromarray(pixels)),
                    "txt": f"number {i}, größer",
                    "json": document,
                    "cls": i % 7,
                    "npy": rng.random((3, 2)),
                }
            )
        return samples_

    return make
