"""Unified task: targets, losses and FLOPs of answers, image generation and text."""

import json
import math
from functools import partial

import pytest
import torch

from data.scenes.conftest import drawn
from models.test_unified_model import made
from tasks.test_contrastive_task import make_named_source
from vitrail import hub, recipe
from vitrail.codecs.codec import Codec
from vitrail.data.augmentation import NO_AUGMENTATION, AugmentationConfig, augment_images
from vitrail.data.language import generate_mixed_questions, generate_questions
from vitrail.data.qa import QUESTION_KINDS, SceneQADataset, build_qa_dataset
from vitrail.data.sampler import MixtureConfig
from vitrail.data.scenes.atlas import Atlas
from vitrail.data.scenes.scene_source import SceneSample, SceneSource, SceneSourceConfig
from vitrail.data.text_source import TextSource, TextSourceConfig
from vitrail.errors import ConfigError
from vitrail.models.unified_model import UnifiedModel
from vitrail.processing.tokenizer import Tokenizer
from vitrail.tasks.qa_tokens import IGNORE_INDEX, NUM_CHECKED, TEXT_KEY
from vitrail.tasks.unified_task import UnifiedSettings, UnifiedTask
from vitrail.training import trainer
from vitrail.training.distributed import TaskModule
from vitrail.training.optimizer import OptimConfig
from vitrail.training.prefetch import PrefetchIterator
from vitrail.training.stage_config import StageConfig
from vitrail.training.task import PreparedBatchTask


@pytest.fixture(scope="module")
def scenes() -> SceneSource:
    return SceneSource(
        SceneSourceConfig(atlas="-", preset="relations", image_size=12, seed=5), Atlas.build(drawn()), "scenes"
    )


@pytest.fixture(scope="module")
def words(scenes) -> Tokenizer:
    return Tokenizer.train(
        [*build_qa_dataset(scenes, 1).pieces.texts, *build_qa_dataset(make_named_source(), 1).pieces.texts], 420
    )


def make_model(order="raster", vocab=420, **more) -> UnifiedModel:
    config = made(order, **more).config
    torch.manual_seed(1)
    return UnifiedModel(config.replace(decoder=config.decoder.replace(vocab_size=vocab)))


def make_task(scenes, words, order="raster", text=None, **settings) -> UnifiedTask:
    sources = {"scenes": scenes, "named": make_named_source(), "drawn": scenes} | (
        {} if text is None else {"text": text}
    )
    return UnifiedTask(make_model(order), sources, words, UnifiedSettings(draw_sources=("drawn",), **settings))


def test_only_answers_are_targets(scenes, words):
    made = make_task(scenes, words, num_questions=3, max_length=200)
    index = torch.arange(6)
    pixels, ids, targets, since = made._make_qa_inputs("scenes", index).values()
    result = made.datasets["scenes"]
    assert isinstance(result, SceneQADataset)
    output = generate_mixed_questions(
        result.language, scenes.sample_scenes(index), scenes.config.seed, QUESTION_KINDS, 3
    )
    questions, answers = result.pieces.to_texts(output.question), result.pieces.to_texts(output.answer)
    for b in range(6):
        turns = [t for t in range(3 * b, 3 * b + 3) if output.valid[t]]
        whole = [
            i
            for t in turns
            for i in (*words.encode(questions[t]), words.eos_token_id, *words.encode(answers[t]), words.eos_token_id)
        ]
        assert ids[b, : len(whole)].tolist() == whole
        learnt = [i for t in turns for i in (*words.encode(answers[t]), words.eos_token_id)]
        assert targets[b][targets[b] != IGNORE_INDEX].tolist() == learnt
        sizes = [len([*words.encode(questions[t]), *words.encode(answers[t])]) + 2 for t in turns]
        starts = [sum(sizes[:n]) for n in range(len(sizes))]
        assert since[b, : len(whole)].tolist() == [at for at, n in zip(starts, sizes, strict=True) for _ in range(n)]
        places = (targets[b] != IGNORE_INDEX).nonzero()[:, 0]
        assert torch.equal(ids[b, places + 1], targets[b, places])  # targets are the next tokens
    assert torch.equal(
        pixels, augment_images(scenes.render_indices(index).pixels, NO_AUGMENTATION.replace(image_size=12))
    )


def test_combined_sources_match_separate_passes(scenes, words):
    made = make_task(scenes, words, num_questions=2, z_loss=0.0)
    made.model.eval()
    index = {"scenes": torch.arange(3), "named": torch.arange(2)}
    batch = made.prepare_batch(index)
    alone = [made({key: value for key, value in batch.items() if key.startswith(name)})["read"] for name in index]
    torch.testing.assert_close(made(batch)["read"], torch.stack(alone).sum())


@pytest.mark.parametrize("last", [None, "caption_long"])
def test_questions_do_not_attend_to_each_other(scenes, words, last):
    made = make_task(scenes, words, num_questions=3, final_kind=last, max_length=300)
    model, batch = made.model.eval(), made.prepare_batch({"scenes": torch.arange(3)})
    ids, targets, since = (batch[f"scenes:{part}"] for part in ("ids", "targets", "turn_starts"))
    seen, _ = model.encode_images(batch["scenes:pixels"])
    hidden = model(model.make_input_image_piece(seen), model.make_text_piece(ids, turn_starts=since))[
        :, -ids.shape[1] :
    ]
    for b in range(3):
        starts = since[b, targets[b] != IGNORE_INDEX].unique().tolist()
        assert len(starts) > 1
        for start in starts:
            own = since[b] == start
            alone = model(model.make_input_image_piece(seen[b : b + 1]), model.make_text_piece(ids[b : b + 1, own]))[
                :, -int(own.sum()) :
            ]
            torch.testing.assert_close(hidden[b : b + 1, own], alone, atol=1e-5, rtol=1e-4)


def test_long_samples_are_truncated(scenes, words):
    whole, cut = (make_task(scenes, words, num_questions=4, max_length=length) for length in (300, 20))
    a, b = (made._make_qa_inputs("scenes", torch.arange(5)) for made in (whole, cut))
    assert torch.equal(a["ids"][:, :20], b["ids"]) and torch.equal(a["targets"][:, :20], b["targets"])


def test_named_images_ask_for_their_names(scenes, words):
    made = make_task(scenes, words)
    _, ids, targets, _ = made._make_qa_inputs("named", torch.arange(4)).values()
    source = made.datasets["named"].source
    for b in range(4):
        name = source.pieces.to_texts(source.sample_texts(torch.tensor([b]), randomize=False))[0]
        assert words.decode(targets[b][targets[b] != IGNORE_INDEX][:-1].tolist()) == name
        assert "?" in words.decode(ids[b].tolist()) or "name" in words.decode(ids[b].tolist())


@pytest.mark.parametrize("order", ["raster", "masked"])
def test_losses_match_the_formula(scenes, words, order):
    made = make_task(scenes, words, order, num_questions=2, z_loss=0.0, prompt_dropout=0.0)
    model, index = made.model.eval(), torch.arange(3)
    batch = {"scenes": index, "drawn": index}
    torch.manual_seed(7)
    losses = made(batch)
    assert made.count_loss_terms(batch) == {"read": 3, "draw": 3}
    with torch.no_grad():
        pixels, ids, targets, since = made._make_qa_inputs("scenes", index).values()
        seen, codes = model.encode_images(pixels)
        output = model(model.make_input_image_piece(seen), model.make_text_piece(ids, turn_starts=since))
        logits = model.decoder.compute_logits(output)[:, 10:].log_softmax(-1)
        each = [-logits[b, t, targets[b, t]] for b in range(3) for t in range(256) if targets[b, t] != IGNORE_INDEX]
        torch.testing.assert_close(losses["read"], torch.stack(each).mean() * 3)
        torch.manual_seed(7)
        request = made._make_prompt_inputs("drawn", index)
        ids, counts, hidden = request["ids"], request["counts"], request.get("hidden")
        total = 0.0
        for b in range(3):
            one = None if hidden is None else hidden[b : b + 1]
            laid_out = model.build_layout(
                model.make_text_piece(ids[b : b + 1, : counts[b]]), model.make_output_image_piece(codes[b : b + 1], one)
            )
            states = model.get_code_states(laid_out, model.forward_hidden(laid_out))[0]
            asked = torch.arange(9) if one is None else one.flatten().nonzero()[:, 0]
            total += model.compute_code_losses(states[asked], codes[b].flatten()[asked]).mean()
        torch.testing.assert_close(losses["draw"], total)


def test_drawing_prompts_describe_the_scene(scenes, words):
    made = make_task(scenes, words, prompt_dropout=0.0)
    _, ids, counts = made._make_prompt_inputs("drawn", torch.arange(20)).values()
    result = made.datasets["drawn"]
    torch.manual_seed(3)
    texts = result.pieces.to_texts(result.sample_drawing_prompts(torch.arange(20)).pieces[:, :-1])
    torch.manual_seed(3)
    _, ids, counts = made._make_prompt_inputs("drawn", torch.arange(20)).values()
    for b in range(20):
        assert ids[b, : counts[b]].tolist() == [*words.encode(texts[b]), words.eos_token_id]
    assert len(set(texts)) > 10


def test_truncated_prompts_keep_their_end_token(scenes, words):
    made = make_task(scenes, words, max_prompt_length=8)
    made.model.eval()
    _, ids, counts = made._make_prompt_inputs("drawn", torch.arange(10)).values()
    assert ids.shape == (10, 8) and bool((ids[:, -1] == made.eos_token_id).all()) and bool((counts <= 8).all())
    assert make_task(scenes, words).prompt_lengths["drawn"] > 8  # truncated by the setting


def test_weights_z_loss_and_augmentation(scenes, words):
    source = make_named_source(augmentation=AugmentationConfig(crop_area=(0.2, 0.4), max_shift=0.5))
    made = UnifiedTask(
        make_model(), {"named": source, "d": scenes}, words,
        UnifiedSettings(draw_sources=("d",), weights={"draw": 3.0}, z_loss=0.0),
    )  # fmt: skip
    assert made.loss_weights == {"read": 1.0, "draw": 3.0}
    made.model.eval()
    shown = made._make_qa_inputs("named", torch.arange(4))["pixels"]
    assert torch.equal(shown, augment_images(source.pixels(torch.arange(4)), NO_AUGMENTATION.replace(image_size=12)))
    made.model.train()
    assert not torch.equal(shown, made._make_qa_inputs("named", torch.arange(4))["pixels"])
    batch, losses = {"d": torch.arange(3)}, {}
    for training in (True, False):
        made.model.train(training)
        for z in (0.0, 0.1):
            made.settings = made.settings.replace(z_loss=z)
            torch.manual_seed(0)
            losses[training, z] = made(batch)["draw"]
    assert losses[True, 0.1] > losses[True, 0.0] + 0.01
    assert losses[False, 0.1] == losses[False, 0.0]  # validation has no z_loss


def test_sources_without_targets_raise(scenes, words):
    with pytest.raises(ConfigError, match=r"has an answer within 8 tokens"):
        make_task(scenes, words, max_length=8, num_questions=1, question_kinds=("choice_object",))
    with pytest.raises(ConfigError, match="of 'scenes' has"):
        make_task(scenes, words, num_questions=1, question_kinds=("reading",))


def test_prompt_dropout_only_in_training(scenes, words):
    made = make_task(scenes, words, prompt_dropout=1.0)
    made.model.train()
    assert not made._make_prompt_inputs("drawn", torch.arange(5))["counts"].any()
    made.model.eval()
    assert made._make_prompt_inputs("drawn", torch.arange(5))["counts"].all()


def test_masked_fractions(scenes, words):
    made = make_task(scenes, words, "masked")
    count = made._sample_mask(torch.zeros(4000)).flatten(1).sum(1)
    assert count.min() >= 1 and count.max() == 9
    # ⌈9 cos(πu/2)⌉ ≥ 5 where u < 2/π · arccos(4/9)
    assert abs((count >= 5).float().mean() - 2 / math.pi * math.acos(4 / 9)) < 0.03


def test_plain_text_loss(scenes, words, tmp_path):
    (tmp_path / "a.txt").write_text("a dog and a cat. " * 200)
    text = TextSource(TextSourceConfig(files=(str(tmp_path / "a.txt"),), window_length=16), words)
    made = make_task(scenes, words, text=text)
    batch = made.collate([text[0], scenes[3], text[1]])
    assert set(batch) == {TEXT_KEY, "scenes"} and made.count_loss_terms(batch) == {"text": 32, "read": 1, "draw": 0}
    with torch.no_grad():
        logits = made.model.decoder(batch[TEXT_KEY][:, :-1]).log_softmax(-1)
        wanted = -logits.gather(-1, batch[TEXT_KEY][:, 1:, None].long()).sum()
        found = made({TEXT_KEY: batch[TEXT_KEY]})
    z = made.settings.z_loss * made.model.decoder(batch[TEXT_KEY][:, :-1]).logsumexp(-1).square().sum()
    torch.testing.assert_close(found["text"], wanted + z.detach(), rtol=1e-4, atol=1e-4)
    assert made.count_flops(batch) > 0


def test_invalid_arguments_raise(scenes, words):
    with pytest.raises(ConfigError, match="tokenizer"):
        UnifiedTask(make_model(), {"scenes": scenes}, None, UnifiedSettings())
    with pytest.raises(ConfigError, match="not an image source"):
        UnifiedTask(make_model(), {"scenes": scenes}, words, UnifiedSettings(draw_sources=("skenes",)))
    for wrong in ({"weights": {"reed": 1.0}}, {"prompt_dropout": 2.0}, {"z_loss": -1.0}):
        with pytest.raises(ConfigError):
            UnifiedSettings(**wrong)
    with pytest.raises(ConfigError, match="questions"):
        make_task(scenes, words, num_questions=100)


@pytest.mark.parametrize("order", ["raster", "masked"])
def test_recipe_trains_with_a_codec_of_an_earlier_stage(order, tmp_path, scenes, monkeypatch):
    """Train from a saved codec to a saved model that generates images; the codec is unchanged."""
    monkeypatch.setattr("vitrail.data.scenes.scene_source.open_atlas", lambda name: scenes.atlas)
    torch.manual_seed(0)
    config = made(order).config
    hub.save(Codec(config.codec), tmp_path / "codec")
    plain = {
        "name": "unified", "description": "x", "seed": 0, "tokenizer": {"vocab_size": 400},
        "model": {
            "kind": "unified",
            "config": config.replace(decoder=config.decoder.replace(vocab_size=400)).to_dict(),
            "parts": {"codec": {"checkpoint": str(tmp_path / "codec"), "part": ""}},
        },
        "sources": {
            name: {"kind": "scenes", "atlas": "-", "preset": "relations", "image_size": 12, "seed": i}
            for i, name in enumerate("rd")
        },
        "stages": [{
            "name": "learn", "task": "unified", "steps": 6, "batch_size": 8, "dtype": "bfloat16",
            "trainable": ["decoder", "image_proj", "code_proj", "mark_embed", "head"],
            "settings": {"draw_sources": ["d"], "num_questions": 2, "max_length": 64},
            "mixture": {"weights": {"r": 1, "d": 1}}, "optim": {"lr": 1e-2},
        }],
    }  # fmt: skip
    chosen = recipe.Recipe.from_dict(plain)
    trained = recipe.train_recipe(chosen, tmp_path / "out", quiet=True)
    rows = [json.loads(line) for line in (tmp_path / "out" / "learn" / "log.jsonl").read_text().splitlines()]
    assert rows[-1]["loss"] < rows[0]["loss"]
    again = hub.load(tmp_path / "out" / "final")
    before = hub.load(tmp_path / "codec").state_dict()
    for name, weight in again.codec.state_dict().items():
        assert torch.equal(weight, before[name]), name
    ids = torch.arange(4)[None]
    assert torch.equal(again(again.make_text_piece(ids)), trained.eval()(trained.make_text_piece(ids)))
    del plain["model"]["parts"]
    with pytest.raises(ConfigError, match="needs a pretrained codec"):
        recipe.train_recipe(recipe.Recipe.from_dict(plain), tmp_path / "other", quiet=True)


@pytest.mark.parametrize("order", ["raster", "masked"])
def test_prepared_step_compiles_to_one_graph(order, scenes, words):
    """Independent of the order of sources, and equal to a step that prepares its inputs itself."""
    torch._dynamo.reset()
    task_ = make_task(scenes, words, order, num_questions=2, max_length=64)
    task_.model.train()
    graphs: list[int] = []

    def backend(module, _):
        graphs.append(len(module.graph.nodes))
        return module.forward

    compiled = torch.compile(TaskModule(task_), backend=backend)
    for names in (("scenes", "drawn", "named"), ("drawn", "named", "scenes")):
        batch = task_.collate([SceneSample(name, i) for i in range(3) for name in names])
        assert isinstance(task_, PreparedBatchTask) and list(batch) == sorted(names)
        torch.manual_seed(0)
        result = compiled(task_.prepare_batch(batch))
        torch.manual_seed(0)
        torch.testing.assert_close(result, task_(batch), rtol=1e-4, atol=1e-4)
    assert len(graphs) == 1
    torch._dynamo.reset()


def test_final_kind_ends_each_sample(scenes, words):
    plain, more = (
        make_task(scenes, words, num_questions=2, max_length=400, final_kind=last) for last in (None, "caption_long")
    )
    index = torch.arange(6)
    a, b = (made._make_qa_inputs("scenes", index) for made in (plain, more))
    result = more.datasets["scenes"]
    output = generate_questions(result.language, scenes.sample_scenes(index), scenes.config.seed, "caption_long")
    asked = zip(result.pieces.to_texts(output.question), result.pieces.to_texts(output.answer), strict=True)
    for row, (question, answer) in enumerate(asked):
        before = int((a["targets"][row] != IGNORE_INDEX).nonzero().max()) + 2
        whole = [*words.encode(question), words.eos_token_id, *words.encode(answer), words.eos_token_id]
        assert torch.equal(a["ids"][row, :before], b["ids"][row, :before])
        assert b["ids"][row, before : before + len(whole)].tolist() == whole
        learnt = b["targets"][row, before - 1 :]
        assert learnt[learnt != IGNORE_INDEX].tolist() == [*words.encode(answer), words.eos_token_id]
    with pytest.raises(ConfigError, match="caption_lung"):
        make_task(scenes, words, final_kind="caption_lung")


def test_prefetching_does_not_change_training(tmp_path, scenes, words, monkeypatch):
    curves = []
    for early in (False, True):
        monkeypatch.setattr(trainer, "PrefetchIterator", partial(PrefetchIterator, early=early))
        torch.manual_seed(0)
        task_ = make_task(scenes, words, "masked", num_questions=2, max_length=64)
        stage = StageConfig(
            name="learn", task="unified", steps=4, batch_size=6, gradient_accumulation_steps=2, save_every=100,
            mixture=MixtureConfig(weights={"scenes": 1.0, "drawn": 1.0}), optim=OptimConfig(lr=1e-2),
        )  # fmt: skip
        sources = {"scenes": scenes, "drawn": SceneSource(scenes.config, scenes.atlas, "drawn")}
        folder = tmp_path / str(early)
        trainer.Trainer(stage, task_, sources, folder, quiet=True).train()
        curves.append([json.loads(line)["loss"] for line in (folder / "log.jsonl").read_text().splitlines()])
    assert curves[0] == curves[1] and curves[0][0] != curves[0][1]


def test_augmentation_only_in_training(scenes, words):
    how = AugmentationConfig(colour_jitter=0.05, log_gamma=(-0.05, 0.05), sharpness=(-0.5, 0.5), max_noise=0.05)
    varied = SceneSource(scenes.config.replace(augmentation=how), scenes.atlas, "scenes")
    made, index = make_task(varied, words, num_questions=2, max_length=120), torch.arange(4)
    plain = make_task(scenes, words, num_questions=2, max_length=120)
    made.model.train()
    seen = made._make_qa_inputs("scenes", index)
    still = plain._make_qa_inputs("scenes", index)
    assert torch.equal(seen["ids"], still["ids"]) and not torch.equal(seen["pixels"], still["pixels"])
    assert (seen["pixels"] - still["pixels"]).abs().mean() < 0.2
    made.model.eval()
    assert torch.equal(made._make_qa_inputs("scenes", index)["pixels"], still["pixels"])


def test_extra_templates_ask_the_same_questions(scenes, words):
    """Also the drawing prompts; answers stay the same."""
    usual, many = (
        make_task(scenes, words, question_kinds=("existence_random",), num_questions=1, templates=w)
        for w in ("usual", "many")
    )
    index, heard = torch.arange(100), []
    for one in (usual, many):
        result = one.datasets["scenes"]
        rows = result.sample_qa(index).pieces
        texts = result.pieces.to_texts(torch.where(rows == len(result.pieces), 0, rows))
        heard.append(sum(text.startswith(("Can you confirm", "Is there any sign", "Do you notice")) for text in texts))
    assert heard[0] == 0 < heard[1]
    answers = [
        [i for i in one._make_qa_inputs("scenes", index)["targets"].flatten().tolist() if i != IGNORE_INDEX]
        for one in (usual, many)
    ]
    assert answers[0] == answers[1]
    with pytest.raises(ConfigError, match=r"UnifiedSettings.templates is"):
        UnifiedSettings(templates="some")  # type: ignore[arg-type]


def test_truncation_is_logged(scenes, words, capsys):
    make_task(scenes, words, num_questions=2, max_length=400)
    assert not capsys.readouterr().err
    make_task(scenes, words, num_questions=2, max_length=24)
    result = build_qa_dataset(scenes, 2)
    assert isinstance(result, SceneQADataset)
    output = generate_mixed_questions(
        result.language, scenes.sample_scenes(torch.arange(NUM_CHECKED)), scenes.config.seed, QUESTION_KINDS, 2
    )
    turns = zip(
        result.pieces.to_texts(output.question),
        result.pieces.to_texts(output.answer),
        output.valid.tolist(),
        strict=True,
    )
    sizes = [valid * (len(words.encode(q)) + len(words.encode(a)) + 2) for q, a, valid in turns]
    whole = [a + b for a, b in zip(sizes[::2], sizes[1::2], strict=True)]
    cut = sum(size > 25 for size in whole)
    want = f"scenes: {cut} of {NUM_CHECKED} samples exceed 24 tokens and are truncated; the longest has {max(whole)}"
    assert want in capsys.readouterr().err
