"""`vitrail eval MODEL fidelity`: drawings against true pictures, by the Fréchet distance."""

from dataclasses import asdict
from typing import Annotated

from cyclopts import Parameter

from vitrail.cli.eval_common import COMMON, Common, device_of, tell
from vitrail.cli.eval_easel import HAND, Easel, Hand
from vitrail.cli.eval_unified import scenes_in


def fidelity(
    model: str,
    /,
    *,
    true: str = "mini:draw",
    count: int = 50,
    unseen: Annotated[bool, Parameter(negative="--seen")] = False,
    hand: Hand = HAND,
    common: Common = COMMON,
) -> None:
    """Have prompts of GenEval's six kinds drawn, each told of a scene, and say how far the drawings are from these
    scenes: papers' gFID, through ResNet-50, whose weights are fetched the first time.

    Beside it: the scenes as the model's codes show them, and as many other scenes. Fewer pictures give larger
    distances, so that only those of equal numbers can be compared.

    Parameters
    ----------
    model
        A unified model: a folder.
    true
        The scenes: those of a recipe, as RECIPE:SOURCE.
    count
        Prompts of each kind; papers take thousands in all.
    unseen
        Ask in paraphrases that training never uses.
    """
    from vitrail.data.scenes.library import open_atlas
    from vitrail.data.scenes.source import SceneSource
    from vitrail.data.words import Words
    from vitrail.evals.suites import fidelity as suite
    from vitrail.hub.resnet50 import load_resnet50

    config, device = scenes_in(true), device_of(common)
    easel, network = Easel(model, hand, common), load_resnet50().to(device).eval()
    source = SceneSource(config.with_(side=easel.side, seed=config.seed + 1 + hand.seed), open_atlas(config.atlas))
    words = Words.of(source.atlas.table).to(device)
    score = suite.fidelity(
        easel.draw, easel.through, source, words, count, network, held_out=unseen, batch=common.batch
    )
    settings = {"true": true, "count": count, "unseen": unseen, **asdict(hand)}
    tell("fidelity", model, settings, [score], common)
