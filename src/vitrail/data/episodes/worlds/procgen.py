"""CoinRun, from procgen. A level is a number; an environment of that one level is made for every episode."""

from typing import Any

import numpy as np
from procgen import ProcgenGym3Env  # pyrefly: ignore


class Simulator:
    def __init__(self, side: int = 64, mode: str = "easy"):
        self.env: Any = None
        self.mode = mode

    def reset(self, seed: int) -> dict[str, np.ndarray]:
        if self.env is not None:
            self.env.close()
        self.env = ProcgenGym3Env(
            num=1,
            env_name="coinrun",
            start_level=seed,
            num_levels=1,
            rand_seed=0,
            num_threads=0,
            distribution_mode=self.mode,
        )
        return self.seen()[0]

    def step(self, action: int) -> tuple[dict[str, np.ndarray], float, bool]:
        self.env.act(np.array([action], np.int32))
        seen, reward, first = self.seen()
        return ({} if first else seen), reward, first  # behind the end, the picture is one of a new beginning

    def seen(self) -> tuple[dict[str, np.ndarray], float, bool]:
        reward, seen, first = self.env.observe()
        return {"frame": seen["rgb"][0]}, float(reward[0]), bool(first[0])
