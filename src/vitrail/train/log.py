"""What a run says: a bar for people, JSON lines always, TensorBoard and Weights & Biases where installed.

Weights & Biases writes files and sends nothing unless WANDB_MODE or WANDB_API_KEY says so: nobody is asked for an
account.
"""

import json
import os
import secrets
import sys
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from tqdm import tqdm

from vitrail.errors import TrainError


class Board(Protocol):
    """Where the rows of a log are drawn."""

    def row(self, step: int, values: dict[str, float]) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    def __init__(self, folder: Path, name: str, start: int):
        board: Any = import_module("torch.utils.tensorboard")
        # Events from this step on, told by a process that was killed, are hidden: they are told again.
        self.writer = board.SummaryWriter(str(folder / "tensorboard" / name), purge_step=start + 1)

    def row(self, step: int, values: dict[str, float]) -> None:
        for key, value in values.items():
            self.writer.add_scalar(key, value, step)

    def flush(self) -> None:
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class WeightsAndBiases:
    def __init__(self, folder: Path, name: str, start: int):
        mode = os.environ.get("WANDB_MODE") or ("online" if os.environ.get("WANDB_API_KEY") else "offline")
        if mode == "offline":
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # which it would send all the same
        wandb: Any = import_module("wandb")
        kept = folder / "wandb.id"  # one run, however often it is started
        if not start or not kept.exists():
            kept.write_text(secrets.token_hex(8))
        self.run = wandb.init(
            project="vitrail",
            name=f"{folder.name}/{name}",
            id=kept.read_text().strip(),
            dir=str(folder),
            mode=mode,
            resume="allow" if mode == "online" else None,  # without the server there is nothing to ask
        )

    def row(self, step: int, values: dict[str, float]) -> None:
        self.run.log(values, step=step)

    def flush(self) -> None:
        """Its own process writes what it is told."""

    def close(self) -> None:
        self.run.finish()


BOARDS: dict[str, Callable[[Path, str, int], Board]] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}
"""package → what it draws with"""


class Log:
    """One run's log. Rows past the step it goes on from are dropped, so that a resumed curve is one curve."""

    def __init__(self, folder: Path, name: str, start: int, steps: int, quiet: bool = False, speaks: bool = True):
        self.speaks = speaks  # of many ranks one does
        self.boards: dict[str, Board] = {}
        self.bar = tqdm(
            total=steps,
            initial=start,
            desc=name,
            unit="step",
            disable=True if quiet or not speaks else None,
            file=sys.stderr,
            dynamic_ncols=True,
        )
        if not speaks:
            return
        folder.mkdir(parents=True, exist_ok=True)
        self.file = folder / "log.jsonl"
        kept = list(_rows_until(self.file, start))
        partial = self.file.with_suffix(".partial")
        partial.write_text("".join(line + "\n" for line in kept))
        partial.replace(self.file)
        self.stream = self.file.open("a", buffering=1)
        for package, make in BOARDS.items():
            if find_spec(package) is not None:
                self._try(package, lambda p=package, m=make: self.boards.update({p: m(folder, name, start)}))

    def row(self, step: int, values: dict[str, float]) -> None:
        if self.speaks:
            try:
                self.stream.write(json.dumps({"step": step, **values}) + "\n")
            except OSError as error:
                raise TrainError(
                    f"step {step} could not be written to {self.file}: {error}",
                    "make room and start the same command again; it goes on from the last checkpoint",
                ) from error
        self._all(lambda board: board.row(step, values))

    def flush(self) -> None:
        """Before a checkpoint: what led up to it must be found by the run that goes on from it."""
        self._all(lambda board: board.flush())

    def tick(self, shown: dict[str, str]) -> None:
        self.bar.set_postfix(shown, refresh=False)
        self.bar.update()

    def say(self, text: str) -> None:
        if not self.bar.disable:
            self.bar.write(text, file=sys.stderr)

    def close(self) -> None:
        self.bar.close()
        if self.speaks:
            self.stream.close()
        self._all(lambda board: board.close())

    def _all(self, act: Callable[[Board], None]) -> None:
        for package, board in list(self.boards.items()):
            self._try(package, lambda b=board: act(b))

    def _try(self, package: str, act: Callable[[], None]) -> None:
        """A board that fails, in whatever way, is said once and done without: the run matters more."""
        try:
            act()
        except Exception as error:
            self.boards.pop(package, None)
            warnings.warn(
                f"{package} is installed and fails ({type(error).__name__}: {error}); the run goes on without it, "
                "and log.jsonl has every row",
                stacklevel=2,
            )


def _rows_until(file: Path, step: int) -> Iterator[str]:
    """The lines of a log up to a step: what a killed run wrote past its checkpoint is told again, not twice."""
    if not step or not file.exists():  # a run that begins has no past, though one that never got far may have written
        return
    for line in file.read_text().splitlines():
        try:
            if json.loads(line)["step"] <= step:
                yield line
        except (ValueError, KeyError, TypeError):
            return  # a line cut short by the kill is the last
