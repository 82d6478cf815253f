"""The feed-forward kinds: plain, gated, mixture of experts.

N tokens, W width, F hidden width, E experts, A active experts a token
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.config import Config
from vitrail.errors import ConfigError
from vitrail.nn.kernels.linear_gelu import linear_gelu
from vitrail.nn.norms import Norm, make_norm

Activation = Literal["gelu", "gelu_tanh", "quick_gelu", "silu", "relu"]


def activate(x: Tensor, kind: Activation) -> Tensor:
    match kind:
        case "gelu":
            return F.gelu(x)
        case "gelu_tanh":
            return F.gelu(x, approximate="tanh")
        case "quick_gelu":  # CLIP's
            return x * torch.sigmoid(1.702 * x)
        case "silu":
            return F.silu(x)
        case "relu":
            return F.relu(x)


class PlainConfig(Config, tag="plain", tag_field="kind"):
    """up, activation, down"""

    hidden: int
    activation: Activation = "gelu"
    bias: bool = True


class GatedConfig(Config, tag="gated", tag_field="kind"):
    """activation(gate) · up, down: SwiGLU and its kin; EVA-02 has a norm before the last"""

    hidden: int
    activation: Activation = "silu"
    bias: bool = False
    inner_norm: Norm | None = None
    eps: float = 1e-6  # of that norm


class ExpertsConfig(Config, tag="experts", tag_field="kind"):
    """Gated experts of which each token uses `active`; `shared` is the hidden width of one that every token uses.

    `renormalize` makes the active weights add up to one (Qwen3); `shared_gate` weighs the shared expert by a sigmoid
    of the token (Qwen2-MoE).
    """

    count: int
    active: int
    hidden: int
    shared: int = 0
    shared_gate: bool = False
    renormalize: bool = True
    activation: Activation = "silu"

    def __post_init__(self) -> None:
        if not 1 <= self.active <= self.count:
            raise ConfigError(f"a token cannot use {self.active} of {self.count} experts")
        if self.shared_gate and not self.shared:
            raise ConfigError("shared_gate weighs a shared expert, and there is none", "give `shared` a width")


MLPConfig = PlainConfig | GatedConfig | ExpertsConfig


class Plain(nn.Module):
    def __init__(self, width: int, config: PlainConfig):
        super().__init__()
        self.activation: Activation = config.activation
        self.up = nn.Linear(width, config.hidden, bias=config.bias)
        self.down = nn.Linear(config.hidden, width, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.up.bias is not None and _epilogue_runs(x, self.activation):
            return self.down(linear_gelu(x, self.up.weight, self.up.bias))
        return self.down(activate(self.up(x), self.activation))


def _epilogue_runs(x: Tensor, activation: Activation) -> bool:
    """cuBLASLt's epilogue is the tanh form, and has no gradient."""
    return activation == "gelu_tanh" and x.is_cuda and x.dtype == torch.bfloat16 and not torch.is_grad_enabled()


class Gated(nn.Module):
    def __init__(self, width: int, config: GatedConfig):
        super().__init__()
        self.activation: Activation = config.activation
        self.gate_up = nn.Linear(width, 2 * config.hidden, bias=config.bias)  # one product for both
        self.norm = make_norm(config.inner_norm, config.hidden, config.eps) if config.inner_norm else nn.Identity()
        self.down = nn.Linear(config.hidden, width, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cpu and not torch.is_grad_enabled() and type(self.gate_up) is nn.Linear:
            # Two products cost the CPU no more than one, and leave halves that lie in one piece.
            biases = (None, None) if self.gate_up.bias is None else self.gate_up.bias.chunk(2)
            gate, up = (F.linear(x, w, b) for w, b in zip(self.gate_up.weight.chunk(2), biases, strict=True))
            return self.down(self.norm(activate(gate, self.activation).mul_(up)))
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(self.norm(activate(gate, self.activation) * up))


class Experts(nn.Module):
    """A mixture of gated experts. In training, `balance` holds the last call's term for `balance_loss`."""

    def __init__(self, width: int, config: ExpertsConfig):
        super().__init__()
        self.config, self.width = config, width
        E, hidden = config.count, config.hidden
        self.router = nn.Linear(width, E, bias=False)
        self.gate_up = nn.Parameter(torch.empty(E, 2 * hidden, width))
        self.down = nn.Parameter(torch.empty(E, width, hidden))
        for weight in (self.gate_up, self.down):  # as nn.Linear starts each expert's matrix
            nn.init.uniform_(weight, -(weight.shape[-1] ** -0.5), weight.shape[-1] ** -0.5)
        self.shared = (
            Gated(width, GatedConfig(hidden=config.shared, activation=config.activation)) if config.shared else None
        )
        self.shared_gate = nn.Linear(width, 1, bias=False) if config.shared_gate else None
        self.balance: Tensor | None = None

    def route(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x (N, W) → probabilities (N, E), active weights (N, A), active experts (N, A)"""
        probabilities = self.router(x).float().softmax(-1)
        weights, chosen = probabilities.topk(self.config.active, dim=-1)
        if self.config.renormalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return probabilities, weights, chosen

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)  # (N, W)
        probabilities, weights, chosen = self.route(flat)
        if self.training:
            self.balance = balance(probabilities, chosen)
        # Sort the (token, choice) pairs by expert, so that each expert's tokens lie together.
        order = chosen.flatten().argsort(stable=True)  # (N·A,)
        token = order // self.config.active
        counts = _count(chosen, self.config.count)
        mixed = self._run(flat[token], counts) * weights.flatten()[order, None].to(x.dtype)
        out = torch.zeros_like(flat).index_add(0, token, mixed)
        if self.shared is not None:
            always = self.shared(flat)
            out = out + (always if self.shared_gate is None else torch.sigmoid(self.shared_gate(flat)) * always)
        return out.view_as(x)

    def _run(self, x: Tensor, counts: Tensor) -> Tensor:
        """x (N·A, W), sorted by expert, counts (E,) → (N·A, W)"""
        aligned = self.width % 8 == self.config.hidden % 8 == 0  # the grouped kernel reads 16 bytes at a time
        if x.device.type == "cuda" and x.dtype == torch.bfloat16 and aligned and hasattr(F, "grouped_mm"):
            ends = counts.cumsum(0).to(torch.int32)
            gate, up = F.grouped_mm(x, self.gate_up.mT, offs=ends).chunk(2, dim=-1)
            return F.grouped_mm(activate(gate, self.config.activation) * up, self.down.mT, offs=ends)
        pieces = []
        for e, tokens in enumerate(x.split(counts.tolist())):
            if len(tokens):
                gate, up = F.linear(tokens, self.gate_up[e]).chunk(2, dim=-1)
                pieces.append(F.linear(activate(gate, self.config.activation) * up, self.down[e]))
        return torch.cat(pieces)


def _count(chosen: Tensor, experts: int) -> Tensor:
    """(E,) how often each expert was chosen; unlike `bincount`, without asking the device how large the answer is."""
    flat = chosen.flatten()
    return torch.zeros(experts, dtype=torch.long, device=flat.device).scatter_add(0, flat, torch.ones_like(flat))


def balance(probabilities: Tensor, chosen: Tensor) -> Tensor:
    """E · Σₑ (share of choices that fell on e) · (mean probability of e): A when the load is even, more when not."""
    E = probabilities.shape[-1]
    load = _count(chosen, E).to(probabilities.dtype) / len(chosen)
    return E * (load * probabilities.mean(0)).sum()


def balance_loss(model: nn.Module) -> Tensor | None:
    """Mean of the load-balancing terms that the last training forward left in the model's experts; None without any."""
    terms = []
    for module in model.modules():
        if isinstance(module, Experts) and module.balance is not None:
            terms.append(module.balance)
            module.balance = None  # lets go of the graph
    return torch.stack(terms).mean() if terms else None


def make_mlp(width: int, config: MLPConfig) -> nn.Module:
    match config:
        case PlainConfig():
            return Plain(width, config)
        case GatedConfig():
            return Gated(width, config)
        case ExpertsConfig():
            return Experts(width, config)
