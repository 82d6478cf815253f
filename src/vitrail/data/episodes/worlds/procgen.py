"""CoinRun of procgen. A level is a number; each episode has an environment of that one level."""

from typing import Any

import numpy as np


class Simulator:
    """CoinRun behind the `Simulator` interface."""

    def __init__(self, image_size: int = 64, mode: str = "easy"):
        self.env: Any = None
        self.mode = mode

    def reset(self, seed: int) -> dict[str, np.ndarray]:
        if self.env is not None:
            self.env.close()
        from procgen import ProcgenGym3Env  # pyrefly: ignore

        self.env = ProcgenGym3Env(
            num=1,
            env_name="coinrun",
            start_level=seed,
            num_levels=1,
            rand_seed=0,
            num_threads=0,
            distribution_mode=self.mode,
        )
        return self.observe()[0]

    def step(self, action: int) -> tuple[dict[str, np.ndarray], float, bool]:
        self.env.select_action(np.array([action], np.int32))
        observation, reward, first = self.observe()
        return ({} if first else observation), reward, first  # after the end, the frame shows a new episode

    def observe(self) -> tuple[dict[str, np.ndarray], float, bool]:
        """Return observation, reward, and whether this is the first frame of an episode."""
        reward, observation, first = self.env.observe()
        return {"frame": observation["rgb"][0]}, float(reward[0]), bool(first[0])
