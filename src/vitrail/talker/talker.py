"""A vision-language model ready to hand: pictures, videos and a question in, words out."""

import copy
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from vitrail import hub
from vitrail.connectors.reduce import AnyReduction
from vitrail.devices import usable
from vitrail.errors import ConfigError, TextError
from vitrail.generate import seen
from vitrail.generate.sampling import GREEDY, Sampling
from vitrail.hub.configs import find, resolve
from vitrail.models.looking import LookingVLM, Views
from vitrail.models.spoken import Asked, Speech, asked_of, begun, fused_with, laid, standing
from vitrail.models.videos import Video, Watched, watch
from vitrail.models.vlm import VLM, Shown, VLMConfig
from vitrail.processing.chat import Chat, ChatTemplate, Message
from vitrail.processing.images import load_image
from vitrail.processing.text import Tokenizer
from vitrail.stream import Stream, build, words
from vitrail.stream.build import FIELDS
from vitrail.stream.pack import rows
from vitrail.talker.habits import Habit, around, habit_of, marks_of, template_of, unfilmed
from vitrail.talker.said import parts_of, place, shown_of, text_part

USUAL = 256  # tokens of an answer, where the context has room for them


class Prompt(NamedTuple):
    """A conversation as a stream that ends where the answer begins, with the pictures and videos that it waits for."""

    stream: Stream
    pictures: Shown | Views | None
    videos: Shown | None


class Weighed(NamedTuple):
    """An answer that was weighed and not written: the logarithm of its probability, over how many tokens with the end,
    and whether each of them is the likeliest, so that the model would say just that."""

    logprob: float
    tokens: int
    greedy: bool


class Talker:
    """`vitrail.load(folder)`, where the folder holds a VLM. Messages are transformers': a role, and a text or parts,
    of which {"type": "image", "image": …} holds a picture, as a file or otherwise (see `load_image`), and
    {"type": "video", "video": …} a video: a file, or a `Video`."""

    def __init__(
        self,
        model: VLM | LookingVLM,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        habit: Habit | None = None,
    ):
        self.model, self.words, self.template, self.habit = model.eval(), tokenizer, template, habit
        self.marks = marks_of(model.config, tokenizer)
        self.tokens = {kind: tokenizer.token(id) for kind, id in self.marks.items()}  # what stands for each in a text
        end = None if habit is None else habit.end
        self.speech = Speech(template, *around(habit, tokenizer), self.marks.get("video"))
        self.stops = (*tokenizer.stops, *((tokenizer.id(end),) if end in tokenizer.specials else ()))

    @classmethod
    def load(
        cls,
        name_or_path: str | Path,
        *,
        template: str | None = None,
        device: str | torch.device | None = None,
        reduce: AnyReduction | None = None,
    ) -> "Talker":
        """On a GPU, if there is one, in half precision. `template` names a preset of `ChatTemplate`: otherwise it is
        the folder's own or, where that has none, its family's. `reduce` leaves fewer tokens of each picture than the
        folder says."""
        where, dtype = home(device)
        found = find(resolve(name_or_path))
        if not issubclass(found.model, VLM | LookingVLM):
            raise ConfigError(f"{name_or_path} is a {found.model.__name__} and not a VLM", "give the folder of a VLM")
        tokenizer, habit = hub.tokenizer(name_or_path), habit_of(found)
        chosen = template_of(found, tokenizer, habit, template)
        if reduce is not None:
            _reducible(found.config).with_(reduce=reduce)
        # The weights come last: what can be wrong is said before they are read.
        talker = cls(hub.load(name_or_path, dtype=dtype, device=where), tokenizer, chosen, habit)
        return talker if reduce is None else talker.reduced(reduce)

    def reduced(self, reduce: AnyReduction | None) -> "Talker":
        """The same model, of the same weights, asked with fewer tokens of each picture, or with all of them (None)."""
        _reducible(self.model.config)
        assert isinstance(self.model, VLM)
        other = copy.copy(self)
        other.model = self.model.reduced(reduce)
        return other

    # ---- what is asked ------------------------------------------------------------------------------------------

    def ask(self, shown: Any, question: str, *, frames: int | None = None, fps: float | None = None, **how: Any) -> str:
        """The answer to one question about a picture or video, several of them, or none ([]). They come before the
        question, or where it says so, if the template allows it: "Is <image> larger than <image>?" Of videos so many
        frames are read, or so many a second, or as the model's config says. `how` is what `stream` takes."""
        return self.chat([self.turn(shown, question, frames=frames, fps=fps)], **how)

    def answers(
        self, shown: Sequence[Any], questions: Sequence[str], *, max_new: int | None = None, **how: Any
    ) -> list[str]:
        """The answers to one question about each of several pictures, or each of several lists of them, written side by
        side: those that `ask` gives. `max_new` tokens at most: 256, or what the context has room for, unless given.
        `how` is what `generate.text.generate` takes."""
        if len(shown) != len(questions):
            raise ConfigError(f"{len(shown)} pictures and {len(questions)} questions", "give a picture a question")
        prompts = [self.prompt([self.turn(one, asked)]) for one, asked in zip(shown, questions, strict=True)]
        if any(one.videos is not None for one in prompts):
            raise ConfigError("videos are not asked about side by side", "use ask")
        rooms = [self._room(one, 1 if max_new is None else max_new) for one in prompts]
        most = [min(USUAL, room) if max_new is None else max_new for room in rooms]
        how = {"sampling": GREEDY, "tokenizer": self.words, "stop_ids": self.stops, **how}
        said = [""] * len(prompts)
        for length in sorted(set(most)):  # one, unless the context is nearly full
            some = [n for n, own in enumerate(most) if own == length]
            pictures = _together([own for n in some if (own := prompts[n].pictures) is not None])
            written = seen.write(self.model, [prompts[n].stream for n in some], pictures, max_new=length, **how)
            for n, one in zip(some, written, strict=True):
                said[n] = one.text.strip()
        return said

    def likelihood(self, shown: Any, question: str, options: Sequence[str]) -> list[float]:
        """How likely each option is as the whole answer to a question about what is shown: the sum of the logarithms
        of the probabilities of its tokens and of the end."""
        return self.likelihoods([(shown, question, options)])[0]

    def likelihoods(self, asked: Sequence[tuple[Any, str, Sequence[str]]]) -> list[list[float]]:
        """The same for several questions, (what is shown, the question, its options) each, in one batch."""
        return [[one.logprob for one in options] for options in self.weighed(asked)]

    @torch.no_grad()
    def weighed(self, asked: Sequence[tuple[Any, str, Sequence[str]]]) -> list[list[Weighed]]:
        """The same with what else is known of each option."""
        streams, pictures, answers = [], [], []
        for shown, question, options in asked:
            turn = self.turn(shown, question)
            prompt, own = self.prompt([turn]), [self._answer(turn, option) for option in options]
            if prompt.videos is not None or not own:
                raise ConfigError("options are weighed about pictures, and at least one of them", "give them so")
            self._room(prompt, max(map(len, own)))
            streams += [_going_on(prompt.stream, ids) for ids in own]
            pictures += [prompt.pictures] * len(own) if prompt.pictures is not None else []
            answers += own
        views: Any = _together(pictures)
        hidden = self.model.hidden(rows(streams), views)  # (B, L, W)
        found = []
        for row, stream, ids in zip(hidden, streams, answers, strict=True):
            logits = self.model.decoder.logits(row[len(stream) - len(ids) - 1 : len(stream) - 1]).float()  # (n, V)
            said = torch.tensor(ids, device=logits.device)
            chance = float(logits.log_softmax(-1).gather(1, said[:, None]).sum())
            found.append(Weighed(chance, len(ids), bool(logits.argmax(-1).eq(said).all())))
        values = iter(found)
        return [[next(values) for _ in options] for _, _, options in asked]

    def tokens_of(self, shown: Any, question: str, *, max_new: int = 1) -> int:
        """How many tokens a question takes with what is shown; refused where the context has not so many more left."""
        prompt = self.prompt([self.turn(shown, question)])
        self._room(prompt, max_new)
        return len(prompt.stream)

    def chat(self, messages: Sequence[Message], **how: Any) -> str:
        """The answer to a conversation of several turns, with pictures and videos in any of them."""
        return "".join(self.stream(messages, **how)).strip()

    def stream(
        self,
        messages: Sequence[Message],
        *,
        max_new: int | None = None,
        sampling: Sampling = GREEDY,
        stop_strings: Sequence[str] = (),
        compiled: bool = False,
    ) -> Iterator[str]:
        """The answer to a conversation, piece by piece as it is written. `max_new` tokens at most: 256, or what the
        context has room for, unless given. `compiled`: see `generate.seen.write`."""
        stream, pictures, videos = prompt = self.prompt(messages)
        room = self._room(prompt, 1 if max_new is None else max_new)
        pieces = seen.stream(
            self.model,
            [stream],
            pictures,
            videos,
            max_new=min(USUAL, room) if max_new is None else max_new,
            sampling=sampling,
            tokenizer=self.words,
            stop_ids=self.stops,
            stop_strings=stop_strings,
            compiled=compiled,
        )
        return (piece.text for piece in pieces)

    def turn(self, shown: Any, question: str, *, frames: int | None = None, fps: float | None = None) -> Message:
        """A user's message."""
        if not isinstance(question, str) or not question.strip():
            raise ConfigError("a question without words", "ask something")
        parts = shown_of(shown, frames, fps)
        said = re.split(f"({'|'.join(map(re.escape, self.tokens.values()))})", question)  # texts, places in between
        if len(said) == 1:
            return {"role": "user", "content": [*parts, text_part(question)]}
        places = said[1::2]
        if places != [self.tokens.get(part["type"]) for part in parts]:
            there = ", ".join(part["type"] for part in parts) or "nothing"
            raise TextError(
                f"the question has {len(places)} places ({' '.join(places)}), and what is shown is {there}",
                "give one for each, or leave the places out: pictures then come first",
            )
        content = [text_part(said[0])]
        for part, after in zip(parts, said[2::2], strict=True):
            content += [part, text_part(after)]
        return {"role": "user", "content": [part for part in content if part.get("text") != ""]}

    # ---- what the model reads -----------------------------------------------------------------------------------

    def prompt(self, messages: Sequence[Message]) -> Prompt:
        """A conversation as the model reads it."""
        if not messages:
            raise TextError("a conversation without a message", "ask something")
        every = [parts_of(message, f"messages[{n}]") for n, message in enumerate(messages)]
        flat = [part for parts in every for part in parts]
        # A template is shown that there is a picture, not which.
        said = [{**one, "content": [place(part) for part in parts]} for one, parts in zip(messages, every, strict=True)]
        asked = asked_of(said) if isinstance(self.model, VLM) and self.model.queries is not None else None
        said = said if asked is None else asked.messages
        ids = self._ids(said, Counter(part["type"] for message in said for part in message["content"]))
        images = [load_image(part["image"]) for part in flat if part["type"] == "image"]
        films, videos = self._watched([part["video"] for part in flat if part["type"] == "video"])
        pictures = self.model.prepare(images) if images else None
        if isinstance(pictures, Shown) and asked is not None:
            pictures = pictures._replace(questions=fused_with(asked, self.words))
        return Prompt(self._stream(ids, pictures, videos, films, asked), pictures, videos)

    def _ids(self, said: Sequence[Message], shown: Counter[str]) -> list[int]:
        """The words, with a mark for everything shown."""
        if shown["video"] and "video" not in self.marks:
            raise unfilmed(self.model, self.habit)
        self._check_order(said)
        ids = begun(self.template.encode(said, self.words, generate=True), self.words, self.marks["image"]).ids
        for kind, mark in self.marks.items():
            if ids.count(mark) != shown[kind]:
                what = {"image": "pictures", "video": "videos"}[kind]
                raise TextError(
                    f"{self.template.name} made {ids.count(mark)} places for {what} ({self.tokens[kind]}) of "
                    f"{shown[kind]} {what}",
                    "use a template that writes one for each, such as template='vicuna'",
                )
        return ids

    def _answer(self, turn: Message, text: str) -> list[int]:
        """What the model would write to say this, with the end."""
        if not text.strip():
            raise ConfigError("an option without words", "give it some")
        said = [{**turn, "content": [place(part) for part in turn["content"]]}]
        chat = self.template.encode([*said, {"role": "assistant", "content": [text_part(text)]}], self.words)
        ids = [id for id, written in zip(chat.ids, chat.loss, strict=True) if written]
        ends = [n for n, id in enumerate(ids, start=1) if id in self.stops]
        if ends:
            return ids[: ends[0]]  # a template may write a line break behind it, which nobody has to foretell
        if not self.stops:
            raise ConfigError("an answer ends with an end token, and the tokenizer has none", "give the model's own")
        while ids and not self.words.decode(ids[-1:]).strip():
            ids.pop()
        return [*ids, self.stops[0]]

    def _watched(self, videos: Sequence[Video]) -> tuple[list[Watched], Shown | None]:
        if not videos or not isinstance(self.model, VLM):
            return [], None
        films = [watch(one, self.model.config) for one in videos]
        return films, self.model.filmed([one.pixels for one in films])

    def _room(self, prompt: Prompt, wanted: int) -> int:
        """How many tokens the context has left; fewer than wanted are refused."""
        context, held = self.model.config.decoder.context, len(prompt.stream)
        if context - held < wanted:
            shown = int((prompt.stream.source >= 0).sum())
            what, less = ("pictures", "") if prompt.videos is None else ("pictures and videos", "fewer frames, ")
            raise ConfigError(
                f"the prompt has {held:,} tokens, {shown:,} of them for {what}, and {wanted} more pass the {context:,} "
                "the model was made for",
                f"ask for at most {context - held} tokens"
                if context > held
                else f"give fewer or smaller {what}, {less}or fewer words",
            )
        return context - held

    def _check_order(self, said: Sequence[Message]) -> None:
        """Refuse a template that writes pictures first where words were to come before them."""
        marks = "|".join(map(re.escape, self.tokens.values()))
        before = re.split(marks, self.template.render(said, generate=True))
        waiting: list[str] = []
        for part in (part for message in said for part in message["content"]):
            if part["type"] == "text":
                waiting.append(part["text"].strip())
                continue
            there = before.pop(0) if before else ""
            late = next((text for text in waiting if not re.search(marks, text) and text not in there), None)
            if late:
                raise TextError(
                    f"{self.template.name} writes pictures before the words {late!r}, which come before a picture",
                    "leave the places out of the question: pictures then come first",
                )
            waiting = []

    def _stream(
        self,
        ids: list[int],
        pictures: Shown | Views | None,
        videos: Shown | None,
        films: Sequence[Watched],
        asked: Asked | None = None,
    ) -> Stream:
        """The words with everything shown in its place: as tokens, or as the mark where it is looked at."""
        config = self.model.config
        if not isinstance(config, VLMConfig):
            return build([words(ids)])
        stills = standing(config, pictures.shapes, asked) if isinstance(pictures, Shown) else ()
        clips = list(zip(() if videos is None else videos.shapes, films, strict=True))
        chat = Chat("", ids, [False] * len(ids))  # nothing is learnt of it
        return build(laid(chat, stills, config, self.speech, clips, self.words), config.rules)


def _reducible(config: Any) -> VLMConfig:
    if not isinstance(config, VLMConfig):
        raise ConfigError("a model that looks at pictures beside the stream has no tokens of them", "leave reduce out")
    return config


def _going_on(stream: Stream, ids: Sequence[int]) -> Stream:
    """With words behind its furthest position, as they are when the model writes them."""
    more = build([words(list(ids))])
    behind = more.positions + (stream.positions.max() + 1)
    joined: dict[str, Any] = {name: torch.cat([getattr(stream, name), getattr(more, name)]) for name in FIELDS}
    joined["positions"] = torch.cat([stream.positions, behind])
    return replace(stream, **joined)


def _together(pictures: Sequence[Shown | Views]) -> Shown | Views | None:
    """Those of several prompts as those of one batch."""
    if not pictures:
        return None
    pixels, *rest = zip(*pictures, strict=True)
    return type(pictures[0])(torch.cat(pixels), *(tuple(one for own in column for one in own) for column in rest))


def home(device: str | torch.device | None, *, half: bool = False) -> tuple[str, torch.dtype]:
    """Where a model ready to hand goes, and its type there: a GPU, if there is one, in half precision; if `half` will
    do, in that on CPUs, too, which have instructions for products of bfloat16."""
    where = usable(device)
    half = half and where == "cpu" and getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)()
    return where, torch.bfloat16 if half or where.startswith("cuda") else torch.float32
