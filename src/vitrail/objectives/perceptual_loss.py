"""Perceptual losses on feature maps: LPIPS, Gram matrices and cosine distillation.

`vitrail.encoders.vgg` has the networks that compute the features.

B images, C channels, H, W size of a feature map, D width of a vector
"""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor
from torch.linalg import vector_norm

from vitrail.errors import ConfigError

EPS = 1e-10  # as in LPIPS, added to the norm of a feature vector


def lpips_distance(x: Sequence[Tensor], y: Sequence[Tensor], heads: Sequence[Tensor]) -> Tensor:
    """Return the LPIPS distance of every pair of images, (B,).

    x and y have one feature map (B, C, H, W) per layer. The features are normalized at each position. Their squared
    differences are weighted by a head (C,), averaged over positions, and summed over layers.
    """
    if not len(x) == len(y) == len(heads) > 0:
        raise ConfigError(f"got {len(x)} and {len(y)} feature maps and {len(heads)} heads", "pass one per layer")
    layers = (
        ((_unit(a) - _unit(b)).square() * head.to(_wide(a))[:, None, None]).sum(1).mean((1, 2))
        for a, b, head in zip(*_check_shapes(x, y), heads, strict=True)
    )
    first, *others = layers  # each (B,)
    return sum(others, first)


def gram_matrix(features: Tensor) -> Tensor:
    """Return the Gram matrix of the channels: (B, C, H, W) → (B, C, C), divided by C·H·W."""
    flat = _wide(features).flatten(2)  # (B, C, HW)
    return flat @ flat.mT / flat[0].numel()


def gram_loss(x: Sequence[Tensor], y: Sequence[Tensor]) -> Tensor:
    """Return the mean absolute difference of Gram matrices, averaged over layers. It compares textures."""
    x, y = _check_shapes(x, y)
    if not x:
        raise ConfigError("there are no feature maps", "pass at least one layer")
    layers = [F.l1_loss(gram_matrix(a), gram_matrix(b)) for a, b in zip(x, y, strict=True)]
    return sum(layers[1:], layers[0]) / len(layers)


def cosine_distillation_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """Return the mean of 1 − cosine similarity of vectors (…, D). The teacher gets no gradient."""
    if student.shape != teacher.shape:
        shapes = f"{tuple(student.shape)} and {tuple(teacher.shape)}"
        raise ConfigError(f"student and teacher features have shapes {shapes}", "make their shapes equal")
    return 1 - F.cosine_similarity(_wide(student), _wide(teacher.detach()), dim=-1).mean()


def _check_shapes(x: Sequence[Tensor], y: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    shapes = [[tuple(each.shape) for each in maps] for maps in (x, y)]
    if shapes[0] != shapes[1]:
        raise ConfigError(f"feature maps have shapes {shapes[0]} and {shapes[1]}", "compare images of one size")
    return x, y


def _unit(features: Tensor) -> Tensor:
    # vector_norm has gradient 0 where all channels are 0 (after a ReLU); a square root would give NaN.
    wide = _wide(features)
    return wide / (vector_norm(wide, dim=1, keepdim=True) + EPS)


def _wide(x: Tensor) -> Tensor:
    """Convert to float32 at least, which sums over many positions need."""
    return x if x.dtype.itemsize >= 4 else x.float()
