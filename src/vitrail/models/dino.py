"""A tower that learns from the running average of itself, without labels (DINO, iBOT, DINOv2).

B pictures, V local views, M masked patches, X prefix tokens, D width, K prototypes
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.config import Config
from vitrail.encoders.vit import ViT, ViTConfig
from vitrail.errors import ConfigError
from vitrail.models.masked import frozen
from vitrail.nn import Work, cost
from vitrail.objectives.masked import at, flags


class DinoConfig(Config):
    """
    steps        over which the teacher's momentum rises, from `momentum` to 1, by half a cosine
    prototypes   what views are told apart by; `hidden` and `bottleneck` are widths of the head that leads there
    """

    image: ViTConfig
    steps: int
    momentum: float = 0.996
    prototypes: int = 4096
    hidden: int = 2048
    bottleneck: int = 256

    def __post_init__(self) -> None:
        if self.image.pool != "cls" or self.image.norm_last != "tokens" or self.image.head:
            raise ConfigError(
                "views are compared by the tower's CLS token",
                'set image.cls, pool = "cls" and norm_last = "tokens", without a head',
            )
        if min(self.steps, self.prototypes, self.hidden, self.bottleneck) < 1:
            raise ConfigError("steps, prototypes, hidden and bottleneck are at least 1", "raise the one that is not")
        if not 0 <= self.momentum <= 1:
            raise ConfigError(f"a momentum of {self.momentum:g}", "give 0 … 1, such as 0.996")


class Head(nn.Module):
    """(…, D) → cosines (…, K) with the prototypes"""

    def __init__(self, config: DinoConfig):
        super().__init__()
        self.up = nn.Linear(config.image.block.width, config.hidden)
        self.mid = nn.Linear(config.hidden, config.hidden)
        self.down = nn.Linear(config.hidden, config.bottleneck)
        self.prototypes = nn.Linear(config.bottleneck, config.prototypes, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(F.gelu(self.mid(F.gelu(self.up(x)))))
        # In float32: a temperature of 0.03 makes thirty times as much of what a half would round away.
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(F.normalize(x.float(), dim=-1), F.normalize(self.prototypes.weight.float(), dim=-1))


class Seen(NamedTuple):
    """What student and teacher make of the views, and of the masked patches where there are any: cosines."""

    student: Tensor  # (2 + V, B, K)
    teacher: Tensor  # (2, B, K)
    guessed: Tensor  # (B · M, K)
    hidden: Tensor  # (B · M, K)


class Dino(nn.Module):
    """Two global views (2, B, 3, S, S) and V local ones (V, B, 3, s, s) → `Seen`.

    `image` and `head` are the student and train. `teacher` and `teacher_head` are their average, which no stage can
    train, and stay in float32 whatever the model's type, since a half would lose every small step. The tower to keep
    is the teacher.
    """

    steps: Tensor
    last: Tensor

    def __init__(self, config: DinoConfig):
        super().__init__()
        self.config = config
        self.image, self.head = ViT(config.image), Head(config)
        self.teacher, self.teacher_head = frozen(ViT(config.image)), frozen(Head(config))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))  # that the teacher has followed
        self.register_buffer("last", torch.full((), torch.nan))  # sum of the weights it followed last

    @property
    def tower(self) -> ViT:
        return self.teacher

    def _apply(self, fn, recurse=True):
        exact = {id(t) for t in (self.last, *self.averages().values())}

        def moved(t: Tensor) -> Tensor:
            new = fn(t)
            wide = torch.promote_types(new.dtype, torch.float32)
            return t.to(new.device, wide) if id(t) in exact and new.dtype != wide else new

        return super()._apply(moved, recurse)

    def train(self, mode: bool = True) -> "Dino":
        super().train(mode)
        self.teacher.eval()
        return self

    # ---- the teacher --------------------------------------------------------------------------------------------

    def averages(self) -> dict[str, Tensor]:
        """The teacher's weights, by the names of the student's."""
        found = {}
        for part, student, teacher in (("image", self.image, self.teacher), ("head", self.head, self.teacher_head)):
            buffers = dict(teacher.named_buffers())
            found |= {f"{part}.{name}": buffers[name] for name, _ in student.named_parameters()}
        return found

    @torch.no_grad()
    def follow(self) -> None:
        """Take the student's weights into the average: whole the first time, a share of them later.

        It is for the start of every pass that trains. Passes that collect the gradients of one step find the weights
        as they were, and then the teacher stays as it is.
        """
        weights = {name: _whole(p) for name, p in self.named_parameters()}
        now = torch.stack([w.sum(dtype=torch.float64) for w in weights.values()]).sum().to(self.last.dtype)
        changed = now != self.last
        done = (self.steps.double() / self.config.steps).clamp(max=1)
        share = (1 - self.config.momentum) * (1 + torch.cos(math.pi * done)) / 2
        share = torch.where(self.steps == 0, 1.0, share) * changed
        for name, average in self.averages().items():
            average.lerp_(weights[name].to(average.dtype), share.to(average.dtype))
        self.steps += changed
        self.last.copy_(now)

    # ---- a pass -------------------------------------------------------------------------------------------------

    def forward(self, wide: Tensor, near: Tensor, places: Tensor | None = None) -> Seen:
        """`places` (B, M): the patches of the first global view that the student does not see."""
        B, V = wide.shape[1], len(near)
        wide = wide.flatten(0, 1)
        N = (wide.shape[2] // self.config.image.patch) * (wide.shape[3] // self.config.image.patch)
        masked = None if places is None else F.pad(flags(places, N), (0, 0, 0, B))  # (2 · B, N)
        rows = [self._rows(self.image.tokens(wide, masked=masked), places)]
        if V:
            rows.append(self.image.tokens(near.flatten(0, 1))[:, 0])
        said, wanted = self.head(torch.cat(rows)), self._taught(wide, places)
        whole, guessed, local = said.split([2 * B, len(said) - (2 + V) * B, V * B])
        student = torch.cat([whole, local]).unflatten(0, (2 + V, B))
        return Seen(student, wanted[: 2 * B].unflatten(0, (2, B)), guessed, wanted[2 * B :])

    @torch.no_grad()
    def _taught(self, wide: Tensor, places: Tensor | None) -> Tensor:
        """What the teacher says, computed in the student's type."""
        kind = self.head.up.weight.dtype
        with torch.autocast(wide.device.type, kind, enabled=kind in (torch.bfloat16, torch.float16)):
            return self.teacher_head(self._rows(self.teacher.tokens(wide), places))

    def _rows(self, tokens: Tensor, places: Tensor | None) -> Tensor:
        """(2 · B, X + N, D) → (2 · B + B · M, D): what stands for the views, then the first views' masked patches"""
        if places is None:
            return tokens[:, 0]
        patches = tokens[: len(places), self.config.image.prefix :]
        return torch.cat([tokens[:, 0], at(patches, places).flatten(0, 1)])

    def work(self, batch: int = 1, size: int | None = None) -> Work:
        """Of the student or the teacher: so many views of a side, each of which asks the head once."""
        return self.image.work(batch, size).with_(asked=batch)


def _whole(weight: Tensor) -> Tensor:
    """All of a weight that ranks share."""
    weight = weight.detach()
    return weight.full_tensor() if hasattr(weight, "full_tensor") else weight  # type: ignore[attr-defined]


@cost.flops.register
def _(module: Head, work: Work) -> int:
    return sum(cost.flops(part, work) for part in module.children())


@cost.flops.register
def _(module: Dino, work: Work) -> int:
    """Of the student or the teacher, which cost the same; `work` as `Dino.work` gives it."""
    rows = work.with_(tokens=work.rows if work.asked is None else work.asked)
    return cost.flops(module.image, work) + cost.flops(module.head, rows)


@cost.bytes.register
def _(module: Dino, work: Work) -> cost.Bytes:
    """The teacher's weights are buffers, which count too."""
    size = sum(t.numel() * t.element_size() for t in (*module.parameters(), *module.buffers()))
    return cost.Bytes(weights=size, read=size)
