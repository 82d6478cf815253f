"""`vitrail scaling diverge`: how far a decoder's hidden states drift apart behind one prefix: texts or pictures."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import torch
from cyclopts import Parameter
from PIL import Image
from torch import Tensor

from vitrail import hub
from vitrail.backbones.decoder import DecoderConfig
from vitrail.cli.scaling import check_figures, print_table, save_figure
from vitrail.cli.written import check_written, write_plain
from vitrail.data.scenes.library import open_atlas
from vitrail.data.scenes.source import ScenesConfig, SceneSource
from vitrail.data.text import TextConfig, read_text
from vitrail.devices import usable
from vitrail.errors import ConfigError
from vitrail.hub.configs import read_config
from vitrail.lab.bottlenecks import side_of
from vitrail.lab.branches import branches, hidden
from vitrail.lab.divergence import bounds, gather
from vitrail.lab.pictured import couples, pictured
from vitrail.lab.plan import ladder
from vitrail.models.unified import UnifiedConfig
from vitrail.models.vlm_config import VLMConfig
from vitrail.processing.images import load_image
from vitrail.show.scaling import Fitted, draw_laws


def diverge(
    files: Annotated[tuple[str, ...], Parameter(negative="")] = (),
    /,
    *,
    model: str = "stories15M",
    prefix: int = 4,
    length: int = 128,
    pairs: int = 128,
    batch: int = 16,
    text: Annotated[bool, Parameter(negative="")] = False,
    prompt: str = "",
    atlas: str = "emoji",
    beta: float = 1.0,
    sup: Annotated[bool, Parameter(negative="")] = False,
    seed: int = 0,
    device: str | None = None,
    json: Path | None = None,
    out: Path | None = None,
) -> None:
    """Measure how far a decoder's hidden states drift apart over two continuations of one prefix, and hold that against
    the theory: D grows as the root of Υ, by √n below the balance point n* and by n above it.

    Pairs are places of real text where the same tokens go on in two ways or, of a model that reads pictures, two
    pictures behind the same words.

    Parameters
    ----------
    files
        Text files; without any, the reference of the Python language that lies in every Python. Pictures for a model
        that reads them, any two of which are a pair; without any, scenes.
    model
        mini, stories15M or smollm2-135m (fetched when first used), a .gguf file, a model folder, or a hub id.
    prefix
        Tokens that two texts have in common.
    length
        Tokens of each continuation; of a picture at most as many as it has.
    pairs
        How many, at most.
    batch
        Pairs at once.
    text
        Pairs of text for a model that reads pictures, too: its decoder alone.
    prompt
        Words before both pictures, which queries that are fused with a question are told.
    atlas
        Sprites of the scenes: emoji, or a .safetensors file.
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
    if min(batch, length, pairs) < 1:
        raise ConfigError(f"--batch is {batch}, --length {length}, --pairs {pairs}", "give at least 1 of each")
    config = read_config(model)
    if not isinstance(config, DecoderConfig | VLMConfig | UnifiedConfig):
        raise ConfigError(f"{model} is no language model", "give a decoder: its hidden states are measured")
    device, wanted = usable(device), Wanted(length, pairs, batch, seed)
    texts = text or isinstance(config, DecoderConfig)
    if texts:
        states, behind = _texts(model, device, files, prefix, wanted), f"after {prefix}"
    else:
        states, behind = _pictures(model, device, files, prompt, atlas, wanted), "of pictures"
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
    steps = ladder(1, len(found.n))
    rows = [["–" if math.isnan(x := float(c[n - 1])) else f"{x:.4g}" for c in columns.values()] for n in steps]
    print_table([("n", *columns), *((f"{n:,}", *row) for n, row in zip(steps, rows, strict=True))])
    print(
        f"\n{found.pairs} pairs of {len(found.n)} tokens {behind}; λ {found.scale:.4g}, M {found.norm:.4g}, "
        f"λ/(√2·M) {found.tightness:.3f}; balance point n* {found.balance[-1]:.3g}"
    )
    if json is not None:
        every = {
            name: [None if not math.isfinite(x) else x for x in column.tolist()] for name, column in columns.items()
        }
        ends = {"pairs": found.pairs, "lambda": found.scale, "M": found.norm, "tightness": found.tightness}
        about = {"prefix": prefix} if texts else {"prompt": prompt}
        write_plain(json, {"model": model, **about, "seed": seed, **ends, "columns": every}, device)
    if out is not None:
        points = [(n, float(found.distance[n - 1])) for n in steps]
        curve = [(int(n), float(d)) for n, d in zip(found.n, fitted, strict=True)]
        note = f"lambda {found.scale:.4g}, n* {found.balance[-1]:.3g}"
        save_figure(
            draw_laws([Fitted(model, note, points, curve)], "Divergence over tokens", "dots D, line its law"), out
        )


States = Iterable[tuple[Tensor, Tensor]]
"""batches of pairs: hidden states (P, N, D) of both branches"""


class Wanted(NamedTuple):
    length: int
    pairs: int
    batch: int
    seed: int


def _texts(model: str, device: str, files: tuple[str, ...], prefix: int, wanted: Wanted) -> States:
    words, loaded = hub.tokenizer(model), hub.load(model, device=device)
    decoder = getattr(loaded, "decoder", loaded)
    ids = words.encode(read_text(TextConfig(files=files, package=None if files else "python-docs")))
    starts = branches(ids, prefix, wanted.length, wanted.pairs, wanted.seed)
    return hidden(decoder, ids, starts, prefix, wanted.length, bos=words.bos, batch=wanted.batch)


def _pictures(model: str, device: str, files: tuple[str, ...], prompt: str, atlas: str, wanted: Wanted) -> States:
    words, seeing = hub.tokenizer(model), hub.load(model, device=device).eval()
    lead = words.encode("", specials=True)[:1]
    asked = words.encode(prompt, literal=True)
    if files:
        pictures = [load_image(file) for file in files]
        pairs = couples(len(pictures), wanted.pairs, wanted.seed)
    else:
        count, side = 2 * wanted.pairs, side_of(seeing)
        source = SceneSource(ScenesConfig(atlas=atlas, side=side, seed=wanted.seed), open_atlas(atlas))
        drawn = torch.cat([source.draw(part).pixels for part in torch.arange(count).split(64)])
        pictures = [Image.fromarray(one) for one in drawn.permute(0, 2, 3, 1).numpy()]
        pairs = np.arange(count).reshape(-1, 2)
    before = [*(lead if lead == [words.bos] else []), *asked]
    return pictured(seeing, pictures, pairs, prefix=before, question=asked, length=wanted.length, batch=wanted.batch)
