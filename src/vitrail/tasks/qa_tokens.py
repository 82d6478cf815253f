"""Shared parts of tasks that train on question-answer samples: tokenization, collation and the answer loss.

B samples, L tokens
"""

import copy
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from vitrail.backbones.decoder import Decoder
from vitrail.data.language.text_pieces import PieceTable, TokenTable
from vitrail.data.qa import QADataset, QASample
from vitrail.data.scenes.scene_source import group_by_source
from vitrail.errors import ConfigError
from vitrail.nn.blockwise_quantization import count_parameters
from vitrail.objectives.fused_cross_entropy import cross_entropy, linear_cross_entropy
from vitrail.processing.chat_template_presets import build_ended_template
from vitrail.processing.tokenizer import Tokenizer
from vitrail.training import distributed
from vitrail.training.task import Batch

TEXT_KEY = "text/ids"  # batch key: windows of plain text from all sources
IGNORE_INDEX = -100
NUM_CHECKED = 64  # samples per source that are checked before training


class QATokenBatch(NamedTuple):
    """Question-answer samples as tokens, with their images."""

    pixels: Tensor  # uint8 (B, 3 or 4, H, W)
    ids: Tensor  # (B, L)
    targets: Tensor  # (B, L) the next token where it is trained on, else IGNORE_INDEX
    attention_mask: Tensor  # (B, L) False for padding
    turn_starts: Tensor  # (B, L) the position where each token's turn starts


@lru_cache(maxsize=16)
def _build_token_table(texts: tuple[str, ...], tokenizer: Tokenizer, eos_token_id: int) -> TokenTable:
    """Token ids of all text pieces and of the end token. Stages of one run share the cached tables."""
    table = PieceTable()
    table.add_all(texts)
    return table.tokenize(tokenizer, [eos_token_id])


class QATokenizer:
    """Turns samples of question-answer datasets into batches of at most `max_length` tokens.

    Token tables are cached per device.
    """

    def __init__(self, datasets: Mapping[str, QADataset], tokenizer: Tokenizer, eos_token_id: int, max_length: int):
        self.datasets, self.eos_token_id, self.max_length = datasets, eos_token_id, max_length
        self._tables: dict[tuple[torch.device, str], TokenTable] = {
            (torch.device("cpu"), name): _build_token_table(tuple(dataset.pieces.texts), tokenizer, eos_token_id)
            for name, dataset in datasets.items()
        }

    @torch.no_grad()
    def make_batch(self, name: str, index: Tensor) -> QATokenBatch:
        return self._encode(name, self.datasets[name].sample_qa(index))

    def _encode(self, name: str, samples: QASample) -> QATokenBatch:
        L, table = self.max_length, self.get_table(samples.pieces.device, name)
        ids, _ = table.to_ids(samples.pieces, L + 1, self.eos_token_id, check=False)
        piece_of_token, piece_lengths = table.piece_of_token(samples.pieces, L + 1), table.length[samples.pieces]
        loss_mask = samples.loss_mask.gather(1, piece_of_token)
        attention_mask = torch.arange(L + 1, device=ids.device) < piece_lengths.sum(1, keepdim=True)
        targets = torch.where(loss_mask & attention_mask, ids, IGNORE_INDEX)[:, 1:]
        turn_starts = (piece_lengths.cumsum(1) - piece_lengths).gather(1, samples.turn_start.gather(1, piece_of_token))
        return QATokenBatch(samples.pixels, ids[:, :-1], targets, attention_mask[:, :-1], turn_starts[:, :-1])

    def get_table(self, device: torch.device, name: str) -> TokenTable:
        if (device, name) not in self._tables:
            self._tables[device, name] = self._tables[torch.device("cpu"), name].to(device)
        return self._tables[device, name]

    def check_lengths(self, name: str, count: int) -> None:
        """Log how many samples are truncated; raise an error if no answer token remains to train on."""
        index = torch.arange(min(count, NUM_CHECKED))
        samples = self.datasets[name].sample_qa(index)
        lengths = self.get_table(index.device, name).length[samples.pieces].sum(1)
        if (num_truncated := int((lengths > self.max_length + 1).sum())) and distributed.get_rank() == 0:
            sys.stderr.write(
                f"{name}: {num_truncated} of {len(index)} samples exceed {self.max_length} tokens and are truncated; "
                f"the longest has {int(lengths.max())}\n"
            )
        if not bool((self._encode(name, samples).targets != IGNORE_INDEX).any()):
            raise ConfigError(
                f"none of {len(index)} samples of {name!r} has an answer within {self.max_length} tokens",
                "raise max_length, or choose question_kinds that its scenes support",
            )


def collate(samples: Sequence[Any]) -> Batch:
    """Group sample indices by source and stack windows of plain text."""
    windows = [torch.from_numpy(sample) for sample in samples if isinstance(sample, np.ndarray)]
    batch = group_by_source([sample for sample in samples if not isinstance(sample, np.ndarray)])
    return batch | ({TEXT_KEY: torch.stack(windows)} if windows else {})


def step_flops(components: Iterable[tuple[Sequence[nn.Module], int]]) -> float:
    """Count the FLOPs of a training step over components in forward order, each given with its forward FLOPs.

    Each component costs its forward pass, a backward pass to its inputs if anything before it trains, and a backward
    pass to its own trainable weights. A frozen tower at the start costs its forward pass only.
    """
    total, trains_before = 0.0, False
    for modules, forward_flops in components:
        trainable = _trainable_fraction(modules)
        total += forward_flops * (1 + (trains_before or trainable > 0) + trainable)
        trains_before = trains_before or trainable > 0
    return total


def _trainable_fraction(modules: Sequence[nn.Module]) -> float:
    """The fraction of the weights that is trainable."""
    trainable = sum(count_parameters(module, trainable=True) for module in modules)
    return trainable / max(1, sum(map(count_parameters, modules)))


def to_chat_tokenizer(tokenizer: Tokenizer, image_token_id: int, video_token_id: int | None = None) -> Tokenizer:
    """Copy the tokenizer and set a chat template in which every turn ends with the end token and has no role prefix.

    `image_token_id` must be a special token that has no other use. Without `video_token_id` the template takes images
    only.
    """
    bos = bos_ids(tokenizer)
    if (
        image_token_id >= tokenizer.vocab_size
        or image_token_id in (tokenizer.eos_token_id, *bos)
        or tokenizer.id_to_token(image_token_id) not in tokenizer.special_tokens
    ):
        raise ConfigError(
            f"the image token id {image_token_id} is not a separate special token of the tokenizer",
            f"set the image token id to one of {tokenizer.special_tokens} other than bos and eos, or add one to "
            "tokenizer.specials",
        )
    chat_tokenizer = copy.copy(tokenizer)
    start = "".join(tokenizer.id_to_token(id) for id in bos)
    chat_tokenizer.chat_template = build_ended_template(
        tokenizer.id_to_token(image_token_id),
        start,
        tokenizer.named_special_tokens["eos"],
        None if video_token_id is None else tokenizer.id_to_token(video_token_id),
    )
    return chat_tokenizer


def bos_ids(tokenizer: Tokenizer) -> list[int]:
    """The bos id as a list, or an empty list if the tokenizer does not prepend one."""
    first = tokenizer.encode("", add_special_tokens=True)[:1]
    return first if first == [tokenizer.bos_token_id] else []


def answer_loss(
    decoder: Decoder, hidden: Tensor, targets: Tensor, reduction: Literal["mean", "sum"], z_loss: float
) -> Tensor:
    """Cross-entropy of hidden (B, L, W) against targets (B, L), plus z_loss · logsumexp².

    Logits are computed for target tokens only. Under a compiler, all tokens get logits so that shapes stay fixed.
    """
    if not torch.compiler.is_compiling():
        is_target = targets != IGNORE_INDEX
        hidden, targets = hidden[is_target][None], targets[is_target][None]  # (1, n, W), (1, n)
    hidden, targets = hidden.flatten(0, 1), targets.flatten()
    if decoder.config.logit_softcap is not None:
        logits = decoder.compute_logits(hidden)
        return cross_entropy(logits, targets, z_loss=z_loss, reduction=reduction, ignore_index=IGNORE_INDEX)
    head = decoder.embed.weight if decoder.head is None else decoder.head.weight
    return linear_cross_entropy(hidden, head, targets, z_loss=z_loss, reduction=reduction, ignore_index=IGNORE_INDEX)
