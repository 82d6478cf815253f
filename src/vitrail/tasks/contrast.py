"""Pictures and words into one space: CLIP's or SigLIP's loss over captioned pictures.

B samples, M texts, L tokens, E width of the embedding
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from vitrail.config import Config
from vitrail.data.captions import Captions, captions
from vitrail.data.named import NamedSource
from vitrail.data.scenes.source import Asked, SceneSource, by_source
from vitrail.data.views import PLAIN, views
from vitrail.data.words.pieces import TokenTable
from vitrail.encoders.text import frame
from vitrail.errors import ConfigError
from vitrail.models.clip import Contrastive
from vitrail.nn import cost
from vitrail.objectives import clip_loss, ranks, siglip_loss
from vitrail.processing.text import Tokenizer
from vitrail.train.task import Batch

MOST = math.log(100)  # CLIP's scale stays below 100
_TEXT = 1 << 62  # labels from here on are those of texts, below of concepts


class ContrastSettings(Config):
    """
    widths   embeddings are compared by their first so many numbers too, so that they can be cut (Matryoshka)
    texts    weight of a loss between two captions of one picture, so that texts find texts
    swapped  captions with colours, places, numbers or sizes swapped join the batch as texts that belong to nothing
    """

    widths: tuple[int, ...] = ()
    texts: float = 0.0
    swapped: bool = False

    def __post_init__(self) -> None:
        if any(width < 1 for width in self.widths):
            raise ConfigError(f"embeddings cut to {self.widths}", "give widths of at least 1")
        if self.texts < 0:
            raise ConfigError(f"a weight of {self.texts}", "give 0 or more")


class Made(NamedTuple):
    """A batch on the device: pictures, ids (B, L) of their captions, and which belong together."""

    pixels: Tensor  # (B, 3, S, S)
    true: Tensor
    false: Tensor | None
    again: Tensor | None
    labels: Tensor  # (B,) of the pictures and of `true`
    wrong: Tensor | None  # (M,) of `false`: −1 where there is none


class ContrastTask:
    """A model without a bias learns by CLIP's loss, one with a bias by SigLIP's. Pictures of one name, of whichever
    source, belong to all captions of that name; scenes belong to captions word for word as their own."""

    def __init__(
        self,
        model: Contrastive,
        sources: Mapping[str, NamedSource | SceneSource],
        words: Tokenizer | None,
        settings: ContrastSettings,
    ):
        if words is None:
            raise ConfigError(
                "a contrastive model reads captions, and there is no tokenizer", "add a [tokenizer] table"
            )
        if words.eos is not None and model.config.text.eos not in (None, words.eos):
            raise ConfigError(
                f"texts end with {model.config.text.eos} to the model, and with {words.eos} to the tokenizer",
                f"set model.config.text.eos to {words.eos}",
            )
        if settings.swapped and not any(isinstance(source, SceneSource) for source in sources.values()):
            raise ConfigError("swapped captions are made of scenes, and there are none", "add a source of scenes")
        self.model, self.settings, self.words = model, settings, words
        width = model.config.width
        if any(cut >= width for cut in settings.widths):
            raise ConfigError(f"embeddings of {width} cannot be cut to {max(settings.widths)}", f"stay below {width}")
        self.weights = {"pairs": 1.0} | ({"texts": settings.texts} if settings.texts else {})
        self.captions: dict[str, Captions] = {name: captions(source) for name, source in sources.items()}
        self.frame = frame(words, model.config.text)
        self._numbers: dict[str, int] = {}  # of concepts, for all sources alike
        self._ready: dict[tuple[torch.device, str], tuple[TokenTable, Tensor]] = {}
        for name, told in self.captions.items():
            self._read(name, told)

    def collate(self, samples: Sequence[Asked]) -> Batch:
        return by_source(samples)

    def counts(self, batch: Batch) -> dict[str, int]:
        return dict.fromkeys(self.weights, sum(len(index) for index in batch.values()))

    def flops(self, batch: Batch) -> int:
        """Every picture has its caption, a second one where texts are compared, and scenes a false one where asked."""
        B = self.counts(batch)["pairs"]
        more = B if self.settings.texts else 0
        if self.settings.swapped:
            more += sum(len(index) for name, index in batch.items() if self.captions[name].concepts is None)
        text = self.model.text
        return cost.flops(self.model, self.model.work(B)) + (cost.flops(text, text.work(more)) if more else 0)

    def __call__(self, batch: Batch) -> dict[str, Tensor]:
        made = self._made(batch)
        return self.compared(made, self.model.encode_image(made.pixels).float())

    def compared(self, made: Made, u: Tensor) -> dict[str, Tensor]:
        """The losses of embeddings of the pictures (B, E), as sums over them."""
        texts = [part for part in (made.true, made.false, made.again) if part is not None]
        v = self.model.encode_text(torch.cat(texts)).float()
        second = v[-len(u) :] if made.again is not None else None
        v = v if second is None else v[: -len(u)]  # true captions, and behind them false ones
        columns = made.labels if made.wrong is None else torch.cat([made.labels, made.wrong])
        found = {"pairs": self._loss(u, v, made.labels, columns)}
        if second is not None:
            found["texts"] = self._loss(second, v, made.labels, columns)
        return {name: _whole(value, len(u)) if self._shared else value * len(u) for name, value in found.items()}

    @property
    def _shared(self) -> bool:
        """Whether ranks hold parts of one batch. Judged, each has all of it."""
        return self.model.training and dist.is_initialized() and dist.get_world_size() > 1

    def _loss(self, u: Tensor, v: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """The mean over the whole width and all it may be cut to."""
        total = u.new_zeros(())
        for width in (None, *self.settings.widths):
            a, b = (F.normalize(x[:, :width], dim=-1) for x in (u, v))
            total = total + self._one(a, b, (rows, columns))
        return total / (1 + len(self.settings.widths))

    def _one(self, u: Tensor, v: Tensor, labels: tuple[Tensor, Tensor]) -> Tensor:
        model, many = self.model, self._shared
        if model.bias is None:
            scale = _AtMost.apply(model.log_scale.float(), MOST).exp()
            return ranks.clip_loss(u, v, scale, labels, reduce="sum") if many else clip_loss(u, v, scale, labels)
        scale, bias = model.scale.float(), model.bias.float()
        if many:
            return ranks.siglip_loss(u, v, scale, bias, labels, reduce="sum")
        return siglip_loss(u, v, scale, bias, labels)

    # ---- samples ------------------------------------------------------------------------------------------------

    @torch.compiler.disable  # sources keep tables by device
    @torch.no_grad()
    def _made(self, batch: Batch) -> Made:
        vary, side = self.model.training, self.model.config.image.image
        found: dict[str, list[Tensor]] = {field: [] for field in Made._fields}
        for name, index in batch.items():
            told = self.captions[name]
            pair = told.pair(index, vary=vary, swapped=self.settings.swapped)
            found["pixels"].append(views(pair.pixels, (told.views if vary else PLAIN).with_(side=side)))
            found["true"].append(self._ids(name, pair.true))
            concepts = self._on(index.device, name)[1]
            found["labels"].append(_mark(found["true"][-1]) if told.concepts is None else concepts[index])
            if self.settings.texts:
                found["again"].append(self._ids(name, told.again(index, vary=vary)))
            if pair.false is not None:
                found["false"].append(self._ids(name, pair.false))
                found["wrong"].append(torch.where(pair.false.any(1), _mark(found["false"][-1]), -1))
        return Made(**{field: torch.cat(parts) if parts else None for field, parts in found.items()})  # type: ignore

    def _ids(self, name: str, rows: Tensor) -> Tensor:
        """(B, P) pieces → (B, L), written as `evals.contrastive.to_ids` writes the same text"""
        table, L = self._on(rows.device, name)[0], self.model.config.text.context
        first = len(table.length) - 2  # the last two are what stands before and behind a text
        ends = (rows.new_full((len(rows), 1), row) for row in (first, first + 1))
        ids, length = table.write(torch.cat([next(ends), rows, next(ends)], 1), L, self.frame.fill, check=False)
        if self.frame.back:  # a text that is cut keeps its end
            ids[:, -1] = torch.where(length > L, self.frame.back[-1], ids[:, -1])
        return ids

    def _on(self, device: torch.device, name: str) -> tuple[TokenTable, Tensor]:
        """A source's tokens, and its concepts as numbers that all sources share."""
        key = device, name
        if key not in self._ready:
            tokens, numbers = self._ready[torch.device("cpu"), name]
            self._ready[key] = tokens.to(device), numbers.to(device)
        return self._ready[key]

    def _read(self, name: str, told: Captions) -> None:
        frame, text = self.frame, self.model.config.text
        tokens = told.pieces.tokenized(self.words, frame.front, frame.back)
        shown = [self._numbers.setdefault(concept, len(self._numbers)) for concept in told.concepts or ()]
        self._ready[torch.device("cpu"), name] = tokens, torch.tensor(shown)
        more = told.longest(tokens) + len(frame.front) + len(frame.back) - text.context
        if more > 0:
            raise ConfigError(
                f"captions of {name!r} are {more} tokens longer than the text tower reads",
                f"set model.config.text.context to {text.context + more} or more",
            )


def _mark(ids: Tensor) -> Tensor:
    """(B, L) → (B,) a label from _TEXT on, the same for the same text and, but for a chance of 2⁻⁶², for no other"""
    odd = torch.arange(ids.shape[1], device=ids.device) * -0x61C8864680B583EB | 1
    mixed = (ids + 1) * odd
    mixed = (mixed ^ (mixed >> 29)) * -0x40A7B892E31B1A47  # a sum alone would take swapped words for the same
    return (mixed.sum(1) & (_TEXT - 1)) + _TEXT


def _whole(loss: Tensor, rows: int) -> Tensor:
    """The loss as a sum over this rank's rows. Its gradient is that of the sum over all ranks' rows: each rank holds
    its part of it, and the trainer adds them up."""
    everywhere = torch.tensor(float(rows), device=loss.device)
    dist.all_reduce(everywhere)
    return loss * everywhere - (loss * (everywhere - rows)).detach()


class _AtMost(torch.autograd.Function):
    """A number cut off at a limit: there, what would raise it further has no gradient, and what lowers it has."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, most: float) -> Tensor:
        ctx.beyond = x >= most
        return x.clamp(max=most)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyrefly: ignore
        return torch.where(ctx.beyond & (gradient < 0), 0, gradient), None
