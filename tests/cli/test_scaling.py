"""`vitrail scaling`: tables, figures and files say what the lab says."""

import json

import numpy as np
import pytest
import torch
from cyclopts import App
from PIL import Image

from data.scenes.conftest import drawn
from helpers import randomize
from lab.test_exact import config_of
from models.test_unified import made
from vitrail import hub
from vitrail.backbones.decoder import Decoder, DecoderConfig
from vitrail.data.scenes.sprites import Atlas
from vitrail.encoders import ViT, ViTConfig
from vitrail.errors import ConfigError, DataError, VitrailError
from vitrail.lab.branches import branches, hidden
from vitrail.lab.divergence import gather
from vitrail.lab.ledger import DEVICES
from vitrail.lab.pictured import couples, pictured
from vitrail.lab.plan import Budget, plan, pricer
from vitrail.lab.scaling import Law, fit
from vitrail.lab.scores import read_scores
from vitrail.models.unified import Unified
from vitrail.models.vlm import VLM
from vitrail.nn import AttentionConfig, BlockConfig, GatedConfig, RotaryConfig
from vitrail.processing.text import Tokenizer

TEXT = "the red cube and the blue ball. " * 3 + "the red ball and the blue cube, the red cube or the green ball. " * 3


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    app = App(result_action="return_value")
    app.command("vitrail.cli.scaling:app", name="scaling")

    def call(*words) -> str:
        app(["scaling", *map(str, words)], exit_on_error=False)
        return capsys.readouterr().out

    return call


def lines(out: str) -> dict[str, str]:
    """First word or words → the line."""
    return {line.split("  ")[0]: line for line in out.splitlines()}


def test_the_paper_is_fitted_by_name(run):
    out = run("fit", "paper", "--at", 1024)
    law = fit(*read_scores("paper")["Overall@POPE"])
    line = lines(out)["Overall@POPE"]
    assert f"c {law.c:.4g}  alpha {law.alpha:.4g}" in line and f"{law.predict(1024.0).value[0]:.4g} [" in line
    assert len(out.splitlines()) == 19


def test_a_file_of_scores_and_all_that_comes_of_it(run, tmp_path):
    (tmp_path / "scores.csv").write_text("n,colour,count\n1,20,9\n8,30,12\n64,40,13\n256,45,20\n512,52,14\n768,55,15\n")
    files = ["laws.svg", "clusters.png", "gaps.svg", "laws.json"]
    flags = ["--out", "--clusters", "--differences", "--json"]
    chosen = [word for pair in zip(flags, files, strict=True) for word in pair]
    out = run("fit", "scores.csv", "--form", "best", "--count", 2, "--against", "scores.csv", *chosen)
    assert all(f"→ {name}" in out for name in files)
    assert "colour" in (tmp_path / "laws.svg").read_text() and "count" in (tmp_path / "gaps.svg").read_text()
    assert Image.open(tmp_path / "clusters.png").width > 600
    told = json.loads((tmp_path / "laws.json").read_text())["laws"]
    assert Law.read(told["colour"]) == fit([1, 8, 64, 256, 512, 768], [20, 30, 40, 45, 52, 55], "best")


def test_points_can_be_dropped(run):
    line = lines(run("fit", "paper-tuned", "--task", "RealWorld", "--drop", 384, "--drop", 512))["Overall@RealWorldQA"]
    assert "c 43.5  alpha -0.00297" in line and "  8  " in line


def test_every_figure_has_every_task(run, tmp_path):
    run(
        "fit", "paper", "--out", "laws.svg", "--clusters", "c.svg", "--against", "paper-tuned", "--differences", "d.svg"
    )
    run("plan", "paper", "--system", "smollm2-135m", "--loss", 0.1, "--out", "plan.svg")
    for name in ("laws.svg", "c.svg", "d.svg", "plan.svg"):
        drawn = (tmp_path / name).read_text()
        assert all(f">{task}</text>" in drawn for task in read_scores("paper")), name
        assert "nan" not in drawn


def test_a_plan_is_the_labs(run, tmp_path):
    out = run("plan", "paper", "--system", "smollm2-135m", "--loss", 0.05, "--task", "OCR", "--json", "plan.json")
    columns = {task: column for task, column in read_scores("paper").items() if "OCR" in task}
    laws = {task: fit(*column, "best") for task, column in columns.items()}
    want = plan(laws, pricer("smollm2-135m"), Budget(loss=0.05))
    assert json.loads((tmp_path / "plan.json").read_text())["choices"] == [
        json.loads(json.dumps(c.plain())) for c in want
    ]
    for choice in want:
        assert f"  {choice.tokens}  " in lines(out)[choice.task]


def test_limits_have_units(run):
    price = pricer("smollm2-135m")
    at = {"--memory": price(100).memory / 1e9, "--flops": price(100).flops / 1e12, "--seconds": price(100).seconds}
    for flag, limit in at.items():
        line = lines(run("plan", "paper", "--system", "smollm2-135m", "--task", "ChartQA", flag, limit * (1 + 1e-9)))
        assert "  100  " in line["Overall@ChartQA TEST"] and flag[2:] in line["Overall@ChartQA TEST"]


def test_a_loss_that_no_budget_allows_is_told(run):
    limit = pricer("smollm2-135m")(10).flops / 1e12
    out = run("plan", "paper", "--system", "smollm2-135m", "--task", "TextVQA", "--flops", limit, "--loss", 0.01)
    assert "loses more than 0.01" in out


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    words = Tokenizer.train([TEXT], 270)
    block = BlockConfig(width=16, attention=AttentionConfig(heads=2), mlp=GatedConfig(hidden=32), norm="rms")
    config = DecoderConfig(vocab=words.size, layers=1, block=block, rotary=RotaryConfig(head_dim=8), context=64)
    path = tmp_path_factory.mktemp("model")
    hub.save(randomize(Decoder(config), spread=0.5), path, words)
    (path / "text.txt").write_text(TEXT)
    return path


def test_divergence_of_a_folder(run, folder, tmp_path):
    words = ["diverge", folder / "text.txt", "--model", folder, "--prefix", 3, "--length", 12, "--device", "cpu"]
    out = run(*words, "--sup", "--json", "d.json", "--out", "d.svg")
    ids = hub.tokenizer(folder).encode(TEXT)
    want = gather(hidden(hub.load(folder), ids, branches(ids, 3, 12, 128), 3, 12))
    told = json.loads((tmp_path / "d.json").read_text())
    assert told["columns"]["D"] == pytest.approx(want.distance.tolist(), rel=1e-5)
    assert told["columns"]["ψ_AA"][0] is None and told["pairs"] == want.pairs
    assert f"{want.distance[11]:.4g}" in lines(out)["12"] and f"λ/(√2·M) {want.tightness:.3f}" in out
    assert (np.array(told["columns"]["Υ that bounds"]) >= np.array(told["columns"]["Υ"]) - 1e-9).all()


@pytest.mark.parametrize(
    ("words", "kind", "said"),
    [
        (["fit", "paper", "--out", "laws.exe"], VitrailError, "exe"),
        (["fit", "paper", "--against", "paper"], ConfigError, "go together"),
        (["fit", "paper", "--drop", 383], ConfigError, "nothing at 383 tokens"),
        (["fit", "paper", "--task", "poem"], ConfigError, "holds poem"),
        (["fit", "nothing.csv"], DataError, "nothing.csv cannot be read"),
        (["fit", "paper", "--clusters", "c.svg", "--count", 30], ConfigError, "30 clusters"),
        (["plan", "paper", "--system", "smollm2-135m"], ConfigError, "without a budget"),
        (["plan", "paper", "--system", "smolm2-135m", "--loss", 0.1], ConfigError, "smollm2-135m"),
        (["diverge", "--batch", 0], ConfigError, "--batch is 0"),
        (["plan", "paper", "--system", "smollm2-135m", "--seconds", "nan"], ConfigError, "no number"),
    ],
)
def test_what_cannot_be(run, words, kind, said):
    with pytest.raises(kind, match=said):
        run(*words)


def test_a_plan_beyond_the_last_score_is_valid_json(run, tmp_path):
    """A law that falls below nothing has no score there: no NaN is written, shown or drawn."""
    (tmp_path / "falls.csv").write_text("n,colour\n1,40\n8,32\n64,25\n512,17\n4096,9\n")
    words = ["--form", "saturating", "--most", 200_000, "--loss", 0.1, "--json", "p.json", "--out", "p.svg"]
    out = run("plan", "falls.csv", "--system", "stories15m", *words)
    told = json.loads((tmp_path / "p.json").read_text(), parse_constant=lambda word: pytest.fail(word))
    assert told["choices"][0]["tokens"] < 8 and 0 < len(told["curves"]["colour"]) < len(told["prices"])
    assert "nan" not in out and "nan" not in (tmp_path / "p.svg").read_text() and "  –\n" in out


@pytest.mark.parametrize("text", ['n,"col\nour"\n1,20\n', 'n,"colour\n1,20\n8,30\n', 'n,colour\n1,"20\n8,30\n'])
def test_quotes_over_a_lines_end_are_refused(run, tmp_path, text):
    (tmp_path / "scores.csv").write_text(text)
    with pytest.raises(DataError, match=r"line \d of scores\.csv"):
        run("fit", "scores.csv")


def test_the_help_of_devices_names_all():
    from vitrail.cli.plan import plan as command

    assert all(name in str(command.__doc__) for name in DEVICES)


def test_a_column_without_a_law_is_named(run, tmp_path):
    (tmp_path / "scores.csv").write_text("n,colour,count\n1,20,0\n8,30,12\n64,40,13\n256,45,20\n512,52,14\n")
    for words in (["fit", "scores.csv"], ["plan", "scores.csv", "--system", "smollm2-135m", "--loss", 0.1]):
        with pytest.raises(DataError, match=r"count: score 0 \(n = 1\)"):
            run(*words)


def test_divergence_of_pictures(run, tmp_path):
    words = Tokenizer.train([TEXT], 300, specials=("<|endoftext|>", "<image>"))
    model = randomize(VLM(config_of("scaling-base")), 3, 0.3)
    hub.save(model, tmp_path / "vlm", words)
    files = []
    for place, picture in enumerate(np.random.default_rng(0).integers(0, 256, (3, 16, 16, 3), dtype=np.uint8)):
        files.append(tmp_path / f"{place}.png")
        Image.fromarray(picture).save(files[-1])
    asked = ["--model", tmp_path / "vlm", "--prompt", "the red", "--device", "cpu"]
    out = run("diverge", *files, *asked, "--json", "d.json", "--out", "d.svg")
    pictures = [Image.open(file) for file in files]
    want = gather(pictured(model.eval(), pictures, couples(3, 128), prefix=words.encode("the red")))
    told = json.loads((tmp_path / "d.json").read_text())
    assert told["columns"]["D"] == pytest.approx(want.distance.tolist(), rel=1e-4) and told["pairs"] == 3
    assert "3 pairs of 16 tokens of pictures" in out and (tmp_path / "d.svg").is_file()

    Atlas.build(drawn()).save(tmp_path / "atlas.safetensors")
    out = run("diverge", *asked, "--pairs", 5, "--length", 9, "--atlas", tmp_path / "atlas.safetensors", "--sup")
    assert "5 pairs of 9 tokens of pictures" in out and "Υ that bounds" in out


def saved(folder, **more) -> tuple[Unified, Tokenizer]:
    """A small model that reads and draws, with words about scenes."""
    words = Tokenizer.train([TEXT, "is there a circle? yes no what colour is the square? "], 300)
    config = made(order="masked", sees="features", **more).config
    model = randomize(Unified(config.with_(decoder=config.decoder.with_(vocab=words.size))), 3, 0.3).eval()
    hub.save(model, folder, words)
    return model, words


def test_divergence_of_a_model_that_reads_and_draws(run, tmp_path):
    model, words = saved(tmp_path / "model")
    pixels = torch.randint(0, 256, (2, 3, 12, 12), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    files = [tmp_path / f"{place}.png" for place in range(2)]
    for file, picture in zip(files, pixels, strict=True):
        Image.fromarray(picture.permute(1, 2, 0).numpy()).save(file)
    asked = ["--model", tmp_path / "model", "--device", "cpu", "--json", "d.json"]
    for prompt in ("", "the red"):
        out = run("diverge", *files, *asked, "--prompt", prompt)
        pieces = [model.shown(model.look(model.codec.pixels(pixels))[0])]
        if prompt:
            pieces.insert(0, model.words(torch.tensor([words.encode(prompt)] * 2)))
        with torch.no_grad():
            a, b = model(*pieces)[:, -9:].double()
        told = json.loads((tmp_path / "d.json").read_text())
        assert told["columns"]["D"] == pytest.approx((a - b).cumsum(0).norm(dim=-1).tolist(), rel=1e-4)
        assert "1 pairs of 9 tokens of pictures" in out and told["prompt"] == prompt

    (tmp_path / "text.txt").write_text(TEXT)
    run("diverge", "text.txt", *asked, "--text", "--prefix", 3, "--length", 8)
    ids = words.encode(TEXT)
    want = gather(hidden(model.decoder, ids, branches(ids, 3, 8, 128), 3, 8, bos=words.bos))
    told = json.loads((tmp_path / "d.json").read_text())
    assert told["columns"]["D"] == pytest.approx(want.distance.tolist(), rel=1e-4) and told["prefix"] == 3


def test_a_model_is_asked_with_fewer_tokens(run, tmp_path, monkeypatch):
    monkeypatch.setattr("vitrail.lab.exact.GUESSED", 128)
    saved(tmp_path / "model")
    Atlas.build(drawn()).save(tmp_path / "atlas.safetensors")
    asked = ["fewer", tmp_path / "model", "--atlas", tmp_path / "atlas.safetensors", "--kinds", "existence_random"]
    asked += [
        "--preset",
        "colours",
        "--kinds",
        "colour",
        "--tokens",
        1,
        "--tokens",
        4,
        "--batch",
        2,
        "--device",
        "cpu",
        "--out",
        "out",
    ]
    run(*asked, "--count", 2)
    first = json.loads((tmp_path / "out" / "hits" / "colour.json").read_text())
    out = run(*asked, "--count", 4)
    told = json.loads((tmp_path / "out" / "scaling.json").read_text())
    ways = ("VisPruner", "VisionZip", "pooling", "random")
    there = {(p["way"], p["kind"], p["tokens"]) for p in told["scores"]}
    assert there == {(way, kind, n) for way in ways for kind in ("existence_random", "colour") for n in (1, 4, 9)}
    assert {p["of"] for p in told["scores"]} == {4} and "existence_random  VisPruner" in out
    whole = {p["value"] for p in told["scores"] if (p["kind"], p["tokens"]) == ("colour", 9)}
    assert len(whole) == 1  # all ways end in the same
    second = json.loads((tmp_path / "out" / "hits" / "colour.json").read_text())
    assert second["batches"][:1] == first["batches"] and len(second["batches"]) == 2
    assert (tmp_path / "out" / "scaling.svg").is_file() and told["contrasts"] == {}  # of reading nothing was asked

    run(*asked, "--count", 5)  # the fifth in a batch of its own, which is asked again with six
    run(*asked, "--count", 6)
    more = json.loads((tmp_path / "out" / "hits" / "colour.json").read_text())["batches"]
    assert more[:2] == second["batches"] and [len(part["random 9"]) for part in more] == [2, 2, 2]
    monkeypatch.setattr("vitrail.cli.scaling_fewer.answered", None)  # nothing is asked twice
    run(*asked, "--count", 4)
    with pytest.raises(ConfigError) as error:
        run(*asked, "--tokens", 9)
    assert "from 1 to 8" in str(error.value)
    with pytest.raises(ConfigError, match="no scenes 'fog'"):
        run("fewer", tmp_path / "model", "--preset", "fog", "--out", "out")


def test_pictures_have_no_continuations(run, tmp_path):
    hub.save(
        randomize(
            ViT(
                ViTConfig(
                    layers=1,
                    image=32,
                    patch=16,
                    block=BlockConfig(width=16, attention=AttentionConfig(heads=2), mlp=GatedConfig(hidden=16)),
                )
            )
        ),
        tmp_path / "vit",
    )
    with pytest.raises(ConfigError, match="no language model"):
        run("diverge", "--model", tmp_path / "vit")
