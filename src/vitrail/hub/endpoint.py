"""A text model behind an address that speaks OpenAI's wire format: llama.cpp, vLLM, Ollama and others do."""

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any, NoReturn

import msgspec

from vitrail.errors import VitrailError


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Message


class _Reply(msgspec.Struct):
    choices: list[_Choice]


class _Stay(urllib.request.HTTPRedirectHandler):
    """What is asked is for the address that was given, and for no other that it names."""

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> NoReturn:
        raise VitrailError(f"{req.full_url} sends on to {newurl}", "give that address instead, if you trust it")


def endpoint(
    url: str, model: str, *, tokens: int, temperature: float, timeout: float = 300.0
) -> Callable[[str, int], str]:
    """prompt, seed → what the model at `url` (such as http://127.0.0.1:8080/v1) answers. Nothing is sent elsewhere:
    proxies of the environment are passed by, and a server that sends on to another address is an error."""
    address = url.rstrip("/") + "/chat/completions"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _Stay())

    def write(prompt: str, seed: int) -> str:
        asked = {
            "model": model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": tokens,
            "temperature": temperature,
            "seed": seed,
        }
        try:
            request = urllib.request.Request(address, json.dumps(asked).encode(), {"Content-Type": "application/json"})
            with opener.open(request, timeout=timeout) as reply:
                found = msgspec.json.decode(reply.read(), type=_Reply)
        except urllib.error.HTTPError as error:
            said = error.read(200).decode(errors="replace")
            raise VitrailError(f"{address} answers {error.code}: {said}", "check the model's name there") from None
        except (OSError, ValueError, http.client.HTTPException, msgspec.DecodeError) as error:
            raise VitrailError(
                f"{address} gives no answer: {error or type(error).__name__}",
                "is a server there, and the address right?",
            ) from None
        if not found.choices:
            raise VitrailError(f"{address} answers with no choice", "check the server")
        return found.choices[0].message.content or ""

    return write
