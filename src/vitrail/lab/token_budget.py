"""Choose the number of visual tokens: scaling laws predict scores, the cost ledger predicts costs."""

import bisect
import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Literal

import numpy as np
import torch

from vitrail.backbones.decoder import Decoder, DecoderConfig
from vitrail.config import Config
from vitrail.connectors.fused_queries import FusedQueryConfig
from vitrail.errors import ConfigError
from vitrail.lab.cost_ledger import DEVICES, DTYPES, compute_ledger, compute_roofline, get_preset
from vitrail.lab.scaling_law import ScalingLaw
from vitrail.models.unified_model import UnifiedConfig
from vitrail.models.vlm_config import VLMConfig
from vitrail.nn import Workload, cost

ChoiceReason = Literal["seconds", "memory", "flops", "loss", "score", "most"]
UNITS = {"seconds": (1.0, "s"), "memory": (1e9, "GB"), "flops": (1e12, "TFLOP")}  # of limits on the command line


class InferenceCost(Config):
    """Roofline cost of questions about one image each, answers included.

    tokens               visual tokens of the image
    first_token_seconds  until the first token of the answers
    seconds              until the last token
    memory               bytes of weights, keys and values at the end
    flops                total
    """

    tokens: int
    first_token_seconds: float
    seconds: float
    memory: int
    flops: int


class Budget(Config):
    """Limits of the cost, and `loss`: the tolerated fraction of the best score."""

    seconds: float | None = None
    memory: float | None = None
    flops: float | None = None
    loss: float | None = None

    def __post_init__(self) -> None:
        if all(value is None for value in self.to_dict().values()):
            raise ConfigError("the budget is empty", "set seconds, memory, flops or loss")
        if any(value is not None and not math.isfinite(value) for value in self.to_dict().values()):
            raise ConfigError("the budget has a value that is not finite", "leave out limits that do not apply")
        if any(value is not None and value < 0 for value in self.to_dict().values()) or (self.loss or 0) >= 1:
            raise ConfigError(
                "the budget has a negative limit, or a loss of 1 or more", "use positive limits, and a loss below 1"
            )

    def first_exceeded(self, cost: InferenceCost) -> ChoiceReason | None:
        """Return the first limit that a cost exceeds."""
        limits: dict[ChoiceReason, float | None] = {"seconds": self.seconds, "memory": self.memory, "flops": self.flops}
        return next(
            (key for key, maximum in limits.items() if maximum is not None and getattr(cost, key) > maximum), None
        )


class TokenChoice(Config):
    """The chosen number of tokens for one task.

    score             predicted score, with the `interval` of a new measurement
    fraction_of_best  score / best score of any number of tokens in range
    reason            what decided: a limit, the tolerated loss, the best score, or the end of the range
    meets_loss        whether the tolerated loss is met within the limits
    """

    task: str
    tokens: int
    score: float
    interval: tuple[float, float]
    fraction_of_best: float
    reason: ChoiceReason
    meets_loss: bool
    cost: InferenceCost


def make_cost_fn(
    system: str | Config,
    *,
    num_words: int = 64,
    answer_tokens: int = 64,
    image_size: tuple[int, int] = (480, 640),
    batch_size: int = 1,
    dtype: str = "bfloat16",
    device: str = "h200",
) -> Callable[[int], InferenceCost]:
    """Return a function from visual tokens to the roofline cost of `batch_size` questions on one device.

    Each question has `num_words` text tokens, one image and an answer of `answer_tokens`. Tower and connector of a
    vision-language model process an image of `image_size` (height, width), whatever the number of tokens. A unified
    model uses its own image size. Question-conditioned queries are as many as the tokens. A decoder has no tower.
    """
    config = get_preset(system) if isinstance(system, str) else system
    if not isinstance(config, DecoderConfig | VLMConfig | UnifiedConfig):
        raise ConfigError(
            f"{system if isinstance(system, str) else type(config).__name__} has no image tokens in its sequence",
            "use a decoder, or a model that turns images into tokens",
        )
    if getattr(config, "voco_tokens", 0):
        raise ConfigError(
            "text of a VoCo model attends to VoCo tokens only, not to image tokens", "use a model without VoCo"
        )
    if answer_tokens < 1:
        raise ConfigError(f"an answer of {answer_tokens} tokens", "use at least 1")
    settings = {
        "context_length": num_words,
        "batch_size": batch_size,
        "dtype": dtype,
        "devices": [device],
        "image_size": image_size,
        "context_lengths": (),
    }
    base_ledger = compute_ledger(config, **settings)
    decoder_config: Any = getattr(config, "decoder", config)
    with torch.device("meta"):
        decoder = Decoder(decoder_config).to(DTYPES[dtype])
    at = DEVICES[device]
    # Images of a unified model have a start token and bidirectional attention, as in some vision-language models.
    mark = int(isinstance(config, UnifiedConfig))
    both = bool(mark) or "image" in getattr(getattr(config, "rules", None), "bidirectional", ())
    queries = getattr(config, "queries", None)

    @cache
    def price(tokens: int) -> InferenceCost:
        ledger = base_ledger
        if isinstance(queries, FusedQueryConfig):
            ledger = compute_ledger(
                config.replace(queries=queries.replace(first_queries=tokens, later_queries=None)), **settings
            )
        encoder_parts = [part for part in ledger.components if part != "decoder"]
        image_tokens = mark + tokens
        prompt = Workload.prefill(num_words + image_tokens, batch_size).replace(
            context_tokens=batch_size * image_tokens
        )
        if both:
            prompt = prompt.replace(
                attention_pairs=prompt.attention_pairs + batch_size * image_tokens * (image_tokens - 1) // 2
            )
        first = (
            sum(ledger.rooflines[0].components[part].roofline for part in encoder_parts)
            + compute_roofline(decoder, prompt, at).roofline
        )
        flops = batch_size * sum(ledger.components[part].forward_flops for part in encoder_parts) + cost.count_flops(
            decoder, prompt
        )
        seconds, cached_bytes = first, cost.count_bytes(decoder, prompt).cache
        if answer_tokens > 1:
            # The prompt yields the first token. The cost of later tokens is linear, so the first and last give the sum.
            steps = [Workload.decode(num_words + image_tokens + n, batch_size) for n in (1, answer_tokens - 1)]
            flops += (answer_tokens - 1) * sum(cost.count_flops(decoder, step) for step in steps) // 2
            seconds += (answer_tokens - 1) * sum(compute_roofline(decoder, step, at).roofline for step in steps) / 2
            cached_bytes = cost.count_bytes(decoder, steps[1]).cache
        return InferenceCost(
            tokens=tokens,
            first_token_seconds=first,
            seconds=seconds,
            memory=ledger.weight_bytes + cached_bytes,
            flops=flops,
        )

    return price


def choose_tokens(
    laws: Mapping[str, ScalingLaw],
    cost_fn: Callable[[int], InferenceCost],
    budget: Budget,
    *,
    max_tokens: int | None = None,
) -> list[TokenChoice]:
    """Choose the number of tokens of each task.

    The range is that of the fitted law, or ends at `max_tokens`. With a tolerated loss the choice is the smallest
    number that meets it. Otherwise it is the best score within the limits.
    """
    return [_choose_for_task(task, law, cost_fn, budget, max_tokens) for task, law in laws.items()]


def _choose_for_task(
    task: str, law: ScalingLaw, cost_fn: Callable[[int], InferenceCost], budget: Budget, max_tokens: int | None
) -> TokenChoice:
    low = int(np.ceil(law.token_range[0]))
    high = int(law.token_range[1]) if max_tokens is None else max_tokens
    if high < low:
        raise ConfigError(f"{task} was measured from {low} tokens on, above the maximum of {high}", "raise the maximum")
    if reason := budget.first_exceeded(cost_fn(low)):
        scale, unit = UNITS[reason]
        raise ConfigError(
            f"{task}: even {low} tokens exceed the limit of {reason}: "
            f"{getattr(cost_fn(low), reason) / scale:.3g} {unit}",
            "raise the limit, or use a smaller system",
        )
    afford = (
        low
        - 1
        + bisect.bisect_left(range(low, high + 1), True, key=lambda n: budget.first_exceeded(cost_fn(n)) is not None)
    )
    scores = np.nan_to_num(law(np.arange(low, high + 1)))  # a saturating law may be undefined here: score 0
    best = float(scores.max())
    because: ChoiceReason | None = None
    within, tokens = True, low + int(scores[: afford - low + 1].argmax())
    if budget.loss is not None:
        enough = low + int((scores >= (1 - budget.loss) * best * (1 - 1e-12)).argmax())
        within = enough <= afford
        if within:
            tokens, because = enough, "loss"
    if because is None:
        limit = budget.first_exceeded(cost_fn(afford + 1)) if afford < high else "most"
        because = limit if tokens == afford and limit else "score"
    value, under, over = law.predict(tokens)
    return TokenChoice(
        task=task,
        tokens=tokens,
        score=float(value[0]),
        interval=(float(under[0]), float(over[0])),
        fraction_of_best=float(value[0]) / best,
        reason=because,
        meets_loss=within,
        cost=cost_fn(tokens),
    )


def powers_of_two(low: int, high: int) -> list[int]:
    """Powers of two between low and high, and both ends."""
    return sorted({low, high, *(2**p for p in range(low.bit_length(), high.bit_length()) if low < 2**p < high)})
