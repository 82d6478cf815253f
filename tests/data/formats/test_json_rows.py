"""Rows of large JSON files by byte offset: the rows of a whole parse, a cached index, and unusable samples."""

import json
import os
import pickle
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import DataLoader

from vitrail.data.conversations import ConversationsConfig, ConversationSource
from vitrail.data.formats import detect_format, json_rows, open_dataset, registry
from vitrail.data.formats.json_rows import JsonRows, load_json_index, scan_json
from vitrail.errors import DataError

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda some: st.lists(some, max_size=3) | st.dictionaries(st.text(), some, max_size=3),
    max_leaves=8,
)


@pytest.fixture
def lazy(monkeypatch, tmp_path):
    """Read every file by offset, with the cache in a folder of the test."""
    monkeypatch.setenv("VITRAIL_HOME", str(tmp_path / "cache"))
    for module in (json_rows, registry):
        monkeypatch.setattr(module, "LARGE_FILE_BYTES", 1)
    json_rows._load_index.cache_clear()
    return tmp_path


def read_places(path: Path) -> list:
    data = path.read_bytes()
    return [json.loads(data[start : start + length]) for start, length in scan_json(path).places.tolist()]


WRITERS = {
    "dump": json.dumps,
    "indent": partial(json.dumps, indent=2),
    "compact": partial(json.dumps, separators=(",", ":"), ensure_ascii=False),
    "uneven": lambda rows: " [ " + " , ".join(json.dumps(row) + " " * (n % 3) for n, row in enumerate(rows)) + "\n]\n",
    "mark": lambda rows: "\ufeff" + json.dumps(rows),
    "lines": lambda rows: "\n".join(map(json.dumps, rows)),
    "windows lines": lambda rows: "".join(json.dumps(row) + "\r\n" for row in rows) + "\n  \n",
}


@pytest.mark.parametrize("writer", WRITERS)
@settings(max_examples=25)
@given(rows=st.lists(st.dictionaries(st.text(), values, min_size=1, max_size=3), min_size=1, max_size=8))
def test_every_row_is_found(tmp_path_factory, writer, rows):
    path = tmp_path_factory.mktemp("rows") / "rows.json"
    path.write_bytes(WRITERS[writer](rows).encode("utf-8", "surrogatepass"))
    assert read_places(path) == rows


def test_lines_across_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr(json_rows, "SCAN_BYTES", 7)
    rows = [{"n": n, "text": "x" * (n % 11)} for n in range(50)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    assert read_places(tmp_path / "rows.jsonl") == rows


def test_the_index_is_cached_and_shared(lazy, monkeypatch):
    path = lazy / "rows.json"
    rows = [{"n": n} for n in range(100)]
    path.write_text(json.dumps(rows))
    first = JsonRows(path, dict)
    assert list(first) == rows and isinstance(first.json_index.places, np.memmap)
    scans = []
    monkeypatch.setattr(json_rows, "scan_json", lambda path: scans.append(path) or scan_json(path))
    json_rows._load_index.cache_clear()
    again = pickle.loads(pickle.dumps(first))
    assert again[99] == rows[99] and not scans and len(pickle.dumps(first)) < 1000
    (index_file,) = (lazy / "cache/json").iterdir()
    for damage in (b"", index_file.read_bytes()[:-8], index_file.read_bytes()[:-1] + b"\x01"):
        index_file.write_bytes(damage)
        json_rows._load_index.cache_clear()
        assert list(JsonRows(path, dict)) == rows and len(scans) == 1
        scans.clear()
    path.write_text(json.dumps(rows[:5]))  # another size
    assert list(JsonRows(path, dict)) == rows[:5] and len(scans) == 1
    assert [row["n"] for row in DataLoader(JsonRows(path, dict), batch_size=None, num_workers=2)] == [*range(5)]


def test_a_read_only_cache_and_a_file_that_shrinks(lazy, monkeypatch):
    path = lazy / "rows.json"
    path.write_text(json.dumps([{"n": n} for n in range(100)]))
    (lazy / "cache").write_text("not a folder")
    rows = JsonRows(path, dict)
    assert rows[99] == {"n": 99}
    os.truncate(path, 100)
    with pytest.raises(DataError, match="truncated while it was read"):
        rows[99]


@pytest.mark.parametrize("text", ['[{"n": 1}, {"n"', '[{"n": 1} {"n": 2}]', '[{"n": 1}]]', "[1, 2", "[\xff]"])
def test_invalid_lists_are_refused(lazy, text):
    (lazy / "rows.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(DataError, match=r"rows\.json"):
        load_json_index(lazy / "rows.json")


# ── conversations of large files ─────────────────────────────────────────────────────────────────────────────────


def write_conversations(folder: Path, count: int = 300, style: str = "llava", **changes) -> Path:
    Image.new("RGB", (8, 6), "red").save(folder / "a.png")
    rows = []
    for n in range(count):
        if style == "llava":
            turns = [{"from": "human", "value": f"<image>\nWhat is {n}?"}, {"from": "gpt", "value": f"a cat {n}"}]
            rows.append({"id": n // 2, "image": "a.png", "conversations": turns})
        else:
            turns = [{"role": "user", "content": f"<image>What is {n}?"}, {"role": "assistant", "content": f"cat {n}"}]
            rows.append({"messages": turns, "images": ["a.png"]})
    for number, change in changes.pop("rows", {}).items():
        rows[number] |= change
    path = folder / "talks.json"
    path.write_text(json.dumps(rows))
    return path


@pytest.mark.parametrize("style", ["llava", "messages"])
def test_the_samples_are_those_of_a_small_file(tmp_path, monkeypatch, style):
    path = write_conversations(tmp_path, style=style)
    eager = open_dataset(style, path)
    for module in (json_rows, registry):
        monkeypatch.setattr(module, "LARGE_FILE_BYTES", 1)
    monkeypatch.setenv("VITRAIL_HOME", str(tmp_path / "cache"))
    assert detect_format(path) == style
    source = ConversationSource(ConversationsConfig(path=str(path)))
    assert source.faults is not None and len(source) == len(eager)
    for n in (0, 7, 299):
        assert source[n].turns == eager[n].turns and source[n].images == eager[n].images
    assert pickle.loads(pickle.dumps(source))[299].turns == eager[299].turns
    assert str(source.report()).startswith("read 3 of 300 samples, 0 faults")


def test_unusable_samples_are_named_and_counted(lazy, monkeypatch, capsys):
    monkeypatch.setattr("vitrail.data.conversations.NUM_CHECKED", 10)
    changes = {5: {"image": "gone.png"}, 77: {"conversations": []}, 150: {"image": ["a.png", "a.png"]}}
    source = ConversationSource(ConversationsConfig(path=str(write_conversations(lazy, rows=changes))))
    assert "of 300 samples" in capsys.readouterr().err
    read = [source[n] for n in range(300)]
    assert all(sample.turns for sample in read) and read[5] == source[5]  # the same replacement
    assert {sample.id for n, sample in enumerate(read) if n not in changes} == {
        f"{n // 2}#{n}" for n in range(300) if n not in changes
    }
    faults = [str(fault) for fault in source.report().faults]
    assert [fault.split(":")[1] for fault in faults] == [" sample 5", " sample 77", " sample 150"]
    assert "gone.png" in faults[0] and "no turns" in faults[1] and "1 × <image>" in faults[2]
    with pytest.raises(DataError, match=r"(?s)unreadable, more than the limit.*talks\.json: sample"):
        strict = ConversationSource(
            ConversationsConfig(path=str(lazy / "talks.json"), max_faults=0, max_fault_fraction=0)
        )
        [strict[n] for n in range(300)]


def test_splits_and_limits_of_a_large_file(lazy):
    path = write_conversations(lazy, 120)
    rows = json.loads(path.read_text())
    for n, row in enumerate(rows):
        row["image"] = f"{n // 2}.png"
        Image.new("RGB", (4, 4)).save(lazy / row["image"])
    path.write_text(json.dumps(rows))
    sources = {
        split: ConversationSource(ConversationsConfig(path=str(path), split=split)) for split in ("train", "test")
    }
    names = {split: {s[n].images[0].name for n in range(len(s))} for split, s in sources.items()}
    assert sum(map(len, sources.values())) == 120 and not names["train"] & names["test"]
    assert len(ConversationSource(ConversationsConfig(path=str(path), max_samples=7))) == 7
    fingerprint = sources["train"].fingerprint
    path.write_text(json.dumps([*rows[:-1], rows[-1] | {"id": "new"}]))
    assert ConversationSource(ConversationsConfig(path=str(path))).fingerprint != fingerprint


def test_msgspec_views_are_not_copied(tmp_path):
    """The index of lists relies on `Raw` being a view of the buffer."""
    data = bytearray(b'[{"a": 1}, {"b": 2}]')
    rows = msgspec.json.decode(memoryview(data), type=list[msgspec.Raw])
    base = np.frombuffer(data, np.uint8).__array_interface__["data"][0]
    starts = [np.frombuffer(row, np.uint8).__array_interface__["data"][0] - base for row in rows]
    assert starts == [1, 11]
