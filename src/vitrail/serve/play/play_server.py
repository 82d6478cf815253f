"""The web server of `vitrail play`, which accepts connections from localhost only."""

import asyncio
import logging
import socket
from functools import partial
from pathlib import Path

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
from vitrail.serve.http_protocol import RequestDeadlineProtocol
from vitrail.serve.loopback_requests import is_loopback_request
from vitrail.serve.play import protocol
from vitrail.serve.play.game_session import MAX_UPLOAD_BYTES, GameHost

PAGE_FOLDER = Path(__file__).resolve().parent / "page"
CONTENT_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
CLOSE_TRY_AGAIN_LATER = 1013  # WebSocket close code: try again later
CLOSE_INTERNAL_ERROR = 1011  # WebSocket close code: internal error
MOST_TOLD, MOST_REASON = 500, 100  # characters of an error; a WebSocket close reason has at most 123 bytes
RECONNECT_REMEDY = "connect again to restart; the server has printed the traceback"
SECURITY_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class LoopbackOnlyMiddleware:
    """Middleware that accepts requests only from pages of this server.

    Any website can make a browser connect to the loopback address, even under its own host name. The Host and Origin
    headers reveal such requests.
    """

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            return await self.app(scope, receive, send)
        if not is_loopback_request(Headers(scope=scope)):
            refusal = PlainTextResponse("This server accepts connections from localhost only.\n", 403)
            return await (WebSocketClose() if scope["type"] == "websocket" else refusal)(scope, receive, send)

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(SECURITY_HEADERS)
            await send(message)

        return await self.app(scope, receive, sent)


def build_app(host: GameHost) -> Starlette:
    """Build the web application: the files of the page and the WebSocket."""

    async def play(link: WebSocket) -> None:
        await link.accept()
        try:
            game = host.create_session()
        except VitrailError as error:
            await link.send_text(protocol.encode_error(error))
            return await link.close(CLOSE_TRY_AGAIN_LATER, error.problem)
        try:
            await link.send_text(protocol.encode_message(game.build_hello()))
            while (asked := await link.receive())["type"] == "websocket.receive":
                try:
                    answer = await game.handle_message(asked.get("text"), asked.get("bytes"))
                except VitrailError as error:
                    await link.send_text(protocol.encode_error(error, game.is_running))
                except Exception as error:
                    logging.getLogger(__name__).exception("a game session failed")
                    reply = VitrailError(
                        f"internal error: {type(error).__name__}: {error}"[:MOST_TOLD], RECONNECT_REMEDY
                    )
                    await link.send_text(protocol.encode_error(reply))
                    return await link.close(CLOSE_INTERNAL_ERROR, type(error).__name__[:MOST_REASON])
                else:
                    await link.send_bytes(answer)
        except (WebSocketDisconnect, asyncio.CancelledError):  # the player has left, or the server stops
            pass
        finally:
            host.sessions.discard(game)
            asyncio.get_running_loop().run_in_executor(None, game.close)  # not awaited: it must not be cancelled

    files = [
        Route(f"/{path.name}", partial(_serve_file, path))
        for path in PAGE_FOLDER.iterdir()
        if path.suffix in CONTENT_TYPES
    ]
    routes = [Route("/", partial(_serve_file, PAGE_FOLDER / "index.html")), *files, WebSocketRoute("/play", play)]
    return Starlette(routes=routes, middleware=[Middleware(LoopbackOnlyMiddleware)])


async def _serve_file(path: Path, request: Request) -> Response:
    return Response(path.read_bytes(), media_type=CONTENT_TYPES[path.suffix])


def bind_loopback_socket(port: int) -> socket.socket:
    """Bind a socket to a port of the loopback address. Port 0 chooses a free port."""
    link = socket.socket()
    try:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        link.bind(("127.0.0.1", port))
        link.listen()  # connections wait until the server runs
    except (OSError, OverflowError) as error:
        link.close()
        raise ConfigError(f"port {port} cannot be used: {error}", "give another port, or 0 for a free one") from None
    return link


def build_server(host: GameHost) -> uvicorn.Server:
    """Build the server: `build_server(host).run(sockets=[bind_loopback_socket(0)])` runs until it is interrupted."""
    config = uvicorn.Config(
        build_app(host),
        http=RequestDeadlineProtocol,
        ws_ping_interval=20.0,  # a player that vanished is noticed after 40 s
        ws_ping_timeout=20.0,
        ws_max_size=MAX_UPLOAD_BYTES
        + 1024,  # slightly larger uploads get an error message; others close the connection
        ws_per_message_deflate=False,  # compression is useless on localhost
        lifespan="off",
        log_level="warning",
        server_header=False,
        timeout_graceful_shutdown=2,
    )
    return uvicorn.Server(config)
