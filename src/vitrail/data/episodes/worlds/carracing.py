"""CarRacing, from gymnasium: a track from above. Beside the raw controls: speed, curvature, and where the road is.

Lengths are in the simulator's own unit, of which a tile of the road is 3.5; angles in radians, left is positive.
"""

from typing import Any

import numpy as np
from gymnasium.envs.box2d.car_racing import CarRacing  # pyrefly: ignore

AHEAD = 5  # tiles that a driver looks ahead


class Simulator:
    def __init__(self, side: int = 96):
        self.env: Any = None

    def reset(self, seed: int) -> dict[str, np.ndarray]:
        if self.env is not None:
            self.env.close()
        self.env = CarRacing(render_mode="rgb_array")  # a new one: what is left of the last would be felt
        self.env.reset(seed=seed)
        self.env.t = 1.0  # its first second would be a flight from high above
        return {"frame": np.asarray(self.env._render("state_pixels")), "state": self.state()}

    def step(self, action: np.ndarray) -> tuple[dict[str, np.ndarray], float, bool]:
        frame, reward, ended, stopped, _ = self.env.step(action.astype(np.float64))
        return {"frame": frame, "state": self.state()}, float(reward), bool(ended or stopped)

    def state(self) -> np.ndarray:
        hull = self.env.car.hull
        forward = np.array(hull.GetWorldVector((0, 1)))
        speed = float(np.dot(hull.linearVelocity, forward))
        curvature = hull.angularVelocity / speed if abs(speed) > 1 else 0.0
        track = np.array(self.env.track)  # (tiles, angle round the middle · heading · x · y)
        here = int(np.argmin(((track[:, 2:] - np.array(hull.position)) ** 2).sum(1)))
        heading, place = track[here, 1], track[here, 2:]
        across = np.array([np.cos(heading), np.sin(heading)])  # to the right of a tile
        offset = -float(np.dot(np.array(hull.position) - place, across))
        error = _turned(heading - hull.angle)
        bend = _turned(track[(here + AHEAD) % len(track), 1] - heading)
        return np.array([speed, curvature, offset, error, bend], np.float32)


def _turned(angle: float) -> float:
    """The same angle in −π … π"""
    return float((angle + np.pi) % (2 * np.pi) - np.pi)
