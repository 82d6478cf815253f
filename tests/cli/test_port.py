"""Models there and back: what transformers saved, in our format, and in its own again."""

import pytest
import torch
from cyclopts import App

from models import test_vlm as vlm
from test_talker import save
from vitrail import hub
from vitrail.cli import port
from vitrail.encoders import ViT
from vitrail.errors import CheckpointError, ConfigError
from vitrail.hub.families import FAMILIES
from vitrail.models.vlm import VLM, VLMConfig
from vitrail.processing.text import Tokenizer


@pytest.fixture
def run():
    app = App(result_action="return_value")
    app.command("vitrail.cli.port:take", name="import")
    app.command("vitrail.cli.port:give", name="export")
    return lambda *words: app(list(map(str, words)), exit_on_error=False)


def made() -> ViT:
    about = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    return ViT(FAMILIES["clip_vision_model"].read(about | {"image_size": 28, "patch_size": 7}))


def test_there_and_back(run, tmp_path, capsys):
    import transformers

    theirs = save(tmp_path / "hf")
    run("import", tmp_path / "hf", "-o", tmp_path / "deep" / "ours")
    said = capsys.readouterr().out.splitlines()
    count = sum(p.numel() for p in theirs.parameters())
    assert said[0].startswith(f"{tmp_path / 'deep' / 'ours'}: VLM from llava, {count:,} parameters, ")
    names = {line.split()[0] for line in said[1:]}
    assert names == {path.name for path in (tmp_path / "deep" / "ours").iterdir()}
    assert {"vitrail.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= names
    run("export", tmp_path / "deep" / "ours", "-o", tmp_path / "again")
    assert "llava from VLM" in capsys.readouterr().out
    back = transformers.LlavaForConditionalGeneration.from_pretrained(tmp_path / "again")
    a, b = theirs.state_dict(), back.state_dict()
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    words = [Tokenizer.load(tmp_path / name) for name in ("hf", "again")]
    assert words[0].chat_template == words[1].chat_template
    assert words[0].encode("what is this? <image>") == words[1].encode("what is this? <image>")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "deep", "hf"]


def test_a_tower_has_no_tokenizer_and_says_so(run, tmp_path, capsys):
    hub.save(made(), tmp_path / "ours")
    run("export", tmp_path / "ours", "-o", tmp_path / "hf")
    said = capsys.readouterr().out
    assert "from ViT" in said and "no tokenizer.json came with it" in said
    run("import", tmp_path / "hf", "-o", tmp_path / "again")
    a, b = (hub.load(tmp_path / name).state_dict() for name in ("ours", "again"))
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_nothing_is_overwritten_or_left_half_done(run, tmp_path, monkeypatch):
    hub.save(made(), tmp_path / "ours")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("full", "file", "link", "ours"):
        with pytest.raises(ConfigError, match=f"{name} is there already"):
            run("export", tmp_path / "ours", "-o", tmp_path / name)
    (tmp_path / "empty").mkdir()
    run("export", tmp_path / "ours", "-o", tmp_path / "empty")
    assert (tmp_path / "empty" / "config.json").is_file()
    with pytest.raises(ConfigError, match="cannot be written"):
        run("export", tmp_path / "ours", "-o", tmp_path / "file" / "below")

    def full(*given, **more):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(port.hub, "save", full)
    with pytest.raises(ConfigError, match="No space left"):
        run("import", tmp_path / "empty", "-o", tmp_path / "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file", "full", "link", "ours"]


def test_what_cannot_be_is_refused_before_it_is_read(run, tmp_path, monkeypatch):
    hub.save(made(), tmp_path / "ours")
    monkeypatch.setattr(port, "build", None)
    with pytest.raises(CheckpointError, match="a ViT with this config is no llama") as caught:
        run("export", tmp_path / "ours", "-o", tmp_path / "x", "--family", "llama")
    assert "it can be written as:" in caught.value.remedy
    with pytest.raises(CheckpointError, match=r"holds no config\.json"):
        run("import", tmp_path / "ours", "-o", tmp_path / "x")
    with pytest.raises(CheckpointError, match="does not exist"):
        run("import", tmp_path / "nowhere", "-o", tmp_path / "x")


@pytest.mark.parametrize(("more", "why"), [({"place": True}, "learned places"), ({"voco": 2}, "stand for a picture")])
def test_what_no_family_has_is_refused_with_the_reason(more, why, run, tmp_path):
    hub.save(VLM(VLMConfig(**vlm.WHOLE | more)), tmp_path / "ours")
    with pytest.raises(CheckpointError, match=why) as caught:
        run("export", tmp_path / "ours", "-o", tmp_path / "x")
    assert "our format" in caught.value.remedy and not (tmp_path / "x").exists()


def test_a_bar_follows_what_is_read_and_written(tmp_path, monkeypatch, capsys):
    class Loud(port.tqdm):
        seen = []

        def __init__(self, **more):
            super().__init__(**(more | {"disable": False, "delay": 0}))

        def __exit__(self, *left):
            Loud.seen.append((self.desc, self.n, self.total))
            return super().__exit__(*left)

    hub.save(made(), tmp_path / "ours")
    monkeypatch.setattr(port, "tqdm", Loud)
    port.give(str(tmp_path / "ours"), out=tmp_path / "hf")
    weights = sum(tensor.nbytes for tensor in made().state_dict().values())
    (reading, read, _), (writing, written, total) = Loud.seen
    assert (reading.strip(": "), writing.strip(": ")) == ("reading", "writing")
    assert read == weights == total == written


def test_into_the_folder_one_stands_in(run, tmp_path, monkeypatch):
    hub.save(made(), tmp_path / "ours")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    run("export", tmp_path / "ours", "-o", ".")
    assert (tmp_path / "here" / "config.json").is_file()
