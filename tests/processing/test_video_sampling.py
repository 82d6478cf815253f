"""Which frames of a video are read, and how large: against the arithmetic of transformers' video processors."""

import sys
from unittest.mock import MagicMock, patch

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from vitrail.errors import CheckpointError, ConfigError, ImageError
from vitrail.processing.video_sampling import VideoSamplingConfig, frame_interval

RULES = ("qwen2-vl", "qwen3-vl")


@pytest.fixture(scope="module")
def theirs():
    """Their processors. Only resizing itself needs torchvision: to import them, a mock of it is enough."""
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    names = ("", ".transforms", ".transforms.v2", ".transforms.v2.functional")
    with patch.dict(sys.modules, {f"torchvision{name}": MagicMock() for name in names}):
        from transformers.models.glm4v.video_processing_glm4v import Glm4vVideoProcessor
        from transformers.models.internvl.video_processing_internvl import InternVLVideoProcessor
        from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
    kinds = {"qwen2-vl": Qwen2VLVideoProcessor, "qwen3-vl": Qwen3VLVideoProcessor, "internvl": InternVLVideoProcessor}
    kinds["glm4v"] = Glm4vVideoProcessor
    return {rule: kind() for rule, kind in kinds.items()}


def sampled(processor, total: int, rate: float, **how) -> list[int]:
    from transformers.video_utils import VideoMetadata

    return [int(n) for n in processor.sample_frames(VideoMetadata(total_num_frames=total, fps=rate), **how)]


@given(
    rule=st.sampled_from(RULES),
    total=st.integers(2, 4000),
    rate=st.sampled_from([8.0, 24.0, 25.0, 30.0, 60.0]),
    fps=st.sampled_from([0.25, 0.5, 1.0, 2.0, 3.0, 7.5]),
)
@example(rule="qwen3-vl", total=100_000, rate=25.0, fps=2.0)  # more than max_frames
def test_frames_by_rate_are_theirs(theirs, rule, total, rate, fps):
    ours = VideoSamplingConfig.default(rule, 28).sample_frame_indices(total, total / rate, fps=fps)
    reference = sampled(theirs[rule], total, rate, fps=fps)
    same(rule, total, ours, reference)


@given(rule=st.sampled_from(RULES), total=st.integers(2, 3000), wanted=st.integers(1, 500))
def test_frames_by_number_are_theirs(theirs, rule, total, wanted):
    if rule == "qwen2-vl":
        wanted = min(wanted + wanted % 2, total // 2 * 2)
    wanted = min(wanted, total)
    same(
        rule,
        total,
        VideoSamplingConfig.default(rule, 28).sample_frame_indices(total, 3.0, num_frames=wanted),
        sampled(theirs[rule], total, 25.0, num_frames=wanted),
    )


@given(total=st.integers(1, 4000), wanted=st.integers(1, 500), rate=st.sampled_from([8.0, 24.0, 30.0]))
@example(total=21, wanted=8, rate=8.0)
def test_frames_of_internvl_are_theirs(theirs, total, wanted, rate):
    films, wanted = VideoSamplingConfig.default("internvl", 448), min(wanted, total)
    for count, ours in (
        (wanted, films.sample_frame_indices(total, total / rate, 1, num_frames=wanted)),
        (min(8, total), films.sample_frame_indices(total, total / rate, 1)),
        (wanted, films.replace(num_frames=wanted).sample_frame_indices(total, total / rate, 1)),
    ):
        assert len(ours) == count and ours == sampled(theirs["internvl"], total, rate, num_frames=count)
    if 1 <= int(total / rate * 2) <= films.max_frames:
        assert films.sample_frame_indices(total, total / rate, 1, fps=2.0) == sampled(
            theirs["internvl"], total, rate, fps=2.0
        )
    assert films.frame_size(wanted, total, 7, patch_size=14, merge_size=2, temporal_patch_size=1) == (448, 448)


@given(
    total=st.integers(1, 8000),
    rate=st.sampled_from([1.0, 8.0, 24.0, 25.0, 30.0, 60.0]),
    fps=st.sampled_from([None, 0.25, 0.5, 1.0, 2.0, 3.0]),
)
@example(total=299, rate=0.5, fps=2.0)  # longer than five minutes, with fewer frames than may be read
@example(total=20_000, rate=30.0, fps=None)  # longer than five minutes
def test_frames_of_glm4v_are_theirs(theirs, total, rate, fps):
    from transformers.video_utils import VideoMetadata

    films = VideoSamplingConfig.default("glm4v", 28)
    # They round up floats: where a frame's number is whole, an error of the product may reach the next frame.
    places = np.linspace(0, total / rate, int(300 * (fps or 2.0))) * rate
    assume(total / rate <= 300 or not ((places > places.round()) & (places < places.round() + 1e-6)).any())
    video = VideoMetadata(total_num_frames=total, fps=rate, duration=total / rate)
    wanted = theirs["glm4v"].sample_frames(video, fps=fps).tolist()
    assert films.sample_frame_indices(total, total / rate, fps=fps) == wanted
    assert films.sample_frame_indices(total, total / rate, num_frames=1) == [0]


@given(frames=st.integers(2, 800), height=st.integers(1, 3000), width=st.integers(1, 3000))
@example(frames=4, height=5, width=900)  # thinner than a token
def test_sizes_of_glm4v_are_theirs(theirs, frames, height, width):
    from transformers.image_utils import SizeDict

    if max(height, width) > 200 * min(height, width):
        return
    films = VideoSamplingConfig.default("glm4v", 28)
    assert {"shortest_edge": films.min_pixels, "longest_edge": films.max_pixels} == theirs["glm4v"].size
    size = SizeDict(shortest_edge=films.min_pixels, longest_edge=films.max_pixels)
    wanted = resized(theirs["glm4v"], frames, height, width, size, 28)
    assert films.frame_size(frames, height, width, patch_size=14, merge_size=2) == wanted


def test_what_files_say_of_glm4v():
    usual = VideoSamplingConfig.default("glm4v", 28)
    assert usual.with_processor_config({}) == usual == usual.with_processor_config(usual.to_processor_config())
    other = usual.replace(fps=1.5, max_frames=90, max_pixels=90_000)
    assert usual.with_processor_config(other.to_processor_config()) == other
    assert usual.with_processor_config({"fps": 1.0}).max_frames == 300  # five minutes
    for wrong in ({"size": 5}, {"fps": -1}, {"max_duration": 10**9}):
        with pytest.raises((ConfigError, CheckpointError)):
            usual.with_processor_config(wrong)


def same(rule: str, total: int, ours: list[int], reference: list[int]) -> None:
    assert ours == sorted(ours) and 0 <= ours[0] and ours[-1] < total
    if rule == "qwen3-vl":
        assert ours == reference
        return
    # They count on in floats: where a frame's number is whole they may fall just below it, and once too often.
    count = len(ours)
    assert count % 2 == 0 and len(reference) in (count, count + 1)
    for n, (mine, other) in enumerate(zip(ours, reference, strict=False)):
        assert mine == other or (n * total % count == 0 and other == mine - 1)


@given(
    rule=st.sampled_from(RULES),
    frames=st.integers(2, 800),
    height=st.integers(1, 3000),
    width=st.integers(1, 3000),
    capped=st.booleans(),
    side=st.sampled_from([2, 14, 16]),
)
@example(rule="qwen3-vl", frames=3, height=5, width=900, capped=True, side=14)  # thinner than a token
def test_sizes_are_theirs(theirs, rule, frames, height, width, capped, side):
    from transformers.image_utils import SizeDict

    processor, factor = theirs[rule], 2 * side
    if max(height, width) > 200 * min(height, width):
        return
    usual = VideoSamplingConfig.default(rule, factor)
    size = SizeDict(shortest_edge=usual.min_pixels, longest_edge=usual.max_pixels)
    wanted = resized(processor, frames, height, width, size, factor, capped)
    video_frames = usual if capped else usual.replace(max_tokens=None)
    assert video_frames.frame_size(frames, height, width, patch_size=side, merge_size=2) == wanted


def resized(processor, frames: int, height: int, width: int, size, factor: int, capped: bool | None = None):
    """The size that `resize` would bring frames to: it is the last thing it says before torchvision is called."""
    import torch
    from transformers.video_processing_utils import BaseVideoProcessor

    with patch.object(BaseVideoProcessor, "resize", create=True) as last:
        video = torch.empty(1, frames, 1, height, width, device="meta")
        more = {} if capped is None else {"cap_pixels_per_frame": capped}
        processor.resize(video, size, None, factor=factor, temporal_factor=2, **more)
    found = last.call_args.kwargs["size"]
    return found.height, found.width


def test_very_short_videos():
    for rule in RULES:
        films = VideoSamplingConfig.default(rule, 28)
        assert films.sample_frame_indices(1, 0.04) == [0]
        assert (
            films.sample_frame_indices(3, 100.0)[0] == 0
            and len(films.sample_frame_indices(3, 100.0)) == {"qwen2-vl": 2, "qwen3-vl": 3}[rule]
        )
        assert (
            films.sample_frame_indices(7, 0.1, num_frames=1) == [0]
            if rule == "qwen3-vl"
            else films.sample_frame_indices(7, 0.1, num_frames=1) == [0, 3]
        )
        assert films.frame_size(1, 100, 100, patch_size=14, merge_size=2)[0] % 28 == 0
        for wrong in (
            {"num_frames": 0},
            {"num_frames": 8},
            {"fps": 0.0},
            {"fps": float("nan")},
            {"num_frames": 2, "fps": 1.0},
        ):
            with pytest.raises(ConfigError):
                films.sample_frame_indices(7, 1.0, **wrong)
        with pytest.raises(ImageError, match="aspect ratio above 200"):
            films.frame_size(4, 30, 30_000, patch_size=14, merge_size=2)
    assert frame_interval([1.0, 2.0, 4.0]) == 1.5 and frame_interval([3.0]) == 1.0


def test_what_files_say():
    for rule in RULES:
        usual = VideoSamplingConfig.default(rule, 28)
        assert usual.with_processor_config({}) == usual == usual.with_processor_config(usual.to_processor_config())
        other = usual.replace(fps=1.0, max_frames=32, min_pixels=5000, max_pixels=90_000, max_tokens=None)
        assert usual.with_processor_config(other.to_processor_config()) == other
        assert usual.with_processor_config({"min_pixels": 4000, "max_pixels": 8000}).max_pixels == 8000
        for wrong in (
            {"size": 5},
            {"fps": -1},
            {"max_frames": 10**9},
            {"min_frames": 900},
            {"max_video_tokens": -3},
        ):
            with pytest.raises((ConfigError, CheckpointError)):
                usual.with_processor_config(wrong)


def test_what_files_say_of_internvl():
    usual = VideoSamplingConfig.default("internvl", 448)
    for films in (usual, usual.replace(num_frames=32), usual.replace(num_frames=None, fps=0.5)):
        assert (
            usual.with_processor_config({}) == usual
            and usual.with_processor_config(films.to_processor_config()) == films
        )
    assert usual.with_processor_config({"num_frames": 16, "fps": 3.0}).num_frames == 16  # which goes first
    for wrong in ({"size": {"height": 448}}, {"fps": -1}, {"num_frames": 10**9}, {"initial_shift": False}):
        with pytest.raises((ConfigError, CheckpointError)):
            usual.with_processor_config(wrong)
