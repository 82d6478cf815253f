"""`vitrail codec`: reconstructions of codecs, and their rate and distortion beside image formats."""

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, Parameter

from vitrail.cli.config_options import DeviceOption, add_options
from vitrail.cli.output_files import write_json_with_origin
from vitrail.config import ConfigOption, list_options
from vitrail.evals.codec_comparison_options import CodecComparison, shorten_names

if TYPE_CHECKING:
    from vitrail.evals.suites.codec_benchmark import CoderResult

app = App(name="codec")


@app.command(
    name="reconstruct",
    help_epilogue="Example: vitrail codec reconstruct photo.jpg --codec out/bsq --codec out/fsq -o strip.png",
)
def draw_reconstructions(
    image: Path,
    /,
    *,
    codec: Annotated[list[str], Parameter(negative="")],
    out: Annotated[Path, Parameter(alias="-o")] = Path("out/strip.png"),
    image_size: int | None = None,
    device: DeviceOption = None,
) -> None:
    """Draw the reconstructions of an image by codecs, with differences, PSNR and bits a pixel.

    Parameters
    ----------
    image
        An image file.
    codec
        A codec: a folder or a hub id. May be repeated.
    out
        The image to write.
    image_size
        Side of the centre crop in pixels. Default: the image size of the first codec.
    """
    import torch
    from PIL import Image

    from vitrail.codecs.image_sources import ImageResizeConfig
    from vitrail.pipelines import CodecPipeline
    from vitrail.plots.reconstruction_strip import Reconstruction, compute_psnr, draw_reconstructions
    from vitrail.plots.style import check_image_path, save_image
    from vitrail.processing.image_loading import load_image

    check_image_path(out)
    original_image = load_image(image)
    models = {name: CodecPipeline.load(path, device=device).model for path, name in shorten_names(codec).items()}
    size = next(iter(models.values())).image_size if image_size is None else (image_size, image_size)
    original, reconstructions = None, []
    for name, model in models.items():
        pixels, _ = ImageResizeConfig(size=size).resolve_size(model).apply(original_image, model.downsample_factor)
        with torch.no_grad():
            reconstructed = model.to_uint8(model.reconstruct(model.to_pixels(pixels[None])))[0].cpu()
        original = original or Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())
        reconstructions.append(
            Reconstruction(
                name, Image.fromarray(reconstructed.permute(1, 2, 0).contiguous().numpy()), model.bits_per_pixel
            )
        )
    assert original is not None
    save_image(draw_reconstructions(original, reconstructions, image.name), out)
    for one in reconstructions:
        bits = f"{one.bits_per_pixel:8.4f} bits a pixel" if one.bits_per_pixel else f"{'continuous':>21}"
        print(f"{compute_psnr(original, one.image):7.2f} dB  {bits}  {one.name}")
    print(out)


def compare_codecs(*codecs: str, **options: Any) -> None:
    """Compare codecs and image formats on the same images: quality, bits, codebook usage and speed."""
    import torch

    from vitrail.devices import resolve_device
    from vitrail.pipelines import codec_comparison
    from vitrail.plots.charts import check_chart_path, save_chart
    from vitrail.plots.rate_distortion import draw_rate_distortion

    out, plot, bits_axis = options.pop("out", None), options.pop("plot", None), options.pop("bits_axis", "coded")
    device = resolve_device(options.pop("device", None))
    if plot is not None:
        check_chart_path(plot)
    comparison = CodecComparison(codecs=codecs, **options)

    def save(rows: "Sequence[CoderResult]") -> None:
        if out is not None:
            found = {"suite": "reconstruction", "threads": torch.get_num_threads(), **comparison.settings}
            write_json_with_origin(out, found | {"rows": [row.as_dict for row in rows]}, device, quiet=True)

    rows, missing = codec_comparison.compare_codecs(comparison, device, save)
    _print_rates(rows, missing)
    if out is not None:
        print(out)
    if plot is not None:
        sides = f"{rows[0].num_pixels // rows[0].num_images:,} pixels each on average"
        note = f"{rows[0].num_images:,} images of {comparison.data}, {sides}; whiskers: 95 % intervals"
        save_chart(draw_rate_distortion(rows, "Rate and distortion of codecs", note, bits=bits_axis), plot)
        print(plot)


_CODECS = Annotated[str, Parameter(help="Codecs: folders or hub ids.", negative="")]
add_options(
    compare_codecs,
    [inspect.Parameter("codecs", inspect.Parameter.VAR_POSITIONAL, annotation=_CODECS)],
    [
        *(option for option in list_options(CodecComparison) if option.name != "codecs"),
        ConfigOption("device", str | None, None, "device: cpu, cuda, … Default: cuda if available"),
        ConfigOption("out", Path | None, None, "A JSON file for the table and all settings, saved after every row"),
        ConfigOption("plot", Path | None, None, "A plot of quality over bits, such as rates.svg or rates.png"),
        ConfigOption(
            "bits_axis",
            Literal["coded", "file"],
            "coded",
            "what the plot counts as bits: coded (the image data only) or file (whole files)",
        ),
    ],
    aliases={"out": "-o"},
)
app.command(
    compare_codecs,
    name="compare",
    help_epilogue="Example: vitrail codec compare out/bsq out/fsq --data cifar10 --limit 1000 "
    "--baseline jpeg --baseline webp --baseline avif -o rates.json --plot rates.svg",
)


def _print_rates(rows: "list[CoderResult]", missing: dict[str, str]) -> None:
    from vitrail.plots.rate_distortion import format_rate_table

    print(format_rate_table(rows))
    for row in rows:
        for name in sorted(set(row.missing_scores) - set(missing)):
            print(f"{row.name}: {name} is not measured: {row.missing_scores[name]}")
    for name, reason in missing.items():
        print(f"{name} is not measured: {reason}")
