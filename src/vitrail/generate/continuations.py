"""How likely texts are as continuations of others, by any model that has a decoder; pictures have no part in it.

The rules are those of EleutherAI's lm-evaluation-harness: where a text is cut into tokens, what stands before the first
of them, and what is left out of a text that is too long.

B rows, L tokens of the longest, n tokens of a continuation, W width, V vocabulary
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from vitrail.backbones.decoder import Decoder
from vitrail.errors import ConfigError, TextError
from vitrail.models.looking import LookingVLM
from vitrail.models.unified import Unified
from vitrail.models.vlm import VLM
from vitrail.processing.text import Tokenizer
from vitrail.stream import build, words
from vitrail.stream.pack import rows

Speaker = Decoder | VLM | LookingVLM | Unified


class Pair(NamedTuple):
    """Ids of a context and of what goes on from it."""

    context: list[int]
    continuation: list[int]


def pair(tokenizer: Tokenizer, context: str, continuation: str) -> Pair:
    """Both as tokens. Spaces at the end of the context go over to the continuation, whose tokens are those of the whole
    text beyond as many as the context alone has. An empty context is the token that texts begin with (bos, or eos)."""
    if context:
        before = tokenizer.encode(context.rstrip(), specials=True, literal=True)
        whole = tokenizer.encode(context + continuation, specials=True, literal=True)
        found = Pair(before, whole[len(before) :])
    else:
        start = tokenizer.eos if tokenizer.bos is None else tokenizer.bos
        if start is None:
            raise TextError("the tokenizer has no token that a text begins with (bos, eos)", "give the model's own")
        ids = tokenizer.encode(continuation, literal=True)
        found = Pair(ids[:1], ids[1:]) if ids[:1] == [start] else Pair([start], ids)
    if not found.context:
        raise TextError("a context of spaces alone", "give it words, or none at all")
    if not found.continuation:
        raise TextError(f"{continuation!r:.80} adds no token to {context[-80:]!r}", "give a longer continuation")
    return found


class Continuations:
    """A model and its tokenizer. `cut` counts the texts that were longer than the model's context and lost their
    beginning."""

    def __init__(self, model: Speaker, tokenizer: Tokenizer):
        self.model, self.words, self.cut = model.eval(), tokenizer, 0
        self.decoder = model if isinstance(model, Decoder) else model.decoder

    @torch.no_grad()
    def likelihoods(self, texts: Sequence[tuple[str, str]]) -> list[float]:
        """Of each (context, continuation) the sum of the logarithms of the probabilities of the continuation's tokens,
        all in one batch."""
        return self.of(self.fitted([pair(self.words, *text) for text in texts]))

    def fitted(self, pairs: Sequence[Pair]) -> list[Pair]:
        """What the context has room for; the last token is foretold and not read."""
        most = self.decoder.config.context + 1
        found = []
        for context, continuation in pairs:
            if len(continuation) >= most:
                raise ConfigError(
                    f"a continuation of {len(continuation):,} tokens passes the {most - 1:,} the model was made for",
                    "give a model of a longer context",
                )
            over = max(0, len(context) + len(continuation) - most)
            self.cut += over > 0
            found.append(Pair(context[over:], continuation))
        return found

    @torch.no_grad()
    def of(self, pairs: Sequence[Pair]) -> list[float]:
        if not pairs:
            return []
        hidden = self._hidden([[*context, *continuation[:-1]] for context, continuation in pairs])  # (B, L, W)
        counts = [len(continuation) for _, continuation in pairs]
        # The token at i is foretold by what is known at i − 1; logits are made of these places alone.
        ends = (len(context) - 1 + count for (context, _), count in zip(pairs, counts, strict=True))
        spans = zip(hidden, ends, counts, strict=True)
        places = torch.cat([row[end - count : end] for row, end, count in spans])  # (Σ n, W)
        said = torch.tensor([id for _, continuation in pairs for id in continuation], device=places.device)
        logits = self.decoder.logits(places).float()  # (Σ n, V)
        told = logits.log_softmax(-1).gather(1, said[:, None])[:, 0]
        return [float(some.sum()) for some in told.split(counts)]

    def _hidden(self, texts: list[list[int]]) -> Tensor:
        """(B, L, W), padding behind each text"""
        model = self.model
        if isinstance(model, VLM):
            return model.hidden(rows([build([words(ids)], model.config.rules) for ids in texts]))
        if isinstance(model, LookingVLM):
            return model.hidden(rows([build([words(ids)]) for ids in texts]))
        device = self.decoder.embed.weight.device
        ids = pad_sequence([torch.tensor(text) for text in texts], batch_first=True).to(device)
        if isinstance(model, Decoder):
            return model.hidden(ids)  # no token sees what is behind it
        return model(model.words(ids, torch.tensor([len(text) for text in texts], device=device)))
