"""AdamW, LAMB and Muon with per-part learning rates and float32 master copies of half-precision weights.

`adamw_8bit` stores the two means with 8 bits.

g gradient, m its running mean, v its running square, w weight, u update, t steps taken
"""

import math
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.config import Config
from vitrail.errors import ConfigError
from vitrail.nn.blockwise_quantization import BLOCK, dequantize_blockwise, quantize_blockwise
from vitrail.nn.kernels import HAS_TRITON
from vitrail.training.parameter_names import check_patterns_match, check_state_matches, matches_pattern

MIN_8BIT_NUMEL = 4096
BUCKET_NUMEL = 2**26
"""Elements updated together. It limits the size of the float32 copies of half-precision gradients."""


class ParamGroupConfig(Config):
    """Learning rate of one part: `lr`, or `lr_multiplier` times the common rate. A rate of 0 freezes the part.

    part           name of the part; `*` matches any characters
    lr             peak rate of the part
    lr_multiplier  multiplier of the common rate
    """

    part: str
    lr: float | None = None
    lr_multiplier: float | None = None

    def __post_init__(self) -> None:
        if (self.lr is None) == (self.lr_multiplier is None):
            raise ConfigError(f"param_groups: part {self.part!r} needs one rate", "give either `lr` or `lr_multiplier`")
        if min(self.lr or 0, self.lr_multiplier or 0) < 0:
            raise ConfigError(f"param_groups: the rate of part {self.part!r} is negative", "use 0 to freeze the part")


class OptimConfig(Config):
    """Optimizer settings. The defaults are the usual ones for large language models since GPT-3.

    kind           adamw; adamw_8bit: AdamW whose means are 8-bit codes with a scale for every 256 values, as in
                   bitsandbytes, for parameters of 4096 elements or more; lamb: Adam's update with weight decay, scaled
                   for each parameter by ‖w‖ / ‖u‖; muon: orthogonalized momentum for the matrices of blocks, AdamW for
                   all other parameters
    lr             peak rate of every part that no entry of `param_groups` names; the schedule scales it
    betas          decay rates of the running means of the gradient and of its square
    eps            epsilon of the division by the root of the second mean
    weight_decay   weight decay
    max_grad_norm  maximum norm of all gradients together; 0 for no clipping
    param_groups   rates of single parts; the first entry that matches a parameter applies
    no_decay       parameters without weight decay and LAMB scaling: `vectors` (fewer than two axes: norms, biases,
                   gates, layer scales, single tokens), `positions` (learned position embeddings), `embeddings` (token
                   embeddings), or a part
    """

    lr: float
    kind: Literal["adamw", "adamw_8bit", "lamb", "muon"] = "adamw"
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0
    param_groups: tuple[ParamGroupConfig, ...] = ()
    no_decay: tuple[str, ...] = ("vectors", "positions")

    def __post_init__(self) -> None:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"betas {self.betas} are out of range", "use 0 ≤ beta < 1, such as 0.9 and 0.95")
        values = {
            "lr": self.lr,
            "eps": self.eps,
            "weight_decay": self.weight_decay,
            "max_grad_norm": self.max_grad_norm,
        }
        for name, value in values.items():
            if not 0 <= value < math.inf:
                raise ConfigError(f"{name} is {value}", "use a finite number, 0 or above")


class ParamGroup(NamedTuple):
    """Parameters with the same rate and weight decay. A rate of 0 means frozen."""

    lr: float
    weight_decay: float
    is_excluded_from_decay: bool
    param_names: tuple[str, ...]


def build_param_groups(model: nn.Module, config: OptimConfig) -> list[ParamGroup]:
    """Assign every parameter, frozen or not, to its group. Raise if an entry applies to no parameter."""
    names = [name for name, _ in model.named_parameters()]
    parts = [rate.part for rate in config.param_groups]
    check_patterns_match("param_groups: part", parts, names)
    check_patterns_match("no_decay: part", [p for p in config.no_decay if p not in NO_DECAY_KINDS], names)
    groups: dict[tuple[float, bool], list[str]] = {}
    used = set()
    for name, p in model.named_parameters():
        row = next((i for i, part in enumerate(parts) if matches_pattern(part, name)), None)
        used.add(row)
        has_no_decay = any(_is_excluded_from_decay(rule, name, model, p) for rule in config.no_decay)
        groups.setdefault((_resolve_lr(config, row), has_no_decay), []).append(name)
    for i, part in enumerate(parts):
        if i not in used:
            raise ConfigError(f"param_groups: part {part!r} is never used: earlier ones match all of it", "move it up")
    return [
        ParamGroup(lr, 0.0 if has_no_decay else config.weight_decay, has_no_decay, tuple(members))
        for (lr, has_no_decay), members in groups.items()
    ]


def freeze_zero_lr_parameters(model: nn.Module, config: OptimConfig) -> list[str]:
    """Freeze the parameters whose rate is 0 and return their names. It never unfreezes a parameter."""
    frozen = [name for group in build_param_groups(model, config) if group.lr == 0 for name in group.param_names]
    parameters = dict(model.named_parameters())
    for name in frozen:
        parameters[name].requires_grad_(False)
    return frozen


NO_DECAY_KINDS = ("vectors", "positions", "embeddings")


def _is_excluded_from_decay(rule: str, name: str, model: nn.Module, p: Tensor) -> bool:
    match rule:
        case "vectors":
            return p.ndim < 2
        case "positions":
            return "positions" in name.split(".")
        case "embeddings":
            return isinstance(model.get_submodule(name.rpartition(".")[0]), nn.Embedding)
        case _:
            return matches_pattern(rule, name)


def _resolve_lr(config: OptimConfig, row: int | None) -> float:
    if row is None:
        return config.lr
    rate = config.param_groups[row]
    return rate.lr if rate.lr is not None else config.lr * (rate.lr_multiplier or 0.0)


class _MomentCodes:
    """The running means of one parameter with 8 bits, padded to whole blocks: codes (2, n), scales (2, n / BLOCK)."""

    def __init__(self, like: Tensor):
        size = -(-like.numel() // BLOCK)
        self.codes = torch.zeros(2, size * BLOCK, dtype=torch.uint8, device=like.device)
        self.scales = torch.zeros(2, size, device=like.device)


class _ParameterState:
    """Optimizer state of one parameter."""

    def __init__(self, weight: nn.Parameter, uses_muon: bool = False, uses_codes: bool = False):
        self.weight, self.uses_muon = weight, uses_muon  # whether Muon updates it
        wide = torch.promote_types(weight.dtype, torch.float32)
        self.master_copy = None if weight.dtype == wide else weight.detach().to(wide)
        # Either the two means, or their 8-bit codes and scales. A step sets the means from the codes.
        self.codes = _MomentCodes(self.master) if uses_codes and weight.numel() >= MIN_8BIT_NUMEL else None
        if self.codes is None:
            self.exp_avg, self.exp_avg_sq = torch.zeros_like(self.master), torch.zeros_like(self.master)
        self.steps = 0
        self.grad_sum: Tensor | None = None  # over the micro-batches of one step

    @property
    def master(self) -> Tensor:
        """The tensor that is updated: the float32 copy, or the weight itself if it has that dtype."""
        return self.weight.detach() if self.master_copy is None else self.master_copy

    @property
    def grad(self) -> Tensor | None:
        return self.weight.grad if self.grad_sum is None else self.grad_sum


class Optimizer:
    """Update the trainable parameters of a model.

    Create it after the model has its weights, dtype and device, because it copies the master weights. It freezes parts
    whose rate is 0; frozen parameters have no state. A parameter without a gradient, such as a vision tower in a text
    batch, is not updated or decayed. Each parameter has its own step count.
    """

    def __init__(self, model: nn.Module, config: OptimConfig):
        self.config = config
        freeze_zero_lr_parameters(model, config)
        parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not parameters:
            raise ConfigError("no parameter is trainable", "give a part a rate above 0, or unfreeze one")
        groups = [
            g._replace(param_names=tuple(n for n in g.param_names if n in parameters))
            for g in build_param_groups(model, config)
        ]
        self.groups = [group for group in groups if group.param_names]
        self._names = list(parameters)  # in the model's order
        muon_parameters = _select_muon_parameters(parameters) if config.kind == "muon" else frozenset()
        if config.kind == "adamw_8bit" and any(hasattr(p, "to_local") for p in parameters.values()):
            raise ConfigError(
                "adamw_8bit needs whole parameters, and these are sharded over ranks", "use adamw, or one process"
            )
        self.parameter_states = {
            name: _ParameterState(parameters[name], name in muon_parameters, config.kind == "adamw_8bit")
            for group in self.groups
            for name in group.param_names
        }
        self._buckets = [
            (group, bucket)
            for group in self.groups
            for bucket in _make_buckets(self.parameter_states[name] for name in group.param_names)
        ]

    def accumulate(self) -> None:
        """Add half-precision gradients to their float32 sums. Call it after each backward pass of a step."""
        for slot in self.parameter_states.values():
            if slot.master_copy is not None and slot.weight.grad is not None:
                wide = slot.weight.grad.to(slot.master_copy.dtype)
                slot.grad_sum = wide if slot.grad_sum is None else slot.grad_sum.add_(wide)
                slot.weight.grad = None

    @torch.no_grad()
    def clip_grad_norm(self, max_norm: float | None = None) -> float:
        """Return the norm of all gradients together, and scale them down to `max_norm` (default: `max_grad_norm`).

        If the norm is not finite, it is returned and the gradients are not changed. Do not call `step` then.
        """
        max_norm = self.config.max_grad_norm if max_norm is None else max_norm
        grads = self._gradients()
        norm = _to_full_tensor(torch.linalg.vector_norm(torch.stack(_compute_norms(grads)))).item() if grads else 0.0
        if max_norm and max_norm < norm < math.inf:
            torch._foreach_mul_(grads, max_norm / norm)
        return norm

    def find_nonfinite_gradients(self) -> list[str]:
        """Return the names of parameters whose gradient (on this rank) is not finite, in the order of the model."""
        grads = {name: self.parameter_states[name].grad for name in self._names}
        return [
            name for name, grad in grads.items() if grad is not None and not _to_local_tensor(grad).isfinite().all()
        ]

    @torch.no_grad()
    def step(self, lr_factor: float = 1.0) -> None:
        """Update all parameters, with every rate multiplied by `lr_factor`."""
        self._gradients()
        for group, bucket in self._buckets:
            slots = [slot for slot in bucket if slot.grad is not None]
            for slot in slots:
                slot.steps += 1
            if self.config.kind != "lamb":
                slots = [
                    slot for slot in slots if not _update_in_one_pass(slot, group, lr_factor * group.lr, self.config)
                ]
            for uses_muon in (False, True):
                some = [slot for slot in slots if slot.uses_muon == uses_muon]
                update = _step_muon if uses_muon else _step_lamb if self.config.kind == "lamb" else _step_adamw
                if some:
                    coded = [slot for slot in some if slot.codes is not None]
                    _decode_means(coded)
                    update(some, _to_master_dtype(some), group, lr_factor * group.lr, self.config)
                    _encode_means(coded)
            if copies := [(slot.weight, slot.master_copy) for slot in slots if slot.master_copy is not None]:
                _copy_tensors([weight for weight, _ in copies], [master for _, master in copies])

    def zero_grad(self) -> None:
        for slot in self.parameter_states.values():
            slot.weight.grad = None
            slot.grad_sum = None

    def _gradients(self) -> list[Tensor]:
        if any(slot.grad_sum is not None for slot in self.parameter_states.values()):
            self.accumulate()  # gradients of the last pass
        return [slot.grad for slot in self.parameter_states.values() if slot.grad is not None]

    def master_weights(self) -> dict[str, Tensor]:
        """Return the float32 master copies of half-precision parameters: name → tensor."""
        return {name: slot.master_copy for name, slot in self.parameter_states.items() if slot.master_copy is not None}

    def state_dict(self) -> dict[str, Tensor]:
        """Return a flat state: `mean.`, `square.`, `steps.` and, for half-precision weights, `master.`, then the name.

        8-bit means are `codes.` and `scales.`, each of the mean and of the square.

        The tensors are not copies; save them before the next step. Training resumes from this state and the weights
        bit for bit.
        """
        state = {}
        for name, slot in self.parameter_states.items():
            if slot.codes is None:
                state[f"mean.{name}"], state[f"square.{name}"] = slot.exp_avg, slot.exp_avg_sq
            else:
                state[f"codes.{name}"], state[f"scales.{name}"] = slot.codes.codes, slot.codes.scales
            state[f"steps.{name}"] = torch.tensor(slot.steps)
            if slot.master_copy is not None:
                state[f"master.{name}"] = slot.master_copy
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load a state of exactly the same parameters. The weights themselves belong to the model's state."""
        own = self.state_dict()
        check_state_matches("optimizer", state, own)
        for name, slot in self.parameter_states.items():
            slot.steps = int(state[f"steps.{name}"])
        for name, value in own.items():
            value.copy_(state[name])


def _make_buckets(slots: Iterable[_ParameterState]) -> list[list[_ParameterState]]:
    """Group states by dtype and device, at most `BUCKET_NUMEL` elements each; a larger parameter is alone."""
    buckets: list[list[_ParameterState]] = []
    open_: dict[tuple[torch.dtype, torch.device], list[_ParameterState]] = {}
    for slot in slots:
        kind = slot.master.dtype, slot.master.device
        bucket = open_.get(kind)
        if bucket is None or sum(s.master.numel() for s in bucket) + slot.master.numel() > BUCKET_NUMEL:
            bucket = []
            open_[kind] = bucket
            buckets.append(bucket)
        bucket.append(slot)
    return buckets


def _to_master_dtype(slots: list[_ParameterState]) -> list[Tensor]:
    """Return the gradients in the dtype of the master weights; narrower gradients are copied."""
    grads = [slot.grad for slot in slots if slot.grad is not None]
    narrow = [i for i, slot in enumerate(slots) if grads[i].dtype != slot.master.dtype]
    if narrow:
        wide = [torch.empty_like(slots[i].master) for i in narrow]
        _copy_tensors(wide, [grads[i] for i in narrow])
        for i, grad in zip(narrow, wide, strict=True):
            grads[i] = grad
    return grads


def _decode_means(slots: list[_ParameterState]) -> None:
    """Set the float32 means of parameters with 8-bit state."""
    for row, name in enumerate(("exp_avg", "exp_avg_sq")):
        if held := [slot.codes for slot in slots if slot.codes is not None]:
            codes, scales = torch.cat([c.codes[row] for c in held]), torch.cat([c.scales[row] for c in held])
            values = dequantize_blockwise(codes, scales, signed=row == 0).split([c.codes.shape[1] for c in held])
            for slot, value in zip(slots, values, strict=True):
                setattr(slot, name, value[: slot.master.numel()].view_as(slot.master))


def _encode_means(slots: list[_ParameterState]) -> None:
    """Store the means with 8 bits and drop the float32 ones.

    A square above 0 gets a code above 0: an update divided by eps alone would be huge.
    """
    for row, name in enumerate(("exp_avg", "exp_avg_sq")):
        if held := [slot.codes for slot in slots if slot.codes is not None]:
            means = [getattr(slot, name).flatten() for slot in slots]
            values = torch.cat([F.pad(mean, (0, -len(mean) % BLOCK)) for mean in means])
            codes, scales = quantize_blockwise(values, signed=row == 0)
            if row == 1:
                codes = torch.where((codes == 0) & (values > 0), codes + 1, codes)
            sizes = [c.codes.shape[1] for c in held]
            torch._foreach_copy_([c.codes[row] for c in held], list(codes.split(sizes)))
            torch._foreach_copy_([c.scales[row] for c in held], list(scales.split([n // BLOCK for n in sizes])))
            for slot in slots:
                delattr(slot, name)


def _update_in_one_pass(slot: _ParameterState, group: ParamGroup, lr: float, config: OptimConfig) -> bool:
    """Update a half-precision weight on a GPU with one AdamW kernel, if that applies; return whether it does."""
    if slot.uses_muon or slot.master_copy is None or slot.grad is None or slot.codes is not None:
        return False
    tensors = (slot.weight.detach(), slot.master_copy, slot.grad, slot.exp_avg, slot.exp_avg_sq)
    local = [_to_local_tensor(x) for x in tensors]
    if not (HAS_TRITON and all(x.is_cuda and x.is_contiguous() for x in local)):
        return False
    from vitrail.nn.kernels.training_kernels import update_adamw

    update_adamw(*local, lr=lr, betas=config.betas, eps=config.eps, weight_decay=group.weight_decay, step=slot.steps)
    return True


def _step_adamw(
    slots: list[_ParameterState], grads: list[Tensor], group: ParamGroup, lr: float, config: OptimConfig
) -> None:
    device = slots[0].master.device
    counts = [slot.steps for slot in slots]
    if len({*counts}) == 1:  # created on the device: a copy from the host would synchronize
        steps = torch.full((len(counts),), counts[0], dtype=torch.float32, device=device)
    else:
        steps = torch.tensor(counts, dtype=torch.float32, device=device)
    torch._fused_adamw_(
        [slot.master for slot in slots],
        grads,
        [slot.exp_avg for slot in slots],
        [slot.exp_avg_sq for slot in slots],
        [],
        list(steps.unbind()),
        lr=lr,
        beta1=config.betas[0],
        beta2=config.betas[1],
        weight_decay=group.weight_decay,
        eps=config.eps,
        amsgrad=False,
        maximize=False,
    )


def _step_lamb(
    slots: list[_ParameterState], grads: list[Tensor], group: ParamGroup, lr: float, config: OptimConfig
) -> None:
    """w ← w − lr · ‖w‖ / ‖u‖ · u with u = m̂ / (√v̂ + eps) + weight_decay · w; the ratio is 1 where a norm is 0."""
    weights, means, squares = [s.master for s in slots], [s.exp_avg for s in slots], [s.exp_avg_sq for s in slots]
    (b1, b2), counts = config.betas, [slot.steps for slot in slots]
    torch._foreach_lerp_(means, grads, 1 - b1)
    torch._foreach_mul_(squares, b2)
    torch._foreach_addcmul_(squares, grads, grads, 1 - b2)
    roots = torch._foreach_div(squares, [1 - b2**t for t in counts])
    torch._foreach_sqrt_(roots)
    torch._foreach_add_(roots, config.eps)
    updates = torch._foreach_div(means, [1 - b1**t for t in counts])
    torch._foreach_div_(updates, roots)
    if group.is_excluded_from_decay:
        torch._foreach_add_(weights, updates, alpha=-lr)
        return
    if group.weight_decay:
        torch._foreach_add_(updates, weights, alpha=group.weight_decay)
    w, u = (torch.stack([_to_full_tensor(n) for n in _compute_norms(list(x))]) for x in (weights, updates))
    ratios = torch.where((w > 0) & (u > 0), w / u, 1.0)
    torch._foreach_mul_(updates, list((-lr * ratios).unbind()))
    torch._foreach_add_(weights, updates)


MUON_MOMENTUM = 0.95
NEWTON_SCHULZ_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # the singular values end between 0.7 and 1.2


def _step_muon(
    slots: list[_ParameterState], grads: list[Tensor], group: ParamGroup, lr: float, config: OptimConfig
) -> None:
    """w ← (1 − lr · weight_decay) · w − lr · 0.2 · √(larger dimension) · orthogonalize(g + momentum).

    The scale makes updates as large as Adam's, so that rates can be shared (Jordan et al. 2024; Liu et al. 2025). A
    convolution's filters are the rows of a matrix. Matrices of one shape are processed together.
    """
    means = [slot.exp_avg for slot in slots]
    torch._foreach_lerp_(means, grads, 1 - MUON_MOMENTUM)
    nesterov = torch._foreach_lerp(grads, means, MUON_MOMENTUM)
    torch._foreach_mul_([slot.master for slot in slots], 1 - lr * group.weight_decay)
    shapes: dict[torch.Size, list[int]] = {}
    for i, slot in enumerate(slots):
        shapes.setdefault(slot.master.shape, []).append(i)
    for shape, indices in shapes.items():
        update = orthogonalize(torch.stack([nesterov[i].flatten(1) for i in indices]))  # (n, A, B)
        steps = update.to(nesterov[indices[0]].dtype).unflatten(2, shape[1:]).unbind()
        alpha = -lr * 0.2 * math.sqrt(max(update.shape[1:]))
        torch._foreach_add_([slots[i].master for i in indices], list(steps), alpha=alpha)


def orthogonalize(x: Tensor, num_iterations: int = 5) -> Tensor:
    """Approximate U Vᵀ of each matrix U S Vᵀ in (n, A, B) by Newton–Schulz iterations in bf16."""
    a, b, c = NEWTON_SCHULZ_COEFFICIENTS
    tall = x.shape[1] > x.shape[2]
    x = (x.mT if tall else x).bfloat16()
    x = x / x.flatten(1).norm(dim=1).clamp(min=1e-7)[:, None, None].to(x.dtype)
    for _ in range(num_iterations):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def _select_muon_parameters(parameters: Mapping[str, nn.Parameter]) -> frozenset[str]:
    """Return the names of the matrices and convolutions inside blocks."""
    names = frozenset(name for name, p in parameters.items() if p.ndim in (2, 4) and "blocks" in name.split("."))
    if not names:
        raise ConfigError("no matrix of a block is trainable, so Muon has none to update", 'use kind = "adamw"')
    if any(hasattr(parameters[name], "full_tensor") for name in names):
        raise ConfigError("Muon needs whole matrices, and these are sharded over ranks", "use adamw, or one process")
    return names


def _compute_norms(tensors: list[Tensor]) -> list[Tensor]:
    return list(torch._foreach_norm(tensors, 2, dtype=torch.promote_types(tensors[0].dtype, torch.float32)))


# A sharded parameter is a DTensor. Importing that class for an isinstance check would take half a second.


def _to_full_tensor(x: Tensor) -> Tensor:
    """Gather a sharded tensor."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x  # type: ignore[attr-defined]


def _copy_tensors(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy between tensors with the same sharding. `_foreach_copy_` does not accept DTensors."""
    torch._foreach_copy_([_to_local_tensor(x) for x in targets], [_to_local_tensor(x) for x in sources])


def _to_local_tensor(x: Tensor) -> Tensor:
    return x.to_local() if hasattr(x, "to_local") else x  # type: ignore[attr-defined]
