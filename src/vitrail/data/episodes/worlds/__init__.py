"""The worlds that can be recorded.

Each world is a row of `WORLDS` and a file with a `Simulator` class. That file imports nothing of vitrail, because it
runs in the environment of the world's packages.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from vitrail.data.episodes.episode import ActionSpace, ContinuousActions, DiscreteActions
from vitrail.data.episodes.policies import (
    CarRacingPolicy,
    PocketPolicy,
    PolicyFactory,
    PushTPolicy,
    build_random_walk_policy,
    build_sticky_policy,
)
from vitrail.data.episodes.pusht_renderer import render_pusht


class World(NamedTuple):
    """One world: its simulator, action space, policies and defaults."""

    module: str
    description: str
    task: str  # the task as an instruction
    licence: str
    packages: tuple[str, ...]  # packages of its environment
    action_space: ActionSpace
    policies: dict[str, PolicyFactory]  # the first is the default
    control_rate_hz: float  # simulator steps per second
    max_steps: int  # default length of an episode
    image_size: int  # default pixels of the longer side
    supports_any_size: bool = False
    options: tuple[str, ...] = ()  # further arguments of its simulator
    state_names: tuple[str, ...] = ()
    label_names: tuple[str, ...] = ()
    tracks: tuple[str, ...] = ()
    # state (T, S), image_size → uint8 (T, image_size, image_size, 3)
    render: Callable[[np.ndarray, int], np.ndarray] | None = None


WALK_ACTIONS = DiscreteActions(names=("left", "right", "up", "down"))
COINRUN_ACTIONS = DiscreteActions(
    names=(
        *("left down", "left", "left up", "down", "nothing", "up", "right down", "right", "right up"),
        *("D", "A", "W", "S", "Q", "E"),  # buttons of other games, without effect here
    )
)
ONWARD_WEIGHTS = {"right": 4, "right up": 4, "left": 1, "left up": 1, "up": 1, "nothing": 1}  # weights of actions
# Walks back and forth, mostly on the ground, to learn controls from. The camera follows jumps, and frequent vertical
# scrolling would dominate the effect of left and right.
STROLLING_WEIGHTS = {"right": 4, "left": 3, "nothing": 1, "right up": 0.8, "left up": 0.5, "up": 0.2}
PUSHT_ACTIONS = ContinuousActions(names=("x", "y"), low=(0, 0), high=(512, 512))
CARRACING_ACTIONS = ContinuousActions(names=("steer", "gas", "brake"), low=(-1, 0, 0), high=(1, 1, 1))
DOOM_ACTIONS = DiscreteActions(names=("nothing", "ahead", "left", "right", "ahead left", "ahead right"))
EXPLORE_WEIGHTS = {"ahead": 4, "ahead left": 2, "ahead right": 2, "left": 1, "right": 1}

WORLDS: dict[str, World] = {
    "pocket": World(
        module="pocket",
        description="a grid room with a walker, a wall with a gap, and a coin behind it; no packages needed",
        task="walk through the gap to the coin",
        licence="Apache-2.0",
        packages=(),
        action_space=WALK_ACTIONS,
        policies={"random": build_sticky_policy(WALK_ACTIONS, repeat_probability=0.5), "seeker": PocketPolicy},
        control_rate_hz=5,
        max_steps=100,
        image_size=32,
        supports_any_size=True,
        state_names=("column", "row"),
        label_names=("floor", "wall", "walker", "coin"),
        tracks=("state", "labels"),
    ),
    "coinrun": World(
        module="procgen",
        description="CoinRun (procgen): run and jump to the coin; a new level each time, one visual theme",
        task="get to the coin",
        licence="MIT",
        packages=("procgen-mirror==0.10.7", "numpy==1.26.4"),
        action_space=COINRUN_ACTIONS,
        policies={
            "onward": build_sticky_policy(COINRUN_ACTIONS, ONWARD_WEIGHTS),
            "strolling": build_sticky_policy(COINRUN_ACTIONS, STROLLING_WEIGHTS, repeat_probability=0.5),
            "random": build_sticky_policy(COINRUN_ACTIONS),
        },
        control_rate_hz=15,
        max_steps=1000,
        image_size=64,
        options=("easy",),
    ),
    "pusht": World(
        module="pusht",
        description="PushT: push a T onto its target; states are stored, and rendered when they are read",
        task="push the T onto the green T",
        licence="Apache-2.0",
        packages=("gym-pusht==0.1.8", "pymunk==6.11.1"),
        action_space=PUSHT_ACTIONS,
        policies={
            "pusher": lambda chance: PushTPolicy(chance, PUSHT_ACTIONS),
            "random": build_random_walk_policy(PUSHT_ACTIONS),
        },
        control_rate_hz=10,
        max_steps=300,
        image_size=96,
        supports_any_size=True,
        state_names=("agent x", "agent y", "block x", "block y", "block angle"),
        tracks=("state",),
        render=render_pusht,
    ),
    "carracing": World(
        module="carracing",
        description="CarRacing (Box2D): a road from above; records speed and curvature with the controls",
        task="drive along the road",
        licence="MIT, zlib",
        packages=("gymnasium[box2d]==1.4.0", "Box2D==2.3.10"),
        action_space=CARRACING_ACTIONS,
        policies={
            "driver": lambda chance: CarRacingPolicy(chance, CARRACING_ACTIONS, 0.2),
            "random": build_random_walk_policy(CARRACING_ACTIONS),
        },
        control_rate_hz=50,
        max_steps=1000,
        image_size=96,
        state_names=("speed", "curvature", "offset", "heading error", "bend ahead"),
        tracks=("state",),
    ),
    "doom": World(
        module="doom",
        description="Doom (vizdoom): a first-person maze with depth and labels",
        task="find medikits and stay alive",
        licence="MIT",
        packages=("vizdoom==1.3.2",),
        action_space=DOOM_ACTIONS,
        policies={
            "explorer": build_sticky_policy(DOOM_ACTIONS, EXPLORE_WEIGHTS, repeat_probability=0.9),
            "random": build_sticky_policy(DOOM_ACTIONS),
        },
        control_rate_hz=35,
        max_steps=1000,
        image_size=160,
        state_names=("x", "y", "z", "angle", "pitch", "health"),
        label_names=("wall", "floor or ceiling", "medikit", "poison", "other"),
        tracks=("state", "depth", "labels"),
    ),
}

WORLDS["pocket-plain"] = WORLDS["pocket"]._replace(
    description="pocket with the same colours in every room: small enough to learn on a CPU",
    options=("plain",),
)
WORLDS["pocket-curtain"] = WORLDS["pocket"]._replace(
    description="pocket with a curtain in front of the wall: a walker in the gap is hidden",
    options=("curtain",),
    label_names=(*WORLDS["pocket"].label_names, "curtain"),
)
WORLDS["coinrun-hard"] = WORLDS["coinrun"]._replace(
    description="CoinRun (procgen) in its hard mode, with all visual themes",
    options=("hard",),
)
