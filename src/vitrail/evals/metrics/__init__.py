"""Metrics, with confidence intervals: functions of images or answers, and the scores of benchmarks made of them."""

from vitrail.evals.metrics.codebook_metrics import (
    CodebookUsage,
    bits_per_pixel,
    compression_ratio,
    measure_codebook_usage,
)
from vitrail.evals.metrics.estimate import Estimate, estimate_mean
from vitrail.evals.metrics.frechet_distance import (
    FeatureMoments,
    extract_features,
    frechet_distance,
    gaussian_frechet_distance,
)
from vitrail.evals.metrics.image_comparison import compare_images
from vitrail.evals.metrics.image_similarity import lpips, psnr, ssim

__all__ = [
    "CodebookUsage",
    "Estimate",
    "FeatureMoments",
    "bits_per_pixel",
    "compare_images",
    "compression_ratio",
    "estimate_mean",
    "extract_features",
    "frechet_distance",
    "gaussian_frechet_distance",
    "lpips",
    "measure_codebook_usage",
    "psnr",
    "ssim",
]
