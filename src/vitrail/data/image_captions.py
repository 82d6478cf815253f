"""Image-caption batches for training, from named images and from synthetic scenes.

Batches are made on the device of the index tensor. Shapes: B samples, H and W pixels, P text pieces of a caption.
"""

from functools import cached_property, partial, singledispatch
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from vitrail.data.augmentation import AugmentationConfig
from vitrail.data.language import SceneLanguage, generate_questions, generate_swap_pairs
from vitrail.data.language.question_generation import max_question_tokens
from vitrail.data.language.text_pieces import PieceTable, TokenTable
from vitrail.data.named_images import NamedImageSource
from vitrail.data.scenes.scene_source import SceneSource
from vitrail.errors import ConfigError
from vitrail.nn.cuda_graphs import CUDAGraphFunction

NEGATIVE_KINDS = ("colour", "relation", "number", "size")


class CaptionBatch(NamedTuple):
    """A batch of images with captions, and optionally a hard negative for each caption.

    A negative caption differs from the caption in one fact, which makes it false. It is empty where none can be made.
    """

    pixels: Tensor  # uint8 (B, 3 or 4, H, W)
    captions: Tensor  # (B, P) indices of text pieces
    negative_captions: Tensor | None = None  # (B, P)


class CaptionSource(Protocol):
    """Interface of a source of images with captions."""

    @property
    def pieces(self) -> PieceTable: ...

    @property
    def augmentation(self) -> AugmentationConfig: ...

    @property
    def concepts(self) -> list[str] | None:
        """Names of the concepts, or None if all images have different captions."""
        ...

    @property
    def has_negatives(self) -> bool:
        """Whether batches can have negative captions."""
        ...

    def concept_rows(self, index: Tensor) -> Tensor:
        """Rows (B,) of `concepts` for these images."""
        ...

    def make_batch(self, index: Tensor, *, randomize: bool = True, swap_negatives: bool = False) -> CaptionBatch:
        """Make a batch of images, each with one caption.

        `randomize` draws the wording at random. `swap_negatives` adds negative captions if the source supports them.
        """
        ...

    def resample_captions(self, index: Tensor, *, randomize: bool = True) -> Tensor:
        """Make another caption (B, P) for each of the same images."""
        ...

    def count_max_tokens(self, token_table: TokenTable) -> int:
        """Return how many tokens a text tower must accept."""
        ...


class NamedImageCaptions:
    """Captions built from the names of images."""

    has_negatives = False

    def __init__(self, source: NamedImageSource):
        self.source = source
        self.pieces = source.pieces
        self.augmentation = source.config.augmentation
        self.concepts = source.concepts

    def make_batch(self, index: Tensor, *, randomize: bool = True, swap_negatives: bool = False) -> CaptionBatch:
        return CaptionBatch(self.source.pixels(index), self.source.sample_texts(index, randomize=randomize))

    def resample_captions(self, index: Tensor, *, randomize: bool = True) -> Tensor:
        return self.source.sample_texts(index, randomize=randomize)

    def concept_rows(self, index: Tensor) -> Tensor:
        return index

    def count_max_tokens(self, token_table: TokenTable) -> int:
        """Token count of the longest name in a template. Keywords and other languages may be truncated."""
        return self.source.count_max_tokens(token_table)


class SceneCaptions:
    """Captions that list the objects of a scene, with negatives that swap a colour, relation, number or size."""

    concepts = None
    has_negatives = True

    def __init__(self, source: SceneSource):
        self.source, self.augmentation = source, source.config.augmentation
        self._captured: dict[tuple[str, bool, bool], CUDAGraphFunction[Any]] = {}

    @cached_property
    def language(self) -> SceneLanguage:
        most = self.source.config.scene_config().objects[1]
        return SceneLanguage.build(self.source.atlas.table, max_objects=most, sprite_rows=self.source.sprite_rows)

    @property
    def pieces(self) -> PieceTable:
        return self.language.pieces

    def make_batch(self, index: Tensor, *, randomize: bool = True, swap_negatives: bool = False) -> CaptionBatch:
        make = partial(self._make_batch, vary=randomize, with_swaps=swap_negatives)
        return self._captured.setdefault(("pair", randomize, swap_negatives), CUDAGraphFunction(make))(index)

    def resample_captions(self, index: Tensor, *, randomize: bool = True) -> Tensor:
        return self._captured.setdefault(
            ("again", randomize, False), CUDAGraphFunction(partial(self._resample, vary=randomize))
        )(index)

    def _make_batch(self, index: Tensor, *, vary: bool, with_swaps: bool) -> CaptionBatch:
        rendered = self.source.render_indices(index)
        seed = self.source.config.seed
        language = self.language.to(index.device)
        captions = generate_questions(language, rendered.scenes, seed, "caption_short", held_out=not vary).answer
        if not with_swaps:
            return CaptionBatch(rendered.pixels, captions)
        pairs = [
            generate_swap_pairs(language, rendered.scenes, seed, kind, held_out=not vary) for kind in NEGATIVE_KINDS
        ]
        is_valid = torch.stack([pair.valid for pair in pairs], 1)  # (B, kinds)
        chosen = (torch.rand(is_valid.shape, device=index.device) * is_valid).argmax(1)  # choose one of the valid kinds
        max_pieces = max(captions.shape[1], *(pair.true_caption.shape[1] for pair in pairs))
        true_table, false_table = (
            torch.stack([pad(text, (0, max_pieces - text.shape[1])) for text in texts], 1)
            for texts in ([pair.true_caption for pair in pairs], [pair.false_caption for pair in pairs])
        )  # (B, kinds, P)
        rows = torch.arange(len(index), device=index.device)
        any_valid = is_valid.any(1, keepdim=True)
        captions = torch.where(any_valid, true_table[rows, chosen], pad(captions, (0, max_pieces - captions.shape[1])))
        return CaptionBatch(rendered.pixels, captions, torch.where(any_valid, false_table[rows, chosen], 0))

    def concept_rows(self, index: Tensor) -> Tensor:
        raise NotImplementedError("scenes have no concepts")

    def _resample(self, index: Tensor, *, vary: bool) -> Tensor:
        language, config = self.language.to(index.device), self.source.config
        return generate_questions(
            language, self.source.sample_scenes(index), config.seed + 1, "caption_short", held_out=not vary
        ).answer

    def count_max_tokens(self, token_table: TokenTable) -> int:
        swaps = (self.language.sentence_templates[f"swap_{kind}"].max_tokens(token_table) for kind in NEGATIVE_KINDS)
        return max(max_question_tokens(self.language, token_table, ["caption_short"])[1], *swaps)


@singledispatch
def build_caption_source(source: Any) -> CaptionSource:
    """Build the caption source for a source of images. `build_caption_source.register(MySource)` adds another."""
    raise ConfigError(f"a {type(source).__name__} has no captions", "register it in build_caption_source")


build_caption_source.register(NamedImageSource, NamedImageCaptions)
build_caption_source.register(SceneSource, SceneCaptions)


def extract_caption_texts(source: Any) -> PieceTable:
    """Return the texts of all captions, to train a tokenizer on."""
    return build_caption_source(source).pieces
