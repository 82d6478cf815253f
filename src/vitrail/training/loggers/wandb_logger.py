"""Weights & Biases. It runs offline unless WANDB_MODE or WANDB_API_KEY is set, so no account is needed."""

import os
import secrets
from importlib import import_module
from pathlib import Path
from typing import Any

from vitrail.registry import LOGGERS


@LOGGERS.register("wandb")
class WandbLogger:
    package = "wandb"

    def __init__(self, folder: Path, name: str, start_step: int):
        mode = os.environ.get("WANDB_MODE") or ("online" if os.environ.get("WANDB_API_KEY") else "offline")
        if mode == "offline":
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # offline mode would still send error reports
        wandb: Any = import_module("wandb")
        id_file = folder / "wandb.id"  # a resumed run keeps its id
        if not start_step or not id_file.exists():
            id_file.write_text(secrets.token_hex(8))
        self.run = wandb.init(
            project="vitrail",
            name=f"{folder.name}/{name}",
            id=id_file.read_text().strip(),
            dir=str(folder),
            mode=mode,
            resume="allow" if mode == "online" else None,  # offline runs cannot ask the server
        )

    def write_row(self, step: int, values: dict[str, float]) -> None:
        self.run.log(values, step=step)

    def flush(self) -> None:
        """Do nothing: wandb's own process writes its files."""

    def close(self) -> None:
        self.run.finish()
