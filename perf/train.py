"""Training a 1.1B Llama with 8 × 2048 tokens a step: ours against transformers, both compiled, on one H200.

    python perf/train.py --out results.json         # needs a CUDA device

Both sides: bf16 weights with fp32 master weights and moments (fused AdamW on the masters), no activation
checkpointing, cross-entropy over the whole vocabulary. `fraction` is the FLOP rate over 790 TFLOP/s, with
6·N·tokens + 3·4·pairs·heads·head width a layer, where N is the number of all parameters and pairs are those of a causal
mask. `fraction_counted` leaves out the embedding lookup. `trainer` is the same model in `vitrail.training.Trainer` with
its chunked loss, clipping, logging and data loader, without saves. `saving` is the trainer with one asynchronous save
in 100 steps: the time of these steps beyond 100 median steps. The last lines print the manual loop, the trainer and the
overhead of the save in percent.
"""

import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from decode import CONFIG, make_llama_config
from record import make_parser, write_record
from timing import H200_MATRIX_RATE, read_peak_gib, time_calls

from vitrail.backbones.decoder import Decoder
from vitrail.data.sampler import MixtureConfig
from vitrail.nn import Workload, cost
from vitrail.tasks.text_task import TextTask
from vitrail.training.optimizer import OptimConfig
from vitrail.training.stage_config import StageConfig
from vitrail.training.trainer import Trainer

BATCH, LENGTH, WARMUP = 8, 2048, 4
SAVE_FOLDER = os.environ.get("SAVES")  # of checkpoints of 15.4 GB each; default: the folder of temporary files
MEASURED = (
    "vitrail.backbones.decoder",
    "vitrail.nn.block",
    "vitrail.nn.attention",
    "vitrail.nn.attention_backends",
    "vitrail.nn.rotary_embedding",
    "vitrail.training.trainer",
    "vitrail.training.step_loader",
    "vitrail.training.checkpoint_writer",
)


def count_step_flops(parameters: int) -> float:
    """Return the FLOPs of one step by the formula above."""
    attention, layers = CONFIG.block.attention, CONFIG.layers
    pairs = BATCH * LENGTH * (LENGTH + 1) // 2
    return 6 * parameters * BATCH * LENGTH + 3 * 4 * pairs * attention.heads * 64 * layers


def count_ledger_flops() -> int:
    """Return the FLOPs of one step as the ledger counts them: three forward passes without the embedding lookup."""
    with torch.device("meta"):
        return 3 * cost.count_flops(Decoder(CONFIG), Workload.causal_attention(LENGTH, BATCH))


class MasterWeights:
    """fp32 copies of bf16 weights. AdamW updates the copies, which are then copied back."""

    def __init__(self, model: torch.nn.Module):
        self.weights = list(model.parameters())
        self.masters = [w.detach().float() for w in self.weights]
        for m in self.masters:
            m.grad = torch.zeros_like(m)
        self.optimizer = torch.optim.AdamW(self.masters, lr=1e-4, fused=True)

    def step(self) -> None:
        torch._foreach_copy_([m.grad for m in self.masters], [w.grad for w in self.weights])
        self.optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(self.weights, self.masters)
        for w in self.weights:
            w.grad = None


def compute_rates(seconds: float, parameters: int) -> dict[str, float]:
    return {
        "ms": 1000 * seconds,
        "tokens_per_s": BATCH * LENGTH / seconds,
        "fraction": count_step_flops(parameters) / seconds / H200_MATRIX_RATE,
        "fraction_counted": count_ledger_flops() / seconds / H200_MATRIX_RATE,
    }


def measure_loop(model: torch.nn.Module, compute_loss: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, float]:
    """Train in a manual loop on one batch."""
    parameters = sum(p.numel() for p in model.parameters())
    masters, losses = MasterWeights(model), []
    ids = torch.randint(0, CONFIG.vocab_size, (BATCH, LENGTH + 1), device="cuda")
    torch.cuda.reset_peak_memory_stats()

    def run_step() -> None:
        loss = compute_loss(ids)
        loss.backward()
        masters.step()
        losses.append(loss.detach())

    seconds = statistics.median(time_calls(run_step, 10, warmup=3))
    rates = compute_rates(seconds, parameters)
    return {**rates, "parameters": parameters, "loss": losses[-1].item(), "peak_gib": read_peak_gib()}


def measure_ours() -> dict[str, float]:
    with torch.device("cuda"):
        model = Decoder(CONFIG).bfloat16()

    @torch.compile
    def compute_loss(ids: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten())

    return measure_loop(model, compute_loss)


class StepTimer(Trainer):
    """Trainer without saves that records when each step starts. The trainer itself synchronizes once in a step."""

    starts: list[float]

    def _train_step(self, batches: Any) -> dict[str, float]:
        self.starts.append(time.perf_counter())
        return super()._train_step(batches)

    def _save_checkpoint(self) -> None:
        pass


class SingleSaveTrainer(StepTimer):
    """Saves one checkpoint, at the step `save_every`."""

    def _save_checkpoint(self) -> None:
        if self.step == self.stage.save_every:
            Trainer._save_checkpoint(self)


def run_trainer(
    trainer_class: type[StepTimer], steps: int, save_every: int
) -> tuple[list[float], list[dict[str, float]], float]:
    """Train on random tokens. Return the seconds between the starts of steps, the log, and the peak in GiB."""
    with torch.device("cuda"):
        model = Decoder(CONFIG)
    source = [np.random.default_rng(i).integers(0, CONFIG.vocab_size, LENGTH + 1) for i in range(64)]
    stage = StageConfig(
        name="perf",
        task="text",
        steps=steps,
        batch_size=BATCH,
        mixture=MixtureConfig(weights={"random": 1.0}),
        optim=OptimConfig(lr=1e-4),
        dtype="bfloat16",
        compile=True,
        num_workers=2,
        save_every=save_every,
    )
    with tempfile.TemporaryDirectory(dir=SAVE_FOLDER) as folder:
        torch.cuda.reset_peak_memory_stats()
        trainer = trainer_class(stage, TextTask(model), {"random": source}, Path(folder), device="cuda", loggers=())
        trainer.starts = []
        trainer.train()
        rows = [json.loads(line) for line in (Path(folder) / "log.jsonl").read_text().splitlines()]
    seconds = [after - before for before, after in itertools.pairwise(trainer.starts)]
    return seconds[WARMUP:], rows[WARMUP:], read_peak_gib()


def measure_trainer() -> dict[str, float]:
    seconds, rows, peak = run_trainer(StepTimer, WARMUP + 21, WARMUP + 21)
    with torch.device("meta"):
        parameters = sum(p.numel() for p in Decoder(CONFIG).parameters())
    return {
        **compute_rates(statistics.median(seconds), parameters),
        "mfu_shown": statistics.median(row["mfu"] for row in rows),
        "wait": max(row["wait"] for row in rows),
        "peak_gib": peak,
    }


def measure_saving() -> dict[str, float]:
    """Save once in 100 steps. The overhead is their time beyond 100 median steps."""
    save_at, steps = WARMUP + 11, WARMUP + 111
    seconds, _, _ = run_trainer(SingleSaveTrainer, steps, save_at)
    window = seconds[10:110]  # the first of these steps saves
    median = statistics.median(seconds[:10])
    return {
        "save_every": 100,
        "median_ms": 1000 * median,
        "extra_ms": 1000 * (sum(window) - len(window) * median),
        "longest_ms": 1000 * max(window),
        "overhead": sum(window) / (len(window) * median) - 1,
    }


def measure_transformers() -> dict[str, float]:
    from transformers import LlamaForCausalLM

    config = make_llama_config(use_cache=False)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).bfloat16()
    compiled = torch.compile(model)

    def compute_loss(ids: torch.Tensor) -> torch.Tensor:
        logits = compiled(ids[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())

    return measure_loop(model, torch.compile(compute_loss))


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--only", choices=["ours", "trainer", "saving", "transformers"], nargs="+")
    arguments = parser.parse_args()
    result = {}
    for name, run in (
        ("ours", measure_ours),
        ("trainer", measure_trainer),
        ("saving", measure_saving),
        ("transformers", measure_transformers),
    ):
        if not arguments.only or name in arguments.only:
            result[name] = run()
            print(name, json.dumps(result[name]), flush=True)
            write_record(arguments.out, result, MEASURED)
            torch.cuda.empty_cache()
    for name, text in (("ours", "manual loop"), ("trainer", "trainer")):
        if name in result:
            fraction, ms = result[name]["fraction"], result[name]["ms"]
            print(f"{text}: {fraction:.1%} of {H200_MATRIX_RATE / 1e12:.0f} TFLOP/s, {ms:.1f} ms")
    if "saving" in result:
        print(f"save overhead: {result['saving']['overhead']:.1%} of the step time, with one save in 100 steps")


if __name__ == "__main__":
    main()
