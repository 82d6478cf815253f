"""World rollouts as CUDA graphs: one graph launch generates a frame, updates the memory and decodes the pixels.

Shapes: B rows, N codes per frame.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from vitrail.errors import ConfigError, DataError
from vitrail.generate.cuda_graph_decode import WeightPointers, capture_graph, compile_blocks
from vitrail.generate.rollout import Rollout, RolloutConfig
from vitrail.models.genie_model import Genie
from vitrail.nn import AnyFrameCache, FrameRingCache


class RecordedFrameGraph(NamedTuple):
    """A CUDA graph with its input buffers (actions, uniforms, codebook) and output buffers (pixels and ids)."""

    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, Tensor, Tensor]
    outputs: tuple[Tensor, Tensor]
    memory: tuple[AnyFrameCache, AnyFrameCache]
    weight_pointers: WeightPointers


class CUDAGraphRollout(Rollout):
    """Rollout that captures a CUDA graph once its memory is full, and replays it for all later frames and rollouts.

    Earlier frames run eagerly. `use_compile` compiles the blocks first, which takes some seconds once.
    """

    def __init__(self, model: Genie, config: RolloutConfig | None = None, *, use_compile: bool = False):
        super().__init__(model, config)
        if reason := explain_unsupported(model):
            raise ConfigError(f"the rollout cannot be captured: {reason}", "use Rollout")
        self.use_compile = use_compile
        self._recorded: RecordedFrameGraph | None = None

    def start(self, frames: Tensor, actions: Tensor | None = None, seed: int | None = None) -> Tensor:
        size = self.model.codec.image_size
        if tuple(frames.shape[-2:]) != size:  # a graph has one grid; another grid can have the same number of codes
            raise DataError(
                f"frames have {tuple(frames.shape[-2:])} pixels", f"give frames of {size} pixels, or use Rollout"
            )
        return super().start(frames, actions, seed)

    def _next(self, shifted_actions: Tensor, chance: Tensor) -> Tensor:
        inputs = shifted_actions, chance, self.codebook
        if not (isinstance(self.dynamics_cache, FrameRingCache) and isinstance(self.decoder_cache, FrameRingCache)):
            return super()._next(shifted_actions, chance)
        if self._recorded is None or not self._matches(self._recorded, inputs):
            self._recorded = self._capture(inputs)
        recorded = self._recorded
        for static, one in zip(recorded.inputs, inputs, strict=True):
            static.copy_(one)
        recorded.graph.replay()
        frame, self._frame_codes = (one.clone() for one in recorded.outputs)
        return frame

    def _matches(self, recorded: RecordedFrameGraph, inputs: tuple[Tensor, ...]) -> bool:
        """Return whether the graph's input shapes and the addresses of memory and weights still match."""
        same = all(a is b for a, b in zip(recorded.memory, (self.dynamics_cache, self.decoder_cache), strict=True))
        return (
            same
            and all(a.shape == b.shape for a, b in zip(recorded.inputs, inputs, strict=True))
            and recorded.weight_pointers.are_unchanged()
        )

    def _capture(self, inputs: tuple[Tensor, Tensor, Tensor]) -> RecordedFrameGraph:
        graph_inputs = inputs[0].clone(), inputs[1].clone(), inputs[2].clone()
        shifted_actions, chance, codes = graph_inputs
        H, W, C = self.frame_shape
        frame = torch.empty(len(shifted_actions), C, H, W, dtype=torch.uint8, device=shifted_actions.device)
        ids, memory = self.last_frame_codes[:, None].clone(), (self.dynamics_cache, self.decoder_cache)
        counters = [torch.as_tensor(one.num_frames).clone() for one in memory]
        eager_next, before = super()._next, (self.codebook, self._frame_codes, self._pending_actions)

        def draw() -> None:
            frame.copy_(eager_next(shifted_actions, chance))
            self.update_memory()
            ids.copy_(self.last_frame_codes[:, None])

        def restore_memory() -> None:
            for one, count in zip(memory, counters, strict=True):
                torch.as_tensor(one.num_frames).copy_(count)

        def warm_up() -> None:  # restores the memory counters after each run
            draw()
            restore_memory()

        blocks = [*self.model.dynamics.transformer.blocks, *self.model.codec.decoder.blocks] if self.use_compile else []
        self.codebook = codes
        try:
            with compile_blocks(blocks):
                graph = capture_graph(draw, warm_up)
        finally:  # restore the state; capture may have failed
            self.codebook, self._frame_codes, self._pending_actions = before
            restore_memory()
        return RecordedFrameGraph(graph, graph_inputs, (frame, ids), memory, WeightPointers(self.model))


def explain_unsupported(model: Genie) -> str | None:
    """Return why rollouts of a model cannot be captured, or None."""
    if model.codec.device.type != "cuda":
        return f"the model is on {model.codec.device}, and CUDA graphs need a GPU"
    return None
