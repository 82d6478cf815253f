"""Training a 1.1B Llama, 8 × 2048 tokens a step: ours against transformers, both compiled, both on one H200.

    python perf/train.py --out results.json         # needs a CUDA device

Both sides: bf16 weights with fp32 master weights and moments (fused AdamW on the masters), no activation
checkpointing, cross-entropy over the whole vocabulary. The rate is (6·N·tokens + attention) / time with N all
parameters and attention 3 · 4 · pairs · heads · head width a layer, pairs those a causal mask allows; the fraction is
of 790 TFLOP/s. `fraction_counted` leaves out the embedding, which is looked up and not multiplied. `trainer` is the
same model under `vitrail.train`'s own loop, with its chunked loss, clipping, logging and data loader; nothing is saved.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from decode import CONFIG, llama_config
from record import record

from vitrail.backbones.decoder import Decoder
from vitrail.data.order import Mixture
from vitrail.nn import Work, cost
from vitrail.tasks.text import TextTask
from vitrail.train.optim import OptimConfig
from vitrail.train.stage import StageConfig
from vitrail.train.trainer import Trainer

BATCH, LENGTH, RATE = 8, 2048, 790e12
MEASURED = (
    "vitrail.backbones.decoder",
    "vitrail.nn.block",
    "vitrail.nn.attention",
    "vitrail.nn.attend",
    "vitrail.nn.rotary",
)


def work(parameters: int) -> float:
    """Operations of one step, by the pinned formula."""
    attention, layers = CONFIG.block.attention, CONFIG.layers
    pairs = BATCH * LENGTH * (LENGTH + 1) // 2
    return 6 * parameters * BATCH * LENGTH + 3 * 4 * pairs * attention.heads * 64 * layers


def counted() -> int:
    """Operations of one step as the ledger counts them: three forwards, in which looking up an embedding is free."""
    with torch.device("meta"):
        return 3 * cost.flops(Decoder(CONFIG), Work.causal(LENGTH, BATCH))


class Masters:
    """fp32 copies of bf16 weights that AdamW steps, and the way back."""

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


def measure(model: torch.nn.Module, loss: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, float]:
    parameters = sum(p.numel() for p in model.parameters())
    masters = Masters(model)
    ids = torch.randint(0, CONFIG.vocab, (BATCH, LENGTH + 1), device="cuda")
    times = []
    torch.cuda.reset_peak_memory_stats()
    for i in range(13):
        torch.cuda.synchronize()
        start = time.perf_counter()
        value = loss(ids)
        value.backward()
        masters.step()
        torch.cuda.synchronize()
        if i >= 3:
            times.append(time.perf_counter() - start)
    time_ = sorted(times)[len(times) // 2]
    return {
        "ms": 1000 * time_,
        "tokens_per_s": BATCH * LENGTH / time_,
        "fraction": work(parameters) / time_ / RATE,
        "fraction_counted": counted() / time_ / RATE,
        "parameters": parameters,
        "loss": value.item(),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
    }


def ours() -> dict[str, float]:
    with torch.device("cuda"):
        model = Decoder(CONFIG).bfloat16()

    @torch.compile
    def loss(ids: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten())

    return measure(model, loss)


def by_trainer() -> dict[str, float]:
    class Unsaved(Trainer):
        def _save(self, saves: Path) -> None:
            pass

    with torch.device("cuda"):
        model = Decoder(CONFIG)
    source = [np.random.default_rng(i).integers(0, CONFIG.vocab, LENGTH + 1) for i in range(64)]
    stage = StageConfig(
        name="perf",
        task="text",
        steps=16,
        batch=BATCH,
        mixture=Mixture(weights={"random": 1.0}),
        optim=OptimConfig(lr=1e-4),
        dtype="bfloat16",
        compile=True,
        workers=2,
    )
    with tempfile.TemporaryDirectory() as folder:
        torch.cuda.reset_peak_memory_stats()
        Unsaved(stage, TextTask(model), {"random": source}, Path(folder), device="cuda").train()
        rows = [json.loads(line) for line in (Path(folder) / "log.jsonl").read_text().splitlines()][3:]
    rate = sorted(row["tokens_per_s"] for row in rows)[len(rows) // 2]
    time_ = BATCH * LENGTH / rate
    return {
        "ms": 1000 * time_,
        "tokens_per_s": rate,
        "fraction": work(sum(p.numel() for p in model.parameters())) / time_ / RATE,
        "fraction_counted": counted() / time_ / RATE,
        "mfu_shown": sorted(row["mfu"] for row in rows)[len(rows) // 2],
        "wait": max(row["wait"] for row in rows),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
    }


def theirs() -> dict[str, float]:
    from transformers import LlamaForCausalLM

    config = llama_config(use_cache=False)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).bfloat16()
    compiled = torch.compile(model)

    def loss(ids: torch.Tensor) -> torch.Tensor:
        logits = compiled(ids[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())

    return measure(model, torch.compile(loss))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", choices=["ours", "trainer", "transformers"])
    arguments = parser.parse_args()
    result = {}
    for name, run in (("ours", ours), ("trainer", by_trainer), ("transformers", theirs)):
        if arguments.only in (None, name):
            result[name] = run()
            print(name, json.dumps(result[name]), flush=True)
            record(arguments.out, result, *MEASURED)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
