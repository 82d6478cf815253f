"""A connection that does not send a whole request is closed, and others are served meanwhile."""

import socket
import threading
import time

import pytest

pytest.importorskip("starlette")

import httpx2 as httpx
from websockets.sync.client import connect

from serve.play.arcades import world_pipeline
from vitrail.serve.http_protocol import RequestDeadlineProtocol
from vitrail.serve.play.game_session import GameHost
from vitrail.serve.play.play_server import bind_loopback_socket, build_server


@pytest.fixture
def port(monkeypatch):
    monkeypatch.setattr(RequestDeadlineProtocol, "request_seconds", 0.5)
    server, link = build_server(GameHost(world_pipeline())), bind_loopback_socket(0)
    server.config.timeout_keep_alive = 3600  # the deadline alone closes connections
    thread = threading.Thread(target=lambda: server.run(sockets=[link]), daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield link.getsockname()[1]
    server.should_exit = True
    thread.join(300)


HEAD = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n"


@pytest.mark.parametrize(
    ("sent", "drip"),
    [
        (b"", b""),
        (HEAD, b""),
        (HEAD, b"x"),  # one byte now and then
        (b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000000\r\n\r\nabc", b""),
        (HEAD + b"\r\n" + HEAD, b""),  # the second request on a connection
    ],
)
def test_half_open_request_is_closed(port, sent, drip, monkeypatch):
    with socket.create_connection(("127.0.0.1", port)) as link:
        link.sendall(sent)
        end = time.monotonic() + 300
        link.settimeout(0.1)
        received = None
        while received != b"" and time.monotonic() < end:
            try:
                received = link.recv(65536)
                if drip:
                    link.sendall(drip)
            except TimeoutError:
                continue
            except ConnectionError:
                received = b""
        assert received == b""
    monkeypatch.setattr(RequestDeadlineProtocol, "request_seconds", 300)
    assert httpx.get(f"http://127.0.0.1:{port}/", timeout=300).status_code == 200


def test_websocket_outlives_the_deadline(port, monkeypatch):
    monkeypatch.setattr(RequestDeadlineProtocol, "request_seconds", 3)
    with connect(f"ws://127.0.0.1:{port}/play", open_timeout=300) as link:
        assert "hello" in link.recv()
        time.sleep(3.5)
        assert link.ping().wait(300)
