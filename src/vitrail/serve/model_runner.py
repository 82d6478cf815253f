"""Passes of the engine: prompt chunks and decoding steps over a paged cache.

N tokens of a pass, B sequences, V vocabulary, W width
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitrail.backbones.decoder import Decoder
from vitrail.backbones.fusion import CrossAttentionFusionConfig, DeepStackInputs, VisualExpertInputs
from vitrail.errors import ConfigError
from vitrail.generate.cuda_graph_decode import can_capture, upload
from vitrail.generate.fused_paged_decoder import FusedPagedDecoder
from vitrail.models.vision_inputs import VisionInputs
from vitrail.models.vlm import VISUAL_KINDS, VLM
from vitrail.models.vlm_vision_model import VisionFeatures
from vitrail.nn import AttentionConfig, AttentionPlan, PagedKVCache, PagedPass
from vitrail.nn.kernels import HAS_TRITON
from vitrail.nn.paged_attention import KERNEL_HEAD_DIMS, count_tile_tokens
from vitrail.nn.rotary_embedding import DynamicNTKScaling, LongRoPEScaling
from vitrail.serve.captured_decode import CapturedDecode, DecodeResult
from vitrail.serve.engine_request import EnginePrompt, SequenceState
from vitrail.serve.engine_scheduler import PrefillChunk
from vitrail.stream import Stream
from vitrail.stream.packing import pad_streams


def explain_unsupported(model: Any) -> str | None:
    """Return why the engine cannot run a model, or None."""
    decoder = model.decoder if isinstance(model, VLM) else model
    if not isinstance(decoder, Decoder):
        return f"{type(model).__name__} is neither a decoder nor a VLM of visual tokens"
    config = decoder.config
    if isinstance(config.fusion, CrossAttentionFusionConfig):
        return "cross-attention to images has no pages"
    if config.linear_attention is not None:
        return "the state of linear attention has no pages"
    if isinstance(model, VLM) and model.voco is not None:
        return "VoCo tokens remove image tokens from the cache"
    rotaries = (config.rotary, config.sliding_rotary)
    if any(isinstance(one and one.scaling, DynamicNTKScaling | LongRoPEScaling) for one in rotaries):
        return "rotary frequencies depend on the length of a row"
    return None


class PromptEmbeddings(NamedTuple):
    """Embeddings (L, W) of a prompt with images.

    image_mask  (L,) visual tokens, for fusion inputs; None without fusion
    depths      features (N, W) of the visual tokens for each layer of DeepStack
    """

    embeds: Tensor
    image_mask: Tensor | None
    depths: list[Tensor] | None


class FeatureCache:
    """Image features by content hash, so that the tower encodes an image once. The least recently used go first."""

    def __init__(self, max_bytes: int):
        self.max_bytes, self.num_bytes = max_bytes, 0
        self._items: OrderedDict[bytes, VisionFeatures] = OrderedDict()
        self.num_encoded, self.num_reused = 0, 0

    def get(self, key: bytes) -> VisionFeatures | None:
        if (found := self._items.get(key)) is not None:
            self._items.move_to_end(key)
        return found

    def put(self, key: bytes, features: VisionFeatures) -> None:
        self._items[key] = features
        self.num_bytes += _count_bytes(features)
        while self.num_bytes > self.max_bytes and self._items:
            self.num_bytes -= _count_bytes(self._items.popitem(last=False)[1])

    def clear(self) -> None:
        self._items.clear()
        self.num_bytes = 0


def _count_bytes(features: VisionFeatures) -> int:
    tensors = [*features.features, *(x for depth in features.deepstack_features for x in depth)]
    return sum(x.numel() * x.element_size() for x in tensors)


def hash_inputs(inputs: VisionInputs) -> bytes:
    """Return the content hash of one prepared image or video."""
    pixels = inputs.pixels.detach().cpu().contiguous()
    found = blake2b(repr((inputs.layouts, tuple(pixels.shape))).encode(), digest_size=16)
    found.update(pixels.view(torch.uint8).numpy().data)
    for questions in inputs.questions:
        for ids in questions:
            found.update(repr(ids.tolist()).encode())
    return found.digest()


def build_engine_prompt(
    model: VLM, stream: Stream, images: VisionInputs | None = None, videos: VisionInputs | None = None
) -> EnginePrompt:
    """Build the prompt of a stream with its prepared images and videos."""
    given = {feed: inputs for feed, inputs in zip(VISUAL_KINDS, (images, videos), strict=True) if inputs is not None}
    keys = {feed: [hash_inputs(one) for one in model.split_inputs(inputs)] for feed, inputs in given.items()}
    return EnginePrompt(stream.ids.tolist(), stream, images, videos, keys)


class ModelRunner:
    """Run passes of a decoder or a VLM over a paged cache. The tables of the sequences are on the device."""

    def __init__(
        self, model: Decoder | VLM, cache: PagedKVCache, max_num_seqs: int, context_length: int, feature_bytes: int
    ):
        self.vlm = model if isinstance(model, VLM) else None
        self.decoder: Decoder = model.decoder if isinstance(model, VLM) else model
        self.cache, self.device = cache, self.decoder.embed.weight.device
        self.features = FeatureCache(feature_bytes)
        pages = -(-(context_length + 1) // cache.page_size)
        # The last row is for padding: its pages are page 0.
        self.padding_row = max_num_seqs
        self.tables = torch.zeros(max_num_seqs + 1, pages, dtype=torch.int32, device=self.device)
        self.last_ids = torch.zeros(max_num_seqs + 1, dtype=torch.long, device=self.device)
        self._known_pages: dict[int, int] = {}  # slot → pages in the device table
        groups = [one.heads // one.num_kv_heads for one in self._attentions()]
        self.tile_tokens = count_tile_tokens(max(groups))
        self._builds_tiles = self.device.type == "cuda"
        self.captured: CapturedDecode | None = None
        self._fused: FusedPagedDecoder | None = None
        if self.device.type == "cuda" and FusedPagedDecoder.supports(self.decoder):
            self.use_fused_kernels()

    def _attentions(self) -> list[AttentionConfig]:
        config = self.decoder.config
        return [config.block_config(i).attention for i in range(config.layers)]

    def use_fused_kernels(self) -> None:
        """Run passes without bidirectional spans and fusion inputs by fused kernels."""
        self._fused, self._builds_tiles = FusedPagedDecoder(self.decoder), True

    # ---- tables -------------------------------------------------------------------------------------------------

    def reset_slot(self, sequence: SequenceState) -> None:
        """Forget the table of a slot that gets a new sequence."""
        assert sequence.slot is not None
        self._known_pages[sequence.slot] = 0

    def _update_tables(self, sequences: Sequence[SequenceState]) -> None:
        """Copy new pages of sequences to the device tables."""
        changes: list[tuple[int, int, int]] = []
        for one in sequences:
            assert one.slot is not None
            known = self._known_pages[one.slot]
            if known < len(one.pages):
                changes += [(one.slot, index, one.pages[index]) for index in range(known, len(one.pages))]
                self._known_pages[one.slot] = len(one.pages)
        if changes:
            rows, columns, pages = upload(np.array(changes, dtype=np.int64).T, self.device)
            self.tables[rows, columns] = pages.int()

    def write_last_ids(self, sequences: Sequence[SequenceState], ids: Tensor) -> None:
        """Keep the sampled tokens (B,) on the device for the next pass."""
        self.last_ids[upload(np.array([one.slot for one in sequences]), self.device)] = ids

    # ---- passes -------------------------------------------------------------------------------------------------

    def capture_decoding(self, num_known_ids: int) -> None:
        """Run decoding by CUDA graphs, if the model can be captured. Graphs are captured on first use."""
        dims = {D for _, D in self.cache.shapes}
        weight = self.decoder.embed.weight
        if not (weight.is_cuda and can_capture(self.decoder, 1, 1) and dims <= KERNEL_HEAD_DIMS and HAS_TRITON):
            return

        def compute(rows: Tensor, slots: Tensor, positions: Tensor, splits: int) -> Tensor:
            return self.run_decode(rows, slots, positions, self.tables.shape[1] * self.cache.page_size, splits)

        self.captured = CapturedDecode(
            compute,
            self.last_ids,
            max_num_seqs=self.padding_row,
            num_known_ids=num_known_ids,
            logits_width=self.decoder.config.vocab_size,
            dtype=weight.dtype,
            kv_heads=min(heads for heads, _ in self.cache.shapes),
        )

    @torch.no_grad()
    def decode(self, sequences: Sequence[SequenceState], *, captured: bool = True) -> DecodeResult:
        """Process the last token of each sequence and return the logits of the next, by CUDA graphs if possible."""
        self._update_tables(sequences)
        slots = [one.num_computed for one in sequences]
        rows = [one.slot for one in sequences if one.slot is not None]
        positions = [one.position_of(one.num_computed) for one in sequences]
        if captured and self.captured is not None:
            return self.captured(rows, slots, positions)
        table_rows, at, where = upload(np.array([rows, slots, positions], dtype=np.int64), self.device)
        return DecodeResult(self.run_decode(table_rows, at, where, max(slots) + 1))

    def run_decode(self, rows: Tensor, slots: Tensor, positions: Tensor, max_length: int, splits: int = 1) -> Tensor:
        """Run one token of each table row (B,), at these slots and positions."""
        batch = PagedPass(self.cache, slots, rows, self.tables, max_length, splits=splits)
        embeds = self.decoder.embed(self.last_ids[rows])
        return self.decoder.compute_logits(self.run_decoder(embeds, positions, batch, None, None))

    def run_decoder(
        self, embeds: Tensor, positions: Tensor, batch: PagedPass, spans: Tensor | None, fusion_inputs: Any
    ) -> Tensor:
        """Run the decoder on embeddings (N, W). Returns hidden states (N, W)."""
        if self._fused is not None and spans is None and fusion_inputs is None:
            return self._fused(embeds, positions, batch)
        plan = AttentionPlan(causal=True, spans=None if spans is None else spans[None])
        hidden = self.decoder.forward_embeddings(embeds[None], positions[None], plan, batch, fusion_inputs)
        return hidden[0]

    @torch.no_grad()
    def prefill(self, chunks: Sequence[PrefillChunk]) -> Tensor | None:
        """Process chunks of prompts and return the next logits (B, V) of those that are complete, or None."""
        self._update_tables([chunk.sequence for chunk in chunks])
        slots = np.concatenate([np.arange(chunk.start, chunk.end) for chunk in chunks])
        counts = [chunk.end - chunk.start for chunk in chunks]
        rows = np.repeat(np.array([chunk.sequence.slot for chunk in chunks]), counts)
        ids = [id for chunk in chunks for id in chunk.sequence.tokens(chunk.start, chunk.end)]
        ends = np.cumsum(counts)
        device_ids, at, table_rows = upload(np.stack([np.array(ids), slots, rows]).astype(np.int64), self.device)
        batch = PagedPass(
            self.cache,
            at,
            table_rows,
            self.tables,
            int(slots.max()) + 1,
            chunks=tuple((int(row), count) for row, count in zip(rows[ends - 1], counts, strict=True)),
            tiles=self._build_tiles(rows[ends - 1], counts) if self._builds_tiles else None,
            tile_tokens=self.tile_tokens,
        )
        embeds, fusion_inputs = self._embed_chunks(chunks, device_ids)
        hidden = self.run_decoder(
            embeds, self._chunk_positions(chunks), batch, self._chunk_spans(chunks), fusion_inputs
        )
        last = [int(end) - 1 for chunk, end in zip(chunks, ends, strict=True) if chunk.is_last]
        if not last:
            return None
        return self.decoder.compute_logits(hidden[upload(np.array(last), self.device)])

    def _build_tiles(self, rows: np.ndarray, counts: Sequence[int]) -> Tensor:
        """Build the tiles of the attention kernel: row, first token and number of tokens."""
        tiles, start = [], 0
        for row, count in zip(rows, counts, strict=True):
            for first in range(0, count, self.tile_tokens):
                tiles.append((int(row), start + first, min(self.tile_tokens, count - first)))
            start += count
        return upload(np.array(tiles, dtype=np.int32).T, self.device)

    def _chunk_positions(self, chunks: Sequence[PrefillChunk]) -> Tensor:
        """Return the positions (N,), or (N, 3) of a rotary layout with several axes."""
        is_1d = self.decoder.config.rotary.layout == "1d"
        parts = []
        for sequence, start, end in chunks:
            if sequence.positions is None:
                own = np.arange(start, end)[:, None].repeat(3, 1)
            else:
                added = np.arange(max(start, sequence.prompt_length), end)
                later = (added - sequence.prompt_length + sequence.next_position)[:, None].repeat(3, 1)
                own = np.concatenate([sequence.positions[start : min(end, sequence.prompt_length)], later])
            parts.append(own)
        positions = np.concatenate(parts).astype(np.int64)
        return upload(positions[:, 0] if is_1d else positions, self.device)

    def _chunk_spans(self, chunks: Sequence[PrefillChunk]) -> Tensor | None:
        """Return the bidirectional spans (N,), numbered from 1 over all chunks; None without any."""
        if all(chunk.sequence.spans is None for chunk in chunks):
            return None
        parts, taken = [], 0
        for sequence, start, end in chunks:
            own = np.zeros(end - start, dtype=np.int64)
            if sequence.spans is not None and start < sequence.prompt_length:
                inside = sequence.spans[start : min(end, sequence.prompt_length)]
                own[: len(inside)] = np.where(inside > 0, inside + taken, 0)
                taken += int(sequence.spans.max())
            parts.append(own)
        return upload(np.concatenate(parts), self.device)

    # ---- images -------------------------------------------------------------------------------------------------

    def _embed_chunks(self, chunks: Sequence[PrefillChunk], ids: Tensor) -> tuple[Tensor, Any]:
        """Return the embeddings (N, W) of chunks, and the inputs of the fusion point."""
        embeds = self.decoder.embed(ids)
        offset, marks, depths = 0, [], []
        has_fusion = False
        for sequence, start, end in chunks:
            prepared: PromptEmbeddings | None = sequence.embeds
            stop = min(end, sequence.prompt_length)
            mark = torch.zeros(end - start, dtype=torch.bool)
            if prepared is not None and start < stop:
                embeds[offset : offset + stop - start] = prepared.embeds[start:stop]
                if prepared.image_mask is not None:
                    has_fusion = True
                    mark[: stop - start] = prepared.image_mask[start:stop]
                    first, count = int(prepared.image_mask[:start].sum()), int(mark.sum())
                    depths.append(
                        [] if prepared.depths is None else [x[first : first + count] for x in prepared.depths]
                    )
            marks.append(mark)
            offset += end - start
        if not has_fusion:
            return embeds, None
        mask = torch.cat(marks)
        if depths[0]:
            indices = upload(mask.nonzero()[:, 0].numpy(), self.device)
            return embeds, DeepStackInputs(indices, [torch.cat(parts) for parts in zip(*depths, strict=True)])
        return embeds, VisualExpertInputs(upload(mask[None].numpy(), self.device))

    @torch.no_grad()
    def embed_prompt(self, sequence: SequenceState) -> None:
        """Encode the images of a prompt, unless their features are cached, and embed its tokens."""
        prompt = sequence.prompt
        if self.vlm is None or prompt.stream is None or not prompt.stream.sources:
            return
        later = prompt.stream.source[sequence.num_computed :]
        if not bool((later >= 0).any()):  # the cached prefix contains all images
            return
        features = {}
        for feed, inputs in zip(VISUAL_KINDS, (prompt.images, prompt.videos), strict=True):
            if inputs is not None:
                features[feed] = self._encode(inputs, prompt.media_keys[feed])
        batch = pad_streams([prompt.stream])
        placements = {
            feed: replace(fill, token_indices=fill.token_indices.to(self.device), rows=fill.rows.to(self.device))
            for feed, fill in batch.feature_placements.items()
        }
        embeds, fusion_inputs = self.vlm.embed_stream(replace(batch, feature_placements=placements), features)
        mask, depths = None, None
        if isinstance(fusion_inputs, DeepStackInputs):
            mask, depths = fusion_inputs.image_mask[0].cpu(), list(fusion_inputs.features)
        elif isinstance(fusion_inputs, VisualExpertInputs):
            mask = fusion_inputs.image_mask[0].cpu()
        sequence.embeds = PromptEmbeddings(embeds[0], mask, depths)

    def _encode(self, inputs: VisionInputs, keys: Sequence[bytes]) -> VisionFeatures:
        """Return the features of images or videos, from the cache where it has them."""
        assert self.vlm is not None
        parts: list[VisionFeatures] = []
        for one, key in zip(self.vlm.split_inputs(inputs), keys, strict=True):
            found = self.features.get(key)
            if found is None:
                found = self.vlm.encode_images(one)
                self.features.num_encoded += 1
                self.features.put(key, found)
            else:
                self.features.num_reused += 1
            parts.append(found)
        depths = zip(*(part.deepstack_features for part in parts), strict=True)
        return VisionFeatures(
            [x for part in parts for x in part.features], [[x for depth in layer for x in depth] for layer in depths]
        )


def check_supported(model: Any) -> None:
    """Raise an error if the engine cannot run a model."""
    if reason := explain_unsupported(model):
        raise ConfigError(f"the engine cannot run this model: {reason}", "use the pipeline, one request at a time")
