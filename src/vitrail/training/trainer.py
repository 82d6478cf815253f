"""Trainer of one stage. It resumes from the last checkpoint.

The state of a run is its weights, its optimizer state and the step. The samples and random numbers of a step are
functions of the step, so an interrupted run that resumes ends with the same weights.
"""

import contextlib
import hashlib
import math
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from vitrail.devices import get_peak_flops
from vitrail.errors import CheckpointError, ConfigError, TrainError, TrainingInterrupted
from vitrail.nn import Block, disable_cudnn_attention
from vitrail.nn.blockwise_quantization import count_parameters
from vitrail.nn.cuda_graphs import enable_cuda_graphs
from vitrail.nn.parameters import FiniteCheck
from vitrail.training import checkpoint, distributed
from vitrail.training.checkpoint_writer import CheckpointWriter
from vitrail.training.ema import EMA
from vitrail.training.lora import select_saved_tensors
from vitrail.training.memory_errors import report_out_of_memory
from vitrail.training.nonfinite_step import report_nonfinite_step
from vitrail.training.optimizer import Optimizer
from vitrail.training.prefetch import PrefetchIterator
from vitrail.training.rank_monitor import RankMonitor, report_stopped_ranks
from vitrail.training.run_summary import format_progress, get_memory_gb, summarize_run
from vitrail.training.stage_config import StageConfig, set_trainable_parts
from vitrail.training.step_loader import StepLoader
from vitrail.training.stop_signals import StopSignals
from vitrail.training.task import Batch, MeteredTask, PreparedBatchTask, SampleSource, Task, TokenTask
from vitrail.training.train_logger import TrainLogger

SAVE_FAILED = 10**6  # larger than any signal number: a rank noticed that the last save failed


class Trainer:
    """Train one stage. `folder` receives its checkpoints and log."""

    def __init__(
        self,
        stage: StageConfig,
        task: Task,
        sources: Mapping[str, SampleSource],
        folder: Path,
        *,
        seed: int = 0,
        device: str = "cpu",
        identity: str = "",
        quiet: bool = False,
        loggers: Sequence[str] | None = None,
    ):
        self.loggers = loggers
        self.stage, self.task, self.sources, self.folder = stage, task, sources, folder
        self.device, self.identity, self.quiet, self.seed = torch.device(device), identity, quiet, seed
        unknown = [name for name in stage.validate if name not in sources]
        if unknown:
            raise ConfigError(
                f"stage {stage.name!r}: validate names {unknown[0]!r}, which is not a source",
                f"sources: {', '.join(sources)}",
            )
        self.loader = StepLoader(stage, task, sources, seed, pin_memory=self.device.type == "cuda")
        model, alone = task.model, distributed.get_world_size() == 1
        self._given_dtypes = {name: tensor.dtype for name, tensor in _list_tensors(model)}
        # With several ranks, sharding moves the weights: a model that was built in shards stays on the CPU until then.
        weight_device = self.device if alone else None
        set_trainable_parts(model, stage.trainable)
        # Originals of tensors that bfloat16 rounds, in host memory.
        self._unrounded: dict[str, Tensor] = {}
        if stage.dtype == "bfloat16":
            before = {name: t.cpu() for name, t in model.state_dict().items() if alone and _is_rounded(t)}
            model.to(weight_device, torch.bfloat16)
            after = model.state_dict()
            self._unrounded = {name: t for name, t in before.items() if after[name].dtype == torch.bfloat16}
        else:
            model.to(weight_device, torch.float32)
        if stage.gradient_checkpointing:
            _enable_gradient_checkpointing(model)
        self.module = distributed.TaskModule(task)
        distributed.shard_module(self.module, self.device)
        self.optimizer = Optimizer(model, stage.optim)
        for name, master in self.optimizer.master_weights().items():
            if name in self._unrounded:  # the master was copied from the rounded weight
                master.copy_(self._unrounded.pop(name))
        self.ema = None if stage.ema_decay is None else EMA(model, stage.ema_decay)
        self.forward_fn: Callable[[Batch], dict[str, Tensor]] = self.module
        if stage.compile:
            self.forward_fn = torch.compile(self.module, mode="reduce-overhead" if stage.compile == "graphs" else None)
        # A backward pass costs one forward pass, and another one for the trainable weights.
        self._passes_per_step = 2 + count_parameters(model, trainable=True) / count_parameters(model)
        self.step = 0
        self._peak_flops = get_peak_flops(self.device, getattr(torch, stage.dtype))
        self._run_eagerly = bool(stage.compile)  # whether the first pass, which may initialize modules, is to come
        self._signals = StopSignals()
        self._writer: CheckpointWriter | None = None  # of the run in progress
        self._monitor: RankMonitor | None = None
        self._weight_check: FiniteCheck | None = None  # of the weights after the last step
        self._is_compiled = not stage.compile

    # ---- training loop ------------------------------------------------------------------------------------------

    def train(self) -> nn.Module:
        """Train to the end of the stage and return the model."""
        saves = self.folder / "checkpoints"
        self._resume(saves)  # checks the identity of the run before anything is deleted
        if distributed.get_rank() == 0:
            checkpoint.remove_partial_checkpoints(saves)
        distributed.barrier()
        if self.step >= self.stage.steps:
            return self._finalize_model()
        is_main = distributed.get_rank() == 0
        log = TrainLogger(self.folder, self.stage.name, self.step, self.stage.steps, self.quiet, is_main, self.loggers)
        state_bytes = self._count_state_bytes()
        log.write_summary(
            summarize_run(self.stage, self.task.model, self.sources, self.device, self.folder, state_bytes)
        )
        if self.step:
            log.write_message(f"resumed from step {self.step}")
        self.task.model.train()
        stop, self._writer = 0, CheckpointWriter(saves, self.device)
        self._writer.reserve(self._tensor_groups())
        if distributed.get_world_size() > 1:
            self._monitor = RankMonitor(distributed.PREPARATION_TIMEOUT)
        try:
            with (
                self._monitor or contextlib.nullcontext(),
                report_stopped_ranks(self._monitor),
                enable_cuda_graphs(),
                disable_cudnn_attention(),
                self._signals.handle(),
                self.loader.report_dead_workers(lambda: self.step),
                self._writer,
                self._prefetched_steps() as batches,
            ):
                if self.step == 0 and self.stage.validate_first:
                    log.write_row(0, results := self.validate())
                    log.write_validation(0, results)
                while self.step < self.stage.steps and not stop:
                    with self._report_compilation(log), self._report_out_of_memory():
                        values = self._train_step(batches)
                    self.step += 1
                    self._enter("validation and saving")
                    results = {}
                    if self.stage.validate_every and self.step % self.stage.validate_every == 0:
                        results = self.validate()
                    log.write_row(self.step, values | results)
                    log.update_progress(format_progress(values))
                    if results:
                        log.write_validation(self.step, results)
                    # Ranks may receive the signal, or notice a failed save, in different steps.
                    stop = distributed.max_over_ranks(
                        SAVE_FAILED if self._writer.has_failed else self._signals.received
                    )
                    if stop == SAVE_FAILED:
                        self._writer.wait()  # raises on all ranks
                    if self.step % self.stage.save_every == 0 or self.step == self.stage.steps or stop:
                        self._finish_weight_check()
                        log.flush()
                        self._save_checkpoint()
            stop = distributed.max_over_ranks(self._signals.received)  # a signal during the last save
        finally:
            log.close()
        if stop:
            raise TrainingInterrupted(
                f"stopped by {signal.Signals(stop).name} after step {self.step} of {self.stage.steps}; "
                f"the checkpoint is in {saves}",
                "start the same command again to resume",
            )
        return self._finalize_model()

    def _enter(self, phase: str) -> None:
        if self._monitor is not None:
            self._monitor.enter(self.step, phase)

    def _report_out_of_memory(self) -> contextlib.AbstractContextManager[None]:
        ranks = distributed.get_world_size()
        return report_out_of_memory(
            self.stage, self.device, self.step + 1, lambda: self._count_state_bytes() // ranks, ranks
        )

    @contextlib.contextmanager
    def _report_compilation(self, log: TrainLogger) -> Iterator[None]:
        """Report the first compiled step and its duration. Ctrl-C during that step stops the run at once."""
        eager_pass = self._run_eagerly and has_uninitialized_modules(self.task.model)
        if self._is_compiled or eager_pass:
            yield
            return
        log.write_message(f"{self.stage.name}: compiling the model in step {self.step + 1}")
        start, self._signals.interrupt = time.monotonic(), True
        try:
            with warnings.catch_warnings():
                # After an interrupt, autograd would print the traceback of the forward pass as a warning.
                warnings.filterwarnings("ignore", message="Error detected in")
                yield
        except KeyboardInterrupt:
            raise TrainingInterrupted(
                f"stopped during compilation in step {self.step + 1} of {self.stage.steps}",
                "start the same command again to resume",
            ) from None
        finally:
            self._signals.interrupt = False
        self._is_compiled = True
        log.write_message(f"{self.stage.name}: compiled, step {self.step + 1} took {time.monotonic() - start:.1f} s")

    @torch.no_grad()
    def _finalize_model(self) -> nn.Module:
        """Return the model for the next stage: in the dtypes it came with, from master weights and unrounded originals.

        Also remove the patched forward methods. With several ranks, the weights stay sharded; the caller gathers them.
        """
        model = self.task.model
        for module in model.modules():
            if isinstance(module, Block):
                module.__dict__.pop("forward", None)
        if distributed.get_world_size() == 1 and self.stage.dtype == "bfloat16":
            masters = self.optimizer.master_weights()
            for name, tensor in _list_tensors(model):
                tensor.data = tensor.data.to(self._given_dtypes.get(name, tensor.dtype))
            for name, weight in model.named_parameters():
                if name in masters:
                    weight.copy_(masters[name])
            state = model.state_dict()
            for name, before in self._unrounded.items():
                rounded = state[name].to(torch.bfloat16)
                if torch.equal(rounded, before.to(rounded)):  # unchanged, not trained
                    state[name].copy_(before)
        return model

    def _train_step(self, batches: PrefetchIterator) -> dict[str, float]:
        start = time.perf_counter()
        self._enter("loading data")
        micro, prepared, waited = next(batches)
        self._enter("exchanging batch counts")
        torch.manual_seed(_derive_seed(self.seed, self.step, distributed.get_rank()))
        own = [bool(indices) for indices in self.loader.list_own_indices(self.step)]  # a borrowed sample has weight 0
        counts: dict[str, float] = {}
        for batch, weight in zip(micro, own, strict=True):
            for name, count in self.task.count_loss_terms(batch).items():
                counts[name] = counts.get(name, 0) + weight * count
        counts = distributed.sum_over_ranks(counts)
        found: list[tuple[str, bool, Tensor]] = []
        run = self.module if self._run_eagerly and has_uninitialized_modules(self.task.model) else self.forward_fn
        self._run_eagerly = False
        self._enter("forward and backward pass")
        for batch, weight in zip(prepared, own, strict=True):
            if self.stage.compile == "graphs":
                torch.compiler.cudagraph_mark_step_begin()
            losses = run(batch)
            share = sum(self.task.loss_weights[k] * v / max(counts[k], 1) for k, v in losses.items())
            assert isinstance(share, Tensor)
            # FSDP averages gradients over the ranks; the loss needs their sum.
            (share * weight * distributed.get_world_size()).backward()
            batches.prefetch()
            if len(micro) > 1:
                self.optimizer.accumulate()
            found += [(name, weight, loss.detach().clone()) for name, loss in losses.items()]  # graphs reuse memory
        self._enter("update")
        norm = self.optimizer.clip_grad_norm()  # waits for the device, so that the numbers below are ready
        self._finish_weight_check()
        sums = dict.fromkeys(counts, 0.0)
        for name, weight, loss in found:
            sums[name] += weight * loss.item()
        sums = distributed.sum_over_ranks(sums)
        means = {name: sums[name] / max(count, 1) for name, count in counts.items()}
        if not math.isfinite(norm) or not all(map(math.isfinite, means.values())):
            indices = self.loader.list_own_indices(self.step)
            samples = [[self.loader.order[i]._asdict() for i in own] for own in indices]
            report_nonfinite_step(self.folder, self.step + 1, micro, means, norm, self.optimizer, samples)
        scale = self.stage.schedule.lr_factor(self.step, self.stage.steps)
        self.optimizer.step(scale)
        self.optimizer.zero_grad()
        # A half-precision weight is the rounded master weight, and not finite if that one is not.
        self._weight_check = FiniteCheck(dict(self.task.model.named_parameters()))
        if not self._defers_check:
            self._finish_weight_check(self.step + 1)
        if self.ema is not None:
            self.ema.update(self.task.model)
        spent = time.perf_counter() - start
        values = {
            "loss": sum(self.task.loss_weights[name] * mean for name, mean in means.items()),
            **{f"loss/{name}": mean for name, mean in means.items()},
            "grad_norm": norm,
            "lr": self.stage.optim.lr * scale,
            "samples_per_s": self.stage.batch_size / spent,
            "wait": waited / spent,
            "memory_gb": get_memory_gb(self.device),
        }
        if isinstance(self.task, TokenTask):
            tokens = distributed.sum_over_ranks({"tokens": sum(map(self.task.count_tokens, prepared))})["tokens"]
            values["tokens_per_s"] = tokens / spent
        if self._peak_flops is not None:
            values["mfu"] = self._count_flops(micro) / spent / self._peak_flops
        return values

    def _count_flops(self, batches: list[Batch]) -> float:
        """Return the FLOPs of a step on this rank, forward and backward."""
        if isinstance(self.task, MeteredTask):
            return sum(map(self.task.count_step_flops, batches))
        return self._passes_per_step * sum(map(self.task.count_flops, batches))

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """Return the mean losses of the model, and of its EMA, on the validation sources.

        Every rank reads all samples, because all ranks must take part in every pass.
        """
        model, values = self.task.model, {}
        self._finish_weight_check()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # prefetching uses the same tables on another stream
        model.eval()
        kinds: dict[str, contextlib.AbstractContextManager] = {"": contextlib.nullcontext()}
        if self.ema is not None:
            kinds["ema/"] = self.ema.swap_weights(model)
        for label, context in kinds.items():
            with context:
                for name in self.stage.validate:
                    values |= {
                        f"validation/{label}{name}/{key}": v for key, v in self._mean_losses(self.sources[name]).items()
                    }
        model.train()
        return values

    def _mean_losses(self, source: SampleSource) -> dict[str, float]:
        size = max(1, self.stage.batch_size // self.stage.gradient_accumulation_steps)
        sums: dict[str, float] = {}
        counts: dict[str, int] = {}
        for start in range(0, len(source), size):
            batch = self.task.collate([source[i] for i in range(start, min(start + size, len(source)))])
            for name, count in self.task.count_loss_terms(batch).items():
                counts[name] = counts.get(name, 0) + count
            for name, loss in self.module({key: value.to(self.device) for key, value in batch.items()}).items():
                sums[name] = sums.get(name, 0.0) + loss.item()
        distributed.reshard(self.module)
        return {name: sums[name] / max(counts[name], 1) for name in sums}

    # ---- data ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _prefetched_steps(self) -> Iterator[PrefetchIterator]:
        """Yield an iterator over the prepared batches of each step on the device."""
        step, gpus = self.step, [self.device] if self.device.type == "cuda" else []

        def make(micro: list[Batch]) -> list[Batch]:
            nonlocal step
            sent = [{key: value.to(self.device, non_blocking=True) for key, value in batch.items()} for batch in micro]
            if isinstance(self.task, PreparedBatchTask):
                with torch.random.fork_rng(gpus):  # keep the random state of the forward pass
                    torch.manual_seed(_derive_seed(self.seed, step, distributed.get_rank(), "made"))
                    sent = [self.task.prepare_batch(batch) for batch in sent]
            step += 1
            return sent

        with contextlib.closing(self.loader.iterate_batches(self.step)) as batches:
            yield PrefetchIterator(
                (distributed.fill_micro_batches(self.task, micro) for micro in batches), make, self.device
            )

    # ---- checkpoints and signals --------------------------------------------------------------------------------

    # ---- checkpoints --------------------------------------------------------------------------------------------

    def _count_state_bytes(self) -> int:
        """Return the bytes of weights, gradients, optimizer state and EMA, over all ranks."""
        model = self.task.model
        tensors = [*model.parameters(), *model.buffers(), *(p for p in model.parameters() if p.requires_grad)]
        tensors += self.optimizer.state_dict().values()
        if self.ema is not None:
            tensors += self.ema.averages.values()
        return sum(t.numel() * t.element_size() for t in tensors)

    def _tensor_groups(self) -> dict[str, Mapping[str, Tensor]]:
        groups: dict[str, Mapping[str, Tensor]] = {
            "model": select_saved_tensors(self.task.model),
            "optim": self.optimizer.state_dict(),
        }
        return groups if self.ema is None else {**groups, "ema": self.ema.state_dict()}

    def _save_checkpoint(self) -> None:
        assert self._writer is not None
        self._writer.save(self.step, self._tensor_groups(), {"step": self.step, "identity": self.identity})

    def _resume(self, saves: Path) -> None:
        """Load the newest checkpoint that is not damaged. Damaged ones are set aside, with a message."""
        found = distributed.gather_objects(checkpoint.list_steps(saves))[0]
        damaged: list[tuple[Path, CheckpointError]] = []
        for step in reversed(found):
            path = checkpoint.get_checkpoint_path(saves, step)
            try:
                self._load_checkpoint(path)
                break
            except CheckpointError as error:
                damaged.append((path, error))
        else:
            if damaged:
                raise damaged[0][1]
            return
        if distributed.get_rank() == 0:
            for path, error in damaged:
                kept = checkpoint.set_aside(path)
                sys.stderr.write(f"{error.problem}; it is kept as {kept.name}, and training resumes from step {step}\n")
        distributed.barrier()

    def _load_checkpoint(self, path: Path) -> None:
        state = checkpoint.read_checkpoint_state(path)
        if state.get("identity") != self.identity:
            raise TrainError(
                f"{path.parent} belongs to a run of another recipe",
                "use another --out, or the recipe and settings of that run",
            )
        groups = self._tensor_groups()
        checkpoint.load_checkpoint(path, groups)  # in place; load_state_dict below reads the counters
        self.optimizer.load_state_dict(groups["optim"])
        if self.ema is not None:
            self.ema.load_state_dict(groups["ema"])
        self.step = int(state["step"])

    @property
    def _defers_check(self) -> bool:
        """Whether the next step starts before the result of the weight check is read, so that a GPU never waits."""
        return self.device.type == "cuda"

    def _finish_weight_check(self, step: int | None = None) -> None:
        """Raise if the last step, by default `self.step`, made a weight NaN or infinite, before anything is saved."""
        check, self._weight_check = self._weight_check, None
        bad = [] if check is None else check.find_nonfinite()
        if check is None or not distributed.max_over_ranks(len(bad)):
            return
        if self._writer is not None:
            self._writer.settle()
        saved = checkpoint.list_steps(self.folder / "checkpoints")
        kept = f"the checkpoint of step {saved[-1]} is kept" if saved else "there is no checkpoint before it"
        where = f"{len(bad)} weights, first {bad[0]!r}," if bad else "weights of another rank"
        raise TrainError(
            f"step {self.step if step is None else step} made {where} NaN or infinite; {kept}",
            "lower the learning rate (stages.N.optim.lr) or max_grad_norm, and start a new run (another --out)",
        )


def _list_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and buffers that casts of the model change."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_floating_point():
            yield name, tensor


def _is_rounded(tensor: Tensor) -> bool:
    """Return whether bfloat16 cannot hold a tensor exactly."""
    if not tensor.is_floating_point() or tensor.dtype == torch.bfloat16:
        return False
    return not torch.equal(tensor.to(torch.bfloat16).to(tensor.dtype), tensor)


def has_uninitialized_modules(model: nn.Module) -> bool:
    """Return whether a module, such as a codebook, initializes itself from the first batch.

    That pass runs eagerly: the compiler would break the graph there and recompile it for the second pass.
    """
    return any(module.training and not getattr(module, "is_initialized", True) for module in model.modules())


def _derive_seed(seed: int, step: int, rank: int, purpose: str = "") -> int:
    """Return the seed of the random numbers of one rank in one step, for one purpose."""
    return int.from_bytes(hashlib.blake2b(f"{seed},{step},{rank}{purpose}".encode(), digest_size=8).digest())


def _enable_gradient_checkpointing(model: nn.Module) -> None:
    """Make every block save only its input and recompute its activations in the backward pass."""
    from torch.utils.checkpoint import checkpoint as recompute

    for module in model.modules():
        if isinstance(module, Block):
            module.forward = partial(recompute, module.forward, use_reentrant=False)
