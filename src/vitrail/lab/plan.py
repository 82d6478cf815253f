"""How many visual tokens to use: a law for each task says what a score loses, the ledger what a token costs."""

import bisect
import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Literal

import numpy as np
import torch

from vitrail.backbones.decoder import Decoder, DecoderConfig
from vitrail.config import Config
from vitrail.connectors.fused import FusedConfig
from vitrail.errors import ConfigError
from vitrail.lab.ledger import DEVICES, DTYPES, ledger, named, time_floor
from vitrail.lab.scaling import Law
from vitrail.models.unified import UnifiedConfig
from vitrail.models.vlm_config import VLMConfig
from vitrail.nn import Work, cost

Reason = Literal["seconds", "memory", "flops", "loss", "score", "most"]
UNITS = {"seconds": (1.0, "s"), "memory": (1e9, "GB"), "flops": (1e12, "TFLOP")}  # as limits are given by hand


class Price(Config):
    """What questions about one picture of so many tokens cost, answers included.

    first    seconds until the first token of the answers, at least
    seconds  until their last
    memory   bytes of weights, keys and values in the end
    flops    of all
    """

    tokens: int
    first: float
    seconds: float
    memory: int
    flops: int


class Budget(Config):
    """Limits of a price, and `loss`: the share of the best score that may be lost."""

    seconds: float | None = None
    memory: float | None = None
    flops: float | None = None
    loss: float | None = None

    def __post_init__(self) -> None:
        if all(value is None for value in self.plain().values()):
            raise ConfigError("a plan without a budget", "limit seconds, memory or flops, or say what loss will do")
        if any(value is not None and not math.isfinite(value) for value in self.plain().values()):
            raise ConfigError("a budget that is no number", "leave out what is not limited")
        if any(value is not None and value < 0 for value in self.plain().values()) or (self.loss or 0) >= 1:
            raise ConfigError(
                "a budget below nothing, or a loss of everything", "limits are positive, a loss is a share"
            )

    def broken(self, price: Price) -> Reason | None:
        """The first limit that is passed."""
        limits: dict[Reason, float | None] = {"seconds": self.seconds, "memory": self.memory, "flops": self.flops}
        return next((key for key, most in limits.items() if most is not None and getattr(price, key) > most), None)


class Choice(Config):
    """Tokens for one task.

    score    as the law predicts it, with the `interval` of a new measurement
    kept     its share of the best that any number of tokens in range would have
    because  what set the number: a limit, the tolerated loss, scores that fall with more tokens, or the most in range
    within   a limit did not stand in the way of the tolerated loss
    """

    task: str
    tokens: int
    score: float
    interval: tuple[float, float]
    kept: float
    because: Reason
    within: bool
    price: Price


def pricer(
    system: str | Config,
    *,
    words: int = 64,
    answer: int = 64,
    picture: tuple[int, int] = (480, 640),
    batch: int = 1,
    dtype: str = "bfloat16",
    device: str = "h200",
) -> Callable[[int], Price]:
    """A function from tokens of a picture to the price of `batch` questions of so many words about one each, at the
    floor of one device.

    Of a vision-language model the tower and the connector cost what they cost for a `picture` of that size (height,
    width), of one that reads and draws for one of its own, whatever is kept of it; queries that are fused with the
    question are as many as the tokens. A decoder is priced alone.
    """
    config = named(system) if isinstance(system, str) else system
    if not isinstance(config, DecoderConfig | VLMConfig | UnifiedConfig):
        raise ConfigError(
            f"{system if isinstance(system, str) else type(config).__name__} reads no picture's tokens in its stream",
            "name a decoder, or a model whose pictures become tokens",
        )
    if isinstance(config, VLMConfig) and config.voco:
        raise ConfigError(
            "text sees a VoCo model's own tokens and no picture's, however many", "name a model without them"
        )
    if answer < 1:
        raise ConfigError(f"an answer of {answer} tokens", "give at least one")
    given = {"context": words, "batch": batch, "dtype": dtype, "devices": [device], "picture": picture, "lengths": ()}
    whole = ledger(config, **given)
    reads = config if isinstance(config, DecoderConfig) else config.decoder
    with torch.device("meta"):
        decoder = Decoder(reads).to(DTYPES[dtype])
    at = DEVICES[device]
    # A unified model's picture is led by a mark, and is read both ways, as it is by some vision-language models.
    mark = int(isinstance(config, UnifiedConfig))
    both = bool(mark) or (isinstance(config, VLMConfig) and "image" in config.rules.both)

    @cache
    def price(tokens: int) -> Price:
        found = whole
        if isinstance(config, VLMConfig) and isinstance(config.queries, FusedConfig):
            found = ledger(config.with_(queries=config.queries.with_(first=tokens, later=None)), **given)
        sees = [part for part in found.parts if part != "decoder"]
        seen = mark + tokens
        prompt = Work.prefill(words + seen, batch).with_(context=batch * seen)
        if both:
            prompt = prompt.with_(pairs=prompt.pairs + batch * seen * (seen - 1) // 2)
        first = sum(found.floors[0].parts[part].floor for part in sees) + time_floor(decoder, prompt, at).floor
        flops = batch * sum(found.parts[part].forward for part in sees) + cost.flops(decoder, prompt)
        seconds, held = first, cost.bytes(decoder, prompt).cache
        if answer > 1:
            # The prompt gives the first token. Work grows evenly with each of the others, so that two stand for all.
            steps = [Work.decode(words + seen + n, batch) for n in (1, answer - 1)]
            flops += (answer - 1) * sum(cost.flops(decoder, step) for step in steps) // 2
            seconds += (answer - 1) * sum(time_floor(decoder, step, at).floor for step in steps) / 2
            held = cost.bytes(decoder, steps[1]).cache
        return Price(tokens=tokens, first=first, seconds=seconds, memory=found.weights + held, flops=flops)

    return price


def plan(
    laws: Mapping[str, Law], price: Callable[[int], Price], budget: Budget, *, most: int | None = None
) -> list[Choice]:
    """A choice for each task, among all numbers of tokens from the least to the most that its law was fitted to, or to
    `most`: the least whose loss is tolerated, or without one the best that the limits allow."""
    return [_choice(task, law, price, budget, most) for task, law in laws.items()]


def _choice(task: str, law: Law, price: Callable[[int], Price], budget: Budget, most: int | None) -> Choice:
    low = int(np.ceil(law.ends[0]))
    high = int(law.ends[1]) if most is None else most
    if high < low:
        raise ConfigError(f"{task} was measured from {low} tokens on, not up to {high}", "raise the most")
    if reason := budget.broken(price(low)):
        scale, unit = UNITS[reason]
        raise ConfigError(
            f"even {low} tokens of {task} pass the budget's {reason}: {getattr(price(low), reason) / scale:.3g} {unit}",
            "raise it, or take a smaller system",
        )
    afford = low - 1 + bisect.bisect_left(range(low, high + 1), True, key=lambda n: budget.broken(price(n)) is not None)
    scores = np.nan_to_num(law(np.arange(low, high + 1)))  # where a law falls below nothing, nothing is scored
    best = float(scores.max())
    because: Reason | None = None
    within, tokens = True, low + int(scores[: afford - low + 1].argmax())
    if budget.loss is not None:
        enough = low + int((scores >= (1 - budget.loss) * best * (1 - 1e-12)).argmax())
        within = enough <= afford
        if within:
            tokens, because = enough, "loss"
    if because is None:
        limit = budget.broken(price(afford + 1)) if afford < high else "most"
        because = limit if tokens == afford and limit else "score"
    value, under, over = law.predict(tokens)
    return Choice(
        task=task,
        tokens=tokens,
        score=float(value[0]),
        interval=(float(under[0]), float(over[0])),
        kept=float(value[0]) / best,
        because=because,
        within=within,
        price=price(tokens),
    )


def ladder(low: int, high: int) -> list[int]:
    """Numbers of tokens to show a curve at: powers of two, and both ends."""
    return sorted({low, high, *(2**p for p in range(low.bit_length(), high.bit_length()) if low < 2**p < high)})
