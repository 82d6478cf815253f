"""Question-answer batches and drawing prompts about images, from scenes and from named images.

Batches are made on the device of the index tensor. Shapes: B samples, T turns, P text pieces.
"""

from collections.abc import Sequence
from functools import singledispatch
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from vitrail.data.augmentation import AugmentationConfig
from vitrail.data.language import (
    QA_DRAFTERS,
    generate_mixed_questions,
    generate_prompts_for_scenes,
    generate_questions,
)
from vitrail.data.language.question_generation import max_question_tokens
from vitrail.data.language.templates import DRAWING_PROMPT_KINDS, OPTIONAL_KINDS
from vitrail.data.language.text_pieces import PieceTable, TokenTable
from vitrail.data.named_images import NamedImageSource
from vitrail.data.scene_annotations import build_scene_language
from vitrail.data.scenes.scene_source import SceneSource
from vitrail.errors import ConfigError, suggest_name
from vitrail.nn.cuda_graphs import CUDAGraphFunction

QUESTION_KINDS = tuple(kind for kind in QA_DRAFTERS if kind not in ("caption_long", "grounding", *OPTIONAL_KINDS))
NAMING_QUESTIONS = ("what is this?", "what does the picture show?", "name what you see.", "which thing is drawn here?")


class QASample(NamedTuple):
    """Images with question-answer turns. A turn is a question, an end, an answer and an end.

    The index after the last text piece means "end".
    """

    pixels: Tensor  # uint8 (B, 3 or 4, H, W)
    pieces: Tensor  # (B, P) pieces
    loss_mask: Tensor  # (B, P) True for answers and their ends
    turn_start: Tensor  # (B, P) position at which the turn of each piece begins


class DrawingPromptSample(NamedTuple):
    """Texts to draw, and images that are correct drawings of them."""

    pixels: Tensor  # uint8 (B, 3 or 4, H, W)
    pieces: Tensor  # (B, P) indices of text pieces, and an end


class QADataset(Protocol):
    """Interface of a dataset of questions, answers and drawing prompts."""

    @property
    def pieces(self) -> PieceTable: ...

    @property
    def augmentation(self) -> AugmentationConfig: ...

    def sample_qa(self, index: Tensor) -> QASample: ...

    def sample_drawing_prompts(self, index: Tensor) -> DrawingPromptSample: ...

    def count_max_tokens(self, token_table: TokenTable) -> tuple[int, int]:
        """Largest token counts of a question-answer sample and of a drawing prompt, without what may be truncated."""
        ...


class SceneQADataset:
    """Several questions of different kinds for each scene, with balanced answers.

    A question of kind `final_kind` comes last, so that no other answer can be copied from it (a caption, for instance).
    Drawing prompts are GenEval's kinds that name everything in the scene, or else the caption. `extra_templates` adds
    more wordings than usual.
    """

    def __init__(
        self,
        source: SceneSource,
        num_questions: int,
        question_kinds: Sequence[str] = QUESTION_KINDS,
        final_kind: str | None = None,
        *,
        held_out: bool = False,
        extra_templates: bool = False,
    ):
        if not 1 <= num_questions <= len(question_kinds):
            raise ConfigError(
                f"num_questions is {num_questions} with {len(question_kinds)} question_kinds",
                "use at least one question, and at most one of each kind",
            )
        if final_kind is not None and final_kind not in QA_DRAFTERS:
            raise ConfigError(f"unknown kind of question {final_kind!r}", suggest_name(final_kind, QA_DRAFTERS))
        self.source = source
        self.num_questions = num_questions
        self.question_kinds = tuple(question_kinds)
        self.final_kind = final_kind
        self.augmentation = source.config.augmentation
        self.held_out = held_out
        self.language = build_scene_language(source, extra_templates=extra_templates)
        self.pieces = self.language.pieces
        self.sample_qa: Any = CUDAGraphFunction(self._sample_qa)
        self._captured_prompts: Any = CUDAGraphFunction(self._all_prompts)

    def _sample_qa(self, index: Tensor) -> QASample:
        rendered, language = self.source.render_indices(index), self.language.to(index.device)
        qa = generate_mixed_questions(
            language,
            rendered.scenes,
            self.source.config.seed,
            self.question_kinds,
            self.num_questions,
            held_out=self.held_out,
        )
        parts = [build_turns(qa.question, qa.answer, qa.valid, len(self.pieces))]
        if self.final_kind is not None:
            qa = generate_questions(
                language, rendered.scenes, self.source.config.seed, self.final_kind, held_out=self.held_out
            )
            parts.append(build_turns(qa.question, qa.answer, qa.valid, len(self.pieces)))
        rows, loss_mask = (
            torch.cat([x.view(len(index), -1) for x in column], 1) for column in zip(*parts, strict=True)
        )
        turn_length, place = parts[0][0].shape[1], torch.arange(rows.shape[1], device=index.device)
        turn_start = (place // turn_length).clamp(max=self.num_questions - (self.final_kind is None)) * turn_length
        return QASample(rendered.pixels, rows, loss_mask, turn_start.expand_as(rows))

    def sample_drawing_prompts(self, index: Tensor) -> DrawingPromptSample:
        pixels, texts, is_valid = self._captured_prompts(index)
        chosen = (torch.rand(is_valid.shape, device=index.device) * is_valid).argmax(1)  # choose one of the valid kinds
        rows = texts[torch.arange(len(index), device=index.device), chosen]
        return DrawingPromptSample(pixels, pad(rows, (0, 1), value=len(self.pieces)))

    def _all_prompts(self, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return images, prompts of every kind (B, kinds, P), and which of them are valid (B, kinds)."""
        rendered, language = self.source.render_indices(index), self.language.to(index.device)
        seed = self.source.config.seed
        caption = generate_questions(language, rendered.scenes, seed, "caption_short", held_out=self.held_out)
        prompts = [
            generate_prompts_for_scenes(language, rendered.scenes, seed, kind, held_out=self.held_out)
            for kind in DRAWING_PROMPT_KINDS
        ]
        is_valid = torch.stack([prompt.valid for prompt in prompts] + [caption.valid], 1)  # (B, kinds)
        texts = [prompt.text for prompt in prompts] + [caption.answer]
        max_pieces = max(text.shape[1] for text in texts)
        table = torch.stack([pad(text, (0, max_pieces - text.shape[1])) for text in texts], 1)
        return rendered.pixels, table, is_valid

    def count_max_tokens(self, token_table: TokenTable) -> tuple[int, int]:
        question, answer = max_question_tokens(self.language, token_table, self.question_kinds)
        final = 0
        if self.final_kind is not None:
            final = sum(max_question_tokens(self.language, token_table, [self.final_kind])) + 2
        prompts = (
            self.language.sentence_templates[f"draw_{kind}"].max_tokens(token_table) for kind in DRAWING_PROMPT_KINDS
        )
        longest_prompt = max(max_question_tokens(self.language, token_table, ["caption_short"])[1], *prompts)
        return self.num_questions * (question + answer + 2) + final, longest_prompt + 1


class NamedImageQADataset:
    """One question for each image: what does it show?"""

    def __init__(self, source: NamedImageSource):
        self.source, self.augmentation = source, source.config.augmentation
        self.pieces = source.pieces
        self._questions = {torch.device("cpu"): self.pieces.add_all(NAMING_QUESTIONS)}

    def sample_qa(self, index: Tensor) -> QASample:
        chosen = torch.randint(len(NAMING_QUESTIONS), (len(index), 1), device=index.device)
        question = self._questions_on(index.device)[chosen]
        valid = torch.ones(len(index), dtype=torch.bool, device=index.device)
        rows, loss_mask = build_turns(
            question, self.source.sample_texts(index, randomize=False), valid, len(self.pieces)
        )
        return QASample(self.source.pixels(index), rows, loss_mask, torch.zeros_like(rows))

    def sample_drawing_prompts(self, index: Tensor) -> DrawingPromptSample:
        rows = self.source.sample_texts(index)
        return DrawingPromptSample(self.source.pixels(index), pad(rows, (0, 1), value=len(self.pieces)))

    def count_max_tokens(self, token_table: TokenTable) -> tuple[int, int]:
        answer = self.source.count_max_tokens(token_table)
        question = token_table.length[self._questions_on(token_table.length.device)]
        return int(question.max()) + answer + 2, answer + 1

    def _questions_on(self, device: torch.device) -> Tensor:
        if device not in self._questions:
            self._questions[device] = self._questions[torch.device("cpu")].to(device)
        return self._questions[device]


def build_turns(question: Tensor, answer: Tensor, valid: Tensor, end: int) -> tuple[Tensor, Tensor]:
    """Join questions (N, P) and answers (N, Q) to turns of text pieces (N, P + Q + 2), and their loss mask.

    Turns that are not `valid` (N,) are empty.
    """
    ends = torch.where(valid, end, 0)[:, None]
    rows = torch.cat([question, ends, answer, ends], 1) * valid[:, None]
    is_answer = torch.arange(rows.shape[1], device=rows.device) > question.shape[1]
    return rows, is_answer & valid[:, None]


@singledispatch
def build_qa_dataset(
    source: Any,
    num_questions: int,
    question_kinds: Sequence[str] = QUESTION_KINDS,
    final_kind: str | None = None,
    *,
    extra_templates: bool = False,
) -> QADataset:
    """Build the question-answer dataset of a source of images. `build_qa_dataset.register(MySource)` adds another."""
    raise ConfigError(f"a {type(source).__name__} has no questions", "register it in build_qa_dataset")


build_qa_dataset.register(NamedImageSource, lambda source, *_args, **_options: NamedImageQADataset(source))
build_qa_dataset.register(SceneSource, SceneQADataset)


def extract_qa_texts(source: Any) -> PieceTable:
    """Return the texts of all questions and answers, to train a tokenizer on."""
    return build_qa_dataset(source, 1).pieces
