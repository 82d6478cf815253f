"""Where a model looked: parts of a picture are covered, one after another, and what the answer loses is drawn.

H, W pixels, h × w codes, K windows, L tokens of the answer
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from vitrail.errors import ConfigError
from vitrail.models.unified import Unified

BATCH = 12


@torch.no_grad()
def losses(
    model: Unified,
    pixels: Tensor,
    question: list[int],
    answer: list[int],
    *,
    window: int = 3,
    stride: int = 2,
    progress: Callable[[int, int], Any] = lambda done, of: None,
) -> Tensor:
    """pixels (3, H, W) in −1 … 1 → (h, w): what the answer's log-probability loses, in nats, where windows of so many
    codes a side are covered by the picture's mean colour; a code's is the mean over the windows that cover it. Below 0
    the answer is surer without."""
    if not answer or window < 1 or not 1 <= stride <= window:
        raise ConfigError(
            f"an answer of {len(answer)} tokens, windows of {window} codes every {stride}",
            "give an answer, and windows that leave no gap",
        )
    (h, w), factor = model.grid, model.codec.factor
    ids = torch.tensor([[*question, *answer]], device=pixels.device)
    corners = [(y, x) for y in _starts(h, window, stride) for x in _starts(w, window, stride)]
    mean = pixels.mean((1, 2), keepdim=True)
    covered = [pixels]
    for y, x in corners:
        one = pixels.clone()
        one[:, y * factor : (y + window) * factor, x * factor : (x + window) * factor] = mean
        covered.append(one)
    said = []
    for start in range(0, len(covered), BATCH):
        some = torch.stack(covered[start : start + BATCH])
        hidden = model(model.shown(model.look(some)[0]), model.words(ids.expand(len(some), -1)))
        logits = model.decoder.logits(hidden[:, -len(answer) - 1 : -1]).float().log_softmax(-1)  # (K, L, V)
        said.append(logits.gather(-1, ids[:, -len(answer) :, None].expand(len(some), -1, -1)).sum((1, 2)))
        progress(min(start + BATCH, len(covered)), len(covered))
    whole, *parts = torch.cat(said)
    total, times = torch.zeros(h, w), torch.zeros(h, w)
    for (y, x), part in zip(corners, parts, strict=True):
        total[y : y + window, x : x + window] += float(whole - part)
        times[y : y + window, x : x + window] += 1
    return total / times


def _starts(size: int, window: int, stride: int) -> list[int]:
    """Where windows begin, the last at the end."""
    last = max(size - window, 0)
    return sorted({*range(0, last + 1, stride), last})


def overlay(image: Image.Image, lost: Tensor) -> Image.Image:
    """The picture, brightest where the answer lost most by covering it, and grey where it lost nothing."""
    pixels = np.asarray(image.convert("RGB"), dtype=np.float32)
    share = lost.clamp(min=0) / lost.max().clamp(min=1e-6)
    light = F.interpolate(share[None, None], size=pixels.shape[:2], mode="bilinear")[0, 0].numpy()[..., None]
    grey = pixels.mean(2, keepdims=True) * 0.35 + 60
    return Image.fromarray((grey + light * (pixels - grey)).clip(0, 255).astype(np.uint8))
