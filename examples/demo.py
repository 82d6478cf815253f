"""`make demo`: a look at what Vitrail does, as pictures in out/demo, and a page: out/demo/index.html.

Photographs come from the scikit-image package; give your own with --image.
"""

import argparse
from importlib.util import find_spec
from pathlib import Path

from vitrail.cli.data import show
from vitrail.cli.demo import demo
from vitrail.cli.grid import grid
from vitrail.cli.ledger import ledger
from vitrail.cli.rotary import rotary
from vitrail.cli.stream import stream
from vitrail.cli.write import write
from vitrail.errors import VitrailError


def photographs() -> list[Path]:
    """A portrait, a landscape and a page of text that ship with scikit-image."""
    package = find_spec("skimage")
    if package is None or package.origin is None:
        raise SystemExit("no photographs: pip install scikit-image, or give your own with --image")
    folder = Path(package.origin).parent / "data"
    return [folder / name for name in ("rocket.jpg", "page.png", "chelsea.png")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/demo"))
    parser.add_argument("--image", type=Path, action="append", help="a picture of your own; may be repeated")
    parser.add_argument("--model", help="a folder with a unified model; the one that ships unless given")
    arguments = parser.parse_args()
    print("A model that reads pictures and draws them, on one page\n")
    demo(model=arguments.model, image=tuple(map(str, arguments.image or ())), out=arguments.out)
    print("\nHow a picture becomes tokens, under every resolution policy\n")
    grid(arguments.image or photographs(), out=arguments.out / "grid")
    print("\nWhat drives a rotary slot, and how fast it turns\n")
    rotary(out=arguments.out / "rotary.png")
    print("\nWords, pictures, video and actions in one stream\n")
    stream(out=arguments.out / "stream.png")
    print("\nWhat models cost, without their weights\n")
    ledger(["llama-3.1-8b", "qwen3-235b-a22b", "smollm2-135m"], out=arguments.out / "ledger.png")
    print("\nScenes whose truth is known, and words about them\n")
    try:
        show("mixed", out=arguments.out / "scenes.png", count=12)
    except VitrailError as error:  # no network or no npm: the rest of the demo stands
        print(f"no scenes this time: {error}")
    print("\nA real language model, 15 million parameters\n")
    try:
        write("Once upon a time", tokens=80, seed=1)
    except VitrailError as error:  # no network or no npm: the rest of the demo stands
        print(f"no story this time: {error}")
    print(f"\nOpen {arguments.out / 'index.html'}, and look at the pictures beside it.")


if __name__ == "__main__":
    try:
        main()
    except VitrailError as error:
        raise SystemExit(f"demo: {error}") from None
