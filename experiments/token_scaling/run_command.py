"""`python -m experiments.token_scaling run`: train models for each number of visual tokens."""

import json
import sys
import tomllib
from collections.abc import Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from experiments.token_scaling.contrasts import (
    Contrast,
    ScorePoint,
    ScoreSummary,
    compare_exponents,
    compute_gain,
    get_raw_score,
    get_score_above_chance,
    group_curves,
    mean_scores,
    summarize_scores,
)
from experiments.token_scaling.exact_match import NAMING
from experiments.token_scaling.token_scaling_config import TokenScalingConfig
from experiments.token_scaling.token_scaling_experiment import (
    ANOTHER_QUESTION,
    PHASES,
    QUESTION_WITHHELD,
    WITH_QUESTION,
    WITHOUT_QUESTION,
    Phase,
    TokenScalingExperiment,
)
from vitrail.cli.output_files import write_json_with_origin
from vitrail.cli.scaling_command import save_figure
from vitrail.cli.text_tables import align_columns
from vitrail.errors import ConfigError, TrainError, TrainingInterrupted, VitrailError
from vitrail.hub.safetensors_files import write_json
from vitrail.lab.cost_ledger import DEVICES
from vitrail.plots.number_format import format_si
from vitrail.plots.scaling_plots import draw_score_curves
from vitrail.recipe.process_queue import ProcessJob, run_jobs
from vitrail.recipe.sweep import check_checkpoints

Ints = Annotated[tuple[int, ...], Parameter(negative="")]
HIDDEN = Parameter(show=False)
DEFAULT_DESIGN = TokenScalingConfig()
DESIGN_FILE = "design.json"
STEEP_KIND, FLAT_KIND = "reading", "existence_random"
POINTING_QUESTIONS = "questions that point"
DECLARED_CONTRASTS = (  # the declared hypotheses: only these get a verdict
    f"α of {STEEP_KIND} − α of {FLAT_KIND}, above chance, {WITH_QUESTION}",
    f"{WITH_QUESTION} over {WITHOUT_QUESTION}, {POINTING_QUESTIONS}",
    f"{WITH_QUESTION} over {WITHOUT_QUESTION}, {POINTING_QUESTIONS} less {NAMING}",
)

# Overrides for smoke tests: tiny models from random weights, two steps each.
_TINY_BLOCK = {"norm": "rms", "eps": 1e-5, "attention": {"heads": 2}, "mlp": {"kind": "gated", "intermediate_size": 24}}
_TINY_STAGE: dict[str, Any] = {
    "steps": 2,
    "save_every": 2,
    "batch_size": 4,
    "dtype": "float32",
    "compile": False,
    "num_workers": 0,
}
_TINY_STAGE |= {"schedule": {"kind": "constant"}}
_TINY_SHARED: dict[str, Any] = {
    "tokenizer": {"vocab_size": 512, "special_tokens": ["<image>"]},
    "model.parts": {},
    "model.config.rules": {"fill_id": 1},
    "model.config.policy": {"policy": "naive", "image_size": 16, "patch_size": 4},
    "model.config.tower.image_size": 16,
    "model.config.tower.patch_size": 4,
    "model.config.tower.layers": 1,
    "model.config.tower.block.width": 16,
    "model.config.tower.block.mlp.intermediate_size": 24,
    "model.config.connector": {"kind": "projector", "in_features": 16, "out_features": 32},
    "model.config.decoder": {"vocab_size": 512, "layers": 4, "tie_word_embeddings": True, "context_length": 320}
    | {"rotary": {"head_dim": 16}, "block": {"width": 32, **_TINY_BLOCK}},
    **{f"sources.{name}.image_size": 16 for name in ("scenes", "named")},
    **{f"stages.0.{key}": value for key, value in _TINY_STAGE.items()},
}
SMOKE_TEST_OVERRIDES: dict[str, Any] = {
    **{f"{which}.{key}": value for which in ("base", "queries") for key, value in _TINY_SHARED.items()},
    **{f"base.stages.1.{key}": value for key, value in _TINY_STAGE.items()},
    "queries.model.config.queries": {
        "kind": "fused",
        "in_features": 32,
        "out_features": 32,
        "vocab_size": 512,
        "layers": 4,
        "width": 32,
    }
    | {"heads": 2, "intermediate_size": 24},
    **{f"queries.sources.{name}.image_size": 16 for name in ("unseen", "unseen-named")},
}


def run_experiment(
    *overrides: str,
    out: Path,
    base: str = DEFAULT_DESIGN.base,
    queries: str = DEFAULT_DESIGN.queries,
    tokens: Ints = DEFAULT_DESIGN.tokens,
    num_seeds: int = 3,
    steps: int = DEFAULT_DESIGN.steps,
    count: int = DEFAULT_DESIGN.num_questions,
    jobs: int = 1,
    dry_run: Annotated[bool, Parameter(negative="")] = False,
    ignore_base_check: Annotated[bool, Parameter(negative="")] = False,
    smoke_test: Annotated[bool, Parameter(negative="")] = False,
    device: str | None = None,
    phase: Annotated[Phase | None, HIDDEN] = None,
    share: Annotated[str, HIDDEN] = "0/1",
    design_file: Annotated[Path | None, HIDDEN] = None,
) -> None:
    """Train models with few and many visual tokens, test them on the same questions, and fit the law of each kind.

    The command trains one base model, then runs with a frozen language model, with and without the question fused into
    the visual tokens. It tests whether reading grows faster than existence, and whether the question helps only where
    it points at something.

    A plain Q-Former is trained in the same way. VisPruner, VisionZip, pooling and random selection are applied to the
    base without training. The command stops if the base is not better than guessing. The same command resumes an
    interrupted run.

    Parameters
    ----------
    overrides
        Settings of the recipes, as key=value with dotted keys. A key that both recipes have needs the prefix base. or
        queries., for example queries.stages.0.steps=400.
    out
        Folder for all runs, scaling.json, scaling.svg and a table of scores for each method.
    base
        Recipe of the base model.
    queries
        Recipe that adds fused queries to the base. All models are tested on its validation sources.
    tokens
        Numbers of visual tokens, ascending. May be repeated.
    num_seeds
        Runs of each number of tokens.
    steps
        Training steps of each run.
    count
        Questions of each kind.
    jobs
        Number of parallel processes.
    dry_run
        Only print the planned runs and their FLOPs.
    ignore_base_check
        Continue even if the base is not better than guessing.
    smoke_test
        Use tiny random models and two steps each, to check that everything runs. Skips the check of the base.
    device
        cpu or cuda. Default: cuda if available.
    """
    if phase is not None and design_file is not None:  # this process is one of the parallel jobs
        design = TokenScalingConfig.from_dict(json.loads(design_file.read_text(encoding="utf-8")))
        _run_job(TokenScalingExperiment(design, out, device), phase, share)
        return
    if jobs < 1 or num_seeds < 1:
        raise ConfigError(f"--jobs is {jobs} and --num-seeds is {num_seeds}", "give at least 1 of each")
    if wrong := [change for change in overrides if "=" not in change]:
        raise ConfigError(f"{wrong[0]!r} is not key=value", "write, for example, base.stages.1.steps=500")
    merged_changes = deepcopy(SMOKE_TEST_OVERRIDES if smoke_test else {}) | dict(map(_parse_override, overrides))
    small: dict[str, Any] = {"tokens": (1, 4, 16), "seeds": (0,), "steps": 2, "num_questions": 8} if smoke_test else {}
    options: dict[str, Any] = {
        "tokens": tokens,
        "seeds": tuple(range(num_seeds)),
        "steps": steps,
        "num_questions": count,
    }
    design = TokenScalingConfig(base=base, queries=queries, changes=merged_changes, **(options | small))
    experiment = TokenScalingExperiment(design, out, device)
    if dry_run:
        for line in list_planned_runs(experiment):
            print(line)
        return
    check_checkpoints(experiment.get_sweep("base"), experiment.folder)
    experiment.folder.mkdir(parents=True, exist_ok=True)
    write_json(experiment.folder / DESIGN_FILE, design.to_dict())
    for each in PHASES:
        _run_phase(experiment, each, out, min(jobs, len(experiment.list_runs(each))), device)
        if each == "base" and not (ignore_base_check or smoke_test):
            experiment.check_base((STEEP_KIND, FLAT_KIND))
    report_experiment(experiment, out)


def _run_phase(experiment: TokenScalingExperiment, phase: Phase, out: Path, jobs: int, device: str | None) -> None:
    if jobs == 1:
        _run_job(experiment, phase, "0/1")
        return
    if phase == "runs":
        experiment.write_starts()  # before the parallel jobs, which would all do it
    more = [] if device is None else ["--device", device]
    words = (sys.executable, "-m", "experiments.token_scaling", "run", "--out", str(out), "--phase", phase, *more)
    words += ("--design-file", str(experiment.folder / DESIGN_FILE))
    share = [(*words, "--share", f"{i}/{jobs}") for i in range(jobs)]
    queue = [ProcessJob(f"{phase} {i}", one, out / f"{phase}-{i}.log") for i, one in enumerate(share)]
    if failed := run_jobs(queue, jobs, phase):
        label = "\n".join(failed.values())
        raise TrainError(f"{len(failed)} of {jobs} jobs failed\n{label}", "fix them and run the command again")


def _run_job(experiment: TokenScalingExperiment, phase: Phase, share: str) -> None:
    from tqdm import tqdm

    i, of = map(int, share.split("/"))
    failed = []
    for planned in tqdm(experiment.list_runs(phase)[i::of], desc=phase, unit="run", disable=None):
        try:
            experiment.execute_run(phase, planned)
        except VitrailError as error:  # continue with the other runs
            if isinstance(error, TrainingInterrupted) or phase != "runs":
                raise
            failed.append(f"{planned.name}: {error.problem}")
    if failed:
        raise TrainError(f"{len(failed)} runs failed:\n" + "\n".join(failed), "fix them and run the command again")


def _parse_override(word: str) -> tuple[str, Any]:
    """Parse key=value. The value is TOML if it parses as one value, otherwise a string."""
    key, _, text = word.partition("=")
    try:
        [value] = tomllib.loads(f"value = {text}").values()
    except ValueError:  # invalid TOML, or more than one value
        value = text
    return key, value


def list_planned_runs(experiment: TokenScalingExperiment, at: str = "h200") -> Iterator[str]:
    """Yield the planned runs of each phase: number, finished, steps, samples, questions, FLOPs and time."""
    kinds, count = len(experiment.settings.question_kinds) + 1, experiment.design.num_questions
    rows = [("phase", "runs", "done", "steps of each", "samples", "questions", "FLOPs", f"at the peak of an {at}")]
    for phase in PHASES:
        planned, sweep = experiment.list_runs(phase), experiment.get_sweep(phase)
        variants = ", ".join(variant.name for variant in sweep.variants)
        yield f"{phase}: {variants}; seeds {', '.join(map(str, sweep.seeds))}"
        recipe = sweep.load_recipe(planned[0].variant, planned[0].seed)
        steps, samples = [stage.steps for stage in recipe.stages], experiment.count_samples(phase)
        work = experiment.count_flops(phase)
        done = sum((run.folder / "recipe.json").is_file() for run in planned)
        total_questions = len(planned) * len(sweep.tests) * kinds * count
        cells = (
            str(len(planned)),
            str(done),
            " + ".join(map(str, steps)),
            f"{samples * len(planned):,}",
            f"{total_questions:,}",
        )
        rows.append((phase, *cells, format_si(work, "FLOP"), format_si(work / DEVICES[at].flops, "s")))
    yield ""
    yield from align_columns(rows, numbers=False).splitlines()
    yield ""
    yield "FLOPs assume that all parts are trained; small models do not reach the peak rate of a device"


# ---- report -----------------------------------------------------------------------------------------------------


def report_experiment(experiment: TokenScalingExperiment, out: Path) -> None:
    """Print and save the scores, laws and contrasts of an experiment."""
    points = experiment.load_points()
    write_experiment_report(
        points, compute_contrasts(points), out, experiment.design.to_dict(), "mean over seeds", experiment.device
    )


def write_experiment_report(
    points: Sequence[ScorePoint],
    contrasts: dict[str, Contrast | None],
    out: Path,
    design: dict[str, Any],
    note: str,
    device: str,
) -> None:
    """Print scores, laws and contrasts, and save them to a folder with the design."""
    summaries, counts = summarize_scores(points), sorted({p.tokens for p in points})
    heads = ("kind", "method", *map(str, counts), "±", "blind", "α")
    print(align_columns([heads, *(_format_line(line, counts) for line in summaries)], numbers=False))
    print()
    rows = [(name, "too few" if one is None else str(one)) for name, one in contrasts.items()]
    print(align_columns(rows, numbers=False))
    laws: dict[str, dict[str, Any]] = {}
    for line in summaries:
        if line.law is not None:
            laws.setdefault(line.method, {})[line.kind] = line.law.to_dict()
    write_json_with_origin(
        out / "scaling.json",
        {
            "design": design,
            "questions": {p.kind: {"count": p.count, "blind": p.blind} for p in points},
            "scores": [p.to_dict() for p in points],
            "laws": laws,
            "contrasts": {name: one and {**one.to_dict(), "sign": one.sign} for name, one in contrasts.items()},
        },
        device,
    )
    for method, kinds in laws.items():
        _write_scores_csv(points, method, list(kinds), out / f"scores-{method.replace(' ', '-').lower()}.csv")
    note = f"accuracy over the number of visual tokens, {note}"
    save_figure(draw_score_curves(group_curves(summaries), "Scaling of visual tokens", note), out / "scaling.svg")


def compute_contrasts(points: Sequence[ScorePoint]) -> dict[str, Contrast | None]:
    """Compute all contrasts of the experiment. The declared ones come first."""
    kinds = list(dict.fromkeys(p.kind for p in points))
    found: dict[str, Contrast | None] = dict.fromkeys(DECLARED_CONTRASTS)
    for by, label in ((get_score_above_chance, "above chance"), (get_raw_score, "as scored")):
        for method in (WITH_QUESTION, WITHOUT_QUESTION):
            found[f"α of {STEEP_KIND} − α of {FLAT_KIND}, {label}, {method}"] = compare_exponents(
                points, method, STEEP_KIND, FLAT_KIND, by
            )
    pointing = [kind for kind in kinds if kind != NAMING]
    for over in (WITHOUT_QUESTION, QUESTION_WITHHELD, ANOTHER_QUESTION):
        found[f"{WITH_QUESTION} over {over}, {POINTING_QUESTIONS}"] = compute_gain(
            points, WITH_QUESTION, over, pointing
        )
        found[f"{WITH_QUESTION} over {over}, {POINTING_QUESTIONS} less {NAMING}"] = compute_gain(
            points, WITH_QUESTION, over, pointing, [NAMING]
        )
        found |= {
            f"{WITH_QUESTION} over {over}, {kind}": compute_gain(points, WITH_QUESTION, over, [kind]) for kind in kinds
        }
    return {name: one and one.replace(declared=name in DECLARED_CONTRASTS) for name, one in found.items()}


def _format_line(line: ScoreSummary, counts: Sequence[int]) -> tuple[str, ...]:
    means = (f"{line.means[n]:.1%}" if n in line.means else "–" for n in counts)
    return line.kind, line.method, *means, f"{line.max_error:.1%}", f"{line.blind:.1%}", line.alpha_text


def _write_scores_csv(points: Sequence[ScorePoint], method: str, kinds: Sequence[str], file: Path) -> None:
    """Write the scores in percent as a CSV file for `vitrail scaling fit` and `plan`: one line a number of tokens."""
    columns = [dict(zip(*mean_scores(points, method, kind), strict=True)) for kind in kinds]
    counts = sorted({n for one in columns for n in one})
    rows = [[f"{n:g}", *(f"{100 * one[n]:.6g}" if n in one else "" for one in columns)] for n in counts]
    file.write_text("\n".join(map(",".join, [["n", *kinds], *rows])) + "\n")
