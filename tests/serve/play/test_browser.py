"""The page in Chromium: keys, buttons and images work, and the page makes no other request."""

import os
import re
import shutil
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("starlette")
pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

from playwright.sync_api import expect, sync_playwright

import worlds
from serve.play.arcades import world_pipeline
from vitrail.data.episodes.worlds.pocket import Simulator
from vitrail.serve.play import ControlMap
from vitrail.serve.play.game_session import GameHost, GameSession
from vitrail.serve.play.play_server import bind_loopback_socket, build_server

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed (Debian: apt-get install chromium)"),
]
PIXELS = """name => {
  const canvas = document.querySelector(`canvas[data-name="${name}"]`);
  return Array.from(canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data);
}"""
SPEAK = """address => new Promise((done) => {
  const socket = new WebSocket(address);
  socket.onopen = () => done("open");
  socket.onerror = () => done("refused");
})"""


@pytest.fixture
def arcade() -> GameHost:
    """A model and its simulator."""
    return GameHost(
        world_pipeline(controls=ControlMap(world="pocket", codes={"left": 3, "right": 1})), "pocket", max_players=2
    )


@pytest.fixture
def address(arcade) -> Iterator[str]:
    """Where it is served."""
    with bind_loopback_socket(0) as link:
        running = build_server(arcade)
        thread = threading.Thread(target=running.run, kwargs={"sockets": [link]})
        thread.start()
        yield f"http://127.0.0.1:{link.getsockname()[1]}"
        running.should_exit = True
        thread.join(300)
    arcade.close()


@pytest.fixture
def browser() -> Iterator:
    flags = ["--no-sandbox"] if os.name == "posix" and os.getuid() == 0 else []
    with sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield opened
        opened.close()


def seen(page, name: str) -> np.ndarray:
    flat = np.array(page.evaluate(PIXELS, name), np.uint8)
    return flat.reshape(worlds.SIDE, worlds.SIDE, 4)[..., :3]


def test_game_in_the_browser(address, browser, tmp_path):
    page = browser.new_page(viewport={"width": 900, "height": 900})
    asked, wrong = [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("websocket", lambda socket: asked.append(socket.url.replace("ws:", "http:")))
    page.on("console", lambda output: wrong.append(output.text) if output.type == "error" else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    step = page.locator("#step")
    page.goto(address)
    expect(page.locator("canvas")).to_have_count(2)

    # from a seed, under the arrows: the simulator's pixels are its own
    page.fill("#wanted", "7")
    page.click("#reset")
    expect(page.locator("#seed")).to_have_text("7")
    own = Simulator(worlds.SIDE)
    assert np.array_equal(seen(page, "pocket"), own.reset(7)["frame"])
    before = seen(page, "model")
    for number, (key, control) in enumerate([("ArrowRight", 1), ("ArrowLeft", 0), ("ArrowDown", 3)], 1):
        page.keyboard.press(key)
        expect(step).to_have_text(str(number))
        assert np.array_equal(seen(page, "pocket"), own.step(control)[0]["frame"])
    assert not np.array_equal(seen(page, "model"), before)

    # buttons and digits; a key that is held goes on, and a pause stops it
    page.get_by_role("button", name="up").click()
    expect(step).to_have_text("4")
    assert np.array_equal(seen(page, "pocket"), own.step(2)[0]["frame"])
    page.keyboard.press("Digit5")
    expect(step).to_have_text("5")
    page.keyboard.down("Digit2")
    expect(step).to_have_text(re.compile("^1[2-9]$"))
    assert float(page.locator("#fps").text_content()) > 0
    page.click("#pause")
    page.keyboard.up("Digit2")
    page.wait_for_timeout(100)
    stopped = step.text_content()
    page.keyboard.press("Digit1")
    page.wait_for_timeout(300)
    assert step.text_content() == stopped
    page.click("#pause")

    # pictures: what is none is said, and one of any size will do
    (tmp_path / "none.png").write_text("no picture")
    page.set_input_files("#file", tmp_path / "none.png")
    expect(page.locator("#error")).to_contain_text("not an image")
    Image.effect_noise((300, 50), 90).convert("RGB").save(tmp_path / "wide.webp")
    page.set_input_files("#file", tmp_path / "wide.webp")
    expect(page.locator("#start")).to_have_value('"picture"')
    expect(page.locator("#error")).to_be_hidden()

    # crisp: a whole number of the screen's pixels each
    box = page.locator("canvas").first.evaluate("canvas => canvas.clientWidth / canvas.width")
    assert box == int(box) > 1
    page.screenshot(path=tmp_path / "page.png", full_page=True)
    with Image.open(tmp_path / "page.png") as shot:
        assert len(shot.convert("RGB").getcolors(1 << 20)) > 20

    # another player, and one too many
    other, third = browser.new_page(), browser.new_page()
    other.goto(address)
    expect(other.locator("canvas")).to_have_count(2)
    third.goto(address)
    expect(third.locator("#error")).to_contain_text("maximum of 2 players")
    other.close()
    expect(third.locator("#again")).to_be_visible()
    third.wait_for_timeout(200)
    third.click("#again")
    expect(third.locator("canvas")).to_have_count(2)

    assert not wrong and all(url.startswith(address) for url in asked)


def test_errors_are_shown_and_the_world_continues(arcade, address, browser, tmp_path, monkeypatch):
    arcade.idle_action = 0  # time goes on by itself
    page = browser.new_page()
    step, error = page.locator("#step"), page.locator("#error")
    page.goto(address)
    expect(step).to_have_text(re.compile("^[1-9]"))

    # an error stays visible for a while, and the world continues
    (tmp_path / "none.png").write_text("no picture")
    page.set_input_files("#file", tmp_path / "none.png")
    expect(error).to_contain_text("not an image")
    expect(step).not_to_have_text(step.text_content())
    expect(error).to_be_visible()
    expect(error).to_be_hidden(timeout=15_000)
    page.fill("#wanted", str(2**31))
    page.click("#reset")
    expect(error).to_contain_text("below 2147483648")

    # an internal error is shown instead of a closed connection
    monkeypatch.setattr(GameSession, "_predict_frame", lambda self, code: 1 / 0)
    expect(error).to_contain_text("ZeroDivisionError")
    expect(page.locator("#again")).to_be_visible()
    expect(error).not_to_contain_text("has stopped")


def test_keys_work_after_settings_and_controls_have_labels(address, browser):
    page = browser.new_page()
    page.goto(address)
    expect(page.locator("canvas")).to_have_count(2)
    page.locator("#rate").click()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#step")).to_have_text("1")
    page.focus("#rate")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")  # by keys it is left by Tab
    assert page.evaluate("document.activeElement.id") == "rate"
    page.fill("#wanted", "7")
    page.press("#wanted", "Enter")
    expect(page.locator("#seed")).to_have_text("7")
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#step")).to_have_text("1")

    for name in ("model", "pocket"):
        expect(page.get_by_role("img", name=name)).to_have_count(1)
    hands = page.get_by_role("group", name="controls").get_by_role("button")
    marked = [one.get_attribute("aria-label") for one in hands.all() if one.get_attribute("title")]
    assert sorted(marked) == ["down", "up"]
    expect(page.locator("#hint")).to_contain_text("The model has no action for up, down")
    expect(page.get_by_role("status")).to_have_count(0)  # nothing that is read aloud at every frame


def test_other_pages_cannot_connect(address, browser):
    page = browser.new_page()
    socket = address.replace("http:", "ws:") + "/play"
    page.goto("about:blank")
    assert page.evaluate(SPEAK, socket) == "refused"
    page.goto(address.replace("127.0.0.1", "localhost"))
    assert page.evaluate(SPEAK, socket.replace("127.0.0.1", "localhost")) == "open"
