"""LLaVA-NeXT-Video matches transformers on random checkpoints: images, videos, both, neither."""

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
from pipelines.test_chat_video import write_clip
from vitrail.connectors.feature_reduction import CellPoolingConfig
from vitrail.errors import ConfigError, VitrailError
from vitrail.hub import from_hf, load, to_hf
from vitrail.models.presets import VLM_PRESETS
from vitrail.pipelines import Video
from vitrail.processing.anyres import AnyResPolicy
from vitrail.processing.tokenizer import Tokenizer
from vitrail.processing.video_sampling import VIDEO_PROCESSOR_FILE, VideoSamplingConfig
from vitrail.registry import FAMILIES
from vitrail.stream import video_part

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
def test_matches_transformers(case, tmp_path):
    agrees(CASES[case](), tmp_path)


@pytest.mark.parametrize("case", CASES)
def test_round_trip(case, tmp_path):
    comes_back(CASES[case](), tmp_path, "llava_next_video")


def test_config_defaults_match_released():
    """Defaults of transformers: CLIP-L/14 at 336 pixels, 24 × 24 patches pooled to 12 × 12."""
    text = T.LlamaConfig(vocab_size=32_064)
    ours = FAMILY.from_hf_config({"model_type": "llava_next_video", "text_config": text.to_dict()})
    assert ours == FAMILY.from_hf_config(T.LlavaNextVideoConfig(text_config=text).to_dict())
    released = VLM_PRESETS["llava-next-video-7b"]
    assert ours.replace(decoder=released.decoder) == released and ours.policy == AnyResPolicy(video_pool_size=2)
    video = ours.policy.layout_video(7)
    assert video.num_tokens == 7 * 12 * 12 == ours.count_tokens(video) == ours.make_video_part(video).num_tokens


@given(frames=st.integers(1, 9), half=st.integers(1, 6), patch=st.integers(1, 5), data=st.data())
def test_video_token_count(frames, half, patch, data):
    """Token count of the processor, without newlines; each frame is used once."""
    unread = data.draw(st.integers(0, patch - 1))
    policy = AnyResPolicy(
        tile_size=2 * half * patch + unread, patch_size=patch, unread_pixels=unread, grids=((1, 1),), video_pool_size=2
    )
    cut, processor = policy.layout_video(frames), object.__new__(T.LlavaNextVideoProcessor)
    processor.patch_size, processor.video_token = patch, "v"
    seen = {"pixel_values_videos": torch.empty(1, frames, 3, policy.tile_size, policy.tile_size)}
    assert cut.num_tokens == len(processor.replace_video_token(seen, 0)) == frames * half**2
    assert [span.first_view for span in cut.spans] == list(range(frames)) and len(cut.views) == frames
    assert not video_part(cut).newline_mask().any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"spatial_pool_mode": "max"}, "spatial_pool_mode is 'max'"),
        ({"spatial_pool_mode": "conv"}, "spatial_pool_mode is 'conv'"),
        ({"spatial_pool_stride": 3}, "spatial_pool_stride is"),
        ({"spatial_pool_stride": 0}, "spatial_pool_stride is 0"),
        ({"spatial_pool_stride": 2.0}, "spatial_pool_stride is 2.0"),
        ({"vision_feature_layer": [-2, -5]}, "no layer -5"),
        ({"vision_feature_select_strategy": "full"}, "CLS"),
        ({"image_grid_pinpoints": [[32, 65]]}, "not a multiple of the tile size"),
        ({"video_token_index": "x"}, "VLMConfig.vision_token_ids is"),
    ],
)
def test_unsupported_settings_raise(change, message, tmp_path):
    next_video().save_pretrained(tmp_path)
    about = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(about | change))
    with pytest.raises(VitrailError, match=message):
        from_hf(tmp_path)


def test_frames_are_reduced_in_one_way():
    with pytest.raises(ConfigError, match="AnyResPolicy has both max_tiles"):
        AnyResPolicy(video_pool_size=2, max_tiles=9)
    with pytest.raises(ConfigError, match="patches is not divisible into blocks of"):
        AnyResPolicy(video_pool_size=5)
    with pytest.raises(ConfigError, match=r"set policy\.video_pool_size"):
        FAMILY.to_hf_config(VLM_PRESETS["llava-next-7b"])


# ── asked ──────────────────────────────────────────────────────────────────────────────────────────────────────

SAID = ["USER: what happens in the video? ASSISTANT: a red ball rolls"]
SIDE = 32
EDGE, SQUARE = {"shortest_edge": SIDE}, {"height": SIDE, "width": SIDE}


class Frames:
    """Stand-in for the video processor, which needs torchvision: CLIP's image processor for each frame."""

    def __call__(self, videos, **how):
        one = CLIPImageProcessorPil(size=EDGE, crop_size=SQUARE)
        return {"pixel_values_videos": torch.stack([one(v, return_tensors="pt")["pixel_values"] for v in videos])}


def written(folder, **output):
    """Save a random transformers model, its tokenizer and its video processor settings."""
    tokens = Tokenizer.train(SAID * 3, 320, special_tokens=["<video>", "<image>"], eos="</s>", bos="<s>")
    text = T.LlamaConfig(**SIZE | {"vocab_size": tokens.vocab_size}, max_position_embeddings=900)
    return keep_both(next_video, text, tokens, folder, output)


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """Return the transformers model, the pipeline of its folder, and the processor of its export."""
    folder = tmp_path_factory.mktemp("next-video")
    reference, chat_pipeline = written(folder / "theirs"), vitrail.load(folder / "theirs", device="cpu")
    to_hf(chat_pipeline.model, folder / "ours", tokenizer=chat_pipeline.tokenizer)
    result = json.loads((folder / "ours" / "processor_config.json").read_text())
    assert result.pop("processor_class") == "LlavaNextVideoProcessor"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(T.ProcessorMixin, "check_argument_for_proper_class", lambda *given: None)
        shown, tokens = (part.from_pretrained(folder / "ours") for part in (T.AutoImageProcessor, T.AutoTokenizer))
        processor = T.LlavaNextVideoProcessor(Frames(), shown, tokens, **result)
    return reference, chat_pipeline, processor


@pytest.mark.parametrize("case", SHOWN)
def test_ids_pixels_and_answers_match_transformers(case, both):
    check_asked(case, *both)


def test_video_file_sampling(both, tmp_path):
    """Samples 8 frames by default, at the start of equal parts of the video."""
    _, chat_pipeline, _ = both
    clip = write_clip(tmp_path / "clip.mp4")
    usual, few = (
        chat_pipeline.build_prompt([chat_pipeline.build_message(clip, "what?", **how)])
        for how in ({}, {"num_frames": 4})
    )
    assert usual.videos.pixels.shape == (8, 3, SIDE, SIDE)
    assert torch.equal(few.videos.pixels, usual.videos.pixels[::2])
    assert (few.stream.kinds == 2).sum() == 4 * 2 * 2
    assert chat_pipeline.ask(clip, "what?", max_new_tokens=8) != chat_pipeline.ask([], "what?", max_new_tokens=8)


def test_video_processor_files(tmp_path):
    written(tmp_path, num_frames=5, size=EDGE, crop_size=SQUARE)
    model = load(tmp_path)
    assert model.config.video_sampling == VideoSamplingConfig.default("llava-next-video", SIDE).replace(num_frames=5)
    to_hf(model, tmp_path / "again")
    assert load(tmp_path / "again").config == model.config
    result = json.loads((tmp_path / "again" / VIDEO_PROCESSOR_FILE).read_text())
    assert result["video_processor_type"] == "LlavaNextVideoVideoProcessor" and result["num_frames"] == 5
    assert (result["size"], result["crop_size"], result["do_center_crop"]) == (EDGE, SQUARE, True)
    assert "image_grid_pinpoints" not in result
    with pytest.raises(ConfigError, match=r"video_sampling.rule is"):
        model.config.replace(video_sampling=VideoSamplingConfig.default("llava-onevision", SIDE))


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ({"size": {"shortest_edge": 24}, "crop_size": {"height": 24, "width": 24}}, "frames of 24 pixels"),
        ({"crop_size": {"height": 24, "width": 24}}, "frames of 24 pixels"),
        ({"size": {"shortest_edge": 40}, "crop_size": SQUARE}, "and crop_size is"),
        ({"size": SQUARE}, "give only shortest_edge"),
        ({"size": EDGE | {"longest_edge": 40}}, "give only shortest_edge"),
        ({"do_center_crop": False}, "do_center_crop is false"),
    ],
)
def test_unsupported_video_settings_raise(output, message, both, tmp_path):
    to_hf(both[1].model, tmp_path)
    (tmp_path / VIDEO_PROCESSOR_FILE).write_text(json.dumps(output))
    with pytest.raises(VitrailError, match=message):
        load(tmp_path)


def test_reduced_frame_tokens(both):
    """Reduction applies to frames instead of pooling."""
    chat_pipeline = both[1].with_reduction(CellPoolingConfig(keep=1))
    video = Video(movie(3, 0), timestamps=[0, 1, 2])
    assert (chat_pipeline.build_prompt([chat_pipeline.build_message(video, "what?")]).stream.kinds == 2).sum() == 3
    assert isinstance(chat_pipeline.ask(video, "what?", max_new_tokens=3), str)
