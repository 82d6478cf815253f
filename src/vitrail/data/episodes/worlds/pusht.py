"""PushT of gym-pusht: a disc pushes a T onto its target. Only states are recorded; images are rendered from
them later."""

from typing import Any

import numpy as np


class Simulator:
    """PushT behind the `Simulator` interface."""

    def __init__(self, image_size: int = 96):
        import gym_pusht  # noqa: F401 (registers the environment)  # pyrefly: ignore
        import gymnasium  # pyrefly: ignore

        environment = gymnasium.make("gym_pusht/PushT-v0", obs_type="state", disable_env_checker=True)
        self.env: Any = environment.unwrapped

    def reset(self, seed: int) -> dict[str, np.ndarray]:
        state, _ = self.env.reset(seed=seed)
        return {"state": state.astype(np.float32)}

    def step(self, action: np.ndarray) -> tuple[dict[str, np.ndarray], float, bool]:
        state, reward, ended, _, _ = self.env.step(action.astype(np.float64))
        return {"state": state.astype(np.float32)}, float(reward), bool(ended)
