"""Videos in questions for Qwen2-VL, 2.5 and 3: sampled frames, prompts and answers match transformers.

The video processors of transformers need torchvision; they are compared in the tests of `processing.video_sampling`.
"""

import json
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers as T
from PIL import Image

import vitrail
from helpers import randomize
from vitrail import hub
from vitrail.cli import main
from vitrail.data.video_file import open_video
from vitrail.errors import CheckpointError, ConfigError, DataError, TextError
from vitrail.pipelines import ChatPipeline, Video
from vitrail.processing.tokenizer import Tokenizer

av = pytest.importorskip("av")

RATE, FRAMES, H, W = 8, 21, 40, 56  # of the clip
BUDGET = {"qwen2": {"shortest_edge": 256, "longest_edge": 1500}, "qwen3": {"shortest_edge": 256, "longest_edge": 9000}}
SAID = ["user: what happens in the video? assistant: a red ball rolls <0.1 seconds>, then:<12.5 seconds>"]
MARKS = ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
KINDS = {
    "qwen2_vl": (T.Qwen2VLConfig, T.Qwen2VLForConditionalGeneration),
    "qwen2_5_vl": (T.Qwen2_5_VLConfig, T.Qwen2_5_VLForConditionalGeneration),
    "qwen3_vl": (T.Qwen3VLConfig, T.Qwen3VLForConditionalGeneration),
    "qwen3_vl_moe": (T.Qwen3VLMoeConfig, T.Qwen3VLMoeForConditionalGeneration),
}
VISION = {"depth": 2, "num_heads": 2, "patch_size": 4, "temporal_patch_size": 2, "spatial_merge_size": 2}
MORE = {
    "qwen2_vl": {"embed_dim": 16, "mlp_ratio": 2, "hidden_size": 32},
    "qwen2_5_vl": {"hidden_size": 16, "window_size": 16, "fullatt_block_indexes": [1], "out_hidden_size": 32},
    "qwen3_vl": {"hidden_size": 16, "out_hidden_size": 32, "num_position_embeddings": 16},
}
MORE["qwen2_5_vl"] |= {"intermediate_size": 20, "tokens_per_second": 2}
MORE["qwen3_vl"] |= {"intermediate_size": 20, "deepstack_visual_indexes": [0]}
MORE["qwen3_vl_moe"] = MORE["qwen3_vl"]
TEXT = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}


def write_clip(path, count: int = FRAMES) -> str:
    """Write a clip of a moving bright square."""
    with av.open(str(path), "w") as file:
        stream = file.add_stream("libx264", rate=Fraction(RATE), options={"crf": "10"})
        stream.width, stream.height, stream.pix_fmt = W, H, "yuv420p"
        for n in range(count):
            pixels = np.full((H, W, 3), 5 * n, np.uint8)
            pixels[10:20, 2 * n : 2 * n + 12] = 240 - 9 * n
            file.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        file.mux(stream.encode())
    return str(path)


def save(folder, family: str):
    words = Tokenizer.train(SAID * 3, 330, special_tokens=MARKS, eos="<|im_end|>")
    config, model = KINDS[family]
    ids = {f"{mark[2:-2].removesuffix('_pad')}_token_id": words.token_to_id(mark) for mark in MARKS[2:]}
    text = TEXT | {"vocab_size": words.vocab_size} | ({"head_dim": 8} if family.startswith("qwen3") else {})
    text |= EXPERTS if family == "qwen3_vl_moe" else {}
    made = config(text_config=text, vision_config=VISION | MORE[family], eos_token_id=words.eos_token_id, **ids)
    made._experts_implementation = "eager"
    reference = randomize(model(made), 4, 0.3).eval()
    reference.save_pretrained(folder)
    words.save(folder)
    output = {"size": BUDGET[family[:5]], "fps": 4, "min_frames": 4, "max_frames": 768}
    (folder / "video_preprocessor_config.json").write_text(json.dumps(output))
    return reference


@pytest.fixture(scope="module")
def clip(tmp_path_factory) -> str:
    return write_clip(tmp_path_factory.mktemp("clips") / "clip.mp4")


@pytest.fixture(scope="module")
def picture(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("pictures") / "a.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (24, 32, 3), dtype=np.uint8)).save(path)
    return str(path)


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """family → transformers model, and a pipeline of its folder with the position rule of transformers."""
    made = {}

    def make(family: str) -> tuple[T.PreTrainedModel, ChatPipeline]:
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            reference, chat_pipeline = save(folder, family), vitrail.load(folder, device="cpu")
            config = chat_pipeline.model.config
            if not family.startswith("qwen3"):
                rules = config.rules.replace(positions=f"{config.rules.positions}/transformers")
                chat_pipeline.model.config = config.replace(rules=rules)
            made[family] = reference, chat_pipeline
        return made[family]

    return make


def written(reference, chat_pipeline: ChatPipeline, prompt, count: int, seconds: float) -> str:
    """Generate with transformers from a native prompt."""
    stream, pictures, videos = prompt
    ids = stream.ids.clone()
    ids[stream.kinds == 2] = chat_pipeline.vision_token_ids["video"]
    given = {"pixel_values_videos": videos.pixels, "video_grid_thw": grids(videos)}
    if pictures is not None:
        given |= {"pixel_values": pictures.pixels, "image_grid_thw": grids(pictures)}
    if "qwen2.5" in chat_pipeline.model.config.rules.positions:
        given["second_per_grid_ts"] = [seconds] * len(videos.layouts)
    made = reference.generate(
        input_ids=ids[None],
        attention_mask=torch.ones_like(ids)[None],
        mm_token_type_ids=stream.kinds[None],
        max_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
        **given,
    )[0, len(ids) :]
    return chat_pipeline.tokenizer.decode(made.tolist(), skip_special_tokens=True)


def grids(shown) -> torch.Tensor:
    return torch.tensor([[grid.t, grid.h, grid.w] for grid in shown.layouts])


@pytest.mark.parametrize("family", KINDS)
def test_answer_matches_transformers(both, clip, picture, family):
    reference, chat_pipeline = both(family)
    for shown, frames in (([clip], None), ([picture, clip, clip], 6)):
        turn = chat_pipeline.build_message(shown, "what happens in the video?", num_frames=frames)
        prompt = chat_pipeline.build_prompt([turn])
        assert [grid.t for grid in prompt.videos.layouts] == [5 if frames is None else 3] * shown.count(clip)
        seconds = 2 * (FRAMES / RATE) / (frames or 10)
        output = written(reference, chat_pipeline, prompt, 12, seconds)
        assert chat_pipeline.chat([turn], max_new_tokens=12) == output.strip()
        assert (
            chat_pipeline.ask(shown, "what happens in the video?", num_frames=frames, max_new_tokens=12)
            == output.strip()
        )
    assert chat_pipeline.ask(clip, "what happens?", max_new_tokens=12) != chat_pipeline.ask(
        [], "what happens?", max_new_tokens=12
    )


@pytest.mark.parametrize(
    "question", ["what happens?", "Look:<|video_pad|> and then?", "as of <|video_pad|>, what <|im_end|>?"]
)
def test_qwen3_prompt_matches_processor(both, clip, question):
    """Only the part of its processor that writes timestamps works without torchvision."""
    _, chat_pipeline = both("qwen3_vl")
    turn = chat_pipeline.build_message(clip, question, num_frames=7)
    stream, _, videos = chat_pipeline.build_prompt([turn])
    chosen = np.linspace(0, FRAMES - 1, 7).round().astype(int)
    marks = {"video_token": MARKS[5], "vision_start_token": MARKS[2], "vision_end_token": MARKS[3]}
    theirs = SimpleNamespace(
        **marks,
        video_processor=SimpleNamespace(merge_size=2, temporal_patch_size=2),
        _calculate_timestamps=lambda *how: T.Qwen3VLProcessor._calculate_timestamps(None, *how),
    )
    seen = {
        "video_grid_thw": grids(videos),
        "video_metadata": [SimpleNamespace(fps=RATE, frames_indices=chosen)],
    }
    assert ":<" in chat_pipeline.tokenizer.decode(
        [chat_pipeline.tokenizer.token_to_id(":<")]
    )  # start of a timestamp after a colon
    written = T.Qwen3VLProcessor.replace_video_token(theirs, seen, 0)
    assert written.count("seconds>") == 4
    output = chat_pipeline.chat_template.render(
        [{**turn, "content": [{k: v for k, v in part.items() if k in ("type", "text")} for part in turn["content"]]}],
        add_generation_prompt=True,
    )
    text = output.replace(MARKS[2] + MARKS[5] + MARKS[3], written)
    spelled = text.find("<|im_end|>?")
    wanted = chat_pipeline.tokenizer.encode(text, literal=[] if spelled < 0 else [(spelled, spelled + 1)])
    ids = torch.where(stream.kinds == 2, chat_pipeline.vision_token_ids["video"], stream.ids)
    assert ids.tolist() == wanted


@pytest.mark.parametrize("family", KINDS)
def test_video_file_equals_its_frames(both, clip, family):
    _, chat_pipeline = both(family)
    video = open_video(clip)
    frames, seconds = video.sample_frames(fps=RATE)
    assert len(frames) == FRAMES
    chosen = chat_pipeline.model.config.resolved_video_sampling.sample_frame_indices(FRAMES, video.duration, 2)
    kept = Video([Image.fromarray(frames[n]) for n in chosen], timestamps=seconds[chosen])
    for shown in (Video(clip), Video(Path(clip).read_bytes()), Video(frames, timestamps=seconds, fps=4.0), kept):
        stream, _, videos = chat_pipeline.build_prompt([chat_pipeline.build_message(shown, "what happens?")])
        first = chat_pipeline.build_prompt([chat_pipeline.build_message(clip, "what happens?")])
        torch.testing.assert_close(videos.pixels, first.videos.pixels, atol=0, rtol=0)
        if shown is not kept:  # spaced by whole frames of the file on average
            assert torch.equal(stream.positions, first.stream.positions)
    every = chat_pipeline.build_prompt(
        [chat_pipeline.build_message(Video(frames, timestamps=seconds), "what?")]
    ).videos.layouts[0]
    assert every.t == -(-FRAMES // 2)  # all frames in memory are used, the last one twice


def test_patch_times_match_transformers(both, clip):
    from transformers.video_utils import VideoMetadata

    from vitrail.models.video_inputs import read_video_frames

    _, chat_pipeline = both("qwen2_5_vl")
    seen = read_video_frames(Video(clip, num_frames=6), chat_pipeline.model.config)
    chosen = chat_pipeline.model.config.resolved_video_sampling.sample_frame_indices(
        FRAMES, FRAMES / RATE, 2, num_frames=6
    )
    about = VideoMetadata(total_num_frames=FRAMES, fps=RATE, frames_indices=chosen)
    assert seen.seconds_per_patch == pytest.approx(2 / about.sampled_fps)
    part = chat_pipeline.build_prompt([chat_pipeline.build_message(Video(clip, num_frames=6), "what?")]).stream
    times = part.positions[part.kinds == 2][:, 0].unique().tolist()
    assert [time - times[0] for time in times] == [int(k * seen.seconds_per_patch * 2) for k in range(3)]


def test_conversation_with_videos(both, clip, picture):
    _, chat_pipeline = both("qwen3_vl")
    asked = {
        "role": "user",
        "content": [{"type": "video", "video": clip, "fps": 1.0}, {"type": "text", "text": "what?"}],
    }
    assert chat_pipeline.chat([asked], max_new_tokens=6) == chat_pipeline.ask(clip, "what?", fps=1.0, max_new_tokens=6)
    turns = [
        asked,
        {"role": "assistant", "content": "a ball"},
        chat_pipeline.build_message([picture, Video(clip, num_frames=2)], "and here?"),
    ]
    _, pictures, videos = chat_pipeline.build_prompt(turns)
    assert (len(pictures.layouts), [grid.t for grid in videos.layouts]) == (1, [2, 1])
    assert isinstance("".join(chat_pipeline.stream_chat(turns, max_new_tokens=3)), str)


def test_pixel_budgets_round_trip(both, clip, tmp_path):
    _, chat_pipeline = both("qwen2_vl")
    video_frames = chat_pipeline.model.config.video_sampling
    assert (video_frames.fps, video_frames.max_pixels) == (4.0, 1500)
    config = chat_pipeline.model.config
    chat_pipeline.model.config = config.replace(rules=config.rules.replace(positions="qwen2-vl"))
    try:
        hub.save(chat_pipeline.model, tmp_path / "ours", chat_pipeline.tokenizer)
        hub.to_hf(chat_pipeline.model, tmp_path / "theirs", tokenizer=chat_pipeline.tokenizer)
    finally:
        chat_pipeline.model.config = config
    for name in ("ours", "theirs"):
        again = vitrail.load(tmp_path / name, device="cpu")
        assert again.model.config.video_sampling == video_frames
    (tmp_path / "theirs" / "video_preprocessor_config.json").write_text('{"fps": -1}')
    with pytest.raises(ConfigError, match=r"VideoSamplingConfig.fps is -"):
        hub.load(tmp_path / "theirs")
    (tmp_path / "theirs" / "video_preprocessor_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"video_preprocessor_config\.json is not a JSON object"):
        hub.load(tmp_path / "theirs")


def test_invalid_inputs_raise(both, clip, picture, tmp_path):
    _, chat_pipeline = both("qwen2_vl")
    whole = Path(clip).read_bytes()
    for name, held in (("empty", b""), ("noise", b"no video" * 99), ("cut", whole[: len(whole) // 2])):
        (tmp_path / f"{name}.mp4").write_bytes(held)
        with pytest.raises(DataError, match=f"{name}.mp4"):
            chat_pipeline.ask(tmp_path / f"{name}.mp4", "what happens?")
    with pytest.raises(DataError, match=r"none\.mp4 is no file"):
        chat_pipeline.ask("none.mp4", "what happens?")
    with pytest.raises(ConfigError, match="frames is given without a video"):
        chat_pipeline.ask(picture, "what?", num_frames=3)
    with pytest.raises(ConfigError, match="give only one of the two"):
        chat_pipeline.ask(clip, "what?", num_frames=3, fps=1.0)
    with pytest.raises(ConfigError, match=r"clip\.mp4: num_frames is 22, and the video has 21 frames"):
        chat_pipeline.ask(clip, "what?", num_frames=22)
    with pytest.raises(TextError, match=r"1 placeholders .* the media are: image"):
        chat_pipeline.ask(picture, "what is <|video_pad|>?")
    with pytest.raises(TextError, match="video part with 'max_pixels'"):
        chat_pipeline.chat([{"role": "user", "content": [{"type": "video", "video": clip, "max_pixels": 5}]}])
    still = np.zeros((9, 9, 3), np.uint8)
    for frames, seconds in (([], []), ([still], None), ([still] * 2, [0.0]), ([still] * 2, [1.0, 1.0])):
        with pytest.raises(ConfigError):
            Video(frames, timestamps=seconds)
    with pytest.raises(DataError, match="one size"):
        chat_pipeline.ask(Video([still, np.zeros((9, 8, 3), np.uint8)], timestamps=[0, 1]), "what?")
    with pytest.raises(ConfigError, match="for images and videos, and 1 more exceed the context length 2,048"):
        chat_pipeline.ask([clip] * 40, "what?")


def test_error_names_video_models(clip, tmp_path):
    from pipelines.test_chat import save as save_llava

    save_llava(tmp_path)
    with pytest.raises(ConfigError, match="this llava takes images and no videos") as caught:
        vitrail.load(tmp_path, device="cpu").ask(clip, "what happens?")
    assert all(name in caught.value.remedy for name in ("qwen2_vl, qwen2_5_vl, qwen3_vl", "internvl"))


def test_command_line(clip, picture, tmp_path, capsys, monkeypatch):
    def run(*given) -> int:
        given = [
            "vitrail",
            "ask",
            *map(str, given),
            "--model",
            str(tmp_path),
            "--device",
            "cpu",
            "--max-new-tokens",
            "5",
        ]
        monkeypatch.setattr("sys.argv", given)
        try:
            main()
        except SystemExit as end:
            return int(end.code or 0)
        return 0

    save(tmp_path, "qwen3_vl")
    chat_pipeline = vitrail.load(tmp_path, device="cpu")
    capsys.readouterr()
    for options in ({"num_frames": 3}, {"fps": 1.0}, {}):
        assert not run(clip, "what happens?", *(word for key, value in options.items() for word in (f"--{key}", value)))
        assert capsys.readouterr().out == chat_pipeline.ask(clip, "what happens?", max_new_tokens=5, **options) + "\n"
    assert not run(clip, "what happens?", picture, "and here?", "--fps", 1)
    capsys.readouterr()
    for wrong, message in (
        ([clip, "what?", "--num-frames", 3, "--fps", 1], "exclude each other"),
        ([picture, "what?", "--fps", 1], "none is given"),
        ([picture, "none.mp4", "what?"], "none.mp4"),
        ([clip, "what?", "--num-frames", 0], "num_frames is 0"),
    ):
        assert run(*wrong) == 2
        error = capsys.readouterr().err
        assert message in error and "Traceback" not in error
