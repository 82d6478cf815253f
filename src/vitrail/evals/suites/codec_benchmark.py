"""Rate and quality of image coders on an image set: one result per coder, with confidence intervals.

N images, B batch size, H, W pixels
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitrail.codecs.image_sources import ImageResizeConfig
from vitrail.data.image_readers.class_images import SplitName
from vitrail.data.scenes.atlas_library import open_atlas
from vitrail.data.scenes.config import PRESETS
from vitrail.data.scenes.scene_source import SceneSource, SceneSourceConfig
from vitrail.errors import ConfigError, DataError
from vitrail.evals.image_coder import CodedUnit, ImageCoder
from vitrail.evals.image_feature_extractor import LazyImage
from vitrail.evals.metrics import CodebookUsage, Estimate, compare_images, estimate_mean
from vitrail.evals.metrics.estimate import BOOTSTRAP_ROUNDS, TAIL_FRACTION
from vitrail.evals.metrics.frechet_distance import FeatureNetwork, extract_features, frechet_distance
from vitrail.evals.metrics.image_comparison import PerceptualMetric
from vitrail.evals.scores import Score
from vitrail.evals.suites import image_collections
from vitrail.evals.suites.reconstruction_recognition import ReconstructionRecognizer
from vitrail.processing.image_loading import load_image

CODED_BPP, FILE_BPP, ENTROPY_BPP = "bits a pixel", "bits a pixel in files", "bits a pixel at the codes' entropy"
POOLED_PSNR = "PSNR of the mean error"
ENCODE_RATE, DECODE_RATE = "pictures a second, encoding", "pictures a second, decoding"
MIN_UNITS = 5  # files or batches that an interval needs
SCENE_BATCH = 64  # scenes rendered at once
SCENE_SEED = 7171  # seed of scenes, not used in training


# ---- images -----------------------------------------------------------------------------------------------------


class ImageSet(NamedTuple):
    """Images that are loaded on demand, at their own size, or resized and cropped to `size`."""

    images: Sequence[LazyImage]
    labels: Tensor | None = None  # (N,)
    names: tuple[str, ...] = ()
    size: tuple[int, int] | None = None

    def iter_batches(self, batch_size: int) -> Iterator[Tensor]:
        """Yield batches uint8 (B, 3, H, W) in order; a batch has consecutive images of one size."""
        if batch_size < 1:
            raise ConfigError(f"batch size {batch_size}", "set at least 1")
        pending: list[Tensor] = []
        for picture in self.images:
            image = load_image(picture() if callable(picture) else picture)
            fit = ImageResizeConfig(how="crop") if self.size is None else ImageResizeConfig(size=self.size)
            pixels, _ = fit.apply(image, 1)
            if pending and (len(pending) == batch_size or pending[0].shape != pixels.shape):
                yield torch.stack(pending)
                pending = []
            pending.append(pixels)
        if pending:
            yield torch.stack(pending)


def open_image_set(
    name: str,
    *,
    split: SplitName = "test",
    limit: int | None = None,
    image_size: int | None = None,
    with_classes: bool = False,
    require_splits: bool = False,
    seed: int = SCENE_SEED,
    atlas: str = "emoji",
) -> ImageSet:
    """Open an image set: scenes by preset name, a classification dataset, or any image source or folder.

    With `with_classes`, the name is a folder with one sub-folder per class; with `require_splits`, it contains `train`
    and `test` folders of that form. Scenes and vector images are rendered at `image_size`; other images are resized to
    squares of this size if it is given.
    """
    size = None if image_size is None else (image_size, image_size)
    if name in PRESETS and not Path(name).is_dir():
        if limit is None:
            raise ConfigError(f"scenes ({name}) are unlimited", "set --limit")
        config = SceneSourceConfig(
            atlas=atlas, preset=name, image_size=image_size or SceneSourceConfig(atlas=atlas).image_size, seed=seed
        )
        if limit < 1:
            raise ConfigError(f"limit = {limit}", "set at least 1")
        return ImageSet(_SceneImages(SceneSource(config, open_atlas(atlas)), limit))
    if with_classes or name in image_collections.CLASSIFICATION_DATASETS:
        dataset = image_collections.open_labelled_images(name, split, limit, require_splits=require_splits)
        return ImageSet(dataset.images, dataset.labels, dataset.names, size)
    return ImageSet(
        image_collections.open_image_collection(name, limit, None if Path(name).is_dir() else image_size).images,
        size=size,
    )


class _SceneImages(Sequence[np.ndarray]):
    """Scenes as a sequence of images, rendered in batches."""

    def __init__(self, source: SceneSource, count: int):
        self._source, self._count, self._start, self._held = source, count, -1, np.empty(0)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> np.ndarray:  # type: ignore[override]
        if not 0 <= number < self._count:
            raise IndexError(number)
        start = number // SCENE_BATCH * SCENE_BATCH
        if start != self._start:
            index = torch.arange(start, min(start + SCENE_BATCH, self._count))
            self._held = self._source.render_indices(index).pixels.permute(0, 2, 3, 1).contiguous().numpy()
            self._start = start
        return self._held[number - start]


# ---- results ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CoderResult:
    """Result of one coder.

    scores              estimates by name
    num_identical       images that are reconstructed exactly
    codebook_usage      per code group
    recognition_scores  classification of the reconstructions
    missing_scores      scores that were not measured, with the reason
    metadata            settings of the coder
    """

    name: str
    kind: str
    num_images: int
    num_pixels: int
    scores: Mapping[str, Estimate]
    device: str
    num_identical: int
    codebook_usage: tuple[CodebookUsage, ...]
    recognition_scores: tuple[Score, ...]
    missing_scores: Mapping[str, str]
    metadata: Mapping[str, Any]

    @property
    def used_fraction(self) -> float | None:
        """Fraction of used codes, averaged over code groups."""
        return (
            sum(use.used_fraction for use in self.codebook_usage) / len(self.codebook_usage)
            if self.codebook_usage
            else None
        )

    @property
    def perplexity(self) -> float | None:
        """Perplexity of the codes, as geometric mean over code groups."""
        return (
            2 ** (sum(use.entropy for use in self.codebook_usage) / len(self.codebook_usage))
            if self.codebook_usage
            else None
        )

    @property
    def as_dict(self) -> dict[str, Any]:
        """The result as a JSON object; infinite values are null."""
        return {
            "name": self.name,
            "kind": self.kind,
            "num_images": self.num_images,
            "num_pixels": self.num_pixels,
            "num_identical": self.num_identical,
            "device": self.device,
            "scores": {
                name: {
                    "value": _finite_or_none(one.value),
                    "interval": [_finite_or_none(end) for end in one.interval],
                    "count": one.count,
                }
                for name, one in self.scores.items()
            },
            "codebook_usage": [
                use._asdict() | {"used_fraction": use.used_fraction, "perplexity": use.perplexity}
                for use in self.codebook_usage
            ],
            "recognition_scores": [score.as_dict for score in self.recognition_scores],
            "missing_scores": dict(self.missing_scores),
            "metadata": dict(self.metadata),
        }


def measure_coder(
    coder: ImageCoder,
    image_set: ImageSet,
    *,
    batch_size: int = 256,
    device: torch.device | str = "cpu",
    perceptual: PerceptualMetric | None = None,
    network: FeatureNetwork | None = None,
    original_features: Tensor | None = None,
    recognizer: ReconstructionRecognizer | None = None,
    missing: Mapping[str, str] | None = None,
    rounds: int = BOOTSTRAP_ROUNDS,
) -> CoderResult:
    """Measure a coder on an image set in one pass over batches.

    device             device of the metrics
    missing            reasons why LPIPS or the Fréchet distance are not measured, for the result
    original_features  features (N, D) of the images, to compute them once for all coders
    """
    units: list[CodedUnit] = []
    errors: list[Tensor] = []
    counts: list[int] = []
    seconds: dict[str, list[float]] = {ENCODE_RATE: [], DECODE_RATE: []}
    recognition = recognizer.start_pass() if recognizer else None
    feature_parts: tuple[list[Tensor], list[Tensor]] = ([], [])  # features of images and of reconstructions

    def pairs() -> Iterator[tuple[Tensor, Tensor]]:
        for x in image_set.iter_batches(batch_size):
            if not counts:
                coder.decode(coder.encode(x))  # warm-up
            coded = _run_timed(partial(coder.encode, x), seconds[ENCODE_RATE])
            y = _run_timed(partial(coder.decode, coded), seconds[DECODE_RATE])
            units.extend(coder.measure_bits(coded))
            counts.append(len(x))
            x, y = x.to(device), y.to(device)
            errors.append((x.double() - y.double()).div(255).square().mean((1, 2, 3)).cpu())
            if recognition:
                recognition.add_images(y)
            if network is not None:
                feature_parts[1].append(extract_features(y, network))
                if original_features is None:
                    feature_parts[0].append(extract_features(x, network))
            yield x, y

    scores = compare_images(pairs(), perceptual=perceptual, rounds=rounds)
    if network is not None:
        first = torch.cat(feature_parts[0]) if original_features is None else original_features
        distance = frechet_distance(first.to(device), torch.cat(feature_parts[1]).to(device), network.name, paired=True)
        scores[distance.name] = distance
    summary = coder.finish()
    squared_errors = torch.cat(errors)
    mean = estimate_mean(POOLED_PSNR, squared_errors, rounds=rounds)
    low, high = (_to_decibel(end) for end in reversed(mean.interval))
    scores[POOLED_PSNR] = Estimate(POOLED_PSNR, _to_decibel(mean.value), (low, high), len(squared_errors))
    missing, total, N = dict(missing or {}), sum(unit.pixels for unit in units), len(squared_errors)
    pixels, coded = [unit.pixels for unit in units], [unit.coded_bits for unit in units]
    if None in coded:
        reason = "codes are continuous and have no bit rate"
        missing[CODED_BPP], missing[FILE_BPP] = reason, reason
    else:
        scores[CODED_BPP] = estimate_ratio(
            CODED_BPP, coded, pixels, count=N, shared_amount=summary.shared_bits, rounds=rounds
        )
        files = [unit.file_bits for unit in units]
        shares_file = None in files  # one file for all images cannot be resampled
        amounts_and_pixels = ([summary.file_bits], [total]) if shares_file else (files, pixels)
        scores[FILE_BPP] = estimate_ratio(FILE_BPP, *amounts_and_pixels, count=N, rounds=rounds)
    if summary.codebook_usage:
        bits = sum(use.entropy * use.tokens for use in summary.codebook_usage)
        scores[ENTROPY_BPP] = estimate_ratio(ENTROPY_BPP, [bits], [total], count=N)
    for name, spent in seconds.items():
        scores[name] = estimate_ratio(name, counts, spent, count=N, rounds=rounds)
    recognition_scores = recognition.compute_scores() if recognition else ()
    num_identical = int((squared_errors == 0).sum())
    return CoderResult(
        coder.name,
        coder.kind,
        N,
        total,
        scores,
        coder.device,
        num_identical,
        summary.codebook_usage,
        tuple(recognition_scores),
        missing,
        coder.metadata,
    )


def estimate_ratio(
    name: str,
    amounts: Sequence[float | None],
    denominators: Sequence[float],
    *,
    count: int,
    shared_amount: float = 0,
    rounds: int = BOOTSTRAP_ROUNDS,
    seed: int = 0,
) -> Estimate:
    """Σ amounts / Σ denominators, with `shared_amount` added to the numerator, and its bootstrap interval over units.

    The interval is infinite for fewer than `MIN_UNITS` units.
    """
    numerators, divisors = (torch.tensor(list(values), dtype=torch.float64) for values in (amounts, denominators))
    if len(numerators) != len(divisors) or not len(divisors) or not bool(divisors.sum() > 0):
        raise DataError(
            f"{name}: {len(numerators)} amounts and {len(divisors)} denominators", "pass one or more of each"
        )
    value = (numerators.sum().item() + shared_amount) / divisors.sum().item()
    if len(numerators) < MIN_UNITS or not rounds:
        return Estimate(name, value, (-math.inf, math.inf), count)
    generator = torch.Generator().manual_seed(seed)
    resampled = []
    for _ in range(rounds):
        draw = torch.randint(len(numerators), (len(numerators),), generator=generator)
        resampled.append((numerators[draw].sum() + shared_amount) / divisors[draw].sum())
    values = torch.stack(resampled).sort().values
    ranks = math.floor(TAIL_FRACTION * (rounds - 1)), math.ceil((1 - TAIL_FRACTION) * (rounds - 1))
    return Estimate(name, value, (values[ranks[0]].item(), values[ranks[1]].item()), count)


def _run_timed(call: Callable[[], Any], durations: list[float]) -> Any:
    start = time.perf_counter()
    result = call()
    durations.append(time.perf_counter() - start)
    return result


def _to_decibel(error: float) -> float:
    return -10 * math.log10(error) if error > 0 else math.inf


def _finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None
