"""One decoder that is Llama 2 and 3, SmolLM2, Qwen2 and Qwen3, dense or with experts, and OPT, by config alone.

B batch, L tokens, V vocabulary, W width
"""

import torch
from torch import Tensor, nn

from vitrail.backbones.fusion import DeepStackConfig, Fusion, Pictures, PrefixConfig, Sight, make_fusion
from vitrail.config import Config
from vitrail.errors import ConfigError
from vitrail.nn import Block, BlockConfig, KVCache, MLPConfig, Plan, Rotary, RotaryConfig, Work, cost
from vitrail.nn.norms import make_norm


class DecoderConfig(Config):
    """`tied`: the head is the embedding. `dense` layers have `dense_mlp` instead of the block's (experts') MLP.

    `context` is how many tokens the model was made for; it is recorded, not enforced. `fusion` is how pictures reach
    the layers other than as tokens. `extra` ids beyond the vocabulary can be read and are never said: the embedding has
    rows for them, the head has none (Llama-3.2-V's mark of a picture). `learned` positions are a table of so many rows,
    added to what is read; its last `context` rows are those of tokens, and further tokens are refused (OPT, which turns
    nothing, has two rows before them).
    """

    vocab: int
    layers: int
    block: BlockConfig
    rotary: RotaryConfig
    tied: bool = False
    context: int = 2048
    dense: tuple[int, ...] = ()
    dense_mlp: MLPConfig | None = None
    fusion: Fusion = PrefixConfig()
    extra: int = 0
    learned: int = 0

    def __post_init__(self) -> None:
        channels = self.block.attention.channels(self.block.width)
        if self.rotary.head_dim != channels:
            raise ConfigError(
                f"rotary positions for heads of {self.rotary.head_dim} channels do not fit heads of {channels}",
                f"set rotary.head_dim to {channels}",
            )
        if "self" not in self.block.chain:
            raise ConfigError(f"a decoder's block needs self-attention, not {self.block.chain}")
        if bool(self.dense) != (self.dense_mlp is not None) or any(not 0 <= i < self.layers for i in self.dense):
            raise ConfigError(
                f"dense layers {self.dense} and dense_mlp do not fit {self.layers} layers",
                "give both, with layers counted from 0, or neither",
            )
        if self.extra < 0 or (self.extra and self.tied):
            raise ConfigError(
                f"{self.extra} extra ids of a {'tied' if self.tied else 'plain'} decoder",
                "give none or more, and an embedding that is not the head",
            )
        if self.learned and (self.learned < self.context or self.rotary.layout != "1d"):
            raise ConfigError(
                f"{self.learned} learned positions for {self.context} tokens, rotary layout {self.rotary.layout!r}",
                "give a row for every token of the context, and positions of one axis",
            )
        self.fusion.check(self.layers, self.block)

    def block_at(self, layer: int) -> BlockConfig:
        if layer in self.dense and self.dense_mlp is not None:
            return self.block.with_(mlp=self.dense_mlp)
        return self.block


class Decoder(nn.Module):
    """ids (B, L) → logits (B, L, V)."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.config = config
        width = config.block.width
        self.embed = nn.Embedding(config.vocab + config.extra, width)
        self.blocks = nn.ModuleList([Block(config.block_at(i)) for i in range(config.layers)])
        self.norm = make_norm(config.block.norm, width, config.block.eps)
        self.head = None if config.tied else nn.Linear(width, config.vocab, bias=False)
        self.rotary = Rotary(config.rotary)
        self.positions = nn.Embedding(config.learned, width) if config.learned else None
        for table in (self.embed, self.positions):
            if table is not None:
                nn.init.normal_(table.weight, std=0.02)
        self.fuse(config.fusion)

    def fuse(self, fusion: Fusion) -> None:
        """Add a fusion point to the decoder as it is, in place of the one it had. What it adds starts without effect:
        gates closed, experts as copies of the weights that the text has by now."""
        self.config = self.config.with_(fusion=fusion)
        self.fusion = make_fusion(fusion, self.config.block, self.blocks)
        if self.fusion is not None:
            self.fusion.to(self.embed.weight).train(self.training)

    def hidden(
        self,
        ids: Tensor | None = None,
        *,
        embeds: Tensor | None = None,
        positions: Tensor | None = None,
        plan: Plan | None = None,
        cache: KVCache | None = None,
        counts: Tensor | None = None,
        spans: Tensor | None = None,
        pictures: Pictures | None = None,
    ) -> Tensor:
        """What the head reads, (B, L, W), from ids (B, L) or from embeddings (B, L, W).

        Without a plan the tokens follow one another, each seeing its past and what the cache holds. A cache makes its
        own plan: `counts` (B,) says how many of each row's tokens are real, `spans` (B, L) which are read both ways.
        `pictures` are what the fusion point takes; what cross-attention looks at is kept in the cache for later passes.
        """
        if (ids is None) == (embeds is None):
            raise ConfigError("a decoder reads ids or embeddings: give one of the two")
        if cache is not None and plan is not None:
            raise ConfigError("a cache makes its own plan", "give `spans` and `counts` instead of a plan")
        if cache is None and (counts is not None or spans is not None):
            raise ConfigError("counts and spans go with a cache", "without one, put them in the plan")
        x = self.embed(ids) if embeds is None else embeds  # (B, L, W)
        if cache is not None:
            plan = cache.extend(x.shape[1], counts, spans)
        if positions is None:
            positions = torch.arange(x.shape[1], device=x.device)[None] if cache is None else cache.slots
        return self.through(x, positions, Plan(causal=True) if plan is None else plan, cache, pictures)

    def through(
        self,
        x: Tensor,
        positions: Tensor,
        plan: Plan,
        cache: KVCache | None = None,
        pictures: Pictures | None = None,
        asked: Tensor | int | None = None,
    ) -> Tensor:
        """Embeddings (B, L, W) through the blocks and the last norm. Where one token a row is `asked` for, (B,), or all
        from a place on, the last MLP runs for these alone, and they alone come out: (B, 1, W), or (B, L − asked, W)."""
        if self.fusion is None and pictures is not None:
            raise ConfigError("pictures were given to a decoder that has no place for them", "give it a `fusion`")
        rotation = self.rotary(positions)
        if self.positions is not None:
            x = x + self.positions(self._rows(positions, cache))
        if asked is not None and not self.trims:
            raise ConfigError("what lies behind the last attention needs all tokens", "take those asked for afterwards")
        sight = Sight() if self.fusion is None else self.fusion.start(x, pictures, cache)
        x = sight.at(0, x)
        for i, block in enumerate(self.blocks):
            layer = None if cache is None else cache.layer(i)
            only = asked if i == self.config.layers - 1 else None
            x = sight.at(i + 1, block(x, plan, rotation=rotation, cache=layer, route=sight.route(i), asked=only))
        return self.norm(x)

    @property
    def trims(self) -> bool:
        """Whether some tokens can go on alone from the last attention: no fusion has to do with the others there."""
        fusion = self.config.fusion
        stacked = isinstance(fusion, DeepStackConfig) and self.config.layers - 1 not in fusion.at
        return self.config.block.chain == ("self", "mlp") and (stacked or isinstance(fusion, PrefixConfig))

    def _rows(self, positions: Tensor, cache: KVCache | None) -> Tensor:
        """(B, L) of the table of learned positions. In a cached batch rows that have ended are fed on, past the context
        too, and what comes of them is not read: something is wrong only where all rows are past it."""
        end = self.config.context
        if not (positions.is_meta or torch.compiler.is_compiling() or (cache is not None and positions.is_cuda)):
            furthest = positions.amax(1)  # (B,)
            if (furthest.max() if cache is None else furthest.min()) >= end:
                raise ConfigError(
                    f"a token at position {int(furthest.max())} of a decoder that has learned {end} positions",
                    f"give it at most {end} tokens",
                )
        return positions.clamp(max=end - 1) + self.config.learned - end

    def logits(self, hidden: Tensor) -> Tensor:
        """(…, W) → (…, V)"""
        return nn.functional.linear(hidden, self.embed.weight) if self.head is None else self.head(hidden)

    def forward(self, ids: Tensor | None = None, **given) -> Tensor:
        return self.logits(self.hidden(ids, **given))

    def cache(self, batch: int, capacity: int | None = None) -> KVCache:
        """An empty cache that fits this model's layers, type and device."""
        attention, weight = self.config.block.attention, self.embed.weight
        channels = attention.channels(self.config.block.width)
        return KVCache(
            self.config.layers,
            batch,
            attention.groups,
            channels,
            capacity=capacity,
            dtype=weight.dtype,
            device=weight.device,
        )


@cost.flops.register
def _(module: Decoder, work: Work) -> int:
    """A lookup is free; the head works for the tokens whose logits are asked for."""
    asked = work.tokens if work.asked is None else work.asked
    head = module.embed if module.head is None else module.head
    fused = 0 if module.fusion is None else cost.flops(module.fusion, work)
    return cost.flops(module.blocks, work) + fused + 2 * head.weight.numel() * asked


@cost.bytes.register
def _(module: Decoder, work: Work) -> cost.Bytes:
    """A tied table is there once, and read whole: as the head."""
    parts = cost.sum_bytes(module, work)
    lookup = cost.bytes(module.embed, work)
    return parts if module.head is not None else parts + cost.Bytes(read=lookup.weights - lookup.read)
