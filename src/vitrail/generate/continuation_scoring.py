"""Log-likelihoods of text continuations under any model with a decoder, without images.

Tokenization, the first token and truncation follow EleutherAI's lm-evaluation-harness.

Shapes: B rows, L tokens of the longest text, n tokens of a continuation, W width, V vocabulary.
"""

from collections.abc import Sequence
from functools import singledispatch
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from vitrail.backbones.decoder import Decoder
from vitrail.errors import ConfigError, TextError
from vitrail.models.cross_attention_vlm import CrossAttentionVLM
from vitrail.models.unified_model import UnifiedModel
from vitrail.models.vlm import VLM
from vitrail.processing.tokenizer import Tokenizer
from vitrail.stream import build_stream, text_part
from vitrail.stream.packing import pad_streams

LanguageModel = Decoder | VLM | CrossAttentionVLM | UnifiedModel


class ContinuationTokens(NamedTuple):
    """Token ids of a context and of its continuation."""

    context: list[int]
    continuation: list[int]


def tokenize_continuation(tokenizer: Tokenizer, context: str, continuation: str) -> ContinuationTokens:
    """Tokenize a context and its continuation.

    Trailing spaces of the context move to the continuation. The continuation has the tokens of the whole text after
    the number of tokens of the context alone. An empty context becomes the BOS token (or the EOS token without BOS).
    """
    if context:
        before = tokenizer.encode(context.rstrip(), add_special_tokens=True, literal=True)
        whole = tokenizer.encode(context + continuation, add_special_tokens=True, literal=True)
        found = ContinuationTokens(before, whole[len(before) :])
    else:
        start = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        if start is None:
            raise TextError("the tokenizer has no BOS or EOS token", "use the model's tokenizer")
        ids = tokenizer.encode(continuation, literal=True)
        found = ContinuationTokens(ids[:1], ids[1:]) if ids[:1] == [start] else ContinuationTokens([start], ids)
    if not found.context:
        raise TextError("the context contains only spaces", "give a non-empty text, or an empty string")
    if not found.continuation:
        raise TextError(f"{continuation!r:.80} adds no token to {context[-80:]!r}", "give a longer continuation")
    return found


class ContinuationScorer:
    """Scores continuations with a model and its tokenizer.

    `num_truncated` counts contexts that were truncated at the start to fit the model's context length.
    """

    def __init__(self, model: LanguageModel, tokenizer: Tokenizer):
        self.model, self.tokenizer, self.num_truncated = model.eval(), tokenizer, 0
        self.decoder = model if isinstance(model, Decoder) else model.decoder

    @torch.no_grad()
    def score_texts(self, texts: Sequence[tuple[str, str]]) -> list[float]:
        """Return the log-likelihood of the continuation of each (context, continuation), in one batch."""
        return self.score_tokens(
            self.truncate_contexts([tokenize_continuation(self.tokenizer, *text) for text in texts])
        )

    def truncate_contexts(self, token_pairs: Sequence[ContinuationTokens]) -> list[ContinuationTokens]:
        """Truncate contexts at the start to fit the context length. The last token is only predicted, not read."""
        max_tokens = self.decoder.config.context_length + 1
        found = []
        for context, continuation in token_pairs:
            if len(continuation) >= max_tokens:
                raise ConfigError(
                    f"a continuation has {len(continuation):,} tokens, more than the context length {max_tokens - 1:,}",
                    "use a model with a longer context",
                )
            excess = max(0, len(context) + len(continuation) - max_tokens)
            self.num_truncated += excess > 0
            found.append(ContinuationTokens(context[excess:], continuation))
        return found

    @torch.no_grad()
    def score_tokens(self, token_pairs: Sequence[ContinuationTokens]) -> list[float]:
        if not token_pairs:
            return []
        # (B, L, W)
        hidden = _forward_texts(self.model, [[*context, *continuation[:-1]] for context, continuation in token_pairs])
        counts = [len(continuation) for _, continuation in token_pairs]
        # The state at i − 1 predicts token i. Compute logits only at these states.
        ends = (len(context) - 1 + count for (context, _), count in zip(token_pairs, counts, strict=True))
        spans = zip(hidden, ends, counts, strict=True)
        states = torch.cat([row[end - count : end] for row, end, count in spans])  # (Σ n, W)
        continuation_ids = torch.tensor(
            [id for _, continuation in token_pairs for id in continuation], device=states.device
        )
        logits = self.decoder.compute_logits(states).float()  # (Σ n, V)
        log_probs = logits.log_softmax(-1).gather(1, continuation_ids[:, None])[:, 0]
        return [float(some.sum()) for some in log_probs.split(counts)]


@singledispatch
def _forward_texts(model: nn.Module, texts: Sequence[list[int]]) -> Tensor:
    """Return the hidden states (B, L, W) of texts padded at the end."""
    raise TypeError(f"{type(model).__name__} is not a language model")


@_forward_texts.register
def _(model: Decoder, texts: Sequence[list[int]]) -> Tensor:
    return model.forward_hidden(_pad_ids(texts, model))  # causal attention ignores the padding


@_forward_texts.register
def _(model: UnifiedModel, texts: Sequence[list[int]]) -> Tensor:
    ids = _pad_ids(texts, model.decoder)
    return model(model.make_text_piece(ids, torch.tensor([len(text) for text in texts], device=ids.device)))


@_forward_texts.register
def _(model: VLM, texts: Sequence[list[int]]) -> Tensor:
    return model.forward_hidden(pad_streams([build_stream([text_part(ids)], model.config.rules) for ids in texts]))


@_forward_texts.register
def _(model: CrossAttentionVLM, texts: Sequence[list[int]]) -> Tensor:
    return model.forward_hidden(pad_streams([build_stream([text_part(ids)]) for ids in texts]))


def _pad_ids(texts: Sequence[list[int]], decoder: Decoder) -> Tensor:
    ids = pad_sequence([torch.tensor(text) for text in texts], batch_first=True)
    return ids.to(decoder.embed.weight.device)
