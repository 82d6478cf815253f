"""Speculative decoding of images: a draft model proposes a few codes, and the target model checks them in one pass.

The target model accepts a digit that the draft sampled with probability q with probability min(1, p / q). The first
rejected digit is resampled from the positive part of p − q, and the rest is dropped. So the images have the target
model's distribution for any draft model (Leviathan et al. 2023, Chen et al. 2023).

Shapes: B rows, n tokens of the longest prompt, N codes, G groups of an id, V vocabulary of a group.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.errors import ConfigError
from vitrail.generate.image_generation import ImageGenerationConfig, apply_guidance
from vitrail.generate.sampling import RowRandom, SamplingConfig, process_logits, sample_from_weights
from vitrail.models.unified_model import OUTPUT_IMAGE, UnifiedModel


class SpeculativeOutput(NamedTuple):
    ids: Tensor  # (B, h, w)
    num_passes: int  # forward passes of the target model
    acceptance_rate: float  # fraction of proposed codes that were accepted


class _CachedModel:
    """A model with its KV cache. With guidance, the batch has twice as many rows."""

    def __init__(self, model: UnifiedModel, prompts: Tensor, counts: Tensor, guidance: float):
        self.model, self.guidance = model, guidance
        self.has_guidance = guidance != 1
        h, w = model.grid
        blank = torch.zeros(len(prompts), h, w, dtype=torch.long, device=prompts.device)
        layout = model.build_layout(model.make_text_piece(prompts, counts), model.make_output_image_piece(blank))
        n = prompts.shape[1]
        self.places = layout.positions[:, n:]  # (rows, 1 + N, …)
        self.text_counts, self.cache = counts, model.decoder.make_cache(len(prompts))
        if n:
            model.decoder.forward_hidden(
                embeds=layout.embeds[:, :n], positions=layout.positions[:, :n], cache=self.cache, counts=counts
            )

    def process(self, ids: Tensor, first: Tensor, count: int) -> Tensor:
        """Process `count` image tokens of ids (B, N) from index `first` (B,), where token 0 is the start token.

        Returns the states (rows, count, W). Each state predicts the next code.
        """
        at = first[:, None] + torch.arange(count, device=ids.device)  # (B, count)
        place, last = (at - 1).clamp(min=0), math.prod(self.model.grid) - 1
        x = self.model.embed_codes(ids.gather(1, place), place.clamp(max=last), self.model.grid)
        x = torch.where((at == 0)[..., None], self.model.mark_embed.weight[OUTPUT_IMAGE], x)
        at = at.clamp(max=self.places.shape[1] - 1)  # positions past the end are dropped later
        if self.has_guidance:
            x, at = torch.cat([x, x]), torch.cat([at, at])
        where = at if self.places.ndim == 2 else at[..., None].expand(-1, -1, 3)
        return self.model.decoder.forward_hidden(embeds=x, positions=self.places.gather(1, where), cache=self.cache)

    def probabilities_of_next(self, states: Tensor, before: Tensor, sampling: SamplingConfig) -> Tensor:
        """Return the float64 probabilities (B, V) of the next digit from states (rows, W) and digits so far (B, g)."""
        logits = apply_guidance(
            self.model.head.compute_logits(states, torch.cat([before, before]) if self.has_guidance else before),
            self.guidance,
        )
        if sampling.is_greedy:
            return F.one_hot(logits.argmax(-1), logits.shape[-1]).double()
        return process_logits(logits, sampling).double().softmax(-1)

    def truncate(self, tokens: Tensor) -> None:
        """Truncate the cache to this number of image tokens (B,)."""
        self.cache.crop(self.text_counts + (torch.cat([tokens, tokens]) if self.has_guidance else tokens))


@torch.no_grad()
def generate_images_speculatively(
    model: UnifiedModel,
    draft_model: UnifiedModel,
    prompts: Tensor,
    counts: Tensor,
    config: ImageGenerationConfig | None = None,
    *,
    draft_length: int = 4,
) -> SpeculativeOutput:
    """Generate images like `generate_images` in raster order, faster if the draft model predicts well."""
    config = config or ImageGenerationConfig()
    if model.config.generation_order != "raster" or draft_model.config.generation_order != "raster":
        raise ConfigError("speculative decoding needs raster order", 'use models with order = "raster"')
    if model.head.vocab_sizes != draft_model.head.vocab_sizes or model.grid != draft_model.grid:
        raise ConfigError(
            "the two models use different codes", "use models with the same codec, grid and number of groups"
        )
    if draft_length < 1:
        raise ConfigError(f"draft_length is {draft_length}", "give at least 1")
    B, (h, w), device = len(prompts), model.grid, prompts.device
    N, sampling = h * w, config.sampling
    if config.guidance_scale != 1:
        prompts, counts = torch.cat([prompts, prompts]), torch.cat([counts, torch.zeros_like(counts)])
    modes = model.training, draft_model.training
    target, draft_side = (
        _CachedModel(side.eval(), prompts, counts, config.guidance_scale) for side in (model, draft_model)
    )
    chance = RowRandom(B, sampling.seed, device)
    ids = torch.zeros(B, N + draft_length + 1, dtype=torch.long, device=device)  # with space for proposals past the end
    done = torch.zeros(B, dtype=torch.long, device=device)
    passes = 0
    num_proposed = 0
    num_accepted = 0
    while bool((done < N).any()):
        proposals = []  # digits (B, G) and their probabilities, G × (B, V)
        for i in range(draft_length + 1):  # the last iteration only updates the cache
            state = draft_side.process(ids[:, : N + draft_length], done + i, 1)[:, 0]
            if i < draft_length:
                digits, probabilities = _sample_code(draft_side, state, sampling, chance)
                proposals.append((digits, probabilities))
                ids.scatter_(1, (done + i)[:, None], model.join_ids(digits)[:, None])
        states = target.process(ids[:, : N + draft_length], done, draft_length + 1)  # (rows, ahead + 1, W)
        passes += 1
        alive, start = done < N, done
        for i, (digits, probabilities) in enumerate(proposals):
            active = alive & (start + i < N)
            verified, is_accepted = _verify_code(target, states[:, i], digits, probabilities, sampling, chance)
            current = ids.gather(1, (start + i)[:, None])[:, 0]
            ids.scatter_(1, (start + i)[:, None], torch.where(active, model.join_ids(verified), current)[:, None])
            done = done + active
            num_proposed, num_accepted = (
                num_proposed + int(active.sum()),
                num_accepted + int((active & is_accepted).sum()),
            )
            alive = active & is_accepted
        extra = alive & (start + draft_length < N)  # all were accepted: the last state predicts one more
        digits, _ = _sample_code(target, states[:, draft_length], sampling, chance)
        current = ids.gather(1, (start + draft_length)[:, None])[:, 0]
        ids.scatter_(1, (start + draft_length)[:, None], torch.where(extra, model.join_ids(digits), current)[:, None])
        done = done + extra
        for side in (target, draft_side):
            side.truncate(done)
    model.train(modes[0])
    draft_model.train(modes[1])
    return SpeculativeOutput(ids[:, :N].view(B, h, w), passes, num_accepted / max(num_proposed, 1))


def _sample_code(
    side: _CachedModel, state: Tensor, sampling: SamplingConfig, chance: RowRandom
) -> tuple[Tensor, list[Tensor]]:
    """Sample the digits of a code (B, G), and return them with the probabilities they were sampled from."""
    digits = torch.empty(len(state) // (1 + side.has_guidance), 0, dtype=torch.long, device=state.device)
    probabilities = []
    for _ in side.model.head.vocab_sizes:
        probabilities.append(side.probabilities_of_next(state, digits, sampling))
        digits = torch.cat([digits, sample_from_weights(probabilities[-1], chance.uniform())[:, None]], 1)
    return digits, probabilities


def _verify_code(
    side: _CachedModel,
    state: Tensor,
    digits: Tensor,
    probabilities: list[Tensor],
    sampling: SamplingConfig,
    chance: RowRandom,
) -> tuple[Tensor, Tensor]:
    """Return digits (B, G) with the target model's distribution, and whether they equal the proposal (B,)."""
    is_accepted = torch.ones(len(digits), dtype=torch.bool, device=digits.device)
    verified = digits[:, :0]
    for g, q in enumerate(probabilities):
        p = side.probabilities_of_next(state, verified, sampling)
        proposal = digits[:, g : g + 1]
        is_taken = chance.uniform() * q.gather(1, proposal)[:, 0] < p.gather(1, proposal)[:, 0]
        remainder = (p - q).clamp(min=0)
        # An empty remainder after a rejection can only be due to rounding.
        remainder = torch.where(remainder.sum(1, keepdim=True) > 0, remainder, p)
        fresh = sample_from_weights(torch.where(is_accepted[:, None], remainder, p), chance.uniform())
        verified = torch.cat([verified, torch.where(is_accepted & is_taken, proposal[:, 0], fresh)[:, None]], 1)
        is_accepted = is_accepted & is_taken
    return verified, is_accepted
