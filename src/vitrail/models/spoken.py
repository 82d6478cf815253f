"""A conversation about pictures and videos as a model reads it: words in ids, and the tokens of what is shown where it
is shown."""

from collections.abc import Sequence
from itertools import takewhile
from typing import NamedTuple

import torch
from torch import Tensor

from vitrail.errors import TextError
from vitrail.models.videos import Watched
from vitrail.models.vlm_config import Shape, VLMConfig
from vitrail.processing.chat import Chat, ChatTemplate, Message
from vitrail.processing.templates import settled
from vitrail.processing.text import Tokenizer
from vitrail.stream import POSITIONS, Part, patch_by_patch, stamp, words


class Speech(NamedTuple):
    """How a model is spoken to: its template, the ids that stand around a picture and no template writes, and the one
    that stands for a video, where it reads them."""

    template: ChatTemplate
    before: Sequence[int] = ()
    after: Sequence[int] = ()
    video: int | None = None


def begun(chat: Chat, tokenizer: Tokenizer, mark: int) -> Chat:
    """With a bos, where the tokenizer begins every text with one and the template does not."""
    lead = tokenizer.encode("", specials=True)[:1]
    first = next(([id] for id in chat.ids if id != mark), [])  # BLIP-2 has pictures before it
    if lead != [tokenizer.bos] or first == lead:
        return chat
    return chat._replace(ids=lead + chat.ids, loss=[False, *chat.loss])


class Asked(NamedTuple):
    """A conversation of questions that queries are fused with."""

    messages: list[Message]  # with a place for each group of queries
    places: list[tuple[int, int]]  # of each in turn: which picture it is of, and which of the questions about that
    questions: list[list[str]]  # about each picture

    def until(self, places: int) -> "Asked":
        """As far as the first so many places go."""
        kept = self.places[:places]
        pictures = {picture for picture, _ in kept}
        counts = [sum(picture == p for picture, _ in kept) for p in sorted(pictures)]
        asked = [own[:n] for own, n in zip(self.questions, counts, strict=False)]
        return Asked(self.messages, kept, asked)


def asked_of(messages: Sequence[Message]) -> Asked:
    """Whoever asks something asks it of every picture shown so far: before each question there is a place for what is
    fused with it of the pictures before, and new ones have theirs where they are shown."""
    said: list[Message] = []
    places: list[tuple[int, int]] = []
    questions: list[list[str]] = []
    for number, message in enumerate(messages):
        content = message["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
        new = sum(part["type"] == "image" for part in parts)
        if message["role"] != "user":
            if new:
                raise TextError(
                    f"messages[{number}] shows a picture that nobody asks about, and queries are fused with questions",
                    "show it in a turn of the user",
                )
            said.append(message)
            continue
        before = len(questions)
        places += [(picture, len(own)) for picture, own in enumerate(questions)]
        places += [(before + picture, 0) for picture in range(new)]
        questions += [[] for _ in range(new)]
        question = "".join(part.get("text", "") for part in parts)
        for own in questions:
            own.append(question)
        said.append({**message, "content": [{"type": "image"}] * before + parts})
    return Asked(said, places, questions)


def fused_with(asked: Asked, tokenizer: Tokenizer) -> tuple[list[Tensor], ...]:
    """The ids (T,) of the questions about each picture."""
    return tuple(
        [torch.tensor(tokenizer.encode(text, literal=True), dtype=torch.long) for text in own]
        for own in asked.questions
    )


def standing(config: VLMConfig, shapes: Sequence[Shape], asked: Asked | None = None) -> list[list[Part]]:
    """What stands at each mark of a picture: the picture or, where queries are fused with questions, one group."""
    if asked is None:
        return [config.parts(shape) for shape in shapes]
    groups = [config.parts(shape, len(own)) for shape, own in zip(shapes, asked.questions, strict=True)]
    return [[groups[picture][question]] for picture, question in asked.places]


def laid(
    chat: Chat,
    shown: Sequence[Sequence[Part]],
    config: VLMConfig,
    speech: Speech,
    films: Sequence[tuple[Shape, Watched]] = (),
    tokenizer: Tokenizer | None = None,
) -> list[Part]:
    """The parts of a conversation: words with their loss, and at each mark what stands there. Videos may bring words of
    their own, for which the tokenizer is needed."""
    stills, clips = iter(shown), iter(films)
    for mark, given, what in ((config.rules.fill, shown, "pictures"), (speech.video, films, "videos")):
        if mark is not None and (places := chat.ids.count(mark)) != len(given):
            raise TextError(
                f"{speech.template.name} made {places} places for {len(given)} {what}",
                "use a template that writes one for each, such as template='vicuna'",
            )
    parts, start = [], 0
    before, after = list(speech.before), list(speech.after)
    for at, id in enumerate(chat.ids):
        if id == config.rules.fill:
            said = chat.ids[start:at] + before
            parts += [words(said, [*chat.loss[start:at], *[False] * len(before)]), *next(stills), words(after)]
            start = at + 1
        elif id == speech.video:
            assert tokenizer is not None
            taken, start = _film(chat, start, at, *next(clips), config, speech, tokenizer)
            parts += taken
    parts.append(words(chat.ids[start:], chat.loss[start:]))
    return [part for part in parts if part.tokens]


def _film(
    chat: Chat,
    start: int,
    at: int,
    shape: Shape,
    seen: Watched,
    config: VLMConfig,
    speech: Speech,
    tokenizer: Tokenizer,
) -> tuple[list[Part], int]:
    """The words from `start` on and the video whose mark is at `at`, and where the words behind it begin. It is one run
    of tokens; in Qwen3-VL patch by patch behind the time of each; in InternVL frame by frame behind its number."""
    lead, loss = list(chat.ids[start:at]), list(chat.loss[start:at])
    clip, behind = config.clip(shape, seconds=seen.seconds), at + 1
    opened, closed = list(speech.before), list(speech.after)
    if config.films is not None and config.films.rule == "internvl":
        said = [f"Frame{n}: " for n in range(1, len(seen.times) + 1)]
        said[1:] = [f"\n{text}" for text in said[1:]]
    elif POSITIONS[config.rules.positions].apart:
        opened, closed = [config.marks["vision_start"]], [config.marks["vision_end"]]
        if (lead[-1:], chat.ids[behind : behind + 1]) == (opened, closed):  # they stand around each patch instead
            lead, loss, behind = lead[:-1], loss[:-1], behind + 1
        said = [stamp(time) for time in seen.times]
    else:
        return [words(lead, loss), clip], behind
    first, learnt = _followed(lead, loss, said[0], tokenizer)
    ahead = [words([*first, *opened], [*learnt, *[False] * len(opened)])]
    ahead += [words([*tokenizer.encode(text, literal=True), *opened]) for text in said[1:]]
    return patch_by_patch(clip, ahead, [words(closed)]), behind


def _followed(lead: list[int], loss: list[bool], text: str, tokenizer: Tokenizer) -> tuple[list[int], list[bool]]:
    """Words, and a text behind them: the last of them may be cut into tokens in another way than without it. A token
    that is no longer the one it was is not to be learnt."""
    specials = set(tokenizer.specials.values())
    last = next((n + 1 for n in reversed(range(len(lead))) if lead[n] in specials), 0)
    ids = lead[:last] + tokenizer.encode(tokenizer.decode(lead[last:]) + text, literal=True)
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(lead, ids, strict=False)))
    return ids, loss[:same] + [False] * (len(ids) - same)


def kept(template: ChatTemplate, tokenizer: Tokenizer) -> str:
    """A template's source with all that it is told, as a tokenizer keeps it."""
    return settled(template.source, template.variables | {f"{k}_token": v for k, v in tokenizer.named.items()})
