"""What a run says: a bar for people, JSON lines always, TensorBoard and Weights & Biases where installed."""

import json
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tqdm import tqdm

from vitrail.train.checkpoint import rows_until


class Log:
    """One run's log. Rows past the step it goes on from are dropped, so that a resumed curve is one curve."""

    def __init__(self, folder: Path, name: str, start: int, steps: int, quiet: bool = False, speaks: bool = True):
        self.speaks = speaks  # of many ranks one does
        self.board: Any = None
        self.wandb: Any = None
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
        kept = list(rows_until(self.file, start))
        partial = self.file.with_suffix(".partial")
        partial.write_text("".join(line + "\n" for line in kept))
        partial.replace(self.file)
        self.stream = self.file.open("a", buffering=1)
        if find_spec("tensorboard") is not None:
            board: Any = import_module("torch.utils.tensorboard")
            self.board = board.SummaryWriter(str(folder / "tensorboard" / name), purge_step=start + 1)
        if find_spec("wandb") is not None:
            wandb: Any = import_module("wandb")
            self.wandb = wandb.init(project="vitrail", name=f"{folder.name}/{name}", dir=str(folder), resume="allow")

    def row(self, step: int, values: dict[str, float]) -> None:
        if not self.speaks:
            return
        self.stream.write(json.dumps({"step": step, **values}) + "\n")
        if self.board is not None:
            for key, value in values.items():
                self.board.add_scalar(key, value, step)
        if self.wandb is not None:
            self.wandb.log(values, step=step)

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
        if self.board is not None:
            self.board.close()
        if self.wandb is not None:
            self.wandb.finish()
