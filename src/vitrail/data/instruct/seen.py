"""What a text model is told of a picture instead of the picture: its captions, and its things with their boxes."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from vitrail.data.formats import Sample, Samples
from vitrail.data.told import Teller
from vitrail.errors import DataError


class Thing(NamedTuple):
    name: str
    box: tuple[float, float, float, float]  # left, top, right, bottom, in shares of the picture's sides


class Seen(NamedTuple):
    """`image` is the file's name as the data set that is made will write it."""

    id: str
    image: str
    captions: tuple[str, ...]
    things: tuple[Thing, ...]


def from_samples(samples: Samples, boxes: Samples | None = None, *, root: Path) -> Iterator[Seen]:
    """Pictures of a format that has captions, boxes or both; `boxes` adds those of another file by the samples' ids.
    Names are relative to `root` where the pictures lie under it."""
    others = {} if boxes is None else {sample.id: sample for sample in boxes}
    for sample in samples:
        other = others.get(sample.id)
        things = (*_things(sample), *(() if other is None else _things(other)))
        captions = (*sample.captions, *(() if other is None else other.captions))
        if not sample.pictures or not isinstance(picture := sample.pictures[0], Path):
            raise DataError(f"sample {sample.id} has no picture in a file of its own", "give a set that names files")
        if captions or things:
            yield Seen(sample.id, _name(picture, root), tuple(text.strip() for text in captions), things)


def _things(sample: Sample) -> tuple[Thing, ...]:
    if not sample.instances:
        return ()
    h, w = sample.size or sample.image().size[::-1]
    found = []
    for one in sample.instances:
        if not one.category.strip():
            continue
        left, top, right, bottom = one.box
        name = f"a group of {one.category}" if one.crowd else one.category
        found.append(Thing(name, (left / w, top / h, right / w, bottom / h)))
    return tuple(found)


def _name(picture: Path, root: Path) -> str:
    return str(picture.relative_to(root) if picture.is_relative_to(root) else picture)


def from_scenes(teller: Teller, start: int, stop: int, folder: Path) -> Iterator[Seen]:
    """Scenes, their pictures written as PNG files into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for told in teller.told(start, stop):
        file = folder / f"{told.key}.png"
        if not file.is_file():
            partial = file.with_suffix(".partial")
            Image.fromarray(told.pixels).save(partial, "PNG")
            partial.replace(file)
        things = tuple(Thing(_named(thing), tuple(thing["box"])) for thing in told.truth["objects"])
        yield Seen(told.key, f"{folder.name}/{file.name}", (told.truth["description"],), things)


def _named(thing: dict[str, str]) -> str:
    return f"{thing['colour']} {thing['name']}".strip()
