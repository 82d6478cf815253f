"""`vitrail codec`: what codecs keep of one picture, and of many beside the formats that everybody has."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, Parameter

from vitrail.cli.written import write_plain
from vitrail.errors import CheckpointError, ConfigError, VitrailError

if TYPE_CHECKING:
    from vitrail.evals.suites.reader import Reader
    from vitrail.evals.suites.reconstruction import Row, Shown

app = App(
    name="codec",
    help="Look at what codecs keep of a picture, and measure it beside JPEG, WebP and AVIF.",
    help_epilogue="Example: vitrail codec look photo.jpg --codec out/bsq --codec out/fsq -o strip.png",
)

Several = Annotated[tuple[str, ...], Parameter(negative="")]


@app.command(help_epilogue="Example: vitrail codec look photo.jpg --codec out/bsq --codec out/fsq -o strip.png")
def look(
    picture: Path,
    /,
    *,
    codec: Annotated[list[str], Parameter(negative="")],
    out: Annotated[Path, Parameter(alias="-o")] = Path("out/strip.png"),
    side: int | None = None,
    device: str | None = None,
) -> None:
    """Draw a picture as codecs give it back: original, reconstructions, differences, PSNR and bits a pixel.

    Parameters
    ----------
    picture
        Any picture file.
    codec
        Models: folders, or hub ids. May be repeated.
    out
        The strip to write.
    side
        Pixels of the square that is looked at, cut from the middle; the first codec's own size unless said.
    device
        cpu, cuda, …; a GPU if there is one.
    """
    import torch
    from PIL import Image

    from vitrail.codecs.fit import Fit
    from vitrail.processing.images import load_image
    from vitrail.show.strip import Kept, decibel, draw_strip
    from vitrail.show.style import check_picture, save_picture

    check_picture(out)
    image = load_image(picture)
    models = {name: load_codec(path, device) for path, name in called(codec).items()}
    size = next(iter(models.values())).size if side is None else (side, side)
    original, kept = None, []
    for name, model in models.items():
        pixels, _ = Fit(size=size).whole(model).apply(image, model.factor)
        with torch.no_grad():
            given = model.bytes(model.reconstruct(model.pixels(pixels[None])))[0].cpu()
        original = original or Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())
        kept.append(Kept(name, Image.fromarray(given.permute(1, 2, 0).contiguous().numpy()), model.bits_per_pixel))
    assert original is not None
    save_picture(draw_strip(original, kept, picture.name), out)
    for one in kept:
        bits = f"{one.bits_per_pixel:8.4f} bits a pixel" if one.bits_per_pixel else f"{'continuous':>21}"
        print(f"{decibel(original, one.picture):7.2f} dB  {bits}  {one.name}")
    print(out)


@app.command(
    help_epilogue="Example: vitrail codec compare out/bsq out/fsq --data cifar10 --limit 1000 "
    "--baseline jpeg --baseline webp --baseline avif -o rates.json --plot rates.svg"
)
def compare(
    *codecs: Annotated[str, Parameter(negative="")],
    data: str = "cifar10",
    part: Literal["train", "test"] = "test",
    limit: int | None = None,
    side: int | None = None,
    seed: int = 7171,
    atlas: str = "emoji",
    baseline: Several = (),
    quality: Annotated[tuple[int, ...], Parameter(negative="")] = (),
    chroma: Annotated[tuple[Literal["4:2:0", "4:4:4"], ...], Parameter(negative="")] = ("4:2:0",),
    sheet: Annotated[bool, Parameter(negative="")] = False,
    lpips: Literal["alexnet", "vgg16", "none"] = "alexnet",
    frechet: Annotated[bool, Parameter(negative="")] = False,
    reader: str | None = None,
    probe: int = 0,
    batch: int = 256,
    device: str | None = None,
    out: Annotated[Path | None, Parameter(alias="-o")] = None,
    plot: Path | None = None,
    bits: Literal["coded", "file"] = "coded",
) -> None:
    """Measure codecs, and formats at several qualities, on the same pictures: quality, bits, use of codes, speed.

    Parameters
    ----------
    codecs
        Models: folders, or hub ids.
    data
        cifar10, fashion-mnist, a source of pictures (`vitrail data list`), a folder, or scenes by their preset.
    part
        train or test, of a set with classes.
    limit
        Pictures at most, drawn alike from all.
    side
        Pixels of the square that pictures are resized and cut to; their own size unless said, and 64 for scenes.
    seed
        Of scenes: not one that a codec was trained on.
    atlas
        Sprites of scenes: emoji, or a .safetensors file.
    baseline
        jpeg, webp or avif. May be repeated.
    quality
        Qualities of baselines, 0 to 100, instead of nine of them. May be repeated.
    chroma
        At which resolution baselines keep colour: half (4:2:0) or all of it, which WebP cannot. May be repeated.
    sheet
        Also write many pictures as one sheet, which shares the head of the file among them.
    lpips
        The network behind LPIPS, whose weights are fetched the first time.
    frechet
        Also the Fréchet distance through ResNet-50: 95 MB are fetched the first time, and it takes thousands of
        pictures.
    reader
        A contrastive model that names the classes of the reconstructions: a folder, or a hub id.
    probe
        Pictures of the training part to train a linear probe of the reader on; none unless said.
    batch
        Pictures at once, and on a sheet at most.
    device
        cpu, cuda, …; a GPU if there is one.
    out
        A JSON file for the table, with all settings; it has every row as soon as that is measured.
    plot
        A picture of quality against bits, such as rates.svg or rates.png.
    bits
        What the picture counts: coded, what tells pictures apart; or whole files.
    """
    import torch

    from vitrail.data.sources.progress import bar
    from vitrail.devices import usable
    from vitrail.evals.baselines import QUALITIES, Baseline
    from vitrail.evals.coders import CodecCoder, Coder
    from vitrail.evals.metrics.frechet import features
    from vitrail.evals.suites.reconstruction import measure, shown
    from vitrail.show.figure import check_figure
    from vitrail.show.rates import draw_rates, table

    if plot is not None:
        check_figure(plot)
    if probe and reader is None:
        raise ConfigError("a probe needs a reader's features", "give --reader, or leave --probe out")
    if not codecs and not baseline:
        raise ConfigError("there is nothing to compare", "name codecs, or baselines: --baseline jpeg")
    where = usable(device)
    formats = [
        Baseline(name, level, "4:2:0" if name == "webp" else colour, whole)
        for name in baseline
        for colour in chroma
        for whole in (False, True)[: 1 + sheet]
        for level in quality or QUALITIES
    ]
    coders: list[Coder] = list(dict.fromkeys(formats))
    coders += [CodecCoder(load_codec(path, where), name) for path, name in called(codecs).items()]
    chosen: dict[str, Any] = {"side": side, "classes": reader is not None, "seed": seed, "atlas": atlas}
    if probe and part == "train":
        raise ConfigError("a probe is trained on the part train, and tested on another", "leave --part out")
    pictures = shown(data, part=part, limit=limit, parted=probe > 0, **chosen)
    train = shown(data, part="train", limit=probe, parted=True, **chosen) if probe else None
    networks, missing = _networks(lpips, frechet, where)
    how: dict[str, Any] = {**networks, "missing": missing, "batch": batch, "device": where}
    if "network" in networks:
        how["original"] = features((x.to(where) for x in pictures.batches(batch)), networks["network"])
    how["reader"] = _reader(reader, data, pictures, train, batch, where) if reader else None
    settings = {"data": data, "part": part, "limit": limit, "side": side, "seed": seed, "atlas": atlas, "batch": batch}
    settings |= {"reader": called([reader])[reader] if reader else None, "probe": probe}
    rows: list[Row] = []
    with bar("measuring", len(coders), unit="coder") as progress:
        for coder in coders:
            progress.set_postfix_str(coder.name)
            rows.append(measure(coder, pictures, **how))
            if out is not None:  # what takes hours is not lost when it is stopped
                found = {"suite": "reconstruction", "threads": torch.get_num_threads(), **settings}
                write_plain(out, found | {"rows": [row.plain for row in rows]}, where, quiet=True)
            progress.update()
    print(table(rows))
    for row in rows:
        for name in sorted(set(row.missing) - set(missing)):
            print(f"{row.name} has no {name}: {row.missing[name]}")
    for name, reason in missing.items():
        print(f"no {name}: {reason}")
    if out is not None:
        print(out)
    if plot is not None:
        sides = f"{rows[0].pixels // rows[0].pictures:,} pixels each on average"
        note = f"{rows[0].pictures:,} pictures of {data}, {sides}; whiskers: intervals of 95 %"
        draw_rates(rows, "What codecs keep, and what it costs", note, bits=bits).save(plot)
        print(plot)


def load_codec(name: str, device: str | None) -> Any:
    """A codec; any other model is refused by what it is."""

    from vitrail import hub
    from vitrail.codecs.codec import CodecConfig
    from vitrail.devices import usable
    from vitrail.hub.configs import read_config
    from vitrail.models.qlip import QLIPConfig
    from vitrail.models.unified import UnifiedConfig

    device = usable(device)
    config = read_config(name)
    if not isinstance(config, CodecConfig | QLIPConfig | UnifiedConfig):
        kind = type(config).__name__.removesuffix("Config")
        raise CheckpointError(
            f"{name} is a {kind} and has no codes", "give a codec: a folder that `vitrail train` wrote"
        )
    try:
        model = hub.load(name, device=device)
        return getattr(model, "codec", model)
    except (RuntimeError, AssertionError) as error:
        first = str(error).splitlines()[0]
        raise ConfigError(f"device {device!r} cannot be used: {first}", "try --device cpu") from None


def called(models: Iterable[str]) -> dict[str, str]:
    """What each model is shown as: as it was given, but absolute paths without the folder that holds them all."""
    given = list(dict.fromkeys(models))
    absolute = [name for name in given if Path(name).is_absolute()]
    above = Path(os.path.commonpath([Path(name).parent for name in absolute])) if absolute else Path()
    return {name: str(Path(name).relative_to(above)) if name in absolute else name for name in given}


# ---- what compare needs, and shows ------------------------------------------------------------------------------


def _networks(lpips: str, frechet: bool, device: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Networks that measure, and why others do not: their weights may be out of reach."""
    from vitrail.hub.lpips import load_lpips
    from vitrail.hub.resnet50 import load_resnet50

    found: dict[str, Any] = {}
    missing: dict[str, str] = {}
    if lpips == "none":
        missing["LPIPS"] = "not asked for"
    else:
        try:
            found["perceptual"] = load_lpips(lpips).to(device).eval()  # type: ignore[arg-type]
        except VitrailError as error:
            missing[f"LPIPS-{lpips}"] = error.problem
    if not frechet:
        missing["Fréchet distance"] = "not asked for"
    else:
        try:
            found["network"] = load_resnet50().to(device).eval()
        except VitrailError as error:
            missing["FD-ResNet50"] = error.problem
    return found, missing


def _reader(name: str, data: str, pictures: "Shown", train: "Shown | None", batch: int, device: str) -> "Reader":
    from vitrail.cli.eval_common import Common, open_embedder
    from vitrail.evals.suites.reader import Reader, Told

    where: Any = "cuda" if device.startswith("cuda") else "cpu"
    embedder = open_embedder(name, Common(batch=batch, device=where))

    def told(some: "Shown") -> Told:
        if some.labels is None:
            raise ConfigError(f"{data} has no classes for a reader to name", "leave --reader out, or take cifar10")
        return Told(some.batches(batch), some.labels)

    if train is not None and train.names != pictures.names:
        raise ConfigError(f"{data}: train and test have other classes", "give both the same sub-folders")
    return Reader(embedder, told(pictures), pictures.names, train=told(train) if train else None)
