"""Frames a second that reach a player: `vitrail play` in a real Chromium on the same cores, as fast as it goes.

    python perf/browser.py --out results.json                     # mini-world, 1, 2 and 3 passes a frame
    python perf/browser.py --out results.json --beside coinrun    # and its simulator in the same page

Nothing is pressed: time goes on by itself, at the page's highest rate. Frames are counted by the page's step number.
"""

import argparse
import shutil
import subprocess
import sys
import time
from pathlib import Path

from playwright.sync_api import expect, sync_playwright
from record import record

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FASTEST = "() => { const r = document.querySelector('#rate'); r.value = r.max; r.dispatchEvent(new Event('input')); }"
WARM = 3000  # milliseconds
MEASURED = (
    *(f"vitrail.play.{name}" for name in ("game", "server", "playground")),
    *("vitrail.generate.rollout", "vitrail.models.genie", "vitrail.nn.one_frame"),
)


def frames_a_second(words: list[str], views: int, seconds: float) -> float:
    command = [sys.executable, "-m", "vitrail.cli", "play", *words, "--no-open"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server, sync_playwright() as play:
        try:
            assert server.stdout is not None
            address = next(line for line in server.stdout if line.startswith("http")).split()[0]
            page = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"]).new_page()
            page.goto(address)
            expect(page.locator("canvas")).to_have_count(views, timeout=60_000)
            page.evaluate(FASTEST)
            page.wait_for_timeout(WARM)

            def step() -> int:
                return int(page.locator("#step").text_content() or 0)

            first, begun = step(), time.perf_counter()
            page.wait_for_timeout(1000 * seconds)
            return (step() - first) / (time.perf_counter() - begun)
        finally:
            server.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="mini-world")
    parser.add_argument("--beside", help="a simulator in the same page")
    parser.add_argument("--passes", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--seconds", type=float, default=8)
    arguments = parser.parse_args()
    if CHROMIUM is None:
        parser.error("no Chromium is installed")
    beside = [] if arguments.beside is None else ["--world", arguments.beside]
    figures: dict[str, float] = {}
    for passes in arguments.passes:
        words = [arguments.model, *beside, "--steps", str(passes)]
        figures[f"{passes} passes"] = frames_a_second(words, 1 + bool(beside), arguments.seconds)
        print(f"{passes} passes: {figures[f'{passes} passes']:.1f} frames a second", flush=True)
    record(arguments.out, {"model": arguments.model, "beside": arguments.beside, "fps": figures}, *MEASURED)


if __name__ == "__main__":
    main()
