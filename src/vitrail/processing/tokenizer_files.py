"""Read the files beside a tokenizer.json, and describe why a tokenizer.json is invalid."""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from vitrail.errors import TextError
from vitrail.file_reading import parse_json, read_regular_file
from vitrail.processing.chat_template_presets import build_conversation_template

TEXT_CONFIG_KEYS = ("text_config", "llm_config", "language_config")
"""Keys of the language model in the config.json of a vision-language model."""
SPECIAL_TOKEN_ROLES = ("bos", "eos", "unk", "pad")  # roles of special tokens, in the order they are added


FUYU_IMAGE_TOKEN, FUYU_NEWLINE_TOKEN = "|SPEAKER|", "|NEWLINE|"
FLORENCE2_TOKENS = (
    *("<od>", "</od>", "<ocr>", "</ocr>", *(f"<loc_{place}>" for place in range(1000))),
    *("<cap>", "</cap>", "<ncap>", "</ncap>", "<dcap>", "</dcap>", "<grounding>", "</grounding>", "<seg>", "</seg>"),
    *("<sep>", "<region_cap>", "</region_cap>", "<region_to_desciption>", "</region_to_desciption>"),  # as released
    *("<proposal>", "</proposal>", "<poly>", "</poly>", "<and>"),
)


class ModelTokens(NamedTuple):
    """Tokens of a model that its tokenizer's files do not describe.

    special        tokens of prompts that the files do not list as special
    text           tokens of texts and answers, though the files may list them as special
    added          special tokens that are added after those of texts if the files lack these
    roles          special tokens of the roles bos, eos, unk and pad, if the files name none
    """

    special: tuple[str, ...] = ()
    text: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    roles: dict[str, str] = {}


MODEL_TOKENS = {
    "fuyu": ModelTokens(special=(FUYU_IMAGE_TOKEN, FUYU_NEWLINE_TOKEN, "<s>", "<0x04>")),
    "florence2": ModelTokens(
        text=FLORENCE2_TOKENS,
        added=("<image>",),
        roles={"bos": "<s>", "eos": "</s>", "unk": "<unk>", "pad": "<pad>"},
    ),
}
"""By model_type."""

TEMPLATE_FOLDER = "additional_chat_templates"
"""Folder of the chat templates besides the default one, as in transformers."""
_TEMPLATE_NAME = re.compile(r"[\w.-]*\w")


class ChatTemplates(NamedTuple):
    """Chat templates of a model folder: the default one, the file that holds it, and further ones by name."""

    default: str | None = None
    file: Path | None = None
    named: dict[str, str] = {}


class TokenizerFiles(NamedTuple):
    """Contents of the files beside a tokenizer.json: special tokens by role, chat templates, extra stop ids."""

    named_special_tokens: dict[str, str]
    chat_templates: ChatTemplates
    stop_ids: tuple[int, ...]


def read_tokenizer_files(folder: Path) -> TokenizerFiles:
    """Read the tokenizer files of a model folder. Every file is optional."""
    config = read_json(folder / "tokenizer_config.json")
    names = read_json(folder / "special_tokens_map.json") | {k: v for k, v in config.items() if v is not None}
    named = dict(find_model_tokens(folder).roles)
    for role in SPECIAL_TOKEN_ROLES:
        token = names.get(f"{role}_token")
        token = token.get("content") if isinstance(token, dict) else token
        if token and not isinstance(token, str):
            raise TextError(f"{role}_token beside {folder / 'tokenizer.json'} is {token!r}", "give a string")
        if token:
            named[role] = token
    return TokenizerFiles(named, read_chat_templates(folder, config), _read_stop_ids(folder))


def read_added_tokens(folder: Path) -> dict[str, int]:
    """Read the ids of the tokens that were added to a vocabulary, by any of the tokenizer's files."""
    listed = read_json(folder / "tokenizer.json").get("added_tokens") or []
    decoder = read_json(folder / "tokenizer_config.json").get("added_tokens_decoder") or {}
    tokens = {token["content"]: token["id"] for token in listed}
    tokens |= {token["content"]: int(id) for id, token in decoder.items()}
    return tokens | read_json(folder / "added_tokens.json")


def find_model_tokens(folder: Path) -> ModelTokens:
    """Return the tokens of the model that a folder's config.json names."""
    return MODEL_TOKENS.get(str(read_json(folder / "config.json").get("model_type")), ModelTokens())


def _read_stop_ids(folder: Path) -> tuple[int, ...]:
    """Return the end-of-text ids: of generation_config.json, or of config.json if that file is missing."""
    file = folder / "generation_config.json"
    settings = read_json(file)
    if not file.is_file():
        file = folder / "config.json"
        settings = read_json(file)
        if "eos_token_id" not in settings:
            nested = [settings.get(key) for key in TEXT_CONFIG_KEYS]
            settings = next((part for part in nested if isinstance(part, dict)), {})
    stops = settings.get("eos_token_id")
    stops = stops if isinstance(stops, list) else [] if stops is None else [stops]
    if not all(type(stop) is int and stop >= 0 for stop in stops):
        raise TextError(f"{file}: eos_token_id is {stops!r:.100}", "give an id or a list of ids")
    return tuple(stops)


def read_chat_templates(folder: Path, tokenizer_config: dict[str, Any]) -> ChatTemplates:
    """Read the chat templates of a folder. The files take precedence in the order of their age, newest first.

    A template may have several named forms, of which "default" is the default, or the only one. The config.json of
    OpenGVLab's InternVL and of MiniCPM-V determines a conversation; their tokenizers have templates of the language
    models alone.
    """
    default, file, named = None, folder / "chat_template.jinja", {}
    conversation = build_conversation_template(read_json(folder / "config.json"))
    if file.is_file():
        default = _decode_utf8(file, read_bytes(file, ""))
    elif conversation is not None:
        default, file = conversation, folder / "config.json"
    else:
        files = (folder / name for name in ("chat_template.json", "processor_config.json"))
        places = [*((file, read_json(file)) for file in files), (folder / "tokenizer_config.json", tokenizer_config)]
        file, found = next(
            ((file, place["chat_template"]) for file, place in places if place.get("chat_template")), (file, None)
        )
        named = _parse_named_templates(found, file)
        default = named.pop("default", None) or (named.popitem()[1] if len(named) == 1 else None)
    for path in sorted((folder / TEMPLATE_FOLDER).glob("*.jinja")):
        named[path.stem] = _decode_utf8(path, read_bytes(path, ""))
    return ChatTemplates(default, file if default is not None else None, named)


def _parse_named_templates(value: object, file: Path) -> dict[str, str]:
    """Return templates by name, given as one text, as a list of names and templates, or as a table."""
    if value is None:
        return {}
    if isinstance(value, list) and all(isinstance(row, dict) for row in value):
        value = {row.get("name"): row.get("template") for row in value}
    rows = value if isinstance(value, dict) else {"default": value}
    for name, template in rows.items():
        if not isinstance(name, str) or not _TEMPLATE_NAME.fullmatch(name) or not isinstance(template, str):
            raise TextError(
                f"{file}: chat_template is {value!r:.100}",
                "give one template, or a list with a name and a template each",
            )
    return dict(rows)


def read_bytes(file: Path, remedy: str) -> bytes:
    try:
        return read_regular_file(file)
    except FileNotFoundError:
        raise TextError(f"{file} does not exist", remedy) from None
    except OSError as error:
        raise TextError(f"{file} cannot be read: {error.strerror}", remedy) from None


def _decode_utf8(file: Path, data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise TextError(f"{file} is not valid UTF-8 (byte {error.start})", "save it as UTF-8") from None


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object from a file. Return {} if the file does not exist."""
    if not file.exists():
        return {}
    data = read_bytes(file, "")
    try:
        found = parse_json(data)
    except ValueError as error:
        raise TextError(f"{file} is not JSON: {error}", "download the file again, or remove it") from None
    if not isinstance(found, dict):
        raise TextError(f"{file} is not a JSON object", "download the file again, or remove it")
    return found


def describe_invalid_tokenizer(file: Path, data: bytes, reason: str) -> TextError:
    """Return the error for an invalid tokenizer.json: not JSON, truncated, or JSON of another kind."""
    remedy = "download the file again"
    try:
        json.loads(data)
    except json.JSONDecodeError as error:
        if not data.strip():
            return TextError(f"{file} is empty", remedy)
        rest = error.doc[error.pos :].strip()
        if "Unterminated" in error.msg or any(word.startswith(rest) for word in ("true", "false", "null")):
            return TextError(f"{file} is truncated: the JSON ends at line {error.lineno}", remedy)
        return TextError(f"{file} is not JSON: {error}", "give the tokenizer.json, not the vocabulary or model file")
    except RecursionError:
        return TextError(f"{file} is nested too deeply", remedy)
    except UnicodeDecodeError:
        return TextError(f"{file} is a binary file, not JSON", "give the tokenizer.json, not the model file (.model)")
    reason = reason.partition("from buffer: ")[2] or reason
    return TextError(f"{file} is JSON but not a tokenizer: {reason}", "give the tokenizer.json, not its config")


def format_json(data: dict[str, Any]) -> str:
    return json.dumps(data, indent=2, ensure_ascii=False) + "\n"
