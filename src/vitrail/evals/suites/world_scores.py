"""Score a world model on recorded episodes: frame quality, controllability, long rollouts and object permanence.

B videos, T frames, C channels, H, W pixels
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitrail.data.episodes import EpisodesConfig, EpisodeSource
from vitrail.data.episodes.episode import Manifest
from vitrail.data.episodes.episode_dataset import read_manifest
from vitrail.data.sampler import permute_index
from vitrail.evals.metrics.estimate import Estimate, estimate_mean
from vitrail.evals.metrics.frechet_distance import FeatureNetwork
from vitrail.evals.scores import Score
from vitrail.evals.suites.long_rollout_benchmark import (
    LongRolloutReport,
    evaluate_long_rollout,
    evaluate_permanence,
    evaluate_step_counts,
)
from vitrail.evals.suites.world_benchmark import WorldReport, evaluate_world
from vitrail.generate.rollout import RolloutConfig
from vitrail.models.genie_model import Genie


class RecordedVideos(NamedTuple):
    """One random window of each episode."""

    frames: Tensor  # uint8 (B, T, C, H, W)
    actions: Tensor  # (B, T − 1)
    labels: Tensor | None  # label of each pixel, (B, T, H, W)
    manifest: Manifest

    @property
    def controls(self) -> Tensor | None:
        """Actions that are codes, which latent actions are compared with."""
        return None if self.actions.is_floating_point() else self.actions


class WorldScores(NamedTuple):
    """Scores of a world model, with the real frames and the rollouts (B, frames, C, H, W) of its longest rollouts."""

    scores: list[Score]
    real: Tensor
    predicted: Tensor
    network: str
    measures_permanence: bool


def load_videos(data: Path, split: Literal["train", "test", "all"], count: int, length: int) -> RecordedVideos:
    """Load one random window of each episode."""
    manifest = read_manifest(data)
    fields = ("frames", "actions", *(("labels",) if "labels" in manifest.tracks else ()))
    config = EpisodesConfig(
        folder=str(data), window_length=length, stride=length, split=split, fields=fields, cache_bytes=0
    )
    source = EpisodeSource(config)
    window_of_episode: dict[int, int] = {}
    for item in (permute_index(i, len(source), 0) for i in range(len(source))):
        if len(window_of_episode) < count:
            window_of_episode.setdefault(source.locate(item)[0], item)
    windows = [source[item] for item in sorted(window_of_episode.values())]
    tracks = {name: torch.from_numpy(np.stack([window[name] for window in windows])) for name in fields}
    return RecordedVideos(tracks["frames"].movedim(-1, 2), tracks["actions"], tracks.get("labels"), manifest)


def score_world(
    model: Genie,
    videos: RecordedVideos,
    rollout_config: RolloutConfig,
    network: FeatureNetwork,
    *,
    steps: Sequence[int],
    rollout_frames: int,
    tracked_object: str,
    seed: int,
) -> WorldScores:
    """Roll out a world model from the first frames of videos and score the rollouts.

    steps           numbers of decoding steps whose quality and speed are compared
    tracked_object  object whose reappearance after occlusion is measured, if the videos have labels of it
    """
    video, controls = videos.frames, videos.controls
    world_report = evaluate_world(
        model, video, controls, rollout_config, names=videos.manifest.actions.names, seed=seed
    )
    actions = controls if model.latent is None else model.infer_actions(model.codec.to_pixels(video)).cpu()
    assert actions is not None
    rollout_report = evaluate_long_rollout(
        model, video, actions, network, rollout_config, num_frames=rollout_frames, seed=seed
    )
    scores = [
        _to_score(world_report.codec_psnr),
        _to_score(world_report.still_psnr),
        _to_score(world_report.delta_psnr),
    ]
    scores += _score_latent_actions(world_report, rollout_report.action_accuracy, actions, controls, model)
    scores += _score_distances(rollout_report)
    for pace in evaluate_step_counts(model, video, actions, steps, rollout_config, seed=seed):
        speed = {"frames a second, one world": pace.fps}
        scores += [
            _to_score(pace.psnr, steps=pace.steps, baselines=speed),
            _to_score(pace.delta_psnr, steps=pace.steps),
        ]
    permanence: list[Score] = []
    if videos.labels is not None and tracked_object in videos.manifest.labels:
        permanence = _score_permanence(model, videos, videos.labels, actions, tracked_object, rollout_config, seed)
    return WorldScores(
        scores + permanence, video, rollout_report.frames, rollout_report.start_end_distance.name, bool(permanence)
    )


def _to_score(
    estimate: Estimate, name: str | None = None, baselines: dict[str, float] | None = None, **part: int
) -> Score:
    is_distance = estimate.name.startswith("FD-")
    return Score(
        name or estimate.name,
        estimate.value,
        estimate.interval,
        estimate.count,
        baselines or {},
        subset=part,
        unit="distance" if is_distance else "dB",
        higher_is_better=not is_distance,
    )


def _score_latent_actions(
    report: WorldReport, decoded_accuracy: Estimate | None, actions: Tensor, controls: Tensor | None, model: Genie
) -> list[Score]:
    """Score the meaning of latent actions: purity, left against right, and decoding from frames."""
    scores, purity, sides = [], report.code_purity, report.left_right_accuracy
    if purity is not None and controls is not None:
        by_video = estimate_mean("purity", (purity.control_of_code[actions] == controls).float().mean(1))
        majority = {"majority": purity.majority}
        scores.append(Score("purity of latent actions", purity.value, by_video.interval, by_video.count, majority))
    if sides is not None:
        title = "left/right accuracy of latent actions"
        scores.append(Score(title, sides.value, sides.interval, sides.count, {"chance": 0.5}))
    if decoded_accuracy is not None:
        chance = {"chance": 1 / model.num_actions}
        scores.append(
            Score(
                "actions recovered from frames",
                decoded_accuracy.value,
                decoded_accuracy.interval,
                decoded_accuracy.count,
                chance,
            )
        )
    return scores


def _score_distances(report: LongRolloutReport) -> list[Score]:
    """Score the distances of long rollouts from real videos."""
    start = {"the videos' first clips": report.start_end_distance.value}
    halves = {"real clips": report.split_half_baseline.value}
    title = f"FVD, {report.start_end_distance.name}"
    return [
        *(_to_score(each.psnr, "psnr", at=each.frame) for each in report.distances if each.psnr is not None),
        *(_to_score(each.frechet_distance, title, start, at=each.frame) for each in report.distances),
        *(
            _to_score(each.split_half_distance, f"{title}, to other videos", halves, at=each.frame)
            for each in report.distances
        ),
    ]


def _score_permanence(
    model: Genie,
    videos: RecordedVideos,
    labels: Tensor,
    actions: Tensor,
    name: str,
    rollout_config: RolloutConfig,
    seed: int,
) -> list[Score]:
    label = videos.manifest.labels.index(name)
    found = evaluate_permanence(model, videos.frames, labels, actions, label, rollout_config, seed)
    if found is None:
        return []
    title = f"{name} reappears at the right place"
    baselines = {"codec": found.codec.value, "never having seen it": found.without_memory.value}
    by_length = [
        Score(title, part.value, part.interval, part.total, subset={"frames away": length})
        for length, part in found.by_length.items()
    ]
    return [Score.from_proportion(title, found.remembered, **baselines), *by_length]
