"""LLaVA-OneVision matches transformers on random checkpoints: images, videos, both, neither."""

import json

import pytest
import torch
import transformers as T
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

import vitrail
from helpers import randomize, relative
from hub.test_blip2_internvl import VALUES, gradients, on_disk, same_gradients
from hub.test_internvl_video import movie
from hub.test_llava import pictures
from pipelines.test_chat_video import FRAMES, RATE, write_clip
from vitrail import hub
from vitrail.cli import main
from vitrail.connectors.feature_reduction import CellPoolingConfig
from vitrail.data.video_file import open_video
from vitrail.errors import ConfigError, VitrailError
from vitrail.hub import from_hf, load, save, to_hf
from vitrail.hub.llava import normalize_llava_config
from vitrail.models.video_inputs import read_video_frames
from vitrail.pipelines import Video
from vitrail.pipelines.message_parts import parse_parts, to_template_part
from vitrail.processing.anyres import LLAVA_ONEVISION_GRIDS, AnyResPolicy
from vitrail.processing.tokenizer import Tokenizer
from vitrail.processing.video_sampling import VIDEO_PROCESSOR_FILE, VideoSamplingConfig
from vitrail.registry import FAMILIES
from vitrail.stream import build_stream, pack_streams, split_by_sample, text_part, video_part

IMAGE, VIDEO = 98, 97
SIZE = {"hidden_size": 30, "intermediate_size": 47, "num_hidden_layers": 2, "num_attention_heads": 3, "vocab_size": 99}
TOWER = {"hidden_size": 22, "intermediate_size": 37, "num_hidden_layers": 3, "num_attention_heads": 2}
PINPOINTS = [[32, 64], [64, 32], [64, 64], [96, 32], [32, 32]]
FAMILY = FAMILIES["llava_onevision"]


def onevision(text=None, vision=None, **more):
    text = text or T.Qwen2Config(**SIZE, num_key_value_heads=1)
    vision = vision or T.SiglipVisionConfig(**TOWER, image_size=32, patch_size=6, vision_use_head=False)  # 5 × 5
    usual = {"image_token_index": IMAGE, "video_token_index": VIDEO, "image_grid_pinpoints": PINPOINTS}
    config = T.LlavaOnevisionConfig(vision_config=vision, text_config=text, **usual | more)
    return randomize(T.LlavaOnevisionForConditionalGeneration(config).eval(), spread=0.1)


CASES = {
    "siglip": lambda: onevision(),
    "shrunk to two tiles": lambda: onevision(
        vision_aspect_ratio="anyres_max_2", vision_feature_layer=-2, projector_hidden_act="relu"
    ),
    "clip, without CLS": lambda: onevision(
        vision=T.CLIPVisionConfig(**TOWER, image_size=32, patch_size=8),
        vision_feature_select_strategy="default",
        multimodal_projector_bias=False,
        text=T.LlamaConfig(**SIZE),
        vision_aspect_ratio="anyres_max_1",
    ),
    "tied": lambda: onevision(text=T.Qwen2Config(**SIZE, num_key_value_heads=1, tie_word_embeddings=True)),
}


def with_video(ours, *counts):
    """Build videos with the given number of frames."""
    if not counts:
        return None
    frames = [Video(movie(n, seed), timestamps=list(range(n))) for seed, n in enumerate(counts)]
    return ours.prepare_videos([read_video_frames(one, ours.config).pixels for one in frames])


def theirs(reference, sample, shown, films):
    """Run transformers on one sample."""
    given = {}
    if shown is not None:
        views = shown.pixels.split([len(shape.views) for shape in shown.layouts])
        given["pixel_values"] = torch.nn.utils.rnn.pad_sequence(views, batch_first=True)
        given["image_sizes"] = torch.tensor([[shape.height, shape.width] for shape in shown.layouts])
    if films is not None:
        given["pixel_values_videos"] = films.pixels.unflatten(0, (len(films.layouts), -1))
    ids = torch.where(sample.kinds == 2, VIDEO, sample.ids)
    return reference(input_ids=ids[None], **given).logits[0]


SHOWN = {  # sizes of pictures, frames of videos
    "words alone": ((), ()),
    "a picture": (((40, 90),), ()),
    "pictures of unequal sizes": (((33, 31), (64, 20), (100, 7)), ()),
    "a video": ((), (5,)),
    "one frame": ((), (1,)),
    "two pictures and two videos": (((20, 64), (91, 90)), (3, 3)),
}


@pytest.mark.parametrize("case", CASES)
def test_matches_transformers(case, tmp_path):
    agrees(CASES[case](), tmp_path)


def agrees(reference, folder):
    """Compare logits and gradients; native packs one row, transformers runs single samples."""
    reference.save_pretrained(folder)
    ours = from_hf(folder).eval()
    every, samples, expected = [], [], []
    for sizes, counts in SHOWN.values():
        shown, films = ours.prepare_images(pictures(*sizes)) if sizes else None, with_video(ours, *counts)
        parts = [text_part([1, 5])]
        for shape in [] if shown is None else shown.layouts:
            parts += [ours.config.make_part(shape), text_part([7, 8])]
        for shape in [] if films is None else films.layouts:
            parts += [ours.config.make_video_part(shape), text_part([9])]
        samples.append(build_stream([*parts, text_part([3])], ours.config.rules))
        every.append((shown, films))
        expected.append(theirs(reference, samples[-1], shown, films))
    batch = pack_streams(samples, sum(map(len, samples)))
    stills, clips = (_together([one[n] for one in every if one[n] is not None]) for n in (0, 1))
    logits = split_by_sample(batch, ours(batch, stills, clips))
    for a, b in zip(logits, expected, strict=True):
        assert relative(a, b) <= VALUES
    weights = [torch.randn_like(b) for b in expected]
    mine = gradients(logits, weights, ours)
    same_gradients(reference, ours, mine, on_disk(reference, gradients(expected, weights, reference)))


def _together(shown):
    return shown[0]._replace(
        pixels=torch.cat([one.pixels for one in shown]), layouts=tuple(s for one in shown for s in one.layouts)
    )


@pytest.mark.parametrize("case", CASES)
def test_round_trip(case, tmp_path):
    comes_back(CASES[case](), tmp_path, "llava_onevision")


def comes_back(reference, folder, name):
    reference.save_pretrained(folder / "hf")
    ours = from_hf(folder / "hf")
    others = {"llava_next", "llava_next_video", "llava_onevision"} - {name}
    assert FAMILIES[name].supports(ours.config) and not any(FAMILIES[other].supports(ours.config) for other in others)
    to_hf(ours, folder / "back")
    assert normalize_llava_config(from_hf(folder / "back").config) == normalize_llava_config(ours.config)
    back = T.AutoModelForImageTextToText.from_pretrained(folder / "back").eval()
    assert type(back) is type(reference)
    a, b = reference.state_dict(), back.state_dict()
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    shown, films = ours.prepare_images(pictures((91, 90))), with_video(ours, 3)
    parts = [
        text_part([1]),
        ours.config.make_part(shown.layouts[0]),
        ours.config.make_video_part(films.layouts[0]),
        text_part([2]),
    ]
    sample = build_stream(parts, ours.config.rules)
    assert torch.equal(*(theirs(model, sample, shown, films) for model in (reference, back)))
    save(ours, folder / "own")
    again = load(folder / "own")
    assert again.config == ours.config and again.config.resolved_video_sampling.rule == name.replace("_", "-")


def test_config_defaults_match_released():
    """Defaults of transformers: SigLIP-so400m without its last block, 27 × 27 patches, up to 6 × 6 tiles."""
    plain = T.LlavaOnevisionConfig()
    ours = FAMILY.from_hf_config({"model_type": "llava_onevision", "text_config": T.Qwen2Config().to_dict()})
    whole = FAMILY.from_hf_config(plain.to_dict())
    assert ours == whole and ours.policy == AnyResPolicy(
        tile_size=384, unread_pixels=6, grids=LLAVA_ONEVISION_GRIDS, max_tiles=9
    )
    assert (ours.tower.grid_size, ours.tower.layers, ours.vision_feature_layer, ours.rules.fill_id) == (
        27,
        26,
        -1,
        151_646,
    )
    video = ours.policy.layout_video(7)
    assert video.num_tokens == 7 * 14 * 14 + 1 == ours.count_tokens(video) == ours.make_video_part(video).num_tokens


@given(frames=st.integers(1, 9), side=st.integers(1, 9), patch=st.integers(1, 5), data=st.data())
def test_video_token_count(frames, side, patch, data):
    """Token count of the processor, with one final newline; each frame is used once."""
    unread = data.draw(st.integers(0, patch - 1))
    policy = AnyResPolicy(
        tile_size=side * patch + unread, patch_size=patch, unread_pixels=unread, grids=((1, 1),), max_tiles=1
    )
    cut, processor = policy.layout_video(frames), object.__new__(T.LlavaOnevisionProcessor)
    processor.num_image_tokens, processor.video_token = side**2, "v"
    seen = {"pixel_values_videos": torch.empty(1, frames, 3, 1, 1)}
    assert cut.num_tokens == len(processor.replace_video_token(seen, 0))
    assert [span.first_view for span in cut.spans] == list(range(frames)) and len(cut.views) == frames
    newlines = video_part(cut).newline_mask()
    assert newlines[-1] and newlines.sum() == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vision_aspect_ratio": "pad"}, "vision_aspect_ratio is 'pad'"),
        ({"vision_aspect_ratio": "anyres"}, "vision_aspect_ratio is 'anyres'"),
        ({"vision_aspect_ratio": "anyres_max_0"}, "max_tiles is 0"),
        ({"vision_feature_layer": [-2, -5]}, "no layer -5"),
        ({"vision_feature_select_strategy": "default"}, "would drop a patch"),
        ({"vision_config": {"model_type": "clip_vision_model", **TOWER, "image_size": 32, "patch_size": 8}}, "CLS"),
        ({"image_grid_pinpoints": [[32, 65]]}, "not a multiple of the tile size"),
        ({"video_token_index": "x"}, "VLMConfig.vision_token_ids is"),
    ],
)
def test_unsupported_settings_raise(change, message, tmp_path):
    onevision().save_pretrained(tmp_path)
    about = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(about | change))
    with pytest.raises(VitrailError, match=message):
        from_hf(tmp_path)


# ── asked ──────────────────────────────────────────────────────────────────────────────────────────────────────

SPECIALS = ["<|im_start|>", "<|im_end|>", "<image>", "<video>"]
SAID = ["user\nwhat happens in the video? assistant\na red ball rolls"]
SIDE = 32


class Frames:
    """Stand-in for the video processor, which needs torchvision: SigLIP's image processor for each frame."""

    def __call__(self, videos, **how):
        one = SiglipImageProcessorPil(size={"height": SIDE, "width": SIDE}, resample=3)
        return {"pixel_values_videos": torch.stack([one(v, return_tensors="pt")["pixel_values"] for v in videos])}


def written(folder, **output):
    """Save a random transformers model, its tokenizer and its video processor settings."""
    tokens = Tokenizer.train(SAID * 3, 320, special_tokens=SPECIALS, eos="<|im_end|>")
    text = T.Qwen2Config(**SIZE | {"vocab_size": tokens.vocab_size}, num_key_value_heads=1, max_position_embeddings=900)
    return keep_both(onevision, text, tokens, folder, output)


def keep_both(make, text, tokens, folder, output):
    ids = {f"{mark}_token_index": tokens.token_to_id(f"<{mark}>") for mark in ("image", "video")}
    reference = make(text=text, **ids, eos_token_id=tokens.eos_token_id)
    reference.save_pretrained(folder)
    tokens.save(folder)
    if output:
        (folder / VIDEO_PROCESSOR_FILE).write_text(json.dumps(output))
    return reference


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """Return the transformers model, the pipeline of its folder, and the processor of its export."""
    folder = tmp_path_factory.mktemp("onevision")
    reference, chat_pipeline = written(folder / "theirs"), vitrail.load(folder / "theirs", device="cpu")
    to_hf(chat_pipeline.model, folder / "ours", tokenizer=chat_pipeline.tokenizer)
    result = json.loads((folder / "ours" / "processor_config.json").read_text())
    assert result.pop("processor_class") == "LlavaOnevisionProcessor"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(T.ProcessorMixin, "check_argument_for_proper_class", lambda *given: None)
        parts = [part.from_pretrained(folder / "ours") for part in (T.AutoImageProcessor, T.AutoTokenizer)]
        processor = T.LlavaOnevisionProcessor(*parts, Frames(), **result)
    return reference, chat_pipeline, processor


@pytest.fixture(scope="module")
def clip(tmp_path_factory) -> str:
    return write_clip(tmp_path_factory.mktemp("clips") / "clip.mp4")


def inputs(processor, chat_pipeline, turns, images, videos):
    """Return the processor's inputs. Images are a flat list: a nested list would give one view for each."""
    output = [{**one, "content": [to_template_part(part) for part in parse_parts(one, "a turn")]} for one in turns]
    text = chat_pipeline.chat_template.render(output, add_generation_prompt=True)
    shown = {"images": images or None, "videos": videos or None}
    return processor(text=text, **shown, return_tensors="pt", add_special_tokens=False)  # the template wrote them


def check_asked(case, reference, chat_pipeline, processor):
    """Compare ids, pixels and greedy answers."""
    sizes, counts = SHOWN[case]
    images, videos = pictures(*sizes), [movie(count, n) for n, count in enumerate(counts)]
    films = [Video(frames, timestamps=list(range(len(frames)))) for frames in videos]
    turns = [chat_pipeline.build_message([*images, *films], "what happens in the video?")]
    given = inputs(processor, chat_pipeline, turns, images, videos)
    stream, stills, seen = chat_pipeline.build_prompt(turns)
    ids = torch.where(stream.kinds == 2, chat_pipeline.vision_token_ids["video"], stream.ids)
    assert ids.tolist() == given["input_ids"][0].tolist()
    if images:
        views = stills.pixels.split([len(shape.views) for shape in stills.layouts])
        for mine, other in zip(views, given["pixel_values"], strict=True):
            assert torch.equal(mine, other[: len(mine)]) and not other[len(mine) :].any()
    if videos:
        assert torch.equal(seen.pixels, given["pixel_values_videos"].flatten(0, 1))
    logits = chat_pipeline.model(pack_streams([stream], len(stream)), stills, seen)[0]
    assert relative(logits, reference(**given).logits[0]) <= VALUES
    made = reference.generate(**given, max_new_tokens=8, do_sample=False, pad_token_id=0)[0, len(ids) :]
    output = chat_pipeline.tokenizer.decode(made.tolist(), skip_special_tokens=True).strip()
    assert chat_pipeline.chat(turns, max_new_tokens=8) == output


@pytest.mark.parametrize("case", SHOWN)
def test_ids_pixels_and_answers_match_transformers(case, both):
    check_asked(case, *both)


def test_video_file_equals_its_frames(both, clip):
    _, chat_pipeline, _ = both
    frames, seconds = open_video(clip).sample_frames(fps=RATE)
    stills = Video([Image.fromarray(frame) for frame in frames], timestamps=seconds)
    whole, kept = (chat_pipeline.build_prompt([chat_pipeline.build_message(one, "what?")]) for one in (clip, stills))
    assert len(whole.videos.pixels) == FRAMES and torch.equal(whole.videos.pixels, kept.videos.pixels)  # 32 at most
    few = chat_pipeline.build_prompt([chat_pipeline.build_message(clip, "what?", num_frames=4)])
    assert torch.equal(few.videos.pixels, whole.videos.pixels[[0, 5, 10, 15]])
    assert (few.stream.kinds == 2).sum() == 4 * 3 * 3 + 1
    assert chat_pipeline.ask(clip, "what?", max_new_tokens=8) != chat_pipeline.ask([], "what?", max_new_tokens=8)


def test_command_line(clip, tmp_path, capsys, monkeypatch):
    written(tmp_path, num_frames=3, size={"height": SIDE, "width": SIDE})
    chat_pipeline = vitrail.load(tmp_path, device="cpu")
    assert chat_pipeline.model.config.resolved_video_sampling.num_frames == 3
    photo = tmp_path / "photo.png"
    pictures((40, 90))[0].save(photo)
    for shown in (clip, str(photo)):
        given = [shown, "what happens?", "--model", str(tmp_path), "--device", "cpu", "--max-new-tokens", "5"]
        monkeypatch.setattr("sys.argv", ["vitrail", "ask", *given])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main()
        assert not end.value.code
        assert capsys.readouterr().out == chat_pipeline.ask(shown, "what happens?", max_new_tokens=5) + "\n"


def test_video_processor_files(tmp_path):
    written(tmp_path / "theirs", num_frames=5)
    model, tokens = load(tmp_path / "theirs"), hub.load_tokenizer(tmp_path / "theirs")
    assert model.config.video_sampling == VideoSamplingConfig.default("llava-onevision", SIDE).replace(num_frames=5)
    to_hf(model, tmp_path / "again", tokenizer=tokens)
    again = load(tmp_path / "again").config
    assert (again.video_sampling, again.policy, again.vision_token_ids) == (
        model.config.video_sampling,
        model.config.policy,
        model.config.vision_token_ids,
    )
    result = json.loads((tmp_path / "again" / VIDEO_PROCESSOR_FILE).read_text())
    assert result["video_processor_type"] == "LlavaOnevisionVideoProcessor" and result["num_frames"] == 5
    assert result["size"] == {"height": SIDE, "width": SIDE} and not result.keys() & {"image_grid_pinpoints", "do_pad"}
    (tmp_path / "again" / VIDEO_PROCESSOR_FILE).write_text(json.dumps({"size": {"height": 24, "width": 24}}))
    with pytest.raises(ConfigError, match="frames of 24 pixels, but the policy has tiles of 32"):
        load(tmp_path / "again")
    with pytest.raises(
        ConfigError, match=r"video_sampling\.rule is 'internvl', but this model needs 'llava-onevision'"
    ):
        model.config.replace(video_sampling=VideoSamplingConfig.default("internvl", SIDE))
    next_ = model.config.replace(video_sampling=None, policy=model.config.policy.replace(max_tiles=None))
    assert next_.resolved_video_sampling is None  # LLaVA-NeXT reads no videos


def test_reduced_frame_tokens(both):
    """Tokens of reduced frames follow each other without newlines."""
    chat_pipeline = both[1].with_reduction(CellPoolingConfig(keep=1))
    video = Video(movie(3, 0), timestamps=[0, 1, 2])
    assert (chat_pipeline.build_prompt([chat_pipeline.build_message(video, "what?")]).stream.kinds == 2).sum() == 3
    assert isinstance(chat_pipeline.ask(video, "what?", max_new_tokens=3), str)
