"""The identity of a run: the checkpoints that a recipe loads, and a hash of all that affects the trained weights."""

import hashlib
import json
from pathlib import Path
from typing import Any

from vitrail.data.sources.hub_snapshots import list_commits
from vitrail.errors import ConfigError, TrainError
from vitrail.hub.checkpoint_info import resolve_path
from vitrail.hub.delta_checkpoint import checksum_tokenizer, checksum_weights
from vitrail.hub.packages import PACKAGES
from vitrail.hub.safetensors_files import write_json
from vitrail.recipe.recipe_files import list_recipe_names, list_untested_recipe_names
from vitrail.recipe.recipe_schema import Recipe
from vitrail.tasks.task_spec import SourceMap

RUN_FILE = "run.json"  # what a run folder is trained with
# Stage settings that may change when a run is resumed: they do not affect the trained weights.
RUNTIME_STAGE_KEYS = (
    "num_workers", "save_every", "validate", "validate_every", "validate_first", "compile", "gradient_checkpointing",
)  # fmt: skip


def collect_checkpoints(recipe: Recipe) -> dict[str, str]:
    """Return the checkpoints that a recipe loads: what they initialize → name or folder."""
    model, tokenizer = recipe.model, recipe.tokenizer
    checkpoints = {"the model": model.checkpoint, "the tokenizer": None if tokenizer is None else tokenizer.checkpoint}
    checkpoints |= {name: part.checkpoint for name, part in model.parts.items()}
    return {target: start for target, start in checkpoints.items() if start is not None}


def check_checkpoints_exist(recipe: Recipe) -> None:
    """Refuse a checkpoint that another recipe writes and that does not exist, and name the command that writes it."""
    known = {name.rpartition("/")[2]: name for name in (*list_recipe_names(), *list_untested_recipe_names())}
    for target, start in collect_checkpoints(recipe).items():
        path = Path(start)
        if path.name == "final" and not path.exists() and path.parent.name in known:
            raise ConfigError(
                f"the checkpoint {start} of {target} does not exist",
                f"train it first: vitrail train {known[path.parent.name]} --out {path.parent}",
            )


def hash_checkpoints(recipe: Recipe) -> dict[str, str]:
    """Return a hash of every checkpoint that a recipe loads. Packages have pinned hashes and are not fetched."""
    found = {}
    for start in sorted(set(collect_checkpoints(recipe).values())):
        if start in PACKAGES and not Path(start).exists():
            found[start] = " ".join(part.sha256 for part in PACKAGES[start].parts)
        else:
            path = resolve_path(start)
            found[start] = f"{checksum_weights(path)} {checksum_tokenizer(path)}"
    return found


def describe_run(recipe: Recipe, sources: SourceMap) -> dict[str, Any]:
    """Return everything that affects the trained weights: the recipe, its checkpoints and its data."""
    plain = recipe.to_dict()
    for stage in plain["stages"]:
        for key in RUNTIME_STAGE_KEYS:
            del stage[key]
    plain["fingerprints"] = {name: source.fingerprint for name, source in sources.items()}
    plain["checkpoints"] = hash_checkpoints(recipe)
    return json.loads(json.dumps({key: value for key, value in plain.items() if key not in ("name", "description")}))


def compute_identity(run: dict[str, Any]) -> str:
    """Return a hash of what `describe_run` returns. A stage resumes only from checkpoints with the same identity.

    The steps of the last stage are left out, so that a finished run can be extended.
    """
    *stages, last = run["stages"]
    last = {key: value for key, value in last.items() if key != "steps"}
    return hashlib.sha256(json.dumps({**run, "stages": [*stages, last]}, sort_keys=True).encode()).hexdigest()[:16]


def check_run_folder(run: dict[str, Any], out: Path) -> None:
    """Refuse to resume a run of another recipe, and record this one in the folder.

    A finished run may be extended with more steps of its last stage.
    """
    file = out / RUN_FILE
    old = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else run
    revisions = old.pop("hub_revisions", {}) | list_commits()  # the checksums of what is read are compared
    changes = find_differences(old, run)
    if changes and any(out.glob("*/checkpoints/*")):
        steps_key = f"stages.{len(run['stages']) - 1}.steps"
        key, (before, after) = next(iter(changes.items()))
        if list(changes) != [steps_key] or after < before or not (out / "final").exists():
            others = f" (and {len(changes) - 1} more keys)" if len(changes) > 1 else ""
            raise TrainError(
                f"{out} contains a run of another recipe: {key} was {before!r:.80} and is {after!r:.80}{others}",
                "use another --out, or those settings; a finished run can only get more steps in its last stage",
            )
    write_json(file, run | ({"hub_revisions": revisions} if revisions else {}))


def find_differences(old: Any, new: Any, path: str = "") -> dict[str, tuple[Any, Any]]:
    """Return the dotted keys in which nested data differ, with both values."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys, step = dict.fromkeys((*old, *new)), {key: (old.get(key), new.get(key)) for key in (*old, *new)}
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        keys, step = dict.fromkeys(range(len(old))), dict(enumerate(zip(old, new, strict=True)))
    else:
        return {} if old == new else {path: (old, new)}
    found: dict[str, tuple[Any, Any]] = {}
    for key in keys:
        found |= find_differences(*step[key], f"{path}.{key}" if path else str(key))
    return found
