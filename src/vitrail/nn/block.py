"""Transformer block: a sequence of residual branches.

    ViT, text tower, decoder   self, mlp
    Q-Former                   self, cross, mlp   (post-norm; the cross branch in every second block)
    Qwen3.5                    linear, mlp        (three of four blocks)
    Flamingo, Llama-3.2-V      cross, mlp         (with tanh gates that start at zero)
    Perceiver resampler        joint, mlp         (keys: context, then the latents)

B batch, L tokens, C context tokens, W width
"""

from typing import Literal

import torch
from torch import Tensor, nn

from vitrail.config import Config
from vitrail.errors import ConfigError
from vitrail.nn.attention import Attention, AttentionConfig, LayerRouter, apply_shared_layer
from vitrail.nn.attention_plans import AttentionPlan
from vitrail.nn.gated_delta_net import GatedDeltaNet, GatedDeltaNetConfig
from vitrail.nn.kv_cache import KeyValues, LayerCache
from vitrail.nn.latent_attention import LatentAttention
from vitrail.nn.mlp import MLPConfig, MoEConfig, make_mlp
from vitrail.nn.norms import NormKind, make_norm
from vitrail.nn.paged_attention import PagedLayer
from vitrail.nn.rotary_embedding import Rotation

BranchKind = Literal["self", "linear", "cross", "joint", "mlp"]


class BlockConfig(Config):
    """Block settings.

    branches       kinds of the residual branches, in order
    norm_position  "before" each branch (pre-norm, as in GPT-2), "after" the residual (post-norm, as in BERT), "both"
                   before and after each branch (Gemma 2), or of the "output" of each branch only (OLMo 2)
    layer_scale    initial value of a learned scale per channel of each branch (DINOv2); None for none
    gated          multiply each branch by tanh of a learned number that starts at zero, so that the block starts as the
                   identity; "channels" for one number per channel (Idefics)
    context_width  width of the cross-attention context; None for `width`
    output_scale   multiply the output of the block by a stored number, which is not trained (Gemma 4)
    linear_attention  settings of the branch `linear`, a gated delta net
    """

    width: int
    attention: AttentionConfig
    mlp: MLPConfig
    branches: tuple[BranchKind, ...] = ("self", "mlp")
    norm: NormKind = "layer"
    eps: float = 1e-6
    norm_position: Literal["before", "after", "both", "output"] = "before"
    layer_scale: float | None = None
    gated: bool | Literal["channels"] = False
    context_width: int | None = None
    output_scale: bool = False
    linear_attention: GatedDeltaNetConfig | None = None

    def __post_init__(self) -> None:
        if ("linear" in self.branches) != (self.linear_attention is not None):
            raise ConfigError(
                f"block branches are {self.branches}, with linear_attention {self.linear_attention}",
                "give linear_attention if and only if there is a branch linear",
            )
        if not self.branches or len(set(self.branches)) != len(self.branches):
            raise ConfigError(f"block branches are {self.branches}", "name at least one branch, and each only once")
        if len({"self", "joint", "linear"} & set(self.branches)) > 1:
            raise ConfigError(
                f"branches {self.branches} attend to the tokens twice", "use self and cross, or joint or linear alone"
            )
        if self.gated and self.layer_scale is not None:
            raise ConfigError("a block has both gated and layer_scale", "set only one of them")
        self.attention.resolve_head_dim(self.width)  # raises if the heads do not divide the width


class ResidualBranch(nn.Module):
    """Residual branch, attention or MLP: x + scale · op(norm(x)), norm(x + scale · op(x)), x + norm(op(norm(x))), or
    x + scale · norm(op(x)).
    """

    def __init__(self, config: BlockConfig, kind: BranchKind):
        super().__init__()
        width = config.width
        self.kind, self.norm_position = kind, config.norm_position
        has_norm = kind != "mlp" or not isinstance(config.mlp, MoEConfig) or config.mlp.norm is None
        self.norm = make_norm(config.norm, width, config.eps) if has_norm else nn.Identity()  # else experts have norms
        self.post_norm = make_norm(config.norm, width, config.eps) if config.norm_position == "both" else None
        # The resampler normalizes its context with separate weights before concatenating it with the latents.
        self.context_norm = make_norm(config.norm, width, config.eps) if kind == "joint" else None
        if kind == "mlp":
            self.op: nn.Module = make_mlp(width, config.mlp)
        elif kind == "linear":
            assert config.linear_attention is not None
            self.op = GatedDeltaNet(width, config.linear_attention)
        elif kind == "self" and config.attention.latent is not None:
            self.op = LatentAttention(width, config.attention)
        else:
            self.op = Attention(width, config.attention, kind, config.context_width)
        self.scale = nn.Parameter(torch.full((width,), config.layer_scale)) if config.layer_scale is not None else None
        self.gate = nn.Parameter(torch.zeros(width if config.gated == "channels" else 1)) if config.gated else None

    def forward(
        self,
        x: Tensor,
        *,
        plan: AttentionPlan | None = None,
        rotation: Rotation | None = None,
        context: Tensor | KeyValues | None = None,
        cache: LayerCache | None = None,
        router: LayerRouter = apply_shared_layer,
    ) -> Tensor:
        if context is not None and self.context_norm is not None:
            context = self.context_norm(context)
        y = x if self.norm_position in ("after", "output") else self.norm(x)
        if self.kind == "mlp":
            y = router("mlp", self.op, y)
        elif self.kind == "linear":
            y = self.op(y, plan=plan, cache=cache, router=router)
        elif isinstance(self.op, LatentAttention):
            y = self.op(y, plan=plan, rotation=rotation, cache=cache, router=router)
        else:
            y = self.op(y, plan=plan, rotation=rotation, context=context, cache=cache, router=router)
        if self.norm_position == "output":
            y = self.norm(y)
        if self.post_norm is not None:
            y = self.post_norm(y)
        if self.scale is not None:
            y = y * self.scale
        if self.gate is not None:
            y = y * self.gate.tanh()
        return self.norm(x + y) if self.norm_position == "after" else x + y


class Block(nn.Module):
    """Transformer block with the branches of its config."""

    output_scale: Tensor | None

    def __init__(self, config: BlockConfig):
        super().__init__()
        self.config = config
        self.branches = nn.ModuleDict({kind: ResidualBranch(config, kind) for kind in config.branches})
        self.register_buffer("output_scale", torch.ones(1) if config.output_scale else None)

    def forward(
        self,
        x: Tensor,
        plan: AttentionPlan | None = None,
        *,
        rotation: Rotation | None = None,
        context: Tensor | KeyValues | None = None,
        context_plan: AttentionPlan | None = None,
        cache: LayerCache | PagedLayer | None = None,
        router: LayerRouter = apply_shared_layer,
        output_index: Tensor | int | None = None,
    ) -> Tensor:
        """Run x (B, L, W) with an optional context (B, C, W′) through all branches. Returns (B, L, W).

        plan          attention plan among the tokens; None for full attention
        context_plan  plan between tokens and context (for `joint`: context + tokens); None for full attention
        router        applies the layers of `self` and `mlp` to the tokens
        output_index  tokens to return: one index per row (B,), or a start index; the MLP runs only for these tokens
        """
        for kind, branch in self.branches.items():
            match kind:
                case "self":
                    x = branch(x, plan=plan or AttentionPlan(), rotation=rotation, cache=cache, router=router)
                case "linear":
                    x = branch(x, plan=plan or AttentionPlan(causal=True), cache=cache, router=router)
                case "cross" | "joint":
                    x = branch(x, plan=context_plan or AttentionPlan(), context=context)
                case _:
                    if isinstance(output_index, int):
                        x = x[:, output_index:]
                    elif output_index is not None:
                        x = x.take_along_dim(output_index[:, None, None], dim=1)
                    x = branch(x, router=router)
        return x if self.output_scale is None else x * self.output_scale
