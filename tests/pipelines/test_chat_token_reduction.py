"""ChatPipeline with token reduction: fewer image tokens than in training."""

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from connectors.test_feature_reduction import prune_reference
from pipelines.test_chat import TOKENS, save
from vitrail import hub
from vitrail.cli import main
from vitrail.connectors.feature_reduction import CellPoolingConfig, VisionZipConfig, VisPrunerConfig
from vitrail.errors import ConfigError
from vitrail.evals.suites.answer_suites import NamingSuite
from vitrail.generate.sampling import GREEDY
from vitrail.generate.vlm_generation import generate_from_streams
from vitrail.models.vlm import VLM
from vitrail.pipelines import ChatPipeline

KINDS = {"vispruner": VisPrunerConfig(keep=5), "visionzip": VisionZipConfig(keep=5), "pool": CellPoolingConfig(keep=4)}


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """transformers model and its folder, with two images in the parent folder."""
    where = tmp_path_factory.mktemp("fewer")
    pixels = np.random.default_rng(0).integers(0, 256, (2, 30, 40, 3), dtype=np.uint8)
    for name, one in zip("ab", pixels, strict=True):
        Image.fromarray(one).save(where / f"{name}.png")
    return save(where / "hf"), where / "hf"


@pytest.fixture(scope="module")
def folder(theirs):
    return theirs[1]


@pytest.fixture(scope="module")
def chat_pipeline(folder) -> ChatPipeline:
    return vitrail.load(folder, device="cpu")


@pytest.fixture(scope="module")
def two(folder) -> list[str]:
    return [str(folder.parent / f"{name}.png") for name in "ab"]


@pytest.mark.parametrize("kind", KINDS)
def test_reduced_prompts_and_answers(kind, chat_pipeline, two):
    """Prompts have as many image tokens as remain, in one and in several turns, single and batched."""
    fewer, keep = chat_pipeline.with_reduction(KINDS[kind]), KINDS[kind].keep
    stream, shown, _ = fewer.build_prompt([fewer.build_message(two, "what is this?")])
    assert int((stream.kinds == 1).sum()) == 2 * keep
    assert (
        int((chat_pipeline.build_prompt([chat_pipeline.build_message(two, "what is this?")])[0].kinds == 1).sum())
        == 2 * TOKENS
    )
    assert isinstance(chat_pipeline.model, VLM)
    model = chat_pipeline.model.with_reduction(KINDS[kind])
    how = {
        "max_new_tokens": 6,
        "sampling": GREEDY,
        "tokenizer": chat_pipeline.tokenizer,
        "stop_ids": chat_pipeline.stop_ids,
    }
    [output] = generate_from_streams(model, [stream], shown, **how)
    assert fewer.ask(two, "what is this?", max_new_tokens=6) == output.text.strip()
    each = [fewer.ask(one, "what is this?", max_new_tokens=6) for one in two]
    assert fewer.ask_batch(two, ["what is this?"] * 2, max_new_tokens=6) == each
    conversation = [
        fewer.build_message(two[0], "what is this?"),
        {"role": "assistant", "content": each[0]},
        fewer.build_message(two[1], "and this?"),
    ]
    assert int((fewer.build_prompt(conversation)[0].kinds == 1).sum()) == 2 * keep
    fewer.chat(conversation, max_new_tokens=3)
    weighed = fewer.loglikelihood(two[0], "what is this?", ["a red cube", "a ball"])
    assert weighed != chat_pipeline.loglikelihood(two[0], "what is this?", ["a red cube", "a ball"])


@pytest.mark.parametrize("kind", ["vispruner", "visionzip"])
def test_reduction_matches_released_code(kind, theirs, chat_pipeline, two):
    """Select tokens from the attention and hidden states of transformers' tower, one image at a time."""
    llava, _ = theirs
    llava.set_attn_implementation("eager")
    shown = chat_pipeline.build_prompt([chat_pipeline.build_message(two, "what is this?")])[1]
    with torch.no_grad():
        out = llava.model.vision_tower(shown.pixels, output_hidden_states=True, output_attentions=True)
        features, num_images = out.hidden_states[-2][:, 1:], out.attentions[-2][:, :, 0, 1:].mean(1)
        found = chat_pipeline.with_reduction(KINDS[kind]).model.encode_images(shown).features
        for mine, own, scores in zip(found, features, num_images, strict=True):
            if kind == "vispruner":
                wanted = own[prune_reference(own, scores, 5, 0.5)]
                assert torch.allclose(mine, llava.model.multi_modal_projector(wanted), atol=1e-5)
            else:  # the first three have the highest CLS attention; two are merged from the rest
                best = sorted(scores.topk(3).indices.tolist())
                assert torch.allclose(mine[:3], llava.model.multi_modal_projector(own[best]), atol=1e-5)
                assert len(mine) == 5


def test_no_reduction_keeps_all_tokens(chat_pipeline, two):
    for kind in (VisPrunerConfig, VisionZipConfig, CellPoolingConfig):
        same = chat_pipeline.with_reduction(kind(keep=TOKENS))
        assert same.ask(two[0], "what is this?", max_new_tokens=6) == chat_pipeline.ask(
            two[0], "what is this?", max_new_tokens=6
        )
    again = chat_pipeline.with_reduction(KINDS["pool"]).with_reduction(None)
    assert again.loglikelihood(two[0], "what?", ["a", "b"]) == chat_pipeline.loglikelihood(two[0], "what?", ["a", "b"])


def test_native_checkpoint_stores_reduction(folder, chat_pipeline, two, tmp_path):
    """It keeps the chat config of its family, which has no reduction."""
    words = hub.load_tokenizer(folder)
    words.chat_template = None
    hub.save(chat_pipeline.model.with_reduction(KINDS["visionzip"]), tmp_path / "ours", words)
    ours = vitrail.load(tmp_path / "ours", device="cpu")
    stream = ours.build_prompt([ours.build_message(two[0], "what is this?")])[0]
    assert int((stream.kinds == 1).sum()) == 5 and "USER: " in words.decode(stream.ids.tolist())
    loaded = vitrail.load(tmp_path / "ours", device="cpu", reduction=KINDS["pool"])
    assert loaded.model.config.feature_reduction == KINDS["pool"]


def test_command_line(folder, chat_pipeline, two, capsys, monkeypatch):
    def ask(*more: str) -> str:
        words = ["vitrail", "ask", two[0], "what is this?", "--model", str(folder), "--device", "cpu", *more]
        monkeypatch.setattr("sys.argv", words)
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return out if not ended.value.code else err

    how = ["--max-new-tokens", "6"]
    assert ask(*how, "--reduce", "vispruner", "--keep", "5").strip() == chat_pipeline.with_reduction(
        KINDS["vispruner"]
    ).ask(two[0], "what is this?", max_new_tokens=6)
    assert "go together" in ask("--keep", "5")
    assert "keep is 0" in ask("--reduce", "pool", "--keep", "0")
    assert "1 × 7 cells" in ask("--reduce", "pool", "--keep", "7")
    assert "vispruner" in ask("--reduce", "prune", "--keep", "7")


def test_invalid_reduction_raises_before_loading(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "load", lambda *_, **__: pytest.fail("weights were read"))
    with pytest.raises(ConfigError, match="1 × 7 cells"):
        vitrail.load(folder, device="cpu", reduction=CellPoolingConfig(keep=7))
    with pytest.raises(ConfigError, match="mini is not a vision-language model and"):
        vitrail.load("mini", reduction=KINDS["pool"])


def test_score_keys():
    every = NamingSuite()
    assert every.label_model("out/vlm") == "out/vlm" and every.reduction_settings == {} and every.reduction is None
    few = NamingSuite(reduce="visionzip", keep=64)
    assert few.label_model("out/vlm") == "out/vlm (visionzip, 64)"
    assert few.reduction_settings == {"reduce": "visionzip", "keep": 64}
    assert few.reduction == VisionZipConfig(keep=64)
