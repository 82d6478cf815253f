"""`vitrail scaling`: tables, figures and files have the numbers of `vitrail.lab`."""

import json

import numpy as np
import pytest
import torch
from cyclopts import App
from PIL import Image

from data.scenes.conftest import drawn
from helpers import randomize
from models.test_unified_model import made
from smoke_recipes import load_smoke_config
from vitrail import hub
from vitrail.backbones.decoder import Decoder, DecoderConfig
from vitrail.data.scenes.atlas import Atlas
from vitrail.encoders import ViT, ViTConfig
from vitrail.errors import ConfigError, DataError, VitrailError
from vitrail.lab.cost_ledger import DEVICES
from vitrail.lab.divergence import accumulate_divergence
from vitrail.lab.image_branches import compute_pair_hidden_states, sample_image_pairs
from vitrail.lab.scaling_law import ScalingLaw, fit_law
from vitrail.lab.score_tables import read_score_table
from vitrail.lab.text_branches import compute_hidden_states, find_branches
from vitrail.lab.token_budget import Budget, choose_tokens, make_cost_fn
from vitrail.models.unified_model import UnifiedModel
from vitrail.models.vlm import VLM
from vitrail.nn import AttentionConfig, BlockConfig, GatedMLPConfig, RotaryConfig
from vitrail.processing.tokenizer import Tokenizer

TEXT = "the red cube and the blue ball. " * 3 + "the red ball and the blue cube, the red cube or the green ball. " * 3


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    app = App(result_action="return_value")
    app.command("vitrail.cli.scaling_command:app", name="scaling")

    def call(*words) -> str:
        app(["scaling", *map(str, words)], exit_on_error=False)
        return capsys.readouterr().out

    return call


def lines(out: str) -> dict[str, str]:
    """First word or words → the line."""
    return {line.split("  ")[0]: line for line in out.splitlines()}


def test_paper_tables_by_name(run):
    out = run("fit", "paper", "--predict-at", 1024)
    law = fit_law(*read_score_table("paper")["Overall@POPE"])
    line = lines(out)["Overall@POPE"]
    assert f"c {law.c:.4g}  alpha {law.alpha:.4g}" in line and f"{law.predict(1024.0).value[0]:.4g} [" in line
    assert len(out.splitlines()) == 19


def test_fit_of_a_file_writes_all_outputs(run, tmp_path):
    (tmp_path / "scores.csv").write_text("n,colour,count\n1,20,9\n8,30,12\n64,40,13\n256,45,20\n512,52,14\n768,55,15\n")
    files = ["laws.svg", "clusters.png", "gaps.svg", "laws.json"]
    flags = ["--out", "--clusters", "--differences", "--json"]
    chosen = [word for pair in zip(flags, files, strict=True) for word in pair]
    out = run("fit", "scores.csv", "--form", "best", "--num-clusters", 2, "--against", "scores.csv", *chosen)
    assert all(f"→ {name}" in out for name in files)
    assert "colour" in (tmp_path / "laws.svg").read_text() and "count" in (tmp_path / "gaps.svg").read_text()
    assert Image.open(tmp_path / "clusters.png").width > 600
    result = json.loads((tmp_path / "laws.json").read_text())["laws"]
    assert ScalingLaw.from_dict(result["colour"]) == fit_law(
        [1, 8, 64, 256, 512, 768], [20, 30, 40, 45, 52, 55], "best"
    )


def test_counts_can_be_excluded(run):
    line = lines(run("fit", "paper-tuned", "--task", "RealWorld", "--exclude-counts", 384, "--exclude-counts", 512))[
        "Overall@RealWorldQA"
    ]
    assert "c 43.5  alpha -0.00297" in line and "  8  " in line


def test_plots_have_every_task(run, tmp_path):
    run(
        "fit", "paper", "--out", "laws.svg", "--clusters", "c.svg", "--against", "paper-tuned", "--differences", "d.svg"
    )
    run("plan", "paper", "--system", "smollm2-135m", "--max-score-loss", 0.1, "--out", "plan.svg")
    for name in ("laws.svg", "c.svg", "d.svg", "plan.svg"):
        drawn = (tmp_path / name).read_text()
        assert all(f">{task}</text>" in drawn for task in read_score_table("paper")), name
        assert "nan" not in drawn


def test_plan_equals_the_library(run, tmp_path):
    out = run(
        "plan", "paper", "--system", "smollm2-135m", "--max-score-loss", 0.05, "--task", "OCR", "--json", "plan.json"
    )
    columns = {task: column for task, column in read_score_table("paper").items() if "OCR" in task}
    laws = {task: fit_law(*column, "best") for task, column in columns.items()}
    want = choose_tokens(laws, make_cost_fn("smollm2-135m"), Budget(loss=0.05))
    assert json.loads((tmp_path / "plan.json").read_text())["choices"] == [
        json.loads(json.dumps(c.to_dict())) for c in want
    ]
    for choice in want:
        assert f"  {choice.tokens}  " in lines(out)[choice.task]


def test_limits_have_units(run):
    price = make_cost_fn("smollm2-135m")
    at = {"--memory": price(100).memory / 1e9, "--flops": price(100).flops / 1e12, "--seconds": price(100).seconds}
    for flag, limit in at.items():
        line = lines(run("plan", "paper", "--system", "smollm2-135m", "--task", "ChartQA", flag, limit * (1 + 1e-9)))
        assert "  100  " in line["Overall@ChartQA TEST"] and flag[2:] in line["Overall@ChartQA TEST"]


def test_unreachable_loss_is_reported(run):
    limit = make_cost_fn("smollm2-135m")(10).flops / 1e12
    out = run(
        "plan", "paper", "--system", "smollm2-135m", "--task", "TextVQA", "--flops", limit, "--max-score-loss", 0.01
    )
    assert "loss exceeds the limit" in out


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    words = Tokenizer.train([TEXT], 270)
    block = BlockConfig(
        width=16, attention=AttentionConfig(heads=2), mlp=GatedMLPConfig(intermediate_size=32), norm="rms"
    )
    config = DecoderConfig(
        vocab_size=words.vocab_size, layers=1, block=block, rotary=RotaryConfig(head_dim=8), context_length=64
    )
    path = tmp_path_factory.mktemp("model")
    hub.save(randomize(Decoder(config), spread=0.5), path, words)
    (path / "text.txt").write_text(TEXT)
    return path


def test_divergence_of_a_folder(run, folder, tmp_path):
    words = ["diverge", folder / "text.txt", "--model", folder, "--prefix-length", 3, "--length", 12, "--device", "cpu"]
    out = run(*words, "--suprema", "--json", "d.json", "--out", "d.svg")
    ids = hub.load_tokenizer(folder).encode(TEXT)
    want = accumulate_divergence(compute_hidden_states(hub.load(folder), ids, find_branches(ids, 3, 12, 128), 3, 12))
    result = json.loads((tmp_path / "d.json").read_text())
    assert result["columns"]["D"] == pytest.approx(want.distance.tolist(), rel=1e-5)
    assert result["columns"]["ψ_AA"][0] is None and result["pairs"] == want.pairs
    assert f"{want.distance[11]:.4g}" in lines(out)["12"] and f"λ/(√2·M) {want.tightness:.3f}" in out
    assert (np.array(result["columns"]["Υ that bounds"]) >= np.array(result["columns"]["Υ"]) - 1e-9).all()


@pytest.mark.parametrize(
    ("words", "kind", "output"),
    [
        (["fit", "paper", "--out", "laws.exe"], VitrailError, "exe"),
        (["fit", "paper", "--against", "paper"], ConfigError, "go together"),
        (["fit", "paper", "--exclude-counts", 383], ConfigError, "paper has no scores at"),
        (["fit", "paper", "--task", "poem"], ConfigError, "no column name of paper contains poem"),
        (["fit", "nothing.csv"], DataError, "nothing.csv cannot be read"),
        (["fit", "paper", "--clusters", "c.svg", "--num-clusters", 30], ConfigError, "30 clusters"),
        (["plan", "paper", "--system", "smollm2-135m"], ConfigError, "the budget is empty"),
        (["plan", "paper", "--system", "smolm2-135m", "--max-score-loss", 0.1], ConfigError, "smollm2-135m"),
        (["diverge", "--batch-size", 0], ConfigError, "--batch-size, --length and --pairs are"),
        (
            ["plan", "paper", "--system", "smollm2-135m", "--seconds", "nan"],
            ConfigError,
            "the budget has a value that is",
        ),
    ],
)
def test_invalid_options_are_refused(run, words, kind, output):
    with pytest.raises(kind, match=output):
        run(*words)


def test_plan_beyond_the_data_is_valid_json(run, tmp_path):
    """A law that falls below nothing has no score there: no NaN is written, shown or drawn."""
    (tmp_path / "falls.csv").write_text("n,colour\n1,40\n8,32\n64,25\n512,17\n4096,9\n")
    words = [
        "--form",
        "saturating",
        "--max-tokens",
        200_000,
        "--max-score-loss",
        0.1,
        "--json",
        "p.json",
        "--out",
        "p.svg",
    ]
    out = run("plan", "falls.csv", "--system", "stories15m", *words)
    result = json.loads((tmp_path / "p.json").read_text(), parse_constant=lambda word: pytest.fail(word))
    assert result["choices"][0]["tokens"] < 8 and 0 < len(result["curves"]["colour"]) < len(result["prices"])
    assert "nan" not in out and "nan" not in (tmp_path / "p.svg").read_text() and "  –\n" in out


@pytest.mark.parametrize("text", ['n,"col\nour"\n1,20\n', 'n,"colour\n1,20\n8,30\n', 'n,colour\n1,"20\n8,30\n'])
def test_unterminated_quotes_are_refused(run, tmp_path, text):
    (tmp_path / "scores.csv").write_text(text)
    with pytest.raises(DataError, match=r"line \d of scores\.csv"):
        run("fit", "scores.csv")


def test_help_lists_all_devices():
    from vitrail.cli.scaling_plan_command import plan_tokens as command

    assert all(name in str(command.__doc__) for name in DEVICES)


def test_unfittable_column_is_named(run, tmp_path):
    (tmp_path / "scores.csv").write_text("n,colour,count\n1,20,0\n8,30,12\n64,40,13\n256,45,20\n512,52,14\n")
    for words in (["fit", "scores.csv"], ["plan", "scores.csv", "--system", "smollm2-135m", "--max-score-loss", 0.1]):
        with pytest.raises(DataError, match=r"count: score 0 \(n = 1\)"):
            run(*words)


def test_divergence_of_images(run, tmp_path):
    words = Tokenizer.train([TEXT], 300, special_tokens=("<|endoftext|>", "<image>"))
    model = randomize(VLM(load_smoke_config("scaling-base")), 3, 0.3)
    hub.save(model, tmp_path / "vlm", words)
    files = []
    for place, picture in enumerate(np.random.default_rng(0).integers(0, 256, (3, 16, 16, 3), dtype=np.uint8)):
        files.append(tmp_path / f"{place}.png")
        Image.fromarray(picture).save(files[-1])
    asked = ["--model", tmp_path / "vlm", "--prompt", "the red", "--device", "cpu"]
    out = run("diverge", *files, *asked, "--json", "d.json", "--out", "d.svg")
    pictures = [Image.open(file) for file in files]
    want = accumulate_divergence(
        compute_pair_hidden_states(
            model.eval(), pictures, sample_image_pairs(3, 128), prefix_ids=words.encode("the red")
        )
    )
    result = json.loads((tmp_path / "d.json").read_text())
    assert result["columns"]["D"] == pytest.approx(want.distance.tolist(), rel=1e-4) and result["pairs"] == 3
    assert "3 pairs of 16 tokens of images" in out and (tmp_path / "d.svg").is_file()

    Atlas.build(drawn()).save(tmp_path / "atlas.safetensors")
    out = run("diverge", *asked, "--pairs", 5, "--length", 9, "--atlas", tmp_path / "atlas.safetensors", "--suprema")
    assert "5 pairs of 9 tokens of images" in out and "Υ that bounds" in out


def saved(folder, **more) -> tuple[UnifiedModel, Tokenizer]:
    """A small model that reads and draws, with words about scenes."""
    words = Tokenizer.train([TEXT, "is there a circle? yes no what colour is the square? "], 300)
    config = made(order="masked", image_input="features", **more).config
    model = randomize(
        UnifiedModel(config.replace(decoder=config.decoder.replace(vocab_size=words.vocab_size))), 3, 0.3
    ).eval()
    hub.save(model, folder, words)
    return model, words


def test_divergence_of_a_unified_model(run, tmp_path):
    model, words = saved(tmp_path / "model")
    pixels = torch.randint(0, 256, (2, 3, 12, 12), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    files = [tmp_path / f"{place}.png" for place in range(2)]
    for file, picture in zip(files, pixels, strict=True):
        Image.fromarray(picture.permute(1, 2, 0).numpy()).save(file)
    asked = ["--model", tmp_path / "model", "--device", "cpu", "--json", "d.json"]
    for prompt in ("", "the red"):
        out = run("diverge", *files, *asked, "--prompt", prompt)
        pieces = [model.make_input_image_piece(model.encode_images(model.codec.to_pixels(pixels))[0])]
        if prompt:
            pieces.insert(0, model.make_text_piece(torch.tensor([words.encode(prompt)] * 2)))
        with torch.no_grad():
            a, b = model(*pieces)[:, -9:].double()
        result = json.loads((tmp_path / "d.json").read_text())
        assert result["columns"]["D"] == pytest.approx((a - b).cumsum(0).norm(dim=-1).tolist(), rel=1e-4)
        assert "1 pairs of 9 tokens of images" in out and result["prompt"] == prompt

    (tmp_path / "text.txt").write_text(TEXT)
    run("diverge", "text.txt", *asked, "--text", "--prefix-length", 3, "--length", 8)
    ids = words.encode(TEXT)
    want = accumulate_divergence(
        compute_hidden_states(model.decoder, ids, find_branches(ids, 3, 8, 128), 3, 8, bos_token_id=words.bos_token_id)
    )
    result = json.loads((tmp_path / "d.json").read_text())
    assert result["columns"]["D"] == pytest.approx(want.distance.tolist(), rel=1e-4) and result["prefix"] == 3


def test_text_option_needs_texts(run, tmp_path):
    hub.save(
        randomize(
            ViT(
                ViTConfig(
                    layers=1,
                    image_size=32,
                    patch_size=16,
                    block=BlockConfig(
                        width=16, attention=AttentionConfig(heads=2), mlp=GatedMLPConfig(intermediate_size=16)
                    ),
                )
            )
        ),
        tmp_path / "vit",
    )
    with pytest.raises(ConfigError, match="has no decoder"):
        run("diverge", "--model", tmp_path / "vit")
