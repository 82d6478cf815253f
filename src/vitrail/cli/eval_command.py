"""`vitrail eval MODEL SUITE`: evaluation suites and benchmarks. Every score has an interval and baselines."""

import inspect
import re
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, Parameter

from vitrail.cli.config_options import add_options
from vitrail.cli.output_files import check_writable, command_line, write_json_with_origin
from vitrail.config import ConfigOption, list_options
from vitrail.errors import ConfigError
from vitrail.evals.evaluation import Suite, find_suite, list_suites
from vitrail.registry import BENCHMARKS, SUITES, TEXT_BENCHMARKS

HELP_FLAGS = ("--help", "-h")

app = App(
    name="eval",
    usage="Usage: vitrail eval MODEL SUITE [OPTIONS]",
    help="Evaluate a model on a suite or a benchmark, with intervals and baselines; or compare two models by their "
    "saved answers.",
    help_epilogue="MODEL is a bundled model, a folder or a hub id. SUITE is a suite above or a benchmark. For its "
    f"options: `vitrail eval MODEL SUITE --help`.\n\nBenchmarks, which need --data: {', '.join(BENCHMARKS)}.\n\n"
    f"Text benchmarks, which need --data: {', '.join(TEXT_BENCHMARKS)}.\n\n"
    "Example: vitrail eval out/clip/final zeroshot --data cifar10",
    group_commands="Suites",
    help_flags=(),
)


@app.default
def evaluate(*words: Annotated[str, Parameter(allow_leading_hyphen=True, show=False)]) -> None:
    """Run a suite: the words are the model, the suite and its options."""
    if not words or words[0] in HELP_FLAGS:
        app.help_print([])
        return
    known, rest = list_suites(), list(words)
    if len(rest) > 1 and (rest[0] not in known or rest[1] in known):
        rest[:2] = reversed(rest[:2])  # the commands of suites take the model as their first argument
    elif rest[0] not in known:
        raise ConfigError(
            f"a suite for {rest[0]} is missing", "vitrail eval MODEL SUITE; vitrail eval --help lists all"
        )
    has_data = any(word.partition("=")[0] == "--data" for word in rest)
    _build_suite_app(rest[0], find_suite(rest[0], has_data=has_data))(rest[1:], result_action="return_value")


@app.command(
    help_epilogue="Example: vitrail eval compare pope first.jsonl second.jsonl --data coco_pope_random.json",
    help_flags=HELP_FLAGS,
)
def compare(
    name: str,
    first: Path,
    second: Path,
    /,
    *,
    data: Path,
    image_folder: Path | None = None,
    video_folder: Path | None = None,
    annotation_file: Path | None = None,
    label_file: Path | None = None,
    split: str | None = None,
    limit: int | None = None,
    circular: Annotated[bool, Parameter(negative="")] = False,
    mode: str | None = None,
    boxes: str | None = None,
    models: tuple[str, str] | None = None,
    out: Path | None = None,
) -> None:
    """Compare two models by their saved answers to the same samples. No model is loaded.

    Prints the difference of the means (first − second) with a 95 % bootstrap interval over images. If every sample is
    right or wrong and has its own image, also prints McNemar's exact p.

    Parameters
    ----------
    name
        Name of the benchmark (see `vitrail eval --help`).
    first
        Answers that `vitrail eval MODEL pope --answers FILE` saved.
    second
        Answers of another model, or to another prompt.
    data
        The file or folder of the benchmark that both models were evaluated on.
    image_folder
        Folder of the images. Default: the folder of the file.
    video_folder
        Folder of the videos. Default: the folder of the file.
    annotation_file
        VQAv2: the file of the answers.
    label_file
        PIQA, Social IQa, WinoGrande: the file of the answers, if it is not beside the data.
    split
        As in the evaluation.
    limit
        As in the evaluation.
    circular
        As in the evaluation.
    mode
        POPE: pope, lmms-eval or vlmevalkit, which parse and count answers differently.
    boxes
        Format of boxes in answers.
    models
        Names of the two models, if a file contains answers of several.
    out
        A JSON file for the comparison.
    """
    from vitrail.evals.model_comparison import compare_answers

    check_writable(out, "--out")
    files = {"image_folder": image_folder, "video_folder": video_folder, "annotation_file": annotation_file}
    files |= {"label_file": label_file}
    format_options = {key: value for key, value in {**files, "split": split}.items() if value is not None}
    scorer_options = {key: value for key, value in {"mode": mode, "boxes": boxes}.items() if value is not None}
    found = compare_answers(
        name, first, second, data, limit=limit, circular=circular, models=models,
        format_options=format_options, scorer_options=scorer_options,
    )  # fmt: skip
    print(f"first: {found.models[0]} ({first})\nsecond: {found.models[1]} ({second})\n{found}")
    if out is not None:
        settings = {"suite": name, "data": str(data), "limit": limit, "circular": circular, "split": split}
        write_json_with_origin(out, {**settings, **scorer_options, **found.to_dict()})


def _build_suite_app(name: str, suite: type[Suite]) -> App:
    """Build the command of a suite from its options."""
    files = {"out": "A JSON file for the settings and the scores", **suite.output_files}
    options = [
        *list_options(suite),
        ConfigOption("device", Literal["auto", "cpu", "cuda"], "auto", "cpu, cuda or auto: cuda if available"),
        *(ConfigOption(file, Path | None, None, description) for file, description in files.items()),
    ]

    def command(model: str, /, **given_options: Any) -> None:
        _run_suite(name, model, given_options, tuple(files))

    annotation = Annotated[str, Parameter(help=suite.model_description)]
    model = inspect.Parameter("model", inspect.Parameter.POSITIONAL_ONLY, annotation=annotation)
    add_options(command, [model], options, [option.name for option in options if not suite.has_option(option.name)])
    built = App(
        name=name,
        usage=f"Usage: vitrail eval MODEL {name} [OPTIONS]",
        help=_describe_suite(suite),
        help_epilogue=f"Example: {suite.example}",
        help_flags=HELP_FLAGS,
        version_flags=(),
    )
    built["--help"].show = False
    built.default(command)
    return built


def _describe_suite(suite: type[Suite]) -> str:
    """Return the docstring of a suite without the descriptions of its options."""
    paragraphs = inspect.cleandoc(suite.__doc__ or "").split("\n\n")
    return "\n\n".join(text for text in paragraphs if not re.match(r"\w+ {2,}\S", text))


def _run_suite(name: str, model: str, options: dict[str, Any], files: tuple[str, ...]) -> None:
    """Evaluate a model, print the scores, and write the files that are asked for."""
    import vitrail
    from vitrail.lab.origin import collect_origin
    from vitrail.plots.eval_files import check_eval_file, save_eval_file

    paths: dict[str, Path] = {file: options.pop(file) for file in files if file in options}
    for file, path in {"answers": options.get("answers"), **paths}.items():
        check_writable(path, f"--{file.replace('_', '-')}")
    for file, path in paths.items():
        check_eval_file(file, path)
    result = vitrail.evaluate(model, name, **options)
    print("\n".join([*result.messages, str(result)]))
    if result.warning:
        print(result.warning, file=sys.stderr)
    for file, path in paths.items():
        if file == "out":
            result.save(path)
        else:
            save_eval_file(file, result, path, collect_origin(command_line(), result.device))
        print(path)


for _name in SUITES:
    app.command(_build_suite_app(_name, SUITES[_name]))
