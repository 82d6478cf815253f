"""A text model behind an address, played by a server on this machine."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from vitrail.errors import VitrailError
from vitrail.hub.endpoint import endpoint


@pytest.fixture
def server():
    """Answers with the prompt backwards; a model called "none" is not there, one called "odd" speaks otherwise."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append((self.path, body))
            said = {"choices": [{"message": {"role": "assistant", "content": body["messages"][0]["content"][::-1]}}]}
            said |= {"odd": {"choices": "?"}, "mute": {"choices": []}}.get(body["model"], {})
            self.send_response({"none": 404, "away": 302}.get(body["model"], 200))
            self.send_header("Location", "/elsewhere")
            self.send_header("Content-Length", str(len(json.dumps(said)) + (body["model"] == "short")))
            self.end_headers()
            self.wfile.write(json.dumps(said).encode())

        def do_GET(self):
            asked.append((self.path, None))

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{http.server_port}/v1/", asked
        http.shutdown()


def test_a_prompt_goes_out_and_an_answer_comes_back(server):
    url, asked = server
    assert endpoint(url, "tiny", tokens=7, temperature=0.5)("abc", 3) == "cba"
    wanted = {"model": "tiny", "messages": [{"role": "user", "content": "abc"}], "max_tokens": 7, "temperature": 0.5}
    assert asked == [("/v1/chat/completions", wanted | {"seed": 3})]


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        ("none", "answers 404"),
        ("odd", "gives no answer"),
        ("mute", "no choice"),
        ("away", "sends on to http.*/elsewhere"),
        ("short", "gives no answer: IncompleteRead"),
    ],
)
def test_what_goes_wrong_is_said(server, model, problem):
    with pytest.raises(VitrailError, match=problem):
        endpoint(server[0], model, tokens=7, temperature=0.5)("abc", 3)
    assert [path for path, _ in server[1]] == ["/v1/chat/completions"]


def test_proxies_of_the_environment_are_passed_by(server, monkeypatch):
    url, asked = server
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", url)
    with pytest.raises(VitrailError, match="no answer"):
        endpoint("http://127.0.0.1:9/v1", "tiny", tokens=7, temperature=0.5)("abc", 3)
    assert not asked


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/v1", "http://127.0.0.1:abc/v1", "http://[::1/v1", "http://"])
def test_nobody_there(url):
    with pytest.raises(VitrailError, match="no answer") as error:
        endpoint(url, "tiny", tokens=7, temperature=0.5)("abc", 3)
    assert error.value.problem.startswith(url.rstrip("/"))
