"""`vitrail scaling plan`: the number of visual tokens for a budget."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from vitrail.cli.output_files import check_writable, write_json_with_origin
from vitrail.cli.scaling_command import (
    Floats,
    FormChoice,
    Strings,
    check_figures,
    fit_columns,
    read_columns,
    save_figure,
)
from vitrail.cli.text_tables import align_columns
from vitrail.lab.token_budget import Budget, InferenceCost, TokenChoice, make_cost_fn, powers_of_two
from vitrail.lab.token_budget import choose_tokens as choose
from vitrail.plots.number_format import format_si
from vitrail.plots.scaling_plots import PlanPanel, draw_plan
from vitrail.recipe import load_model_config


def plan_tokens(
    scores: str,
    /,
    *,
    system: Annotated[str, Parameter(alias="--model")],
    seconds: float | None = None,
    memory: float | None = None,
    flops: float | None = None,
    max_score_loss: float | None = None,
    max_tokens: int | None = None,
    form: FormChoice = "best",
    task: Strings = (),
    exclude_counts: Floats = (),
    question_tokens: int = 64,
    answer_tokens: int = 64,
    batch_size: int = 1,
    dtype: str = "bfloat16",
    device: str = "h200",
    json: Path | None = None,
    out: Path | None = None,
) -> None:
    """Choose the number of visual tokens within a budget: one line a task, with the costs.

    With --max-score-loss the command chooses the fewest tokens within that loss, otherwise the best score within the
    limits. Times are rooflines, as in `vitrail ledger`.

    Parameters
    ----------
    scores
        A CSV file with a column n (visual tokens) and a column of scores for each task or kind of question; or paper,
        paper-tuned, paper-queries.
    system
        A vision-language model or a decoder, by any name that `vitrail ledger` accepts.
    seconds
        Maximum time until the last token of the answer.
    memory
        Maximum gigabytes of weights and KV cache.
    flops
        Maximum TFLOPs of a batch of questions with their answers.
    max_score_loss
        Maximum loss as a fraction of the best score, such as 0.05.
    max_tokens
        Maximum number of visual tokens. Default: the largest measured number.
    form
        Form of the law: see `vitrail scaling fit`.
    task
        Use only columns whose names contain one of these words. May be repeated.
    exclude_counts
        Exclude scores at this number of tokens. May be repeated.
    question_tokens
        Text tokens of a question.
    answer_tokens
        Tokens of an answer.
    batch_size
        Questions a batch.
    dtype
        Type of the weights and the KV cache: float32, bfloat16, float16, float8.
    device
        h200, h100, a100, rtx4090, orin.
    json
        A JSON file for the choices and curves.
    out
        A plot of scores over tokens with the choices.
    """
    check_figures(out)
    check_writable(json)
    scaled = {"memory": memory and memory * 1e9, "flops": flops and flops * 1e12}
    budget = Budget(seconds=seconds, loss=max_score_loss, **scaled)
    laws = fit_columns(read_columns(scores, task, exclude_counts), form)
    price = make_cost_fn(
        load_model_config(system).config,
        num_words=question_tokens,
        answer_tokens=answer_tokens,
        batch_size=batch_size,
        dtype=dtype,
        device=device,
    )
    choices = choose(laws, price, budget, max_tokens=max_tokens)
    heads = ("", "tokens", "score", "", "of best", "limited by", "")
    print(align_columns([heads, *map(_format_choice, choices)], numbers=False))
    ends = [law.token_range for law in laws.values()]
    steps = powers_of_two(int(min(e[0] for e in ends)) or 1, max_tokens or int(max(e[1] for e in ends)))
    print(
        f"\n{system} on {device}, question {question_tokens} tokens, answer {answer_tokens} tokens, "
        f"batch {batch_size}, {dtype}:"
    )
    prices = [price(n) for n in steps]
    # Some laws are undefined at small n.
    curves = {name: {n: s for n in steps if math.isfinite(s := float(law(n)))} for name, law in laws.items()}
    print(align_columns(_format_costs(prices, curves), numbers=False))
    if json is not None:
        points = {name: list(curve.items()) for name, curve in curves.items()}
        plain = {"choices": [one.to_dict() for one in choices], "prices": [p.to_dict() for p in prices]}
        settings = {"scores": scores, "system": system, "device": device, "budget": budget.to_dict()}
        write_json_with_origin(json, {**settings, **plain, "curves": points})
    if out is not None:
        panels = {c.task: PlanPanel(list(curves[c.task].items()), (c.tokens, c.score)) for c in choices}
        limits = ", ".join(f"{key} {value:g}" for key, value in budget.to_dict().items() if value is not None)
        note = f"budget: {limits}; {device}, batch {batch_size}"
        save_figure(draw_plan(panels, f"{scores} with {system}", note), out)


def _format_choice(choice: TokenChoice) -> tuple[str, ...]:
    low, high = choice.interval
    return (
        choice.task,
        f"{choice.tokens:,}",
        f"{choice.score:.4g}",
        f"[{low:.4g}, {high:.4g}]",
        f"{choice.fraction_of_best:.1%}",
        choice.reason,
        "" if choice.meets_loss else "loss exceeds the limit",
    )


def _format_costs(prices: Sequence[InferenceCost], curves: dict[str, dict[int, float]]) -> list[tuple[str, ...]]:
    """Format the costs at each number of tokens, with the scores of at most three tasks."""
    columns = curves if len(curves) < 4 else {}
    rows: list[tuple[str, ...]] = [("tokens", "first token", "total", "memory", "FLOPs", *columns)]
    for price in prices:
        times = format_si(price.first_token_seconds, "s"), format_si(price.seconds, "s")
        sizes = format_si(price.memory, "B"), format_si(price.flops, "FLOP")
        scores = (f"{curve[price.tokens]:.4g}" if price.tokens in curve else "–" for curve in columns.values())
        rows.append((f"{price.tokens:,}", *times, *sizes, *scores))
    return rows
