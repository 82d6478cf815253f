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
from vitrail.hub.maps import Move, under
from vitrail.hub.packages import PACKAGES
from vitrail.hub.single import Single, locate, open_single, single_tokenizer
from vitrail.nn import Rotary
from vitrail.processing.text import Tokenizer

OWN = "vitrail.json"


def load(name_or_path: str | Path, *, dtype: torch.dtype | None = None, device: str = "cpu") -> Any:
    """A model from a folder of ours or of Hugging Face's, from a hub id, from one file (GGUF, llama2.c), or by the name
    of a package that holds one (`stories15M`, `smollm2-135m`).

    Weights keep the type they are stored in unless `dtype` is given; quantised ones become float32.
    """
    folder = locate(name_or_path)
    if folder.is_file():
        return _from_single(folder, dtype, device)
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
    family = _family_of(about, folder)
    config = family.read(about)
    with torch.device("meta"):
        model = family.model(config)
    moves = family.moves(config)
    weights = Weights(folder)
    if family.outer and all(name.startswith(family.outer) for name in weights):
        moves = under("", family.outer, moves)
    return _fill(model, _pull(weights, moves, family), folder, dtype, device)


def _from_single(path: Path, dtype: torch.dtype | None, device: str) -> Any:
    weights = open_single(path)
    family = FAMILIES[weights.about["model_type"]]
    config = family.read(weights.about)
    with torch.device("meta"):
        model = family.model(config)
    return _fill(model, _pull(weights, family.moves(config), family), path, dtype, device)


def tokenizer(name_or_path: str | Path) -> Tokenizer:
    """The tokenizer that belongs to what `load` loads."""
    path = locate(name_or_path)
    found = single_tokenizer(path) if path.is_file() else None
    return Tokenizer.load(_folder(path)) if found is None else found


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
    write_json(folder / "config.json", {row.key: row.name, "dtype": dtype, **row.write(model.config)})
    if tokenizer is not None:
        tokenizer.save(folder)


def _folder(path_or_id: str | Path) -> Path:
    """A folder on disk: the path itself, or the snapshot of a hub id."""
    path = Path(path_or_id)
    if path.exists():
        return path
    name = str(path_or_id)
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        known = ", ".join(PACKAGES)
        raise CheckpointError(f"{name} does not exist", f"give a folder, {known}, or a hub id such as Qwen/Qwen3-0.6B")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(
            f"{name} is no folder here and could not be fetched: {first}", "check the name and the network"
        ) from None


def _family_of(about: dict[str, Any], folder: Path) -> Family:
    """The row that config.json names: transformers by its model_type, timm by the first word of its architecture."""
    key = "architecture" if "architecture" in about and "model_type" not in about else "model_type"
    name = about.get(key) if key == "model_type" else str(about.get(key)).partition("_")[0]
    row = FAMILIES.get(name) if isinstance(name, str) else None
    if row is None or row.key != key:
        raise CheckpointError(
            f"{folder / 'config.json'} is of the unknown {key} {about.get(key)!r}", f"known: {', '.join(FAMILIES)}"
        )
    return row


def _pull(weights: Weights | Single, moves: list[Move], family: Family) -> Iterable[tuple[str, Tensor]]:
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
