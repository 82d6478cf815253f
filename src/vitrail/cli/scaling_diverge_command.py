"""`vitrail scaling diverge`: divergence of a decoder's hidden states over two continuations: texts or images."""

import math
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from cyclopts import Parameter

from vitrail import hub
from vitrail.backbones.decoder import DecoderConfig
from vitrail.cli.config_options import DeviceOption
from vitrail.cli.output_files import check_writable, write_json_with_origin
from vitrail.cli.scaling_command import check_figures, save_figure
from vitrail.cli.text_tables import align_columns
from vitrail.devices import resolve_device
from vitrail.errors import ConfigError
from vitrail.hub.checkpoint_info import read_config
from vitrail.lab.divergence import Divergence, accumulate_divergence, compute_bounds
from vitrail.lab.image_branches import compute_image_pairs
from vitrail.lab.text_branches import PairSettings, compute_text_pairs
from vitrail.lab.token_budget import powers_of_two
from vitrail.models.unified_model import UnifiedConfig
from vitrail.models.vlm_config import VLMConfig
from vitrail.plots.scaling_plots import LawPanel, draw_laws


def measure_divergence(
    files: Annotated[tuple[str, ...], Parameter(negative="")] = (),
    /,
    *,
    model: str = "stories15M",
    prefix_length: int = 4,
    length: int = 128,
    pairs: int = 128,
    batch_size: int = 16,
    text: Annotated[bool, Parameter(negative="")] = False,
    prompt: str = "",
    atlas: str = "emoji",
    beta: float = 1.0,
    suprema: Annotated[bool, Parameter(negative="")] = False,
    seed: int = 0,
    device: DeviceOption = None,
    json: Path | None = None,
    out: Path | None = None,
) -> None:
    """Measure the divergence of a decoder's hidden states over two continuations of the same prefix.

    The theory predicts that D grows as the root of Υ: as √n below the balance point n*, and as n above it. Pairs are
    places of a text where the same tokens continue in two ways, or two images after the same text.

    Parameters
    ----------
    files
        Text files. Default: the language reference of the Python installation. For a model with images: image files,
        of which any two are a pair. Default: scenes.
    model
        mini, stories15M or smollm2-135m (fetched when first used), a .gguf file, a model folder, or a hub id.
    prefix_length
        Tokens of the common prefix of two texts.
    length
        Tokens of each continuation. For images at most their number of tokens.
    pairs
        Maximum number of pairs.
    batch_size
        Pairs a batch.
    text
        Use pairs of texts for a model with images: only its decoder runs.
    prompt
        Text before both images. Queries that are fused with a question use it as the question.
    atlas
        Sprites of the scenes: emoji, or a .safetensors file.
    beta
        β in S ∝ Υ^(β/2), for α(n).
    suprema
        Also compute Υ by suprema, as the paper defines it (not a bound), and by the infima and suprema that give a
        bound.
    seed
        Seed that selects the pairs.
    json
        A JSON file for the values at all n.
    out
        A plot of D(n) and λ√Υ.
    """
    check_figures(out)
    check_writable(json)
    if min(sizes := (batch_size, length, pairs)) < 1:
        raise ConfigError(f"--batch-size, --length and --pairs are {sizes}", "give at least 1 of each")
    config = read_config(model)
    if not isinstance(config, DecoderConfig | VLMConfig | UnifiedConfig):
        raise ConfigError(f"{model} has no decoder", "give a language, vision-language or unified model")
    device, texts = resolve_device(device), text or isinstance(config, DecoderConfig)
    loaded, tokenizer = hub.load(model, device=device).eval(), hub.load_tokenizer(model)
    settings = PairSettings(length, pairs, batch_size, seed)
    if texts:
        states = compute_text_pairs(loaded, tokenizer, files, prefix_length, settings)
    else:
        states = compute_image_pairs(loaded, tokenizer, files, settings, prompt=prompt, atlas=atlas)
    if suprema:
        states = list(states)  # extremes over positions need all pairs in memory
    divergence = accumulate_divergence(states)
    columns = divergence.build_columns(beta)
    if suprema:
        left, right = (torch.cat(side) for side in zip(*states, strict=True))
        extremes = compute_bounds(left, right)
        columns |= {"Υ by suprema": extremes.upsilon, "Υ that bounds": extremes.valid_upsilon}
    steps, context = powers_of_two(1, len(divergence.n)), f"after {prefix_length}" if texts else "of images"
    rows = [["–" if math.isnan(x := float(c[n - 1])) else f"{x:.4g}" for c in columns.values()] for n in steps]
    table = [("n", *columns), *((f"{n:,}", *row) for n, row in zip(steps, rows, strict=True))]
    print(align_columns(table, numbers=False))
    print(
        f"\n{divergence.pairs} pairs of {len(divergence.n)} tokens {context}; λ {divergence.scale:.4g}, "
        f"M {divergence.max_norm:.4g}, λ/(√2·M) {divergence.tightness:.3f}; "
        f"balance point n* {divergence.balance_point[-1]:.3g}"
    )
    if json is not None:
        pair_options = {"prefix": prefix_length} if texts else {"prompt": prompt}
        _save_columns(json, {"model": model, **pair_options, "seed": seed}, divergence, columns, device)
    if out is not None:
        points = [(n, float(divergence.distance[n - 1])) for n in steps]
        curve = [(int(n), float(d)) for n, d in zip(divergence.n, divergence.fitted_distance, strict=True)]
        panel = LawPanel(model, f"lambda {divergence.scale:.4g}, n* {divergence.balance_point[-1]:.3g}", points, curve)
        save_figure(draw_laws([panel], "Divergence over tokens", "dots: D; line: law"), out)


def _save_columns(
    file: Path, settings: dict[str, Any], divergence: Divergence, columns: dict[str, np.ndarray], device: str
) -> None:
    """Save all columns at all n; infinite values become null."""
    plain = {name: [x if math.isfinite(x) else None for x in column.tolist()] for name, column in columns.items()}
    ends = {
        "pairs": divergence.pairs,
        "lambda": divergence.scale,
        "M": divergence.max_norm,
        "tightness": divergence.tightness,
    }
    write_json_with_origin(file, {**settings, **ends, "columns": plain}, device)
