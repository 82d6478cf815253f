"""Occlusion sensitivity: mask windows of an image and measure the loss in log-probability of the answer.

Shapes: H × W pixels, h × w codes, K windows, L answer tokens.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from vitrail.errors import ConfigError
from vitrail.models.unified_model import UnifiedModel

BATCH_SIZE = 12


@torch.no_grad()
def compute_occlusion_map(
    model: UnifiedModel,
    pixels: Tensor,
    question_ids: list[int],
    answer_ids: list[int],
    *,
    window_size: int = 3,
    stride: int = 2,
    progress: Callable[[int, int], Any] | None = None,
) -> Tensor:
    """Compute the occlusion map (h, w) of pixels (3, H, W) in −1…1.

    Each window of `window_size` × `window_size` codes is filled with the mean colour. The value of a code is the mean
    loss in log-probability of the answer, in nats, over the windows that cover it. Negative values mean that the answer
    becomes more likely.
    """
    if not answer_ids or window_size < 1 or not 1 <= stride <= window_size:
        raise ConfigError(
            f"invalid occlusion: {len(answer_ids)} answer tokens, windows of {window_size} codes with stride {stride}",
            "give an answer, and a stride between 1 and the window size",
        )
    (h, w), factor = model.grid, model.codec.downsample_factor
    ids = torch.tensor([[*question_ids, *answer_ids]], device=pixels.device)
    corners = [
        (y, x) for y in _get_window_starts(h, window_size, stride) for x in _get_window_starts(w, window_size, stride)
    ]
    mean = pixels.mean((1, 2), keepdim=True)
    covered = [pixels]
    for y, x in corners:
        one = pixels.clone()
        one[:, y * factor : (y + window_size) * factor, x * factor : (x + window_size) * factor] = mean
        covered.append(one)
    scores = []
    for start in range(0, len(covered), BATCH_SIZE):
        some = torch.stack(covered[start : start + BATCH_SIZE])
        hidden = model(
            model.make_input_image_piece(model.encode_images(some)[0]), model.make_text_piece(ids.expand(len(some), -1))
        )
        logits = model.decoder.compute_logits(hidden[:, -len(answer_ids) - 1 : -1]).float().log_softmax(-1)  # (K, L, V)
        scores.append(logits.gather(-1, ids[:, -len(answer_ids) :, None].expand(len(some), -1, -1)).sum((1, 2)))
        if progress is not None:
            progress(min(start + BATCH_SIZE, len(covered)), len(covered))
    whole, *parts = torch.cat(scores)
    total, times = torch.zeros(h, w), torch.zeros(h, w)
    for (y, x), part in zip(corners, parts, strict=True):
        total[y : y + window_size, x : x + window_size] += float(whole - part)
        times[y : y + window_size, x : x + window_size] += 1
    return total / times


def _get_window_starts(size: int, window: int, stride: int) -> list[int]:
    """Return the starts of windows; the last window ends at the border."""
    last = max(size - window, 0)
    return sorted({*range(0, last + 1, stride), last})


def draw_occlusion_map(image: Image.Image, occlusion_map: Tensor) -> Image.Image:
    """Draw the image in colour where occlusion reduces the answer's probability most, and grey where it does not."""
    pixels = np.asarray(image.convert("RGB"), dtype=np.float32)
    share = occlusion_map.clamp(min=0) / occlusion_map.max().clamp(min=1e-6)
    light = F.interpolate(share[None, None], size=pixels.shape[:2], mode="bilinear")[0, 0].numpy()[..., None]
    grey = pixels.mean(2, keepdims=True) * 0.35 + 60
    return Image.fromarray((grey + light * (pixels - grey)).clip(0, 255).astype(np.uint8))
