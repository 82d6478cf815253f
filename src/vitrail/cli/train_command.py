"""`vitrail train`: train a recipe."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from vitrail import recipe as recipes
from vitrail.errors import ConfigError
from vitrail.registry import LOGGERS

LOGGER_HELP = (
    f"Where metrics go besides log.jsonl: {', '.join(LOGGERS)}. May be repeated. Default: all that are installed."
)


def train_recipe(
    recipe: str,
    /,
    *overrides: str,
    out: Path | None = None,
    dry_run: Annotated[bool, Parameter(negative="")] = False,
    stop_after: str | None = None,
    start_stage: str | None = None,
    checkpoint: str | None = None,
    device: str | None = None,
    logger: Annotated[list[str] | None, Parameter(negative="", help=LOGGER_HELP)] = None,
) -> None:
    """Train a recipe. The same command resumes an interrupted run. The final weights are saved to OUT/final.

    A finished run is extended by more steps in its last stage: stages.0.steps=2000

    Parameters
    ----------
    recipe
        Name of a recipe (see `vitrail recipes`) or a .toml file.
    overrides
        Settings to change, as key=value with dotted keys: stages.0.steps=500 seed=3
    out
        Folder for checkpoints, logs and the final weights.
    dry_run
        Only print the modules with their parameters, and for every stage steps, samples, memory, FLOPs and time.
    stop_after
        Stop after this stage and save its weights to OUT/STAGE/final. The same command without it continues.
    start_stage
        Train from this stage on. Needs `--checkpoint`: a model that is trained through all stages before it.
    checkpoint
        The model for `--start-stage`: a folder, such as OUT/STAGE/final of another run, or the name of a model.
    device
        cpu or cuda. Default: cuda if available.
    """
    if (start_stage is None) != (checkpoint is None):
        raise ConfigError(
            "--start-stage and --checkpoint go together", "give the stage, and the model to start it from"
        )
    if out is None and not dry_run:
        raise ConfigError("--out is missing", "give the folder for checkpoints, logs and the final weights")
    changes = parse_overrides(overrides)
    if out is None or dry_run:
        resolved = recipes.load_recipe(recipe, changes)
        if start_stage is not None and checkpoint is not None:
            resolved = recipes.resume_from_stage(resolved, start_stage, checkpoint)
        print("\n".join(recipes.format_dry_run(resolved)))
        return
    from vitrail.api import train

    result = train(
        recipes.load_recipe(recipe, changes),
        out,
        stop_after=stop_after,
        start_stage=start_stage,
        checkpoint=checkpoint,
        device=device,
        loggers=logger,
    )
    print(f"→ {result.weights}")


def parse_overrides(overrides: Sequence[str]) -> dict[str, str]:
    """Parse key=value arguments."""
    wrong = [override for override in overrides if "=" not in override]
    if wrong:
        raise ConfigError(f"{wrong[0]!r} is not key=value", "write, for example, stages.0.steps=500")
    return dict(override.split("=", 1) for override in overrides)
