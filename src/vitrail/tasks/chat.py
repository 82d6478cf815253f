"""A vision-language model learns from conversations: with pictures of any size, anywhere in them, or none.

Data workers read the pictures and lay conversations side by side in rows, each a segment of its own. So any policy and
tower can be trained: one view, any-resolution, tiles, native sizes with DeepStack.

B rows, L tokens of a row, P pictures, F places that features fill
"""

import copy
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from PIL import Image
from torch import Tensor, nn

from vitrail.config import Config
from vitrail.data.conversations import ConversationSource
from vitrail.data.formats import Sample
from vitrail.errors import ConfigError, VitrailError
from vitrail.models.seeing import SeeingWork
from vitrail.models.spoken import Speech, begun, kept, laid
from vitrail.models.vlm import VLM, Shown, prepare, shapes
from vitrail.processing.chat import ChatTemplate
from vitrail.processing.text import Tokenizer
from vitrail.stream import Batch as Packed
from vitrail.stream import Part, Stream, build, pack, words
from vitrail.stream.pack import IGNORED, Fill
from vitrail.tasks.told import said_loss, speaking, step_flops
from vitrail.train.task import Batch

FIELDS = ("ids", "kinds", "positions", "segments", "spans", "targets")  # of a packed stream: what a pass needs
PLACES, ROWS = "places/", "rows/"  # before a feed's name: where its features go (F,), and which of them (F,)
TRIED = 8  # conversations of a source that are laid out before training, besides the longest
GREY = Image.new("RGB", (32, 32), (128, 128, 128))


class ChatSettings(Config):
    """
    length    tokens of a row; as many conversations lie in one as there is room for
    long      what is done with a longer conversation: "refuse" ends the run and names it; "cut" keeps what fits, never
              half a picture, and the log has the share of conversations that were cut
    template  how turns are written: a preset of `ChatTemplate`. Unless given it is the tokenizer's own, else that of
              the model's family if the tokenizer has its tokens, else "ended": every turn, and the end token
    z         weight of logsumexp² of all logits; in training alone
    """

    length: int = 2048
    long: Literal["refuse", "cut"] = "refuse"
    template: str | None = None
    z: float = 0.0

    def __post_init__(self) -> None:
        if self.length < 8 or self.z < 0:
            raise ConfigError(f"length = {self.length}, z = {self.z:g}", "give 8 or more, 0 or more")


class Said(NamedTuple):
    """A conversation as the model reads it."""

    stream: Stream
    shown: Shown | None
    sizes: list[tuple[int, int]]  # (height, width) of its pictures
    cut: bool


class ChatTask:
    """The loss is the sum over what the assistant says, its ends included; words of others and pictures have none. So
    a token weighs the same in whatever row, micro-batch or rank it lies.

    A batch without a picture gets a grey one in a sample of its own, of which nothing is learnt: every pass runs all
    parts of the model, whatever the conversations hold.

    `spoken` is the tokenizer with the template that was used, for whoever asks the model afterwards.
    """

    def __init__(
        self,
        model: VLM,
        sources: Mapping[str, ConversationSource],
        tokenizer: Tokenizer | None,
        settings: ChatSettings,
        speech: Speech | None = None,
    ):
        if tokenizer is None or tokenizer.eos is None:
            raise ConfigError("answers end with an end token, and there is none", "add a [tokenizer] table")
        if model.queries is not None:
            raise ConfigError(
                "queries that are fused with one question, and conversations of several", 'use the task "vlm"'
            )
        self.model, self.config, self.settings, self.words = model, model.config, settings, tokenizer
        self.mark, self.spoken = model.config.rules.fill, speaking(tokenizer, model.config.rules.fill)
        self.speech = Speech(ChatTemplate.of(self.spoken)) if speech is None else speech
        if speech is not None:
            self.spoken = copy.copy(tokenizer)
            if speech.template.source != tokenizer.chat_template:
                self.spoken.chat_template = kept(speech.template, tokenizer)
        self.weights = {"answers": 1.0} | ({"cut": 0.0} if settings.long == "cut" else {})
        self._read = torch.zeros((), dtype=torch.long)  # tokens, padding aside, since `useful` was asked
        context = model.config.decoder.context
        if settings.length > context:
            raise ConfigError(
                f"rows of {settings.length} tokens and a decoder made for {context}",
                "lower settings.length, or take a decoder of a longer context",
            )
        if len(self._grey.stream) > settings.length:
            raise ConfigError(
                f"a small picture is {len(self._grey.stream)} tokens, and a row has {settings.length}",
                "raise settings.length, or make fewer tokens of a picture",
            )
        for name, source in sources.items():
            self._try(name, source)

    # ---- samples, in the data workers ---------------------------------------------------------------------------

    def collate(self, samples: Sequence[Sample]) -> Batch:
        """Tensors alone, as they go to a device: a packed stream, `pixels`, of `pictures` (P, 3) height, width and rows
        of features, and which conversations were `cut`."""
        said = [self.said(sample) for sample in samples]
        full = said if any(one.sizes for one in said) else [*said, self._grey]
        packed = pack([one.stream for one in full], self.settings.length, trim=True)
        batch = {field: getattr(packed, field) for field in FIELDS}
        for feed, fill in packed.fills.items():
            batch |= {PLACES + feed: fill.places, ROWS + feed: fill.rows}
        batch["pixels"] = torch.cat([one.shown.pixels for one in full if one.shown is not None])
        sizes, rows = [size for one in full for size in one.sizes], [rows for rows, _ in packed.fills["image"].blocks]
        batch["pictures"] = torch.tensor([(*size, row) for size, row in zip(sizes, rows, strict=True)])
        batch["cut"] = torch.tensor([one.cut for one in said])
        return batch

    def said(self, sample: Sample) -> Said:
        """A conversation with its pictures, in the order in which they are shown."""
        try:
            shown = [part.index for turn in sample.turns for part in turn.parts if part.kind == "image"]
            chat = begun(self.speech.template.encode(sample.messages(), self.words), self.words, self.mark)
            images = [sample.image(index) for index in shown]
            sizes = [(image.height, image.width) for image in images]
            parts = laid(chat, shapes(self.config, sizes), self.config, self.speech)
            length, room = sum(part.tokens for part in parts), self.settings.length
            if length > room:
                if self.settings.long == "refuse":
                    raise ConfigError(
                        f"{length:,} tokens, more than a row of {room:,}",
                        'raise settings.length, make fewer tokens of a picture, or set settings.long = "cut"',
                    )
                parts = _cut(parts, room)
            seen = sum(part.kind == "image" for part in parts)
            stream = build(parts, self.config.rules, name=f"conversation {sample.id:.80}")
        except VitrailError as error:
            raise type(error)(f"conversation {sample.id:.80}: {error.problem}", error.remedy) from None
        return Said(stream, prepare(self.config, images[:seen]) if seen else None, sizes[:seen], length > room)

    @cached_property
    def _grey(self) -> Said:
        shown, size = prepare(self.config, [GREY]), (GREY.height, GREY.width)
        return Said(build(self.config.parts(shown.shapes[0]), self.config.rules, name="grey"), shown, [size], False)

    def _try(self, name: str, source: ConversationSource) -> None:
        """What is never learnt would look perfect."""
        items = {*range(min(len(source), TRIED)), *source.extremes}
        tried = [self.said(source[item]) for item in sorted(items)]
        if not any(one.stream.learnt for one in tried):
            raise ConfigError(
                f"of {len(tried)} conversations of {name!r} not one has an answer within {self.settings.length} tokens",
                "allow a greater length, or make fewer tokens of a picture",
            )

    # ---- losses -------------------------------------------------------------------------------------------------

    def counts(self, batch: Batch) -> dict[str, int]:
        """Tokens that are learnt, and conversations."""
        found = {"answers": int((batch["targets"] != IGNORED).sum()), "cut": len(batch["cut"])}
        return {name: found[name] for name in self.weights}

    def __call__(self, batch: Batch) -> dict[str, Tensor]:
        hidden = self.model.hidden(*self._given(batch))
        losses = {"answers": self._said_loss(hidden, batch["targets"]), "cut": batch["cut"].float().sum()}
        return {name: losses[name] for name in self.weights}

    @torch.compiler.disable  # how much is learnt is another number in every batch
    def _said_loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        z = self.settings.z if self.model.training else 0.0  # what is judged is the loss alone
        return said_loss(self.model.decoder, hidden, targets, "sum", z)

    @torch.compiler.disable
    def _given(self, batch: Batch) -> tuple[Packed, Shown]:
        """The packed stream and its pictures, as they were before they became tensors. Segments and spans go to the
        host, where a plan is made of them."""
        pictures = batch["pictures"].tolist()
        found = shapes(self.config, [(height, width) for height, width, _ in pictures])
        feeds = {name.removeprefix(PLACES) for name in batch if name.startswith(PLACES)}
        blocks: dict[str, tuple[tuple[int, str], ...]] = {feed: ((1, feed),) for feed in feeds}  # the newline's one row
        blocks["image"] = tuple((rows, f"picture {n}") for n, (_, _, rows) in enumerate(pictures))
        fills = {feed: Fill(batch[PLACES + feed], batch[ROWS + feed], blocks[feed]) for feed in feeds}
        segments, spans = batch["segments"].cpu(), batch["spans"].cpu()
        self._read = self._read + (segments >= 0).sum()
        none = torch.empty(0)  # these are of the samples one by one, which no pass asks for
        packed = Packed(
            **{field: batch[field] for field in ("ids", "kinds", "positions", "targets")},
            segments=segments,
            spans=spans,
            loss=none,
            source=none,
            row=none,
            fills=fills,
            lengths=tuple(_lengths(segments)),
            names=(),
            sources=(),
            silent=(),
        )
        return packed, Shown(batch["pixels"].to(self.model.decoder.embed.weight.dtype), found)

    # ---- costs --------------------------------------------------------------------------------------------------

    def useful(self) -> int:
        """Tokens read since this was last asked, those of pictures included and padding left out."""
        found, self._read = int(self._read), torch.zeros_like(self._read)
        return found

    def flops(self, batch: Batch) -> int:
        """Of a forward pass, the tower's included; the head's of what is learnt, and padding left out."""
        return sum(found for _, found in self._legs(batch))

    def step_flops(self, batch: Batch) -> float:
        return step_flops(self._legs(batch))

    def _legs(self, batch: Batch) -> list[tuple[Sequence[nn.Module], int]]:
        """The parts in the order that a picture goes through them, each with its operations."""
        return [(leg.modules, leg.flops) for leg in self.model.legs(self._work(batch)).values()]

    def _work(self, batch: Batch) -> SeeingWork:
        lengths, spans = _lengths(batch["segments"]), batch["spans"]
        pairs = sum(n * (n + 1) // 2 for n in lengths)
        for row in spans[(spans > 0).any(1)]:  # what is read both ways sees its future, too
            pairs += sum(n * (n - 1) // 2 for n in row[row > 0].unique(return_counts=True)[1].tolist())
        asked = int((batch["targets"] != IGNORED).sum())
        found = self.model.work([(height, width) for height, width, _ in batch["pictures"].tolist()], 0)
        return found.with_(tokens=sum(lengths), pairs=pairs, rows=len(lengths), held=0, asked=asked)


def _lengths(segments: Tensor) -> list[int]:
    """Of the samples, by their numbers."""
    return segments[segments >= 0].bincount().tolist()


def _cut(parts: Sequence[Part], room: int) -> list[Part]:
    """The first so many tokens; a picture that does not fit is left out, with all that follows."""
    found: list[Part] = []
    for part in parts:
        if part.tokens > room:
            if part.kind == "text" and room:
                assert part.ids is not None and not isinstance(part.loss, bool)
                found.append(words(part.ids[:room], part.loss[:room]))
            break
        found.append(part)
        room -= part.tokens
    return found
