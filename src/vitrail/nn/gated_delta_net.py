"""Gated delta net: linear attention with a state of fixed size instead of keys and values (Qwen3-Next, Qwen3.5).

Every value head has a state S (K, V), which maps keys to values. Each token forgets a part of it, replaces the value
that the state has for the token's key, and reads the value of its query:

    S ← decay · S,   S ← S + rate · k (v − kᵀS),   output = qᵀS

Queries, keys and values first pass a short causal convolution. `apply_delta_rule` computes the rule in chunks of
tokens, by matrix products.

B batch, L tokens, W width, H value heads, K key width, V value width, C convolved channels, T tokens of a chunk
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence, unpad_sequence

from vitrail.config import Config, PositiveInt
from vitrail.errors import ConfigError
from vitrail.nn.attention import LayerRouter, apply_shared_layer
from vitrail.nn.attention_plans import AttentionPlan
from vitrail.nn.kv_cache import LayerCache, RecurrentState
from vitrail.nn.mlp import Activation, apply_activation

CHUNK_LENGTH = 64
NORM_EPS = 1e-6  # of the lengths of queries and keys


class GatedDeltaNetConfig(Config):
    """Settings of a gated delta net.

    key_heads    heads of queries and keys; each serves value_heads / key_heads value heads
    value_heads  heads of values, each with a state
    key_dim      width of a key
    value_dim    width of a value
    kernel_size  tokens that the convolution spans
    activation   activation after the convolution
    eps          eps of the norm of the outputs
    """

    key_heads: PositiveInt
    value_heads: PositiveInt
    key_dim: PositiveInt = 128
    value_dim: PositiveInt = 128
    kernel_size: PositiveInt = 4
    activation: Activation = "silu"
    eps: float = 1e-6

    def __post_init__(self) -> None:
        if self.value_heads % self.key_heads:
            raise ConfigError(
                f"{self.value_heads} value heads do not divide into groups for {self.key_heads} key heads",
                "make key_heads a divisor of value_heads",
            )

    @property
    def num_channels(self) -> int:
        """Channels of queries, keys and values, which the convolution reads."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


class GatedDeltaNet(nn.Module):
    """Causal token mixer with a recurrent state."""

    def __init__(self, width: int, config: GatedDeltaNetConfig):
        super().__init__()
        self.config = config
        H, inner = config.value_heads, config.value_heads * config.value_dim
        self.qkv = nn.Linear(width, config.num_channels, bias=False)
        self.gate = nn.Linear(width, inner, bias=False)
        self.rate = nn.Linear(width, H, bias=False)
        self.decay = nn.Linear(width, H, bias=False)
        self.decay_bias = nn.Parameter(torch.ones(H))
        self.log_decay = nn.Parameter(torch.empty(H).uniform_(0.01, 16).log())
        self.kernel = nn.Parameter(torch.empty(config.num_channels, config.kernel_size))
        bound = config.kernel_size**-0.5
        nn.init.uniform_(self.kernel, -bound, bound)
        self.norm = nn.RMSNorm(config.value_dim, eps=config.eps)
        self.out = nn.Linear(inner, width, bias=False)

    def forward(
        self,
        x: Tensor,
        plan: AttentionPlan,
        *,
        cache: LayerCache | None = None,
        router: LayerRouter = apply_shared_layer,
    ) -> Tensor:
        """Mix the tokens x (B, L, W) of each segment of the plan, or those after the cached ones. Returns (B, L, W)."""
        self._check_plan(plan, cache)
        qkv = router("qkv", self.qkv, x)  # (B, L, C)
        rate = self.rate(x).float().sigmoid()  # (B, L, H)
        log_decay = -self.log_decay.float().exp() * F.softplus(self.decay(x).float() + self.decay_bias)  # (B, L, H)
        if cache is not None:
            values = self._continue(qkv, rate, log_decay, cache)
        elif plan.segments is None:
            values, _ = self._mix(self._convolve(qkv), rate, log_decay, None)
        else:
            values = self._mix_segments(qkv, rate, log_decay, plan)
        gate = apply_activation(self.gate(x).float().view_as(values), "silu")  # (B, L, H, V)
        return router("out", self.out, (self.norm(values) * gate).to(x.dtype).flatten(2))

    def _check_plan(self, plan: AttentionPlan, cache: LayerCache | None) -> None:
        if plan.spans is not None or plan.window is not None or plan.shares_segment_zero:
            raise ConfigError(
                "linear attention is causal: it has no bidirectional spans, no sliding window and no questions that "
                "share an image",
                "use a decoder with attention, or one question per row and causal images",
            )
        if cache is None and not plan.causal:
            raise ConfigError("linear attention is causal, but the plan is not", "use a causal plan")
        if plan.segments is not None and (cache is not None or plan.segment_lengths is None):
            raise ConfigError(
                "linear attention needs contiguous segments, and one segment per row with a cache",
                "pack each sample in one piece",
            )

    def _mix_segments(self, qkv: Tensor, rate: Tensor, log_decay: Tensor, plan: AttentionPlan) -> Tensor:
        """Mix each segment of packed rows on its own."""
        B, L = qkv.shape[:2]
        lengths = plan.expand_rows(B, L, L).segment_lengths
        assert lengths is not None

        def split(x: Tensor) -> Tensor:
            return pad_sequence(list(x.flatten(0, 1).split(lengths)), batch_first=True)

        values, _ = self._mix(self._convolve(split(qkv)), split(rate), split(log_decay), None)
        rows = unpad_sequence(values, torch.tensor(lengths), batch_first=True)
        return torch.cat(rows).unflatten(0, (B, L))

    def _continue(self, qkv: Tensor, rate: Tensor, log_decay: Tensor, cache: LayerCache) -> Tensor:
        """Mix the new tokens of a cache, and update its state."""
        (B, L, C), past, before = qkv.shape, self.config.kernel_size - 1, cache.state
        earlier = qkv.new_zeros(B, past, C) if before is None else before.inputs.to(qkv.dtype)
        if (counts := cache.counts) is not None:  # padding does not change the state
            valid = (torch.arange(L, device=qkv.device) < counts.to(qkv.device)[:, None])[..., None]
            rate, log_decay = rate * valid, log_decay * valid
        inputs = torch.cat([earlier, qkv], dim=1)  # (B, past + L, C)
        values, state = self._mix(
            self._convolve(qkv, earlier), rate, log_decay, None if before is None else before.memory
        )
        ends = torch.full((B,), L, device=qkv.device) if counts is None else counts.to(qkv.device)
        last = ends[:, None, None] + torch.arange(past, device=qkv.device)[:, None]  # (B, past, 1)
        cache.write_state(RecurrentState(inputs.take_along_dim(last, dim=1).detach(), state.detach()))
        return values

    def _convolve(self, qkv: Tensor, earlier: Tensor | None = None) -> Tensor:
        """Convolve channels (B, L, C) over tokens. `earlier` (B, kernel_size − 1, C) are the inputs before them."""
        past = self.config.kernel_size - 1
        x = F.pad(qkv, (0, 0, past, 0)) if earlier is None else torch.cat([earlier, qkv], dim=1)
        convolved = F.conv1d(x.mT, self.kernel[:, None].to(x.dtype), groups=len(self.kernel)).mT
        return apply_activation(convolved, self.config.activation)

    def _mix(self, qkv: Tensor, rate: Tensor, log_decay: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """Apply the delta rule to convolved channels (B, L, C). Returns values (B, L, H, V) and the state."""
        config, K = self.config, self.config.key_dim
        keys = config.key_heads * K
        q, k, v = qkv.split([keys, keys, config.value_heads * config.value_dim], dim=-1)
        q, k = (_normalize(x.unflatten(-1, (-1, K)).float()) for x in (q, k))
        group = config.value_heads // config.key_heads
        q, k = (x.repeat_interleave(group, dim=2) for x in (q * K**-0.5, k))
        values, state = apply_delta_rule(
            q, k, v.unflatten(-1, (config.value_heads, -1)).float(), rate, log_decay, state
        )
        return values.to(qkv.dtype), state


def _normalize(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt()


def apply_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, rate: Tensor, log_decay: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Apply the gated delta rule to q and k (B, L, H, K), v (B, L, H, V), rate and log_decay (B, L, H), in float32.

    Returns the outputs (B, L, H, V) and the last state (B, H, K, V).
    """
    (B, L, H, K), V = q.shape, v.shape[-1]
    T = min(CHUNK_LENGTH, L)

    def chunk(x: Tensor) -> Tensor:  # (B, L, H, …) → (chunks, B, H, T, …); padding leaves the state as it is
        x = F.pad(x, (*(0, 0) * (x.ndim - 2), 0, -L % T))
        return x.unflatten(1, (-1, T)).transpose(0, 1).transpose(2, 3)

    q, k, v, rate, log_decay = map(chunk, (q, k, v, rate[..., None], log_decay[..., None]))
    total = log_decay[..., 0].cumsum(-1)  # (chunks, B, H, T): log decay from the start of the chunk
    later = torch.ones(T, T, dtype=torch.bool, device=q.device).triu(1)
    between = (total[..., :, None] - total[..., None, :]).masked_fill(later, -torch.inf).exp()  # (…, T, T)
    # Tokens of a chunk replace values of each other: solve for the values that each of them writes, which are
    # `written` less what the state before the chunk has for their keys.
    system = (k * rate) @ k.mT * between
    right = torch.cat([v * rate, k * rate * total.exp()[..., None]], dim=-1)
    written, lookup = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True).split([V, K], -1)
    within = q @ k.mT * between
    read, write = q * total.exp()[..., None], k * (total[..., -1:] - total).exp()[..., None]
    keep = total[..., -1].exp()[..., None, None]  # (chunks, B, H, 1, 1)
    state = q.new_zeros(B, H, K, V) if state is None else state.to(q)
    outputs = []
    for i in range(len(q)):
        new = written[i] - lookup[i] @ state  # (B, H, T, V)
        outputs.append(read[i] @ state + within[i] @ new)
        state = keep[i] * state + write[i].mT @ new
    return torch.stack(outputs).transpose(2, 3).transpose(0, 1).flatten(1, 2)[:, :L], state
