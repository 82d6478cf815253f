"""Find pairs of continuations of the same prefix in a text, and compute a decoder's hidden states for both.

Shapes: P pairs, K prefix tokens, N continuation tokens, D width.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitrail.backbones.decoder import Decoder
from vitrail.data.text_source import TextSourceConfig, read_text
from vitrail.errors import ConfigError, DataError
from vitrail.processing.tokenizer import Tokenizer


class PairSettings(NamedTuple):
    """Number of pairs, and tokens of each continuation."""

    length: int
    num_pairs: int
    batch_size: int
    seed: int


def compute_text_pairs(
    model: Any, tokenizer: Tokenizer, files: tuple[str, ...], prefix_length: int, settings: PairSettings
) -> Iterator[tuple[Tensor, Tensor]]:
    """Compute hidden states for pairs of continuations in text files, by default in the language reference of Python.

    model  a decoder, or a model with one
    """
    ids = tokenizer.encode(read_text(TextSourceConfig(files=files, package=None if files else "python-docs")))
    length, count, batch_size, seed = settings
    starts = find_branches(ids, prefix_length, length, count, seed)
    return compute_hidden_states(
        getattr(model, "decoder", model),
        ids,
        starts,
        prefix_length,
        length,
        bos_token_id=tokenizer.bos_token_id,
        batch_size=batch_size,
    )


def find_branches(
    ids: Sequence[int] | np.ndarray, prefix_length: int, length: int, max_pairs: int, seed: int = 0
) -> np.ndarray:
    """Find the starts (P, 2) of window pairs that share a prefix and differ in the token after it.

    Windows have `prefix_length + length` tokens, come from the text and do not overlap. Each prefix contributes one
    pair. If there are more than `max_pairs` pairs, a random subset is returned.
    """
    if prefix_length < 1 or length < 1 or max_pairs < 1:
        raise ConfigError(
            f"invalid sizes: {max_pairs} pairs, {length} tokens after a prefix of {prefix_length}",
            "use at least 1 for each",
        )
    starts_by_prefix: dict[tuple[int, ...], dict[int, int]] = {}  # prefix → next token → first start
    found: list[tuple[int, int]] = []
    ids = np.asarray(ids).tolist()
    done: set[tuple[int, ...]] = set()
    for start in range(len(ids) - prefix_length - length + 1):
        key = tuple(ids[start : start + prefix_length])
        if key in done:
            continue
        after = ids[start + prefix_length]
        others = (first for other, first in starts_by_prefix.get(key, {}).items() if other != after)
        partner = next((first for first in others if start - first >= prefix_length + length), None)
        if partner is None:
            starts_by_prefix.setdefault(key, {}).setdefault(after, start)
        else:
            found.append((partner, start))
            done.add(key)
    if not found:
        raise DataError(
            f"no prefix of {prefix_length} tokens occurs twice with different continuations of {length} tokens",
            "use a longer text or a shorter prefix",
        )
    order = np.random.default_rng(seed).permutation(len(found))[:max_pairs]
    return np.array(found)[np.sort(order)]


@torch.no_grad()
def compute_hidden_states(
    model: Decoder,
    ids: Sequence[int] | np.ndarray,
    starts: np.ndarray,
    prefix_length: int,
    length: int,
    *,
    bos_token_id: int | None = None,
    batch_size: int = 16,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the last hidden states (P, N, D) of both continuations, one batch of pairs at a time."""
    prefix = [] if bos_token_id is None else [bos_token_id]
    if len(prefix) + prefix_length + length > model.config.context_length:
        raise ConfigError(
            f"{prefix_length} + {length} tokens exceed the context length of {model.config.context_length}",
            "use a shorter prefix or continuation",
        )
    text = torch.as_tensor(np.asarray(ids), dtype=torch.long)
    device = model.embed.weight.device
    for part in torch.as_tensor(starts).split(batch_size):
        windows = text[part.flatten()[:, None] + torch.arange(prefix_length + length)]  # (2P, K + N)
        first = torch.tensor(prefix, dtype=torch.long).expand(len(windows), -1)
        states = model.forward_hidden(torch.cat([first, windows], 1).to(device))[:, len(prefix) + prefix_length :]
        left, right = states.unflatten(0, (-1, 2)).unbind(1)
        yield left, right
