"""A whole prompt of a vision-language model as one CUDA graph: tower, connector and decoder without the host.

At batch 1 a prompt is a thousand small launches, and the host is slower at them than the GPU at the work. Prompts that
differ in ids and pixels alone (one question about many pictures of a size) are one graph, made the second time such a
prompt comes.

B rows, L tokens of the longest stream, N picture tokens, W width, V vocabulary, G key/value heads, D head width
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from vitrail.backbones.fusion import DeepStackConfig, PrefixConfig, Stacked
from vitrail.connectors import MergerConfig, ProjectorConfig
from vitrail.encoders import PackedViT, ViT
from vitrail.generate.captured import Captured, addresses, graph_of
from vitrail.models.vlm import SEEN, VLM, Shown
from vitrail.nn import Block, KVCache, Plan
from vitrail.stream import Batch, merge

COMPILED: dict[str, Any] = {"dynamic": False}  # how torch compiles blocks
KEPT = 4  # kinds of prompt that a model remembers; a graph holds the activations of its prompt

Given = Sequence[Shown | None]
"""Pictures and videos."""


def prefilled(model: VLM, batch: Batch, shown: Given, steps: Captured) -> Tensor | None:
    """Logits (B, V) of the next tokens, of rows that the steps' cache then holds; None where the prompt has to go
    through the model itself: its kind is new, or is none that a graph can be made of."""
    if not _fits(model, batch):
        return None
    known, kind = steps.prefills, (*_kind(batch, shown), *_weights(model))
    met, found = kind in known, known.pop(kind, None)
    if met and found is None:
        with compiled_blocks(model) if steps.compiled else nullcontext():
            found = CapturedPrefill(model, batch, shown, steps.cache)
    known[kind] = found  # the last used is the last forgotten
    if len(known) > KEPT:
        del known[next(iter(known))]
    return None if found is None else found(batch, shown)


@contextmanager
def compiled_blocks(model: VLM) -> Iterator[None]:
    """Within, tower and decoder run with the small operations of a block fused. What is compiled serves all blocks of a
    kind, and costs some tens of seconds; a graph keeps it."""
    blocks = [block for part in (model.tower, model.decoder) for block in part.modules() if isinstance(block, Block)]
    for block in blocks:
        block.compile(**COMPILED)
    try:
        yield
    finally:
        for block in blocks:
            block._compiled_call_impl = None


class CapturedPrefill:
    """`prefill(batch, shown)` → logits (B, V), for prompts of one kind; they live in one buffer. It keeps no model."""

    def __init__(self, model: VLM, batch: Batch, shown: Given, cache: KVCache):
        self.cache, self.longest = cache, max(batch.lengths)
        self.laid = laid = _lay(model, batch, shown, cache.k.device)  # the graph reads these: they have to stay
        head = torch.zeros(len(laid.rows), model.config.decoder.vocab, dtype=cache.k.dtype, device=cache.k.device)
        self.logits = head
        self.graph = graph_of(lambda: head.copy_(_logits(model, laid, cache)))

    def __call__(self, batch: Batch, shown: Given) -> Tensor:
        self.laid.batch.ids.copy_(batch.ids)
        for mine, one in zip(self.laid.shown, shown, strict=True):
            if mine is not None and one is not None:
                mine.pixels.copy_(one.pixels)
        self.graph.replay()
        cache = self.cache
        cache.lengths, cache.filled = self.laid.lengths.clone(), self.longest
        cache.even = len(set(batch.lengths)) == 1
        return self.logits


class _Laid(NamedTuple):
    """What a pass needs on the device. Ids and pixels are the prompt's own; the rest hangs on its kind."""

    batch: Batch
    shown: Given
    positions: Tensor  # (B, L) or (B, L, 3)
    rows: Tensor  # (B,)
    lengths: Tensor  # (B,)
    places: Tensor | None  # (N,) of the pictures' tokens, where DeepStack adds to them
    arranged: list[Any]


def _lay(model: VLM, batch: Batch, shown: Given, device: torch.device) -> _Laid:
    config, tower = model.config, model.tower
    axes = batch.positions[..., 0] if config.decoder.rotary.layout == "1d" else batch.positions
    batch = replace(batch.to(device), ids=batch.ids.to(device, copy=True))
    there = [feed for feed, one in zip(SEEN, shown, strict=True) if one is not None]
    stacked = bool(there) and isinstance(config.decoder.fusion, DeepStackConfig)
    return _Laid(
        batch,
        [None if one is None else one._replace(pixels=one.pixels.to(device, copy=True)) for one in shown],
        axes.to(device),
        torch.arange(len(batch.lengths), device=device),
        torch.tensor(batch.lengths, device=device),
        torch.cat([batch.fills[feed].places for feed in there]) if stacked else None,
        [tower.arranged(cast(Any, one.shapes), device) for one in shown if one and isinstance(tower, PackedViT)],
    )


def _logits(model: VLM, laid: _Laid, cache: KVCache) -> Tensor:
    """What `VLM.hidden` makes of an empty cache, and then its head, without asking the device for anything or bringing
    anything to it: (B, V)"""
    decoder, fills = model.decoder, laid.batch.fills
    seen = {feed: model.look(one) for feed, one in zip(SEEN, laid.shown, strict=True) if one is not None}
    tables = {} if model.newline is None else {"newline": model.newline}
    blocks = {feed: one.blocks for feed, one in seen.items()}
    x = merge(decoder.embed(laid.batch.ids), blocks | tables, laid.batch)  # (B, L, W)
    beside = None
    if laid.places is not None:
        depths = [[torch.cat(depth)[fills[feed].rows] for depth in one.depths] for feed, one in seen.items()]
        beside = Stacked(laid.places, [torch.cat(depth) for depth in zip(*depths, strict=True)])  # (N, W) each
    x = decoder.through(x, laid.positions, Plan(causal=True), cast(KVCache, _Slab(cache)), beside)
    return decoder.logits(x[laid.rows, laid.lengths - 1])


class _Slab(NamedTuple):
    """A cache that is being filled from its first slot on; its layers are tensors, so that blocks compile once."""

    cache: KVCache

    def layer(self, i: int) -> "_SlabLayer":
        return _SlabLayer(self.cache.k[i], self.cache.v[i])


class _SlabLayer(NamedTuple):
    k: Tensor  # (B, capacity, G, D)
    v: Tensor

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self.k[:, : k.shape[1]].copy_(k)
        self.v[:, : v.shape[1]].copy_(v)
        return k, v


def _kind(batch: Batch, shown: Given) -> tuple[Any, ...]:
    """All of a prompt but its ids and pixels."""
    shapes = tuple(None if one is None else (one.shapes, one.pixels.shape) for one in shown)
    laid = (batch.kinds, batch.positions, batch.source, batch.row)
    return batch.lengths, shapes, *(x.numpy().tobytes() for x in laid)


def _weights(model: VLM) -> tuple[int, ...]:
    """Where they lie; the steps look after the decoder's."""
    own = () if model.newline is None else (model.newline.data_ptr(),)
    return own + addresses(model.tower, model.connector, model.stack)


def _fits(model: VLM, batch: Batch) -> bool:
    """Whether the pass can be captured: the parts below are known to leave the host alone."""
    config = model.config
    return (
        isinstance(model.tower, (ViT, PackedViT))
        and model.queries is None
        and isinstance(config.connector, (MergerConfig, ProjectorConfig))
        and isinstance(config.decoder.fusion, (PrefixConfig, DeepStackConfig))
        and not bool(batch.spans.any())
    )
