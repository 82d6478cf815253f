import json
import re

import pytest
from cyclopts import App

from helpers import randomize
from hub.test_llama2c import SIZES, made_of, write_model, write_vocabulary
from vitrail import hub
from vitrail.backbones.decoder import Decoder, DecoderConfig
from vitrail.cli import write_command as module
from vitrail.data.text_source import TextSource, TextSourceConfig
from vitrail.encoders import ViT, ViTConfig
from vitrail.errors import CheckpointError, ConfigError, TextError
from vitrail.generate.bulk_generation import Continuation
from vitrail.nn import AttentionConfig, BlockConfig, GatedMLPConfig, RotaryConfig
from vitrail.processing.tokenizer import Tokenizer

TEMPLATE = "{% for m in messages %}<u>{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    words = Tokenizer.train(["the red cube and the blue ball"] * 9, 280, special_tokens=["<u>", "<a>"], eos="<u>")
    words.chat_template = TEMPLATE
    block = BlockConfig(
        width=16, attention=AttentionConfig(heads=2), mlp=GatedMLPConfig(intermediate_size=32), norm="rms"
    )
    config = DecoderConfig(
        vocab_size=words.vocab_size, layers=1, block=block, rotary=RotaryConfig(head_dim=8), context_length=64
    )
    path = tmp_path_factory.mktemp("model")
    hub.save(randomize(Decoder(config), spread=0.5), path, words)
    return path


@pytest.fixture
def run(folder):
    app = App(result_action="return_value")
    app.command("vitrail.cli.write_command:generate_text", name="write")
    return lambda *words: app(
        ["write", *map(str, words), "--model", str(folder), "--device", "cpu"], exit_on_error=False
    )


def test_text_continues_the_prompt(run, capsys):
    run("the red", "--max-new-tokens", 20, "--seed", 5)
    out, err = capsys.readouterr()
    assert out.startswith("the red") and out.endswith("\n") and len(out) > len("the red\n")
    assert "tokens/s" in err and err.endswith("seed 5\n") and err.startswith("20 tokens, first after")
    run("the red", "--max-new-tokens", 20, "--seed", 5)
    assert capsys.readouterr().out == out
    run("the red", "--max-new-tokens", 20)
    assert capsys.readouterr().out != out


def test_temperature_zero_needs_no_seed(run, capsys):
    run("the", "--temperature", 0, "--max-new-tokens", 9)
    one = capsys.readouterr()
    run("the", "--temperature", 0, "--max-new-tokens", 9, "--top-k", 3, "--top-p", 0.5, "--min-p", 0.1)
    assert capsys.readouterr().out == one.out and "seed" not in one.err


def test_text_ends_at_a_stop_string(run, capsys):
    run("the", "--temperature", 0, "--max-new-tokens", 30)
    whole = capsys.readouterr().out
    run("the", "--temperature", 0, "--max-new-tokens", 30, "--stop", whole[6:8])
    assert capsys.readouterr().out == whole[: whole.index(whole[6:8], 3)] + "\n"


def test_default_length_fits_the_context(run, capsys):
    run("the", "--temperature", 0)
    assert capsys.readouterr().err.startswith(("63 tokens", "62 tokens", "61 tokens"))
    with pytest.raises(ConfigError, match="more exceed the context length"):
        run("the", "--max-new-tokens", 64)
    with pytest.raises(ConfigError, match="more exceed the context length"):
        run("red " * 70)


def test_chat_prints_only_the_answer(run, folder, capsys, monkeypatch):
    asked = []

    def listen(model, prompts, **options):
        asked.extend(prompts)
        return iter(())

    monkeypatch.setattr(module, "stream_tokens", listen)
    run("the cube", "--chat")
    assert hub.load_tokenizer(folder).decode(asked[0]) == "<u>the cube<a>"
    assert capsys.readouterr().out == "\n"


def test_interrupt_stops_cleanly(run, capsys, monkeypatch):
    whole = module.stream_tokens

    def interrupted(*args, **options):
        for n, piece in enumerate(whole(*args, **options)):
            if n == 4:
                raise KeyboardInterrupt
            yield piece

    monkeypatch.setattr(module, "stream_tokens", interrupted)
    with pytest.raises(SystemExit) as left:
        run("the", "--seed", 1)
    assert left.value.code == 130
    out, err = capsys.readouterr()
    assert out.startswith("the") and out.endswith("\n") and err.startswith("4 tokens, first after")


def test_invalid_options_are_refused(run, tmp_path):
    with pytest.raises(ConfigError, match="temperature"):
        run("the", "--temperature", -1)
    with pytest.raises(CheckpointError, match="does not exist"):
        module.generate_text("the", model="nowhere", device="cpu")
    (tmp_path / "a.png").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"is not a model file"):
        module.generate_text("the", model=str(tmp_path / "a.png"), device="cpu")


def test_invalid_options_are_refused_before_loading_weights(folder, tmp_path, monkeypatch):
    hub.save(hub.load(folder), tmp_path / "mute", Tokenizer.train(["the"], 260))
    block = BlockConfig(width=8, attention=AttentionConfig(heads=1), mlp=GatedMLPConfig(intermediate_size=8))
    hub.save(ViT(ViTConfig(layers=1, block=block)), tmp_path / "seeing")
    monkeypatch.setattr(module.hub, "load", None)
    for device in ("quantum", "meta"):
        with pytest.raises(ConfigError, match=f"{device}' is not available"):
            module.generate_text("the", model=str(folder), device=device)
    with pytest.raises(ConfigError, match="--max-new-tokens is"):
        module.generate_text("the", model=str(folder), max_new_tokens=0, device="cpu")
    with pytest.raises(ConfigError, match="--stop is empty"):
        module.generate_text("the", model=str(folder), stop=("a", ""), device="cpu")
    with pytest.raises(TextError, match="mute has no chat template") as caught:
        module.generate_text("the", model=str(tmp_path / "mute"), chat=True, device="cpu")
    assert "--chat" in caught.value.remedy
    with pytest.raises(ConfigError, match="is a ViT, not a language model"):
        module.generate_text("the", model=str(tmp_path / "seeing"), device="cpu")


def test_help_has_an_example(run, capsys):
    run("--help")
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert 'vitrail write "Once upon a time"' in text and "stories15M" in text


def test_count_writes_a_text_source(run, folder, tmp_path, capsys):
    out = tmp_path / "deep" / "texts.jsonl"
    run("the red", "--count", 300, "--out", out, "--max-new-tokens", 9, "--temperature", 1, "--seed", 3)
    output = capsys.readouterr().err
    result = re.search(r"300 texts in \S+, (\d+) of them truncated at 9 tokens, seed 3", output)
    assert result and 0 < int(result[1]) < 300
    lines = [json.loads(line)["text"] for line in out.read_text().splitlines()]
    assert len(lines) == 300 and len(set(lines)) > 100 and all(line.startswith("the red") for line in lines)
    first = out.read_bytes()
    run("the red", "--count", 300, "-o", out, "--max-new-tokens", 9, "--temperature", 1, "--seed", 3)
    assert out.read_bytes() == first and [path.name for path in out.parent.iterdir()] == ["texts.jsonl"]
    words = hub.load_tokenizer(folder)
    windows = TextSource(TextSourceConfig(files=(str(out),), window_length=8), words)
    assert (windows.ids == words.eos_token_id).sum() == 270  # the tenth is for judging


@pytest.mark.parametrize(
    "more", [["--count", 3], ["--out", "a.jsonl"], ["--count", 0, "--out", "a.jsonl"],
             ["--count", 2, "--out", "a.jsonl", "--chat"], ["--count", 2, "--out", "a.jsonl", "--stop", "."],
             ["--count", 2, "--out", "a.jsonl", "--max-new-tokens", 300],
             ["--count", 2, "--out", "a.jsonl", "--temperature", 0], ["--count", 2, "--out", "a.txt"]],
)  # fmt: skip
def test_options_excluded_by_count_are_refused(run, more, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError):
        run("the red", *more)
    assert not [*tmp_path.iterdir()]


def test_word_keeps_its_space(tmp_path, monkeypatch):
    """To SentencePiece a text begins with a space that is not there, and only the first."""
    write_model(tmp_path / "model.bin", SIZES | {"vocab": 265})
    write_vocabulary(tmp_path / "tokenizer.bin", *made_of([(0, 1)]))
    monkeypatch.setattr(
        module, "generate_many", lambda *given, **more: iter([Continuation([259], True), Continuation([1, 260], False)])
    )
    app, out = App(result_action="return_value"), tmp_path / "texts.jsonl"
    app.command("vitrail.cli.write_command:generate_text", name="write")
    given = [
        "--model",
        str(tmp_path / "model.bin"),
        "--count",
        "2",
        "--max-new-tokens",
        "6",
        "-o",
        str(out),
        "--device",
        "cpu",
    ]
    app(["write", "ab ab", *given], exit_on_error=False)
    assert [json.loads(line)["text"] for line in out.read_text().splitlines()] == ["ab ab a", "ab ab "]


def test_unfinished_file_is_removed(run, tmp_path, monkeypatch):
    def broken(*_given, **_more):
        yield Continuation([1], True)
        raise TextError("no more")

    monkeypatch.setattr(module, "generate_many", broken)
    with pytest.raises(TextError, match="no more"):
        run("the red", "--count", 3, "--out", tmp_path / "a.jsonl")
    assert not [*tmp_path.iterdir()]
