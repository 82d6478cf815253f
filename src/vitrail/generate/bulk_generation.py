"""Bulk generation: thousands of random continuations of one prompt, without streaming.

Shapes: B rows, T new tokens, V vocabulary.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitrail.backbones.decoder import Decoder
from vitrail.errors import ConfigError
from vitrail.generate.sampling import SamplingConfig, check_logits, sample_tokens
from vitrail.generate.text_generation import select_stepper

BATCH_SIZE = 256  # rows per batch; with 256 tokens each, a GPU can still use a CUDA graph
STOP_CHECK_INTERVAL = 16  # tokens between two checks whether all rows have ended


class Continuation(NamedTuple):
    ids: list[int]  # without the stop token
    is_complete: bool  # False if the token limit ended the row


def generate_many(
    model: Decoder,
    prompt: Sequence[int],
    count: int,
    *,
    max_new_tokens: int,
    stop_ids: Collection[int],
    sampling: SamplingConfig,
    vocab_size: int | None = None,
    batch_size: int = BATCH_SIZE,
) -> Iterator[Continuation]:
    """Yield `count` random continuations of a prompt.

    `vocab_size` limits sampling to the first ids. The rows of a batch share a random stream, which depends on the seed
    and the index of the first row. So a larger `count` starts with the same continuations as a smaller one.
    """
    capacity = model.config.context_length - len(prompt)
    if not prompt or not 1 <= max_new_tokens <= capacity:
        raise ConfigError(
            f"max_new_tokens is {max_new_tokens} for a prompt of {len(prompt)} tokens",
            f"give a non-empty prompt and 1 … {capacity} new tokens",
        )
    if sampling.repetition_penalty != 1 or sampling.is_greedy:
        raise ConfigError(
            "bulk generation does not support greedy decoding or repetition_penalty",
            "give a temperature above 0, and repetition_penalty 1",
        )
    batches = (
        _draw_uniforms(sampling.seed, start, max_new_tokens, batch_size)[:, : count - start]
        for start in range(0, count, batch_size)
    )
    return (one for chance in batches for one in _generate_batch(model, prompt, chance, stop_ids, sampling, vocab_size))


def _draw_uniforms(seed: int | None, start: int, tokens: int, rows: int) -> Tensor:
    """(T, rows) in [0, 1)"""
    batches = np.random.default_rng(None if seed is None else [seed, start])
    return torch.from_numpy(batches.random((tokens, rows)))


@torch.no_grad()
def _generate_batch(
    model: Decoder,
    prompt: Sequence[int],
    chance: Tensor,
    stops: Collection[int],
    sampling: SamplingConfig,
    vocab_size: int | None,
) -> list[Continuation]:
    """Generate up to T tokens for B rows with uniforms (T, B), or until all rows have ended."""
    (T, B), device = chance.shape, model.embed.weight.device
    chance, ends = chance.to(device), torch.tensor(sorted(stops), device=device)
    stepper = select_stepper(model, B, len(prompt) + T)
    logits = stepper.prefill(torch.tensor([list(prompt)] * B), torch.full((B,), len(prompt)))
    tokens: list[Tensor] = []
    while True:
        if len(tokens) % STOP_CHECK_INTERVAL == 0 or len(tokens) == T - 1:  # what is not finite stays so in the cache
            check_logits(logits[:, :vocab_size], model)
        tokens.append(sample_tokens(logits[:, :vocab_size], sampling, chance[len(tokens)]))  # (B,)
        check_stop = len(tokens) % STOP_CHECK_INTERVAL == 0
        if len(tokens) == T or (check_stop and bool(torch.isin(torch.stack(tokens, 1), ends).any(1).all())):
            break
        logits = stepper.step(tokens[-1])
    found = torch.stack(tokens, 1)  # (B, tokens)
    before = torch.isin(found, ends).cumsum(1) == 0
    rows = zip(found.tolist(), before.sum(1).tolist(), strict=True)
    return [Continuation(ids[:length], length < len(ids)) for ids, length in rows]
