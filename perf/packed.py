"""Training a vision-language model on packed rows against padded rows: real tokens per second.

    python perf/packed.py --out results.json           # needs a CUDA device
    python perf/packed.py --out results.json --tiny    # the same script with a tiny model, on the CPU

The lengths are those of The Cauldron (arXiv 2405.02246, table 14). For each dataset the table gives its images, its
question–answer pairs, the tokens of its answers, and its share of the answer tokens of the mixture. A sample is one
image with all its pairs, or with as many as fit into a row. A question has QUESTION_LENGTH tokens, because the table
has no lengths of questions. All samples of a dataset have its mean length, so real lengths vary more, and real padded
rows have more padding than here. PlotQA is left out: its row has less than half a token per answer.

The model has the shapes of SmolLM2-135M and of a frozen SigLIP-B/16 at 256 px, with four patches per token. All
variants take the same steps of the same 128 samples: bf16, fused AdamW, cross-entropy over answers, without
compilation, because shapes of padded batches vary.

| variant | rows |
|---|---|
| `padded` | one sample a row, 32 rows at a time with accumulated gradients, padded to the longest of the 32, causal |
| `grouped` | the same, with the samples of a step sorted by length |
| `packed` | rows of ROW_LENGTH tokens packed by best fit, all rows of a step at once |

Pixels, ids and plans are on the device before the first step. Every variant takes all its steps once as a warm-up.
`full` is the fraction of positions that are not padding.
"""

import json
import statistics
from collections.abc import Sequence
from functools import partial
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
from record import make_parser, write_record
from timing import CUDA, DEVICE, measure_seconds, read_peak_gib
from torch import Tensor

from vitrail.backbones.decoder import DecoderConfig
from vitrail.connectors import MergerConfig
from vitrail.encoders.presets import siglip_vit_config
from vitrail.encoders.vit import ViTConfig
from vitrail.generate.vlm_generation import pad_streams
from vitrail.models.vision_inputs import VisionInputs
from vitrail.models.vlm import VLM, VLMConfig
from vitrail.nn import AttentionConfig, AttentionPlan, BlockConfig, GatedMLPConfig, PlainMLPConfig, RotaryConfig
from vitrail.processing.resolution_policies import NaivePolicy
from vitrail.stream import PackedBatch, Part, Stream, build_stream, merge_features, pack_streams, text_part
from vitrail.tasks.qa_tokens import IGNORE_INDEX, answer_loss

DTYPE = torch.bfloat16 if CUDA else torch.float32
QUESTION_LENGTH, ROW_LENGTH = 16, 2048
MEASURED = (
    "vitrail.models.vlm",
    "vitrail.models.vlm_vision_model",
    "vitrail.stream.packing",
    "vitrail.nn.attention_backends",
    "vitrail.nn.attention_plans",
    "vitrail.tasks.qa_tokens",
)

# dataset: images, pairs, tokens of answers, share of the mixture's answer tokens in %
CAULDRON = {
    "VQAv2": (82_772, 443_757, 1_595_929, 5.72), "COCO-QA": (46_287, 78_736, 286_982, 1.47),
    "Visual7W": (14_366, 69_817, 279_268, 1.43), "A-OKVQA": (16_539, 17_056, 236_492, 1.21),
    "TallyQA": (98_680, 183_986, 738_254, 0.57), "OK-VQA": (8_998, 9_009, 38_853, 0.40),
    "HatefulMemes": (8_500, 8_500, 25_500, 0.13), "VQA-RAD": (313, 1_793, 8_418, 0.09),
    "LNarratives": (507_444, 507_444, 21_328_731, 4.56), "Screen2Words": (15_730, 15_743, 143_103, 0.37),
    "VSR": (2_157, 3_354, 10_062, 0.21), "RenderedText": (999_000, 999_000, 27_207_774, 5.57),
    "DocVQA": (10_189, 39_463, 337_829, 3.46), "TextCaps": (21_953, 21_953, 389_658, 2.00),
    "TextVQA": (21_953, 34_602, 181_918, 1.86), "ST-VQA": (17_247, 23_121, 127_846, 1.31),
    "OCR-VQA": (165_746, 801_579, 6_073_824, 0.93), "VisualMRC": (3_027, 11_988, 168_828, 0.86),
    "IAM": (5_663, 5_663, 144_216, 0.74), "InfoVQA": (2_118, 10_074, 61_048, 0.63),
    "Diagrams": (300, 300, 22_196, 0.11), "Chart2Text": (26_985, 30_242, 2_852_827, 4.38),
    "DVQA": (200_000, 2_325_316, 8_346_234, 4.27), "VisText": (7_057, 9_969, 1_245_485, 1.91),
    "ChartQA": (18_271, 28_299, 185_835, 1.90), "FigureQA": (100_000, 1_327_368, 3_982_104, 0.61),
    "MapQA": (37_417, 483_416, 6_470_485, 0.33), "TabMWP": (22_729, 23_059, 1_948_166, 2.49),
    "TAT-QA": (2_199, 13_215, 283_776, 2.18), "HiTab": (2_500, 7_782, 351_299, 1.80),
    "MultiHiertt": (7_619, 7_830, 267_615, 1.37), "FinQA": (5_276, 6_251, 242_561, 0.99),
    "WikiSQL": (74_989, 86_202, 9_680_673, 0.99), "SQA": (8_514, 34_141, 1_894_824, 0.97),
    "WTQ": (38_246, 44_096, 6_677_013, 0.51), "GeomVerse": (9_303, 9_339, 2_489_459, 3.83),
    "CLEVR-Math": (70_000, 788_650, 3_184_656, 3.26), "CLEVR": (70_000, 699_989, 2_396_781, 1.23),
    "IconQA": (27_315, 29_859, 112_969, 1.16), "RAVEN": (42_000, 42_000, 105_081, 0.67),
    "Inter-GPS": (1_451, 2_101, 8_404, 0.17), "AI2D": (3_099, 9_708, 38_832, 0.80),
    "TQA": (1_496, 6_501, 26_004, 0.53), "ScienceQA": (4_985, 6_218, 24_872, 0.25),
    "NLVR2": (50_426, 86_373, 259_119, 1.33), "GSD": (70_939, 141_869, 4_637_229, 0.48),
    "Spot the diff": (8_566, 9_524, 221_477, 0.57), "WebSight": (500_000, 500_000, 276_743_299, 0.28),
    "DaTikz": (47_974, 48_296, 59_556_252, 0.03),
}  # fmt: skip

Variant = Literal["padded", "grouped", "packed"]


class Size(NamedTuple):
    samples: int  # in a step
    rows: int  # padded rows at a time
    steps: int
    row_length: int  # of packed rows
    config: VLMConfig


class Conversation(NamedTuple):
    """The text lengths of one sample."""

    turns: int  # questions with answers
    answer: int  # tokens of an answer


def sample_conversations(count: int, max_tokens: int, seed: int = 0) -> list[Conversation]:
    """Sample conversations of the mixture with at most `max_tokens` text tokens."""
    table = np.array(list(CAULDRON.values()))
    images, _, tokens, share = table.T
    weights = share / (tokens / images)  # shares are of tokens, not of images
    chosen = np.random.default_rng(seed).choice(len(table), count, p=weights / weights.sum())
    means = [Conversation(round(p / n), max(1, round(t / p))) for n, p, t in table[:, :3]]
    cut = [
        Conversation(max(1, min(turns, max_tokens // (QUESTION_LENGTH + answer))), answer) for turns, answer in means
    ]
    return [cut[i]._replace(answer=min(cut[i].answer, max_tokens - QUESTION_LENGTH)) for i in chosen]


def make_full_size() -> Size:
    block = BlockConfig(576, AttentionConfig(9, kv_heads=3), GatedMLPConfig(1536), norm="rms", eps=1e-5)
    decoder = DecoderConfig(
        vocab_size=49_152, layers=30, block=block, rotary=RotaryConfig(64), tie_word_embeddings=True
    )
    return Size(128, 32, 16, ROW_LENGTH, build_config(siglip_vit_config("B", 16, 256), decoder))


def make_tiny_size() -> Size:
    block = BlockConfig(32, AttentionConfig(2), GatedMLPConfig(48), norm="rms")
    decoder = DecoderConfig(vocab_size=64, layers=2, block=block, rotary=RotaryConfig(16), tie_word_embeddings=True)
    tower = ViTConfig(
        image_size=16, patch_size=4, layers=1, block=BlockConfig(16, AttentionConfig(2), PlainMLPConfig(32))
    )
    return Size(8, 4, 2, 512, build_config(tower, decoder))


def build_config(tower: ViTConfig, decoder: DecoderConfig) -> VLMConfig:
    connector = MergerConfig(in_features=tower.block.width, out_features=decoder.block.width, merge=2)
    return VLMConfig(
        tower, connector, decoder, policy=NaivePolicy(image_size=tower.image_size, patch_size=tower.patch_size)
    )


class MicroBatch(NamedTuple):
    """The inputs of one forward pass."""

    batch: PackedBatch
    plan: AttentionPlan
    images: VisionInputs


class Step(NamedTuple):
    micro_batches: list[MicroBatch]

    @property
    def lengths(self) -> list[int]:
        return [length for part in self.micro_batches for length in part.batch.lengths]

    @property
    def num_positions(self) -> int:
        """Tokens and padding."""
        return sum(part.batch.ids.numel() for part in self.micro_batches)

    @property
    def num_targets(self) -> int:
        return sum(int((part.batch.targets != IGNORE_INDEX).sum()) for part in self.micro_batches)


def make_steps(size: Size, device: str, variant: Variant) -> list[Step]:
    """Make the steps of a variant. All variants have the same samples."""
    config = size.config
    layout, generator = config.policy.layout(*[config.tower.image_size] * 2), torch.Generator().manual_seed(1)
    conversations = sample_conversations(size.samples * size.steps, size.row_length - config.count_tokens(layout))

    def make_text(length: int, loss_mask: bool = False) -> Part:
        ids = torch.randint(1, config.decoder.vocab_size, (length,), generator=generator).tolist()
        return text_part(ids, loss_mask=loss_mask)

    steps = []
    for first in range(0, len(conversations), size.samples):
        samples = []
        for conversation in conversations[first : first + size.samples]:
            parts = [config.make_part(layout)]
            for _ in range(conversation.turns):
                parts += [make_text(QUESTION_LENGTH), make_text(conversation.answer, loss_mask=True)]
            pixels = torch.randn(3, config.tower.image_size, config.tower.image_size, generator=generator)
            samples.append((build_stream(parts, config.rules), pixels))
        if variant == "grouped":
            samples.sort(key=lambda sample: len(sample[0]))
        at_once = size.samples if variant == "packed" else size.rows
        groups = [samples[i : i + at_once] for i in range(0, len(samples), at_once)]
        steps.append(Step([make_micro_batch(*zip(*group, strict=True), size, variant, device) for group in groups]))
    return steps


def make_micro_batch(
    streams: Sequence[Stream], pixels: Sequence[Tensor], size: Size, variant: Variant, device: str
) -> MicroBatch:
    config = size.config
    layout = config.policy.layout(config.tower.image_size, config.tower.image_size)
    batch = pack_streams(streams, size.row_length) if variant == "packed" else pad_streams(streams)
    plan = batch.attention_plan() if variant == "packed" else AttentionPlan(causal=True)
    images = VisionInputs(torch.stack(list(pixels)).to(device, DTYPE), (layout,) * len(streams))
    return MicroBatch(batch.to(device), plan.to(device), images)


def compute_loss(model: VLM, micro_batch: MicroBatch) -> Tensor:
    """Return the summed −log p of all answer tokens."""
    batch, plan, images = micro_batch
    with torch.no_grad():
        features = model.forward_features(images.pixels)
    embeds = model.connector(features, model.config.feature_layout(images.layouts[0].views[0].grid))
    embeds = merge_features(model.decoder.embed(batch.ids), {"image": list(embeds)}, batch)
    hidden = model.decoder.forward_hidden(embeds=embeds, positions=batch.positions[..., 0], plan=plan)
    return answer_loss(model.decoder, hidden, batch.targets, "sum", 0.0)


def measure_variant(size: Size, variant: Variant) -> dict[str, float]:
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = VLM(size.config).to(DTYPE)
    model.tower.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=CUDA)
    steps, losses = make_steps(size, DEVICE, variant), []
    target_counts = [step.num_targets for step in steps]

    def run_step(step: Step, num_targets: int) -> None:
        total = torch.zeros((), device=DEVICE)
        for micro_batch in step.micro_batches:
            loss = compute_loss(model, micro_batch) / num_targets
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)

    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    times = [
        measure_seconds(partial(run_step, step, count))
        for step, count in zip(steps * 2, target_counts * 2, strict=True)
    ]
    times, tokens = times[len(steps) :], sum(sum(step.lengths) for step in steps)  # without the warm-up
    figures = {
        "tokens_per_s": tokens / sum(times),
        "full": tokens / sum(step.num_positions for step in steps),
        "tokens_a_sample": tokens / (size.samples * size.steps),
        "longest": max(max(step.lengths) for step in steps),
        "ms": 1000 * statistics.median(times),
        "first_loss": losses[0].item(),
        "peak_gib": read_peak_gib(),
    }
    print(f"{variant}: {json.dumps(figures)}")
    return figures


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    if not (CUDA or arguments.tiny):
        parser.error("no CUDA device: --tiny runs on the CPU")
    size, result = make_tiny_size() if arguments.tiny else make_full_size(), {}
    for variant in get_args(Variant):
        result[variant] = measure_variant(size, variant)
        write_record(arguments.out, result, MEASURED)
    for other in ("padded", "grouped"):
        speedup = result["packed"]["tokens_per_s"] / result[other]["tokens_per_s"]
        result[f"speedup_over_{other}"] = speedup
        print(f"packed over {other}: {speedup:.2f} times the tokens per second")
    write_record(arguments.out, result, MEASURED)


if __name__ == "__main__":
    main()
