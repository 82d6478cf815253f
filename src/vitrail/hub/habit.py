"""How a family is spoken to: its chat template where a folder holds none, and what transformers' processor is told."""

from collections.abc import Callable
from typing import Any, NamedTuple

from vitrail.errors import TextError
from vitrail.models.looking import LookingVLMConfig
from vitrail.models.vlm import VLMConfig
from vitrail.processing.chat import ChatTemplate
from vitrail.processing.text import Tokenizer

About = dict[str, Any]
Words = dict[str, str]  # those that stand for or around pictures, by name: {"image": "<image>", …}
VIDEO = "<video>"  # what stands for a video in a text, of a model whose config names no token for it


class Habit(NamedTuple):
    """
    processor  the class of transformers that makes a model's inputs of words and pictures
    preset     the chat template of those whose folder holds none, and what it is `told`
    around     words that stand around a picture, which its processor writes and its templates do not
    end        a word that ends a turn, of those whose tokenizer has it
    fields     a config, and its words → what the processor is told of them
    tokens     what the processor calls tokens of its tokenizer → the name of a word or, in <…>, the token itself
    fixed      the token that the processor takes for a picture, whatever its tokenizer says
    chats      whether the processor takes a chat template; those that do not put pictures in place themselves
    pads       whether the processor pads even one text, and must have a token for it
    """

    processor: str
    preset: str
    told: dict[str, str] = {}
    around: tuple[str, str] | None = None
    end: str | None = None
    fields: Callable[[Any, Words], About] = lambda config, words: {}
    tokens: dict[str, str] = {}
    fixed: str | None = None
    chats: bool = True
    pads: bool = False

    def template(self, config: VLMConfig | LookingVLMConfig, tokenizer: Tokenizer) -> ChatTemplate:
        """The preset, in the words of this tokenizer."""
        return preset(self.preset, config, tokenizer, self.told, self.end)


def preset(
    name: str,
    config: VLMConfig | LookingVLMConfig,
    tokenizer: Tokenizer,
    told: dict[str, str] | None = None,
    end: str | None = None,
) -> ChatTemplate:
    template = ChatTemplate.preset(name)
    marks = {kind: tokenizer.token(id) for kind, id in marks_of(config, tokenizer).items()}
    ends = {} if end is None else {"end": end if end in tokenizer.specials else ""}
    template.variables |= {**marks, **ends, **(told or {})}
    return template


def marks_of(config: VLMConfig | LookingVLMConfig, tokenizer: Tokenizer) -> dict[str, int]:
    """The ids that stand for a picture and, where it takes videos, for a video in a text."""
    if not isinstance(config, VLMConfig):
        return {"image": config.mark}
    video = None if config.films is None else config.marks.get("video", tokenizer.specials.get(VIDEO))
    return {"image": config.rules.fill} | ({"video": video} if video is not None and video < tokenizer.size else {})


def words_of(config: VLMConfig | LookingVLMConfig, tokenizer: Tokenizer) -> Words:
    """Those of a config that the tokenizer has."""
    ids = {**config.marks, "image": config.rules.fill} if isinstance(config, VLMConfig) else {"image": config.mark}
    words = {}
    for name, id in ids.items():
        try:
            words[name] = tokenizer.token(id)
        except TextError:  # a vocabulary that was made without it
            continue
    return words
