"""InternVL with videos: ids of its processor, logits and gradients of transformers' model, and frames of files.

Their video processor resizes by torchvision: here their image processor makes each frame a tile. Which frames it picks
is held against ours in tests/processing/test_footage.py.
"""

import json

import numpy as np
import pytest
import torch
import transformers as T
from PIL import Image
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

import vitrail
from helpers import randomize, relative
from hub.test_blip2_internvl import GATED, SIZE, TILES_TOWER, VALUES, gradients, on_disk, pictures, same_gradients
from pipelines.test_chat_video import FRAMES, RATE, write_clip
from vitrail import hub
from vitrail.cli import main
from vitrail.connectors.feature_reduction import CellPoolingConfig
from vitrail.data.video_file import open_video
from vitrail.errors import CheckpointError, ConfigError, TextError
from vitrail.pipelines import Video
from vitrail.pipelines.message_parts import parse_parts, to_template_part
from vitrail.processing.image_loading import NORMALIZATIONS
from vitrail.processing.tokenizer import Tokenizer
from vitrail.processing.video_sampling import VIDEO_PROCESSOR_FILE, VideoSamplingConfig
from vitrail.registry import FAMILIES
from vitrail.stream import pack_streams

SIDE, EACH = 12, 4  # pixels of a tile's side, and its tokens
SPECIALS = ["<|im_start|>", "<|im_end|>", "<img>", "</img>", "<IMG_CONTEXT>"]
SAID = ["user\nFrame1: what happens in the video?\nFrame2: assistant\na red ball rolls"]
NORM = {"image_mean": NORMALIZATIONS["imagenet"].mean, "image_std": NORMALIZATIONS["imagenet"].std}


class Frames:
    """Stand-in for the video processor, which needs torchvision."""

    def __init__(self, images: GotOcr2ImageProcessorPil):
        self.images = images

    def __call__(self, videos, **how):
        made = [self.images(one, crop_to_patches=False, return_tensors="pt")["pixel_values"] for one in videos]
        alike = len({len(one) for one in made}) == 1
        return {"pixel_values_videos": torch.stack(made) if alike else made}  # (B, T, C, H, W)


def save(folder, *, video: bool = True, **more):
    """Save a random transformers model. Its video token is not in the embedding, as in released models."""
    words = Tokenizer.train(SAID * 3, 320, special_tokens=SPECIALS, eos="<|im_end|>")
    text = T.Qwen2Config(**SIZE | GATED | {"vocab_size": words.vocab_size}, max_position_embeddings=600)
    vision = {**TILES_TOWER, "num_hidden_layers": 2, "image_size": [SIDE, SIDE]}
    ids = {"image_token_id": words.token_to_id("<IMG_CONTEXT>"), "eos_token_id": words.eos_token_id}
    config = T.InternVLConfig(vision_config=vision, text_config=text, tie_word_embeddings=False, **ids)
    reference = randomize(T.InternVLForConditionalGeneration(config).eval(), 1)
    reference.save_pretrained(folder)
    if video:
        words.add_special_tokens(["<video>"])
    words.save(folder)
    if more:
        (folder / VIDEO_PROCESSOR_FILE).write_text(json.dumps(more))
    return reference


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """Return the transformers model, the pipeline of its folder, and its processor."""
    folder = tmp_path_factory.mktemp("internvl")
    reference, chat_pipeline = save(folder), vitrail.load(folder, device="cpu")
    named = {"start_image_token": "<img>", "end_image_token": "</img>"}
    named |= {"context_image_token": "<IMG_CONTEXT>", "video_token": "<video>"}
    tokens = T.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), extra_special_tokens=named)
    images = GotOcr2ImageProcessorPil(size={"height": SIDE, "width": SIDE}, **NORM)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(T.ProcessorMixin, "check_argument_for_proper_class", lambda *given: None)
        processor = T.InternVLProcessor(images, tokens, Frames(images), image_seq_length=EACH)
    return reference, chat_pipeline, processor


@pytest.fixture(scope="module")
def clip(tmp_path_factory) -> str:
    return write_clip(tmp_path_factory.mktemp("clips") / "clip.mp4")


def movie(count: int, seed: int) -> list[Image.Image]:
    chance = np.random.default_rng(seed)
    return [Image.fromarray(chance.integers(0, 256, (31, 44, 3), dtype=np.uint8)) for _ in range(count)]


def video(frames) -> Video:
    return Video(frames, timestamps=[n / 2 for n in range(len(frames))])


def theirs(processor, chat_pipeline, turns, images, videos) -> tuple[list[int], torch.Tensor]:
    """Return ids and pixels (V, C, H, W) of transformers, videos before images."""
    output = [{**one, "content": [to_template_part(part) for part in parse_parts(one, "a turn")]} for one in turns]
    given = {
        "text": chat_pipeline.chat_template.render(output, add_generation_prompt=True),
        "images": images or None,
        "videos": videos,
    }
    if len({len(one) for one in videos}) == 1:
        made = processor(**given, return_tensors="pt")
        return made["input_ids"][0].tolist(), made["pixel_values"]
    made = T.ProcessorMixin.__call__(processor, **given)  # InternVL's own call takes videos of one length alone
    assert not images
    return made["input_ids"][0], torch.cat(made["pixel_values_videos"])


SHOWN = {
    "one video": ([], [5]),
    "one frame": ([], [1]),
    "a video and a picture": ([(40, 90)], [3]),
    "two videos of unequal length": ([], [2, 11]),
    "two videos and two pictures": ([(33, 31), (20, 64)], [2, 2]),
}


@pytest.mark.parametrize("case", SHOWN)
def test_matches_transformers(case, both):
    """Compare ids, pixels, logits and gradients."""
    reference, chat_pipeline, processor = both
    sizes, counts = SHOWN[case]
    images, videos = pictures(*sizes), [movie(count, n) for n, count in enumerate(counts)]
    turns = [chat_pipeline.build_message([*map(video, videos), *images], "what happens in the video?")]
    ids, pixels = theirs(processor, chat_pipeline, turns, images, videos)
    stream, stills, films = chat_pipeline.build_prompt(turns)
    assert stream.ids.tolist() == ids and (stream.kinds == 2).sum() == EACH * sum(counts)
    assert [len(shape.views) for shape in films.layouts] == counts
    assert torch.equal(torch.cat([films.pixels, *([] if stills is None else [stills.pixels])]), pixels)

    logits = chat_pipeline.model(pack_streams([stream], len(stream)), stills, films)[0]
    expected = reference(input_ids=torch.tensor([ids]), pixel_values=pixels).logits[0]
    assert relative(logits, expected) <= VALUES
    weights = [torch.randn_like(expected)]
    mine = gradients([logits], weights, chat_pipeline.model)
    same_gradients(reference, chat_pipeline.model, mine, on_disk(reference, gradients([expected], weights, reference)))


@pytest.mark.parametrize(
    "question", ["what happens?", "Look: <video> and then?", "as in <IMG_CONTEXT> or\n<video>\nand <video>?"]
)
def test_text_around_a_video(question, both):
    """Text before a video placeholder is tokenized together with the frame number."""
    _, chat_pipeline, processor = both
    images = pictures(*[(20, 20)] * question.count("<IMG_CONTEXT>"))
    videos = [movie(2, n) for n in range(max(1, question.count("<video>")))]
    turns = [
        chat_pipeline.build_message([*images, *map(video, videos)], question),
        {"role": "assistant", "content": "a ball"},
        chat_pipeline.build_message([], "and then?"),
    ]
    assert (
        chat_pipeline.build_prompt(turns).stream.ids.tolist()
        == theirs(processor, chat_pipeline, turns, images, videos)[0]
    )


def test_video_file_equals_its_frames(both, clip):
    reference, chat_pipeline, processor = both
    frames, seconds = open_video(clip).sample_frames(fps=RATE)
    assert len(frames) == FRAMES and chat_pipeline.model.config.resolved_video_sampling == VideoSamplingConfig.default(
        "internvl", SIDE
    )
    chosen = [1, 3, 6, 9, 11, 14, 17, 19]  # the middles of eight parts of 21
    stills = [Image.fromarray(frames[n]) for n in chosen]
    turn = chat_pipeline.build_message(clip, "what happens?")
    stream, _, films = chat_pipeline.build_prompt([turn])
    kept = chat_pipeline.build_prompt(
        [chat_pipeline.build_message(Video(stills, timestamps=seconds[chosen]), "what happens?")]
    )
    assert torch.equal(films.pixels, kept.videos.pixels) and torch.equal(stream.ids, kept.stream.ids)
    assert "\nFrame8: <img>" in chat_pipeline.tokenizer.decode(stream.ids.tolist())
    ids, pixels = theirs(processor, chat_pipeline, [turn], [], [stills])
    given = torch.tensor([ids])
    made = reference.generate(
        input_ids=given,
        attention_mask=torch.ones_like(given),
        pixel_values=pixels,
        max_new_tokens=12,
        do_sample=False,
        pad_token_id=0,
    )[0, len(ids) :]
    output = chat_pipeline.tokenizer.decode(made.tolist(), skip_special_tokens=True).strip()
    assert chat_pipeline.ask(clip, "what happens?", max_new_tokens=12) == output
    assert chat_pipeline.ask([clip], "what happens?", max_new_tokens=12) != chat_pipeline.ask(
        [], "what happens?", max_new_tokens=12
    )
    for how, count in (({"num_frames": 3}, 3), ({"fps": 4.0}, 10), ({"fps": 0.1}, 1)):
        assert (
            len(chat_pipeline.build_prompt([chat_pipeline.build_message(clip, "what?", **how)]).videos.pixels) == count
        )


def test_command_line(clip, tmp_path, capsys, monkeypatch):
    save(tmp_path, num_frames=3)
    chat_pipeline = vitrail.load(tmp_path, device="cpu")
    given = [clip, "what happens?", "--model", str(tmp_path), "--device", "cpu", "--max-new-tokens", "5"]
    monkeypatch.setattr("sys.argv", ["vitrail", "ask", *given])
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code
    assert capsys.readouterr().out == chat_pipeline.ask(clip, "what happens?", num_frames=3, max_new_tokens=5) + "\n"


def test_video_processor_files_round_trip(tmp_path):
    save(tmp_path / "theirs", num_frames=5, size={"height": SIDE, "width": SIDE}, fps=None, initial_shift=True)
    model, words = hub.load(tmp_path / "theirs"), hub.load_tokenizer(tmp_path / "theirs")
    assert model.config.video_sampling == VideoSamplingConfig.default("internvl", SIDE).replace(num_frames=5)
    hub.save(model, tmp_path / "ours", words)
    hub.to_hf(hub.load(tmp_path / "ours"), tmp_path / "again", tokenizer=words)
    for name in ("ours", "again"):
        assert hub.load(tmp_path / name).config.video_sampling == model.config.video_sampling
    assert FAMILIES["internvl"].supports(model.config)
    result = json.loads((tmp_path / "again" / VIDEO_PROCESSOR_FILE).read_text())
    assert result["video_processor_type"] == "InternVLVideoProcessor" and result["size"] == {
        "height": SIDE,
        "width": SIDE,
    }
    assert (result["num_frames"], result["do_sample_frames"]) == (5, True) and "crop_to_patches" not in result
    assert result["image_mean"] == list(NORM["image_mean"])
    for wrong, message in (
        ({"size": {"height": 24, "width": 24}}, "frames of 24 pixels, but the policy has tiles of 12"),
        ({"size": {"height": 24, "width": 12}}, "is not square"),
        ({"initial_shift": 1}, "initial_shift is 1"),
        ({"num_frames": 0}, "frames is 0"),
        ({"num_frames": "all"}, "frames is 'all'"),
    ):
        (tmp_path / "again" / VIDEO_PROCESSOR_FILE).write_text(json.dumps(wrong))
        with pytest.raises((ConfigError, CheckpointError), match=message) as caught:
            hub.load(tmp_path / "again")
        assert VIDEO_PROCESSOR_FILE in caught.value.problem


def test_invalid_inputs_raise(both, clip, tmp_path):
    _, chat_pipeline, _ = both
    with pytest.raises(ConfigError, match=r"clip\.mp4: num_frames is 22, and the video has 21 frames"):
        chat_pipeline.ask(clip, "what?", num_frames=22)
    with pytest.raises(ConfigError, match=f"{EACH * 8 * 18} of them for images and videos"):
        chat_pipeline.ask([clip] * 18, "what?")
    with pytest.raises(TextError, match=r"1 placeholders .* the media are: image"):
        chat_pipeline.ask(pictures((9, 9)), "what is <video>?")
    with pytest.raises(ConfigError, match=r"video_sampling\.rule is 'qwen2-vl', but this model needs 'internvl'"):
        chat_pipeline.model.config.replace(video_sampling=VideoSamplingConfig.default("qwen2-vl", 28))
    save(tmp_path, video=False)
    with pytest.raises(ConfigError, match="this internvl takes videos, but its tokenizer has no video token") as caught:
        vitrail.load(tmp_path, device="cpu").ask(clip, "what?")
    assert "<video>" in caught.value.remedy


def test_reduced_frame_tokens(both, clip):
    chat_pipeline = both[1].with_reduction(CellPoolingConfig(keep=4))  # 2 × 2 features, which become one
    stream, _, videos = chat_pipeline.build_prompt([chat_pipeline.build_message(clip, "what happens?")])
    assert (stream.kinds == 2).sum() == len(videos.pixels) == 8
    assert isinstance(chat_pipeline.ask(clip, "what happens?", max_new_tokens=3), str)


def test_voco_tokens_do_not_replace_videos(both):
    config = both[1].model.config
    assert config.replace(voco_tokens=2).resolved_video_sampling is None
    with pytest.raises(ConfigError, match="does not support videos"):
        config.replace(voco_tokens=2, video_sampling=config.resolved_video_sampling)
