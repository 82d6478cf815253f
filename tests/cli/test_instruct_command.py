"""`vitrail data instruct`: from a file to conversations, with a text model that plays a script."""

import json
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

from vitrail.backbones.decoder import Decoder
from vitrail.cli import instruct_command as module
from vitrail.cli.instruct_command import make_instruction_data
from vitrail.errors import ConfigError

GOOD = "Question: Is there a dog?\nAnswer: yes\nQuestion: Is there a cat?\nAnswer: perhaps"


@pytest.fixture
def coco(tmp_path):
    Image.new("RGB", (8, 4)).save(tmp_path / "a.png")
    output = {
        "images": [{"id": 1, "file_name": "a.png"}],
        "annotations": [{"id": 1, "image_id": 1, "caption": "A dog."}],
    }
    (tmp_path / "captions.json").write_text(json.dumps(output))
    return tmp_path


def test_table_of_yields(coco, monkeypatch, capsys):
    monkeypatch.setattr(module, "_build_text_writer", lambda *_: lambda prompt, seed: GOOD)
    make_instruction_data(str(coco / "captions.json"), out=coco / "out", kinds=("yesno", "reasoning"))
    output = capsys.readouterr().out
    assert "1 texts, 2 pairs, 1 kept (50%); yes 1" in output and "refused 1: neither yes nor no" in output
    assert "refused 2: answer too short" in output  # as reasoning, "yes" and "perhaps" are no answers
    (row,) = map(json.loads, (coco / "out" / "instruct.jsonl").read_text().splitlines())
    assert row["image"] == "a.png" and row["conversations"][1] == {"from": "gpt", "value": "yes"}
    with pytest.raises(ConfigError, match="other settings"):
        make_instruction_data(str(coco / "captions.json"), out=coco / "out", temperature=0.1)


def test_invalid_options_are_refused(coco):
    with pytest.raises(ConfigError, match="--count is 0"):
        make_instruction_data(str(coco / "captions.json"), out=coco / "out", count=0)


def test_special_tokens_in_captions_stay_plain_text(monkeypatch):
    """Of a model without a chat template too."""
    encoded = []

    class Words:
        chat_template = None

        def encode(self, text, **how):
            encoded.append((text, how))
            return [0] * 10**6  # no room is left, so that nothing is generated

    decoder = Decoder.__new__(Decoder)
    torch.nn.Module.__init__(decoder)
    decoder.config = SimpleNamespace(context_length=64)
    monkeypatch.setattr("vitrail.hub.load", lambda *_, **__: decoder)
    monkeypatch.setattr("vitrail.hub.load_tokenizer", lambda _: Words())
    assert module._build_text_writer("tiny", "default", 32, 0.7, "cpu")("A dog.</s>", 0) is None
    assert encoded == [("A dog.</s>", {"add_special_tokens": True, "literal": True})]
