"""UnifiedPipeline, from Python and from the command line."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from generate.test_unified_generation import TEXTS, unified
from vitrail import hub
from vitrail.cli import main
from vitrail.cli.drawing_commands import draw_images as draw_command
from vitrail.data.language.prompt_checks import build_prompt_checks
from vitrail.errors import ConfigError, ImageError, VitrailError
from vitrail.generate.image_generation import ImageGenerationConfig, generate_images
from vitrail.generate.sampling import GREEDY, SamplingConfig
from vitrail.generate.speculative_drawing import generate_images_speculatively
from vitrail.generate.text_generation import GeneratedText
from vitrail.generate.unified_generation import UnifiedStepper
from vitrail.pipelines.unified import CAPTION_PROMPT, SEED_STRIDE, UnifiedPipeline
from vitrail.processing.tokenizer import Tokenizer


@pytest.fixture(scope="module", params=["raster", "masked"])
def folder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    hub.save(unified(order=request.param), folder / "model", Tokenizer.train(TEXTS * 3, 300))
    pixels = np.random.default_rng(0).integers(0, 256, (2, 30, 40, 3), dtype=np.uint8)
    for name, one in zip("ab", pixels, strict=True):
        Image.fromarray(one).save(folder / f"{name}.png")
    return folder


@pytest.fixture
def pipeline(folder) -> UnifiedPipeline:
    return UnifiedPipeline.load(folder / "model", device="cpu", dtype=torch.float32)


def same(a: Image.Image, b: Image.Image) -> bool:
    return np.array_equal(np.asarray(a), np.asarray(b))


def test_tokenize_and_detokenize(pipeline, folder):
    ids = pipeline.tokenize([folder / "a.png", Image.open(folder / "b.png")])
    assert ids.shape == (2, 3, 3) and ids.dtype == torch.int64
    pictures = pipeline.detokenize(ids)
    assert [picture.size for picture in pictures] == [(12, 12)] * 2
    with torch.no_grad():
        wanted = pipeline.model.codec.decode(pipeline.model.codec.lookup(ids))
    assert np.array_equal(np.asarray(pictures[1]), pipeline.model.codec.to_uint8(wanted)[1].permute(1, 2, 0).numpy())
    found = pipeline.embed_images([folder / "a.png", folder / "b.png"])
    with torch.no_grad():
        hidden = pipeline.model(pipeline.model.make_input_image_piece(pipeline._encode_images(folder / "b.png")[0]))[
            0, 1:
        ].mean(0)
    torch.testing.assert_close(found[1], hidden / hidden.norm())


def test_answer_has_no_leading_space(pipeline, folder, monkeypatch):
    output = GeneratedText([1], " Yes, it is", "stop")
    monkeypatch.setattr("vitrail.pipelines.unified.generate_answers", lambda *given, **more: [output])
    assert pipeline.ask(folder / "a.png", TEXTS[0]) == "Yes, it is"


def test_single_and_list_inputs(pipeline, folder):
    a, b = str(folder / "a.png"), str(folder / "b.png")
    one = pipeline.ask(a, TEXTS[0], max_new_tokens=6)
    assert isinstance(one, str)
    assert pipeline.ask(a, TEXTS[:2], max_new_tokens=6) == [
        one,
        pipeline.ask(a, TEXTS[1], max_new_tokens=6),
    ]
    assert pipeline.ask([a, b], TEXTS[0], max_new_tokens=6) == [
        one,
        pipeline.ask(b, TEXTS[0], max_new_tokens=6),
    ]
    assert pipeline.ask([a, b], TEXTS[:2], max_new_tokens=6) == [
        one,
        pipeline.ask(b, TEXTS[1], max_new_tokens=6),
    ]
    assert pipeline.caption(a, max_new_tokens=6) == pipeline.ask(a, CAPTION_PROMPT, max_new_tokens=6)


@torch.no_grad()
def test_loglikelihoods_match_decoding(pipeline, folder):
    """Sum of the log-probabilities that a stepper gives token by token."""
    a, b, words = str(folder / "a.png"), str(folder / "b.png"), pipeline.tokenizer
    asked = [(a, TEXTS[0], [TEXTS[1], TEXTS[2]]), ([b], TEXTS[3], [TEXTS[1]])]
    found = pipeline.loglikelihoods(asked)
    assert [len(row) for row in found] == [2, 1]
    for (shown, question, options), row in zip(asked, found, strict=True):
        for option, value in zip(options, row, strict=True):
            stepper = UnifiedStepper(pipeline.model, pipeline._encode_images(shown)[0], 1)
            ids = torch.tensor([[*words.encode(question), words.eos_token_id]])
            logits, total = stepper.prefill(ids, torch.tensor([ids.shape[1]])), 0.0
            for token in [*words.encode(option), words.eos_token_id]:
                total += float(logits.log_softmax(-1)[0, token])
                logits = stepper.step(torch.tensor([token]))
            assert value == pytest.approx(total, rel=1e-5)
    with pytest.raises(ConfigError, match="one image for each question"):
        pipeline.loglikelihoods([([a, b], TEXTS[0], [TEXTS[1]])])
    with pytest.raises(ConfigError, match="no option"):
        pipeline.loglikelihoods([(a, TEXTS[0], [])])


def test_tries_keep_the_best_candidate(pipeline):
    how = {"steps": 3, "guidance_scale": 2.0}
    prompts, result = ["a red dog", "two cats above an owl"], []
    each = [pipeline.draw(prompts, seed=5 + n * SEED_STRIDE, **how) for n in range(3)]
    best = pipeline.draw(prompts, seed=5, tries=3, progress=lambda done, of: result.append(done / of), **how)
    for row, prompt in enumerate(prompts):
        sure = [
            sum(
                pipeline.loglikelihoods([(some[row], *(check.question, [check.answer]))])[0][0]
                for check in build_prompt_checks(prompt)
            )
            for some in each
        ]
        assert same(best[row], each[sure.index(max(sure))][row])
    assert result == sorted(result) and result[-1] == 1
    assert same(pipeline.draw(prompts[0], seed=5, tries=1, **how), each[0][0])
    with pytest.raises(ConfigError, match="tries is 0"):
        pipeline.draw(prompts, tries=0)
    with pytest.raises(ConfigError, match="'something nice' names nothing"):
        pipeline.draw([*prompts, "something nice"], tries=2)


def test_draw_matches_model(pipeline):
    words, model = pipeline.tokenizer, pipeline.model
    picture = pipeline.draw(TEXTS[3], seed=4, guidance_scale=2.0, steps=3, top_p=0.9)
    ids = torch.tensor([[*words.encode(TEXTS[3]), words.eos_token_id]])
    how = ImageGenerationConfig(guidance_scale=2.0, steps=3, sampling=SamplingConfig(top_p=0.9, seed=4))
    assert same(picture, pipeline.detokenize(generate_images(model, ids, torch.tensor([ids.shape[1]]), how))[0])
    both = pipeline.draw([TEXTS[1], TEXTS[3]], seed=3, guidance_scale=2.0, steps=3, top_p=0.9)
    assert same(both[1], picture)  # the second image has seed 3 + 1
    assert len(pipeline.draw(["", "a dog"], negative_prompt="a cat", seed=0)) == 2
    wide = [[*words.encode(text), words.eos_token_id] for text in (TEXTS[1], "a cat")]
    asked, against = ((torch.tensor([row]), torch.tensor([len(row)])) for row in wide)
    how = ImageGenerationConfig(guidance_scale=4.0, steps=3, sampling=SamplingConfig(seed=9))
    wanted = generate_images(model, *asked, how, negative_prompts=against)
    assert torch.equal(
        pipeline.draw_ids([TEXTS[1]], negative_prompt="a cat", guidance_scale=4.0, steps=3, seed=9), wanted
    )


def test_speculative_drawing(pipeline, folder, tmp_path, capsys):
    """Results equal those of speculative decoding; only models in raster order support it."""
    small = UnifiedPipeline(unified(order=pipeline.model.config.generation_order), pipeline.tokenizer)
    if pipeline.model.config.generation_order == "masked":
        with pytest.raises(ConfigError, match="raster order"):
            pipeline.draw("a dog", draft=small)
        return
    words = pipeline.tokenizer
    ids = torch.tensor([[*words.encode(TEXTS[3]), words.eos_token_id]])
    how = ImageGenerationConfig(guidance_scale=2.0, sampling=SamplingConfig(seed=4))
    wanted = generate_images_speculatively(pipeline.model, small.model, ids, torch.tensor([ids.shape[1]]), how).ids
    assert torch.equal(pipeline.draw_ids([TEXTS[3]], draft=small, guidance_scale=2.0, seed=4), wanted)
    with pytest.raises(ConfigError, match="does not work with negative_prompt"):
        pipeline.draw("a dog", draft=small, negative_prompt="a cat")
    other = UnifiedPipeline(small.model, Tokenizer.train(TEXTS[:2], 280))
    with pytest.raises(ConfigError, match="different tokenizers"):
        pipeline.draw(TEXTS[3], draft=other)
    draw_command(
        TEXTS[3], out=tmp_path / "dog.png", model=str(folder / "model"), draft_model=str(folder / "model"), seed=1
    )
    assert Image.open(tmp_path / "dog.png").size == (12, 12)
    with pytest.raises(ConfigError, match="does not support"):
        draw_command("a", out=tmp_path / "x.png", draft_model="mini", init_image="a.png", redraw_fraction=0.5)


def test_vary_and_inpaint(pipeline, folder):
    ids = pipeline.tokenize([folder / "a.png"])
    kept = []
    plain = pipeline.detokenize
    pipeline.detokenize = lambda found: kept.append(found) or plain(found)
    pipeline.inpaint(folder / "a.png", "a dog", (0.0, 0.0, 0.4, 0.4), seed=1)
    changed = (kept[-1] != ids)[0]
    assert not changed[2:].any() and not changed[:, 2:].any()  # 0.4 of three codes touches two of them
    where = torch.zeros(3, 3, dtype=torch.bool)
    for seed in range(6):
        pipeline.inpaint(folder / "a.png", "a dog", (0.7, 0.0, 1.0, 0.6), seed=seed)
        where |= (kept[-1] != ids)[0]
    assert where[:2, 2].any() and not where[2].any() and not where[:, :2].any()  # two rows of the right column
    some = [pipeline.vary(folder / "a.png", redraw_fraction=0.4, count=2, seed=3) and kept[-1] for _ in range(2)]
    assert torch.equal(*some) and 0 < int((some[0] != ids).flatten(1).sum(1).max()) <= 4
    assert len(pipeline.vary(folder / "a.png", redraw_fraction=0.0, count=3, seed=2)) == 3
    assert torch.equal(kept[-1], ids.expand(3, -1, -1))


def test_invalid_inputs_raise(pipeline, folder, tmp_path):
    with pytest.raises(ConfigError, match="box"):
        pipeline.inpaint(folder / "a.png", "x", (0.5, 0.0, 0.2, 1.0))
    with pytest.raises(ConfigError, match="is empty"):
        pipeline.ask(folder / "a.png", " ")
    a = folder / "a.png"
    for nothing in (
        lambda: pipeline.draw([]), lambda: pipeline.tokenize([]), lambda: pipeline.ask(a, []),
        lambda: pipeline.ask([], "x"),
        lambda: pipeline.caption([]), lambda: pipeline.vary(a, count=0), lambda: pipeline.vary(a, seed=-1),
        lambda: pipeline.ask([a, a], ["x", "y", "z"]),
    ):  # fmt: skip
        with pytest.raises(ConfigError):
            nothing()
    assert pipeline.tokenize(str(a)).shape == pipeline.tokenize(Image.open(a)).shape == (1, 3, 3)
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="is not available on this machine"):
            UnifiedPipeline.load(folder / "model", device="cuda")
    with pytest.raises(ConfigError, match="end-of-sequence"):
        UnifiedPipeline(pipeline.model, Tokenizer.train(TEXTS, 300, special_tokens=("<x>",), eos=None))
    assert UnifiedPipeline.load(folder / "model", device=torch.device("cpu")).model.codec.device.type == "cpu"
    (tmp_path / "broken.png").write_bytes(b"no picture")
    with pytest.raises(ImageError, match=r"broken\.png"):
        pipeline.caption(tmp_path / "broken.png")
    hub.save(pipeline.model.codec, tmp_path / "codec")
    with pytest.raises(ConfigError, match="only a unified model"):
        UnifiedPipeline.load(tmp_path / "codec")


def test_wrong_types_raise(pipeline, folder):
    a, ids = folder / "a.png", pipeline.tokenize(folder / "a.png")
    assert same(pipeline.detokenize(ids.numpy())[0], pipeline.detokenize(ids)[0])
    assert same(pipeline.detokenize(ids.tolist())[0], pipeline.detokenize(ids)[0])
    for wrong, message in (
        (lambda: pipeline.detokenize("ids"), "not an array of ids"),
        (lambda: pipeline.detokenize(ids[0]), r"shape \(3, 3\)"),
        (lambda: pipeline.detokenize(ids.to("meta")), "on meta"), (lambda: pipeline.ask(a, None), "not a question"),
        (lambda: pipeline.ask(a, b"hi"), "not a question"), (lambda: pipeline.draw(None), "None is not a prompt"),
        (lambda: pipeline.draw(["a", 3]), "3 is not a prompt"),
        (lambda: pipeline.draw("a", negative_prompt=3), "negative_prompt is 3"),
        (lambda: pipeline.draw("a", seed="x"), "seed is 'x'"), (lambda: vitrail.load(None), "not a model name"),
        (lambda: pipeline.inpaint(a, "x", (0, 1)), "2 numbers"), (lambda: pipeline.ask(a, "x", temprature=1), "temper"),
        (lambda: pipeline.ask(a, "x", sampling=GREEDY, seed=1), "both given"),
        (lambda: pipeline.ask(a, "x", tokenizer=pipeline.tokenizer), "unknown option 'tokenizer'"),
        (lambda: pipeline.draw("a dog " * 9999), r"exceed the context length"),
        (lambda: pipeline.draw("a", negative_prompt="a dog " * 9999), "shorten the prompt"),
    ):  # fmt: skip
        with pytest.raises(VitrailError, match=message):
            wrong()


def test_sampling_options_of_answers(pipeline, folder):
    a, how = folder / "a.png", SamplingConfig(temperature=2.0, seed=3)
    assert pipeline.ask(a, "x", temperature=2.0, seed=3, max_new_tokens=8) == pipeline.ask(
        a, "x", sampling=how, max_new_tokens=8
    )
    assert pipeline.ask(a, "x", seed=3, max_new_tokens=8) == pipeline.ask(
        a, "x", max_new_tokens=8
    )  # greedy decoding ignores the seed


def test_drawings_are_saved_incrementally(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("vitrail.cli.drawing_commands.MAX_BATCH_SIZE", 2)
    kept, plain = [], UnifiedPipeline.draw

    def draw(self, prompts, **how):
        kept.append(sorted(path.name for path in tmp_path.glob("*.png")))
        return plain(self, prompts, **how)

    monkeypatch.setattr(UnifiedPipeline, "draw", draw)
    draw_command("a dog", out=tmp_path / "d.png", model=str(folder / "model"), count=5, seed=7, device="cpu")
    assert [len(some) for some in kept] == [0, 2, 4] and len(list(tmp_path.glob("*.png"))) == 5
    pipeline = vitrail.load(folder / "model", device="cpu")
    with Image.open(tmp_path / "d-4.png") as fourth:
        assert same(fourth, plain(pipeline, "a dog", seed=10))


def test_command_line(folder, tmp_path, capsys, monkeypatch):
    pipeline = vitrail.load(folder / "model", device="cpu")

    def run(*words) -> int:
        monkeypatch.setattr("sys.argv", ["vitrail", *map(str, words)])
        try:
            main()
        except SystemExit as end:
            return int(end.code or 0)
        return 0

    model = ["--model", folder / "model", "--device", "cpu"]
    assert not run("ask", folder / "a.png", TEXTS[0], TEXTS[1], *model)
    assert capsys.readouterr().out.splitlines() == "\n".join(pipeline.ask(folder / "a.png", TEXTS[:2])).splitlines()
    assert not run("caption", folder / "a.png", folder / "b.png", *model)
    assert str(folder / "b.png") in capsys.readouterr().out
    assert not run("draw", "a dog", "-o", tmp_path / "dog.png", "--count", 2, "--seed", 5, *model)
    assert capsys.readouterr().out.split() == [str(tmp_path / f"dog-{i}.png") for i in (1, 2)]
    with Image.open(tmp_path / "dog-2.png") as second:
        assert same(second, pipeline.draw("a dog", seed=6))
    for more in (["--box", "0", "0", "0.5", "0.5"], ["--redraw-fraction", "0.5"]):
        assert not run("draw", "a dog", "-o", tmp_path / "new.png", "--init-image", folder / "a.png", *more, *model)
    over = ["--init-image", folder / "a.png", "--box", "0", "0", "1", "1", "--seed", 2, "--count", 2]
    assert not run("draw", "a dog", "-o", tmp_path / "two.png", *over, *model)
    with Image.open(tmp_path / "two-2.png") as second:
        assert same(second, pipeline.inpaint(folder / "a.png", "a dog", (0, 0, 1, 1), seed=3))
    capsys.readouterr()
    for wrong, message in (("x.jpg", "PNG"), ("none/x.png", "does not exist")):
        assert run("draw", "a dog", "-o", tmp_path / wrong, *model)
        assert message in capsys.readouterr().err
    assert run("draw", "a dog", "-o", tmp_path / "x.png", "--init-image", folder / "a.png", "--empty-box", *model)
    assert "--empty-box" in capsys.readouterr().err
    assert run("draw", "a dog", "-o", tmp_path / "x.png", "--redraw-fraction", "0.5", *model)
    assert "--init-image needs" in capsys.readouterr().err
    assert not run("ask", folder / "a.png", TEXTS[0], "--heatmap", tmp_path / "where.png", *model)
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / "where.png")
    with Image.open(tmp_path / "where.png") as where:
        assert where.size == (12, 12)
    assert run("ask", folder / "a.png", TEXTS[0], TEXTS[1], "--heatmap", tmp_path / "where.png", *model)
    assert "one question at a time" in capsys.readouterr().err
    assert run("ask", folder / "a.png", *model)
    assert "the question is missing" in capsys.readouterr().err


def test_dtype_argument(folder):
    assert (
        UnifiedPipeline.load(folder / "model", device="cpu", dtype=torch.float32).model.code_proj.weight.dtype
        == torch.float32
    )
    half = UnifiedPipeline.load(folder / "model", device="cpu", dtype=torch.bfloat16)
    assert half.model.code_proj.weight.dtype == torch.bfloat16
    assert half.draw("a dog", seed=1, steps=3).size == (12, 12) and isinstance(half.caption(folder / "a.png"), str)


def test_draw_stages(pipeline):
    stages = pipeline.draw_stages("two cats", 3, seed=4, steps=6)
    whole = pipeline.draw("two cats", seed=4, steps=6)
    grey = [(np.asarray(one.resize((3, 3), Image.Resampling.NEAREST)) == 128).all(-1).sum() for one in stages]
    assert same(stages[-1], whole) and list(grey) == sorted(grey, reverse=True) and grey[0] > 0 == grey[-1]
    passed = []
    ids = pipeline.draw_ids(
        ["two cats"], on_step=lambda ids, hidden: passed.append((ids.clone(), hidden)), seed=4, steps=6
    )
    for (_, before), (now, hidden) in pairwise(passed):
        assert not (hidden & ~before).any()  # drawn codes stay drawn
        assert torch.equal(now[~hidden], ids[~hidden])  # and keep their values


@pytest.mark.parametrize("halves", [True, False])
def test_bfloat16_on_supported_cpus(folder, monkeypatch, halves):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: halves, raising=False)
    kinds = {weight.dtype for weight in UnifiedPipeline.load(folder / "model", device="cpu").model.parameters()}
    assert kinds == {torch.bfloat16 if halves else torch.float32}
