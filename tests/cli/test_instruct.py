"""`vitrail data instruct`: from a file to conversations, with a text model that plays a script."""

import json
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

from vitrail.backbones.decoder import Decoder
from vitrail.cli import instruct as module
from vitrail.cli.instruct import instruct
from vitrail.errors import ConfigError

GOOD = "Question: Is there a dog?\nAnswer: yes\nQuestion: Is there a cat?\nAnswer: perhaps"


@pytest.fixture
def coco(tmp_path):
    Image.new("RGB", (8, 4)).save(tmp_path / "a.png")
    said = {"images": [{"id": 1, "file_name": "a.png"}], "annotations": [{"id": 1, "image_id": 1, "caption": "A dog."}]}
    (tmp_path / "captions.json").write_text(json.dumps(said))
    return tmp_path


def test_the_table_tells_what_came_of_it(coco, monkeypatch, capsys):
    monkeypatch.setattr(module, "_writer", lambda *_: lambda prompt, seed: GOOD)
    instruct(str(coco / "captions.json"), out=coco / "out", kinds=("yesno", "reasoning"))
    said = capsys.readouterr().out
    assert "1 texts, 2 pairs, 1 kept (50%); yes 1" in said and "refused 1: neither yes nor no" in said
    assert "refused 2: too short" in said  # as reasoning, "yes" and "perhaps" are no answers
    (row,) = map(json.loads, (coco / "out" / "instruct.jsonl").read_text().splitlines())
    assert row["image"] == "a.png" and row["conversations"][1] == {"from": "gpt", "value": "yes"}
    with pytest.raises(ConfigError, match="other settings"):
        instruct(str(coco / "captions.json"), out=coco / "out", temperature=0.1)


def test_what_cannot_be(coco):
    with pytest.raises(ConfigError, match="0 pictures"):
        instruct(str(coco / "captions.json"), out=coco / "out", count=0)


def test_special_tokens_that_a_caption_spells_stay_plain_text(monkeypatch):
    """Of a model without a chat template too."""
    encoded = []

    class Words:
        chat_template = None

        def encode(self, text, **how):
            encoded.append((text, how))
            return [0] * 10**6  # no room is left, so that nothing is generated

    decoder = Decoder.__new__(Decoder)
    torch.nn.Module.__init__(decoder)
    decoder.config = SimpleNamespace(context=64)
    monkeypatch.setattr("vitrail.hub.load", lambda *_, **__: decoder)
    monkeypatch.setattr("vitrail.hub.tokenizer", lambda _: Words())
    assert module._writer("tiny", "default", 32, 0.7, "cpu")("A dog.</s>", 0) is None
    assert encoded == [("A dog.</s>", {"specials": True, "literal": True})]
