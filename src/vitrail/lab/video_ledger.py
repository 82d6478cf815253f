"""The cost of a long video: frames, FLOPs, latency and cache of a vision-language model that a video fills.

FLOPs, bytes and rooflines are those of the cost ledger.
"""

from collections.abc import Sequence

import torch

from vitrail.config import Config
from vitrail.encoders.packed_vit import PackedViTConfig
from vitrail.errors import ConfigError
from vitrail.lab.cost_ledger import (
    CONTEXT_LENGTHS,
    DEVICES,
    DTYPES,
    DeviceSpec,
    PassTime,
    compute_roofline,
    get_preset,
    lookup,
)
from vitrail.models.vlm import VLM
from vitrail.models.vlm_config import VisualLayout, VLMConfig
from vitrail.nn import Workload, cost
from vitrail.processing.anyres import AnyResPolicy
from vitrail.processing.grid import Grid
from vitrail.processing.internvl_tiles import TilesPolicy
from vitrail.processing.split_tiles import SplitPolicy
from vitrail.stream import POSITION_RULES

QUESTION_TOKENS = 64
TIMESTAMP_TOKENS = 10  # of a text timestamp with its boundary tokens, such as <12.5 seconds>
DEFAULT_FPS = 2.0


class VideoCost(Config):
    """Cost of a question about a video that fills a context.

    context_length  tokens of the prompt at most: the video and the question
    tokens          tokens of the prompt
    num_frames      frames of the video
    seconds         duration of the video at the frame rate
    frame_tokens    tokens of a frame, text timestamps included
    flops           component → FLOPs of the prefill
    cache_bytes     bytes of keys and values after the prefill
    prefill         roofline of the prefill, which is the time to the first token
    decode          roofline of each further token
    """

    context_length: int
    tokens: int
    num_frames: int
    seconds: float
    frame_tokens: float
    flops: dict[str, int]
    cache_bytes: int
    prefill: PassTime
    decode: PassTime


class VideoLedger(Config):
    """Costs of a model for videos of several lengths on one device."""

    name: str
    device: str
    dtype: str
    fps: float
    frame_size: tuple[int, int]
    costs: tuple[VideoCost, ...]


def compute_video_ledger(
    model: str | VLMConfig,
    *,
    name: str = "",
    context_lengths: Sequence[int] = CONTEXT_LENGTHS,
    frame_size: tuple[int, int] = (480, 640),
    fps: float = DEFAULT_FPS,
    dtype: str = "bfloat16",
    device: str = "h200",
) -> VideoLedger:
    """Compute the costs of videos that fill these contexts, with frames of `frame_size` (height, width).

    Every frame has the size that it has in a short video: budgets for whole videos do not apply.
    """
    config = get_preset(model) if isinstance(model, str) else model
    label = name or (model if isinstance(model, str) else type(config).__name__)
    if not isinstance(config, VLMConfig) or config.resolved_video_sampling is None:
        raise ConfigError(f"{label} takes no videos", "give a model such as qwen2.5-vl-7b, or omit --video")
    if fps <= 0:
        raise ConfigError(f"--fps is {fps:g}", "give a number above 0")
    spec = lookup(DEVICES, device, "device")
    with torch.device("meta"):
        vlm = VLM(config).to(lookup(DTYPES, dtype, "type"))
    costs = tuple(_compute_cost(vlm, label, length, frame_size, fps, spec) for length in context_lengths)
    return VideoLedger(label, device, dtype, fps, frame_size, costs)


def _compute_cost(
    vlm: VLM, name: str, context_length: int, frame_size: tuple[int, int], fps: float, device: DeviceSpec
) -> VideoCost:
    config = vlm.config
    step = config.frames_per_step
    first, second = (_count_tokens(config, n * step, frame_size) for n in (1, 2))
    per_step = second - first
    num_steps = (context_length - QUESTION_TOKENS - first) // per_step + 1
    if num_steps < 1:
        raise ConfigError(
            f"a frame of {name} takes {first} tokens, which do not fit a context of {context_length} tokens",
            "give smaller frames, or a longer context",
        )
    num_frames = num_steps * step
    layout = layout_video(config, num_frames, frame_size)
    num_text = QUESTION_TOKENS + num_steps * _count_timestamp_tokens(config)
    workload = vlm.workload([], num_text, videos=[layout])
    tokens = num_text + config.count_tokens(layout)
    return VideoCost(
        context_length=context_length,
        tokens=tokens,
        num_frames=num_frames,
        seconds=num_frames / fps,
        frame_tokens=per_step / step,
        flops={part: component.flops for part, component in vlm.cost_components(workload).items()},
        cache_bytes=cost.count_bytes(vlm, workload).cache,
        prefill=compute_roofline(vlm, workload, device),
        decode=compute_roofline(vlm, Workload.decode(tokens + 1), device),
    )


def layout_video(config: VLMConfig, num_frames: int, frame_size: tuple[int, int]) -> VisualLayout:
    """Return the layout of a video whose frames have the size that they have in a video of one temporal patch."""
    policy, sampling = config.policy, config.resolved_video_sampling
    if isinstance(policy, TilesPolicy | AnyResPolicy | SplitPolicy):
        return policy.layout_video(num_frames)
    assert isinstance(config.tower, PackedViTConfig) and sampling is not None
    tower = config.tower
    sizes = {
        "patch_size": tower.patch_size,
        "merge_size": tower.spatial_merge_size,
        "temporal_patch_size": tower.temporal_patch_size,
    }
    height, width = sampling.frame_size(tower.temporal_patch_size, *frame_size, **sizes)
    return Grid.from_pixels(
        height,
        width,
        tower.patch_size,
        merge_size=tower.spatial_merge_size,
        t=num_frames // tower.temporal_patch_size,
    )


def _count_tokens(config: VLMConfig, num_frames: int, frame_size: tuple[int, int]) -> int:
    layout = layout_video(config, num_frames, frame_size)
    return config.count_tokens(layout) + num_frames // config.frames_per_step * _count_timestamp_tokens(config)


def _count_timestamp_tokens(config: VLMConfig) -> int:
    """Count the text tokens before each temporal patch."""
    sampling = config.resolved_video_sampling
    has_labels = sampling is not None and sampling.rule in ("smolvlm", "internvl")
    return TIMESTAMP_TOKENS if POSITION_RULES[config.rules.positions].per_frame or has_labels else 0
