"""Text generation from vision-language models: prefill token streams with images and videos, then decode text.

Shapes: B rows, L tokens of the longest stream, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vitrail.backbones.decoder import Decoder
from vitrail.errors import ConfigError
from vitrail.generate import text_generation
from vitrail.generate.cuda_graph_decode import CompiledStepper, CUDAGraphStepper, can_capture
from vitrail.generate.cuda_graph_prefill import VisionEncodingTicket, run_prefill, start_vision_encoding
from vitrail.generate.text_generation import GeneratedText, GeneratedToken, StepperFactory
from vitrail.models.cross_attention_vlm import CrossAttentionVLM, ImageViews
from vitrail.models.vision_inputs import VisionInputs
from vitrail.models.vlm import VLM
from vitrail.stream import PackedBatch, Stream
from vitrail.stream.packing import pad_streams


class VLMStepper:
    """Stepper whose prompts are token streams, one per row, with their images and videos.

    Generated tokens continue at the largest position of their row, which M-RoPE makes smaller than its token count.
    With a `capacity` and on a GPU, the stepper uses CUDA graphs for steps and for repeated kinds of prompts.
    """

    def __init__(
        self,
        model: VLM | CrossAttentionVLM,
        streams: Sequence[Stream],
        images: VisionInputs | ImageViews | None,
        videos: VisionInputs | None,
        capacity: int | None = None,
        *,
        compiled: bool = False,
        encoding_ticket: VisionEncodingTicket | None = None,
    ):
        device, count = model.decoder.embed.weight.device, len(streams)
        self.model, self.streams, self.encoding_ticket = model, streams, encoding_ticket
        self.vision_inputs: Any = (images,) if isinstance(model, CrossAttentionVLM) else (images, videos)
        next_positions = [model.find_next_position(stream) for stream in streams]
        shift = [place - len(stream) for place, stream in zip(next_positions, streams, strict=True)]
        self.graph_stepper: CUDAGraphStepper | None = None
        drops_image_tokens = isinstance(model, VLM) and model.voco is not None  # then positions exceed cache slots
        positions_fit = not drops_image_tokens and max(shift, default=0) <= 0
        if capacity is not None and positions_fit and can_capture(model.decoder, count, capacity):
            self.graph_stepper = (CompiledStepper if compiled else CUDAGraphStepper).get_or_create(
                model.decoder, count, capacity, shift
            )
        self.cache = model.decoder.make_cache(count) if self.graph_stepper is None else self.graph_stepper.cache
        # (B, 1), for eager steps
        self.next_position = torch.tensor(next_positions, device="cpu" if self.graph_stepper else device)[:, None]

    def prefill(self, ids: Tensor, counts: Tensor) -> Tensor:
        if len(counts) != len(self.streams):
            raise ConfigError(
                f"{len(counts)} prompts for {len(self.streams)} streams",
                "remove guidance_scale, which streams do not support",
            )
        if self.graph_stepper is not None and isinstance(self.model, VLM):
            logits = run_prefill(self.model, self.streams, self.vision_inputs, self.graph_stepper, self.encoding_ticket)
            if logits is not None:
                return logits
        batch = _move_placements(pad_streams(self.streams), self.model.decoder.embed.weight.device)
        hidden = self.model.forward_hidden(batch, *self.vision_inputs, cache=self.cache)  # (B, L, W)
        return self.model.decoder.compute_logits(hidden[torch.arange(len(counts), device=counts.device), counts - 1])

    def step(self, ids: Tensor) -> Tensor:
        if self.graph_stepper is not None:
            return self.graph_stepper.step(ids)
        logits = self.model.decoder(ids[:, None], positions=self.next_position, cache=self.cache)  # (B, 1, V)
        self.next_position = self.next_position + 1
        return logits[:, 0]


def _move_placements(batch: PackedBatch, device: torch.device) -> PackedBatch:
    """Move the feature placements to the device of the features. The host reads the rest of the batch."""
    fills = {
        feed: replace(fill, token_indices=fill.token_indices.to(device), rows=fill.rows.to(device))
        for feed, fill in batch.feature_placements.items()
    }
    return replace(batch, feature_placements=fills)


def generate_from_streams(
    model: VLM | CrossAttentionVLM,
    streams: Sequence[Stream],
    images: VisionInputs | ImageViews | None = None,
    videos: VisionInputs | None = None,
    *,
    compiled: bool = False,
    **options: Any,
) -> list[GeneratedText]:
    """Continue each stream with text.

    images    images of all streams, in their order
    options   further arguments of `generate_texts`, except negative prompts
    compiled  compile the model before capturing CUDA graphs. This takes tens of seconds, and pays off if prompts of
              the same kind are frequent.
    """
    stepper = _build_stepper_factory(model, streams, images, videos, compiled)  # starts to encode the images
    return text_generation.generate_texts(
        model.decoder, [one.ids.tolist() for one in streams], stepper_factory=stepper, **options
    )


def stream_tokens_from_streams(
    model: VLM | CrossAttentionVLM,
    streams: Sequence[Stream],
    images: VisionInputs | ImageViews | None = None,
    videos: VisionInputs | None = None,
    *,
    compiled: bool = False,
    **options: Any,
) -> Iterator[GeneratedToken]:
    """Continue each stream and yield every token. See `generate_from_streams` for the arguments."""
    stepper = _build_stepper_factory(model, streams, images, videos, compiled)
    return text_generation.stream_tokens(
        model.decoder, [one.ids.tolist() for one in streams], stepper_factory=stepper, **options
    )


def _build_stepper_factory(
    model: VLM | CrossAttentionVLM,
    streams: Sequence[Stream],
    images: VisionInputs | ImageViews | None,
    videos: VisionInputs | None,
    compiled: bool,
) -> StepperFactory:
    vision_inputs: Any = (images, videos)
    encoding_ticket = start_vision_encoding(model, vision_inputs) if isinstance(model, VLM) else None

    def create_stepper(_decoder: Decoder, _batch_size: int, capacity: int) -> VLMStepper:
        return VLMStepper(model, streams, images, videos, capacity, compiled=compiled, encoding_ticket=encoding_ticket)

    return create_stepper
