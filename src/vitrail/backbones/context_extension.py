"""Longer contexts for a decoder: scale its rotary embedding, with or without training afterwards.

LongVA extends the language model first, by a larger base and training on long texts. The longer context then holds for
the tokens of long videos, too.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from vitrail.backbones.decoder import Decoder, DecoderConfig
from vitrail.errors import ConfigError
from vitrail.nn import RotaryConfig, RotaryEmbedding
from vitrail.nn.rotary_embedding import NTKScaling, YaRNScaling

ExtensionMethod = Literal["none", "yarn", "ntk", "base"]
EXTENSION_METHODS: dict[ExtensionMethod, str] = {
    "none": "the positions continue behind those of the training",
    "yarn": "YaRN: low frequencies are interpolated, high ones stay; works without training",
    "ntk": "a larger base, as a scaling; works without training",
    "base": "a larger base, as in LongVA: continue the training on long texts with it",
}


def extend_rotary(config: RotaryConfig, factor: float, trained_length: int, method: ExtensionMethod) -> RotaryConfig:
    """Return a rotary config for a context that is `factor` times `trained_length` positions."""
    if method not in EXTENSION_METHODS:
        raise ConfigError(f"there is no context extension {method!r}", f"choose from {', '.join(EXTENSION_METHODS)}")
    if method == "none" or factor <= 1:
        return config
    if config.scaling is not None:
        raise ConfigError(
            f"the rotary embedding already has {type(config.scaling).__name__}",
            "extend the context of the model as it was before, or use the method none",
        )
    if method == "yarn":
        return config.replace(scaling=YaRNScaling(factor=factor, original_length=trained_length))
    if method == "ntk":
        return config.replace(scaling=NTKScaling(factor=factor))
    channels = config.num_rotated_channels
    return config.replace(theta=config.theta * factor ** (channels / (channels - 2)))


def extend_context(
    config: DecoderConfig, context_length: int, method: ExtensionMethod = "yarn", trained_length: int | None = None
) -> DecoderConfig:
    """Return the config of a decoder for `context_length` tokens.

    `trained_length` are the positions of the training; default: the context length of the config.
    """
    trained = config.context_length if trained_length is None else trained_length
    if context_length < 1 or trained < 1:
        raise ConfigError(f"a context of {context_length} tokens, trained with {trained}", "give at least 1")
    rotary = extend_rotary(config.rotary, context_length / trained, trained, method)
    return config.replace(rotary=rotary, context_length=context_length)


@contextmanager
def use_extended_context(
    decoder: Decoder, context_length: int, method: ExtensionMethod = "yarn", trained_length: int | None = None
) -> Iterator[None]:
    """Run a decoder with an extended context inside the `with` block."""
    config, rotary = decoder.config, decoder.rotary
    extended = extend_context(config, context_length, method, trained_length)
    decoder.config, decoder.rotary = extended, RotaryEmbedding(extended.rotary).to(decoder.embed.weight.device)
    try:
        yield
    finally:
        decoder.config, decoder.rotary = config, rotary
