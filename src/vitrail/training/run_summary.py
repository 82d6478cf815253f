"""Text of a training run: the summary before the first step, and the values of the progress bar."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from vitrail.nn.blockwise_quantization import count_parameters
from vitrail.training import distributed
from vitrail.training.stage_config import StageConfig
from vitrail.training.task import SampleSource


def summarize_run(
    stage: StageConfig,
    model: nn.Module,
    sources: Mapping[str, SampleSource],
    device: torch.device,
    folder: Path,
    state_bytes: int,
) -> dict[str, str]:
    """Return what will be trained, as rows of the summary."""
    weights = stage.mixture.weights
    total = sum(weights.values())
    data = (f"{name} ({len(sources[name]):,} samples, {weight / total:.0%})" for name, weight in weights.items())
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    threads = torch.get_num_threads()
    where = f"{device} ({name or f'{threads} thread' + 's' * (threads > 1)}), {stage.dtype}"
    if (ranks := distributed.get_world_size()) > 1:
        where = f"{ranks} × {where}"
    rows = {
        "model": f"{type(model).__name__}, {count_parameters(model):,} parameters, "
        f"{count_parameters(model, trainable=True):,} trainable",
        "data": ", ".join(data),
        "device": where,
        "memory": f"{state_bytes / ranks / 1e9:.2f} GB for weights, gradients and optimizer state, plus activations",
        "steps": f"{stage.steps:,} steps of {stage.batch_size:,} samples",
        "output": str(folder),
    }
    if stage.validate:
        names = ", ".join(f"{name} ({len(sources[name]):,} samples)" for name in stage.validate)
        steps = f"every {stage.validate_every:,} steps" if stage.validate_every else "before the first step"
        rows["validation"] = f"{names}, {steps}"
    return rows


def get_memory_gb(device: torch.device) -> float:
    """Return the peak memory of this process on the device, in GB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 1e9
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def format_progress(values: dict[str, float]) -> dict[str, str]:
    """Return the values that the progress bar or line shows."""
    losses = {key.removeprefix("loss/"): value for key, value in values.items() if key.startswith("loss/")}
    columns = {"loss": f"{values['loss']:.4g}"}
    if len(losses) > 1:
        columns |= {name: f"{value:.4g}" for name, value in losses.items()}
    columns |= {"lr": f"{values['lr']:.2e}", "samples/s": f"{values['samples_per_s']:,.1f}"}
    if "tokens_per_s" in values:
        columns["tokens/s"] = f"{values['tokens_per_s']:,.0f}"
    if "mfu" in values:
        columns["mfu"] = f"{values['mfu']:.0%}"
    return columns | {"wait": f"{values['wait']:.0%}", "mem": f"{values['memory_gb']:.1f}GB"}
