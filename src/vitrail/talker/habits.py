"""How the model of a folder is spoken to: as its family is, or as a template says."""

from typing import Any

from vitrail.errors import ConfigError, TextError
from vitrail.hub.configs import Found
from vitrail.hub.families import FAMILIES
from vitrail.hub.habit import VIDEO, Habit, marks_of, preset
from vitrail.models.looking import LookingVLM
from vitrail.models.vlm import VLM, VLMConfig
from vitrail.processing.chat import ChatTemplate
from vitrail.processing.text import Tokenizer

__all__ = ["Habit", "around", "habit_of", "marks_of", "preset", "template_of", "unfilmed", "whole"]

FILMED = tuple(name for name, row in FAMILIES.items() if row.videos)
"""Those that take videos."""


def habit_of(found: Found) -> Habit | None:
    """That of the folder's family; a folder of ours has those that it could be written as."""
    fits = [row for row in FAMILIES.values() if row.model is found.model and row.fits(whole(found.config))]
    rows = fits if found.family is None else [found.family]
    return next((row.habit for row in rows if row.habit is not None), None)


def whole(config: Any) -> Any:
    """A config without what leaves tokens out: it is spoken to as if it read them all."""
    return config.with_(reduce=None) if isinstance(config, VLMConfig) else config


def unfilmed(model: VLM | LookingVLM, habit: Habit | None) -> ConfigError:
    """Why a model takes no videos, and what does."""
    kin = [row for row in FAMILIES.values() if habit is not None and row.habit is habit]
    name = kin[0].name if kin else type(model).__name__
    if isinstance(model, VLM) and model.config.films is not None:
        return ConfigError(
            f"this {name} reads videos, and its tokenizer has no word for one",
            f"use the one that came with the model, or add {VIDEO} to it as a special token",
        )
    return ConfigError(
        f"this {name} reads pictures and no videos",
        f"give its frames as pictures, or use a model that does: {', '.join(FILMED)}",
    )


def template_of(found: Found, tokenizer: Tokenizer, habit: Habit | None, named: str | None) -> ChatTemplate:
    """The one named, else the tokenizer's own, else the habit's."""
    if named is not None:
        return preset(named, found.config, tokenizer, end=None if habit is None else habit.end)
    if tokenizer.chat_template is not None:
        return ChatTemplate.of(tokenizer)
    if habit is None:
        raise TextError(
            f"{found.path} has no chat template", "name one: load(…, template='vicuna'), or --template vicuna"
        )
    return habit.template(found.config, tokenizer)


def around(habit: Habit | None, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """The ids that stand before and behind a picture, and that no template writes; a model of ours may look like its
    family's and have been trained without them."""
    if habit is None or habit.around is None or any(word not in tokenizer.specials for word in habit.around):
        return [], []
    before, after = habit.around
    return [tokenizer.id(before)], [tokenizer.id(after)]
