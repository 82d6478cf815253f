"""Models in folders: our own format, and Hugging Face's in both directions."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from vitrail import __version__
from vitrail.config import Config
from vitrail.errors import CheckpointError
from vitrail.hub.families import FAMILIES, MODELS, Family
from vitrail.hub.files import Weights, read_json, write_json, write_weights
from vitrail.hub.maps import Move
from vitrail.nn import Rotary
from vitrail.processing.text import Tokenizer

OWN = "vitrail.json"


def load(name_or_path: str | Path, *, dtype: torch.dtype | None = None, device: str = "cpu") -> Any:
    """A model from a folder of ours or of Hugging Face's, or from a hub id.

    Weights keep the type they are stored in unless `dtype` is given.
    """
    folder = Path(name_or_path)
    if not (folder / OWN).exists():
        return from_hf(name_or_path, dtype=dtype, device=device)
    about = read_json(folder / OWN)
    kind = about.get("kind")
    if kind not in MODELS:
        raise CheckpointError(f"{folder / OWN} is of the unknown kind {kind!r}", f"known: {', '.join(MODELS)}")
    config_class, model_class = MODELS[kind]
    with torch.device("meta"):
        model = model_class(config_class.read(about.get("config", {})))
    weights = Weights(folder)
    return _fill(model, ((name, weights[name]) for name in weights), folder, dtype, device)


def save(model: nn.Module, folder: str | Path, tokenizer: Tokenizer | None = None) -> None:
    """Write a model that `load` reads: vitrail.json (its kind and config) and safetensors."""
    kind = next((kind for kind, (_, cls) in MODELS.items() if type(model) is cls), None)
    if kind is None:
        raise CheckpointError(f"{type(model).__name__} is not a kind that can be saved", f"known: {', '.join(MODELS)}")
    folder, config = Path(folder), cast(Config, model.config)
    write_weights(folder, model.state_dict().items())
    write_json(folder / OWN, {"kind": kind, "vitrail": __version__, "config": config.plain()})
    if tokenizer is not None:
        tokenizer.save(folder)


def from_hf(path_or_id: str | Path, *, dtype: torch.dtype | None = None, device: str = "cpu") -> Any:
    """A model from a Hugging Face folder or hub id."""
    folder = _folder(path_or_id)
    about = read_json(folder / "config.json")
    family = _family_named(about.get("model_type"), folder)
    config = family.read(about)
    with torch.device("meta"):
        model = family.model(config)
    moves = family.moves(config)
    weights = Weights(folder)
    return _fill(model, _pull(weights, moves, family), folder, dtype, device)


def to_hf(
    model: nn.Module, folder: str | Path, *, family: str | None = None, tokenizer: Tokenizer | None = None
) -> None:
    """Write a folder that transformers loads. The family is found from the config unless named."""
    folder = Path(folder)
    rows = {name: row for name, row in FAMILIES.items() if row.model is type(model) and row.fits(model.config)}
    if family is not None and family not in rows:
        raise CheckpointError(
            f"this model is not one of {family!r}", f"it can be written as: {', '.join(rows) or 'none'}"
        )
    if not rows:
        raise CheckpointError(f"no Hugging Face family is a {type(model).__name__} with this config")
    row = rows[family] if family is not None else next(iter(rows.values()))
    state = model.state_dict()

    def tensors() -> Iterable[tuple[str, Tensor]]:
        for move in row.moves(model.config):
            yield from zip(move.theirs, move.push([state.pop(name) for name in move.ours]), strict=True)

    write_weights(folder, tensors())
    if state:
        raise CheckpointError(f"the map of {row.name} forgets {sorted(state)[0]!r}")
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    write_json(folder / "config.json", {**row.write(model.config), "model_type": row.name, "dtype": dtype})
    if tokenizer is not None:
        tokenizer.save(folder)


def _folder(path_or_id: str | Path) -> Path:
    """A folder on disk: the path itself, or the snapshot of a hub id."""
    path = Path(path_or_id)
    if path.exists():
        return path
    name = str(path_or_id)
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise CheckpointError(f"{name} does not exist", "give a folder, or a hub id such as Qwen/Qwen3-0.6B")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(
            f"{name} is no folder here and could not be fetched: {first}", "check the name and the network"
        ) from None


def _family_named(name: Any, folder: Path) -> Family:
    if name not in FAMILIES:
        raise CheckpointError(
            f"{folder / 'config.json'} is of the unknown model_type {name!r}", f"known: {', '.join(FAMILIES)}"
        )
    return FAMILIES[name]


def _pull(weights: Weights, moves: list[Move], family: Family) -> Iterable[tuple[str, Tensor]]:
    """Our tensors, one move at a time, from theirs; what no move takes is refused."""
    taken = set()
    for move in moves:
        taken.update(move.theirs)
        yield from zip(move.ours, move.pull([weights[name] for name in move.theirs]), strict=True)
    left = [name for name in weights if name not in taken and not family.ignores(name)]
    if left:
        raise CheckpointError(
            f"{weights.path} holds tensors a {family.name} has no place for: {', '.join(left[:3])}",
            "is it a checkpoint of this model, without a head or adapter of its own?",
        )


def _fill(
    model: nn.Module, tensors: Iterable[tuple[str, Tensor]], source: Path, dtype: torch.dtype | None, device: str
) -> nn.Module:
    """Give a model made on the meta device its weights, each checked by name and shape."""
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    state = {}
    for name, tensor in tensors:
        if name not in wanted:
            raise CheckpointError(f"{source} holds tensor {name!r}, which this model has no place for")
        if tuple(tensor.shape) != wanted[name]:
            raise CheckpointError(
                f"tensor {name!r} of {source} has shape {tuple(tensor.shape)}, the model's is {wanted[name]}",
                "does its config belong to these weights?",
            )
        kept = tensor.dtype if dtype is None or not tensor.is_floating_point() else dtype
        state[name] = tensor.to(device, kept)
    missing = [name for name in wanted if name not in state]
    if missing:
        raise CheckpointError(f"{source} lacks tensor {missing[0]!r} and {len(missing) - 1} more")
    model.load_state_dict(state, assign=True)
    for module in model.modules():
        if isinstance(module, Rotary):
            module.fill(torch.device(device))
    return model.eval()
