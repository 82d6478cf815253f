"""What players give the server: pictures of their own, and rubbish."""

import io
import json

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from play.arcades import Page, client, playground
from play.test_server import file_of
from vitrail.errors import DataError
from vitrail.play import game, messages
from vitrail.play.game import Arcade

# ---- pictures ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "mode", "size"),
    [("PNG", "RGBA", (1, 1)), ("JPEG", "L", (301, 7)), ("WEBP", "RGB", (40, 900)), ("GIF", "P", (64, 64))],
)
def test_a_picture_of_ones_own(kind, mode, size):
    made, picture = playground(starts=0), Image.effect_noise(size, 90).convert(mode)
    more = {"save_all": True, "append_images": [picture.rotate(90)]} if kind == "GIF" else {}
    data = file_of(picture, kind, **more)
    with Page(client(Arcade(made))) as page:
        assert page.hello["choices"] == []
        page.socket.send_bytes(data)
        frame, (seen,) = page.frame()
        with Image.open(io.BytesIO(data)) as read:
            ground = Image.new("RGBA", read.size, "white")
            flat = Image.alpha_composite(ground, read.convert("RGBA")).convert("RGB")
        wanted = made.rollout().start(made.fit(flat).movedim(-1, 0)[None])
        assert frame.start == "picture" and np.array_equal(seen, wanted[0].movedim(0, -1))
        page.step("1")
        assert np.array_equal(page.reset("picture")[1][0], seen)  # it is kept


def test_pictures_that_cannot_be_are_refused(monkeypatch):
    monkeypatch.setattr(game, "MOST_BYTES", 20_000)
    monkeypatch.setattr(game, "MOST_PIXELS", 10_000)
    whole = file_of(Image.effect_noise((90, 90), 90))
    with Page(client(Arcade(playground()))) as page:
        _, before = page.reset(seed=1)
        for data, says in (
            (b"", "empty"),
            (b"<svg/>", "not a picture"),
            (whole[:500], "corrupt"),
            (file_of(Image.new("RGB", (101, 100))), "10,000 pixels at most"),
            (bytes(20_001), "20,000 at most"),
            (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not a picture"),
        ):
            page.socket.send_bytes(data)
            told = page.error()
            assert says in told and "--" not in told
        page.socket.send_text('{"do": "reset", "start": "picture"}')
        assert "picture" in page.error()  # none of them was kept
        assert np.array_equal(page.reset(seed=1)[1][0], before[0])
    with Page(client(Arcade(world="pocket"))) as page:
        page.socket.send_bytes(whole)
        assert "only a model" in page.error()


def test_of_an_animation_given_at_the_start_the_first_frame_is_taken(tmp_path):
    first, then = (Image.new("RGB", (30, 20), colour) for colour in ("red", "blue"))
    first.save(tmp_path / "moving.gif", save_all=True, append_images=[then])
    made = playground()
    assert torch.equal(Arcade(made, picture=tmp_path / "moving.gif").picture, made.fit(first))


def test_a_picture_given_at_the_start_is_where_everyone_starts():
    made, picture = playground(), Image.effect_noise((30, 20), 90)
    with Page(client(Arcade(made, picture=picture))) as page:
        assert page.hello["choices"] == ["picture", "any"]
        wanted = made.rollout().start(made.fit(picture).movedim(-1, 0)[None])
        assert np.array_equal(page.reset("picture")[1][0], wanted[0].movedim(0, -1))


# ---- rubbish ----------------------------------------------------------------------------------------------------

json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
some = json_like | st.integers(0, 9) | st.sampled_from(["any", "real", "picture", 2**31 - 1, 2**31, 2**64, 1.0])
near = st.fixed_dictionaries(
    {"do": st.sampled_from(["step", "reset", "x", 1])}, optional=dict.fromkeys(["action", "start", "seed"], some)
)
rubbish = st.one_of(st.text(max_size=40), json_like.map(json.dumps), near.map(json.dumps))


def accepted(text: str) -> bool:
    """Whether a message is one, by the page's own account of the protocol."""
    try:
        said = json.loads(text, parse_constant=lambda name: 1 / 0)
    except (ValueError, ZeroDivisionError, RecursionError):
        return False
    if not isinstance(said, dict):
        return False

    def number(value):
        return type(value) is int and 0 <= value < messages.SEEDS

    if said.get("do") == "step":
        return set(said) == {"do", "action"} and number(said["action"])
    if said.get("do") != "reset" or not {"do", "start"} <= set(said) <= {"do", "start", "seed"}:
        return False
    seed, start = said.get("seed"), said["start"]
    return (seed is None or number(seed)) and (start in ("real", "picture", "any") or number(start))


@settings(max_examples=300)
@given(rubbish)
def test_only_messages_are_read(text):
    try:
        messages.read(text)
    except DataError as error:
        assert not accepted(text) and error.problem and error.remedy
    else:
        assert accepted(text)


@pytest.mark.parametrize("seed", [2**31, 2**70, -1])
def test_it_is_said_which_seeds_there_are(seed):
    with pytest.raises(DataError, match="below 2147483648"):
        messages.read(json.dumps({"do": "reset", "start": "any", "seed": seed}))


def test_rubbish_does_no_harm():
    """Whatever is said, there is one answer, and the next who asks properly gets a frame as if nothing had been."""
    arcade = Arcade(playground())
    with client(arcade) as http, Page(http) as page, Page(http) as other:
        page.reset(seed=1)
        other.reset(seed=1)

        @settings(max_examples=60, suppress_health_check=list(HealthCheck))
        @given(rubbish.filter(lambda text: not accepted(text)) | st.binary(max_size=60))
        def throw(said):
            (page.socket.send_bytes if isinstance(said, bytes) else page.socket.send_text)(said)
            page.error()

        throw()
        page.socket.send_text(json.dumps({"do": "step", "action": 99}))
        assert "no action 99" in page.error()
        page.socket.send_text(json.dumps({"do": "reset", "start": 3}))
        assert "0 … 2" in page.error()
        page.socket.send_text(json.dumps({"do": "step", "action": 0, "x": "a" * 2000}))
        assert "2,0" in page.error()
        page.socket.send_text("[" * 900)
        page.error()
        assert np.array_equal(page.step("4")[1][0], other.step("4")[1][0])


def test_a_world_that_has_not_begun_cannot_go_on():
    for arcade in (Arcade(playground()), Arcade(world="pocket")):
        with Page(client(arcade)) as page:
            page.socket.send_text('{"do": "step", "action": 0}')
            assert "reset" in page.error()
