"""Files that are no files, too large, nested too deeply or without a UTF-8 form raise OSError or ValueError."""

import os
import threading

import pytest

from vitrail import hub
from vitrail.errors import VitrailError
from vitrail.file_reading import parse_json, parse_toml, read_json_file, read_regular_file, read_text_file
from vitrail.processing.chat_template import ChatTemplate
from vitrail.recipe.recipe_files import read_recipe_file
from vitrail.stream.stream_description import StreamDescription

DEEP = 100_000


@pytest.mark.parametrize(
    "text", ["[" * DEEP + "]" * DEEP, '{"a":' * DEEP + "1" + "}" * DEEP, '{"a": "\\ud800"}', "1" * 9999]
)
def test_json(text):
    for data in (text, text.encode()):
        with pytest.raises(ValueError):
            parse_json(data)
    assert parse_json('["\\ud83d\\ude00", 1e999]') == ["😀", float("inf")]


def test_toml():
    with pytest.raises(ValueError, match="nested"):
        parse_toml("a = " + "[" * DEEP + "]" * DEEP)
    assert parse_toml("a = [1]") == {"a": [1]}


def test_text(tmp_path):
    (tmp_path / "a").write_bytes(b"\xef\xbb\xbfa\n")
    assert read_text_file(tmp_path / "a") == "a\n"
    (tmp_path / "a").write_bytes(b"\xff")
    with pytest.raises(UnicodeDecodeError):
        read_text_file(tmp_path / "a")


def test_size_limit(tmp_path, monkeypatch):
    with (tmp_path / "a").open("wb") as file:
        file.truncate(10**12)  # it needs no disk space
    with pytest.raises(OSError, match=r"1,000,000,000,000 bytes exceed the limit of 50,000,000 \(VITRAIL_FILE_BYTES"):
        read_json_file(tmp_path / "a")
    (tmp_path / "b").write_bytes(b"[" + b" " * 6_000_000 + b"]")
    assert read_json_file(tmp_path / "b") == []
    monkeypatch.setenv("VITRAIL_FILE_BYTES", "1e8")
    with pytest.raises(OSError, match="limit of 5,000,000"):
        read_json_file(tmp_path / "b")
    with pytest.raises(OSError, match="limit of 3"):
        read_regular_file(tmp_path / "b", 3)


@pytest.fixture(params=["pipe", "device", "folder", "missing"])
def endless(request, tmp_path):
    """Return a function that puts something that is no regular file at a path."""

    def make(path):
        match request.param:
            case "pipe":
                os.mkfifo(path)
            case "device":
                path.symlink_to("/dev/zero")
            case "folder":
                path.mkdir()

    return make


READERS = {
    "vitrail.json": hub.load,
    "config.json": hub.load,
    "model_index.json": hub.load,
    "model.safetensors": lambda folder: hub.load(folder / "model.safetensors"),
    "model.gguf": lambda folder: hub.load(folder / "model.gguf"),
    "model.bin": lambda folder: hub.load(folder / "model.bin"),
    "tokenizer.json": hub.load_tokenizer,
    "tokenizer_config.json": ChatTemplate.load,
    "a.toml": lambda folder: read_recipe_file(folder / "a.toml"),
    "b.toml": lambda folder: StreamDescription.load(folder / "b.toml"),
}


@pytest.mark.parametrize("name", READERS)
def test_no_reader_waits_for_a_pipe_or_device(name, endless, tmp_path):
    endless(tmp_path / name)
    result = []

    def read():
        try:
            READERS[name](tmp_path)
        except VitrailError as error:
            result.append(error)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(300)
    assert result, f"the reader of {name} hangs, or raises another error"
    assert result[0].problem
