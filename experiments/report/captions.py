"""Captions of figures and tables with the origin of their data."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.results_files import ORIGIN_LABELS
from vitrail.plots.html_page import Html, escape_html, render_code


def format_caption(text: str, provenance: Mapping[str, Any], file: Path | None = None) -> Html:
    """Format the caption of a figure or table, with its origin below."""
    known = [escape_html(f"{word}{provenance[key]}") for key, word in ORIGIN_LABELS.items() if key in provenance]
    command = [render_code(str(provenance["command"]))] if "command" in provenance else []
    source = [escape_html(f"read from {file}" if file else "computed for this page")]
    note = f" Note: {escape_html(str(provenance['note']))}." if "note" in provenance else ""
    return Html(f'{escape_html(text)} <span class="origin">{", ".join([*command, *known, *source])}.{note}</span>')
