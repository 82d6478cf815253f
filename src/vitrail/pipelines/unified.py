"""Pipeline of a unified model: images and texts in, images and texts out.

Shapes: B images or texts, h × w codes, W width.
"""

import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from vitrail import hub
from vitrail.codecs.image_sources import ImageResizeConfig
from vitrail.data.language.prompt_checks import PromptCheck, build_prompt_checks
from vitrail.errors import ConfigError, suggest_name
from vitrail.evals.context import SceneAnswerModel, max_answer_tokens
from vitrail.generate.image_generation import ImageGenerationConfig, build_variation_inputs, generate_images
from vitrail.generate.sampling import SamplingConfig
from vitrail.generate.speculative_drawing import generate_images_speculatively
from vitrail.generate.unified_generation import generate_answers, score_answers
from vitrail.models.unified_model import UnifiedModel
from vitrail.pipelines.base import MINI, find_bundled_model, select_device
from vitrail.plots.occlusion import compute_occlusion_map, draw_occlusion_map
from vitrail.processing.image_loading import ImageSource, load_image
from vitrail.processing.tokenizer import Tokenizer

CAPTION_PROMPT = "Describe the picture briefly."
SAMPLING_FIELDS = ("temperature", "top_k", "top_p", "min_p")  # fields of `SamplingConfig` that calls take by name
SEED_STRIDE = 1_000_003  # offset between the seeds of two candidates; larger than any batch


class UnifiedPipeline:
    """Ask, draw, edit and tokenize images with a unified model: `vitrail.load()` or `vitrail.load(folder)`.

    One input gives one output and a list gives a list. Tensors have one row for each input.
    """

    def __init__(self, model: UnifiedModel, tokenizer: Tokenizer):
        if tokenizer.eos_token_id is None:
            raise ConfigError("the tokenizer has no end-of-sequence token", "use the tokenizer of the model")
        self.model, self.tokenizer, self.end_id = model.eval(), tokenizer, tokenizer.eos_token_id

    @classmethod
    def load(
        cls,
        name_or_path: str | Path = MINI,
        *,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> "UnifiedPipeline":
        """Load a checkpoint onto a GPU if there is one.

        The default dtype is bfloat16 on GPUs and on CPUs with bfloat16 instructions, else float32. A seed draws
        different images in different dtypes: set `dtype` to reproduce a drawing on another machine.
        """
        name_or_path = find_bundled_model(name_or_path)
        device_name, default_dtype = select_device(device, prefer_half=True)
        model = hub.load(name_or_path, dtype=dtype or default_dtype, device=device_name)
        if not isinstance(model, UnifiedModel):
            raise ConfigError(
                f"{name_or_path} is a {type(model).__name__}, and only a unified model can draw",
                f'give {MINI}, or the folder of a model trained with kind = "unified"',
            )
        return cls(model, hub.load_tokenizer(name_or_path))

    # ---- tokens -------------------------------------------------------------------------------------------------

    def tokenize(self, images: Any) -> Tensor:
        """Encode images as code ids (B, h, w)."""
        return self._encode_images(images)[1]

    def detokenize(self, ids: Tensor) -> list[Image.Image]:
        """Decode code ids (B, h, w) to images."""
        try:
            ids = torch.as_tensor(ids)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(f"{type(ids).__name__} is not an array of ids: {error!s:.80}", "give (B, h, w)") from None
        if ids.ndim != 3 or ids.is_meta:
            raise ConfigError(f"ids have shape {tuple(ids.shape)} on {ids.device}", "give (B, h, w) with values")
        return _to_images(self.model.codec.to_uint8(self.model.decode_pixels(ids.to(self.model.codec.device))))

    def preprocess_image(self, image: ImageSource) -> Image.Image:
        """Crop the centre of an image and resize it to the codec's input size."""
        return _to_images(self._prepare_pixels(image))[0]

    @torch.no_grad()
    def embed_images(self, images: Any) -> Tensor:
        """Return unit vectors (B, W): the mean of the decoder's hidden states over an image's codes."""
        hidden = self.model(self.model.make_input_image_piece(self._encode_images(images)[0]))[:, 1:]
        return F.normalize(hidden.float().mean(1), dim=-1)

    # ---- answers ------------------------------------------------------------------------------------------------

    def ask(self, images: Any, questions: Any, **options: Any) -> Any:
        """Answer questions about images.

        Takes one image with one or several questions, or several images with one question or one question each.
        `options` are those of `generate_answers` or fields of `SamplingConfig` (temperature, seed, …). Decoding is
        greedy by default.
        """
        is_single = not isinstance(images, list | tuple) and isinstance(questions, str)
        texts = _to_texts(questions, "question")
        if not texts or not all(question.strip() for question in texts):
            raise ConfigError("a question is empty", "give a text")
        sampling_fields: dict[str, Any] = {
            key: options.pop(key) for key in list(options) if key in SamplingConfig.__struct_fields__
        }
        known_options = {
            name
            for name, parameter in inspect.signature(generate_answers).parameters.items()
            if parameter.kind is parameter.KEYWORD_ONLY
        }
        if unknown := sorted(set(options) - known_options):
            raise ConfigError(
                f"unknown option {unknown[0]!r}", suggest_name(unknown[0], [*known_options, *SAMPLING_FIELDS, "seed"])
            )
        if sampling_fields:
            if not set(sampling_fields) & set(SAMPLING_FIELDS):  # a seed or a repetition penalty alone: greedy
                sampling_fields["temperature"] = 0.0
            if "sampling" in options:
                raise ConfigError(f"sampling and {', '.join(sampling_fields)} are both given", "give one of the two")
            options["sampling"] = SamplingConfig(**sampling_fields)
        image_codes = self._encode_images(images)[0]
        if len(image_codes) == 1:
            image_codes = image_codes.expand(len(texts), -1, -1, -1)
        elif len(texts) == 1:
            texts = texts * len(image_codes)
        outputs = generate_answers(self.model, image_codes, texts, self.tokenizer, **options)
        answers = [output.text.lstrip() for output in outputs]  # SentencePiece starts a word with a space
        return answers[0] if is_single else answers

    def caption(self, images: Any, **options: Any) -> Any:
        """Describe images briefly."""
        return self.ask(images, CAPTION_PROMPT, **options)

    def loglikelihoods(self, requests: Sequence[tuple[Any, str, Sequence[str]]]) -> list[list[float]]:
        """Return the log-likelihood of each option as the whole answer.

        Each request is (image, question, options).
        """
        if not requests or not all(options for *_, options in requests):
            raise ConfigError("a question has no options", "give at least one option")
        if any(isinstance(image, list | tuple) and len(image) != 1 for image, *_ in requests):
            raise ConfigError("a unified model takes one image for each question", "give one image")
        rows = [
            (image[0] if isinstance(image, list | tuple) else image, question, option)
            for image, question, options in requests
            for option in options
        ]
        pictures, questions, options = map(list, zip(*rows, strict=True))
        scores = iter(
            score_answers(self.model, self._encode_images(pictures)[0], questions, options, self.tokenizer).tolist()
        )
        return [[next(scores) for _ in options] for _, _, options in requests]

    def build_scene_answer_model(self, answers: Sequence[str] = ()) -> SceneAnswerModel:
        """Build the model that suites ask about images. `answers` are correct answers that may be long."""
        model, max_new_tokens = self.model, max_answer_tokens(self.tokenizer, answers)

        def answer(pixels: Tensor, questions: list[str]) -> list[str]:
            codes, _ = model.encode_images(model.codec.to_pixels(pixels))
            outputs = generate_answers(model, codes, questions, self.tokenizer, max_new_tokens=max_new_tokens)
            return [output.text for output in outputs]

        return SceneAnswerModel(answer, model.codec.image_size[0], 1 / model.grid[0])

    def ask_with_occlusion_map(self, image: ImageSource, question: str, **options: Any) -> tuple[str, Image.Image]:
        """Answer a question and draw an occlusion map: the image, brightest where the answer depends on it.

        `options` are those of `compute_occlusion_map`.
        """
        answer_text = self.ask(image, question)
        pixels, end_id = self._prepare_pixels(image), self.end_id
        question_ids = [*self.tokenizer.encode(question), end_id]
        answer_ids = [*self.tokenizer.encode(answer_text), end_id]
        occlusion_map = compute_occlusion_map(
            self.model, self.model.codec.to_pixels(pixels)[0], question_ids, answer_ids, **options
        )
        return answer_text, draw_occlusion_map(_to_images(pixels)[0], occlusion_map)

    # ---- drawings -----------------------------------------------------------------------------------------------

    def draw(self, prompts: Any, **options: Any) -> Any:
        """Generate images from prompts. `options` are those of `draw_ids`."""
        pictures = self.detokenize(self.draw_ids(_to_texts(prompts, "prompt"), **options))
        return pictures[0] if isinstance(prompts, str) else pictures

    def draw_ids(
        self,
        prompts: Sequence[str],
        *,
        tries: int = 1,
        negative_prompt: str | None = None,
        fixed_codes: tuple[Tensor, Tensor] | None = None,
        progress: Callable[[int, int], Any] | None = None,
        on_step: Callable[[Tensor, Tensor], Any] | None = None,
        seed: int | None = None,
        draft: "UnifiedPipeline | None" = None,
        **options: Any,
    ) -> Tensor:
        """Generate the code ids (B, h, w) of images.

        tries            candidates for each prompt; the model answers the questions of `data.language.prompt_checks`
                         about each, and the one with the most likely correct answers is returned
        negative_prompt  guidance leads away from this text
        fixed_codes      ids (B, h, w) and a mask (B, h, w) of the codes that stay as they are
        progress         called with the number of codes that are done and of all
        on_step          called after each pass with the ids and the mask of codes not yet drawn
        seed             prompt i is drawn from seed + i
        draft            a smaller pipeline with the same tokenizer and codes, for speculative drawing of models that
                         draw in raster order; it needs fewer passes and does not change the distribution
        options          fields of `ImageGenerationConfig` (guidance_scale, steps, …) and of `SamplingConfig`
                         (temperature, top_k, top_p, min_p)
        """
        if not prompts:
            raise ConfigError("there is no prompt", "give at least one prompt")
        if tries < 1:
            raise ConfigError(f"tries is {tries}", "give at least 1")
        if seed is not None and not isinstance(seed, Integral):
            raise ConfigError(f"seed is {seed!r:.80}", "give an integer")
        if negative_prompt is not None and not isinstance(negative_prompt, str):
            raise ConfigError(f"negative_prompt is {negative_prompt!r:.80}", "give one text")
        if draft is not None and (negative_prompt is not None or fixed_codes is not None):
            raise ConfigError("draft does not work with negative_prompt or fixed_codes", "give one of them")
        prompt_checks = [build_prompt_checks(prompt) for prompt in prompts] if tries > 1 else []
        for prompt, own_checks in zip(prompts, prompt_checks, strict=False):
            if not own_checks:
                raise ConfigError(
                    f"{prompt!r:.80} names nothing that candidates can be checked for",
                    "name things that the model was trained on, or use tries = 1",
                )
        device = self.model.codec.device
        sampling_fields = {key: options.pop(key) for key in list(options) if key in SAMPLING_FIELDS}
        encoded = self._encode_texts(prompts, device)
        ids, counts = encoded
        if draft is not None and not all(map(torch.equal, encoded, draft._encode_texts(prompts, device))):
            raise ConfigError("the model and its draft have different tokenizers", "train both with one tokenizer")
        negative_ids = None if negative_prompt is None else self._encode_texts([negative_prompt] * len(prompts), device)
        candidates = []
        for candidate in range(tries):
            sampling = SamplingConfig(**sampling_fields, seed=None if seed is None else seed + candidate * SEED_STRIDE)
            config = ImageGenerationConfig(sampling=sampling, **options)
            report = partial(_report_candidate_progress, progress, candidate, tries)
            if draft is not None:
                candidates.append(generate_images_speculatively(self.model, draft.model, ids, counts, config).ids)
                report(1, 1)
                continue
            candidates.append(
                generate_images(
                    self.model,
                    ids,
                    counts,
                    config,
                    negative_prompts=negative_ids,
                    fixed_codes=fixed_codes,
                    progress=report,
                    on_step=on_step,
                )
            )
        if tries == 1:
            return candidates[0]
        scores = torch.stack([self._score_drawings(ids, prompt_checks) for ids in candidates])  # (tries, B)
        return torch.stack(candidates)[scores.argmax(0), torch.arange(len(prompts), device=device)]

    def _score_drawings(self, ids: Tensor, prompt_checks: Sequence[Sequence[PromptCheck]]) -> Tensor:
        """Return (B,): the log-probability of the expected answers about images (B, h, w)."""
        # Drawings are decoded and encoded again, as input images are.
        image_codes = self.model.encode_images(self.model.decode_pixels(ids))[0]
        rows = [(row, *check) for row, own_checks in enumerate(prompt_checks) for check in own_checks]
        image_index, questions, answers = map(list, zip(*rows, strict=True))
        scores = score_answers(self.model, image_codes[image_index], questions, answers, self.tokenizer)
        return scores.new_zeros(len(ids)).index_add(0, torch.tensor(image_index, device=scores.device), scores)

    def draw_stages(self, prompt: str, count: int = 6, **options: Any) -> list[Image.Image]:
        """Draw one image and return `count` intermediate images, the last complete. Codes not yet drawn are grey.

        `options` are those of `draw_ids`.
        """
        steps: list[tuple[Tensor, Tensor]] = []
        self.draw_ids([prompt], tries=1, on_step=lambda ids, hidden: steps.append((ids.clone(), hidden)), **options)
        progress = torch.stack([(~hidden).float().mean() for _, hidden in steps])  # (passes,), rising to 1
        targets = torch.arange(1, count + 1, device=progress.device) / count
        step_index = torch.searchsorted(progress, targets - 1e-6).clamp(max=len(steps) - 1).tolist()
        ids, hidden = (torch.cat([steps[i][part] for i in step_index]) for part in (0, 1))
        pixels = self.model.codec.to_uint8(self.model.decode_pixels(ids))  # (count, C, H, W)
        grey_mask = (
            hidden[:, None]
            .repeat_interleave(self.model.codec.downsample_factor, 2)
            .repeat_interleave(self.model.codec.downsample_factor, 3)
        )
        return _to_images(pixels.masked_fill(grey_mask.to(pixels.device), 128))

    def vary(
        self,
        image: ImageSource,
        prompt: str = "",
        *,
        redraw_fraction: float = 0.5,
        count: int = 1,
        seed: int | None = None,
        **options: Any,
    ) -> list[Image.Image]:
        """Draw variations of an image: `redraw_fraction` of its codes are drawn again."""
        if count < 1:
            raise ConfigError(f"count is {count}", "give at least 1")
        ids = self.tokenize([image]).expand(count, -1, -1)
        return self.draw(
            [prompt] * count, fixed_codes=build_variation_inputs(ids, redraw_fraction, seed), seed=seed, **options
        )

    def inpaint(self, image: ImageSource, prompt: Any, box: tuple[float, float, float, float], **options: Any) -> Any:
        """Draw the codes again that touch a box (x0, y0, x1, y1 in 0 … 1). Several prompts give several images."""
        if len(box) != 4:
            raise ConfigError(f"the box has {len(box)} numbers", "give x0, y0, x1, y1")
        x0, y0, x1, y1 = box
        if not (0 <= x0 < x1 <= 1 and 0 <= y0 < y1 <= 1):
            raise ConfigError(f"the box is {box}", "give x0 < x1 and y0 < y1 within 0 … 1")
        ids = self.tokenize([image])
        _, h, w = ids.shape
        row, column = torch.arange(h, device=ids.device), torch.arange(w, device=ids.device)
        rows = (row + 1 > y0 * h) & (row < y1 * h)
        columns = (column + 1 > x0 * w) & (column < x1 * w)
        keep_mask, prompts = ~(rows[:, None] & columns)[None], _to_texts(prompt, "prompt")
        fixed_codes = tuple(part.expand(len(prompts), -1, -1) for part in (ids, keep_mask))
        pictures = self.draw(prompts, fixed_codes=fixed_codes, **options)
        return pictures[0] if isinstance(prompt, str) else pictures

    def _encode_images(self, pictures: Any) -> tuple[Tensor, Tensor]:
        return self.model.encode_images(self.model.codec.to_pixels(self._prepare_pixels(pictures)))

    def _prepare_pixels(self, pictures: Any) -> Tensor:
        """Load one image or a list of images as uint8 (B, 3, H, W)."""
        sources = list(pictures) if isinstance(pictures, list | tuple) else [pictures]
        if not sources:
            raise ConfigError("there is no image", "give at least one image")
        codec = self.model.codec
        fit = ImageResizeConfig().resolve_size(codec)
        return torch.stack([fit.apply(load_image(picture), codec.downsample_factor)[0] for picture in sources])

    def _encode_texts(self, texts: Sequence[str], device: torch.device) -> tuple[Tensor, Tensor]:
        """Encode texts as ids (B, n) and lengths (B,). A text ends with `end_id`; an empty text has no tokens."""
        rows = [[*self.tokenizer.encode(text), self.end_id] if text.strip() else [] for text in texts]
        longest, codes = max(map(len, rows)), math.prod(self.model.grid) + 1
        if longest + codes > (context := self.model.decoder.config.context_length):
            raise ConfigError(
                f"{longest} prompt tokens and {codes} image tokens exceed the context length {context}",
                "shorten the prompt",
            )
        ids = torch.full((len(rows), max(map(len, rows))), self.end_id)
        for row, tokens in zip(ids, rows, strict=True):
            row[: len(tokens)] = torch.tensor(tokens, dtype=torch.long)
        return ids.to(device), torch.tensor([len(row) for row in rows], device=device)


def _to_texts(value: Any, kind: str) -> list[str]:
    texts = list(value) if isinstance(value, Iterable) and not isinstance(value, str | bytes) else [value]
    for text in texts:
        if not isinstance(text, str):
            raise ConfigError(f"{text!r:.80} is not a {kind}", "give a text, or a list of texts")
    return [str(text) for text in texts]


def _report_candidate_progress(
    progress: Callable[[int, int], Any] | None, candidate: int, num_candidates: int, done: int, total: int
) -> None:
    """Report the progress of one candidate as a part of the progress of all."""
    if progress is not None:
        progress(candidate * total + done, num_candidates * total)


def _to_images(pixels: Tensor) -> list[Image.Image]:
    """Convert uint8 pixels (B, 3, H, W) to PIL images."""
    return [Image.fromarray(image.permute(1, 2, 0).contiguous().numpy()) for image in pixels.cpu()]


# ---- error of packaging ------------------------------------------------------------------------------------------
