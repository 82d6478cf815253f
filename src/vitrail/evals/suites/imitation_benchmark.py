"""Imitation learning in a simulator: a policy from unlabelled videos and a few action labels, against baselines.

The policy predicts latent actions, and few labels translate these to controls. The baselines use the labels only.

E episodes, T frames, K latent actions, A controls
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitrail.control.behavior_cloning import (
    ActionProbabilityFn,
    BehaviorCloningConfig,
    build_action_fn,
    estimate_action_map,
    train_behavior_cloning,
)
from vitrail.data.episodes.simulators import Simulator, step_repeated
from vitrail.errors import DataError
from vitrail.evals.metrics.estimate import Estimate, estimate_mean
from vitrail.evals.scores import Proportion, Score

InferActionsFn = Callable[[Tensor], Tensor]
"""Frames uint8 (1, T, C, H, W) → the latent actions between them (1, T − 1)."""


class Demonstrations(NamedTuple):
    """Concatenated steps of an expert: frames (N, C, H, W), controls (N,), and inferred latent actions (N,)."""

    frames: Tensor
    controls: Tensor
    codes: Tensor
    num_latent_actions: int
    num_controls: int


class ImitationResult(NamedTuple):
    """Mean return of a policy, and the fraction of episodes with a positive return.

    Intervals are over the episodes of these policies; they do not include the variation over training seeds.
    """

    name: str
    num_labels: int
    returns: Estimate
    success: Proportion

    @property
    def success_score(self) -> Score:
        rate, part = self.success, {"labels": self.num_labels}
        return Score(f"{self.name}: success", rate.value, rate.interval, rate.total, subset=part)

    @property
    def return_score(self) -> Score:
        mean, part = self.returns, {"labels": self.num_labels}
        return Score(f"{self.name}: returns", mean.value, mean.interval, mean.count, subset=part, unit="points")


def label_demonstrations(
    videos: Sequence[tuple[Tensor, Tensor]], infer: InferActionsFn, num_latent_actions: int, num_controls: int
) -> Demonstrations:
    """Infer latent actions for videos uint8 (T, C, H, W) with known controls (T − 1,)."""
    nonempty = [(frames, actions) for frames, actions in videos if len(actions)]
    if not nonempty:
        raise DataError("no episode has an action", "record longer episodes")
    codes = [infer(frames[None])[0].cpu() for frames, _ in nonempty]
    all_frames = torch.cat([frames[:-1] for frames, _ in nonempty])
    actions = torch.cat([actions for _, actions in nonempty])
    return Demonstrations(all_frames, actions, torch.cat(codes), num_latent_actions, num_controls)


def play_episodes(
    simulator: Simulator, policy: ActionProbabilityFn, seeds: Sequence[int], max_steps: int, action_repeat: int = 1
) -> Tensor:
    """Play one episode per seed and return the returns (E,).

    A seed determines the level and the sampling of actions. Each action is repeated `action_repeat` times.
    """
    returns = []
    for seed in seeds:
        generator, total = np.random.default_rng((seed, 1)), 0.0
        frame = simulator.reset(seed)["frame"]
        for _ in range(max_steps):
            probabilities = policy(torch.from_numpy(np.array(frame)).movedim(-1, 0)[None])[0].double().numpy()
            action = int(generator.choice(len(probabilities), p=probabilities / probabilities.sum()))
            observation, reward, done = step_repeated(simulator, action, action_repeat)
            total += reward
            if done:
                break
            frame = observation["frame"]
        returns.append(total)
    return torch.tensor(returns)


def evaluate_imitation(
    demonstrations: Demonstrations,
    simulator: Simulator,
    label_counts: Sequence[int],
    *,
    config: BehaviorCloningConfig | None = None,
    num_seeds: int = 3,
    num_episodes: int = 50,
    max_steps: int = 100,
    action_repeat: int = 1,
    first_level: int = 1_000_000,
    device: str = "cpu",
) -> list[ImitationResult]:
    """Evaluate policies for each number of labels.

    Baselines are a random policy, a policy cloned from all labels, and one cloned from the given number of labels. A
    seed determines the labels, the networks and the levels, which start at `first_level`. Actions are repeated
    `action_repeat` times, as in the demonstrations.
    """
    N = len(demonstrations.frames)
    if max(label_counts, default=0) > N or min(label_counts, default=0) < 1:
        raise DataError(f"{label_counts} labelled steps, but there are {N} steps", f"set 1 … {N}")
    returns_of: dict[tuple[str, int], list[Tensor]] = {}

    def evaluate(name: str, count: int, act: ActionProbabilityFn, seed: int) -> None:
        level_seeds = [first_level + seed * num_episodes + i for i in range(num_episodes)]
        returns_of.setdefault((name, count), []).append(
            play_episodes(simulator, act, level_seeds, max_steps, action_repeat)
        )

    for seed in range(num_seeds):
        clone_options = {"config": config, "seed": seed, "device": device}
        evaluate("at random", 0, lambda frames: torch.ones(len(frames), demonstrations.num_controls), seed)
        evaluate(
            "cloning every label",
            N,
            build_action_fn(
                train_behavior_cloning(
                    demonstrations.frames, demonstrations.controls, demonstrations.num_controls, **clone_options
                )
            ),
            seed,
        )
        by_code = train_behavior_cloning(
            demonstrations.frames, demonstrations.codes, demonstrations.num_latent_actions, **clone_options
        )
        order = torch.randperm(N, generator=torch.Generator().manual_seed(seed))
        for count in label_counts:
            selected = order[:count]
            codes, controls = demonstrations.codes[selected], demonstrations.controls[selected]
            table = estimate_action_map(codes, controls, demonstrations.num_latent_actions, demonstrations.num_controls)
            evaluate("through latent actions", count, build_action_fn(by_code, table), seed)
            evaluate(
                "cloning the labels",
                count,
                build_action_fn(
                    train_behavior_cloning(
                        demonstrations.frames[selected], controls, demonstrations.num_controls, **clone_options
                    )
                ),
                seed,
            )
    rows = []
    for (name, count), parts in returns_of.items():
        returns = torch.cat(parts)
        rows.append(
            ImitationResult(
                name, count, estimate_mean(name, returns), Proportion(int((returns > 0).sum()), len(returns))
            )
        )
    return rows
