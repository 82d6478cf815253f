"""Image generation with a unified model: image codes in raster order, or masked-parallel (MaskGIT).

Each row has its own random stream, so a row's image depends only on its own seed.

Shapes: B rows, n tokens of the longest prompt, h × w codes, N = h·w, V vocabulary of a code group.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vitrail.config import Config, NonNegativeFloat, PositiveInt
from vitrail.errors import ConfigError
from vitrail.generate.masked_decoding import count_hidden, find_active_passes, gumbel_noise, hide_least_confident
from vitrail.generate.sampling import RowRandom, SamplingConfig, check_logits, process_logits, sample_tokens
from vitrail.models.unified_model import OUTPUT_IMAGE, UnifiedModel

ProgressFn = Callable[[int, int], Any]
"""(generated codes, total codes)"""
StepCallback = Callable[[Tensor, Tensor], Any]
"""(ids (B, h, w), mask of codes that are still hidden (B, h, w))"""


class _Callbacks(NamedTuple):
    progress: ProgressFn | None
    on_step: StepCallback | None

    def report(self, generated: int, total: int, ids: Tensor | None = None, hidden: Tensor | None = None) -> None:
        """Call the callbacks; `on_step` only after a pass that generated codes."""
        if self.progress is not None:
            self.progress(generated, total)
        if self.on_step is not None and ids is not None and hidden is not None:
            self.on_step(ids, hidden)


class ImageGenerationConfig(Config):
    """Settings of image generation.

    sampling            sampling parameters of each code group; the seed is that of the first row
    guidance_scale      classifier-free guidance g: u + g·(c − u), with u of the negative or empty prompt
    steps               passes of masked-parallel decoding; ignored in raster order
    choice_temperature  randomness in the choice of codes to keep in each pass; decreases to 0 in the last pass
    """

    sampling: SamplingConfig = SamplingConfig()
    guidance_scale: float = 3.0
    steps: PositiveInt = 24
    choice_temperature: NonNegativeFloat = 4.5

    def __post_init__(self) -> None:
        if not math.isfinite(self.guidance_scale):
            raise ConfigError(f"guidance_scale is {self.guidance_scale}", "give a finite number")
        if self.sampling.repetition_penalty != 1:
            raise ConfigError(
                f"sampling.repetition_penalty is {self.sampling.repetition_penalty}", "give 1: images repeat codes"
            )


@torch.no_grad()
def generate_images(
    model: UnifiedModel,
    prompts: Tensor,
    counts: Tensor,
    config: ImageGenerationConfig | None = None,
    *,
    negative_prompts: tuple[Tensor, Tensor] | None = None,
    fixed_codes: tuple[Tensor, Tensor] | None = None,
    progress: ProgressFn | None = None,
    on_step: StepCallback | None = None,
) -> Tensor:
    """Generate image codes (B, h, w) for prompts (B, n) with `counts` (B,) real tokens.

    negative_prompts  one negative prompt per row, and its counts; default: empty prompts
    fixed_codes       for inpainting: ids (B, h, w) and the mask (B, h, w) of ids to keep. In raster order, generated
                      codes depend only on earlier codes.
    on_step           callback after every pass, with the ids and the mask of hidden codes
    """
    config = config or ImageGenerationConfig()
    h, w = model.grid if fixed_codes is None else fixed_codes[0].shape[1:]
    B, device = len(prompts), prompts.device
    if fixed_codes is not None and not len(fixed_codes[0]) == len(fixed_codes[1]) == B:
        raise ConfigError(f"{len(fixed_codes[0])} fixed_codes for {B} prompts", "give one image per prompt")
    if negative_prompts is not None and config.guidance_scale == 1:
        raise ConfigError("a negative prompt has no effect with guidance_scale 1", "remove it, or raise guidance_scale")
    ids = torch.zeros(B, h, w, dtype=torch.long, device=device) if fixed_codes is None else fixed_codes[0].clone()
    to_generate = torch.ones_like(ids, dtype=torch.bool) if fixed_codes is None else ~fixed_codes[1]
    if config.guidance_scale != 1:
        other, length = negative_prompts or (prompts[:, :0], torch.zeros_like(counts))
        wide = max(prompts.shape[1], other.shape[1])
        pad = torch.nn.functional.pad
        prompts = torch.cat([pad(some, (0, wide - some.shape[1])) for some in (prompts, other)])
        counts = torch.cat([counts, length.expand_as(counts)])
    mode = model.training
    model.eval()
    try:
        generate = _generate_raster if model.config.generation_order == "raster" else _generate_masked
        return generate(model, prompts, counts, ids, to_generate, config, _Callbacks(progress, on_step))
    finally:
        model.train(mode)


def apply_guidance(logits: Tensor, guidance_scale: float) -> Tensor:
    """Apply classifier-free guidance: (B or 2B, …) → (B, …). The second half holds the negative prompts."""
    if guidance_scale == 1:
        return logits.float()
    c, u = logits.float().chunk(2)
    return u + guidance_scale * (c - u)


def _sample_codes(
    model: UnifiedModel, states: Tensor, drawing: ImageGenerationConfig, chance: RowRandom
) -> tuple[Tensor, Tensor]:
    """Sample codes from states (B or 2B, N, W), group by group: ids (B, N) and their log-probabilities (B, N)."""
    has_guidance = drawing.guidance_scale != 1
    N = states.shape[1]
    parts = torch.empty(*states.shape[:2], 0, dtype=torch.long, device=states.device)
    sure = 0.0
    for _ in model.head.vocab_sizes:
        logits = apply_guidance(model.head.compute_logits(states, parts), drawing.guidance_scale)  # (B, N, V)
        check_logits(logits, model)
        rolled = chance.uniform(N).flatten()
        part = sample_tokens(logits.flatten(0, 1), drawing.sampling, rolled).view(logits.shape[:2])
        log_probs = process_logits(logits.flatten(0, 1), drawing.sampling).log_softmax(-1).view_as(logits)
        sure = sure + log_probs.gather(-1, part[..., None])[..., 0]
        parts = torch.cat([parts, (torch.cat([part, part]) if has_guidance else part)[..., None]], -1)
    sampled = parts.chunk(2)[0] if has_guidance else parts
    assert isinstance(sure, Tensor)
    return model.join_ids(sampled), sure


def _generate_masked(
    model: UnifiedModel,
    prompts: Tensor,
    counts: Tensor,
    ids: Tensor,
    to_generate: Tensor,
    drawing: ImageGenerationConfig,
    callbacks: _Callbacks,
) -> Tensor:
    """Generate masked-parallel (MaskGIT): each pass samples all hidden codes and keeps the most confident ones."""
    B, (h, w), has_guidance = len(ids), ids.shape[1:], drawing.guidance_scale != 1
    chance = RowRandom(B, drawing.sampling.seed, ids.device)
    hidden, total = to_generate, to_generate.flatten(1).sum(1)  # (B, h, w), (B,)
    text_piece = model.make_text_piece(prompts, counts)
    for step, is_active in enumerate(find_active_passes(total, drawing.steps)):
        if not is_active:  # the pass keeps no codes: skip it, but consume its random numbers for reproducibility
            for _ in range(len(model.head.vocab_sizes) + 1):
                chance.uniform(h * w)
            callbacks.report(int(h * w * B - count_hidden(total, step, drawing.steps).sum()), h * w * B)
            continue
        rows = (torch.cat([x, x]) if has_guidance else x for x in (ids, hidden))
        layout = model.build_layout(text_piece, model.make_output_image_piece(*rows))
        found, sure = _sample_codes(model, model.get_code_states(layout, model.forward_hidden(layout)), drawing, chance)
        ids = torch.where(hidden, found.view(B, h, w), ids)
        left = count_hidden(total, step, drawing.steps)
        noise = gumbel_noise(chance.uniform(h * w))
        sure = sure + drawing.choice_temperature * (1 - (step + 1) / drawing.steps) * noise.to(sure)
        hidden = hide_least_confident(sure, hidden.flatten(1), left).view(B, h, w)
        callbacks.report(int(h * w * B - left.sum()), h * w * B, ids, hidden)
    return ids


def _generate_raster(
    model: UnifiedModel,
    prompts: Tensor,
    counts: Tensor,
    ids: Tensor,
    to_generate: Tensor,
    drawing: ImageGenerationConfig,
    callbacks: _Callbacks,
) -> Tensor:
    """Generate in raster order, with a KV cache."""
    B, (h, w), has_guidance = len(ids), ids.shape[1:], drawing.guidance_scale != 1
    chance = RowRandom(B, drawing.sampling.seed, ids.device)
    decoder, flat, fixed = model.decoder, ids.view(B, -1).clone(), ~to_generate.view(B, -1)
    places = torch.arange(h * w, device=ids.device).view(h, w)
    text_piece = model.make_text_piece(prompts, counts)
    # Positions do not depend on the codes, so all positions are known in advance.
    blank = model.make_output_image_piece(torch.cat([ids, ids]) if has_guidance else ids)
    layout = model.build_layout(text_piece, blank)
    n = prompts.shape[1]
    cache = decoder.make_cache(len(prompts))
    if n:
        decoder.forward_hidden(
            embeds=layout.embeds[:, :n], positions=layout.positions[:, :n], cache=cache, counts=counts
        )
    x = model.mark_embed.weight[OUTPUT_IMAGE].expand(len(prompts), 1, -1)
    for i in range(h * w):
        # (B, 1, W)
        state = decoder.forward_hidden(embeds=x, positions=layout.positions[:, n + i : n + i + 1], cache=cache)
        found, _ = _sample_codes(model, state, drawing, chance)
        flat[:, i] = torch.where(fixed[:, i], flat[:, i], found[:, 0])
        x = model.embed_codes(flat[:, i : i + 1], places.view(-1)[i : i + 1], (h, w))
        x = torch.cat([x, x]) if has_guidance else x
        callbacks.report(i + 1, h * w, flat.view(B, h, w), to_generate & (places > i))
    return flat.view(B, h, w)


def build_variation_inputs(ids: Tensor, redraw_fraction: float, seed: int | None = None) -> tuple[Tensor, Tensor]:
    """Return `fixed_codes` of `generate_images` for variations of images (B, h, w) that redraw a fraction of codes."""
    if not 0 <= redraw_fraction <= 1:
        raise ConfigError(f"redraw_fraction is {redraw_fraction:g}", "give 0 … 1")
    B, h, w = ids.shape
    rank = RowRandom(B, seed, ids.device, stream=1).uniform(h * w).argsort(1).argsort(1)
    return ids, (rank >= round(redraw_fraction * h * w)).view(B, h, w)
