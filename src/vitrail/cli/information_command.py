"""`vitrail information`: the information about an image at every bottleneck of a model."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from vitrail.cli.output_files import check_writable, write_json_with_origin
from vitrail.cli.text_tables import align_columns

if TYPE_CHECKING:
    from vitrail.lab.bottleneck_information import BottleneckRecord


def measure_information(
    model: str,
    /,
    *,
    data: str = "scenes",
    count: int = 1000,
    seed: int = 7171,
    atlas: str = "emoji",
    device: Literal["auto", "cpu", "cuda"] = "auto",
    json: Path | None = None,
    out: Path | None = None,
) -> None:
    """Measure the information about images at every bottleneck of a model: tokens, bits, ranks and linear probes.

    On scenes, linear probes predict position, colour, identity and count; on datasets with classes they predict the
    class. Probes are fitted to three quarters of the images and tested on the rest.

    Example: vitrail information out/codec/final --out codec.png

    Example: vitrail information openai/clip-vit-base-patch32 --data cifar10 --count 2000

    Parameters
    ----------
    model
        A folder or a name: a codec, an image tower, or a contrastive, vision-language or unified model.
    data
        scenes; or images with classes: cifar10, fashion-mnist, or a folder with one sub-folder a class.
    count
        Number of images. For scenes: so many with one thing, and as many with several.
    seed
        Seed of the scenes.
    atlas
        Sprites of the scenes: emoji, flat, older, or a .safetensors file.
    device
        cpu, cuda or auto: cuda if available.
    json
        A JSON file for the table.
    out
        A figure of the probe accuracy at every bottleneck (.svg, .png, …).
    """
    import torch

    from vitrail import __version__, hub
    from vitrail.devices import resolve_device
    from vitrail.hub.checkpoint_info import resolve_path
    from vitrail.lab.bottleneck_information import measure_bottlenecks as make_lines
    from vitrail.lab.bottlenecks import collect_bottlenecks, get_image_size, load_preprocessing
    from vitrail.plots.charts import check_chart_path, save_chart
    from vitrail.plots.information_plot import BottleneckReadings, draw_information

    if out is not None:
        check_chart_path(out)
    check_writable(json)
    where = resolve_device(device)
    loaded_model = hub.load(model, dtype=torch.float32, device=where)
    side = get_image_size(loaded_model)
    images = _load_labelled_images(data, count, seed, atlas, side)
    found = collect_bottlenecks(loaded_model, images.images, load_preprocessing(loaded_model, resolve_path(model)))
    lines = make_lines(found, 24 * side**2, images.ground_truths)

    truths = list(images.ground_truths)
    print(align_columns(_format_lines(lines, truths)))
    note = f"{len(images.images):,} images of {side} × {side} pixels; continuous values count as 16 bits"
    print(f"\n{note}" + "; position is explained variance, the others are accuracies" * ("position" in truths))
    if json is not None:
        settings = {"model": model, "data": data, "count": count, "seed": seed, "image_size": side}
        settings |= {"vitrail": __version__}
        write_json_with_origin(json, settings | {"bottlenecks": [line.to_dict() for line in lines]}, where)
    if out is not None:
        places = [
            BottleneckReadings(line.name, line.after, line.tokens, line.width, line.bits,
                  {name: (r.value, r.interval, r.blind) for name, r in line.probes.items()})
            for line in lines
        ]  # fmt: skip
        save_chart(draw_information(places, f"Information about an image: {Path(model).name}"), out)
        print(f"→ {out}", file=sys.stderr)


def _format_lines(lines: "Sequence[BottleneckRecord]", truths: list[str]) -> list[list[str]]:
    """Format a table with one row a bottleneck, and a row of the probes without the image."""
    from vitrail.plots.number_format import format_si

    table = [["", "tokens", "bits", "fewer", "at most", "rank", "spread", "dimension", *truths]]
    for line in lines:
        cells = [f"{line.tokens:,} × {line.width:,}", format_si(line.bits, "bit"), f"{line.ratio:.4g}×"]
        cells += [format_si(line.max_bits, "bit"), f"{line.rank:.1f} of {line.bound:,}", f"{line.spread:.1f}"]
        cells += ["–" if line.dimension is None else f"{line.dimension:.1f}"]
        for name in truths:
            reading = line.probes[name]
            half = max(reading.value - reading.interval[0], reading.interval[1] - reading.value)
            cells.append(f"{reading.value:.1%} ± {half:.1%}")
        table.append([line.name, *cells])
    blind = [f"{lines[0].probes[name].blind:.1%}" for name in truths]
    return [*table, ["without the image", *[""] * 7, *blind]]


def _load_labelled_images(data: str, count: int, seed: int, atlas: str, image_size: int):
    from vitrail.data.scenes.atlas_library import open_atlas
    from vitrail.evals.suites.image_collections import open_labelled_images
    from vitrail.lab.ground_truth import make_class_images, make_scene_images

    if data == "scenes":
        return make_scene_images(open_atlas(atlas), image_size, count, seed=seed)
    found = open_labelled_images(data, "test", count)
    return make_class_images(found.images, found.labels, len(found.names), image_size)
