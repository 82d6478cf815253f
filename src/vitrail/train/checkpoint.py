"""Checkpoints that are whole or not there.

A checkpoint is a folder `step-00000100`: groups of tensors as safetensors, the rest as JSON. One process writes a file
a group, `model.safetensors`. Of many each writes the pieces it holds, `model-00001-of-00003.safetensors`, with their
places in the header, and reads whatever overlaps with the pieces it holds then: a shared-out tensor is nowhere put
together, and any number of ranks can go on. All is written under another name, brought to the disk, and renamed; a
process killed at any instant leaves the old one and at most a leftover that the next start sweeps away.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from vitrail.errors import CheckpointError
from vitrail.train import distributed
from vitrail.train.names import refuse_other
from vitrail.train.pieces import Box, inside, piece, shared, volume, whole

STEP = re.compile(r"step-(\d{8})")
Tensors = Mapping[str, Tensor]
T = TypeVar("T")


def steps(folder: Path) -> list[int]:
    """The steps that have a checkpoint, in order."""
    found = (STEP.fullmatch(path.name) for path in folder.iterdir()) if folder.is_dir() else ()
    return sorted(int(match.group(1)) for match in found if match)


def path_of(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08}"


# ---- writing ----------------------------------------------------------------------------------------------------


def save(folder: Path, step: int, groups: Mapping[str, Tensors], state: dict[str, Any], keep: int = 2) -> Path:
    """Write a checkpoint, every rank its pieces, and drop all but the newest `keep`. All ranks must call it."""
    final, partial, first = path_of(folder, step), folder / f".partial-{step:08}", distributed.rank() == 0
    try:
        _together(lambda: _begin(partial) if first else None)
        files = {name: about for told in _together(lambda: _write(partial, groups)) for name, about in told.items()}
        _together(lambda: _publish(partial, final, {**state, "files": files}) if first else None)
    except _Failed as error:
        if first:
            shutil.rmtree(partial, ignore_errors=True)
        kept = steps(folder)
        raise CheckpointError(
            f"the checkpoint of step {step} could not be written to {folder}: {error}",
            f"make room and start the same command again; it goes on from step {kept[-1]}"
            if kept
            else "make room and start the same command again",
        ) from error
    if first:
        for old in steps(folder)[:-keep]:
            path_of(folder, old).rename(folder / f".old-{old:08}")
        sweep(folder)
    return final


def _begin(partial: Path) -> None:
    partial.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()


def _write(partial: Path, groups: Mapping[str, Tensors]) -> dict[str, dict[str, Any]]:
    """This rank's files: name → size and checksum."""
    rank, ranks, files = distributed.rank(), distributed.size(), {}
    for group, tensors in groups.items():
        held = {name: piece(tensor, rank) for name, tensor in tensors.items()}
        held = {name: p for name, p in held.items() if p.keeps and (volume(p.box) or not volume(whole(p.shape)))}
        places = {
            name: {"shape": p.shape, "start": [rows.start for rows in p.box]}
            for name, p in held.items()
            if p.box != whole(p.shape)
        }
        path = partial / (f"{group}.safetensors" if ranks == 1 else f"{group}-{rank:05}-of-{ranks:05}.safetensors")
        save_file(
            {name: p.numbers.cpu().contiguous() for name, p in held.items()},
            path,
            metadata={"places": json.dumps(places)} if places else None,
        )
        _to_disk(path)
        files[path.name] = {"group": group, "bytes": path.stat().st_size, "sha256": _checksum(path)}
    return files


def _publish(partial: Path, final: Path, state: dict[str, Any]) -> None:
    lost = [name for name in state["files"] if not (partial / name).is_file()]
    if lost:
        raise OSError(f"{lost[0]}, written by another rank, is not there: the ranks do not share this folder")
    (partial / "state.json").write_text(json.dumps(state, indent=1))
    _to_disk(partial / "state.json")
    _to_disk(partial)
    if final.exists():  # the same step again, after going back: it is the same, and whole
        shutil.rmtree(partial)
    else:
        partial.rename(final)
    _to_disk(final.parent)


# ---- reading ----------------------------------------------------------------------------------------------------


def state(path: Path) -> dict[str, Any]:
    """What was saved beside the tensors, and the files they are in. All ranks must call it, and are told the same."""
    with _named(path):
        return _together(lambda: _read_state(path))[0]


def load(path: Path, groups: Mapping[str, Tensors]) -> None:
    """Fill the live tensors of `groups` with what was saved, each rank what it holds. All ranks must call it.

    Every file is checked by one of them before any number is taken.
    """
    files = list(state(path)["files"].items())
    with _named(path):
        _together(lambda: _check(path, files[distributed.rank() :: distributed.size()]))
        for group, tensors in groups.items():
            its = [name for name, about in files if about.get("group") == group]
            _together(lambda group=group, its=its, tensors=tensors: _fill(path, group, its, tensors))


@contextmanager
def _named(path: Path) -> Iterator[None]:
    try:
        yield
    except _Failed as error:
        raise CheckpointError(
            f"checkpoint {path} cannot be read: {error}", "delete that folder; the one before it is used then"
        ) from error


def _read_state(path: Path) -> dict[str, Any]:
    found = json.loads((path / "state.json").read_text())
    if not isinstance(found, dict) or not isinstance(found.get("files"), dict):
        raise ValueError("state.json does not say which files belong to it")
    if path_of(path.parent, found.get("step", -1)) != path:
        raise ValueError(f"state.json is that of step {found.get('step')}")
    return found


def _check(path: Path, files: list[tuple[str, dict[str, Any]]]) -> None:
    for name, about in files:
        if not (path / name).is_file():
            raise OSError(f"{name} is missing")
        if (size := (path / name).stat().st_size) != about.get("bytes"):
            raise OSError(f"{name} holds {size} bytes, not the {about.get('bytes')} that were written")
        if _checksum(path / name) != about.get("sha256"):
            raise OSError(f"{name} was changed after it was written")


@torch.no_grad()
def _fill(path: Path, group: str, files: list[str], tensors: Tensors) -> None:
    """Copy, piece by piece, what this rank holds of every tensor."""
    with ExitStack() as opened:
        saved: dict[str, list[tuple[Any, Box]]] = {}
        shapes: dict[str, Tensor] = {}
        for name in files:
            file = opened.enter_context(safe_open(path / name, "pt"))
            places = json.loads((file.metadata() or {}).get("places", "{}"))
            for key in file.keys():  # noqa: SIM118, it is no mapping
                size = file.get_slice(key).get_shape()
                place = places.get(key, {"shape": size, "start": [0] * len(size)})
                box = tuple(range(a, a + n) for a, n in zip(place["start"], size, strict=True))
                saved.setdefault(key, []).append((file, box))
                shapes[key] = torch.empty(place["shape"], device="meta")
        refuse_other(f"{group} tensors", shapes, tensors)
        for key, tensor in tensors.items():
            own, found = piece(tensor, distributed.rank()), 0
            for file, box in saved[key]:
                both = shared(box, own.box)
                if volume(both):
                    numbers = file.get_tensor(key) if both == box else file.get_slice(key)[inside(both, box)]
                    own.numbers[inside(both, own.box)].copy_(numbers)
                found += volume(both)
            if found != volume(own.box):
                raise ValueError(f"of {key} in {group} {found} of {volume(own.box)} numbers are there")


# ---- with the other ranks ---------------------------------------------------------------------------------------


class _Failed(Exception):
    """What went wrong, on this rank or another."""


def _together(act: Callable[[], T]) -> list[T]:
    """What `act` gives on every rank. Failed on one, it fails on all: none waits for a rank that has given up."""
    done: Any = None
    cause: Exception | None = None
    try:
        done = act()
    except Exception as error:  # of whatever kind: the others must hear of it
        cause = error
    outcomes = distributed.gather((done, "" if cause is None else str(cause) or type(cause).__name__))
    if cause is not None and not isinstance(cause, (OSError, ValueError, SafetensorError)):
        raise cause
    for rank, (_, wrong) in enumerate(outcomes):
        if wrong:
            raise _Failed(wrong if distributed.size() == 1 else f"rank {rank}: {wrong}") from cause
    return [done for done, _ in outcomes]


def sweep(folder: Path) -> None:
    """Remove what a killed process left behind."""
    if folder.is_dir():
        for path in folder.glob(".*-*"):
            shutil.rmtree(path, ignore_errors=True)


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
