"""The world that ships, under keys: what it imagines of a level that it was not trained on."""

from PIL import Image

from vitrail.play import Playground
from vitrail.show.page import Section, code, figure, heading, strip
from vitrail.tour.step import Step

# Keys held, frame by frame.
WALKS = (
    ("right",) * 5,
    ("right up", "right up", "right", "right", "right"),
    ("right", "right", "right", "left", "left"),
)
TIMES = 3  # pixels are shown as squares of so many


def played(world: Playground, seed: int, step: Step) -> Section:
    """Strips of frames from one of its starts, and the keys that lead to each."""
    assert world.controls is not None
    start = Image.fromarray(world.starts[seed % len(world.starts)].numpy())
    body = [
        f"A model of {world.controls.world}, learned from video alone: nobody told it which keys were pressed, or that "
        "there are keys. It is given the first frame of a level that it was not trained on, and imagines the others."
    ]
    for keys in WALKS:
        step(f"playing: {keys[0]} … {keys[-1]}")
        frames = world.roll([world.controls.codes[key] for key in keys], start, seed=seed)
        shown = zip((start, *frames), ("given", *keys), strict=True)
        body += [heading(", ".join(keys)), strip(*(figure(_large(frame), key) for frame, key in shown))]
    return Section("It imagines a world", [*body, "Under your own keys, in the browser:", code("vitrail play")])


def _large(frame: Image.Image) -> Image.Image:
    return frame.resize((TIMES * frame.width, TIMES * frame.height), Image.Resampling.NEAREST)
