"""Training task of the unified model: image understanding, image generation and plain text in one step.

B samples, L tokens, N codes of an image
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from vitrail.config import Config, Fraction, NonNegativeFloat
from vitrail.data.augmentation import NO_AUGMENTATION, augment_images
from vitrail.data.named_images import NamedImageSource
from vitrail.data.qa import QUESTION_KINDS, QADataset, build_qa_dataset, extract_qa_texts
from vitrail.data.scenes.scene_source import SceneSource
from vitrail.data.text_source import TextSource
from vitrail.errors import ConfigError
from vitrail.models.unified_model import UnifiedModel
from vitrail.nn import Workload, cost
from vitrail.nn.parallel_streams import ParallelStreams
from vitrail.processing.tokenizer import Tokenizer
from vitrail.registry import TASKS
from vitrail.tasks.qa_tokens import TEXT_KEY, QATokenizer, answer_loss, collate
from vitrail.tasks.task_spec import TaskSpec
from vitrail.training.task import Batch


class UnifiedSettings(Config):
    """Settings of the unified task.

    draw_sources       sources used for image generation; other image sources train answers about images
    weights            loss weights of "text", "read" (answers) and "draw" (generation); 1 by default
    num_questions      questions per scene
    question_kinds     kinds of questions
    templates          of questions and prompts: "usual", or "many" with the extra templates
    final_kind         kind of question that ends every sample, such as a long caption
    max_length         tokens of the questions and answers at most; longer samples are truncated
    max_prompt_length  tokens of a drawing prompt at most; longer prompts are truncated
    prompt_dropout     probability of an empty prompt, for classifier-free guidance
    z_loss             weight of logsumexp² of all logits, which prevents logit drift
    """

    draw_sources: tuple[str, ...] = ()
    weights: dict[str, float] = {}
    num_questions: int = 6
    question_kinds: tuple[str, ...] = QUESTION_KINDS
    templates: Literal["usual", "many"] = "usual"
    final_kind: str | None = None
    max_length: int = 256
    max_prompt_length: int = 128
    prompt_dropout: Fraction = 0.1
    z_loss: NonNegativeFloat = 1e-4

    def __post_init__(self) -> None:
        wrong = [name for name in self.weights if name not in ("text", "read", "draw")]
        if wrong or any(weight < 0 for weight in self.weights.values()):
            raise ConfigError(f"weights = {self.weights}", 'use the keys "text", "read" and "draw" with values >= 0')
        for name in ("max_length", "max_prompt_length"):
            if getattr(self, name) < 8:
                raise ConfigError(f"{name} is {getattr(self, name)}", "give at least 8")


class UnifiedTask:
    """Trains a unified model to answer questions about images, to generate images from prompts, and on plain text.

    The losses of answers and image codes are means per image, summed over images; the text loss is a sum over tokens.

    The questions about an image do not attend to each other. Otherwise the model could derive most answers from
    earlier turns instead of the image.
    """

    def __init__(
        self,
        model: UnifiedModel,
        sources: Mapping[str, NamedImageSource | SceneSource | TextSource],
        tokenizer: Tokenizer | None,
        settings: UnifiedSettings,
    ):
        if tokenizer is None or tokenizer.eos_token_id is None:
            raise ConfigError(
                "answers need an end token, but there is no tokenizer with one", "add a [tokenizer] table"
            )
        unknown = [
            name for name in settings.draw_sources if name not in sources or isinstance(sources[name], TextSource)
        ]
        if unknown:
            raise ConfigError(
                f"draw_sources names {unknown[0]!r}, which is not an image source of this stage",
                "name image sources of the stage",
            )
        self.model, self.settings, self.eos_token_id = model, settings, tokenizer.eos_token_id
        image_sources = {name: source for name, source in sources.items() if not isinstance(source, TextSource)}
        self.datasets: dict[str, QADataset] = {
            name: build_qa_dataset(
                source,
                settings.num_questions,
                settings.question_kinds,
                settings.final_kind,
                extra_templates=settings.templates == "many",
            )
            for name, source in image_sources.items()
        }
        loss_kinds = {"draw" if name in settings.draw_sources else "read" for name in image_sources}
        loss_kinds |= {"text"} if len(image_sources) < len(sources) else set()
        self.loss_weights = {
            kind: settings.weights.get(kind, 1.0) for kind in ("text", "read", "draw") if kind in loss_kinds
        }
        self.qa_tokenizer = QATokenizer(self.datasets, tokenizer, tokenizer.eos_token_id, settings.max_length)
        cpu = torch.device("cpu")
        self.prompt_lengths = {
            name: min(settings.max_prompt_length, dataset.count_max_tokens(self.qa_tokenizer.get_table(cpu, name))[1])
            for name, dataset in self.datasets.items()
        }
        self.image_size = model.codec.image_size[0]
        self._parallel_streams = ParallelStreams()
        for name in self.datasets:
            if name not in settings.draw_sources:
                self.qa_tokenizer.check_lengths(name, len(image_sources[name]))

    # ---- samples ------------------------------------------------------------------------------------------------

    def collate(self, samples: Sequence[Any]) -> Batch:
        return collate(samples)

    def count_loss_terms(self, batch: Batch) -> dict[str, int]:
        """Count target tokens of plain text, and images."""
        num_terms = dict.fromkeys(self.loss_weights, 0)
        for name, samples in batch.items():
            num_terms[self._source_kind(name)] += samples.numel() - len(samples) if name == TEXT_KEY else len(samples)
        return num_terms

    def _source_kind(self, name: str) -> str:
        return "text" if name == TEXT_KEY else "draw" if name in self.settings.draw_sources else "read"

    def __call__(self, batch: Batch) -> dict[str, Tensor]:
        if any(name in self.datasets for name in batch):
            batch = self.prepare_batch(batch)
        losses = {kind: self.model.mark_embed.weight.new_zeros((), dtype=torch.float32) for kind in self.loss_weights}
        if TEXT_KEY in batch:
            losses["text"] = self._text_loss(batch[TEXT_KEY])
        prepared = [name for name in self.datasets if f"{name}:pixels" in batch]
        if read_names := [name for name in prepared if self._source_kind(name) == "read"]:
            losses["read"] = self._read_loss(read_names, batch)
        for name in prepared:
            if self._source_kind(name) == "draw":
                losses["draw"] = losses["draw"] + self._draw_loss(name, batch)
        return losses

    def _text_loss(self, ids: Tensor) -> Tensor:
        return self._token_loss(self.model(self.model.make_text_piece(ids[:, :-1])), ids[:, 1:], "sum")

    def _read_loss(self, names: Sequence[str], batch: Batch) -> Tensor:
        """Answer loss: images of all sources in one forward pass, averaged per source whatever its text length."""
        pixels, ids, turn_starts = (
            torch.cat([batch[f"{name}:{part}"] for name in names]) for part in ("pixels", "ids", "turn_starts")
        )
        features, _ = self.model.encode_images(pixels)
        layout = self.model.build_layout(
            self.model.make_input_image_piece(features), self.model.make_text_piece(ids, turn_starts=turn_starts)
        )
        hidden = self.model.forward_hidden(layout, layout.ends[0])
        targets = [batch[f"{name}:targets"] for name in names]
        parts = zip(hidden.split([len(part) for part in targets]), targets, strict=True)
        return torch.stack([self._token_loss(part, target, "mean") * len(part) for part, target in parts]).sum()

    def _draw_loss(self, name: str, batch: Batch) -> Tensor:
        pixels, ids, counts = (batch[f"{name}:{part}"] for part in ("pixels", "ids", "counts"))
        masked = batch.get(f"{name}:hidden")  # (B, h, w) masked codes, in masked generation order
        model, (_, codes) = self.model, self.model.encode_images(pixels)
        layout = model.build_layout(model.make_text_piece(ids, counts), model.make_output_image_piece(codes, masked))
        code_losses = model.compute_code_losses(
            model.get_code_states(layout, model.forward_hidden(layout)), codes.flatten(1), self._z_loss_weight
        )
        if masked is None:
            return code_losses.mean(1).sum()
        weights = masked.flatten(1).float()
        return ((code_losses * weights).sum(1) / weights.sum(1)).sum()

    @property
    def _z_loss_weight(self) -> float:
        return self.settings.z_loss if self.model.training else 0.0  # validation reports the plain loss

    def _token_loss(self, hidden: Tensor, targets: Tensor, reduction: Literal["mean", "sum"]) -> Tensor:
        return answer_loss(self.model.decoder, hidden, targets, reduction, self._z_loss_weight)

    # ---- inputs from sample indices -----------------------------------------------------------------------------

    @torch.compiler.disable  # sources cache tables by device
    @torch.no_grad()
    def prepare_batch(self, batch: Batch) -> Batch:
        names = [name for name in batch if name in self.datasets]
        device = next(iter(batch.values())).device
        prepared = {name: rows for name, rows in batch.items() if name not in self.datasets}
        inputs = self._parallel_streams(device, [partial(self._make_inputs, name, batch[name]) for name in names])
        for name, parts in zip(names, inputs, strict=True):
            prepared |= {f"{name}:{part}": value for part, value in parts.items()}
        return prepared

    def _make_inputs(self, name: str, index: Tensor) -> Batch:
        return (
            self._make_prompt_inputs(name, index)
            if self._source_kind(name) == "draw"
            else self._make_qa_inputs(name, index)
        )

    def _make_qa_inputs(self, name: str, index: Tensor) -> Batch:
        """Inputs of question-answer samples: pixels (B, C, S, S), ids (B, L), targets (B, L), turn starts (B, L)."""
        samples = self.qa_tokenizer.make_batch(name, index)
        return {
            "pixels": self._make_views(name, samples.pixels),
            "ids": samples.ids,
            "targets": samples.targets,
            "turn_starts": samples.turn_starts,
        }

    def _make_prompt_inputs(self, name: str, index: Tensor) -> Batch:
        """Inputs of image generation: pixels (B, C, S, S), prompt ids (B, L), and prompt lengths (B,), 0 if dropped.

        Masked generation order adds the mask of the codes (B, h, w).
        """
        prompts = self.datasets[name].sample_drawing_prompts(index)
        L = self.prompt_lengths[name]
        ids, length = self.qa_tokenizer.get_table(index.device, name).to_ids(
            prompts.pieces, L, self.eos_token_id, check=False
        )
        ids[:, -1] = torch.where(length > L, self.eos_token_id, ids[:, -1])  # a truncated prompt keeps its end token
        dropped = torch.rand(len(index), device=index.device) < self.settings.prompt_dropout * self.model.training
        inputs = {
            "pixels": self._make_views(name, prompts.pixels),
            "ids": ids,
            "counts": length.clamp(max=L) * ~dropped,
        }
        return inputs | ({"hidden": self._sample_mask(index)} if self.model.config.generation_order == "masked" else {})

    def _sample_mask(self, index: Tensor) -> Tensor:
        """Sample a mask (B, h, w): cos(π/2 · u) of each image's codes at random positions, at least one."""
        B, (h, w), device = len(index), self.model.grid, index.device
        fraction = torch.cos(math.pi / 2 * torch.rand(B, 1, device=device))
        rank = torch.rand(B, h * w, device=device).argsort(1).argsort(1)
        return (rank < (fraction * h * w).ceil().clamp(min=1)).view(B, h, w)

    def _make_views(self, name: str, pixels: Tensor) -> Tensor:
        return augment_images(
            pixels,
            (self.datasets[name].augmentation if self.model.training else NO_AUGMENTATION).replace(
                image_size=self.image_size
            ),
        )

    def count_flops(self, batch: Batch) -> int:
        """FLOPs of the decoder."""
        total = 0
        for name, samples in batch.items():
            text_tokens = {"text": 0, "read": self.settings.max_length, "draw": self.prompt_lengths.get(name, 0)}[
                self._source_kind(name)
            ]
            work = (
                Workload.causal_attention(samples.shape[1] - 1, len(samples))
                if name == TEXT_KEY
                else self.model.workload(len(samples), text_tokens)
            )
            total += cost.count_flops(self.model, work)
        return total


TASKS.register("unified", TaskSpec(UnifiedTask, UnifiedModel, ("questions", "text"), UnifiedSettings, extract_qa_texts))
