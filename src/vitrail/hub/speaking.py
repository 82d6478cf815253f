"""What transformers' processor of a vision-language model needs beside weights and config, from folder to folder.

What a folder said of its processor, of its tokenizer's manners and of how it writes is kept with the model. An export
adds what follows from the model's config and its tokenizer (see `Habit`), which goes first: it must be true of the
model. How pictures are prepared, and the videos of a model that sees them, is not kept here: the config says it (see
`hub.pictures`).
"""

from pathlib import Path
from typing import Any

from torch import nn

from vitrail.hub.family import Family
from vitrail.hub.files import read_json, write_json
from vitrail.hub.habit import Habit, Words, words_of
from vitrail.models.looking import LookingVLM
from vitrail.models.vlm import VLM
from vitrail.processing import footage
from vitrail.processing.preprocessing import WHOLE
from vitrail.processing.templates import settled
from vitrail.processing.text import Tokenizer

About = dict[str, Any]
KEPT = "speaking"  # the attribute of a model: file → what it said
GENERATION, TOKENIZER, TEMPLATE = "generation_config.json", "tokenizer_config.json", "chat_template.jinja"
FILES = (WHOLE, GENERATION, footage.FILE)  # which are kept as they are
MANNERS = ("padding_side", "truncation_side", "model_max_length", "model_input_names", "extra_special_tokens")
ASKED = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}]


def remember(model: nn.Module, folder: Path) -> None:
    """Keep with a vision-language model what its folder says, our own or strangers'."""
    if not isinstance(model, VLM | LookingVLM) or not folder.is_dir():
        return
    kept = {name: read_json(folder / name) for name in (*FILES, TOKENIZER) if (folder / name).is_file()}
    held = ["image_processor", *([footage.PART] if _films(model) else [])]  # by the model's config
    kept[WHOLE] = {key: value for key, value in kept.get(WHOLE, {}).items() if key not in held}
    if _films(model):
        kept.pop(footage.FILE, None)
    manners = kept.get(TOKENIZER, {})
    kept[TOKENIZER] = {key: manners[key] for key in MANNERS if key in manners}
    setattr(model, KEPT, {name: about for name, about in kept.items() if about})


def _films(model: nn.Module) -> bool:
    return isinstance(model, VLM) and model.config.films is not None


def keep(model: nn.Module, folder: Path, tokenizer: Tokenizer | None) -> None:
    """Write a tokenizer, if there is one, and beside a model of ours what came with it."""
    kept: dict[str, About] = getattr(model, KEPT, {})
    if isinstance(model, VLM | LookingVLM):
        (folder / WHOLE).unlink(missing_ok=True)  # of a model that lay there before
    for name in FILES:
        if name in kept:
            write_json(folder / name, kept[name])
    if tokenizer is not None:
        tokenizer.save(folder)
        _add(folder / TOKENIZER, kept.get(TOKENIZER, {}))


def export(model: nn.Module, folder: Path, family: Family, tokenizer: Tokenizer | None) -> list[str]:
    """Write a tokenizer, if there is one, and what transformers' processor of the model is told. Returns what it could
    not be told."""
    habit = family.habit
    config: Any = model.config
    keep(model, folder, tokenizer)
    if habit is None or config.tower.channels != 3:  # whose pictures no processor prepares
        return []
    words = {} if tokenizer is None else words_of(config, tokenizer)
    unfit = None if tokenizer is None else _unfit(habit, words, tokenizer)
    if unfit is not None:
        (folder / WHOLE).unlink(missing_ok=True)
        return [f"no {WHOLE} was written: {habit.processor} {unfit}"]
    kept = getattr(model, KEPT, {}).get(WHOLE, {})
    if kept.get("processor_class") not in (None, habit.processor):  # it came as another family
        kept = {}
    write_json(folder / WHOLE, kept | habit.fields(config, words) | {"processor_class": habit.processor})
    if tokenizer is None:
        return []
    _name(folder, habit, words, tokenizer)
    return _chat(folder, habit, config, words, tokenizer)


def _unfit(habit: Habit, words: Words, tokenizer: Tokenizer) -> str | None:
    """Why the processor cannot work with this tokenizer: it would write tokens that the model does not know."""
    if habit.fixed is not None and words.get("image", habit.fixed) != habit.fixed:
        return f"takes {habit.fixed} for a picture, and the tokenizer has {words['image']} for it"
    if any(word not in tokenizer.specials for word in habit.around or ()):
        return f"puts {' and '.join(habit.around or ())} around a picture, which the tokenizer lacks"
    return None


def _name(folder: Path, habit: Habit, words: Words, tokenizer: Tokenizer) -> None:
    """The tokens that the processor asks its tokenizer for, and those that begin, end and pad what is written."""
    named = read_json(folder / TOKENIZER).get("extra_special_tokens")
    tokens = {name: word if word.startswith("<") else words.get(word) for name, word in habit.tokens.items()}
    tokens = (named if isinstance(named, dict) else {}) | {name: word for name, word in tokens.items() if word}
    pad = tokenizer.named.get("pad")
    if pad is None and habit.pads:
        pad = tokenizer.named.get("unk", tokenizer.named.get("eos"))
    about = {"extra_special_tokens": tokens, "pad_token": pad}
    _add(folder / TOKENIZER, {key: value for key, value in about.items() if value})
    ends = [*tokenizer.stops, *([tokenizer.id(habit.end)] if habit.end in tokenizer.specials else [])]
    ids = {"bos": tokenizer.bos, "eos": list(dict.fromkeys(ends)) or None, "pad": pad and tokenizer.id(pad)}
    _add(folder / GENERATION, {f"{role}_token_id": id for role, id in ids.items() if id is not None})


def _chat(folder: Path, habit: Habit, config: Any, words: Words, tokenizer: Tokenizer) -> list[str]:
    """The family's chat template, where the tokenizer came with none."""
    if not habit.chats or tokenizer.chat_template is not None:
        return []
    if "image" not in words:
        return [f"no {TEMPLATE} was written: the tokenizer has no word for a picture"]
    template = habit.template(config, tokenizer)
    if missing := template.missing(ASKED, tokenizer):
        return [f"no {TEMPLATE} was written: the tokenizer lacks {', '.join(missing)}"]
    given = {f"{role}_token" for role in tokenizer.named}  # by whoever renders it
    own = {name: value for name, value in template.variables.items() if name not in given}
    (folder / TEMPLATE).write_text(settled(template.source, own), encoding="utf-8")
    return []


def _add(file: Path, about: About) -> None:
    if about:
        write_json(file, (read_json(file) if file.is_file() else {}) | about)
