"""A vision-language model learns to answer: scenes with several questions each, named pictures, and plain text.

B samples, C channels, S side, L tokens of a talk, K questions, T tokens of a question, P pieces
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vitrail.config import Config
from vitrail.data.named import NamedSource
from vitrail.data.scenes.source import SceneSource
from vitrail.data.talks import QUESTIONS, SceneTalks, Talks, talks
from vitrail.data.text import TextWindows
from vitrail.data.views import PLAIN, views
from vitrail.data.words.ask import longest
from vitrail.errors import ConfigError
from vitrail.models.looking import LookingVLM
from vitrail.models.rows import Frame, Rows, SeeingModel, mark_of, turn_of
from vitrail.nn import Work, cost
from vitrail.nn.beside import Beside
from vitrail.processing.fit import fit, squashes
from vitrail.processing.text import Tokenizer
from vitrail.tasks.told import IGNORED, TEXT, Teller, begins, collate, said_loss, speaking, step_flops
from vitrail.train.task import Batch

BLANK = "blank/"  # before a part's name: something that runs it and says nothing
MADE = "made/"  # before what a pass takes of pictures and the talks about them


class VLMSettings(Config):
    """
    weights          of answers and of text; 1 unless given
    questions, kinds how many questions are asked of a scene, of which kinds (LLaVA's first stage: one, a caption)
    turns            questions about a picture are "apart", each as if it alone were asked; else most answers can be had
                     from what was said before, and little is learnt of the picture. Or "together", as LLaVA learns
                     them: one conversation, for a model that shall be asked on
    length           tokens of a talk at most; what is longer is cut
    z                weight of logsumexp² of all logits, which keeps them from drifting; in training alone
    """

    weights: dict[str, float] = {}
    questions: int = 6
    kinds: tuple[str, ...] = QUESTIONS
    turns: Literal["apart", "together"] = "apart"
    length: int = 160
    z: float = 0.0

    def __post_init__(self) -> None:
        wrong = [name for name in self.weights if name not in ("answers", "text")]
        if wrong or any(weight < 0 for weight in self.weights.values()):
            raise ConfigError(f"weights {self.weights}", "name answers and text, and give 0 or more")
        if self.length < 8 or self.z < 0:
            raise ConfigError(f"length = {self.length}, z = {self.z:g}", "give 8 or more, 0 or more")


class VLMTask:
    """A row is a bos, where the tokenizer has one, a picture, and a talk: question, end, answer, end, and so on. Turns
    that are apart see what comes before the talk and themselves, and count their positions from the picture on. The
    loss is the mean over tokens of answers and their ends, times the pictures; of text it is the sum over its tokens.
    So micro-batches and ranks weigh by their pictures, not by their tokens: a token counts for less where more are.

    `spoken` is the tokenizer with a chat template that says the same, for whoever asks the model afterwards.
    """

    def __init__(
        self,
        model: SeeingModel,
        sources: Mapping[str, NamedSource | SceneSource | TextWindows],
        words: Tokenizer | None,
        settings: VLMSettings,
    ):
        if words is None or words.eos is None:
            raise ConfigError("answers end with an end token, and there is none", "add a [tokenizer] table")
        self.model, self.settings, self.end = model, settings, words.eos
        self.fused = not isinstance(model, LookingVLM) and model.queries is not None
        shown = {name: source for name, source in sources.items() if not isinstance(source, TextWindows)}
        several = settings.questions != 1 and any(isinstance(source, SceneSource) for source in shown.values())
        self.apart = several and settings.turns == "apart"  # one turn needs no mask
        if self.fused and self.apart:
            raise ConfigError(
                f"queries are fused with all that was asked before, and {settings.questions} questions a scene that "
                "know nothing of each other",
                'set settings.turns = "together", or settings.questions = 1',
            )
        self.spoken = speaking(words, mark_of(model))
        self.rows = Rows(model, begins(words), settings.length, settings.questions if several else 1)
        asked, context = self.rows.before + self.rows.later + settings.length, model.config.decoder.context
        if asked > context:
            raise ConfigError(
                f"rows of {asked} tokens, {asked - settings.length} before a talk, and a decoder made for {context}",
                "lower settings.length, make fewer tokens of a picture, or take a decoder of a longer context",
            )
        self.talks: dict[str, Talks] = {
            name: talks(source, settings.questions, settings.kinds) for name, source in shown.items()
        }
        kinds = (["answers"] if shown else []) + (["text"] if len(shown) < len(sources) else [])
        self.weights = {kind: settings.weights.get(kind, 1.0) for kind in kinds}
        self.teller = Teller(self.talks, words, words.eos, settings.length)
        self._beside = Beside()
        self._learnt = float(settings.length)  # tokens of a talk, when `useful` was last asked
        self.longest = max([0, *map(self._question, self.talks)])  # tokens of a question
        for name in self.talks:
            self.teller.look_over(name, len(shown[name]))

    # ---- samples ------------------------------------------------------------------------------------------------

    def collate(self, samples: Sequence[Any]) -> Batch:
        return collate(samples)

    def counts(self, batch: Batch) -> dict[str, int]:
        """Pictures, and tokens of plain text."""
        pictures = sum(len(index) for name, index in batch.items() if name in self.talks)
        found = {"answers": pictures, "text": _followed(batch.get(TEXT))}
        return {kind: found[kind] for kind in self.weights}

    def parts(self, batch: Batch) -> dict[str, bool]:
        """Pictures are read in one pass, whatever sources they are of, and texts in another."""
        there = {"answers": any(name in self.talks for name in batch), "text": TEXT in batch}
        return {kind: there[kind] or BLANK + kind in batch for kind in self.weights}

    def fill(self, batch: Batch, part: str) -> Batch:
        return batch | {BLANK + part: torch.zeros(1, 2, dtype=torch.long)}

    # ---- losses -------------------------------------------------------------------------------------------------

    def __call__(self, batch: Batch) -> dict[str, Tensor]:
        if MADE + "ids" not in batch:
            batch = self.made(batch)
        zero = self.model.decoder.embed.weight.new_zeros((), dtype=torch.float32)
        losses = dict.fromkeys(self.weights, zero)
        if MADE + "ids" in batch:
            pixels, ids, targets = (batch[MADE + part] for part in ("pixels", "ids", "targets"))
            frame, asked, since = self._frame(ids.device), batch.get(MADE + "asked"), batch.get(MADE + "since")
            hidden = self.rows.hidden(frame, pixels, ids, asked, since)
            losses["answers"] = self._said(hidden, targets, "mean") * (len(ids) - (BLANK + "answers" in batch))
        text, blank = batch.get(TEXT), batch.get(BLANK + "text")
        if text is None and blank is not None:
            losses["text"] = self._text(blank) * 0
        elif text is not None:
            losses["text"] = self._text(text)
        return losses

    @torch.compiler.disable  # frames are kept by device
    def _frame(self, device: torch.device) -> Frame:
        return self.rows.frame(device)

    def _text(self, ids: Tensor) -> Tensor:
        loss = self._said(self.rows.text(ids[:, :-1]), ids[:, 1:], "sum")
        if torch.is_grad_enabled() and self.model.training and not loss.requires_grad:
            raise ConfigError(
                "text is in the mixture, and the stage trains nothing that text reaches",
                "train the decoder, or leave text out and judge it instead (stages.N.judge)",
            )
        return loss

    @torch.compiler.disable  # how much is learnt is another number in every batch
    def _said(self, hidden: Tensor, targets: Tensor, reduction: Literal["mean", "sum"]) -> Tensor:
        z = self.settings.z if self.model.training else 0.0  # what is judged is the loss alone
        return said_loss(self.model.decoder, hidden, targets, reduction, z)

    # ---- what is made of numbers --------------------------------------------------------------------------------

    @torch.compiler.disable  # sources keep tables by device
    @torch.no_grad()
    def made(self, batch: Batch) -> Batch:
        """The talks of all sources, one below the other, beside what else there is: behind `MADE`

        pixels   (B, C, S, S), normalised as the tower reads them
        ids      (B, L)
        targets  (B, L) what each token should be followed by, where it is learnt
        read     (2,) tokens of talks and pictures, padding aside, and how many of them are learnt
        asked    (B, K, T) the questions, −1 behind each, where queries are fused with them
        since    (B, L) the place where each token's turn begins, where that matters
        """
        told = [partial(self._talk, name, index) for name, index in batch.items() if name in self.talks]
        parts = self._beside(next(iter(batch.values())).device, told)
        if BLANK + "answers" in batch:
            parts.append(self._blank(batch[BLANK + "answers"].device))
        if not parts:
            return batch
        columns = {key: [part[key] for part in parts] for key in parts[0]}
        made = {key: torch.cat(column) for key, column in columns.items() if key != "read"}
        made["read"] = torch.stack(columns["read"]).sum(0)
        if self.fused:
            made["asked"] = self._asked(made["ids"], made["since"])
        if not (self.apart or self.rows.later):
            del made["since"]
        rest = {name: value for name, value in batch.items() if name not in self.talks}
        return rest | {MADE + key: value for key, value in made.items()}

    def _asked(self, ids: Tensor, since: Tensor) -> Tensor:
        """The questions of talks (B, L): of each turn what comes before its first end, (B, K, T)"""
        K, T, ends = self.rows.questions, self.longest, (ids == self.end).long()
        before = ends.cumsum(1) - ends
        place = torch.arange(ids.shape[1], device=ids.device) - since  # in its turn
        question = (ends == 0) & (before == before.gather(1, since.clamp(max=ids.shape[1] - 1))) & (place < T)
        slot = torch.where(question, turn_of(since) * T + place, K * T)  # what is no question goes behind, and away
        return ids.new_full((len(ids), K * T + 1), -1).scatter(1, slot, ids)[:, :-1].unflatten(1, (K, T))

    def _talk(self, name: str, index: Tensor) -> Batch:
        told = self.teller.tell(name, index)
        turns = (turn_of(told.since) * told.inside).amax(1).sum()  # later ones
        shown = len(index) * self.rows.before + turns * (self.rows.later // max(1, self.rows.questions - 1))
        read = torch.stack([told.inside.sum() + shown, (told.targets != IGNORED).sum()])
        pixels = self.viewed(told.pixels, name)
        return {"pixels": pixels, "ids": told.ids, "targets": told.targets, "since": told.since, "read": read}

    def _question(self, name: str) -> int:
        """Tokens that no question about a source's pictures exceeds."""
        told, table = self.talks[name], self.teller.table(torch.device("cpu"), name)
        return longest(told.words, table, told.kinds)[0] if isinstance(told, SceneTalks) else told.longest(table)[0]

    def _blank(self, device: torch.device) -> Batch:
        C, S = len(self.model.config.mean), self.rows.side
        ids = torch.full((1, self.settings.length), self.end, device=device)
        pixels = torch.zeros(1, C, S, S, device=device, dtype=self.model.decoder.embed.weight.dtype)
        nothing = torch.full_like(ids, IGNORED), torch.zeros_like(ids), ids.new_zeros(2)
        return dict(zip(("pixels", "ids", "targets", "since", "read"), (pixels, ids, *nothing), strict=True))

    def viewed(self, pixels: Tensor, name: str) -> Tensor:
        """uint8 (B, 3 or 4, H, W) → (B, C, S, S), fitted, varied in training, and normalised as the tower reads it"""
        config = self.model.config
        height, width = pixels.shape[2:]
        if height != width or not squashes(self.rows.policy, height, width):
            pixels = fit(pixels, self.rows.policy)
        varied = self.talks[name].views if self.model.training else PLAIN
        x = (views(pixels, varied.with_(side=self.rows.side)) + 1) / 2
        # Number by number: a host that sends a table of them to a GPU waits for what it does.
        told = [(x[:, c] - mean) / std for c, (mean, std) in enumerate(zip(config.mean, config.std, strict=True))]
        return torch.stack(told, 1).to(self.model.decoder.embed.weight.dtype)

    # ---- costs --------------------------------------------------------------------------------------------------

    def useful(self, batch: Batch) -> int:
        """Tokens that a pass over what was `made` reads, those of pictures included and padding left out."""
        talked, written = 0, _followed(batch.get(TEXT))
        if MADE + "ids" in batch:
            talked, learnt = batch[MADE + "read"].tolist()
            pictures = len(batch[MADE + "ids"]) - (BLANK + "answers" in batch)
            self._learnt = learnt / pictures if pictures else self._learnt
        return talked + written

    def flops(self, batch: Batch) -> int:
        """Of a forward pass, the tower's included; the head's of what is learnt, as it was when `useful` was asked.
        Turns that are apart are counted as if they saw one another, which their mask does not spare."""
        return sum(found for _, found in self._legs(batch))

    def step_flops(self, batch: Batch) -> float:
        return step_flops(self._legs(batch))

    def _legs(self, batch: Batch) -> list[tuple[Sequence[nn.Module], int]]:
        """The parts in the order that a picture goes through them, each with its operations."""
        B, text, decoder = sum(len(i) for n, i in batch.items() if n in self.talks), batch.get(TEXT), self.model.decoder
        legs = self.model.legs(self.rows.work(B, round(B * self._learnt))).values() if B else ()
        found = [(leg.modules, leg.flops) for leg in legs]
        if text is not None:
            found.append(([decoder], cost.flops(decoder, Work.causal(text.shape[1] - 1, len(text)))))
        return found


def _followed(windows: Tensor | None) -> int:
    """Tokens that have one before them."""
    return 0 if windows is None else windows.numel() - len(windows)
