"""Damaged and malicious checkpoints raise errors that name the file or tensor; no code runs, no file is lost."""

import json
import os
import pickle
import struct

import pytest
import torch
from safetensors.torch import save_file

from vitrail.backbones.decoder import Decoder, DecoderConfig
from vitrail.errors import CheckpointError, ConfigError
from vitrail.hub import from_hf, load, safetensors_files, save, to_hf
from vitrail.hub.safetensors_files import INDEX_FILE, SafetensorsWeights, write_weights
from vitrail.nn import AttentionConfig, BlockConfig, GatedMLPConfig, RotaryConfig

CONFIG = DecoderConfig(
    vocab_size=30,
    layers=2,
    block=BlockConfig(
        width=16, attention=AttentionConfig(heads=2), mlp=GatedMLPConfig(intermediate_size=20), norm="rms"
    ),
    rotary=RotaryConfig(head_dim=8),
)


class Trap:
    def __reduce__(self):
        return (exec, ("raise SystemExit('the pickle ran')",))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "model.ckpt"])
def test_pickle_is_refused_unopened(name, tmp_path):
    (tmp_path / name).write_bytes(pickle.dumps(Trap()))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(CheckpointError, match="can execute arbitrary code"):
            SafetensorsWeights(path)


def test_truncated_file_names_tensor(tmp_path):
    save_file({"early": torch.zeros(10), "late": torch.ones(1000)}, tmp_path / "model.safetensors")
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-100])
    with pytest.raises(CheckpointError, match="'late'"):
        SafetensorsWeights(tmp_path)


@pytest.mark.parametrize("keep", [0, 3, 8, 20])
def test_truncated_header_raises(keep, tmp_path):
    save_file({"a": torch.zeros(10)}, tmp_path / "model.safetensors")
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:keep])
    with pytest.raises(CheckpointError, match=r"truncated|header"):
        SafetensorsWeights(tmp_path)


@pytest.mark.parametrize("header", [b"[]", b"not json", b'{"a": 1}', b'{"a": {"data_offsets": []}}', b"[" * 5000])
def test_malicious_header_raises(header, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(CheckpointError):
        SafetensorsWeights(tmp_path)


def test_invalid_index_raises(tmp_path):
    (tmp_path / "inside").mkdir()
    save_file({"a": torch.zeros(1)}, tmp_path / "outside.safetensors")
    for target, message in (("../outside.safetensors", "outside its folder"), ("gone.safetensors", "missing")):
        (tmp_path / "inside" / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": target}}))
        with pytest.raises(CheckpointError, match=message):
            SafetensorsWeights(tmp_path / "inside")
    for broken in ('{"weight_map": 3}', '{"weight_map": {"a": 5}}', "{}"):
        (tmp_path / "inside" / INDEX_FILE).write_text(broken)
        with pytest.raises(CheckpointError, match="not an index"):
            SafetensorsWeights(tmp_path / "inside")


def test_missing_files_are_named(tmp_path):
    with pytest.raises(CheckpointError, match="nowhere"):
        from_hf(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        from_hf(tmp_path)
    with pytest.raises(CheckpointError, match="nobody/nothing"):
        from_hf("nobody/nothing")


def test_extra_and_missing_tensors_are_named(tmp_path):
    model = Decoder(CONFIG)
    to_hf(model, tmp_path)
    weights = SafetensorsWeights(tmp_path)
    tensors = {name: weights[name].clone() for name in weights}
    write_weights(tmp_path, {**tensors, "adapter.weight": torch.zeros(1)}.items())
    with pytest.raises(CheckpointError, match=r"adapter\.weight"):
        from_hf(tmp_path)
    del tensors["model.norm.weight"]
    write_weights(tmp_path, tensors.items())
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight"):
        from_hf(tmp_path)


def test_saving_shards_replaces_old_files(tmp_path):
    tensors = {f"t{i}": torch.randn(50) for i in range(7)}
    write_weights(tmp_path, tensors.items(), shard_bytes=450)
    assert len(list(tmp_path.glob("model-*.safetensors"))) == 4
    weights = SafetensorsWeights(tmp_path)
    assert all(torch.equal(weights[name], tensor) for name, tensor in tensors.items())
    write_weights(tmp_path, {"only": torch.ones(2)}.items())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.safetensors"]
    assert list(SafetensorsWeights(tmp_path)) == ["only"]


def test_failed_save_keeps_old_files(tmp_path, monkeypatch):
    model = Decoder(CONFIG)
    save(model, tmp_path)

    def full(*_args, **_more):
        raise OSError("No space left on device")

    monkeypatch.setattr(safetensors_files, "save_file", full)
    with pytest.raises(OSError, match="space"):
        save(Decoder(CONFIG), tmp_path)
    monkeypatch.undo()
    again = load(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))


def test_native_format_validates_metadata(tmp_path):
    save(Decoder(CONFIG), tmp_path)
    about = json.loads((tmp_path / "vitrail.json").read_text())
    (tmp_path / "vitrail.json").write_text(json.dumps({**about, "kind": "oracle"}))
    with pytest.raises(CheckpointError, match="oracle"):
        load(tmp_path)
    (tmp_path / "vitrail.json").write_text(json.dumps({**about, "config": {**about["config"], "widht": 3}}))
    with pytest.raises(ConfigError, match="widht"):
        load(tmp_path)
    with pytest.raises(CheckpointError, match="Linear"):
        save(torch.nn.Linear(2, 2), tmp_path)


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_weights_have_default_permissions(mask, tmp_path):
    before = os.umask(mask)
    try:
        write_weights(tmp_path, [("a", torch.ones(3)), ("b", torch.ones(3))], shard_bytes=12)
        (tmp_path / "other").touch()
    finally:
        os.umask(before)
    assert len({path.stat().st_mode for path in tmp_path.iterdir()}) == 1
