"""Judges generated images: a detector finds the objects, and a rule compares them with the prompt.

B images, O objects
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import torch
from torch import Tensor

from vitrail.data.language import (
    DrawingPromptBatch,
    DrawingSpec,
    SceneLanguage,
    generate_prompts_for_scenes,
    matches_spec,
)
from vitrail.data.language.templates import DRAWING_PROMPT_KINDS
from vitrail.data.scenes.atlas_library import open_atlas
from vitrail.data.scenes.scene import COLOURS, GRID, SceneBatch, SpriteTable
from vitrail.data.scenes.scene_source import RenderedScenes, SceneSource, SceneSourceConfig
from vitrail.errors import ConfigError
from vitrail.evals.scores import Proportion
from vitrail.models.detector import Detector, normalize_images

B = TypeVar("B", DrawingSpec, SceneBatch)

DEFAULT_THRESHOLD = 0.4  # detection score threshold; published error rates use it


class DrawingJudge:
    """Detects objects in images and checks them against drawing specs.

    Detections are converted to scenes of a sprite table. So the same rule applies to detections and to ground truth.
    """

    def __init__(
        self, detector: Detector, language: SceneLanguage, table: SpriteTable, *, threshold: float = DEFAULT_THRESHOLD
    ):
        self.detector, self.language, self.threshold = detector.eval(), language, threshold
        row_of_name: dict[str, int] = {}
        for row, (kind, concept) in enumerate(zip(table.kind, table.concept.tolist(), strict=True)):
            if kind == "thing":
                row_of_name.setdefault(table.names[concept], row)
        unknown = [name for name in row_of_name if name not in detector.config.concepts]
        if unknown:
            raise ConfigError(
                f"the detector has no class for {unknown[0]!r} and {len(unknown) - 1} more of the concepts",
                "train it on these concepts, or judge fewer",
            )
        if detector.config.colours != tuple(colour.name for colour in COLOURS):
            raise ConfigError("the detector was trained on other colours", "train it on the COLOURS of this version")
        # Concepts that no prompt can name are dropped.
        self.sprite_of_concept = torch.tensor([row_of_name.get(name, -1) for name in detector.config.concepts])
        # Without frames: they have names, but the detector has no classes for them.
        self.known_concepts = tuple(table.concept[list(row_of_name.values())].tolist())

    @torch.no_grad()
    def detect_scenes(self, pixels: Tensor) -> SceneBatch:
        """Detect the objects in uint8 images (B, 3, H, W)."""
        detections = self.detector.detect_objects(normalize_images(pixels), threshold=self.threshold)
        B, M = detections.score.shape
        sprites = self.sprite_of_concept.to(pixels.device)[detections.concept.clamp(min=0)].where(
            detections.concept >= 0, -1
        )
        none = torch.full((B, M), -1, device=pixels.device)
        return SceneBatch(
            index=torch.arange(B, device=pixels.device),
            sprite=sprites,
            colour=detections.colour,
            box=(detections.box * GRID).round().long(),
            frame_slot=none,
            background=torch.zeros(B, dtype=torch.int64, device=pixels.device),
        )

    def judge_images(self, spec: DrawingSpec, pixels: Tensor) -> Tensor:
        """Whether each image (B,) matches its spec."""
        return matches_spec(self.language, spec, self.detect_scenes(pixels))


@dataclass(frozen=True)
class JudgeErrorRates:
    """Error rates of a judge on images with known ground truth."""

    false_accepts: Proportion  # of the wrong images
    false_rejects: Proportion  # of the correct images

    @property
    def overall(self) -> Proportion:
        return Proportion(
            self.false_accepts.hits + self.false_rejects.hits, self.false_accepts.total + self.false_rejects.total
        )


def compute_error_rates(verdicts: Tensor, ground_truth: Tensor) -> JudgeErrorRates:
    """Compute error rates from verdicts and ground truth, both bool (B,)."""
    return JudgeErrorRates(
        false_accepts=Proportion(int((verdicts & ~ground_truth).sum()), int((~ground_truth).sum())),
        false_rejects=Proportion(int((~verdicts & ground_truth).sum()), int(ground_truth.sum())),
    )


# ---- renders with known ground truth ----------------------------------------------------------------------------


def sample_matching_scenes(
    language: SceneLanguage, source: SceneSource, kind: str, count: int, *, start: int = 0
) -> tuple[DrawingSpec, RenderedScenes]:
    """Sample rendered scenes with specs of one kind that they match."""
    prompts, rendered = sample_prompted_scenes(language, source, kind, count, start=start)
    return prompts.spec, rendered


def sample_prompted_scenes(
    language: SceneLanguage,
    source: SceneSource,
    kind: str,
    count: int,
    *,
    start: int = 0,
    name_everything: bool = False,
    held_out: bool = False,
) -> tuple[DrawingPromptBatch, RenderedScenes]:
    """Sample prompts of one kind and rendered scenes that match them.

    With `name_everything`, prompts name every object of the scene.
    """
    index, batch_size = start, max(64, 4 * count)
    prompts, rendered = [], []
    while sum(len(prompt_batch.valid) for prompt_batch in prompts) < count:
        if index - start > 1000 * batch_size:
            raise ConfigError(f"scenes of {source.name!r} rarely match any prompt of kind {kind!r}")
        batch_scenes = source.render_indices(torch.arange(index, index + batch_size, device=language.concept.device))
        batch_prompts = generate_prompts_for_scenes(
            language, batch_scenes.scenes, source.config.seed, kind, name_all=name_everything, held_out=held_out
        )
        rows = batch_prompts.valid.nonzero()[:, 0]
        prompts.append(
            DrawingPromptBatch(batch_prompts.text[rows], batch_prompts.spec[rows], batch_prompts.valid[rows])
        )
        rendered.append(RenderedScenes(batch_scenes.scenes[rows], batch_scenes.pixels[rows]))
        index += batch_size
    text, valid = (torch.cat([getattr(one, name) for one in prompts])[:count] for name in ("text", "valid"))
    spec = concatenate_batches([one.spec for one in prompts])[:count]
    scenes = concatenate_batches([one.scenes for one in rendered])[:count]
    pixels = torch.cat([one.pixels for one in rendered])[:count]
    return DrawingPromptBatch(text, spec, valid), RenderedScenes(scenes, pixels)


def concatenate_batches(batches: Sequence[B]) -> B:
    """Concatenate dataclasses of tensors."""
    names = [field.name for field in fields(batches[0])]
    return type(batches[0])(*(torch.cat([getattr(one, name) for one in batches]) for name in names))


def select_rows(mask: Tensor, a: B, b: B) -> B:
    """Take the rows (B,) of `a` where the mask is True, and of `b` elsewhere. Both are dataclasses of tensors."""
    parts = ((getattr(a, field.name), getattr(b, field.name)) for field in fields(a))
    return type(a)(*(torch.where(mask.view(-1, *[1] * (x.ndim - 1)), x, y) for x, y in parts))


def sample_labelled_scenes(
    language: SceneLanguage, source: SceneSource, kind: str, count: int, *, start: int = 0
) -> tuple[DrawingSpec, RenderedScenes]:
    """Sample scenes with specs of one kind; every second spec is altered so that the scene does not match it."""
    specs, rendered = sample_matching_scenes(language, source, kind, count, start=start)
    is_altered = torch.arange(count, device=specs.count.device) % 2 == 1
    return select_rows(is_altered, alter_spec(specs, kind), specs), rendered


def alter_spec(spec: DrawingSpec, kind: str) -> DrawingSpec:
    """Alter one property of each spec: concept, count, colour, relation, or the assignment of colours."""
    if kind in ("single", "two"):  # the concept of another spec
        concept = spec.concept.clone()
        concept[:, -1 if kind == "two" else 0] = spec.concept[:, 0].roll(1)
        return replace(spec, concept=concept)
    if kind == "counting":
        number = spec.count.clone()
        number[:, 0] += torch.where(torch.arange(len(number), device=number.device) % 4 < 2, 1, -1)
        return replace(spec, count=number)
    if kind == "colours":
        colour = spec.colour % (len(COLOURS) - 1) + 1
        return replace(spec, colour=torch.where(spec.colour > 0, colour, 0))
    if kind == "position":
        return replace(spec, relation=spec.relation ^ 1)  # relations come in pairs: left/right, above/below
    return replace(spec, colour=spec.colour.flip(1))


def open_judge_scenes(
    detector: Detector, *, preset: str = "drawing", vendors: Sequence[str] = (), atlas: str = "emoji", seed: int = 0
) -> SceneSource:
    """Open labelled scenes with the things that a detector knows, on which its error is measured."""
    scene: dict[str, object] = {
        "vendors": list(vendors),
        "objects": [1, 4],
        "repeat_probability": 0.4,
        "tint_probability": 0.5,
        "combinations": "all",
    }
    side = detector.config.image.image_size
    config = SceneSourceConfig(atlas=atlas, preset=preset, scene=scene, image_size=side, seed=seed)
    return SceneSource(config, open_atlas(atlas)).with_things(detector.config.concepts)


def measure_judge_error(
    judge: DrawingJudge, source: SceneSource, count: int = 200, *, start: int = 0
) -> dict[str, JudgeErrorRates]:
    """Measure the judge's error rates on `count` labelled renders, per kind and overall."""
    if count < len(DRAWING_PROMPT_KINDS):
        raise ConfigError(
            f"{count} renders for {len(DRAWING_PROMPT_KINDS)} kinds of prompts",
            f"set at least {len(DRAWING_PROMPT_KINDS)}",
        )
    errors, verdicts, ground_truths = {}, [], []
    for i, kind in enumerate(DRAWING_PROMPT_KINDS):
        kind_count = count // len(DRAWING_PROMPT_KINDS) + (i < count % len(DRAWING_PROMPT_KINDS))
        spec, rendered = sample_labelled_scenes(judge.language, source, kind, kind_count, start=start)
        verdicts.append(judge.judge_images(spec, rendered.pixels))
        ground_truths.append(matches_spec(judge.language, spec, rendered.scenes))
        errors[kind] = compute_error_rates(verdicts[-1], ground_truths[-1])
    return errors | {"all": compute_error_rates(torch.cat(verdicts), torch.cat(ground_truths))}
