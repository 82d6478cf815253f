"""The Perceiver resampler (Flamingo, Idefics): a few learned latents look at the picture and at each other.

B batch, N features, D their width, M latents, W width of the soft tokens
"""

from collections.abc import Sequence

from torch import Tensor, nn

from vitrail.connectors.base import Connector, ConnectorConfig, fit, positive
from vitrail.connectors.grids import Laid
from vitrail.nn import AttentionConfig, Block, BlockConfig, PlainConfig, Work, cost
from vitrail.nn.learned import small
from vitrail.nn.mlp import Activation
from vitrail.nn.norms import Norm, make_norm


class ResamplerConfig(ConnectorConfig, tag="resampler", tag_field="kind"):
    """Blocks as wide as the features, whose latents see the features and themselves; nothing in them has a bias.

    `hidden` is that of the MLPs, 4·D unless given. A linear layer follows where `gives` is not `reads`.
    """

    latents: int = 64
    layers: int = 6
    heads: int = 16
    head_dim: int | None = None
    hidden: int | None = None
    activation: Activation = "gelu"
    qk_norm: Norm | None = None
    eps: float = 1e-5

    def __post_init__(self) -> None:
        positive(self, "reads", "gives", "latents", "layers", *(["hidden"] if self.hidden is not None else []))
        self.block()  # refuses a width that the heads do not divide

    def block(self) -> BlockConfig:
        return BlockConfig(
            width=self.reads,
            attention=AttentionConfig(heads=self.heads, head_dim=self.head_dim, qk_norm=self.qk_norm, eps=self.eps),
            mlp=PlainConfig(hidden=self.hidden or 4 * self.reads, activation=self.activation, bias=False),
            chain=("joint", "mlp"),
            eps=self.eps,
        )

    def tokens(self, laid: Laid) -> int:
        return self.latents


class Resampler(Connector[ResamplerConfig]):
    Config = ResamplerConfig

    def __init__(self, config: ResamplerConfig):
        super().__init__(config)
        self.latents = small(config.latents, config.reads)
        self.blocks = nn.ModuleList([Block(config.block()) for _ in range(config.layers)])
        self.norm = make_norm("layer", config.reads, config.eps)
        self.fit = fit(config.reads, config.gives)

    def forward(self, features: Tensor, laid: Laid | Sequence[Laid] | None = None) -> Tensor:
        """(B, N, D) → (B, M, W)"""
        M = self.config.latents
        plan = self.looking(features, self.rows(features, laid), M, own=M)
        x = self.latents.expand(len(features), -1, -1)
        for block in self.blocks:
            x = block(x, context=features, context_plan=plan)
        return self.fit(self.norm(x))

    def work(self, laid: Laid, batch: int = 1) -> Work:
        """A latent sees the latents too."""
        work = super().work(laid, batch)
        return work.with_(context_pairs=work.context_pairs + work.pairs)


@cost.flops.register
def _(module: Resampler, work: Work) -> int:
    return cost.flops(module.blocks, work) + cost.flops(module.fit, work)
