"""LoRA: small trainable additions to the weights of frozen linear layers.

    y = x Wᵀ + (alpha / rank) · (x Aᵀ) Bᵀ

on a whole layer, or on named rows of a fused one: q, k, v of `qkv`, k, v of `kv`, gate, up of `gate_up`.

A and B have the type of the layer they belong to: in bf16 the optimizer keeps float32 masters of them, as of any
weight, so a second type inside the model would add nothing.

O outputs, I inputs, R rank, o outputs of a slice
"""

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.config import Config
from vitrail.errors import ConfigError
from vitrail.nn import Attention, Work, cost
from vitrail.nn.mlp import Gated
from vitrail.train.names import matches, refuse_idle, refuse_other


class LoRAConfig(Config):
    """`targets` are patterns over the names of linear layers and their slices: `*.qkv` is whole layers, `*.q` and
    `*.gate_up.up` are slices (and `*.q` the q layers of cross-attention as well), `blocks.0` all layers of a block."""

    rank: int
    alpha: float
    targets: tuple[str, ...]
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ConfigError(f"LoRA of rank {self.rank} adds nothing", "use a rank of at least 1")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"a dropout of {self.dropout} cannot be", "use 0 ≤ dropout < 1")
        if not self.targets:
            raise ConfigError("LoRA has no target", "name layers, such as '*.qkv' or '*.q'")


class Adapter(nn.Module):
    """The addition to one slice: rows `start` … `stop` of the layer's output."""

    def __init__(self, weight: Tensor, start: int, stop: int, config: LoRAConfig):
        super().__init__()
        self.start, self.stop = start, stop
        self.scale, self.dropout = config.alpha / config.rank, config.dropout
        self.a = nn.Parameter(weight.new_empty(config.rank, weight.shape[1]))
        self.b = nn.Parameter(weight.new_zeros(stop - start, config.rank))  # zero: the layer starts as it was
        nn.init.kaiming_uniform_(self.a, a=math.sqrt(5))  # as nn.Linear starts

    def forward(self, x: Tensor) -> Tensor:
        """x (…, I) → (…, o)"""
        x = F.dropout(x, self.dropout, self.training)
        return F.linear(F.linear(x, self.a), self.b) * self.scale

    def add(self, y: Tensor, addition: Tensor) -> Tensor:
        """y (…, O) with (…, o) added to the slice. Not in place: y may be a view that autograd forbids to write to."""
        a, b = self.start, self.stop
        return y + addition if b - a == y.shape[-1] else y.slice_scatter(y[..., a:b] + addition, -1, a, b)

    def delta(self) -> Tensor:
        """(o, I) in float32: what it adds to the weight."""
        wide = torch.promote_types(self.a.dtype, torch.float32)
        return self.b.to(wide) @ self.a.to(wide) * self.scale


class LoRALinear(nn.Linear):
    """What `add_lora` turns a linear layer into. Its own weight and bias keep their names."""

    lora: nn.ModuleDict

    @property
    def adapters(self) -> list[Adapter]:
        return [adapter for adapter in self.lora.values() if isinstance(adapter, Adapter)]

    @property
    def base(self) -> Tensor:
        return self._parameters["weight"]  # type: ignore[return-value]

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The weight with its additions. Some fast paths use a layer's weight without calling the layer; this way they
        are right too. A shard is computed with by nobody, and FSDP2, which asks for it by this name, must find it."""
        return self.base if hasattr(self.base, "to_local") else self.merged()

    def merged(self) -> Tensor:
        """(O, I): the weight with its additions, without dropout."""
        whole = self.base.to(torch.promote_types(self.base.dtype, torch.float32))
        for adapter in self.adapters:
            whole = adapter.add(whole.T, adapter.delta().T).T
        return whole.to(self.base.dtype)

    def forward(self, input: Tensor) -> Tensor:
        """(…, I) → (…, O)"""
        y = F.linear(input, self.base, self.bias)
        for adapter in self.adapters:
            y = adapter.add(y, adapter(input))
        return y


def add_lora(model: nn.Module, config: LoRAConfig) -> nn.Module:
    """Freeze the model and add trainable A and B to the targets, in place. Until B moves, outputs stay bit for bit.

    Each layer keeps its place and its names, so `state_dict` holds the old keys and `<layer>.lora.<slice>.{a,b}`.
    """
    if any(isinstance(module, LoRALinear) for module in model.modules()):
        raise ConfigError("the model has LoRA layers already", "merge them first")
    layers = {name: m for name, m in model.named_modules() if type(m) is nn.Linear}
    rows = {name: _slices(model, name, layer) for name, layer in layers.items()}
    refuse_idle(
        "LoRA target", config.targets, [*layers, *(f"{n}.{part}" for n, parts in rows.items() for part in parts)]
    )
    model.requires_grad_(False)
    for name, layer in layers.items():
        if any(matches(target, name) for target in config.targets):
            chosen = {"all": (0, layer.out_features)}
        else:
            chosen = {
                part: row
                for part, row in rows[name].items()
                if any(matches(target, f"{name}.{part}") for target in config.targets)
            }
        if chosen:
            adapters = {part: Adapter(layer.weight, *row, config) for part, row in chosen.items()}
            # In place: hooks, references and the layer's place in the model stay as they are.
            layer.__class__ = LoRALinear
            layer.lora = nn.ModuleDict(adapters).train(layer.training)
    return model


@torch.no_grad()
def merge(model: nn.Module) -> nn.Module:
    """Put the additions into the weights and take the adapters out, in place. What was frozen stays frozen."""
    for layer in model.modules():
        if isinstance(layer, LoRALinear):
            layer.base.copy_(layer.merged())
            del layer.lora
            layer.__class__ = nn.Linear  # type: ignore[bad-argument-type]
    return model


def lora_state(model: nn.Module) -> dict[str, Tensor]:
    """The adapters alone, under the names they have in the model's `state_dict`."""
    adapters = {name: module for name, module in model.named_modules() if isinstance(module, Adapter)}
    return {f"{name}.{key}": p.detach() for name, adapter in adapters.items() for key, p in adapter.named_parameters()}


@torch.no_grad()
def load_lora(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Put saved adapters into a model that has the same ones."""
    own = lora_state(model)
    refuse_other("adapters", state, own)
    for name, value in own.items():
        value.copy_(state[name])


def _slices(model: nn.Module, name: str, layer: nn.Linear) -> dict[str, tuple[int, int]]:
    """The named rows of a fused layer: slice → (start, stop); none of a layer that is one."""
    path, _, last = name.rpartition(".")
    owner = model.get_submodule(path)
    match owner, last:
        case Attention(), "qkv":
            q, kv = owner.config.heads * owner.head_dim, owner.config.groups * owner.head_dim
            return {"q": (0, q), "k": (q, q + kv), "v": (q + kv, q + 2 * kv)}
        case Attention(), "kv":
            half, parts = layer.out_features // 2, ("k", "v")
        case Gated(), "gate_up":
            half, parts = layer.out_features // 2, ("gate", "up")
        case _:
            return {}
    return {parts[0]: (0, half), parts[1]: (half, 2 * half)}


@cost.flops.register
def _(module: LoRALinear, work: Work) -> int:
    sizes = sum(p.numel() for p in module.lora.parameters())
    return 2 * (module.in_features * module.out_features + sizes) * work.tokens
