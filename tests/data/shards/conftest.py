"""Small tars and real photographs."""

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
    """A picture → the bytes of a JPEG."""

    def encode(image: Image.Image, **options) -> bytes:
        file = io.BytesIO()
        image.copy().save(file, "JPEG", **{"quality": 90, **options})
        return file.getvalue()

    return encode


@pytest.fixture
def tar(tmp_path):
    """Members (name, bytes) → a tar written by Python's tarfile."""

    def write(members, name: str = "a.tar", form: int = tarfile.PAX_FORMAT) -> Path:
        path = tmp_path / name
        with tarfile.open(path, "w", format=form) as file:
            for member, data in members:
                about = tarfile.TarInfo(member)
                about.size = len(data)
                file.addfile(about, io.BytesIO(data))
        return path

    return write


@pytest.fixture(scope="session")
def samples(jpeg):
    """Samples of all kinds, small; every one is different."""

    def make(count: int) -> list[dict]:
        random = np.random.default_rng(0)
        made = []
        for i in range(count):
            pixels = np.kron(random.integers(0, 256, (4, 6, 3), dtype=np.uint8), np.ones((8, 8, 1), np.uint8))
            words = {"n": i, "words": ["a", "b"], "none": None}
            made.append(
                {
                    "__key__": f"part/{i:04}",
                    "jpg": jpeg(Image.fromarray(pixels)),
                    "txt": f"number {i}, größer",
                    "json": words,
                    "cls": i % 7,
                    "npy": random.random((3, 2)),
                }
            )
        return made

    return make
