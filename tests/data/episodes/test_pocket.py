"""The pocket world: its curtain hides who stands in the gap, and nothing else changes with it."""

import numpy as np
import pytest

from vitrail.data.episodes.remote import open_simulator
from vitrail.data.episodes.worlds import WORLDS
from vitrail.data.episodes.worlds.pocket import CURTAIN, WALKER


@pytest.mark.parametrize("seed", range(5))
def test_a_curtain_hides_who_stands_in_the_gap(seed):
    plain, hung = open_simulator("pocket", 16), open_simulator("pocket-curtain", 16)
    seeker = WORLDS["pocket"].policies["seeker"](np.random.default_rng(seed))
    seen, veiled, ended, away = plain.reset(seed), hung.reset(seed), False, 0
    while not ended:
        same = veiled["labels"] != CURTAIN
        assert (seen["frame"] == veiled["frame"])[same].all() and (seen["state"] == veiled["state"]).all()
        away += not (veiled["labels"] == WALKER).any()
        action = int(seeker.act(seen))
        (seen, *_, ended), (veiled, *_) = plain.step(action), hung.step(action)
    assert away >= 1 and veiled["labels"].max() < len(WORLDS["pocket-curtain"].labels)
