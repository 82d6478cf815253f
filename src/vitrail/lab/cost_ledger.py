"""The cost ledger: parameters, FLOPs, bytes and roofline times of a model, computed without running it.

The model is built on the meta device and traversed by `vitrail.nn.cost`, so that 235B parameters take no memory. FLOPs
are those of matrix products; a multiply-add counts as two. Bytes are the weights that a pass reads, once each, and the
keys and values that it reads or writes. Times are rooflines: lower bounds at the device's peak rates. Vision-language
and unified models are also broken down into components: tower, connector and decoder.
"""

import bisect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import nn

from vitrail.backbones.decoder import Decoder, DecoderConfig
from vitrail.backbones.presets import DECODER_PRESETS
from vitrail.codecs.causal_video_codec import CausalVideoCodec, CausalVideoCodecConfig
from vitrail.codecs.codec import Codec, CodecConfig
from vitrail.codecs.presets import CODEC_PRESETS, VIDEO_CODEC_PRESETS
from vitrail.config import Config
from vitrail.encoders import (
    SAM,
    ConvTower,
    ConvTowerConfig,
    MultiTower,
    MultiTowerConfig,
    SAMConfig,
    T5Encoder,
    T5EncoderConfig,
    TextTower,
    TextTowerConfig,
    ViT,
    ViTConfig,
)
from vitrail.encoders.presets import MULTI_TOWER_PRESETS, SAM_PRESETS, TEXT_TOWER_PRESETS, VIT_PRESETS
from vitrail.errors import ConfigError, suggest_name
from vitrail.lab.partial_models import UnifiedReadingModel, WorldDynamicsModel
from vitrail.models.contrastive_model import ContrastiveConfig, ContrastiveModel
from vitrail.models.cross_attention_vlm import CrossAttentionVLM, CrossAttentionVLMConfig
from vitrail.models.detector import Detector, DetectorConfig
from vitrail.models.encoder_decoder_vlm import EncoderDecoderVLM, EncoderDecoderVLMConfig
from vitrail.models.genie_model import GenieConfig
from vitrail.models.presets import ALL_VLM_PRESETS
from vitrail.models.safety_checker import SafetyChecker, SafetyCheckerConfig
from vitrail.models.unified_model import UnifiedConfig
from vitrail.models.vision_inputs import get_image_layouts
from vitrail.models.vlm import VLM, VLMConfig
from vitrail.models.vlm_cost import CostComponent
from vitrail.nn import Workload, cost
from vitrail.nn.mlp import MoE

T = TypeVar("T")
InputKind = Literal["prompt", "image", "text", "pair", "question", "video"]

CONTEXT_LENGTHS = (8_192, 32_768, 262_144)
"""Context lengths to report cache and decoding at."""

TRAINING_FLOPS_FACTOR = 3
"""Training FLOPs over forward FLOPs: backward computes the gradients of both inputs and weights."""

VIDEO_FRAMES = 49
"""Frames of a video of a video codec, rounded up to a number that the codec restores."""

MAX_BATCH_SIZE = 2**20
"""Upper limit of the search for a compute-bound batch size."""

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8": torch.float8_e4m3fn,
}
"""Storage types of weights and cache. Products always run at the bf16 rate of a device."""


class DeviceSpec(NamedTuple):
    """Peak rates and memory of a device."""

    flops: float  # dense bf16 FLOPs per second
    bandwidth: float  # bytes per second
    memory: float  # bytes
    origin: str  # source of the figures


DEVICES = {
    "h200": DeviceSpec(790e12, 4.30e12, 141e9, "measured rates (bf16 product, copy), memory of the datasheet"),
    "h100": DeviceSpec(989e12, 3.35e12, 80e9, "datasheet, SXM"),
    "a100": DeviceSpec(312e12, 2.04e12, 80e9, "datasheet, SXM 80 GB"),
    "rtx4090": DeviceSpec(165e12, 1.01e12, 24e9, "datasheet"),
    "orin":    DeviceSpec(42.5e12, 0.205e12, 64e9, "datasheet, AGX 64 GB: half the rate of 85 dense int8 TOPS"),
}  # fmt: skip


class PassTime(Config):
    """Minimum seconds of a pass: its FLOPs at the device's rate, its bytes at the device's bandwidth."""

    compute: float
    memory: float

    @property
    def roofline(self) -> float:
        return max(self.compute, self.memory)

    @property
    def bound(self) -> Literal["compute", "memory"]:
        return "compute" if self.compute >= self.memory else "memory"


class DeviceRoofline(Config):
    """Roofline times of a model on one device.

    num_devices               devices needed to hold the weights and the cache of `batch_size` prompts
    forward                   a pass over `batch_size` rows
    components                time of each component of that pass
    decode                    context length → one decoding step of `batch_size` rows
    compute_bound_batch_size  smallest batch size at which decoding at the ledger's context is compute bound; None if
                              no batch size is, because a row adds more memory time than compute time
    max_batch_size            prompts of the ledger's context whose cache fits beside the weights, without activations
    """

    device: str
    batch_size: int
    num_devices: int
    forward: PassTime
    components: dict[str, PassTime] = {}
    decode: dict[int, PassTime] = {}
    compute_bound_batch_size: int | None = None
    max_batch_size: int | None = None


class ComponentCost(Config):
    """Cost of one component (tower, connector, decoder) in a pass over one row.

    `cache_bytes` are its keys and values after the pass.
    """

    parameters: int
    forward_flops: int
    weight_bytes: int
    cache_bytes: int


class CostLedger(Config):
    """Cost of one model.

    input_kind         input of a pass: prompt, image, text, pair (image and text), question (images and text), or
                       video (as long as a world model's memory; only its dynamics are counted; 49 frames of a codec)
    active_parameters  parameters used per token: all but the unused experts
    tokens             tokens of an input; patches for an image
    forward_flops      FLOPs of a pass over one input; prompts and questions compute only the last token's logits
    training_flops     FLOPs of training on one token of a prompt, or on one other input, with all parameters trainable
    weight_bytes       bytes of the weights
    decode_flops       FLOPs of one more token at this context
    cache_bytes        context length → bytes of keys and values, cross-attended image features included
    components         cost of each component of a vision-language or unified model
    image_sizes        height and width of each image of a question
    image_tokens       image tokens of a question, or cross-attended image features
    """

    name: str
    input_kind: InputKind
    dtype: str
    parameters: int
    active_parameters: int
    tokens: int
    forward_flops: int
    training_flops: int
    weight_bytes: int
    decode_flops: int | None = None
    cache_bytes: dict[int, int] = {}
    components: dict[str, ComponentCost] = {}
    image_sizes: tuple[tuple[int, int], ...] = ()
    image_tokens: int = 0
    rooflines: tuple[DeviceRoofline, ...] = ()


class InputSpec(NamedTuple):
    """Size of an input where the model does not fix it: text tokens, and images by (height, width)."""

    num_words: int
    image_sizes: tuple[tuple[int, int], ...]


class ModelKind(NamedTuple):
    """How to build a model of a config and its workloads.

    build_model           (config) → module
    count_tokens          (config, input_spec) → tokens of an input
    workload              (model, input_spec, batch_size) → workload of a pass
    decode_step_workload  (model, input_spec, length, batch_size) → workload of one more token; None if not a decoder
    """

    build_model: Callable[[Any], nn.Module]
    input_kind: InputKind
    count_tokens: Callable[[Any, InputSpec], int]
    workload: Callable[[Any, InputSpec, int], Workload]
    decode_step_workload: Callable[[Any, InputSpec, int, int], Workload] | None = None


def _count_codes(config: CodecConfig) -> int:
    return math.prod(config.net.image_size) // config.net.downsample_factor**2


def _count_patches(config: MultiTowerConfig) -> int:
    return (config.image_size // config.towers[0].vit.patch_size) ** 2


def _count_vlm_tokens(config: VLMConfig, spec: InputSpec) -> int:
    return spec.num_words + sum(map(config.count_tokens, get_image_layouts(config, spec.image_sizes)))


def _batch_workload(model: Any, spec: InputSpec, batch_size: int) -> Workload:
    return model.workload(batch_size)


def _question_workload(model: Any, spec: InputSpec, batch_size: int) -> Workload:
    return model.workload(spec.image_sizes, spec.num_words, batch_size)


def _question_decode_workload(model: Any, spec: InputSpec, length: int, batch_size: int) -> Workload:
    return model.decode_step_workload(length, spec.image_sizes, batch_size)


def _decode_workload(model: Any, spec: InputSpec, length: int, batch_size: int) -> Workload:
    return Workload.decode(length, batch_size)


def _make_tower_kind(build_model: Callable[[Any], nn.Module]) -> ModelKind:
    return ModelKind(build_model, "image", lambda config, _: config.grid_size**2, _batch_workload)


MODEL_KINDS: dict[type[Config], ModelKind] = {
    DecoderConfig: ModelKind(
        Decoder,
        "prompt",
        lambda _, spec: spec.num_words,
        lambda _, spec, batch_size: Workload.prefill(spec.num_words, batch_size),
        _decode_workload,
    ),
    ViTConfig: _make_tower_kind(ViT),
    ConvTowerConfig: _make_tower_kind(ConvTower),
    SAMConfig: _make_tower_kind(SAM),
    MultiTowerConfig: ModelKind(
        MultiTower,
        "image",
        lambda config, _: _count_patches(config),
        lambda model, _, batch_size: Workload.full_attention(_count_patches(model.config), batch_size),
    ),
    SafetyCheckerConfig: ModelKind(
        SafetyChecker, "image", lambda config, _: config.image.grid_size**2, _batch_workload
    ),
    DetectorConfig: ModelKind(Detector, "image", lambda config, _: config.image.grid_size**2, _batch_workload),
    TextTowerConfig: ModelKind(TextTower, "text", lambda config, _: config.context_length, _batch_workload),
    T5EncoderConfig: ModelKind(T5Encoder, "text", lambda config, _: config.context_length, _batch_workload),
    CodecConfig: ModelKind(Codec, "image", lambda config, _: _count_codes(config), _batch_workload),
    CausalVideoCodecConfig: ModelKind(
        CausalVideoCodec,
        "video",
        lambda config, _: config.count_codes(config.net.round_up_frames(VIDEO_FRAMES)),
        lambda model, _, batch_size: model.workload(model.config.net.round_up_frames(VIDEO_FRAMES), batch_size),
    ),
    ContrastiveConfig: ModelKind(
        ContrastiveModel, "pair", lambda config, _: config.image.grid_size**2, _batch_workload
    ),
    VLMConfig: ModelKind(VLM, "question", _count_vlm_tokens, _question_workload, _question_decode_workload),
    EncoderDecoderVLMConfig: ModelKind(
        EncoderDecoderVLM, "question", _count_vlm_tokens, _question_workload, _question_decode_workload
    ),
    UnifiedConfig: ModelKind(
        UnifiedReadingModel,
        "question",
        lambda config, spec: spec.num_words + len(spec.image_sizes) * (1 + _count_codes(config.codec)),
        lambda model, spec, batch_size: model.workload(len(spec.image_sizes), spec.num_words, batch_size),
        _decode_workload,
    ),
    CrossAttentionVLMConfig: ModelKind(
        CrossAttentionVLM,
        "question",
        lambda _, spec: spec.num_words + len(spec.image_sizes),
        _question_workload,
        _question_decode_workload,
    ),
    GenieConfig: ModelKind(
        WorldDynamicsModel,
        "video",
        lambda config, _: config.dynamics.transformer.context_frames * math.prod(config.codec.grid),
        _batch_workload,
    ),
}

PRESETS: dict[str, Config] = {
    **DECODER_PRESETS,
    **VIT_PRESETS,
    **SAM_PRESETS,
    **MULTI_TOWER_PRESETS,
    **CODEC_PRESETS,
    **VIDEO_CODEC_PRESETS,
    **{f"{name}-text": text for name, text in TEXT_TOWER_PRESETS.items()},
    **ALL_VLM_PRESETS,
}


def get_preset(name: str) -> Config:
    """Return the config of a preset."""
    remedy = "run `vitrail ledger` to list the presets, or give a folder with a config.json, or a GGUF file"
    return lookup(PRESETS, name, "preset", remedy)


def check_workload(context_length: int, batch_size: int, num_images: int = 1) -> None:
    if context_length < 1 or batch_size < 1 or num_images < 0:
        raise ConfigError(
            f"invalid workload: batch size {batch_size}, {context_length} tokens, {num_images} images",
            "batch size and tokens must be at least 1, images at least 0",
        )


def compute_ledger(
    model: str | Config,
    *,
    name: str = "",
    context_length: int = 8192,
    image_size: tuple[int, int] = (480, 640),
    num_images: int = 1,
    batch_size: int = 1,
    dtype: str = "bfloat16",
    devices: Sequence[str] = ("h200",),
    context_lengths: Sequence[int] = CONTEXT_LENGTHS,
) -> CostLedger:
    """Compute the cost ledger of a preset or a config.

    `context_length` is the number of tokens of a prompt, or of the text of a question. A question has `num_images`
    images of `image_size` (height, width). Towers use their own input size.
    """
    check_workload(context_length, batch_size, num_images)
    torch_dtype = lookup(DTYPES, dtype, "type")
    config = get_preset(model) if isinstance(model, str) else model
    kind, input_spec = get_model_kind(config), InputSpec(context_length, (image_size,) * num_images)
    with torch.device("meta"):
        model_on_meta = kind.build_model(config).to(torch_dtype)
    tokens = kind.count_tokens(config, input_spec)
    forward_workload = kind.workload(model_on_meta, input_spec, 1)
    forward, memory = (
        cost.count_flops(model_on_meta, forward_workload),
        cost.count_bytes(model_on_meta, forward_workload),
    )
    ledger = CostLedger(
        name=name or (model if isinstance(model, str) else type(config).__name__),
        input_kind=kind.input_kind,
        dtype=dtype,
        parameters=sum(p.numel() for p in model_on_meta.parameters()),
        active_parameters=count_active_parameters(model_on_meta),
        tokens=tokens,
        forward_flops=forward,
        training_flops=TRAINING_FLOPS_FACTOR * forward,
        weight_bytes=memory.weights,
        rooflines=tuple(
            _compute_device_roofline(model_on_meta, kind, input_spec, tokens, batch_size, label, context_lengths)
            for label in devices
        ),
    )
    if kind.decode_step_workload is None:
        return ledger
    lengths = {tokens, *context_lengths} | ({1} if kind.input_kind == "prompt" else set())
    steps = {n: kind.decode_step_workload(model_on_meta, input_spec, n, 1) for n in sorted(lengths)}
    training_flops = TRAINING_FLOPS_FACTOR * cost.count_flops(
        model_on_meta, forward_workload.replace(cached_tokens=0, logit_tokens=None)
    )
    # The cache holds all image tokens, even those that later tokens do not attend to.
    unseen = memory.cache - cost.count_bytes(model_on_meta, steps[tokens]).cache
    ledger = ledger.replace(
        decode_flops=cost.count_flops(model_on_meta, steps[tokens]),
        training_flops=training_flops // tokens if kind.input_kind == "prompt" else training_flops,
        cache_bytes={n: cost.count_bytes(model_on_meta, step).cache + unseen for n, step in steps.items()},
    )
    if kind.input_kind != "question":
        return ledger
    parts = {
        part: _compute_component_cost(cost_component)
        for part, cost_component in _get_cost_components(model_on_meta, forward_workload).items()
    }
    return ledger.replace(
        components=parts, image_sizes=input_spec.image_sizes, image_tokens=forward_workload.context_tokens
    )


def compute_roofline(model: nn.Module, workload: Workload, device: DeviceSpec) -> PassTime:
    """Compute the roofline time of a pass: its weights, keys and values are moved once."""
    return _compute_pass_time(cost.count_flops(model, workload), cost.count_bytes(model, workload), device)


def _compute_pass_time(flops: int, memory_traffic: cost.MemoryBytes, device: DeviceSpec) -> PassTime:
    return PassTime(
        compute=flops / device.flops, memory=(memory_traffic.read + memory_traffic.cache) / device.bandwidth
    )


def count_active_parameters(model: nn.Module) -> int:
    """Count the parameters used per token."""
    idle = 0
    for module in model.modules():
        if isinstance(module, MoE):
            one = cost.count_bytes(module, Workload.decode(1))
            idle += (one.weights - one.read) // module.down.element_size()
    return sum(p.numel() for p in model.parameters()) - idle


def find_compute_bound_batch_size(
    model: nn.Module,
    context_length: int,
    device: DeviceSpec,
    decode_workload: Callable[[int, int], Workload] = Workload.decode,
) -> int | None:
    """Find the smallest batch size at which decoding is compute bound, up to MAX_BATCH_SIZE.

    `decode_workload` maps (context_length, batch_size) to a workload. Bytes per row decrease with the batch size.
    """
    index = bisect.bisect_left(
        range(1, MAX_BATCH_SIZE + 1),
        True,
        key=lambda batch: compute_roofline(model, decode_workload(context_length, batch), device).bound == "compute",
    )
    return None if index == MAX_BATCH_SIZE else index + 1


def _get_cost_components(model: nn.Module, workload: Workload) -> dict[str, CostComponent]:
    return (
        model.cost_components(workload)
        if isinstance(model, VLM | CrossAttentionVLM | UnifiedReadingModel | WorldDynamicsModel)
        else {}
    )


def _compute_component_cost(component: CostComponent) -> ComponentCost:
    memory = component.bytes
    return ComponentCost(
        parameters=component.parameters,
        forward_flops=component.flops,
        weight_bytes=memory.weights,
        cache_bytes=memory.cache,
    )


def _compute_device_roofline(
    model: nn.Module,
    kind: ModelKind,
    input_spec: InputSpec,
    tokens: int,
    batch_size: int,
    device_name: str,
    context_lengths: Sequence[int],
) -> DeviceRoofline:
    device = lookup(DEVICES, device_name, "device")
    work = kind.workload(model, input_spec, batch_size)
    memory = cost.count_bytes(model, work)
    roofline = DeviceRoofline(
        device=device_name,
        batch_size=batch_size,
        num_devices=math.ceil((memory.weights + memory.cache) / device.memory),
        forward=compute_roofline(model, work, device),
        components={
            part: _compute_pass_time(cost_component.flops, cost_component.bytes, device)
            for part, cost_component in _get_cost_components(model, work).items()
        },
    )
    if kind.decode_step_workload is None:
        return roofline
    step = partial(kind.decode_step_workload, model, input_spec)
    return roofline.replace(
        decode={n: compute_roofline(model, step(n, batch_size), device) for n in sorted({tokens, *context_lengths})},
        compute_bound_batch_size=find_compute_bound_batch_size(model, tokens, device, step),
        max_batch_size=max(0, int((device.memory - memory.weights) // (memory.cache // batch_size))),
    )


def get_model_kind(config: Config) -> ModelKind:
    if type(config) not in MODEL_KINDS:
        known = ", ".join(kind.__name__ for kind in MODEL_KINDS)
        raise ConfigError(f"the ledger does not support a {type(config).__name__}", f"supported: {known}")
    return MODEL_KINDS[type(config)]


def lookup(table: Mapping[str, T], name: str, kind: str, remedy: str = "") -> T:
    if name in table:
        return table[name]
    raise ConfigError(f"no {kind} is named {name!r}", suggest_name(name, table, remedy))
