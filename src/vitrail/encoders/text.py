"""Text towers of CLIP (causal) and SigLIP (reading both ways).

B batch, L tokens, D width
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from vitrail.config import Config
from vitrail.encoders.depth import run_blocks
from vitrail.errors import ConfigError, TextError
from vitrail.nn import Block, BlockConfig, Plan, Work, cost
from vitrail.nn.learned import small, weigh
from vitrail.nn.norms import make_norm
from vitrail.processing.text import Tokenizer


class TextConfig(Config):
    """`pool` takes the state at the first `eos` (CLIP), at the largest id (the same in CLIP's first vocabulary, and
    still what its older checkpoints are read by), or at the last token, be it padding (SigLIP).

    `head` is the width of a linear layer, with bias, for the pooled vector (SigLIP); 0 for none.
    """

    vocab: int
    layers: int
    block: BlockConfig
    context: int = 77
    causal: bool = True
    pool: Literal["eos", "largest", "last"] = "eos"
    eos: int | None = None
    head: int = 0

    @property
    def pooled(self) -> int:
        """Width of what `pool` gives."""
        return self.head or self.block.width

    def __post_init__(self) -> None:
        if self.block.chain != ("self", "mlp"):
            raise ConfigError(f"a text tower's block is self, mlp, not {', '.join(self.block.chain)}")
        if (self.pool == "eos") != (self.eos is not None):
            raise ConfigError(f"pool {self.pool!r} and eos {self.eos} do not go together", "give eos for pool 'eos'")


class TextTower(nn.Module):
    """ids (B, L) → states (B, L, D)."""

    def __init__(self, config: TextConfig):
        super().__init__()
        self.config = config
        block, width = config.block, config.block.width
        self.embed = nn.Embedding(config.vocab, width)
        self.positions = small(config.context, width)
        self.blocks = nn.ModuleList([Block(block) for _ in range(config.layers)])
        self.norm = make_norm(block.norm, width, block.eps)
        self.head = nn.Linear(width, config.head) if config.head else None
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, ids: Tensor, *, layer: int | None = None) -> Tensor:
        """(B, L, D), from `layer` (see `depth_of`) without the last norm, or from the end with it."""
        L, limit = ids.shape[1], self.config.context
        if L > limit:
            raise TextError(f"{L} tokens do not fit a text tower of {limit}", f"cut the text to {limit} tokens")
        x = self.embed(ids) + self.positions[:L]
        x = run_blocks(self.blocks, x, layer, plan=Plan(causal=self.config.causal))
        return self.norm(x) if layer is None else x

    def pool(self, ids: Tensor) -> Tensor:
        """One vector a text, (B, D) or (B, head)."""
        pooled = self(ids)[torch.arange(len(ids), device=ids.device), self._place(ids)]
        return pooled if self.head is None else self.head(pooled)

    def _place(self, ids: Tensor) -> Tensor:
        """(B,) the token to pool at."""
        match self.config.pool:
            case "last":
                return ids.new_full((len(ids),), ids.shape[1] - 1)
            case "largest":
                return ids.argmax(-1)
            case "eos":
                assert self.config.eos is not None
                ends = ids.eq(self.config.eos)
                if not ids.is_meta and not torch.compiler.is_compiling():
                    _all_end(ends, self.config.eos)
                return ends.int().argmax(-1)

    def work(self, batch: int = 1, length: int | None = None) -> Work:
        """What `cost` needs to know of so many texts, as long as the tower reads unless told."""
        length = length or self.config.context
        return Work.causal(length, batch) if self.config.causal else Work.full(length, batch)


class Frame(NamedTuple):
    """What is written around a text, and what fills it up."""

    front: tuple[int, ...]
    back: tuple[int, ...]
    fill: int


def frame(tokenizer: Tokenizer, config: TextConfig) -> Frame:
    """How a tower's texts are written: with the tokenizer's specials, and with an end unless the last place is what is
    pooled. Padding must not be taken for the end where that is the largest id."""
    end = config.eos if config.eos is not None else tokenizer.eos
    inner, outer = tokenizer.encode("a"), tokenizer.encode("a", specials=True)
    at = next(i for i in range(len(outer)) if outer[i : i + len(inner)] == inner)
    front, back = tuple(outer[:at]), tuple(outer[at + len(inner) :])
    if config.pool != "last" and end is not None and back[-1:] != (end,):
        back = (*back, end)
    fill = tokenizer.pad if tokenizer.pad is not None and config.pool != "largest" else end if end is not None else 0
    return Frame(front, back, fill)


def _all_end(ends: Tensor, eos: int) -> None:
    endless = (~ends.any(-1)).nonzero()
    if len(endless):
        raise TextError(
            f"text {int(endless[0])} has no end token ({eos})", "cut long texts so that their end token stays"
        )


@cost.flops.register
def _(module: TextTower, work: Work) -> int:
    """Of `tower(ids)`; the head reads one vector a text and is counted where it is used."""
    return cost.flops(module.blocks, work)


@cost.bytes.register
def _(module: TextTower, work: Work) -> cost.Bytes:
    return cost.sum_bytes(module, work) + cost.Bytes(read=-weigh(module.head))
