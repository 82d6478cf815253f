"""Measure the exact-match accuracy of greedy answers without generating them.

A greedy answer equals the reference exactly if each reference token is the argmax after the tokens before it. One
teacher-forced pass over question and answer checks this, for any source of the image's soft tokens.

Shapes: N questions, B per batch, C channels, S image size, L tokens of a sample, T of a question, M soft tokens,
W width.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vitrail.backbones.decoder import Decoder
from vitrail.backbones.fusion import PrefixFusionConfig
from vitrail.data.augmentation import NO_AUGMENTATION, augment_images
from vitrail.data.language import QA_DRAFTERS, generate_questions, measure_baselines
from vitrail.data.named_images import NamedImageSource
from vitrail.data.qa import NamedImageQADataset, QADataset, SceneQADataset
from vitrail.data.scenes.scene_source import SceneSource
from vitrail.errors import ConfigError
from vitrail.evals.scores import Proportion, Score
from vitrail.models.vlm import VLM
from vitrail.processing.batch_resize import get_fixed_view
from vitrail.processing.tokenizer import Tokenizer
from vitrail.stream import RowPart, build_rows
from vitrail.tasks.qa_tokens import IGNORE_INDEX, QATokenizer

SoftTokenFn = Callable[[Tensor, Tensor], Tensor]
"""Maps pixels (B, C, S, S) and question ids (B, T), padded with −1, to soft tokens (B, M, W)."""

NAMING = "naming"  # “What is this?” for named images; it refers to no object in particular
MIN_BATCH_SIZE, MAX_BATCH_SIZE = 64, 256  # minimum and maximum images per batch
MAX_ATTEMPTS = 200  # batches without enough questions of a kind before giving up
SCENE_STRIDE = 2**22  # distance between the scene indices of two kinds
NUM_BASELINE_SCENES = 8192  # scenes to fit and test the blind baselines on


class QuestionBatch(NamedTuple):
    """N questions of one kind with their images and reference answers."""

    pixels: Tensor  # uint8 (N, 3 or 4, H, W)
    token_ids: Tensor  # (N, L) question, end token, answer
    labels: Tensor  # (N, L) next token to predict, IGNORE_INDEX elsewhere
    question_ids: Tensor  # (N, L) question tokens, −1 elsewhere

    def select(self, rows: slice) -> "QuestionBatch":
        """Select some questions, truncated to the longest of them."""
        last = int((self.labels[rows] != IGNORE_INDEX).any(0).nonzero().max()) + 1
        return QuestionBatch(self.pixels[rows], *(x[rows, :last] for x in self[1:]))


class ExactMatchBenchmark:
    """A fixed set of questions for all models that share a tokenizer.

    It holds questions about scenes by kind, and optionally the naming of images. `count` questions of each kind.
    """

    def __init__(
        self,
        scenes: SceneSource,
        kinds: Sequence[str],
        tokenizer: Tokenizer,
        *,
        count: int,
        max_length: int,
        named: NamedImageSource | None = None,
        device: str = "cpu",
    ):
        if count < 1:
            raise ConfigError(f"{count} questions of each kind", "use at least 1")
        if tokenizer.eos_token_id is None:
            raise ConfigError("the tokenizer has no end token, which ends every answer", "use a tokenizer that has one")
        self.eos_token_id, self.vocab_size, self.device, self.count = (
            tokenizer.eos_token_id,
            tokenizer.vocab_size,
            torch.device(device),
            count,
        )
        lead = tokenizer.encode("", add_special_tokens=True)[:1]
        self.prefix_ids = lead if lead == [tokenizer.bos_token_id] else []
        datasets: dict[str, QADataset] = {kind: SceneQADataset(scenes, 1, (kind,)) for kind in kinds}
        qa_tokenizer = QATokenizer(
            datasets | ({} if named is None else {NAMING: NamedImageQADataset(named)}),
            tokenizer,
            tokenizer.eos_token_id,
            max_length,
        )
        # Each kind uses its own scenes, so that no two questions share a scene.
        self.question_batches = {
            kind: self._build_scene_questions(qa_tokenizer, kind, list(QA_DRAFTERS).index(kind) * SCENE_STRIDE)
            for kind in kinds
        }
        self.baselines = {kind: _compute_blind_baselines(scenes, datasets[kind], kind) for kind in kinds}
        if named is not None:
            self.question_batches[NAMING] = self._build_naming_questions(qa_tokenizer, named)
            self.baselines[NAMING] = _compute_majority_baseline(self.question_batches[NAMING])

    def _build_scene_questions(self, qa_tokenizer: QATokenizer, kind: str, start: int) -> QuestionBatch:
        parts: list[QuestionBatch] = []
        at_once = min(MAX_BATCH_SIZE, max(self.count, MIN_BATCH_SIZE))
        for first in range(start, start + (MAX_ATTEMPTS + self.count) * at_once, at_once):
            parts.append(
                self._build_batch(qa_tokenizer, kind, torch.arange(first, first + at_once, device=self.device))
            )
            if sum(len(part.token_ids) for part in parts) >= self.count:
                return _concatenate(parts, self.count)
            if first >= start + MAX_ATTEMPTS * at_once and not any(len(part.token_ids) for part in parts):
                break
        raise ConfigError(f"too few scenes allow a question of kind {kind!r}", "leave out this kind")

    def _build_naming_questions(self, qa_tokenizer: QATokenizer, named: NamedImageSource) -> QuestionBatch:
        index = torch.linspace(0, len(named) - 1, min(self.count, len(named)), device=self.device).round().long()
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(0)  # seeds the choice of question templates
            return _concatenate(
                [self._build_batch(qa_tokenizer, NAMING, part) for part in index.split(MAX_BATCH_SIZE)], len(index)
            )

    def _build_batch(self, qa_tokenizer: QATokenizer, name: str, index: Tensor) -> QuestionBatch:
        qa_batch = qa_tokenizer.make_batch(name, index)
        valid = (qa_batch.targets != IGNORE_INDEX).any(1)
        answer = (qa_batch.ids == self.eos_token_id).long().cumsum(1) > 0
        return QuestionBatch(
            *(x[valid] for x in (qa_batch.pixels, qa_batch.ids, qa_batch.targets, qa_batch.ids.masked_fill(answer, -1)))
        )

    @torch.no_grad()
    def evaluate(
        self, model: VLM, soft_token_fn: SoftTokenFn, *, batch_size: int = MAX_BATCH_SIZE, question_shift: int = 0
    ) -> list[Score]:
        """Compute the accuracy of each kind.

        `question_shift` gives `soft_token_fn` the question of another image, shifted by that many positions. The
        question that the decoder reads does not change.
        """
        found = []
        for kind, sheet in self.question_batches.items():
            sheet = sheet._replace(question_ids=sheet.question_ids.roll(question_shift, 0))
            parts = zip(*(x.split(batch_size) for x in sheet), strict=True)
            hits = sum(int(self._is_correct(model, soft_token_fn, QuestionBatch(*part)).sum()) for part in parts)
            found.append(
                Score.from_proportion(kind, Proportion(hits, len(sheet.token_ids)), **self.baselines.get(kind, {}))
            )
        return found

    def _is_correct(self, model: VLM, soft_token_fn: SoftTokenFn, batch: QuestionBatch) -> Tensor:
        hidden = compute_hidden_states(
            model,
            self.prefix_ids,
            soft_token_fn(prepare_pixels(model, batch.pixels), batch.question_ids),
            batch.token_ids,
        )
        return is_exact_match(model.decoder, hidden, batch.labels, self.vocab_size)


def is_exact_match(decoder: Decoder, hidden: Tensor, labels: Tensor, vocab_size: int) -> Tensor:
    """Whether the argmax matches every answer token: hidden (B, L, W), labels (B, L) → (B,).

    Logits beyond `vocab_size`, the size of the tokenizer, are ignored.
    """
    learnt = labels != IGNORE_INDEX
    wrong = torch.zeros_like(learnt)
    wrong[learnt] = decoder.compute_logits(hidden[learnt])[:, :vocab_size].argmax(-1) != labels[learnt]
    return ~wrong.any(1)


def prepare_pixels(model: VLM, pixels: Tensor) -> Tensor:
    """Resize uint8 images (B, 3 or 4, H, W) to the tower's size (B, C, S, S) and normalize them."""
    config, image_size = model.config, get_fixed_view(model.config.policy).canvas_size[0]
    x = (augment_images(pixels, NO_AUGMENTATION.replace(image_size=image_size)) + 1) / 2
    mean, std = (x.new_tensor(values).view(-1, 1, 1) for values in (config.mean, config.std))
    return ((x - mean) / std).to(model.decoder.embed.weight.dtype)


def compute_hidden_states(model: VLM, prefix_ids: Sequence[int], soft_tokens: Tensor, token_ids: Tensor) -> Tensor:
    """Compute the last hidden states of the token ids: soft tokens (B, M, W), ids (B, L) → (B, L, W).

    The input sequence is prefix, soft tokens, token ids.
    """
    config = model.config
    plain = config.decoder.rotary.layout == "1d" and isinstance(config.decoder.fusion, PrefixFusionConfig)
    if not plain or config.rules.bidirectional or config.voco_tokens:
        raise ConfigError(
            "the model does more with images than insert tokens into a causal sequence",
            "use a decoder without fusion, 1D rotary positions, and a model without voco and rules.both",
        )
    embed = model.decoder.embed
    before = embed(torch.tensor(prefix_ids, dtype=torch.long, device=token_ids.device).expand(len(token_ids), -1))
    rows = build_rows([RowPart(before), RowPart(soft_tokens.to(before.dtype)), RowPart(embed(token_ids))], is_1d=True)
    return model.decoder.forward_embeddings(rows.embeds, rows.positions, rows.plan)[:, rows.ends[1] :]


def make_soft_token_fn(model: VLM) -> SoftTokenFn:
    """Return the soft-token function of the unmodified model."""
    get_fixed_view(model.config.policy)  # rejects policies with varying numbers of tokens

    def compute_soft_tokens(pixels: Tensor, questions: Tensor) -> Tensor:
        soft = model.encode_views(pixels)
        return soft if model.queries is None else model.queries(soft, None, [questions])

    return compute_soft_tokens


def withhold_question(soft_token_fn: SoftTokenFn) -> SoftTokenFn:
    """Wrap a soft-token function so that it receives an empty question."""
    return lambda pixels, questions: soft_token_fn(pixels, questions[:, :0])


def _concatenate(parts: Sequence[QuestionBatch], count: int) -> QuestionBatch:
    return QuestionBatch(*(torch.cat(column)[:count] for column in zip(*parts, strict=True)))


def _compute_majority_baseline(batch: QuestionBatch) -> Mapping[str, float]:
    """Accuracy of the most frequent answer. All questions are equal, so this is also the best blind guess."""
    answers = Counter(tuple(row[row != IGNORE_INDEX].tolist()) for row in batch.labels.cpu())
    share = answers.most_common(1)[0][1] / len(batch.token_ids)
    return {"majority": share, "blind": share}


def _compute_blind_baselines(scenes: SceneSource, questions: QADataset, kind: str) -> Mapping[str, float]:
    """Accuracy of the most frequent answer, and of the best guess from the question alone."""
    assert isinstance(questions, SceneQADataset)
    index = torch.arange(2**20, 2**20 + NUM_BASELINE_SCENES)
    qa_batch = generate_questions(questions.language, scenes.sample_scenes(index), scenes.config.seed, kind)
    return {name: getattr(row, name) for row in measure_baselines(qa_batch) for name in ("majority", "blind")}
