"""World-model section of the demo: frames generated from keys in an unseen level."""

from PIL import Image

from vitrail.demo.judged_drawing import StepLogger
from vitrail.plots.html_page import Section, render_code, render_heading, render_image, render_strip
from vitrail.serve.play import WorldPipeline

# Keys held, frame by frame.
KEY_SEQUENCES = (
    ("right",) * 5,
    ("right up", "right up", "right", "right", "right"),
    ("right", "right", "right", "left", "left"),
)
ZOOM = 3  # zoom factor of frames


def build_world_section(world: WorldPipeline, seed: int, log_step: StepLogger) -> Section:
    """Build strips of generated frames from a start frame, with their keys."""
    assert world.controls is not None
    start = Image.fromarray(world.start_images[seed % len(world.start_images)].numpy())
    body = [
        f"A world model of {world.controls.world}, trained on video without action labels. It gets the first frame of "
        "an unseen level and generates the others from keys."
    ]
    for keys in KEY_SEQUENCES:
        log_step(f"playing: {keys[0]} … {keys[-1]}")
        frames = world.generate_frames([world.controls.codes[key] for key in keys], start, seed=seed)
        labelled_frames = zip((start, *frames), ("start", *keys), strict=True)
        body += [
            render_heading(", ".join(keys)),
            render_strip(*(render_image(_enlarge(frame), key) for frame, key in labelled_frames)),
        ]
    return Section("World model", [*body, "Play it in the browser:", render_code("vitrail play")])


def _enlarge(frame: Image.Image) -> Image.Image:
    return frame.resize((ZOOM * frame.width, ZOOM * frame.height), Image.Resampling.NEAREST)
