"""What a tour shows of drawing: prompts of all kinds, how one of them comes about, and changes to it."""

from vitrail.data.words import prompts
from vitrail.data.words.templates import DRAWINGS
from vitrail.evals.judge import Judge
from vitrail.show.measured import KINDS, Measured
from vitrail.show.page import Section, figure, heading, marked, row, strip, tiles
from vitrail.studio import Studio
from vitrail.tour.judge import Drawn, judged, judged_figure, tells
from vitrail.tour.step import Step

STAGES = 6
SEEDS, SHARES, RIGHT_HALF = 3, (0.5, 0.75, 0.9), (0.5, 0.0, 1.0, 1.0)


def draw(studio: Studio, judge: Judge, seed: int, step: Step, measured: Measured | None) -> tuple[Section, list[Drawn]]:
    blocks: list[list[str]] = []
    named = 0
    drawn: list[Drawn] = []
    for kind in DRAWINGS:
        asked = prompts(judge.words, kind, 1, seed, among=judge.knows)
        text = judge.words.pieces.read(asked.text)[0]
        pictures = studio.draw([text] * SEEDS, seed=seed, progress=step(f"drawing {text}"))
        made = [judged(judge, text, asked.spec, seed + i, picture) for i, picture in enumerate(pictures)]
        says = [(tells(judge, asked.spec, said), said) for said in studio.caption(pictures, max_new=24)]
        named += sum(told for told, _ in says)
        share = "" if measured is None else f"; measured: {measured.share('drawing', kind)}"
        blocks.append(
            [
                heading(text),
                f"{KINDS['drawing'][kind]}: {sum(one.right for one in made)} of {SEEDS} here{share}",
                row(
                    *(
                        judged_figure(judge, one, marked(told, f"it says: {said}"))
                        for one, (told, said) in zip(made, says, strict=True)
                    )
                ),
            ]
        )
        drawn += made
    body = [
        f"{len(DRAWINGS)} prompts, {SEEDS} drawings of each, seeds {seed} to {seed + SEEDS - 1}. The judge takes "
        f"{sum(one.right for one in drawn)} of {len(drawn)} for what was asked.",
        "The judge is another network, and sometimes wrong: docs/judge.md says how often. It lets pass what is there "
        "besides, unless a number was asked for; to broken shapes it can be too kind, so look for yourself.",
        f"Below stands what the model says when it is shown its own drawing, without the prompt. It names all things "
        f"that were asked for in {named} of {len(drawn)}.",
        tiles(*blocks),
    ]
    return Section("It draws", body), drawn


def stages(studio: Studio, one: Drawn, step: Step) -> Section:
    made = studio.stages(one.prompt, STAGES, seed=one.seed, progress=step("drawing it once more"))
    order = "the surest of them stay" if studio.model.config.order == "masked" else "the next of them stays"
    return Section(
        "It takes its time",
        [
            f"In every pass codes that are still open, here grey, are drawn, and {order}. “{one.prompt}”, at "
            f"{STAGES} moments:",
            strip(
                *(
                    figure(picture, f"{n / STAGES:.0%}", f"{one.prompt}, {n / STAGES:.0%} drawn")
                    for n, picture in enumerate(made, 1)
                )
            ),
        ],
    )


def changed(studio: Studio, judge: Judge, one: Drawn, other: Drawn, seed: int, step: Step) -> Section:
    progress = step("variations")
    varied = [studio.vary(one.picture, one.prompt, share=share, seed=seed, progress=progress)[0] for share in SHARES]
    painted = studio.inpaint(one.picture, other.prompt, RIGHT_HALF, seed=seed, progress=step("painting in"))
    figures = [
        judged_figure(judge, judged(judge, *asked, picture), said)
        for said, asked, picture in (
            *((f"{share:.0%} of its codes anew", one[:3], new) for share, new in zip(SHARES, varied, strict=True)),
            (f"its right half anew: {other.prompt}", other[:3], painted),
        )
    ]
    return Section(
        "It changes a drawing",
        [
            "It is the drawing that the judge has least against: one that shows what was asked and nothing besides, if "
            "there is one, and of those the one of which most was asked. Some codes stay, the rest is drawn around "
            "them: for the same words, then one half for others.",
            row(figure(one.picture, one.prompt, f"The drawing that is changed: {one.prompt}"), *figures),
        ],
    )
