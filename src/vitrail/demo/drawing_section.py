"""Drawing sections of the demo: prompts of all kinds, the stages of one drawing, and edits to it."""

from vitrail.data.language import generate_prompts
from vitrail.data.language.templates import DRAWING_PROMPT_KINDS
from vitrail.demo.judged_drawing import JudgedDrawing, StepLogger, judge_drawing, mentions_all, render_judged_drawing
from vitrail.evals.drawing_judge import DrawingJudge
from vitrail.pipelines.unified import UnifiedPipeline
from vitrail.plots.eval_results import SCORE_LABELS, EvalResults
from vitrail.plots.html_page import (
    Section,
    render_heading,
    render_image,
    render_row,
    render_strip,
    render_tiles,
    render_verdict,
)

NUM_STAGES = 6
NUM_SEEDS, EDIT_FRACTIONS, RIGHT_HALF = 3, (0.5, 0.75, 0.9), (0.5, 0.0, 1.0, 1.0)


def build_drawing_section(
    pipeline: UnifiedPipeline, judge: DrawingJudge, seed: int, log_step: StepLogger, eval_results: EvalResults | None
) -> tuple[Section, list[JudgedDrawing]]:
    """Build the section of drawings for prompts of all kinds; also return the drawings."""
    blocks: list[list[str]] = []
    num_complete = 0
    drawings: list[JudgedDrawing] = []
    for kind in DRAWING_PROMPT_KINDS:
        prompts = generate_prompts(judge.language, kind, 1, seed, concepts=judge.known_concepts)
        text = judge.language.pieces.to_texts(prompts.text)[0]
        pictures = pipeline.draw([text] * NUM_SEEDS, seed=seed, progress=log_step(f"drawing {text}"))
        judged = [judge_drawing(judge, text, prompts.spec, seed + i, picture) for i, picture in enumerate(pictures)]
        captions = [
            (mentions_all(judge, prompts.spec, text), text) for text in pipeline.caption(pictures, max_new_tokens=24)
        ]
        num_complete += sum(complete for complete, _ in captions)
        num_right = sum(drawing.is_right for drawing in judged)
        share = "" if eval_results is None else f"; measured: {eval_results.format_score('drawing', kind)}"
        blocks.append(
            [
                render_heading(text),
                f"{SCORE_LABELS['drawing'][kind]}: {num_right} of {NUM_SEEDS} here{share}",
                render_row(
                    *(
                        render_judged_drawing(judge, drawing, render_verdict(complete, f"model caption: {caption}"))
                        for drawing, (complete, caption) in zip(judged, captions, strict=True)
                    )
                ),
            ]
        )
        drawings += judged
    body = [
        f"{len(DRAWING_PROMPT_KINDS)} prompts, {NUM_SEEDS} drawings of each, seeds {seed} to {seed + NUM_SEEDS - 1}. "
        f"The judge accepts {sum(drawing.is_right for drawing in drawings)} of {len(drawings)}.",
        "The judge is a detector network with errors; see docs/judge.md. It ignores additional things unless the "
        "prompt asks for a number, and may accept distorted shapes.",
        f"The model caption is generated from the drawing without the prompt. It names all requested things in "
        f"{num_complete} of {len(drawings)} drawings.",
        render_tiles(*blocks),
    ]
    return Section("Drawing", body), drawings


def build_stages_section(pipeline: UnifiedPipeline, drawing: JudgedDrawing, log_step: StepLogger) -> Section:
    """Build the section that shows the stages of one drawing."""
    stages = pipeline.draw_stages(
        drawing.prompt, NUM_STAGES, seed=drawing.seed, progress=log_step("drawing the stages")
    )
    order = (
        "the most confident are kept" if pipeline.model.config.generation_order == "masked" else "the next one is kept"
    )
    return Section(
        "Stages of a drawing",
        [
            f"Each pass samples the open codes, shown in grey, and {order}. “{drawing.prompt}” at {NUM_STAGES} stages:",
            render_strip(
                *(
                    render_image(picture, f"{n / NUM_STAGES:.0%}", f"{drawing.prompt}, {n / NUM_STAGES:.0%} drawn")
                    for n, picture in enumerate(stages, 1)
                )
            ),
        ],
    )


def build_editing_section(
    pipeline: UnifiedPipeline,
    judge: DrawingJudge,
    drawing: JudgedDrawing,
    other_drawing: JudgedDrawing,
    seed: int,
    log_step: StepLogger,
) -> Section:
    """Build the section of variations and inpainting."""
    progress = log_step("variations")
    variations = [
        pipeline.vary(drawing.image, drawing.prompt, redraw_fraction=share, seed=seed, progress=progress)[0]
        for share in EDIT_FRACTIONS
    ]
    inpainted = pipeline.inpaint(
        drawing.image, other_drawing.prompt, RIGHT_HALF, seed=seed, progress=log_step("inpainting")
    )
    figures = [
        render_judged_drawing(judge, judge_drawing(judge, *target, picture), line)
        for line, target, picture in (
            *(
                (f"{share:.0%} of the codes resampled", drawing[:3], new)
                for share, new in zip(EDIT_FRACTIONS, variations, strict=True)
            ),
            (f"right half resampled: {other_drawing.prompt}", other_drawing[:3], inpainted),
        )
    ]
    return Section(
        "Editing a drawing",
        [
            "The edited drawing is the one that fits its prompt best: right, without additional things if possible, "
            "and with the most requested things. Some codes are kept and the others resampled: for the same prompt, "
            "then one half for another prompt.",
            render_row(render_image(drawing.image, drawing.prompt, f"The edited drawing: {drawing.prompt}"), *figures),
        ],
    )
