"""Training a vision-language model on packed rows against padded ones, in one run: useful tokens a second.

    python perf/packed.py --out results.json           # needs a CUDA device
    python perf/packed.py --out results.json --tiny    # the same script with a tiny model, on the CPU

The lengths are The Cauldron's, as published (arXiv 2405.02246, table 14): for every data set with pictures, these, its
pairs of question and answer, the tokens of its answers, and its share of the mixture's answer tokens. A sample is one
picture with all its pairs, or with as many as a row holds; a question counts QUESTION tokens, which the table does not
say. Within a data set only the mean is published and all samples have it, so that real lengths are spread wider and
padded rows are emptier than here. PlotQA is left out: its row has less than half a token an answer.

The model has SmolLM2-135M's shape behind SigLIP-B/16's at 256 px, frozen, four patches to a token. All sides take the
same steps of the same 128 samples: bf16, fused AdamW, cross-entropy over answers, nothing compiled, since no two padded
batches have one shape. Padded: a row a sample, 32 rows at a time with their gradients summed up, as long as the longest
of these, causal attention without a mask. Grouped: the same, the samples of a step sorted by length before. Packed:
rows of ROW tokens by best fit, all of a step at once. Pixels, ids and plans lie ready on the device, and every side
takes all of its steps once before those that are timed. `full` is the share of a side's places that are no padding.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
from record import record
from torch import Tensor

from vitrail.backbones.decoder import DecoderConfig
from vitrail.connectors import MergerConfig
from vitrail.encoders.presets import siglip
from vitrail.encoders.vit import ViTConfig
from vitrail.generate.seen import rows as row_each
from vitrail.models.vlm import VLM, Shown, VLMConfig
from vitrail.nn import AttentionConfig, BlockConfig, GatedConfig, PlainConfig, Plan, RotaryConfig
from vitrail.processing.resolution import Naive
from vitrail.stream import Batch, Stream, build, merge, pack, words
from vitrail.tasks.told import IGNORED, said_loss

CUDA = torch.cuda.is_available()
QUESTION, ROW = 16, 2048
MEASURED = ("vitrail.models.vlm", "vitrail.stream.pack", "vitrail.nn.attend", "vitrail.nn.plan", "vitrail.tasks.told")

# data set: pictures, pairs, tokens of answers, share of the mixture's answer tokens in %
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


Side = Literal["padded", "grouped", "packed"]


class Size(NamedTuple):
    samples: int  # of a step
    rows: int  # of samples that are padded, at a time
    steps: int
    row: int
    config: VLMConfig


class Talk(NamedTuple):
    """Tokens of one sample's words: so many turns, each a question and an answer."""

    turns: int
    answer: int


def talks(count: int, most: int, seed: int = 0) -> list[Talk]:
    """So many samples, drawn as the mixture would, none with more words than `most`."""
    table = np.array(list(CAULDRON.values()))
    pictures, _, tokens, share = table.T
    chance = share / (tokens / pictures)  # shares are of tokens: a picture with many is drawn less often
    chosen = np.random.default_rng(seed).choice(len(table), count, p=chance / chance.sum())
    each = [Talk(round(p / n), max(1, round(t / p))) for n, p, t in table[:, :3]]
    kept = [Talk(max(1, min(turns, most // (QUESTION + answer))), answer) for turns, answer in each]
    return [kept[i]._replace(answer=min(kept[i].answer, most - QUESTION)) for i in chosen]


def full() -> Size:
    block = BlockConfig(576, AttentionConfig(9, kv_heads=3), GatedConfig(1536), norm="rms", eps=1e-5)
    decoder = DecoderConfig(vocab=49_152, layers=30, block=block, rotary=RotaryConfig(64), tied=True)
    return Size(128, 32, 16, ROW, _config(siglip("B", 16, 256), decoder))


def tiny() -> Size:
    block = BlockConfig(32, AttentionConfig(2), GatedConfig(48), norm="rms")
    decoder = DecoderConfig(vocab=64, layers=2, block=block, rotary=RotaryConfig(16), tied=True)
    tower = ViTConfig(image=16, patch=4, layers=1, block=BlockConfig(16, AttentionConfig(2), PlainConfig(32)))
    return Size(8, 4, 2, 512, _config(tower, decoder))


def _config(tower: ViTConfig, decoder: DecoderConfig) -> VLMConfig:
    connector = MergerConfig(reads=tower.block.width, gives=decoder.block.width, merge=2)
    return VLMConfig(tower, connector, decoder, policy=Naive(size=tower.image, patch=tower.patch))


class Part(NamedTuple):
    """What goes through the model at once."""

    batch: Batch
    plan: Plan
    shown: Shown


class Step(NamedTuple):
    parts: list[Part]

    @property
    def lengths(self) -> list[int]:
        return [length for part in self.parts for length in part.batch.lengths]

    @property
    def places(self) -> int:
        """Tokens, padding included."""
        return sum(part.batch.ids.numel() for part in self.parts)


def steps(size: Size, device: str, side: Side) -> list[Step]:
    """The same samples on every side."""
    config = size.config
    cut = config.policy.cut(config.tower.image, config.tower.image)
    soft, chance = config.tokens(cut), torch.Generator().manual_seed(1)
    every = talks(size.samples * size.steps, size.row - soft)
    found = []
    for first in range(0, len(every), size.samples):
        samples = []
        for talk in every[first : first + size.samples]:
            parts = [config.part(cut)]
            for _ in range(talk.turns):
                parts.append(words(_ids(QUESTION, config.decoder.vocab, chance)))
                parts.append(words(_ids(talk.answer, config.decoder.vocab, chance), loss=True))
            pixels = torch.randn(3, config.tower.image, config.tower.image, generator=chance)
            samples.append((build(parts, config.rules), pixels))
        if side == "grouped":
            samples.sort(key=lambda sample: len(sample[0]))
        at_once = size.samples if side == "packed" else size.rows
        groups = [samples[i : i + at_once] for i in range(0, len(samples), at_once)]
        found.append(Step([_part(*zip(*group, strict=True), size, side, device) for group in groups]))
    return found


def _part(streams: Sequence[Stream], pixels: Sequence[Tensor], size: Size, side: Side, device: str) -> Part:
    config = size.config
    cut = config.policy.cut(config.tower.image, config.tower.image)
    batch = pack(streams, size.row) if side == "packed" else row_each(streams)
    plan = batch.plan() if side == "packed" else Plan(causal=True)
    seen = torch.stack(list(pixels)).to(device, torch.bfloat16 if CUDA else torch.float32)
    return Part(batch.to(device), plan.to(device), Shown(seen, (cut,) * len(streams)))


def _ids(count: int, vocab: int, chance: torch.Generator) -> list[int]:
    return torch.randint(1, vocab, (count,), generator=chance).tolist()


def losses_of(model: VLM, part: Part) -> Tensor:
    """−log p of all answers, summed."""
    with torch.no_grad():
        features = model.features(part.shown.pixels)
    soft = model.connector(features, model.config.laid(part.shown.shapes[0].views[0].grid))
    batch, decoder = part.batch, model.decoder
    embeds = merge(decoder.embed(batch.ids), {"image": list(soft)}, batch)
    hidden = decoder.hidden(embeds=embeds, positions=batch.positions[..., 0], plan=part.plan)
    return said_loss(decoder, hidden, batch.targets, "sum", 0.0)


def learnt(step: Step) -> int:
    return sum(int((part.batch.targets != IGNORED).sum()) for part in step.parts)


def measure(size: Size, side: Side, show: Callable[[str], object] = print) -> dict[str, float]:
    device = "cuda" if CUDA else "cpu"
    torch.manual_seed(0)
    with torch.device(device):
        model = VLM(size.config).to(torch.bfloat16 if CUDA else torch.float32)
    model.tower.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=CUDA)
    every, times, losses = steps(size, device, side), [], []
    counts = [learnt(step) for step in every]
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    for step, count in zip(every * 2, counts * 2, strict=True):  # the first pass over all is not counted
        _wait()
        start = time.perf_counter()
        found = []
        for part in step.parts:
            loss = losses_of(model, part) / count
            loss.backward()
            found.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        _wait()
        times.append(time.perf_counter() - start)
        losses.append(sum(loss.item() for loss in found))
    timed, tokens = times[len(every) :], sum(sum(step.lengths) for step in every)
    figures = {
        "tokens_per_s": tokens / sum(timed),
        "full": tokens / sum(step.places for step in every),
        "tokens_a_sample": tokens / (size.samples * size.steps),
        "longest": max(max(step.lengths) for step in every),
        "ms": 1000 * statistics.median(timed),
        "first_loss": losses[0],
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if CUDA else 0.0,
    }
    show(f"{side}: {json.dumps(figures)}")
    return figures


def _wait() -> None:
    if CUDA:
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    if not (CUDA or arguments.tiny):
        parser.error("no CUDA device: --tiny runs on the CPU")
    size, result = tiny() if arguments.tiny else full(), {}
    for side in get_args(Side):
        result[side] = measure(size, side)
        record(arguments.out, result, *MEASURED)
    for other in ("padded", "grouped"):
        speedup = result["packed"]["tokens_per_s"] / result[other]["tokens_per_s"]
        result[f"speedup_over_{other}"] = speedup
        print(f"packed over {other}: {speedup:.2f} times the tokens a second")
    record(arguments.out, result, *MEASURED)


if __name__ == "__main__":
    main()
