"""LoRA: trainable low-rank updates of frozen linear layers.

    y = x Wᵀ + (alpha / rank) · (x Aᵀ) Bᵀ

An adapter covers a whole layer or a slice of a fused layer: q, k, v of `qkv`, k, v of `kv`, gate, up of `gate_up`.

A and B have the dtype of their layer, or float32. In bf16 the optimizer holds float32 master copies of them, as of all
weights. QLoRA stores the frozen weights as NF4 (`quantize_base`); each pass dequantizes them layer by layer.

O outputs, I inputs, R rank, o outputs of a slice
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.config import Config, FractionBelowOne, PositiveInt
from vitrail.errors import ConfigError
from vitrail.nn import Attention, Block, Workload, cost
from vitrail.nn.blockwise_quantization import NF4Linear, NF4Weight, nf4_linear, quantize_linear
from vitrail.nn.mlp import GatedMLP
from vitrail.training.parameter_names import check_patterns_match, check_state_matches, matches_pattern


class LoRAConfig(Config):
    """LoRA settings.

    rank            rank of the two matrices
    alpha           scale: the update is multiplied by alpha / rank
    target_modules  patterns for linear layers and their slices: `*.qkv` selects whole layers, `*.q` and `*.gate_up.up`
                    select slices (`*.q` also the q layers of cross-attention), `blocks.0` all layers of a block
    dropout         dropout of the input of the adapter
    quantization    "nf4" stores the frozen weights of linear layers with 4 bits (QLoRA): those of all blocks that have
                    an adapter, routers excepted
    """

    rank: PositiveInt
    alpha: float
    target_modules: tuple[str, ...]
    dropout: FractionBelowOne = 0.0
    quantization: Literal["nf4"] | None = None

    def __post_init__(self) -> None:
        if not self.target_modules:
            raise ConfigError("LoRA has no target_modules", "name layers, such as '*.qkv' or '*.q'")


class LoRAAdapter(nn.Module):
    """Low-rank update of one slice: rows `start` … `stop` of the layer's output."""

    def __init__(self, weight: Tensor, start: int, stop: int, config: LoRAConfig, dtype: torch.dtype | None = None):
        super().__init__()
        self.start, self.stop = start, stop
        self.scale, self.dropout = config.alpha / config.rank, config.dropout
        self.a = nn.Parameter(weight.new_empty(config.rank, weight.shape[1], dtype=dtype))
        self.b = nn.Parameter(
            weight.new_zeros(stop - start, config.rank, dtype=dtype)
        )  # zeros: the initial output does not change
        nn.init.kaiming_uniform_(self.a, a=math.sqrt(5))  # as in nn.Linear

    def project(self, x: Tensor) -> Tensor:
        """x (…, I) → x Aᵀ (…, R)"""
        return F.linear(F.dropout(x, self.dropout, self.training), self.a.to(x.dtype))

    def pad_b(self, size: int, dtype: torch.dtype) -> Tensor:
        """Return scale · B with zeros for the rows of other slices, (size, R)."""
        return F.pad((self.b * self.scale).to(dtype), (0, 0, self.start, size - self.stop))

    def add_to(self, y: Tensor, addition: Tensor) -> Tensor:
        """Add (…, o) to the slice of y (…, O). Not in place, because y may be a view that autograd protects."""
        a, b = self.start, self.stop
        return y + addition if b - a == y.shape[-1] else y.slice_scatter(y[..., a:b] + addition, -1, a, b)

    def weight_delta(self) -> Tensor:
        """Return the update of the weight, (o, I) in float32."""
        wide = torch.promote_types(self.a.dtype, torch.float32)
        return self.b.to(wide) @ self.a.to(wide) * self.scale


class LoRALinear(nn.Linear):
    """Linear layer with adapters, made by `add_lora`. Its weight and bias keep their names."""

    lora: nn.ModuleDict
    nf4: NF4Weight | None  # instead of the weight
    dtype: torch.dtype  # of the weight before quantization

    @property
    def adapters(self) -> list[LoRAAdapter]:
        return [adapter for adapter in self.lora.values() if isinstance(adapter, LoRAAdapter)]

    @property
    def is_quantized(self) -> bool:
        return "nf4" in self._modules

    @property
    def base_weight(self) -> Tensor:
        """The frozen weight, dequantized if it is stored as NF4."""
        if self.is_quantized:
            assert self.nf4 is not None
            return self.nf4.dequantize(self.dtype)
        return self._parameters["weight"]  # type: ignore[return-value]

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The merged weight, for fast paths that use a layer's weight without calling the layer.

        For an FSDP2 shard it is the base weight, because FSDP2 accesses the parameter by this name.
        """
        return self.base_weight if hasattr(self.base_weight, "to_local") else self.merge_weight()

    def merge_weight(self) -> Tensor:
        """Return the weight with all updates, (O, I), without dropout."""
        whole = self.base_weight.to(torch.promote_types(self.base_weight.dtype, torch.float32))
        for adapter in self.adapters:
            whole = adapter.add_to(whole.T, adapter.weight_delta().T).T
        return whole.to(self.base_weight.dtype)

    def forward(self, input: Tensor) -> Tensor:
        """(…, I) → (…, O)"""
        x = input.flatten(0, -2)  # (N, I): in place, a view of three axes would copy its gradient
        if self.is_quantized:
            assert self.nf4 is not None
            y = nf4_linear(x, self.nf4, self.bias)
        else:
            y = F.linear(x, self.base_weight, self.bias)
        # One product adds the updates of all slices: (N, ΣR) · (ΣR, O). Nothing needs the sum without them.
        low = torch.cat([adapter.project(x) for adapter in self.adapters], -1)
        b = torch.cat([adapter.pad_b(self.out_features, y.dtype) for adapter in self.adapters], 1)
        return y.addmm_(low, b.T).view(*input.shape[:-1], self.out_features)


def add_lora(model: nn.Module, config: LoRAConfig, dtype: torch.dtype | None = None) -> nn.Module:
    """Freeze the model and add trainable adapters to the target modules, in place.

    The adapters have a dtype; by default that of their layer. `quantize_base` applies `config.quantization`.

    The initial outputs are unchanged bit for bit. `state_dict` has the old keys and `<layer>.lora.<slice>.{a,b}`.
    """
    if any(isinstance(module, LoRALinear) for module in model.modules()):
        raise ConfigError("the model already has LoRA layers", "merge them first with merge_lora")
    layers = {name: m for name, m in model.named_modules() if type(m) is nn.Linear}
    rows = {name: _slices(model, name, layer) for name, layer in layers.items()}
    check_patterns_match(
        "LoRA target module",
        config.target_modules,
        [*layers, *(f"{n}.{part}" for n, parts in rows.items() for part in parts)],
    )
    model.requires_grad_(False)
    for name, layer in layers.items():
        if any(matches_pattern(target, name) for target in config.target_modules):
            chosen = {"all": (0, layer.out_features)}
        else:
            chosen = {
                part: row
                for part, row in rows[name].items()
                if any(matches_pattern(target, f"{name}.{part}") for target in config.target_modules)
            }
        if chosen:
            _attach(layer, {part: LoRAAdapter(layer.weight, *row, config, dtype) for part, row in chosen.items()})
    return model


@torch.no_grad()
def add_lora_slices(
    model: nn.Module, slices: Sequence[tuple[str, int, int, Tensor, Tensor, float]], dropout: float = 0.0
) -> None:
    """Freeze the model and add given adapters, in place: (layer, start, stop, A (R, I), B (o, R), scale)."""
    if any(isinstance(module, LoRALinear) for module in model.modules()):
        raise ConfigError("the model already has LoRA layers", "merge them first with merge_lora")
    model.requires_grad_(False)
    adapters: dict[str, dict[str, LoRAAdapter]] = {}
    for name, start, stop, a, b, scale in slices:
        layer = model.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        parts = {rows: part for part, rows in _slices(model, name, layer).items()}
        part = parts.get((start, stop), "all" if stop - start == layer.out_features else f"rows_{start}_{stop}")
        config = LoRAConfig(rank=len(a), alpha=scale * len(a), target_modules=(name,), dropout=dropout)
        adapter = LoRAAdapter(layer.weight, start, stop, config)
        adapter.a.copy_(a)
        adapter.b.copy_(b)
        adapters.setdefault(name, {})[part] = adapter
    for name, parts in adapters.items():
        _attach(model.get_submodule(name), parts)


def quantize_base(model: nn.Module, device: torch.device | str | None = None) -> None:
    """Store the frozen weights of linear layers as NF4, in place: those of all blocks that have an adapter.

    Weights are quantized on `device` one by one, and stay there. Experts and routers keep their dtype.
    """
    for block in [module for module in model.modules() if isinstance(module, Block)]:
        layers = {name: module for name, module in block.named_modules() if isinstance(module, nn.Linear)}
        if any(isinstance(layer, LoRALinear) for layer in layers.values()):
            for name, layer in layers.items():
                if name.rpartition(".")[2] != "router" and "weight" in layer._parameters:
                    quantize_linear(layer, device)


def _attach(layer: Any, adapters: dict[str, LoRAAdapter]) -> None:
    """Change the class of a linear layer in place: hooks and references to it stay valid."""
    layer.__class__ = LoRALinear
    layer.lora = nn.ModuleDict(adapters).train(layer.training)


def list_lora_targets(model: nn.Module) -> list[str]:
    """List what `target_modules` can select: linear layers, and slices of fused ones."""
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    return [*layers, *(f"{name}.{part}" for name, layer in layers.items() for part in _slices(model, name, layer))]


@torch.no_grad()
def merge_lora(model: nn.Module) -> nn.Module:
    """Add the adapters' updates to the weights and remove the adapters, in place. Frozen weights stay frozen.

    A model with NF4 weights moves to the CPU, because its weights in full may not fit on its device.
    """
    layers = [module for module in model.modules() if isinstance(module, LoRALinear | NF4Linear)]
    packed = [layer for layer in layers if "nf4" in layer._modules]
    for layer in layers:
        weight = layer.merge_weight() if isinstance(layer, LoRALinear) else layer.weight
        if isinstance(layer, LoRALinear):
            del layer.lora
        layer.__class__ = nn.Linear  # type: ignore[bad-argument-type]
        if layer in packed:
            del layer.nf4
            layer.register_parameter("weight", nn.Parameter(weight.cpu(), requires_grad=False))
        else:
            layer.weight.copy_(weight)
    return model.cpu() if packed else model


def lora_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of the adapters, with their names in the model's `state_dict`."""
    adapters = {name: module for name, module in model.named_modules() if isinstance(module, LoRAAdapter)}
    return {f"{name}.{key}": p.detach() for name, adapter in adapters.items() for key, p in adapter.named_parameters()}


def select_saved_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a training checkpoint: all, or those of a model with LoRA that training changes.

    A run with LoRA builds its frozen weights again when it resumes, from the same checkpoint and seed.
    """
    state = model.state_dict()
    if not any(isinstance(module, LoRALinear) for module in model.modules()):
        return state
    frozen = {name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}
    for name, module in model.named_modules():
        if isinstance(module, NF4Weight):
            frozen |= {f"{name}.{key}" for key in module.state_dict()}
    return {name: tensor for name, tensor in state.items() if name not in frozen}


@torch.no_grad()
def load_lora_state_dict(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load saved adapters into a model with the same adapters."""
    own = lora_state_dict(model)
    check_state_matches("adapters", state, own)
    for name, value in own.items():
        value.copy_(state[name])


def _slices(model: nn.Module, name: str, layer: nn.Linear) -> dict[str, tuple[int, int]]:
    """Return the slices of a fused layer, name → (start, stop); an empty dict for other layers."""
    path, _, last = name.rpartition(".")
    owner = model.get_submodule(path)
    match owner, last:
        case Attention(), "qkv":
            q, kv = owner.config.heads * owner.head_dim, owner.config.num_kv_heads * owner.head_dim
            return {"q": (0, q), "k": (q, q + kv), "v": (q + kv, q + 2 * kv)}
        case Attention(), "kv":
            half, parts = layer.out_features // 2, ("k", "v")
        case GatedMLP(), "gate_up":
            half, parts = layer.out_features // 2, ("gate", "up")
        case _:
            return {}
    return {parts[0]: (0, half), parts[1]: (half, 2 * half)}


@cost.count_flops.register
def _(module: LoRALinear, work: Workload) -> int:
    sizes = sum(p.numel() for p in module.lora.parameters())
    return 2 * (module.in_features * module.out_features + sizes) * work.tokens
