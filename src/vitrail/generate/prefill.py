"""A whole prompt of a vision-language model as two CUDA graphs: what looks, and what reads, without the host.

At batch 1 a prompt is a thousand small launches, and the host is slower at them than the GPU at the work. Prompts that
differ in ids and pixels alone (one question about many pictures of a size) share their graphs, made the second time
such a prompt comes.

B rows, L tokens of the longest stream, N picture tokens, W width, V vocabulary, G key/value heads, D head width
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from vitrail.backbones.fusion import DeepStackConfig, Stacked
from vitrail.connectors import MergerConfig, ProjectorConfig
from vitrail.encoders import PackedViT, ViT
from vitrail.generate.captured import Captured, Pinned, graph_of, kept, send
from vitrail.models.vlm import SEEN, VLM, Seen, Shown
from vitrail.nn import Block, KVCache, Plan
from vitrail.stream import Batch, Stream, merge
from vitrail.stream.pack import rows

COMPILED: dict[str, Any] = {"dynamic": False}  # how torch compiles blocks
LIMIT = 128  # versions of a block that it may compile: a kind of prompt has up to three, and torch would stop at 8
KEPT = 4  # kinds of prompt that a model remembers; a graph holds the activations of its prompt

Given = Sequence[Shown | None]
"""Pictures and videos."""


def prefilled(
    model: VLM, streams: Sequence[Stream], shown: Given, steps: Captured, looked: "Looked | None" = None
) -> Tensor | None:
    """Logits (B, V) of the next tokens, of rows that the steps' cache then holds; None where the prompt has to go
    through the model itself: its kind is new, or none that a graph can be made of. `looked` is what `glance` gave.
    The streams are laid out as a batch for a new graph alone: it takes as long as all else here."""
    if not _fits(model, streams):
        return None
    known, kind = steps.prefills, _kind(model, streams, shown)
    met, found = kind in known, known.pop(kind, None)
    held = found is not None and (found.has(looked) or found.weights.hold())  # they held when it began to look
    if met and not held:
        with compiled_blocks(model) if steps.compiled else nullcontext():
            found = CapturedPrefill(model, rows(streams), shown, steps.cache)
    known[kind] = found  # the last used is the last forgotten
    if len(known) > KEPT:
        del known[next(iter(known))]
    return None if found is None else found(streams, shown, looked)


class Looked(NamedTuple):
    """Whose look was begun, and which of its looks it was: another prompt may have looked since."""

    by: "CapturedPrefill"
    number: int


def glance(model: VLM, shown: Given) -> Looked | None:
    """Begin to look, if pictures of these shapes were looked at before: a GPU does it while the host lays the prompt
    out, which takes about as long: from here to `CapturedPrefill` nothing may wait for the device."""
    steps = kept(model.decoder) if _whole(model) else None
    asked = _shapes(shown)
    for found in reversed([] if steps is None else list(steps.prefills.values())):
        if found is not None and found.shapes == asked and found.weights.hold():
            return found.look(shown)
    return None


@contextmanager
def compiled_blocks(model: VLM) -> Iterator[None]:
    """Within, tower and decoder run with the small operations of a block fused. What is compiled serves all blocks of a
    kind, and costs some tens of seconds; a graph keeps it."""
    from torch._dynamo import config  # which takes long to import

    blocks = [block for part in (model.tower, model.decoder) for block in part.modules() if isinstance(block, Block)]
    for block in blocks:
        block.compile(**COMPILED)
    try:
        with config.patch(recompile_limit=LIMIT):
            yield
    finally:
        for block in blocks:
            block._compiled_call_impl = None


class CapturedPrefill:
    """`prefill(streams, shown)` → logits (B, V), for prompts of one kind; they live in one buffer. It keeps no model.

    Tower and connector are one graph, the decoder another, so that the first can begin before the words are there.
    """

    def __init__(self, model: VLM, batch: Batch, shown: Given, cache: KVCache):
        self.cache, self.shapes = cache, _shapes(shown)
        self.weights = Pinned(model.tower, model.connector, model.stack)  # the steps look after the decoder's
        self.laid = laid = _lay(model, batch, shown, cache.k.device)  # the graphs read these: they have to stay
        head = torch.zeros(len(batch.lengths), model.config.decoder.vocab, dtype=cache.k.dtype, device=cache.k.device)
        self.logits, self.seen, self.looks = head, {}, 0  # what was seen, and how often it was looked
        seen, there = self.seen, any(one is not None for one in laid.shown)
        self.looking = graph_of(lambda: _look(model, laid, seen)) if there else None
        self.reading = graph_of(lambda: head.copy_(_logits(model, laid, seen, cache)))

    def look(self, shown: Given) -> Looked:
        for mine, one in zip(self.laid.shown, shown, strict=True):
            if mine is not None and one is not None:
                mine.pixels.copy_(one.pixels)
        if self.looking is not None:
            self.looking.replay()
        self.looks += 1
        return Looked(self, self.looks)

    def has(self, looked: Looked | None) -> bool:
        """Whether what that look found is still there."""
        return looked is not None and looked.by is self and looked.number == self.looks

    def __call__(self, streams: Sequence[Stream], shown: Given, looked: Looked | None = None) -> Tensor:
        if not self.has(looked):
            self.look(shown)
        send(pad_sequence([stream.ids for stream in streams], batch_first=True), self.laid.batch.ids)
        self.reading.replay()
        cache = self.cache
        cache.lengths, cache.filled = self.laid.lengths.clone(), self.laid.batch.ids.shape[1]
        cache.even = len(set(self.laid.batch.lengths)) == 1
        return self.logits


def _look(model: VLM, laid: "_Laid", seen: dict[str, Seen]) -> None:
    """What is seen goes where the decoder's graph finds it: into the tensors of the first time."""
    for feed, one in zip(SEEN, laid.shown, strict=True):
        if one is None:
            continue
        made = model.look(one)
        if feed not in seen:
            seen[feed] = Seen([x.clone() for x in made.blocks], [[x.clone() for x in depth] for depth in made.depths])
        for mine, new in zip((seen[feed].blocks, *seen[feed].depths), (made.blocks, *made.depths), strict=True):
            for to, x in zip(mine, new, strict=True):
                to.copy_(x)


class _Laid(NamedTuple):
    """What a pass needs on the device. Ids and pixels are the prompt's own; the rest hangs on its kind."""

    batch: Batch
    shown: Given
    positions: Tensor  # (B, L) or (B, L, 3)
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
        torch.tensor(batch.lengths, device=device),
        torch.cat([batch.fills[feed].places for feed in there]) if stacked else None,
        [tower.arranged(cast(Any, one.shapes), device) for one in shown if one and isinstance(tower, PackedViT)],
    )


def _logits(model: VLM, laid: _Laid, seen: Mapping[str, Seen], cache: KVCache) -> Tensor:
    """What `VLM.hidden` makes of what was seen and an empty cache, and then its head, without asking the device for
    anything or bringing anything to it: (B, V)"""
    decoder, fills = model.decoder, laid.batch.fills
    tables = {} if model.newline is None else {"newline": model.newline}
    blocks = {feed: one.blocks for feed, one in seen.items()}
    x = merge(decoder.embed(laid.batch.ids), blocks | tables, laid.batch)  # (B, L, W)
    beside = None
    if laid.places is not None:
        depths = [[torch.cat(depth)[fills[feed].rows] for depth in one.depths] for feed, one in seen.items()]
        beside = Stacked(laid.places, [torch.cat(depth) for depth in zip(*depths, strict=True)])  # (N, W) each
    last = laid.lengths - 1
    x = decoder.through(x, laid.positions, Plan(causal=True), cast(KVCache, _Slab(cache)), beside, asked=last)
    return decoder.logits(x[:, 0])


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


def _shapes(shown: Given) -> tuple[Any, ...]:
    return tuple(None if one is None else (one.shapes, one.pixels.shape) for one in shown)


def _kind(model: VLM, streams: Sequence[Stream], shown: Given) -> tuple[Any, ...]:
    """All of a prompt but its ids and pixels, and where the one weight lies that is nobody's part."""
    laid = (x for one in streams for x in (one.kinds, one.positions, one.source, one.row))
    newline = None if model.newline is None else model.newline.data_ptr()
    return newline, _shapes(shown), *(x.numpy().tobytes() for x in laid)


def _fits(model: VLM, streams: Sequence[Stream]) -> bool:
    """Whether the pass can be captured: the parts below are known to leave the host alone."""
    config = model.config
    return (
        isinstance(model.tower, (ViT, PackedViT))
        and _whole(model)
        and isinstance(config.connector, (MergerConfig, ProjectorConfig))
        and model.decoder.trims
        and not any(bool(stream.spans.any()) for stream in streams)
    )


def _whole(model: VLM) -> bool:
    """Whether the decoder reads all that the connector makes of a picture, and goes on seeing it."""
    return model.queries is None and model.config.reduction is None and not model.config.voco
