"""The page and its socket, for this machine alone."""

import asyncio
import logging
import socket
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketClose, WebSocketDisconnect

from vitrail.errors import ConfigError, VitrailError
from vitrail.play import messages
from vitrail.play.game import MOST_BYTES, Arcade

PAGE = Path(__file__).resolve().parent / "page"
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
LOOPBACK = ("127.0.0.1", "localhost", "::1")
FULL = 1013  # try again later
BROKEN = 1011  # the fault is the server's
MOST_TOLD, MOST_REASON = 500, 100  # characters of what went wrong; a socket's reason has at most 123 bytes
SEE = "connect again to begin anew; what the server printed says more"
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Guard:
    """Only pages of this server may speak to it. Any site can make a browser connect to the loopback, under a name of
    its own if it likes; but it can hide neither that name (Host) nor itself (Origin)."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            return await self.app(scope, receive, send)
        if not allowed(Headers(scope=scope)):
            refusal = PlainTextResponse("This page is for this machine alone.\n", 403)
            return await (WebSocketClose() if scope["type"] == "websocket" else refusal)(scope, receive, send)

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        return await self.app(scope, receive, sent)


def allowed(headers: Headers) -> bool:
    """Asked under a name of the loopback and, where a page asks, by a page of the same name and port. A program that
    is no browser names no origin."""
    host, origin = headers.getlist("host"), headers.getlist("origin")
    try:
        named = len(host) == 1 and urlsplit(f"//{host[0]}").hostname in LOOPBACK
    except ValueError:
        return False
    return named and origin in ([], [f"http://{host[0]}"])


def make_app(arcade: Arcade) -> Starlette:
    async def play(link: WebSocket) -> None:
        await link.accept()
        try:
            game = arcade.enter()
        except VitrailError as error:
            await link.send_text(messages.failed(error))
            return await link.close(FULL, error.problem)
        try:
            await link.send_text(messages.say(game.hello()))
            while (asked := await link.receive())["type"] == "websocket.receive":
                try:
                    answer = await game.answer(asked.get("text"), asked.get("bytes"))
                except VitrailError as error:
                    await link.send_text(messages.failed(error, game.begun))
                except Exception as error:
                    logging.getLogger(__name__).exception("a player's world broke")
                    told = VitrailError(f"this world broke: {type(error).__name__}: {error}"[:MOST_TOLD], SEE)
                    await link.send_text(messages.failed(told))
                    return await link.close(BROKEN, type(error).__name__[:MOST_REASON])
                else:
                    await link.send_bytes(answer)
        except (WebSocketDisconnect, asyncio.CancelledError):  # the player has gone, or the server ends
            pass
        finally:
            arcade.players.discard(game)
            asyncio.get_running_loop().run_in_executor(None, game.close)  # not awaited, so that nobody can cancel it

    files = [Route(f"/{path.name}", partial(_file, path)) for path in PAGE.iterdir() if path.suffix in KINDS]
    routes = [Route("/", partial(_file, PAGE / "index.html")), *files, WebSocketRoute("/play", play)]
    return Starlette(routes=routes, middleware=[Middleware(Guard)])


async def _file(path: Path, request: Request) -> Response:
    return Response(path.read_bytes(), media_type=KINDS[path.suffix])


def listen(port: int) -> socket.socket:
    """On the loopback; 0 is any port that is free."""
    link = socket.socket()
    try:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        link.bind(("127.0.0.1", port))
        link.listen()  # who comes before the server is there waits
    except (OSError, OverflowError) as error:
        link.close()
        raise ConfigError(f"port {port} cannot be had: {error}", "give another, or 0 for any that is free") from None
    return link


def make_server(arcade: Arcade) -> uvicorn.Server:
    """`make_server(arcade).run(sockets=[listen(0)])` serves until it is interrupted."""
    config = uvicorn.Config(
        make_app(arcade),
        ws_max_size=MOST_BYTES + 1024,  # what is a little too large is told so; more is cut off
        ws_per_message_deflate=False,  # frames stay on this machine
        lifespan="off",
        log_level="warning",
        server_header=False,
        timeout_graceful_shutdown=2,
    )
    return uvicorn.Server(config)
