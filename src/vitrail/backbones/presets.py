"""Configs of published decoders.

`stories15m` is llama2.c's. `perf-1.1b` is not a released model: it is the shape of this repository's benchmarks.

L layers, H heads, G key/value heads
"""

from functools import partial

from vitrail.backbones.decoder import DecoderConfig
from vitrail.nn import AttentionConfig, BlockConfig, GatedMLPConfig, MoEConfig, RotaryConfig
from vitrail.nn.rotary_embedding import Llama3Scaling


def _make_decoder_config(
    width: int,
    layers: int,
    heads: int,
    kv_heads: int,
    intermediate_size: int,
    vocab_size: int,
    tie_word_embeddings: bool,
    context_length: int,
    theta: float,
    *,
    eps: float = 1e-6,
    rope_factor: float | None = None,
    experts: tuple[int, int] | None = None,
    **attention,
) -> DecoderConfig:
    """Make the config of a decoder.

    `rope_factor` is Llama 3's rotary scaling from 8,192 tokens. `experts` are the number of experts and of active
    experts for each token; `intermediate_size` is then that of one expert.
    """
    heads_of = AttentionConfig(heads=heads, kv_heads=kv_heads, eps=eps, **attention)
    mlp = GatedMLPConfig(intermediate_size=intermediate_size)
    if experts is not None:
        mlp = MoEConfig(
            num_experts=experts[0],
            experts_per_token=experts[1],
            intermediate_size=intermediate_size,
            router_aux_loss_coef=0.001,  # of Qwen3's experts
        )
    scaling = None if rope_factor is None else Llama3Scaling(factor=rope_factor, original_length=8192)
    return DecoderConfig(
        vocab_size=vocab_size,
        layers=layers,
        block=BlockConfig(width=width, attention=heads_of, mlp=mlp, norm="rms", eps=eps),
        rotary=RotaryConfig(head_dim=heads_of.resolve_head_dim(width), theta=theta, scaling=scaling),
        tie_word_embeddings=tie_word_embeddings,
        context_length=context_length,
    )


_llama = partial(_make_decoder_config, eps=1e-5)
_qwen2 = partial(_make_decoder_config, bias="qkv")
_qwen3 = partial(_make_decoder_config, qk_norm="rms", head_dim=128)

# fmt: off
DECODER_PRESETS: dict[str, DecoderConfig] = {
    #                         width   L   H   G  hidden    vocab  tied   context  theta
    "stories15m":      _llama(  288,  6,  6,  6,    768,  32_000, True,      256, 1e4),
    "smollm2-135m":    _llama(  576, 30,  9,  3,  1_536,  49_152, True,    8_192, 1e5),
    "smollm2-360m":    _llama(  960, 32, 15,  5,  2_560,  49_152, True,    8_192, 1e5),
    "smollm2-1.7b":    _llama(2_048, 24, 32, 32,  8_192,  49_152, True,    8_192, 1.3e5),
    "perf-1.1b":       _llama(2_048, 16, 32,  8,  8_192,  32_768, False,   2_048, 1e4),
    "tinyllama-1.1b":  _llama(2_048, 22, 32,  4,  5_632,  32_000, False,   2_048, 1e4),
    "llama-2-7b":      _llama(4_096, 32, 32, 32, 11_008,  32_000, False,   4_096, 1e4),
    "llama-2-13b":     _llama(5_120, 40, 40, 40, 13_824,  32_000, False,   4_096, 1e4),
    "llama-2-70b":     _llama(8_192, 80, 64,  8, 28_672,  32_000, False,   4_096, 1e4),
    "llama-3.1-8b":    _llama(4_096, 32, 32,  8, 14_336, 128_256, False, 131_072, 5e5, rope_factor=8.0),
    "llama-3.1-70b":   _llama(8_192, 80, 64,  8, 28_672, 128_256, False, 131_072, 5e5, rope_factor=8.0),
    "llama-3.2-1b":    _llama(2_048, 16, 32,  8,  8_192, 128_256, True,  131_072, 5e5, rope_factor=32.0),
    "llama-3.2-3b":    _llama(3_072, 28, 24,  8,  8_192, 128_256, True,  131_072, 5e5, rope_factor=32.0),
    "qwen2.5-0.5b":    _qwen2(  896, 24, 14,  2,  4_864, 151_936, True,   32_768, 1e6),
    "qwen2.5-1.5b":    _qwen2(1_536, 28, 12,  2,  8_960, 151_936, True,  131_072, 1e6),
    "qwen2.5-7b":      _qwen2(3_584, 28, 28,  4, 18_944, 152_064, False, 131_072, 1e6),
    "qwen2.5-72b":     _qwen2(8_192, 80, 64,  8, 29_568, 152_064, False, 131_072, 1e6, eps=1e-5),
    "qwen3-0.6b":      _qwen3(1_024, 28, 16,  8,  3_072, 151_936, True,   40_960, 1e6),
    "qwen3-1.7b":      _qwen3(2_048, 28, 16,  8,  6_144, 151_936, True,   40_960, 1e6),
    "qwen3-4b":        _qwen3(2_560, 36, 32,  8,  9_728, 151_936, True,   40_960, 1e6),
    "qwen3-8b":        _qwen3(4_096, 36, 32,  8, 12_288, 151_936, False,  40_960, 1e6),
    "qwen3-14b":       _qwen3(5_120, 40, 40,  8, 17_408, 151_936, False,  40_960, 1e6),
    "qwen3-32b":       _qwen3(5_120, 64, 64,  8, 25_600, 151_936, False,  40_960, 1e6),
    "qwen3-30b-a3b":   _qwen3(2_048, 48, 32,  4,    768, 151_936, False,  40_960, 1e6, experts=(128, 8)),
    "qwen3-235b-a22b": _qwen3(4_096, 94, 64,  4,  1_536, 151_936, False,  40_960, 1e6, experts=(128, 8)),
}
# fmt: on
