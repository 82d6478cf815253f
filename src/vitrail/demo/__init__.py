"""A demo page of a unified model: judged drawings, edits, answers with references, and a world model."""

from collections.abc import Sequence

from vitrail.data.language.templates import DRAWING_PROMPT_KINDS
from vitrail.demo.drawing_section import build_drawing_section, build_editing_section, build_stages_section
from vitrail.demo.judged_drawing import StepLogger, load_judge, rank_clarity
from vitrail.demo.reading_section import (
    DemoImage,
    build_own_drawing_section,
    build_reading_section,
    build_scenes_section,
    load_demo_images,
)
from vitrail.demo.world_section import KEY_SEQUENCES, build_world_section
from vitrail.pipelines.unified import UnifiedPipeline
from vitrail.plots.eval_results import EvalResults
from vitrail.plots.html_page import Section, render_list

__all__ = [
    "DemoImage",
    "EvalResults",
    "StepLogger",
    "build_demo",
    "build_introduction",
    "build_scenes_section",
    "build_world_section",
    "count_steps",
    "load_demo_images",
]


def count_steps(images: Sequence[DemoImage]) -> int:
    """Return the maximum number of steps of a demo."""
    return len(images) + len(DRAWING_PROMPT_KINDS) + 4 + len(KEY_SEQUENCES)


def build_demo(
    pipeline: UnifiedPipeline,
    images: Sequence[DemoImage],
    seed: int,
    log_step: StepLogger,
    eval_results: EvalResults | None = None,
) -> list[Section]:
    """Build all sections that need a unified model."""
    judge = load_judge(str(pipeline.model.codec.device))
    drawing, drawn = build_drawing_section(pipeline, judge, seed, log_step, eval_results)
    chosen = max(drawn, key=rank_clarity)
    other = next(one for one in drawn if one.prompt != chosen.prompt)
    return [
        drawing,
        build_stages_section(pipeline, chosen, log_step),
        build_editing_section(pipeline, judge, chosen, other, seed, log_step),
        build_reading_section(pipeline, images, log_step, eval_results),
        build_own_drawing_section(pipeline, judge, chosen, seed, log_step),
    ]


def build_introduction(pipeline: UnifiedPipeline, eval_results: EvalResults | None = None) -> list[str]:
    """Build the introduction of the page: facts about the model, and a summary of its scores."""
    model, (h, w) = pipeline.model, pipeline.model.grid
    inputs = "these codes" if model.config.image_input == "codes" else "the features before quantization"
    order = "in raster order" if model.config.generation_order == "raster" else "the most confident first"
    weights = sum(p.numel() for p in model.parameters()) / 1e6
    return [
        f"An image becomes {h} × {w} codes out of {model.codec.vocab_sizes[0]:,}. The model reads images as {inputs}, "
        f"and draws images by generating codes, {order}. It has {weights:.1f} million parameters.",
        "Scenes and prompts are random and not selected by results, except for the one drawing that is edited and "
        "asked about. A green tick is right, a red cross is wrong.",
        *([] if eval_results is None else ["Scores over many more samples than shown here:"]),
        *([] if eval_results is None else [render_list(eval_results.summarize())]),
    ]
