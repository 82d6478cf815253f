"""Training task for vision-language models on questions about scenes and named images, and on plain text.

Batches hold sample indices; images and token ids are built on the device.

B samples, C channels, S image size, L text tokens of a row, K questions, T tokens of a question, P pieces
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vitrail.config import Config, NonNegativeFloat
from vitrail.data.augmentation import NO_AUGMENTATION, augment_images
from vitrail.data.language.question_generation import max_question_tokens
from vitrail.data.named_images import NamedImageSource
from vitrail.data.qa import QUESTION_KINDS, QADataset, SceneQADataset, build_qa_dataset, extract_qa_texts
from vitrail.data.scenes.scene_source import SceneSource
from vitrail.data.text_source import TextSource
from vitrail.errors import ConfigError
from vitrail.models.cross_attention_vlm import CrossAttentionVLM
from vitrail.models.vlm import VLM
from vitrail.models.vlm_cost import make_row_workload
from vitrail.nn import Workload, cost, pop_load_balancing_loss
from vitrail.nn.parallel_streams import ParallelStreams
from vitrail.processing.batch_resize import (
    find_view_layout,
    get_fixed_view,
    is_plain_resize,
    resize_batch,
    resize_to_views,
)
from vitrail.processing.image_layout import ImageLayout
from vitrail.processing.tokenizer import Tokenizer
from vitrail.registry import TASKS
from vitrail.stream import RowTemplate, count_turns
from vitrail.tasks.qa_tokens import (
    IGNORE_INDEX,
    TEXT_KEY,
    QATokenizer,
    answer_loss,
    bos_ids,
    collate,
    step_flops,
    to_chat_tokenizer,
)
from vitrail.tasks.task_spec import TaskSpec
from vitrail.training.task import Batch

BLANK_PREFIX = "blank/"  # key prefix before a part's name: blank input that runs the part without a loss
PREPARED_PREFIX = "prepared/"  # key prefix of prepared inputs: images and the questions and answers about them


class VLMSettings(Config):
    """Settings of the vlm task.

    weights         loss weights of "answers" and "text"; 1 by default
    num_questions   questions per scene (LLaVA's first stage: one)
    question_kinds  kinds of questions (LLaVA's first stage: captions)
    turns           "apart": the questions about an image do not attend to each other. Otherwise the model can derive
                    most answers from earlier turns instead of the image. "together": one conversation, as in LLaVA,
                    for models that answer follow-up questions. Queries that are fused with a question see one
                    question only, so questions that are "apart" become rows of their own
    max_length      tokens of the questions and answers at most; longer samples are truncated
    z_loss          weight of logsumexp² of all logits, which prevents logit drift; in training only
    balancing_loss  weight of the load-balancing loss of a mixture of experts; in training only
    """

    weights: dict[str, float] = {}
    num_questions: int = 6
    question_kinds: tuple[str, ...] = QUESTION_KINDS
    turns: Literal["apart", "together"] = "apart"
    max_length: int = 160
    z_loss: NonNegativeFloat = 0.0
    balancing_loss: NonNegativeFloat = 0.0

    def __post_init__(self) -> None:
        wrong = [name for name in self.weights if name not in ("answers", "text")]
        if wrong or any(weight < 0 for weight in self.weights.values()):
            raise ConfigError(f"weights = {self.weights}", 'use the keys "answers" and "text" with values >= 0')
        if self.max_length < 8:
            raise ConfigError(f"max_length is {self.max_length}", "give at least 8")


class VLMTask:
    """Trains a vision-language model on questions and answers about images, and optionally on plain text.

    A row is bos (if the tokenizer has one), an image, then question, eos, answer, eos, and so on. Turns that are
    "apart" attend to the image and to themselves only; their positions continue from the image.

    The answer loss is the mean over answer tokens, end tokens included, times the number of images. The text loss is
    the sum over tokens. So micro-batches and ranks are weighted by images, not by answer tokens.

    `chat_tokenizer` is the tokenizer with a chat template that formats prompts the same way, for saving with the model.
    """

    def __init__(
        self,
        model: VLM | CrossAttentionVLM,
        sources: Mapping[str, NamedImageSource | SceneSource | TextSource],
        tokenizer: Tokenizer | None,
        settings: VLMSettings,
    ):
        if tokenizer is None or tokenizer.eos_token_id is None:
            raise ConfigError(
                "answers need an end token, but there is no tokenizer with one", "add a [tokenizer] table"
            )
        self.model, self.settings, self.eos_token_id = model, settings, tokenizer.eos_token_id
        self.has_queries = isinstance(model, VLM) and model.queries is not None
        image_sources = {name: source for name, source in sources.items() if not isinstance(source, TextSource)}
        has_several_turns = settings.num_questions != 1 and any(
            isinstance(source, SceneSource) for source in image_sources.values()
        )
        self.independent_turns = has_several_turns and settings.turns == "apart"  # a single turn needs no mask
        self.splits_turns = self.has_queries and self.independent_turns  # every turn is a row
        self.chat_tokenizer = to_chat_tokenizer(tokenizer, model.config.image_token_id)
        self.policy = model.config.resolved_policy
        self.view_layout = self._find_view_layout(image_sources)
        self.image_size = 0 if self.view_layout is not None else get_fixed_view(self.policy).canvas_size[0]
        self.datasets: dict[str, QADataset] = {
            name: build_qa_dataset(source, settings.num_questions, settings.question_kinds)
            for name, source in image_sources.items()
        }
        loss_kinds = (["answers"] if image_sources else []) + (["text"] if len(image_sources) < len(sources) else [])
        self.loss_weights = {kind: settings.weights.get(kind, 1.0) for kind in loss_kinds}
        self.qa_tokenizer = QATokenizer(self.datasets, tokenizer, tokenizer.eos_token_id, settings.max_length)
        self._parallel_streams = ParallelStreams()
        self._label_tokens = float(settings.max_length)  # target tokens per image, at the last call of `count_tokens`
        # Longest question, in tokens.
        self.max_question_length = max([0, *map(self._max_question_length, self.datasets)])
        for name in self.datasets:
            self.qa_tokenizer.check_lengths(name, len(image_sources[name]))
        self.row_length = settings.max_length  # text tokens of a row
        if self.splits_turns:
            self.row_length = min(self.row_length, max(map(self._max_turn_length, self.datasets)))
        several_turns = has_several_turns and not self.splits_turns
        self.row_template = model.make_row_template(
            bos_ids(tokenizer), self.row_length, settings.num_questions if several_turns else 1, self._image_shape
        )
        self._device_templates: dict[torch.device, RowTemplate] = {}
        self._check_context(self.row_template.prefix_length + self.row_template.num_later_queries + self.row_length)

    def _find_view_layout(self, sources: Mapping[str, NamedImageSource | SceneSource]) -> ImageLayout | None:
        """Return the views of every image if the policy makes several, or one of native size; all have one shape."""
        shapes = {
            source.image_shape if isinstance(source, SceneSource) else (source.config.image_size,) * 2
            for source in sources.values()
        }
        layouts = [find_view_layout(self.policy, shape) for shape in shapes or {(1, 1)}]
        if all(layout is None for layout in layouts):
            return None
        if len(shapes) != 1:
            raise ConfigError(
                f"policy {type(self.policy).__name__} gives images of {sorted(shapes)} pixels different views",
                "use sources of one image shape, or naive, letterbox or crop",
            )
        return layouts[0]

    @property
    def _image_shape(self) -> tuple[int, int] | None:
        """Height and width of all images, if the policy needs them."""
        return None if self.view_layout is None else (self.view_layout.height, self.view_layout.width)

    def _check_context(self, row_length: int) -> None:
        context = self.model.config.decoder.context_length
        if row_length > context:
            raise ConfigError(
                f"rows of {row_length} tokens, {row_length - self.row_length} of them for the image, exceed the "
                f"decoder's context length of {context}",
                "lower settings.max_length, reduce the tokens per image, or use a decoder with a longer context",
            )

    # ---- samples ------------------------------------------------------------------------------------------------

    def collate(self, samples: Sequence[Any]) -> Batch:
        return collate(samples)

    def count_loss_terms(self, batch: Batch) -> dict[str, int]:
        """Count images, and target tokens of plain text."""
        num_images = sum(len(index) for name, index in batch.items() if name in self.datasets)
        num_terms = {"answers": num_images, "text": _count_targets(batch.get(TEXT_KEY))}
        return {kind: num_terms[kind] for kind in self.loss_weights}

    def used_parts(self, batch: Batch) -> dict[str, bool]:
        """Images of all sources run in one forward pass, plain texts in another."""
        used = {"answers": any(name in self.datasets for name in batch), "text": TEXT_KEY in batch}
        return {kind: used[kind] or BLANK_PREFIX + kind in batch for kind in self.loss_weights}

    def fill_part(self, batch: Batch, part: str) -> Batch:
        return batch | {BLANK_PREFIX + part: torch.zeros(1, 2, dtype=torch.long)}

    # ---- losses -------------------------------------------------------------------------------------------------

    def __call__(self, batch: Batch) -> dict[str, Tensor]:
        if PREPARED_PREFIX + "ids" not in batch:
            batch = self.prepare_batch(batch)
        zero = self.model.decoder.embed.weight.new_zeros((), dtype=torch.float32)
        losses = dict.fromkeys(self.loss_weights, zero)
        if PREPARED_PREFIX + "ids" in batch:
            pixels, ids, targets = (batch[PREPARED_PREFIX + part] for part in ("pixels", "ids", "targets"))
            questions, turn_starts = (
                batch.get(PREPARED_PREFIX + "question_ids"),
                batch.get(PREPARED_PREFIX + "turn_starts"),
            )
            template = self._get_row_template(ids.device)
            hidden = self.model.forward_rows(template, pixels, ids, questions, turn_starts)
            loss = self._token_loss(hidden, targets, "mean")
            if self.settings.balancing_loss and (balance := pop_load_balancing_loss(self.model)) is not None:
                loss = loss + self.settings.balancing_loss * balance
            losses["answers"] = loss * (len(pixels) - (BLANK_PREFIX + "answers" in batch))
        text, blank = batch.get(TEXT_KEY), batch.get(BLANK_PREFIX + "text")
        if text is None and blank is not None:
            losses["text"] = self._text_loss(blank) * 0
        elif text is not None:
            losses["text"] = self._text_loss(text)
        return losses

    @torch.compiler.disable  # templates are cached by device
    def _get_row_template(self, device: torch.device) -> RowTemplate:
        if device not in self._device_templates:
            self._device_templates[device] = self.row_template.to(device)
        return self._device_templates[device]

    def _text_loss(self, ids: Tensor) -> Tensor:
        loss = self._token_loss(self.model.forward_text(ids[:, :-1]), ids[:, 1:], "sum")
        if torch.is_grad_enabled() and self.model.training and not loss.requires_grad:
            raise ConfigError(
                "the mixture has text, but the stage trains no module that text passes through",
                "train the decoder, or use text for validation only (stages.N.validate)",
            )
        return loss

    @torch.compiler.disable  # the number of targets differs between batches
    def _token_loss(self, hidden: Tensor, targets: Tensor, reduction: Literal["mean", "sum"]) -> Tensor:
        z = self.settings.z_loss if self.model.training else 0.0  # validation reports the plain loss
        return answer_loss(self.model.decoder, hidden, targets, reduction, z)

    # ---- inputs from sample indices -----------------------------------------------------------------------------

    @torch.compiler.disable  # sources cache tables by device
    @torch.no_grad()
    def prepare_batch(self, batch: Batch) -> Batch:
        """Build the inputs of all image sources from sample indices; keys start with `PREPARED_PREFIX`.

        pixels        (B, C, S, S) or views (B, V, C, h, w), normalised for the tower
        ids           (B, L)
        targets       (B, L) the next token where it is trained on, else IGNORE_INDEX
        counts        (2,) number of text and image tokens without padding, and number of target tokens
        question_ids  (B, K, T) the questions, padded with −1, if queries are fused with questions
        turn_starts   (B, L) the position where each token's turn starts, if turns are masked
        """
        makers = [partial(self._make_inputs, name, index) for name, index in batch.items() if name in self.datasets]
        parts = self._parallel_streams(next(iter(batch.values())).device, makers)
        if BLANK_PREFIX + "answers" in batch:
            parts.append(self._blank_inputs(batch[BLANK_PREFIX + "answers"].device))
        if not parts:
            return batch
        fields = {key: [part[key] for part in parts] for key in parts[0]}
        inputs = {key: torch.cat(tensors) for key, tensors in fields.items() if key != "counts"}
        inputs["counts"] = torch.stack(fields["counts"]).sum(0)
        if self.has_queries:
            inputs["question_ids"] = self._extract_questions(inputs["ids"], inputs["turn_starts"])
        if self.splits_turns:
            inputs |= self._split_turns(inputs["ids"], inputs["targets"], inputs["turn_starts"])
            inputs["question_ids"] = inputs["question_ids"].flatten(0, 1)[:, None]  # (B·K, 1, T)
        if self.splits_turns or not (self.independent_turns or self.row_template.num_later_queries):
            del inputs["turn_starts"]
        rest = {name: value for name, value in batch.items() if name not in self.datasets}
        return rest | {PREPARED_PREFIX + key: value for key, value in inputs.items()}

    def _split_turns(self, ids: Tensor, targets: Tensor, turn_starts: Tensor) -> Batch:
        """Split rows (B, L) into one row for each turn (B·K, T), the turns of an image after one another."""
        K, T = self.settings.num_questions, self.row_length
        turn, position = count_turns(turn_starts), torch.arange(ids.shape[1], device=ids.device) - turn_starts
        slot = torch.where((turn < K) & (position < T), turn * T + position, K * T)  # others go to a dropped column

        def place(x: Tensor, fill: int) -> Tensor:
            return x.new_full((len(x), K * T + 1), fill).scatter(1, slot, x)[:, :-1].reshape(-1, T)

        return {"ids": place(ids, self.eos_token_id), "targets": place(targets, IGNORE_INDEX)}

    def _extract_questions(self, ids: Tensor, turn_starts: Tensor) -> Tensor:
        """Extract the questions (B, K, T) from rows (B, L): in each turn the tokens before the first end token."""
        K = self.settings.num_questions if self.splits_turns else self.row_template.num_questions
        T, is_end = self.max_question_length, (ids == self.eos_token_id).long()
        ends_before = is_end.cumsum(1) - is_end
        position = torch.arange(ids.shape[1], device=ids.device) - turn_starts  # position within the turn
        is_question = (
            (is_end == 0)
            & (ends_before == ends_before.gather(1, turn_starts.clamp(max=ids.shape[1] - 1)))
            & (position < T)
        )
        # Other tokens go to an extra column that is dropped.
        slot = torch.where(is_question, count_turns(turn_starts) * T + position, K * T)
        return ids.new_full((len(ids), K * T + 1), -1).scatter(1, slot, ids)[:, :-1].unflatten(1, (K, T))

    def _make_inputs(self, name: str, index: Tensor) -> Batch:
        samples = self.qa_tokenizer.make_batch(name, index)
        later_turns = (count_turns(samples.turn_starts) * samples.attention_mask).amax(1).sum()  # number of later turns
        template = self.row_template
        later_tokens = template.num_later_queries // max(1, template.num_questions - 1)
        later_tokens = template.prefix_length if self.splits_turns else later_tokens
        image_tokens = len(index) * template.prefix_length + later_turns * later_tokens
        token_counts = torch.stack(
            [samples.attention_mask.sum() + image_tokens, (samples.targets != IGNORE_INDEX).sum()]
        )
        pixels = self.make_views(samples.pixels, name)
        return {
            "pixels": pixels,
            "ids": samples.ids,
            "targets": samples.targets,
            "turn_starts": samples.turn_starts,
            "counts": token_counts,
        }

    def _max_question_length(self, name: str) -> int:
        """Upper bound of the question length of a source, in tokens."""
        dataset, table = self.datasets[name], self.qa_tokenizer.get_table(torch.device("cpu"), name)
        return (
            max_question_tokens(dataset.language, table, dataset.question_kinds)[0]
            if isinstance(dataset, SceneQADataset)
            else dataset.count_max_tokens(table)[0]
        )

    def _max_turn_length(self, name: str) -> int:
        """Upper bound of the tokens of a question and its answer, with both ends."""
        dataset, table = self.datasets[name], self.qa_tokenizer.get_table(torch.device("cpu"), name)
        if isinstance(dataset, SceneQADataset):
            return sum(max_question_tokens(dataset.language, table, dataset.question_kinds)) + 2
        return dataset.count_max_tokens(table)[0]

    def _blank_inputs(self, device: torch.device) -> Batch:
        C, S = len(self.model.config.mean), self.image_size
        shape = (1, C, S, S)
        if self.view_layout is not None:
            views = self.view_layout.views
            shape = (1, *((len(views),) if len(views) > 1 else ()), C, *views[0].canvas_size)
        ids = torch.full((1, self.settings.max_length), self.eos_token_id, device=device)
        pixels = torch.zeros(shape, device=device, dtype=self.model.decoder.embed.weight.dtype)
        rest = torch.full_like(ids, IGNORE_INDEX), torch.zeros_like(ids), ids.new_zeros(2)
        return dict(zip(("pixels", "ids", "targets", "turn_starts", "counts"), (pixels, ids, *rest), strict=True))

    def make_views(self, pixels: Tensor, name: str) -> Tensor:
        """Resize, augment (in training) and normalise images: uint8 (B, 3 or 4, H, W) → (B, C, S, S), or the views of
        the policy, (B, V, C, h, w), or one of native size.
        """
        height, width = pixels.shape[2:]
        if self.view_layout is not None:
            augmentation = self.datasets[name].augmentation if self.model.training else NO_AUGMENTATION
            images = augment_images(pixels, augmentation, (height, width))
            views = resize_to_views(((images + 1) * 127.5).round().to(torch.uint8), self.view_layout.views, self.policy)
            x = torch.stack([self._normalize(view / 255) for view in views], 1)
            return x if len(views) > 1 else x[:, 0]
        if height != width or not is_plain_resize(self.policy, height, width):
            pixels = resize_batch(pixels, self.policy)
        augmentation = self.datasets[name].augmentation if self.model.training else NO_AUGMENTATION
        return self._normalize((augment_images(pixels, augmentation.replace(image_size=self.image_size)) + 1) / 2)

    def _normalize(self, x: Tensor) -> Tensor:
        config = self.model.config
        # Channel by channel with Python numbers: copying a tensor of them to the GPU would synchronize.
        channels = [(x[:, c] - mean) / std for c, (mean, std) in enumerate(zip(config.mean, config.std, strict=True))]
        return torch.stack(channels, 1).to(self.model.decoder.embed.weight.dtype)

    # ---- costs --------------------------------------------------------------------------------------------------

    def count_tokens(self, batch: Batch) -> int:
        """Count the tokens of a prepared batch, image tokens included and padding excluded."""
        image_row_tokens, text_tokens = 0, _count_targets(batch.get(TEXT_KEY))
        if PREPARED_PREFIX + "ids" in batch:
            image_row_tokens, num_targets = batch[PREPARED_PREFIX + "counts"].tolist()
            num_images = len(batch[PREPARED_PREFIX + "ids"]) - (BLANK_PREFIX + "answers" in batch)
            self._label_tokens = num_targets / num_images if num_images else self._label_tokens
        return image_row_tokens + text_tokens

    def count_flops(self, batch: Batch) -> int:
        """FLOPs of a forward pass, vision tower included.

        The head counts the target tokens of the last call of `count_tokens`. Independent turns count full attention,
        because their mask does not reduce the work.
        """
        return sum(flops for _, flops in self._cost_components(batch))

    def count_step_flops(self, batch: Batch) -> float:
        return step_flops(self._cost_components(batch))

    def _cost_components(self, batch: Batch) -> list[tuple[Sequence[nn.Module], int]]:
        """Modules in the order of the forward pass, each with its forward FLOPs."""
        B = sum(len(i) for n, i in batch.items() if n in self.datasets)
        text = batch.get(TEXT_KEY)
        decoder = self.model.decoder
        costs: list[tuple[Sequence[nn.Module], int]] = []
        if B:
            rows = self.settings.num_questions if self.splits_turns else 1  # of an image; they share its features
            num_logits = round(B * self._label_tokens)
            workload = make_row_workload(self.model, self.row_template, B * rows, num_logits, self._image_shape)
            parts = self.model.cost_components(workload).items()
            shared = ("tower", "connector")
            costs = [(part.modules, part.flops // (rows if name in shared else 1)) for name, part in parts]
        if text is not None:
            costs.append(
                ([decoder], cost.count_flops(decoder, Workload.causal_attention(text.shape[1] - 1, len(text))))
            )
        return costs


def _count_targets(windows: Tensor | None) -> int:
    """Number of tokens that have a predecessor."""
    return 0 if windows is None else windows.numel() - len(windows)


TASKS.register("vlm", TaskSpec(VLMTask, (VLM, CrossAttentionVLM), ("questions", "text"), VLMSettings, extract_qa_texts))
