"""Processor files of vision-language models: kept with a model when it is loaded, saved and exported with it.

Loading attaches the processor, tokenizer and generation settings of a folder to the model. An export adds the settings
that follow from the model's config and tokenizer (see `ChatConfig`), which take precedence. Image and video
preprocessing is part of the model's config (see `hub.image_processor_config`).
"""

from pathlib import Path
from typing import Any

from torch import nn

from vitrail.hub.chat_config import ChatConfig, VisionTokens, find_vision_tokens
from vitrail.hub.checkpoint_family import CheckpointFamily
from vitrail.hub.safetensors_files import read_json, write_json
from vitrail.models.cross_attention_vlm import CrossAttentionVLM
from vitrail.models.vlm import VLM
from vitrail.processing import video_sampling
from vitrail.processing.chat_template_presets import bind_variables
from vitrail.processing.image_preprocessor import PROCESSOR_FILE
from vitrail.processing.tokenizer import Tokenizer

JSONDict = dict[str, Any]
ATTRIBUTE = "processor_files"  # attribute of a model: file name → its content
GENERATION_FILE, TOKENIZER_CONFIG_FILE, TEMPLATE_FILE = (
    "generation_config.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
COPIED_FILES = (PROCESSOR_FILE, GENERATION_FILE, video_sampling.VIDEO_PROCESSOR_FILE)  # saved unchanged
TOKENIZER_KEYS = ("padding_side", "truncation_side", "model_max_length", "model_input_names", "extra_special_tokens")
PROBE_MESSAGES = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}]


def attach_processor_files(model: nn.Module, folder: Path) -> None:
    """Attach the processor files of a folder to a vision-language model."""
    if not isinstance(model, VLM | CrossAttentionVLM) or not folder.is_dir():
        return
    files = {
        name: read_json(folder / name) for name in (*COPIED_FILES, TOKENIZER_CONFIG_FILE) if (folder / name).is_file()
    }
    config_keys = [
        "image_processor",
        *([video_sampling.VIDEO_PROCESSOR_KEY] if _takes_videos(model) else []),
    ]  # part of the model's config
    files[PROCESSOR_FILE] = {
        key: value for key, value in files.get(PROCESSOR_FILE, {}).items() if key not in config_keys
    }
    if _takes_videos(model):
        files.pop(video_sampling.VIDEO_PROCESSOR_FILE, None)
    tokenizer_config = files.get(TOKENIZER_CONFIG_FILE, {})
    files[TOKENIZER_CONFIG_FILE] = {key: tokenizer_config[key] for key in TOKENIZER_KEYS if key in tokenizer_config}
    setattr(model, ATTRIBUTE, {name: content for name, content in files.items() if content})


def _takes_videos(model: nn.Module) -> bool:
    return isinstance(model, VLM) and model.config.resolved_video_sampling is not None


def save_processor_files(model: nn.Module, folder: Path, tokenizer: Tokenizer | None) -> None:
    """Save the attached processor files, and the tokenizer if there is one."""
    files: dict[str, JSONDict] = getattr(model, ATTRIBUTE, {})
    if isinstance(model, VLM | CrossAttentionVLM):
        (folder / PROCESSOR_FILE).unlink(missing_ok=True)  # of an earlier model in this folder
    for name in COPIED_FILES:
        if name in files:
            write_json(folder / name, files[name])
    if tokenizer is not None:
        tokenizer.save(folder)
        _update_json(folder / TOKENIZER_CONFIG_FILE, files.get(TOKENIZER_CONFIG_FILE, {}))


def export_processor_files(
    model: nn.Module, folder: Path, family: CheckpointFamily, tokenizer: Tokenizer | None
) -> list[str]:
    """Export the files of the transformers processor, and the tokenizer if there is one.

    Returns messages about files that could not be written.
    """
    chat = family.chat_config
    config: Any = model.config
    save_processor_files(model, folder, tokenizer)
    if chat is None or config.tower.channels != 3:  # no processor exists for such images
        return []
    vision_tokens = {} if tokenizer is None else find_vision_tokens(config, tokenizer)
    mismatch = None if tokenizer is None else _explain_mismatch(chat, vision_tokens, tokenizer)
    if mismatch is not None:
        (folder / PROCESSOR_FILE).unlink(missing_ok=True)
        return [f"{PROCESSOR_FILE} was not written: {chat.processor_class} {mismatch}"]
    processor_config = getattr(model, ATTRIBUTE, {}).get(PROCESSOR_FILE, {})
    if processor_config.get("processor_class") not in (None, chat.processor_class):  # loaded from another family
        processor_config = {}
    write_json(
        folder / PROCESSOR_FILE,
        processor_config | chat.processor_fields(config, vision_tokens) | {"processor_class": chat.processor_class},
    )
    if tokenizer is None:
        return []
    _write_special_tokens(folder, chat, vision_tokens, tokenizer)
    return _write_chat_template(folder, chat, config, vision_tokens, tokenizer)


def _explain_mismatch(chat: ChatConfig, vision_tokens: VisionTokens, tokenizer: Tokenizer) -> str | None:
    """Explain why the processor does not work with a tokenizer: it would write unknown tokens. None if it works."""
    if (
        chat.fixed_image_token is not None
        and vision_tokens.get("image", chat.fixed_image_token) != chat.fixed_image_token
    ):
        return f"uses the image token {chat.fixed_image_token}, but the tokenizer has {vision_tokens['image']}"
    if any(word not in tokenizer.special_tokens for word in chat.image_boundary_tokens or ()):
        return f"puts {' and '.join(chat.image_boundary_tokens or ())} around an image, which the tokenizer lacks"
    return None


def _write_special_tokens(folder: Path, chat: ChatConfig, vision_tokens: VisionTokens, tokenizer: Tokenizer) -> None:
    """Write the special tokens of the processor, and the bos, eos and pad ids of generation."""
    extra_tokens = read_json(folder / TOKENIZER_CONFIG_FILE).get("extra_special_tokens")
    tokens = {
        name: word if word.startswith("<") else vision_tokens.get(word) for name, word in chat.tokenizer_tokens.items()
    }
    tokens = (extra_tokens if isinstance(extra_tokens, dict) else {}) | {
        name: word for name, word in tokens.items() if word
    }
    pad = tokenizer.named_special_tokens.get("pad")
    if pad is None and chat.requires_pad_token:
        pad = tokenizer.named_special_tokens.get("unk", tokenizer.named_special_tokens.get("eos"))
    settings = {"extra_special_tokens": tokens, "pad_token": pad}
    _update_json(folder / TOKENIZER_CONFIG_FILE, {key: value for key, value in settings.items() if value})
    ends = [
        *tokenizer.stop_ids,
        *([tokenizer.token_to_id(chat.end_of_turn)] if chat.end_of_turn in tokenizer.special_tokens else []),
    ]
    ids = {
        "bos": tokenizer.bos_token_id,
        "eos": list(dict.fromkeys(ends)) or None,
        "pad": pad and tokenizer.token_to_id(pad),
    }
    settings = {f"{role}_token_id": id for role, id in ids.items()}
    roles = {"bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id}
    settings |= {key: roles[role] for key, role in chat.generation_tokens.items()}
    _update_json(folder / GENERATION_FILE, {key: id for key, id in settings.items() if id is not None})


def _write_chat_template(
    folder: Path, chat: ChatConfig, config: Any, vision_tokens: VisionTokens, tokenizer: Tokenizer
) -> list[str]:
    """Write the family's chat template if the tokenizer has none."""
    if not chat.takes_chat_template or tokenizer.chat_template is not None:
        return []
    if "image" not in vision_tokens:
        return [f"{TEMPLATE_FILE} was not written: the tokenizer has no image token"]
    template = chat.build_template(config, tokenizer)
    if missing := template.find_missing_tokens(PROBE_MESSAGES, tokenizer):
        return [f"{TEMPLATE_FILE} was not written: the tokenizer lacks {', '.join(missing)}"]
    reserved = {f"{role}_token" for role in tokenizer.named_special_tokens}  # set by whoever renders the template
    variables = {name: value for name, value in template.variables.items() if name not in reserved}
    (folder / TEMPLATE_FILE).write_text(bind_variables(template.source, variables), encoding="utf-8")
    return []


def _update_json(file: Path, settings: JSONDict) -> None:
    if settings:
        write_json(file, (read_json(file) if file.is_file() else {}) | settings)
