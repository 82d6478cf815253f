"""A conversation about pictures as a model reads it: words in ids, and the pictures' tokens where they are shown."""

from collections.abc import Sequence
from typing import NamedTuple

from vitrail.errors import TextError
from vitrail.models.vlm_config import Shape, VLMConfig
from vitrail.processing.chat import Chat, ChatTemplate
from vitrail.processing.templates import settled
from vitrail.processing.text import Tokenizer
from vitrail.stream import Part, words


class Speech(NamedTuple):
    """How a model is spoken to: its template, and the ids that stand around a picture and no template writes."""

    template: ChatTemplate
    before: Sequence[int] = ()
    after: Sequence[int] = ()


def begun(chat: Chat, tokenizer: Tokenizer, mark: int) -> Chat:
    """With a bos, where the tokenizer begins every text with one and the template does not."""
    lead = tokenizer.encode("", specials=True)[:1]
    first = next(([id] for id in chat.ids if id != mark), [])  # BLIP-2 has pictures before it
    if lead != [tokenizer.bos] or first == lead:
        return chat
    return chat._replace(ids=lead + chat.ids, loss=[False, *chat.loss])


def laid(chat: Chat, shapes: Sequence[Shape], config: VLMConfig, speech: Speech) -> list[Part]:
    """The parts of a conversation: words with their loss, and a picture for each mark."""
    marks = [at for at, id in enumerate(chat.ids) if id == config.rules.fill]
    if len(marks) != len(shapes):
        raise TextError(
            f"{speech.template.name} made {len(marks)} places for {len(shapes)} pictures",
            "use a template that writes one for each, such as template='vicuna'",
        )
    parts, start = [], 0
    before, after = list(speech.before), list(speech.after)
    for at, shape in zip(marks, shapes, strict=True):
        said = chat.ids[start:at] + before
        parts += [words(said, [*chat.loss[start:at], *[False] * len(before)]), *config.parts(shape), words(after)]
        start = at + 1
    parts.append(words(chat.ids[start:], chat.loss[start:]))
    return [part for part in parts if part.tokens]


def kept(template: ChatTemplate, tokenizer: Tokenizer) -> str:
    """A template's source with all that it is told, as a tokenizer keeps it."""
    return settled(template.source, template.variables | {f"{k}_token": v for k, v in tokenizer.named.items()})
