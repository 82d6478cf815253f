"""BLIP-2's first stage: queries learn to find in a picture what its caption says.

    itc  contrast   a picture's nearest query and the beginning of a text, both ways, over the whole batch
    itm  matching   does a text belong to a picture? Of true pairs, and of two false ones for each that look true to itc
    itg  writing    the caption, word by word

B samples of this rank, G of all ranks, T tokens, Q queries, N features of a picture, D their width, E of the embedding
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.config import Config
from vitrail.data.named import NamedSource
from vitrail.data.scenes.source import SceneSource
from vitrail.encoders.text import Frame
from vitrail.errors import ConfigError
from vitrail.models.qformer import TextQFormer
from vitrail.nn import Work, cost
from vitrail.objectives import ranks
from vitrail.objectives.queries import SMOOTHING, closest, hard_negatives, smoothed_cross_entropy
from vitrail.processing.text import Tokenizer
from vitrail.tasks.captioned import CaptionedTask, Shape
from vitrail.tasks.contrast import capped_scale
from vitrail.train.task import Batch

LOSSES = ("itc", "itm", "itg")
PAD = -1  # of ids


class QFormerSettings(Config):
    """
    weights    of itc, itm and itg; 1 unless given
    smoothing  of targets, in training: this part is shared by all texts of the batch (itc), or all words (itg)
    """

    weights: dict[str, float] = {}
    smoothing: float = SMOOTHING

    def __post_init__(self) -> None:
        if any(name not in LOSSES for name in self.weights) or any(weight < 0 for weight in self.weights.values()):
            raise ConfigError(f"weights {self.weights}", f"name {', '.join(LOSSES)}, and give 0 or more")
        if not 0 <= self.smoothing < 1:
            raise ConfigError(f"a smoothing of {self.smoothing:g}", "give 0 or more, and less than 1")


class QFormerTask(CaptionedTask):
    """Each loss is a mean times the pictures: over them (itc), pairs (itm), or words (itg). Ranks compare what all of
    them hold, and take false pairs from all; what belongs together is never a false pair."""

    model: TextQFormer

    def __init__(
        self,
        model: TextQFormer,
        sources: Mapping[str, NamedSource | SceneSource],
        words: Tokenizer | None,
        settings: QFormerSettings,
    ):
        config = model.config
        if words is None:
            raise ConfigError("a Q-Former reads captions, and there is no tokenizer", "add a [tokenizer] table")
        if config.dec is None or model.log_scale is None:
            raise ConfigError("a Q-Former that learns writes, and has a scale", "give dec and log_scale")
        for name, id in {"cls": config.cls, "eos": config.eos, "dec": config.dec}.items():
            if id >= words.size or words.token(id) not in words.specials:
                raise ConfigError(
                    f"model.config.{name} is {id}, which is no special token to the tokenizer",
                    f"give the id of one of {words.specials}, or add one: tokenizer.specials",
                )
        self.settings = settings
        self.weights = {name: settings.weights.get(name, 1.0) for name in LOSSES}
        shape = Shape(config.tower.image, config.context, "model.config.context")
        super().__init__(model, sources, words, Frame((config.cls,), (config.eos,), PAD), shape)

    def counts(self, batch: Batch) -> dict[str, int]:
        return dict.fromkeys(self.weights, sum(len(index) for index in batch.values()))

    def flops(self, batch: Batch) -> int:
        """The tower once; the Q-Former once to write and look, once to read, three times to match."""
        B, model, qformer = self.counts(batch)["itc"], self.model, self.model.qformer
        N, T, Q = model.config.seen, model.config.context, qformer.config.queries
        found = cost.flops(model, model.work(B))  # looks and reads
        found += qformer.pass_flops("itg", B, N, T) - qformer.pass_flops("itg", B, N, 0)  # and the words beside it
        found += qformer.pass_flops("itm", 3 * B, N, T)
        heads = {model.matcher: 3 * B * Q, model.writer: B * T}
        found += sum(cost.flops(head, Work(tokens=n, pairs=0)) for head, n in heads.items() if head is not None)
        return found

    def __call__(self, batch: Batch) -> dict[str, Tensor]:
        made, model = self._made(batch), self.model
        ids, B = self._cut(made.true), len(made.true)
        features = model.features(made.pixels)  # (B, N, D)
        looked, told = model.write(features, ids)  # queries do not see the words: they serve to compare as well
        u = F.normalize(model.qformer.project(looked).float(), dim=-1)  # (B, Q, E)
        v = F.normalize(model.encode_text(ids).float(), dim=-1)  # (B, E)
        assert model.log_scale is not None
        scale = capped_scale(model.log_scale)
        to_texts = scale * closest(u, self._all(v))  # (B, G), of each picture
        to_pictures = scale * closest(self._all(u), v).T  # (B, G), of each text
        own = made.labels[:, None] == self._all(made.labels)
        smoothing = self.settings.smoothing if model.training else 0.0  # what is judged is the loss alone
        itc = [smoothed_cross_entropy(logits, own, smoothing).sum() for logits in (to_texts, to_pictures)]
        false = hard_negatives(to_pictures, own), hard_negatives(to_texts, own)
        return {
            "itc": torch.stack(itc).sum() / 2,
            "itm": self._matched(features, ids, *false) * B,
            "itg": self._written(told, ids, smoothing) * B,
        }

    def _matched(self, features: Tensor, ids: Tensor, picture: Tensor, text: Tensor) -> Tensor:
        """The mean over true pairs, texts with a false `picture` (B,), and pictures with a false `text` (B,), both by
        their numbers among all: −1 is none."""
        pictures = torch.cat([features, self._all(features)[picture.clamp_min(0)], features])
        texts = torch.cat([ids, ids, self._all(ids)[text.clamp_min(0)]])
        answers = torch.cat([torch.ones_like(text), picture.clamp_max(0), text.clamp_max(0)])
        return F.cross_entropy(self.model.match(pictures, texts).float(), answers, ignore_index=-1)

    def _written(self, told: Tensor, ids: Tensor, smoothing: float) -> Tensor:
        """The mean over words, ends included: `told` (B, T, V) of each of the words before them."""
        words, next_ones = told[:, :-1], ids[:, 1:]
        if not torch.compiler.is_compiling():  # which must see one shape in every batch
            real = next_ones != PAD
            words, next_ones = words[real], next_ones[real]
        logits = self.model.logits(words).flatten(0, -2).float()
        return F.cross_entropy(logits, next_ones.flatten(), label_smoothing=smoothing, ignore_index=PAD)

    def _cut(self, ids: Tensor) -> Tensor:
        """Texts as long as the longest of them: most are far from what could be said. Under a compiler, and among
        ranks, all batches have one shape."""
        if self._shared or torch.compiler.is_compiling():
            return ids
        return ids[:, : int((ids != PAD).sum(1).max())]

    def _all(self, x: Tensor) -> Tensor:
        """What all ranks have, (B, …) → (G, …)"""
        return ranks.gather(x) if self._shared else x
