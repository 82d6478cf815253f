"""Distances between the features of two pictures. The networks that give the features live elsewhere.

B pictures, C channels, H, W places of a feature map, D width of a vector
"""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor
from torch.linalg import vector_norm

from vitrail.errors import ConfigError

EPS = 1e-10  # of LPIPS, added to the length of a feature vector


def lpips(x: Sequence[Tensor], y: Sequence[Tensor], heads: Sequence[Tensor]) -> Tensor:
    """LPIPS of every pair of pictures (B,): at each place the features are brought to length 1, the squares of their
    differences are weighed by a head (C,) and averaged over places, and the layers add up.

    x and y hold one map (B, C, H, W) a layer.
    """
    if not len(x) == len(y) == len(heads) > 0:
        raise ConfigError(f"{len(x)} and {len(y)} feature maps do not go with {len(heads)} heads", "give one a layer")
    layers = (
        ((_unit(a) - _unit(b)).square() * head.to(_wide(a))[:, None, None]).sum(1).mean((1, 2))
        for a, b, head in zip(*_alike(x, y), heads, strict=True)
    )
    first, *others = layers  # each (B,)
    return sum(others, first)


def gram(features: Tensor) -> Tensor:
    """Which channels are strong together: (B, C, H, W) → (B, C, C), divided by C·H·W."""
    flat = _wide(features).flatten(2)  # (B, C, HW)
    return flat @ flat.mT / flat[0].numel()


def gram_loss(x: Sequence[Tensor], y: Sequence[Tensor]) -> Tensor:
    """Mean over layers of the mean |difference| between Gram matrices: textures without their places."""
    x, y = _alike(x, y)
    if not x:
        raise ConfigError("there are no feature maps to compare", "give at least one")
    layers = [F.l1_loss(gram(a), gram(b)) for a, b in zip(x, y, strict=True)]
    return sum(layers[1:], layers[0]) / len(layers)


def cosine_distillation(student: Tensor, teacher: Tensor) -> Tensor:
    """1 − cosine between each vector (…, D) of the student and the teacher's, which gets no gradient: a mean."""
    if student.shape != teacher.shape:
        shapes = f"{tuple(student.shape)} and {tuple(teacher.shape)}"
        raise ConfigError(f"features of shapes {shapes} cannot be compared", "project the student, and match the grids")
    return 1 - F.cosine_similarity(_wide(student), _wide(teacher.detach()), dim=-1).mean()


def _alike(x: Sequence[Tensor], y: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    shapes = [[tuple(each.shape) for each in maps] for maps in (x, y)]
    if shapes[0] != shapes[1]:
        raise ConfigError(f"feature maps of {shapes[0]} and {shapes[1]} differ", "compare pictures of one size")
    return x, y


def _unit(features: Tensor) -> Tensor:
    # vector_norm has the gradient 0 where every channel is 0, as behind a ReLU; a square root there gives NaN.
    wide = _wide(features)
    return wide / (vector_norm(wide, dim=1, keepdim=True) + EPS)


def _wide(x: Tensor) -> Tensor:
    """Sums over many places need float32 at least."""
    return x if x.dtype.itemsize >= 4 else x.float()
