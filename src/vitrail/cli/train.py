"""`vitrail train` and `vitrail recipes`."""

import tomllib
from pathlib import Path

from vitrail import recipe as recipes
from vitrail.errors import ConfigError


def train(
    recipe: str,
    /,
    *changes: str,
    out: Path,
    until: str | None = None,
    since: str | None = None,
    start: str | None = None,
    device: str | None = None,
) -> None:
    """Train a recipe. The same command goes on after any interruption; the end's weights are in OUT/final.

    Parameters
    ----------
    recipe
        A recipe's name (see `vitrail recipes`) or a .toml file.
    changes
        Settings to change, as key=value with dotted keys: stages.0.steps=500 seed=3
    out
        Folder for checkpoints, logs and the result.
    until
        The stage to stop behind; its weights are then in OUT/STAGE/final, and the same command without it goes on.
    since
        The stage to begin with, and `start` the model that has been through those before: OUT/STAGE/final of another
        run, say, wherever it was trained.
    start
        A folder, or a model's name.
    device
        cpu or cuda; a GPU is used where there is one.
    """
    if (since is None) != (start is None):
        raise ConfigError("--since and --start go together", "give the stage, and the model that it begins with")
    wrong = [change for change in changes if "=" not in change]
    if wrong:
        raise ConfigError(f"{wrong[0]!r} is no key=value", "for example stages.0.steps=500")
    chosen = recipes.read(recipe, dict(change.split("=", 1) for change in changes))
    if since is not None and start is not None:
        chosen = recipes.begun(chosen, since, start)
    recipes.train(chosen, out, until=until, device=device)
    print(f"→ {recipes.kept_in(chosen, out, until)}")


def list_recipes() -> None:
    """List the recipes that can be trained by name."""
    trained, others = recipes.names(), recipes.untested()
    wide = max(map(len, (*trained, *others)))
    for name in (*trained, *others):
        if name in others[:1]:
            print("\nnot yet trained:")
        row = tomllib.loads((recipes.folder() / f"{name}.toml").read_text())  # as it stands: checking all takes a while
        steps = ", ".join(f"{stage['name']} {stage['steps']:,} steps" for stage in row["stages"])
        print(f"{name:{wide}}  {row['says']} ({steps})")
