"""Load and save checkpoints: the native format, Hugging Face, GGUF and llama2.c. No pickles, no remote code."""

from vitrail.hub.pretrained import from_hf, load, load_tokenizer, save, to_hf

__all__ = ["from_hf", "load", "load_tokenizer", "save", "to_hf"]
