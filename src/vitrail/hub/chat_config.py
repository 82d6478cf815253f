"""Chat config of a family: its default chat template, and the settings of its transformers processor."""

from collections.abc import Callable
from typing import Any, NamedTuple

from vitrail.errors import TextError
from vitrail.models.cross_attention_vlm import CrossAttentionVLMConfig
from vitrail.models.vlm import VLMConfig
from vitrail.processing.chat_template import ChatTemplate
from vitrail.processing.image_layout import ImageLayout
from vitrail.processing.tokenizer import Tokenizer

HFConfig = dict[str, Any]
VisionTokens = dict[str, str]  # tokens for and around images, by name: {"image": "<image>", …}
VIDEO_TOKEN = "<video>"  # video token of models whose config names none
VIDEO_STAND_IN = "<global-img>"  # stands for a video in prompts of SmolVLM, whose tokenizer has no video token


class ChatConfig(NamedTuple):
    """Chat template and processor settings of a family of vision-language models.

    processor_class        processor class of transformers
    template_preset        chat template of checkpoints without one
    template_variables     variables of that preset
    image_boundary_tokens  tokens around an image that the processor inserts and chat templates do not
    image_text             layout and number of an image → texts before each view, or span with newlines, and after the
                           last one, instead of these tokens
    expansions             tokens that chat templates write → the text that the processor replaces them with
    end_of_turn            token that ends a turn, if the tokenizer has it
    processor_fields       (config, vision tokens) → settings in processor_config.json
    tokenizer_tokens       token attributes of the tokenizer → the name of a vision token or, in <…>, the token
    generation_tokens      settings of generation_config.json → the role of a token, such as "eos"
    required_word          word of chat templates that the preset does not replace, such as "video"; None for any
    fixed_image_token      image token that the processor hard-codes
    takes_chat_template    whether the processor takes a chat template; those that do not place images themselves
    requires_pad_token     whether the processor pads single texts too
    """

    processor_class: str
    template_preset: str
    template_variables: dict[str, str] = {}
    image_boundary_tokens: tuple[str, str] | None = None
    image_text: Callable[[ImageLayout, int], list[str]] | None = None
    expansions: dict[str, str] = {}
    end_of_turn: str | None = None
    processor_fields: Callable[[Any, VisionTokens], HFConfig] = lambda _config, _vision_tokens: {}
    tokenizer_tokens: dict[str, str] = {}
    generation_tokens: dict[str, str] = {}
    required_word: str | None = None
    fixed_image_token: str | None = None
    takes_chat_template: bool = True
    requires_pad_token: bool = False

    def build_template(self, config: VLMConfig | CrossAttentionVLMConfig, tokenizer: Tokenizer) -> ChatTemplate:
        """Build the preset template with the tokens of a tokenizer."""
        return load_chat_preset(self.template_preset, config, tokenizer, self.template_variables, self.end_of_turn)

    def select_template(self, config: VLMConfig | CrossAttentionVLMConfig, tokenizer: Tokenizer) -> ChatTemplate:
        """Return the tokenizer's template, or the preset if there is none."""
        source = tokenizer.chat_template
        if source is None or (self.required_word is not None and self.required_word not in source):
            return self.build_template(config, tokenizer)
        return ChatTemplate.from_tokenizer(tokenizer)

    def expand_tokens(self, template: ChatTemplate) -> ChatTemplate:
        """Let a template replace tokens as the processor does."""
        template.expansions = dict(self.expansions)
        return template


def load_chat_preset(
    name: str,
    config: VLMConfig | CrossAttentionVLMConfig,
    tokenizer: Tokenizer,
    template_variables: dict[str, str] | None = None,
    end_of_turn: str | None = None,
) -> ChatTemplate:
    """Load a chat template preset with the vision tokens of a tokenizer."""
    template = ChatTemplate.from_preset(name)
    vision_tokens = {kind: tokenizer.id_to_token(id) for kind, id in find_vision_token_ids(config, tokenizer).items()}
    end_variables = (
        {} if end_of_turn is None else {"end": end_of_turn if end_of_turn in tokenizer.special_tokens else ""}
    )
    template.variables |= {**vision_tokens, **end_variables, **(template_variables or {})}
    return template


def find_vision_token_ids(config: VLMConfig | CrossAttentionVLMConfig, tokenizer: Tokenizer) -> dict[str, int]:
    """Return the ids of the image token and, if the model takes videos, of the video token."""
    if not isinstance(config, VLMConfig):
        return {"image": config.image_token_id}
    video = None
    if config.resolved_video_sampling is not None:
        specials = tokenizer.special_tokens
        video = config.vision_token_ids.get("video", specials.get(VIDEO_TOKEN))
        if video is None and config.resolved_video_sampling.rule == "smolvlm":
            video = specials.get(VIDEO_STAND_IN)
    return {"image": config.rules.fill_id} | (
        {"video": video} if video is not None and video < tokenizer.vocab_size else {}
    )


def find_vision_tokens(config: VLMConfig | CrossAttentionVLMConfig, tokenizer: Tokenizer) -> VisionTokens:
    """Return the vision tokens of a config that the tokenizer has."""
    ids = (
        {**config.vision_token_ids, "image": config.rules.fill_id}
        if isinstance(config, VLMConfig)
        else {"image": config.image_token_id}
    )
    tokens = {}
    for name, id in ids.items():
        try:
            tokens[name] = tokenizer.id_to_token(id)
        except TextError:  # the vocabulary lacks it
            continue
    return tokens
