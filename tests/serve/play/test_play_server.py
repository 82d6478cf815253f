"""The play server answers requests, isolates players, and refuses other sites."""

import io
import json
import re
import threading
import time

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("starlette")

import httpx2 as httpx
from starlette.websockets import WebSocketDisconnect

import worlds
from serve.play.arcades import SOCKET, Page, client, world_pipeline
from vitrail.data.episodes import WORLDS
from vitrail.data.episodes.worlds.pocket import Simulator
from vitrail.errors import ConfigError, DataError
from vitrail.serve.play import ControlMap, game_session, play_server, protocol
from vitrail.serve.play.game_session import GameHost
from vitrail.serve.play.play_server import PAGE_FOLDER, bind_loopback_socket, build_server

BESIDE = ControlMap(world="pocket", codes={"left": 3, "right": 1, "up": 0})


def file_of(picture: Image.Image, kind: str = "PNG", **how) -> bytes:
    out = io.BytesIO()
    picture.save(out, kind, **how)
    return out.getvalue()


def soon(is_so) -> bool:
    """Whether it comes to be so, in the end."""
    for _ in range(30_000):
        if is_so():
            return True
        time.sleep(0.01)
    return False


# ---- playing ----------------------------------------------------------------------------------------------------


def test_frames_equal_the_model():
    made = world_pipeline()
    with Page(client(GameHost(made, steps=2))) as page:
        frame, (seen,) = page.reset(start=1, seed=5)
        assert (frame.step, frame.seed, frame.start) == (0, 5, 1)
        drawn = [page.step(name)[1][0] for name in ("8", "1", "3")]
    world = made.create_rollout(2)
    first = world.start(made.start_images[1:2].movedim(-1, 1), seed=5)
    wanted = [first, *(world.step(torch.tensor([action])) for action in (7, 0, 2))]
    assert all(np.array_equal(a, b[0].movedim(0, -1)) for a, b in zip([seen, *drawn], wanted, strict=True))


def test_memory_updates_after_sending_a_frame():
    """Nobody asks for the next one, and it is in the memory of the model all the same."""
    arcade = GameHost(world_pipeline())
    with Page(client(arcade)) as page:
        page.reset(seed=5)
        page.step("8")
        (player,) = arcade.sessions
        assert soon(lambda: player.rollout._pending_actions is None)


def test_seed_determines_the_world():
    with Page(client(GameHost(world_pipeline()))) as page:
        first = page.reset()[0].seed
        again = page.reset(seed=first)
        drawn = [page.step("2")[1][0] for _ in range(3)]
        page.reset(seed=first)
        assert again[0].seed == first
        assert all(np.array_equal(a, page.step("2")[1][0]) for a in drawn)


def test_simulator_and_model_share_keys():
    made = world_pipeline(controls=BESIDE)
    with Page(client(GameHost(made, "pocket"))) as page:
        assert page.hello["views"] == ["model", "pocket"] and page.hello["idle"] is None
        frame, (_, real) = page.reset("real", seed=3)
        own = Simulator(worlds.SIDE)
        assert np.array_equal(real, own.reset(3)["frame"])
        world = made.create_rollout(2)
        shown = [world.start(torch.from_numpy(real.copy()).movedim(-1, 0)[None], seed=3)]
        for name, code, control in (("right", 1, 1), ("up", 0, 2), ("left", 3, 0)):
            frame, (model, real) = page.step(name)
            shown.append(world.step(torch.tensor([code])))
            assert np.array_equal(real, own.step(control)[0]["frame"])
            assert np.array_equal(model, shown[-1][0].movedim(0, -1))
        frame, (model, still) = page.step("5")  # a latent action is the model's alone
        assert np.array_equal(still, real) and not np.array_equal(model, shown[-1][0].movedim(0, -1))
        frame, (same, real) = page.step("down")  # nobody knows what down is to the model
        assert np.array_equal(same, model) and np.array_equal(real, own.step(3)[0]["frame"]) and frame.step == 5


def test_simulator_alone_until_the_end():
    with Page(client(GameHost(world="pocket"))) as page:
        assert page.hello["views"] == ["pocket"] and page.hello["most_bytes"] == 0
        page.reset("real", seed=0)
        own = Simulator(32)
        own.reset(0)
        names, ended = ("left", "right", "up", "down"), False
        chance = np.random.default_rng(0)
        for _ in range(3000):
            control = int(chance.integers(4))
            frame, (seen,) = page.step(names[control])
            wanted, _, ended = own.step(control)
            assert np.array_equal(seen, wanted["frame"]) and frame.views[0].ended == ended
            if ended:
                break
        assert ended and frame.views[0].reward == 1.0
        frame, (after,) = page.step("left")  # nothing moves behind the end
        assert np.array_equal(after, seen) and frame.views[0].reward == 1.0
        assert not page.reset("real", seed=0)[0].views[0].ended


def test_frame_skip_follows_the_controls():
    made = world_pipeline(controls=ControlMap(world="pocket", codes={"right": 1}, repeat=2))
    with Page(client(GameHost(made, "pocket"))) as page:
        assert page.hello["rate"] == 2.5
        page.reset("real", seed=3)
        own = Simulator(worlds.SIDE)
        own.reset(3)
        own.step(1)
        assert np.array_equal(page.step("right")[1][1], own.step(1)[0]["frame"])


def test_frame_skip_applies_to_world_variants():
    made = world_pipeline(controls=ControlMap(world="pocket", codes={"right": 1}, repeat=2))
    arcade = GameHost(made, "pocket-curtain")
    assert arcade.repeat == 2 and arcade.create_simulator_session().frame_skip == 2


def test_repeated_steps_stop_when_the_player_leaves(monkeypatch):
    real, done = game_session.SimulatorSession("pocket", worlds.SIDE, frame_skip=100), []
    own = Simulator.step

    def step(self, action):
        done.append(action)
        if len(done) == 3:
            real.abandon()
        return own(self, action)

    real.reset(0)
    monkeypatch.setattr(Simulator, "step", step)
    real.step(0)
    assert len(done) == 3
    real.reset(0)  # which was on its way when the player left
    assert real.simulator is None


def test_stopped_simulator_is_reported_and_reopened(monkeypatch):
    arcade = GameHost(world="pocket")
    with Page(client(arcade)) as page:
        page.reset("real", seed=0)
        monkeypatch.setattr(Simulator, "step", lambda self, action: (_ for _ in ()).throw(DataError("it stopped")))
        page.socket.send_text('{"do": "step", "action": 0}')
        result = page.error(begun=False)
        assert "it stopped" in result and "Reset it to start again" in result
        monkeypatch.undo()
        page.socket.send_text('{"do": "step", "action": 0}')
        assert "reset" in page.error()
        page.reset("real", seed=0)
        page.step("left")


def fails(*given):
    raise DataError("it failed", "mend it")


def test_partial_failure_keeps_or_stops_the_world(monkeypatch):
    data = file_of(Image.effect_noise((9, 9), 90))
    arcade = GameHost(world_pipeline(controls=BESIDE), "pocket")
    with client(arcade) as http, Page(http) as page, Page(http) as other:
        page.reset("any", seed=3)
        other.reset("any", seed=3)
        with monkeypatch.context() as patch:  # the model cannot begin: the simulator was not touched, nor the picture
            patch.setattr(game_session.GameSession, "_start_rollout", fails)
            page.socket.send_bytes(data)
            assert "stopped" not in page.error(begun=True)
            page.socket.send_text('{"do": "reset", "start": 0}')
            page.error(begun=True)
        page.socket.send_text('{"do": "reset", "start": "picture"}')
        assert "no start 'picture'" in page.error(begun=True)
        for seen, wanted in zip(page.step("right")[1], other.step("right")[1], strict=True):
            assert np.array_equal(seen, wanted)
        with monkeypatch.context() as patch:  # the simulator has begun anew, and the model cannot
            patch.setattr(game_session.GameSession, "_start_rollout", fails)
            page.socket.send_text('{"do": "reset", "start": "real"}')
            assert "Reset it to start again" in page.error(begun=False)
        page.socket.send_text('{"do": "step", "action": 0}')
        assert "reset it first" in page.error(begun=False)
        with monkeypatch.context() as patch:  # the other way round
            page.reset("any", seed=3)
            patch.setattr(Simulator, "reset", fails)
            page.socket.send_bytes(data)
            assert "Reset it to start again" in page.error(begun=False)
        page.socket.send_text('{"do": "reset", "start": "picture"}')
        assert "no start 'picture'" in page.error(begun=False)
        page.reset("real", seed=3)


def test_unexpected_errors_are_logged_and_reported(monkeypatch, caplog):
    arcade = GameHost(world_pipeline())
    with client(arcade) as http, Page(http) as page, Page(http) as other:
        page.reset()
        other.reset()
        with monkeypatch.context() as patch:
            patch.setattr(game_session.GameSession, "_predict_frame", lambda self, code: 1 / 0)
            page.socket.send_text('{"do": "step", "action": 0}')
            assert "ZeroDivisionError: division by zero" in page.error(begun=False)
            with pytest.raises(WebSocketDisconnect) as closed:
                page.socket.receive_text()
        assert closed.value.code == play_server.CLOSE_INTERNAL_ERROR and "ZeroDivisionError" in closed.value.reason
        assert "1 / 0" in caplog.text  # with where it was
        other.step("1")  # nobody else is disturbed
        assert soon(lambda: len(arcade.sessions) == 1)


# ---- players ----------------------------------------------------------------------------------------------------


def test_players_are_independent():
    arcade = GameHost(world_pipeline())
    with client(arcade) as http, Page(http) as alone:
        alone.reset(seed=1)
        wanted = [alone.step("3")[1][0] for _ in range(3)]
        with Page(http) as one, Page(http) as two:
            one.reset(seed=1)
            for frame in wanted:
                two.reset(seed=9)
                assert np.array_equal(one.step("3")[1][0], frame)
                two.step("7")


def test_max_players_is_enforced():
    arcade = GameHost(world_pipeline(), max_players=2)
    with client(arcade) as http:
        with Page(http) as one, Page(http):
            one.reset()
            with http.websocket_connect(SOCKET) as third:
                result = json.loads(third.receive_text())
                assert result["is"] == "error" and "maximum of 2 players" in result["problem"]
                with pytest.raises(WebSocketDisconnect) as closed:
                    third.receive_text()
                assert closed.value.code == play_server.CLOSE_TRY_AGAIN_LATER
            one.step("1")
        assert soon(lambda: not arcade.sessions)
        with Page(http) as page:
            page.reset()


def test_dropped_connections_release_resources(monkeypatch):
    closed = []
    monkeypatch.setattr(game_session.SimulatorSession, "close", lambda self: closed.append(self))
    arcade = GameHost(world_pipeline(), "pocket", max_players=1)

    def play_and_drop(http) -> game_session.GameSession:
        with Page(http) as page:
            page.reset("real")
            (mine,) = arcade.sessions
            for _ in range(5):  # and leave without waiting for the answers
                page.socket.send_text('{"do": "step", "action": 0}')
        return mine

    with client(arcade) as http:
        for _ in range(3):
            mine = play_and_drop(http)
            assert soon(lambda mine=mine: not arcade.sessions and mine.rollout is None and mine.simulator in closed)


def test_simulator_process_ends_with_its_player(monkeypatch):
    own = WORLDS["pocket"]._replace(packages=(f"numpy=={np.__version__}",))  # which is here, so that no other is made
    monkeypatch.setitem(WORLDS, "pocket", own)
    arcade = GameHost(world="pocket")
    with client(arcade) as http:
        with Page(http) as page:
            _, (seen,) = page.reset("real", seed=4)
            assert np.array_equal(seen, Simulator(32).reset(4)["frame"])
            page.step("left")
            (mine,) = arcade.sessions
            process = mine.simulator.simulator.process
            assert process.poll() is None
            process.kill()
            page.socket.send_text('{"do": "step", "action": 0}')
            assert "stopped" in page.error()
            page.reset("real", seed=4)
            process = mine.simulator.simulator.process
        assert soon(lambda: process.poll() is not None and not arcade.sessions)


# ---- who may ask ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "origin", "may"),
    [
        ("127.0.0.1:8000", None, True),
        ("127.0.0.1:8000", "http://127.0.0.1:8000", True),
        ("localhost:9", "http://localhost:9", True),  # through a tunnel
        ("[::1]:8000", "http://[::1]:8000", True),
        ("127.0.0.1:8000", "http://localhost:8000", False),
        ("127.0.0.1:8000", "http://127.0.0.1:8001", False),  # another page of this machine
        ("127.0.0.1:8000", "https://127.0.0.1:8000", False),
        ("127.0.0.1:8000", "https://evil.example", False),
        ("127.0.0.1:8000", "null", False),
        ("127.0.0.1:8000", "", False),
        ("evil.example:8000", "http://evil.example:8000", False),  # a name that was made to mean the loopback
        ("evil.example:8000", None, False),
        ("localhost.evil.example", None, False),
        ("localhost@evil.example", None, False),
        ("[::1", None, False),
        ("", None, False),
    ],
)
def test_other_origins_are_refused(host, origin, may):
    arcade = GameHost(world_pipeline())
    headers = {"host": host} | ({} if origin is None else {"origin": origin})
    with client(arcade) as http:
        assert http.get("/", headers=headers).status_code == (200 if may else 403)
        if may:
            with Page(http, headers=headers) as page:
                page.reset()
        else:
            with pytest.raises(WebSocketDisconnect), Page(http, headers=headers):
                pass
        assert soon(lambda: not arcade.sessions)


def test_page_is_self_contained():
    with client(GameHost(world_pipeline())) as http:
        home = http.get("/")
        policy = home.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "*" not in policy
        assert home.headers["x-content-type-options"] == "nosniff" and "text/html" in home.headers["content-type"]
        linked = re.findall(r'(?:src|href)="(.+?)"', home.text)
        for name in linked + [path.name for path in PAGE_FOLDER.glob("*.js")]:
            answer = http.get(f"/{name}")
            assert answer.status_code == 200 and answer.headers["content-security-policy"] == policy
            assert (
                "http://" not in answer.text.replace("http://www.w3.org/2000/svg", "") and "https://" not in answer.text
            )
            for other in re.findall(r'from "\./(.+?)"', answer.text):
                assert (PAGE_FOLDER / other).is_file()
        for path in ("/server.py", "/../server.py", "/%2e%2e/server.py", "/page", "/play"):
            assert http.get(path).status_code == 404
        assert http.post("/").status_code == 405
        with pytest.raises(WebSocketDisconnect), http.websocket_connect(f"{SOCKET}/other"):
            pass


# ---- a real server ----------------------------------------------------------------------------------------------


def test_server_binds_loopback_and_stops():
    arcade = GameHost(world="pocket")
    with bind_loopback_socket(0) as link:
        running = build_server(arcade)
        thread = threading.Thread(target=running.run, kwargs={"sockets": [link]})
        thread.start()
        host, port = link.getsockname()
        assert host == "127.0.0.1"
        with pytest.raises(ConfigError, match=f"port {port}"):
            bind_loopback_socket(port)
        try:
            assert httpx.get(f"http://127.0.0.1:{port}/", timeout=300).status_code == 200
            from websockets.sync.client import connect

            with connect(f"ws://127.0.0.1:{port}/play", open_timeout=300) as socket:
                assert json.loads(socket.recv())["title"] == "pocket"
                socket.send('{"do": "reset", "start": "real", "seed": 1}')
                frame, _ = protocol.unpack_frame(socket.recv())
                assert frame.seed == 1
                running.should_exit = True  # with a player there
                thread.join(300)
                assert not thread.is_alive()
        finally:
            running.should_exit = True
            thread.join(300)
    arcade.close()
    assert soon(lambda: not arcade.sessions)


def test_unplayable_worlds_are_refused():
    with pytest.raises(ConfigError, match="neither a model nor a simulator"):
        GameHost()
    with pytest.raises(ConfigError, match="--max-players is 0"):
        GameHost(world="pocket", max_players=0)
    with pytest.raises(ConfigError, match="steps is 0"):
        GameHost(world_pipeline(), steps=0)
    with pytest.raises(ConfigError, match="2 controls, but pocket has 4"):
        GameHost(world_pipeline(latent=False), "pocket")
    with pytest.raises(ConfigError, match="no key maps"):
        GameHost(world_pipeline(latent=False, controls=ControlMap(world="pocket")))
    with pytest.raises(ConfigError, match="does not start from an image"):
        GameHost(world="pocket", start_image=Image.new("RGB", (8, 8)))
    with pytest.raises(ConfigError, match="cannot be used"):
        bind_loopback_socket(70_000)
