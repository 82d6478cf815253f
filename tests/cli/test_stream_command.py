import pytest
from cyclopts import App
from PIL import Image

from vitrail.errors import ConfigError, StreamError, VitrailError
from vitrail.stream import POSITION_RULES


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    app = App(result_action="return_value")
    app.command("vitrail.cli.stream_command:draw_streams", name="stream")
    return lambda *given: app(["stream", *map(str, given)], exit_on_error=False)


@pytest.fixture
def described(tmp_path):
    def write(text: str, name: str = "it.toml"):
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return write


def test_example(run, capsys, tmp_path):
    run()
    out = capsys.readouterr().out
    assert "clip  49 tokens, 4 with loss" in out
    assert "video, 6×2×3" in out and "(4, 4, 4) … (14, 5, 6)" in out
    assert "6 samples in 2 × 112 tokens, 94% filled" in out
    with Image.open(tmp_path / "out/stream.png") as sheet:
        assert sheet.width > 1000


def test_rule_and_row_length_options(run, capsys):
    run("--position-rule", "qwen2-vl/transformers", "--row-length", 60, "--bidirectional", "video")
    out = capsys.readouterr().out
    assert out.startswith("qwen2-vl/transformers") and "5 × 60 tokens" in out
    assert "(4, 4, 4) … (9, 5, 6)" in out and "(7, 7, 7)" in out  # the text after the video steps back
    with pytest.raises(ConfigError, match="did you mean 'qwen3-vl'"):
        run("--position-rule", "qwen3vl")
    with pytest.raises(StreamError, match="compare has 49 tokens, more than a row of 40"):
        run("--row-length", 40)


def test_description_file(run, described, capsys):
    toml = """
    [rules]
    positions = "qwen3-vl"
    [[samples]]
    name = "mixed"
    parts = [
        { text = 4 }, { image= [480, 640], policy = "llava-next" }, { image= 32 },
        { video = [3, 4, 4], merge_size= 2, timestamp_tokens= 5 }, { action = 7, loss = true }, { query = 8 },
    ]
    [[samples]]
    parts = [{ text = 4 }, { image= [2, 2], codes = true }]
    """
    run(described(toml), "--out", "deep/s.png")
    out = capsys.readouterr().out
    assert "image, 480×640 pixels in 2340 tokens" in out
    assert out.count("video, 1×2×2") == 3 and out.count("text, 5 tokens") == 3
    assert "no targets in sample 1" in out and "→ deep/s.png" in out
    run(described('{"samples": [{"parts": [{"text": 3}]}]}', "it.json"))
    assert "1 samples in 1 × 3 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("samples = [{ parts = [{ text = 4, imag = 3 }] }]", "did you mean 'image'"),
        ("samples = [{ parts = [{ text = 4, query = 3 }] }]", "not text and query"),
        ("samples = [{ parts = [{ loss = true }] }]", "none of them"),
        ("samples = [{ parts = [] }]", "sample 0 is empty"),
        ("samples = []", "no samples"),
        ("samples = [", "cannot be parsed"),
        ("samples = [{ parts = [{ image = [4, 4], policy = 'anyrez' }] }]", "did you mean 'anyres'"),
        ("samples = [{ parts = [{ text = -4 }] }]", "is -4"),
        (
            """row_length= 0
samples = [{ parts = [{ text = 4 }] }]""",
            "row_length is 0",
        ),
    ],
)
def test_invalid_descriptions_are_refused(run, described, text, message):
    with pytest.raises(VitrailError, match=message):
        run(described(text))


def test_missing_files_are_refused(run, tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.toml cannot be read"):
        run(tmp_path / "absent.toml")
    with pytest.raises(VitrailError, match="cannot be written"):
        run("--out", "it.nothing")


def test_help_names_every_rule(run, capsys):
    run("--help")
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert not [name for name in POSITION_RULES if name not in text]
