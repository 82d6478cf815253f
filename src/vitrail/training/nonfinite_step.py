"""Report of a step whose loss or gradient is NaN or infinite, with its batch."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from vitrail.errors import TrainError
from vitrail.training import distributed
from vitrail.training.optimizer import Optimizer
from vitrail.training.task import Batch


def report_nonfinite_step(
    folder: Path,
    step: int,
    micro_batches: Sequence[Batch],
    losses: dict[str, float],
    grad_norm: float,
    optimizer: Optimizer,
    samples: list[list[dict[str, Any]]],
) -> NoReturn:
    """Save the micro-batches of a step and their samples for inspection, and raise."""
    from safetensors.torch import save_file

    folder = folder / f"bad-step-{step:08}"
    if distributed.get_world_size() > 1:
        folder /= f"rank-{distributed.get_rank()}"
    folder.mkdir(parents=True, exist_ok=True)
    broken, trainable = optimizer.find_nonfinite_gradients(), len(optimizer.parameter_states)
    report = {"losses": losses, "grad_norm": grad_norm, "broken gradients": broken, "samples": samples}
    (folder / "samples.json").write_text(json.dumps(report, indent=1))
    # Copies, because safetensors rejects tensors that share memory, as ids and targets often do.
    copies = {f"{m}.{k}": v.clone().contiguous() for m, b in enumerate(micro_batches) for k, v in b.items()}
    save_file(copies, folder / "batch.safetensors")
    raise TrainError(
        f"NaN or infinite loss in step {step}: losses {losses}, gradient norm {grad_norm}"
        + (f", not finite in {len(broken)} of {trainable} parameters, last {broken[-1]}" if broken else "")
        + f"; its batch is saved to {folder}",
        "inspect the batch; correct the data, or lower the learning rate in a new run (another --out)",
    )
