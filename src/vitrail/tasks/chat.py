"""A vision-language model learns from conversations: with pictures of any size and videos, anywhere in them, or none.

Data workers read what is shown and lay conversations side by side in rows, each a segment of its own. So any policy and
tower can be trained: one view, any-resolution, tiles, native sizes with DeepStack.

B rows, L tokens of a row, P pictures, M videos, F places that features fill
"""

import copy
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import zip_longest
from typing import Any, Literal, NamedTuple

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from vitrail.config import Config
from vitrail.connectors.voco import voco_groups
from vitrail.data.conversations import ConversationSource
from vitrail.data.formats import Sample
from vitrail.encoders.packed import PackedViTConfig
from vitrail.errors import ConfigError, VitrailError
from vitrail.models.seeing import SeeingWork
from vitrail.models.spoken import Speech, asked_of, begun, fused_with, kept, laid, standing
from vitrail.models.videos import Video, Watched, watch
from vitrail.models.vlm import VLM, Shown, filmed, prepare, shapes
from vitrail.models.vlm_config import Shape, VLMConfig
from vitrail.processing.anyres import AnyRes
from vitrail.processing.chat import ChatTemplate
from vitrail.processing.footage import Footage
from vitrail.processing.grid import Grid
from vitrail.processing.text import Tokenizer
from vitrail.processing.tiles import Tiles
from vitrail.stream import KINDS, Part, Stream, build, pack, words
from vitrail.stream import Batch as Packed
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
              half a picture or video, and the log has the share of conversations that were cut
    template  how turns are written: a preset of `ChatTemplate`. Unless given it is the tokenizer's own, else that of
              the model's family if the tokenizer has its tokens, else "ended": every turn, and the end token
    frames    of every video so many are read, or all that it has; or
    fps       so many a second; and
    pixels    about so many of a frame at most, of those that are read in their own shape. Unless given all three are as
              the model's `footage` says, which stays as it is: who asks the model afterwards says it again
    z         weight of logsumexp² of all logits; in training alone
    """

    length: int = 2048
    long: Literal["refuse", "cut"] = "refuse"
    template: str | None = None
    frames: int | None = None
    fps: float | None = None
    pixels: int | None = None
    z: float = 0.0

    def __post_init__(self) -> None:
        if self.length < 8 or self.z < 0:
            raise ConfigError(f"length = {self.length}, z = {self.z:g}", "give 8 or more, 0 or more")
        if self.frames is not None and self.fps is not None:
            raise ConfigError(f"{self.frames} frames of a video, and {self.fps} a second", "give one of the two")

    def footage(self, config: VLMConfig) -> Footage | None:
        """What is read of videos by such a model; None where it reads none."""
        usual = config.films
        if usual is None:
            if (self.frames, self.fps, self.pixels) != (None, None, None):
                raise ConfigError("settings of videos, and the model reads none", "leave out frames, fps and pixels")
            return None
        chosen: dict[str, Any] = {} if self.frames is None else {"frames": self.frames}
        chosen |= {} if self.fps is None else {"fps": self.fps, "frames": None}
        if self.pixels is not None:
            if not isinstance(config.tower, PackedViTConfig):
                raise ConfigError(
                    f"{self.pixels:,} pixels of a frame, and this model reads squares of {usual.side}",
                    "leave pixels out",
                )
            chosen["min_pixels"] = min(usual.min_pixels, self.pixels)
            if usual.rule == "qwen3-vl":  # its budget is of all frames together, and the cap that of one
                chosen["cap"] = max(1, self.pixels // (config.tower.patch * config.tower.merge) ** 2)
            else:
                chosen["max_pixels"] = self.pixels
        return usual.with_(**chosen)


class Said(NamedTuple):
    """A conversation as the model reads it."""

    stream: Stream
    shown: Shown | None
    sizes: list[tuple[int, int]]  # (height, width) of its pictures
    cut: bool
    questions: tuple[list[Tensor], ...] = ()  # about each picture, where queries are fused with them: their ids (T,)
    films: Shown | None = None


class ChatTask:
    """The loss is the sum over what the assistant says, its ends included; words of others, pictures and videos have
    none. So a token weighs the same in whatever row, micro-batch or rank it lies.

    A batch without a picture gets a grey one in a sample of its own, of which nothing is learnt: every pass runs all
    parts of the model, whatever the conversations hold. Videos go through them a second time; where another rank has
    some, a batch without is given a grey one that stands nowhere.

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
        self.model, self.config, self.settings, self.words = model, model.config, settings, tokenizer
        self.mark, self.spoken = model.config.rules.fill, speaking(tokenizer, model.config.rules.fill)
        self.speech = Speech(ChatTemplate.of(self.spoken)) if speech is None else speech
        if speech is not None:
            self.spoken = copy.copy(tokenizer)
            if speech.template.source != tokenizer.chat_template:
                self.spoken.chat_template = kept(speech.template, tokenizer)
        self.watching = model.config.with_(footage=settings.footage(model.config))
        self.weights = {"answers": 1.0} | ({"cut": 0.0} if settings.long == "cut" else {})
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
        of features, and which conversations were `cut`. Where there are videos, also their `frames`, and of `videos`
        (M, 4) the extent in temporal patches, or frames, and patches, and rows of features. Where queries are fused
        with questions, also how many there are of each picture, `questions` (P,), and all of them, `asked` (Q, T), −1
        behind each."""
        said = [self.said(sample) for sample in samples]
        full = said if any(one.sizes for one in said) else [*said, self._grey]
        packed = pack([one.stream for one in full], self.settings.length, trim=True)
        batch = {field: getattr(packed, field) for field in FIELDS}
        for feed, fill in packed.fills.items():
            batch |= {PLACES + feed: fill.places, ROWS + feed: fill.rows}
        batch["pixels"] = torch.cat([one.shown.pixels for one in full if one.shown is not None])
        sizes, rows = [size for one in full for size in one.sizes], [rows for rows, _ in packed.fills["image"].blocks]
        batch["pictures"] = torch.tensor([(*size, row) for size, row in zip(sizes, rows, strict=True)])
        films = [one.films for one in said if one.films is not None]
        if films:
            rows = [rows for rows, _ in packed.fills["video"].blocks]
            found = zip((shape for one in films for shape in one.shapes), rows, strict=True)
            batch["frames"] = torch.cat([one.pixels for one in films])
            batch["videos"] = torch.tensor([(*_extent(shape), row) for shape, row in found])
        batch["cut"] = torch.tensor([one.cut for one in said])
        if self.model.queries is not None:
            asked = [own for one in full for own in one.questions]
            batch["questions"] = torch.tensor([len(own) for own in asked])
            batch["asked"] = pad_sequence([ids for own in asked for ids in own], batch_first=True, padding_value=-1)
        return batch

    def said(self, sample: Sample) -> Said:
        """A conversation with its pictures and videos, in the order in which they are shown."""
        try:
            places = [part for turn in sample.turns for part in turn.parts]
            watched = self._watched(sample, [part.index for part in places if part.kind == "video"])
            films = filmed(self.config, [one.pixels for one in watched]) if watched else None
            clips = [] if films is None else list(zip(films.shapes, watched, strict=True))
            asked = None if self.model.queries is None else asked_of(sample.messages())
            messages = sample.messages() if asked is None else asked.messages
            chat = begun(self.speech.template.encode(messages, self.words), self.words, self.mark)
            images = [sample.image(part.index) for part in places if part.kind == "image"]
            sizes = [(image.height, image.width) for image in images]
            stills = standing(self.config, shapes(self.config, sizes), asked)
            parts = laid(chat, stills, self.config, self.speech, clips, self.words)
            length, room = sum(part.tokens for part in parts), self.settings.length
            if length > room:
                if self.settings.long == "refuse":
                    raise ConfigError(
                        f"{length:,} tokens, more than a row of {room:,}",
                        "raise settings.length, make fewer tokens of a picture, read less of videos (settings.frames, "
                        'settings.pixels), or set settings.long = "cut"',
                    )
                parts = _cut(parts, room, self.config.voco)
            played = len({part.source or number for number, part in enumerate(parts) if part.kind == "video"})
            seen = sum(part.kind == "image" for part in parts)
            asked = None if asked is None else asked.until(seen)
            seen = seen if asked is None else len(asked.questions)
            stream = build(parts, self.config.rules, name=f"conversation {sample.id:.80}")
        except VitrailError as error:
            raise type(error)(f"conversation {sample.id:.80}: {error.problem}", error.remedy) from None
        told = () if asked is None else fused_with(asked, self.words)
        if played < len(watched):
            films = filmed(self.config, [one.pixels for one in watched[:played]]) if played else None
        pictures = prepare(self.config, images[:seen]) if seen else None
        return Said(stream, pictures, sizes[:seen], length > room, told, films)

    def _watched(self, sample: Sample, shown: Sequence[int]) -> list[Watched]:
        """What is read of the videos."""
        if shown and self.speech.video is None:
            reads = self.config.films is not None
            raise ConfigError(
                "it shows a video, and " + ("there is no word for one" if reads else "the model reads none"),
                "take the tokenizer and the template of the model's family; of some families <video> must be among the "
                "special tokens"
                if reads
                else "take a model that does (docs/vlm.md, Videos), or leave it out",
            )
        return [watch(Video(sample.videos[index]), self.watching) for index in shown]

    @cached_property
    def _grey(self) -> Said:
        shown, size = prepare(self.config, [GREY]), (GREY.height, GREY.width)
        stream = build(self.config.parts(shown.shapes[0]), self.config.rules, name="grey")
        return Said(stream, shown, [size], False, ([torch.zeros(0, dtype=torch.long)],))  # nothing is asked about it

    @cached_property
    def _grey_film(self) -> tuple[Shown, int]:
        """A short one, and rows of its features."""
        frames = Video([GREY, GREY], seconds=[0.0, 1.0])
        shown = filmed(self.config, [watch(frames, self.watching).pixels])
        stream = build([self.config.clip(shown.shapes[0])], self.config.rules, name="grey")
        return shown, pack([stream], len(stream)).fills["video"].blocks[0][0]

    def _try(self, name: str, source: ConversationSource) -> None:
        """What is never learnt would look perfect."""
        items = {*range(min(len(source), TRIED)), *source.extremes}
        tried = [self.said(source[item]) for item in sorted(items)]
        if not any(one.stream.learnt for one in tried):
            raise ConfigError(
                f"of {len(tried)} conversations of {name!r} not one has an answer within {self.settings.length} tokens",
                "allow a greater length, or make fewer tokens of a picture",
            )

    # ---- ranks --------------------------------------------------------------------------------------------------

    def parts(self, batch: Batch) -> dict[str, bool]:
        """Of videos the tower runs once more."""
        return {"video": "videos" in batch}

    def fill(self, batch: Batch, part: str) -> Batch:
        (grey, rows), ids = self._grey_film, batch["ids"]
        seen = {"frames": grey.pixels.to(ids.device), "videos": ids.new_tensor([(*_extent(grey.shapes[0]), rows)])}
        return batch | {**seen, PLACES + "video": ids.new_zeros(0), ROWS + "video": ids.new_zeros(0)}

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
    def _given(self, batch: Batch) -> tuple[Packed, Shown, Shown | None]:
        """The packed stream, its pictures and videos, as they were before they became tensors. Segments and spans go
        to the host, where a plan is made of them."""
        pictures = batch["pictures"].tolist()
        found = shapes(self.config, [(height, width) for height, width, _ in pictures])
        feeds = {name.removeprefix(PLACES) for name in batch if name.startswith(PLACES)}
        blocks: dict[str, tuple[tuple[int, str], ...]] = {feed: ((1, feed),) for feed in feeds}  # the newline's one row
        blocks["image"] = tuple((rows, f"picture {n}") for n, (_, _, rows) in enumerate(pictures))
        videos = batch["videos"].tolist() if "videos" in batch else []
        blocks["video"] = tuple((rows, f"video {n}") for n, (*_, rows) in enumerate(videos))
        fills = {feed: Fill(batch[PLACES + feed], batch[ROWS + feed], blocks[feed]) for feed in feeds}
        segments, spans = batch["segments"].cpu(), batch["spans"].cpu()
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
        dtype = self.model.decoder.embed.weight.dtype
        films = Shown(batch["frames"].to(dtype), self._films(batch)) if videos else None
        return packed, Shown(batch["pixels"].to(dtype), found, self._asked(batch)), films

    def _films(self, batch: Batch) -> tuple[Shape, ...]:
        """The shapes of the videos, as they were."""
        return tuple(_shape(self.config, *row[:3]) for row in batch["videos"].tolist()) if "videos" in batch else ()

    def _asked(self, batch: Batch) -> tuple[Sequence[Tensor], ...]:
        """The questions about each picture, as they were."""
        if self.model.queries is None:
            return ()
        every = [ids[ids >= 0] for ids in batch["asked"].cpu()]
        return tuple(every[end - n : end] for n, end in zip(*_ends(batch["questions"]), strict=True))

    # ---- costs --------------------------------------------------------------------------------------------------

    def useful(self, batch: Batch) -> int:
        """Tokens that a pass reads, those of pictures included and padding left out."""
        return int((batch["segments"] >= 0).sum())

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
        if self.config.voco:
            pairs -= _unseen(batch["kinds"], batch["segments"])
        asked = int((batch["targets"] != IGNORED).sum())
        sizes = [(height, width) for height, width, _ in batch["pictures"].tolist()]
        found = self.model.work(sizes, 0, films=self._films(batch))
        if self.model.queries is not None:  # which read all pictures side by side, filled up to the longest
            longest = [max(map(len, column)) for column in zip_longest(*self._asked(batch), fillvalue=())]
            given = max(self.config.given(self.config.policy.cut(*size)) for size in sizes)
            found = found.with_(looks=(*found.looks[:2], self.model.queries.work(given, len(sizes), longest)))
        return found.with_(tokens=sum(lengths), pairs=pairs, rows=len(lengths), held=0, asked=asked)


def _extent(shape: Shape) -> tuple[int, int, int]:
    """Of a video: its temporal patches, rows and columns, or frames that are views."""
    return (shape.t, shape.h, shape.w) if isinstance(shape, Grid) else (len(shape.views), 0, 0)


def _shape(config: VLMConfig, t: int, h: int, w: int) -> Shape:
    """That of a video of such an extent."""
    policy = config.policy
    if isinstance(policy, Tiles | AnyRes):
        return policy.film(t)
    assert isinstance(config.tower, PackedViTConfig)
    return Grid(t=t, h=h, w=w, merge=config.tower.merge)


def _lengths(segments: Tensor) -> list[int]:
    """Of the samples, by their numbers."""
    return segments[segments >= 0].bincount().tolist()


def _ends(counts: Tensor) -> tuple[list[int], list[int]]:
    """So many of each, and where the last of them ends."""
    return counts.tolist(), counts.cumsum(0).tolist()


def _unseen(kinds: Tensor, segments: Tensor) -> int:
    """Pairs of tokens and pictures before them that are not seen, since others stand for the pictures."""
    image, query = (kinds == KINDS[kind].id for kind in ("image", "query"))
    groups, found = voco_groups(image, query), 0
    for row, group in zip(segments, groups, strict=True):
        for number in group[group > 0].unique().tolist():
            own, at = group.abs() == number, int((group == number).nonzero()[0])
            behind = int((row == row[at]).nonzero()[-1]) - int(own.nonzero()[-1])
            found += int((group == number).sum()) * behind
    return found


def _cut(parts: Sequence[Part], room: int, voco: int = 0) -> list[Part]:
    """The first so many tokens; a picture that does not fit, with so many that stand for it, is left out, with all
    that follows. So is a video of which not every patch does."""
    found: list[Part] = []
    for part in parts:
        if part.tokens + voco * (part.kind == "image") > room:
            if part.kind == "text" and room:
                assert part.ids is not None
                found.append(words(part.ids[:room], part.loss if isinstance(part.loss, bool) else part.loss[:room]))
            break
        found.append(part)
        room -= part.tokens
    halved = {part.source for part in parts[len(found) :] if part.kind == "video" and part.source is not None}
    whole = next((n for n, part in enumerate(found) if part.source in halved), len(found))
    return found[:whole]
