"""`vitrail scaling diverge`: how far a decoder's hidden states drift apart behind one prefix."""

import math
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from cyclopts import Parameter

from vitrail import hub
from vitrail.backbones.decoder import DecoderConfig
from vitrail.cli.scaling import check_figures, print_table, save_figure
from vitrail.cli.write import usable
from vitrail.cli.written import check_written, write_plain
from vitrail.data.text import TextConfig, read_text
from vitrail.errors import ConfigError
from vitrail.hub.configs import read_config
from vitrail.lab.branches import branches, hidden
from vitrail.lab.divergence import bounds, gather
from vitrail.lab.plan import ladder
from vitrail.show.scaling import Fitted, draw_laws


def diverge(
    text: Annotated[tuple[str, ...], Parameter(negative="")] = (),
    /,
    *,
    model: str = "stories15M",
    prefix: int = 4,
    length: int = 128,
    pairs: int = 128,
    batch: int = 16,
    beta: float = 1.0,
    sup: Annotated[bool, Parameter(negative="")] = False,
    seed: int = 0,
    device: str | None = None,
    json: Path | None = None,
    out: Path | None = None,
) -> None:
    """Measure how far a decoder's hidden states drift apart over two continuations of one prefix, and hold that against
    the theory: D grows as the root of Υ, by √n below the balance point n* and by n above it.

    Pairs are places of real text where the same tokens go on in two ways.

    Parameters
    ----------
    text
        Text files; without any, the reference of the Python language that lies in every Python.
    model
        stories15M or smollm2-135m (fetched when first used), a .gguf file, a model folder, or a hub id.
    prefix
        Tokens that both have in common.
    length
        Tokens of each continuation.
    pairs
        How many, at most.
    batch
        Pairs at once.
    beta
        Of scores S ∝ Υ^(β/2), for α(n).
    sup
        Add Υ by suprema, as the paper defines it, which is no bound, and by the infima and suprema that are one.
    seed
        Of which pairs are taken, where there are more.
    device
        cpu, cuda, …; a GPU if there is one.
    json
        Write all n to this file too.
    out
        Draw D(n) and λ√Υ.
    """
    check_figures(out)
    check_written(json)
    if batch < 1:
        raise ConfigError(f"--batch is {batch}", "give at least 1")
    if not isinstance(read_config(model), DecoderConfig):
        raise ConfigError(f"{model} is no language model", "give a decoder: its hidden states are measured")
    words, decoder = hub.tokenizer(model), hub.load(model, device=usable(device))
    ids = words.encode(read_text(TextConfig(files=text, package=None if text else "python-docs")))
    starts = branches(ids, prefix, length, pairs, seed)
    states = hidden(decoder, ids, starts, prefix, length, bos=words.bos, batch=batch)
    if sup:
        states = list(states)  # extremes over positions need all pairs at once
    found = gather(states)
    fitted = found.scale * np.sqrt(found.upsilon.clip(min=0))
    columns = {
        "D": found.distance, "λ√Υ": fitted, "ψ_eq": found.equal, "ψ_AA": found.within, "ψ_AB": found.across,
        "Υ": found.upsilon, "n*": found.balance, f"α, β = {beta:g}": found.exponent(beta),
    }  # fmt: skip
    if sup:
        left, right = (torch.cat(side) for side in zip(*states, strict=True))
        extremes = bounds(left, right)
        columns |= {"Υ by suprema": extremes.upsilon, "Υ that bounds": extremes.valid}
    steps = ladder(1, length)
    rows = [["–" if math.isnan(x := float(c[n - 1])) else f"{x:.4g}" for c in columns.values()] for n in steps]
    print_table([("n", *columns), *((f"{n:,}", *row) for n, row in zip(steps, rows, strict=True))])
    print(
        f"\n{found.pairs} pairs of {length} tokens after {prefix}; λ {found.scale:.4g}, M {found.norm:.4g}, "
        f"λ/(√2·M) {found.tightness:.3f}; balance point n* {found.balance[-1]:.3g}"
    )
    if json is not None:
        every = {
            name: [None if not math.isfinite(x) else x for x in column.tolist()] for name, column in columns.items()
        }
        ends = {"pairs": found.pairs, "lambda": found.scale, "M": found.norm, "tightness": found.tightness}
        write_plain(json, {"model": model, "prefix": prefix, "seed": seed, **ends, "columns": every})
    if out is not None:
        points = [(n, float(found.distance[n - 1])) for n in steps]
        curve = [(int(n), float(d)) for n, d in zip(found.n, fitted, strict=True)]
        note = f"lambda {found.scale:.4g}, n* {found.balance[-1]:.3g}"
        save_figure(
            draw_laws([Fitted(model, note, points, curve)], "Divergence over tokens", "dots D, line its law"), out
        )
