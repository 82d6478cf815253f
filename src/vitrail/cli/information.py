"""`vitrail information`: what is left of a picture at every bottleneck of a model."""

import sys
from pathlib import Path
from typing import Literal

from vitrail.cli.eval_common import Common, device_of
from vitrail.cli.systems import aligned
from vitrail.cli.written import check_written, write_plain


def information(
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
    """Show what is left of pictures at every bottleneck of a model: tokens, bits, ranks, and what can be read off.

    Position, colour, identity and count are read off scenes whose truth is known, by a straight reading fitted to three
    quarters of them and tested on the rest; of pictures with classes it is the class.

    Example: vitrail information out/codec/final --out codec.png

    Example: vitrail information openai/clip-vit-base-patch32 --data cifar10 --count 2000

    Parameters
    ----------
    model
        A folder or a name: a codec, a picture tower, a contrastive, a vision-language or a unified model.
    data
        scenes; or pictures with classes: cifar10, fashion-mnist, or a folder with a sub-folder a class.
    count
        Pictures: of scenes, so many of one thing and as many of several.
    seed
        Of the scenes.
    atlas
        Sprites of the scenes: emoji, flat, older, or a .safetensors file.
    device
        Where the model runs; auto is a GPU where there is one.
    json
        Write the lines to this file too.
    out
        Draw what is read at every bottleneck as this figure (.svg, or any picture).
    """
    import torch

    from vitrail import __version__, hub
    from vitrail.hub.configs import resolve
    from vitrail.lab.bottlenecks import bottlenecks, prepared_as, side_of
    from vitrail.lab.information import information as make_lines
    from vitrail.show.figure import check_figure
    from vitrail.show.information import Place, draw_information
    from vitrail.show.ledger import si

    if out is not None:
        check_figure(out)
    check_written(json)
    where = device_of(Common(device=device))
    built = hub.load(model, dtype=torch.float32, device=where)
    side = side_of(built)
    shown = _shown(data, count, seed, atlas, side)
    found = bottlenecks(built, shown.pictures, prepared_as(built, resolve(model)))
    lines = make_lines(found, 24 * side**2, shown.truths)

    truths = list(shown.truths)
    table = [["", "tokens", "bits", "fewer", "at most", "rank", "spread", "dimension", *truths]]
    for line in lines:
        cells = [f"{line.tokens:,} × {line.width:,}", si(line.bits, "bit"), f"{line.ratio:.4g}×"]
        cells += [si(line.at_most, "bit"), f"{line.rank:.1f} of {line.bound:,}", f"{line.spread:.1f}"]
        cells += ["–" if line.dimension is None else f"{line.dimension:.1f}"]
        for name in truths:
            reading = line.readings[name]
            half = max(reading.value - reading.interval[0], reading.interval[1] - reading.value)
            cells.append(f"{reading.value:.1%} ± {half:.1%}")
        table.append([line.name, *cells])
    blind = [f"{lines[0].readings[name].blind:.1%}" for name in truths]
    table.append(["without looking", *[""] * 7, *blind])
    print(aligned(table))
    said = f"{len(shown.pictures):,} pictures of {side} × {side}; continuous numbers counted as 16 bits"
    print(f"\n{said}" + "; position is a share of variance, the others of right answers" * ("position" in truths))
    if json is not None:
        about = {"model": model, "vitrail": __version__, "data": data, "count": count, "seed": seed, "side": side}
        write_plain(json, about | {"lines": [line.plain() for line in lines]}, where)
    if out is not None:
        places = [
            Place(line.name, line.after, line.tokens, line.width, line.bits,
                  {name: (r.value, r.interval, r.blind) for name, r in line.readings.items()})
            for line in lines
        ]  # fmt: skip
        draw_information(places, f"What is left of a picture: {Path(model).name}").save(out)
        print(f"→ {out}", file=sys.stderr)


def _shown(data: str, count: int, seed: int, atlas: str, side: int):
    from vitrail.data.scenes.library import open_atlas
    from vitrail.evals.suites.sets import classes
    from vitrail.lab.truths import classed, scenes

    if data == "scenes":
        return scenes(open_atlas(atlas), side, count, seed=seed)
    found = classes(data, "test", count)
    return classed(found.pictures, found.labels, len(found.names), side)
