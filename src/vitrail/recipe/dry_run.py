"""Dry runs: what training a recipe takes, without data, weights or a device."""

from collections.abc import Iterator

import torch
from torch import nn

from vitrail.errors import ConfigError
from vitrail.hub.checkpoint_info import find_checkpoint, resolve_path
from vitrail.lab.cost_ledger import DEVICES, compute_ledger
from vitrail.plots.ledger_plot import format_si
from vitrail.recipe.recipe_schema import Recipe
from vitrail.registry import MODELS
from vitrail.training.lora import add_lora
from vitrail.training.stage_config import StageConfig, set_trainable_parts

REFERENCE_DEVICE = "h200"
BYTES_PER_PARAMETER = {"float32": 4, "bfloat16": 2}


def format_dry_run(recipe: Recipe) -> Iterator[str]:
    """Yield lines: modules with parameters, and for every stage its steps, samples, memory, FLOPs and time.

    Memory counts weights, gradients, master weights and two optimizer states of the trainable parameters; activations
    come on top. The time assumes the peak rate of the reference device.
    """
    if recipe.model.checkpoint is None:
        model_class, config = MODELS[recipe.model.kind], recipe.build_model_config()
    else:
        found = find_checkpoint(resolve_path(recipe.model.checkpoint))
        model_class, config = found.model_class, found.config
    with torch.device("meta"):
        model = model_class(config)
    if recipe.lora is not None:
        add_lora(model, recipe.lora)
    yield f"{recipe.name}: {recipe.description}"
    yield f"model: {type(model).__name__}, {_count(model):,} parameters"
    for name, module in model.named_children():
        if _count(module):
            yield f"  {name:22} {_count(module):>15,}"
    for stage in recipe.stages:
        set_trainable_parts(model, stage.trainable)
        yield from _format_stage(stage, model, _training_flops(recipe, stage, config))


def _format_stage(stage: StageConfig, model: nn.Module, flops: float | None) -> Iterator[str]:
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    weights = BYTES_PER_PARAMETER[stage.dtype]
    master = 4 if stage.dtype == "bfloat16" else 0
    memory = weights * _count(model) + (weights + master + 8) * trainable
    yield f"stage {stage.name}: task {stage.task}, {trainable:,} trainable parameters"
    yield f"  steps {stage.steps:,}, batch size {stage.batch_size:,}, samples {stage.steps * stage.batch_size:,}"
    yield f"  memory {format_si(memory, 'B')} plus activations"
    if flops is None:
        yield "  FLOPs: the cost ledger does not support this model"
    else:
        seconds = format_si(flops / DEVICES[REFERENCE_DEVICE].flops, "s")
        yield f"  about {format_si(flops, 'FLOP')}: {seconds} at the peak rate of one {REFERENCE_DEVICE}"


def _training_flops(recipe: Recipe, stage: StageConfig, config: object) -> float | None:
    """Estimate the training FLOPs of a stage as if all parameters were trainable, or None if they are unknown."""
    sources = [recipe.sources[name] for name in stage.mixture.weights]
    tokens = max((getattr(source, "window_length", 0) for source in sources), default=0)
    tokens = tokens or stage.settings.get("max_length", 0) or 64
    try:
        ledger = compute_ledger(config, context_length=tokens, devices=(), context_lengths=())  # type: ignore[arg-type]
    except ConfigError:
        return None
    inputs = stage.steps * stage.batch_size
    return ledger.training_flops * inputs * (tokens if ledger.input_kind == "prompt" else 1)


def _count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
