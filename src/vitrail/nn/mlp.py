"""MLPs: plain, gated, and mixture of experts.

N tokens, W width, F hidden width, E experts, A active experts a token
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.config import Config, NonNegativeFloat
from vitrail.errors import ConfigError
from vitrail.nn.kernels import HAS_TRITON
from vitrail.nn.kernels.linear_gelu import linear_gelu
from vitrail.nn.norms import NormKind, make_norm

Activation = Literal["gelu", "gelu_tanh", "quick_gelu", "silu", "relu", "relu2"]


def apply_activation(x: Tensor, kind: Activation) -> Tensor:
    """Apply an activation function by name."""
    match kind:
        case "gelu":
            return F.gelu(x)
        case "gelu_tanh":
            return F.gelu(x, approximate="tanh")
        case "quick_gelu":  # CLIP
            return x * torch.sigmoid(1.702 * x)
        case "silu":
            return F.silu(x)
        case "relu":
            return F.relu(x)
        case "relu2":  # Persimmon
            return F.relu(x).square()


class PlainMLPConfig(Config, tag="plain", tag_field="kind"):
    """Two-layer MLP: up, activation, down."""

    intermediate_size: int
    activation: Activation = "gelu"
    bias: bool = True


class GatedMLPConfig(Config, tag="gated", tag_field="kind"):
    """Gated MLP such as SwiGLU: activation(gate) · up, down. EVA-02 has `inner_norm` before the last layer."""

    intermediate_size: int
    activation: Activation = "silu"
    bias: bool = False
    inner_norm: NormKind | None = None
    eps: float = 1e-6  # of inner_norm


class MoEConfig(Config, tag="experts", tag_field="kind"):
    """Mixture of gated experts.

    num_experts               number of experts
    experts_per_token         experts that each token uses
    shared_intermediate_size  intermediate size of an expert that all tokens use; 0 for none
    shared_gate               multiply the shared expert by a sigmoid gate (Qwen2-MoE)
    renormalize               make the weights of the selected experts sum to one (Qwen3)
    scoring                   scores of the experts: softmax over all, or a sigmoid of each (DeepSeek-V3, GLM-4.5)
    correction_bias           a bias of each expert's score that changes the selection only, not the weights
    num_groups, top_groups    select experts from the `top_groups` best of `num_groups` groups
    group_score               score of a group: that of its best expert (DeepSeek-V2), or of its two best (V3)
    weight_scale              factor on the weights of the selected experts
    norm                      norms before and after the experts and the shared expert, and scales of the router's input
                              and of the experts' weights: the branch then has no norm before (Gemma 4)
    router_aux_loss_coef      weight of the load-balancing loss in training
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    shared_intermediate_size: int = 0
    shared_gate: bool = False
    renormalize: bool = True
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    correction_bias: bool = False
    num_groups: int = 1
    top_groups: int = 1
    group_score: Literal["best", "two_best"] = "two_best"
    weight_scale: float = 1.0
    activation: Activation = "silu"
    norm: NormKind | None = None
    eps: float = 1e-6  # of norm
    router_aux_loss_coef: NonNegativeFloat = 0.0

    def __post_init__(self) -> None:
        size = self.num_experts // max(1, self.num_groups)  # of a group
        if self.num_groups != 1 and (
            not 1 <= self.top_groups <= self.num_groups
            or self.num_experts % self.num_groups
            or size < self.experts_per_group_score
            or self.experts_per_token > self.top_groups * size
        ):
            raise ConfigError(
                f"{self.top_groups} of {self.num_groups} groups of {self.num_experts} experts do not give "
                f"{self.experts_per_token} experts",
                f"use groups of {self.experts_per_group_score} experts or more, and enough of them",
            )
        if not 1 <= self.experts_per_token <= self.num_experts:
            raise ConfigError(
                f"experts_per_token is {self.experts_per_token} of {self.num_experts} experts", "use 1 … num_experts"
            )
        if self.shared_gate and not self.shared_intermediate_size:
            raise ConfigError("shared_gate is set without a shared expert", "set shared_intermediate_size")
        if self.norm is not None and (not self.shared_intermediate_size or self.shared_gate):
            raise ConfigError("norm needs a shared expert without a gate", "set shared_intermediate_size")

    @property
    def experts_per_group_score(self) -> int:
        """Number of experts whose scores add up to that of their group."""
        return 1 if self.group_score == "best" else 2


MLPConfig = PlainMLPConfig | GatedMLPConfig | MoEConfig


class PlainMLP(nn.Module):
    """Two-layer MLP."""

    def __init__(self, width: int, config: PlainMLPConfig):
        super().__init__()
        self.activation: Activation = config.activation
        self.up = nn.Linear(width, config.intermediate_size, bias=config.bias)
        self.down = nn.Linear(config.intermediate_size, width, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.up.bias is not None and _epilogue_runs(x, self.activation):
            return self.down(linear_gelu(x, self.up.weight, self.up.bias))
        return self.down(apply_activation(self.up(x), self.activation))


def _epilogue_runs(x: Tensor, activation: Activation) -> bool:
    """Return whether the fused linear + GELU kernel applies: tanh form, bf16, no gradient."""
    return activation == "gelu_tanh" and x.is_cuda and x.dtype == torch.bfloat16 and not torch.is_grad_enabled()


class GatedMLP(nn.Module):
    """Gated MLP with one fused gate and up projection."""

    def __init__(self, width: int, config: GatedMLPConfig):
        super().__init__()
        self.activation: Activation = config.activation
        self.gate_up = nn.Linear(width, 2 * config.intermediate_size, bias=config.bias)  # one matrix product for both
        self.norm = (
            make_norm(config.inner_norm, config.intermediate_size, config.eps) if config.inner_norm else nn.Identity()
        )
        self.down = nn.Linear(config.intermediate_size, width, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cpu and not torch.is_grad_enabled() and type(self.gate_up) is nn.Linear:
            # On a CPU two products cost the same as one, and their outputs are contiguous.
            biases = (None, None) if self.gate_up.bias is None else self.gate_up.bias.chunk(2)
            gate, up = (F.linear(x, w, b) for w, b in zip(self.gate_up.weight.chunk(2), biases, strict=True))
            return self.down(self.norm(apply_activation(gate, self.activation).mul_(up)))
        both = self.gate_up(x)
        if self.activation == "silu" and _swiglu_runs(both):
            from vitrail.nn.kernels.training_kernels import swiglu

            return self.down(self.norm(swiglu(both)))
        gate, up = both.chunk(2, dim=-1)
        return self.down(self.norm(apply_activation(gate, self.activation) * up))


def _swiglu_runs(x: Tensor) -> bool:
    """Return whether the fused kernel applies, whose backward pass is faster than what the compiler makes."""
    return HAS_TRITON and x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and torch.is_grad_enabled()


class MoE(nn.Module):
    """Mixture of gated experts. In training mode, `balancing_loss` holds the load-balancing loss of the last call."""

    correction_bias: Tensor | None

    def __init__(self, width: int, config: MoEConfig):
        super().__init__()
        self.config, self.width = config, width
        E, hidden = config.num_experts, config.intermediate_size
        self.router = nn.Linear(width, E, bias=False)
        self.gate_up = nn.Parameter(torch.empty(E, 2 * hidden, width))
        self.down = nn.Parameter(torch.empty(E, width, hidden))
        for weight in (self.gate_up, self.down):  # as nn.Linear initializes each expert's matrix
            nn.init.uniform_(weight, -(weight.shape[-1] ** -0.5), weight.shape[-1] ** -0.5)
        self.shared = (
            GatedMLP(
                width, GatedMLPConfig(intermediate_size=config.shared_intermediate_size, activation=config.activation)
            )
            if config.shared_intermediate_size
            else None
        )
        self.shared_gate = nn.Linear(width, 1, bias=False) if config.shared_gate else None
        bias = torch.zeros(E) if config.correction_bias else None  # balanced in training without gradients
        self.register_buffer("correction_bias", bias)
        kind = config.norm
        names = () if kind is None else ("experts", "experts_post", "shared", "shared_post")
        self.norms = nn.ModuleDict({name: make_norm(kind, width, config.eps) for name in names if kind})
        self.router_scale = nn.Parameter(torch.ones(width)) if kind else None
        self.expert_scale = nn.Parameter(torch.ones(E)) if kind else None
        self.balancing_loss: Tensor | None = None
        self.token_mask: Tensor | None = None  # which tokens of a batch are not padding; all if None

    def select_experts(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Select experts for x (N, W): probabilities (N, E), weights (N, A) and indices (N, A) of the experts."""
        if self.router_scale is not None:
            x = F.rms_norm(x.float(), (self.width,), eps=self.config.eps).to(x.dtype)
            x = x * self.router_scale * self.width**-0.5
        if self.config.scoring == "softmax":
            scores = self.router(x).float().softmax(-1)
            probabilities = scores
        else:
            scores = F.linear(x.float(), self.router.weight.float()).sigmoid()
            probabilities = scores / scores.sum(-1, keepdim=True)
        expert_indices = self._limit_to_groups(scores).topk(self.config.experts_per_token, dim=-1).indices
        weights = scores.gather(-1, expert_indices)
        if self.config.renormalize:
            weights = weights / weights.sum(-1, keepdim=True)
        if self.expert_scale is not None:
            weights = weights * self.expert_scale[expert_indices]
        return probabilities, weights * self.config.weight_scale, expert_indices

    def _limit_to_groups(self, scores: Tensor) -> Tensor:
        """Return the scores (N, E) by which experts are selected: −∞ outside of the best groups."""
        if self.correction_bias is not None:
            scores = scores + self.correction_bias.float()
        if self.config.num_groups == 1:
            return scores
        groups = scores.unflatten(-1, (self.config.num_groups, -1))
        group_scores = groups.topk(self.config.experts_per_group_score, dim=-1).values.sum(-1)
        best = group_scores.topk(self.config.top_groups, dim=-1).indices
        outside = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter(-1, best, False)
        return groups.masked_fill(outside[..., None], -torch.inf).flatten(-2)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)  # (N, W)
        probabilities, weights, expert_indices = self.select_experts(flat)
        if self.training:
            self.balancing_loss = load_balancing_loss(probabilities, expert_indices, self.token_mask)
        # Sort the (token, expert) pairs by expert, so that each expert's tokens are contiguous.
        order = expert_indices.flatten().argsort(stable=True)  # (N·A,)
        token = order // self.config.experts_per_token
        counts = _count(expert_indices, self.config.num_experts)
        mixed = self._run(self._normed("experts", flat)[token], counts) * weights.flatten()[order, None].to(x.dtype)
        out = self._normed("experts_post", torch.zeros_like(flat).index_add(0, token, mixed))
        if self.shared is not None:
            shared = self._normed("shared_post", self.shared(self._normed("shared", flat)))
            out = out + (shared if self.shared_gate is None else torch.sigmoid(self.shared_gate(flat)) * shared)
        return out.view_as(x)

    def _normed(self, name: str, x: Tensor) -> Tensor:
        return self.norms[name](x) if self.config.norm is not None else x

    def _run(self, x: Tensor, counts: Tensor) -> Tensor:
        """Run x (N·A, W), sorted by expert, with counts (E,) tokens per expert. Returns (N·A, W)."""
        # The grouped kernel reads 16 bytes at a time.
        aligned = self.width % 8 == self.config.intermediate_size % 8 == 0
        if x.device.type == "cuda" and x.dtype == torch.bfloat16 and aligned and hasattr(F, "grouped_mm"):
            ends = counts.cumsum(0).to(torch.int32)
            gate, up = F.grouped_mm(x, self.gate_up.mT, offs=ends).chunk(2, dim=-1)
            return F.grouped_mm(apply_activation(gate, self.config.activation) * up, self.down.mT, offs=ends)
        outputs = []
        for e, tokens in enumerate(x.split(counts.tolist())):
            if len(tokens):
                gate, up = F.linear(tokens, self.gate_up[e]).chunk(2, dim=-1)
                outputs.append(F.linear(apply_activation(gate, self.config.activation) * up, self.down[e]))
        return torch.cat(outputs)


def _count(expert_indices: Tensor, experts: int) -> Tensor:
    """Count how often each expert is selected, (E,). Unlike `bincount`, it needs no device synchronization."""
    flat = expert_indices.flatten()
    return torch.zeros(experts, dtype=torch.long, device=flat.device).scatter_add(0, flat, torch.ones_like(flat))


def load_balancing_loss(probabilities: Tensor, expert_indices: Tensor, token_mask: Tensor | None = None) -> Tensor:
    """E · Σₑ (fraction of selections of e) · (mean probability of e): A under an even load, larger otherwise.

    Tokens outside of `token_mask` (N, or of any shape with N elements) are padding and do not count.
    """
    N, E = probabilities.shape
    if token_mask is None:
        load = _count(expert_indices, E).to(probabilities.dtype) / N
        return E * (load * probabilities.mean(0)).sum()
    weights = token_mask.flatten().to(probabilities)
    weights = weights / weights.sum()
    each = weights[:, None].expand_as(expert_indices).flatten()
    load = torch.zeros(E, dtype=probabilities.dtype, device=each.device).scatter_add(0, expert_indices.flatten(), each)
    return E * (load * (weights @ probabilities)).sum()


def pop_load_balancing_losses(model: nn.Module) -> list[Tensor]:
    """Return the load-balancing losses of the last training forward by layer, and clear them."""
    losses = []
    for module in model.modules():
        if isinstance(module, MoE) and module.balancing_loss is not None:
            losses.append(module.balancing_loss)
            module.balancing_loss = None  # free the graph
    return losses


def pop_load_balancing_loss(model: nn.Module) -> Tensor | None:
    """Return the mean load-balancing loss of the last training forward and clear it; None without experts."""
    losses = pop_load_balancing_losses(model)
    return torch.stack(losses).mean() if losses else None


def make_mlp(width: int, config: MLPConfig) -> nn.Module:
    """Build the MLP of a config."""
    match config:
        case PlainMLPConfig():
            return PlainMLP(width, config)
        case GatedMLPConfig():
            return GatedMLP(width, config)
        case MoEConfig():
            return MoE(width, config)
