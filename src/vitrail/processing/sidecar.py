"""The files of a tokenizer: what lies beside a tokenizer.json, and why one that cannot be read cannot."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from vitrail.errors import TextError

NAMED = ("bos", "eos", "unk", "pad")  # the special tokens that have a part to play, in the order they are added


class Sidecar(NamedTuple):
    """What lies beside a tokenizer.json: the names of special tokens, the chat template, further stop ids."""

    named: dict[str, str]
    chat_template: str | None
    stops: tuple[int, ...]


def read_sidecar(folder: Path) -> Sidecar:
    """Read the files that model folders keep beside a tokenizer.json; each may be missing."""
    config = read_json(folder / "tokenizer_config.json")
    names = read_json(folder / "special_tokens_map.json") | {k: v for k, v in config.items() if v is not None}
    named = {}
    for role in NAMED:
        token = names.get(f"{role}_token")
        token = token.get("content") if isinstance(token, dict) else token
        if token and not isinstance(token, str):
            raise TextError(f"{role}_token beside {folder / 'tokenizer.json'} is {token!r}", "a string is expected")
        if token:
            named[role] = token
    file = folder / "generation_config.json"
    stops = read_json(file).get("eos_token_id")
    stops = stops if isinstance(stops, list) else [] if stops is None else [stops]
    if not all(type(stop) is int and stop >= 0 for stop in stops):
        raise TextError(f"{file}: eos_token_id is {stops!r:.100}", "an id is expected, or a list of ids")
    return Sidecar(named, _chat_template(folder, config), tuple(stops))


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    """The folder's chat template; a file of its own goes before one inside a JSON file."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return _decoded(file, read_bytes(file, ""))
    found = read_json(folder / "chat_template.json").get("chat_template") or config.get("chat_template")
    if isinstance(found, list) and all(isinstance(row, dict) for row in found):  # several, by name
        found = next((row.get("template") for row in found if row.get("name") == "default"), None)
    if found is not None and not isinstance(found, str):
        raise TextError(f"chat_template beside {folder / 'tokenizer.json'} is {found!r:.100}", "a string is expected")
    return found


def read_bytes(file: Path, remedy: str) -> bytes:
    try:
        return file.read_bytes()
    except FileNotFoundError:
        raise TextError(f"{file} does not exist", remedy) from None
    except OSError as error:
        raise TextError(f"{file} cannot be read: {error.strerror}", remedy) from None


def _decoded(file: Path, data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise TextError(f"{file} is not UTF-8 text (byte {error.start})", "save it as UTF-8") from None


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a file that may be missing."""
    if not file.is_file():
        return {}
    data = read_bytes(file, "")
    try:
        found = json.loads(data)
    except ValueError as error:
        raise TextError(f"{file} is not JSON: {error}", "fetch the file again, or remove it") from None
    if not isinstance(found, dict):
        raise TextError(f"{file} holds no JSON object", "fetch the file again, or remove it")
    return found


def no_tokenizer(file: Path, data: bytes, reason: str) -> TextError:
    """Why the library refused a file: not JSON, cut short, or JSON of another kind."""
    again = "fetch the file again"
    try:
        json.loads(data)
    except json.JSONDecodeError as error:
        if not data.strip():
            return TextError(f"{file} is empty", again)
        rest = error.doc[error.pos :].strip()
        if "Unterminated" in error.msg or any(word.startswith(rest) for word in ("true", "false", "null")):
            return TextError(f"{file} is cut short: the JSON ends at line {error.lineno}", again)
        return TextError(f"{file} is not JSON: {error}", "give the tokenizer.json, not the vocabulary or model file")
    except UnicodeDecodeError:
        return TextError(f"{file} is not JSON but binary", "give the tokenizer.json, not the model file (.model)")
    reason = reason.partition("from buffer: ")[2] or reason
    return TextError(f"{file} is JSON but no tokenizer: {reason}", "give the tokenizer.json, not its config")


def dump(data: dict[str, Any]) -> str:
    return json.dumps(data, indent=2, ensure_ascii=False) + "\n"
