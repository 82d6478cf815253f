"""Attention as a module: projections, q/k norm, rotation, cache; what sees what is the plan's.

B batch, L tokens, C context tokens, W width, H heads, G key/value heads, D head width
"""

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.config import Config
from vitrail.errors import ConfigError
from vitrail.nn.attend import attend
from vitrail.nn.cache import Kept, LayerCache
from vitrail.nn.norms import Norm, make_norm
from vitrail.nn.plan import Plan
from vitrail.nn.rotary import Rotation, rotate

Source = Literal["self", "cross", "joint"]

Layer = Callable[[Tensor], Tensor]
Route = Callable[[str, Layer, Tensor], Tensor]
"""(name of the weights, the layer that holds them, x) → what comes of x; where some tokens have weights of their own,
a route takes those tokens through them."""


def shared(name: str, layer: Layer, x: Tensor) -> Tensor:
    """The route of every token through the same weights."""
    return layer(x)


class AttentionConfig(Config):
    """`kv_heads` fewer than heads: grouped queries.

    `bias` is on no projection, on q, k and v, on the one out, on all four, or on all but k's (EVA-02). `inner_norm` is
    over the heads' joined output, before the projection out (EVA-02 CLIP). `qk_norm` is over each head's channels, or
    over those of all heads together (InternViT-6B).
    """

    heads: int
    kv_heads: int | None = None
    head_dim: int | None = None  # width / heads unless given
    bias: Literal["none", "qkv", "out", "all", "all_but_k"] = "none"
    qk_norm: Norm | None = None
    qk_norm_over: Literal["head", "heads"] = "head"
    inner_norm: Norm | None = None
    eps: float = 1e-6  # of those norms

    @property
    def groups(self) -> int:
        return self.heads if self.kv_heads is None else self.kv_heads

    def __post_init__(self) -> None:
        if self.heads < 1 or self.groups < 1 or self.heads % self.groups:
            raise ConfigError(
                f"{self.heads} heads cannot share {self.groups} key/value heads",
                "make kv_heads a divisor of heads",
            )

    def channels(self, width: int) -> int:
        """Channels of one head."""
        if self.head_dim is not None:
            return self.head_dim
        if width % self.heads:
            raise ConfigError(f"width {width} does not divide into {self.heads} heads", "change one, or give head_dim")
        return width // self.heads


class Attention(nn.Module):
    """Keys and values come from the tokens themselves (`self`), from a context (`cross`: Q-Former, Flamingo's layers),
    or from the context followed by the tokens (`joint`: the Perceiver resampler)."""

    def __init__(self, width: int, config: AttentionConfig, source: Source = "self", context_width: int | None = None):
        super().__init__()
        if source == "joint" and context_width not in (None, width):
            raise ConfigError(f"joint attention needs a context of width {width}, not {context_width}")
        self.config, self.width, self.source = config, width, source
        self.head_dim = D = config.channels(width)
        H, G, bias = config.heads, config.groups, config.bias in ("qkv", "all")
        if config.bias == "all_but_k" and source != "self":
            raise ConfigError(f"{source} attention projects k and v together", "use bias 'all', 'qkv', 'out' or 'none'")
        if source == "self":
            self.qkv = nn.Linear(width, (H + 2 * G) * D, bias=bias)
        else:
            self.q = nn.Linear(width, H * D, bias=bias)
            self.kv = nn.Linear(context_width or width, 2 * G * D, bias=bias)
        # With rotary positions a bias on k is no constant that softmax would drop, so leaving it out is a choice.
        self.q_bias = nn.Parameter(torch.zeros(H * D)) if config.bias == "all_but_k" else None
        self.v_bias = nn.Parameter(torch.zeros(G * D)) if config.bias == "all_but_k" else None
        self.out = nn.Linear(H * D, width, bias=config.bias not in ("none", "qkv"))
        self.inner_norm = make_norm(config.inner_norm, H * D, config.eps) if config.inner_norm else nn.Identity()
        q_width, k_width = (D, D) if config.qk_norm_over == "head" else (H * D, G * D)
        self.q_norm = make_norm(config.qk_norm, q_width, config.eps) if config.qk_norm else nn.Identity()
        self.k_norm = make_norm(config.qk_norm, k_width, config.eps) if config.qk_norm else nn.Identity()

    def forward(
        self,
        x: Tensor,
        plan: Plan,
        *,
        rotation: Rotation | None = None,
        context: Tensor | Kept | None = None,
        cache: LayerCache | None = None,
        route: Route = shared,
    ) -> Tensor:
        """x (B, L, W), context (B, C, W′) or what `keys` made of it → (B, L, W)"""
        q, k, v = self._project(x, context, route)  # (B, L, H, D), (B, ·, G, D) twice
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        if cache is not None:
            k, v = cache.append(k, v)
        return route("out", self.out, self.inner_norm(attend(q, k, v, plan).flatten(2)))

    def keys(self, context: Tensor) -> Kept:
        """Keys and values of a context (B, C, W′), for a cross-attention that looks at it many times."""
        G = self.config.groups
        k, v = self.kv(context).unflatten(-1, (-1, self.head_dim)).split([G, G], dim=-2)
        return Kept(self._normed(self.k_norm, k), v)

    def _project(self, x: Tensor, context: Tensor | Kept | None, route: Route) -> tuple[Tensor, Tensor, Tensor]:
        H, G, D = self.config.heads, self.config.groups, self.head_dim
        if self.source == "self":
            q, k, v = route("qkv", self._qkv, x).unflatten(-1, (-1, D)).split([H, G, G], dim=-2)
            return self._normed(self.q_norm, q), self._normed(self.k_norm, k), v
        if context is None:
            raise ConfigError(f"{self.source} attention was called without a context")
        if not isinstance(context, Kept):
            context = self.keys(torch.cat([context, x], dim=1) if self.source == "joint" else context)
        return self._normed(self.q_norm, self.q(x).unflatten(-1, (-1, D))), context.k, context.v

    def _normed(self, norm: nn.Module, x: Tensor) -> Tensor:
        """x (B, ·, heads, D)"""
        return norm(x) if self.config.qk_norm_over == "head" else norm(x.flatten(2)).view_as(x)

    def _qkv(self, x: Tensor) -> Tensor:
        if self.q_bias is None or self.v_bias is None:
            return self.qkv(x)
        bias = torch.cat([self.q_bias, torch.zeros_like(self.v_bias), self.v_bias])
        return F.linear(x, self.qkv.weight, bias)
