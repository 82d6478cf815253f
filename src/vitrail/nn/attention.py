"""Attention module: projections, q/k norm, rotary positions and KV cache. The attention plan is the mask.

B batch, L tokens, C context tokens, W width, H heads, G key/value heads, D head width
"""

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.config import Config, PositiveFloat
from vitrail.errors import ConfigError
from vitrail.nn.attention_backends import compute_attention
from vitrail.nn.attention_plans import AttentionPlan
from vitrail.nn.kv_cache import KeyValues, LayerCache
from vitrail.nn.norms import NormKind, make_norm
from vitrail.nn.paged_attention import PagedLayer
from vitrail.nn.rotary_embedding import Rotation, apply_rotation

AttentionSource = Literal["self", "cross", "joint"]

LayerFn = Callable[[Tensor], Tensor]
LayerRouter = Callable[[str, LayerFn, Tensor], Tensor]
"""(name of the layer, layer, x) → output. It applies a layer to the tokens; a router can apply other weights to some
tokens, such as those of an expert."""


def apply_shared_layer(name: str, layer: LayerFn, x: Tensor) -> Tensor:
    """Apply the layer to all tokens: the default router."""
    return layer(x)


class LatentConfig(Config):
    """Settings of multi-head latent attention (see `LatentAttention`), with the names of transformers.

    kv_lora_rank      width of the latent from which keys and values are projected
    q_lora_rank       width of the latent from which queries are projected; None to project the tokens
    qk_nope_head_dim  channels of queries and keys without rotary positions
    qk_rope_head_dim  channels with rotary positions; all heads share those of the keys
    v_head_dim        channels of a value
    """

    kv_lora_rank: int
    q_lora_rank: int | None = None
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128

    def __post_init__(self) -> None:
        if min(value for value in self.to_dict().values() if value is not None) < 1:
            raise ConfigError(f"latent attention has the sizes {self.to_dict()}", "use at least 1 for each")

    @property
    def qk_head_dim(self) -> int:
        """Channels of queries and keys."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


class AttentionConfig(Config):
    """Attention settings.

    kv_heads               fewer than `heads` for grouped-query attention; None for `heads`
    head_dim               None for width / heads
    bias                   projections with a bias: none, qkv, out, all four, or all but k (EVA-02)
    qk_norm                norm of queries and keys
    qk_norm_over           "head": each head's channels; "heads": the channels of all heads together (InternViT-6B)
    inner_norm             norm of the concatenated heads before the output projection (EVA-02 CLIP)
    eps                    eps of these norms
    query_pre_attn_scalar  scores are divided by its square root; None for head_dim
    share_kv               values are the keys before their norm, from one projection (Gemma 4)
    v_norm                 RMS norm of the values, without weights (Gemma 4)
    output_gate            multiply the heads by the sigmoid of a gate, which the query projection gives too (Qwen3.5)
    logit_softcap          scores s become softcap · tanh(s / softcap) (Gemma 2); None for no cap
    latent                 project keys and values from a latent, as DeepSeek-V2 and V3 do; None for ordinary attention.
                           Its bias "all" is one of the latents and of the output
    """

    heads: int
    kv_heads: int | None = None
    head_dim: int | None = None
    bias: Literal["none", "qkv", "out", "all", "all_but_k"] = "none"
    qk_norm: NormKind | None = None
    qk_norm_over: Literal["head", "heads"] = "head"
    inner_norm: NormKind | None = None
    eps: float = 1e-6
    query_pre_attn_scalar: PositiveFloat | None = None
    share_kv: bool = False
    v_norm: bool = False
    output_gate: bool = False
    logit_softcap: PositiveFloat | None = None
    latent: LatentConfig | None = None

    @property
    def num_kv_heads(self) -> int:
        """Number of key/value heads."""
        return self.heads if self.kv_heads is None else self.kv_heads

    def __post_init__(self) -> None:
        if self.heads < 1 or self.num_kv_heads < 1 or self.heads % self.num_kv_heads:
            raise ConfigError(
                f"{self.heads} heads do not divide into groups of {self.num_kv_heads} key/value heads",
                "make kv_heads a divisor of heads",
            )
        if self.latent is not None:
            self._check_latent(self.latent)

    def _check_latent(self, latent: LatentConfig) -> None:
        allowed = {"heads", "kv_heads", "head_dim", "bias", "eps", "query_pre_attn_scalar", "latent"}
        plain = AttentionConfig(heads=self.heads)
        changed = [
            key for key in self.__struct_fields__ if key not in allowed and getattr(self, key) != getattr(plain, key)
        ]
        if changed or self.bias not in ("none", "all"):
            key = (*changed, "bias")[0]
            raise ConfigError(f"latent attention has {key} = {getattr(self, key)!r}", f"remove latent, or {key}")
        if self.num_kv_heads != self.heads or self.head_dim not in (None, latent.qk_head_dim):
            raise ConfigError(
                f"latent attention has kv_heads {self.kv_heads} and head_dim {self.head_dim}",
                "remove both: they follow from heads and latent",
            )

    def resolve_head_dim(self, width: int) -> int:
        """Return the width of one head: of its query and key."""
        if self.latent is not None:
            return self.latent.qk_head_dim
        if self.head_dim is not None:
            return self.head_dim
        if width % self.heads:
            raise ConfigError(f"width {width} does not divide into {self.heads} heads", "change one, or set head_dim")
        return width // self.heads

    def resolve_rotary_dim(self, width: int) -> int:
        """Return the number of channels of a head that rotary positions can rotate."""
        return self.resolve_head_dim(width) if self.latent is None else self.latent.qk_rope_head_dim

    def cache_shape(self, width: int) -> tuple[int, int, int]:
        """Return what a cache keeps of a token: the number of heads, and the widths of their keys and values.

        Latent attention keeps its latent and the rotated channels of the key.
        """
        if self.latent is not None:
            return 1, self.latent.kv_lora_rank, self.latent.qk_rope_head_dim
        D = self.resolve_head_dim(width)
        return self.num_kv_heads, D, D


class Attention(nn.Module):
    """Multi-head attention.

    `source` selects the keys and values: the tokens (`self`), a context (`cross`: Q-Former, Flamingo), or the context
    followed by the tokens (`joint`: Perceiver resampler).
    """

    def __init__(
        self, width: int, config: AttentionConfig, source: AttentionSource = "self", context_width: int | None = None
    ):
        super().__init__()
        if config.latent is not None:
            raise ConfigError(f"{source} attention cannot be latent", "remove attention.latent")
        if source == "joint" and context_width not in (None, width):
            raise ConfigError(f"joint attention needs a context of width {width}, not {context_width}")
        self.config, self.width, self.source = config, width, source
        D = config.resolve_head_dim(width)
        self.head_dim = D
        H, G, bias = config.heads, config.num_kv_heads, config.bias in ("qkv", "all")
        if config.bias == "all_but_k" and (source != "self" or config.output_gate):
            raise ConfigError(f"{source} attention projects k and v together", "use bias 'all', 'qkv', 'out' or 'none'")
        for key in ("output_gate", "share_kv", "v_norm"):
            if getattr(config, key) and source != "self":
                raise ConfigError(f"{source} attention has no {key}", f"set {key} = false")
        if config.bias == "all_but_k" and config.share_kv:
            raise ConfigError("attention with share_kv has no bias 'all_but_k'", "use 'all', 'qkv', 'out' or 'none'")
        if source == "self":
            self.qkv = nn.Linear(width, (H * (1 + config.output_gate) + G * (2 - config.share_kv)) * D, bias=bias)
        else:
            self.q = nn.Linear(width, H * D, bias=bias)
            self.kv = nn.Linear(context_width or width, 2 * G * D, bias=bias)
        # With rotary positions, a k bias changes the scores, so its absence matters.
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
        plan: AttentionPlan,
        *,
        rotation: Rotation | None = None,
        context: Tensor | KeyValues | None = None,
        cache: LayerCache | PagedLayer | None = None,
        router: LayerRouter = apply_shared_layer,
    ) -> Tensor:
        """Attend from x (B, L, W). `context` is (B, C, W′) or the output of `project_context`. Returns (B, L, W)."""
        q, k, v, gate = self._project(x, context, router)  # (B, L, H, D), (B, ·, G, D) twice, (B, L, H, D)
        if rotation is not None:
            q, k = apply_rotation(q, rotation), apply_rotation(k, rotation)
            if rotation.query_scale is not None:
                q = q * rotation.query_scale[..., None, None].to(q.dtype)
        if self.config.query_pre_attn_scalar is not None:
            q = q * (self.head_dim / self.config.query_pre_attn_scalar) ** 0.5  # backends divide by sqrt(head_dim)
        if isinstance(cache, PagedLayer):
            attended = cache.attend(q, k, v, plan, self.config.logit_softcap)
        else:
            if cache is not None:
                k, v = cache.append(k, v)
            attended = compute_attention(q, k, v, plan, logit_softcap=self.config.logit_softcap)
        if gate is not None:
            attended = attended * torch.sigmoid(gate)
        return router("out", self.out, self.inner_norm(attended.flatten(2)))

    def project_context(self, context: Tensor) -> KeyValues:
        """Return the keys and values of a context (B, C, W′), to use it in several calls."""
        G = self.config.num_kv_heads
        k, v = self.kv(context).unflatten(-1, (-1, self.head_dim)).split([G, G], dim=-2)
        return KeyValues(self._normed(self.k_norm, k), v)

    def _project(
        self, x: Tensor, context: Tensor | KeyValues | None, router: LayerRouter
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        H, G, D, gate = self.config.heads, self.config.num_kv_heads, self.head_dim, None
        if self.source == "self":
            width = (1 + self.config.output_gate) * H
            heads = router("qkv", self._qkv, x).unflatten(-1, (-1, D))
            q, k, v = heads[..., :width, :], heads[..., width : width + G, :], heads[..., -G:, :]
            if self.config.v_norm:
                v = F.rms_norm(v.float(), (D,), eps=self.config.eps).to(v.dtype)
            if self.config.output_gate:
                q, gate = q.unflatten(-2, (H, 2)).unbind(-2)  # each head's query, then its gate
            return self._normed(self.q_norm, q), self._normed(self.k_norm, k), v, gate
        if context is None:
            raise ConfigError(f"{self.source} attention needs a context")
        if not isinstance(context, KeyValues):
            context = self.project_context(torch.cat([context, x], dim=1) if self.source == "joint" else context)
        return self._normed(self.q_norm, self.q(x).unflatten(-1, (-1, D))), context.k, context.v, None

    def _normed(self, norm: nn.Module, x: Tensor) -> Tensor:
        """Normalize queries or keys (B, ·, heads, D)."""
        return norm(x) if self.config.qk_norm_over == "head" else norm(x.flatten(2)).view_as(x)

    def _qkv(self, x: Tensor) -> Tensor:
        if self.q_bias is None or self.v_bias is None:
            return self.qkv(x)
        bias = torch.cat([self.q_bias, torch.zeros_like(self.v_bias), self.v_bias])
        return F.linear(x, self.qkv.weight, bias)
