"""Input of players: their own images, and invalid data."""

import io
import json

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from serve.play.arcades import Page, client, world_pipeline
from serve.play.test_play_server import file_of
from vitrail.errors import DataError
from vitrail.serve.play import game_session, protocol
from vitrail.serve.play.game_session import GameHost

# ---- pictures ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "mode", "size"),
    [("PNG", "RGBA", (1, 1)), ("JPEG", "L", (301, 7)), ("WEBP", "RGB", (40, 900)), ("GIF", "P", (64, 64))],
)
def test_uploaded_image_is_the_start(kind, mode, size):
    made, picture = world_pipeline(starts=0), Image.effect_noise(size, 90).convert(mode)
    more = {"save_all": True, "append_images": [picture.rotate(90)]} if kind == "GIF" else {}
    data = file_of(picture, kind, **more)
    with Page(client(GameHost(made))) as page:
        assert page.hello["choices"] == []
        page.socket.send_bytes(data)
        frame, (seen,) = page.frame()
        with Image.open(io.BytesIO(data)) as read:
            ground = Image.new("RGBA", read.size, "white")
            flat = Image.alpha_composite(ground, read.convert("RGBA")).convert("RGB")
        wanted = made.create_rollout().start(made.preprocess_image(flat).movedim(-1, 0)[None])
        assert frame.start == "picture" and np.array_equal(seen, wanted[0].movedim(0, -1))
        page.step("1")
        assert np.array_equal(page.reset("picture")[1][0], seen)  # it is kept


def test_invalid_images_are_refused(monkeypatch):
    monkeypatch.setattr(game_session, "MAX_UPLOAD_BYTES", 20_000)
    monkeypatch.setattr(game_session, "MAX_UPLOAD_PIXELS", 10_000)
    whole = file_of(Image.effect_noise((90, 90), 90))
    with Page(client(GameHost(world_pipeline()))) as page:
        _, before = page.reset(seed=1)
        for data, message in (
            (b"", "empty"),
            (b"<svg/>", "not an image"),
            (whole[:500], "corrupt"),
            (file_of(Image.new("RGB", (101, 100))), "at most 10,000 pixels"),
            (bytes(20_001), "at most 20,000 bytes"),
            (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not an image"),
        ):
            page.socket.send_bytes(data)
            result = page.error()
            assert message in result and "--" not in result
        page.socket.send_text('{"do": "reset", "start": "picture"}')
        assert "picture" in page.error()  # none of them was kept
        assert np.array_equal(page.reset(seed=1)[1][0], before[0])
    with Page(client(GameHost(world="pocket"))) as page:
        page.socket.send_bytes(whole)
        assert "does not start from an image" in page.error()


def test_start_animation_uses_the_first_frame(tmp_path):
    first, then = (Image.new("RGB", (30, 20), colour) for colour in ("red", "blue"))
    first.save(tmp_path / "moving.gif", save_all=True, append_images=[then])
    made = world_pipeline()
    assert torch.equal(GameHost(made, start_image=tmp_path / "moving.gif").start_image, made.preprocess_image(first))


def test_start_image_applies_to_all_players():
    made, picture = world_pipeline(), Image.effect_noise((30, 20), 90)
    with Page(client(GameHost(made, start_image=picture))) as page:
        assert page.hello["choices"] == ["picture", "any"]
        wanted = made.create_rollout().start(made.preprocess_image(picture).movedim(-1, 0)[None])
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
        output = json.loads(text, parse_constant=lambda name: 1 / 0)
    except (ValueError, ZeroDivisionError, RecursionError):
        return False
    if not isinstance(output, dict):
        return False

    def number(value):
        return type(value) is int and 0 <= value < protocol.SEED_LIMIT

    if output.get("do") == "step":
        return set(output) == {"do", "action"} and number(output["action"])
    if output.get("do") != "reset" or not {"do", "start"} <= set(output) <= {"do", "start", "seed"}:
        return False
    seed, start = output.get("seed"), output["start"]
    return (seed is None or number(seed)) and (start in ("real", "picture", "any") or number(start))


@settings(max_examples=300)
@given(rubbish)
def test_only_valid_messages_are_parsed(text):
    try:
        protocol.parse_message(text)
    except DataError as error:
        assert not accepted(text) and error.problem and error.remedy
    else:
        assert accepted(text)


@pytest.mark.parametrize("seed", [2**31, 2**70, -1])
def test_seed_range_is_reported(seed):
    with pytest.raises(DataError, match="from 0 to 2147483647"):
        protocol.parse_message(json.dumps({"do": "reset", "start": "any", "seed": seed}))


def test_invalid_messages_do_no_harm():
    """Whatever is said, there is one answer, and the next who asks properly gets a frame as if nothing had been."""
    arcade = GameHost(world_pipeline())
    with client(arcade) as http, Page(http) as page, Page(http) as other:
        page.reset(seed=1)
        other.reset(seed=1)

        @settings(max_examples=60, suppress_health_check=list(HealthCheck))
        @given(rubbish.filter(lambda text: not accepted(text)) | st.binary(max_size=60))
        def throw(output):
            (page.socket.send_bytes if isinstance(output, bytes) else page.socket.send_text)(output)
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


def test_step_before_reset_is_refused():
    for arcade in (GameHost(world_pipeline()), GameHost(world="pocket")):
        with Page(client(arcade)) as page:
            page.socket.send_text('{"do": "step", "action": 0}')
            assert "reset" in page.error()
