"""Decoding steps as CUDA graphs: captured once, replayed for every token.

Batch size 1 in half precision uses fused kernels (`nn/kernels/decode.py`). Other cases capture the model itself, which
removes the launch overhead. Optionally the model is compiled first. This takes tens of seconds once, and pays off for
many rows.

Shapes: B batch size, V vocabulary.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, cast
from weakref import WeakKeyDictionary, proxy

import numpy as np
import torch
from torch import Tensor, nn

from vitrail.backbones.decoder import Decoder
from vitrail.backbones.fusion import CrossAttentionFusionConfig, ImageLoRAConfig
from vitrail.errors import ConfigError
from vitrail.generate.text_generation import EagerStepper
from vitrail.nn import AttentionPlan, GatedMLPConfig, KVCache, MoEConfig
from vitrail.nn.cuda_graphs import pause_garbage_collection
from vitrail.nn.kernels import HAS_TRITON
from vitrail.nn.rotary_embedding import DynamicNTKScaling, LongRoPEScaling

COMPILE_OPTIONS: dict[str, Any] = {"dynamic": False}  # options of torch.compile for blocks
RECOMPILE_LIMIT = 128  # compiled versions per block. Each kind of prompt needs up to three; torch's default limit is 8
MAX_CACHE_TOKENS = 65_536  # maximum tokens of a preallocated KV cache; larger caches grow on demand


class CUDAGraphDecodeStep:
    """One decoding step as a CUDA graph: ids (B,) → logits (B, V) of the next token.

    The step appends the tokens to the cache, which needs a fixed capacity. A token's position is its cache slot plus
    the shift of `set_position_shift`. The logits are in a reused buffer: read them before the next call. With
    `greedy`, the graph also selects the next token and feeds it back, so that tokens follow without the host.
    """

    def __init__(self, model: Decoder, cache: KVCache, *, greedy: bool = False, use_compile: bool = False):
        if not cache.is_fixed_size:
            raise ConfigError(
                "a captured step needs a cache of fixed capacity", "create it with model.cache(batch, capacity)"
            )
        if reason := _explain_unsupported(model):
            raise ConfigError(f"the step cannot be captured: {reason}", "use EagerStepper")
        self.model, self.cache, self.greedy = model, cache, greedy
        weight, batch = model.embed.weight, len(cache.lengths)
        self.ids = torch.zeros(batch, dtype=torch.long, device=weight.device)
        self.cache_length = cache.lengths.clone()  # tokens in the cache; advanced by the graph itself
        self.position_shift = torch.zeros_like(self.cache_length)
        self.position = self.cache_length.clone()  # of the current token
        self._host_shift = [0] * batch  # copy of the shift on the host
        self.logits = torch.zeros(batch, model.config.vocab_size, dtype=weight.dtype, device=weight.device)
        self.chosen_ids = torch.zeros(batch, cache.capacity + 1, dtype=torch.long, device=weight.device)
        self.run_model: Callable[[], None] = (
            FusedStep(self) if FusedStep.supports(model, batch) else self._run_full_model
        )
        self._compute_next_logits = (
            torch.compile(_compute_next_logits, dynamic=False) if use_compile else _compute_next_logits
        )
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, ids: Tensor | None = None) -> Tensor:
        """Process one token per row: `ids`, or with `greedy` the last selected tokens."""
        cache = self.cache
        if cache.max_row_length >= cache.capacity:
            cache.extend(1)  # raises the error
        if ids is None and not self.greedy:
            raise ConfigError("the step has no ids and is not greedy", "pass ids, or create the step with greedy=True")
        if ids is not None:
            self.ids.copy_(ids)
        if cache.lengths is not self.cache_length:  # the cache has changed outside of the graph
            self.cache_length.copy_(cache.lengths)
            cache.lengths = self.cache_length
        self.get_graph().replay()
        cache.max_row_length += 1
        return self.logits

    def set_position_shift(self, position_shift: Sequence[int]) -> None:
        """Set the offset of positions relative to cache slots, per row.

        The shift is 0 for text. It is negative after an image with M-RoPE, which has more tokens than positions.
        """
        if max(position_shift) > 0:
            raise ConfigError(
                f"the position shift {max(position_shift)} is positive, beyond the table of rotary angles",
                "use EagerStepper",
            )
        if self._host_shift != (requested := list(position_shift)):
            copy_to_device(torch.tensor(requested), self.position_shift)
            self._host_shift = requested

    def generate_greedy(self, count: int) -> Tensor:
        """Generate (B, count) tokens greedily, without synchronizing with the host in between."""
        start = self.cache.lengths[:, None] + 1
        for _ in range(count):
            self()
        return self.chosen_ids.gather(1, start + torch.arange(count, device=start.device))

    def _step(self) -> None:
        torch.add(self.cache_length, self.position_shift, out=self.position)
        self.run_model()
        self.cache_length.add_(1)
        if self.greedy:
            self.ids.copy_(_argmax(self.logits))
            self.chosen_ids.scatter_(1, self.cache_length[:, None], self.ids[:, None])

    def get_graph(self) -> torch.cuda.CUDAGraph:
        """Return the graph, and capture it on first use."""
        if self.graph is not None:
            return self.graph
        ids, length = self.ids.clone(), self.cache_length.clone()

        def rehearse() -> None:  # restores what the step changes
            self._step()
            self.ids.copy_(ids)
            self.cache_length.copy_(length)

        self.graph = capture_graph(self._step, rehearse)
        return self.graph

    def _run_full_model(self) -> None:
        """Run the model over the whole cache capacity. The causal mask hides slots that are not yet written."""
        cache, filled = self.cache, self.cache.max_row_length
        cache._slots, cache.max_row_length, cache._first = self.cache_length[:, None], cache.capacity, False
        try:
            self.logits.copy_(self._compute_next_logits(self.model, self.ids, self.cache_length, self.position, cache))
        finally:
            cache.max_row_length = filled


def copy_to_device(source: Tensor, target: Tensor) -> None:
    """Copy CPU values into a device tensor without blocking the host, through pinned memory."""
    target.copy_(source.pin_memory() if target.is_cuda else source, non_blocking=True)


def upload(values: np.ndarray, device: torch.device) -> Tensor:
    """Copy values to a device without blocking the host, through pinned memory."""
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def capture_graph(function: Callable[[], object], warm_up: Callable[[], object] | None = None) -> torch.cuda.CUDAGraph:
    """Capture a call as a CUDA graph. Warm-up runs come first, to compile and tune kernels outside of the graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.no_grad():
        for _ in range(2):
            (warm_up or function)()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with pause_garbage_collection(), torch.cuda.graph(graph), torch.no_grad():
        function()
    return graph


@contextmanager
def compile_blocks(blocks: Iterable[nn.Module]) -> Iterator[None]:
    """Compile blocks while the context is active. Captured graphs keep the compiled kernels.

    Compilation takes seconds to tens of seconds and is shared by all blocks of one kind.
    """
    if not (compiled := list(blocks)):
        yield
        return
    from torch._dynamo import config  # slow import

    for block in compiled:
        block.compile(**COMPILE_OPTIONS)
    try:
        with config.patch(recompile_limit=RECOMPILE_LIMIT):
            yield
    finally:
        for block in compiled:
            block._compiled_call_impl = None


def _compute_next_logits(model: Decoder, ids: Tensor, length: Tensor, position: Tensor, cache: KVCache) -> Tensor:
    """Return the logits (B, V) of ids (B,) at `position` (B,), after `length` (B,) cached tokens."""
    plan = AttentionPlan(causal=True, query_slots=length[:, None])
    return model.compute_logits(model.forward_embeddings(model.embed(ids)[:, None], position[:, None], plan, cache))[
        :, 0
    ]


def _argmax(logits: Tensor) -> Tensor:
    """Return the argmax (B, V) → (B,), in two stages if V is divisible: one row alone does not fill a GPU."""
    B, V = logits.shape
    if V % 256:
        return logits.argmax(-1)
    best, where = logits.view(B, -1, 256).max(-1)  # (B, V/256); the first of equal values, as in argmax
    chunk = best.argmax(-1, keepdim=True)
    return (chunk * 256 + where.gather(1, chunk))[:, 0]


_CACHED_STEPPERS: "WeakKeyDictionary[Decoder, CUDAGraphStepper]" = WeakKeyDictionary()


def get_cached_stepper(model: Decoder) -> "CUDAGraphStepper | None":
    """Return the last stepper of the model, or None. It may not fit the next request."""
    return _CACHED_STEPPERS.get(model)


class WeightPointers:
    """Addresses of the weights of modules, to detect changes: a CUDA graph reads the weights at fixed addresses.

    The check runs before every prompt. It compares the parameter tables of all modules, which is several times faster
    than walking the module tree.
    """

    def __init__(self, *modules: nn.Module):
        every = {id(part): part for module in modules for part in module.modules()}.values()
        self._parts = [part._modules for part in every]
        self._weights = [part._parameters for part in every if part._parameters]
        self._without = [part._parameters for part in every if not part._parameters]
        self._then = [dict(parts) for parts in self._parts], self._places()

    def are_unchanged(self) -> bool:
        """Return whether all weights still have the same addresses."""
        return not any(self._without) and (self._parts, self._places()) == self._then

    def _places(self) -> list[int | None]:
        weights = chain.from_iterable(map(dict.values, self._weights))
        return [None if weight is None else weight.data_ptr() for weight in weights]


def _explain_unsupported(model: Decoder) -> str | None:
    """Return why a model cannot be captured, or None."""
    if isinstance(model.config.fusion, CrossAttentionFusionConfig):
        return "the image features of cross-attention differ in every cache"
    if isinstance(model.config.fusion, ImageLoRAConfig):
        return "the rows with images differ in every cache"
    if model.config.linear_attention is not None:
        return "the state of linear attention is replaced in every step"
    if not model.embed.weight.is_cuda:
        return f"the model is on {model.embed.weight.device}, and CUDA graphs need a GPU"
    return None


def can_capture(model: Decoder, batch_size: int, capacity: int) -> bool:
    """Return whether decoding can use a CUDA graph.

    This requires a GPU, a cache small enough to preallocate, and experts that run without host synchronization.
    """
    weight, mlp = model.embed.weight, model.config.block.mlp
    experts = isinstance(mlp, MoEConfig)
    grouped = weight.dtype == torch.bfloat16 and model.config.block.width % 8 == mlp.intermediate_size % 8 == 0
    return (
        _explain_unsupported(model) is None and batch_size * capacity <= MAX_CACHE_TOKENS and (grouped or not experts)
    )


class CUDAGraphStepper(EagerStepper):
    """Stepper for `generate_texts`: eager prefill, then a CUDA graph per token."""

    use_compile = False

    def __init__(self, model: Decoder, batch_size: int, capacity: int):
        self.weight_pointers = WeightPointers(model)
        self.cache = model.make_cache(batch_size, capacity)
        self.graph_step = CUDAGraphDecodeStep(model, self.cache, use_compile=self.use_compile)
        self.graph_step.get_graph()
        self.prefill_graphs: dict[Hashable, Any] = {}  # prefill graphs that write to this cache (see vlm_generation.py)
        # Use a proxy: a strong reference would keep the model alive, which is the key of the stepper cache.
        self.model = cast(Decoder, proxy(model))
        self.graph_step.model = self.model

    @classmethod
    def get_or_create(
        cls, model: Decoder, batch_size: int, capacity: int, position_shift: Sequence[int] | None = None
    ) -> "CUDAGraphStepper":
        """Return the model's last stepper with an empty cache if it fits, or create a new one.

        Capturing costs as much as a hundred tokens. `position_shift` is passed to `set_position_shift`.
        """
        stepper = get_cached_stepper(model)
        is_reusable = (
            type(stepper) is cls and len(stepper.cache.lengths) == batch_size and stepper.cache.capacity >= capacity
        )
        if stepper is None or not is_reusable or not stepper.weight_pointers.are_unchanged():
            stepper = cls(model, batch_size, max(512, 1 << (capacity - 1).bit_length()))
            _CACHED_STEPPERS[model] = stepper
        stepper.cache.clear()
        stepper.graph_step.set_position_shift([0] * batch_size if position_shift is None else position_shift)
        return stepper

    def step(self, ids: Tensor) -> Tensor:
        return self.graph_step(ids)


class CompiledStepper(CUDAGraphStepper):
    """CUDA graph stepper with compiled model: `generate_texts(…, stepper_factory=CompiledStepper.get_or_create)`."""

    use_compile = True


class FusedStep:
    """Decoding step at batch size 1 with fused kernels, five per layer."""

    @staticmethod
    def supports(model: Decoder, batch_size: int) -> bool:
        config, weight = model.config, model.embed.weight
        block, rotary = config.block, config.rotary
        channels = block.attention.resolve_head_dim(block.width)
        return (
            batch_size == 1
            and HAS_TRITON
            and weight.is_cuda
            and weight.dtype in (torch.bfloat16, torch.float16)
            and block.branches == ("self", "mlp")
            and (block.norm, block.norm_position, block.layer_scale, block.gated) == ("rms", "before", None, False)
            and isinstance(block.mlp, GatedMLPConfig)
            and block.mlp.activation == "silu"
            and block.mlp.inner_norm is None
            and block.attention.inner_norm is block.attention.latent is None
            and block.attention.qk_norm in (None, "rms")
            and block.attention.query_pre_attn_scalar is block.attention.logit_softcap is None
            and config.sliding_window is config.logit_softcap is config.linear_attention is None
            and not (block.attention.output_gate or block.attention.share_kv or block.attention.v_norm)
            and not block.output_scale
            and not config.scale_embeddings
            and block.attention.heads // block.attention.num_kv_heads <= 16
            and channels in (32, 64, 128, 256)
            and rotary.num_rotated_channels == channels
            and rotary.query_scaling is None
            and not isinstance(rotary.scaling, DynamicNTKScaling | LongRoPEScaling)  # the table has one length
        )

    def __init__(self, step: CUDAGraphDecodeStep):
        from vitrail.nn.kernels.decode_kernels import DecodeAttention

        self.step = step
        model, cache = step.model, step.cache
        block = model.config.block
        attention, D = block.attention, block.attention.resolve_head_dim(block.width)
        H, G, device = attention.heads, attention.num_kv_heads, step.ids.device
        self.attend = DecodeAttention(H, G, D, cache.capacity, device)
        # Positions never exceed their slots, so a table over the capacity covers all rotary angles.
        rotation = model.rotary(torch.arange(cache.capacity, device=device)[None])
        self.cos, self.sin = rotation.cos[0].contiguous(), rotation.sin[0].contiguous()

        def allocate(size: int) -> Tensor:
            return torch.empty(size, dtype=step.logits.dtype, device=device)

        self.x, self.y = allocate(block.width), allocate(block.width)
        self.qkv = allocate((H + 2 * G) * D)
        self.heads = allocate(H * D)
        self.hidden = allocate(block.mlp.intermediate_size)

    def __call__(self) -> None:
        from vitrail.nn.kernels.decode_kernels import compute_matvec

        step, model, cache = self.step, self.step.model, self.step.cache
        eps, attention = model.config.block.eps, model.config.block.attention
        torch.index_select(model.embed.weight, 0, step.ids, out=self.x[None])
        blocks: Any = model.blocks
        norm: Any = model.norm
        for i, block in enumerate(blocks):
            self_attention, mlp = block.branches["self"], block.branches["mlp"]
            compute_matvec(
                self.x,
                self_attention.op.qkv.weight,
                self.qkv,
                bias=self_attention.op.qkv.bias,
                norm=self_attention.norm.weight,
                eps=eps,
            )
            self.attend(
                self.qkv,
                cache.k[i][0],
                cache.v[i][0],
                self.heads,
                cos=self.cos,
                sin=self.sin,
                length=step.cache_length,
                position=step.position,
                adjacent=model.config.rotary.pairing == "adjacent",
                norms=(self_attention.op.q_norm.weight, self_attention.op.k_norm.weight) if attention.qk_norm else None,
                eps=attention.eps,
            )
            compute_matvec(
                self.heads, self_attention.op.out.weight, self.y, bias=self_attention.op.out.bias, residual=self.x
            )
            up, down = mlp.op.gate_up, mlp.op.down
            compute_matvec(self.y, up.weight, self.hidden, bias=up.bias, norm=mlp.norm.weight, eps=eps, gated=True)
            compute_matvec(self.hidden, down.weight, self.x, bias=down.bias, residual=self.y)
        head = model.embed.weight if model.head is None else model.head.weight
        compute_matvec(self.x, head, step.logits[0], norm=norm.weight, eps=eps)
