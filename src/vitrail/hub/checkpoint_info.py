"""Find a checkpoint and read its config, without building the model or reading weights."""

import importlib.util
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from vitrail.config import Config
from vitrail.data.sources.hub_snapshots import ALLOW_VARIABLE, fetch_snapshot, may_contact_hub, split_revision
from vitrail.errors import CheckpointError, VitrailError
from vitrail.hub.checkpoint_family import CheckpointFamily
from vitrail.hub.config_schema import MAX_COUNT
from vitrail.hub.packages import PACKAGES
from vitrail.hub.safetensors_files import SafetensorsWeights, read_json
from vitrail.hub.single_file import SingleFileWeights, locate_file, open_single_file
from vitrail.hub.unsupported_checkpoint import build_unsupported_error
from vitrail.registry import FAMILIES, MODELS

NATIVE_CONFIG_FILE, HF_CONFIG_FILE, PIPELINE_FILE = "vitrail.json", "config.json", "model_index.json"
SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model")  # downloaded before the weights
LAYER_COUNT_KEYS = ("layers", "global_layers", "encoder_layers")  # keys of configs that hold a number of layers
BUNDLED_MODELS = ("judge", "mini", "mini-vlm", "mini-world")  # models of the distribution vitrail-mini
INSTALL_BUNDLED_MODELS = "pip install 'vitrail[mini]'"


def _find_bundled_models_folder() -> Path:
    """Return the folder of the package vitrail_mini. It does not exist if the package is not installed."""
    spec = importlib.util.find_spec("vitrail_mini")
    return Path("vitrail_mini") if spec is None or spec.origin is None else Path(spec.origin).parent


BUNDLED_MODELS_FOLDER = _find_bundled_models_folder()


class CheckpointInfo(NamedTuple):
    """A checkpoint on disk. `family` is None for the native format."""

    path: Path
    model_class: type
    config: Any
    family: CheckpointFamily | None
    open_weights: Callable[[], SafetensorsWeights | SingleFileWeights]


def read_config(name_or_path: str | Path) -> Config:
    """Read the config of any checkpoint that `hub.load` loads."""
    return find_checkpoint(resolve_path(name_or_path)).config


def find_checkpoint(path: Path, *, native: bool = True) -> CheckpointInfo:
    """Find the checkpoint at a path: a native (if `native`) or Hugging Face folder, or a GGUF or llama2.c file."""
    if path.is_file():
        single = open_single_file(path)
        family = FAMILIES[single.hf_config["model_type"]]
        return _check_depth(
            CheckpointInfo(
                path, family.model_class, family.read_config(single.hf_config, path), family, lambda: single
            ),
            path,
        )
    if native and (path / NATIVE_CONFIG_FILE).exists():
        return _check_depth(_find_native(path), path / NATIVE_CONFIG_FILE)
    file = path / HF_CONFIG_FILE
    if not file.exists() and (path / PIPELINE_FILE).is_file():
        return find_checkpoint(_find_pipeline_part(path), native=native)
    if not file.exists():
        missing = f"neither {NATIVE_CONFIG_FILE} nor {HF_CONFIG_FILE}" if native else f"no {HF_CONFIG_FILE}"
        raise CheckpointError(f"{path} contains {missing}", "give the folder of a checkpoint")
    hf_config = read_json(file)
    family = _find_family(hf_config, file)
    return _check_depth(
        CheckpointInfo(
            path,
            family.model_class,
            family.read_config(hf_config, file),
            family,
            lambda: _open_folder(path, hf_config, file, family),
        ),
        file,
    )


def resolve_path(name_or_path: str | Path, *, may_download: bool = True) -> Path:
    """Return the local path of a bundled model, a path, a package model or a hub id (`owner/name@revision`).

    Downloads if needed. Without `may_download`, a hub id is only looked up on this machine.
    """
    if not isinstance(name_or_path, str | os.PathLike):
        raise CheckpointError(
            f"{name_or_path!r:.80} is not a model name or path", "give a folder or the name of a bundled model"
        )
    name = str(name_or_path)
    if isinstance(name_or_path, str) and name in list_bundled_models():  # a folder of that name is reached as ./NAME
        return BUNDLED_MODELS_FOLDER / name
    path = locate_file(name_or_path)
    if path.exists():
        return path
    if name in BUNDLED_MODELS:
        raise CheckpointError(f"the weights of {name} are not installed", INSTALL_BUNDLED_MODELS)
    if name.partition("@")[0].count("/") != 1 or name.startswith((".", "/", "~")):
        names = ", ".join([*list_bundled_models(), *PACKAGES])
        raise CheckpointError(f"{name} does not exist", f"give a folder, {names}, or a hub id such as Qwen/Qwen3-0.6B")
    repository, revision = split_revision(name)
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

    def fetch(patterns: list[str]) -> Path:
        return fetch_snapshot(repository, revision, kind="model", may_download=may_download, patterns=patterns)

    try:
        folder = fetch(list(SMALL_FILES))
        is_pipeline = (folder / PIPELINE_FILE).is_file() and not (folder / HF_CONFIG_FILE).is_file()
        weights = f"{_find_pipeline_part(folder).name}/*.safetensors" if is_pipeline else "*.safetensors"
        return fetch([*SMALL_FILES, weights])
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        if not may_download:
            raise CheckpointError(
                f"{name} is not on this machine, and the files of a local folder do not contact the hub",
                f"download it first (hf download {repository}), or allow it with --allow-hub ({ALLOW_VARIABLE}=1)",
            ) from None
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(
            f"{name} is not a local folder, and its download failed: {reason}", "check the name and the network"
        ) from None


def resolve_reference(name: str, folder: Path) -> Path:
    """Return the local path of a model that the files of a checkpoint name. The hub is contacted only if allowed."""
    return resolve_path(name, may_download=may_contact_hub(folder))


def list_bundled_models() -> list[str]:
    """Return the names of the installed models of vitrail-mini."""
    return sorted(path.parent.name for path in BUNDLED_MODELS_FOLDER.glob(f"*/{NATIVE_CONFIG_FILE}"))


def count_layers(config: Any) -> int:
    """Count the layers of all towers in a config as plain data. A convolutional tower lists `blocks` for each stage."""
    if isinstance(config, dict):
        return sum(
            value
            if key in LAYER_COUNT_KEYS and isinstance(value, int)
            else sum(value)
            if key == "blocks"
            else count_layers(value)
            for key, value in config.items()
        )
    return sum(map(count_layers, config)) if isinstance(config, list | tuple) else 0


def _find_native(folder: Path) -> CheckpointInfo:
    file = folder / NATIVE_CONFIG_FILE
    metadata = read_json(file)
    kind = metadata.get("kind")
    if not isinstance(kind, str) or kind not in MODELS:
        raise CheckpointError(f"{file} has the unknown kind {kind!r}", MODELS.describe())
    model = MODELS[kind]
    try:
        return CheckpointInfo(
            folder, model, model.Config.from_dict(metadata.get("config", {})), None, lambda: SafetensorsWeights(folder)
        )
    except VitrailError as error:
        raise error.with_prefix(file) from None


def _check_depth(info: CheckpointInfo, file: Path) -> CheckpointInfo:
    """Raise an error if the config has more layers than can be built."""
    count = count_layers(info.config.to_dict())
    if not 1 <= count <= MAX_COUNT:
        raise CheckpointError(f"{file} has {count:,} layers", f"the limit is {MAX_COUNT:,}")
    return info


def _open_folder(path: Path, hf_config: dict[str, Any], file: Path, family: CheckpointFamily) -> SafetensorsWeights:
    """Open the weights of a folder. Raises an error if they are quantized."""
    parts = {"": hf_config, **{f"{key}.": value for key, value in hf_config.items() if isinstance(value, dict)}}
    for prefix, part in parts.items():
        quantization = part.get("quantization_config")
        if isinstance(quantization, dict):
            raise CheckpointError(
                f"{file}: {prefix}quantization_config has the quant_method {quantization.get('quant_method')!r}: "
                "quantized weights are not supported",
                "use the original weights, or a GGUF file",
            )
    return SafetensorsWeights(path) if family.open_weights is None else family.open_weights(path, hf_config)


def _find_pipeline_part(folder: Path) -> Path:
    """Return the subfolder of a diffusers pipeline that is opened: the first with a supported class of diffusers."""
    index = folder / PIPELINE_FILE
    rows = read_json(index)
    parts = {
        name: row[1]
        for name, row in rows.items()
        if isinstance(row, list) and len(row) == 2 and isinstance(row[1], str) and Path(name).name == name
    }
    codecs = {name for name, family in FAMILIES.items() if family.config_key == "_class_name"}
    for name, class_name in parts.items():
        if class_name in codecs:
            if not (file := folder / name / HF_CONFIG_FILE).is_file():
                raise CheckpointError(
                    f"{index} lists {name} ({class_name}), but {file} does not exist",
                    f"download the subfolder {name} too",
                )
            return folder / name
    raise CheckpointError(
        f"{index}: no part of this {rows.get('_class_name')} has a supported class of diffusers "
        f"({', '.join(f'{name}: {class_name}' for name, class_name in parts.items())})",
        f"supported classes: {', '.join(sorted(codecs))}{_describe_other_parts(folder, parts)}",
    )


def _describe_other_parts(folder: Path, parts: Iterable[str]) -> str:
    """Name the subfolders of a pipeline that can be opened one by one."""
    supported = []
    for name in parts:
        file = folder / name / HF_CONFIG_FILE
        if file.is_file():
            try:
                _find_family(read_json(file), file)
            except VitrailError:
                continue
            supported.append(str(folder / name))
    return f"; or give a subfolder: {', '.join(supported)}" if supported else ""


def _find_family(hf_config: dict[str, Any], file: Path) -> CheckpointFamily:
    """Find the family of a config.json.

    It is named by a known class, else by transformers' model_type, else by the first word of timm's architecture.
    """
    architectures = hf_config.get("architectures")
    for name in (hf_config.get("_class_name"), *(architectures if isinstance(architectures, list) else ())):
        row = FAMILIES.get(name) if isinstance(name, str) else None
        if row is not None and row.config_key in ("_class_name", "architectures"):
            return row
    key = "architecture" if "architecture" in hf_config and "model_type" not in hf_config else "model_type"
    name = hf_config.get(key) if key == "model_type" else str(hf_config.get(key)).partition("_")[0]
    row = FAMILIES.get(name) if isinstance(name, str) else None
    if row is None or row.config_key != key or "_class_name" in hf_config:
        raise build_unsupported_error(hf_config, file, FAMILIES)
    vision_config = hf_config.get("vision_config")
    tower = vision_config.get("model_type") if isinstance(vision_config, dict) else None
    return FAMILIES[row.variants[tower]] if isinstance(tower, str) and tower in row.variants else row
