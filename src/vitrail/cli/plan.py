"""`vitrail scaling plan`: how many visual tokens a budget buys."""

import math
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from vitrail.cli.ledger import config_of
from vitrail.cli.scaling import (
    FormChoice,
    Numbers,
    Several,
    check_figures,
    fit_columns,
    print_table,
    read_columns,
    save_figure,
)
from vitrail.cli.written import check_written, write_plain
from vitrail.lab.plan import Budget, ladder, pricer
from vitrail.lab.plan import plan as choose
from vitrail.show.ledger import si
from vitrail.show.scaling import Bought, draw_plan


def plan(
    scores: str,
    /,
    *,
    system: Annotated[str, Parameter(alias="--model")],
    seconds: float | None = None,
    memory: float | None = None,
    flops: float | None = None,
    loss: float | None = None,
    most: int | None = None,
    form: FormChoice = "best",
    task: Several = (),
    drop: Numbers = (),
    words: int = 64,
    answer: int = 64,
    batch: int = 1,
    dtype: str = "bfloat16",
    device: str = "h200",
    json: Path | None = None,
    out: Path | None = None,
) -> None:
    """Say how many visual tokens to use within a budget: a line a task, and the prices they were read from.

    With --loss the fewest tokens that lose no more, otherwise the best that the limits allow. Times are floors, as in
    `vitrail ledger`.

    Parameters
    ----------
    scores
        A CSV file with a column n (visual tokens) and a column of scores for each task or kind of question; or paper,
        paper-tuned, paper-queries.
    system
        Whose tokens: a vision-language model or a decoder, by any name that `vitrail ledger` takes.
    seconds
        Until the last token of the answer.
    memory
        Gigabytes of weights, keys and values.
    flops
        TFLOPs of a batch of questions with their answers.
    loss
        Share of the best score that may be lost, such as 0.05.
    most
        Tokens beyond which not to look; the most that was measured.
    form
        Of the law: see `vitrail scaling fit`.
    task
        Only columns whose names hold one of these words. May be repeated.
    drop
        Leave out what was measured at so many tokens. May be repeated.
    words
        Of a question.
    answer
        Tokens of an answer.
    batch
        Questions at once.
    dtype
        What weights and cache are kept in: float32, bfloat16, float16, float8.
    device
        As `vitrail ledger` has them: h200, h100, a100, rtx4090, orin.
    json
        Write choices and curves to this file too.
    out
        Draw scores over tokens, and what was chosen.
    """
    check_figures(out)
    check_written(json)
    scaled = {"memory": memory and memory * 1e9, "flops": flops and flops * 1e12}
    budget = Budget(seconds=seconds, loss=loss, **scaled)
    laws = fit_columns(read_columns(scores, task, drop), form)
    price = pricer(config_of(system), words=words, answer=answer, batch=batch, dtype=dtype, device=device)
    choices = choose(laws, price, budget, most=most)
    rows = [("", "tokens", "score", "", "kept", "because of", "")]
    for one in choices:
        low, high = one.interval
        short = "" if one.within else f"loses more than {loss:g}"
        cells = (
            f"{one.tokens:,}",
            f"{one.score:.4g}",
            f"[{low:.4g}, {high:.4g}]",
            f"{one.kept:.1%}",
            one.because,
            short,
        )
        rows.append((one.task, *cells))
    print_table(rows)
    ends = [law.ends for law in laws.values()]
    steps = ladder(int(min(e[0] for e in ends)) or 1, most or int(max(e[1] for e in ends)))
    print(f"\n{system} on {device}, {words} words, {answer} tokens of answer, batch {batch}, {dtype}:")
    prices = [price(n) for n in steps]
    heads = ("tokens", "first token", "all", "memory", "work", *(laws if len(laws) < 4 else ()))
    # A law that falls below nothing has no score there.
    curves = {name: {n: s for n in steps if math.isfinite(s := float(law(n)))} for name, law in laws.items()}
    shown = list(curves.values()) if len(laws) < 4 else []
    more = [[f"{curve[n]:.4g}" if n in curve else "–" for curve in shown] for n in steps]
    figures = [
        (f"{p.tokens:,}", si(p.first, "s"), si(p.seconds, "s"), si(p.memory, "B"), si(p.flops, "FLOP")) for p in prices
    ]
    print_table([heads, *((*cells, *extra) for cells, extra in zip(figures, more, strict=True))])
    if json is not None:
        points = {name: list(curve.items()) for name, curve in curves.items()}
        plain = {"choices": [one.plain() for one in choices], "prices": [p.plain() for p in prices], "curves": points}
        write_plain(json, {"scores": scores, "system": system, "device": device, "budget": budget.plain(), **plain})
    if out is not None:
        bought = {c.task: Bought(list(curves[c.task].items()), (c.tokens, c.score)) for c in choices}
        limits = ", ".join(f"{key} {value:g}" for key, value in budget.plain().items() if value is not None)
        save_figure(draw_plan(bought, f"{scores} with {system}", f"budget: {limits}; {device}, batch {batch}"), out)
