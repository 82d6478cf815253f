"""Sampling for rows with parameters of their own. Each row gets the token that `sample_tokens` gives it alone.

B rows, V vocabulary
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitrail.generate.cuda_graph_decode import upload
from vitrail.generate.sampling import sample_from_weights
from vitrail.serve.engine_request import SequenceState, TokenLogprobs


class SampledTokens(NamedTuple):
    """Tokens of the rows, on the device until they are read.

    ids            (B,)
    finite         (B,) whether the logits are finite
    logprob_rows   rows with log-probabilities
    logprobs       (rows, 1 + K) of the sampled token and of the most likely ones
    top_ids        (rows, K)
    """

    ids: Tensor
    finite: Tensor
    logprob_rows: list[int]
    logprobs: Tensor | None = None
    top_ids: Tensor | None = None

    def to_host(self) -> "SampledTokens":
        """Start to copy the tensors to the host. The copies are complete after the device's current work."""
        if not self.ids.is_cuda:
            return self._replace(ids=self.ids.clone(), finite=self.finite.clone())  # captured steps reuse theirs

        def copy(x: Tensor | None) -> Tensor | None:
            if x is None:
                return None
            return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)

        ids, finite, logprobs, top_ids = map(copy, (self.ids, self.finite, self.logprobs, self.top_ids))
        assert ids is not None and finite is not None
        return SampledTokens(ids, finite, self.logprob_rows, logprobs, top_ids)

    def read_logprobs(self, sequences: Sequence[SequenceState]) -> dict[int, TokenLogprobs]:
        """Return the log-probabilities by row, from tensors on the host."""
        if self.logprobs is None or self.top_ids is None:
            return {}
        found = {}
        for row, values, ids in zip(self.logprob_rows, self.logprobs.tolist(), self.top_ids.tolist(), strict=True):
            count = sequences[row].params.logprobs or 0
            found[row] = TokenLogprobs(values[0], ids[:count], values[1 : count + 1])
        return found


class BatchSampler:
    """Sample tokens of sequences. It keeps which tokens each slot contains, for the repetition penalty."""

    def __init__(self, vocab_size: int, max_num_seqs: int, device: torch.device):
        self.vocab_size, self.max_num_seqs, self.device = vocab_size, max_num_seqs, device
        self._seen: Tensor | None = None  # (slots, V), made when a sequence first needs it

    def add_sequence(self, sequence: SequenceState) -> None:
        """Mark the tokens of a sequence that starts to run."""
        if sequence.params.sampling.repetition_penalty == 1:
            return
        if self._seen is None:
            self._seen = torch.zeros(self.max_num_seqs, self.vocab_size, dtype=torch.bool, device=self.device)
        ids = [id for id in (*sequence.prompt.ids, *sequence.generated) if id < self.vocab_size]
        self._seen[sequence.slot] = False
        self._seen[sequence.slot, upload(np.array(ids, dtype=np.int64), self.device)] = True

    def sample(self, logits: Tensor, sequences: Sequence[SequenceState]) -> SampledTokens:
        """Sample one token for each row of logits (B, V)."""
        logits = logits[:, : self.vocab_size].float()
        finite = logits.amax(-1).isfinite()
        wanting = [row for row, one in enumerate(sequences) if one.params.logprobs is not None]
        rows = upload(np.array(wanting), self.device) if wanting else None
        raw = None if rows is None else logits[rows].log_softmax(-1)  # before the filters
        if constrained := [row for row, one in enumerate(sequences) if one.constraint is not None]:
            logits = self._mask_rows(logits, sequences, constrained)
        if all(one.params.sampling.is_greedy and one.params.sampling.repetition_penalty == 1 for one in sequences):
            ids = logits.argmax(-1)
        else:
            ids = self._sample_filtered(logits, sequences)
        if raw is None or rows is None:
            return SampledTokens(ids, finite, [])
        count = max(sequences[row].params.logprobs or 0 for row in wanting)
        top = raw.topk(min(max(count, 1), raw.shape[-1]))
        own = raw.gather(1, ids[rows][:, None])
        return SampledTokens(ids, finite, wanting, torch.cat([own, top.values], 1), top.indices)

    def _mask_rows(self, logits: Tensor, sequences: Sequence[SequenceState], rows: list[int]) -> Tensor:
        """Return the logits with the tokens removed that the constraints of these rows do not allow."""
        words = np.stack([one.constraint.compute_mask() for one in map(sequences.__getitem__, rows) if one.constraint])
        bits = upload(words, logits.device)  # the mask is unpacked on the device
        allowed = (bits[:, :, None] >> torch.arange(32, device=logits.device, dtype=torch.int32)) & 1
        index = upload(np.array(rows), logits.device)
        own = logits[index].masked_fill(allowed.flatten(1)[:, : logits.shape[1]] == 0, -torch.inf)
        return logits.index_copy(0, index, own)

    def _sample_filtered(self, logits: Tensor, sequences: Sequence[SequenceState]) -> Tensor:
        settings = [one.params.sampling for one in sequences]

        def column(values: Sequence[float], dtype: Any = np.float32) -> Tensor:
            return upload(np.array(values, dtype=dtype), logits.device)[:, None]

        slots = upload(np.array([one.slot for one in sequences]), logits.device)
        if any(one.repetition_penalty != 1 for one in settings):
            assert self._seen is not None
            penalty = column([one.repetition_penalty for one in settings])
            lowered = torch.where(logits > 0, logits / penalty, logits * penalty)
            logits = torch.where(self._seen[slots] & (penalty != 1), lowered, logits)
        greedy_ids = logits.argmax(-1)
        ids = greedy_ids
        if not all(one.is_greedy for one in settings):
            logits = logits / column([one.temperature or 1.0 for one in settings])
            logits = _filter(logits, settings, column)
            uniforms = column([one.draw_uniform() for one in sequences], np.float64)[:, 0]
            sampled = sample_from_weights(logits.softmax(-1), uniforms)
            ids = torch.where(column([one.is_greedy for one in settings], np.bool_)[:, 0], greedy_ids, sampled)
        if self._seen is not None:
            self._seen[slots, ids] = True  # unused for sequences without a penalty
        return ids


def _filter(logits: Tensor, settings: Sequence, column) -> Tensor:
    """Apply top_k, top_p and min_p of each row."""
    V = logits.shape[-1]
    if any(one.top_k is not None for one in settings):
        ks = [min(one.top_k or V, V) for one in settings]
        limited = max(k for k in ks if k < V) if min(ks) < V else 1
        best = logits.topk(limited).values
        least = best.gather(1, column([min(k, limited) - 1 for k in ks], np.int64))
        logits = logits.masked_fill((logits < least) & column([k < V for k in ks], np.bool_), -torch.inf)
    if any(one.top_p is not None and one.top_p < 1 for one in settings):
        ps = [1.0 if one.top_p is None else one.top_p for one in settings]
        ordered, order = logits.sort(dim=-1)  # ascending
        out = ordered.softmax(-1).cumsum(-1) <= column([1 - p for p in ps])
        out[:, -1] = False
        out &= column([p < 1 for p in ps], np.bool_)
        logits = logits.masked_fill(out.scatter(1, order, out), -torch.inf)
    if any(one.min_p is not None for one in settings):
        probabilities = logits.softmax(-1)
        fraction = column([one.min_p or 0.0 for one in settings])
        logits = logits.masked_fill(probabilities < fraction * probabilities.amax(-1, keepdim=True), -torch.inf)
    return logits
