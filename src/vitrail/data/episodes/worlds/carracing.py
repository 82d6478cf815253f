"""CarRacing of gymnasium: a track from above, with speed, curvature and the position relative to the road.

Lengths are in the simulator's unit, of which a road tile is 3.5. Angles are in radians, positive to the left.
"""

from typing import Any

import numpy as np

LOOKAHEAD_TILES = 5  # tiles of lookahead for the bend


class Simulator:
    """CarRacing behind the `Simulator` interface."""

    def __init__(self, image_size: int = 96):
        self.env: Any = None

    def reset(self, seed: int) -> dict[str, np.ndarray]:
        if self.env is not None:
            self.env.close()
        from gymnasium.envs.box2d.car_racing import CarRacing  # pyrefly: ignore

        self.env = CarRacing(render_mode="rgb_array")  # a new environment, since state of the last one would remain
        self.env.reset(seed=seed)
        self.env.t = 1.0  # skip the zoom-in animation of the first second
        return {"frame": np.asarray(self.env._render("state_pixels")), "state": self.read_state()}

    def step(self, action: np.ndarray) -> tuple[dict[str, np.ndarray], float, bool]:
        frame, reward, ended, stopped, _ = self.env.step(action.astype(np.float64))
        return {"frame": frame, "state": self.read_state()}, float(reward), bool(ended or stopped)

    def read_state(self) -> np.ndarray:
        """Read speed, curvature, offset, heading error and the bend ahead."""
        hull = self.env.car.hull
        forward = np.array(hull.GetWorldVector((0, 1)))
        speed = float(np.dot(hull.linearVelocity, forward))
        curvature = hull.angularVelocity / speed if abs(speed) > 1 else 0.0
        track = np.array(self.env.track)  # (tiles, angle round the middle · heading · x · y)
        tile = int(np.argmin(((track[:, 2:] - np.array(hull.position)) ** 2).sum(1)))
        heading, tile_position = track[tile, 1], track[tile, 2:]
        right = np.array([np.cos(heading), np.sin(heading)])  # to the right of a tile
        offset = -float(np.dot(np.array(hull.position) - tile_position, right))
        heading_error = _wrap_angle(heading - hull.angle)
        bend = _wrap_angle(track[(tile + LOOKAHEAD_TILES) % len(track), 1] - heading)
        return np.array([speed, curvature, offset, heading_error, bend], np.float32)


def _wrap_angle(angle: float) -> float:
    """Wrap an angle to −π … π."""
    return float((angle + np.pi) % (2 * np.pi) - np.pi)
