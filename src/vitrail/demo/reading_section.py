"""Question-answering sections of the demo: labelled scenes, the user's images, and one of the model's drawings."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from vitrail.data.examples import load_examples
from vitrail.data.language import generate_questions
from vitrail.demo.judged_drawing import JudgedDrawing, StepLogger, describe_detections
from vitrail.evals.drawing_judge import DrawingJudge
from vitrail.evals.suites.scene_benchmarks import normalize_answer
from vitrail.pipelines.unified import UnifiedPipeline
from vitrail.plots.eval_results import EvalResults
from vitrail.plots.html_page import (
    Section,
    compute_code_colours,
    render_code_mosaic,
    render_heading,
    render_image,
    render_row,
    render_table,
    render_verdict,
)
from vitrail.plots.reconstruction_strip import DIFFERENCE_GAIN, compute_psnr, draw_difference
from vitrail.processing.image_loading import load_image

GENERIC_QUESTIONS = ("What is this?", "Is there a person in the picture?", "How many things are there?")
"""Questions for images without reference answers."""
OWN_DRAWING_KINDS = ("existence_random", "counting", "colour", "position")
"""Kinds of questions about the model's own drawing."""
CAPTION_ROW = "What does it show?"


class DemoImage(NamedTuple):
    """An image with questions (kind, question, reference answer). Unknown values are None."""

    name: str
    image: Image.Image
    caption: str | None
    questions: list[tuple[str | None, str, str | None]]


def load_demo_images(images: Sequence[str | Path]) -> list[DemoImage]:
    """Load the user's images and the example scenes."""
    own = [
        DemoImage(Path(name).name, load_image(name), None, [(None, q, None) for q in GENERIC_QUESTIONS])
        for name in images
    ]
    return own + [
        DemoImage(e.name, load_image(e.file), e.caption, [(q["kind"], q["question"], q["answer"]) for q in e.questions])
        for e in load_examples()
    ]


def build_scenes_section(images: Sequence[DemoImage]) -> Section:
    """Build the section of images and references, without a model."""
    body: list[str] = []
    for one in images:
        body += [
            render_heading(one.name),
            render_row(render_image(one.image, one.caption or "", one.caption or one.name)),
        ]
        if one.caption is not None:
            body.append(render_table(("question", "reference"), [(q, a or "") for _, q, a in one.questions]))
    return Section("Scenes", body)


def build_reading_section(
    pipeline: UnifiedPipeline, images: Sequence[DemoImage], log_step: StepLogger, eval_results: EvalResults | None
) -> Section:
    """Build the section of answers, codes, reconstructions and attention maps of images."""
    body: list[str] = []
    num_right = 0
    num_known = 0
    for image_record in images:
        progress = log_step(f"reading {image_record.name}")
        ids, resized = pipeline.tokenize(image_record.image), pipeline.preprocess_image(image_record.image)
        reconstruction = pipeline.detokenize(ids)[0]
        questions = [question for _, question, _ in image_record.questions]
        answers = pipeline.ask(image_record.image, questions, max_new_tokens=24)
        caption = pipeline.caption(image_record.image, max_new_tokens=48)
        answer, highlighted = pipeline.ask_with_occlusion_map(image_record.image, questions[0], progress=progress)
        rows = [(CAPTION_ROW, caption, image_record.caption or "unknown", "")]
        for (kind, question, truth), predicted in zip(image_record.questions, answers, strict=True):
            right = truth is not None and normalize_answer(predicted) == normalize_answer(truth)
            num_right, num_known = num_right + right, num_known + (truth is not None)
            share = "" if eval_results is None or kind is None else eval_results.format_score("questions", kind)
            rows.append(
                (question, predicted if truth is None else render_verdict(right, predicted), truth or "unknown", share)
            )
        head, wide = ("question", "answer", "reference", "accuracy"), 3 if eval_results is None else 4
        colours, alt = (
            compute_code_colours(pipeline.model.codec.quantizer, ids[0]),
            image_record.caption or image_record.name,
        )
        body += [
            render_heading(image_record.name),
            render_row(
                render_image(resized, "the image at the model's input size", alt),
                render_code_mosaic(ids[0].cpu(), colours, f"{ids.numel()} codes"),
                render_image(
                    reconstruction,
                    f"reconstruction from its codes, {compute_psnr(resized, reconstruction):.1f} dB",
                    f"Reconstruction: {alt}",
                ),
                render_image(
                    draw_difference(resized, reconstruction), "difference", "Difference of image and reconstruction"
                ),
                render_image(
                    highlighted, f"occlusion map: “{questions[0]}” {answer}", "Image, bright where it matters"
                ),
            ),
            render_table(head[:wide], [cells[:wide] for cells in rows]),
        ]
    run = None if eval_results is None else eval_results.find_run("questions")
    note = [] if run is None else [f"Accuracy is measured over many questions of the kind: “{run.title}”, below."]
    return Section(
        "Question answering",
        [
            f"{num_right} of {num_known} answers match the reference exactly. Captions are not counted.",
            *note,
            "Each cell is a code; similar colours are similar codes, and hovering shows the id. The difference is "
            f"amplified {DIFFERENCE_GAIN} times; grey is zero. The occlusion map is bright where masking the image "
            "reduces the probability of the answer most.",
            *body,
        ],
    )


def build_own_drawing_section(
    pipeline: UnifiedPipeline, judge: DrawingJudge, drawing: JudgedDrawing, seed: int, log_step: StepLogger
) -> Section:
    """Build the section of questions about the model's own drawing."""
    log_step("asking about a drawing")
    words = judge.language.pieces.to_texts
    fields = {
        name: getattr(drawing.detected, name)[:, : judge.language.max_objects]
        for name in ("sprite", "colour", "box", "frame_slot")
    }
    questions = [
        generate_questions(judge.language, replace(drawing.detected, **fields), seed, kind)
        for kind in OWN_DRAWING_KINDS
    ]
    pairs = [(words(each.question)[0], words(each.answer)[0]) for each in questions if bool(each.valid[0])]
    answers = pipeline.ask(drawing.image, [question for question, _ in pairs], max_new_tokens=24) if pairs else []
    rows = [
        (question, render_verdict(normalize_answer(predicted) == normalize_answer(truth), predicted), truth)
        for (question, truth), predicted in zip(pairs, answers, strict=True)
    ]
    caption = pipeline.caption(drawing.image, max_new_tokens=48)
    return Section(
        "Questions about its own drawing",
        [
            "The same drawing. The judge answers the same questions. A tick means that both answers are equal.",
            render_row(render_image(drawing.image, drawing.prompt, f"The drawing of the questions: {drawing.prompt}")),
            render_table(
                ("question", "model", "judge"),
                [(CAPTION_ROW, caption, describe_detections(judge, drawing.detected)), *rows],
            ),
        ],
    )
