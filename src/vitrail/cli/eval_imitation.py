"""`vitrail eval MODEL imitation`: what latent actions are worth to a policy that has hardly any labels."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from vitrail.cli.eval_common import COMMON, Common, device_of, tell
from vitrail.errors import CheckpointError, ConfigError, DataError

if TYPE_CHECKING:
    import torch


def imitation(
    model: str,
    /,
    *,
    data: Path,
    labels: Annotated[tuple[int, ...], Parameter(negative="")] = (32, 128),
    watched: int = 200,
    rounds: int = 600,
    seeds: int = 3,
    episodes: int = 50,
    steps: int | None = None,
    common: Common = COMMON,
) -> None:
    """Learn to act by watching, in the real simulator of a world: through latent actions and a few labels, against
    cloning those few labels.

    Parameters
    ----------
    model
        A world model that learned its actions (Genie): a folder.
    data
        Episodes of somebody who knows how, such as `vitrail data make pocket --policy seeker`.
    labels
        Steps of which the true control is told; may be repeated.
    watched
        Episodes that are watched, at most.
    rounds
        Steps of training of every policy.
    seeds
        Policies of each kind, with other labels, weights and levels. Intervals are over the episodes of all of them,
        and leave out how much other policies would differ.
    episodes
        Levels that each of them plays.
    steps
        Of an episode at most; as many as the episodes were given, unless told.
    """
    import torch

    from vitrail import hub
    from vitrail.control.imitation import CloneConfig
    from vitrail.data.episodes import Episodes
    from vitrail.data.episodes.episode import Choices
    from vitrail.data.episodes.remote import open_simulator
    from vitrail.evals.shares import Score
    from vitrail.evals.suites.imitation import judge_imitation, watch
    from vitrail.models.genie import Genie

    if min(watched, rounds, seeds, episodes, steps or 1) < 1 or not labels:
        raise ConfigError("there is nothing to do", "give numbers from 1 on")
    device = device_of(common)
    loaded = hub.load(model, device=device)
    if not isinstance(loaded, Genie) or loaded.latent is None:
        raise CheckpointError(f"{model} is no world model with latent actions", "give a Genie that learned them")
    found = Episodes(data)
    manifest = found.manifest
    if not isinstance(manifest.actions, Choices):
        raise DataError(f"{data} was steered by dials", "imitation is of choices")
    genie: Genie = loaded

    def infer(video: "torch.Tensor") -> "torch.Tensor":
        return genie.infer(genie.codec.pixels(video))

    videos = []
    for number in range(min(watched, len(found))):
        one = found.window(number, 0, int(found.lengths[number]), ("frames", "actions"))
        videos.append((torch.from_numpy(one["frames"]).movedim(-1, 1), torch.from_numpy(one["actions"])))
    if tuple(videos[0][0].shape[-2:]) != genie.codec.size:
        raise DataError(f"{data} has frames of {tuple(videos[0][0].shape[-2:])}", f"the model's are {genie.codec.size}")
    seen = watch(videos, infer, genie.actions, len(manifest.actions.names))
    print(f"{len(seen.frames):,} steps of {len(videos)} episodes were watched")
    simulator = open_simulator(manifest.world, manifest.side)
    try:
        rows = judge_imitation(
            seen,
            simulator,
            labels,
            config=CloneConfig(rounds=rounds),
            seeds=seeds,
            episodes=episodes,
            steps=steps or manifest.steps,
            repeat=manifest.repeat,
            device=device,
        )
    finally:
        getattr(simulator, "close", lambda: None)()
    scores = []
    for what in ("success", "returns"):
        for row in rows:
            about = getattr(row, what)
            title, part = f"{row.name}: {what}", {"labels": row.labels}
            scores.append(Score(title, about.value, about.interval, about.of, part=part, points=what == "returns"))
    settings = {"data": str(data), "world": manifest.world, "policy": manifest.policy, "repeat": manifest.repeat}
    settings |= {
        "watched": len(videos),
        "steps_watched": len(seen.frames),
        "rounds": rounds,
        "seeds": seeds,
        "episodes": episodes,
    }
    tell("imitation", model, settings, scores, common)
