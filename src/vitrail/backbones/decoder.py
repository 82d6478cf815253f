"""Decoder language model: Llama, Mistral, Gemma, Phi, Qwen, DeepSeek, dense or MoE, and OPT, by config alone.

Shapes: B batch, L tokens, V vocabulary size, W width.
"""

import math
from typing import Literal

import torch
from torch import Tensor, nn

from vitrail.backbones.fusion import (
    DeepStackConfig,
    FusionConfig,
    FusionInputs,
    FusionPass,
    PrefixFusionConfig,
    VisualExpertConfig,
    make_fusion,
)
from vitrail.config import Config, LayerCount
from vitrail.errors import ConfigError
from vitrail.nn import (
    AttentionConfig,
    AttentionPlan,
    Block,
    BlockConfig,
    GatedDeltaNetConfig,
    KVCache,
    MLPConfig,
    RotaryConfig,
    RotaryEmbedding,
    Workload,
    cost,
)
from vitrail.nn.norms import make_norm
from vitrail.nn.paged_attention import PagedKVCache, PagedPass
from vitrail.registry import MODELS

LayerType = Literal["full_attention", "sliding_attention", "linear_attention"]


class DecoderConfig(Config):
    """Config of a `Decoder`.

    tie_word_embeddings  the output head shares the embedding
    context_length       number of tokens that the model is trained for; informative, not enforced
    dense_layers         layers with `dense_mlp` instead of the block's (MoE) MLP
    fusion               how images reach the layers other than as tokens
    extra_embeddings     input-only ids beyond the vocabulary: the embedding has rows for them, the head has not
                         (Llama-3.2-V's image token)
    learned_positions    rows of a learned position embedding; its last `context_length` rows belong to tokens, and more
                         tokens are refused (OPT has two rows before them, and no rotary positions)
    layer_types          attention of the layers, repeated until the last layer; the names are those of transformers
    sliding_window       tokens that a layer with sliding_attention attends to, including the token itself
    sliding_rotary       rotary positions of layers with sliding_attention; None for `rotary` (Gemma 3)
    sliding_spans        bidirectional spans count only in layers with sliding_attention, inside of the window (Gemma 4)
    sliding_attention    attention of layers with sliding_attention; None for the block's (Gemma 4)
    linear_attention     gated delta net of layers with linear_attention (Qwen3.5)
    window_limits_spans  whether the sliding window limits attention inside of bidirectional spans (Gemma 3) or only to
                         earlier tokens (PaliGemma 2)
    scale_embeddings     multiply token embeddings by the square root of the width (Gemma)
    norm_embeddings      normalize the embeddings, instead of the output of the last block (BART)
    logit_softcap        logits x become softcap · tanh(x / softcap) (Gemma 2); None for no cap
    """

    vocab_size: int
    layers: LayerCount
    block: BlockConfig
    rotary: RotaryConfig
    tie_word_embeddings: bool = False
    context_length: int = 2048
    dense_layers: tuple[int, ...] = ()
    dense_mlp: MLPConfig | None = None
    fusion: FusionConfig = PrefixFusionConfig()
    extra_embeddings: int = 0
    learned_positions: int = 0
    layer_types: tuple[LayerType, ...] = ("full_attention",)
    sliding_window: int | None = None
    sliding_rotary: RotaryConfig | None = None
    sliding_spans: bool = False
    sliding_attention: AttentionConfig | None = None
    linear_attention: GatedDeltaNetConfig | None = None
    window_limits_spans: bool = True
    scale_embeddings: bool = False
    norm_embeddings: bool = False
    logit_softcap: float | None = None

    def __post_init__(self) -> None:
        sliding = self.sliding_attention or self.block.attention
        rotaries = [("rotary", self.rotary, self.block.attention)]
        if self.sliding_rotary is not None or self.sliding_attention is not None:
            rotaries.append(("sliding_rotary", self.sliding_rotary or self.rotary, sliding))
        for name, rotary, attention in rotaries:
            channels = attention.resolve_rotary_dim(self.block.width)
            if rotary.head_dim != channels:
                what = "channels" if attention.latent is None else "channels with rotary positions"
                raise ConfigError(
                    f"{name}.head_dim is {rotary.head_dim}, but attention heads have {channels} {what}",
                    f"set {name}.head_dim to {channels}",
                )
        self._check_sliding_window()
        self._check_linear_attention()
        if self.logit_softcap is not None and not self.logit_softcap > 0:
            raise ConfigError(f"logit_softcap is {self.logit_softcap}", "use a number above 0, or none")
        if "self" not in self.block.branches:
            raise ConfigError(
                f"the decoder's block has branches {self.block.branches} without self-attention", "add 'self' to them"
            )
        if bool(self.dense_layers) != (self.dense_mlp is not None) or any(
            not 0 <= i < self.layers for i in self.dense_layers
        ):
            raise ConfigError(
                f"dense_layers {self.dense_layers} and dense_mlp do not match {self.layers} layers",
                "give both, with layers counted from 0, or neither",
            )
        if self.extra_embeddings < 0 or (self.extra_embeddings and self.tie_word_embeddings):
            raise ConfigError(
                f"extra_embeddings is {self.extra_embeddings} with "
                f"{'tied' if self.tie_word_embeddings else 'untied'} embeddings",
                "give 0 or more, and set tie_word_embeddings = false",
            )
        if self.learned_positions and (self.learned_positions < self.context_length or self.rotary.layout != "1d"):
            raise ConfigError(
                f"learned_positions is {self.learned_positions} for {self.context_length} tokens, rotary layout "
                f"{self.rotary.layout!r}",
                "give at least context_length rows, and the rotary layout 1d",
            )
        self.fusion.check_decoder(self.layers, self.block)

    def _check_sliding_window(self) -> None:
        if not 1 <= len(self.layer_types) <= self.layers:
            raise ConfigError(
                f"layer_types has {len(self.layer_types)} entries for {self.layers} layers",
                "give the types of a group of layers that repeats, or of all layers",
            )
        slides = "sliding_attention" in self.layer_types
        if slides != (self.sliding_window is not None) or (self.sliding_window or 1) < 1:
            raise ConfigError(
                f"sliding_window is {self.sliding_window} with the layer_types {', '.join(self.layer_types)}",
                "give the window, 1 or more, if and only if a layer has sliding_attention",
            )
        if self.sliding_attention is not None and not slides:
            raise ConfigError("sliding_attention is given, but no layer has it", "remove it, or change layer_types")
        if self.sliding_rotary is not None and (not slides or self.sliding_rotary.layout != self.rotary.layout):
            raise ConfigError(
                f"sliding_rotary has the layout {self.sliding_rotary.layout!r}, rotary {self.rotary.layout!r}, and the "
                f"layer_types are {', '.join(self.layer_types)}",
                "use one layout, and give sliding_rotary only if a layer has sliding_attention",
            )

    def _check_linear_attention(self) -> None:
        if ("linear_attention" in self.layer_types) != (self.linear_attention is not None):
            raise ConfigError(
                f"linear_attention is {self.linear_attention} with the layer_types {', '.join(self.layer_types)}",
                "give the settings if and only if a layer has linear_attention",
            )
        if self.linear_attention is not None and isinstance(self.fusion, VisualExpertConfig):
            raise ConfigError("visual experts need attention in all layers", "use prefix fusion")

    def has_window(self, layer: int) -> bool:
        """Whether a layer attends to the sliding window only."""
        return self.layer_types[layer % len(self.layer_types)] == "sliding_attention"

    def is_linear(self, layer: int) -> bool:
        """Whether a layer has linear attention."""
        return self.layer_types[layer % len(self.layer_types)] == "linear_attention"

    def block_config(self, layer: int) -> BlockConfig:
        block = self.block
        if self.is_linear(layer):
            branches = tuple("linear" if kind == "self" else kind for kind in block.branches)
            block = block.replace(branches=branches, linear_attention=self.linear_attention)
        if self.has_window(layer) and self.sliding_attention is not None:
            block = block.replace(attention=self.sliding_attention)
        if layer in self.dense_layers and self.dense_mlp is not None:
            block = block.replace(mlp=self.dense_mlp)
        return block


class ScaledEmbedding(nn.Embedding):
    """Embedding multiplied by the square root of its width, rounded to the dtype of the weights."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * torch.tensor(math.sqrt(self.embedding_dim), dtype=self.weight.dtype)


@MODELS.register("decoder")
class Decoder(nn.Module):
    """Decoder language model: ids (B, L) to logits (B, L, V)."""

    Config = DecoderConfig

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.config = config
        width = config.block.width
        embedding = ScaledEmbedding if config.scale_embeddings else nn.Embedding
        self.embed = embedding(config.vocab_size + config.extra_embeddings, width)
        self.blocks = nn.ModuleList([Block(config.block_config(i)) for i in range(config.layers)])
        self.norm = make_norm(config.block.norm, width, config.block.eps)
        self.head = None if config.tie_word_embeddings else nn.Linear(width, config.vocab_size, bias=False)
        self.rotary = RotaryEmbedding(config.rotary)
        self.sliding_rotary = None if config.sliding_rotary is None else RotaryEmbedding(config.sliding_rotary)
        # Layers with attention have keys and values, those with linear attention states: each kind is counted from 0.
        kinds = [config.is_linear(i) for i in range(config.layers)]
        self._cache_layers = [kinds[:i].count(kind) for i, kind in enumerate(kinds)]
        self.positions = nn.Embedding(config.learned_positions, width) if config.learned_positions else None
        for table in (self.embed, self.positions):
            if table is not None:
                nn.init.normal_(table.weight, std=0.02)
        self.add_fusion(config.fusion)

    def add_fusion(self, fusion: FusionConfig) -> None:
        """Replace the fusion point of the decoder.

        The new fusion starts without effect: gates are closed, and visual experts are copies of the current text
        weights.
        """
        self.config = self.config.replace(fusion=fusion)
        self.fusion = make_fusion(fusion, self.config.block, self.blocks)
        if self.fusion is not None:
            self.fusion.to(self.embed.weight).train(self.training)

    def forward_hidden(
        self,
        ids: Tensor | None = None,
        *,
        embeds: Tensor | None = None,
        positions: Tensor | None = None,
        plan: AttentionPlan | None = None,
        cache: KVCache | None = None,
        counts: Tensor | None = None,
        spans: Tensor | None = None,
        fusion_inputs: FusionInputs | None = None,
    ) -> Tensor:
        """Return the hidden states (B, L, W) before the output head, from ids (B, L) or embeddings (B, L, W).

        Without a plan, attention is causal, over the tokens and the cache. A cache makes its own plan: `counts` (B,) is
        the number of valid tokens of each row, `spans` (B, L) marks bidirectional spans. `fusion_inputs` are those of
        the fusion point; the cache keeps cross-attention features for later passes.
        """
        if (ids is None) == (embeds is None):
            raise ConfigError("both or neither of ids and embeds were given", "give one of them")
        if cache is not None and plan is not None:
            raise ConfigError("a plan was given, but a cache makes its own plan", "give `spans` and `counts` instead")
        if cache is None and (counts is not None or spans is not None):
            raise ConfigError("counts and spans need a cache", "put them into the plan")
        x = self.embed(ids) if embeds is None else embeds  # (B, L, W)
        if cache is not None:
            plan = cache.extend(x.shape[1], counts, spans)
        if positions is None:
            positions = torch.arange(x.shape[1], device=x.device)[None] if cache is None else cache.slots
        return self.forward_embeddings(
            x, positions, AttentionPlan(causal=True) if plan is None else plan, cache, fusion_inputs
        )

    def forward_embeddings(
        self,
        embeds: Tensor,
        positions: Tensor,
        plan: AttentionPlan,
        cache: KVCache | PagedPass | None = None,
        fusion_inputs: FusionInputs | None = None,
        output_positions: Tensor | int | None = None,
    ) -> Tensor:
        """Run the blocks and the last norm on embeddings (B, L, W).

        `output_positions` selects outputs: one token for each row (B,) gives (B, 1, W), a start position gives all
        tokens from there. The last MLP then runs for these tokens only.
        """
        if self.fusion is None and fusion_inputs is not None:
            raise ConfigError("fusion_inputs were given, but the decoder has no fusion", "set `fusion` in its config")
        rotation = self.rotary(positions)
        sliding_rotation = rotation
        if self.sliding_rotary is not None:
            sliding_rotation = self.sliding_rotary(positions)
        sliding_plan = self._limit_to_window(plan, embeds.shape[1], cache)
        if self.config.sliding_spans:
            plan = plan.without_spans()
        if self.positions is not None:
            embeds = embeds + self.positions(self._position_rows(positions, cache))
        embeds = self.norm(embeds) if self.config.norm_embeddings else embeds
        if output_positions is not None and not self.can_trim_last_layer:
            raise ConfigError(
                "the last layer of this decoder needs all tokens, so output_positions is not supported",
                "select the outputs afterwards",
            )
        fusion_pass = (
            FusionPass()
            if self.fusion is None
            else self.fusion.start_pass(embeds, fusion_inputs, None if isinstance(cache, PagedPass) else cache)
        )
        embeds = fusion_pass.apply_at(0, embeds)
        for i, block in enumerate(self.blocks):
            layer = None if cache is None else cache.layer(self._cache_layers[i])
            only = output_positions if i == self.config.layers - 1 else None
            block_output = block(
                embeds,
                sliding_plan if self.config.has_window(i) else plan,
                rotation=sliding_rotation if self.config.has_window(i) else rotation,
                cache=layer,
                router=fusion_pass.route(i),
                output_index=only,
            )
            embeds = fusion_pass.apply_at(i + 1, block_output)
        return embeds if self.config.norm_embeddings else self.norm(embeds)

    @property
    def can_trim_last_layer(self) -> bool:
        """Whether the last MLP can run for some tokens only: no fusion needs the others there."""
        fusion = self.config.fusion
        stacked = isinstance(fusion, DeepStackConfig) and self.config.layers - 1 not in fusion.layer_indices
        return self.config.block.branches == ("self", "mlp") and (stacked or isinstance(fusion, PrefixFusionConfig))

    def _limit_to_window(self, plan: AttentionPlan, length: int, cache: KVCache | PagedPass | None) -> AttentionPlan:
        """Return the plan of the layers with a sliding window. The cache keeps the keys before the window too."""
        window = self.config.sliding_window
        if window is None or (length if cache is None else max(length, cache.max_row_length)) <= window:
            return plan
        if isinstance(cache, KVCache) and plan.is_maskless and not plan.causal:  # one token that attends to all
            plan = AttentionPlan(causal=True, query_slots=cache.slots)
        return plan.with_window(window - 1, self.config.window_limits_spans)

    def _position_rows(self, positions: Tensor, cache: KVCache | PagedPass | None) -> Tensor:
        """Return rows (B, L) of the learned position embedding.

        In a cached batch, finished rows are fed further tokens beyond the context, whose outputs are not used. So the
        context is exceeded only if all rows exceed it.
        """
        end = self.config.context_length
        if not (positions.is_meta or torch.compiler.is_compiling() or (cache is not None and positions.is_cuda)):
            furthest = positions.amax(1)  # (B,)
            if (furthest.max() if cache is None else furthest.min()) >= end:
                raise ConfigError(
                    f"a token is at position {int(furthest.max())}, but the decoder has {end} learned positions",
                    f"give at most {end} tokens",
                )
        return positions.clamp(max=end - 1) + self.config.learned_positions - end

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Map hidden states (…, W) to logits (…, V)."""
        logits = nn.functional.linear(hidden, self.embed.weight) if self.head is None else self.head(hidden)
        cap = self.config.logit_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def forward(
        self,
        ids: Tensor | None = None,
        *,
        embeds: Tensor | None = None,
        positions: Tensor | None = None,
        plan: AttentionPlan | None = None,
        cache: KVCache | None = None,
        counts: Tensor | None = None,
        spans: Tensor | None = None,
        fusion_inputs: FusionInputs | None = None,
    ) -> Tensor:
        """Return the logits (B, L, V). The arguments are those of `forward_hidden`."""
        hidden = self.forward_hidden(
            ids,
            embeds=embeds,
            positions=positions,
            plan=plan,
            cache=cache,
            counts=counts,
            spans=spans,
            fusion_inputs=fusion_inputs,
        )
        return self.compute_logits(hidden)

    def make_cache(self, batch_size: int, capacity: int | None = None) -> KVCache:
        """Create an empty KV cache for this model's layers, dtype and device."""
        shapes, weight = self._list_cache_shapes(), self.embed.weight
        return KVCache(shapes, batch_size, capacity=capacity, dtype=weight.dtype, device=weight.device)

    def make_paged_cache(self, num_pages: int, page_size: int) -> PagedKVCache:
        """Create a paged KV cache for this model's layers, dtype and device."""
        weight = self.embed.weight
        return PagedKVCache(self.kv_shapes, num_pages, page_size, dtype=weight.dtype, device=weight.device)

    @property
    def kv_shapes(self) -> list[tuple[int, int]]:
        """Numbers of key/value heads and their width (G, D) of each layer with attention, as a paged cache has them."""
        shapes = self._list_cache_shapes()
        if any(key_width != value_width for _, key_width, value_width in shapes):
            raise ConfigError("a paged cache does not support latent attention", "use a decoder without it")
        return [(heads, width) for heads, width, _ in shapes]

    def _list_cache_shapes(self) -> list[tuple[int, int, int]]:
        config = self.config
        attentions = [config.block_config(i).attention for i in range(config.layers) if not config.is_linear(i)]
        return [attention.cache_shape(config.block.width) for attention in attentions]


@cost.count_flops.register
def _(module: Decoder, work: Workload) -> int:
    """Count blocks and the head for the tokens with logits; the embedding lookup is free."""
    num_logits = work.tokens if work.logit_tokens is None else work.logit_tokens
    head = module.embed if module.head is None else module.head
    fusion_flops = 0 if module.fusion is None else cost.count_flops(module.fusion, work)
    config = module.config
    sliding_work = work if config.sliding_window is None else work.limit_to_window(config.sliding_window)
    full_work = work.replace(attention_pairs=work.attention_pairs - work.span_pairs) if config.sliding_spans else work
    block_flops = sum(
        cost.count_flops(block, sliding_work if config.has_window(i) else full_work)
        for i, block in enumerate(module.blocks)
    )
    return block_flops + fusion_flops + 2 * head.weight.numel() * num_logits


@cost.count_bytes.register
def _(module: Decoder, work: Workload) -> cost.MemoryBytes:
    """Count a tied embedding once, read completely by the head."""
    parts = cost.sum_child_bytes(module, work)
    lookup = cost.count_bytes(module.embed, work)
    return parts if module.head is not None else parts + cost.MemoryBytes(read=lookup.weights - lookup.read)
