"""The page's server: what is asked is answered, players do not disturb each other, and no other site may ask."""

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
from play.arcades import SOCKET, Page, client, playground
from vitrail.data.episodes import WORLDS
from vitrail.data.episodes.worlds.pocket import Simulator
from vitrail.errors import ConfigError, DataError
from vitrail.play import Controls, game, messages, server
from vitrail.play.game import Arcade
from vitrail.play.server import PAGE, listen, make_server

BESIDE = Controls(world="pocket", codes={"left": 3, "right": 1, "up": 0})


def file_of(picture: Image.Image, kind: str = "PNG", **how) -> bytes:
    out = io.BytesIO()
    picture.save(out, kind, **how)
    return out.getvalue()


def soon(is_so) -> bool:
    """Whether it comes to be so, in the end."""
    for _ in range(500):
        if is_so():
            return True
        time.sleep(0.01)
    return False


# ---- playing ----------------------------------------------------------------------------------------------------


def test_frames_are_those_of_the_model():
    made = playground()
    with Page(client(Arcade(made, steps=2))) as page:
        frame, (seen,) = page.reset(start=1, seed=5)
        assert (frame.step, frame.seed, frame.start) == (0, 5, 1)
        drawn = [page.step(name)[1][0] for name in ("8", "1", "3")]
    world = made.rollout(2)
    first = world.start(made.starts[1:2].movedim(-1, 1), seed=5)
    wanted = [first, *(world.step(torch.tensor([action])) for action in (7, 0, 2))]
    assert all(np.array_equal(a, b[0].movedim(0, -1)) for a, b in zip([seen, *drawn], wanted, strict=True))


def test_a_frame_is_taken_in_while_it_travels():
    """Nobody asks for the next one, and it is in the memory of the model all the same."""
    arcade = Arcade(playground())
    with Page(client(arcade)) as page:
        page.reset(seed=5)
        page.step("8")
        (player,) = arcade.players
        assert soon(lambda: player.rollout._led is None)


def test_a_seed_is_a_world_and_is_told():
    with Page(client(Arcade(playground()))) as page:
        first = page.reset()[0].seed
        again = page.reset(seed=first)
        drawn = [page.step("2")[1][0] for _ in range(3)]
        page.reset(seed=first)
        assert again[0].seed == first
        assert all(np.array_equal(a, page.step("2")[1][0]) for a in drawn)


def test_a_simulator_beside_the_model_answers_to_the_same_keys():
    made = playground(controls=BESIDE)
    with Page(client(Arcade(made, "pocket"))) as page:
        assert page.hello["views"] == ["model", "pocket"] and page.hello["idle"] is None
        frame, (_, real) = page.reset("real", seed=3)
        own = Simulator(worlds.SIDE)
        assert np.array_equal(real, own.reset(3)["frame"])
        world = made.rollout(2)
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


def test_a_simulator_alone_until_its_end():
    with Page(client(Arcade(world="pocket"))) as page:
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


def test_actions_last_as_long_as_those_that_were_learned_from():
    made = playground(controls=Controls(world="pocket", codes={"right": 1}, repeat=2))
    with Page(client(Arcade(made, "pocket"))) as page:
        assert page.hello["rate"] == 2.5
        page.reset("real", seed=3)
        own = Simulator(worlds.SIDE)
        own.reset(3)
        own.step(1)
        assert np.array_equal(page.step("right")[1][1], own.step(1)[0]["frame"])


def test_actions_last_as_long_beside_another_variant_of_the_world():
    made = playground(controls=Controls(world="pocket", codes={"right": 1}, repeat=2))
    arcade = Arcade(made, "pocket-curtain")
    assert arcade.repeat == 2 and arcade.simulator().repeat == 2


def test_steps_that_are_repeated_stop_when_their_player_leaves(monkeypatch):
    real, done = game.Real("pocket", worlds.SIDE, repeat=100), []
    own = Simulator.step

    def step(self, action):
        done.append(action)
        if len(done) == 3:
            real.leave()
        return own(self, action)

    real.begin(0)
    monkeypatch.setattr(Simulator, "step", step)
    real.step(0)
    assert len(done) == 3
    real.begin(0)  # which was on its way when the player left
    assert real.simulator is None


def test_a_simulator_that_stops_is_told_of_and_opened_again(monkeypatch):
    arcade = Arcade(world="pocket")
    with Page(client(arcade)) as page:
        page.reset("real", seed=0)
        monkeypatch.setattr(Simulator, "step", lambda self, action: (_ for _ in ()).throw(DataError("it stopped")))
        page.socket.send_text('{"do": "step", "action": 0}')
        told = page.error(begun=False)
        assert "it stopped" in told and "reset it to begin anew" in told
        monkeypatch.undo()
        page.socket.send_text('{"do": "step", "action": 0}')
        assert "reset" in page.error()
        page.reset("real", seed=0)
        page.step("left")


def fails(*given):
    raise DataError("it failed", "mend it")


def test_what_fails_halfway_leaves_the_world_as_it_was_or_says_that_it_stopped(monkeypatch):
    data = file_of(Image.effect_noise((9, 9), 90))
    arcade = Arcade(playground(controls=BESIDE), "pocket")
    with client(arcade) as http, Page(http) as page, Page(http) as other:
        page.reset("any", seed=3)
        other.reset("any", seed=3)
        with monkeypatch.context() as patch:  # the model cannot begin: the simulator was not touched, nor the picture
            patch.setattr(game.Game, "_dream", fails)
            page.socket.send_bytes(data)
            assert "stopped" not in page.error(begun=True)
            page.socket.send_text('{"do": "reset", "start": 0}')
            page.error(begun=True)
        page.socket.send_text('{"do": "reset", "start": "picture"}')
        assert "starts from 'picture'" in page.error(begun=True)
        for seen, wanted in zip(page.step("right")[1], other.step("right")[1], strict=True):
            assert np.array_equal(seen, wanted)
        with monkeypatch.context() as patch:  # the simulator has begun anew, and the model cannot
            patch.setattr(game.Game, "_dream", fails)
            page.socket.send_text('{"do": "reset", "start": "real"}')
            assert "reset it to begin anew" in page.error(begun=False)
        page.socket.send_text('{"do": "step", "action": 0}')
        assert "reset it first" in page.error(begun=False)
        with monkeypatch.context() as patch:  # the other way round
            page.reset("any", seed=3)
            patch.setattr(Simulator, "reset", fails)
            page.socket.send_bytes(data)
            assert "reset it to begin anew" in page.error(begun=False)
        page.socket.send_text('{"do": "reset", "start": "picture"}')
        assert "starts from 'picture'" in page.error(begun=False)
        page.reset("real", seed=3)


def test_what_nobody_foresaw_is_logged_and_told(monkeypatch, caplog):
    arcade = Arcade(playground())
    with client(arcade) as http, Page(http) as page, Page(http) as other:
        page.reset()
        other.reset()
        with monkeypatch.context() as patch:
            patch.setattr(game.Game, "_step", lambda self, code: 1 / 0)
            page.socket.send_text('{"do": "step", "action": 0}')
            assert "ZeroDivisionError: division by zero" in page.error(begun=False)
            with pytest.raises(WebSocketDisconnect) as closed:
                page.socket.receive_text()
        assert closed.value.code == server.BROKEN and "ZeroDivisionError" in closed.value.reason
        assert "1 / 0" in caplog.text  # with where it was
        other.step("1")  # nobody else is disturbed
        assert soon(lambda: len(arcade.players) == 1)


# ---- players ----------------------------------------------------------------------------------------------------


def test_players_do_not_disturb_each_other():
    arcade = Arcade(playground())
    with client(arcade) as http, Page(http) as alone:
        alone.reset(seed=1)
        wanted = [alone.step("3")[1][0] for _ in range(3)]
        with Page(http) as one, Page(http) as two:
            one.reset(seed=1)
            for frame in wanted:
                two.reset(seed=9)
                assert np.array_equal(one.step("3")[1][0], frame)
                two.step("7")


def test_there_is_room_for_so_many():
    arcade = Arcade(playground(), players=2)
    with client(arcade) as http:
        with Page(http) as one, Page(http):
            one.reset()
            with http.websocket_connect(SOCKET) as third:
                told = json.loads(third.receive_text())
                assert told["is"] == "error" and "room for 2" in told["problem"]
                with pytest.raises(WebSocketDisconnect) as closed:
                    third.receive_text()
                assert closed.value.code == server.FULL
            one.step("1")
        assert soon(lambda: not arcade.players)
        with Page(http) as page:
            page.reset()


def test_sockets_that_drop_free_what_they_had(monkeypatch):
    closed = []
    monkeypatch.setattr(game.Real, "close", lambda self: closed.append(self))
    arcade = Arcade(playground(), "pocket", players=1)

    def play_and_drop(http) -> game.Game:
        with Page(http) as page:
            page.reset("real")
            (mine,) = arcade.players
            for _ in range(5):  # and leave without waiting for the answers
                page.socket.send_text('{"do": "step", "action": 0}')
        return mine

    with client(arcade) as http:
        for _ in range(3):
            mine = play_and_drop(http)
            assert soon(lambda mine=mine: not arcade.players and mine.rollout is None and mine.real in closed)


def test_a_simulator_in_a_process_of_its_own_leaves_with_its_player(monkeypatch):
    own = WORLDS["pocket"]._replace(packages=(f"numpy=={np.__version__}",))  # which is here, so that no other is made
    monkeypatch.setitem(WORLDS, "pocket", own)
    arcade = Arcade(world="pocket")
    with client(arcade) as http:
        with Page(http) as page:
            _, (seen,) = page.reset("real", seed=4)
            assert np.array_equal(seen, Simulator(32).reset(4)["frame"])
            page.step("left")
            (mine,) = arcade.players
            process = mine.real.simulator.process
            assert process.poll() is None
            process.kill()
            page.socket.send_text('{"do": "step", "action": 0}')
            assert "stopped" in page.error()
            page.reset("real", seed=4)
            process = mine.real.simulator.process
        assert soon(lambda: process.poll() is not None and not arcade.players)


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
def test_no_other_site_may_ask(host, origin, may):
    arcade = Arcade(playground())
    headers = {"host": host} | ({} if origin is None else {"origin": origin})
    with client(arcade) as http:
        assert http.get("/", headers=headers).status_code == (200 if may else 403)
        if may:
            with Page(http, headers=headers) as page:
                page.reset()
        else:
            with pytest.raises(WebSocketDisconnect), Page(http, headers=headers):
                pass
        assert soon(lambda: not arcade.players)


def test_the_page_is_whole_in_itself():
    with client(Arcade(playground())) as http:
        home = http.get("/")
        policy = home.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "*" not in policy
        assert home.headers["x-content-type-options"] == "nosniff" and "text/html" in home.headers["content-type"]
        linked = re.findall(r'(?:src|href)="(.+?)"', home.text)
        for name in linked + [path.name for path in PAGE.glob("*.js")]:
            answer = http.get(f"/{name}")
            assert answer.status_code == 200 and answer.headers["content-security-policy"] == policy
            assert (
                "http://" not in answer.text.replace("http://www.w3.org/2000/svg", "") and "https://" not in answer.text
            )
            for other in re.findall(r'from "\./(.+?)"', answer.text):
                assert (PAGE / other).is_file()
        for path in ("/server.py", "/../server.py", "/%2e%2e/server.py", "/page", "/play"):
            assert http.get(path).status_code == 404
        assert http.post("/").status_code == 405
        with pytest.raises(WebSocketDisconnect), http.websocket_connect(f"{SOCKET}/other"):
            pass


# ---- a real server ----------------------------------------------------------------------------------------------


def test_a_real_server_is_on_the_loopback_and_ends_when_told():
    arcade = Arcade(world="pocket")
    with listen(0) as link:
        running = make_server(arcade)
        thread = threading.Thread(target=running.run, kwargs={"sockets": [link]})
        thread.start()
        host, port = link.getsockname()
        assert host == "127.0.0.1"
        with pytest.raises(ConfigError, match=f"port {port}"):
            listen(port)
        try:
            assert httpx.get(f"http://127.0.0.1:{port}/").status_code == 200
            from websockets.sync.client import connect

            with connect(f"ws://127.0.0.1:{port}/play") as socket:
                assert json.loads(socket.recv())["title"] == "pocket"
                socket.send('{"do": "reset", "start": "real", "seed": 1}')
                frame, _ = messages.unpack(socket.recv())
                assert frame.seed == 1
                running.should_exit = True  # with a player there
                thread.join(10)
                assert not thread.is_alive()
        finally:
            running.should_exit = True
            thread.join(10)
    arcade.close()
    assert soon(lambda: not arcade.players)


def test_what_cannot_be_played_is_said():
    with pytest.raises(ConfigError, match="nothing to play"):
        Arcade()
    with pytest.raises(ConfigError, match="0 players"):
        Arcade(world="pocket", players=0)
    with pytest.raises(ConfigError, match="0 passes"):
        Arcade(playground(), steps=0)
    with pytest.raises(ConfigError, match="2 controls, and pocket 4"):
        Arcade(playground(latent=False), "pocket")
    with pytest.raises(ConfigError, match="nothing to do"):
        Arcade(playground(latent=False, controls=Controls(world="pocket")))
    with pytest.raises(ConfigError, match="only a model"):
        Arcade(world="pocket", picture=Image.new("RGB", (8, 8)))
    with pytest.raises(ConfigError, match="cannot be had"):
        listen(70_000)
