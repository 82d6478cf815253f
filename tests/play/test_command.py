"""`vitrail play`: what cannot be is said before anything is opened, and Ctrl-C ends it without a word too many."""

import os
import signal
import subprocess
import sys
import threading
import webbrowser
from inspect import signature

import pytest

pytest.importorskip("starlette")

from play.arcades import Page, client, playground
from vitrail.cli.eval_world import world
from vitrail.cli.play import TRAIN, play
from vitrail.errors import CheckpointError, ConfigError, VitrailError
from vitrail.hub import configs
from vitrail.play import Controls, server
from vitrail.play.playground import Playground


def test_a_folder_is_served_and_opened(tmp_path, monkeypatch, capsys):
    playground(controls=Controls(world="pocket", codes={"left": 1})).save(tmp_path)
    seen, opened, there, over = [], [], threading.Event(), threading.Event()

    class Served:
        def __init__(self, arcade):
            self.arcade = arcade

        def run(self, sockets):
            there.set()
            over.wait(5)
            with Page(client(self.arcade)) as page:
                seen.append((page.hello, page.reset(page.hello["choices"][0])[0]))
            raise KeyboardInterrupt

    monkeypatch.setattr(server, "make_server", Served)

    def browse(address):  # in the foreground: it is left only when the page has been served
        assert there.wait(5)
        opened.append(address)
        over.set()

    monkeypatch.setattr(webbrowser, "open", browse)
    play(str(tmp_path), world="pocket", steps=3, device="cpu")
    assert capsys.readouterr().out.startswith(opened[0]) and opened[0].startswith("http://127.0.0.1:")
    play(str(tmp_path), open=False, device="cpu")
    for (hello, frame), views in zip(seen, (["model", "pocket"], ["model"]), strict=True):
        assert hello["views"] == [view.name for view in frame.views] == views
        assert hello["actions"][8]["name"] == "left" and hello["title"] == str(tmp_path)
    assert len(opened) == 1


def test_what_cannot_be_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(configs, "shipped", list)
    with pytest.raises(CheckpointError, match="--world pocket"):
        play()
    with pytest.raises(ConfigError, match="there is none"):
        play(world="pocket", picture="photo.png")
    with pytest.raises(ConfigError, match="did you mean 'pocket'"):
        play(world="poket")
    with pytest.raises(ConfigError, match="dials"):
        play(world="carracing")
    for name, says in (
        (str(tmp_path / "none"), "does not exist"),
        ("mini", "no world model"),
        ("mini-worl", "does not exist"),
        ("n" * 5000, "cannot be opened"),
    ):
        with pytest.raises(VitrailError, match=says) as refused:
            play(name)
        assert TRAIN in refused.value.remedy and "Qwen" not in str(refused.value) and len(str(refused.value)) < 500
    monkeypatch.setitem(sys.modules, "starlette.applications", None)
    monkeypatch.delitem(sys.modules, "vitrail.play.server")
    with pytest.raises(ConfigError, match=r"vitrail\[play\]"):
        play(world="pocket")


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="signals are POSIX")
def test_an_interrupt_ends_it_with_a_player_there():
    from websockets.sync.client import connect

    command = [sys.executable, "-m", "vitrail.cli", "play", "--world", "pocket", "--no-open"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        address = process.stdout.readline().split()[0]
        with connect(address.replace("http:", "ws:") + "play") as socket:
            socket.recv()
            socket.send('{"do": "reset", "start": "real"}')
            socket.recv()
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0
        assert process.stderr.read() == ""


@pytest.mark.parametrize("name", ["steps", "temperature"])
def test_what_is_played_is_what_is_judged_and_what_environments_are(name):
    """Unless told: the commands have their own defaults, so that help needs no torch."""
    defaults = [
        signature(call).parameters[name].default for call in (play, world, Playground.rollout, Playground.world)
    ]
    first = [value[0] if isinstance(value, tuple) else value for value in defaults]
    assert len(set(first)) == 1
