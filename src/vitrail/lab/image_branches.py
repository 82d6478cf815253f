"""Compute a decoder's hidden states for pairs of images after the same prefix, to measure their divergence.

Shapes: F images, P pairs, N tokens of an image, K prefix tokens, D width.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitrail.codecs.image_sources import ImageResizeConfig
from vitrail.data.scenes.atlas_library import open_atlas
from vitrail.data.scenes.scene_source import SceneSource, SceneSourceConfig
from vitrail.errors import ConfigError, DataError
from vitrail.generate.vlm_generation import pad_streams
from vitrail.lab.bottlenecks import get_image_size
from vitrail.lab.text_branches import PairSettings
from vitrail.models.unified_model import UnifiedModel
from vitrail.models.vlm import VLM
from vitrail.processing.image_loading import load_image
from vitrail.processing.tokenizer import Tokenizer
from vitrail.stream import build_stream, text_part

SCENE_BATCH = 64  # scenes rendered at once


def compute_image_pairs(
    model: VLM | UnifiedModel,
    tokenizer: Tokenizer,
    files: Sequence[str],
    settings: PairSettings,
    *,
    prompt: str = "",
    atlas: str = "emoji",
) -> Iterator[tuple[Tensor, Tensor]]:
    """Compute hidden states for pairs of images after a prompt: of image files, by default of scenes."""
    length, count, batch_size, seed = settings
    if files:
        images = [load_image(file) for file in files]
        pairs = sample_image_pairs(len(images), count, seed)
    else:
        config = SceneSourceConfig(atlas=atlas, image_size=get_image_size(model), seed=seed)
        source = SceneSource(config, open_atlas(atlas))
        batches = torch.arange(2 * count).split(SCENE_BATCH)
        pixels = torch.cat([source.render_indices(batch).pixels for batch in batches])
        images = [Image.fromarray(image) for image in pixels.permute(0, 2, 3, 1).numpy()]
        pairs = np.arange(2 * count).reshape(-1, 2)
    start = tokenizer.encode("", add_special_tokens=True)[:1]
    question_ids = tokenizer.encode(prompt, literal=True)
    return compute_pair_hidden_states(
        model,
        images,
        pairs,
        prefix_ids=[*(start if start == [tokenizer.bos_token_id] else []), *question_ids],
        question_ids=question_ids,
        length=length,
        batch_size=batch_size,
    )


def sample_image_pairs(num_images: int, max_pairs: int, seed: int = 0) -> np.ndarray:
    """Return index pairs (P, 2) of distinct images: all of them, or a random subset of `max_pairs`."""
    if num_images < 2 or max_pairs < 1:
        raise DataError(
            f"cannot form {max_pairs} pairs of {num_images} images",
            "give at least two images and ask for at least one pair",
        )
    first, second = np.triu_indices(num_images, 1)
    kept = np.sort(np.random.default_rng(seed).permutation(len(first))[:max_pairs])
    return np.stack([first[kept], second[kept]], 1)


@torch.no_grad()
def compute_pair_hidden_states(
    model: VLM | UnifiedModel,
    images: Sequence[Image.Image],
    pairs: np.ndarray,
    *,
    prefix_ids: Sequence[int] = (),
    question_ids: Sequence[int] = (),
    length: int | None = None,
    batch_size: int = 16,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the last hidden states (P, N, D) of both images of each pair, one batch of pairs at a time.

    prefix_ids    tokens before both images
    question_ids  the question for question-conditioned queries
    length        number of image tokens to keep; default: all
    """
    for part in torch.as_tensor(pairs).split(batch_size):
        pair_images = [images[i] for i in part.flatten().tolist()]  # 2P
        states = (
            _compute_unified_hidden_states(model, pair_images, prefix_ids)
            if isinstance(model, UnifiedModel)
            else _compute_vlm_hidden_states(model, pair_images, prefix_ids, question_ids)
        )
        left, right = states[:, :length].unflatten(0, (-1, 2)).unbind(1)
        yield left, right


def _compute_vlm_hidden_states(
    model: VLM, images: Sequence[Image.Image], prefix_ids: Sequence[int], question_ids: Sequence[int]
) -> Tensor:
    """(2P, N, D)"""
    config, inputs = model.config, model.prepare_images(images)
    if model.queries is not None:
        inputs = inputs._replace(questions=([torch.tensor(question_ids, dtype=torch.long)],) * len(inputs.layouts))
    prefix_parts = [text_part(prefix_ids)] if len(prefix_ids) else []
    streams = [build_stream([*prefix_parts, *config.make_parts(shape)], config.rules) for shape in inputs.layouts]
    counts = {len(stream) - len(prefix_ids) for stream in streams}
    if len(counts) > 1:
        raise DataError(f"images of a batch have {min(counts)} to {max(counts)} tokens", "give images of one size")
    [N] = counts
    _check_context_length(len(prefix_ids), N, config.decoder.context_length)
    return model.forward_hidden(pad_streams(streams), inputs)[:, len(prefix_ids) :]


def _compute_unified_hidden_states(
    model: UnifiedModel, images: Sequence[Image.Image], prefix_ids: Sequence[int]
) -> Tensor:
    """(2P, N, D): hidden states of the codes, without the start token before them"""
    codec, N = model.codec, math.prod(model.grid)
    _check_context_length(len(prefix_ids), 1 + N, model.config.decoder.context_length)
    fit = ImageResizeConfig().resolve_size(codec)
    pixels = torch.stack([fit.apply(picture.convert("RGB"), codec.downsample_factor)[0] for picture in images])
    pieces = [model.make_input_image_piece(model.encode_images(codec.to_pixels(pixels))[0])]
    if len(prefix_ids):
        prefix = torch.tensor(list(prefix_ids), device=pieces[0].embeds.device)
        pieces.insert(0, model.make_text_piece(prefix.expand(len(images), -1)))
    return model(*pieces)[:, -N:]


def _check_context_length(prefix_length: int, num_tokens: int, context_length: int) -> None:
    if prefix_length + num_tokens > context_length:
        raise ConfigError(
            f"{prefix_length} + {num_tokens} tokens exceed the context length of {context_length}",
            "use a shorter prompt",
        )
