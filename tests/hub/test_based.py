"""A model that stands on another: what is kept, what comes back, and what is refused."""

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
from vitrail.processing.chat import ChatTemplate
from vitrail.processing.templates import spoken
from vitrail.processing.text import Tokenizer
from vitrail.studio import MINI_VLM, TRAIN_VLM, said_change
from vitrail.talker import Talker


@pytest.fixture
def made(tmp_path):
    """A decoder in a folder, a VLM that has it and moved on from it a little, and a tokenizer."""
    torch.manual_seed(0)
    words = Tokenizer.train(
        ["what is this? a red dog"] * 3, 300, specials=("<|endoftext|>", "<image>"), eos="<|endoftext|>"
    )
    words.chat_template = spoken("<image>", "", "<|endoftext|>")
    model = recipe._model(small("mini-vlm-llava"), None).eval()
    hub.save(model.decoder, tmp_path / "lm")
    with torch.no_grad():
        for block in model.decoder.blocks:
            block.branches["mlp"].op.gate_up.weight.add_(0.01 * torch.randn(()))
    return model, words, tmp_path


def same(a, b) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("small_", [False, True])
def test_only_what_differs_is_kept_and_all_comes_back(made, small_):
    model, words, root = made
    hub.save(model, root / "vlm", words, base=str(root / "lm"), small=small_)
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
        hub.save(model, root / "whole", words, small=True)
        other = hub.load(root / "whole").state_dict()
        for name in moved:
            assert (again[name] - state[name]).abs().max() < (other[name] - state[name]).abs().max() / 3


def test_a_frozen_language_model_adds_nothing(made):
    model, words, root = made
    model.decoder.load_state_dict(hub.load(root / "lm").state_dict())
    hub.save(model, root / "vlm", words, base=str(root / "lm"))
    assert not any(name.startswith("decoder.") for name in load_file(root / "vlm" / "model.safetensors"))
    assert same(hub.load(root / "vlm").state_dict(), model.state_dict())


def test_a_base_that_is_gone_or_another_is_refused(made):
    model, words, root = made
    hub.save(model, root / "vlm", words, base=str(root / "lm"))
    file = root / "lm" / "model.safetensors"
    before = file.read_bytes()
    file.write_bytes(before[:-4] + bytes([before[-4] ^ 1, *before[-3:]]))
    with pytest.raises(CheckpointError, match=r"stands on .*lm of sha256 .* and the one here has"):
        hub.load(root / "vlm")
    (root / "lm").rename(root / "away")
    with pytest.raises(CheckpointError, match="which is not there"):
        vitrail.load(root / "vlm", device="cpu")


def test_a_base_of_another_shape_or_that_stands_on_a_third_is_refused(made):
    model, words, root = made
    config = model.decoder.config
    wider = config.with_(block=config.block.with_(mlp=config.block.mlp.with_(hidden=40)))
    hub.save(type(model.decoder)(wider), root / "other")
    with pytest.raises(CheckpointError, match="in the base"):
        hub.save(model, root / "no", words, base=str(root / "other"))
    hub.save(model, root / "vlm", words, base=str(root / "lm"))
    with pytest.raises(CheckpointError, match="stands on another model itself"):
        hub.save(model, root / "third", words, base=str(root / "vlm"))
    about = json.loads((root / "vlm" / "vitrail.json").read_text())
    about["base"] = {"start": 3}
    (root / "vlm" / "vitrail.json").write_text(json.dumps(about))
    with pytest.raises(CheckpointError, match="base"):
        hub.load(root / "vlm")


def test_a_model_that_stands_on_itself_is_refused(made, monkeypatch):
    model, words, root = made
    with pytest.raises(CheckpointError, match="stand on itself"):
        hub.save(model, root / "lm", words, base=str(root / "lm"))
    words.save(root / "lm")
    hub.save(model, root / "vlm", words, base=str(root / "lm"))
    about = json.loads((root / "vlm" / "vitrail.json").read_text())
    about["base"]["start"] = "vlm"
    (root / "vlm" / "vitrail.json").write_text(json.dumps(about))
    monkeypatch.chdir(root)
    for read in (hub.load, hub.tokenizer):
        with pytest.raises(CheckpointError, match="stand on itself"):
            read(root / "vlm")


@pytest.mark.parametrize(
    ("mine", "theirs", "small_"),
    [("float32", "bfloat16", False), ("float32", "bfloat16", True), ("bfloat16", "float32", False)],
)
def test_what_comes_back_is_of_one_type(made, mine, theirs, small_):
    model, words, root = made
    hub.save(hub.load(root / "lm").to(getattr(torch, theirs)), root / "other")
    hub.save(model.to(getattr(torch, mine)), root / "vlm", words, base=str(root / "other"), small=small_)
    again = hub.load(root / "vlm")
    assert {weight.dtype for weight in again.parameters()} == {getattr(torch, mine)}
    Talker(again, words, ChatTemplate.of(words)).ask(Image.new("RGB", (16, 16), "red"), "what is this?", max_new=2)


def test_a_tensor_that_the_base_has_too_is_not_replaced_in_silence(made):
    model, words, root = made
    hub.save(model, root / "vlm", words, base=str(root / "lm"))
    file = root / "vlm" / "model.safetensors"
    name = next(name for name in model.state_dict() if "gate_up" in name)
    kept = {key: value for key, value in load_file(file).items() if key != name + ":added"}
    save_file(kept | {name: model.state_dict()[name]}, file)
    with pytest.raises(CheckpointError, match="is kept whole, and the base has it too"):
        hub.load(root / "vlm")


def test_words_of_a_base_that_has_others_now_are_refused(made):
    model, words, root = made
    words.save(root / "lm")
    hub.save(model, root / "vlm", words, base=str(root / "lm"))
    assert hub.tokenizer(root / "vlm").encode("a red dog") == words.encode("a red dog")
    specials = ("<|endoftext|>", "<image>")
    Tokenizer.train(["other words"] * 3, 300, specials=specials, eos="<|endoftext|>").save(root / "lm")
    with pytest.raises(CheckpointError, match="lm's words of sha256"):
        hub.tokenizer(root / "vlm")
    hub.load(root / "vlm")  # its weights are the same


def test_words_that_are_the_base_s_are_not_kept_twice(made):
    model, words, root = made
    hub.save(model, root / "apart", words, base=str(root / "lm"))  # which has no words
    plain = Tokenizer.load(root / "apart")
    plain.chat_template, plain.stops = None, ()
    plain.save(root / "lm")
    hub.save(model, root / "vlm", words, base=str(root / "lm"))
    assert (root / "apart" / "tokenizer.json").is_file() and not (root / "vlm" / "tokenizer.json").is_file()
    one, other = hub.tokenizer(root / "apart"), hub.tokenizer(root / "vlm")
    assert one.encode("a red dog") == other.encode("a red dog")
    assert (one.named, one.chat_template, one.stops) == (other.named, other.chat_template, other.stops)
    assert hub.tokenizer(root / "lm").chat_template is None


def test_a_package_that_cannot_be_had_is_named(made, monkeypatch):
    model, words, root = made
    hub.save(model, root / "vlm", words, base=str(root / "lm"))
    about = json.loads((root / "vlm" / "vitrail.json").read_text())
    about["base"]["start"] = "stories15M"
    (root / "vlm" / "vitrail.json").write_text(json.dumps(about))

    def fetch(name, **_):
        raise CheckpointError("npm cannot be reached", "check the network")

    monkeypatch.setattr(packages, "fetch", fetch)
    monkeypatch.chdir(root)
    with pytest.raises(CheckpointError, match="stands on stories15M, which is not there: npm cannot be reached"):
        hub.load(root / "vlm")


def test_shipped_and_asked_by_name(made, monkeypatch, capsys):
    model, words, root = made
    monkeypatch.setattr("vitrail.hub.configs.SHIPPED", root / "weights")
    with pytest.raises(CheckpointError, match="no weights of mini-vlm") as error:
        vitrail.load(MINI_VLM)
    assert TRAIN_VLM in error.value.remedy
    hub.save(model, root / "trained", words)
    for words_, code in ((["--base", str(root / "lm")], 0), (["--base", str(root / "lm")], 2)):
        monkeypatch.setattr(
            "sys.argv", ["vitrail", "ship", str(root / "trained"), "-o", str(root / "weights" / MINI_VLM), *words_]
        )
        try:
            main()
            found = 0
        except SystemExit as end:
            found = int(end.code or 0)
        assert found == code
    said = capsys.readouterr()
    assert "MB beside" in said.out and "logits of words" in said.out and "holds a model already" in said.err
    picture = Image.new("RGB", (16, 16), "red")
    whole, ours = vitrail.load(root / "trained", device="cpu"), vitrail.load(MINI_VLM, device="cpu")
    assert isinstance(ours.ask(picture, "what is this?", max_new=3), str)
    assert ours.template.encode is not None and ours.words.encode("a dog") == whole.words.encode("a dog")


def test_gates_are_kept_beside_a_language_model_that_is_not(made):
    plain, words, root = made
    plain.decoder.load_state_dict(hub.load(root / "lm").state_dict())
    gated = recipe._model(small("mini-vlm-gated"), None).eval()
    gated.decoder.load_state_dict(plain.decoder.state_dict(), strict=False)
    hub.save(gated, root / "gated", words, base=str(root / "lm"))
    kept = {name for name in load_file(root / "gated" / "model.safetensors") if name.startswith("decoder.")}
    assert kept and all(name.startswith("decoder.fusion.") for name in kept)
    whole, other = (Talker(model, words, ChatTemplate.of(words)) for model in (gated, hub.load(root / "gated")))
    picture = Image.new("RGB", (16, 16), "red")
    assert same(whole.model.state_dict(), other.model.state_dict())
    assert said_change(whole, other, [picture], ["what is this?"]) == 0
    with torch.no_grad():
        other.model.decoder.embed.weight.mul_(1.5)
    assert said_change(whole, other, [picture], ["what is this?"]) > 0
