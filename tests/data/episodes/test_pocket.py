"""Variants of the pocket world: a curtain that hides a walker in the gap, and rooms of the same colours."""

import numpy as np
import pytest

from vitrail.data.episodes.simulators import open_simulator
from vitrail.data.episodes.worlds import WORLDS
from vitrail.data.episodes.worlds.pocket import CURTAIN, WALKER


@pytest.mark.parametrize("seed", range(5))
def test_curtain_hides_a_walker_in_the_gap(seed):
    plain, curtained = open_simulator("pocket", 16), open_simulator("pocket-curtain", 16)
    seeker = WORLDS["pocket"].policies["seeker"](np.random.default_rng(seed))
    observation, curtained_observation, terminated, num_hidden = plain.reset(seed), curtained.reset(seed), False, 0
    while not terminated:
        is_uncovered = curtained_observation["labels"] != CURTAIN
        assert (observation["frame"] == curtained_observation["frame"])[is_uncovered].all() and (
            observation["state"] == curtained_observation["state"]
        ).all()
        num_hidden += not (curtained_observation["labels"] == WALKER).any()
        action = int(seeker.select_action(observation))
        (observation, *_, terminated), (curtained_observation, *_) = plain.step(action), curtained.step(action)
    assert num_hidden >= 1 and curtained_observation["labels"].max() < len(WORLDS["pocket-curtain"].label_names)


def test_plain_rooms_differ_from_others_in_colours_only():
    coloured, plain = open_simulator("pocket", 16), open_simulator("pocket-plain", 16)
    palettes = set()
    for seed in range(4):
        observation, plain_observation = coloured.reset(seed), plain.reset(seed)
        assert (observation["labels"] == plain_observation["labels"]).all()
        assert (observation["frame"] != plain_observation["frame"]).any()
        palettes.add(tuple(map(tuple, np.unique(plain_observation["frame"].reshape(-1, 3), axis=0))))
    assert len(palettes) == 1
