"""Base class of tasks on captioned images: builds batches on the device and labels which images and texts match.

B samples, M texts, L tokens
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from vitrail.data.augmentation import NO_AUGMENTATION, augment_images
from vitrail.data.image_captions import CaptionSource, build_caption_source
from vitrail.data.language.text_pieces import TokenTable
from vitrail.data.named_images import NamedImageSource
from vitrail.data.scenes.scene_source import SceneSource
from vitrail.encoders.text_tower import TextSpecialTokens
from vitrail.errors import ConfigError
from vitrail.processing.image_preprocessor import build_naflex_policy
from vitrail.processing.resolution_policies import NaFlexPolicy
from vitrail.processing.tokenizer import Tokenizer
from vitrail.tasks.image_task import ImageTask
from vitrail.training.task import Batch

_FIRST_TEXT_LABEL = 1 << 62  # text labels start here; concept labels lie below


class ImageTextBatch(NamedTuple):
    """A batch on the device: images, token ids (B, L) of their captions, and labels of what matches."""

    pixels: Tensor  # (B, 3, S, S), or for a NaFlex tower (B, 3, H, W) or patches (B, N, K)
    caption_ids: Tensor
    negative_ids: Tensor | None
    second_caption_ids: Tensor | None
    labels: Tensor  # (B,) shared by the images and their captions
    negative_labels: Tensor | None  # (M,) of the negatives; −1 where there is none
    grids: list[tuple[int, int]] | None = None  # of patches


class InputShape(NamedTuple):
    """Input sizes of a model: image size in pixels, context length in tokens, and the config key of the latter.

    Images become squares of `image_size`. With `patch_counts`, they keep the aspect ratio of their source, and have at
    most one of these numbers of patches: the first in validation, one drawn for each batch in training.
    """

    image_size: int
    context_length: int
    context_key: str
    patch_counts: tuple[int, ...] = ()


class ImageTextTask(ImageTask):
    """Builds batches of images and captions and the labels that say which of them match.

    Named images match every caption with the same name, in all sources. A scene matches captions with exactly the text
    of its own. `swap_negatives` adds negative captions; `second_captions` adds a second caption of each image.
    """

    def __init__(
        self,
        model: Any,
        sources: Mapping[str, NamedImageSource | SceneSource],
        tokenizer: Tokenizer,
        special_tokens: TextSpecialTokens,
        input_shape: InputShape,
        *,
        swap_negatives: bool = False,
        second_captions: bool = False,
    ):
        self.model = model
        self.tokenizer = tokenizer
        self.special_tokens = special_tokens
        self.input_shape = input_shape
        self.swap_negatives, self.second_captions = swap_negatives, second_captions
        self.captions: dict[str, CaptionSource] = {
            name: build_caption_source(source) for name, source in sources.items()
        }
        self._concept_numbers: dict[str, int] = {}  # concept → number, shared by all sources
        self._tables: dict[tuple[torch.device, str], tuple[TokenTable, Tensor]] = {}
        for name, caption_source in self.captions.items():
            self._tokenize_source(name, caption_source)

    @property
    def _is_distributed(self) -> bool:
        """Whether ranks hold parts of one batch. In validation every rank holds the whole batch."""
        return self.model.training and dist.is_initialized() and dist.get_world_size() > 1

    @torch.compiler.disable  # sources cache tables by device
    @torch.no_grad()
    def _make_batch(self, batch: Batch) -> ImageTextBatch:
        training = self.model.training
        policy = self._draw_policy(training)
        pixels: list[Tensor] = []
        positives: list[Tensor] = []
        negatives: list[Tensor] = []
        seconds: list[Tensor] = []
        positive_labels: list[Tensor] = []
        swapped_labels: list[Tensor] = []
        for name, index in batch.items():
            source = self.captions[name]
            pair = source.make_batch(index, randomize=training, swap_negatives=self.swap_negatives)
            pixels.append(
                augment_images(
                    pair.pixels,
                    (source.augmentation if training else NO_AUGMENTATION).replace(
                        image_size=self.input_shape.image_size
                    ),
                    None if policy is None else policy.layout(*pair.pixels.shape[-2:]).views[0].canvas_size,
                )
            )
            positives.append(self._token_ids(name, pair.captions))
            concepts = self._tables_on(index.device, name)[1]
            positive_labels.append(
                hash_texts(positives[-1]) if source.concepts is None else concepts[source.concept_rows(index)]
            )
            if self.second_captions:
                seconds.append(self._token_ids(name, source.resample_captions(index, randomize=training)))
            if pair.negative_captions is not None:
                negatives.append(self._token_ids(name, pair.negative_captions))
                swapped_labels.append(torch.where(pair.negative_captions.any(1), hash_texts(negatives[-1]), -1))
        batched, grids = (torch.cat(pixels), None) if policy is None else self.model.image.batch_images(pixels)
        return ImageTextBatch(
            pixels=batched,
            caption_ids=torch.cat(positives),
            negative_ids=torch.cat(negatives) if negatives else None,
            second_caption_ids=torch.cat(seconds) if seconds else None,
            labels=torch.cat(positive_labels),
            negative_labels=torch.cat(swapped_labels) if swapped_labels else None,
            grids=grids,
        )

    def _draw_policy(self, training: bool) -> NaFlexPolicy | None:
        """The policy of images that keep their aspect ratio; None for squares."""
        counts = self.input_shape.patch_counts
        if not counts:
            return None
        drawn = int(torch.randint(len(counts), ())) if training else 0
        return build_naflex_policy(self.model.config.image, counts[drawn])

    def _token_ids(self, name: str, rows: Tensor) -> Tensor:
        """Token ids (B, L) of texts given as pieces (B, P), identical to those of `evals.contrastive_embedder`."""
        table, L = self._tables_on(rows.device, name)[0], self.input_shape.context_length
        first = len(table.length) - 2  # the last two rows are the prefix and the suffix of a text
        prefix_suffix = (rows.new_full((len(rows), 1), row) for row in (first, first + 1))
        ids, length = table.to_ids(
            torch.cat([next(prefix_suffix), rows, next(prefix_suffix)], 1),
            L,
            self.special_tokens.padding_id,
            check=False,
        )
        if self.special_tokens.suffix:  # a truncated text keeps its end token
            ids[:, -1] = torch.where(length > L, self.special_tokens.suffix[-1], ids[:, -1])
        return ids

    def _tables_on(self, device: torch.device, name: str) -> tuple[TokenTable, Tensor]:
        """The token table of a source and the concept numbers of its samples, on a device."""
        key = device, name
        if key not in self._tables:
            tokens, numbers = self._tables[torch.device("cpu"), name]
            self._tables[key] = tokens.to(device), numbers.to(device)
        return self._tables[key]

    def _tokenize_source(self, name: str, source_captions: CaptionSource) -> None:
        frame, context_length = self.special_tokens, self.input_shape.context_length
        tokens = source_captions.pieces.tokenize(self.tokenizer, frame.prefix, frame.suffix)
        numbers = [
            self._concept_numbers.setdefault(concept, len(self._concept_numbers))
            for concept in source_captions.concepts or ()
        ]
        self._tables[torch.device("cpu"), name] = tokens, torch.tensor(numbers)
        excess = source_captions.count_max_tokens(tokens) + len(frame.prefix) + len(frame.suffix) - context_length
        if excess > 0:
            raise ConfigError(
                f"captions of {name!r} are {excess} tokens longer than the context of the text model",
                f"set {self.input_shape.context_key} to {context_length + excess} or more",
            )


def hash_texts(ids: Tensor) -> Tensor:
    """Hash token ids (B, L) to labels (B,) from _FIRST_TEXT_LABEL on; different texts collide with probability 2⁻⁶²."""
    multipliers = torch.arange(ids.shape[1], device=ids.device) * -0x61C8864680B583EB | 1
    hashed = (ids + 1) * multipliers
    hashed = (hashed ^ (hashed >> 29)) * -0x40A7B892E31B1A47  # without mixing, texts with swapped words would collide
    return (hashed.sum(1) & (_FIRST_TEXT_LABEL - 1)) + _FIRST_TEXT_LABEL
