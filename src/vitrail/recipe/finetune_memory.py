"""Estimate of the memory of fine-tuning: exact bytes of the state, and the activations of a step.

The state is counted on a model on the meta device, in the dtypes of training. Activations follow the passes of one
micro-batch: what each block keeps for its backward pass, the loss, and the update.

T tokens of a micro-batch with padding
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from torch import nn

from vitrail.data.sampler import MixtureSampler
from vitrail.models.vlm import VLM
from vitrail.nn import Attention, Block
from vitrail.nn.blockwise_quantization import NF4Weight
from vitrail.nn.kernels import HAS_TRITON
from vitrail.nn.mlp import GatedMLP, MoE
from vitrail.objectives.fused_cross_entropy import MAX_LOGITS
from vitrail.stream.packing import IGNORE_INDEX
from vitrail.tasks.chat_task import ChatTask
from vitrail.training.lora import LoRAAdapter
from vitrail.training.optimizer import BUCKET_NUMEL, Optimizer
from vitrail.training.stage_config import StageConfig
from vitrail.training.task import Batch, SampleSource

NUM_BATCHES = 8  # micro-batches of the first steps; the largest counts


class StateBytes(NamedTuple):
    """Bytes that a model on the meta device takes in training."""

    weights: int
    gradients: int
    optimizer: int


def count_state_bytes(model: nn.Module, stage: StageConfig) -> StateBytes:
    """Count the bytes of weights, gradients and optimizer state.

    With several micro-batches, gradients of bfloat16 weights also have float32 sums.
    """
    weights = [*model.parameters(), *model.buffers()]
    trainable = [p for p in model.parameters() if p.requires_grad]
    sums = stage.dtype == "bfloat16" and stage.gradient_accumulation_steps > 1
    return StateBytes(
        weights=sum(t.numel() * t.element_size() for t in weights),
        gradients=sum(p.numel() * (p.element_size() + 4 * sums) for p in trainable),
        optimizer=sum(
            t.numel() * t.element_size()
            for name, t in Optimizer(model, stage.optim).state_dict().items()
            if not name.startswith("steps.")
        ),
    )


def read_micro_batches(
    task: ChatTask, stage: StageConfig, sources: Mapping[str, SampleSource], seed: int, limit: int
) -> list[Batch]:
    """Return the first micro-batches of a run, as the trainer makes them."""
    order = MixtureSampler(stage.mixture, {name: len(source) for name, source in sources.items()}, seed)
    size = stage.batch_size // stage.gradient_accumulation_steps
    count = min(limit, stage.steps * stage.gradient_accumulation_steps)
    draws = [[order[first + i] for i in range(size)] for first in range(0, count * size, size)]
    return [task.collate([sources[draw.source][draw.item] for draw in batch]) for batch in draws]


def estimate_activations(model: VLM, task: ChatTask, batch: Batch, stage: StageConfig, device: str) -> int:
    """Estimate the largest number of bytes beyond weights and optimizer state in a step with this micro-batch."""
    size = 2 if stage.dtype == "bfloat16" else 4
    has_kernels = HAS_TRITON and size == 2 and device.startswith("cuda")
    state, is_accumulated = count_state_bytes(model, stage), stage.gradient_accumulation_steps > 1
    parts = list(_list_block_memory(model, task, batch, stage, has_kernels))
    kept = sum(part.kept for part in parts)
    blocks = [part.peak for part in parts]
    tokens, width = batch["ids"].numel(), model.config.decoder.block.width  # type: ignore[union-attr]
    kept += 2 * size * tokens * width  # input and output of the last norm
    inputs = 2 * sum(value.numel() * value.element_size() for value in batch.values())  # also those of the next step
    trainable = [p.numel() for p in model.parameters() if p.requires_grad]
    sums = 4 * sum(trainable) if is_accumulated else 0
    loss, head_gradient = _estimate_loss(model, batch, size)
    dequantized = max((size * one.numel for one in model.modules() if isinstance(one, NF4Weight)), default=0)
    backward = max(blocks, default=0) + dequantized
    largest = max(max(trainable), min(sum(trainable), BUCKET_NUMEL))
    # Float32 copies in the update: gradients, and means with codes and scales.
    copies = 20 if stage.optim.kind == "adamw_8bit" else 0
    copies += 4 if size == 2 and not (has_kernels and stage.optim.kind == "adamw") else 0
    return inputs + max(
        sums + kept + loss,
        sums + kept + head_gradient + backward,
        state.gradients + backward,
        state.gradients + copies * largest,
    )


class _BlockMemory(NamedTuple):
    """Bytes of one block: kept until its backward pass, and needed in addition while that runs."""

    kept: int
    peak: int


def _list_block_memory(
    model: VLM, task: ChatTask, batch: Batch, stage: StageConfig, has_kernels: bool
) -> Iterator[_BlockMemory]:
    """Yield the memory of the blocks through which gradients flow."""
    vision, is_checkpointed = task.count_vision_tokens(batch), stage.gradient_checkpointing
    size = 2 if stage.dtype == "bfloat16" else 4
    has_gradient = False
    for name, module in model.named_modules():  # tower, connector, decoder
        has_gradient |= any(p.requires_grad for p in module.parameters(recurse=isinstance(module, Block)))
        if has_gradient and isinstance(module, Block):
            tokens = size * (batch["ids"].numel() if name.startswith("decoder.") else vision)
            width, saved, extra = count_block_numbers(module, has_kernels)
            kept = tokens * (width if is_checkpointed else width + saved)
            yield _BlockMemory(kept, tokens * (saved + extra if is_checkpointed else extra))


def count_block_numbers(block: Block, has_kernels: bool = False) -> tuple[int, int, int]:
    """Count numbers of one token: the input, what the backward pass needs besides, and its largest gradients.

    A layer keeps its input and its output. Rotated queries and keys, repeated key/value heads and the activation of a
    gated MLP come on top, the last without the fused kernel only.
    """
    layers = [layer for layer in block.modules() if isinstance(layer, nn.Linear)]
    saved = sum(layer.in_features + layer.out_features for layer in layers)
    saved += sum(len(one.a) for one in block.modules() if isinstance(one, LoRAAdapter))
    extra = max((layer.out_features for layer in layers), default=0)
    width = 0
    for module in block.modules():
        if isinstance(module, Attention):
            width = module.width
            heads, groups = module.config.heads, module.config.num_kv_heads
            saved += module.head_dim * (heads + (groups if groups == heads else 2 * heads)) - width
        elif isinstance(module, GatedMLP) and not (has_kernels and module.activation == "silu"):
            saved += module.down.in_features
        elif isinstance(module, MoE):
            rows = module.config.experts_per_token * module.gate_up.shape[1]
            saved += 2 * rows + 2 * module.config.experts_per_token * module.width
            extra = max(extra, rows)
    return width or layers[0].in_features, saved, extra + width


def _estimate_loss(model: VLM, batch: Batch, size: int) -> tuple[int, int]:
    """Return the bytes of the loss and its gradients, and those that stay for the backward pass."""
    head = model.decoder.embed.weight if model.decoder.head is None else model.decoder.head.weight
    targets = int((batch["targets"] != IGNORE_INDEX).sum())
    logits = min(targets * len(head), MAX_LOGITS) * (size + 4)
    hidden = 2 * size * targets * head.shape[1]
    weight_gradient = size * head.numel() if head.requires_grad else 0
    return logits + hidden + (4 * head.numel() + weight_gradient if weight_gradient else 0), hidden + weight_gradient
