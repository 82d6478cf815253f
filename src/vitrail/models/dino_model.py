"""Self-distillation of a vision tower with a momentum teacher, without labels (DINO, iBOT, DINOv2).

Shapes: B images, V local views, M masked patches, X prefix tokens, D width, K prototypes.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.config import Config, Fraction, PositiveInt
from vitrail.encoders.vit import ViT, ViTConfig
from vitrail.errors import ConfigError
from vitrail.models.masked_image_model import freeze_as_buffers
from vitrail.nn import Workload, cost
from vitrail.objectives.masking import gather_patches, indices_to_mask
from vitrail.registry import MODELS


class DINOConfig(Config):
    """Config of a `DINOModel`.

    image              config of the student and teacher towers
    momentum_steps     steps in which the teacher's momentum rises from `momentum` to 1 by a half cosine
    num_prototypes     number of output classes
    intermediate_size  hidden width of the head
    bottleneck_width   width of the head before the prototypes
    """

    image: ViTConfig
    momentum_steps: PositiveInt
    momentum: Fraction = 0.996
    num_prototypes: PositiveInt = 4096
    intermediate_size: PositiveInt = 2048
    bottleneck_width: PositiveInt = 256

    def __post_init__(self) -> None:
        if self.image.pool != "cls" or self.image.norm_last != "tokens" or self.image.head_width:
            raise ConfigError(
                "the image tower does not end with a normalized CLS token",
                'set image.cls_token, pool = "cls" and norm_last = "tokens", without a head',
            )


class DINOHead(nn.Module):
    """DINO head: features (…, D) to cosines (…, K) with the prototypes."""

    def __init__(self, config: DINOConfig):
        super().__init__()
        self.up = nn.Linear(config.image.block.width, config.intermediate_size)
        self.mid = nn.Linear(config.intermediate_size, config.intermediate_size)
        self.down = nn.Linear(config.intermediate_size, config.bottleneck_width)
        self.prototypes = nn.Linear(config.bottleneck_width, config.num_prototypes, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(F.gelu(self.mid(F.gelu(self.up(x)))))
        # In float32: a temperature of 0.03 would amplify rounding errors of half precision.
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(F.normalize(x.float(), dim=-1), F.normalize(self.prototypes.weight.float(), dim=-1))


class DINOOutput(NamedTuple):
    """Cosines of student and teacher for the views, and for masked patches if there are any."""

    student: Tensor  # (2 + V, B, K)
    teacher: Tensor  # (2, B, K)
    masked_student: Tensor  # (B · M, K)
    masked_teacher: Tensor  # (B · M, K)


@MODELS.register("dino")
class DINOModel(nn.Module):
    """DINO model: global views (2, B, 3, S, S) and local views (V, B, 3, s, s) to `DINOOutput`.

    `image` and `head` are the student. `teacher` and `teacher_head` are its moving average; they are not trainable and
    stay in float32, since half precision would lose small updates. The final tower is the teacher.
    """

    Config = DINOConfig

    steps: Tensor
    last: Tensor

    def __init__(self, config: DINOConfig):
        super().__init__()
        self.config = config
        self.image, self.head = ViT(config.image), DINOHead(config)
        self.teacher, self.teacher_head = freeze_as_buffers(ViT(config.image)), freeze_as_buffers(DINOHead(config))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))  # number of teacher updates
        self.register_buffer("last", torch.full((), torch.nan))  # sum of the student's weights at the last update

    @property
    def tower(self) -> ViT:
        return self.teacher

    def _apply(self, fn, recurse=True):
        exact = {id(t) for t in (self.last, *self.teacher_weights().values())}

        def moved(t: Tensor) -> Tensor:
            new = fn(t)
            wide = torch.promote_types(new.dtype, torch.float32)
            return t.to(new.device, wide) if id(t) in exact and new.dtype != wide else new

        return super()._apply(moved, recurse)

    def train(self, mode: bool = True) -> "DINOModel":
        super().train(mode)
        self.teacher.eval()
        return self

    # ---- the teacher --------------------------------------------------------------------------------------------

    def teacher_weights(self) -> dict[str, Tensor]:
        """Return the teacher's weights by the names of the student's."""
        weights = {}
        for part, student, teacher in (("image", self.image, self.teacher), ("head", self.head, self.teacher_head)):
            buffers = dict(teacher.named_buffers())
            weights |= {f"{part}.{name}": buffers[name] for name, _ in student.named_parameters()}
        return weights

    @torch.no_grad()
    def update_teacher(self) -> None:
        """Update the teacher with the student's weights: a copy at the first update, a moving average later.

        Call it before every training pass. If the student has not changed, as within gradient accumulation, the teacher
        does not change either.
        """
        weights = {name: _gather_full(p) for name, p in self.named_parameters()}
        now = torch.stack([w.sum(dtype=torch.float64) for w in weights.values()]).sum().to(self.last.dtype)
        changed = now != self.last
        done = (self.steps.double() / self.config.momentum_steps).clamp(max=1)
        share = (1 - self.config.momentum) * (1 + torch.cos(math.pi * done)) / 2
        share = torch.where(self.steps == 0, 1.0, share) * changed
        for name, average in self.teacher_weights().items():
            average.lerp_(weights[name].to(average.dtype), share.to(average.dtype))
        self.steps += changed
        self.last.copy_(now)

    # ---- forward pass -------------------------------------------------------------------------------------------

    def forward(self, global_views: Tensor, local_views: Tensor, masked_indices: Tensor | None = None) -> DINOOutput:
        """Run student and teacher; `masked_indices` (B, M) are the patches of the first global view masked for the
        student.
        """
        B, V = global_views.shape[1], len(local_views)
        global_views = global_views.flatten(0, 1)
        N = (global_views.shape[2] // self.config.image.patch_size) * (
            global_views.shape[3] // self.config.image.patch_size
        )
        # (2 · B, N)
        masked = None if masked_indices is None else F.pad(indices_to_mask(masked_indices, N), (0, 0, 0, B))
        rows = [self._select_tokens(self.image.forward_tokens(global_views, patch_mask=masked), masked_indices)]
        if V:
            rows.append(self.image.forward_tokens(local_views.flatten(0, 1))[:, 0])
        outputs, targets = self.head(torch.cat(rows)), self._forward_teacher(global_views, masked_indices)
        whole, masked_student, local = outputs.split([2 * B, len(outputs) - (2 + V) * B, V * B])
        student = torch.cat([whole, local]).unflatten(0, (2 + V, B))
        return DINOOutput(student, targets[: 2 * B].unflatten(0, (2, B)), masked_student, targets[2 * B :])

    @torch.no_grad()
    def _forward_teacher(self, patch_inputs: Tensor, places: Tensor | None) -> Tensor:
        """Run the teacher in the student's dtype."""
        kind = self.head.up.weight.dtype
        with torch.autocast(patch_inputs.device.type, kind, enabled=kind in (torch.bfloat16, torch.float16)):
            return self.teacher_head(self._select_tokens(self.teacher.forward_tokens(patch_inputs), places))

    def _select_tokens(self, tokens: Tensor, places: Tensor | None) -> Tensor:
        """Select tokens (2 · B + B · M, D) from (2 · B, X + N, D): CLS of each view, then masked patches of the first
        views.
        """
        if places is None:
            return tokens[:, 0]
        patches = tokens[: len(places), self.config.image.num_prefix_tokens :]
        return torch.cat([tokens[:, 0], gather_patches(patches, places).flatten(0, 1)])

    def workload(self, batch_size: int = 1, image_size: int | None = None) -> Workload:
        """Return the workload of student or teacher for square views; each view runs the head once."""
        return self.image.workload(batch_size, image_size).replace(logit_tokens=batch_size)


def _gather_full(weight: Tensor) -> Tensor:
    """Return the full tensor of a sharded weight."""
    weight = weight.detach()
    return weight.full_tensor() if hasattr(weight, "full_tensor") else weight  # type: ignore[attr-defined]


@cost.count_flops.register
def _(module: DINOHead, work: Workload) -> int:
    return sum(cost.count_flops(part, work) for part in module.children())


@cost.count_flops.register
def _(module: DINOModel, work: Workload) -> int:
    """Count student or teacher, which cost the same, with the workload of `DINOModel.workload`."""
    rows = work.replace(tokens=work.sequences if work.logit_tokens is None else work.logit_tokens)
    return cost.count_flops(module.image, work) + cost.count_flops(module.head, rows)


cost.count_bytes.register(DINOModel, cost.sum_tensor_bytes)  # the teacher's weights are buffers
