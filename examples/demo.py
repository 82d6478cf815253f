"""`make demo`: write images and a page (index.html) that demonstrate Vitrail to out/demo.

The default photographs come from the scikit-image package. `--image` replaces them.
"""

import argparse
from importlib.util import find_spec
from pathlib import Path

from vitrail.cli.data_command import draw_dataset
from vitrail.cli.demo_command import write_demo_page
from vitrail.cli.grid_command import draw_grids
from vitrail.cli.ledger_command import print_ledger
from vitrail.cli.rotary_command import draw_rotary_layouts
from vitrail.cli.stream_command import draw_streams
from vitrail.cli.write_command import generate_text
from vitrail.errors import VitrailError


def find_photographs() -> list[Path]:
    """Return three photographs of the scikit-image package."""
    package = find_spec("skimage")
    if package is None or package.origin is None:
        raise SystemExit("no photographs: pip install scikit-image, or give your own with --image")
    folder = Path(package.origin).parent / "data"
    return [folder / name for name in ("rocket.jpg", "page.png", "chelsea.png")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/demo"))
    parser.add_argument("--image", type=Path, action="append", help="an image of your own; may be repeated")
    parser.add_argument("--model", help="folder of a unified model (default: mini)")
    arguments = parser.parse_args()
    print("Demo page of a unified model\n")
    write_demo_page(model=arguments.model, image=tuple(map(str, arguments.image or ())), out=arguments.out)
    print("\nTokens of an image under every resolution policy\n")
    draw_grids(arguments.image or find_photographs(), out=arguments.out / "grid")
    print("\nRotary layouts: axis and frequency of every channel\n")
    draw_rotary_layouts(out=arguments.out / "rotary.png")
    print("\nA token stream of text, images, video and actions\n")
    draw_streams(out=arguments.out / "stream.png")
    print("\nCost of three language models\n")
    print_ledger(["llama-3.1-8b", "qwen3-235b-a22b", "smollm2-135m"], out=arguments.out / "ledger.png")
    print("\nGenerated scenes with captions and questions\n")
    try:
        draw_dataset("mixed", out=arguments.out / "scenes.png", count=12)
    except VitrailError as error:  # such as no network, or no npm
        print(f"skipped: {error}")
    print("\nText of a language model with 15 million parameters\n")
    try:
        generate_text("Once upon a time", max_new_tokens=80, seed=1)
    except VitrailError as error:  # such as no network, or no npm
        print(f"skipped: {error}")
    print(f"\nOpen {arguments.out / 'index.html'}. Its folder contains the images.")


if __name__ == "__main__":
    try:
        main()
    except VitrailError as error:
        raise SystemExit(f"demo: {error}") from None
