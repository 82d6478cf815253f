"""Detector pipeline: the objects in images, with names, scores and boxes."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from vitrail import hub
from vitrail.devices import resolve_device
from vitrail.errors import CheckpointError, ConfigError
from vitrail.evals.drawing_judge import DEFAULT_THRESHOLD
from vitrail.models.detector import Detections, Detector, normalize_images
from vitrail.processing.image_loading import load_image


class DetectedObject(NamedTuple):
    """An object in an image; the box is x0 y0 x1 y1 in 0 … 1."""

    name: str
    score: float
    box: tuple[float, float, float, float]


class DetectorPipeline:
    """Detect objects with a detector, such as the judge of drawings: `vitrail.load("judge")`."""

    def __init__(self, model: Detector):
        self.model = model.eval()

    @classmethod
    def load(
        cls,
        name_or_path: str | Path,
        *,
        device: str | torch.device | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> "DetectorPipeline":
        """Load a bundled detector or a folder."""
        model = hub.load(name_or_path, dtype=dtype, device=resolve_device(device))
        if not isinstance(model, Detector):
            raise CheckpointError(
                f"{name_or_path} is a {type(model).__name__}, not a detector", "train one: vitrail train judge"
            )
        return cls(model)

    def resize(self, image: Any) -> Image.Image:
        """Load an image and resize it to the square image size of the model."""
        side = self.model.config.image.image_size
        return load_image(image).resize((side, side), Image.Resampling.BICUBIC)

    def detect(self, images: Any, *, threshold: float = DEFAULT_THRESHOLD) -> list[list[DetectedObject]]:
        """Detect the objects in one image or a list of images, by descending score."""
        several = list(images) if isinstance(images, list | tuple) else [images]
        if not several:
            raise ConfigError("there is no image", "give at least one image")
        arrays = np.stack([np.array(self.resize(image)) for image in several])
        pixels = torch.from_numpy(arrays).movedim(-1, 1).to(next(self.model.parameters()).device)
        detections = self.model.detect_objects(normalize_images(pixels), threshold=threshold)
        return [
            [self._describe(detections, row, i) for i in range(int(detections.count[row]))]
            for row in range(len(several))
        ]

    def _describe(self, detections: Detections, row: int, i: int) -> DetectedObject:
        config = self.model.config
        colour, concept = (
            config.colours[int(detections.colour[row, i])],
            config.concepts[int(detections.concept[row, i])],
        )
        x0, y0, x1, y1 = detections.box[row, i].clamp(0, 1).tolist()
        return DetectedObject(f"{colour} {concept}".strip(), float(detections.score[row, i]), (x0, y0, x1, y1))
