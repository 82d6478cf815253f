"""Client of a text model behind an OpenAI-compatible endpoint, such as llama.cpp, vLLM or Ollama."""

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


class _RejectRedirects(urllib.request.HTTPRedirectHandler):
    """Reject redirects: prompts go to the given address only."""

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> NoReturn:
        raise VitrailError(f"{req.full_url} redirects to {newurl}", "give that address instead, if you trust it")


def connect_endpoint(
    url: str, model: str, *, max_tokens: int, temperature: float, timeout: float = 300.0
) -> Callable[[str, int], str]:
    """Return a function (prompt, seed) → answer of the model at `url`, such as http://127.0.0.1:8080/v1.

    Prompts are sent nowhere else: proxies of the environment are ignored, and redirects raise an error.
    """
    address = url.rstrip("/") + "/chat/completions"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _RejectRedirects())

    def complete(prompt: str, seed: int) -> str:
        body = {
            "model": model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": max_tokens,
            "temperature": temperature,
            "seed": seed,
        }
        try:
            request = urllib.request.Request(address, json.dumps(body).encode(), {"Content-Type": "application/json"})
            with opener.open(request, timeout=timeout) as reply:
                parsed = msgspec.json.decode(reply.read(), type=_Reply)
        except urllib.error.HTTPError as error:
            details = error.read(200).decode(errors="replace")
            raise VitrailError(f"{address} returned HTTP {error.code}: {details}", "check the model name") from None
        except (OSError, ValueError, http.client.HTTPException, msgspec.DecodeError) as error:
            raise VitrailError(
                f"{address} does not answer: {error or type(error).__name__}",
                "check the address, and that the server runs",
            ) from None
        if not parsed.choices:
            raise VitrailError(f"{address} returned no choices", "check the server")
        return parsed.choices[0].message.content or ""

    return complete
