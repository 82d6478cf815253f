"""How each family is spoken to: its chat template where a folder holds none, and what its processor writes besides."""

from typing import NamedTuple

from vitrail.errors import TextError
from vitrail.hub.configs import Found
from vitrail.hub.families import FAMILIES
from vitrail.models.looking import LookingVLMConfig
from vitrail.models.vlm import VLMConfig
from vitrail.processing.chat import ChatTemplate
from vitrail.processing.text import Tokenizer


class Habit(NamedTuple):
    """
    preset  the chat template of those whose folder holds none, and what it is `told`
    around  words that stand around a picture, which its processor writes and its templates do not
    end     a word that ends a turn, of those whose tokenizer has it
    """

    preset: str
    told: dict[str, str] = {}
    around: tuple[str, str] | None = None
    end: str | None = None


HABITS = {
    "llava": Habit("vicuna"),
    "llava_next": Habit("vicuna"),
    "qwen2_vl": Habit("qwen2-vl"),
    "qwen2_5_vl": Habit("qwen2-vl"),
    "qwen3_vl": Habit("qwen2-vl", {"default_system": ""}),
    "qwen3_vl_moe": Habit("qwen2-vl", {"default_system": ""}),
    "internvl": Habit("chatml", around=("<img>", "</img>")),
    "mllama": Habit("llama3"),
    "idefics": Habit("idefics", end="<end_of_utterance>"),
    "blip-2": Habit("blip-2"),
}
FILMED = tuple(name for name, row in FAMILIES.items() if row.videos)
"""Those that take videos."""


def habit_of(found: Found) -> Habit | None:
    """That of the folder's family; a folder of ours has those that it could be written as."""
    fits = [name for name, row in FAMILIES.items() if row.model is found.model and row.fits(found.config)]
    names = fits if found.family is None else [found.family.name]
    return next((HABITS[name] for name in names if name in HABITS), None)


def template_of(found: Found, tokenizer: Tokenizer, habit: Habit | None, named: str | None) -> ChatTemplate:
    """The one named, else the tokenizer's own, else the habit's."""
    if named is None and tokenizer.chat_template is not None:
        return ChatTemplate.of(tokenizer)
    told = {} if habit is None or habit.end is None else {"end": habit.end if habit.end in tokenizer.specials else ""}
    if named is not None:
        habit = Habit(named)
    if habit is None:
        raise TextError(f"{found.path} has no chat template", "name one: load(…, template='vicuna')")
    template = ChatTemplate.preset(habit.preset)
    marks = {kind: tokenizer.token(id) for kind, id in marks_of(found.config, tokenizer).items()}
    template.variables |= {**marks, **told, **habit.told}
    return template


def marks_of(config: VLMConfig | LookingVLMConfig, tokenizer: Tokenizer) -> dict[str, int]:
    """The ids that stand for a picture and, where it takes videos, for a video in a text."""
    if not isinstance(config, VLMConfig):
        return {"image": config.mark}
    video = None if config.films is None else config.marks.get("video")
    return {"image": config.rules.fill} | ({"video": video} if video is not None and video < tokenizer.size else {})
