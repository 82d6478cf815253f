"""`vitrail eval compare pope FIRST SECOND --data FILE`: two models by the answers that were kept of them."""

import math
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from vitrail.cli.written import check_written, write_plain


def compare(
    name: str,
    first: Path,
    second: Path,
    /,
    *,
    data: Path,
    pictures: Path | None = None,
    videos: Path | None = None,
    annotations: Path | None = None,
    labels: Path | None = None,
    part: str | None = None,
    limit: int | None = None,
    circular: Annotated[bool, Parameter(negative="")] = False,
    mode: str | None = None,
    boxes: str | None = None,
    models: tuple[str, str] | None = None,
    out: Path | None = None,
) -> None:
    """Compare two models by their answers to the same samples. No model is loaded.

    The difference is the first's mean less the second's, with 95 % of what it comes to when pictures are drawn anew;
    where each sample is right or wrong and has a picture of its own, also McNemar's exact p.

    Parameters
    ----------
    name
        The benchmark: `vitrail eval --help` names them.
    first
        Answers that `vitrail eval MODEL pope --answers FILE` kept.
    second
        Those of another model, or of another prompt.
    data
        The benchmark's own file, or folder, that both were asked from.
    pictures
        The folder that its pictures lie in; beside the file unless said.
    videos
        The folder that its videos lie in; beside the file unless said.
    annotations
        VQAv2's answers, which are a file of their own.
    labels
        The answers of PIQA, Social IQa or WinoGrande, where they lie elsewhere than beside the file.
    part
        As it was when they were asked.
    limit
        As it was when they were asked.
    circular
        As it was when they were asked.
    mode
        Of POPE: pope, lmms-eval or vlmevalkit, which read and count differently.
    boxes
        How the models write boxes.
    models
        The two models by name, where a file holds answers of several.
    out
        A JSON file to write the comparison to.
    """
    from vitrail.evals.suites.compared import read
    from vitrail.evals.suites.texts import any_benchmark

    row = any_benchmark(name)
    where: dict[str, Any] = {"pictures": pictures, "annotations": annotations, "part": part}
    scored: dict[str, Any] = {"mode": mode, "boxes": boxes}
    where |= {"videos": videos, "labels": labels}
    where, scored = ({key: value for key, value in some.items() if value is not None} for some in (where, scored))
    row.check(scored)
    check_written(out, "--out")
    samples = row.read(data, limit=limit, circular=circular, **where)
    one, other = (read(path, samples, None if models is None else models[n]) for n, path in enumerate((first, second)))
    found = row.compare_parts(samples, one.answers, other.answers, **scored)
    print(f"first: {one.model} ({first})\nsecond: {other.model} ({second})")
    wide = max(len(part.title) for part in found)
    for line in found:
        print(f"{line.title:{wide}}  {line.first:6.1%}  {line.second:6.1%}  {line.paired}")
    if out is not None:
        about = {"suite": name, "data": str(data), "limit": limit, "circular": circular, "part": part, **scored}
        table = [
            {
                "part": part.title,
                "first": part.first,
                "second": part.second,
                "difference": part.paired.difference,
                "interval": [end if math.isfinite(end) else None for end in part.paired.interval],
                "of": part.paired.of,
                **({} if part.paired.only is None else {"only": list(part.paired.only), "p": part.paired.p}),
            }
            for part in found
        ]
        write_plain(out, {**about, "models": [one.model, other.model], "compared": table})
