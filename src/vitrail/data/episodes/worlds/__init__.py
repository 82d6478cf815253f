"""The worlds that can be recorded: a row here, and a file that holds its `Simulator` and imports nothing of ours, since
it runs where the world's packages are."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from vitrail.data.episodes.draw import draw_pusht
from vitrail.data.episodes.episode import Actions, Choices, Dials
from vitrail.data.episodes.policies import Driver, Make, Pusher, Seeker, sticky, wander


class World(NamedTuple):
    file: str
    says: str
    text: str  # the task, as one would tell it
    licence: str
    packages: tuple[str, ...]  # what its environment is made of
    actions: Actions
    policies: dict[str, Make]  # the first is taken unless another is named
    rate: float  # steps a second
    steps: int  # of an episode, unless told
    side: int  # pixels, of the longer side
    any_side: bool = False
    options: tuple[str, ...] = ()  # what its simulator is told besides
    state: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    tracks: tuple[str, ...] = ()
    draw: Callable[[np.ndarray, int], np.ndarray] | None = None  # state (T, S), side → uint8 (T, side, side, 3)


WALK = Choices(names=("left", "right", "up", "down"))
COINRUN = Choices(
    names=(
        *("left down", "left", "left up", "down", "nothing", "up", "right down", "right", "right up"),
        *("D", "A", "W", "S", "Q", "E"),  # keys of other games, which do nothing in this one
    )
)
ONWARD = {"right": 4, "right up": 4, "left": 1, "left up": 1, "up": 1, "nothing": 1}  # weights
# To and fro, mostly on the ground, to learn controls from: the view follows who jumps, and where that is often, the
# picture's scrolling up and down is more of what there is to tell of a step than left and right are.
STROLLING = {"right": 4, "left": 3, "nothing": 1, "right up": 0.8, "left up": 0.5, "up": 0.2}
PUSHT = Dials(names=("x", "y"), low=(0, 0), high=(512, 512))
DRIVE = Dials(names=("steer", "gas", "brake"), low=(-1, 0, 0), high=(1, 1, 1))
DOOM = Choices(names=("nothing", "ahead", "left", "right", "ahead left", "ahead right"))
EXPLORE = {"ahead": 4, "ahead left": 2, "ahead right": 2, "left": 1, "right": 1}

WORLDS: dict[str, World] = {
    "pocket": World(
        file="pocket",
        says="a walker, a wall with a gap, a coin behind it; needs nothing",
        text="walk through the gap to the coin",
        licence="Apache-2.0",
        packages=(),
        actions=WALK,
        policies={"random": sticky(WALK, again=0.5), "seeker": Seeker},
        rate=5,
        steps=100,
        side=32,
        any_side=True,
        state=("column", "row"),
        labels=("floor", "wall", "walker", "coin"),
        tracks=("state", "labels"),
    ),
    "coinrun": World(
        file="procgen",
        says="CoinRun (procgen): run and jump to the coin, another level every time in one look",
        text="get to the coin",
        licence="MIT",
        packages=("procgen-mirror==0.10.7", "numpy==1.26.4"),
        actions=COINRUN,
        policies={
            "onward": sticky(COINRUN, ONWARD),
            "strolling": sticky(COINRUN, STROLLING, again=0.5),
            "random": sticky(COINRUN),
        },
        rate=15,
        steps=1000,
        side=64,
        options=("easy",),
    ),
    "pusht": World(
        file="pusht",
        says="PushT: push a T onto its place; states are kept, and drawn when they are read",
        text="push the T onto the green T",
        licence="Apache-2.0",
        packages=("gym-pusht==0.1.8", "pymunk==6.11.1"),
        actions=PUSHT,
        policies={"pusher": lambda chance: Pusher(chance, PUSHT), "random": wander(PUSHT)},
        rate=10,
        steps=300,
        side=96,
        any_side=True,
        state=("agent x", "agent y", "block x", "block y", "block angle"),
        tracks=("state",),
        draw=draw_pusht,
    ),
    "carracing": World(
        file="carracing",
        says="CarRacing (Box2D): a road from above; speed and curvature beside the controls",
        text="drive along the road",
        licence="MIT, zlib",
        packages=("gymnasium[box2d]==1.4.0", "Box2D==2.3.10"),
        actions=DRIVE,
        policies={"driver": lambda chance: Driver(chance, DRIVE, 0.2), "random": wander(DRIVE)},
        rate=50,
        steps=1000,
        side=96,
        state=("speed", "curvature", "offset", "heading error", "bend ahead"),
        tracks=("state",),
    ),
    "doom": World(
        file="doom",
        says="Doom (vizdoom): a maze in the first person, with depth and labels",
        text="find medikits and stay alive",
        licence="MIT",
        packages=("vizdoom==1.3.2",),
        actions=DOOM,
        policies={"explorer": sticky(DOOM, EXPLORE, again=0.9), "random": sticky(DOOM)},
        rate=35,
        steps=1000,
        side=160,
        state=("x", "y", "z", "angle", "pitch", "health"),
        labels=("wall", "floor or ceiling", "medikit", "poison", "other"),
        tracks=("state", "depth", "labels"),
    ),
}

WORLDS["pocket-curtain"] = WORLDS["pocket"]._replace(
    says="the same with a curtain before the wall: who stands in the gap is out of sight",
    options=("curtain",),
    labels=(*WORLDS["pocket"].labels, "curtain"),
)
WORLDS["coinrun-hard"] = WORLDS["coinrun"]._replace(
    says="CoinRun (procgen) in its hard mode, in every look that the game has",
    options=("hard",),
)
