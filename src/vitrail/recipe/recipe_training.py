"""Training of recipes: all stages in turn, with resumption."""

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import nn

from vitrail import hub
from vitrail.devices import resolve_device
from vitrail.errors import CheckpointError, ConfigError
from vitrail.hub.checkpoint_info import find_checkpoint, resolve_path
from vitrail.hub.peft_adapters import save_adapter
from vitrail.processing.tokenizer import Tokenizer
from vitrail.recipe.recipe_building import (
    build_model,
    load_or_train_tokenizer,
    open_sources,
    publish_tokenizer,
    select_stage_sources,
)
from vitrail.recipe.recipe_identity import check_checkpoints_exist, check_run_folder, compute_identity, describe_run
from vitrail.recipe.recipe_schema import Recipe
from vitrail.registry import TASKS
from vitrail.tasks.task_spec import SourceMap
from vitrail.training import distributed
from vitrail.training.loggers.metric_logger import select_loggers
from vitrail.training.lora import merge_lora
from vitrail.training.run_lock import check_run_lock, lock_run_folder
from vitrail.training.sharded_init import init_in_shards
from vitrail.training.trainer import Trainer


def train_recipe(
    recipe: Recipe,
    out: Path,
    *,
    stop_after: str | None = None,
    device: str | None = None,
    quiet: bool = False,
    loggers: Sequence[str] | None = None,
) -> nn.Module:
    """Train all stages in turn and save the final weights to out/final. The same call resumes an interrupted run.

    The weights of a run with LoRA are merged; its adapters are saved to out/adapter in the format of PEFT.

    A finished run continues if the last stage has more steps than before.

    With `stop_after` training stops after that stage and saves its weights to out/STAGE/final.

    The metrics go to log.jsonl and to the `loggers` of these names. Default: all that are installed.

    Under torchrun the processes share the work. A run can resume with another number of processes. The returned model
    is complete on rank 0 and sharded on the other ranks.
    """
    final = final_weights_folder(recipe, out, stop_after)
    stages = recipe.stages if stop_after is None else recipe.stages[: 1 + recipe.stage_index(stop_after)]
    check_checkpoints_exist(recipe)
    select_loggers(loggers)  # refuses unknown names
    device = resolve_device(device)
    with ExitStack() as stack:
        stack.enter_context(distributed.init_process_group(device))
        # Rank 0 checks the folder before it writes anything, and builds what is cached on disk.
        distributed.run_on_main_rank(lambda: stack.enter_context(lock_run_folder(out)))
        opened = distributed.run_on_main_rank(lambda: _prepare_run(recipe, out))
        tokenizer, sources, run = opened or _open_run(recipe, out)
        if recipe.lora is not None and recipe.lora.quantization is not None and distributed.get_world_size() > 1:
            raise ConfigError("lora.quantization does not support several ranks", "train in one process")
        model = _build_in_shards(recipe, tokenizer, device)
        recipe.check_stages(model)
        options: dict[str, Any] = {
            "seed": recipe.seed,
            "device": device,
            "identity": compute_identity(run),
            "quiet": quiet,
            "loggers": loggers,
        }
        chat_tokenizer = tokenizer  # with the chat template of the last task that has one
        for i, stage in enumerate(stages):
            task = TASKS[stage.task].make_task(
                model, select_stage_sources(sources, stage), tokenizer, recipe.task_settings(i)
            )
            chat_tokenizer = getattr(task, "chat_tokenizer", chat_tokenizer)
            trainer = Trainer(stage, task, sources, out / stage.name, **options)
            try:
                trainer.train()
            finally:
                report_skipped(sources, out / stage.name)
            if distributed.get_world_size() > 1:
                masters = trainer.optimizer.master_weights()
                if stage is not stages[-1]:  # the next stage shards the weights again
                    next_model = _build_in_shards(recipe, tokenizer, device)
                    distributed.copy_shards(model, next_model, masters)
                    model = next_model
                else:
                    full_model = build_model(recipe, tokenizer) if distributed.get_rank() == 0 else None
                    distributed.gather_weights(model, full_model, masters)
                    model = model if full_model is None else full_model
        if distributed.get_rank() == 0:
            check_run_lock(out)
            if recipe.lora is not None:
                _save_adapter(model, recipe, final.parent / "adapter")
                merge_lora(model)
            _save_final_weights(model, final, chat_tokenizer)
        distributed.barrier()
    return model


def _build_in_shards(recipe: Recipe, tokenizer: Tokenizer | None, device: str) -> Any:
    """Build the model; with several ranks, only the shards of this rank, on the CPU. All ranks must call it."""
    if distributed.get_world_size() == 1:
        return build_model(recipe, tokenizer, device)
    with init_in_shards() as complete:
        return complete(build_model(recipe, tokenizer))


def _open_run(recipe: Recipe, out: Path) -> tuple[Tokenizer | None, SourceMap, dict[str, Any]]:
    """Return the tokenizer, the sources and the description of a run."""
    sources_without_text = open_sources(recipe)
    tokenizer = load_or_train_tokenizer(recipe, out, sources_without_text)
    opened = sources_without_text | ({} if tokenizer is None else open_sources(recipe, tokenizer))
    sources = {name: opened[name] for name in recipe.sources}
    return tokenizer, sources, describe_run(recipe, sources)


def report_skipped(sources: SourceMap, folder: Path) -> None:
    """Write which samples this process and its data workers could not read, to stderr and to FOLDER/skipped.txt."""
    reports = {name: source.report() for name, source in sources.items() if hasattr(source, "report")}
    lines = [f"{name}: {report}" for name, report in reports.items() if report and (report.faults or report.num_cut)]
    if lines:
        sys.stderr.write("".join(f"{line.splitlines()[0]}\n" for line in lines))
        rank = distributed.get_rank()
        (folder / ("skipped.txt" if rank == 0 else f"skipped-{rank}.txt")).write_text("\n".join(lines) + "\n")


def _prepare_run(recipe: Recipe, out: Path) -> tuple[Tokenizer | None, SourceMap, dict[str, Any]]:
    """Open a run and check that its folder belongs to it, before anything in the folder changes."""
    opened = _open_run(recipe, out)
    check_run_folder(opened[-1], out)
    publish_tokenizer(out)
    return opened


def final_weights_folder(recipe: Recipe, out: Path, stop_after: str | None = None) -> Path:
    """Return the folder of the weights that a run saves at its end, or after the stage `stop_after`."""
    if stop_after is None or recipe.stage_index(stop_after) == len(recipe.stages) - 1:
        return out / "final"
    return out / stop_after / "final"


def _save_adapter(model: nn.Module, recipe: Recipe, folder: Path) -> None:
    """Save the adapters in the format of PEFT, or report why this is not possible: the merged weights hold them too."""
    try:
        if others := [part for stage in recipe.stages for part in stage.trainable if ".lora" not in part]:
            raise CheckpointError(f"{others[0]} is trained too", "train LoRA adapters only")
        base = recipe.model.checkpoint
        found = None if base is None else find_checkpoint(resolve_path(base)).family
        save_adapter(model, folder, base, None if found is None else found.name)
    except CheckpointError as error:
        sys.stderr.write(f"no PEFT adapter is saved: {error.problem}\n")


def _save_final_weights(model: nn.Module, folder: Path, tokenizer: Tokenizer | None) -> None:
    try:
        hub.save(getattr(model, "final_model", model), folder, tokenizer)  # without modules that only training needs
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"the final weights cannot be written to {folder}: {error}",
            "free disk space and run the same command again; the last training checkpoint is complete",
        ) from error
