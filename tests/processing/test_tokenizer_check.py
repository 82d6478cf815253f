"""A tokenizer.json that crashes its library, expands texts, or never ends raises TextError, and the process goes on."""

import json

import pytest

from vitrail.errors import TextError
from vitrail.processing.tokenizer import Tokenizer

VALID = Tokenizer.train(["the red cube"] * 9, 270)
LIMITS = "takes more than|crashes its process|needs more than"
GROW = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 16}


def split(expression: str) -> dict:
    return {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}


HOSTILE = {
    "growing text": ({"normalizer": {"type": "Sequence", "normalizers": [GROW] * 12}}, LIMITS),
    "growing a little": ({"normalizer": {"type": "Sequence", "normalizers": [GROW] * 2}}, "expands a text of 200"),
    "many tokens": ({"pre_tokenizer": split("a"), "normalizer": GROW | {"content": "a" * 150}}, "expands|encodes"),
    "growing decoder": (
        {"decoder": {"type": "Sequence", "decoders": [GROW] * 12}},
        LIMITS,
    ),
    "regular expression": ({"pre_tokenizer": split("(?:a+a+)+y$")}, "retry-limit"),
    "panic on load": ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}, "PanicException"),
}


def write(folder, change: dict):
    (folder / "tokenizer.json").write_text(json.dumps(json.loads(VALID._rust.to_str()) | change))
    return folder


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_tokenizer(name, tmp_path, monkeypatch):
    monkeypatch.setenv("VITRAIL_FILE_SECONDS", "6")
    change, message = HOSTILE[name]
    with pytest.raises(TextError, match=message) as error:
        Tokenizer.load(write(tmp_path, change))
    assert "tokenizer.json" in error.value.problem and error.value.remedy
    VALID.save(tmp_path / "valid")
    assert Tokenizer.load(tmp_path / "valid").encode("red cube") == VALID.encode("red cube")


def test_panic_while_encoding(tmp_path):
    words = Tokenizer.load(write(tmp_path, {"pre_tokenizer": split("(?:x+x+)+y$")}))
    assert words.encode("red x")
    with pytest.raises(TextError, match="retry-limit"):
        words.encode("x" * 40)


def test_usual_steps_pass(tmp_path):
    steps = [{"type": "NFKC"}, {"type": "Prepend", "prepend": "▁"}, GROW | {"content": "▁", "pattern": {"String": " "}}]
    words = Tokenizer.load(write(tmp_path, {"normalizer": {"type": "Sequence", "normalizers": steps}}))
    assert words.encode("red")
