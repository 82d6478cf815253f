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
            self.send_response(404 if body["model"] == "none" else 200)
            self.end_headers()
            self.wfile.write(json.dumps(said).encode())

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
    ("model", "problem"), [("none", "answers 404"), ("odd", "gives no answer"), ("mute", "no choice")]
)
def test_what_goes_wrong_is_said(server, model, problem):
    with pytest.raises(VitrailError, match=problem):
        endpoint(server[0], model, tokens=7, temperature=0.5)("abc", 3)


def test_nobody_there():
    with pytest.raises(VitrailError, match="no answer"):
        endpoint("http://127.0.0.1:9/v1", "tiny", tokens=7, temperature=0.5)("abc", 3)
