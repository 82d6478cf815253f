"""`vitrail tokenize` and `vitrail detokenize`: encode images and videos to codec tokens, and decode them."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from vitrail.cli.config_options import DeviceOption
from vitrail.errors import ConfigError

if TYPE_CHECKING:
    from vitrail.codecs.token_file import TokenFileHeader
    from vitrail.codecs.video_token_file import TokenizedVideo

_FIT_DESCRIPTIONS = {
    "cover": "resized to cover the image size, then center-cropped (--fit pad keeps all pixels)",
    "pad": "kept at their size, padded to full patches",
    "crop": "kept at their size, cropped to full patches (--fit pad keeps all pixels)",
}
MAX_NAMED_FILES = 20  # unreadable files, and videos, that are listed; the others are counted


def tokenize_files(
    inputs: Annotated[list[str], Parameter(negative="")],
    /,
    *,
    codec: str,
    out: Annotated[Path, Parameter(alias="-o")],
    fit: Literal["cover", "pad", "crop"] | None = None,
    image_size: int | None = None,
    batch_size: int = 32,
    num_workers: int = 2,
    start: float = 0.0,
    end: float | None = None,
    fps: float | None = None,
    segment_frames: int | None = None,
    chunk_frames: int | None = None,
    device: DeviceOption = None,
) -> None:
    """Encode images or videos to a file of codec tokens.

    An image codec encodes images, folders and shards to bit-packed ids. A video codec encodes videos and folders: every
    frame and its timestamp is kept. Codecs without a codebook give latents, which are stored in the dtype of the codec.

    The same command resumes an interrupted run. Unreadable files are listed at the end, and in the file with the
    reason. A video that cannot be read completely is listed with the number of frames that were read.

    Example: vitrail tokenize photos --codec out/bsq -o photos.vtok

    Example: vitrail tokenize clip.mp4 --codec out/cosmos -o clip.vt

    Parameters
    ----------
    inputs
        Images, folders (searched recursively), and shards (a .tar, a folder of them, "train-{000..009}.tar"); or
        videos and folders of videos.
    codec
        A codec: a folder or a hub id.
    out
        The file to write.
    fit
        How frames are fitted to the grid of codes; what is cropped is printed. cover: resize to cover the image size of
        the codec or --image-size, then crop the centre. pad: keep the size and replicate edges to full patches;
        decoding removes the padding. crop: keep the size and drop the remaining pixels at the right and bottom edge.
        Default: cover for images, pad for videos.
    image_size
        Side of the square of `cover` in pixels. Default: the image size of the codec.
    batch_size
        Images a batch.
    num_workers
        Number of threads that read images.
    start
        Second of each video to start at.
    end
        Second of each video to end before. Default: its end.
    fps
        Frame rate to which videos are resampled. Default: every frame is kept, with its own timestamp.
    segment_frames
        Frames of a video that are coded independently of those before: 1 + m·n, where m is the temporal factor of the
        codec, and 8 for CogVideoX. Seeking and resuming start at a segment. Default: about 121.
    chunk_frames
        Frames of a video that are encoded at a time: a multiple of m. Fewer need less memory. Default: about 8.
    """
    from vitrail.api import has_video_codec

    if image_size is not None and fit not in ("cover", None):
        raise ConfigError(f"--image-size needs --fit cover, not {fit!r}", "remove one of the two options")
    fit = "cover" if fit is None and image_size is not None else fit
    video_options = {
        "start": start, "end": end, "fps": fps, "segment_frames": segment_frames, "chunk_frames": chunk_frames
    }  # fmt: skip
    if has_video_codec(codec):
        _tokenize_videos(inputs, codec, out, fit=fit or "pad", image_size=image_size, device=device, **video_options)
        return
    given = [name for name, value in video_options.items() if value]
    if given:
        option = f"--{given[0].replace('_', '-')}"
        raise ConfigError(f"{option} needs a video codec, but {codec} is none", f"remove {option}")
    _tokenize_images(
        inputs, codec, out, fit=fit or "cover", image_size=image_size, batch_size=batch_size,
        num_workers=num_workers, device=device,
    )  # fmt: skip


def _tokenize_images(
    inputs: list[str],
    codec: str,
    out: Path,
    *,
    fit: Literal["cover", "pad", "crop"],
    image_size: int | None,
    batch_size: int,
    num_workers: int,
    device: str | None,
) -> None:
    from tqdm import tqdm

    from vitrail.api import tokenize
    from vitrail.codecs import image_tokenization
    from vitrail.data.formats.media_folders import VIDEO_SUFFIXES
    from vitrail.pipelines.codec_pipeline import CodecPipeline

    pipeline = CodecPipeline.load(codec, device=device)
    for name in inputs:
        if Path(name).suffix.lower() in VIDEO_SUFFIXES:
            raise ConfigError(f"{name} is a video, but {codec} encodes images", "give a video codec")
    with tqdm(unit=" images", file=sys.stderr, disable=None) as bar:

        def show(count: int, total: int) -> None:
            bar.total = total
            bar.update(count)

        file = tokenize(
            inputs,
            pipeline,
            out,
            fit=fit,
            image_size=image_size,
            batch_size=batch_size,
            num_workers=num_workers,
            progress=show,
        )
    with file:
        weight = out.stat().st_size
        print(f"{len(file):,} images, {pipeline.model.bits} bits a code, {weight:,} bytes: {out}")
        cropped = image_tokenization.count_cropped_images(file)
        print(f"--fit {fit}: {_FIT_DESCRIPTIONS[fit]}; {cropped:,} of {len(file):,} images lost pixels at their edges")
        _print_faults(file.errors)


def _tokenize_videos(
    inputs: list[str], codec: str, out: Path, *, fit: Literal["cover", "pad", "crop"], **options: Any
) -> None:
    from vitrail.api import tokenize_videos

    with _show_frames() as progress:
        file = tokenize_videos(inputs, codec, out, fit=fit, progress=progress, **options)
    with file:
        videos = list(file)
        frames, seconds = sum(map(len, videos)), sum(video.duration for video in videos)
        weight = out.stat().st_size
        print(
            f"{_count_videos(len(file))}, {frames:,} frames, {_describe_tokens(file.header)}, {weight:,} bytes, "
            f"{8 * weight / seconds / 1000:,.1f} kbit/s: {out}"
        )
        for video in videos[:MAX_NAMED_FILES]:
            print(f"  {_describe_video(video)}")
        if len(videos) > MAX_NAMED_FILES:
            print(f"  … and {len(videos) - MAX_NAMED_FILES:,} more")
        print(f"--fit {fit}: {_FIT_DESCRIPTIONS[fit]}")
        _print_faults(file.errors)


@contextmanager
def _show_frames() -> Iterator[Callable[[str, int, int], None]]:
    """Show a progress bar of the frames of each video. The value is the callback for `tokenize_videos`."""
    from tqdm import tqdm

    video = ""
    with tqdm(unit=" frames", file=sys.stderr, disable=None) as bar:

        def show(name: str, count: int, total: int) -> None:
            nonlocal video
            if name != video:
                video = name
                bar.set_description(name, refresh=False)
                bar.reset(total)
            bar.update(count)

        yield show


def _count_videos(count: int) -> str:
    return f"{count:,} video" if count == 1 else f"{count:,} videos"


def _describe_tokens(header: "TokenFileHeader") -> str:
    if header.video is not None and header.video.latent_dtype is not None:
        return f"{header.video.latent_width} {header.video.latent_dtype} a code"
    return f"{sum(header.bits)} bits a code"


def _describe_video(video: "TokenizedVideo") -> str:
    """Describe frames, rate and sizes of a video in one line."""
    rate = f"{float(video.frame_rate):.4g} a second" + ("" if video.has_constant_rate else " on average (variable)")
    sizes = [f"{height} × {width}" for height, width in (video.source_size, video.image_size, video.grid)]
    shown = f"{sizes[0]} pixels" if sizes[0] == sizes[1] else f"{sizes[0]} → {sizes[1]} pixels"
    turned = ", turned upright" if any(video.record.orientation) else ""
    return f"{video.name}: {len(video):,} frames, {video.duration:.3f} s, {rate}; {shown}{turned}, {sizes[2]} codes"


def detokenize_files(
    file: Path,
    /,
    *,
    codec: str,
    out: Annotated[Path, Parameter(alias="-o")],
    batch_size: int = 32,
    start: float = 0.0,
    end: float | None = None,
    device: DeviceOption = None,
) -> None:
    """Decode a token file to PNG images, or to H.264 videos with the timestamps of their sources.

    The file must be complete, and written with the same codec and weights. Any other file is refused.

    Example: vitrail detokenize photos.vtok --codec out/bsq -o photos-again

    Example: vitrail detokenize clip.vt --codec out/cosmos -o clip-again.mp4 --start 60 --end 70

    Parameters
    ----------
    file
        A token file that `vitrail tokenize` wrote.
    codec
        The codec that wrote it: a folder or a hub id.
    out
        The folder to write to; or, for one video, a file that ends in .mp4, .mov or .mkv.
    batch_size
        Images a batch.
    start
        Second of each video to start at.
    end
        Second of each video to end before. Default: its end.
    """
    from vitrail.codecs.token_file import read_token_file_header

    if read_token_file_header(file).video is not None:
        _detokenize_videos(file, codec, out, start, end, device)
    elif start or end is not None:
        raise ConfigError(f"--start and --end need a file of videos, but {file} has images", "remove them")
    else:
        _detokenize_images(file, codec, out, batch_size, device)


def _detokenize_images(file: Path, codec: str, out: Path, batch_size: int, device: str | None) -> None:
    from tqdm import tqdm

    from vitrail.codecs.image_tokenization import detokenize_images as write
    from vitrail.codecs.token_file import TokenFile
    from vitrail.pipelines import CodecPipeline

    with TokenFile(file) as token_file:
        model = CodecPipeline.load(codec, device=device).model
        with tqdm(total=len(token_file), unit=" images", file=sys.stderr, disable=None) as bar:
            paths = write(model, token_file, out, batch_size=batch_size, progress=bar.update)
        print(f"{len(paths):,} images: {out}")
        _print_faults(token_file.errors)


def _detokenize_videos(file: Path, codec: str, out: Path, start: float, end: float | None, device: str | None) -> None:
    from vitrail.api import load_video_codec
    from vitrail.codecs.video_token_file import VideoTokenFile
    from vitrail.codecs.video_tokenization import detokenize_videos as write

    with VideoTokenFile(file) as token_file:
        model = load_video_codec(codec, device)
        with _show_frames() as progress:
            paths = write(model, token_file, out, start=start, end=end, progress=progress)
        frames = sum(len(video.find_frames(start, end)) for video in token_file)
        print(f"{_count_videos(len(paths))}, {frames:,} frames: {out}")
        _print_faults(token_file.errors)


def _print_faults(
    faults: dict[str, str], log: Callable[[str], Any] = lambda line: print(line, file=sys.stderr)
) -> None:
    if not faults:
        return
    log(f"{len(faults):,} cannot be read; the reasons are saved in the file:")
    for name, reason in list(faults.items())[:MAX_NAMED_FILES]:
        log(f"  {name}: {reason}")
    if len(faults) > MAX_NAMED_FILES:
        log(f"  … and {len(faults) - MAX_NAMED_FILES:,} more")
