"""Videos in questions: what Qwen2-VL, 2.5 and 3 read of a file, in which words, and that they answer as transformers'.

Their video processors need torchvision; what they compute is held against ours in tests/processing/test_footage.py.
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
from vitrail.data.video import open_video
from vitrail.errors import CheckpointError, ConfigError, DataError, TextError
from vitrail.processing.text import Tokenizer
from vitrail.talker import Talker, Video

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
    """A bright square that moves."""
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
    words = Tokenizer.train(SAID * 3, 330, specials=MARKS, eos="<|im_end|>")
    config, model = KINDS[family]
    ids = {f"{mark[2:-2].removesuffix('_pad')}_token_id": words.id(mark) for mark in MARKS[2:]}
    text = TEXT | {"vocab_size": words.size} | ({"head_dim": 8} if family.startswith("qwen3") else {})
    text |= EXPERTS if family == "qwen3_vl_moe" else {}
    made = config(text_config=text, vision_config=VISION | MORE[family], eos_token_id=words.eos, **ids)
    made._experts_implementation = "eager"
    reference = randomize(model(made), 4, 0.3).eval()
    reference.save_pretrained(folder)
    words.save(folder)
    said = {"size": BUDGET[family[:5]], "fps": 4, "min_frames": 4, "max_frames": 768}
    (folder / "video_preprocessor_config.json").write_text(json.dumps(said))
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
    """family → transformers' model, and a talker of its folder, which places what follows a video as theirs does."""
    made = {}

    def make(family: str) -> tuple[T.PreTrainedModel, Talker]:
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            reference, talker = save(folder, family), vitrail.load(folder, device="cpu")
            config = talker.model.config
            if not family.startswith("qwen3"):
                rules = config.rules.with_(positions=f"{config.rules.positions}/transformers")
                talker.model.config = config.with_(rules=rules)
            made[family] = reference, talker
        return made[family]

    return make


def written(reference, talker: Talker, prompt, count: int, seconds: float) -> str:
    """What transformers says to what we prepared."""
    stream, pictures, videos = prompt
    ids = stream.ids.clone()
    ids[stream.kinds == 2] = talker.marks["video"]
    given = {"pixel_values_videos": videos.pixels, "video_grid_thw": grids(videos)}
    if pictures is not None:
        given |= {"pixel_values": pictures.pixels, "image_grid_thw": grids(pictures)}
    if "qwen2.5" in talker.model.config.rules.positions:
        given["second_per_grid_ts"] = [seconds] * len(videos.shapes)
    made = reference.generate(
        input_ids=ids[None],
        attention_mask=torch.ones_like(ids)[None],
        mm_token_type_ids=stream.kinds[None],
        max_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
        **given,
    )[0, len(ids) :]
    return talker.words.decode(made.tolist(), skip_specials=True)


def grids(shown) -> torch.Tensor:
    return torch.tensor([[grid.t, grid.h, grid.w] for grid in shown.shapes])


@pytest.mark.parametrize("family", KINDS)
def test_an_answer_is_what_transformers_writes(both, clip, picture, family):
    reference, talker = both(family)
    for shown, frames in (([clip], None), ([picture, clip, clip], 6)):
        turn = talker.turn(shown, "what happens in the video?", frames=frames)
        prompt = talker.prompt([turn])
        assert [grid.t for grid in prompt.videos.shapes] == [5 if frames is None else 3] * shown.count(clip)
        seconds = 2 * (FRAMES / RATE) / (frames or 10)
        said = written(reference, talker, prompt, 12, seconds)
        assert talker.chat([turn], max_new=12) == said.strip()
        assert talker.ask(shown, "what happens in the video?", frames=frames, max_new=12) == said.strip()
    assert talker.ask(clip, "what happens?", max_new=12) != talker.ask([], "what happens?", max_new=12)


@pytest.mark.parametrize(
    "question", ["what happens?", "Look:<|video_pad|> and then?", "as of <|video_pad|>, what <|im_end|>?"]
)
def test_the_words_of_qwen3_are_those_of_its_processor(both, clip, question):
    """Its processor needs torchvision as a whole, but not to write the time before every temporal patch."""
    _, talker = both("qwen3_vl")
    turn = talker.turn(clip, question, frames=7)
    stream, _, videos = talker.prompt([turn])
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
    assert ":<" in talker.words.decode([talker.words.id(":<")])  # which a time behind a colon begins with
    written = T.Qwen3VLProcessor.replace_video_token(theirs, seen, 0)
    assert written.count("seconds>") == 4
    said = talker.template.render(
        [{**turn, "content": [{k: v for k, v in part.items() if k in ("type", "text")} for part in turn["content"]]}],
        generate=True,
    )
    text = said.replace(MARKS[2] + MARKS[5] + MARKS[3], written)
    spelled = text.find("<|im_end|>?")
    wanted = talker.words.encode(text, literal=[] if spelled < 0 else [(spelled, spelled + 1)])
    ids = torch.where(stream.kinds == 2, talker.marks["video"], stream.ids)
    assert ids.tolist() == wanted


@pytest.mark.parametrize("family", KINDS)
def test_a_file_is_its_frames(both, clip, family):
    _, talker = both(family)
    film = open_video(clip)
    frames, seconds = film.sample(fps=RATE)
    assert len(frames) == FRAMES
    chosen = talker.model.config.films.pick(FRAMES, film.duration, 2)
    kept = Video([Image.fromarray(frames[n]) for n in chosen], seconds=seconds[chosen])
    for shown in (Video(clip), Video(Path(clip).read_bytes()), Video(frames, seconds=seconds, fps=4.0), kept):
        stream, _, videos = talker.prompt([talker.turn(shown, "what happens?")])
        first = talker.prompt([talker.turn(clip, "what happens?")])
        torch.testing.assert_close(videos.pixels, first.videos.pixels, atol=0, rtol=0)
        if shown is not kept:  # whose frames lie apart by whole frames of the file, on average
            assert torch.equal(stream.positions, first.stream.positions)
    every = talker.prompt([talker.turn(Video(frames, seconds=seconds), "what?")]).videos.shapes[0]
    assert every.t == -(-FRAMES // 2)  # of frames in memory all are read, the last one twice


def test_times_of_a_patch_are_those_of_transformers(both, clip):
    from transformers.video_utils import VideoMetadata

    from vitrail.models.videos import watch

    _, talker = both("qwen2_5_vl")
    seen = watch(Video(clip, frames=6), talker.model.config)
    chosen = talker.model.config.films.pick(FRAMES, FRAMES / RATE, 2, frames=6)
    about = VideoMetadata(total_num_frames=FRAMES, fps=RATE, frames_indices=chosen)
    assert seen.seconds == pytest.approx(2 / about.sampled_fps)
    part = talker.prompt([talker.turn(Video(clip, frames=6), "what?")]).stream
    times = part.positions[part.kinds == 2][:, 0].unique().tolist()
    assert [time - times[0] for time in times] == [int(k * seen.seconds * 2) for k in range(3)]


def test_a_conversation_with_videos(both, clip, picture):
    _, talker = both("qwen3_vl")
    asked = {
        "role": "user",
        "content": [{"type": "video", "video": clip, "fps": 1.0}, {"type": "text", "text": "what?"}],
    }
    assert talker.chat([asked], max_new=6) == talker.ask(clip, "what?", fps=1.0, max_new=6)
    turns = [
        asked,
        {"role": "assistant", "content": "a ball"},
        talker.turn([picture, Video(clip, frames=2)], "and here?"),
    ]
    _, pictures, videos = talker.prompt(turns)
    assert (len(pictures.shapes), [grid.t for grid in videos.shapes]) == (1, [2, 1])
    assert isinstance("".join(talker.stream(turns, max_new=3)), str)


def test_budgets_go_from_folder_to_folder(both, clip, tmp_path):
    _, talker = both("qwen2_vl")
    footage = talker.model.config.footage
    assert (footage.fps, footage.max_pixels) == (4.0, 1500)
    config = talker.model.config
    talker.model.config = config.with_(rules=config.rules.with_(positions="qwen2-vl"))
    try:
        hub.save(talker.model, tmp_path / "ours", talker.words)
        hub.to_hf(talker.model, tmp_path / "theirs", tokenizer=talker.words)
    finally:
        talker.model.config = config
    for name in ("ours", "theirs"):
        again = vitrail.load(tmp_path / name, device="cpu")
        assert again.model.config.footage == footage
    (tmp_path / "theirs" / "video_preprocessor_config.json").write_text('{"fps": -1}')
    with pytest.raises(ConfigError, match=r"video_preprocessor_config\.json: Footage.fps is -1"):
        hub.load(tmp_path / "theirs")
    (tmp_path / "theirs" / "video_preprocessor_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"video_preprocessor_config\.json holds no JSON object"):
        hub.load(tmp_path / "theirs")


def test_what_cannot_be_is_refused(both, clip, picture, tmp_path):
    _, talker = both("qwen2_vl")
    whole = Path(clip).read_bytes()
    for name, held in (("empty", b""), ("noise", b"no video" * 99), ("cut", whole[: len(whole) // 2])):
        (tmp_path / f"{name}.mp4").write_bytes(held)
        with pytest.raises(DataError, match=f"{name}.mp4"):
            talker.ask(tmp_path / f"{name}.mp4", "what happens?")
    with pytest.raises(DataError, match=r"none\.mp4 is no file"):
        talker.ask("none.mp4", "what happens?")
    with pytest.raises(ConfigError, match="frames without a video"):
        talker.ask(picture, "what?", frames=3)
    with pytest.raises(ConfigError, match="give one of the two"):
        talker.ask(clip, "what?", frames=3, fps=1.0)
    with pytest.raises(ConfigError, match=r"clip\.mp4: 22 frames of a video that has 21"):
        talker.ask(clip, "what?", frames=22)
    with pytest.raises(TextError, match=r"1 places .* shown is image"):
        talker.ask(picture, "what is <|video_pad|>?")
    with pytest.raises(TextError, match="video part with 'max_pixels'"):
        talker.chat([{"role": "user", "content": [{"type": "video", "video": clip, "max_pixels": 5}]}])
    still = np.zeros((9, 9, 3), np.uint8)
    for frames, seconds in (([], []), ([still], None), ([still] * 2, [0.0]), ([still] * 2, [1.0, 1.0])):
        with pytest.raises(ConfigError):
            Video(frames, seconds=seconds)
    with pytest.raises(DataError, match="one size"):
        talker.ask(Video([still, np.zeros((9, 8, 3), np.uint8)], seconds=[0, 1]), "what?")
    with pytest.raises(ConfigError, match="for pictures and videos, and 1 more pass the 2,048"):
        talker.ask([clip] * 40, "what?")


def test_a_model_without_videos_names_those_with(clip, tmp_path):
    from test_talker import save as save_llava

    save_llava(tmp_path)
    with pytest.raises(ConfigError, match="this llava reads pictures and no videos") as caught:
        vitrail.load(tmp_path, device="cpu").ask(clip, "what happens?")
    assert all(name in caught.value.remedy for name in ("qwen2_vl, qwen2_5_vl, qwen3_vl", "internvl"))


def test_from_the_command_line(clip, picture, tmp_path, capsys, monkeypatch):
    def run(*given) -> int:
        given = ["vitrail", "ask", *map(str, given), "--model", str(tmp_path), "--device", "cpu", "--max-new", "5"]
        monkeypatch.setattr("sys.argv", given)
        try:
            main()
        except SystemExit as end:
            return int(end.code or 0)
        return 0

    save(tmp_path, "qwen3_vl")
    talker = vitrail.load(tmp_path, device="cpu")
    capsys.readouterr()
    for options in ({"frames": 3}, {"fps": 1.0}, {}):
        assert not run(clip, "what happens?", *(word for key, value in options.items() for word in (f"--{key}", value)))
        assert capsys.readouterr().out == talker.ask(clip, "what happens?", max_new=5, **options) + "\n"
    assert not run(clip, "what happens?", picture, "and here?", "--fps", 1)
    capsys.readouterr()
    for wrong, says in (
        ([clip, "what?", "--frames", 3, "--fps", 1], "both say"),
        ([picture, "what?", "--fps", 1], "there is none"),
        ([picture, "none.mp4", "what?"], "none.mp4"),
        ([clip, "what?", "--frames", 0], "0 frames"),
    ):
        assert run(*wrong) == 2
        error = capsys.readouterr().err
        assert says in error and "Traceback" not in error
