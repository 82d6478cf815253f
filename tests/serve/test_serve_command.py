"""`vitrail serve` as a process: it starts, answers, and drains on SIGTERM."""

import json
import signal
import subprocess
import sys
import threading
import urllib.request

import pytest

from vitrail.cli.serve_command import serve_models
from vitrail.errors import ConfigError


def test_wrong_options_fail_before_a_model_is_loaded(monkeypatch):
    monkeypatch.delenv("VITRAIL_API_KEY", raising=False)
    with pytest.raises(ConfigError, match="no model"):
        serve_models()
    with pytest.raises(ConfigError, match="no key"):
        serve_models("mini-vlm", host="0.0.0.0")
    with pytest.raises(ConfigError, match="cannot be used"):
        serve_models("mini-vlm", port=99_999)


@pytest.mark.slow
def test_sigterm_ends_the_server_after_the_running_answers():
    command = [sys.executable, "-m", "vitrail", "serve", "mini-vlm", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        base = process.stdout.readline().split()[0]
        body = {"model": "mini-vlm", "prompt": "a dog", "max_tokens": 200, "stream": True}
        request = urllib.request.Request(f"{base}/completions", json.dumps(body).encode())
        stream = urllib.request.urlopen(request, timeout=300)
        assert stream.readline().startswith(b"data: ")
        process.send_signal(signal.SIGTERM)
        lines: list[bytes] = []
        reader = threading.Thread(target=lambda: lines.extend(stream.readlines()))
        reader.start()
        reader.join(300)
        assert b"data: [DONE]\n" in lines
        assert process.wait(300) in (0, -signal.SIGTERM)
    finally:
        process.kill()
