"""Prefill of vision-language models as two CUDA graphs: one encodes images, one runs the decoder.

At batch size 1, a prefill is about a thousand small kernel launches, which take longer than the GPU work. Prompts that
differ only in ids and pixels (one question about many images of one size) share their graphs. The graphs are captured
the second time such a prompt occurs.

Shapes: B rows, L tokens of the longest stream, N image tokens, W width, V vocabulary, G key/value heads, D head width.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from vitrail.backbones.fusion import DeepStackConfig, DeepStackInputs
from vitrail.connectors import MergerConfig, ProjectorConfig
from vitrail.encoders import PackedViT, ViT
from vitrail.generate.cuda_graph_decode import (
    CUDAGraphStepper,
    WeightPointers,
    capture_graph,
    compile_blocks,
    copy_to_device,
    get_cached_stepper,
)
from vitrail.models.vision_inputs import VisionInputs
from vitrail.models.vlm import VISUAL_KINDS, VLM
from vitrail.models.vlm_vision_model import VisionFeatures
from vitrail.nn import AttentionPlan, Block, KVCache
from vitrail.stream import PackedBatch, Stream, merge_features
from vitrail.stream.packing import pad_streams

MAX_CACHED_GRAPHS = 4  # cached kinds of prompts per model; a graph holds the activations of its prompt

MediaInputs = Sequence[VisionInputs | None]
"""Images and videos."""


def run_prefill(
    model: VLM,
    streams: Sequence[Stream],
    vision_inputs: MediaInputs,
    stepper: CUDAGraphStepper,
    ticket: "VisionEncodingTicket | None" = None,
) -> Tensor | None:
    """Run the prefill as CUDA graphs and fill the stepper's cache. Return the next logits (B, V).

    Return None if the model must run eagerly: the kind of prompt is new, or graphs do not support it. `ticket` is the
    result of `start_vision_encoding`. The streams are only padded to a batch for a new graph, because padding takes as
    long as everything else here.
    """
    if not _can_capture_prefill(model, streams):
        return None
    prefills, kind = stepper.prefill_graphs, _prompt_kind(model, streams, vision_inputs)
    is_repeated, prefill = kind in prefills, prefills.pop(kind, None)
    # start_vision_encoding has already checked the weights.
    is_valid = prefill is not None and (prefill.holds_encoding(ticket) or prefill.weight_pointers.are_unchanged())
    if is_repeated and not is_valid:
        parts = (model.tower, model.decoder) if stepper.use_compile else ()
        with compile_blocks(block for part in parts for block in part.modules() if isinstance(block, Block)):
            prefill = CUDAGraphPrefill(model, pad_streams(streams), vision_inputs, stepper.cache)
    prefills[kind] = prefill  # evict the least recently used kind
    if len(prefills) > MAX_CACHED_GRAPHS:
        del prefills[next(iter(prefills))]
    return None if prefill is None else prefill(streams, vision_inputs, ticket)


class VisionEncodingTicket(NamedTuple):
    """Identifies a started image encoding: the prefill and the number of the encoding."""

    prefill: "CUDAGraphPrefill"
    number: int


def start_vision_encoding(model: VLM, vision_inputs: MediaInputs) -> VisionEncodingTicket | None:
    """Start to encode the images if a cached graph fits their shapes. Return a ticket, or None.

    The GPU encodes while the host prepares the prompt, which takes about as long. Nothing may wait for the device
    between this call and `CUDAGraphPrefill`.
    """
    stepper = get_cached_stepper(model.decoder) if _reads_all_tokens(model) else None
    shapes = _input_shapes(vision_inputs)
    for prefill in reversed([] if stepper is None else list(stepper.prefill_graphs.values())):
        if prefill is not None and prefill.input_shapes == shapes and prefill.weight_pointers.are_unchanged():
            return prefill.encode_images(vision_inputs)
    return None


class CUDAGraphPrefill:
    """CUDA graphs of the prefill for one kind of prompt. Calling it returns logits (B, V) in a reused buffer.

    Tower and connector are one graph and the decoder is another, so that encoding can start before the ids are known.
    The object holds no reference to the model.
    """

    def __init__(self, model: VLM, batch: PackedBatch, vision_inputs: MediaInputs, cache: KVCache):
        self.cache, self.input_shapes = cache, _input_shapes(vision_inputs)
        # The stepper checks the decoder's weights.
        self.weight_pointers = WeightPointers(model.tower, model.connector, model.stack)
        # The graphs read these tensors: keep them alive.
        static_inputs = _build_inputs(model, batch, vision_inputs, cache.device)
        self.inputs = static_inputs
        logits_buffer = torch.zeros(
            len(batch.lengths), model.config.decoder.vocab_size, dtype=cache.dtype, device=cache.device
        )
        self.logits = logits_buffer
        self.vision_features: dict[str, VisionFeatures] = {}
        self.encode_count = 0
        features, has_vision = self.vision_features, any(one is not None for one in static_inputs.media)
        self.vision_graph = capture_graph(lambda: _encode_into(model, static_inputs, features)) if has_vision else None
        self.decoder_graph = capture_graph(
            lambda: logits_buffer.copy_(_compute_logits(model, static_inputs, features, cache))
        )

    def encode_images(self, vision_inputs: MediaInputs) -> VisionEncodingTicket:
        for static_input, new_input in zip(self.inputs.media, vision_inputs, strict=True):
            if static_input is not None and new_input is not None:
                static_input.pixels.copy_(new_input.pixels)
        if self.vision_graph is not None:
            self.vision_graph.replay()
        self.encode_count += 1
        return VisionEncodingTicket(self, self.encode_count)

    def holds_encoding(self, ticket: VisionEncodingTicket | None) -> bool:
        """Return whether the features of this encoding are still in the buffers."""
        return ticket is not None and ticket.prefill is self and ticket.number == self.encode_count

    def __call__(
        self, streams: Sequence[Stream], vision_inputs: MediaInputs, ticket: VisionEncodingTicket | None = None
    ) -> Tensor:
        if not self.holds_encoding(ticket):
            self.encode_images(vision_inputs)
        copy_to_device(pad_sequence([stream.ids for stream in streams], batch_first=True), self.inputs.batch.ids)
        self.decoder_graph.replay()
        cache = self.cache
        cache.lengths, cache.max_row_length = self.inputs.lengths.clone(), self.inputs.batch.ids.shape[1]
        cache.has_equal_lengths = len(set(self.inputs.batch.lengths)) == 1
        return self.logits


def _encode_into(model: VLM, static_inputs: "_PrefillInputs", features: dict[str, VisionFeatures]) -> None:
    """Encode images into the tensors of the first call, which the decoder's graph reads."""
    for feed, one in zip(VISUAL_KINDS, static_inputs.media, strict=True):
        if one is None:
            continue
        encoded = model.encode_images(one)
        if feed not in features:
            features[feed] = VisionFeatures(
                [value.clone() for value in encoded.features],
                [[value.clone() for value in depth] for depth in encoded.deepstack_features],
            )
        for targets, values in zip(
            (features[feed].features, *features[feed].deepstack_features),
            (encoded.features, *encoded.deepstack_features),
            strict=True,
        ):
            for target, value in zip(targets, values, strict=True):
                target.copy_(value)


class _PrefillInputs(NamedTuple):
    """Inputs of the graphs on the device. Ids and pixels belong to the prompt, the rest to the kind of prompt."""

    batch: PackedBatch
    media: MediaInputs
    positions: Tensor  # (B, L) or (B, L, 3)
    lengths: Tensor  # (B,)
    places: Tensor | None  # (N,) indices of the image tokens, for DeepStack
    tower_layouts: list[Any]  # tensors that the graph of a packed tower reads


def _build_inputs(model: VLM, batch: PackedBatch, media: MediaInputs, device: torch.device) -> _PrefillInputs:
    config, tower = model.config, model.tower
    axes = batch.positions[..., 0] if config.decoder.rotary.layout == "1d" else batch.positions
    batch = replace(batch.to(device), ids=batch.ids.to(device, copy=True))
    feeds = [feed for feed, one in zip(VISUAL_KINDS, media, strict=True) if one is not None]
    stacked = bool(feeds) and isinstance(config.decoder.fusion, DeepStackConfig)
    return _PrefillInputs(
        batch,
        [None if one is None else one._replace(pixels=one.pixels.to(device, copy=True)) for one in media],
        axes.to(device),
        torch.tensor(batch.lengths, device=device),
        torch.cat([batch.feature_placements[feed].token_indices for feed in feeds]) if stacked else None,
        [tower.layout(cast(Any, one.layouts), device) for one in media if one and isinstance(tower, PackedViT)],
    )


def _compute_logits(
    model: VLM, static_inputs: _PrefillInputs, features: Mapping[str, VisionFeatures], cache: KVCache
) -> Tensor:
    """Return the logits (B, V) of the model for an empty cache, without host-device synchronization or transfers."""
    decoder, fills = model.decoder, static_inputs.batch.feature_placements
    tables = {} if model.newline is None else {"newline": model.newline}
    blocks = {feed: one.features for feed, one in features.items()}
    batch = static_inputs.batch
    x = merge_features(decoder.embed(batch.ids), blocks | tables, batch, add=model.config.merge == "add")  # (B, L, W)
    stacked_features = None
    if static_inputs.places is not None:
        depths = [
            [torch.cat(depth)[fills[feed].rows] for depth in one.deepstack_features] for feed, one in features.items()
        ]
        stacked_features = DeepStackInputs(
            static_inputs.places, [torch.cat(depth) for depth in zip(*depths, strict=True)]
        )  # (N, W) each
    last = static_inputs.lengths - 1
    x = decoder.forward_embeddings(
        x,
        static_inputs.positions,
        AttentionPlan(causal=True),
        cast(KVCache, _PrefillCache(cache)),
        stacked_features,
        output_positions=last,
    )
    return decoder.compute_logits(x[:, 0])


class _PrefillCache(NamedTuple):
    """View of an empty cache during prefill. Its layers are plain tensors, so that blocks compile only once."""

    cache: KVCache

    @property
    def max_row_length(self) -> int:
        return self.cache.max_row_length

    def layer(self, i: int) -> "_PrefillCacheLayer":
        return _PrefillCacheLayer(self.cache.k[i], self.cache.v[i])


class _PrefillCacheLayer(NamedTuple):
    k: Tensor  # (B, capacity, G, D)
    v: Tensor

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self.k[:, : k.shape[1]].copy_(k)
        self.v[:, : v.shape[1]].copy_(v)
        return k, v


def _input_shapes(media: MediaInputs) -> tuple[Any, ...]:
    return tuple(None if one is None else (one.layouts, one.pixels.shape) for one in media)


def _prompt_kind(model: VLM, streams: Sequence[Stream], media: MediaInputs) -> tuple[Any, ...]:
    """Return the key of a kind of prompt: everything except ids and pixels, plus the address of the newline weight."""
    static_inputs = (x for one in streams for x in (one.kinds, one.positions, one.source, one.row))
    newline = None if model.newline is None else model.newline.data_ptr()
    return newline, _input_shapes(media), *(x.numpy().tobytes() for x in static_inputs)


def _can_capture_prefill(model: VLM, streams: Sequence[Stream]) -> bool:
    """Return whether the prefill can be captured: the parts below never synchronize with the host."""
    config = model.config
    return (
        isinstance(model.tower, (ViT, PackedViT))
        and _reads_all_tokens(model)
        and not config.policy.masks_padding
        and isinstance(config.connector, (MergerConfig, ProjectorConfig))
        and not config.padding_embedding  # its kinds of patches come from the host
        and model.decoder.can_trim_last_layer
        and not any(bool(stream.spans.any()) for stream in streams)
    )


def _reads_all_tokens(model: VLM) -> bool:
    """Return whether the decoder reads all image tokens, of grids of one size, and keeps attending to them."""
    if model.config.has_unequal_views:
        return False
    return model.queries is None and model.config.active_reduction is None and not model.config.voco_tokens
