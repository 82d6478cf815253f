"""Judge the drawings of a demo with a detector."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from vitrail import hub
from vitrail.data.language import DrawingSpec, SceneLanguage, matches_spec
from vitrail.data.scenes.plurals import pluralize
from vitrail.data.scenes.scene import COLOURS, GRID, SceneBatch, SpriteTable
from vitrail.evals.drawing_judge import DrawingJudge
from vitrail.plots.html_page import Html, render_image, render_lines, render_verdict

StepLogger = Callable[[str], Callable[[int, int], Any]]
"""Called with the name of a step of the demo; returns a callback for (done, total)."""


class JudgedDrawing(NamedTuple):
    """A drawing, its prompt, the objects detected by the judge, and whether they match."""

    prompt: str
    spec: DrawingSpec
    seed: int
    image: Image.Image
    detected: SceneBatch
    is_right: bool


def load_judge(device: str) -> DrawingJudge:
    """Load the packaged judge, with a vocabulary of its concepts. No sprites are needed."""
    detector = hub.load("judge", dtype=torch.float32, device=device)
    names = detector.config.concepts
    n = len(names)
    known = SpriteTable(
        id=names,
        vendor=("",) * n,
        key=names,
        kind=("thing",) * n,
        concept=torch.arange(n),
        names=names,
        plurals=tuple(map(pluralize, names)),
        category=("thing",) * n,
        aspect=torch.full((n, 2), GRID),
    )
    return DrawingJudge(detector, SceneLanguage.build(known).to(device), known)


def judge_drawing(judge: DrawingJudge, prompt: str, spec: DrawingSpec, seed: int, image: Image.Image) -> JudgedDrawing:
    """Resize an image to the judge's input size, and check it against the only row of `spec`."""
    side = judge.detector.config.image.image_size
    pixels = torch.from_numpy(np.array(image.resize((side, side), Image.Resampling.BICUBIC)))  # (H, W, 3)
    detections = judge.detect_scenes(pixels.permute(2, 0, 1)[None].to(spec.count.device))
    return JudgedDrawing(prompt, spec, seed, image, detections, bool(matches_spec(judge.language, spec, detections)[0]))


def describe_detections(judge: DrawingJudge, detected: SceneBatch) -> str:
    """Describe the objects that the judge detects in an image."""
    names = judge.detector.config.concepts
    things = [
        f"{COLOURS[colour].name} {names[thing]}".strip()
        for thing, colour in zip(detected.sprite[0].tolist(), detected.colour[0].tolist(), strict=True)
        if thing >= 0
    ]
    return ", ".join(things) or "no known object"


def rank_clarity(drawing: JudgedDrawing) -> tuple[bool, bool, int]:
    """Sort key of a drawing: right, without additional objects, and number of requested things and colours."""
    things = int(drawing.spec.count.sum())
    colours = int(((drawing.spec.colour > 0) & (drawing.spec.count > 0)).sum())
    return drawing.is_right, int(drawing.detected.is_filled.sum()) == things, things + colours


def mentions_all(judge: DrawingJudge, spec: DrawingSpec, caption: str) -> bool:
    """Whether a caption names all requested things."""
    requested = {name for name, n in zip(spec.concept[0].tolist(), spec.count[0].tolist(), strict=True) if n}
    names = [judge.detector.config.concepts[thing] for thing in requested]
    return all(re.search(rf"\b({re.escape(name)}|{re.escape(pluralize(name))})\b", caption) for name in names)


def render_judged_drawing(judge: DrawingJudge, drawing: JudgedDrawing, line: str) -> Html:
    """Render a drawing with the verdict of the judge and one more line."""
    verdict = render_verdict(drawing.is_right, f"judge: {describe_detections(judge, drawing.detected)}")
    return render_image(drawing.image, render_lines(verdict, line), f"Drawing of: {drawing.prompt}")
