"""Visual question answering with a unified model: image first, then the question, then the generated answer.

Shapes: B rows, n tokens of the longest question, h × w image codes.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from vitrail.errors import ConfigError
from vitrail.generate.sampling import GREEDY, SamplingConfig
from vitrail.generate.text_generation import GeneratedText, generate_texts
from vitrail.models.unified_model import UnifiedModel
from vitrail.processing.tokenizer import Tokenizer


class UnifiedStepper:
    """Stepper that processes image codes (B, h, w, ·) of the unified model before the text."""

    def __init__(self, model: UnifiedModel, image_codes: Tensor | None, batch_size: int):
        self.model, self.image_codes = model, image_codes
        self.cache = model.decoder.make_cache(batch_size)
        self.next_position = torch.zeros(batch_size, 1, dtype=torch.long)  # position of the next token of each row

    def prefill(self, ids: Tensor, counts: Tensor) -> Tensor:
        model, decoder = self.model, self.model.decoder
        ids, counts = (x.to(decoder.embed.weight.device) for x in (ids, counts))
        pieces = [model.make_text_piece(ids, counts)]
        if self.image_codes is not None:
            pieces.insert(0, model.make_input_image_piece(self.image_codes))
        layout = model.build_layout(*pieces)
        last = layout.embeds.shape[1] - ids.shape[1] + counts - 1  # (B,) index of the last real token
        rows = torch.arange(len(ids), device=ids.device)
        hidden = decoder.forward_hidden(
            embeds=layout.embeds, positions=layout.positions, cache=self.cache, counts=last + 1, spans=layout.plan.spans
        )
        flat = layout.positions if layout.positions.ndim == 2 else layout.positions.amax(-1)
        self.next_position = flat[rows, last][:, None] + 1
        return decoder.compute_logits(hidden[rows, last])

    def step(self, ids: Tensor) -> Tensor:
        decoder = self.model.decoder
        hidden = decoder.forward_hidden(ids[:, None], positions=self.next_position, cache=self.cache)
        self.next_position = self.next_position + 1
        return decoder.compute_logits(hidden)[:, 0]


@torch.no_grad()
def generate_answers(
    model: UnifiedModel,
    image_codes: Tensor | None,
    questions: Sequence[str],
    tokenizer: Tokenizer,
    *,
    max_new_tokens: int = 64,
    sampling: SamplingConfig = GREEDY,
    stop_strings: Sequence[str] = (),
) -> list[GeneratedText]:
    """Generate an answer to each question about its image, with image codes (B, h, w, ·) or None for text only."""
    if image_codes is not None and len(image_codes) != len(questions):
        raise ConfigError(f"{len(image_codes)} images and {len(questions)} questions", "give one image per question")
    if tokenizer.eos_token_id is None:
        raise ConfigError("the tokenizer has no EOS token", "use the model's tokenizer")
    prompts = [[*tokenizer.encode(question), tokenizer.eos_token_id] for question in questions]
    return generate_texts(
        model.decoder,
        prompts,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        tokenizer=tokenizer,
        stop_ids=[tokenizer.eos_token_id],
        stop_strings=stop_strings,
        stepper_factory=lambda _decoder, rows, _capacity: UnifiedStepper(model, image_codes, rows),
    )


@torch.no_grad()
def score_answers(
    model: UnifiedModel, image_codes: Tensor, questions: Sequence[str], answers: Sequence[str], tokenizer: Tokenizer
) -> Tensor:
    """Return the log-likelihood (B,) of each complete answer to a question about its image, EOS token included."""
    if not len(image_codes) == len(questions) == len(answers):
        raise ConfigError(
            f"{len(image_codes)} images, {len(questions)} questions and {len(answers)} answers",
            "give one of each per row",
        )
    if tokenizer.eos_token_id is None:
        raise ConfigError("the tokenizer has no EOS token", "use the model's tokenizer")
    question_ids = [[*tokenizer.encode(text), tokenizer.eos_token_id] for text in questions]
    answer_ids = [[*tokenizer.encode(text), tokenizer.eos_token_id] for text in answers]
    rows = [torch.tensor(a + b) for a, b in zip(question_ids, answer_ids, strict=True)]
    ids = pad_sequence(rows, batch_first=True, padding_value=tokenizer.eos_token_id).to(image_codes.device)  # (B, n)
    counts = torch.tensor([len(row) for row in rows], device=ids.device)
    answer_starts = torch.tensor([len(row) for row in question_ids], device=ids.device)
    hidden = model(model.make_input_image_piece(image_codes), model.make_text_piece(ids, counts))[:, -ids.shape[1] :]
    # The state at i − 1 predicts token i. Only the tokens of the answer count.
    log_probs = (
        model.decoder.compute_logits(hidden[:, :-1]).float().log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    )
    place = torch.arange(1, ids.shape[1], device=ids.device)
    return log_probs.masked_fill((place < answer_starts[:, None]) | (place >= counts[:, None]), 0).sum(1)
