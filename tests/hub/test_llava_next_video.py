"""LLaVA-NeXT-Video against transformers on random checkpoints of odd shapes: pictures, videos, both, neither."""

import json

import pytest
import torch
import transformers as T
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

import vitrail
from helpers import randomize
from hub.test_internvl_video import movie
from hub.test_llava_onevision import (
    IMAGE,
    PINPOINTS,
    SHOWN,
    SIZE,
    TOWER,
    VIDEO,
    agrees,
    check_asked,
    comes_back,
    keep_both,
)
from test_talker_video import write_clip
from vitrail.connectors.reduce import CellsConfig
from vitrail.errors import ConfigError, VitrailError
from vitrail.hub import from_hf, load, to_hf
from vitrail.hub.families import FAMILIES
from vitrail.models.presets import VLMS
from vitrail.processing.anyres import AnyRes
from vitrail.processing.footage import FILE, Footage
from vitrail.processing.text import Tokenizer
from vitrail.stream import video
from vitrail.talker import Video

FAMILY = FAMILIES["llava_next_video"]


def next_video(text=None, vision=None, **more):
    text = text or T.LlamaConfig(**SIZE)
    vision = vision or T.CLIPVisionConfig(**TOWER, image_size=32, patch_size=8)  # 4 × 4
    usual = {"image_token_index": IMAGE, "video_token_index": VIDEO, "image_grid_pinpoints": PINPOINTS}
    config = T.LlavaNextVideoConfig(vision_config=vision, text_config=text, **usual | more)
    return randomize(T.LlavaNextVideoForConditionalGeneration(config).eval(), spread=0.1)


CASES = {
    "clip": lambda: next_video(),
    "blocks of 3 × 3, two pixels unread": lambda: next_video(
        vision=T.CLIPVisionConfig(**TOWER, image_size=32, patch_size=5),
        spatial_pool_stride=3,
        vision_feature_layer=-1,
        projector_hidden_act="relu",
    ),
    "every patch of an odd side": lambda: next_video(
        vision=T.CLIPVisionConfig(**TOWER, image_size=32, patch_size=6),
        spatial_pool_stride=1,
        multimodal_projector_bias=False,
        text=T.Qwen2Config(**SIZE, num_key_value_heads=1),
    ),
    "siglip": lambda: next_video(
        vision=T.SiglipVisionConfig(**TOWER, image_size=32, patch_size=5, vision_use_head=False),
        vision_feature_select_strategy="full",
    ),
    "tied": lambda: next_video(text=T.LlamaConfig(**SIZE, tie_word_embeddings=True)),
}


@pytest.mark.parametrize("case", CASES)
def test_agrees(case, tmp_path):
    agrees(CASES[case](), tmp_path)


@pytest.mark.parametrize("case", CASES)
def test_comes_back(case, tmp_path):
    comes_back(CASES[case](), tmp_path, "llava_next_video")


def test_what_a_config_leaves_out_is_as_released():
    """transformers' own defaults: CLIP-L/14 at 336 pixels, 24 × 24 patches, of which 12 × 12 means are read."""
    text = T.LlamaConfig(vocab_size=32_064)
    ours = FAMILY.read({"model_type": "llava_next_video", "text_config": text.to_dict()})
    assert ours == FAMILY.read(T.LlavaNextVideoConfig(text_config=text).to_dict())
    released = VLMS["llava-next-video-7b"]
    assert ours.with_(decoder=released.decoder) == released and ours.policy == AnyRes(pool=2)
    film = ours.policy.film(7)
    assert film.tokens == 7 * 12 * 12 == ours.tokens(film) == ours.clip(film).tokens


@given(frames=st.integers(1, 9), half=st.integers(1, 6), patch=st.integers(1, 5), data=st.data())
def test_tokens_of_a_video(frames, half, patch, data):
    """As many as their processor writes, no newline among them, and every frame read once."""
    unread = data.draw(st.integers(0, patch - 1))
    policy = AnyRes(tile=2 * half * patch + unread, patch=patch, unread=unread, grids=((1, 1),), pool=2)
    cut, processor = policy.film(frames), object.__new__(T.LlavaNextVideoProcessor)
    processor.patch_size, processor.video_token = patch, "v"
    seen = {"pixel_values_videos": torch.empty(1, frames, 3, policy.tile, policy.tile)}
    assert cut.tokens == len(processor.replace_video_token(seen, 0)) == frames * half**2
    assert [span.first for span in cut.spans] == list(range(frames)) and len(cut.views) == frames
    assert not video(cut).newlines().any()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"spatial_pool_mode": "max"}, "spatial_pool_mode is 'max'"),
        ({"spatial_pool_mode": "conv"}, "spatial_pool_mode is 'conv'"),
        ({"spatial_pool_stride": 3}, "spatial_pool_stride is 3, and a frame has 4 × 4 patches"),
        ({"spatial_pool_stride": 0}, "spatial_pool_stride is 0"),
        ({"spatial_pool_stride": 2.0}, "spatial_pool_stride is 2.0"),
        ({"vision_feature_layer": [-2, -5]}, "several layers"),
        ({"vision_feature_select_strategy": "full"}, "CLS"),
        ({"image_grid_pinpoints": [[32, 65]]}, "whole number of tiles"),
        ({"video_token_index": "x"}, "marks"),
    ],
)
def test_what_is_not_built_is_refused(change, says, tmp_path):
    next_video().save_pretrained(tmp_path)
    about = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(about | change))
    with pytest.raises(VitrailError, match=says):
        from_hf(tmp_path)


def test_frames_are_shrunk_in_one_way():
    with pytest.raises(ConfigError, match="each in its way"):
        AnyRes(pool=2, max_tiles=9)
    with pytest.raises(ConfigError, match="does not divide into blocks of 5×5"):
        AnyRes(pool=5)
    with pytest.raises(ConfigError, match=r"set policy\.pool"):
        FAMILY.write(VLMS["llava-next-7b"])


# ── asked ──────────────────────────────────────────────────────────────────────────────────────────────────────

SAID = ["USER: what happens in the video? ASSISTANT: a red ball rolls"]
SIDE = 32
EDGE, SQUARE = {"shortest_edge": SIDE}, {"height": SIDE, "width": SIDE}


class Frames:
    """In place of their video processor, which resizes by torchvision: CLIP's own keeps the middle of each frame."""

    def __call__(self, videos, **how):
        one = CLIPImageProcessorPil(size=EDGE, crop_size=SQUARE)
        return {"pixel_values_videos": torch.stack([one(v, return_tensors="pt")["pixel_values"] for v in videos])}


def written(folder, **said):
    """A random model of transformers, its tokenizer, and what is `said` of its videos."""
    tokens = Tokenizer.train(SAID * 3, 320, specials=["<video>", "<image>"], eos="</s>", bos="<s>")
    text = T.LlamaConfig(**SIZE | {"vocab_size": tokens.size}, max_position_embeddings=900)
    return keep_both(next_video, text, tokens, folder, said)


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """transformers' model, a talker of its folder, and the processor that an export is opened with."""
    folder = tmp_path_factory.mktemp("next-video")
    reference, talker = written(folder / "theirs"), vitrail.load(folder / "theirs", device="cpu")
    to_hf(talker.model, folder / "ours", tokenizer=talker.words)
    told = json.loads((folder / "ours" / "processor_config.json").read_text())
    assert told.pop("processor_class") == "LlavaNextVideoProcessor"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(T.ProcessorMixin, "check_argument_for_proper_class", lambda *given: None)
        shown, tokens = (part.from_pretrained(folder / "ours") for part in (T.AutoImageProcessor, T.AutoTokenizer))
        processor = T.LlavaNextVideoProcessor(Frames(), shown, tokens, **told)
    return reference, talker, processor


@pytest.mark.parametrize("case", SHOWN)
def test_ids_pixels_and_answers_are_theirs(case, both):
    check_asked(case, *both)


def test_a_file(both, tmp_path):
    """Eight frames, or as many as are asked for: the first of as many equal parts of sixteen and more."""
    _, talker, _ = both
    clip = write_clip(tmp_path / "clip.mp4")
    usual, few = (talker.prompt([talker.turn(clip, "what?", **how)]) for how in ({}, {"frames": 4}))
    assert usual.videos.pixels.shape == (8, 3, SIDE, SIDE)
    assert torch.equal(few.videos.pixels, usual.videos.pixels[::2])
    assert (few.stream.kinds == 2).sum() == 4 * 2 * 2
    assert talker.ask(clip, "what?", max_new=8) != talker.ask([], "what?", max_new=8)


def test_what_files_say_of_videos(tmp_path):
    written(tmp_path, num_frames=5, size=EDGE, crop_size=SQUARE)
    model = load(tmp_path)
    assert model.config.footage == Footage.usual("llava-next-video", SIDE).with_(frames=5)
    to_hf(model, tmp_path / "again")
    assert load(tmp_path / "again").config == model.config
    told = json.loads((tmp_path / "again" / FILE).read_text())
    assert told["video_processor_type"] == "LlavaNextVideoVideoProcessor" and told["num_frames"] == 5
    assert (told["size"], told["crop_size"], told["do_center_crop"]) == (EDGE, SQUARE, True)
    assert "image_grid_pinpoints" not in told
    with pytest.raises(ConfigError, match="footage by 'llava-onevision' for a tower that reads 'llava-next-video'"):
        model.config.with_(footage=Footage.usual("llava-onevision", SIDE))


@pytest.mark.parametrize(
    ("said", "says"),
    [
        ({"size": {"shortest_edge": 24}, "crop_size": {"height": 24, "width": 24}}, "frames of 24 pixels"),
        ({"crop_size": {"height": 24, "width": 24}}, "frames of 24 pixels"),
        ({"size": {"shortest_edge": 40}, "crop_size": SQUARE}, "as large as the short edge"),
        ({"size": SQUARE}, "shortest_edge alone"),
        ({"size": EDGE | {"longest_edge": 40}}, "shortest_edge alone"),
        ({"do_center_crop": False}, "do_center_crop is false"),
    ],
)
def test_what_files_cannot_say_of_videos(said, says, both, tmp_path):
    to_hf(both[1].model, tmp_path)
    (tmp_path / FILE).write_text(json.dumps(said))
    with pytest.raises(VitrailError, match=says):
        load(tmp_path)


def test_fewer_tokens_of_each_frame(both):
    """What is left of a view is left of a frame, in place of its means."""
    talker = both[1].reduced(CellsConfig(keep=1))
    film = Video(movie(3, 0), seconds=[0, 1, 2])
    assert (talker.prompt([talker.turn(film, "what?")]).stream.kinds == 2).sum() == 3
    assert isinstance(talker.ask(film, "what?", max_new=3), str)
