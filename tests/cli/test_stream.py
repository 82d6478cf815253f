import pytest
from cyclopts import App
from PIL import Image

from vitrail.errors import ConfigError, StreamError, VitrailError
from vitrail.stream import POSITIONS


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    app = App(result_action="return_value")
    app.command("vitrail.cli.stream:stream", name="stream")
    return lambda *given: app(["stream", *map(str, given)], exit_on_error=False)


@pytest.fixture
def described(tmp_path):
    def write(text: str, name: str = "it.toml"):
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return write


def test_the_example(run, capsys, tmp_path):
    run()
    out = capsys.readouterr().out
    assert "clip  49 tokens, 4 learnt" in out
    assert "video, 6×2×3" in out and "(4, 4, 4) … (14, 5, 6)" in out
    assert "6 samples in 2 × 112 tokens, 94% full" in out
    with Image.open(tmp_path / "out/stream.png") as sheet:
        assert sheet.width > 1000


def test_rule_and_budget_are_changed(run, capsys):
    run("--rule", "qwen2-vl/transformers", "--budget", 60, "--both", "video")
    out = capsys.readouterr().out
    assert out.startswith("qwen2-vl/transformers") and "5 × 60 tokens" in out
    assert "(4, 4, 4) … (9, 5, 6)" in out and "(7, 7, 7)" in out  # the text after the video steps back
    with pytest.raises(ConfigError, match="did you mean 'qwen3-vl'"):
        run("--rule", "qwen3vl")
    with pytest.raises(StreamError, match="compare has 49 tokens, more than a row of 40"):
        run("--budget", 40)


def test_a_description(run, described, capsys):
    toml = """
    [rules]
    positions = "qwen3-vl"
    [[samples]]
    name = "mixed"
    parts = [
        { text = 4 }, { picture = [480, 640], policy = "llava-next" }, { picture = 32 },
        { video = [3, 4, 4], merge = 2, stamp = 5 }, { action = 7, loss = true }, { query = 8 },
    ]
    [[samples]]
    parts = [{ text = 4 }, { picture = [2, 2], codes = true }]
    """
    run(described(toml), "--out", "deep/s.png")
    out = capsys.readouterr().out
    assert "image, 480×640 pixels in 2340 tokens" in out
    assert out.count("video, 1×2×2") == 3 and out.count("text, 5 tokens") == 3
    assert "nothing on sample 1" in out and "→ deep/s.png" in out
    run(described('{"samples": [{"parts": [{"text": 3}]}]}', "it.json"))
    assert "1 samples in 1 × 3 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("samples = [{ parts = [{ text = 4, pictur = 3 }] }]", "did you mean 'picture'"),
        ("samples = [{ parts = [{ text = 4, query = 3 }] }]", "not text and query"),
        ("samples = [{ parts = [{ loss = true }] }]", "none of them"),
        ("samples = [{ parts = [] }]", "sample 0 is empty"),
        ("samples = []", "no samples"),
        ("samples = [", "cannot be parsed"),
        ("samples = [{ parts = [{ picture = [4, 4], policy = 'anyrez' }] }]", "did you mean 'anyres'"),
        ("samples = [{ parts = [{ text = -4 }] }]", "is -4"),
        ("budget = 0\nsamples = [{ parts = [{ text = 4 }] }]", "budget is 0"),
    ],
)
def test_what_cannot_be_is_refused(run, described, text, says):
    with pytest.raises(VitrailError, match=says):
        run(described(text))


def test_files_that_are_not_there(run, tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.toml cannot be read"):
        run(tmp_path / "absent.toml")
    with pytest.raises(VitrailError, match="cannot be written"):
        run("--out", "it.nothing")


def test_help_names_every_rule(run, capsys):
    run("--help")
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert not [name for name in POSITIONS if name not in text]
