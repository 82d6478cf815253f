"""A tour of a unified model, as sections of a page: its drawings are judged, its answers held against the truth."""

from collections.abc import Sequence

from vitrail.data.words.templates import DRAWINGS
from vitrail.show.measured import Measured
from vitrail.show.page import Section, listed
from vitrail.studio import Studio
from vitrail.tour.drawing import changed, draw, stages
from vitrail.tour.judge import clear, ready_judge
from vitrail.tour.reading import Shown, own, read, scenes, shown
from vitrail.tour.step import Step
from vitrail.tour.world import WALKS, played

__all__ = ["Measured", "Shown", "Step", "lead", "played", "scenes", "shown", "steps", "tour"]


def steps(pictures: Sequence[Shown]) -> int:
    """How many a tour has at most."""
    return len(pictures) + len(DRAWINGS) + 4 + len(WALKS)


def tour(
    studio: Studio, pictures: Sequence[Shown], seed: int, step: Step, measured: Measured | None = None
) -> list[Section]:
    judge = ready_judge(str(studio.model.codec.device))
    drawing, drawn = draw(studio, judge, seed, step, measured)
    chosen = max(drawn, key=clear)
    other = next(one for one in drawn if one.prompt != chosen.prompt)
    return [
        drawing,
        stages(studio, chosen, step),
        changed(studio, judge, chosen, other, seed, step),
        read(studio, pictures, step, measured),
        own(studio, judge, chosen, seed, step),
    ]


def lead(studio: Studio, measured: Measured | None = None) -> list[str]:
    model, (h, w) = studio.model, studio.model.grid
    sees = "by these codes" if model.config.sees == "codes" else "by the features that codes are made of"
    order = "one after another" if model.config.order == "raster" else "the surest first"
    weights = sum(p.numel() for p in model.parameters()) / 1e6
    return [
        f"A picture becomes {h} × {w} codes, each one of {model.codec.sizes[0]:,}. The model reads pictures {sees}, "
        f"and draws by writing codes, {order}. It has {weights:.1f} million weights.",
        "Scenes and prompts were drawn by lot before the model saw them: nothing is here because it went well, but "
        "for the one drawing that is then changed and asked about. A green tick is right, a red cross is wrong.",
        *([] if measured is None else ["What it can do and what it cannot, over many more than are shown:"]),
        *([] if measured is None else [listed(measured.glance())]),
    ]
