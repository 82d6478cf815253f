"""Every system by name, at published size: its parts, and the passes that one output takes.

T frames, h, w patches along the sides of one, n tokens of context
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn

from vitrail.backbones.decoder import Decoder, DecoderConfig
from vitrail.backbones.presets import DECODERS
from vitrail.codecs.codec import Codec
from vitrail.codecs.presets import CODECS
from vitrail.encoders.packed import PackedViTConfig
from vitrail.encoders.presets import SIZES, TOWERS
from vitrail.evals.metrics import times_smaller
from vitrail.lab.audit import GAIA, GAIA_CONTEXT, GAIA_FRAME
from vitrail.lab.ledger import DEVICES, LENGTHS, pick
from vitrail.lab.whole import Built, Pass, System, Whole, weigh_up
from vitrail.models.looking import LookingVLM, LookingVLMConfig
from vitrail.models.presets import SYSTEMS, VLMS, vlm_named
from vitrail.models.unified import Unified, UnifiedConfig
from vitrail.models.vlm import VLM, VLMConfig
from vitrail.nn import AttentionConfig, Block, BlockConfig, GatedConfig, PlainConfig, RotaryConfig, Work
from vitrail.processing.resolution import Naive

PICTURE = (480, 640)
"""Height and width of what models that take any size are shown."""

WORDS, FRAMES = 32, 2
"""Words of a question or an instruction, and frames a second of a video that is looked at."""


# ---- models that look -------------------------------------------------------------------------------------------


def _vlm(config: VLMConfig | LookingVLMConfig, said: int = 1) -> Built:
    """A picture and WORDS words arrive behind n tokens that are cached; `said` tokens are the output."""
    model = VLM(config) if isinstance(config, VLMConfig) else LookingVLM(config)
    with torch.device("cpu"):  # what sees what in a packed tower is counted with real tensors
        asked = model.work([PICTURE], WORDS)

    def passes(n: int) -> list[Pass]:
        # The new tokens see each other, as `asked` has it, and all that was there.
        work = asked.with_(pairs=asked.pairs + n * asked.tokens, held=asked.held + n)
        length = n + asked.tokens + 1
        word = model.step(length, [PICTURE])
        first = Pass("the first token", [(model, work)])
        return [first, Pass("more tokens", [(model.decoder, word)], said - 1)] if said > 1 else [first]

    pairs_up = isinstance(config.tower, PackedViTConfig) and config.tower.temporal == FRAMES
    parts = {name: nn.ModuleList(leg.modules) for name, leg in model.legs(asked).items()}
    second = asked.context * (1 if pairs_up else FRAMES)
    return Built(parts, passes, asked.tokens, asked.context, second, grows=True)


def _openvla() -> VLMConfig:
    """Prismatic at 224 pixels."""
    return VLMS["prismatic-7b"].with_(tower=TOWERS["prismatic-224"], policy=Naive(size=224))


def _octo() -> Built:
    """Octo-Base: ViT-B over two steps of a camera (256 tokens) and a wrist camera (64), behind 16 of an instruction. A
    step sees the words and the steps so far; a readout token a step reads along and is seen by nothing."""
    width, layers, heads, hidden = SIZES["B"]
    block = BlockConfig(width=width, attention=AttentionConfig(heads=heads, bias="all"), mlp=PlainConfig(hidden=hidden))
    blocks = nn.ModuleList([Block(block) for _ in range(layers)])
    words, step = 16, 256 + 64
    sees = [words + step, words + 2 * step]
    pairs = words**2 + sum(step * seen + seen + 1 for seen in sees)
    tokens = words + 2 * (step + 1)
    run = Pass("transformer", [(blocks, Work(tokens=tokens, pairs=pairs))])
    told = {"stems and diffusion head": 8_000_000, "T5-base": 111_000_000}
    return Built({"transformer": blocks}, lambda n: [run], tokens, step, told=told)


# ---- models that draw -------------------------------------------------------------------------------------------


def _codec(name: str) -> Built:
    codec = Codec(CODECS[name])
    work = codec.work()
    return Built({"codec": codec}, lambda n: [Pass("there and back", [(codec, work)])], work.tokens, work.tokens)


def _um3() -> Built:
    """A picture is drawn code by code; the codec's decoder makes pixels of them."""
    words = DECODERS["llama-3.2-1b"].with_(tied=False)
    model = Unified(UnifiedConfig(decoder=words, codec=CODECS["qlip-b16-256"], groups=4))
    heads = [part for part in model.head.modules() if isinstance(part, nn.Linear)]
    bridge = next(part for part in model.codec.out_of.modules() if isinstance(part, nn.Linear))
    seen = model.codec.work()

    def passes(n: int) -> list[Pass]:
        step = Work.decode(n + seen.tokens // 2)  # the mean: cost is linear in the context
        draw = [(model.decoder.blocks, step), (model.code, step), *((head, step) for head in heads)]
        return [
            Pass("codes", draw, seen.tokens, (model.decoder.blocks, Work.decode(n + seen.tokens))),
            Pass("pixels", [(bridge, seen), (model.codec.decoder, seen)]),
        ]

    parts = {"decoder": model.decoder, "codec": model.codec, "heads": model.head}
    return Built(parts, passes, seen.tokens, seen.tokens, grows=True)


def _gaia() -> Built:
    """A frame is 576 tokens, one after another, behind its text and actions."""
    world, codec = Decoder(GAIA), Codec(CODECS["gaia1"])
    given = 32 + 2

    def passes(n: int) -> list[Pass]:
        n = n or GAIA_CONTEXT
        told = Work(tokens=given, pairs=given * n, held=n, asked=0)
        return [
            Pass("text and actions", [(world.blocks, told)]),
            Pass("codes", [(world, Work.decode(n))], GAIA_FRAME),
        ]

    told = {"video decoder": 2_600_000_000}
    parts = {"world model": world, "tokenizer": codec}
    return Built(parts, passes, GAIA_CONTEXT, GAIA_FRAME, 6.25 * GAIA_FRAME, told, grows=True)


def genie_dynamics(hidden: int) -> nn.ModuleList:
    """Embedding, attention within a frame, attention along time with the MLP behind it, head."""
    width, layers = 5120, 48
    attention = AttentionConfig(heads=36, head_dim=128, qk_norm="rms")
    block = BlockConfig(width=width, attention=attention, mlp=PlainConfig(hidden=hidden, bias=False))
    space = nn.ModuleList([Block(block.with_(chain=("self",))) for _ in range(layers)])
    time = nn.ModuleList([Block(block) for _ in range(layers)])
    return nn.ModuleList([nn.Embedding(1024, width), space, time, nn.Linear(width, 1024)])


def _genie() -> Built:
    """Every one of 25 steps runs the new frame alone: it sees itself, and each token the same place in 16 frames."""
    side, frames, steps = 40 * 23, 16, 25
    here = Work.full(side)
    past = Work(tokens=side, pairs=side * frames, held=side * frames)
    dynamics = genie_dynamics(2048)
    run = Pass("masked steps", list(zip(dynamics, (here, here, past, here), strict=True)), steps)
    told = {"tokenizer": 200_000_000, "latent actions": 300_000_000}
    return Built({"dynamics": dynamics}, lambda n: [run], side * frames, side, 10 * side, told)


def _cosmos_ar(layers: int, width: int) -> Built:
    """33 frames of 640 × 1024 are 5 × 40 × 64 tokens, of which a frame given is the first 40 × 64."""
    attention = AttentionConfig(heads=32, kv_heads=8, head_dim=128, qk_norm="rms")
    config = DecoderConfig(
        vocab=64_000,
        layers=layers,
        block=BlockConfig(width=width, attention=attention, mlp=GatedConfig(hidden=14_336), norm="rms"),
        rotary=RotaryConfig(head_dim=128),
        context=12_800,
    )
    world, given, rest = Decoder(config), 40 * 64, 4 * 40 * 64

    def passes(n: int) -> list[Pass]:
        before = Work.prefill(given)
        middle = Work.decode(n + given + rest // 2)  # the mean: cost is linear in the context
        return [
            Pass("the frame given", [(world, before.with_(pairs=before.pairs + n * given, held=n + given))]),
            Pass("codes", [(world, middle)], rest, (world, Work.decode(n + given + rest))),
        ]

    return Built({"world model": world}, passes, given + rest, given, 24 / 8 * given, grows=True)


def _dit(width: int, layers: int, heads: int, clip: tuple[int, int, int], steps: int, rate: float) -> Built:
    """Cosmos' denoiser: attention among all tokens of the clip and to 512 of a text; guided, so two passes a step."""
    T, h, w = clip
    attention = AttentionConfig(heads=heads, qk_norm="rms")
    block = BlockConfig(
        width=width,
        attention=attention,
        mlp=PlainConfig(hidden=4 * width, bias=False),
        chain=("self", "cross", "mlp"),
        norm="rms",
        context_width=1024,
    )
    blocks = nn.ModuleList([Block(block) for _ in range(layers)])
    # Scale, shift and gate of each branch, by way of 256 numbers (adaLN-LoRA), once a pass.
    tunes = nn.ModuleList([nn.Linear(a, b, bias=False) for a, b in [(width, 256), (256, 3 * width)] * 3 * layers])
    ends = nn.ModuleList([nn.Linear(17 * 4, width, bias=False), nn.Linear(width, 16 * 4, bias=False)])
    tokens = Work.full(T * h * w)
    run = [(blocks, tokens.across(512)), (tunes, Work(tokens=1, pairs=0)), (ends, tokens)]
    parts = {"denoiser": nn.ModuleList([blocks, tunes, ends])}
    return Built(parts, lambda n: [Pass("denoising", run, 2 * steps)], tokens.tokens, h * w, rate * h * w)


def _tesseract() -> Built:
    """CogVideoX-5B: text and video in one attention. RGB, depth and normals are summed before it, so that three videos
    have the tokens of one."""
    width, layers, heads, steps = 3072, 42, 48, 50
    T, h, w = 13, 30, 45  # 49 frames of 480 × 720 by 4 × 8 × 8, patches of 2 × 2
    attention = AttentionConfig(heads=heads, bias="all", qk_norm="layer")
    block = BlockConfig(width=width, attention=attention, mlp=PlainConfig(hidden=4 * width))
    blocks = nn.ModuleList([Block(block) for _ in range(layers)])
    # Text and video are each scaled, shifted and gated, before attention and before the MLP, by 512 numbers of time.
    tunes = nn.ModuleList([nn.Linear(512, 6 * width) for _ in range(2 * layers)])
    # An input projector of latent and first frame a modality, and one for all that comes out.
    ends = nn.ModuleList([*(nn.Linear(2 * 16 * 4, width) for _ in range(3)), nn.Linear(width, 3 * 16 * 4)])
    text = nn.Linear(4096, width)
    runs = [
        (blocks, Work.full(T * h * w + 226)),
        (tunes, Work(tokens=1, pairs=0)),
        (ends, Work.full(T * h * w)),
        (text, Work.full(226)),
    ]
    parts = {"denoiser": nn.ModuleList([blocks, tunes, ends, text])}
    return Built(parts, lambda n: [Pass("denoising", runs, 2 * steps)], T * h * w + 226, h * w, 8 / 4 * h * w)


def _named(name: str) -> Callable[[], Built]:
    return lambda: _vlm(vlm_named(name))


# fmt: off
WHOLE: dict[str, System] = {
    "llava-1.5-7b":         System("answer",  _named("llava-1.5-7b")),
    "llava-1.5-13b":        System("answer",  _named("llava-1.5-13b")),
    "prismatic-7b":         System("answer",  _named("prismatic-7b")),
    "blip2-opt-2.7b":       System("answer",  _named("blip2-opt-2.7b")),
    "llama-3.2-11b-vision": System("answer",  _named("llama-3.2-11b-vision"),
                                   note="its pictures are looked at from beside the tokens"),
    "token-scaling":        System("answer",  _named("token-scaling"), note="256 queries; HD-9"),
    "qwen3-vl-2b":          System("answer",  _named("qwen3-vl-2b")),
    "qwen3-vl-4b":          System("answer",  _named("qwen3-vl-4b")),
    "qwen3-vl-8b":          System("answer",  _named("qwen3-vl-8b")),
    "qwen3-vl-30b-a3b":     System("answer",  _named("qwen3-vl-30b-a3b")),
    "qwen3-vl-32b":         System("answer",  _named("qwen3-vl-32b")),
    "qwen3-vl-235b-a22b":   System("answer",  _named("qwen3-vl-235b-a22b")),
    "openvla-7b":           System("action",  lambda: _vlm(_openvla(), said=7), note="an action is seven tokens"),
    "octo-base":            System("action",  _octo,
                                   note="a chunk of four actions; stems, T5 and the head's 20 steps are not in times"),
    "qlip-b16-256":         System("picture", partial(_codec, "qlip-b16-256"), note="there and back"),
    "qlip-b8-256":          System("picture", partial(_codec, "qlip-b8-256"), note="there and back"),
    "qlip-l14-392":         System("picture", partial(_codec, "qlip-l14-392"), note="there and back"),
    "um3-1.5b":             System("picture", _um3, note="shape untold: Llama-3.2-1B's with a head apart, QLIP-B/16"),
    "gaia-1":               System("frame",   _gaia, frames=1,
                                   note="shapes untold; the video decoder's passes are not in times"),
    "genie-11b":            System("frame",   _genie, frames=1,
                                   note="MLP's width untold: 2,048 comes to 10.1 B, the usual 4 × width would be 19 B; "
                                        "the tokenizer's passes are not in times"),
    "cosmos-ar-4b":         System("clip",    lambda: _cosmos_ar(16, 4096), frames=33, note="a token a pass"),
    "cosmos-ar-12b":        System("clip",    lambda: _cosmos_ar(40, 5120), frames=33, note="a token a pass"),
    "cosmos-1-7b":          System("clip",    lambda: _dit(4096, 28, 32, (16, 44, 80), 35, 3), frames=121,
                                   note="1280 × 704; text encoder and tokenizer are not counted"),
    "cosmos-2-2b":          System("clip",    lambda: _dit(2048, 28, 16, (24, 30, 52), 35, 4), frames=93,
                                   note="832 × 480; text encoder and tokenizer are not counted"),
    "cosmos-2-14b":         System("clip",    lambda: _dit(5120, 36, 40, (24, 44, 80), 35, 4), frames=93,
                                   note="1280 × 704; text encoder and tokenizer are not counted"),
    "tesseract":            System("clip",    _tesseract, frames=49,
                                   note="CogVideoX-5B; text encoder, VAE and further heads are not counted"),
}
# fmt: on
"""Every system by name. Sizes are those of papers and released configs."""


def system(
    name: str, *, devices: Sequence[str] = tuple(DEVICES), lengths: Sequence[int] = LENGTHS, dtype: str = "bfloat16"
) -> Whole:
    """The figures of one of them, or of any other vision-language model that has a preset."""
    others = {other: System("answer", _named(other)) for other in SYSTEMS if other not in WHOLE}
    return weigh_up(name, pick(WHOLE | others, name, "system"), devices=devices, lengths=lengths, dtype=dtype)


def compression(name: str) -> float:
    """How many times fewer bits a codec's codes have than the pixels of its pictures."""
    with torch.device("meta"):
        codec = Codec(pick(CODECS, name, "codec"))
    return times_smaller(codec.bits, codec.work().tokens, *codec.size)
