"""Building of what a recipe describes: its data sources, its tokenizer and its model."""

import hashlib
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitrail import hub
from vitrail.backbones.decoder import Decoder
from vitrail.data.source_spec import SourceContext
from vitrail.errors import ConfigError
from vitrail.hub import image_processor_config
from vitrail.nn.mlp import MoE
from vitrail.processing.tokenizer import Tokenizer
from vitrail.recipe.recipe_schema import PretrainedPartConfig, Recipe, check_vocab_size, get_source_spec
from vitrail.registry import MODELS, TASKS
from vitrail.tasks.task_spec import SourceMap
from vitrail.training.lora import add_lora, quantize_base
from vitrail.training.stage_config import StageConfig

PARTIAL_TOKENIZER = ".partial-tokenizer"
END_OF_TEXT = "<|endoftext|>"  # the end token of a tokenizer that is trained by a recipe


def open_sources(recipe: Recipe, tokenizer: Tokenizer | None = None) -> SourceMap:
    """Open the sources that need the tokenizer, or without a tokenizer all other sources."""
    shared: dict[Any, Any] = {}
    return {
        name: spec.open_source(config, SourceContext(name, tokenizer, shared))
        for name, config in recipe.sources.items()
        if (spec := get_source_spec(config)).needs_tokenizer(config) == (tokenizer is not None)
    }


def load_or_train_tokenizer(recipe: Recipe, out: Path, sources: SourceMap) -> Tokenizer | None:
    """Load the tokenizer, or train it on the texts and captions of the training sources.

    `publish_tokenizer` caches a trained one in `out`, once the identity of the run is known to match the folder.
    """
    config = recipe.tokenizer
    if config is None:
        return None
    if config.checkpoint is not None:
        return hub.load_tokenizer(config.checkpoint)
    texts = [text for config in recipe.sources.values() for text in get_source_spec(config).read_texts(config)]
    extractors = {
        name: TASKS[stage.task].source_texts
        for stage in recipe.stages
        for name in stage.mixture.weights
        if TASKS[stage.task].source_texts is not None  # a later stage may use the same images without text
    }
    for name, source in sources.items():
        if (extract := extractors.get(name)) is not None:
            texts += extract(source).texts[1:]
    fingerprint = hashlib.sha256(repr((config.vocab_size, texts, *config.special_tokens)).encode()).hexdigest()
    folder, fingerprint_file = out / "tokenizer", "made-of"
    if not (folder / fingerprint_file).is_file() or (folder / fingerprint_file).read_text() != fingerprint:
        assert config.vocab_size is not None
        partial = out / PARTIAL_TOKENIZER
        folder = partial
        shutil.rmtree(partial, ignore_errors=True)
        Tokenizer.train(
            texts, config.vocab_size, special_tokens=(END_OF_TEXT, *config.special_tokens), eos=END_OF_TEXT
        ).save(partial)
        (partial / fingerprint_file).write_text(fingerprint)
    return Tokenizer.load(folder)


def publish_tokenizer(out: Path) -> None:
    """Move a tokenizer that `load_or_train_tokenizer` trained to out/tokenizer."""
    if (out / PARTIAL_TOKENIZER).is_dir():
        shutil.rmtree(out / "tokenizer", ignore_errors=True)
        (out / PARTIAL_TOKENIZER).rename(out / "tokenizer")


def select_stage_sources(sources: SourceMap, stage: StageConfig) -> SourceMap:
    """Return the sources that a stage trains and validates on."""
    return {name: sources[name] for name in (*stage.mixture.weights, *stage.validate)}


def build_model(recipe: Recipe, tokenizer: Tokenizer | None, device: str = "cpu") -> Any:
    """Build the model from its checkpoint, or from its config and the seed, and add LoRA adapters.

    The model is in float32 and on the CPU. With LoRA in bfloat16 stages, the frozen weights are in bfloat16 from the
    start, so that no float32 copy of them exists; NF4 weights are quantized on `device` and stay there.
    """
    torch.manual_seed(recipe.seed)
    part = recipe.model
    dtype = get_weights_dtype(recipe)
    if part.checkpoint is not None:
        model = hub.load(part.checkpoint, dtype=dtype)
        if (tower := image_processor_config.find_image_tower(model)) is not None:
            # Training samples are augmented views, which replace the preprocessing of the checkpoint.
            image_processor_config.fold_normalization(model, tower, image_processor_config.NATIVE_NORMALIZATION)
    else:
        model = MODELS[part.kind](recipe.build_model_config())
        for name in getattr(model, "pretrained_parts", ()):
            if name not in part.parts:
                raise ConfigError(
                    f"the model needs a pretrained {name}", f"add a [model.parts.{name}] table with a checkpoint"
                )
    for name, other in part.parts.items():
        load_pretrained_part(model, name, other)
    if tokenizer is not None:
        check_vocab_size(model.config, tokenizer.vocab_size)
    if recipe.lora is None:
        return model
    add_lora(model.to(dtype), recipe.lora, torch.float32)
    if recipe.lora.quantization is not None:
        quantize_base(model, device)
    return model


def get_weights_dtype(recipe: Recipe) -> torch.dtype:
    """Return the dtype in which the weights of a recipe are loaded."""
    is_narrow = recipe.lora is not None and all(stage.dtype == "bfloat16" for stage in recipe.stages)
    return torch.bfloat16 if is_narrow else torch.float32


# Sub-modules of a tower or a decoder that may be missing in the checkpoint. They keep their random initialization.
OPTIONAL_SUBMODULES = ("mask", "head", "pooler", "fusion")


def _copy_to_experts(target: nn.Module, dense: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """Return the weights of the experts of `target`, copied from the gated MLPs of a dense model, and its routers."""
    found: dict[str, Tensor] = {}
    for path, module in target.named_modules():
        if isinstance(module, MoE) and f"{path}.gate_up.weight" in dense:
            for weight in ("gate_up", "down"):
                found[f"{path}.{weight}"] = dense[f"{path}.{weight}.weight"].expand(module.config.num_experts, -1, -1)
            found[f"{path}.router.weight"] = module.router.weight.detach()
    if not found:
        raise ConfigError(
            f"model.parts.{name}.upcycle is set, but no mixture of experts has a gated MLP in the checkpoint",
            'remove upcycle, or set mlp.kind = "experts" in the config of the part',
        )
    return found


def load_pretrained_part(model: nn.Module, name: str, config: PretrainedPartConfig) -> None:
    """Load the weights of a part of another model into a part of this model."""
    other = hub.load(config.checkpoint, dtype=torch.float32)
    try:
        target = model.get_submodule(name)
        source = other.get_submodule(name if config.part is None else config.part)
    except AttributeError as error:
        raise ConfigError(f"model.parts.{name}: {error}", f"check that {config.checkpoint} has such a part") from None
    image_processor_config.match_normalization(model, target, other, source, config.reinitialize)
    expected = {
        key: tensor for key, tensor in target.state_dict().items() if key.split(".")[0] not in config.reinitialize
    }
    for part in config.reinitialize:
        if not hasattr(target, part):
            raise ConfigError(f"model.parts.{name}.reinitialize names {part!r}, which is not a sub-module", "remove it")
    available = source.state_dict()
    if config.upcycle:
        available |= _copy_to_experts(target, available, name)
    missing = sorted(key for key in expected if key not in available)
    for key in (key for key in expected if key.split(".")[0] not in OPTIONAL_SUBMODULES or key not in missing):
        if key in missing or expected[key].shape != available[key].shape:
            reason = "it is missing" if key in missing else f"its shape is {tuple(available[key].shape)}"
            raise ConfigError(
                f"model.parts.{name} cannot load {key} of shape {tuple(expected[key].shape)} "
                f"from {config.checkpoint}: {reason}",
                f'use the same config, or set reinitialize = ["{key.split(".")[0]}"]',
            )
    target.load_state_dict({key: available[key] for key in expected if key in available}, strict=False)
    if isinstance(target, Decoder) and any(key.startswith("fusion.") for key in missing):
        target.add_fusion(target.config.fusion)  # fusion layers are initialized from the loaded layers
    if missing:
        random = dict.fromkeys(key.split(".")[0] for key in missing)
        sys.stderr.write(f"{name}: loaded from {config.checkpoint}, except {', '.join(random)}\n")
