"""Package a model for shipping: 8 bits a weight, and the differences that this makes.

Shapes: N start images, B images, h × w codes
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from vitrail import hub
from vitrail.data.examples import load_examples
from vitrail.errors import ConfigError
from vitrail.pipelines import loading
from vitrail.pipelines.chat import ChatPipeline
from vitrail.pipelines.unified import UnifiedPipeline
from vitrail.pipelines.world import WorldPipeline
from vitrail.processing.image_loading import ImageSource
from vitrail.stream import pack_streams


class ModelDifference(NamedTuple):
    """Difference between two copies of a model; None for outputs that the model does not have.

    text_logits  largest difference of the text logits, in standard deviations of the reference
    code_logits  the same of the code logits
    changed_ids  fraction of image codes whose ids differ
    """

    text_logits: float | None = None
    code_logits: float | None = None
    changed_ids: float | None = None

    def __str__(self) -> str:
        differences = {"text": self.text_logits, "code": self.code_logits}
        lines = [
            f"{name} logits: largest difference {value:.3f} standard deviations"
            for name, value in differences.items()
            if value is not None
        ]
        return "\n".join(lines + ([] if self.changed_ids is None else [f"image codes: {self.changed_ids:.1%} changed"]))


def package_model(
    model: str | Path, out: str | Path, *, base: str | None = None, episodes: str | Path | None = None
) -> ModelDifference:
    """Quantize a unified, vision-language or world model to 8 bits a weight, and compare it with the original.

    base      the language model that a vision-language model is trained from; only the difference from it is saved
    episodes  recorded episodes with the start images and the controls of a world model
    """
    out = Path(out)
    if any(out.glob("*.safetensors")):
        raise ConfigError(f"{out} already contains a model", "remove it first, or give another folder")
    is_world = loading.is_world_model(model)
    is_vlm = not is_world and loading.is_vlm(model)
    if base is not None and not is_vlm:
        raise ConfigError(f"--base is set, but {model} is not a vision-language model", "remove --base")
    if (episodes is not None) != is_world:
        raise ConfigError(
            "--episodes and world models go together", "give --episodes for a world model, and only for one"
        )
    try:
        if episodes is not None:
            return _package_world(model, out, episodes)
        return _package_vlm(model, out, base) if is_vlm else _package_unified(model, out)
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror}", "give another folder") from None


def _package_world(model: str | Path, out: Path, episodes: str | Path) -> ModelDifference:
    pipeline = WorldPipeline.load(model, device="cpu").with_episodes(episodes)
    pipeline.save(out, small=True)
    starts = pipeline.start_images.movedim(-1, 1)[:, None]  # (N, 1, C, H, W)
    ids, logits = [], []
    for one in (pipeline, WorldPipeline.load(out, device="cpu")):
        with torch.no_grad():
            ids.append(one.model.encode_frames(one.model.codec.to_pixels(starts)))
            no_action = torch.full(ids[0].shape[:2], one.model.num_actions)
            logits.append(one.model.dynamics(ids[0], no_action).float())
    changed = float((ids[0] != ids[1]).float().mean())
    return ModelDifference(code_logits=_max_deviation([logits[0]], [logits[1]]), changed_ids=changed)


def _package_vlm(model: str | Path, out: Path, base: str | None) -> ModelDifference:
    pipeline, scenes = ChatPipeline.load(model, device="cpu"), load_examples()
    hub.save(pipeline.model, out, pipeline.tokenizer, int8=True, base=base)
    files, questions = [scene.file for scene in scenes], [scene.questions[0]["question"] for scene in scenes]
    return ModelDifference(compare_vlms(pipeline, ChatPipeline.load(out, device="cpu"), files, questions))


def _package_unified(model: str | Path, out: Path) -> ModelDifference:
    pipeline, scenes = UnifiedPipeline.load(model, device="cpu", dtype=torch.float32), load_examples()
    hub.save(pipeline.model, out, pipeline.tokenizer, int8=True)
    texts = [f"{scene.questions[0]['question']} {scene.questions[0]['answer']}" for scene in scenes]
    small = UnifiedPipeline.load(out, device="cpu", dtype=torch.float32)
    return compare_unified(pipeline, small, [scene.file for scene in scenes], texts)


@torch.no_grad()
def compare_unified(
    reference: UnifiedPipeline, candidate: UnifiedPipeline, images: Sequence[ImageSource], texts: Sequence[str]
) -> ModelDifference:
    """Compare two unified models on images and a text about each.

    Text logits are computed with the image before the text, code logits with the text before the image.
    """
    text_ids, counts = reference._encode_texts(texts, reference.model.codec.device)
    text_mask = torch.arange(text_ids.shape[1], device=text_ids.device) < counts[:, None]
    ids = reference.tokenize(list(images))
    h, w = ids.shape[1:]
    # Masked models see every second code. Models in raster order see all codes.
    hidden = (torch.arange(h * w, device=ids.device).view(1, h, w) % 2 == 0).expand_as(ids)
    logits = []
    for pipeline in (reference, candidate):
        model = pipeline.model
        image_codes = pipeline._encode_images(list(images))[0]
        text_states = model(model.make_input_image_piece(image_codes), model.make_text_piece(text_ids, counts))[
            :, -text_ids.shape[1] :
        ]
        layout = model.build_layout(
            model.make_text_piece(text_ids, counts),
            model.make_output_image_piece(ids, hidden if model.config.generation_order == "masked" else None),
        )
        code_logits = model.head(
            model.get_code_states(layout, model.forward_hidden(layout)), model.split_ids(ids.flatten(1))
        )
        logits.append(([model.decoder.compute_logits(text_states)[text_mask]], code_logits))
    (text_logits, reference_codes), (other_text_logits, other_codes) = logits
    other_ids = float((candidate.tokenize(list(images)) != ids).float().mean())
    return ModelDifference(
        _max_deviation(text_logits, other_text_logits), _max_deviation(reference_codes, other_codes), other_ids
    )


@torch.no_grad()
def compare_vlms(
    reference: ChatPipeline, candidate: ChatPipeline, images: Sequence[ImageSource], questions: Sequence[str]
) -> float:
    """Return the largest difference of two vision-language models' logits at the first token of the answer.

    The unit is the standard deviation of the reference's logits.
    """
    logits = []
    for pipeline in (reference, candidate):
        prompts = [
            pipeline.build_prompt([pipeline.build_message(*question)])
            for question in zip(images, questions, strict=True)
        ]
        logits.append([pipeline.model(pack_streams([p.stream], len(p.stream)), p.images)[0, -1] for p in prompts])
    return _max_deviation(*logits)


def _max_deviation(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    pairs = [(x.float(), y.float()) for x, y in zip(a, b, strict=True)]
    return max(float((x - y).abs().max() / x.std()) for x, y in pairs)
