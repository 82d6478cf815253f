"""Text descriptions of images for a text model: captions, and objects with boxes."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from vitrail.data.formats import Sample, SampleDataset
from vitrail.data.scene_annotations import SceneAnnotator
from vitrail.errors import DataError


class DescribedObject(NamedTuple):
    """An object and its box."""

    name: str
    box: tuple[float, float, float, float]  # left, top, right, bottom, as fractions of the image sides


class ImageDescription(NamedTuple):
    """A description of an image. `image` is the file name in the dataset to be written."""

    id: str
    image: str
    captions: tuple[str, ...]
    objects: tuple[DescribedObject, ...]


def describe_samples(
    samples: SampleDataset, boxes: SampleDataset | None = None, *, root: Path
) -> Iterator[ImageDescription]:
    """Describe images of a format with captions, boxes or both.

    `boxes` adds those of another dataset, by sample ids. File names are relative to `root` where possible.
    """
    others = {} if boxes is None else {sample.id: sample for sample in boxes}
    for sample in samples:
        box_sample = others.get(sample.id)
        objects = (*_list_objects(sample), *(() if box_sample is None else _list_objects(box_sample)))
        captions = (*sample.captions, *(() if box_sample is None else box_sample.captions))
        if not sample.images or not isinstance(picture := sample.images[0], Path):
            raise DataError(f"sample {sample.id} has no image file", "use a dataset with image files")
        if captions or objects:
            yield ImageDescription(
                sample.id, _relative_name(picture, root), tuple(text.strip() for text in captions), objects
            )


def _list_objects(sample: Sample) -> tuple[DescribedObject, ...]:
    if not sample.instances:
        return ()
    h, w = sample.size or sample.load_image().size[::-1]
    objects = []
    for instance in sample.instances:
        if not instance.category.strip():
            continue
        left, top, right, bottom = instance.box
        name = f"a group of {instance.category}" if instance.is_crowd else instance.category
        objects.append(DescribedObject(name, (left / w, top / h, right / w, bottom / h)))
    return tuple(objects)


def _relative_name(picture: Path, root: Path) -> str:
    return str(picture.relative_to(root) if picture.is_relative_to(root) else picture)


def describe_scenes(annotator: SceneAnnotator, start: int, stop: int, folder: Path) -> Iterator[ImageDescription]:
    """Describe scenes, and write their images as PNG files into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for scene in annotator.annotate(start, stop):
        file = folder / f"{scene.key}.png"
        if not file.is_file():
            partial = file.with_suffix(".partial")
            Image.fromarray(scene.pixels).save(partial, "PNG")
            partial.replace(file)
        objects = tuple(DescribedObject(_object_name(obj), tuple(obj["box"])) for obj in scene.ground_truth["objects"])
        yield ImageDescription(scene.key, f"{folder.name}/{file.name}", (scene.ground_truth["description"],), objects)


def _object_name(thing: dict[str, str]) -> str:
    return f"{thing['colour']} {thing['name']}".strip()
