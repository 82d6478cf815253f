"""TensorBoard: event files in the folder `tensorboard` of a run."""

from importlib import import_module
from pathlib import Path
from typing import Any

from vitrail.registry import LOGGERS


@LOGGERS.register("tensorboard")
class TensorBoardLogger:
    package = "tensorboard"

    def __init__(self, folder: Path, name: str, start_step: int):
        board: Any = import_module("torch.utils.tensorboard")
        # Hide events after the start step that a killed process wrote: the resumed run writes them again.
        self.writer = board.SummaryWriter(str(folder / "tensorboard" / name), purge_step=start_step + 1)

    def write_row(self, step: int, values: dict[str, float]) -> None:
        for key, value in values.items():
            self.writer.add_scalar(key, value, step)

    def flush(self) -> None:
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()
