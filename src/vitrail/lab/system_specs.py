"""Systems at published size: their components, and the passes of one output.

Shapes: T frames, h × w patches per frame, n tokens of context.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn

from vitrail.backbones.decoder import Decoder, DecoderConfig
from vitrail.backbones.presets import DECODER_PRESETS
from vitrail.codecs.codec import Codec
from vitrail.codecs.presets import CODEC_PRESETS
from vitrail.encoders.packed_vit import PackedViTConfig
from vitrail.encoders.presets import MULTI_TOWER_PRESETS, VIT_SIZES
from vitrail.lab.cost_ledger import CONTEXT_LENGTHS, DEVICES, lookup
from vitrail.lab.system_cost import SystemCost, SystemModules, SystemPass, SystemSpec, compute_system_cost
from vitrail.models.cross_attention_vlm import CrossAttentionVLM, CrossAttentionVLMConfig
from vitrail.models.presets import ALL_VLM_PRESETS, VLM_PRESETS, get_vlm_config
from vitrail.models.unified_model import UnifiedConfig, UnifiedModel
from vitrail.models.vlm import VLM, VLMConfig
from vitrail.nn import AttentionConfig, Block, BlockConfig, GatedMLPConfig, PlainMLPConfig, RotaryConfig, Workload
from vitrail.processing.resolution_policies import NaivePolicy

IMAGE_SIZE = (480, 640)
"""Height and width of input images for models that accept any size."""

QUESTION_TOKENS, FRAMES_PER_SECOND = 32, 2
"""Text tokens of a question or an instruction, and frames per second of input video."""

GAIA_FRAME_TOKENS, GAIA_CONTEXT_LENGTH = 576, 26 * (32 + 576 + 2)
"""Image tokens per frame, and tokens of 26 frames with their text and actions: 15,860."""

GAIA_CONFIG = DecoderConfig(
    vocab_size=8192,
    layers=32,
    block=BlockConfig(
        width=4096, attention=AttentionConfig(heads=32), mlp=PlainMLPConfig(intermediate_size=16_384, bias=False)
    ),
    rotary=RotaryConfig(head_dim=128),
    context_length=GAIA_CONTEXT_LENGTH,
)
"""A decoder with 6.5B parameters. The real shape is unpublished; only the size matters here."""


# ---- vision-language models, policies ---------------------------------------------------------------------------


def _build_vlm(config: VLMConfig | CrossAttentionVLMConfig, output_tokens: int = 1) -> SystemModules:
    """Build a vision-language model: an image and text after n cached tokens, and `output_tokens` of output."""
    model = VLM(config) if isinstance(config, VLMConfig) else CrossAttentionVLM(config)
    with torch.device("cpu"):  # counting attention pairs of a packed tower needs real tensors
        workload = model.workload([IMAGE_SIZE], QUESTION_TOKENS)

    def passes(n: int) -> list[SystemPass]:
        # New tokens attend to each other, as in `workload`, and to all n cached tokens.
        work = workload.replace(
            attention_pairs=workload.attention_pairs + n * workload.tokens, cached_tokens=workload.cached_tokens + n
        )
        length = n + workload.tokens + 1
        word = model.decode_step_workload(length, [IMAGE_SIZE])
        first = SystemPass("first token", [(model, work)])
        return (
            [first, SystemPass("next tokens", [(model.decoder, word)], output_tokens - 1)]
            if output_tokens > 1
            else [first]
        )

    pairs_up = isinstance(config.tower, PackedViTConfig) and config.tower.temporal_patch_size == FRAMES_PER_SECOND
    parts = {name: nn.ModuleList(component.modules) for name, component in model.cost_components(workload).items()}
    second = workload.context_tokens * (1 if pairs_up else FRAMES_PER_SECOND)
    return SystemModules(parts, passes, workload.tokens, workload.context_tokens, second, is_context_open=True)


def _make_openvla_config() -> VLMConfig:
    """Return the config of OpenVLA: Prismatic at 224 pixels."""
    return VLM_PRESETS["prismatic-7b"].replace(
        tower=MULTI_TOWER_PRESETS["prismatic-224"], policy=NaivePolicy(image_size=224)
    )


def _build_octo() -> SystemModules:
    """Build Octo-Base: a ViT-B over two steps of a camera (256 tokens) and a wrist camera (64), after 16 text tokens.

    A step attends to the text and all steps so far. One readout token per step attends to them; nothing attends to it.
    """
    width, layers, heads, hidden = VIT_SIZES["B"]
    block = BlockConfig(
        width=width, attention=AttentionConfig(heads=heads, bias="all"), mlp=PlainMLPConfig(intermediate_size=hidden)
    )
    blocks = nn.ModuleList([Block(block) for _ in range(layers)])
    num_words, step = 16, 256 + 64
    context_lengths = [num_words + step, num_words + 2 * step]
    pairs = num_words**2 + sum(step * context + context + 1 for context in context_lengths)
    tokens = num_words + 2 * (step + 1)
    run = SystemPass("transformer", [(blocks, Workload(tokens=tokens, attention_pairs=pairs))])
    published = {"stems and diffusion head": 8_000_000, "T5-base": 111_000_000}
    return SystemModules({"transformer": blocks}, lambda _n: [run], tokens, step, published_parameters=published)


# ---- codecs, generative models ---------------------------------------------------------------------------------------


def _build_codec(name: str) -> SystemModules:
    codec = Codec(CODEC_PRESETS[name])
    work = codec.workload()
    return SystemModules(
        {"codec": codec}, lambda _n: [SystemPass("encode, decode", [(codec, work)])], work.tokens, work.tokens
    )


def _build_um3() -> SystemModules:
    """Build UM3: it samples an image code by code, then decodes the codes to pixels."""
    decoder_config = DECODER_PRESETS["llama-3.2-1b"].replace(tie_word_embeddings=False)
    model = UnifiedModel(UnifiedConfig(decoder=decoder_config, codec=CODEC_PRESETS["qlip-b16-256"], id_groups=4))
    heads = [part for part in model.head.modules() if isinstance(part, nn.Linear)]
    bridge = next(part for part in model.codec.post_quant_proj.modules() if isinstance(part, nn.Linear))
    image_workload = model.codec.workload()

    def passes(n: int) -> list[SystemPass]:
        step = Workload.decode(n + image_workload.tokens // 2)  # mean context: cost is linear
        draw = [(model.decoder.blocks, step), (model.code_proj, step), *((head, step) for head in heads)]
        return [
            SystemPass(
                "codes", draw, image_workload.tokens, (model.decoder.blocks, Workload.decode(n + image_workload.tokens))
            ),
            SystemPass("pixels", [(bridge, image_workload), (model.codec.decoder, image_workload)]),
        ]

    parts = {"decoder": model.decoder, "codec": model.codec, "heads": model.head}
    return SystemModules(parts, passes, image_workload.tokens, image_workload.tokens, is_context_open=True)


def _build_gaia() -> SystemModules:
    """Build GAIA-1: a frame is 576 sequential tokens, after its text and action tokens."""
    world, codec = Decoder(GAIA_CONFIG), Codec(CODEC_PRESETS["gaia1"])
    num_given = 32 + 2

    def passes(n: int) -> list[SystemPass]:
        n = n or GAIA_CONTEXT_LENGTH
        inputs = Workload(tokens=num_given, attention_pairs=num_given * n, cached_tokens=n, logit_tokens=0)
        return [
            SystemPass("text and actions", [(world.blocks, inputs)]),
            SystemPass("codes", [(world, Workload.decode(n))], GAIA_FRAME_TOKENS),
        ]

    published = {"video decoder": 2_600_000_000}
    parts = {"world model": world, "tokenizer": codec}
    return SystemModules(
        parts, passes, GAIA_CONTEXT_LENGTH, GAIA_FRAME_TOKENS, 6.25 * GAIA_FRAME_TOKENS, published, is_context_open=True
    )


def build_genie_dynamics(intermediate_size: int) -> nn.ModuleList:
    """Build Genie's dynamics: embedding, spatial attention, temporal attention with MLP, head."""
    width, layers = 5120, 48
    attention = AttentionConfig(heads=36, head_dim=128, qk_norm="rms")
    block = BlockConfig(
        width=width, attention=attention, mlp=PlainMLPConfig(intermediate_size=intermediate_size, bias=False)
    )
    space = nn.ModuleList([Block(block.replace(branches=("self",))) for _ in range(layers)])
    time = nn.ModuleList([Block(block) for _ in range(layers)])
    return nn.ModuleList([nn.Embedding(1024, width), space, time, nn.Linear(width, 1024)])


def _build_genie() -> SystemModules:
    """Build Genie: each of 25 steps runs the new frame, with attention within it and over 16 frames per position."""
    side, frames, steps = 40 * 23, 16, 25
    here = Workload.full_attention(side)
    past = Workload(tokens=side, attention_pairs=side * frames, cached_tokens=side * frames)
    dynamics = build_genie_dynamics(2048)
    run = SystemPass("masked steps", list(zip(dynamics, (here, here, past, here), strict=True)), steps)
    published = {"tokenizer": 200_000_000, "latent actions": 300_000_000}
    return SystemModules({"dynamics": dynamics}, lambda _n: [run], side * frames, side, 10 * side, published)


def _build_cosmos_ar(layers: int, width: int) -> SystemModules:
    """Build Cosmos AR: 33 frames of 640 × 1024 are 5 × 40 × 64 tokens; the given frame is the first 40 × 64."""
    attention = AttentionConfig(heads=32, kv_heads=8, head_dim=128, qk_norm="rms")
    config = DecoderConfig(
        vocab_size=64_000,
        layers=layers,
        block=BlockConfig(width=width, attention=attention, mlp=GatedMLPConfig(intermediate_size=14_336), norm="rms"),
        rotary=RotaryConfig(head_dim=128),
        context_length=12_800,
    )
    world, num_given, num_generated = Decoder(config), 40 * 64, 4 * 40 * 64

    def passes(n: int) -> list[SystemPass]:
        before = Workload.prefill(num_given)
        middle = Workload.decode(n + num_given + num_generated // 2)  # mean context: cost is linear
        return [
            SystemPass(
                "given frame",
                [
                    (
                        world,
                        before.replace(
                            attention_pairs=before.attention_pairs + n * num_given, cached_tokens=n + num_given
                        ),
                    )
                ],
            ),
            SystemPass(
                "codes", [(world, middle)], num_generated, (world, Workload.decode(n + num_given + num_generated))
            ),
        ]

    return SystemModules(
        {"world model": world}, passes, num_given + num_generated, num_given, 24 / 8 * num_given, is_context_open=True
    )


def _build_dit(
    width: int,
    layers: int,
    heads: int,
    clip_shape: tuple[int, int, int],
    num_inference_steps: int,
    latent_frame_rate: float,
) -> SystemModules:
    """Build Cosmos' denoiser: attention over all tokens of a clip and 512 text tokens; guidance takes two passes."""
    T, h, w = clip_shape
    attention = AttentionConfig(heads=heads, qk_norm="rms")
    block = BlockConfig(
        width=width,
        attention=attention,
        mlp=PlainMLPConfig(intermediate_size=4 * width, bias=False),
        branches=("self", "cross", "mlp"),
        norm="rms",
        context_width=1024,
    )
    blocks = nn.ModuleList([Block(block) for _ in range(layers)])
    # Scale, shift and gate of each branch from 256 features (adaLN-LoRA), once per pass.
    tunes = nn.ModuleList([nn.Linear(a, b, bias=False) for a, b in [(width, 256), (256, 3 * width)] * 3 * layers])
    ends = nn.ModuleList([nn.Linear(17 * 4, width, bias=False), nn.Linear(width, 16 * 4, bias=False)])
    tokens = Workload.full_attention(T * h * w)
    run = [(blocks, tokens.with_context(512)), (tunes, Workload(tokens=1, attention_pairs=0)), (ends, tokens)]
    parts = {"denoiser": nn.ModuleList([blocks, tunes, ends])}
    return SystemModules(
        parts,
        lambda _n: [SystemPass("denoising", run, 2 * num_inference_steps)],
        tokens.tokens,
        h * w,
        latent_frame_rate * h * w,
    )


def _build_tesseract() -> SystemModules:
    """Build TesserAct (CogVideoX-5B): joint attention of text and video.

    RGB, depth and normals are summed before attention, so that three videos take the tokens of one.
    """
    width, layers, heads, steps = 3072, 42, 48, 50
    T, h, w = 13, 30, 45  # 49 frames of 480 × 720 by 4 × 8 × 8, patches of 2 × 2
    attention = AttentionConfig(heads=heads, bias="all", qk_norm="layer")
    block = BlockConfig(width=width, attention=attention, mlp=PlainMLPConfig(intermediate_size=4 * width))
    blocks = nn.ModuleList([Block(block) for _ in range(layers)])
    # Scale, shift and gate of text and video, before attention and MLP, from 512 time features.
    tunes = nn.ModuleList([nn.Linear(512, 6 * width) for _ in range(2 * layers)])
    # One input projector per modality for latent and first frame, and one joint output projector.
    ends = nn.ModuleList([*(nn.Linear(2 * 16 * 4, width) for _ in range(3)), nn.Linear(width, 3 * 16 * 4)])
    text = nn.Linear(4096, width)
    runs = [
        (blocks, Workload.full_attention(T * h * w + 226)),
        (tunes, Workload(tokens=1, attention_pairs=0)),
        (ends, Workload.full_attention(T * h * w)),
        (text, Workload.full_attention(226)),
    ]
    parts = {"denoiser": nn.ModuleList([blocks, tunes, ends, text])}
    return SystemModules(
        parts, lambda _n: [SystemPass("denoising", runs, 2 * steps)], T * h * w + 226, h * w, 8 / 4 * h * w
    )


def _make_vlm_builder(name: str) -> Callable[[], SystemModules]:
    return lambda: _build_vlm(get_vlm_config(name))


SYSTEM_SPECS: dict[str, SystemSpec] = {
    "llava-1.5-7b": SystemSpec("answer", _make_vlm_builder("llava-1.5-7b")),
    "llava-1.5-13b": SystemSpec("answer", _make_vlm_builder("llava-1.5-13b")),
    "prismatic-7b": SystemSpec("answer", _make_vlm_builder("prismatic-7b")),
    "blip2-opt-2.7b": SystemSpec("answer", _make_vlm_builder("blip2-opt-2.7b")),
    "llama-3.2-11b-vision": SystemSpec(
        "answer", _make_vlm_builder("llama-3.2-11b-vision"), note="images are read by cross-attention"
    ),
    "token-scaling": SystemSpec("answer", _make_vlm_builder("token-scaling"), note="256 queries; HD-9"),
    "qwen3-vl-2b": SystemSpec("answer", _make_vlm_builder("qwen3-vl-2b")),
    "qwen3-vl-4b": SystemSpec("answer", _make_vlm_builder("qwen3-vl-4b")),
    "qwen3-vl-8b": SystemSpec("answer", _make_vlm_builder("qwen3-vl-8b")),
    "qwen3-vl-30b-a3b": SystemSpec("answer", _make_vlm_builder("qwen3-vl-30b-a3b")),
    "qwen3-vl-32b": SystemSpec("answer", _make_vlm_builder("qwen3-vl-32b")),
    "qwen3-vl-235b-a22b": SystemSpec("answer", _make_vlm_builder("qwen3-vl-235b-a22b")),
    "openvla-7b": SystemSpec(
        "action", lambda: _build_vlm(_make_openvla_config(), output_tokens=7), note="an action is seven tokens"
    ),
    "octo-base": SystemSpec(
        "action", _build_octo, note="a chunk of four actions; times exclude stems, T5 and the head's 20 steps"
    ),
    "qlip-b16-256": SystemSpec("image", partial(_build_codec, "qlip-b16-256"), note="encode and decode"),
    "qlip-b8-256": SystemSpec("image", partial(_build_codec, "qlip-b8-256"), note="encode and decode"),
    "qlip-l14-392": SystemSpec("image", partial(_build_codec, "qlip-l14-392"), note="encode and decode"),
    "um3-1.5b": SystemSpec("image", _build_um3, note="unpublished shape: Llama-3.2-1B with an untied head, QLIP-B/16"),
    "gaia-1": SystemSpec(
        "frame", _build_gaia, num_frames=1, note="unpublished shapes; times exclude the video decoder"
    ),
    "genie-11b": SystemSpec(
        "frame",
        _build_genie,
        num_frames=1,
        note="unpublished MLP width: 2,048 gives 10.1 B, the usual 4 × width 19 B; times exclude the tokenizer",
    ),
    "cosmos-ar-4b": SystemSpec("clip", lambda: _build_cosmos_ar(16, 4096), num_frames=33, note="one token per pass"),
    "cosmos-ar-12b": SystemSpec("clip", lambda: _build_cosmos_ar(40, 5120), num_frames=33, note="one token per pass"),
    "cosmos-1-7b": SystemSpec(
        "clip",
        lambda: _build_dit(4096, 28, 32, (16, 44, 80), 35, 3),
        num_frames=121,
        note="1280 × 704; text encoder and tokenizer are not counted",
    ),
    "cosmos-2-2b": SystemSpec(
        "clip",
        lambda: _build_dit(2048, 28, 16, (24, 30, 52), 35, 4),
        num_frames=93,
        note="832 × 480; text encoder and tokenizer are not counted",
    ),
    "cosmos-2-14b": SystemSpec(
        "clip",
        lambda: _build_dit(5120, 36, 40, (24, 44, 80), 35, 4),
        num_frames=93,
        note="1280 × 704; text encoder and tokenizer are not counted",
    ),
    "tesseract": SystemSpec(
        "clip",
        _build_tesseract,
        num_frames=49,
        note="CogVideoX-5B; text encoder, VAE and further heads are not counted",
    ),
}
"""Systems by name. Sizes are those of papers and released configs."""


def get_system_cost(
    name: str,
    *,
    devices: Sequence[str] = tuple(DEVICES),
    context_lengths: Sequence[int] = CONTEXT_LENGTHS,
    dtype: str = "bfloat16",
) -> SystemCost:
    """Compute the cost of a system, or of any vision-language preset."""
    others = {
        other: SystemSpec("answer", _make_vlm_builder(other)) for other in ALL_VLM_PRESETS if other not in SYSTEM_SPECS
    }
    return compute_system_cost(
        name,
        lookup(SYSTEM_SPECS | others, name, "system"),
        devices=devices,
        context_lengths=context_lengths,
        dtype=dtype,
    )
