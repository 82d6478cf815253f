"""Checkpoints that are whole or not there.

A checkpoint is a folder `step-00000100`: weights, optimizer and random states as safetensors, the rest as JSON. It is
written under another name, brought to the disk, and renamed; a process killed at any instant leaves the old one and at
most a leftover that the next start sweeps away.
"""

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from vitrail.errors import CheckpointError

STEP = re.compile(r"step-(\d{8})")
Tensors = Mapping[str, Tensor]


def steps(folder: Path) -> list[int]:
    """The steps that have a checkpoint, in order."""
    found = (STEP.fullmatch(path.name) for path in folder.iterdir()) if folder.is_dir() else ()
    return sorted(int(match.group(1)) for match in found if match)


def path_of(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08}"


def save(folder: Path, step: int, groups: Mapping[str, Tensors], state: dict[str, Any], keep: int = 2) -> Path:
    """Write a checkpoint and drop all but the newest `keep`."""
    final, partial = path_of(folder, step), folder / f".partial-{step:08}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        for name, tensors in groups.items():
            save_file({k: v.detach().cpu().contiguous() for k, v in tensors.items()}, partial / f"{name}.safetensors")
        (partial / "state.json").write_text(json.dumps(state, indent=1))
        for file in partial.iterdir():
            _to_disk(file)
        _to_disk(partial)
        if final.exists():  # the same step again, after going back: it is the same, and whole
            shutil.rmtree(partial)
        else:
            partial.rename(final)
        _to_disk(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        kept = steps(folder)
        raise CheckpointError(
            f"the checkpoint of step {step} could not be written to {folder}: {error}",
            f"make room and start the same command again; it goes on from step {kept[-1]}"
            if kept
            else "make room and start the same command again",
        ) from error
    for old in steps(folder)[:-keep]:
        path_of(folder, old).rename(folder / f".old-{old:08}")
    sweep(folder)
    return final


def load(path: Path) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """The groups of tensors and the state of a checkpoint."""
    try:
        groups = {file.stem: load_file(file) for file in sorted(path.glob("*.safetensors"))}
        return groups, json.loads((path / "state.json").read_text())
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(
            f"checkpoint {path} cannot be read: {error}", "delete that folder; the one before it is used then"
        ) from error


def sweep(folder: Path) -> None:
    """Remove what a killed process left behind."""
    if folder.is_dir():
        for path in folder.glob(".*-*"):
            shutil.rmtree(path, ignore_errors=True)


def random_states() -> dict[str, Tensor]:
    """The generators a step may draw from."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_random_states(states: Tensors) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def _to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def rows_until(file: Path, step: int) -> Iterator[str]:
    """The lines of a log up to a step: what a killed run wrote past its checkpoint is told again, not twice."""
    if not file.exists():
        return
    for line in file.read_text().splitlines():
        try:
            if json.loads(line)["step"] <= step:
                yield line
        except (ValueError, KeyError, TypeError):
            return  # a line cut short by the kill is the last
