"""Text pipeline of a language model: continue texts, and score continuations."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from vitrail import hub
from vitrail.backbones.decoder import Decoder
from vitrail.errors import CheckpointError
from vitrail.generate.continuation_scoring import ContinuationScorer
from vitrail.generate.sampling import GREEDY, SamplingConfig
from vitrail.generate.text_generation import generate_texts, stream_tokens
from vitrail.hub.checkpoint_info import resolve_path
from vitrail.pipelines.base import load_model, select_device
from vitrail.pipelines.generation_config import read_sampling
from vitrail.processing.tokenizer import Tokenizer

DEFAULT_MAX_NEW_TOKENS = 200  # capped by what the context has left


class TextPipeline:
    """Generate text with a language model: `vitrail.load(folder)`.

    Decoding is greedy by default. `checkpoint_sampling` are the settings of the checkpoint's generation_config.json.
    """

    def __init__(self, model: Decoder, tokenizer: Tokenizer, checkpoint_sampling: SamplingConfig = GREEDY):
        self.model, self.tokenizer, self.checkpoint_sampling = model.eval(), tokenizer, checkpoint_sampling

    @classmethod
    def load(
        cls,
        name_or_path: str | Path,
        *,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> "TextPipeline":
        """Load a language model, in bfloat16 on a GPU if there is one, else in float32 on the CPU."""
        where, default_dtype = select_device(device)
        sampling = read_sampling(resolve_path(name_or_path))
        model: Any = load_model(name_or_path, where, dtype or default_dtype)
        if not isinstance(model, Decoder):
            raise CheckpointError(
                f"{name_or_path} is a {type(model).__name__}, not a language model", "give a language model"
            )
        return cls(model, hub.load_tokenizer(name_or_path), sampling)

    def generate(
        self,
        prompts: str | Sequence[str],
        *,
        max_new_tokens: int | None = None,
        sampling: SamplingConfig = GREEDY,
        stop_strings: Sequence[str] = (),
    ) -> Any:
        """Continue one prompt (returns a text) or several prompts in one batch (returns a list)."""
        several = [prompts] if isinstance(prompts, str) else list(prompts)
        ids = [self.tokenizer.encode(prompt, add_special_tokens=True) for prompt in several]
        outputs = generate_texts(
            self.model,
            ids,
            max_new_tokens=self._limit(ids, max_new_tokens),
            sampling=sampling,
            tokenizer=self.tokenizer,
            stop_strings=stop_strings,
        )
        texts = [output.text for output in outputs]
        return texts[0] if isinstance(prompts, str) else texts

    def stream(
        self,
        prompt: str,
        *,
        max_new_tokens: int | None = None,
        sampling: SamplingConfig = GREEDY,
        stop_strings: Sequence[str] = (),
    ) -> Iterator[str]:
        """Yield the continuation of a prompt piece by piece."""
        ids = [self.tokenizer.encode(prompt, add_special_tokens=True)]
        tokens = stream_tokens(
            self.model,
            ids,
            max_new_tokens=self._limit(ids, max_new_tokens),
            sampling=sampling,
            tokenizer=self.tokenizer,
            stop_strings=stop_strings,
        )
        return (token.text for token in tokens)

    def loglikelihoods(self, texts: Sequence[tuple[str, str]]) -> list[float]:
        """Return the log-likelihood of the continuation of each (context, continuation)."""
        return ContinuationScorer(self.model, self.tokenizer).score_texts(texts)

    def _limit(self, prompts: Sequence[Sequence[int]], max_new_tokens: int | None) -> int:
        if max_new_tokens is not None:
            return max_new_tokens
        return min(DEFAULT_MAX_NEW_TOKENS, self.model.config.context_length - max(map(len, prompts)))
