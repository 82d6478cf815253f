"""A text model behind an address that speaks OpenAI's wire format: llama.cpp, vLLM, Ollama and others do."""

import json
import urllib.error
import urllib.request
from collections.abc import Callable

import msgspec

from vitrail.errors import VitrailError


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Message


class _Reply(msgspec.Struct):
    choices: list[_Choice]


def endpoint(
    url: str, model: str, *, tokens: int, temperature: float, timeout: float = 300.0
) -> Callable[[str, int], str]:
    """prompt, seed → what the model at `url` (such as http://127.0.0.1:8080/v1) answers. Nothing is sent elsewhere."""
    address = url.rstrip("/") + "/chat/completions"

    def write(prompt: str, seed: int) -> str:
        asked = {
            "model": model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": tokens,
            "temperature": temperature,
            "seed": seed,
        }
        request = urllib.request.Request(address, json.dumps(asked).encode(), {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=timeout) as reply:
                found = msgspec.json.decode(reply.read(), type=_Reply)
        except urllib.error.HTTPError as error:
            said = error.read(200).decode(errors="replace")
            raise VitrailError(f"{address} answers {error.code}: {said}", "check the model's name there") from None
        except (OSError, ValueError, msgspec.DecodeError) as error:
            raise VitrailError(
                f"{address} gives no answer: {error}", "is a server there, and the address right?"
            ) from None
        if not found.choices:
            raise VitrailError(f"{address} answers with no choice", "check the server")
        return found.choices[0].message.content or ""

    return write
