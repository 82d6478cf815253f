"""Simulators, opened: in this process, or in an environment of their own that is made when it is first needed.

Simulators want versions of packages that neither we nor each other can live with, so each has its own.
"""

import contextlib
import hashlib
import importlib
import importlib.metadata
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import venv
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from vitrail.data.episodes import player
from vitrail.data.episodes.worlds import WORLDS, World
from vitrail.data.sources.fetch import home, to_stderr
from vitrail.errors import DataError

HERE = Path(__file__).resolve().parent
PATIENCE = 60.0  # seconds that a simulator may take for an answer
PYTHON = Path("Scripts/python.exe") if os.name == "nt" else Path("bin/python")


class Simulator(Protocol):
    """What a file in `worlds/` holds. What is seen: `frame` uint8 (H, W, 3) and the world's tracks. A frame that is
    missing at the end was never shown."""

    def reset(self, seed: int) -> dict[str, np.ndarray]: ...

    def step(self, action: Any) -> tuple[dict[str, np.ndarray], float, bool]:
        """seen, reward, ended"""
        ...


def open_simulator(name: str, side: int) -> Simulator:
    """A world's simulator, ready for its first reset."""
    world = WORLDS[name]
    if not world.packages:
        module = importlib.import_module(f"vitrail.data.episodes.worlds.{world.file}")
        return module.Simulator(side, *world.options)
    return Remote(name, python_with(name, world), HERE / "worlds" / f"{world.file}.py", side, world.options)


def lasting(simulator: Simulator, action: Any, repeat: int) -> tuple[dict[str, np.ndarray], float, bool]:
    """An action held for as many steps as it lasts, or to the end: what is seen then, all rewards, whether it ended."""
    total = 0.0
    for _ in range(repeat):
        seen, reward, ended = simulator.step(action)
        total += reward
        if ended:
            break
    return seen, total, ended


class Remote:
    """A simulator in a process of its own."""

    def __init__(self, name: str, python: Path, file: Path, side: int, options: tuple[str, ...] = ()):
        self.name, self.due, self.late = name, math.inf, False  # when an answer is due, and whether one was late
        self.place = tempfile.TemporaryDirectory()  # some leave files where they are
        self.log = (Path(self.place.name) / "log").open("w+b")
        # A display is never there, and threads would be as many as there are cores for every worker.
        quiet = {"SDL_VIDEODRIVER": "dummy", "SDL_AUDIODRIVER": "dummy", "OMP_NUM_THREADS": "1"}
        if python != Path(sys.executable):
            quiet["PYTHONPATH"] = ""  # our packages are not its own
        self.process = subprocess.Popen(
            [str(python), "-P", str(HERE / "player.py"), str(file), str(side), *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            cwd=self.place.name,
            env={**os.environ, **quiet},
            start_new_session=True,  # so that it can be ended with whatever it has started
        )
        threading.Thread(target=self._watch, daemon=True).start()  # one for all answers: a timer for each costs more

    def reset(self, seed: int) -> dict[str, np.ndarray]:
        return self._ask({"seed": seed}, {})[0]

    def step(self, action: Any) -> tuple[dict[str, np.ndarray], float, bool]:
        return self._ask({}, {"action": np.asarray(action)})

    def _ask(self, about: dict[str, Any], arrays: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], float, bool]:
        pipes = self.process.stdin, self.process.stdout
        assert pipes[0] is not None and pipes[1] is not None
        self.due = time.monotonic() + PATIENCE
        try:
            player.send(pipes[0], about, arrays)  # pyrefly: ignore
            answer = player.receive(pipes[1])  # pyrefly: ignore
        except (BrokenPipeError, ValueError):
            answer = None
        finally:
            self.due = math.inf
        if self.late:
            raise DataError(
                f"the simulator of {self.name} has not answered for {PATIENCE:g} seconds",
                "give the command again: it goes on where it stopped",
            )
        if answer is None:
            raise DataError(f"the simulator of {self.name} has stopped: {self._last_words()}", "see what it says")
        return answer[1], answer[0]["reward"], answer[0]["ended"]

    def _last_words(self) -> str:
        self._leave()
        self.log.seek(0)
        lines = self.log.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"it left with {self.process.returncode}, without a word"

    def _watch(self) -> None:
        while self.process.poll() is None:
            time.sleep(min(1.0, PATIENCE))
            if time.monotonic() > self.due:
                self.late = True
                self.kill()

    def kill(self) -> None:
        """At once, even where it hangs."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL) if os.name == "posix" else self.process.kill()

    def close(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(BrokenPipeError):
                assert pipe is not None
                pipe.close()  # its cue to leave
        self._leave()
        self.log.close()
        self.place.cleanup()

    def _leave(self) -> None:
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.kill()
            self.process.wait()


_making = threading.Lock()


def python_with(name: str, world: World) -> Path:
    """The interpreter that has a world's packages: this one, or that of an environment, made if need be."""
    if all(_here(package) for package in world.packages):
        return Path(sys.executable)
    folder = _environment(world)
    with _making:
        if not folder.is_dir():
            to_stderr(f"making an environment for {name} ({', '.join(world.packages)}; licence {world.licence})")
            _make(name, world, folder)
    return (folder / PYTHON).absolute()


def installed(name: str) -> bool:
    """Whether a world's simulator can be opened with nothing fetched."""
    world = WORLDS[name]
    return all(_here(package) for package in world.packages) or _environment(world).is_dir()


def _environment(world: World) -> Path:
    wanted = "\n".join((*world.packages, sys.version.split()[0]))
    return home() / "worlds" / f"{world.file}-{hashlib.sha256(wanted.encode()).hexdigest()[:8]}"


def _make(name: str, world: World, folder: Path) -> None:
    """An environment appears whole or not at all; of two that are made at once one stays."""
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    try:
        venv.create(partial, clear=True, with_pip=True)
        pip = [partial / PYTHON, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *world.packages]
        done = subprocess.run(pip, capture_output=True, text=True)
        if done.returncode:
            said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["pip failed"]
            raise DataError(
                f"{name} needs {', '.join(world.packages)}: {said[-1]}",
                f"connect to the network and try again, or install here: pip install {' '.join(world.packages)}",
            )
        if not folder.is_dir():
            partial.replace(folder)
    except (OSError, subprocess.CalledProcessError) as error:
        raise DataError(
            f"no environment for {name} can be made in {folder.parent}: {error}",
            f"install Python's venv module, or install here: pip install {' '.join(world.packages)}",
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _here(package: str) -> bool:
    name, _, version = package.partition("==")
    try:
        return importlib.metadata.version(name.partition("[")[0]) == version
    except importlib.metadata.PackageNotFoundError:
        return False
