"""Stress scenes: the same questions about ordinary scenes and about scenes that are hard for vision towers."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from vitrail.data.language import SceneLanguage
from vitrail.data.scenes.scene_source import SceneSource
from vitrail.errors import ConfigError
from vitrail.evals.scores import Score
from vitrail.evals.suites.scene_benchmarks import BATCH, AnswerFn, evaluate_answers

ORDINARY_PRESET = "plain"
STRESS_PRESETS: dict[str, dict[str, object]] = {  # preset → changed settings
    "transparent": {},
    "sub-patch": {},
    "moving": {},
    "occluded": {},
    "crowded": {"inside_probability": 0.0},  # no frames, which are a separate difficulty
}
STRESS_QUESTION_KINDS = ("existence_random", "existence_adversarial", "counting", "colour", "position", "what")
MIN_OBJECT_SIZE = 0.02  # fraction of the image size: the layout places no smaller objects

OpenScenesFn = Callable[[str, dict[str, object]], tuple[SceneSource, SceneLanguage]]
"""Preset and changed settings → scene source and language."""


def sub_patch_sizes(patch_fraction: float) -> dict[str, object]:
    """Scene settings with objects smaller than a patch, given as a fraction of the image size."""
    if not MIN_OBJECT_SIZE < patch_fraction <= 1:
        raise ConfigError(
            f"patch fraction {patch_fraction:.3f} of the image size", f"set a value > {MIN_OBJECT_SIZE} and <= 1"
        )
    return {"sizes": [max(MIN_OBJECT_SIZE, 0.6 * patch_fraction), patch_fraction]}


def evaluate_stress_scenes(
    answer_fn: AnswerFn,
    open_scenes: OpenScenesFn,
    question_kinds: Sequence[str],
    count: int,
    *,
    patch_fraction: float | None = None,
    held_out: bool = False,
    batch_size: int = BATCH,
) -> list[Score]:
    """Evaluate each kind of question on each kind of scene; scores on hard scenes have the ordinary score as baseline.

    `patch_fraction` is the patch size of the model as a fraction of the image size, if known. Sub-patch scenes are
    skipped if objects cannot be that small.
    """
    scores, ordinary_scores = [], {}
    for preset in (ORDINARY_PRESET, *STRESS_PRESETS):
        changes = STRESS_PRESETS.get(preset, {})
        if preset == "sub-patch" and patch_fraction is not None:
            if patch_fraction <= MIN_OBJECT_SIZE:
                continue
            changes = changes | sub_patch_sizes(patch_fraction)
        source, words = open_scenes(preset, changes)
        for score in evaluate_answers(
            answer_fn, source, words, question_kinds, count, held_out=held_out, batch_size=batch_size
        ):
            baselines = {
                **score.baselines,
                **({"ordinary": ordinary_scores[score.name]} if preset in STRESS_PRESETS else {}),
            }
            ordinary_scores.setdefault(score.name, score.value)
            scores.append(replace(score, subset={"scenes": preset}, baselines=baselines))
    return scores
