"""LoRA adapters in the format of PEFT: adapter_config.json and adapter_model.safetensors, read and written.

An adapter names the linear layers of transformers. Native layers may be fused, so a layer of PEFT is a range of rows of
one or several native layers. The tensor rules of the checkpoint family say which.

O outputs, I inputs, R rank, o rows of a layer
"""

import functools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor, nn

from vitrail.errors import CheckpointError, VitrailError
from vitrail.hub.checkpoint_family import ADAPTER_CONFIG_FILE, ADAPTER_STEM, CheckpointFamily
from vitrail.hub.pretrained import find_family
from vitrail.hub.safetensors_files import read_json, write_json, write_weights
from vitrail.hub.tensor_rules import TensorRule
from vitrail.registry import FAMILIES
from vitrail.training.lora import LoRALinear, add_lora_slices

WEIGHTS_FILE = f"{ADAPTER_STEM}.safetensors"
KEY = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.default)?\.weight")
WRAPPERS = {"model", "language_model"}  # parts of module names that differ between versions of transformers
MAX_RANK = 1024
NATIVE_ONLY = (".router",)  # linear layers that are no linear layers in transformers


class AdapterSchema(msgspec.Struct):
    """Settings of an adapter_config.json that change the result."""

    r: int
    lora_alpha: float
    lora_dropout: float = 0.0
    peft_type: str = "LORA"
    base_model_name_or_path: str | None = None
    use_rslora: bool = False
    use_dora: bool = False
    bias: str = "none"
    lora_bias: bool = False
    fan_in_fan_out: bool = False
    rank_pattern: dict[str, int] = {}
    alpha_pattern: dict[str, float] = {}
    modules_to_save: list[str] | None = None
    target_parameters: list[str] | None = None
    trainable_token_indices: Any = None
    layer_replication: Any = None

    def find_pattern(self, table: dict[str, Any], layer: str, default: Any) -> Any:
        """Return the value of the first pattern that matches the end of a layer's name, as PEFT does."""
        return next((value for key, value in table.items() if re.match(rf"(.*\.)?({key})$", layer)), default)

    def find_rank(self, layer: str) -> int:
        return self.find_pattern(self.rank_pattern, layer, self.r)

    def find_scale(self, layer: str) -> float:
        """Return the factor of the update of a layer."""
        rank = self.find_rank(layer)
        return self.find_pattern(self.alpha_pattern, layer, self.lora_alpha) / (
            math.sqrt(rank) if self.use_rslora else rank
        )


class RowRange(NamedTuple):
    """Rows that a layer of PEFT shares with a native layer: row peft_rows[n] is the native row native_rows[n]."""

    native: str
    native_rows: Tensor
    peft_rows: Tensor


class SliceUpdate(NamedTuple):
    """Low-rank update of the rows `start` … `stop` of a native linear layer: scale · b a."""

    layer: str
    start: int
    stop: int
    a: Tensor  # (R, I)
    b: Tensor  # (o, R)
    scale: float
    key: str  # of the adapter's file, for messages


def load_adapter(model: nn.Module, folder: str | Path) -> nn.Module:
    """Freeze a model and add the adapter of a PEFT folder to it, in place and without merging.

    `training.lora.merge_lora` merges it. Further training changes the adapter only.
    """
    updates, config = read_adapter(model, folder), read_adapter_config(Path(folder) / ADAPTER_CONFIG_FILE)
    add_lora_slices(model, [update[:6] for update in updates], config.lora_dropout)
    return model


def read_adapter(model: nn.Module, folder: str | Path) -> list[SliceUpdate]:
    """Read a PEFT folder as updates of the model's layers. Every tensor must fit a layer of the model."""
    folder = Path(folder)
    for file in (ADAPTER_CONFIG_FILE, WEIGHTS_FILE):
        if not (folder / file).is_file():
            raise CheckpointError(f"{folder} has no {file}", "give the folder of a PEFT LoRA adapter")
    config = read_adapter_config(folder / ADAPTER_CONFIG_FILE)
    rows = _LayerRows(model, [find_family(type(model), model.config), *_list_families(model)])  # type: ignore[arg-type]
    base = f" (its base model is {config.base_model_name_or_path})" if config.base_model_name_or_path else ""
    remedy = f"use an adapter that was trained for this model{base}"
    updates = []
    for layer, (a, b) in _read_pairs(folder / WEIGHTS_FILE).items():
        key, rank = f"{folder / WEIGHTS_FILE}: {layer}", config.find_rank(layer)
        ranges = rows.find(layer)
        if ranges is None:
            raise CheckpointError(f"{key} is no linear layer of this model", remedy)
        in_features = model.get_submodule(ranges[0].native).in_features
        expected = ((rank, in_features), (sum(len(one.peft_rows) for one in ranges), rank))
        if (tuple(a.shape), tuple(b.shape)) != expected:
            raise CheckpointError(
                f"{key} has lora_A of shape {tuple(a.shape)} and lora_B of shape {tuple(b.shape)}, but the model needs "
                f"{expected[0]} and {expected[1]}: other shapes",
                remedy,
            )
        if not bool(a.isfinite().all() and b.isfinite().all()):
            raise CheckpointError(f"{key} has NaN or infinite values", "use another adapter")
        for native, native_rows, peft_rows in ranges:
            order = native_rows.argsort()
            start, stop = int(native_rows.min()), int(native_rows.max()) + 1
            if stop - start != len(native_rows):
                raise CheckpointError(
                    f"{key} has rows apart from each other in {native}", "merge this adapter with PEFT"
                )
            updates.append(SliceUpdate(native, start, stop, a, b[peft_rows[order]], config.find_scale(layer), key))
    if not updates:
        raise CheckpointError(f"{folder / WEIGHTS_FILE} has no tensors", "use another adapter")
    return updates


def save_adapter(model: nn.Module, folder: str | Path, base: str | None = None, family: str | None = None) -> None:
    """Write the adapters of a model as a PEFT folder, which transformers loads onto the base model.

    base    name or folder of the base model, for adapter_config.json
    family  checkpoint family of the base model; by default the first that fits the model
    """
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, LoRALinear)}
    if not layers:
        raise CheckpointError("the model has no LoRA adapters", "add them with training.lora.add_lora")
    found = FAMILIES[family] if family is not None else find_family(type(model), model.config)
    check_layers_writable(model, layers, found)
    rows, tensors = _LayerRows(model, [found]), {}
    for stored, ranges in rows.list_layers(layers):
        size = sum(len(one.peft_rows) for one in ranges)
        parts_a, parts_b = [], []
        for native, native_rows, peft_rows in ranges:
            for adapter in layers[native].adapters if native in layers else ():
                inside = (native_rows >= adapter.start) & (native_rows < adapter.stop)
                if not inside.any():
                    continue
                b = adapter.b.new_zeros(size, adapter.b.shape[1])
                b[peft_rows[inside]] = adapter.b.detach()[native_rows[inside] - adapter.start]
                parts_a.append(adapter.a.detach())
                parts_b.append(b)
        if parts_a:
            tensors[found.to_module_name(stored)] = torch.cat(parts_a), torch.cat(parts_b, 1)
    adapter = next(iter(layers.values())).adapters[0]
    rank = len(adapter.a)
    ranks = {name: len(a) for name, (a, _) in tensors.items() if len(a) != rank}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": adapter.scale * rank,
        "lora_dropout": adapter.dropout,
        "target_modules": sorted(tensors),
        "rank_pattern": {re.escape(name): size for name, size in ranks.items()},
        "alpha_pattern": {re.escape(name): adapter.scale * size for name, size in ranks.items()},
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
        "use_dora": False,
        "use_rslora": False,
    }
    named = (
        (f"base_model.model.{name}.lora_{half}.weight", tensor.contiguous())
        for name, pair in tensors.items()
        for half, tensor in zip("AB", pair, strict=True)
    )
    write_weights(Path(folder), named, stem=ADAPTER_STEM)
    write_json(Path(folder) / ADAPTER_CONFIG_FILE, config)


def check_layers_writable(model: nn.Module, layers: Iterable[str], family: CheckpointFamily) -> None:
    """Raise an error for layers that are no linear layers of the family in transformers."""
    wanted = set(layers)
    found = {one.native for _, ranges in _LayerRows(model, [family]).list_layers(wanted) for one in ranges}
    if missing := sorted(wanted - found):
        raise CheckpointError(
            f"{missing[0]} has an adapter, but it is no linear layer of {family.name} in transformers",
            "leave it out of the target modules",
        )


def read_adapter_config(file: Path) -> AdapterSchema:
    """Read an adapter_config.json. Settings that change the result and are not supported are refused."""
    settings = read_json(file)
    kind = settings.get("peft_type", "LORA")
    if kind != "LORA":
        raise CheckpointError(f"{file}: peft_type is {kind!r:.40}, which is not supported", "use a LORA adapter")
    try:
        config = msgspec.convert(settings, AdapterSchema)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{file}: {error}", "use the config that PEFT wrote") from None
    unsupported = {
        "use_dora": config.use_dora,
        "bias": config.bias != "none",
        "lora_bias": config.lora_bias,
        "fan_in_fan_out": config.fan_in_fan_out,
        "modules_to_save": bool(config.modules_to_save),
        "target_parameters": bool(config.target_parameters),
        "trainable_token_indices": bool(config.trainable_token_indices),
        "layer_replication": bool(config.layer_replication),
    }
    if wrong := [name for name, is_set in unsupported.items() if is_set]:
        raise CheckpointError(f"{file}: {wrong[0]} is not supported", "merge this adapter into the weights with PEFT")
    for key, ranks in (("r", [config.r]), ("rank_pattern", list(config.rank_pattern.values()))):
        if not all(1 <= rank <= MAX_RANK for rank in ranks):
            raise CheckpointError(f"{file}: {key} is {ranks}", f"use a rank of 1 … {MAX_RANK}")
    for key, alphas in (("lora_alpha", [config.lora_alpha]), ("alpha_pattern", list(config.alpha_pattern.values()))):
        if not all(map(math.isfinite, alphas)):
            raise CheckpointError(f"{file}: {key} is {alphas}", "use a finite alpha")
    for pattern in (*config.rank_pattern, *config.alpha_pattern):
        try:
            re.compile(pattern)
        except re.error as error:
            raise CheckpointError(f"{file}: {pattern!r:.80} is no pattern: {error}", "use PEFT's config") from None
    return config


def _read_pairs(file: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """Read the tensors A and B of every layer."""
    from safetensors.torch import load_file

    try:
        tensors = load_file(file)
    except Exception as error:
        raise CheckpointError(f"{file} cannot be read: {error}", "copy it again") from None
    halves: dict[str, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        found = KEY.fullmatch(key)
        if found is None or value.ndim != 2:
            raise CheckpointError(
                f"{file}: {key} of shape {tuple(value.shape)} is no LoRA weight of a linear layer",
                "use a LoRA adapter of linear layers only",
            )
        halves.setdefault(found[1], {})[found[2]] = value
    for layer, pair in halves.items():
        if len(pair) == 1:
            raise CheckpointError(f"{file}: layer {layer} has lora_{next(iter(pair))} only", "copy the file again")
    return {layer: (pair["A"], pair["B"]) for layer, pair in halves.items()}


def _list_families(model: nn.Module) -> Iterator[CheckpointFamily]:
    """Yield the families that the model can be exported as: their layers may be fused in different ways."""
    for family in FAMILIES.values():
        if family.model_class is type(model) and family.supports(model.config):
            yield family


class _LayerRows:
    """The native rows of the layers of families. Layers are found by name without what differs between versions."""

    def __init__(self, model: nn.Module, families: Sequence[CheckpointFamily]):
        self.layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
        self.rules: dict[str, tuple[TensorRule, int]] = {}  # external tensor → its rule, and its number there
        self.names: dict[str, str] = {}  # normalized layer → external tensor
        for family in families:
            for rule in family.tensor_rules(model.config):
                if all(self._is_linear(name) for name in rule.native):
                    for number, tensor in enumerate(rule.hf):
                        self.rules.setdefault(tensor, (rule, number))
                        self.names.setdefault(_normalize(tensor.removesuffix(".weight")), tensor)

    def _is_linear(self, tensor: str) -> bool:
        layer = tensor.removesuffix(".weight")
        return tensor.endswith(".weight") and layer in self.layers and not layer.endswith(NATIVE_ONLY)

    def find(self, layer: str) -> list[RowRange] | None:
        """Return the rows of a layer of PEFT; None for an unknown layer."""
        tensor = self.names.get(_normalize(layer))
        return None if tensor is None else self._map_rows(*self.rules[tensor])

    def list_layers(self, native: Any) -> Iterator[tuple[str, list[RowRange]]]:
        """Yield the layers of PEFT, with their rows, that share rows with the native layers."""
        for tensor, (rule, number) in self.rules.items():
            if any(name.removesuffix(".weight") in native for name in rule.native):
                ranges = self._map_rows(rule, number)
                if ranges is not None:
                    yield tensor.removesuffix(".weight"), ranges

    def _map_rows(self, rule: TensorRule, number: int) -> list[RowRange] | None:
        """Export numbered rows: they show where each row goes. None if a rule does more than move rows."""
        sizes = [self.layers[name.removesuffix(".weight")].out_features for name in rule.native]
        total = sum(sizes)
        try:
            numbered = torch.arange(total, dtype=torch.float64)[:, None].split(sizes)
            column = rule.export(list(numbered))[number]
        except (VitrailError, RuntimeError):
            return None
        if column.ndim != 2 or column.shape[1] != 1:
            return None
        rows = column[:, 0].long()
        if not torch.equal(rows.double(), column[:, 0]) or len(rows.unique()) != len(rows) or rows.max() >= total:
            return None
        ranges, begin = [], 0
        for name, size in zip(rule.native, sizes, strict=True):
            (inside,) = ((rows >= begin) & (rows < begin + size)).nonzero(as_tuple=True)
            if len(inside):
                ranges.append(RowRange(name.removesuffix(".weight"), rows[inside] - begin, inside))
            begin += size
        return ranges


@functools.cache
def _normalize(layer: str) -> str:
    """Remove parts of a layer's name that differ between versions of transformers."""
    name = ".".join(part for part in layer.split(".") if part not in WRAPPERS)
    return name.replace("vision_tower.vision_model.", "vision_tower.")
