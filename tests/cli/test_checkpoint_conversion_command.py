"""Models there and back: what transformers saved, in our format, and in its own again."""

import pytest
import torch
from cyclopts import App

from models import test_vlm as vlm
from pipelines.test_chat import save
from vitrail import hub
from vitrail.cli import checkpoint_conversion_command
from vitrail.data.sources import progress_bar
from vitrail.encoders import ViT
from vitrail.errors import CheckpointError, ConfigError
from vitrail.hub import checkpoint_conversion
from vitrail.models.vlm import VLM, VLMConfig
from vitrail.processing.tokenizer import Tokenizer
from vitrail.registry import FAMILIES


@pytest.fixture
def run():
    app = App(result_action="return_value")
    app.command("vitrail.cli.checkpoint_conversion_command:import_checkpoint", name="import")
    app.command("vitrail.cli.checkpoint_conversion_command:export_checkpoint", name="export")
    return lambda *words: app(list(map(str, words)), exit_on_error=False)


def made() -> ViT:
    about = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    return ViT(FAMILIES["clip_vision_model"].from_hf_config(about | {"image_size": 28, "patch_size": 7}))


def test_import_and_export_round_trip(run, tmp_path, capsys):
    import transformers

    theirs = save(tmp_path / "hf")
    run("import", tmp_path / "hf", "-o", tmp_path / "deep" / "ours")
    output = capsys.readouterr().out.splitlines()
    count = sum(p.numel() for p in theirs.parameters())
    assert output[0].startswith(f"{tmp_path / 'deep' / 'ours'}: VLM from llava, {count:,} parameters, ")
    names = {line.split()[0] for line in output[1:]}
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


def test_tower_without_tokenizer_is_noted(run, tmp_path, capsys):
    hub.save(made(), tmp_path / "ours")
    run("export", tmp_path / "ours", "-o", tmp_path / "hf")
    output = capsys.readouterr().out
    assert "from ViT" in output and "the source has no tokenizer.json" in output
    run("import", tmp_path / "hf", "-o", tmp_path / "again")
    a, b = (hub.load(tmp_path / name).state_dict() for name in ("ours", "again"))
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_output_is_atomic_and_never_overwrites(run, tmp_path, monkeypatch):
    hub.save(made(), tmp_path / "ours")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("full", "file", "link", "ours"):
        with pytest.raises(ConfigError, match=f"{name} already exists"):
            run("export", tmp_path / "ours", "-o", tmp_path / name)
    (tmp_path / "empty").mkdir()
    run("export", tmp_path / "ours", "-o", tmp_path / "empty")
    assert (tmp_path / "empty" / "config.json").is_file()
    with pytest.raises(ConfigError, match="cannot be written"):
        run("export", tmp_path / "ours", "-o", tmp_path / "file" / "below")

    def full(*given, **more):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint_conversion.hub, "save", full)
    with pytest.raises(ConfigError, match="No space left"):
        run("import", tmp_path / "empty", "-o", tmp_path / "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file", "full", "link", "ours"]


def test_unsupported_models_are_refused_before_reading_weights(run, tmp_path, monkeypatch):
    hub.save(made(), tmp_path / "ours")
    monkeypatch.setattr(checkpoint_conversion, "build_model", None)
    with pytest.raises(CheckpointError, match="a ViT with this config cannot be") as caught:
        run("export", tmp_path / "ours", "-o", tmp_path / "x", "--family", "llama")
    assert "possible:" in caught.value.remedy
    with pytest.raises(CheckpointError, match=r"contains no"):
        run("import", tmp_path / "ours", "-o", tmp_path / "x")
    with pytest.raises(CheckpointError, match="does not exist"):
        run("import", tmp_path / "nowhere", "-o", tmp_path / "x")


@pytest.mark.parametrize(
    ("more", "why"), [({"position_embedding": True}, "position embeddings"), ({"voco_tokens": 2}, "VoCo tokens")]
)
def test_unexportable_model_is_refused_with_the_reason(more, why, run, tmp_path):
    hub.save(VLM(VLMConfig(**vlm.WHOLE | more)), tmp_path / "ours")
    with pytest.raises(CheckpointError, match=why) as caught:
        run("export", tmp_path / "ours", "-o", tmp_path / "x")
    assert "native format" in caught.value.remedy and not (tmp_path / "x").exists()


def test_progress_bar_follows_bytes(tmp_path, monkeypatch, capsys):
    class Loud(progress_bar.tqdm):
        seen = []

        def __init__(self, **more):
            super().__init__(**(more | {"disable": False, "delay": 0}))

        def __exit__(self, *left):
            Loud.seen.append((self.desc, self.n, self.total))
            return super().__exit__(*left)

    hub.save(made(), tmp_path / "ours")
    monkeypatch.setattr(progress_bar, "tqdm", Loud)
    checkpoint_conversion_command.export_checkpoint(str(tmp_path / "ours"), out=tmp_path / "hf")
    weights = sum(tensor.nbytes for tensor in made().state_dict().values())
    (reading, read, _), (writing, written, total) = Loud.seen
    assert (reading.strip(": "), writing.strip(": ")) == ("reading", "writing")
    assert read == weights == total == written


def test_relative_output_folder(run, tmp_path, monkeypatch):
    hub.save(made(), tmp_path / "ours")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    run("export", tmp_path / "ours", "-o", ".")
    assert (tmp_path / "here" / "config.json").is_file()
