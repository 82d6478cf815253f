"""Compare codecs and image formats on the same images: quality, bits, codebook usage and speed."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from vitrail.data.sources.progress_bar import progress_bar
from vitrail.errors import ConfigError, VitrailError
from vitrail.evals.codec_comparison_options import CodecComparison, shorten_names
from vitrail.evals.image_coder import CodecCoder, ImageCoder
from vitrail.evals.image_format_coder import QUALITIES, ImageFormatCoder
from vitrail.evals.metrics.frechet_distance import extract_features
from vitrail.evals.suites.codec_benchmark import CoderResult, ImageSet, measure_coder, open_image_set
from vitrail.evals.suites.reconstruction_recognition import LabelledBatches, ReconstructionRecognizer
from vitrail.hub import lpips_weights, resnet50_weights
from vitrail.pipelines.codec_pipeline import CodecPipeline
from vitrail.pipelines.embedding import EmbeddingPipeline


class MetricNetworks(NamedTuple):
    """Networks of the metrics by argument of `measure_coder`, and metric → reason for those that are missing."""

    networks: dict[str, Any]
    missing: dict[str, str]


def open_coders(options: CodecComparison, device: str) -> list[ImageCoder]:
    """Open the image formats at all qualities, then the codecs."""
    formats = [
        ImageFormatCoder(name, level, "4:2:0" if name == "webp" else colour, whole)  # type: ignore[arg-type]
        for name in options.baseline
        for colour in options.chroma_subsampling
        for whole in (False, True)[: 1 + options.image_sheets]
        for level in options.quality or QUALITIES
    ]
    names = shorten_names(options.codecs)
    codecs = [CodecCoder(CodecPipeline.load(path, device=device).model, name) for path, name in names.items()]
    return [*dict.fromkeys(formats), *codecs]


def load_metric_networks(options: CodecComparison, device: str) -> MetricNetworks:
    """Load the networks of the metrics."""
    found, missing = MetricNetworks({}, {})
    if options.lpips == "none":
        missing["LPIPS"] = "not requested"
    else:
        try:
            found["perceptual"] = lpips_weights.load_lpips(options.lpips).to(device).eval()
        except VitrailError as error:
            missing[f"LPIPS-{options.lpips}"] = error.problem
    if not options.frechet:
        missing["Fréchet distance"] = "not requested"
    else:
        try:
            found["network"] = resnet50_weights.load_resnet50().to(device).eval()
        except VitrailError as error:
            missing["FD-ResNet50"] = error.problem
    return MetricNetworks(found, missing)


def load_recognizer(
    options: CodecComparison, name: str, images: ImageSet, train: ImageSet | None, device: str
) -> ReconstructionRecognizer:
    """Load the model that classifies the reconstructions."""
    embedder = EmbeddingPipeline.load(name, device=device).build_embedder(options.batch_size)
    if train is not None and train.names != images.names:
        raise ConfigError(f"{options.data}: train and test have different classes", "give both the same sub-folders")
    probe_data = None if train is None else _label_batches(options, train)
    return ReconstructionRecognizer(embedder, _label_batches(options, images), images.names, train=probe_data)


def _label_batches(options: CodecComparison, images: ImageSet) -> LabelledBatches:
    if images.labels is None:
        problem = f"--recognizer needs classes, but {options.data} has none"
        raise ConfigError(problem, "remove it, or use --data cifar10")
    return LabelledBatches(images.iter_batches(options.batch_size), images.labels)


def compare_codecs(
    options: CodecComparison,
    device: str,
    on_result: Callable[[Sequence[CoderResult]], None] | None = None,
) -> tuple[list[CoderResult], dict[str, str]]:
    """Measure all coders. Returns the results, and metric → reason for those that are not measured.

    `on_result` is called with all results so far after each coder, so that an interrupted comparison keeps them.
    """
    coders = open_coders(options, device)
    chosen: dict[str, Any] = {"image_size": options.image_size, "seed": options.seed, "atlas": options.atlas}
    chosen |= {"with_classes": options.recognizer is not None, "require_splits": options.probe_images > 0}
    images = open_image_set(options.data, split=options.split, limit=options.limit, **chosen)
    train = None
    if options.probe_images:
        train = open_image_set(options.data, split="train", limit=options.probe_images, **chosen)
    networks, missing = load_metric_networks(options, device)
    measures: dict[str, Any] = {**networks, "missing": missing, "batch_size": options.batch_size, "device": device}
    if "network" in networks:
        batches = (x.to(device) for x in images.iter_batches(options.batch_size))
        measures["original_features"] = extract_features(batches, networks["network"])
    if options.recognizer is not None:
        measures["recognizer"] = load_recognizer(options, options.recognizer, images, train, device)
    results: list[CoderResult] = []
    with progress_bar("measuring", len(coders), unit="coder") as progress:
        for coder in coders:
            progress.set_postfix_str(coder.name)
            results.append(measure_coder(coder, images, **measures))
            if on_result is not None:
                on_result(results)
            progress.update()
    return results, missing
