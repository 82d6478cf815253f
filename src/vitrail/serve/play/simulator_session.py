"""The simulator of a game session."""

from collections.abc import Callable

import numpy as np

from vitrail.data.episodes import WORLDS
from vitrail.data.episodes.simulators import Simulator, SimulatorProcess, open_simulator
from vitrail.errors import DataError


class SimulatorSession:
    """A simulator and the state of its episode.

    The simulator opens at the first reset. `image_size` applies to worlds with a configurable size. `abandon` stops it
    at any time, even during a step.
    """

    def __init__(self, world: str, image_size: int | None = None, frame_skip: int = 1):
        row = WORLDS[world]
        self.world = world
        self.frame_skip = frame_skip
        self.image_size = image_size if image_size is not None and row.supports_any_size else row.image_size
        self.simulator: Simulator | None = None
        self.frame, self.reward, self.ended = np.zeros((1, 1, 3), np.uint8), 0.0, True
        self.is_abandoned = False

    def reset(self, seed: int) -> None:
        """Start an episode."""
        if self.simulator is None:
            self.simulator = open_simulator(self.world, self.image_size)
        if self.is_abandoned:  # the player has left while the simulator opened
            self.close()
            return
        self._call_simulator(lambda simulator: simulator.reset(seed))
        self.reward, self.ended = 0.0, False

    def step(self, control: int) -> None:
        """Apply a control. After the end of the episode this does nothing."""
        if self.ended:
            return

        def act(simulator: Simulator) -> dict[str, np.ndarray]:
            observation: dict[str, np.ndarray] = {}
            for _ in range(self.frame_skip):
                observation, reward, self.ended = simulator.step(control)
                self.reward += reward
                if self.ended or self.is_abandoned:
                    break
            return observation

        self._call_simulator(act)

    def _call_simulator(self, call: Callable[[Simulator], dict[str, np.ndarray]]) -> None:
        assert self.simulator is not None
        try:
            self.frame = call(self.simulator).get("frame", self.frame)  # the last step may return no frame
        except DataError:  # the simulator has stopped: the next reset opens another one
            self.close()
            raise

    def abandon(self) -> None:
        """Stop the simulator because the player has left."""
        self.is_abandoned = True
        self.close()

    def close(self) -> None:
        """Close the simulator."""
        if isinstance(self.simulator, SimulatorProcess):
            self.simulator.close()
        self.simulator, self.ended = None, True
