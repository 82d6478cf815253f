"""Doom, from vizdoom: a maze in the first person whose floor burns and whose medikits heal, with depth and labels."""

import os

import numpy as np
import vizdoom  # pyrefly: ignore
from vizdoom import (  # pyrefly: ignore
    Button,
    DoomGame,
    GameVariable,
    ScreenFormat,
    ScreenResolution,
)

BUTTONS = (Button.TURN_LEFT, Button.TURN_RIGHT, Button.MOVE_FORWARD)
# Every choice as the buttons it presses: nothing, ahead, left, right, and turning on the way.
PRESSED = ((0, 0, 0), (0, 0, 1), (1, 0, 0), (0, 1, 0), (1, 0, 1), (0, 1, 1))
# The simulator numbers things anew in every picture, from 2 on; walls are 0, floors and ceilings 1.
KINDS = {"CustomMedikit": 2, "Poison": 3}
OTHER = 4
VARIABLES = (
    GameVariable.POSITION_X,
    GameVariable.POSITION_Y,
    GameVariable.POSITION_Z,
    GameVariable.ANGLE,
    GameVariable.PITCH,
    GameVariable.HEALTH,
)


class Simulator:
    def __init__(self, side: int = 160):
        game = self.game = DoomGame()
        game.load_config(os.path.join(vizdoom.scenarios_path, "health_gathering_supreme.cfg"))  # noqa: PTH118
        game.set_window_visible(False)
        game.set_screen_resolution(ScreenResolution.RES_160X120)
        game.set_screen_format(ScreenFormat.RGB24)
        game.set_depth_buffer_enabled(True)
        game.set_labels_buffer_enabled(True)
        game.set_available_buttons(list(BUTTONS))
        game.set_available_game_variables(list(VARIABLES))
        game.set_seed(0)
        game.init()

    def reset(self, seed: int) -> dict[str, np.ndarray]:
        self.game.set_seed(seed)
        self.game.new_episode()
        return self.seen()

    def step(self, action: int) -> tuple[dict[str, np.ndarray], float, bool]:
        reward = self.game.make_action([bool(pressed) for pressed in PRESSED[action]])
        ended = self.game.is_episode_finished()
        return ({} if ended else self.seen()), float(reward), bool(ended)

    def seen(self) -> dict[str, np.ndarray]:
        state = self.game.get_state()
        kinds = np.array([0, 1] + [OTHER] * 254, np.uint8)
        for thing in state.labels:
            kinds[thing.value] = KINDS.get(thing.object_name, OTHER)
        return {
            "frame": state.screen_buffer,
            "depth": state.depth_buffer,
            "labels": kinds[state.labels_buffer],
            "state": np.array(state.game_variables, np.float32),
        }
