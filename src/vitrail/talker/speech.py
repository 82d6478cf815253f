"""How `Talker` will speak to a model that is in no folder yet: so it must be trained."""

from vitrail.hub.families import FAMILIES
from vitrail.models.spoken import Speech
from vitrail.models.vlm import VLM
from vitrail.processing.chat import ChatTemplate
from vitrail.processing.text import Tokenizer
from vitrail.talker.habits import around, marks_of, preset, whole

TALK = [{"role": "user", "content": [{"type": "image"}]}, {"role": "assistant", "content": "yes"}]


def speech_of(model: VLM, tokenizer: Tokenizer, named: str | None = None) -> Speech | None:
    """In the template named, else the tokenizer's own, else that of a family which the model could be written as and
    whose special tokens the tokenizer has; None where there is none of these."""
    fits = (row.habit for row in FAMILIES.values() if row.model is VLM and row.fits(whole(model.config)))
    habit = next((habit for habit in fits if habit is not None), None)
    if named is not None:
        template = preset(named, model.config, tokenizer, end=None if habit is None else habit.end)
    elif tokenizer.chat_template is not None:
        template = ChatTemplate.of(tokenizer)
    elif habit is None or (template := habit.template(model.config, tokenizer)).missing(TALK, tokenizer):
        return None
    return Speech(template, *around(habit, tokenizer), marks_of(model.config, tokenizer).get("video"))
