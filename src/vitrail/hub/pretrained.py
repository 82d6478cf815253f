"""Load and save models and tokenizers: the native format, and Hugging Face checkpoints in both directions."""

import copy
import sys
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
from torch import Tensor, nn

from vitrail import __version__
from vitrail.codecs.quantizers import FSQ, Quantizer
from vitrail.config import Config
from vitrail.errors import CheckpointError, VitrailError
from vitrail.hub import image_processor_config, processor_files
from vitrail.hub.checkpoint_family import ADAPTER_CONFIG_FILE, ADAPTER_STEM, CheckpointFamily
from vitrail.hub.checkpoint_info import (
    HF_CONFIG_FILE,
    NATIVE_CONFIG_FILE,
    CheckpointInfo,
    count_layers,
    find_checkpoint,
    resolve_path,
)
from vitrail.hub.delta_checkpoint import (
    TOKENIZER_FILE,
    BaseCheckpoint,
    add_base,
    check_base_is_other,
    read_base,
    subtract_base,
)
from vitrail.hub.int8_weights import dequantize_tensors, quantize_tensors
from vitrail.hub.safetensors_files import SafetensorsWeights, read_json, write_json, write_weights
from vitrail.hub.single_file import SingleFileWeights, read_single_file_tokenizer
from vitrail.hub.stored_tensors import check_stored_tensors
from vitrail.hub.tensor_rules import TensorRule, add_prefix
from vitrail.hub.tiktoken_tokenizer import has_tiktoken_tokenizer, read_tiktoken_tokenizer
from vitrail.nn import RotaryEmbedding
from vitrail.nn.mlp import MoE
from vitrail.nn.parameters import find_nonfinite, place_loaded_parameter
from vitrail.processing.tokenizer import Tokenizer
from vitrail.processing.tokenizer_files import read_tokenizer_files
from vitrail.registry import FAMILIES, MODELS


def load(name_or_path: str | Path, *, dtype: torch.dtype | None = None, device: str = "cpu") -> Any:
    """Load a model.

    `name_or_path` is a native or Hugging Face folder, a hub id, a GGUF or llama2.c file, the name of a package model
    (`stories15M`, `smollm2-135m`) or of a bundled model (`judge`). Weights keep their stored dtype unless `dtype` is
    given; quantized weights become float32.
    """
    return build_model(find_checkpoint(resolve_path(name_or_path)), dtype, device)


def save(
    model: nn.Module,
    folder: str | Path,
    tokenizer: Tokenizer | None = None,
    *,
    int8: bool = False,
    base: str | None = None,
) -> None:
    """Save a model in the native format: vitrail.json (kind and config) and safetensors files.

    int8  store 8 bits for each weight and one scale for each row
    base  name or folder of the model that the decoder was started from; only the difference is stored, and loading
          needs the base (see `hub.delta_checkpoint`)

    Image processor and chat processor files that came with the model are saved too (see `hub.image_processor_config`
    and `hub.processor_files`).
    """
    kind = next((kind for kind, cls in MODELS.items() if type(model) is cls), None)
    if kind is None:
        raise CheckpointError(f"a {type(model).__name__} cannot be saved", MODELS.describe())
    folder, config = Path(folder), cast(Config, model.config)
    if bad := find_nonfinite(model.state_dict()):
        raise CheckpointError(
            f"the model is not saved: its tensor {bad[0]!r} contains NaN or infinite values",
            "train it again with a lower learning rate, from a checkpoint before that",
        )
    tensors: Iterable[tuple[str, Tensor]] = model.state_dict().items()
    metadata = {"kind": kind, "vitrail": __version__, "config": config.to_dict()}
    if base is not None:
        check_base_is_other(folder, base)
        base_checkpoint = BaseCheckpoint.from_model(base)
        tensors, metadata["base"] = (
            subtract_base(tensors, base_checkpoint.load_tensors(load, folder)),
            base_checkpoint.to_dict(),
        )
    write_weights(folder, quantize_tensors(tensors) if int8 else tensors)
    write_json(folder / NATIVE_CONFIG_FILE, metadata)
    image_processor_config.save_image_processor(model, folder)
    processor_files.save_processor_files(model, folder, tokenizer)
    if tokenizer is not None and base is not None and _is_base_tokenizer(folder, base):
        (folder / TOKENIZER_FILE).unlink()


def from_hf(path_or_id: str | Path, *, dtype: torch.dtype | None = None, device: str = "cpu") -> Any:
    """Load a model from a Hugging Face folder or hub id."""
    return build_model(find_checkpoint(resolve_path(path_or_id), native=False), dtype, device)


def load_tokenizer(name_or_path: str | Path) -> Tokenizer:
    """Load the tokenizer of a checkpoint that `load` loads."""
    path = resolve_path(name_or_path)
    if has_tiktoken_tokenizer(path):
        return read_tiktoken_tokenizer(path)
    own_tokenizer = read_single_file_tokenizer(path) if path.is_file() else None
    if own_tokenizer is not None or not (path / NATIVE_CONFIG_FILE).is_file() or (path / TOKENIZER_FILE).is_file():
        return Tokenizer.load(path) if own_tokenizer is None else own_tokenizer
    if (base := read_base(path)) is None:
        return Tokenizer.load(path)
    base.check_tokenizer(path)
    # The base's vocabulary with this checkpoint's special tokens and template.
    base_tokenizer = copy.copy(load_tokenizer(base.resolve_path(path)))
    base_tokenizer.named_special_tokens, templates, stops = read_tokenizer_files(path)
    base_tokenizer.set_chat_templates(templates)
    base_tokenizer.stop_ids = tuple(
        dict.fromkeys([*([] if base_tokenizer.eos_token_id is None else [base_tokenizer.eos_token_id]), *stops])
    )
    return base_tokenizer


def _is_base_tokenizer(folder: Path, base: str) -> bool:
    """Whether the tokenizer of a folder is that of its base."""
    try:
        base_tokenizer = load_tokenizer(base)
    except VitrailError:  # the base has no tokenizer
        return False
    with TemporaryDirectory() as temporary:
        base_tokenizer.save(temporary)
        return (Path(temporary) / TOKENIZER_FILE).read_bytes() == (folder / TOKENIZER_FILE).read_bytes()


def find_family(model_class: type[nn.Module], config: Any, family: str | None = None) -> CheckpointFamily:
    """Find the family that a model is exported as: the first that fits, or the named one."""
    unsupported = {
        "position_embedding": ("adds position embeddings to image features", ", or train without them"),
        "feature_reduction": ("reduces the tokens of an image", ", or export model.with_reduction(None)"),
        "voco_tokens": ("has VoCo tokens", ""),
        "stack_layers": ("adds features of several layers of such a tower to its decoder", ""),
    }
    for key, (feature, hint) in unsupported.items():
        if getattr(config, key, None):
            raise CheckpointError(
                f"no Hugging Face family {feature} (model.config.{key})",
                f"save it in the native format (hub.save){hint}",
            )
    families = {
        name: candidate
        for name, candidate in FAMILIES.items()
        if candidate.model_class is model_class and candidate.supports(config)
    }
    if family is not None and family not in families:
        raise CheckpointError(
            f"a {model_class.__name__} with this config cannot be written as {family}",
            f"possible: {', '.join(families) or 'none'}",
        )
    if not families:
        raise CheckpointError(
            f"no Hugging Face family matches a {model_class.__name__} with this config",
            "save it in the native format (hub.save)",
        )
    return families[family] if family is not None else next(iter(families.values()))


def to_hf(
    model: nn.Module, folder: str | Path, *, family: str | None = None, tokenizer: Tokenizer | None = None
) -> list[str]:
    """Export a model to a folder that transformers loads. The family follows from the config unless it is named.

    Vision models get a preprocessor_config.json. Vision-language models also get the files of their transformers
    processor (see `hub.processor_files`). Returns messages about processor files that could not be written.
    """
    folder, target = Path(folder), find_family(type(model), model.config, family)
    state, rules = model.state_dict(), target.tensor_rules(model.config)
    uncovered = sorted(state.keys() - {name for rule in rules for name in rule.native})
    if uncovered:
        raise CheckpointError(f"the tensor rules of {target.name} do not cover {uncovered[0]!r}", "add a rule")

    def tensors() -> Iterable[tuple[str, Tensor]]:
        for rule in rules:
            yield from zip(rule.hf, rule.export([state.pop(name) for name in rule.native]), strict=True)

    _write_tensors(folder, tensors(), target, model.config)
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    # Diffusers would take dtype for an argument.
    dtype_entry = {} if target.config_key == "_class_name" else {"dtype": dtype}
    hf_config = {target.config_key: target.name, **dtype_entry, **target.to_hf_config(model.config)}
    write_json(folder / "config.json", image_processor_config.export_image_processor(model, folder, target, hf_config))
    return processor_files.export_processor_files(model, folder, target, tokenizer)


def _write_tensors(folder: Path, tensors: Iterable[tuple[str, Tensor]], family: CheckpointFamily, config: Any) -> None:
    """Write the weights, and those of the family's adapter to a folder of their own."""
    adapter, adapted = family.adapter, []

    def own_tensors() -> Iterable[tuple[str, Tensor]]:
        for name, tensor in tensors:
            if adapter is None or (stored := adapter.find_stored_name(name)) is None:
                yield name, tensor
            else:
                adapted.append((stored, tensor))

    write_weights(folder, own_tensors(), stem=family.weights_stem)
    if adapter is None:
        return
    for file in (f"{ADAPTER_STEM}.safetensors", ADAPTER_CONFIG_FILE):  # of an earlier model in this folder
        (folder / adapter.name / file).unlink(missing_ok=True)
    if adapted:
        write_weights(folder / adapter.name, adapted, sys.maxsize, ADAPTER_STEM)
        write_json(folder / adapter.name / ADAPTER_CONFIG_FILE, adapter.write_config(config))


def build_model(checkpoint: CheckpointInfo, dtype: torch.dtype | None, device: str) -> nn.Module:
    """Build a model and load its weights.

    Every layer has tensors of its own, so a config with more layers than stored tensors is rejected before building.
    """
    weights, family = checkpoint.open_weights(), checkpoint.family
    stored, depth = len(list(weights)), count_layers(checkpoint.config.to_dict())
    if depth > stored:
        raise CheckpointError(
            f"the config of {checkpoint.path} has {depth:,} layers, but {stored:,} tensors are stored",
            "check that config and weights belong together",
        )
    model = build_on_meta_device(checkpoint)
    if family is None:
        assert isinstance(weights, SafetensorsWeights)
        tensors: Iterable[tuple[str, Tensor]] = dequantize_tensors(weights)
        if (base := read_base(checkpoint.path)) is not None:
            base_tensors, wanted = base.load_tensors(load, checkpoint.path), model.state_dict()
            tensors = add_base(tensors, {name: tensor for name, tensor in base_tensors.items() if name in wanted})
    else:
        rules = family.tensor_rules(checkpoint.config)
        if family.legacy_prefix and all(name.startswith(family.legacy_prefix) for name in weights):
            rules = add_prefix("", family.legacy_prefix, rules)
        rules = [family.select_rule(rule, weights) for rule in rules]
        if isinstance(weights, SafetensorsWeights) and checkpoint.path.is_dir():
            config_file = checkpoint.path / HF_CONFIG_FILE
            check_stored_tensors(weights, rules, family, model, read_json(config_file), config_file)
        tensors = _load_tensors(weights, rules, family)
    model = _load_weights(model, tensors, checkpoint.path, dtype, device)
    image_processor_config.attach_image_processor(model, checkpoint.path, native=family is None)
    processor_files.attach_processor_files(model, checkpoint.path)
    return model


def build_on_meta_device(checkpoint: CheckpointInfo) -> nn.Module:
    """Build the model of a checkpoint without weights."""
    try:
        with torch.device("meta"):
            return checkpoint.model_class(checkpoint.config)
    except (RuntimeError, TypeError, OverflowError, MemoryError) as error:  # impossible tensor sizes
        raise CheckpointError(
            f"{checkpoint.path} describes a model that cannot be built: {str(error).splitlines()[0]}",
            "check its config.json",
        ) from None


def _load_tensors(
    weights: SafetensorsWeights | SingleFileWeights, rules: list[TensorRule], family: CheckpointFamily
) -> Iterable[tuple[str, Tensor]]:
    """Yield native tensors, one rule at a time. Raises an error for external tensors that no rule covers."""
    taken = set()
    for rule in rules:
        names = [family.find_stored_name(name, weights) for name in rule.hf]
        taken.update(names)
        yield from zip(rule.native, rule.load([weights[name] for name in names]), strict=True)
    remaining = [name for name in weights if name not in taken and not family.ignores_tensor(name)]
    for name, original in family.duplicate_tensors:
        if name in remaining:
            if not torch.equal(weights[name], weights[original]):
                raise CheckpointError(
                    f"{weights.path}: tensor {name!r} differs from {original!r}, but the config ties them",
                    "set tie_word_embeddings to false in its config.json to load both",
                )
            remaining.remove(name)
    if remaining:
        raise CheckpointError(
            f"{weights.path} contains tensors that {family.name} does not have: {', '.join(remaining[:3])}",
            "check that it is a checkpoint of this model without additional heads or adapters",
        )


def _load_weights(
    model: nn.Module, tensors: Iterable[tuple[str, Tensor]], source: Path, dtype: torch.dtype | None, device: str
) -> nn.Module:
    """Load weights into a model on the meta device. Checks every name and shape."""
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    exact_tensors = _list_exact_tensors(model)
    parameters = {name for name, _ in model.named_parameters()}
    state, bad = {}, []
    for name, tensor in tensors:
        if name not in wanted:
            raise CheckpointError(f"{source} contains tensor {name!r}, which this model does not have")
        if tuple(tensor.shape) != wanted[name]:
            raise CheckpointError(
                f"tensor {name!r} of {source} has shape {tuple(tensor.shape)}, but the model needs {wanted[name]}",
                "check that config and weights belong together",
            )
        tensor_dtype = (
            tensor.dtype if dtype is None or not tensor.is_floating_point() or name in exact_tensors else dtype
        )
        state[name] = tensor.to(device, tensor_dtype)
        if name in parameters:
            bad += find_nonfinite({name: state[name]})
            state[name] = place_loaded_parameter(state[name])
    missing = [name for name in wanted if name not in state]
    if missing:
        others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(
            f"{source} lacks tensor {missing[0]!r}{others}", "check that it is complete and of this version"
        )
    bad += find_nonfinite({name: tensor for name, tensor in state.items() if name not in parameters})
    if bad:
        raise CheckpointError(
            f"tensor {bad[0]!r} of {source} contains NaN or infinite values"
            + (f", and {len(bad) - 1} more tensors do" if len(bad) > 1 else ""),
            "use an earlier checkpoint; the training that wrote this one diverged, or the file is damaged",
        )
    model.load_state_dict(state, assign=True)
    for module in model.modules():
        if isinstance(module, RotaryEmbedding):  # computed from the config
            module.reset_frequencies(torch.device(device))
        elif isinstance(module, FSQ):
            module.make_tables(torch.device(device))
    return model.eval()


def _list_exact_tensors(model: nn.Module) -> set[str]:
    """Return the names of tensors that keep their dtype: codebooks and running means, which determine ids, and biases
    that select experts.
    """
    modules = [(name, module) for name, module in model.named_modules() if isinstance(module, Quantizer | MoE)]
    return {
        f"{name}.{buffer}".lstrip(".") for name, module in modules for buffer, _ in module.named_buffers(recurse=False)
    }
