"""Start and stop of the server of OpenAI's API."""

import contextlib
import logging
import socket
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import uvicorn

from vitrail.errors import ConfigError
from vitrail.serve.engine_scheduler import EngineConfig
from vitrail.serve.http_protocol import HeaderDeadlineProtocol
from vitrail.serve.loopback_requests import LOOPBACK_HOSTS
from vitrail.serve.openai_server import ServedModels, ServerLimits, build_app
from vitrail.serve.remote_images import RemoteImageReader
from vitrail.serve.served_model import ServedModel

MAX_CONNECTIONS = 2048
SWITCH_SECONDS = 0.0005  # an engine that waits for the interpreter gets it from the event loop after this time


def bind_socket(host: str, port: int) -> socket.socket:
    """Bind a socket. Port 0 chooses a free port."""
    link = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        link.bind((host, port))
        link.listen(1024)
    except (OSError, OverflowError) as error:
        link.close()
        raise ConfigError(
            f"port {port} of {host} cannot be used: {error}", "give another port, or 0 for a free one"
        ) from None
    return link


def build_server(served: ServedModels, drain_seconds: float = 30.0) -> uvicorn.Server:
    """Build the server. A signal ends it after the running requests, at most `drain_seconds` later."""
    config = uvicorn.Config(
        build_app(served),
        http=HeaderDeadlineProtocol,
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
        server_header=False,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_graceful_shutdown=max(1, round(drain_seconds)),
    )
    return uvicorn.Server(config)


def run_server(
    models: Sequence[str],
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    api_keys: Sequence[str] = (),
    device: str | None = None,
    drain_seconds: float = 30.0,
    adapters: Mapping[str, str] | None = None,
    allow_remote_images: bool = False,
    **engine_options: Any,
) -> None:
    """Load models and serve them until a signal arrives.

    adapters             LoRA adapters of the first model: name → PEFT folder
    allow_remote_images  read images at http and https addresses of the public internet
    engine_options       fields of `EngineConfig`
    """
    config = EngineConfig(**engine_options)
    sys.setswitchinterval(SWITCH_SECONDS)
    with bind_socket(host, port) as link:  # fails before the weights are read
        loaded = [
            ServedModel.load(name, device, config, adapters if index == 0 else None)
            for index, name in enumerate(models)
        ]
        remote_images = RemoteImageReader() if allow_remote_images else None
        is_local = host in LOOPBACK_HOSTS
        served = ServedModels(loaded, api_keys, ServerLimits(), is_local=is_local, remote_images=remote_images)
        served.start()
        shown = f"[{host}]" if ":" in host else host
        print(f"http://{shown}:{link.getsockname()[1]}/v1  (Ctrl-C stops the server)", flush=True)  # noqa: T201
        for model in loaded:
            print(f"  {', '.join(model.names)}: {', '.join(model.endpoints)}", flush=True)  # noqa: T201
        try:
            build_server(served, drain_seconds).run(sockets=[link])
        except KeyboardInterrupt:
            logging.getLogger(__name__).info("interrupted")
        finally:
            served.close()


@contextlib.contextmanager
def open_server(
    *models: Any,
    api_keys: Sequence[str] = (),
    limits: ServerLimits | None = None,
    remote_images: RemoteImageReader | None = None,
) -> Iterator[str]:
    """Serve models in a thread while the context is active, and return the base URL for clients.

        with open_server("mini-vlm") as url:
            client = openai.OpenAI(base_url=url, api_key="none")

    `models` are names, folders or `ServedModel` objects.
    """
    loaded = [one if isinstance(one, ServedModel) else ServedModel.load(str(one)) for one in models]
    served = ServedModels(loaded, api_keys, limits or ServerLimits(), is_local=True, remote_images=remote_images)
    served.start()
    server = build_server(served, drain_seconds=5)
    with bind_socket("127.0.0.1", 0) as link:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [link]}, name="vitrail-server", daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{link.getsockname()[1]}/v1"
        finally:
            server.should_exit = True
            thread.join()
            served.close()
