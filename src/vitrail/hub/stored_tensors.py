"""Check that the tensors of a checkpoint are those that its config.json describes, before any of them is read."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.errors import CheckpointError, VitrailError
from vitrail.hub.checkpoint_family import CheckpointFamily, fill_defaults
from vitrail.hub.safetensors_files import SafetensorsWeights
from vitrail.hub.tensor_rules import TensorRule

HEAD_KEYS = ("num_attention_heads", "num_key_value_heads")
MAX_NAMED_KEYS = 4
_LAYER_NUMBER = re.compile(r"\.(\d+)\.")


def check_stored_tensors(
    weights: SafetensorsWeights,
    rules: Sequence[TensorRule],
    family: CheckpointFamily,
    model: nn.Module,
    hf_config: Mapping[str, Any],
    config_file: Path,
) -> None:
    """Raise an error that names file, tensor and config keys if a tensor is missing or has another shape.

    `model` is on the meta device: exporting its parameters gives the names and shapes of the files.
    """
    state, sizes = model.state_dict(), dict(_list_sizes(hf_config, family))
    names = [[family.find_stored_name(name, weights) for name in rule.hf] for rule in rules]
    expected = [name for found in names for name in found]
    missing = [name for name in expected if name not in weights]
    if missing:
        raise _build_missing_error(weights, missing, expected, sizes, config_file)
    for rule, found in zip(rules, names, strict=True):
        parameters, stored = [state[name] for name in rule.native], [weights.get_shape(name) for name in found]
        if _loads(rule, stored, parameters):
            continue
        for name, shape, tensor in zip(found, stored, rule.export(parameters), strict=True):
            if shape != tuple(tensor.shape):
                where = f"{weights.get_file(name)}: tensor {name!r}"
                raise CheckpointError(
                    f"{where} has shape {shape}, but {config_file.name} requires {tuple(tensor.shape)}",
                    _suggest_keys(shape, tuple(tensor.shape), sizes, config_file),
                )


def _loads(rule: TensorRule, shapes: Sequence[tuple[int, ...]], parameters: Sequence[Tensor]) -> bool:
    """Whether a rule makes the parameters of tensors of these shapes. Some rules take several layouts."""
    try:
        outputs = rule.load([torch.empty(shape, device="meta") for shape in shapes])
    except (VitrailError, RuntimeError, IndexError):
        return False
    return [tensor.shape for tensor in outputs] == [parameter.shape for parameter in parameters]


def _build_missing_error(
    weights: SafetensorsWeights,
    missing: Sequence[str],
    expected: Sequence[str],
    sizes: Mapping[str, int],
    config_file: Path,
) -> CheckpointError:
    others = f" and {len(missing) - 1:,} more" if len(missing) > 1 else ""
    problem = f"{weights.path} has no tensor {missing[0]!r}{others}, which {config_file} requires"
    numbers = [[int(match) for match in _LAYER_NUMBER.findall(name)] for name in expected]
    layers = 1 + max((max(found) for found in numbers if found), default=0)
    keys = [key for key, size in sizes.items() if size == layers]
    if _LAYER_NUMBER.search(missing[0]) and keys:
        return CheckpointError(problem, f"check {', '.join(keys[:MAX_NAMED_KEYS])} ({layers}), or download all shards")
    return CheckpointError(problem, "check that the checkpoint is complete and that its config.json belongs to it")


def _suggest_keys(stored: tuple[int, ...], shape: tuple[int, ...], sizes: Mapping[str, int], config_file: Path) -> str:
    """Name the config keys with the sizes that do not match."""
    wrong = [(b, a) for a, b in zip(stored, shape, strict=False) if a != b] if len(stored) == len(shape) else []
    hints = [
        f"{', '.join(keys[:MAX_NAMED_KEYS])} ({size}; the tensor has {other})"
        for size, other in wrong
        if (keys := [key for key, value in sizes.items() if value == size])
    ]
    remedy = f"use the {config_file.name} that belongs to the weights"
    return f"{remedy}: check {' and '.join(hints)}" if hints else remedy


def _list_sizes(hf_config: Mapping[str, Any], family: CheckpointFamily) -> Iterator[tuple[str, int]]:
    """Yield the sizes of a config by key, with defaults, those of parts as part.key, and heads × head_dim."""
    filled = fill_defaults(hf_config, family.class_defaults)
    for part, defaults in family.part_defaults.items():
        found = filled.get(part) or {}
        filled[part] = fill_defaults(found, defaults) if isinstance(found, Mapping) else found
    tables = {"": filled} | {f"{key}.": value for key, value in filled.items() if isinstance(value, Mapping)}
    for prefix, table in tables.items():
        numbers = {key: value for key, value in table.items() if type(value) is int and not key.endswith("_id")}
        yield from ((prefix + key, value) for key, value in numbers.items())
        for key in HEAD_KEYS:
            if key in numbers and "head_dim" in numbers:
                yield f"{prefix}{key} × head_dim", numbers[key] * numbers["head_dim"]
