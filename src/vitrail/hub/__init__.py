"""Load and save: our own format, Hugging Face's, GGUF and llama2.c; safetensors only, nothing executed."""

from vitrail.hub.folders import from_hf, load, save, to_hf, tokenizer

__all__ = ["from_hf", "load", "save", "to_hf", "tokenizer"]
