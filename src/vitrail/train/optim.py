"""AdamW, LAMB and Muon with a rate for every part, on float32 masters where the weights are in half precision.

g gradient, m its running mean, v its running square, w weight, u update, t steps taken
"""

import math
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from vitrail.config import Config
from vitrail.errors import ConfigError
from vitrail.train.names import matches, refuse_idle, refuse_other

BUCKET = 2**26
"""Numbers stepped together: the float32 copies that a step needs of gradients in half precision stay this small."""


class Rate(Config):
    """The rate of a part: `lr` itself, or `times` the common one. 0 freezes the part."""

    part: str
    lr: float | None = None
    times: float | None = None

    def __post_init__(self) -> None:
        if (self.lr is None) == (self.times is None):
            raise ConfigError(f"the rate of {self.part!r} is `lr` or `times` the common one", "give one of the two")
        if min(self.lr or 0, self.times or 0) < 0:
            raise ConfigError(f"the rate of {self.part!r} is negative", "use 0 to freeze the part")


class OptimConfig(Config):
    """How weights are stepped. The defaults are those large language models have been trained with since GPT-3.

    kind      AdamW; or LAMB: Adam's update with decay inside, scaled for each parameter by ‖w‖ / ‖u‖; or Muon: matrices
              of blocks by the momentum, made orthogonal and as long as Adam's steps are, and all else by AdamW
    lr        the peak rate of every part that no row of `rates` names; a schedule scales it
    clip      largest norm of all gradients together; 0 for no clipping
    rates     rows of part and rate; the first that matches a parameter decides
    no_decay  what is spared decay, and LAMB's scaling with it: `vectors` (fewer than two axes: norms, biases, gates,
              layer scales, lone tokens), `positions` (learned tables of them), `embeddings` (of words; they decay
              unless named), or a part
    """

    lr: float
    kind: Literal["adamw", "lamb", "muon"] = "adamw"
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    decay: float = 0.1
    clip: float = 1.0
    rates: tuple[Rate, ...] = ()
    no_decay: tuple[str, ...] = ("vectors", "positions")

    def __post_init__(self) -> None:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"betas {self.betas} are no decay rates", "use 0 ≤ beta < 1, such as 0.9 and 0.95")
        for name in ("lr", "eps", "decay", "clip"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} = {getattr(self, name)} cannot be", "use a finite number, 0 or above")


class Group(NamedTuple):
    """Parameters stepped alike. What is `spared` has no decay and no LAMB scaling; a rate of 0 is a frozen part."""

    lr: float
    decay: float
    spared: bool
    names: tuple[str, ...]


def group_parameters(model: nn.Module, config: OptimConfig) -> list[Group]:
    """Every parameter in its group, frozen ones included; a rule that decides nothing is refused."""
    names = [name for name, _ in model.named_parameters()]
    parts = [rate.part for rate in config.rates]
    refuse_idle("rates: part", parts, names)
    refuse_idle("no_decay: part", [p for p in config.no_decay if p not in KINDS], names)
    found: dict[tuple[float, bool], list[str]] = {}
    used = set()
    for name, p in model.named_parameters():
        row = next((i for i, part in enumerate(parts) if matches(part, name)), None)
        used.add(row)
        spared = any(_spares(rule, name, model, p) for rule in config.no_decay)
        found.setdefault((_rate(config, row), spared), []).append(name)
    for i, part in enumerate(parts):
        if i not in used:
            raise ConfigError(f"rates: part {part!r} decides nothing: rows above it match all it does", "move it up")
    return [
        Group(lr, 0.0 if spared else config.decay, spared, tuple(members)) for (lr, spared), members in found.items()
    ]


def freeze(model: nn.Module, config: OptimConfig) -> list[str]:
    """Turn gradients off where the rate is 0; the names of those parameters. It never turns any on."""
    frozen = [name for group in group_parameters(model, config) if group.lr == 0 for name in group.names]
    parameters = dict(model.named_parameters())
    for name in frozen:
        parameters[name].requires_grad_(False)
    return frozen


KINDS = ("vectors", "positions", "embeddings")


def _spares(rule: str, name: str, model: nn.Module, p: Tensor) -> bool:
    match rule:
        case "vectors":
            return p.ndim < 2
        case "positions":
            return "positions" in name.split(".")
        case "embeddings":
            return isinstance(model.get_submodule(name.rpartition(".")[0]), nn.Embedding)
        case _:
            return matches(rule, name)


def _rate(config: OptimConfig, row: int | None) -> float:
    if row is None:
        return config.lr
    rate = config.rates[row]
    return rate.lr if rate.lr is not None else config.lr * (rate.times or 0.0)


class _Slot:
    """A parameter and what the optimizer keeps of it."""

    def __init__(self, weight: nn.Parameter, turned: bool = False):
        self.weight, self.turned = weight, turned  # whether Muon steps it
        wide = torch.promote_types(weight.dtype, torch.float32)
        self.copy = None if weight.dtype == wide else weight.detach().to(wide)
        self.mean, self.square = torch.zeros_like(self.master), torch.zeros_like(self.master)
        self.steps = 0
        self.sum: Tensor | None = None  # of gradients, over the passes of one step

    @property
    def master(self) -> Tensor:
        """What is stepped: the weight itself where it is wide enough."""
        return self.weight.detach() if self.copy is None else self.copy

    @property
    def grad(self) -> Tensor | None:
        return self.weight.grad if self.sum is None else self.sum


class Optimizer:
    """Steps the trainable parameters of a model.

    Make it when the model has its weights, type and device: masters are copied then. Parts whose rate is 0 are frozen
    here, and like those already frozen they have no state. A parameter without a gradient (a tower in a batch of mere
    text) is left as it is, undecayed, and keeps its own count of steps.
    """

    def __init__(self, model: nn.Module, config: OptimConfig):
        self.config = config
        freeze(model, config)
        parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not parameters:
            raise ConfigError("nothing is left to train", "give a part a rate above 0, or unfreeze one")
        groups = [
            g._replace(names=tuple(n for n in g.names if n in parameters)) for g in group_parameters(model, config)
        ]
        self.groups = [group for group in groups if group.names]
        self._names = list(parameters)  # in the model's order
        turned = _turned(parameters) if config.kind == "muon" else frozenset()
        self.slots = {name: _Slot(parameters[name], name in turned) for group in self.groups for name in group.names}
        self._buckets = [
            (group, bucket) for group in self.groups for bucket in _buckets(self.slots[name] for name in group.names)
        ]

    def accumulate(self) -> None:
        """After each backward pass of a step that has several: half-precision gradients are summed in float32."""
        for slot in self.slots.values():
            if slot.copy is not None and slot.weight.grad is not None:
                wide = slot.weight.grad.to(slot.copy.dtype)
                slot.sum = wide if slot.sum is None else slot.sum.add_(wide)
                slot.weight.grad = None

    @torch.no_grad()
    def clip(self, max_norm: float | None = None) -> float:
        """The norm of all gradients together, which are then scaled down to `max_norm` (the config's unless given).

        A norm that is not finite comes back as it is and the gradients stay: do not step on them.
        """
        max_norm = self.config.clip if max_norm is None else max_norm
        grads = self._gradients()
        norm = _whole(torch.linalg.vector_norm(torch.stack(_norms(grads)))).item() if grads else 0.0
        if max_norm and max_norm < norm < math.inf:
            torch._foreach_mul_(grads, max_norm / norm)
        return norm

    def broken(self) -> list[str]:
        """The parameters of which a gradient, or this rank's part of it, is not finite, in the model's order."""
        grads = {name: self.slots[name].grad for name in self._names}
        return [name for name, grad in grads.items() if grad is not None and not _local(grad).isfinite().all()]

    @torch.no_grad()
    def step(self, scale: float = 1.0) -> None:
        """One step at `scale` times every part's rate."""
        self._gradients()
        for group, bucket in self._buckets:
            slots = [slot for slot in bucket if slot.grad is not None]
            for slot in slots:
                slot.steps += 1
            for turned in (False, True):
                some = [slot for slot in slots if slot.turned == turned]
                update = _muon if turned else _lamb if self.config.kind == "lamb" else _adamw
                if some:
                    update(some, _wide_gradients(some), group, scale * group.lr, self.config)
            if copies := [(slot.weight, slot.copy) for slot in slots if slot.copy is not None]:
                _copy([weight for weight, _ in copies], [master for _, master in copies])

    def zero_grad(self) -> None:
        for slot in self.slots.values():
            slot.weight.grad = slot.sum = None

    def _gradients(self) -> list[Tensor]:
        if any(slot.sum is not None for slot in self.slots.values()):
            self.accumulate()  # what a last pass may have left on the weights
        return [slot.grad for slot in self.slots.values() if slot.grad is not None]

    def masters(self) -> dict[str, Tensor]:
        """Parameter → what it is in float32, where the weight itself is narrower."""
        return {name: slot.copy for name, slot in self.slots.items() if slot.copy is not None}

    def state_dict(self) -> dict[str, Tensor]:
        """Flat: `mean.`, `square.`, `steps.` and, for weights in half precision, `master.` before a parameter's name.

        The tensors are the live ones; save them before the next step. With them, the weights and the gradients that
        follow, training goes on bit for bit.
        """
        state = {}
        for name, slot in self.slots.items():
            state[f"mean.{name}"], state[f"square.{name}"] = slot.mean, slot.square
            state[f"steps.{name}"] = torch.tensor(slot.steps)
            if slot.copy is not None:
                state[f"master.{name}"] = slot.copy
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Only a state of the very same parameters is taken; the weights themselves come with the model's."""
        own = self.state_dict()
        refuse_other("optimizer", state, own)
        for name, slot in self.slots.items():
            slot.steps = int(state[f"steps.{name}"])
        for name, value in own.items():
            value.copy_(state[name])


def _buckets(slots: Iterable[_Slot]) -> list[list[_Slot]]:
    """Slots of one type and device, at most BUCKET numbers together (a larger parameter alone)."""
    done: list[list[_Slot]] = []
    open_: dict[tuple[torch.dtype, torch.device], list[_Slot]] = {}
    for slot in slots:
        kind = slot.master.dtype, slot.master.device
        bucket = open_.get(kind)
        if bucket is None or sum(s.master.numel() for s in bucket) + slot.master.numel() > BUCKET:
            bucket = open_[kind] = []
            done.append(bucket)
        bucket.append(slot)
    return done


def _wide_gradients(slots: list[_Slot]) -> list[Tensor]:
    """In the masters' type; copies where the gradients are narrower."""
    grads = [slot.grad for slot in slots if slot.grad is not None]
    narrow = [i for i, slot in enumerate(slots) if grads[i].dtype != slot.master.dtype]
    if narrow:
        wide = [torch.empty_like(slots[i].master) for i in narrow]
        _copy(wide, [grads[i] for i in narrow])
        for i, grad in zip(narrow, wide, strict=True):
            grads[i] = grad
    return grads


def _adamw(slots: list[_Slot], grads: list[Tensor], group: Group, lr: float, config: OptimConfig) -> None:
    device = slots[0].master.device
    counts = [slot.steps for slot in slots]
    if len({*counts}) == 1:  # filled there: a host that sends numbers to a GPU waits for what it does
        steps = torch.full((len(counts),), counts[0], dtype=torch.float32, device=device)
    else:
        steps = torch.tensor(counts, dtype=torch.float32, device=device)
    torch._fused_adamw_(
        [slot.master for slot in slots],
        grads,
        [slot.mean for slot in slots],
        [slot.square for slot in slots],
        [],
        list(steps.unbind()),
        lr=lr,
        beta1=config.betas[0],
        beta2=config.betas[1],
        weight_decay=group.decay,
        eps=config.eps,
        amsgrad=False,
        maximize=False,
    )


def _lamb(slots: list[_Slot], grads: list[Tensor], group: Group, lr: float, config: OptimConfig) -> None:
    """w ← w − lr · ‖w‖ / ‖u‖ · u with u = m̂ / (√v̂ + eps) + decay · w; the ratio is 1 where either norm is 0."""
    weights, means, squares = [s.master for s in slots], [s.mean for s in slots], [s.square for s in slots]
    (b1, b2), counts = config.betas, [slot.steps for slot in slots]
    torch._foreach_lerp_(means, grads, 1 - b1)
    torch._foreach_mul_(squares, b2)
    torch._foreach_addcmul_(squares, grads, grads, 1 - b2)
    roots = torch._foreach_div(squares, [1 - b2**t for t in counts])
    torch._foreach_sqrt_(roots)
    torch._foreach_add_(roots, config.eps)
    updates = torch._foreach_div(means, [1 - b1**t for t in counts])
    torch._foreach_div_(updates, roots)
    if group.spared:
        torch._foreach_add_(weights, updates, alpha=-lr)
        return
    if group.decay:
        torch._foreach_add_(updates, weights, alpha=group.decay)
    w, u = (torch.stack([_whole(n) for n in _norms(list(x))]) for x in (weights, updates))
    ratios = torch.where((w > 0) & (u > 0), w / u, 1.0)
    torch._foreach_mul_(updates, list((-lr * ratios).unbind()))
    torch._foreach_add_(weights, updates)


MOMENTUM = 0.95
QUINTIC = (3.4445, -4.7750, 2.0315)  # of Newton's and Schulz's rounds: singular values end between 0.7 and 1.2


def _muon(slots: list[_Slot], grads: list[Tensor], group: Group, lr: float, config: OptimConfig) -> None:
    """w ← (1 − lr · decay) · w − lr · 0.2 · √(larger side) · orthogonal(g + momentum): steps as long as Adam's, so that
    rates carry over (Jordan et al. 2024; Liu et al. 2025). A convolution's filters are rows of a matrix. Matrices of
    one shape go together."""
    means = [slot.mean for slot in slots]
    torch._foreach_lerp_(means, grads, 1 - MOMENTUM)
    ahead = torch._foreach_lerp(grads, means, MOMENTUM)  # Nesterov's
    torch._foreach_mul_([slot.master for slot in slots], 1 - lr * group.decay)
    shapes: dict[torch.Size, list[int]] = {}
    for i, slot in enumerate(slots):
        shapes.setdefault(slot.master.shape, []).append(i)
    for shape, places in shapes.items():
        turned = orthogonal(torch.stack([ahead[i].flatten(1) for i in places]))  # (n, A, B)
        steps = turned.to(ahead[places[0]].dtype).unflatten(2, shape[1:]).unbind()
        far = -lr * 0.2 * math.sqrt(max(turned.shape[1:]))
        torch._foreach_add_([slots[i].master for i in places], list(steps), alpha=far)


def orthogonal(x: Tensor, rounds: int = 5) -> Tensor:
    """(n, A, B) → about U Vᵀ of each U S Vᵀ, by products in bf16 alone"""
    a, b, c = QUINTIC
    tall = x.shape[1] > x.shape[2]
    x = (x.mT if tall else x).bfloat16()
    x = x / x.flatten(1).norm(dim=1).clamp(min=1e-7)[:, None, None].to(x.dtype)
    for _ in range(rounds):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def _turned(parameters: Mapping[str, nn.Parameter]) -> frozenset[str]:
    """The matrices and convolutions of blocks."""
    found = frozenset(name for name, p in parameters.items() if p.ndim in (2, 4) and "blocks" in name.split("."))
    if not found:
        raise ConfigError("Muon steps matrices of blocks, and none of them trains", 'use kind = "adamw"')
    if any(hasattr(parameters[name], "full_tensor") for name in found):
        raise ConfigError("Muon steps whole matrices, and these are shared out over ranks", "use adamw, or one process")
    return found


def _norms(tensors: list[Tensor]) -> list[Tensor]:
    return list(torch._foreach_norm(tensors, 2, dtype=torch.promote_types(tensors[0].dtype, torch.float32)))


# A sharded parameter is a DTensor. Importing that class to ask for it would cost half a second.


def _whole(x: Tensor) -> Tensor:
    """A number that shards have each a part of, gathered."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x  # type: ignore[attr-defined]


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Between tensors sharded alike, or not at all; a list of DTensors has no such operation."""
    torch._foreach_copy_([_local(x) for x in targets], [_local(x) for x in sources])


def _local(x: Tensor) -> Tensor:
    return x.to_local() if hasattr(x, "to_local") else x  # type: ignore[attr-defined]
