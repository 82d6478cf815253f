"""The task video-qa: its rows equal prompts of the chat pipeline, and turns are independent."""

from functools import cache

import pytest
import torch

from helpers import randomize
from vitrail import hub, recipe
from vitrail.data.clips.clip_questions import NUM_QUESTIONS, get_piece_table
from vitrail.data.clips.clip_source import ClipLayout, ClipSource, ClipSourceConfig
from vitrail.models.video_inputs import Video
from vitrail.models.video_rows import answer_video_turns, embed_video_prefix, forward_video_turns
from vitrail.models.vlm import VLM
from vitrail.pipelines import ChatPipeline
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
    return VideoQATask(model, {"clips": source}, tokenizer, VideoQASettings(turn_length=20, **settings))


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
