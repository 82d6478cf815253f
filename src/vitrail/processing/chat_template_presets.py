"""Chat template presets, as used to train released models. Their sources are the files of `chat_templates/`.

`ended` ends every turn with the EOS token and does not mark roles. In `idefics`, adjacent images share the boundary
tokens between them. In `blip-2`, `florence2`, `fuyu` and `paligemma`, images come first, even before the BOS token, in
`molmo` after it, which is the EOS token if the tokenizer has none. `florence2` replaces task names, such as <OD>, and
ends with the first tokens of the answer. In `gemma`, the processor of Gemma 3 writes the image tokens at
<start_of_image>. In `phi-3-vision`, the BOS token follows each image, because the processor encodes the texts between
images one by one.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple


class ChatTemplatePreset(NamedTuple):
    source: str
    special_tokens: tuple[str, ...]
    variables: dict[str, str]


def _read_source(*names: str) -> str:
    """Join template files. An escaped line end becomes a line end, as in the templates of saved models."""
    folder = Path(__file__).parent / "chat_templates"
    return "".join((folder / f"{name}.jinja").read_text(encoding="utf-8").replace("\\n", "\n") for name in names)


def _read_turns(name: str) -> str:
    """Read a template of an optional system message and alternating turns of user and assistant."""
    return _read_source("body", "turns", name)


_LLAVA_VARIABLES = {"image": "<image>", "video": "<video>", "before": "", "after": "\n"}
_LLAMA_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
_CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
_VISION_TOKENS = ("<|vision_start|>", "<|image_pad|>", "<|video_pad|>", "<|vision_end|>")
_QWEN_VL_VARIABLES = {
    "image": "<|image_pad|>",
    "video": "<|video_pad|>",
    "before": "<|vision_start|>",
    "after": "<|vision_end|>",
}
_IDEFICS_VARIABLES = {"image": "<image>", "fake": "<fake_token_around_image>", "end": "<end_of_utterance>"}
_GEMMA_TOKENS = ("<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>")
_INTERNVL_VARIABLES = {
    "image": "<IMG_CONTEXT>",
    "video": "<video>",
    "before": "",
    "after": "\n",
    "default_system": "你是书生·万象，英文名是InternVL，是由上海人工智能实验室、清华大学及多家合作单位联合开发的"
    "多模态大语言模型。",
    "system_start": "<|im_start|>system\n",
    "user_start": "<|im_start|>user\n",
    "assistant_start": "<|im_start|>assistant\n",
    "separator": "<|im_end|>\n",
}
_INTERNVL2_VARIABLES = _INTERNVL_VARIABLES | {
    "default_system": "你是由上海人工智能实验室联合商汤科技开发的书生多模态大模型，英文名叫InternVL, "
    "是一个有用无害的人工智能助手。",
    "separator": "<|im_end|>",
}
_MINICPM_VARIABLES = {
    "image": "<unk>",
    "bos_token": "",
    "default_system": "",
    "start": "<|im_start|>",
    "middle": "\n",
    "end": "<|im_end|>\n",
}
_LLAMA3_TOKENS = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
_VICUNA_SYSTEM_PROMPT = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)
_DEEPSEEK_SYSTEM_PROMPT = (
    "You are a helpful language and vision assistant. You are able to understand the visual content that the user "
    "provides, and assist the user with a variety of tasks using natural language."
)
_PHI_TOKENS = ("<|user|>", "<|assistant|>", "<|end|>")
_DEEPSEEK_TOKENS = {"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>"}
_DEEPSEEK_VARIABLES = {"image": "<image_placeholder>", "before": "", "after": ""}
_DEEPSEEK_VARIABLES |= {"user_start": "User: ", "assistant_start": "Assistant:"}

PRESETS = {
    #         template                   special tokens  default variables, which a rendering can override
    "chatml": ChatTemplatePreset(
        _read_source("body", "chatml"), _CHATML_TOKENS, _LLAVA_VARIABLES | {"default_system": ""}
    ),
    "qwen2-vl": ChatTemplatePreset(
        _read_source("body", "chatml"),
        _CHATML_TOKENS + _VISION_TOKENS,
        _QWEN_VL_VARIABLES | {"default_system": "You are a helpful assistant."},
    ),
    "llama2": ChatTemplatePreset(_read_turns("llama2"), (), _LLAVA_VARIABLES | _LLAMA_TOKENS),
    "llama3": ChatTemplatePreset(
        _read_source("body", "llama3"), _LLAMA3_TOKENS, _LLAVA_VARIABLES | {"bos_token": "<|begin_of_text|>"}
    ),
    "vicuna": ChatTemplatePreset(
        _read_turns("vicuna"), (), _LLAVA_VARIABLES | _LLAMA_TOKENS | {"default_system": _VICUNA_SYSTEM_PROMPT}
    ),
    "deepseek-vl": ChatTemplatePreset(
        _read_turns("deepseek-vl"),
        (),
        _DEEPSEEK_VARIABLES | _DEEPSEEK_TOKENS | {"default_system": _DEEPSEEK_SYSTEM_PROMPT},
    ),
    "deepseek-vl2": ChatTemplatePreset(
        _read_turns("deepseek-vl2"),
        ("<|User|>", "<|Assistant|>"),
        _DEEPSEEK_TOKENS | {"image": "<image>", "before": "", "after": "\n", "default_system": ""},
    ),
    "gemma": ChatTemplatePreset(_read_turns("gemma"), _GEMMA_TOKENS, {"bos_token": "<bos>"}),
    "gemma4": ChatTemplatePreset(
        _read_turns("gemma4"),
        ("<|turn>", "<turn|>"),
        {"image": "<|image|>", "before": "", "after": "", "bos_token": "<bos>"},
    ),
    "glm4v": ChatTemplatePreset(
        _read_source("glm4v"),
        ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>"),
        {"image": "<|image|>", "video": "<|video|>", "eos_token": "<|endoftext|>"},
    ),
    "idefics3": ChatTemplatePreset(
        _read_source("body", "idefics3"),
        ("<end_of_utterance>",),
        _LLAVA_VARIABLES | {"after": "", "bos_token": "<|begin_of_text|>", "end": "<end_of_utterance>"},
    ),
    "internvl": ChatTemplatePreset(_read_turns("internvl"), _CHATML_TOKENS, _INTERNVL_VARIABLES),
    "minicpm-v": ChatTemplatePreset(_read_source("minicpm-v"), _CHATML_TOKENS, _MINICPM_VARIABLES),
    "molmo": ChatTemplatePreset(
        _read_turns("molmo"), (), {"image": "<im_patch>", "bos_token": "", "eos_token": "<|endoftext|>"}
    ),
    "fuyu": ChatTemplatePreset(_read_turns("fuyu"), (), {"image": "|SPEAKER|", "eos_token": "|ENDOFTEXT|"}),
    "florence2": ChatTemplatePreset(_read_turns("florence2"), (), {"image": "<image>"} | _LLAMA_TOKENS),
    "paligemma": ChatTemplatePreset(
        _read_turns("paligemma"), (), {"image": "<image>", "bos_token": "<bos>", "eos_token": "<eos>"}
    ),
    "kimi": ChatTemplatePreset(
        _read_source("body", "kimi"),
        ("<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_end|>"),
        {
            "image": "<|media_pad|>",
            "before": "<|media_start|>image<|media_content|>",
            "after": "<|media_end|>",
            "default_system": "You are a helpful assistant",
            "reply_start": "",
        },
    ),
    "mistral": ChatTemplatePreset(_read_turns("mistral"), (), _LLAVA_VARIABLES | _LLAMA_TOKENS),
    "idefics": ChatTemplatePreset(
        _read_turns("idefics"), (_IDEFICS_VARIABLES["fake"],), _IDEFICS_VARIABLES | _LLAMA_TOKENS
    ),
    "blip-2": ChatTemplatePreset(_read_turns("blip-2"), (), {"image": "<image>", "bos_token": "</s>"}),
    "ended": ChatTemplatePreset(_read_turns("ended"), (), _LLAVA_VARIABLES | {"after": ""} | _LLAMA_TOKENS),
    "phi-3-vision": ChatTemplatePreset(
        _read_source("body", "phi"),
        _PHI_TOKENS,
        {"image": "<|image|>", "before": "", "after": "<s>\n", "bos_token": "<s>", "line": "\n", "closing": ""},
    ),
    "phi-4-multimodal": ChatTemplatePreset(
        _read_source("body", "phi"),
        _PHI_TOKENS,
        {"image": "<|endoftext10|>", "before": "", "after": "", "bos_token": "", "line": ""}
        | {"closing": "<|endoftext|>"},
    ),
    "plain": ChatTemplatePreset(_read_turns("plain"), (), _LLAVA_VARIABLES | {"after": "", "bos_token": ""}),
}


INTERNVL_CONVERSATIONS = {
    "Hermes-2": _INTERNVL2_VARIABLES,
    "internlm2-chat": _INTERNVL2_VARIABLES,
    "phi3-chat": _INTERNVL2_VARIABLES
    | {
        "system_start": "<|system|>\n",
        "user_start": "<|user|>\n",
        "assistant_start": "<|assistant|>\n",
        "separator": "<|end|>",
    },
    "internvl2_5": _INTERNVL_VARIABLES,
}
"""Conversations of OpenGVLab's InternVL, by the name in config.json."""


MINICPM_CONVERSATIONS = {
    "2.5": _MINICPM_VARIABLES
    | {
        "bos_token": "<|begin_of_text|>",
        "start": "<|start_header_id|>",
        "middle": "<|end_header_id|>\n\n",
        "end": "<|eot_id|>",
    },
    "2.6": _MINICPM_VARIABLES | {"default_system": "You are a helpful assistant."},
    "4.0": _MINICPM_VARIABLES,
    "4.5": _MINICPM_VARIABLES,
}
"""Conversations of MiniCPM-V, by the version in config.json."""


def build_conversation_template(model_config: Mapping[str, Any]) -> str | None:
    """Return the template of a model whose config.json determines its conversation, or None."""
    conversation = str(model_config.get("template"))
    if model_config.get("model_type") == "internvl_chat" and conversation in INTERNVL_CONVERSATIONS:
        return build_internvl_template(conversation)
    version = str(model_config.get("version"))
    if model_config.get("model_type") == "minicpmv" and version in MINICPM_CONVERSATIONS:
        return bind_variables(PRESETS["minicpm-v"].source, MINICPM_CONVERSATIONS[version])
    return None


def build_internvl_template(conversation: str) -> str:
    """Return the template of a conversation of OpenGVLab's InternVL, with its variables bound."""
    return bind_variables(PRESETS["internvl"].source, INTERNVL_CONVERSATIONS[conversation])


def build_ended_template(image_token: str, bos_token: str, eos_token: str, video_token: str | None = None) -> str:
    """Return the `ended` template with the tokenizer's image, video, BOS and EOS tokens bound."""
    own = {"image": image_token, "before": "", "after": "", "bos_token": bos_token, "eos_token": eos_token}
    own |= {} if video_token is None else {"video": video_token}
    return bind_variables(PRESETS["ended"].source, own)


def bind_variables(source: str, variables: Mapping[str, str]) -> str:
    """Return the template with its variables set inside, so that rendering needs no arguments."""
    return "".join(f"{{%- set {name} = {value!r} -%}}\n" for name, value in variables.items()) + source
