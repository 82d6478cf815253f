"""Endpoint client against a local test server."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from vitrail.errors import VitrailError
from vitrail.hub.endpoint import connect_endpoint


@pytest.fixture
def server():
    """Serve reversed prompts; the model "none" is missing, and "odd" returns an invalid reply."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append((self.path, body))
            output = {"choices": [{"message": {"role": "assistant", "content": body["messages"][0]["content"][::-1]}}]}
            output |= {"odd": {"choices": "?"}, "mute": {"choices": []}}.get(body["model"], {})
            self.send_response({"none": 404, "away": 302}.get(body["model"], 200))
            self.send_header("Location", "/elsewhere")
            self.send_header("Content-Length", str(len(json.dumps(output)) + (body["model"] == "short")))
            self.end_headers()
            self.wfile.write(json.dumps(output).encode())

        def do_GET(self):
            asked.append((self.path, None))

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{http.server_port}/v1/", asked
        http.shutdown()


def test_completion(server):
    url, asked = server
    assert connect_endpoint(url, "tiny", max_tokens=7, temperature=0.5)("abc", 3) == "cba"
    wanted = {"model": "tiny", "messages": [{"role": "user", "content": "abc"}], "max_tokens": 7, "temperature": 0.5}
    assert asked == [("/v1/chat/completions", wanted | {"seed": 3})]


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        ("none", "returned HTTP 404"),
        ("odd", "does not answer"),
        ("mute", "no choice"),
        ("away", "redirects to http.*/elsewhere"),
        ("short", "does not answer: IncompleteRead"),
    ],
)
def test_server_errors_raise(server, model, problem):
    with pytest.raises(VitrailError, match=problem):
        connect_endpoint(server[0], model, max_tokens=7, temperature=0.5)("abc", 3)
    assert [path for path, _ in server[1]] == ["/v1/chat/completions"]


def test_proxies_are_ignored(server, monkeypatch):
    url, asked = server
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", url)
    with pytest.raises(VitrailError, match="does not answer"):
        connect_endpoint("http://127.0.0.1:9/v1", "tiny", max_tokens=7, temperature=0.5)("abc", 3)
    assert not asked


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/v1", "http://127.0.0.1:abc/v1", "http://[::1/v1", "http://"])
def test_unreachable_server_raises(url):
    with pytest.raises(VitrailError, match="does not answer") as error:
        connect_endpoint(url, "tiny", max_tokens=7, temperature=0.5)("abc", 3)
    assert error.value.problem.startswith(url.rstrip("/"))
