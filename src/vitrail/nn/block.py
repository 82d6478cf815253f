"""The one block: a chain of residual branches.

    ViT, text tower, decoder   self, mlp
    Q-Former                   self, cross, mlp   (norms after; the cross branch on every second block)
    Flamingo, Llama-3.2-V      cross, mlp         (behind tanh gates that start at zero)
    Perceiver resampler        joint, mlp         (keys: context, then the latents themselves)

B batch, L tokens, C context tokens, W width
"""

from typing import Literal

import torch
from torch import Tensor, nn

from vitrail.config import Config
from vitrail.errors import ConfigError
from vitrail.nn.attention import Attention, AttentionConfig, Route, shared
from vitrail.nn.cache import Kept, LayerCache
from vitrail.nn.mlp import MLPConfig, make_mlp
from vitrail.nn.norms import Norm, make_norm
from vitrail.nn.plan import Plan
from vitrail.nn.rotary import Rotation

Branch = Literal["self", "cross", "joint", "mlp"]


class BlockConfig(Config):
    """`norm_at`: before each branch (everything since GPT-2) or after the residual (BERT, so the Q-Former).

    `scale` is how a branch is weighed as it joins the stream: not at all, per channel from a small start (`layer_scale`
    gives it: DINOv2), or by tanh of one number that starts at zero, so that the block starts as the identity (`gated`;
    "channels": of one number a channel, as in Idefics).
    """

    width: int
    attention: AttentionConfig
    mlp: MLPConfig
    chain: tuple[Branch, ...] = ("self", "mlp")
    norm: Norm = "layer"
    eps: float = 1e-6
    norm_at: Literal["before", "after"] = "before"
    layer_scale: float | None = None
    gated: bool | Literal["channels"] = False
    context_width: int | None = None

    def __post_init__(self) -> None:
        if not self.chain or len(set(self.chain)) != len(self.chain):
            raise ConfigError(f"a block cannot be the chain {self.chain}", "name each branch once, at least one")
        if {"self", "joint"} <= set(self.chain):
            raise ConfigError(f"chain {self.chain} looks at the tokens twice", "use self and cross, or joint alone")
        if self.gated and self.layer_scale is not None:
            raise ConfigError("a branch is weighed by a gate or by a layer scale, not both")
        self.attention.channels(self.width)  # refuses a width that the heads do not divide


class Residual(nn.Module):
    """x + scale · branch(norm(x)), or norm(x + scale · branch(x)). The branch is one of the house's operations."""

    def __init__(self, config: BlockConfig, kind: Branch):
        super().__init__()
        width = config.width
        self.kind, self.norm_at = kind, config.norm_at
        self.norm = make_norm(config.norm, width, config.eps)
        # The resampler's context is normed with weights of its own before it is joined with the latents.
        self.context_norm = make_norm(config.norm, width, config.eps) if kind == "joint" else None
        if kind == "mlp":
            self.op: nn.Module = make_mlp(width, config.mlp)
        else:
            self.op = Attention(width, config.attention, kind, config.context_width)
        self.scale = nn.Parameter(torch.full((width,), config.layer_scale)) if config.layer_scale is not None else None
        self.gate = nn.Parameter(torch.zeros(width if config.gated == "channels" else 1)) if config.gated else None

    def forward(self, x: Tensor, *, route: Route = shared, **given) -> Tensor:
        if given.get("context") is not None and self.context_norm is not None:
            given["context"] = self.context_norm(given["context"])
        y = self.norm(x) if self.norm_at == "before" else x
        y = route("mlp", self.op, y) if self.kind == "mlp" else self.op(y, route=route, **given)
        if self.scale is not None:
            y = y * self.scale
        if self.gate is not None:
            y = y * self.gate.tanh()
        return x + y if self.norm_at == "before" else self.norm(x + y)


class Block(nn.Module):
    def __init__(self, config: BlockConfig):
        super().__init__()
        self.config = config
        self.branches = nn.ModuleDict({kind: Residual(config, kind) for kind in config.chain})

    def forward(
        self,
        x: Tensor,
        plan: Plan | None = None,
        *,
        rotation: Rotation | None = None,
        context: Tensor | Kept | None = None,
        context_plan: Plan | None = None,
        cache: LayerCache | None = None,
        route: Route = shared,
        asked: Tensor | int | None = None,
    ) -> Tensor:
        """x (B, L, W), context (B, C, W′) → (B, L, W). `plan` is among the tokens, `context_plan` between them and the
        context (for `joint`, between them and context + tokens); without one, everything sees everything. `route`
        takes the tokens through the weights of `self` and `mlp`. With `asked`, one token a row (B,) or all from a place
        on, the MLP runs for these alone, and they alone come out."""
        for kind, branch in self.branches.items():
            match kind:
                case "self":
                    x = branch(x, plan=plan or Plan(), rotation=rotation, cache=cache, route=route)
                case "cross" | "joint":
                    x = branch(x, plan=context_plan or Plan(), context=context)
                case _:
                    if isinstance(asked, int):
                        x = x[:, asked:]
                    elif asked is not None:
                        x = x.take_along_dim(asked[:, None, None], dim=1)
                    x = branch(x, route=route)
        return x
