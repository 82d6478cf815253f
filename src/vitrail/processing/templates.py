"""Chat templates by name: the words that released models were trained on, as Jinja."""

from collections.abc import Mapping
from typing import NamedTuple


class Preset(NamedTuple):
    source: str
    specials: tuple[str, ...]
    variables: dict[str, str]


# What a message says, pictures in place.
_BODY = """\
{%- macro body(message) -%}
    {%- if message.content is string -%}
        {{ message.content }}
    {%- else -%}
        {%- for part in message.content -%}
            {%- if part.type == 'text' -%}
                {{ part.text }}
            {%- else -%}
                {{ before + (image if part.type == 'image' else video) + after }}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
"""

# A system message if there is one, then user and assistant in turn.
_TURNS = """\
{%- set system = body(messages[0]) if messages and messages[0].role == 'system' else '' -%}
{%- set turns = messages[1:] if messages and messages[0].role == 'system' else messages -%}
{%- for turn in turns -%}
    {%- if turn.role != ['user', 'assistant'][loop.index0 % 2] -%}
        {{ raise_exception('after an optional system message, user and assistant must alternate, user first; '
                           ~ 'turn ' ~ loop.index ~ ' is by ' ~ turn.role) }}
    {%- endif -%}
{%- endfor -%}
"""

_CHATML = """\
{%- if default_system and not (messages and messages[0].role == 'system') -%}
    {{ '<|im_start|>system\n' + default_system + '<|im_end|>\n' }}
{%- endif -%}
{%- for message in messages -%}
    {{ '<|im_start|>' + message.role + '\n' }}
    {%- if message.role == 'assistant' -%}
        {%- generation -%}{{ body(message) + '<|im_end|>' }}{%- endgeneration -%}
    {%- elif message.role in ['system', 'user'] -%}
        {{ body(message) + '<|im_end|>' }}
    {%- else -%}
        {{ raise_exception('the role ' ~ message.role ~ ' has no place here') }}
    {%- endif -%}
    {{ '\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<|im_start|>assistant\n' }}
{%- endif -%}
"""

_LLAMA2 = """\
{%- for turn in turns -%}
    {%- if turn.role == 'user' -%}
        {%- set head = '<<SYS>>\n' + system + '\n<</SYS>>\n\n' if system and loop.first else '' -%}
        {{ bos_token + '[INST] ' + (head + body(turn)) | trim + ' [/INST]' }}
    {%- else -%}
        {%- generation -%}{{ ' ' + body(turn) | trim + ' ' + eos_token }}{%- endgeneration -%}
    {%- endif -%}
{%- endfor -%}
"""

_LLAMA3 = """\
{{- bos_token -}}
{%- for message in messages -%}
    {{ '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' }}
    {%- if message.role == 'assistant' -%}
        {%- generation -%}{{ body(message) | trim + '<|eot_id|>' }}{%- endgeneration -%}
    {%- elif message.role in ['system', 'user'] -%}
        {{ body(message) | trim + '<|eot_id|>' }}
    {%- else -%}
        {{ raise_exception('the role ' ~ message.role ~ ' has no place here') }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif -%}
"""

_VICUNA = """\
{{- bos_token + (system or default_system) + ' ' -}}
{%- for turn in turns -%}
    {%- if turn.role == 'user' -%}
        {{ 'USER: ' + body(turn) + ' ' }}
    {%- else -%}
        {{ 'ASSISTANT:' }}
        {%- generation -%}{{ ' ' + body(turn) + eos_token }}{%- endgeneration -%}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ 'ASSISTANT:' }}
{%- endif -%}
"""

_DEEPSEEK_VL = """\
{{- bos_token + (system or default_system) + '\n\n' -}}
{%- for turn in turns -%}
    {%- if turn.role == 'user' -%}
        {{ 'User: ' + body(turn) | trim + '\n\n' }}
    {%- else -%}
        {{ 'Assistant:' }}
        {%- generation -%}{{ ' ' + body(turn) | trim + eos_token }}{%- endgeneration -%}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ 'Assistant:' }}
{%- endif -%}
"""

_MISTRAL = """\
{{- bos_token -}}
{%- for turn in turns -%}
    {%- if turn.role == 'user' -%}
        {{ '[INST] ' + (system + '\n\n' if system and loop.first else '') + body(turn) + ' [/INST]' }}
    {%- else -%}
        {%- generation -%}{{ ' ' + body(turn) + eos_token }}{%- endgeneration -%}
    {%- endif -%}
{%- endfor -%}
"""

_PLAIN = """\
{{- bos_token -}}
{%- for turn in turns -%}
    {%- if turn.role == 'assistant' -%}
        {%- generation -%}{{ body(turn) + '\n' }}{%- endgeneration -%}
    {%- elif system or turn.content is string or turn.content | selectattr('type', 'equalto', 'text') | list -%}
        {{ raise_exception('a caption answers a picture alone; it takes no words from system or user') }}
    {%- else -%}
        {{ body(turn) }}
    {%- endif -%}
{%- endfor -%}
"""

# Every turn ends with the end token, and nothing else says whose it was.
_ENDED = """\
{{- bos_token -}}
{%- for turn in turns -%}
    {%- if turn.role == 'assistant' -%}
        {%- generation -%}{{ body(turn) + eos_token }}{%- endgeneration -%}
    {%- elif system -%}
        {{ raise_exception('the role system has no place here') }}
    {%- else -%}
        {{ body(turn) + eos_token }}
    {%- endif -%}
{%- endfor -%}
"""

# The tokens around a picture are shared by pictures side by side.
_IDEFICS = """\
{%- macro shown(message) -%}
    {%- set text = {'type': 'text', 'text': message.content} -%}
    {%- for part in ([text] if message.content is string else message.content) -%}
        {%- if part.type == 'text' -%}
            {{ (' ' if loop.first else '') + part.text | trim(' ') }}
        {%- elif part.type == 'image' -%}
            {{ ('' if not loop.first and loop.previtem.type == 'image' else fake) + image + fake }}
        {%- else -%}
            {{ raise_exception('a ' ~ part.type ~ ' has no place here') }}
        {%- endif -%}
    {%- endfor -%}
{%- endmacro -%}
{%- if system -%}
    {{ raise_exception('the role system has no place here') }}
{%- endif -%}
{{ bos_token }}
{%- for turn in turns -%}
    {%- if turn.role == 'user' -%}
        {{ ('' if loop.first else '\n') + 'User:' + shown(turn) + end }}
    {%- else -%}
        {{ '\nAssistant:' }}
        {%- generation -%}{{ shown(turn) + end }}{%- endgeneration -%}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '\nAssistant:' }}
{%- endif -%}
"""

# Pictures come before everything, even the bos token.
_BLIP2 = """\
{%- macro said(message) -%}
    {%- if message.content is string -%}
        {{ message.content }}
    {%- else -%}
        {{ message.content | selectattr('type', 'equalto', 'text') | map(attribute='text') | join(' ') }}
    {%- endif -%}
{%- endmacro -%}
{%- if system -%}
    {{ raise_exception('the role system has no place here') }}
{%- endif -%}
{%- for turn in turns if turn.content is not string -%}
    {%- for part in turn.content if part.type != 'text' -%}
        {{ image if part.type == 'image' else raise_exception('a ' ~ part.type ~ ' has no place here') }}
    {%- endfor -%}
{%- endfor -%}
{{ bos_token }}
{%- for turn in turns -%}
    {%- if turn.role == 'user' -%}
        {{ ('' if loop.first else ' ') + 'Question: ' + said(turn) | trim + ' Answer:' }}
    {%- else -%}
        {%- generation -%}{{ ' ' + said(turn) | trim }}{%- endgeneration -%}
        {{ '' if said(turn) | trim | last == '.' else '.' }}
    {%- endif -%}
{%- endfor -%}
"""

_IMAGE = {"image": "<image>", "video": "<video>", "before": "", "after": "\n"}
_ENDS = {"bos_token": "<s>", "eos_token": "</s>"}
_IM = ("<|im_start|>", "<|im_end|>")
_EYE = ("<|vision_start|>", "<|image_pad|>", "<|video_pad|>", "<|vision_end|>")
_PADS = {"image": "<|image_pad|>", "video": "<|video_pad|>", "before": "<|vision_start|>", "after": "<|vision_end|>"}
_FAKE = {"image": "<image>", "fake": "<fake_token_around_image>", "end": "<end_of_utterance>"}
_HEADERS = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
_CURIOUS = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)
_SEEING = (
    "You are a helpful language and vision assistant. You are able to understand the visual content that the user "
    "provides, and assist the user with a variety of tasks using natural language."
)
_SENTENCE = {"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>"}
_PLACED = {"image": "<image_placeholder>", "before": "", "after": ""}

PRESETS = {
    #         template                   special tokens  variables, each of which a rendering may change
    "chatml": Preset(_BODY + _CHATML, _IM, _IMAGE | {"default_system": ""}),
    "qwen2-vl": Preset(_BODY + _CHATML, _IM + _EYE, _PADS | {"default_system": "You are a helpful assistant."}),
    "llama2": Preset(_BODY + _TURNS + _LLAMA2, (), _IMAGE | _ENDS),
    "llama3": Preset(_BODY + _LLAMA3, _HEADERS, _IMAGE | {"bos_token": "<|begin_of_text|>"}),
    "vicuna": Preset(_BODY + _TURNS + _VICUNA, (), _IMAGE | _ENDS | {"default_system": _CURIOUS}),
    "deepseek-vl": Preset(_BODY + _TURNS + _DEEPSEEK_VL, (), _PLACED | _SENTENCE | {"default_system": _SEEING}),
    "mistral": Preset(_BODY + _TURNS + _MISTRAL, (), _IMAGE | _ENDS),
    "idefics": Preset(_BODY + _TURNS + _IDEFICS, (_FAKE["fake"],), _FAKE | _ENDS),
    "blip-2": Preset(_BODY + _TURNS + _BLIP2, (), {"image": "<image>", "bos_token": "</s>"}),
    "ended": Preset(_BODY + _TURNS + _ENDED, (), _IMAGE | {"after": ""} | _ENDS),
    "plain": Preset(_BODY + _TURNS + _PLAIN, (), _IMAGE | {"after": "", "bos_token": ""}),
}


def spoken(image: str, start: str, end: str) -> str:
    """The `ended` template as a tokenizer keeps it, with its own words for a picture, the start and the end."""
    own = {"image": image, "before": "", "after": "", "bos_token": start, "eos_token": end}
    return settled(PRESETS["ended"].source, own)


def settled(source: str, variables: Mapping[str, str]) -> str:
    """A template that needs to be told nothing: its variables are set in it."""
    return "".join(f"{{%- set {name} = {value!r} -%}}\n" for name, value in variables.items()) + source
