"""Rows of one shape with a video: all rows of a batch have videos of the same length, and questions in turns.

The turns of a row attend to the video and to themselves only. Each turn has the same number of tokens, so positions
and attention plan are the same for all rows. A prompt of the chat pipeline with the same video has the same tokens and
positions.

Shapes: B rows, T frames, C channels, H, W pixels, P tokens before the turns, n video tokens, Q turns, S tokens of a
turn, D width
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vitrail.encoders.packed_vit import PackedViTConfig
from vitrail.errors import ConfigError
from vitrail.models.chat_layout import ChatFormat, build_chat_parts, prepend_bos
from vitrail.models.video_inputs import VideoFrames
from vitrail.models.vision_inputs import VisionInputs
from vitrail.models.vlm import VLM
from vitrail.models.vlm_config import VLMConfig
from vitrail.nn import AttentionPlan
from vitrail.processing.grid import Grid
from vitrail.processing.patchify import patchify_blocks
from vitrail.processing.tokenizer import Tokenizer
from vitrail.stream import build_stream, compute_patch_times, pack_streams

PROBE_QUESTION = "?"


@dataclass(frozen=True, eq=False)
class VideoRowTemplate:
    """What rows share: the tokens before the turns, with the places of the video, positions and attention plan.

    Build it with `build_video_row_template`.
    """

    grid: Grid  # of one video
    ids: Tensor  # (P,)
    video_places: Tensor  # (n,) tokens that features replace
    feature_rows: Tensor  # (n,)
    positions: Tensor  # (1, P + Q·S) or, for rotary layouts of several axes, (1, P + Q·S, 3)
    plan: AttentionPlan
    num_turns: int
    turn_length: int

    @property
    def prefix_length(self) -> int:
        return len(self.ids)

    @property
    def num_tokens(self) -> int:
        """Tokens of a row."""
        return self.positions.shape[1]

    @property
    def num_positions(self) -> int:
        """Positions of a row: what the context of a rotary embedding must cover."""
        return int(self.positions.max()) + 1

    def to(self, device: torch.device | str) -> "VideoRowTemplate":
        names = ("ids", "video_places", "feature_rows", "positions")
        return replace(self, plan=self.plan.to(device), **{name: getattr(self, name).to(device) for name in names})


def build_video_row_template(
    config: VLMConfig,
    tokenizer: Tokenizer,
    chat_format: ChatFormat,
    timestamps: Sequence[float],
    frame_size: tuple[int, int],
    num_turns: int,
    turn_length: int,
) -> VideoRowTemplate:
    """Build the template of rows with one video, whose frames have these timestamps in seconds and this size."""
    tower = _check_config(config)
    S = config.frames_per_step
    if len(timestamps) % S:
        raise ConfigError(
            f"videos of {len(timestamps)} frames do not fill steps of {S} frames", f"use a multiple of {S} frames"
        )
    grid = Grid.from_pixels(
        *frame_size,
        tower.patch_size,
        merge_size=tower.spatial_merge_size,
        t=len(timestamps) // tower.temporal_patch_size,
    )
    interval = (timestamps[-1] - timestamps[0]) / max(1, len(timestamps) - 1) or 1.0
    frames = VideoFrames(torch.empty(0), compute_patch_times(timestamps, S), S * interval)
    message = {"role": "user", "content": [{"type": "video"}, {"type": "text", "text": PROBE_QUESTION}]}
    chat = prepend_bos(chat_format.template.encode([message], tokenizer), tokenizer, config.rules.fill_id)
    *before, question = build_chat_parts(chat, [], config, chat_format, [(grid, frames)], tokenizer)
    assert tokenizer.eos_token_id is not None
    expected = [*tokenizer.encode(PROBE_QUESTION), tokenizer.eos_token_id]
    if not isinstance(question.ids, list) or question.ids != expected:
        raise ConfigError(
            f"the chat template {chat_format.template.name} writes text around questions",
            "use the template `ended`, in which every turn ends with the end token",
        )
    stream = build_stream([*before, question], config.rules)
    placement = pack_streams([stream], len(stream)).feature_placements["video"]
    P = len(stream) - len(expected)
    turn = torch.arange(turn_length)[:, None].expand(-1, 3) + stream.positions[P]
    positions = torch.cat([stream.positions[:P], turn.repeat(num_turns, 1)])[None]
    turns = torch.arange(1, num_turns + 1).repeat_interleave(turn_length)
    segments = torch.cat([torch.zeros(P, dtype=torch.long), turns])[None]
    plan = AttentionPlan(
        causal=True,
        segments=segments,
        key_segments=segments,
        shares_segment_zero=True,
        prefix_length=P,
        causal_prefix=True,
    )
    return VideoRowTemplate(
        grid=grid,
        ids=stream.ids[:P],
        video_places=placement.token_indices,
        feature_rows=placement.rows,
        positions=positions[..., 0] if config.decoder.rotary.layout == "1d" else positions,
        plan=plan,
        num_turns=num_turns,
        turn_length=turn_length,
    )


def _check_config(config: VLMConfig) -> PackedViTConfig:
    unsupported = {
        "a tower that takes views": not isinstance(config.tower, PackedViTConfig),
        "DeepStack": bool(config.deepstack_layers),
        "rules.bidirectional": bool(config.rules.bidirectional) or config.rules.bidirectional_prompt,
        "decoder layers with a sliding window": "sliding_attention" in config.decoder.layer_types,
    }
    for name, is_used in unsupported.items():
        if is_used:
            raise ConfigError(f"rows of one shape with a video do not support {name}", 'use task = "chat"')
    assert isinstance(config.tower, PackedViTConfig)
    return config.tower


def embed_video_prefix(model: VLM, template: VideoRowTemplate, frames: Tensor) -> Tensor:
    """Encode videos uint8 (B, T, C, H, W) and return the embeddings (B, P, D) of the tokens before the turns."""
    config, weight = model.config, model.decoder.embed.weight
    channels = [
        (frames[:, :, c].float() / 255 - mean) / std
        for c, (mean, std) in enumerate(zip(config.mean, config.std, strict=True))
    ]
    pixels = torch.stack(channels, 2).to(weight.dtype).flatten(0, 1)  # one video of B·T frames: frames are independent
    tower = _check_config(config)
    patches, grid = patchify_blocks(
        pixels, tower.patch_size, merge_size=tower.spatial_merge_size, temporal_patch_size=tower.temporal_patch_size
    )
    features = model.encode_images(VisionInputs(patches, (grid,))).features[0].unflatten(0, (len(frames), -1))
    prefix = model.decoder.embed(template.ids)[None].expand(len(frames), -1, -1)
    places = template.video_places[None, :, None].expand(len(frames), -1, prefix.shape[-1])
    return prefix.scatter(1, places, features[:, template.feature_rows].to(prefix.dtype))


def forward_video_turns(model: VLM, template: VideoRowTemplate, prefix: Tensor, ids: Tensor) -> Tensor:
    """Return the hidden states (B, Q·S, D) of turns with ids (B, Q·S) behind embeddings of the video (B, P, D)."""
    embeds = torch.cat([prefix, model.decoder.embed(ids)], 1)
    hidden = model.decoder.forward_embeddings(
        embeds, template.positions.expand(len(ids), *template.positions.shape[1:]), template.plan
    )
    return hidden[:, template.prefix_length :]


@torch.no_grad()
def answer_video_turns(
    model: VLM,
    template: VideoRowTemplate,
    frames: Tensor,
    ids: Tensor,
    lengths: Tensor,
    stop_id: int,
    max_new_tokens: int,
) -> Tensor:
    """Answer the questions of all turns greedily: ids (B, Q, S) of which the first `lengths` (B, Q) are the question.

    Returns the ids (B, Q, max_new_tokens) of the answers, with `stop_id` from their end on.
    """
    prefix, ids = embed_video_prefix(model, template, frames), ids.clone()
    answers = ids.new_full((*lengths.shape, max_new_tokens), stop_id)
    running = torch.ones_like(lengths, dtype=torch.bool)
    for step in range(max_new_tokens):
        hidden = forward_video_turns(model, template, prefix, ids.flatten(1)).unflatten(1, ids.shape[1:])
        last = (lengths + step - 1)[..., None, None].expand(-1, -1, 1, hidden.shape[-1])
        chosen = model.decoder.compute_logits(hidden.gather(2, last)[:, :, 0]).argmax(-1)  # (B, Q)
        running = running & (chosen != stop_id)
        chosen = torch.where(running, chosen, stop_id)
        answers[:, :, step] = chosen
        ids = ids.scatter(2, (lengths + step)[..., None], chosen[..., None])
        if step % 2 and not bool(running.any()):
            break
    return answers
