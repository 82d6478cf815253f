"""Compositionality: scores of Winoground and ARO, and image-caption pairs with swapped properties from scenes.

B pairs, O object slots, H, W pixels, E embedding width
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import combinations

import torch
from torch import Tensor

from vitrail.data.language import CaptionPair, SceneLanguage, generate_swap_pairs
from vitrail.data.language.scene_facts import SceneFacts
from vitrail.data.scenes.scene import GRID, SceneBatch
from vitrail.data.scenes.scene_source import SceneSource
from vitrail.errors import ConfigError, DataError, suggest_name
from vitrail.evals.drawing_judge import concatenate_batches, select_rows
from vitrail.evals.scores import Proportion, Score

BATCH = 256  # scenes per batch
MAX_BATCHES = 400  # batches that are searched before an error is raised


def score_winoground(scores: Tensor) -> list[Score]:
    """Winoground scores from scores[b, c, p] of caption c with image p (B, 2, 2), where caption i matches image i.

    text: the correct caption scores higher for both images; image: the correct image scores higher for both captions;
    group: both. A tie is wrong.
    """
    (a, b), (c, d) = (column.unbind(1) for column in scores.unbind(1))  # a and d are the matching pairs
    text, image = (a > c) & (d > b), (a > b) & (d > c)
    rows = {"text": (text, 1 / 4), "image": (image, 1 / 4), "group": (text & image, 1 / 6)}
    return [
        Score.from_proportion(name, Proportion(int(hit.sum()), len(hit)), chance=chance)
        for name, (hit, chance) in rows.items()
    ]


def score_aro(images: Tensor, true: Tensor, false: Tensor) -> Score:
    """Fraction of images nearer to the true than to the false caption, from embeddings (B, E). A tie is wrong.

    The blind baseline compares all captions with the mean image embedding.
    """

    def share(pictures: Tensor) -> Proportion:
        hit = (pictures * true).sum(1) > (pictures * false).sum(1)
        return Proportion(int(hit.sum()), len(hit))

    blind = share(images.mean(0, keepdim=True).expand_as(images)).value
    return Score.from_proportion("true caption before the false", share(images), chance=1 / 2, blind=blind)


# ---- pairs from scenes ------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class CaptionPairs:
    """Images with a true and a false caption, and optionally counterpart images that match the false caption."""

    scenes: SceneBatch
    pixels: Tensor  # (B, 3, H, W) uint8
    true: list[str]
    false: list[str]
    counterpart_scenes: SceneBatch | None = None
    counterpart_pixels: Tensor | None = None  # (B, 3, H, W)


SWAP_OF_PRESET = {"colours": "colour", "relations": "relation", "counting": "number", "plain": "size"}
"""Swap kind that each scene preset is made for."""


def sample_caption_pairs(
    source: SceneSource, language: SceneLanguage, swap_kind: str, count: int, *, held_out: bool = True
) -> CaptionPairs:
    """Sample scenes with a true and a false caption of the same words.

    Captions use held-out templates that training does not use, unless `held_out` is False.
    """
    return _gather_pairs(source, language, swap_kind, count, held_out, None)


def sample_image_pairs(
    source: SceneSource, language: SceneLanguage, swap_kind: str, count: int, *, held_out: bool = True
) -> CaptionPairs:
    """Sample scenes with counterparts in which the colours or positions of two objects are swapped."""
    if swap_kind not in COUNTERPARTS:
        raise ConfigError(f"swap kind {swap_kind!r} has no counterpart images", suggest_name(swap_kind, COUNTERPARTS))
    return _gather_pairs(source, language, swap_kind, count, held_out, COUNTERPARTS[swap_kind])


def swap_colours(language: SceneLanguage, scenes: SceneBatch, i: int, j: int) -> tuple[SceneBatch, Tensor]:
    """Swap the colours of slots i and j; also return which scenes are valid."""
    return replace(scenes, colour=_swap_slots(scenes.colour, i, j)), scenes.is_filled[:, i] & scenes.is_filled[:, j]


def swap_positions(language: SceneLanguage, scenes: SceneBatch, i: int, j: int) -> tuple[SceneBatch, Tensor]:
    """Swap the positions of the objects in slots i and j; also return which scenes are valid.

    Each object keeps its size and moves to the other's centre. A scene is valid if the objects stay inside the image
    and touch nothing.
    """
    extent = _swap_slots(scenes.box[..., 2:] - scenes.box[..., :2], i, j)
    corner = (scenes.doubled_centre - extent) // 2
    is_moved = torch.zeros_like(scenes.is_filled)
    is_moved[:, [i, j]] = True
    box = torch.where(is_moved[..., None], torch.cat([corner, corner + extent], -1), scenes.box)
    swapped = replace(scenes, sprite=_swap_slots(scenes.sprite, i, j), colour=_swap_slots(scenes.colour, i, j), box=box)
    disjoint = SceneFacts(language, swapped).is_disjoint | ~scenes.is_filled[:, :, None] | ~scenes.is_filled[:, None, :]
    disjoint |= torch.eye(disjoint.shape[1], dtype=torch.bool, device=disjoint.device)
    is_valid = scenes.is_filled[:, i] & scenes.is_filled[:, j] & disjoint[:, [i, j]].all(2).all(1)
    is_inside = ((box[:, [i, j]] >= 0) & (box[:, [i, j]] <= GRID)).flatten(1).all(1)
    is_free = (scenes.frame_slot[:, [i, j]] < 0).all(1) & ~SceneFacts(language, scenes).is_frame[:, [i, j]].any(1)
    return swapped, is_valid & is_inside & is_free


CounterpartFn = Callable[[SceneLanguage, SceneBatch, int, int], tuple[SceneBatch, Tensor]]
COUNTERPARTS: dict[str, CounterpartFn] = {"colour": swap_colours, "relation": swap_positions}


def _swap_slots(x: Tensor, i: int, j: int) -> Tensor:
    order = list(range(x.shape[1]))
    order[i], order[j] = j, i
    return x[:, order]


def _gather_pairs(
    source: SceneSource,
    language: SceneLanguage,
    swap_kind: str,
    count: int,
    held_out: bool,
    counterpart: CounterpartFn | None,
) -> CaptionPairs:
    if f"swap_{swap_kind}" not in language.sentence_templates:
        raise ConfigError(f"unknown swap kind {swap_kind!r}", suggest_name(swap_kind, SWAP_OF_PRESET.values()))
    if count < 1:
        raise DataError(f"{count} pairs", "set at least 1")

    def swap_captions(scenes: SceneBatch) -> CaptionPair:
        return generate_swap_pairs(language, scenes, source.config.seed, swap_kind, held_out=held_out)

    scenes, counterparts = [], []
    true_captions: list[str] = []
    false_captions: list[str] = []
    for start in range(0, MAX_BATCHES * BATCH, BATCH):
        batch_scenes = source.sample_scenes(torch.arange(start, start + BATCH, device=language.concept.device))
        pair = swap_captions(batch_scenes)
        batch_counterparts, is_valid = (
            (batch_scenes, pair.valid)
            if counterpart is None
            else _find_counterparts(language, batch_scenes, pair, swap_captions, counterpart)
        )
        rows = is_valid.nonzero()[: count - len(true_captions), 0]
        scenes.append(batch_scenes[rows])
        counterparts.append(batch_counterparts[rows])
        true_captions += language.pieces.to_texts(pair.true_caption[rows])
        false_captions += language.pieces.to_texts(pair.false_caption[rows])
        if len(true_captions) == count:
            break
    else:
        raise DataError(
            f"scenes of preset {source.config.preset!r} gave only {len(true_captions)} of {count} pairs "
            f"for swap {swap_kind!r}",
            "use fewer pairs, or another preset",
        )
    all_scenes = concatenate_batches(scenes)
    if counterpart is None:
        return CaptionPairs(all_scenes, source.render_scenes(all_scenes), true_captions, false_captions)
    all_counterparts = concatenate_batches(counterparts)
    return CaptionPairs(
        all_scenes,
        source.render_scenes(all_scenes),
        true_captions,
        false_captions,
        all_counterparts,
        source.render_scenes(all_counterparts),
    )


def _find_counterparts(
    language: SceneLanguage,
    scenes: SceneBatch,
    pair: CaptionPair,
    swap_captions: Callable[[SceneBatch], CaptionPair],
    counterpart: CounterpartFn,
) -> tuple[SceneBatch, Tensor]:
    """Find counterparts for which the false caption is true; also return which scenes have one.

    Each pair of slots is swapped and captions are generated again for the new scene. The counterpart is valid if its
    true and false captions are those of the original scene, exchanged.
    """
    found, is_found = scenes, torch.zeros_like(pair.valid)
    for i, j in combinations(range(scenes.sprite.shape[1]), 2):
        candidates, is_valid = counterpart(language, scenes, i, j)
        swapped_pair = swap_captions(candidates)
        is_exchanged = (swapped_pair.true_caption == pair.false_caption).all(1) & (
            swapped_pair.false_caption == pair.true_caption
        ).all(1)
        is_new = pair.valid & swapped_pair.valid & is_valid & is_exchanged & ~is_found
        found, is_found = select_rows(is_new, candidates, found), is_found | is_new
    return found, is_found
