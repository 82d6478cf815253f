"""Batched text generation from a decoder, with prompts of unequal length and a stop condition per row.

The loop uses a model only through `prefill` and `step`, which return the logits of the next token. `EagerStepper` uses
a growing KV cache, `CUDAGraphStepper` (see cuda_graph_decode.py) uses a CUDA graph.

Shapes: B rows, L tokens of the longest prompt, V vocabulary.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from vitrail.backbones.decoder import Decoder
from vitrail.errors import ConfigError, TextError
from vitrail.generate.sampling import RowRandom, SamplingConfig, sample_tokens, transfer_tokens
from vitrail.generate.stopping import FinishReason, RowState

if TYPE_CHECKING:  # the tokenizers library is optional here
    from vitrail.processing.tokenizer import Tokenizer

Prompt = str | Sequence[int]


class DecodeStepper(Protocol):
    """Protocol of the model calls in the generation loop.

    All calls have the same rows. Finished rows still receive tokens. Prompts are CPU tensors, so that a stepper that
    does not need them on the device does not have to synchronize.
    """

    def prefill(self, ids: Tensor, counts: Tensor) -> Tensor:
        """Process the prompts, ids (B, L) with `counts` (B,) real tokens, and return the next logits (B, V)."""
        ...

    def step(self, ids: Tensor) -> Tensor:
        """Process one more token per row (B,) and return the next logits (B, V)."""
        ...


class EagerStepper:
    """Stepper in eager mode. Its KV cache grows, so short answers are cheap even with a long context."""

    def __init__(self, model: Decoder, batch_size: int, capacity: int):
        self.model, self.cache = model, model.make_cache(batch_size)

    def prefill(self, ids: Tensor, counts: Tensor) -> Tensor:
        ids = ids.to(self.model.embed.weight.device)
        hidden = self.model.forward_hidden(ids, cache=self.cache, counts=counts)  # (B, L, W)
        last = hidden[torch.arange(len(counts), device=counts.device), counts - 1]  # (B, W)
        return self.model.compute_logits(last)

    def step(self, ids: Tensor) -> Tensor:
        return self.model(ids[:, None], cache=self.cache)[:, 0]


StepperFactory = Callable[[Decoder, int, int], DecodeStepper]
"""(model, batch_size, capacity in tokens per row) → stepper"""


def select_stepper(model: Decoder, rows: int, capacity: int) -> DecodeStepper:
    """Return a CUDA graph stepper if the model supports it, and an eager stepper otherwise."""
    from vitrail.generate.cuda_graph_decode import CUDAGraphStepper, can_capture  # circular import

    return (
        CUDAGraphStepper.get_or_create(model, rows, capacity)
        if can_capture(model, rows, capacity)
        else EagerStepper(model, rows, capacity)
    )


class GeneratedToken(NamedTuple):
    """One generated token of one row, and the text that it completes, which may be empty or several words.

    `text` omits special tokens and never contains part of a stop string. `finish_reason` is set on a row's last token.
    """

    row: int
    id: int
    text: str
    finish_reason: FinishReason | None


class GeneratedText(NamedTuple):
    """A complete continuation: all ids including the stop token, the text before the stop, and the finish reason."""

    ids: list[int]
    text: str
    finish_reason: FinishReason


def generate_texts(
    model: Decoder,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int | None = None,
    sampling: SamplingConfig | None = None,
    tokenizer: "Tokenizer | None" = None,
    stop_ids: Sequence[int] | None = None,
    stop_strings: Sequence[str] = (),
    guidance_scale: float = 1.0,
    negative_prompts: Sequence[Prompt] | None = None,
    stepper_factory: StepperFactory | None = None,
) -> list[GeneratedText]:
    """Continue each prompt and return one `GeneratedText` per prompt. See `stream_tokens` for the arguments."""
    ids: list[list[int]] = [[] for _ in prompts]
    texts: list[list[str]] = [[] for _ in prompts]
    ends: dict[int, FinishReason] = {}
    pieces = stream_tokens(
        model,
        prompts,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        tokenizer=tokenizer,
        stop_ids=stop_ids,
        stop_strings=stop_strings,
        guidance_scale=guidance_scale,
        negative_prompts=negative_prompts,
        stepper_factory=stepper_factory,
    )
    for row, id, text, ended in pieces:
        ids[row].append(id)
        texts[row].append(text)
        if ended is not None:
            ends[row] = ended
    return [GeneratedText(ids[row], "".join(texts[row]), ends[row]) for row in range(len(prompts))]


def stream_tokens(
    model: Decoder,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int | None = None,
    sampling: SamplingConfig | None = None,
    tokenizer: "Tokenizer | None" = None,
    stop_ids: Sequence[int] | None = None,
    stop_strings: Sequence[str] = (),
    guidance_scale: float = 1.0,
    negative_prompts: Sequence[Prompt] | None = None,
    stepper_factory: StepperFactory | None = None,
) -> Iterator[GeneratedToken]:
    """Continue each prompt and yield every token as it is sampled.

    prompts           ids, or texts for the tokenizer. A row's result does not depend on the other rows.
    max_new_tokens    new tokens per row; default: the rest of the model's context length
    sampling          sampling parameters; default: `SamplingConfig()`
    stop_ids          ids that end a row; default: those of the tokenizer
    stop_strings      strings that end a row, also across tokens
    guidance_scale    classifier-free guidance g: u + g·(c − u), with logits u of the negative prompt, c of the prompt
    negative_prompts  one prompt per row, or one for all
    stepper_factory   creates the stepper; default: a CUDA graph stepper if possible
    """
    sampling = sampling or SamplingConfig()
    request = _build_request(model, prompts, max_new_tokens, tokenizer, guidance_scale, negative_prompts)
    stop_ids = (() if tokenizer is None else tokenizer.stop_ids) if stop_ids is None else stop_ids
    rows = [
        RowState(p, n, stop_ids, stop_strings, tokenizer) for p, n in zip(request.prompts, request.limits, strict=True)
    ]
    vocab_size = model.config.vocab_size if tokenizer is None else min(tokenizer.vocab_size, model.config.vocab_size)
    return _run_loop(model, request, rows, sampling, vocab_size, guidance_scale, stepper_factory or select_stepper)


@torch.no_grad()
def _run_loop(
    model: Decoder,
    request: "_Request",
    rows: list[RowState],
    sampling: SamplingConfig,
    vocab_size: int,
    guidance: float,
    stepper: StepperFactory,
) -> Iterator[GeneratedToken]:
    device = next(model.parameters()).device
    B, inputs = len(rows), [*request.prompts, *request.negative]
    dice = None if sampling.is_greedy else RowRandom(B, sampling.seed, device)

    counts = torch.tensor([len(ids) for ids in inputs])
    padded = torch.zeros(len(inputs), max(map(len, inputs)), dtype=torch.long)  # (B or 2B, L)
    for row, ids in zip(padded, inputs, strict=True):
        row[: len(ids)] = torch.from_numpy(np.array(ids))  # several times faster than torch.tensor for lists
    used_tokens = (
        None
        if sampling.repetition_penalty == 1
        else _mark_prompt_tokens(request.prompts, model.config.vocab_size).to(device)
    )  # (B, V)

    steps = stepper(model, len(inputs), padded.shape[1] + max(request.limits))
    logits = steps.prefill(padded, counts)
    while True:
        if request.negative:
            c, u = logits.float().chunk(2)
            logits = u + guidance * (c - u)
        chance = None if dice is None else dice.uniform()
        # Exclude vocabulary rows that only pad the embedding and have no text.
        token = sample_tokens(
            logits[:, :vocab_size], sampling, chance, None if used_tokens is None else used_tokens[:, :vocab_size]
        )  # (B,)
        for i, id in enumerate(transfer_tokens(token, logits[:, :vocab_size], model)):
            if rows[i].finish_reason is None:
                yield GeneratedToken(i, id, rows[i].push(id), rows[i].finish_reason)
        if all(row.finish_reason for row in rows):
            return
        if used_tokens is not None:
            used_tokens.scatter_(1, token[:, None], True)
        logits = steps.step(torch.cat([token, token]) if request.negative else token)


def _mark_prompt_tokens(prompts: Sequence[Sequence[int]], vocab: int) -> Tensor:
    """Return booleans (B, V): which tokens each prompt contains."""
    prompt_length = torch.zeros(len(prompts), vocab, dtype=torch.bool)
    for row, ids in zip(prompt_length, prompts, strict=True):
        row[[id for id in ids if id < vocab]] = True  # image token ids can exceed the text vocabulary
    return prompt_length


# ---- validation of requests -------------------------------------------------------------------------------------


class _Request(NamedTuple):
    prompts: list[list[int]]
    negative: list[list[int]]  # empty without guidance
    limits: list[int]  # maximum new tokens of each row


def _build_request(
    model: Decoder,
    prompts: Sequence[Prompt],
    max_new_tokens: int | None,
    tokenizer: "Tokenizer | None",
    guidance: float,
    negative: Sequence[Prompt] | None,
) -> _Request:
    """Validate a request before any computation, and encode its prompts."""
    vocab, context = model.config.vocab_size + model.config.extra_embeddings, model.config.context_length
    prompt_ids = _encode_prompts("prompt", prompts, tokenizer, vocab)
    if not math.isfinite(guidance):
        raise ConfigError(f"guidance_scale is {guidance}", "give a finite number; 1 disables guidance")
    if guidance != 1 and negative is None:
        raise ConfigError(
            f"guidance_scale is {guidance}, but there is no negative prompt", "give a negative prompt, such as [[bos]]"
        )
    negatives = [] if negative is None else _encode_prompts("negative prompt", negative, tokenizer, vocab)
    if len(negatives) == 1:
        negatives *= len(prompt_ids)
    if negatives and len(negatives) != len(prompt_ids):
        raise ConfigError(
            f"{len(negatives)} negative prompts for {len(prompt_ids)} prompts", "give one, or one for each prompt"
        )
    if max_new_tokens is not None and max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens is {max_new_tokens}", "give at least 1, or leave it out")
    limits = []
    for i, ids in enumerate(prompt_ids):
        prompt_length = max(len(ids), len(negatives[i]) if negatives else 0)
        capacity = context - prompt_length
        if capacity < (max_new_tokens or 1):
            raise ConfigError(
                f"prompt {i} has {prompt_length} tokens, and {max_new_tokens or 1} more exceed the context length "
                f"{context}",
                f"give max_new_tokens of at most {capacity}" if capacity > 0 else "shorten the prompt",
            )
        limits.append(max_new_tokens or capacity)
    return _Request(prompt_ids, negatives, limits)


def _encode_prompts(name: str, prompts: Sequence[Prompt], tokenizer: "Tokenizer | None", vocab: int) -> list[list[int]]:
    if isinstance(prompts, str) or not len(prompts):
        raise ConfigError(f"the {name}s are not a list", f"give a list, even for one {name}")
    encoded = []
    for i, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            if tokenizer is None:
                raise ConfigError(f"{name} {i} is text, but there is no tokenizer", "pass the tokenizer, or give ids")
            prompt = tokenizer.encode(prompt, add_special_tokens=True)
        ids = list(map(int, prompt))
        if not ids:
            raise TextError(f"{name} {i} is empty", "give at least one token, such as the tokenizer's bos")
        if min(ids) < 0 or max(ids) >= vocab:
            wrong = next(id for id in ids if not 0 <= id < vocab)
            raise TextError(
                f"{name} {i} contains id {wrong}, and the model has ids 0 to {vocab - 1}", "use the model's tokenizer"
            )
        encoded.append(ids)
    return encoded
