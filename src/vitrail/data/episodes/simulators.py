"""Opens simulators, in this process or in a separate environment that is created on first use.

Simulators require conflicting versions of packages, so each has its own environment.
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

from vitrail.data.episodes import simulator_server
from vitrail.data.episodes.worlds import WORLDS, World
from vitrail.data.sources.fetch import get_cache_folder, log_to_stderr
from vitrail.errors import DataError

EPISODES_FOLDER = Path(__file__).resolve().parent
TIMEOUT_SECONDS = 60.0  # seconds that a simulator may take to respond
PYTHON_PATH = Path("Scripts/python.exe") if os.name == "nt" else Path("bin/python")


class Simulator(Protocol):
    """Interface of the `Simulator` class in each file of `worlds/`.

    An observation holds `frame` uint8 (H, W, 3) and the world's tracks. The last frame is missing if it was not
    observed.
    """

    def reset(self, seed: int) -> dict[str, np.ndarray]: ...

    def step(self, action: Any) -> tuple[dict[str, np.ndarray], float, bool]:
        """Apply an action. Return observation, reward and whether the episode ended."""
        ...


def open_simulator(name: str, image_size: int) -> Simulator:
    """Open a world's simulator, ready for its first reset."""
    world = WORLDS[name]
    if not world.packages:
        module = importlib.import_module(f"vitrail.data.episodes.worlds.{world.module}")
        return module.Simulator(image_size, *world.options)
    return SimulatorProcess(
        name, find_python(name, world), EPISODES_FOLDER / "worlds" / f"{world.module}.py", image_size, world.options
    )


def step_repeated(simulator: Simulator, action: Any, frame_skip: int) -> tuple[dict[str, np.ndarray], float, bool]:
    """Repeat an action for `frame_skip` steps or until the end. Return the last observation, the summed reward, and the
    end."""
    total = 0.0
    for _ in range(frame_skip):
        observation, reward, terminated = simulator.step(action)
        total += reward
        if terminated:
            break
    return observation, total, terminated


class SimulatorProcess:
    """A simulator in a separate process."""

    def __init__(self, name: str, python: Path, file: Path, image_size: int, options: tuple[str, ...] = ()):
        # deadline of the next response, and whether one was missed
        self.name, self.deadline, self.timed_out = name, math.inf, False
        self.folder = tempfile.TemporaryDirectory()  # some simulators write files to their working directory
        self.log = (Path(self.folder.name) / "log").open("w+b")
        # There is no display. One thread each, since many workers run in parallel.
        environment = {"SDL_VIDEODRIVER": "dummy", "SDL_AUDIODRIVER": "dummy", "OMP_NUM_THREADS": "1"}
        if python != Path(sys.executable):
            environment["PYTHONPATH"] = ""  # vitrail's packages must not shadow the environment's
        self.process = subprocess.Popen(
            [str(python), "-P", str(EPISODES_FOLDER / "simulator_server.py"), str(file), str(image_size), *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            cwd=self.folder.name,
            env={**os.environ, **environment},
            start_new_session=True,  # so that its child processes can be killed with it
        )
        # one watchdog for all requests; a timer for each costs more
        threading.Thread(target=self._watch_deadline, daemon=True).start()

    def reset(self, seed: int) -> dict[str, np.ndarray]:
        return self._request({"seed": seed}, {})[0]

    def step(self, action: Any) -> tuple[dict[str, np.ndarray], float, bool]:
        return self._request({}, {"action": np.asarray(action)})

    def _request(
        self, request: dict[str, Any], arrays: dict[str, np.ndarray]
    ) -> tuple[dict[str, np.ndarray], float, bool]:
        pipes = self.process.stdin, self.process.stdout
        assert pipes[0] is not None and pipes[1] is not None
        self.deadline = time.monotonic() + TIMEOUT_SECONDS
        try:
            simulator_server.send_message(pipes[0], request, arrays)  # pyrefly: ignore
            response = simulator_server.receive_message(pipes[1])  # pyrefly: ignore
        except (BrokenPipeError, ValueError):
            response = None
        finally:
            self.deadline = math.inf
        if self.timed_out:
            raise DataError(
                f"the simulator of {self.name} has not responded for {TIMEOUT_SECONDS:g} seconds",
                "repeat the command: it continues where it stopped",
            )
        if response is None:
            raise DataError(
                f"the simulator of {self.name} has stopped: {self._last_log_line()}", "fix the cause that it logged"
            )
        return response[1], response[0]["reward"], response[0]["ended"]

    def _last_log_line(self) -> str:
        self._wait_for_exit()
        self.log.seek(0)
        lines = self.log.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"it exited with code {self.process.returncode} and no output"

    def _watch_deadline(self) -> None:
        while self.process.poll() is None:
            time.sleep(min(1.0, TIMEOUT_SECONDS))
            if time.monotonic() > self.deadline:
                self.timed_out = True
                self.kill()

    def kill(self) -> None:
        """Kill the process at once, even if it hangs."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL) if os.name == "posix" else self.process.kill()

    def close(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(BrokenPipeError):
                assert pipe is not None
                pipe.close()  # the process exits when its pipes close
        self._wait_for_exit()
        self.log.close()
        self.folder.cleanup()

    def _wait_for_exit(self) -> None:
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.kill()
            self.process.wait()


_environment_lock = threading.Lock()


def find_python(name: str, world: World) -> Path:
    """Return an interpreter that has a world's packages: this one, or that of an environment, created if needed."""
    if all(_is_available(package) for package in world.packages):
        return Path(sys.executable)
    folder = _environment_folder(world)
    with _environment_lock:
        if not folder.is_dir():
            log_to_stderr(f"creating an environment for {name} ({', '.join(world.packages)}; licence {world.licence})")
            _create_environment(name, world, folder)
    return (folder / PYTHON_PATH).absolute()


def is_installed(name: str) -> bool:
    """Whether a world's simulator can be opened without a download."""
    world = WORLDS[name]
    return all(_is_available(package) for package in world.packages) or _environment_folder(world).is_dir()


def find_requirements_file(world: World) -> Path:
    """Return the file of all packages of a world's environment, with versions and checksums."""
    return EPISODES_FOLDER / "worlds" / f"{world.module}.lock"


def _environment_folder(world: World) -> Path:
    """Folder of the environment of these packages and this Python version."""
    requirements = find_requirements_file(world).read_text(encoding="utf-8") + sys.version.split()[0]
    return get_cache_folder() / "worlds" / f"{world.module}-{hashlib.sha256(requirements.encode()).hexdigest()[:8]}"


def _create_environment(name: str, world: World, folder: Path) -> None:
    """Create an environment atomically. If two processes create it at once, one of them is kept."""
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    try:
        venv.create(partial, clear=True, with_pip=True)
        pip = [partial / PYTHON_PATH, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        pip += ["--require-hashes", "--no-deps", "--requirement", find_requirements_file(world)]
        result = subprocess.run(pip, capture_output=True, text=True)
        if result.returncode:
            errors = [line for line in result.stderr.splitlines() if line.startswith("ERROR")] or ["pip failed"]
            raise DataError(
                f"{name} needs {', '.join(world.packages)}: {errors[-1]}",
                f"connect to the network and try again, or install here: pip install {' '.join(world.packages)}",
            )
        if not folder.is_dir():
            partial.replace(folder)
    except (OSError, subprocess.CalledProcessError) as error:
        raise DataError(
            f"the environment for {name} cannot be created in {folder.parent}: {error}",
            f"install Python's venv module, or install here: pip install {' '.join(world.packages)}",
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _is_available(package: str) -> bool:
    """Whether this interpreter has a package in the required version."""
    name, _, version = package.partition("==")
    try:
        return importlib.metadata.version(name.partition("[")[0]) == version
    except importlib.metadata.PackageNotFoundError:
        return False
