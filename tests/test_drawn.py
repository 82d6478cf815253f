"""The example that has the model that ships draw: every prompt from one seed, each read from its own drawing."""

import runpy
from pathlib import Path

from PIL import Image

FILE = Path(__file__).parents[1] / "examples" / "drawn.py"


class Hand:
    """A model whose drawings are told apart by their colour."""

    def __init__(self):
        self.asked = []

    def draw(self, prompt, *, seed):
        self.asked.append((prompt, seed))
        return Image.new("RGB", (96, 96), (len(self.asked), 0, 0))

    def caption(self, picture):
        return f"Number {picture.getpixel((0, 0))[0]}."


def test_every_prompt_is_drawn_and_read(monkeypatch):
    script, hand, words = runpy.run_path(str(FILE)), Hand(), []
    monkeypatch.setattr("vitrail.load", lambda name: hand)

    def sheet(tiles, title, **_):
        words.extend(tile.words for tile in tiles)
        return Image.new("RGB", (1, 1))

    monkeypatch.setitem(script["drawn"].__globals__, "draw_sheet", sheet)
    script["drawn"](seed=4)
    assert hand.asked == [(prompt, 4) for prompt in script["PROMPTS"]] and len(hand.asked) == 8
    assert words == [[f"“{prompt}”", f"It reads: Number {n}."] for n, prompt in enumerate(script["PROMPTS"], 1)]
