"""What the tests of playing share: a tiny random Genie, places to play at, and a page's side of the socket."""

import json

import numpy as np
import torch
from starlette.testclient import TestClient

import worlds
from helpers import randomize
from vitrail.play import Playground
from vitrail.play.game import Arcade
from vitrail.play.messages import Frame, unpack
from vitrail.play.server import make_app

HERE, SOCKET = "http://127.0.0.1:8000", "ws://127.0.0.1:8000/play"


def playground(latent: bool = True, starts: int = 3, **more) -> Playground:
    model = worlds.genie(latent=latent, layers=2)
    randomize(model)
    chance = torch.Generator().manual_seed(0)
    some = torch.randint(0, 256, (starts, worlds.SIDE, worlds.SIDE, 3), dtype=torch.uint8, generator=chance)
    return Playground(model, some if starts else None, **more)


def client(arcade: Arcade) -> TestClient:
    return TestClient(make_app(arcade), base_url=HERE)


class Page:
    """`with Page(client) as page`: what a page says, and what it hears."""

    def __init__(self, client: TestClient, **how):
        self.socket = client.websocket_connect(SOCKET, **how)

    def __enter__(self) -> "Page":
        self.socket.__enter__()
        self.hello = json.loads(self.socket.receive_text())
        return self

    def __exit__(self, *error) -> None:
        self.socket.__exit__(*error)

    def frame(self) -> tuple[Frame, list[np.ndarray]]:
        heard = self.socket.receive()
        assert heard.get("bytes") is not None, heard
        return unpack(heard["bytes"])

    def error(self, begun: bool | None = None) -> str:
        told = json.loads(self.socket.receive_text())
        assert told["is"] == "error" and told["problem"] and begun in (None, told["begun"])
        return f"{told['problem']}\n{told['remedy']}"

    def reset(self, start="any", seed=None):
        self.socket.send_text(json.dumps({"do": "reset", "start": start, "seed": seed}))
        return self.frame()

    def step(self, name: str):
        names = [action["name"] for action in self.hello["actions"]]
        self.socket.send_text(json.dumps({"do": "step", "action": names.index(name)}))
        return self.frame()
