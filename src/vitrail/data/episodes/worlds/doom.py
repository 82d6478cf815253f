"""Doom of vizdoom: a first-person maze with a damaging floor and healing medikits, with depth and labels."""

import os

import numpy as np

BUTTONS = ("TURN_LEFT", "TURN_RIGHT", "MOVE_FORWARD")
# Buttons of each action: nothing, ahead, left, right, and turning while moving.
ACTION_BUTTONS = ((0, 0, 0), (0, 0, 1), (1, 0, 0), (0, 1, 0), (1, 0, 1), (0, 1, 1))
# The simulator numbers objects of each frame from 2 on; walls are 0, floors and ceilings 1.
LABEL_IDS = {"CustomMedikit": 2, "Poison": 3}
OTHER_LABEL = 4
GAME_VARIABLES = ("POSITION_X", "POSITION_Y", "POSITION_Z", "ANGLE", "PITCH", "HEALTH")


class Simulator:
    """Doom behind the `Simulator` interface."""

    def __init__(self, image_size: int = 160):
        import vizdoom  # pyrefly: ignore

        game = vizdoom.DoomGame()
        self.game = game
        game.load_config(os.path.join(vizdoom.scenarios_path, "health_gathering_supreme.cfg"))  # noqa: PTH118
        game.set_window_visible(False)
        game.set_screen_resolution(vizdoom.ScreenResolution.RES_160X120)
        game.set_screen_format(vizdoom.ScreenFormat.RGB24)
        game.set_depth_buffer_enabled(True)
        game.set_labels_buffer_enabled(True)
        game.set_available_buttons([getattr(vizdoom.Button, name) for name in BUTTONS])
        game.set_available_game_variables([getattr(vizdoom.GameVariable, name) for name in GAME_VARIABLES])
        game.set_seed(0)
        game.init()

    def reset(self, seed: int) -> dict[str, np.ndarray]:
        self.game.set_seed(seed)
        self.game.new_episode()
        return self.observe()

    def step(self, action: int) -> tuple[dict[str, np.ndarray], float, bool]:
        reward = self.game.make_action([bool(pressed) for pressed in ACTION_BUTTONS[action]])
        ended = self.game.is_episode_finished()
        return ({} if ended else self.observe()), float(reward), bool(ended)

    def observe(self) -> dict[str, np.ndarray]:
        """Read frame, depth, labels and game variables."""
        state = self.game.get_state()
        label_table = np.array([0, 1] + [OTHER_LABEL] * 254, np.uint8)
        for label in state.labels:
            label_table[label.value] = LABEL_IDS.get(label.object_name, OTHER_LABEL)
        return {
            "frame": state.screen_buffer,
            "depth": state.depth_buffer,
            "labels": label_table[state.labels_buffer],
            "state": np.array(state.game_variables, np.float32),
        }
