"""`vitrail ledger` prints the numbers of the ledger."""

import json
import re
import struct
from pathlib import Path

import pytest
from cyclopts import App
from PIL import Image

from vitrail import recipe
from vitrail.backbones.decoder import Decoder
from vitrail.backbones.presets import DECODER_PRESETS
from vitrail.errors import CheckpointError, ConfigError, VitrailError
from vitrail.hub import save
from vitrail.lab.cost_ledger import PRESETS, compute_ledger
from vitrail.lab.pass_timing import PROBE_SIZES
from vitrail.plots.ledger_plot import format_si, format_token_count


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    app = App(result_action="return_value")
    app.command("vitrail.cli.ledger_command:print_ledger", name="ledger")

    def call(*words) -> str:
        app(["ledger", *map(str, words)], exit_on_error=False)
        return capsys.readouterr().out

    return call


def rows(out: str) -> dict[str, list[str]]:
    """Label → cells of the first table."""
    split = (re.split(r"\s{2,}", line.strip()) for line in out.split("\n\n")[0].splitlines()[1:])
    return {label: cells for label, *cells in split}


@pytest.mark.parametrize(
    ("value", "unit", "shown"),
    [
        (8_030_261_248, "", "8.03 G"),
        (131_072, "B", "131 kB"),
        (0.000546, "s", "546 µs"),
        (3.7404e-3, "s", "3.74 ms"),
        (999.6e6, "B", "1.00 GB"),
        (1.0, "s", "1.00 s"),
        (0, "B", "0 B"),
        (1.2e-10, "s", "0.120 ns"),
        (5e21, "FLOP", "5000 EFLOP"),
    ],
)
def test_units(value, unit, shown):
    assert format_si(value, unit) == shown


def test_context_lengths_are_abbreviated():
    assert [format_token_count(n) for n in (500, 8192, 262_144, 2**20)] == ["500", "8k", "256k", "1M"]


def test_table(run):
    out = run("llama-3.1-8b", "qwen3-30b-a3b")
    shown = rows(out)
    assert shown["parameters"] == ["8.03 B", "30.5 B"]
    assert shown["active"] == ["8.03 B", "3.35 B"]
    assert shown["cache, a token"] == ["131 kB", "98.3 kB"]
    assert shown["cache, 256k"] == ["34.4 GB", "25.8 GB"]
    assert shown["decode step at 256k"][0] == "11.5 ms m"
    assert shown["devices needed"] == ["1", "1"]
    assert "h200: measured rates" in out


def test_docs_page_equals_the_output(run):
    page = Path(__file__).parents[2] / "docs" / "ledger.md"
    assert run("llama-3.1-8b", "qwen3-30b-a3b").split("\n\n")[0] in page.read_text()


@pytest.mark.parametrize("name", [*recipe.list_recipe_names(), *recipe.list_untested_recipe_names()])
def test_every_recipe_has_a_ledger(run, name):
    found = rows(run(name))
    assert {"parameters", "weights"} <= set(found) and any("forward" in key or "prefill" in key for key in found)


def test_listing_names_presets(run, monkeypatch):
    """A sample of the presets, because all take seconds. Whole systems have their own heading."""
    shown = ("stories15m", "qwen3-235b-a22b", "clip-b16", "clip-l-text")
    whole = ("qwen2.5-vl-3b", "llama-3.2-11b-vision")
    monkeypatch.setattr("vitrail.cli.ledger_command.PRESETS", {name: PRESETS[name] for name in (*shown, *whole)})
    monkeypatch.setattr("vitrail.cli.ledger_command.ALL_VLM_PRESETS", {name: PRESETS[name] for name in whole})
    lines = run().splitlines()
    gap = lines.index("")
    assert [line.split()[0] for line in lines[:gap]] == list(shown)
    assert "235 B" in lines[1] and "22.2 B active" in lines[1] and "256 tokens" in lines[0]
    assert lines[gap + 1].startswith("vision-language models")
    assert [line.split()[0] for line in lines[gap + 2 : gap + 4]] == list(whole)
    assert "391 tokens an image" in lines[gap + 2] and "3,202 image features" in lines[gap + 3]
    assert lines[-1].split()[0] == "mini" and "37.5 M" in lines[-1] and "145 tokens an image" in lines[-1]


def test_settings_reach_the_ledger(run, tmp_path):
    out = run(
        "stories15m",
        "--context-length",
        500,
        "--batch-size",
        4,
        "--dtype",
        "float32",
        "--device",
        "a100",
        "--json",
        "deep/l.json",
    )
    assert "stories15m has a context of 256 tokens, less than 500" in out
    assert "a100, batch 4" in out
    output = json.loads((tmp_path / "deep/l.json").read_text())
    assert {"command", "date", "device", "torch"} <= output["origin"].keys()
    assert output["devices"]["a100"]["origin"].startswith("datasheet")
    expected = compute_ledger("stories15m", context_length=500, batch_size=4, dtype="float32", devices=["a100"])
    assert output["ledgers"] == json.loads(json.dumps([expected.to_dict()]))


def test_devices_needed_are_noted(run):
    assert "llama-3.1-70b needs 6 rtx4090" in run("llama-3.1-70b", "--device", "rtx4090", "--context-length", 512)


def test_towers_have_a_separate_table(run):
    out = run("clip-l14-336", "stories15m", "clip-l-text")
    pictures, prompts, texts, notes = out.split("\n\n")
    assert "tokens, an image             576" in pictures
    assert "prefill, 256" in prompts
    assert "forward, a text" in texts
    assert "the prompt has 256 tokens, the context of the model" in notes


def test_narrow_terminals_wrap_models(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "50")
    out = run("stories15m", "smollm2-135m", "smollm2-360m")
    assert out.count("parameters") == 2
    assert all(len(line) <= 50 for line in out.split("\n\nh200:")[0].splitlines())


@pytest.mark.parametrize("own", [True, False], ids=["ours", "theirs"])
def test_folder_is_read_without_weights(run, tmp_path, own):
    from vitrail.registry import FAMILIES

    config = DECODER_PRESETS["smollm2-135m"]
    folder = tmp_path / "mine"
    folder.mkdir()
    if own:
        about = {"kind": "decoder", "config": config.to_dict()}
    else:
        about = {"model_type": "llama", **FAMILIES["llama"].to_hf_config(config)}
    (folder / ("vitrail.json" if own else "config.json")).write_text(json.dumps(about))
    named, mine = run("smollm2-135m"), run("mine")
    assert [line.split() for line in mine.splitlines()[1:]] == [line.split() for line in named.splitlines()[1:]]


def test_single_file_is_read_without_weights(run, tmp_path):
    """llama2.c: width 8, hidden 12, one layer, two heads, two of keys, vocabulary 10, context 4; then the numbers."""
    parameters = 10 * 8 + (4 * 8 * 8 + 3 * 8 * 12 + 2 * 8) + 8
    tables = 2 * 4 * 2
    (tmp_path / "tiny.bin").write_bytes(struct.pack("<7i", 8, 12, 1, 2, 2, 10, 4) + bytes(4 * (parameters + tables)))
    assert rows(run("tiny.bin", "--context-length", 4))["parameters"] == [str(parameters)]


@pytest.mark.parametrize(
    ("file", "about", "message"),
    [
        ("other.json", {}, "neither vitrail.json nor config.json"),
        ("config.json", {"model_type": "abacus"}, "unknown model_type 'abacus'"),
        ("vitrail.json", {"kind": "abacus"}, "unknown kind 'abacus'"),
    ],
)
def test_folders_without_a_model_are_refused(run, tmp_path, file, about, message):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / file).write_text(json.dumps(about))
    with pytest.raises(CheckpointError, match=message):
        run("mine")


def test_picture(run, tmp_path):
    assert "→ deep/l.png" in run("smollm2-135m", "llama-2-7b", "clip-b16", "--out", "deep/l.png")
    with Image.open(tmp_path / "deep/l.png") as sheet:
        two = sheet.size
    run("smollm2-135m", "llama-2-7b", "qwen3-4b", "qwen3-8b", "qwen3-14b", "--out", "l.png")
    with Image.open(tmp_path / "l.png") as sheet:
        assert sheet.height > two[1]
    with pytest.raises(ConfigError, match="one to six decoders, not 0"):
        run("clip-b16", "--out", "l.png")
    with pytest.raises(VitrailError, match=r"l\.nonsense cannot be written"):
        run("stories15m", "--out", "l.nonsense")


def test_unknown_names_are_refused(run):
    with pytest.raises(ConfigError, match="did you mean 'smollm2-135m'"):
        run("smollm-135m")


def test_unwritable_output_is_refused_early(run, monkeypatch):
    monkeypatch.setattr("vitrail.cli.ledger_command.make_ledger", None)
    with pytest.raises(VitrailError, match=r"l\.nonsense cannot be written"):
        run("stories15m", "--out", "l.nonsense")


def test_unwritable_paths_are_refused(run, tmp_path):
    (tmp_path / "file").touch()
    cases = (("--out", "file/l.png", "give another path"), ("--json", "file/l.json", "give another path with --json"))
    for option, name, remedy in cases:
        with pytest.raises(VitrailError, match=f"{name} cannot be written") as caught:
            run("stories15m", option, name)
        assert caught.value.remedy == remedy


def test_repeated_device_is_listed_once(run):
    assert run("stories15m", "--device", "a100", "--device", "a100").count("a100, batch 1") == 1


def test_unknown_model_lists_known_ones(run, tmp_path):
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    with pytest.raises(CheckpointError, match=r"is not a model file") as caught:
        run("a.png")
    assert ".gguf" in caught.value.remedy


@pytest.mark.parametrize(
    ("about", "message"),
    [
        ({"kind": ["x"]}, r"unknown kind \['x'\]"),
        ({"kind": "decoder", "config": "x"}, "DecoderConfig"),
        (
            {"kind": "decoder", "config": {**DECODER_PRESETS["stories15m"].to_dict(), "layers": 3_000_000}},
            "layers is 3000000",
        ),
        ({"kind": "decoder", "config": {**DECODER_PRESETS["stories15m"].to_dict(), "layers": 0}}, "layers"),
    ],
)
def test_invalid_vitrail_json_is_named(run, tmp_path, about, message):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "vitrail.json").write_text(json.dumps(about))
    with pytest.raises(VitrailError, match=message) as caught:
        run("mine")
    assert "vitrail.json" in caught.value.problem


def test_complete_systems(run, tmp_path):
    out = run("llava-1.5-7b", "genie-11b", "--all", "--device", "orin", "--json", "all.json")
    weighs, works, orin, notes = out.split("\n\n")
    assert re.split(r"\s{2,}", weighs.splitlines()[1])[:7] == [
        "llava-1.5-7b", "answer", "7.06 B", "7.06 B", "14.1 GB", "576", "1,152",
    ]  # fmt: skip
    assert weighs.splitlines()[2].split()[-3:] == ["–"] * 3 and works.startswith("FLOPs per output")
    output = json.loads((tmp_path / "all.json").read_text())
    llava, genie = output["systems"]
    assert [one["name"] for one in (llava, genie)] == ["llava-1.5-7b", "genie-11b"]
    hz = llava["latency"]["orin"][str(llava["own_context"])]["hz"]
    assert f"{hz:.3g}" in orin.splitlines()[1] and output["devices"]["orin"]["memory"] == 64e9
    assert "only parameters are counted for tokenizer, latent actions" in notes


def test_docs_page_equals_the_output_for_systems(run):
    """Some stand for all, which take seconds; columns are as wide as all of them need."""
    page = (Path(__file__).parents[2] / "docs" / "ledger.md").read_text().splitlines()
    shown = [re.split(r"\s{2,}", line) for line in page]
    some = ("llava-1.5-7b", "openvla-7b", "um3-1.5b", "gaia-1", "cosmos-2-2b")
    weighs, _, h200, *_ = run(*some, "--all", "--device", "h200").split("\n\n")
    for line in (*weighs.splitlines()[1:], *h200.splitlines()[1:]):
        assert re.split(r"\s{2,}", line) in shown


def test_measured_times_beside_rooflines(run, tmp_path, monkeypatch):
    monkeypatch.setitem(PROBE_SIZES, "cpu", (64, 2**16))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    save(Decoder(DECODER_PRESETS["stories15m"].replace(layers=1, vocab_size=40)), tmp_path / "tiny")
    out = run("tiny", "--measure", "--context-length", 8, "--dtype", "float32", "--json", "m.json")
    assert [line.split("  ")[0] for line in out.splitlines()[1:3]] == ["tiny", "tiny"]
    output = json.loads((tmp_path / "m.json").read_text())
    for one in output["passes"]:
        floor = max(one["flops"] / output["device"]["flops"], one["bytes"] / output["device"]["bandwidth"])
        assert one["roofline"] == pytest.approx(floor) and one["ratio"] == pytest.approx(one["seconds"] / floor)
    with pytest.raises(ConfigError, match="--measure needs a model"):
        run("--measure")
    with pytest.raises(ConfigError, match="float8"):
        run("tiny", "--measure", "--dtype", "float8")
    with pytest.raises(ConfigError, match="batch size 0, 8 tokens"):
        run("tiny", "--measure", "--context-length", 8, "--batch-size", 0, "--dtype", "float32")


@pytest.mark.parametrize(
    "option", ["--context-length 64", "--image-size 64x64", "--num-images 2", "--batch-size 4", "--out l.png"]
)
def test_all_excludes_other_options(run, option):
    with pytest.raises(ConfigError, match=f"--all does not support {option.split()[0]}"):
        run("llava-1.5-7b", "--all", *option.split())


@pytest.mark.parametrize("option", ["--num-images 2", "--device a100", "--out l.png"])
def test_measure_excludes_other_options(run, option):
    with pytest.raises(ConfigError, match=f"--measure does not support {option.split()[0]}"):
        run("stories15m", "--measure", *option.split())
    with pytest.raises(ConfigError, match="--all does not support --measure"):
        run("stories15m", "--all", "--measure")
