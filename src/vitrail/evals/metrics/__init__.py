"""Measures as pure functions, with intervals: of pictures and codes, here; of words, in a module each."""

from vitrail.evals.metrics.codes import Use, bits_per_pixel, codebook_use, times_smaller
from vitrail.evals.metrics.compare import compare
from vitrail.evals.metrics.estimate import Estimate, estimate
from vitrail.evals.metrics.frechet import Moments, features, frechet, frechet_distance
from vitrail.evals.metrics.similarity import lpips, psnr, ssim

__all__ = [
    "Estimate",
    "Moments",
    "Use",
    "bits_per_pixel",
    "codebook_use",
    "compare",
    "estimate",
    "features",
    "frechet",
    "frechet_distance",
    "lpips",
    "psnr",
    "ssim",
    "times_smaller",
]
