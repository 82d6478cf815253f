"""Generation: sampling, text and image generation, world rollouts and CUDA graph capture."""

from vitrail.generate.sampling import GREEDY, SamplingConfig
from vitrail.generate.text_generation import GeneratedText, GeneratedToken, generate_texts, stream_tokens

__all__ = ["GREEDY", "GeneratedText", "GeneratedToken", "SamplingConfig", "generate_texts", "stream_tokens"]
