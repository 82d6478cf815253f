"""The task video-qa: its rows equal prompts of the chat pipeline, and turns are independent."""

from functools import cache

import pytest
import torch

from helpers import randomize
from vitrail import hub, recipe
from vitrail.cli.ask_command import ask_questions
from vitrail.data.clips.clip_questions import NUM_QUESTIONS, get_piece_table
from vitrail.data.clips.clip_source import ClipLayout, ClipSource, ClipSourceConfig
from vitrail.errors import ConfigError, DataError
from vitrail.models.video_inputs import Video
from vitrail.models.video_rows import answer_video_turns, embed_video_prefix, forward_video_turns
from vitrail.models.vlm import VLM
from vitrail.pipelines import ChatPipeline
from vitrail.processing.grid import Grid
from vitrail.processing.tokenizer import Tokenizer
from vitrail.recipe.sweep import load_sweep
from vitrail.stream.packing import pad_streams
from vitrail.tasks.video_qa_task import VideoQASettings, VideoQATask

SPECIALS = ["<|endoftext|>", "<image>", "<video>", "<|vision_start|>", "<|vision_end|>"]
SMALL = {
    "model.config.tower.layers": 1,
    "model.config.tower.block.width": 32,
    "model.config.tower.block.attention.heads": 2,
    "model.config.tower.block.mlp.intermediate_size": 32,
    "model.config.connector.in_features": 32,
    "model.config.connector.out_features": 64,
    "model.config.decoder.layers": 2,
    "model.config.decoder.block.width": 64,
    "model.config.decoder.block.attention.heads": 1,
    "model.config.decoder.block.mlp.intermediate_size": 64,
}
VARIANTS = [variant.name for variant in load_sweep("video-time").variants]


@cache
def make_tokenizer() -> Tokenizer:
    texts = get_piece_table().texts[1:]
    return Tokenizer.train(texts, 512, special_tokens=SPECIALS, eos=SPECIALS[0])


@pytest.fixture
def tokenizer() -> Tokenizer:
    return make_tokenizer()


def make_task(variant: str, tokenizer: Tokenizer, **settings) -> VideoQATask:
    sweep = load_sweep("video-time")
    overrides = next(one.overrides for one in sweep.variants if one.name == variant)
    chosen = recipe.load_recipe(
        sweep.recipe, {k: f'"{v}"' if isinstance(v, str) else v for k, v in (SMALL | overrides).items()}
    )
    torch.manual_seed(0)
    model = randomize(VLM(chosen.build_model_config())).eval()
    source = ClipSource(ClipSourceConfig(num_frames=(8,), fps=(2.0, 4.0), seed=5))
    return VideoQATask(model, {"clips": source}, tokenizer, VideoQASettings(**{"turn_length": 20} | settings))


@pytest.mark.parametrize("variant", VARIANTS)
def test_rows_equal_prompts_of_the_pipeline(variant, tokenizer, tmp_path):
    """Tokens and positions are those of a prompt; states and loss those of packed conversations."""
    task, layout = make_task(variant, tokenizer), ClipLayout(8, 4.0)
    hub.save(task.model, tmp_path, task.chat_tokenizer)
    pipeline = ChatPipeline.load(tmp_path, device="cpu")
    data = task.sources["clips"].render_indices(torch.arange(2), layout)
    turns = task.clip_tokenizer.encode(data.questions, 20)
    template = task.get_template(layout, 32, torch.device("cpu"))
    prefix = embed_video_prefix(task.model, template, data.frames)
    hidden = forward_video_turns(task.model, template, prefix, turns.ids.flatten(1)).unflatten(1, (NUM_QUESTIONS, 20))
    answers = answer_video_turns(task.model, template, data.frames, turns.ids, turns.question_lengths, 0, 4)
    texts = get_piece_table().to_texts(data.questions.question[1])
    for n, question in enumerate(texts):
        video = Video(data.frames[1].permute(0, 2, 3, 1).numpy(), timestamps=layout.timestamps)
        stream, images, videos = pipeline.build_prompt([pipeline.build_message(video, question)])
        length, P = int(turns.question_lengths[1, n]), template.prefix_length
        expected = [*template.ids.tolist(), *turns.ids[1, n, :length].tolist()]
        assert stream.ids.tolist() == expected
        places = torch.cat([torch.arange(P), P + 20 * n + torch.arange(length)])
        positions = template.positions[0, places]
        assert torch.equal(positions, stream.positions[:, 0] if positions.ndim == 1 else stream.positions)
        with torch.no_grad():
            states = task.model.forward_hidden(pad_streams([stream]), images, videos)[0, P:]
        torch.testing.assert_close(hidden[1, n, :length], states, rtol=1e-4, atol=1e-5)
        text = pipeline.ask(video, question, max_new_tokens=4)
        own = answers[1, n].tolist()
        assert tokenizer.decode(own[: own.index(0)] if 0 in own else own).strip() == text


def write_mp4(path, frames, fps: int, scale: int = 4) -> None:
    """Write frames (T, 3, H, W), enlarged, as H.264 with PyAV."""
    av = pytest.importorskip("av")
    with av.open(str(path), "w") as out:
        track = out.add_stream("libx264", rate=fps)
        track.width = track.height = frames.shape[-1] * scale
        track.pix_fmt, track.options = "yuv420p", {"crf": "10"}
        for frame in frames.repeat_interleave(scale, 2).repeat_interleave(scale, 3).permute(0, 2, 3, 1).numpy():
            out.mux(track.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        out.mux(track.encode())


def test_ask_about_an_mp4(tokenizer, tmp_path, capsys):
    """`vitrail ask clip.mp4 "What happens first?"` with a saved model reads the frames of the file."""
    task = make_task("seconds", tokenizer)
    hub.save(task.model, tmp_path / "model", task.chat_tokenizer)
    frames = task.sources["clips"].render_indices(torch.arange(1), ClipLayout(8, 2.0)).frames[0]
    write_mp4(tmp_path / "clip.mp4", frames, fps=2)
    ask_questions(
        str(tmp_path / "clip.mp4"), "What happens first?", model=str(tmp_path / "model"), device="cpu", max_new_tokens=4
    )
    printed = capsys.readouterr().out.strip()
    pipeline = ChatPipeline.load(tmp_path / "model", device="cpu")
    message = pipeline.build_message(str(tmp_path / "clip.mp4"), "What happens first?")
    prompt = pipeline.build_prompt([message])
    assert prompt.videos.layouts[0].t == 8 and "<3.5 seconds>" in tokenizer.decode(prompt.stream.ids.tolist())
    own = pipeline.build_prompt(
        [
            pipeline.build_message(
                Video(frames.permute(0, 2, 3, 1).numpy(), timestamps=[n / 2 for n in range(8)]), "What happens first?"
            )
        ]
    )
    assert torch.equal(prompt.stream.ids, own.stream.ids) and torch.equal(prompt.stream.positions, own.stream.positions)
    assert (prompt.videos.pixels - own.videos.pixels).abs().mean() < 0.05  # the loss of H.264
    assert printed == pipeline.chat([message], max_new_tokens=4)
    (tmp_path / "empty.mp4").write_bytes(b"")
    with pytest.raises(DataError, match=r"empty\.mp4"):
        ask_questions(str(tmp_path / "empty.mp4"), "What happens?", model=str(tmp_path / "model"), device="cpu")


def test_temporal_pooling_averages_adjacent_frames(tokenizer, tmp_path):
    """Tokens are means of those without pooling; prompts have one timestamp for each group of frames."""
    task = make_task("seconds", tokenizer)
    pooled = VLM(task.model.config.replace(temporal_pooling=4)).eval()
    pooled.load_state_dict(task.model.state_dict())
    frames = torch.rand(8, 3, 32, 32)
    with torch.no_grad():
        each = task.model.encode_images(task.model.prepare_videos([frames])).features[0]
        means = pooled.encode_images(pooled.prepare_videos([frames])).features[0]
    torch.testing.assert_close(means, each.view(2, 4, 4, -1).mean(1).flatten(0, 1))
    hub.save(pooled, tmp_path, task.chat_tokenizer)
    pipeline = ChatPipeline.load(tmp_path, device="cpu")
    video = Video(frames[:7].permute(0, 2, 3, 1).numpy(), timestamps=[n / 2 for n in range(7)])  # the last is repeated
    prompt = pipeline.build_prompt([pipeline.build_message(video, "What happens first?")])
    text = tokenizer.decode(prompt.stream.ids.tolist())
    assert text.count("<image>") == 8 and "<0.8 seconds>" in text and "<2.5 seconds>" in text
    pipeline.ask(video, "What happens first?", max_new_tokens=2)
    with pytest.raises(ConfigError, match="do not fill steps of 4 frames"):
        VideoQATask(pooled, {"clips": ClipSource(ClipSourceConfig(num_frames=(10,)))}, tokenizer, VideoQASettings())
    with pytest.raises(ConfigError, match="does not divide into groups of 4"):
        pooled.config.count_tokens(Grid(t=6, h=4, w=4, merge_size=2))


def test_settings_and_models_that_do_not_fit_are_refused(tokenizer):
    with pytest.raises(ConfigError, match="more than turn_length = 6"):
        make_task("seconds", tokenizer, turn_length=6)
    task = make_task("seconds", tokenizer)
    small = task.model.config.replace(decoder=task.model.config.decoder.replace(context_length=64))
    with pytest.raises(ConfigError, match="more than the decoder's context length of 64"):
        VideoQATask(VLM(small), task.sources, tokenizer, VideoQASettings(turn_length=20))
    plain = Tokenizer.train(["a"], 300, special_tokens=["<image>"], eos="<image>")
    unmarked = VLM(task.model.config.replace(vision_token_ids={"vision_start": 3, "vision_end": 4}))
    with pytest.raises(ConfigError, match="no video token"):
        VideoQATask(unmarked, task.sources, plain, VideoQASettings())


def test_costs_and_batches(tokenizer):
    """A batch has one layout, whose clips, tokens and FLOPs are counted; losses of clips add up."""
    task = make_task("seconds", tokenizer)
    batch = task.collate([task.sources["clips"][n] for n in (3, 8)])
    (key,) = batch
    assert key.split("/")[:2] == ["clips", "8"] and task.count_loss_terms(batch) == {"answers": 2}
    prepared = task.prepare_batch(batch)
    assert task.count_flops(prepared) == task.count_flops(batch) == 2 * task.count_flops({key: batch[key][:1]})
    assert task.count_step_flops(prepared) == 3 * task.count_flops(batch)
    template = task.get_template(ClipLayout(8, float(key.split("/")[2])), 32, torch.device("cpu"))
    turns = sum(int((row != 0).sum()) for row in prepared[f"{key}/ids"].flatten(0, 1))
    assert 2 * template.prefix_length < task.count_tokens(prepared) <= 2 * template.prefix_length + turns + 40
    assert task(batch)["answers"].item() == pytest.approx(task(prepared)["answers"].item())
