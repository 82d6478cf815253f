"""Pictures and words into one space: CLIP's or SigLIP's loss over captioned pictures.

B samples, M texts, L tokens, E width of the embedding
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from vitrail.config import Config
from vitrail.data.named import NamedSource
from vitrail.data.scenes.source import SceneSource
from vitrail.encoders.text import frame
from vitrail.errors import ConfigError
from vitrail.models.clip import Contrastive
from vitrail.nn import cost
from vitrail.objectives import clip_loss, ranks, siglip_loss
from vitrail.processing.text import Tokenizer
from vitrail.tasks.captioned import CaptionedTask, Made, Shape
from vitrail.train.task import Batch

MOST = math.log(100)  # CLIP's scale stays below 100


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


class ContrastTask(CaptionedTask):
    """A model without a bias learns by CLIP's loss, one with a bias by SigLIP's."""

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
        text, width = model.config.text, model.config.width
        if any(cut >= width for cut in settings.widths):
            raise ConfigError(f"embeddings of {width} cannot be cut to {max(settings.widths)}", f"stay below {width}")
        self.settings = settings
        self.weights = {"pairs": 1.0} | ({"texts": settings.texts} if settings.texts else {})
        shape = Shape(model.config.image.image, text.context, "model.config.text.context")
        more = {"swapped": settings.swapped, "twice": settings.texts > 0}
        super().__init__(model, sources, words, frame(words, text), shape, **more)

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
            scale = capped_scale(model.log_scale)
            return ranks.clip_loss(u, v, scale, labels, reduce="sum") if many else clip_loss(u, v, scale, labels)
        scale, bias = model.scale.float(), model.bias.float()
        if many:
            return ranks.siglip_loss(u, v, scale, bias, labels, reduce="sum")
        return siglip_loss(u, v, scale, bias, labels)


def _whole(loss: Tensor, rows: int) -> Tensor:
    """The loss as a sum over this rank's rows. Its gradient is that of the sum over all ranks' rows: each rank holds
    its part of it, and the trainer adds them up."""
    everywhere = torch.tensor(float(rows), device=loss.device)
    dist.all_reduce(everywhere)
    return loss * everywhere - (loss * (everywhere - rows)).detach()


def capped_scale(log_scale: Tensor) -> Tensor:
    """What similarities are multiplied by, a hundred at most."""
    return _AtMost.apply(log_scale.float(), MOST).exp()


class _AtMost(torch.autograd.Function):
    """A number cut off at a limit: there, what would raise it further has no gradient, and what lowers it has."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, most: float) -> Tensor:
        ctx.beyond = x >= most
        return x.clamp(max=most)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyrefly: ignore
        return torch.where(ctx.beyond & (gradient < 0), 0, gradient), None
