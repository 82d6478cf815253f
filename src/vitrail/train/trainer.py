"""The training loop: one stage, from wherever it stopped, to its end.

The state of a run is its weights, its optimizer and one integer, the step; the samples of a step and its random numbers
follow from it. So the same command goes on after any death, and ends with the same weights.
"""

import contextlib
import gc
import hashlib
import json
import math
import signal
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from vitrail.data.order import Draw, Order
from vitrail.errors import ConfigError, Stopped, TrainError
from vitrail.nn import Block, sound_gradients
from vitrail.nn.replay import recording
from vitrail.train import checkpoint, distributed
from vitrail.train.ahead import Ahead
from vitrail.train.ema import EMA
from vitrail.train.log import Log
from vitrail.train.optim import Optimizer
from vitrail.train.stage import StageConfig, choose_trainable
from vitrail.train.task import Batch, MadeTask, MeteredTask, Source, Task, Varied


class Samples(Dataset):
    """index → sample, by the order."""

    def __init__(self, order: Order, sources: Mapping[str, Source]):
        self.order, self.sources = order, sources
        self.varied = {name for name, source in sources.items() if isinstance(source, Varied)}

    def __getitem__(self, index: int) -> Any:
        draw: Draw = self.order[index]
        source = self.sources[draw.source]
        if draw.source in self.varied:
            return source.sample(draw.item, (self.order.seed, index))  # type: ignore[attr-defined]
        return source[draw.item]


class _Numbers:
    """The sample numbers of every batch to come, made when they are asked for."""

    def __init__(self, of_step: Callable[[int], list[list[int]]], start: int, stop: int):
        self.of_step, self.start, self.stop = of_step, start, stop

    def __iter__(self) -> Iterator[list[int]]:
        for step in range(self.start, self.stop):
            yield from self.of_step(step)


def _unmoved(_worker: int) -> None:
    """A signal to the whole group is for the run to answer: it ends the step, saves, and then the workers. What the run
    left to be collected is for the run, too: tensors of a GPU, say, which a forked process dies of freeing."""
    gc.freeze()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


class Trainer:
    """Trains one stage in `folder`, which holds its checkpoints and its log."""

    def __init__(
        self,
        stage: StageConfig,
        task: Task,
        sources: Mapping[str, Source],
        folder: Path,
        *,
        seed: int = 0,
        device: str = "cpu",
        identity: str = "",
        quiet: bool = False,
    ):
        self.stage, self.task, self.sources, self.folder = stage, task, sources, folder
        self.device, self.identity, self.quiet, self.seed = torch.device(device), identity, quiet, seed
        unknown = [name for name in stage.judge if name not in sources]
        if unknown:
            raise ConfigError(f"stage {stage.name!r} is judged on {unknown[0]!r}, which is no source")
        self.order = Order(stage.mixture, {name: len(s) for name, s in sources.items()}, seed)
        model, alone = task.model, distributed.size() == 1
        model.to(self.device, torch.float32)
        choose_trainable(model, stage.train)
        self._exact: dict[str, Tensor] = {}  # what is rounded and not stepped, as it came
        if stage.dtype == "bfloat16":
            before = {name: t.detach().clone() for name, t in model.state_dict().items()} if alone else {}
            model.to(torch.bfloat16)
            rounded = {name for name, t in model.state_dict().items() if t.dtype == torch.bfloat16}
            self._exact = {name: t for name, t in before.items() if name in rounded}
        if stage.recompute:
            _recompute(model)
        self.whole = distributed.Whole(task)
        distributed.shard(self.whole, self.device)
        self.optimizer = Optimizer(model, stage.optim)
        for name, master in self.optimizer.masters().items():
            if name in self._exact:  # made of the rounded weight
                master.copy_(self._exact.pop(name))
        self.ema = None if stage.ema is None else EMA(model, stage.ema)
        self.run: Callable[[Batch], dict[str, Tensor]] = self.whole
        if stage.compile:
            self.run = torch.compile(self.whole, mode="reduce-overhead" if stage.compile == "graphs" else None)
        # A backward pass goes through every weight, and once more through those that train.
        sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
        self._passes = 2 + sum(n for n, trains in sizes if trains) / sum(n for n, _ in sizes)
        self.step = 0
        self._eager = bool(stage.compile)  # whether a pass is yet to come in which parts may begin
        self._stop = 0  # the signal that asked for it

    # ---- the loop -----------------------------------------------------------------------------------------------

    def train(self) -> nn.Module:
        """Run to the end of the stage, and give the model."""
        saves = self.folder / "checkpoints"
        if distributed.rank() == 0:
            checkpoint.sweep(saves)
        distributed.wait()
        self._resume(saves)
        if self.step >= self.stage.steps:
            return self._settled()
        log = Log(self.folder, self.stage.name, self.step, self.stage.steps, self.quiet, distributed.rank() == 0)
        if self.step:
            log.say(f"goes on from step {self.step}")
        rate = _matrix_rate(self.device, getattr(torch, self.stage.dtype))
        self.task.model.train()
        stop = 0
        try:
            with recording(), sound_gradients(), self._signals(), self._workers(), self._ready() as batches:
                if self.step == 0 and self.stage.judge and self.stage.judge_first:
                    log.row(0, self.judge())
                while self.step < self.stage.steps and not stop:
                    values = self._one_step(batches, rate)
                    self.step += 1
                    if self.stage.judge_every and self.step % self.stage.judge_every == 0:
                        values |= self.judge()
                    log.row(self.step, values)
                    log.tick(_shown(values))
                    stop = distributed.most(self._stop)  # a signal reaches the ranks in different steps
                    if self.step % self.stage.save_every == 0 or self.step == self.stage.steps or stop:
                        log.flush()
                        self._save(saves)
            stop = distributed.most(self._stop)  # one that came while the last step was being saved counts too
        finally:
            log.close()
        if stop:
            raise Stopped(
                f"stopped by {signal.Signals(stop).name} after step {self.step} of {self.stage.steps}, "
                f"which is saved in {saves}",
                "start the same command again to go on",
            )
        return self._settled()

    @torch.no_grad()
    def _settled(self) -> nn.Module:
        """The model as the next stage finds it: in float32, exact where it has masters or was left alone, and without
        our patches. Many ranks hold shards still, which are put together from outside."""
        model = self.task.model
        for module in model.modules():
            if isinstance(module, Block):
                module.__dict__.pop("forward", None)
        if distributed.size() == 1 and self.stage.dtype == "bfloat16":
            masters = self.optimizer.masters()
            model.float()
            for name, weight in model.named_parameters():
                if name in masters:
                    weight.copy_(masters[name])
            state = model.state_dict()
            for name, before in self._exact.items():
                if torch.equal(state[name].to(torch.bfloat16), before.to(torch.bfloat16)):  # a buffer may have moved on
                    state[name].copy_(before)
        return model

    def _one_step(self, batches: Ahead, rate: float) -> dict[str, float]:
        start = time.perf_counter()
        micro, made, waited = next(batches)
        torch.manual_seed(_seed(self.seed, self.step, distributed.rank()))
        own = [bool(indices) for indices in self._indices(self.step)]  # what is borrowed weighs nothing
        counts: dict[str, float] = {}
        for batch, weight in zip(micro, own, strict=True):
            for name, count in self.task.counts(batch).items():
                counts[name] = counts.get(name, 0) + weight * count
        counts = distributed.total(counts)
        sums = dict.fromkeys(counts, 0.0)
        run = self.whole if self._eager and unbegun(self.task.model) else self.run
        self._eager = False
        for batch, weight in zip(made, own, strict=True):
            if self.stage.compile == "graphs":
                torch.compiler.cudagraph_mark_step_begin()
            losses = run(batch)
            share = sum(self.task.weights[k] * v / max(counts[k], 1) for k, v in losses.items())
            assert isinstance(share, Tensor)
            # Gradients are averaged over the ranks, and should be summed.
            (share * weight * distributed.size()).backward()
            batches.begin()
            if len(micro) > 1:
                self.optimizer.accumulate()
            for name, loss in losses.items():
                sums[name] += weight * loss.item()
        sums = distributed.total(sums)
        means = {name: sums[name] / max(count, 1) for name, count in counts.items()}
        norm = self.optimizer.clip()
        if not math.isfinite(norm) or not all(map(math.isfinite, means.values())):
            self._report(micro, means, norm)
        scale = self.stage.schedule.scale(self.step, self.stage.steps)
        self.optimizer.step(scale)
        self.optimizer.zero_grad()
        if self.ema is not None:
            self.ema.update(self.task.model)
        spent = time.perf_counter() - start
        if isinstance(self.task, MeteredTask):
            tokens = distributed.total({"useful": sum(map(self.task.useful, made))})["useful"]
            flops = sum(map(self.task.step_flops, micro))
        else:
            tokens, flops = max(counts.values(), default=0), self._passes * sum(map(self.task.flops, micro))
        return {
            "loss": sum(self.task.weights[name] * mean for name, mean in means.items()),
            **{f"loss/{name}": mean for name, mean in means.items()},
            "norm": norm,
            "rate": self.stage.optim.lr * scale,
            "tokens_per_s": tokens / spent,
            "mfu": flops / spent / rate,
            "wait": waited / spent,
            "memory_gb": _memory(self.device),
        }

    @torch.no_grad()
    def judge(self) -> dict[str, float]:
        """Mean losses of the live model (and of the average, where one is kept) on the sources it is judged on; every
        rank reads them all, since all must take part in every pass."""
        model, values = self.task.model, {}
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # samples of the next step are being made, of the same tables
        model.eval()
        kinds: dict[str, contextlib.AbstractContextManager] = {"": contextlib.nullcontext()}
        if self.ema is not None:
            kinds["ema/"] = self.ema.swapped(model)
        for label, held in kinds.items():
            with held:
                for name in self.stage.judge:
                    values |= {
                        f"judge/{label}{name}/{key}": v for key, v in self._mean_losses(self.sources[name]).items()
                    }
        model.train()
        return values

    def _mean_losses(self, source: Source) -> dict[str, float]:
        size = max(1, self.stage.batch // self.stage.accumulate)
        sums: dict[str, float] = {}
        counts: dict[str, int] = {}
        for start in range(0, len(source), size):
            batch = self.task.collate([source[i] for i in range(start, min(start + size, len(source)))])
            for name, count in self.task.counts(batch).items():
                counts[name] = counts.get(name, 0) + count
            for name, loss in self.whole({key: value.to(self.device) for key, value in batch.items()}).items():
                sums[name] = sums.get(name, 0.0) + loss.item()
        distributed.let_go(self.whole)
        return {name: sums[name] / max(counts[name], 1) for name in sums}

    # ---- samples ------------------------------------------------------------------------------------------------

    def _indices(self, step: int) -> list[list[int]]:
        """This rank's sample indices in each micro-batch of a step; none where there are more ranks than samples."""
        size = self.stage.batch // self.stage.accumulate
        first, rank, ranks = step * self.stage.batch, distributed.rank(), distributed.size()
        return [
            list(range(first + m * size + rank, first + (m + 1) * size, ranks)) for m in range(self.stage.accumulate)
        ]

    def _read(self, step: int) -> list[list[int]]:
        """The indices that this rank reads: its own, or, since it must run too, one borrowed from the first rank."""
        size = self.stage.batch // self.stage.accumulate
        return [ids or [step * self.stage.batch + m * size] for m, ids in enumerate(self._indices(step))]

    @contextlib.contextmanager
    def _ready(self) -> Iterator[Ahead]:
        """Every step's samples, on the device."""
        step, gpus = self.step, [self.device] if self.device.type == "cuda" else []

        def make(micro: list[Batch]) -> list[Batch]:
            nonlocal step
            sent = [{key: value.to(self.device, non_blocking=True) for key, value in batch.items()} for batch in micro]
            if isinstance(self.task, MadeTask):
                with torch.random.fork_rng(gpus):  # a pass may draw too, before and after
                    torch.manual_seed(_seed(self.seed, step, distributed.rank(), "made"))
                    sent = [self.task.made(batch) for batch in sent]
            step += 1
            return sent

        with contextlib.closing(self._batches()) as batches:
            yield Ahead((distributed.filled(self.task, micro) for micro in batches), make, self.device)

    def _batches(self) -> Generator[list[Batch], None, None]:
        loader = DataLoader(
            Samples(self.order, self.sources),
            batch_sampler=_Numbers(self._read, self.step, self.stage.steps),  # pyrefly: ignore
            worker_init_fn=_unmoved,
            collate_fn=self.task.collate,
            num_workers=self.stage.workers,
            pin_memory=self.device.type == "cuda",
            generator=torch.Generator(),  # its own, so that reading draws nothing from the run's
        )
        stream: Any = iter(loader)
        try:
            for _ in range(self.step, self.stage.steps):
                yield [next(stream) for _ in range(self.stage.accumulate)]
        finally:
            if workers := getattr(stream, "_workers", ()):
                stream._shutdown_workers()
                for worker in workers:
                    worker.kill()  # one that is busy does not hear that it should end, see `_unmoved`
                    worker.join()

    @contextlib.contextmanager
    def _workers(self) -> Iterator[None]:
        """A worker that dies is noticed wherever the run happens to be; its death is said plainly."""
        try:
            yield
        except RuntimeError as error:
            if "DataLoader worker" not in str(error):
                raise
            raise TrainError(
                f"a data worker died in step {self.step + 1}: {error}",
                "free memory or use fewer workers (stages.N.workers), and start the command again",
            ) from error

    # ---- surviving ----------------------------------------------------------------------------------------------

    def _groups(self) -> dict[str, Mapping[str, Tensor]]:
        groups: dict[str, Mapping[str, Tensor]] = {
            "model": self.task.model.state_dict(),
            "optim": self.optimizer.state_dict(),
        }
        return groups if self.ema is None else {**groups, "ema": self.ema.state_dict()}

    def _save(self, saves: Path) -> None:
        checkpoint.save(saves, self.step, self._groups(), {"step": self.step, "identity": self.identity})

    def _resume(self, saves: Path) -> None:
        found = distributed.gather(checkpoint.steps(saves))[0]
        if not found:
            return
        path = checkpoint.path_of(saves, found[-1])
        state = checkpoint.state(path)
        if state.get("identity") != self.identity:
            raise TrainError(
                f"{saves} holds a run of another recipe",
                "give another --out, or the recipe and settings it was started with",
            )
        groups = self._groups()
        checkpoint.load(path, groups)  # into the live tensors; what is a mere number is taken from them below
        self.optimizer.load_state_dict(groups["optim"])
        if self.ema is not None:
            self.ema.load_state_dict(groups["ema"])
        self.step = int(state["step"])

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGTERM and SIGINT let the step end and be saved; a second is obeyed once torch has a hand free."""

        def note(number: int, _frame: Any) -> None:
            self._stop = number
            signal.signal(number, old[number])

        old: dict[int, Any] = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            for number in old:
                signal.signal(number, note)
        except ValueError:  # not the main thread, where signals cannot be set and do not arrive
            old = {}
        try:
            yield
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)

    def _report(self, micro: list[Batch], means: dict[str, float], norm: float) -> None:
        """A step that is not a number ends the run, with all that is needed to see why."""
        from safetensors.torch import save_file

        draws = [[self.order[i]._asdict() for i in ids] for ids in self._indices(self.step)]
        about = self.folder / f"bad-step-{self.step + 1:08}"
        if distributed.size() > 1:
            about /= f"rank-{distributed.rank()}"
        about.mkdir(parents=True, exist_ok=True)
        broken, learn = self.optimizer.broken(), len(self.optimizer.slots)
        seen = {"losses": means, "norm": norm, "broken gradients": broken, "samples": draws}
        (about / "samples.json").write_text(json.dumps(seen, indent=1))
        # Copies: ids and targets are often two views of one tensor, which the format refuses.
        copies = {f"{m}.{k}": v.clone().contiguous() for m, b in enumerate(micro) for k, v in b.items()}
        save_file(copies, about / "batch.safetensors")
        raise TrainError(
            f"step {self.step + 1} is not a number: losses {means}, gradient norm {norm}"
            + (f", broken in {len(broken)} of {learn} parameters, the last of them {broken[-1]}" if broken else "")
            + f"; its batch is in {about}",
            "look at them; mend the data, or lower the rate in a run of its own (another --out)",
        )


def unbegun(model: nn.Module) -> bool:
    """Whether a part, such as a codebook, makes its start of the first batch: with loops, and once, so that a compiler
    would break the pass there and compile it anew for the second."""
    return any(module.training and not getattr(module, "begun", True) for module in model.modules())


def _seed(seed: int, step: int, rank: int, what: str = "") -> int:
    """Of the random numbers that one rank draws in one step, for one purpose."""
    return int.from_bytes(hashlib.blake2b(f"{seed},{step},{rank}{what}".encode(), digest_size=8).digest())


def _recompute(model: nn.Module) -> None:
    """Make every block keep its input alone."""
    from torch.utils.checkpoint import checkpoint as recompute

    for module in model.modules():
        if isinstance(module, Block):
            plain = module.forward
            module.forward = lambda *given, _plain=plain, **more: recompute(_plain, *given, use_reentrant=False, **more)


def _matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second of a large product on this device: what a full use of it is measured against. A CPU that has
    to emulate half precision takes a thousand times as long, so that there the first may be the last."""
    n = 8192 if device.type == "cuda" else 512
    a = torch.randn(n, n, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    best, begun = math.inf, time.perf_counter()
    for _ in range(8):
        start = time.perf_counter()
        if best < math.inf and device.type != "cuda" and start - begun > 0.2:
            break
        a @ a
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return 2 * n**3 / best


def _memory(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 1e9
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def _shown(values: dict[str, float]) -> dict[str, str]:
    """What the bar has room for."""
    by_kind = {key.removeprefix("loss/"): f"{v:.3f}" for key, v in values.items() if key.startswith("loss/")}
    return {
        **by_kind,
        "tok/s": f"{values['tokens_per_s']:,.0f}",
        "mfu": f"{values['mfu']:.0%}",
        "wait": f"{values['wait']:.0%}",
        "mem": f"{values['memory_gb']:.1f}GB",
    }
