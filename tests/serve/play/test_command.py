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

from serve.play.arcades import Page, client, world_pipeline
from vitrail.cli.play_command import TRAIN_COMMANDS, play_world
from vitrail.errors import CheckpointError, ConfigError, VitrailError
from vitrail.evals.suites.world_suites import WorldSuite
from vitrail.hub import checkpoint_info
from vitrail.pipelines.world import WorldPipeline
from vitrail.serve.play import ControlMap, play_server


def test_folder_is_served_and_opened(tmp_path, monkeypatch, capsys):
    world_pipeline(controls=ControlMap(world="pocket", codes={"left": 1})).save(tmp_path)
    seen, opened, there, over = [], [], threading.Event(), threading.Event()

    class Served:
        def __init__(self, arcade):
            self.arcade = arcade

        def run(self, sockets):
            there.set()
            over.wait(300)
            with Page(client(self.arcade)) as page:
                seen.append((page.hello, page.reset(page.hello["choices"][0])[0]))
            raise KeyboardInterrupt

    monkeypatch.setattr(play_server, "build_server", Served)

    def browse(address):  # in the foreground: it is left only when the page has been served
        assert there.wait(300)
        opened.append(address)
        over.set()

    monkeypatch.setattr(webbrowser, "open", browse)
    play_world(str(tmp_path), world="pocket", steps=3, device="cpu")
    assert capsys.readouterr().out.startswith(opened[0]) and opened[0].startswith("http://127.0.0.1:")
    play_world(str(tmp_path), open=False, device="cpu")
    for (hello, frame), views in zip(seen, (["model", "pocket"], ["model"]), strict=True):
        assert hello["views"] == [view.name for view in frame.views] == views
        assert hello["actions"][8]["name"] == "left" and hello["title"] == str(tmp_path)
    assert len(opened) == 1


def test_invalid_options_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_info, "list_bundled_models", list)
    with pytest.raises(CheckpointError, match="the weights of mini-world are not installed"):
        play_world()
    with pytest.raises(ConfigError, match="none is given"):
        play_world(world="pocket", image="photo.png")
    with pytest.raises(ConfigError, match="did you mean 'pocket'"):
        play_world(world="poket")
    with pytest.raises(ConfigError, match="continuous actions"):
        play_world(world="carracing")
    for name, message in (
        (str(tmp_path / "none"), "does not exist"),
        ("mini", "the weights of mini are not installed"),
        ("mini-worl", "does not exist"),
        ("n" * 5000, "cannot be opened"),
    ):
        with pytest.raises(VitrailError, match=message) as refused:
            play_world(name)
        assert (
            TRAIN_COMMANDS in refused.value.remedy
            and "Qwen" not in str(refused.value)
            and len(str(refused.value)) < 500
        )
    monkeypatch.setitem(sys.modules, "starlette.applications", None)
    monkeypatch.delitem(sys.modules, "vitrail.serve.play.play_server")
    with pytest.raises(ConfigError, match=r"vitrail\[play\]"):
        play_world(world="pocket")


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="signals are POSIX")
def test_interrupt_stops_the_server_with_a_player():
    from websockets.sync.client import connect

    command = [sys.executable, "-m", "vitrail", "play", "--world", "pocket", "--no-open"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        address = process.stdout.readline().split()[0]
        with connect(address.replace("http:", "ws:") + "play", open_timeout=300) as socket:
            socket.recv()
            socket.send('{"do": "reset", "start": "real"}')
            socket.recv()
            process.send_signal(signal.SIGINT)
            assert process.wait(300) == 0
        assert process.stderr.read() == ""


@pytest.mark.parametrize("name", ["steps", "temperature"])
def test_commands_and_environments_share_defaults(name):
    """Unless told: the commands have their own defaults, so that help needs no torch."""
    defaults = [
        signature(call).parameters[name].default
        for call in (play_world, WorldSuite, WorldPipeline.create_rollout, WorldPipeline.create_world)
    ]
    first = [value[0] if isinstance(value, tuple) else value for value in defaults]
    assert len(set(first)) == 1
