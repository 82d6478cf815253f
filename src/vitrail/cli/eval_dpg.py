"""`vitrail eval MODEL dpg`: dense prompts, drawn and asked about as DPG-Bench does."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from vitrail.cli.eval_common import ASKED, COMMON, Common, tell, write_page
from vitrail.cli.eval_easel import HAND, Easel, Hand, judge_of, open_detector
from vitrail.cli.eval_reader import open_reader
from vitrail.cli.written import check_written
from vitrail.errors import ConfigError

SCENE: dict[str, object] = {
    "objects": [4, 4], "sizes": [0.25, 0.45], "repeat": 0.8, "tint": 0.6, "combinations": "all",
}  # fmt: skip
"""What dense prompts tell of, beside the preset of scenes to draw: some things of a kind, and colours for most."""


def dpg(
    model: str,
    /,
    *,
    data: Path | None = None,
    asks: str | None = None,
    judge: str = "judge",
    count: int = 50,
    drawings: int = 1,
    concepts: int | None = None,
    unseen: Annotated[bool, Parameter(negative="--seen")] = False,
    atlas: str = "flat",
    true: bool = True,
    page: Path | None = None,
    hand: Hand = HAND,
    common: Common = COMMON,
) -> None:
    """Have dense prompts drawn, and ask each drawing the questions of its prompt's graph: DPG-Bench's score.

    Prompts tell of scenes: four things with colours, numbers and places. Beside the score: what drawings for
    other prompts would have, and true pictures in the model's codes.

    Parameters
    ----------
    model
        A unified model: a folder.
    data
        DPG-Bench's own prompts: its dpg_bench.csv. They ask for anything, so --asks has to answer.
    asks
        A unified or vision-language model that is asked yes or no, in place of the judge: a folder.
    judge
        A detector: a folder, or the one that ships with the package.
    count
        Prompts; of --data the first ones.
    drawings
        Of each prompt; their scores are averaged. Shares by category are of the last ones, as in the original.
    concepts
        Only so many of the things that the judge knows; all unless given.
    unseen
        Tell of scenes in paraphrases that training never uses.
    atlas
        Sprites of the scenes and the true pictures: those that the model learned to draw.
    true
        Also score true pictures of the scenes in the model's codes.
    page
        An HTML file to write the scores to, with drawings that are all that was asked for, and drawings that are not.
    """
    from vitrail.data.formats.dpg import read_dpg
    from vitrail.data.scenes.library import open_atlas
    from vitrail.data.scenes.source import ScenesConfig, SceneSource
    from vitrail.evals.suites import dense as suite
    from vitrail.show.scored import Gathered

    check_written(page, "--page")
    if count < 1:
        raise ConfigError(f"{count} prompts", "ask for at least one")
    if data is not None and unseen:
        raise ConfigError("the prompts of --data are worded as they are", "leave --unseen out")
    if data is not None and asks is None:
        raise ConfigError(f"the judge cannot answer what {data} asks", "name a model that can with --asks")
    told = read_dpg(data)[:count] if data is not None else []
    easel = Easel(model, hand, common)
    reader = open_reader(asks, common) if asks is not None else None
    scenes, looker = None, None
    if data is None:
        config = ScenesConfig(atlas=atlas, preset="drawing", scene=SCENE, side=easel.side, seed=hand.seed)
        detector = open_detector(judge, common)
        source = SceneSource(config, open_atlas(atlas)).only(detector.config.concepts[:concepts])
        known = judge_of(detector, source, common)
        scenes = source, suite.dense_prompts(known.words, source, count, held_out=unseen)
        told, looker = scenes[1].graphs, suite.judged(known, scenes[1])
        easel.shows = detector.config.image.image
    if reader is not None:
        looker, easel.shows = suite.Asker(reader.answerer, told, batch=min(common.batch, ASKED.batch)), reader.side
    assert looker is not None  # the prompts of --data are asked of a model
    seen = Gathered("dpg")
    scores = suite.densely(easel.draw, looker, told, drawings=drawings, batch=common.batch, watch=seen)
    if true and scenes is not None:
        scores.append(suite.redrawn_densely(easel.through, looker, scenes[1], scenes[0], batch=common.batch))
    if isinstance(looker, suite.Asker):
        scores.append(looker.score)
    settings = {
        "data": None if data is None else str(data), "asks": asks, "judge": judge if asks is None else None,
        "count": len(told), "drawings": drawings, "unseen": unseen, **asdict(hand), "atlas": atlas,
        "questions": sum(len(graph.questions) for graph in told),
    }  # fmt: skip
    print(f"such as: {told[0].prompt}")
    tell("dpg", model, settings, scores, common)
    if page is not None:
        write_page(page, "dpg", model, settings, scores, seen.examples, common)
