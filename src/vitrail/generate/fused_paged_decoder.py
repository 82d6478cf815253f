"""Decoder passes over a paged cache with few kernel launches: matrix products, and one kernel between two of them.

N tokens, W width, H heads, G key/value heads, D head width
"""

from typing import Any

import torch
from torch import Tensor, nn

from vitrail.backbones.decoder import Decoder
from vitrail.nn import GatedMLPConfig, PagedPass
from vitrail.nn.kernels import HAS_TRITON
from vitrail.nn.paged_attention import KERNEL_DTYPES
from vitrail.nn.rotary_embedding import DynamicNTKScaling, LongRoPEScaling, Rotation


class FusedPagedDecoder:
    """Run a decoder of Llama's or Qwen's shape on embeddings (N, W). It equals `Decoder.forward_embeddings`."""

    @staticmethod
    def supports(model: Decoder) -> bool:
        """Whether the kernels implement the blocks of this decoder. The device is not checked."""
        config, block, rotary = model.config, model.config.block, model.config.rotary
        attention = block.attention
        channels = attention.resolve_head_dim(block.width)
        return (
            HAS_TRITON
            and model.embed.weight.dtype in KERNEL_DTYPES
            and block.branches == ("self", "mlp")
            and (block.norm, block.norm_position, block.layer_scale, block.gated) == ("rms", "before", None, False)
            and isinstance(block.mlp, GatedMLPConfig)
            and block.mlp.activation == "silu"
            and block.mlp.inner_norm is None
            and not config.dense_layers
            and attention.inner_norm is None
            and attention.qk_norm in (None, "rms")
            and attention.qk_norm_over == "head"
            and attention.query_pre_attn_scalar is attention.logit_softcap is None
            and config.sliding_window is config.linear_attention is None
            and not (attention.output_gate or attention.share_kv or attention.v_norm)
            and not block.output_scale
            and not config.learned_positions
            and channels in (16, 32, 64, 128, 256)
            and rotary.num_rotated_channels == channels
            and rotary.query_scaling is None
            and not isinstance(rotary.scaling, DynamicNTKScaling | LongRoPEScaling)
        )

    def __init__(self, model: Decoder):
        self.model = model

    @property
    def has_plain_layers(self) -> bool:
        """Whether all layers are plain: matrix-vector kernels use the weights without calling the layers."""
        layers = (layer for layer in self.model.blocks.modules() if isinstance(layer, nn.Linear))
        return self.model.config.block.attention.bias != "all_but_k" and all(type(one) is nn.Linear for one in layers)

    @torch.no_grad()
    def __call__(self, embeds: Tensor, positions: Tensor, batch: PagedPass) -> Tensor:
        """Process tokens (N, W) at positions (N,) or (N, 3). Returns hidden states (N, W)."""
        from vitrail.nn.kernels.token_kernels import add_rms_norm, multiply_silu

        if len(embeds) == 1 and batch.tiles is None and self.has_plain_layers:
            return self._run_one_token(embeds[0], positions, batch)
        model = self.model
        config = model.config.block
        rotation = model.rotary(positions[None])
        residual = embeds.clone()
        y: Tensor | None = None
        blocks: Any = model.blocks
        for i, block in enumerate(blocks):
            own, mlp = block.branches["self"], block.branches["mlp"]
            if y is None:
                x = add_rms_norm(residual, own.norm.weight, config.eps)
            else:
                x = add_rms_norm(y, own.norm.weight, config.eps, residual)
            attended = self._attend(i, own.op, own.op._qkv(x), rotation, batch)
            x = add_rms_norm(own.op.out(attended), mlp.norm.weight, config.eps, residual)
            y = mlp.op.down(multiply_silu(mlp.op.gate_up(x)))
        assert y is not None
        norm: Any = model.norm
        return add_rms_norm(y, norm.weight, config.eps, residual)

    def _attend(self, layer: int, op: Any, qkv: Tensor, rotation: Rotation, batch: PagedPass) -> Tensor:
        """Rotate, write keys and values, and attend: qkv (N, (H + 2G)·D) → (N, H·D)."""
        from vitrail.nn.kernels.paged_attention_triton import attend_paged
        from vitrail.nn.kernels.token_kernels import rotate_and_write

        cache, attention = batch.cache, self.model.config.block.attention
        places = {"tables": batch.tables, "slots": batch.slots, "token_rows": batch.token_rows}
        q = rotate_and_write(
            qkv,
            cache.k[layer],
            cache.v[layer],
            attention.heads,
            cos=rotation.cos[0],
            sin=rotation.sin[0],
            adjacent=rotation.pairing == "adjacent",
            norms=(op.q_norm.weight, op.k_norm.weight) if attention.qk_norm else None,
            eps=attention.eps,
            **places,
        )
        attended = attend_paged(
            q,
            cache.k[layer],
            cache.v[layer],
            **places,
            tiles=batch.tiles,
            tile_tokens=batch.tile_tokens,
            splits=batch.splits,
        )
        return attended.flatten(1)

    def _run_one_token(self, x: Tensor, positions: Tensor, batch: PagedPass) -> Tensor:
        """Process one token (W,) with matrix-vector kernels, which read the weights faster than matrix products."""
        from vitrail.nn.kernels.decode_kernels import compute_matvec
        from vitrail.nn.kernels.token_kernels import add_rms_norm

        eps, rotation = self.model.config.block.eps, self.model.rotary(positions[None])
        x, y = x.clone(), torch.empty_like(x)
        blocks: Any = self.model.blocks
        for i, block in enumerate(blocks):
            own, mlp = block.branches["self"], block.branches["mlp"]
            op, up, down = own.op, mlp.op.gate_up, mlp.op.down
            qkv = x.new_empty(op.qkv.out_features)
            compute_matvec(x, op.qkv.weight, qkv, bias=op.qkv.bias, norm=own.norm.weight, eps=eps)
            attended = self._attend(i, op, qkv[None], rotation, batch)[0]
            compute_matvec(attended, op.out.weight, y, bias=op.out.bias, residual=x)
            hidden = x.new_empty(down.in_features)
            compute_matvec(y, up.weight, hidden, bias=up.bias, norm=mlp.norm.weight, eps=eps, gated=True)
            compute_matvec(hidden, down.weight, x, bias=down.bias, residual=y)
        norm: Any = self.model.norm
        return add_rms_norm(x[None], norm.weight, eps)
