"""Small sources in the layout of their packages, in a folder that replaces the cache."""

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from PIL import Image

from vitrail.data.sources import fetch, get_source

Place = Callable[[str, dict[str, object]], Path]
SVG = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 40 20"><rect width="40" height="20" fill="#00f"/></svg>'


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """Return a function that writes a source's files into the cache, from texts, JSON or RGBA arrays, and returns its
    root."""

    def put(name: str, files: dict[str, object]) -> Path:
        folder = tmp_path / "root" / "data" / name / "files"
        for path, content in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, np.ndarray):
                Image.fromarray(content).save(folder / path, lossless=True)
            else:
                (folder / path).write_text(
                    content if isinstance(content, str) else json.dumps(content), encoding="utf-8"
                )
        record = fetch._build_record(get_source(name), folder)
        (folder / fetch.FETCH_RECORD_FILE).write_bytes(msgspec.json.encode(record))
        return tmp_path / "root"

    return put


@pytest.fixture
def names(place: Place) -> Path:
    """A small emojibase."""

    def entries(*labels: str) -> list[dict[str, object]]:
        farmer = {"hexcode": "1F468-1F3FD-200D-1F33E", "label": f"{labels[1]}, medium"}
        return [
            {"hexcode": "1F436", "label": labels[0], "tags": ["pet", "woof"], "group": 3, "unicode": "🐶"},
            {"hexcode": "1F468-200D-1F33E", "label": labels[1], "tags": ["plow"], "group": 1, "skins": [farmer]},
            {"hexcode": "0023-FE0F-20E3", "label": labels[2], "tags": [], "group": 8},
            {"hexcode": "1F1E6", "label": labels[3]},
        ]

    groups = [{"key": "people-body", "order": 1}, {"key": "animals-nature", "order": 3}, {"key": "symbols", "order": 8}]
    return place(
        "emojibase",
        {
            "package/en/compact.json": entries("dog face", "man farmer", "keycap: #", "letter A"),
            "package/de/compact.json": entries("Hundegesicht", "Bauer", "Taste: #", "Buchstabe A"),
            "package/en/messages.json": {"groups": groups, "skinTones": []},
        },
    )
