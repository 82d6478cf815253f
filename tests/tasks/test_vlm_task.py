"""VLM task: targets, losses and FLOPs, for every documented variant."""

import itertools
import json
from itertools import groupby

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from PIL import Image

import vitrail
from tasks.small_vlms import KINDS, VARIANTS, made_of, scenes_of, small, task_of
from tasks.test_contrastive_task import make_named_source
from vitrail import hub, recipe
from vitrail.cli.eval_command import app as evals
from vitrail.data.language import generate_mixed_questions
from vitrail.data.scenes.word_sprites import BUILT_IN_FONTS
from vitrail.data.text_source import TextSource, TextSourceConfig
from vitrail.errors import ConfigError
from vitrail.models.cross_attention_vlm import CrossAttentionVLM
from vitrail.models.vlm_cost import make_row_workload
from vitrail.nn import cost, cuda_graphs
from vitrail.pipelines import ChatPipeline
from vitrail.processing.tokenizer import Tokenizer
from vitrail.recipe import sweep as sweeps
from vitrail.registry import TASKS
from vitrail.stream import build_stream, pack_streams
from vitrail.stream import text_part as text_part
from vitrail.tasks.qa_tokens import IGNORE_INDEX, TEXT_KEY
from vitrail.tasks.vlm_task import BLANK_PREFIX, VLMSettings, VLMTask
from vitrail.training.distributed import TaskModule
from vitrail.training.stage_config import set_trainable_parts
from vitrail.training.task import PreparedBatchTask

# ---- targets ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_trains(name, atlas, words):
    """One gradient step on the trainable parts of the last stage lowers the loss."""
    task = task_of(name, atlas, words)
    batch = {"scenes": torch.arange(6)}
    task.model.eval()
    optim = torch.optim.AdamW([p for p in task.model.parameters() if p.requires_grad], lr=3e-3)
    losses = []
    for _ in range(3):
        loss = task(batch)["answers"] / 6
        losses.append(loss.item())
        optim.zero_grad()
        loss.backward()
        optim.step()
    assert losses[2] < losses[1] < losses[0]
    assert 0 < task.count_flops(batch) < task.count_step_flops(batch)


@pytest.mark.parametrize(
    "name", ["mini-vlm-llava", "mini-vlm-gated", "vlm-fused", "vlm-towers", "vlm-codes", "vlm-expert"]
)
@pytest.mark.parametrize("bos", [None, "<s>"])
def test_loss_is_cross_entropy_over_answers(name, bos, atlas, both):
    """Compare with the model's forward pass over streams that are built per sample from texts and PIL images."""
    words, questions = both[bos], 2
    task = task_of(name, atlas, words, num_questions=questions, max_length=80, turns="together")
    model, index = task.model.eval(), torch.arange(3)
    _randomize(model)
    source, result = scenes_of(small(name), atlas), task.datasets["scenes"]
    output = generate_mixed_questions(
        result.language, source.sample_scenes(index), source.config.seed, KINDS, questions
    )
    asked, answered = result.pieces.to_texts(output.question), result.pieces.to_texts(output.answer)
    images = [Image.fromarray(one.permute(1, 2, 0).numpy()) for one in source.render_indices(index).pixels]
    shown, streams, told_of = model.prepare_images(images), [], []
    for b in range(3):
        turns = [t for t in range(b * questions, (b + 1) * questions) if output.valid[t]]
        parts = [] if bos is None else [text_part([words.bos_token_id])]
        cross_vlm = isinstance(model, CrossAttentionVLM)
        before = (
            [text_part([model.config.image_token_id])]
            if cross_vlm
            else model.config.make_parts(shown.layouts[b], len(turns))
        )
        for n, t in enumerate(turns):
            parts += before[
                n : n + 1
            ]  # the image or its token before the first question; queries before every question
            parts.append(text_part([*words.encode(asked[t]), words.eos_token_id]))
            parts.append(text_part([*words.encode(answered[t]), words.eos_token_id], loss_mask=True))
        told_of.append([torch.tensor(words.encode(asked[t])) for t in turns])
        streams.append(build_stream(parts, None if cross_vlm else model.config.rules))
    if name == "vlm-fused":
        shown = shown._replace(questions=tuple(told_of))
        assert max(map(len, told_of)) == 2  # at least two questions per scene
    packed, passes = pack_streams(streams, max(map(len, streams))), []
    model.decoder.rotary.register_forward_pre_hook(lambda _, inputs: passes.append(inputs[0]))
    with torch.no_grad():
        logits = model(packed, shown)
        wanted = F.cross_entropy(logits.flatten(0, 1), packed.targets.flatten(), ignore_index=IGNORE_INDEX)
        torch.testing.assert_close(task({"scenes": index})["answers"] / 3, wanted, rtol=1e-4, atol=1e-5)
    made = made_of(task, {"scenes": index})
    assert int((made.targets != IGNORE_INDEX).sum()) == sum(stream.num_target_tokens for stream in streams)
    assert task.count_tokens(task.prepare_batch({"scenes": index})) == sum(map(len, streams))
    for b, stream in enumerate(streams):  # text starts after the image
        prefix_length = task.row_template.prefix_length
        conversation = stream.ids[prefix_length:][stream.kinds[prefix_length:] == 0]
        assert conversation.tolist() == made.ids[b, : len(conversation)].tolist()
        positions = stream.positions[:, 0]
        assert torch.equal(passes[-1][b, : len(stream)], positions)


def _randomize(model) -> None:
    """Give zero-initialised gates and experts an effect, so that they are tested."""
    torch.manual_seed(5)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "fusion" in name:
                p.add_(torch.randn_like(p) * 0.3)


@pytest.mark.parametrize(
    ("name", "train", "learns"),
    [
        ("mini-vlm-llava", ("connector",), {"connector"}),
        ("mini-vlm-llava", ("connector", "decoder"), {"connector", "decoder"}),
        ("vlm-tuned", ("connector", "decoder", "tower"), {"connector", "decoder", "tower"}),
        ("mini-vlm-gated", ("connector", "decoder.fusion"), {"connector", "decoder.fusion"}),
        ("vlm-fused", ("connector", "queries"), {"connector", "queries"}),
        ("vlm-codes", ("connector", "tower"), {"connector", "tower"}),
    ],
)
def test_gradients_reach_only_trainable_parts(name, train, learns, atlas, words):
    task = task_of(name, atlas, words)
    _randomize(task.model)
    set_trainable_parts(task.model, train)
    task({"scenes": torch.arange(4)})["answers"].backward()
    unread = {"tower.norm_last", "decoder.head", "queries.end"}
    for key, p in task.model.named_parameters():
        mine = any(key.startswith(f"{part}.") for part in learns)
        if not any(key.startswith(part) for part in unread):
            assert (p.grad is not None and bool(p.grad.any())) == mine, key


def test_overfits_eight_scenes(atlas, words, tmp_path):
    """The saved model also returns these answers."""
    torch.manual_seed(0)
    task = task_of(
        "vlm-tuned", atlas, words, question_kinds=("colour", "counting", "what"), num_questions=1, max_length=24
    )
    made = made_of(task, {"scenes": torch.arange(8)})  # rendered once to save time
    optim = torch.optim.AdamW(task.model.parameters(), lr=8e-3, weight_decay=0.0)
    for step in range(70):
        loss = task._token_loss(task.model.forward_rows(made.template, made.pixels, made.ids), made.targets, "mean")
        optim.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(task.model.parameters(), 1.0)
        for group in optim.param_groups:
            group["lr"] = 8e-3 * min(1, (70 - step) / 30)
        optim.step()
    assert loss < 0.1
    hub.save(task.model, tmp_path, task.chat_tokenizer)
    chat_pipeline, source = vitrail.load(tmp_path, device="cpu"), scenes_of(small("mini-vlm-llava"), atlas)
    result = task.datasets["scenes"]
    output = generate_mixed_questions(
        result.language, source.sample_scenes(torch.arange(8)), source.config.seed, task.settings.question_kinds, 1
    )
    rows = output.valid.nonzero()[:, 0].tolist()
    questions, answers = result.pieces.to_texts(output.question[rows]), result.pieces.to_texts(output.answer[rows])
    pictures = [
        Image.fromarray(source.render_indices(torch.tensor([b])).pixels[0].permute(1, 2, 0).numpy()) for b in rows
    ]
    assert len(rows) > 5 and chat_pipeline.ask_batch(pictures, questions, max_new_tokens=16) == answers
    assert chat_pipeline.ask(pictures[0], questions[0], max_new_tokens=16) == answers[0]
    stream = chat_pipeline.build_prompt([chat_pipeline.build_message(pictures[0], questions[0])]).stream
    ids = made_of(task, {"scenes": torch.tensor(rows[:1])}).ids[0]
    assert (
        stream.ids[task.row_template.prefix_length :].tolist()
        == ids[: len(stream) - task.row_template.prefix_length].tolist()
    )
    assert task.row_template.ids.tolist() == stream.ids[: task.row_template.prefix_length].tolist()


@pytest.mark.parametrize("name", ["mini-vlm-llava", "mini-vlm-gated", "vlm-fused"])
def test_answers_are_scored_by_kind(name, atlas, words, tmp_path, monkeypatch, capsys):
    """`vitrail eval FOLDER questions`, on another vendor and with held-out templates."""
    monkeypatch.setattr("vitrail.data.scenes.atlas_library.open_atlas", lambda name: atlas)
    task = task_of(name, atlas, words)
    hub.save(task.model, tmp_path / "model", task.chat_tokenizer)
    how = ["--kinds", "counting", "--kinds", "colour", "--count", "4", "--vendors", "right", "--held-out"]
    how += ["--preset", "colours", "--device", "cpu", "--out", str(tmp_path / "found.json")]
    how += [] if name == "mini-vlm-gated" else ["--reduce", "pool", "--keep", "1"]  # independent of tokens
    evals([str(tmp_path / "model"), "questions", *how], result_action="return_value")
    found = json.loads((tmp_path / "found.json").read_text())
    assert [(score["name"], score["count"]) for score in found["scores"][:2]] == [("counting", 4), ("colour", 4)]
    assert found["held_out"] and found["vendors"] == ["right"] and "blind" in capsys.readouterr().out
    assert found.get("reduce") == (None if name == "mini-vlm-gated" else "pool")


def test_fused_queries_with_follow_up_questions(atlas, words, tmp_path):
    """One question per image in a batch, several in turn, and several images."""
    task = task_of("vlm-fused", atlas, words, num_questions=2, turns="together")
    hub.save(task.model.eval(), tmp_path, task.chat_tokenizer)
    chat_pipeline, picture = ChatPipeline.load(tmp_path, device="cpu"), Image.new("RGB", (16, 16), "red")
    output = [
        chat_pipeline.ask(picture, question, max_new_tokens=4)
        for question in ("what is this?", "how many dogs are there?")
    ]
    assert (
        chat_pipeline.ask_batch([picture, picture], ["what is this?", "how many dogs are there?"], max_new_tokens=4)
        == output
    )
    first = chat_pipeline.build_message(picture, "what is this?")
    conversation = [
        first,
        {"role": "assistant", "content": output[0]},
        chat_pipeline.build_message([], "how many dogs are there?"),
    ]
    chat_pipeline.chat(conversation, max_new_tokens=4)
    stream, shown, _ = chat_pipeline.build_prompt(conversation)
    n, m = task.model.config.queries.queries_per_question(2)
    runs = [len(list(run)) for kind, run in groupby(stream.kinds.tolist()) if kind == 1]
    assert runs == [n, m] and [len(own) for own in shown.questions] == [2]
    # The training row with the same text has the same ids at the same positions.
    wanted = [*words.encode("what is this?"), words.eos_token_id, *words.encode(output[0]), words.eos_token_id]
    behind = [*words.encode("how many dogs are there?"), words.eos_token_id]
    assert stream.ids[stream.kinds == 0].tolist() == wanted + behind
    assert stream.ids[-len(behind) :].tolist() == behind and stream.kinds[-len(behind) - 1] == 1
    chat_pipeline.ask([picture, picture], "what are these?", max_new_tokens=4)


@pytest.mark.parametrize("name", ["vlm-wide", "vlm-letterbox", "vlm-crop"])
def test_wide_images_are_resized_as_by_the_model(name, atlas, words):
    task = task_of(name, atlas, words)
    task.model.eval()
    pixels = scenes_of(small(name), atlas).render_indices(torch.arange(5)).pixels
    assert pixels.shape == (5, 3, 16, 32)
    theirs = task.model.prepare_images([Image.fromarray(one.permute(1, 2, 0).numpy()) for one in pixels]).pixels
    ours = task.make_views(pixels, "scenes")
    assert ours.shape == theirs.shape and (ours - theirs).abs().mean() < 0.005


def test_named_images_ask_for_their_names(atlas, words):
    source = make_named_source()
    task = task_of("mini-vlm-llava", atlas, words, {"named": source})
    made = made_of(task, {"scenes": torch.arange(2), "named": torch.arange(3)})
    assert len(made.ids) == 5
    for b in range(3):
        targets = made.targets[2 + b]
        assert words.decode(targets[targets != IGNORE_INDEX][:-1].tolist()) == source.records[b].name
    assert task.count_loss_terms({"scenes": torch.arange(2), "named": torch.arange(3)}) == {"answers": 5}


# ---- text -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pages(words, tmp_path_factory) -> TextSource:
    file = tmp_path_factory.mktemp("text") / "a.txt"
    file.write_text("a dog and a cat. " * 200)
    return TextSource(TextSourceConfig(files=(str(file),), window_length=16), words)


@pytest.mark.parametrize("name", ["mini-vlm-llava", "vlm-expert", "mini-vlm-gated"])
def test_text_loss_matches_the_decoder(name, atlas, words, pages):
    task = task_of(name, atlas, words, {"text": pages})
    _randomize(task.model.eval())
    samples = [pages[0], scenes_of(small(name), atlas)[3], pages[1]]
    batch = task.collate(samples)
    assert set(batch) == {TEXT_KEY, "scenes"} and task.count_loss_terms(batch) == {"answers": 1, "text": 32}
    with torch.no_grad():
        logits = task.model.decoder(batch[TEXT_KEY][:, :-1])
        wanted = F.cross_entropy(logits.flatten(0, 1), batch[TEXT_KEY][:, 1:].flatten().long(), reduction="sum")
        torch.testing.assert_close(task(batch)["text"], wanted, rtol=1e-4, atol=1e-4)
    assert (
        task.count_tokens(task.prepare_batch(batch)) > 32 + task.row_template.prefix_length
    )  # those of text, image and answers


def test_z_loss_only_in_training(atlas, words, pages):
    """Validation excludes z_loss, so that stages with and without it are comparable."""
    task = task_of("mini-vlm-llava", atlas, words, {"text": pages})
    found = {}
    for training in (True, False):
        task.model.train(training)
        for z in (0.0, 0.1):
            task.settings = task.settings.replace(z_loss=z)
            found[training, z] = task(task.collate([pages[0], pages[1]]))["text"]
    assert found[True, 0.1] > found[True, 0.0] + 0.1 and found[False, 0.1] == found[False, 0.0]


def test_reads_words_in_a_held_out_font():
    chosen = sweeps.load_sweep("vlm-towers")
    for variant in chosen.variants:
        sources = chosen.load_recipe(variant, 0).sources
        learnt, judged = (set(sources[name].scene["fonts"]) for name in ("scenes", "unseen"))
        asked = chosen.tests["reading"]
        tested = {word for flag, word in itertools.pairwise(asked) if flag == "--fonts"}
        assert learnt and tested == judged and not learnt & tested
        assert learnt | tested == {font.name for font in BUILT_IN_FONTS}


def test_zero_gates_do_not_change_text(atlas, words, pages):
    task = task_of("mini-vlm-gated", atlas, words, {"text": pages})
    batch = {TEXT_KEY: task.collate([pages[0], pages[1]])[TEXT_KEY]}
    with torch.no_grad():
        before = task(batch)["text"]
    optim = torch.optim.AdamW([p for p in task.model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(3):
        task({"scenes": torch.arange(4)})["answers"].backward()
        optim.step()
    with torch.no_grad():
        assert torch.equal(task(batch)["text"], before)
    plain = task_of("vlm-gates-none", atlas, words, {"text": pages})  # control: without gates
    mine = task.model.decoder.state_dict()
    plain.model.decoder.load_state_dict({k: v for k, v in mine.items() if not k.startswith("fusion.")})
    with torch.no_grad():
        torch.testing.assert_close(plain(batch)["text"], before)
    task.model.train()
    with pytest.raises(ConfigError, match="no module that text passes through"):
        task(batch)


# ---- many processes, and costs ----------------------------------------------------------------------------------


def test_blank_inputs_change_no_loss(atlas, words, pages):
    task = task_of("mini-vlm-llava", atlas, words, {"text": pages})
    task.model.eval()
    seen, read = {"scenes": torch.arange(3)}, {TEXT_KEY: task.collate([pages[0]])[TEXT_KEY]}
    for batch, part, other in ((seen, "text", "answers"), (read, "answers", "text")):
        full = task.fill_part(batch, part)
        assert task.used_parts(batch) == {part: False, other: True} and all(task.used_parts(full).values())
        assert task.count_loss_terms(full) == task.count_loss_terms(batch)
        found = []
        for one in (batch, full):
            task.model.zero_grad()
            losses = task(one)
            sum(losses.values()).backward()
            found.append((losses, {k: p.grad.clone() for k, p in task.model.named_parameters() if p.grad is not None}))
        (plain, gradients), (filled, same) = found
        assert filled[part] == 0 and plain[part] == 0 and filled[part].requires_grad
        torch.testing.assert_close(filled[other], plain[other])
        assert all(torch.allclose(same[k], gradient, atol=1e-5) for k, gradient in gradients.items())
    both = task.fill_part(seen, "answers")  # batches with images may get a blank one too
    torch.testing.assert_close(task(both)["answers"], task(seen)["answers"])
    assert BLANK_PREFIX + "answers" in both


def test_frozen_tower_counts_forward_flops_only(atlas, words, pages):
    task = task_of("mini-vlm-llava", atlas, words, {"text": pages})
    batch = {"scenes": torch.arange(4)}
    component_costs = {
        name: component.flops
        for name, component in task.model.cost_components(make_row_workload(task.model, task.row_template, 4)).items()
    }
    assert task.count_flops(batch) == sum(component_costs.values())
    assert (
        task.count_step_flops(batch)
        == component_costs["tower"] + 3 * component_costs["connector"] + 3 * component_costs["decoder"]
    )
    set_trainable_parts(task.model, ("connector", "position_embedding"))
    assert (
        task.count_step_flops(batch)
        == component_costs["tower"] + 3 * component_costs["connector"] + 2 * component_costs["decoder"]
    )
    set_trainable_parts(task.model, ("*",))
    assert task.count_step_flops(batch) == 3 * sum(component_costs.values())
    text = task.collate([pages[0], pages[1]])
    assert task.count_flops(text) == cost.count_flops(task.model.decoder, cost.Workload.causal_attention(16, 2))


# ---- execution --------------------------------------------------------------------------------------------------

COMPILED = ("vlm-towers", "vlm-qformer", "vlm-letterbox", "vlm-pruned", "vlm-voco", "vlm-talks")
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in COMPILED]


@pytest.mark.parametrize("name", ["mini-vlm-llava", "mini-vlm-gated", "vlm-codes", *SLOW])
def test_step_compiles_to_one_graph(name, atlas, both):
    """The forward pass compiles to one graph, separate from the preparation of inputs, without recompilation."""
    torch._dynamo.reset()
    task = task_of(name, atlas, both["<s>"])
    task.model.train()
    graphs: list[int] = []

    def backend(module, _):
        graphs.append(len(module.graph.nodes))
        return module.forward

    whole = TaskModule(task)
    compiled = torch.compile(whole, backend=backend)
    for step in range(2):
        batch = task.prepare_batch({"scenes": torch.arange(4) + 4 * step})
        torch.testing.assert_close(compiled(batch)["answers"], whole(batch)["answers"], rtol=1e-4, atol=1e-4)
    assert [count for count in graphs if count > 8] == [max(graphs)]  # the order of summation differs
    torch._dynamo.reset()


def test_prefetched_batches_match(atlas, words):
    task = task_of("mini-vlm-llava", atlas, words, {"named": make_named_source()})
    assert isinstance(task, PreparedBatchTask)
    task.model.train()
    batch = {"scenes": torch.arange(3), "named": torch.arange(2)}
    torch.manual_seed(0)
    useful = task.count_tokens(task.prepare_batch(batch))
    for filled in (batch, task.fill_part(batch, "answers")):  # blank inputs run without a loss
        torch.manual_seed(0)
        wanted = task(filled)["answers"]
        torch.manual_seed(0)
        made = task.prepare_batch(filled)
        assert torch.equal(task(made)["answers"], wanted) and task.count_tokens(made) == useful


def test_training_prepares_batches_with_cuda_graphs(atlas, monkeypatch, tmp_path):
    monkeypatch.setattr("vitrail.data.scenes.scene_source.open_atlas", lambda name: atlas)
    seen = []

    class RecordingVLMTask(VLMTask):
        def prepare_batch(self, batch):
            seen.append(cuda_graphs._GRAPHS_ENABLED.get())
            return super().prepare_batch(batch)

    monkeypatch.setitem(TASKS._values, "vlm", TASKS["vlm"]._replace(make_task=RecordingVLMTask))
    recipe.train_recipe(small("mini-vlm-llava"), tmp_path, device="cpu", quiet=True)
    assert seen and all(seen) and not cuda_graphs._GRAPHS_ENABLED.get()


def test_log_has_tokens_tower_flops_and_wait_time(atlas, monkeypatch, tmp_path):
    monkeypatch.setattr("vitrail.data.scenes.scene_source.open_atlas", lambda name: atlas)
    monkeypatch.setattr("vitrail.training.trainer.get_peak_flops", lambda device, dtype: 1e9)
    made = []

    class RecordingVLMTask(VLMTask):
        def __init__(self, *given):
            super().__init__(*given)
            made.append(self)

        def count_tokens(self, batch):
            self.num_tokens = super().count_tokens(batch)
            return self.num_tokens

    monkeypatch.setitem(TASKS._values, "vlm", TASKS["vlm"]._replace(make_task=RecordingVLMTask))
    recipe.train_recipe(small("mini-vlm-llava"), tmp_path, device="cpu", quiet=True)
    for task, stage in zip(made, ("align", "tune"), strict=True):
        [*_, row] = map(json.loads, (tmp_path / stage / "log.jsonl").read_text().splitlines())
        spent = task.num_tokens / row["tokens_per_s"]
        assert (
            4 * task.row_template.prefix_length
            < task.num_tokens
            < 4 * (task.row_template.prefix_length + task.settings.max_length)
        )
        batch = {"scenes": torch.arange(4)}
        set_trainable_parts(
            task.model, ("connector", "position_embedding", *(() if stage == "align" else ("decoder",)))
        )
        assert row["mfu"] == pytest.approx(task.count_step_flops(batch) / spent / 1e9)
        component_costs = task.model.cost_components(
            make_row_workload(task.model, task.row_template, 4, round(4 * task._label_tokens))
        )
        assert (
            task.count_step_flops(batch) > component_costs["tower"].flops + 2 * component_costs["decoder"].flops
            and component_costs["tower"].flops > 0
        )
        assert 0 < row["wait"] < 1


def test_head_flops_count_targets_only(atlas, words):
    task = task_of("mini-vlm-llava", atlas, words)
    batch = {"scenes": torch.arange(6)}
    before = task.count_flops(batch)
    made = made_of(task, batch)
    assert (
        task.count_tokens(task.prepare_batch(batch)) > 0
        and task._label_tokens == int((made.targets != IGNORE_INDEX).sum()) / 6
    )
    head = 2 * task.model.decoder.compute_logits(torch.zeros(1, 32)).shape[-1] * 32
    assert before - task.count_flops(batch) == head * (
        6 * task.settings.max_length - int((made.targets != IGNORE_INDEX).sum())
    )


def test_image_token_must_differ_from_bos(atlas, both):
    words = both["<s>"]
    chosen = small("mini-vlm-llava").to_dict()
    chosen["model"]["config"]["rules"]["fill_id"] = words.bos_token_id
    model = recipe.build_model(recipe.Recipe.from_dict(chosen), words)
    with pytest.raises(ConfigError, match="other than bos and eos"):
        VLMTask(model, {}, words, VLMSettings(max_length=8))


def test_rows_fit_the_context(atlas, words):
    task = task_of("mini-vlm-llava", atlas, words)
    room = task.model.config.decoder.context_length - task.row_template.prefix_length
    task_of("mini-vlm-llava", atlas, words, max_length=room)
    with pytest.raises(ConfigError, match=f"{task.row_template.prefix_length} of them for the image"):
        task_of("mini-vlm-llava", atlas, words, max_length=room + 1)


def test_invalid_arguments_raise(atlas, words):
    with pytest.raises(ConfigError, match="tokenizer"):
        VLMTask(recipe.build_model(small("mini-vlm-llava"), None), {}, None, VLMSettings())
    with pytest.raises(ConfigError, match="has an answer within"):
        task_of("mini-vlm-llava", atlas, words, num_questions=1, question_kinds=("reading",))
    for wrong in ({"weights": {"read": 1.0}}, {"z_loss": -1.0}, {"balancing_loss": -1.0}, {"max_length": 4}):
        with pytest.raises(ConfigError):
            VLMSettings(**wrong)
    plain = Tokenizer.train(["what is this? a dog"], 300)  # its only special token is eos
    with pytest.raises(ConfigError, match="is not a separate special token"):
        task_of("mini-vlm-llava", atlas, plain)
    with pytest.raises(ConfigError, match="special_tokens"):
        recipe.TokenizerConfig(checkpoint="stories15M", special_tokens=("<image>",))
