"""What gets harder where pictures do: the same questions about ordinary scenes and about those that vision towers are
known to fail on, each beside the best guess without looking."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from vitrail.data.scenes.source import SceneSource
from vitrail.data.words import Words
from vitrail.errors import ConfigError
from vitrail.evals.shares import Score
from vitrail.evals.suites.talking import BATCH, Answerer, answered

ORDINARY = "plain"
STRESSES: dict[str, dict[str, object]] = {  # preset → what is changed of it
    "transparent": {},
    "sub-patch": {},
    "moving": {},
    "occluded": {},
    "crowded": {"inside": 0.0},  # frames are another matter
}
KINDS = ("existence_random", "existence_adversarial", "counting", "colour", "position", "what")
LEAST = 0.02  # of a side: smaller things are not laid out

Open = Callable[[str, dict[str, object]], tuple[SceneSource, Words]]
"""a preset and what is changed of it → its scenes, and words about them"""


def below_a_patch(patch: float) -> dict[str, object]:
    """Sizes of things that lie within one patch, which is so large a share of the side."""
    if not LEAST < patch <= 1:
        raise ConfigError(f"a patch of {patch:.3f} of the side", f"give a share between {LEAST} and 1")
    return {"sizes": [max(LEAST, 0.6 * patch), patch]}


def stressed(
    answerer: Answerer,
    open_scenes: Open,
    kinds: Sequence[str],
    count: int,
    *,
    patch: float | None = None,
    held_out: bool = False,
    batch: int = BATCH,
) -> list[Score]:
    """Every kind of question about every kind of scene; those about hard scenes stand beside what the same kind has on
    ordinary ones too. `patch`, where it is known, is the model's own, as a share of the side; where nothing so small
    is laid out, scenes below a patch are left out."""
    scores, ordinary = [], {}
    for preset in (ORDINARY, *STRESSES):
        changes = STRESSES.get(preset, {})
        if preset == "sub-patch" and patch is not None:
            if patch <= LEAST:
                continue
            changes = changes | below_a_patch(patch)
        source, words = open_scenes(preset, changes)
        for score in answered(answerer, source, words, kinds, count, held_out=held_out, batch=batch):
            beside = {**score.beside, **({"ordinary": ordinary[score.name]} if preset in STRESSES else {})}
            ordinary.setdefault(score.name, score.value)
            scores.append(replace(score, part={"scenes": preset}, beside=beside))
    return scores
