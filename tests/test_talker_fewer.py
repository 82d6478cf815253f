"""A vision-language model asked with fewer tokens of its pictures than it was trained with."""

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from connectors.test_reduce import pruned_plainly
from test_talker import TOKENS, save
from vitrail import hub
from vitrail.cli import main
from vitrail.cli.fewer import Fewer
from vitrail.connectors.reduce import CellsConfig, VisionZipConfig, VisPrunerConfig
from vitrail.errors import ConfigError
from vitrail.generate.sampling import GREEDY
from vitrail.generate.seen import write
from vitrail.models.vlm import VLM
from vitrail.talker import Talker

KINDS = {"vispruner": VisPrunerConfig(keep=5), "visionzip": VisionZipConfig(keep=5), "pool": CellsConfig(keep=4)}


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """Transformers' model and its folder, with two pictures above it."""
    where = tmp_path_factory.mktemp("fewer")
    pixels = np.random.default_rng(0).integers(0, 256, (2, 30, 40, 3), dtype=np.uint8)
    for name, one in zip("ab", pixels, strict=True):
        Image.fromarray(one).save(where / f"{name}.png")
    return save(where / "hf"), where / "hf"


@pytest.fixture(scope="module")
def folder(theirs):
    return theirs[1]


@pytest.fixture(scope="module")
def talker(folder) -> Talker:
    return vitrail.load(folder, device="cpu")


@pytest.fixture(scope="module")
def two(folder) -> list[str]:
    return [str(folder.parent / f"{name}.png") for name in "ab"]


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_told_fewer_and_answers_with_them(kind, talker, two):
    """In one turn and in several, alone and side by side; the prompt has as many tokens as are left."""
    fewer, keep = talker.reduced(KINDS[kind]), KINDS[kind].keep
    stream, shown, _ = fewer.prompt([fewer.turn(two, "what is this?")])
    assert int((stream.kinds == 1).sum()) == 2 * keep
    assert int((talker.prompt([talker.turn(two, "what is this?")])[0].kinds == 1).sum()) == 2 * TOKENS
    assert isinstance(talker.model, VLM)
    model = talker.model.reduced(KINDS[kind])
    how = {"max_new": 6, "sampling": GREEDY, "tokenizer": talker.words, "stop_ids": talker.stops}
    [said] = write(model, [stream], shown, **how)
    assert fewer.ask(two, "what is this?", max_new=6) == said.text.strip()
    each = [fewer.ask(one, "what is this?", max_new=6) for one in two]
    assert fewer.answers(two, ["what is this?"] * 2, max_new=6) == each
    talk = [
        fewer.turn(two[0], "what is this?"),
        {"role": "assistant", "content": each[0]},
        fewer.turn(two[1], "and this?"),
    ]
    assert int((fewer.prompt(talk)[0].kinds == 1).sum()) == 2 * keep
    fewer.chat(talk, max_new=3)
    weighed = fewer.likelihood(two[0], "what is this?", ["a red cube", "a ball"])
    assert weighed != talker.likelihood(two[0], "what is this?", ["a red cube", "a ball"])


@pytest.mark.parametrize("kind", ["vispruner", "visionzip"])
def test_what_is_left_is_what_was_released(kind, theirs, talker, two):
    """Chosen by the attention that transformers' tower shows, from its hidden states, and through its projector; the
    choice written out plainly, a picture at a time."""
    llava, _ = theirs
    llava.set_attn_implementation("eager")
    shown = talker.prompt([talker.turn(two, "what is this?")])[1]
    with torch.no_grad():
        out = llava.model.vision_tower(shown.pixels, output_hidden_states=True, output_attentions=True)
        features, looked = out.hidden_states[-2][:, 1:], out.attentions[-2][:, :, 0, 1:].mean(1)
        found = talker.reduced(KINDS[kind]).model.look(shown).blocks
        for mine, own, scores in zip(found, features, looked, strict=True):
            if kind == "vispruner":
                wanted = own[pruned_plainly(own, scores, 5, 0.5)]
                assert torch.allclose(mine, llava.model.multi_modal_projector(wanted), atol=1e-5)
            else:  # the first three are what CLS looks at most; two are sums with means of the rest
                best = sorted(scores.topk(3).indices.tolist())
                assert torch.allclose(mine[:3], llava.model.multi_modal_projector(own[best]), atol=1e-5)
                assert len(mine) == 5


def test_all_of_them_are_as_before(talker, two):
    for kind in (VisPrunerConfig, VisionZipConfig, CellsConfig):
        same = talker.reduced(kind(keep=TOKENS))
        assert same.ask(two[0], "what is this?", max_new=6) == talker.ask(two[0], "what is this?", max_new=6)
    again = talker.reduced(KINDS["pool"]).reduced(None)
    assert again.likelihood(two[0], "what?", ["a", "b"]) == talker.likelihood(two[0], "what?", ["a", "b"])


def test_a_folder_of_ours_says_it_itself(folder, talker, two, tmp_path):
    """And is spoken to as its family is, which reads all tokens."""
    words = hub.tokenizer(folder)
    words.chat_template = None
    hub.save(talker.model.reduced(KINDS["visionzip"]), tmp_path / "ours", words)
    ours = vitrail.load(tmp_path / "ours", device="cpu")
    stream = ours.prompt([ours.turn(two[0], "what is this?")])[0]
    assert int((stream.kinds == 1).sum()) == 5 and "USER: " in words.decode(stream.ids.tolist())
    loaded = vitrail.load(tmp_path / "ours", device="cpu", reduce=KINDS["pool"])
    assert loaded.model.config.reduce == KINDS["pool"]


def test_from_the_command_line(folder, talker, two, capsys, monkeypatch):
    def ask(*more: str) -> str:
        words = ["vitrail", "ask", two[0], "what is this?", "--model", str(folder), "--device", "cpu", *more]
        monkeypatch.setattr("sys.argv", words)
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return out if not ended.value.code else err

    how = ["--max-new", "6"]
    assert ask(*how, "--reduce", "vispruner", "--keep", "5").strip() == talker.reduced(KINDS["vispruner"]).ask(
        two[0], "what is this?", max_new=6
    )
    assert "go together" in ask("--keep", "5")
    assert "leaves nothing" in ask("--reduce", "pool", "--keep", "0")
    assert "1 × 7 cells" in ask("--reduce", "pool", "--keep", "7")
    assert "vispruner" in ask("--reduce", "prune", "--keep", "7")


def test_what_cannot_be_is_said_before_weights_are_read(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "load", lambda *_, **__: pytest.fail("weights were read"))
    with pytest.raises(ConfigError, match="1 × 7 cells"):
        vitrail.load(folder, device="cpu", reduce=CellsConfig(keep=7))
    with pytest.raises(ConfigError, match="no VLM"):
        vitrail.load("mini", reduce=KINDS["pool"])


def test_what_scores_are_kept_under():
    assert Fewer().named("out/vlm") == "out/vlm" and Fewer().plain == {} and Fewer().chosen is None
    few = Fewer(reduce="visionzip", keep=64)
    assert few.named("out/vlm") == "out/vlm (visionzip, 64)" and few.plain == {"reduce": "visionzip", "keep": 64}
    assert few.chosen == VisionZipConfig(keep=64)
