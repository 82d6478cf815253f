"""The step of a decoder on a GPU: captured once as a CUDA graph, replayed for every token.

Batch 1 in half precision runs on fused kernels (`nn/kernels/decode.py`); anything else is the model itself, captured,
which takes the launches off the critical path, and compiled first where that is asked for: it costs tens of seconds
once, and pays where many rows are written.

B batch, V vocabulary
"""

from collections.abc import Callable, Hashable, Sequence
from importlib.util import find_spec
from itertools import chain
from typing import Any, cast
from weakref import WeakKeyDictionary, proxy

import torch
from torch import Tensor, nn

from vitrail.backbones.decoder import Decoder
from vitrail.backbones.fusion import CrossConfig
from vitrail.errors import ConfigError
from vitrail.generate.text import Eager
from vitrail.nn import ExpertsConfig, GatedConfig, KVCache, Plan

LARGEST = 65_536  # tokens of a cache that is set aside whole; a larger one grows as it is needed


class CapturedStep:
    """ids (B,) → logits (B, V) of the next token; the tokens join the cache, which needs a capacity.

    A token stands where it lies in the cache, unless `stand` says how far from there. The logits live in one buffer:
    read them before the next call. `greedy` makes the graph choose the next token too,
    and feed it to itself, so that tokens can follow one another without the host.
    """

    def __init__(self, model: Decoder, cache: KVCache, *, greedy: bool = False, compiled: bool = False):
        if not cache.fixed:
            raise ConfigError(
                "a captured step needs a cache of fixed capacity", "make it with model.cache(batch, capacity)"
            )
        if reason := _unfit(model):
            raise ConfigError(f"no step can be captured: {reason}", "use the plain stepper, Eager")
        self.model, self.cache, self.greedy = model, cache, greedy
        weight, batch = model.embed.weight, len(cache.lengths)
        self.ids = torch.zeros(batch, dtype=torch.long, device=weight.device)
        self.length = cache.lengths.clone()  # tokens before the one being read; advanced by the graph itself
        self.shift, self.position = torch.zeros_like(self.length), self.length.clone()  # where that one stands
        self._shift = [0] * batch  # the same on the host
        self.logits = torch.zeros(batch, model.config.vocab, dtype=weight.dtype, device=weight.device)
        self.chosen = torch.zeros(batch, cache.capacity + 1, dtype=torch.long, device=weight.device)
        self.run: Callable[[], None] = Fused(self) if Fused.suits(model, batch) else self._whole
        self._next = torch.compile(_next, dynamic=False) if compiled else _next
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, ids: Tensor | None = None) -> Tensor:
        """Take one token a row: `ids`, or with `greedy` the ones last chosen."""
        cache = self.cache
        if cache.filled >= cache.capacity:
            cache.extend(1)  # says what is wrong
        if ids is None and not self.greedy:
            raise ConfigError(
                "the step was given no token and does not choose them itself", "give ids, or make it greedy"
            )
        if ids is not None:
            self.ids.copy_(ids)
        if cache.lengths is not self.length:  # others have written to the cache since
            self.length.copy_(cache.lengths)
            cache.lengths = self.length
        self.capture().replay()
        cache.filled += 1
        return self.logits

    def stand(self, shift: Sequence[int]) -> None:
        """From now on the tokens of each row stand so far from where they lie: 0 in a text, less than that behind a
        picture placed by M-RoPE, which takes more tokens than positions."""
        if max(shift) > 0:
            raise ConfigError(
                f"a token {max(shift)} positions past its slot, where no angles are kept", "use the plain stepper"
            )
        if self._shift != (asked := list(shift)):
            send(torch.tensor(asked), self.shift)
            self._shift = asked

    def follow(self, count: int) -> Tensor:
        """(B, count) tokens chosen greedily one after another, without asking the host in between."""
        start = self.cache.lengths[:, None] + 1
        for _ in range(count):
            self()
        return self.chosen.gather(1, start + torch.arange(count, device=start.device))

    def _step(self) -> None:
        torch.add(self.length, self.shift, out=self.position)
        self.run()
        self.length.add_(1)
        if self.greedy:
            self.ids.copy_(_argmax(self.logits))
            self.chosen.scatter_(1, self.length[:, None], self.ids[:, None])

    def capture(self) -> torch.cuda.CUDAGraph:
        """The graph, made the first time."""
        if self.graph is not None:
            return self.graph
        ids, length = self.ids.clone(), self.length.clone()

        def rehearse() -> None:  # what it writes is written again
            self._step()
            self.ids.copy_(ids)
            self.length.copy_(length)

        self.graph = graph_of(self._step, rehearse)
        return self.graph

    def _whole(self) -> None:
        """The model itself over the whole capacity: slots not yet written lie in the future and are not seen."""
        cache, filled = self.cache, self.cache.filled
        cache._slots, cache.filled, cache._first = self.length[:, None], cache.capacity, False
        try:
            self.logits.copy_(self._next(self.model, self.ids, self.length, self.position, cache))
        finally:
            cache.filled = filled


def send(values: Tensor, to: Tensor) -> None:
    """Values on the host to their place on the device, without waiting for what the device is at: a copy from pinned
    memory takes its turn, and torch leaves that memory alone until then; from any other the host waits for the copy."""
    to.copy_(values.pin_memory() if to.is_cuda else values, non_blocking=True)


def graph_of(call: Callable[[], object], rehearse: Callable[[], object] | None = None) -> torch.cuda.CUDAGraph:
    """A call as a CUDA graph. Rehearsed first, which compiles and tunes its kernels outside the graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.no_grad():
        for _ in range(2):
            (rehearse or call)()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        call()
    return graph


def _next(model: Decoder, ids: Tensor, length: Tensor, position: Tensor, cache: KVCache) -> Tensor:
    """ids (B,) after `length` (B,) tokens, standing at `position` (B,) → logits (B, V)"""
    plan = Plan(causal=True, index=length[:, None])
    return model.logits(model.through(model.embed(ids)[:, None], position[:, None], plan, cache))[:, 0]


def _argmax(logits: Tensor) -> Tensor:
    """(B, V) → (B,). In two stages where that divides: one row is too little for the reduction kernel to fill a GPU."""
    B, V = logits.shape
    if V % 256:
        return logits.argmax(-1)
    best, where = logits.view(B, -1, 256).max(-1)  # (B, V/256), the first of equals as argmax has it
    chunk = best.argmax(-1, keepdim=True)
    return (chunk * 256 + where.gather(1, chunk))[:, 0]


_KEPT: "WeakKeyDictionary[Decoder, Captured]" = WeakKeyDictionary()


def kept(model: Decoder) -> "Captured | None":
    """The model's last stepper, whether or not it still fits."""
    return _KEPT.get(model)


class Pinned:
    """Where the weights of modules lie: a graph reads them there, whatever the model's names point to by now.

    Asked before every prompt, and so it compares the tables of all modules instead of walking the tree, which takes
    several times as long; most modules have no weights of their own, and need only be seen to have none still.
    """

    def __init__(self, *modules: nn.Module):
        every = {id(part): part for module in modules for part in module.modules()}.values()
        self._parts = [part._modules for part in every]
        self._weights = [part._parameters for part in every if part._parameters]
        self._without = [part._parameters for part in every if not part._parameters]
        self._then = [dict(parts) for parts in self._parts], self._places()

    def hold(self) -> bool:
        """Whether all are where they were."""
        return not any(self._without) and (self._parts, self._places()) == self._then

    def _places(self) -> list[int | None]:
        weights = chain.from_iterable(map(dict.values, self._weights))
        return [None if weight is None else weight.data_ptr() for weight in weights]


def _unfit(model: Decoder) -> str | None:
    """Why no graph can be made of a model, whatever the size of its cache."""
    if isinstance(model.config.fusion, CrossConfig):
        return "cross-attention looks at pictures, which are others in every cache"
    if not model.embed.weight.is_cuda:
        return f"a graph is CUDA's, and the model is on {model.embed.weight.device}"
    return None


def capturable(model: Decoder, rows: int, capacity: int) -> bool:
    """On a GPU, with a cache worth setting aside, and experts that run without asking the host how many each has."""
    weight, mlp = model.embed.weight, model.config.block.mlp
    experts = isinstance(mlp, ExpertsConfig)
    grouped = weight.dtype == torch.bfloat16 and model.config.block.width % 8 == mlp.hidden % 8 == 0
    return _unfit(model) is None and rows * capacity <= LARGEST and (grouped or not experts)


class Captured(Eager):
    """A stepper for `generate`: the prompt through the model, then a captured step a token."""

    compiled = False

    def __init__(self, model: Decoder, rows: int, capacity: int):
        self.weights = Pinned(model)
        self.cache = model.cache(rows, capacity)
        self.captured = CapturedStep(model, self.cache, compiled=self.compiled)
        self.captured.capture()
        self.prefills: dict[Hashable, Any] = {}  # whole prompts that write to this cache (seen.py)
        # From here on by proxy, or the stepper would keep alive the model that keeps it.
        self.model = self.captured.model = cast(Decoder, proxy(model))

    @classmethod
    def of(cls, model: Decoder, rows: int, capacity: int, shift: Sequence[int] | None = None) -> "Captured":
        """The model's last stepper if it fits, emptied; capturing anew costs as much as a hundred tokens. `shift` is
        where tokens are to `stand`."""
        last = kept(model)
        fits = type(last) is cls and len(last.cache.lengths) == rows and last.cache.capacity >= capacity
        if last is None or not fits or not last.weights.hold():
            last = _KEPT[model] = cls(model, rows, max(512, 1 << (capacity - 1).bit_length()))
        last.cache.clear()
        last.captured.stand([0] * rows if shift is None else shift)
        return last

    def step(self, ids: Tensor) -> Tensor:
        return self.captured(ids)


class Compiled(Captured):
    """The same, compiled before it is captured: `generate(model, prompts, stepper=Compiled.of)`."""

    compiled = True


class Fused:
    """A step at batch 1 on fused kernels: five a layer."""

    @staticmethod
    def suits(model: Decoder, batch: int) -> bool:
        config, weight = model.config, model.embed.weight
        block, rotary = config.block, config.rotary
        channels = block.attention.channels(block.width)
        return (
            batch == 1
            and find_spec("triton") is not None
            and weight.is_cuda
            and weight.dtype in (torch.bfloat16, torch.float16)
            and block.chain == ("self", "mlp")
            and (block.norm, block.norm_at, block.layer_scale, block.gated) == ("rms", "before", None, False)
            and isinstance(block.mlp, GatedConfig)
            and block.mlp.activation == "silu"
            and block.mlp.inner_norm is None
            and block.attention.inner_norm is None
            and block.attention.qk_norm in (None, "rms")
            and block.attention.heads // block.attention.groups <= 16
            and channels in (32, 64, 128, 256)
            and rotary.rotated == channels
        )

    def __init__(self, step: CapturedStep):
        from vitrail.nn.kernels.decode import DecodeAttention

        self.step = step
        model, cache = step.model, step.cache
        block = model.config.block
        attention, D = block.attention, block.attention.channels(block.width)
        H, G, device = attention.heads, attention.groups, step.ids.device
        self.attend = DecodeAttention(H, G, D, cache.capacity, device)
        # Positions never pass their slots, so a table over the capacity holds every angle.
        rotation = model.rotary(torch.arange(cache.capacity, device=device)[None])
        self.cos, self.sin = rotation.cos[0].contiguous(), rotation.sin[0].contiguous()

        def room(size: int) -> Tensor:
            return torch.empty(size, dtype=step.logits.dtype, device=device)

        self.x, self.y = room(block.width), room(block.width)
        self.qkv, self.heads, self.hidden = room((H + 2 * G) * D), room(H * D), room(block.mlp.hidden)

    def __call__(self) -> None:
        from vitrail.nn.kernels.decode import matvec

        step, model, cache = self.step, self.step.model, self.step.cache
        eps, attention = model.config.block.eps, model.config.block.attention
        torch.index_select(model.embed.weight, 0, step.ids, out=self.x[None])
        blocks: Any = model.blocks
        norm: Any = model.norm
        for i, block in enumerate(blocks):
            own, mlp = block.branches["self"], block.branches["mlp"]
            matvec(self.x, own.op.qkv.weight, self.qkv, bias=own.op.qkv.bias, norm=own.norm.weight, eps=eps)
            self.attend(
                self.qkv,
                cache.k[i, 0],
                cache.v[i, 0],
                self.heads,
                cos=self.cos,
                sin=self.sin,
                length=step.length,
                position=step.position,
                adjacent=model.config.rotary.pairing == "adjacent",
                norms=(own.op.q_norm.weight, own.op.k_norm.weight) if attention.qk_norm else None,
                eps=attention.eps,
            )
            matvec(self.heads, own.op.out.weight, self.y, bias=own.op.out.bias, residual=self.x)
            up, down = mlp.op.gate_up, mlp.op.down
            matvec(self.y, up.weight, self.hidden, bias=up.bias, norm=mlp.norm.weight, eps=eps, gated=True)
            matvec(self.hidden, down.weight, self.x, bias=down.bias, residual=self.y)
        head = model.embed.weight if model.head is None else model.head.weight
        matvec(self.x, head, step.logits[0], norm=norm.weight, eps=eps)
