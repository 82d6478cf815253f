"""Multi-head latent attention (DeepSeek-V2 and V3): keys and values of all heads are projections of one latent.

The cache keeps the latent of a token and the rotated channels of its key, which all heads share. Both forms compute the
same:

    expanded  project the latents to keys and values of every head, then attend: the plain form
    absorbed  move this projection to the queries and to the outputs, and attend to the latents themselves

The absorbed form has more products for each pair of a query and a key, and none for the keys alone. So it is cheaper
for few queries over many cached tokens.

B batch, L tokens, K keys, W width, H heads, R latent width, N and P channels without and with rotary positions,
V value width
"""

import torch
from torch import Tensor, nn

from vitrail.errors import ConfigError
from vitrail.nn.attention import AttentionConfig, LatentConfig, LayerRouter, apply_shared_layer
from vitrail.nn.attention_backends import compute_attention
from vitrail.nn.attention_plans import AttentionPlan
from vitrail.nn.kv_cache import LayerCache
from vitrail.nn.norms import make_norm
from vitrail.nn.rotary_embedding import Rotation, apply_rotation


def is_absorbed_cheaper(config: LatentConfig, queries: int, keys: int) -> bool:
    """Return whether the absorbed form has fewer products for this many queries and keys of a row.

    Without cached keys it is not considered: fused kernels need keys and values.
    """
    project = config.kv_lora_rank * (config.qk_nope_head_dim + config.v_head_dim)
    more_per_pair = 2 * config.kv_lora_rank - config.qk_nope_head_dim - config.v_head_dim
    return queries < keys and queries * keys * more_per_pair < (keys - queries) * project


class LatentAttention(nn.Module):
    """Multi-head latent attention among the tokens. It takes the place of `Attention` in a branch."""

    def __init__(self, width: int, config: AttentionConfig):
        super().__init__()
        if config.latent is None:
            raise ConfigError("attention.latent is missing", "give the sizes of the latent")
        self.config, self.width, self.latent = config, width, config.latent
        latent, H, bias = config.latent, config.heads, config.bias == "all"
        R, P = latent.kv_lora_rank, latent.qk_rope_head_dim
        queries = H * latent.qk_head_dim
        if latent.q_lora_rank is None:
            self.q_down, self.q_norm, self.q = None, None, nn.Linear(width, queries, bias=False)
        else:
            self.q_down = nn.Linear(width, latent.q_lora_rank, bias=bias)
            self.q_norm = make_norm("rms", latent.q_lora_rank, config.eps)
            self.q = nn.Linear(latent.q_lora_rank, queries, bias=False)
        self.kv_down = nn.Linear(width, R + P, bias=bias)
        self.kv_norm = make_norm("rms", R, config.eps)
        self.kv_up = nn.Linear(R, H * (latent.qk_nope_head_dim + latent.v_head_dim), bias=False)
        self.out = nn.Linear(H * latent.v_head_dim, width, bias=bias)

    def forward(
        self,
        x: Tensor,
        plan: AttentionPlan,
        *,
        rotation: Rotation | None = None,
        cache: LayerCache | None = None,
        router: LayerRouter = apply_shared_layer,
    ) -> Tensor:
        """Attend among x (B, L, W) and the cached tokens. Returns (B, L, W)."""
        q = router("q", self._project_queries, x)  # (B, L, H, N + P)
        latent, rotated = router("kv_down", self.kv_down, x).split(
            [self.latent.kv_lora_rank, self.latent.qk_rope_head_dim], dim=-1
        )
        latent, rotated = self.kv_norm(latent)[:, :, None], rotated[:, :, None]  # (B, L, 1, R), (B, L, 1, P)
        if rotation is not None:
            q, rotated = self._rotate(q, rotated, rotation)
        if cache is not None:
            latent, rotated = cache.append(latent, rotated)
        is_absorbed = is_absorbed_cheaper(self.latent, q.shape[1], latent.shape[1])
        attend = self.attend_absorbed if is_absorbed else self.attend_expanded
        return router("out", self.out, attend(q, latent, rotated, plan).flatten(2))

    def attend_expanded(self, q: Tensor, latent: Tensor, rotated: Tensor, plan: AttentionPlan) -> Tensor:
        """Attend from q (B, L, H, N + P) to latents (B, K, 1, R) and rotated keys (B, K, 1, P): (B, L, H, V)."""
        heads = self.kv_up(latent[:, :, 0]).unflatten(-1, (self.config.heads, -1))  # (B, K, H, N + V)
        k, v = heads.split([self.latent.qk_nope_head_dim, self.latent.v_head_dim], dim=-1)
        k = torch.cat([k, rotated.expand(-1, -1, self.config.heads, -1)], dim=-1)
        return compute_attention(q * (self._scale * q.shape[-1] ** 0.5), k, v, plan)  # backends divide by this root

    def attend_absorbed(self, q: Tensor, latent: Tensor, rotated: Tensor, plan: AttentionPlan) -> Tensor:
        """Compute the same as `attend_expanded` without keys and values of the heads."""
        weight = self.kv_up.weight.unflatten(0, (self.config.heads, -1))  # (H, N + V, R)
        to_key, to_value = weight.split([self.latent.qk_nope_head_dim, self.latent.v_head_dim], dim=1)
        plain, turned = q.split([self.latent.qk_nope_head_dim, self.latent.qk_rope_head_dim], dim=-1)
        plain = torch.einsum("blhn,hnr->blhr", plain, to_key)
        (B, L, H, _), K = q.shape, latent.shape[1]
        queries = torch.cat([plain, turned], dim=-1).flatten(1, 2).float() * self._scale  # (B, L·H, R + P)
        keys = torch.cat([latent, rotated], dim=-1)[:, :, 0].float()  # (B, K, R + P)
        scores = (queries @ keys.mT).view(B, L, H, K)
        if plan.causal or not plan.is_maskless:
            mask = plan.expand_rows(B, L, K).mask(L, K, q.device).transpose(1, 2)  # (B or 1, L, 1, K)
            weights = scores.masked_fill(~mask, -torch.inf).softmax(-1).masked_fill(~mask.any(-1, keepdim=True), 0.0)
        else:
            weights = scores.softmax(-1)
        attended = (weights.flatten(1, 2) @ latent[:, :, 0].float()).view(B, L, H, -1).to(q.dtype)  # (B, L, H, R)
        return torch.einsum("blhr,hvr->blhv", attended, to_value)

    @property
    def _scale(self) -> float:
        return (self.config.query_pre_attn_scalar or self.latent.qk_head_dim) ** -0.5

    def _project_queries(self, x: Tensor) -> Tensor:
        if self.q_down is not None and self.q_norm is not None:
            x = self.q_norm(self.q_down(x))
        return self.q(x).unflatten(-1, (self.config.heads, -1))

    def _rotate(self, q: Tensor, rotated: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        P = self.latent.qk_rope_head_dim
        if 2 * rotation.cos.shape[-1] > P:
            raise ConfigError(
                f"rotary positions rotate {2 * rotation.cos.shape[-1]} channels, but latent attention has {P} for them",
                "set rotary.head_dim to qk_rope_head_dim",
            )
        plain, turned = q.split([self.latent.qk_nope_head_dim, P], dim=-1)
        q = torch.cat([plain, apply_rotation(turned, rotation)], dim=-1)
        if rotation.query_scale is not None:
            q = q * rotation.query_scale[..., None, None].to(q.dtype)
        return q, apply_rotation(rotated, rotation)
