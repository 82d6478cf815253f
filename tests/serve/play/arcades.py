"""What the tests of playing share: a tiny random Genie, places to play at, and a page's side of the socket."""

import json

import numpy as np
import torch
from starlette.testclient import TestClient

import worlds
from helpers import randomize
from vitrail.serve.play import WorldPipeline
from vitrail.serve.play.game_session import GameHost
from vitrail.serve.play.play_server import build_app
from vitrail.serve.play.protocol import FrameMessage, unpack_frame

HERE, SOCKET = "http://127.0.0.1:8000", "ws://127.0.0.1:8000/play"


def world_pipeline(latent: bool = True, starts: int = 3, **more) -> WorldPipeline:
    model = worlds.genie(latent=latent, layers=2)
    randomize(model)
    chance = torch.Generator().manual_seed(0)
    some = torch.randint(0, 256, (starts, worlds.SIDE, worlds.SIDE, 3), dtype=torch.uint8, generator=chance)
    return WorldPipeline(model, some if starts else None, **more)


def client(arcade: GameHost) -> TestClient:
    return TestClient(build_app(arcade), base_url=HERE)


class Page:
    """`with Page(client) as page`: the messages that a page sends and receives."""

    def __init__(self, client: TestClient, **how):
        self.socket = client.websocket_connect(SOCKET, **how)

    def __enter__(self) -> "Page":
        self.socket.__enter__()
        self.hello = json.loads(self.socket.receive_text())
        return self

    def __exit__(self, *error) -> None:
        self.socket.__exit__(*error)

    def frame(self) -> tuple[FrameMessage, list[np.ndarray]]:
        heard = self.socket.receive()
        assert heard.get("bytes") is not None, heard
        return unpack_frame(heard["bytes"])

    def error(self, begun: bool | None = None) -> str:
        result = json.loads(self.socket.receive_text())
        assert result["is"] == "error" and result["problem"] and begun in (None, result["is_running"])
        return f"{result['problem']}\n{result['remedy']}"

    def reset(self, start="any", seed=None):
        self.socket.send_text(json.dumps({"do": "reset", "start": start, "seed": seed}))
        return self.frame()

    def step(self, name: str):
        names = [action["name"] for action in self.hello["actions"]]
        self.socket.send_text(json.dumps({"do": "step", "action": names.index(name)}))
        return self.frame()
