"""Chat settings of a model: its chat config, its chat template and the tokens around an image."""

from typing import Any

from vitrail.errors import ConfigError
from vitrail.hub.chat_config import VIDEO_TOKEN, ChatConfig, find_vision_token_ids, load_chat_preset
from vitrail.hub.checkpoint_family import CheckpointFamily
from vitrail.models.chat_layout import ChatFormat
from vitrail.models.cross_attention_vlm import CrossAttentionVLM
from vitrail.models.vlm import VLM, VLMConfig
from vitrail.processing.chat_template import ChatTemplate
from vitrail.processing.tokenizer import Tokenizer
from vitrail.registry import FAMILIES

PROBE_MESSAGES = [{"role": "user", "content": [{"type": "image"}]}, {"role": "assistant", "content": "yes"}]


def find_chat_config(model_class: type, config: Any, family: CheckpointFamily | None = None) -> ChatConfig | None:
    """Return the chat config of a family, or without one that of the first family that the model can be exported as."""
    if isinstance(config, VLMConfig):
        config = config.replace(feature_reduction=None)  # token reduction does not change how a model is prompted
    matches = [row for row in FAMILIES.values() if row.model_class is model_class and row.supports(config)]
    families = matches if family is None else [family]
    return next((row.chat_config for row in families if row.chat_config is not None), None)


def build_no_video_error(model: VLM | CrossAttentionVLM, chat_config: ChatConfig | None) -> ConfigError:
    """Build the error for a model that takes no videos."""
    families = [row for row in FAMILIES.values() if chat_config is not None and row.chat_config is chat_config]
    name = families[0].name if families else type(model).__name__
    if isinstance(model, VLM) and model.config.resolved_video_sampling is not None:
        return ConfigError(
            f"this {name} takes videos, but its tokenizer has no video token",
            f"use the tokenizer of the model, or add {VIDEO_TOKEN} to it as a special token",
        )
    takes_videos = [key for key, row in FAMILIES.items() if row.has_video_processor]
    return ConfigError(
        f"this {name} takes images and no videos",
        f"give the frames as images, or use a model that takes videos: {', '.join(takes_videos)}",
    )


def select_template(
    config: Any, tokenizer: Tokenizer, chat_config: ChatConfig | None, preset_name: str | None
) -> ChatTemplate | None:
    """Return the named template, else the tokenizer's template, else that of the chat config, or None without one.

    The name is that of a further template of the tokenizer, or of a preset.
    """
    if preset_name is not None and preset_name in tokenizer.named_chat_templates:
        template = ChatTemplate.from_tokenizer(tokenizer, preset_name)
    elif preset_name is not None:
        end_of_turn = None if chat_config is None else chat_config.end_of_turn
        template = load_chat_preset(preset_name, config, tokenizer, end_of_turn=end_of_turn)
    elif chat_config is not None:
        template = chat_config.select_template(config, tokenizer)
    elif tokenizer.chat_template is not None:
        template = ChatTemplate.from_tokenizer(tokenizer)
    else:
        return None
    return template if chat_config is None else chat_config.expand_tokens(template)


def build_training_chat_format(model: VLM, tokenizer: Tokenizer, preset_name: str | None = None) -> ChatFormat | None:
    """Build the chat format that a model is trained with: how `ChatPipeline` will prompt it once it is saved.

    Returns None if there is no template, or if the tokenizer lacks special tokens of the family's template.
    """
    chat_config = find_chat_config(type(model), model.config)
    template = select_template(model.config, tokenizer, chat_config, preset_name)
    is_default = preset_name is None and tokenizer.chat_template is None
    if template is None or (is_default and template.find_missing_tokens(PROBE_MESSAGES, tokenizer)):
        return None
    video_token_id = find_vision_token_ids(model.config, tokenizer).get("video")
    return build_chat_format(template, chat_config, tokenizer, video_token_id)


def build_chat_format(
    template: ChatTemplate, chat_config: ChatConfig | None, tokenizer: Tokenizer, video_token_id: int | None
) -> ChatFormat:
    """Build the chat format: the template, and the text around an image that the processor inserts.

    There is no such text if the tokenizer lacks its tokens: a native model of this family may be trained without them.
    """
    boundary_tokens = None if chat_config is None else chat_config.image_boundary_tokens
    if (
        chat_config is None
        or boundary_tokens is None
        or any(word not in tokenizer.special_tokens for word in boundary_tokens)
    ):
        return ChatFormat(template, video_token_id=video_token_id)
    if chat_config.image_text is not None:
        return ChatFormat(template, video_token_id=video_token_id, image_text=chat_config.image_text)
    before, after = ([tokenizer.token_to_id(word)] for word in boundary_tokens)
    return ChatFormat(template, before, after, video_token_id)
