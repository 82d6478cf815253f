"""Report sections that need no results: laws of the paper's tables, a token budget, system cost, published figures."""

from collections.abc import Iterator

import torch

from experiments.published_figures.figure_table import iter_figures as told_rows
from experiments.report.captions import format_caption
from vitrail.codecs.codec import Codec
from vitrail.codecs.presets import CODEC_PRESETS
from vitrail.encoders.presets import VIT_PRESETS
from vitrail.encoders.vit import ViT
from vitrail.lab import score_curves
from vitrail.lab.cost_ledger import CONTEXT_LENGTHS, DEVICES
from vitrail.lab.law_figures import build_clusters_figure, build_differences_figure, build_laws_figure
from vitrail.lab.origin import collect_origin
from vitrail.lab.scaling_law import ScalingLaw, fit_law
from vitrail.lab.score_tables import PAPER_TABLES, read_score_table
from vitrail.lab.system_cost_tables import build_system_notes, build_system_tables, format_quantity
from vitrail.lab.system_specs import SYSTEM_SPECS, get_system_cost
from vitrail.lab.token_budget import Budget, choose_tokens, make_cost_fn
from vitrail.plots.html_page import Html, NumberCell, render_code, render_details, render_figure, render_table
from vitrail.plots.scaling_plots import PlanPanel, draw_plan

NUM_CLUSTERS = 4
TASKS, SYSTEM, SECONDS = ("OCRBench", "POPE", "ChartQA"), "token-scaling", 0.21
TOWERS = ("clip-b16", "clip-l14-336", "siglip-so400m-384", "dinov2-l14")
BITS_PER_FEATURE = 16


def build_law_section() -> list[str]:
    """Refit Table 1 of the token-scaling paper, with its clusters and differences."""
    tables = {name: read_score_table(name) for name in PAPER_TABLES[:2]}
    laws = {name: {task: fit_law(*column) for task, column in columns.items()} for name, columns in tables.items()}
    first, second = laws
    ask = {name: f"vitrail scaling fit {name}" for name in laws}
    rows = [[task, *_format_law(laws[first][task]), *_format_law(laws[second][task])] for task in laws[first]]
    sides = ("with the question", "tuned without")
    heads = ["task", *(f"{what}, {side}" for side in sides for what in ("c", "α", "outliers"))]
    gaps = score_curves.compute_differences(*(tables[name] for name in laws))
    return [
        "S ≈ c / n^α: score S over n visual tokens, from the tables of arXiv 2412.18387. α is negative if scores rise. "
        "Intervals are 95 %.",
        render_table(
            heads,
            rows,
            format_caption(
                "Table 1, refitted from Tables 2 to 4", collect_origin(" and ".join(map(str, ask.values())))
            ),
        ),
        render_figure(
            build_laws_figure(laws[first], first),
            "One panel per task: measured scores as dots and the fitted law as a line, over visual tokens",
            format_caption("Laws of the question-conditioned model", collect_origin(f"{ask[first]} --out laws.svg")),
        ),
        render_figure(
            build_clusters_figure(tables[first], NUM_CLUSTERS, first),
            f"Rescaled score curves in {NUM_CLUSTERS} clusters of tasks",
            format_caption(
                "Clusters of similar curves",
                collect_origin(f"{ask[first]} --clusters alike.svg --count {NUM_CLUSTERS}"),
            ),
        ),
        render_figure(
            build_differences_figure(gaps, first, second),
            "One panel per task: bars of the difference between the two models at each number of tokens",
            format_caption(
                "Gain from question conditioning",
                collect_origin(f"{ask[first]} --against {second} --differences differences.svg"),
            ),
        ),
    ]


def _format_law(law: ScalingLaw) -> list[str]:
    low, high = law.intervals["alpha"]
    outliers = ", ".join(f"{n:g}" for n in law.outliers)
    alpha = f"{law.alpha:.4f} [{low:.4f}, {high:.4f}]".replace("-", "−")
    return [NumberCell(f"{law.c:.4f}", law.c), NumberCell(alpha, law.alpha), outliers]


def build_plan_section() -> list[str]:
    """Choose token counts for some tasks and one system under a time limit."""
    columns = {task: c for task, c in read_score_table(PAPER_TABLES[0]).items() if any(word in task for word in TASKS)}
    laws = {task: fit_law(*column, "best") for task, column in columns.items()}
    choices = choose_tokens(laws, make_cost_fn(SYSTEM, num_words=64, answer_tokens=64), Budget(seconds=SECONDS))
    command = f"vitrail scaling plan {PAPER_TABLES[0]} --system {SYSTEM} --seconds {SECONDS}"
    about = collect_origin(" ".join([command, *(f"--task {task}" for task in TASKS)]))
    rows = []
    bought = {}
    for one in choices:
        low, high = one.interval
        tokens, score = NumberCell(f"{one.tokens:,}", one.tokens), NumberCell(f"{one.score:.4g}", one.score)
        kept = NumberCell(f"{one.fraction_of_best:.1%}", one.fraction_of_best)
        rows.append([one.task, tokens, score, f"[{low:.4g}, {high:.4g}]", kept, one.reason])
        n = [float(2**i) for i in range(10) if laws[one.task].token_range[0] <= 2**i <= laws[one.task].token_range[1]]
        bought[one.task] = PlanPanel(
            list(zip(n, laws[one.task](n).tolist(), strict=True)), (float(one.tokens), one.score)
        )
    note = f"at most {SECONDS} s for a question of 64 tokens and an answer of 64 tokens, on an H200"
    return [
        f"Tokens that {SYSTEM} can afford: {note}. Times are rooflines.",
        render_table(
            ("task", "tokens", "score", "interval", "of the best", "reason"),
            rows,
            format_caption("Chosen tokens", about),
        ),
        render_figure(
            draw_plan(bought, f"{PAPER_TABLES[0]} with {SYSTEM}", note),
            "One panel per task: the predicted score over tokens, and the chosen number of tokens",
            format_caption("Predicted scores and choices", about),
        ),
    ]


def build_systems_section() -> list[str]:
    found = [get_system_cost(name) for name in SYSTEM_SPECS]
    about = collect_origin("vitrail ledger --all")
    weighs, flops, *devices, passes = build_system_tables(found, CONTEXT_LENGTHS)
    return [
        "Systems at published size, built on the meta device: minimum time per output, and outputs per second. "
        f"{len(found)} systems, {len(devices)} devices; at their own context, and after 8k, 32k and 256k tokens.",
        render_table(["system", *weighs.head], weighs.rows, format_caption("Size of systems, and their tokens", about)),
        render_table(["system", *flops.head], flops.rows, format_caption("FLOPs per output", about)),
        *(
            render_table(
                ["system", *one.head],
                one.rows,
                format_caption(f"Roofline latency and Hz on {one.title}: {DEVICES[one.title].origin}", about),
            )
            for one in devices
        ),
        render_table(
            ["system", *passes.head], passes.rows, format_caption(f"Time of an output by pass: {passes.title}", about)
        ),
        render_details("Method", [Html("<br>".join(render_code(line) for line in build_system_notes(found)))]),
    ]


def build_figures_section() -> list[str]:
    head = ("quantity", "source", "published", "ours", "evidence")
    about = collect_origin("python -m experiments.published_figures")

    def lines(holding: bool) -> Iterator[list[str]]:
        for source, what, printed, ours, by, why in told_rows(holding):
            yield [what, source, printed, ours, by, *([] if holding else [why])]

    broken, right = list(lines(False)), list(lines(True))
    return [
        f"{len(right)} published figures are confirmed, and {len(broken)} are not.",
        render_table((*head, "reason"), broken, format_caption("Figures that do not hold", about)),
        render_table(head, right, format_caption("Figures that hold", about)),
    ]


def build_bounds_section() -> list[str]:
    """Bound I(X; Z) by N · b bits for codes, N · D · 16 bits for features, and the bits of the image."""
    rows = []
    for name, config in CODEC_PRESETS.items():
        with torch.device("meta"):
            codec = Codec(config)
        if codec.bits:
            height, width = codec.image_size
            rows.append(_format_bound(f"{name}, codes", codec.workload().tokens, codec.bits, 24 * height * width, ""))
    for name in TOWERS:
        config = VIT_PRESETS[name]
        with torch.device("meta"):
            tokens = ViT(config).workload().tokens - config.num_prefix_tokens
        rank = f"{min(tokens, config.block.width):,}"
        rows.append(
            _format_bound(
                f"{name}, features", tokens, BITS_PER_FEATURE * config.block.width, 24 * config.image_size**2, rank
            )
        )
    heads = ("bottleneck", "tokens", "bits per token", "bits", "image bits", "ratio", "bound", "rank bound")
    return [
        "Bits of the tokens of an image, and of the image at 24 bits per pixel. The information is at most the smaller "
        f"of both. Features count as {BITS_PER_FEATURE} bits per number.",
        render_table(
            heads, rows, format_caption("Bounds at published size", collect_origin("python -m experiments.report"))
        ),
    ]


def _format_bound(name: str, num_tokens: int, bits_per_token: int, image_bits: int, rank: str) -> list[str]:
    bits = num_tokens * bits_per_token
    return [
        name,
        NumberCell(f"{num_tokens:,}", num_tokens),
        NumberCell(f"{bits_per_token:,}", bits_per_token),
        format_quantity(bits, "bit"),
        format_quantity(image_bits, "bit"),
        NumberCell(f"{image_bits / bits:.4g}", image_bits / bits),
        format_quantity(min(bits, image_bits), "bit"),
        rank,
    ]
