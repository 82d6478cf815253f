"""Text towers of CLIP (causal) and SigLIP (bidirectional).

B batch, L tokens, D width
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from vitrail.config import Config, LayerCount
from vitrail.encoders.layer_selection import run_blocks
from vitrail.errors import ConfigError, TextError
from vitrail.nn import AttentionPlan, Block, BlockConfig, Workload, cost
from vitrail.nn.norms import make_norm
from vitrail.nn.parameters import count_parameter_bytes, make_small_parameter
from vitrail.processing.tokenizer import Tokenizer
from vitrail.registry import MODELS


class TextTowerConfig(Config):
    """Text tower settings.

    pool        token whose state is pooled: "eos" the first `eos_token_id` (CLIP); "largest" the largest id (old CLIP
                checkpoints, equal to eos in the original vocabulary); "last" the last token, also padding (SigLIP)
    head_width  width of a linear layer for the pooled vector; 0 for none
    head_bias   this layer has a bias (SigLIP; CLIP's projection has none)
    """

    vocab_size: int
    layers: LayerCount
    block: BlockConfig
    context_length: int = 77
    causal: bool = True
    pool: Literal["eos", "largest", "last"] = "eos"
    eos_token_id: int | None = None
    head_width: int = 0
    head_bias: bool = True

    @property
    def pooled_width(self) -> int:
        """Width of the output of `forward_pooled`."""
        return self.head_width or self.block.width

    def __post_init__(self) -> None:
        if self.block.branches != ("self", "mlp"):
            raise ConfigError(f"a text tower block needs branches self, mlp, not {', '.join(self.block.branches)}")
        if (self.pool == "eos") != (self.eos_token_id is not None):
            raise ConfigError(
                f"pool is {self.pool!r} and eos_token_id is {self.eos_token_id}",
                "set eos_token_id for pool 'eos', and only for it",
            )


@MODELS.register("text")
class TextTower(nn.Module):
    """Text tower: token ids (B, L) → hidden states (B, L, D)."""

    Config = TextTowerConfig

    def __init__(self, config: TextTowerConfig):
        super().__init__()
        self.config = config
        block, width = config.block, config.block.width
        self.embed = nn.Embedding(config.vocab_size, width)
        self.positions = make_small_parameter(config.context_length, width)
        self.blocks = nn.ModuleList([Block(block) for _ in range(config.layers)])
        self.norm = make_norm(block.norm, width, block.eps)
        self.head = nn.Linear(width, config.head_width, bias=config.head_bias) if config.head_width else None
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, ids: Tensor, *, layer: int | None = None) -> Tensor:
        """Return hidden states (B, L, D) of `layer` (see `resolve_depth`), or of the last layer with the last norm."""
        L, limit = ids.shape[1], self.config.context_length
        if L > limit:
            raise TextError(f"{L} tokens exceed context_length {limit}", f"truncate the text to {limit} tokens")
        x = self.embed(ids) + self.positions[:L]
        x = run_blocks(self.blocks, x, layer, plan=AttentionPlan(causal=self.config.causal))
        return self.norm(x) if layer is None else x

    def forward_pooled(self, ids: Tensor) -> Tensor:
        """Return one vector per text, (B, D) or (B, head_width)."""
        pooled = self(ids)[torch.arange(len(ids), device=ids.device), self._pooled_index(ids)]
        return pooled if self.head is None else self.head(pooled)

    def _pooled_index(self, ids: Tensor) -> Tensor:
        """Return the index of the pooled token, (B,)."""
        match self.config.pool:
            case "last":
                return ids.new_full((len(ids),), ids.shape[1] - 1)
            case "largest":
                return ids.argmax(-1)
            case "eos":
                assert self.config.eos_token_id is not None
                ends = ids.eq(self.config.eos_token_id)
                if not ids.is_meta and not torch.compiler.is_compiling():
                    _check_end_tokens(ends, self.config.eos_token_id)
                return ends.int().argmax(-1)

    def workload(self, batch_size: int = 1, length: int | None = None) -> Workload:
        """Return the workload of a batch of texts. The default length is the context length."""
        length = length or self.config.context_length
        return (
            Workload.causal_attention(length, batch_size)
            if self.config.causal
            else Workload.full_attention(length, batch_size)
        )


class TextSpecialTokens(NamedTuple):
    """Special tokens before and after a text, and the padding id."""

    prefix: tuple[int, ...]
    suffix: tuple[int, ...]
    padding_id: int


def find_special_tokens(tokenizer: Tokenizer, config: TextTowerConfig) -> TextSpecialTokens:
    """Find the special tokens of a text tower: those of the tokenizer, and an end token unless pool is "last".

    If pool is "largest", padding must not be larger than the end token.
    """
    end = config.eos_token_id if config.eos_token_id is not None else tokenizer.eos_token_id
    inner, outer = tokenizer.encode("a"), tokenizer.encode("a", add_special_tokens=True)
    at = next(i for i in range(len(outer)) if outer[i : i + len(inner)] == inner)
    front, back = tuple(outer[:at]), tuple(outer[at + len(inner) :])
    if config.pool != "last" and end is not None and back[-1:] != (end,):
        back = (*back, end)
    fill = (
        tokenizer.pad_token_id
        if tokenizer.pad_token_id is not None and config.pool != "largest"
        else end
        if end is not None
        else 0
    )
    return TextSpecialTokens(front, back, fill)


def _check_end_tokens(is_end: Tensor, eos: int) -> None:
    missing = (~is_end.any(-1)).nonzero()
    if len(missing):
        raise TextError(f"text {int(missing[0])} has no end token ({eos})", "truncate long texts before the end token")


@cost.count_flops.register
def _(module: TextTower, work: Workload) -> int:
    """FLOPs of `tower(ids)`, without the head, which is counted where it is used."""
    return cost.count_flops(module.blocks, work)


@cost.count_bytes.register
def _(module: TextTower, work: Workload) -> cost.MemoryBytes:
    return cost.sum_child_bytes(module, work) + cost.MemoryBytes(read=-count_parameter_bytes(module.head))
