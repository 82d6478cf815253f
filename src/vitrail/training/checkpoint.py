"""Atomic checkpoints: save, load, and remove old ones.

A checkpoint is a folder `step-00000100` with groups of tensors as safetensors and all other state as JSON. One process
writes one file per group, `model.safetensors`. With several ranks, each writes its shards to
`model-00001-of-00003.safetensors` and stores their locations in the header. To load, a rank reads the parts that
overlap with its own shards, so a run can resume with another number of ranks, and no tensor is ever gathered.

Files are written to a temporary folder, synced to disk, and renamed. A killed process leaves the previous checkpoint
and at most a partial folder, which the next start removes.
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
from torch import Tensor

from vitrail.errors import CheckpointError
from vitrail.training import distributed
from vitrail.training.parameter_names import check_state_matches
from vitrail.training.run_lock import check_run_lock
from vitrail.training.tensor_file_writer import write_tensor_file
from vitrail.training.tensor_shards import (
    Box,
    TensorShard,
    box_numel,
    full_box,
    get_local_shard,
    intersect_boxes,
    relative_slices,
)

STEP_PATTERN = re.compile(r"step-(\d{8})")
Tensors = Mapping[str, Tensor]
ShardGroups = Mapping[str, Mapping[str, TensorShard]]
T = TypeVar("T")


def list_steps(folder: Path) -> list[int]:
    """Return the steps that have a checkpoint, in ascending order."""
    found = (STEP_PATTERN.fullmatch(path.name) for path in folder.iterdir()) if folder.is_dir() else ()
    return sorted(int(match.group(1)) for match in found if match)


def get_checkpoint_path(folder: Path, step: int) -> Path:
    """Return the folder of the checkpoint of a step."""
    return folder / f"step-{step:08}"


# ---- writing ----------------------------------------------------------------------------------------------------


def save_checkpoint(
    folder: Path, step: int, groups: Mapping[str, Tensors], state: dict[str, Any], keep_last: int = 2
) -> Path:
    """Save a checkpoint and delete all but the newest `keep_last`. All ranks must call it; each saves its shards."""
    return write_checkpoint(folder, step, collect_shards(groups), state, keep_last)


def collect_shards(groups: Mapping[str, Tensors]) -> ShardGroups:
    """Return the shards that this rank writes, without a copy."""
    rank = distributed.get_rank()
    held = {group: {k: get_local_shard(x, rank) for k, x in tensors.items()} for group, tensors in groups.items()}
    return {
        group: {
            k: p for k, p in shards.items() if p.is_writer and (box_numel(p.box) or not box_numel(full_box(p.shape)))
        }
        for group, shards in held.items()
    }


def write_checkpoint(
    folder: Path,
    step: int,
    shards: ShardGroups,
    state: dict[str, Any],
    keep_last: int = 2,
    exchange: distributed.GatherFn | None = None,
) -> Path:
    """Write shards to a checkpoint and delete all but the newest `keep_last`. All ranks must call it.

    `exchange` gathers an object of every rank; a thread needs one that does not disturb the collectives of training.
    """
    final, partial, first = (
        get_checkpoint_path(folder, step),
        folder / f".partial-{step:08}",
        distributed.get_rank() == 0,
    )
    try:
        _run_on_all_ranks(lambda: _create_partial_folder(partial) if first else None, exchange)
        files = {
            name: info
            for files in _run_on_all_ranks(lambda: _write_files(partial, shards), exchange)
            for name, info in files.items()
        }
        _run_on_all_ranks(lambda: _publish(partial, final, {**state, "files": files}) if first else None, exchange)
    except _RankFailedError as error:
        if first:
            shutil.rmtree(partial, ignore_errors=True)
        saved = list_steps(folder)
        raise CheckpointError(
            f"the checkpoint of step {step} could not be saved to {folder}: {error}",
            f"free disk space and start the same command again; it resumes from step {saved[-1]}"
            if saved
            else "free disk space and start the same command again",
        ) from error
    if first:
        for old in list_steps(folder)[:-keep_last]:
            get_checkpoint_path(folder, old).rename(folder / f".old-{old:08}")
        remove_partial_checkpoints(folder)
    return final


def _create_partial_folder(partial: Path) -> None:
    check_run_lock(partial)
    partial.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()


def _write_files(partial: Path, shards: ShardGroups) -> dict[str, dict[str, Any]]:
    """Write this rank's files. Returns name → group, size and checksum."""
    rank, ranks, files = distributed.get_rank(), distributed.get_world_size(), {}
    for group, held in shards.items():
        places = {
            name: {"shape": p.shape, "start": [rows.start for rows in p.box]}
            for name, p in held.items()
            if p.box != full_box(p.shape)
        }
        path = partial / (f"{group}.safetensors" if ranks == 1 else f"{group}-{rank:05}-of-{ranks:05}.safetensors")
        written = write_tensor_file(
            path,
            {name: p.values.detach().cpu() for name, p in held.items()},
            {"places": json.dumps(places)} if places else None,
        )
        files[path.name] = {"group": group, "bytes": written.size, "sha256": written.sha256}
    return files


def _publish(partial: Path, final: Path, state: dict[str, Any]) -> None:
    missing = [name for name in state["files"] if not (partial / name).is_file()]
    if missing:
        raise OSError(f"{missing[0]}, written by another rank, is missing: the ranks do not share this folder")
    (partial / "state.json").write_text(json.dumps(state, indent=1))
    _fsync_path(partial / "state.json")
    _fsync_path(partial)
    check_run_lock(final)
    if final.exists():  # the step was saved before the run resumed from an earlier one; both are equal
        shutil.rmtree(partial)
    else:
        partial.rename(final)
    _fsync_path(final.parent)


def set_aside(path: Path) -> Path:
    """Rename a damaged checkpoint, so that training can save that step again."""
    target = path.with_name(f"damaged-{path.name}")
    shutil.rmtree(target, ignore_errors=True)
    return path.rename(target)


# ---- reading ----------------------------------------------------------------------------------------------------


def read_checkpoint_state(path: Path) -> dict[str, Any]:
    """Return the saved state other than tensors, and the list of tensor files. All ranks must call it."""
    with _name_checkpoint_in_errors(path):
        return _run_on_all_ranks(lambda: _read_state(path))[0]


def load_checkpoint(path: Path, groups: Mapping[str, Tensors]) -> None:
    """Load a checkpoint into the tensors of `groups`, in place. All ranks must call it; each loads its shards.

    One rank verifies each file before any tensor is loaded.
    """
    files = list(read_checkpoint_state(path)["files"].items())
    with _name_checkpoint_in_errors(path):
        _run_on_all_ranks(lambda: _check_files(path, files[distributed.get_rank() :: distributed.get_world_size()]))
        for group, tensors in groups.items():
            names = [name for name, info in files if info.get("group") == group]
            _run_on_all_ranks(
                lambda group=group, names=names, tensors=tensors: _fill_tensors(path, group, names, tensors)
            )


@contextmanager
def _name_checkpoint_in_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except _RankFailedError as error:
        raise CheckpointError(
            f"checkpoint {path} cannot be read: {error}", "restore it from a copy, or start a new run (another --out)"
        ) from error


def _read_state(path: Path) -> dict[str, Any]:
    state = json.loads((path / "state.json").read_text())
    if not isinstance(state, dict) or not isinstance(state.get("files"), dict):
        raise ValueError("state.json has no list of files")
    if get_checkpoint_path(path.parent, state.get("step", -1)) != path:
        raise ValueError(f"state.json belongs to step {state.get('step')}")
    return state


def _check_files(path: Path, files: list[tuple[str, dict[str, Any]]]) -> None:
    for name, info in files:
        if not (path / name).is_file():
            raise OSError(f"{name} is missing")
        if (size := (path / name).stat().st_size) != info.get("bytes"):
            raise OSError(f"{name} has {size} bytes, not the {info.get('bytes')} that were saved")
        if _compute_sha256(path / name) != info.get("sha256"):
            raise OSError(f"{name} was changed after it was saved")


@torch.no_grad()
def _fill_tensors(path: Path, group: str, files: list[str], tensors: Tensors) -> None:
    """Copy into each tensor the saved parts that overlap with this rank's shard."""
    with ExitStack() as opened:
        saved: dict[str, list[tuple[Any, Box]]] = {}
        shapes: dict[str, Tensor] = {}
        for name in files:
            file = opened.enter_context(safe_open(path / name, "pt"))
            places = json.loads((file.metadata() or {}).get("places", "{}"))
            for key in file.keys():  # noqa: SIM118, not a mapping
                size = file.get_slice(key).get_shape()
                place = places.get(key, {"shape": size, "start": [0] * len(size)})
                box = tuple(range(a, a + n) for a, n in zip(place["start"], size, strict=True))
                saved.setdefault(key, []).append((file, box))
                shapes[key] = torch.empty(place["shape"], device="meta")
        check_state_matches(f"{group} tensors", shapes, tensors)
        for key, tensor in tensors.items():
            own, loaded = get_local_shard(tensor, distributed.get_rank()), 0
            for file, box in saved[key]:
                overlap = intersect_boxes(box, own.box)
                if box_numel(overlap):
                    values = (
                        file.get_tensor(key) if overlap == box else file.get_slice(key)[relative_slices(overlap, box)]
                    )
                    own.values[relative_slices(overlap, own.box)].copy_(values)
                loaded += box_numel(overlap)
            if loaded != box_numel(own.box):
                raise ValueError(f"{group} tensor {key} has {loaded} of {box_numel(own.box)} elements")


# ---- agreement between ranks -------------------------------------------------------------------------------------


class _RankFailedError(Exception):
    """Failure on this rank or another."""


def _run_on_all_ranks(act: Callable[[], T], exchange: distributed.GatherFn | None = None) -> list[T]:
    """Run `act` on every rank and return all results. If it fails on one rank, raise on all of them."""
    result: Any = None
    cause: Exception | None = None
    try:
        result = act()
    except Exception as error:  # any error: the other ranks must be told
        cause = error
    exchange = exchange or distributed.gather_objects
    outcomes = exchange((result, "" if cause is None else str(cause) or type(cause).__name__))
    if cause is not None and not isinstance(cause, (OSError, ValueError, SafetensorError)):
        raise cause
    for rank, (_, message) in enumerate(outcomes):
        if message:
            raise _RankFailedError(
                message if distributed.get_world_size() == 1 else f"rank {rank}: {message}"
            ) from cause
    return [result for result, _ in outcomes]


def remove_partial_checkpoints(folder: Path) -> None:
    """Remove partial checkpoints that a killed process left."""
    if folder.is_dir():
        for path in folder.glob(".*-*"):
            shutil.rmtree(path, ignore_errors=True)


def _compute_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fsync_path(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
