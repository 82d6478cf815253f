"""Parts of the report that need no results: laws of the paper's tables, a plan, what systems cost, figures of texts."""

from collections.abc import Iterator

import torch

from vitrail.codecs.codec import Codec
from vitrail.codecs.presets import CODECS
from vitrail.encoders.presets import VITS
from vitrail.encoders.vit import ViT
from vitrail.lab import curves
from vitrail.lab.costs import measure, system_notes, system_tables
from vitrail.lab.laws_drawn import clusters_figure, differences_figure, laws_figure
from vitrail.lab.ledger import DEVICES, LENGTHS
from vitrail.lab.origin import caption, origin
from vitrail.lab.plan import Budget, plan, pricer
from vitrail.lab.scaling import Law, fit
from vitrail.lab.scores import PAPERS, read_scores
from vitrail.lab.systems import WHOLE, system
from vitrail.lab.told import rows as told_rows
from vitrail.show.page import Html, Number, code, drawing, fold, table
from vitrail.show.scaling import Bought, draw_plan

CLUSTERS = 4
TASKS, SYSTEM, SECONDS = ("OCRBench", "POPE", "ChartQA"), "token-scaling", 0.21
TOWERS = ("clip-b16", "clip-l14-336", "siglip-so400m-384", "dinov2-l14")
NUMBER_BITS = 16


def law() -> list[str]:
    """The paper's Table 1 refitted, its clusters and differences."""
    tables = {name: read_scores(name) for name in PAPERS[:2]}
    laws = {name: {task: fit(*column) for task, column in columns.items()} for name, columns in tables.items()}
    first, second = laws
    ask = {name: f"vitrail scaling fit {name}" for name in laws}
    rows = [[task, *_law(laws[first][task]), *_law(laws[second][task])] for task in laws[first]]
    sides = ("with the question", "tuned without")
    heads = ["task", *(f"{what}, {side}" for side in sides for what in ("c", "α", "outliers"))]
    gaps = curves.differences(*(tables[name] for name in laws))
    return [
        "S ≈ c / n^α: a score over the number n of visual tokens, of the tables of arXiv 2412.18387; α is negative "
        "where scores rise. Intervals are of 95 %.",
        table(
            heads, rows, caption("Table 1, refitted from Tables 2 to 4", origin(" and ".join(map(str, ask.values()))))
        ),
        drawing(
            laws_figure(laws[first], first),
            "A panel a task: measured scores as dots and the fitted law as a line, over visual tokens",
            caption("Laws of the model that reads the question", origin(f"{ask[first]} --out laws.svg")),
        ),
        drawing(
            clusters_figure(tables[first], CLUSTERS, first),
            f"Scaled score curves in {CLUSTERS} groups of tasks that grow alike",
            caption("Tasks that grow alike", origin(f"{ask[first]} --clusters alike.svg --count {CLUSTERS}")),
        ),
        drawing(
            differences_figure(gaps, first, second),
            "A panel a task: bars of the difference between the two models at each number of tokens",
            caption(
                "What the question helps", origin(f"{ask[first]} --against {second} --differences differences.svg")
            ),
        ),
    ]


def _law(one: Law) -> list[str]:
    low, high = one.intervals["alpha"]
    outliers = ", ".join(f"{n:g}" for n in one.outliers)
    alpha = f"{one.alpha:.4f} [{low:.4f}, {high:.4f}]".replace("-", "−")
    return [Number(f"{one.c:.4f}", one.c), Number(alpha, one.alpha), outliers]


def plan_example() -> list[str]:
    columns = {task: c for task, c in read_scores(PAPERS[0]).items() if any(word in task for word in TASKS)}
    laws = {task: fit(*column, "best") for task, column in columns.items()}
    choices = plan(laws, pricer(SYSTEM, words=64, answer=64), Budget(seconds=SECONDS))
    asked = f"vitrail scaling plan {PAPERS[0]} --system {SYSTEM} --seconds {SECONDS}"
    about = origin(" ".join([asked, *(f"--task {task}" for task in TASKS)]))
    rows = []
    bought = {}
    for one in choices:
        low, high = one.interval
        tokens, score = Number(f"{one.tokens:,}", one.tokens), Number(f"{one.score:.4g}", one.score)
        kept = Number(f"{one.kept:.1%}", one.kept)
        rows.append([one.task, tokens, score, f"[{low:.4g}, {high:.4g}]", kept, one.because])
        n = [float(2**i) for i in range(10) if laws[one.task].ends[0] <= 2**i <= laws[one.task].ends[1]]
        bought[one.task] = Bought(list(zip(n, laws[one.task](n).tolist(), strict=True)), (float(one.tokens), one.score))
    note = f"{SECONDS} s for a question of 64 words and an answer of 64 tokens, on an H200 at best"
    return [
        f"How many tokens {SYSTEM} can spend: {note}. Times are floors.",
        table(("task", "tokens", "score", "between", "kept", "because of"), rows, caption("Tokens to use", about)),
        drawing(
            draw_plan(bought, f"{PAPERS[0]} with {SYSTEM}", note),
            "A panel a task: the predicted score over tokens, and the number of tokens chosen",
            caption("Where they were read from", about),
        ),
    ]


def systems() -> list[str]:
    found = [system(name) for name in WHOLE]
    about = origin("vitrail ledger --all")
    weighs, flops, *devices, passes = system_tables(found, LENGTHS)
    return [
        "Systems at published size, built on the meta device: what one output takes at least, and how many a second "
        f"that is. {len(found)} systems, {len(devices)} devices; behind no context but their own, and behind 8k, 32k "
        "and 256k tokens.",
        table(["system", *weighs.head], weighs.rows, caption("What systems weigh, and their tokens", about)),
        table(["system", *flops.head], flops.rows, caption("FLOPs of one output", about)),
        *(
            table(
                ["system", *one.head],
                one.rows,
                caption(f"Floor latency and Hz on {one.title}: {DEVICES[one.title].origin}", about),
            )
            for one in devices
        ),
        table(
            ["system", *passes.head], passes.rows, caption(f"What an output's time is made of: {passes.title}", about)
        ),
        fold("How this is counted", [Html("<br>".join(code(line) for line in system_notes(found)))]),
    ]


def figures() -> list[str]:
    head = ("about", "source", "as printed", "ours", "shown by")
    about = origin("vitrail lab figures")

    def lines(holding: bool) -> Iterator[list[str]]:
        for source, what, printed, ours, by, why in told_rows(holding):
            yield [what, source, printed, ours, by, *([] if holding else [why])]

    broken, right = list(lines(False)), list(lines(True))
    return [
        f"{len(right)} figures of the texts hold, and {len(broken)} do not survive arithmetic.",
        table((*head, "why"), broken, caption("Those that do not hold", about)),
        table(head, right, caption("Those that hold", about)),
    ]


def bounds() -> list[str]:
    """I(X; Z) ≤ N · b bits of codes, N · D · 16 of features, and never more than the picture has."""
    rows = []
    for name, config in CODECS.items():
        with torch.device("meta"):
            codec = Codec(config)
        if codec.bits:
            height, width = codec.size
            rows.append(_bound(f"{name}, codes", codec.work().tokens, codec.bits, 24 * height * width, ""))
    for name in TOWERS:
        config = VITS[name]
        with torch.device("meta"):
            tokens = ViT(config).work().tokens - config.prefix
        rank = f"{min(tokens, config.block.width):,}"
        rows.append(_bound(f"{name}, features", tokens, NUMBER_BITS * config.block.width, 24 * config.image**2, rank))
    heads = ("bottleneck", "tokens", "bits a token", "bits", "the picture's", "times fewer", "at most", "rank, at most")
    return [
        "Bits that a picture's tokens have, beside the picture's own at 24 a pixel. What comes through is no more than "
        f"either; features are counted as {NUMBER_BITS} bits a number.",
        table(heads, rows, caption("Bounds at published size", origin("vitrail lab report"))),
    ]


def _bound(name: str, tokens: int, each: int, raw: int, rank: str) -> list[str]:
    bits = tokens * each
    return [
        name,
        Number(f"{tokens:,}", tokens),
        Number(f"{each:,}", each),
        measure(bits, "bit"),
        measure(raw, "bit"),
        Number(f"{raw / bits:.4g}", raw / bits),
        measure(min(bits, raw), "bit"),
        rank,
    ]
