"""What lies at a path: which model, with which config; nothing is built and no weight is read."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from vitrail.config import Config
from vitrail.errors import CheckpointError, VitrailError
from vitrail.hub.about import MOST
from vitrail.hub.families import FAMILIES, MODELS
from vitrail.hub.family import Family
from vitrail.hub.files import Weights, read_json
from vitrail.hub.packages import PACKAGES
from vitrail.hub.single import Single, locate, open_single

OWN, THEIRS = "vitrail.json", "config.json"
COUNTS = ("layers", "over")  # keys of configs that count layers
SHIPPED = Path(__file__).resolve().parents[1] / "weights"


class Found(NamedTuple):
    """A model on disk. Without a family its tensors have our own names."""

    path: Path
    model: type
    config: Any
    family: Family | None
    weights: Callable[[], Weights | Single]


def read_config(name_or_path: str | Path) -> Config:
    """The config of whatever `load` loads, without its weights."""
    return find(resolve(name_or_path)).config


def find(path: Path, *, own: bool = True) -> Found:
    """A folder of ours (unless `own` is off) or of Hugging Face's, or one file (GGUF, llama2.c)."""
    if path.is_file():
        single = open_single(path)
        family = FAMILIES[single.about["model_type"]]
        return _checked(Found(path, family.model, family.config(single.about, path), family, lambda: single), path)
    if own and (path / OWN).exists():
        return _checked(_ours(path), path / OWN)
    file = path / THEIRS
    if not file.exists():
        lacks = f"neither {OWN} nor {THEIRS}" if own else f"no {THEIRS}"
        raise CheckpointError(f"{path} holds {lacks}", "name the folder of a model")
    about = read_json(file)
    family = _family_of(about, file)
    return _checked(Found(path, family.model, family.config(about, file), family, lambda: Weights(path)), file)


def resolve(name_or_path: str | Path) -> Path:
    """A path on disk: itself, a model that ships with the package, the file of one, or the snapshot of a hub id."""
    if not isinstance(name_or_path, str | os.PathLike):
        raise CheckpointError(f"{name_or_path!r:.80} names no model", "give a folder, or the name of one that ships")
    name = str(name_or_path)
    if isinstance(name_or_path, str) and name in shipped():  # a folder called so is ./NAME
        return SHIPPED / name
    path = locate(name_or_path)
    if path.exists():
        return path
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        known = ", ".join([*shipped(), *PACKAGES])
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


def shipped() -> list[str]:
    """The models that came with the package."""
    return sorted(path.parent.name for path in SHIPPED.glob(f"*/{OWN}"))


def layers(plain: Any) -> int:
    """Layers of all the towers in a config as plain data; a convolutional tower says `blocks`, stage by stage."""
    if isinstance(plain, dict):
        return sum(
            value if key in COUNTS and isinstance(value, int) else sum(value) if key == "blocks" else layers(value)
            for key, value in plain.items()
        )
    return sum(map(layers, plain)) if isinstance(plain, list | tuple) else 0


def _ours(folder: Path) -> Found:
    file = folder / OWN
    about = read_json(file)
    kind = about.get("kind")
    if not isinstance(kind, str) or kind not in MODELS:
        raise CheckpointError(f"{file} is of the unknown kind {kind!r}", f"known: {', '.join(MODELS)}")
    config, model = MODELS[kind]
    try:
        return Found(folder, model, config.read(about.get("config", {})), None, lambda: Weights(folder))
    except VitrailError as error:
        raise type(error)(f"{file}: {error.problem}", error.remedy) from None


def _checked(found: Found, file: Path) -> Found:
    """Refuse a depth that would be built for ever."""
    count = layers(found.config.plain())
    if not 1 <= count <= MOST:
        raise CheckpointError(f"{file} says {count:,} layers", f"1 … {MOST:,} are built")
    return found


def _family_of(about: dict[str, Any], file: Path) -> Family:
    """The row that config.json names: by its class where we know that, else transformers by its model_type, timm by the
    first word of its architecture."""
    listed = about.get("architectures")
    for name in (about.get("_class_name"), *(listed if isinstance(listed, list) else ())):
        row = FAMILIES.get(name) if isinstance(name, str) else None
        if row is not None and row.key in ("_class_name", "architectures"):
            return row
    key = "architecture" if "architecture" in about and "model_type" not in about else "model_type"
    name = about.get(key) if key == "model_type" else str(about.get(key)).partition("_")[0]
    row = FAMILIES.get(name) if isinstance(name, str) else None
    if row is None or row.key != key:
        raise CheckpointError(f"{file} is of the unknown {key} {about.get(key)!r}", f"known: {', '.join(FAMILIES)}")
    return row
