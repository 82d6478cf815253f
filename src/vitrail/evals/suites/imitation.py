"""Policies in a real simulator: one that watched videos nobody labelled and knows a handful of labels, and one that has
the handful alone.

E episodes, T frames, K latent actions, A controls
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitrail.control.imitation import Act, CloneConfig, acting, clone, translation
from vitrail.data.episodes.remote import Simulator, lasting
from vitrail.errors import DataError
from vitrail.evals.metrics.estimate import Estimate, estimate
from vitrail.evals.shares import Share

Infer = Callable[[Tensor], Tensor]
"""uint8 (1, T, C, H, W) → the latent actions between its frames (1, T − 1)"""


class Watched(NamedTuple):
    """Steps of somebody who knows how, one behind the other: what was seen (N, C, H, W), what was done (N,), and which
    latent action that looks like (N,)."""

    frames: Tensor
    controls: Tensor
    codes: Tensor
    latent: int
    choices: int


class Imitated(NamedTuple):
    """The sum of rewards of an episode, and the share of episodes with any. Intervals are over the episodes that these
    policies played: they leave out how much policies of other seeds would differ."""

    name: str
    labels: int
    returns: Estimate
    success: Share


def watch(videos: Sequence[tuple[Tensor, Tensor]], infer: Infer, latent: int, choices: int) -> Watched:
    """Videos uint8 (T, C, H, W), each with what was done in it (T − 1,)."""
    long = [(frames, done) for frames, done in videos if len(done)]
    if not long:
        raise DataError("nothing was done in any episode", "record longer ones")
    codes = [infer(frames[None])[0].cpu() for frames, _ in long]
    seen, done = torch.cat([frames[:-1] for frames, _ in long]), torch.cat([done for _, done in long])
    return Watched(seen, done, torch.cat(codes), latent, choices)


def play(simulator: Simulator, act: Act, seeds: Sequence[int], steps: int, repeat: int = 1) -> Tensor:
    """The sum of rewards (E,) of an episode a seed, of which the level is made and, apart from it, the chance of
    acting. An action lasts `repeat` steps of the simulator."""
    sums = []
    for seed in seeds:
        chance, total = np.random.default_rng((seed, 1)), 0.0
        frame = simulator.reset(seed)["frame"]
        for _ in range(steps):
            likely = act(torch.from_numpy(np.array(frame)).movedim(-1, 0)[None])[0].double().numpy()
            chosen = int(chance.choice(len(likely), p=likely / likely.sum()))
            seen, reward, ended = lasting(simulator, chosen, repeat)
            total += reward
            if ended:
                break
            frame = seen["frame"]
        sums.append(total)
    return torch.tensor(sums)


def judge_imitation(
    watched: Watched,
    simulator: Simulator,
    labels: Sequence[int],
    *,
    config: CloneConfig | None = None,
    seeds: int = 3,
    episodes: int = 50,
    steps: int = 100,
    repeat: int = 1,
    levels: int = 1_000_000,
    device: str = "cpu",
) -> list[Imitated]:
    """For each number of labels, both policies; before them one that acts at random, and one that has every label. A
    seed chooses the labels, the networks and the levels, which begin at `levels`. Actions last `repeat` steps of the
    simulator, as they did in what was watched."""
    N = len(watched.frames)
    if max(labels, default=0) > N or min(labels, default=0) < 1:
        raise DataError(f"{labels} labelled steps of {N}", f"ask for 1 … {N}")
    found: dict[tuple[str, int], list[Tensor]] = {}

    def tell(name: str, count: int, act: Act, seed: int) -> None:
        some = [levels + seed * episodes + i for i in range(episodes)]
        found.setdefault((name, count), []).append(play(simulator, act, some, steps, repeat))

    for seed in range(seeds):
        how = {"config": config, "seed": seed, "device": device}
        tell("at random", 0, lambda frames: torch.ones(len(frames), watched.choices), seed)
        tell("cloning every label", N, acting(clone(watched.frames, watched.controls, watched.choices, **how)), seed)
        by_code = clone(watched.frames, watched.codes, watched.latent, **how)
        order = torch.randperm(N, generator=torch.Generator().manual_seed(seed))
        for count in labels:
            few = order[:count]
            codes, controls = watched.codes[few], watched.controls[few]
            table = translation(codes, controls, watched.latent, watched.choices)
            tell("through latent actions", count, acting(by_code, table), seed)
            tell(
                "cloning the labels", count, acting(clone(watched.frames[few], controls, watched.choices, **how)), seed
            )
    rows = []
    for (name, count), parts in found.items():
        sums = torch.cat(parts)
        rows.append(Imitated(name, count, estimate(name, sums), Share(int((sums > 0).sum()), len(sums))))
    return rows
