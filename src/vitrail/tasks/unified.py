"""Reading, drawing and plain text, each from its sources, in one step.

B samples, L tokens, N codes of a picture
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from vitrail.config import Config
from vitrail.data.named import NamedSource
from vitrail.data.scenes.source import SceneSource
from vitrail.data.talks import QUESTIONS, Talks, talks
from vitrail.data.text import TextWindows
from vitrail.data.views import PLAIN, views
from vitrail.errors import ConfigError
from vitrail.models.unified import Unified
from vitrail.nn import Work, cost
from vitrail.nn.beside import Beside
from vitrail.processing.text import Tokenizer
from vitrail.tasks.told import TEXT, Teller, collate, said_loss
from vitrail.train.task import Batch


class UnifiedSettings(Config):
    """
    draw             the sources whose pictures are drawn; the others' are read, and plain text is continued
    weights          of text, read and draw; 1 unless given
    questions, kinds how many questions are asked of a scene, of which kinds
    wordings         of questions and prompts: the usual ones, or many more (`data.words.templates.MANY`)
    last             a kind that ends every talk: a long caption says more of a picture than questions ask
    length, prompt   tokens of a talk and of a prompt at most; what is longer is cut
    drop             chance that a prompt is left out, so that guidance knows what a picture is without one
    z                weight of logsumexp² of all logits, which keeps them from drifting
    """

    draw: tuple[str, ...] = ()
    weights: dict[str, float] = {}
    questions: int = 6
    kinds: tuple[str, ...] = QUESTIONS
    wordings: Literal["usual", "many"] = "usual"
    last: str | None = None
    length: int = 256
    prompt: int = 128
    drop: float = 0.1
    z: float = 1e-4

    def __post_init__(self) -> None:
        wrong = [name for name in self.weights if name not in ("text", "read", "draw")]
        if wrong or any(weight < 0 for weight in self.weights.values()):
            raise ConfigError(f"weights {self.weights}", "name text, read and draw, and give 0 or more")
        if not 0 <= self.drop <= 1 or min(self.length, self.prompt) < 8 or self.z < 0:
            raise ConfigError(
                f"drop = {self.drop:g}, length = {self.length}, prompt = {self.prompt}, z = {self.z:g}",
                "give 0 … 1, 8 or more, 8 or more, 0 or more",
            )


class UnifiedTask:
    """A loss is the mean over tokens that count, or codes, times the pictures they are of; of text over its tokens.

    The questions about a picture know nothing of each other, each as if it alone were asked: else most answers could be
    had from what was said before, and next to nothing from the picture."""

    def __init__(
        self,
        model: Unified,
        sources: Mapping[str, NamedSource | SceneSource | TextWindows],
        words: Tokenizer | None,
        settings: UnifiedSettings,
    ):
        if words is None or words.eos is None:
            raise ConfigError("answers end with an end token, and there is none", "add a [tokenizer] table")
        unknown = [name for name in settings.draw if name not in sources or isinstance(sources[name], TextWindows)]
        if unknown:
            raise ConfigError(f"{unknown[0]!r} is to be drawn, and is no source of pictures", "name one that is")
        self.model, self.settings, self.end = model, settings, words.eos
        shown = {name: source for name, source in sources.items() if not isinstance(source, TextWindows)}
        self.talks: dict[str, Talks] = {
            name: talks(source, settings.questions, settings.kinds, settings.last, many=settings.wordings == "many")
            for name, source in shown.items()
        }
        kinds = {"draw" if name in settings.draw else "read" for name in shown}
        kinds |= {"text"} if len(shown) < len(sources) else set()
        self.weights = {kind: settings.weights.get(kind, 1.0) for kind in ("text", "read", "draw") if kind in kinds}
        self.teller = Teller(self.talks, words, words.eos, settings.length)
        cpu = torch.device("cpu")
        self.prompt = {
            name: min(settings.prompt, told.longest(self.teller.table(cpu, name))[1])
            for name, told in self.talks.items()
        }
        self.side = model.codec.size[0]
        self._beside = Beside()
        for name in self.talks:
            if name not in settings.draw:
                self.teller.look_over(name, len(shown[name]))

    # ---- samples ------------------------------------------------------------------------------------------------

    def collate(self, samples: Sequence[Any]) -> Batch:
        return collate(samples)

    def counts(self, batch: Batch) -> dict[str, int]:
        """Tokens of plain text, and pictures."""
        found = dict.fromkeys(self.weights, 0)
        for name, rows in batch.items():
            found[self._kind(name)] += rows.numel() - len(rows) if name == TEXT else len(rows)
        return found

    def _kind(self, name: str) -> str:
        return "text" if name == TEXT else "draw" if name in self.settings.draw else "read"

    def __call__(self, batch: Batch) -> dict[str, Tensor]:
        if any(name in self.talks for name in batch):
            batch = self.made(batch)
        losses = {kind: self.model.marks.weight.new_zeros((), dtype=torch.float32) for kind in self.weights}
        if TEXT in batch:
            losses["text"] = self._text(batch[TEXT])
        shown = [name for name in self.talks if f"{name}:pixels" in batch]
        if read := [name for name in shown if self._kind(name) == "read"]:
            losses["read"] = self._read(read, batch)
        for name in shown:
            if self._kind(name) == "draw":
                losses["draw"] = losses["draw"] + self._draw(name, batch)
        return losses

    def _text(self, ids: Tensor) -> Tensor:
        return self._said(self.model(self.model.words(ids[:, :-1])), ids[:, 1:], "sum")

    def _read(self, names: Sequence[str], batch: Batch) -> Tensor:
        """Pictures of all sources in one pass; each source has a mean of its own, whatever its talks are long."""
        pixels, ids, since = (
            torch.cat([batch[f"{name}:{part}"] for name in names]) for part in ("pixels", "ids", "since")
        )
        seen, _ = self.model.look(pixels)
        laid = self.model.lay(self.model.shown(seen), self.model.words(ids, since=since))
        hidden = self.model.hidden(laid, laid.ends[0])
        targets = [batch[f"{name}:targets"] for name in names]
        parts = zip(hidden.split([len(part) for part in targets]), targets, strict=True)
        return torch.stack([self._said(part, wanted, "mean") * len(part) for part, wanted in parts]).sum()

    def _draw(self, name: str, batch: Batch) -> Tensor:
        pixels, ids, counts = (batch[f"{name}:{part}"] for part in ("pixels", "ids", "counts"))
        hidden = batch.get(f"{name}:hidden")  # (B, h, w), where codes are drawn in any order
        model, (_, codes) = self.model, self.model.look(pixels)
        laid = model.lay(model.words(ids, counts), model.drawn(codes, hidden))
        each = model.code_losses(model.drawing_states(laid, model.hidden(laid)), codes.flatten(1), self._z)
        if hidden is None:
            return each.mean(1).sum()
        asked = hidden.flatten(1).float()
        return ((each * asked).sum(1) / asked.sum(1)).sum()

    @property
    def _z(self) -> float:
        return self.settings.z if self.model.training else 0.0  # what is judged is the loss alone

    def _said(self, hidden: Tensor, targets: Tensor, reduction: Literal["mean", "sum"]) -> Tensor:
        return said_loss(self.model.decoder, hidden, targets, reduction, self._z)

    # ---- what is made of numbers --------------------------------------------------------------------------------

    @torch.compiler.disable  # sources keep tables by device
    @torch.no_grad()
    def made(self, batch: Batch) -> Batch:
        told = [name for name in batch if name in self.talks]
        device = next(iter(batch.values())).device
        found = {name: rows for name, rows in batch.items() if name not in self.talks}
        made = self._beside(device, [partial(self._made, name, batch[name]) for name in told])
        for name, parts in zip(told, made, strict=True):
            found |= {f"{name}:{part}": value for part, value in parts.items()}
        return found

    def _made(self, name: str, index: Tensor) -> Batch:
        return self._wish(name, index) if self._kind(name) == "draw" else self._talk(name, index)

    def _talk(self, name: str, index: Tensor) -> Batch:
        """pixels (B, C, S, S), ids (B, L), what each token should be followed by (B, L), where it is learnt, and where
        its turn begins (B, L)"""
        told = self.teller.tell(name, index)
        return {
            "pixels": self._viewed(name, told.pixels),
            "ids": told.ids,
            "targets": told.targets,
            "since": told.since,
        }

    def _wish(self, name: str, index: Tensor) -> Batch:
        """pixels (B, C, S, S), ids (B, L) of prompts and how many of them are there (B,): none where it is dropped; and
        which codes are hidden (B, h, w), where some are"""
        asked = self.talks[name].wish(index)
        L = self.prompt[name]
        ids, length = self.teller.table(index.device, name).write(asked.rows, L, self.end, check=False)
        ids[:, -1] = torch.where(length > L, self.end, ids[:, -1])  # a prompt that is cut keeps its end
        dropped = torch.rand(len(index), device=index.device) < self.settings.drop * self.model.training
        made = {"pixels": self._viewed(name, asked.pixels), "ids": ids, "counts": length.clamp(max=L) * ~dropped}
        return made | ({"hidden": self._hidden(index)} if self.model.config.order == "masked" else {})

    def _hidden(self, index: Tensor) -> Tensor:
        """(B, h, w): a share of cos(π/2 · u) of each picture's codes, at least one, anywhere"""
        B, (h, w), device = len(index), self.model.grid, index.device
        share = torch.cos(math.pi / 2 * torch.rand(B, 1, device=device))
        rank = torch.rand(B, h * w, device=device).argsort(1).argsort(1)
        return (rank < (share * h * w).ceil().clamp(min=1)).view(B, h, w)

    def _viewed(self, name: str, pixels: Tensor) -> Tensor:
        return views(pixels, (self.talks[name].views if self.model.training else PLAIN).with_(side=self.side))

    def flops(self, batch: Batch) -> int:
        """Of the decoder."""
        total = 0
        for name, rows in batch.items():
            more = {"text": 0, "read": self.settings.length, "draw": self.prompt.get(name, 0)}[self._kind(name)]
            work = Work.causal(rows.shape[1] - 1, len(rows)) if name == TEXT else self.model.work(len(rows), more)
            total += cost.flops(self.model, work)
        return total
