"""Frames per second of `vitrail play` in Chromium, on the same CPU cores as the model.

    python perf/browser.py --out results.json                     # mini-world with 1, 2 and 3 steps a frame
    python perf/browser.py --out results.json --simulator coinrun    # with its simulator in the same page

No keys are pressed. The page requests frames at its highest rate, and its step number counts them.
"""

import shutil
import subprocess
import sys
import time

from playwright.sync_api import expect, sync_playwright
from record import make_parser, write_record

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SET_HIGHEST_RATE = (
    "() => { const r = document.querySelector('#rate'); r.value = r.max; r.dispatchEvent(new Event('input')); }"
)
WARMUP_MS = 3000
MEASURED = (
    *("vitrail.serve.play.game_session", "vitrail.serve.play.play_server", "vitrail.pipelines.world"),
    *("vitrail.generate.rollout", "vitrail.models.genie_model", "vitrail.nn.single_frame"),
)


def measure_fps(options: list[str], num_views: int, seconds: float) -> float:
    """Start `vitrail play` with these options, and count the frames of its page."""
    command = [sys.executable, "-m", "vitrail", "play", *options, "--no-open"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server, sync_playwright() as playwright:
        try:
            assert server.stdout is not None
            address = next(line for line in server.stdout if line.startswith("http")).split()[0]
            page = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"]).new_page()
            page.goto(address)
            expect(page.locator("canvas")).to_have_count(num_views, timeout=60_000)
            page.evaluate(SET_HIGHEST_RATE)
            page.wait_for_timeout(WARMUP_MS)

            def read_step() -> int:
                return int(page.locator("#step").text_content() or 0)

            first, start = read_step(), time.perf_counter()
            page.wait_for_timeout(1000 * seconds)
            return (read_step() - first) / (time.perf_counter() - start)
        finally:
            server.terminate()


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="mini-world")
    parser.add_argument("--simulator", help="a simulator in the same page")
    parser.add_argument("--passes", type=int, nargs="+", default=[1, 2, 3], help="decoding steps of a frame")
    parser.add_argument("--seconds", type=float, default=8)
    arguments = parser.parse_args()
    if CHROMIUM is None:
        parser.error("no Chromium is installed")
    simulator = [] if arguments.simulator is None else ["--world", arguments.simulator]
    figures: dict[str, float] = {}
    for passes in arguments.passes:
        options = [arguments.model, *simulator, "--steps", str(passes)]
        figures[f"{passes} passes"] = measure_fps(options, 1 + bool(simulator), arguments.seconds)
        print(f"{passes} passes: {figures[f'{passes} passes']:.1f} frames per second", flush=True)
    result = {"model": arguments.model, "simulator": arguments.simulator, "fps": figures}
    write_record(arguments.out, result, MEASURED)


if __name__ == "__main__":
    main()
